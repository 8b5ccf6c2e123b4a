"""EAGLE drafter (arXiv 2401.15077): one decoder layer predicts features; the target's head turns them into logits."""

from dataclasses import dataclass

from torch import Tensor

from slipstream.models.checkpoint import resolve
from slipstream.models.draft import load_draft
from slipstream.models.eagle import Eagle
from slipstream.models.target import Target
from slipstream.serve.autoregressive import AutoregressiveDrafter, TreeOptions
from slipstream.serve.draft_vocabulary import TokenMapOptions, target_vocabulary


@dataclass(frozen=True, slots=True)
class EagleOptions(TokenMapOptions, TreeOptions):
    def __post_init__(self) -> None:
        TreeOptions.__post_init__(self)
        TokenMapOptions.__post_init__(self)


class Drafter(AutoregressiveDrafter):
    Options = EagleOptions
    module: Eagle

    @classmethod
    def load(cls, draft: str, options: EagleOptions, target: Target) -> "Drafter":
        module = load_draft(Eagle, resolve(draft), target.config, target.dtype, target.device, target.shared)
        return cls(module, target_vocabulary(target, module.target_ids, options), options)

    def head_input(self, hidden: Tensor) -> Tensor:
        return hidden
