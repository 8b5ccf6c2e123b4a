"""EAGLE drafter (arXiv 2401.15077): one decoder layer that predicts features, which the target's own head reads."""

from dataclasses import dataclass

from torch import Tensor

from slipstream.kernels.gathered_head import DraftHead
from slipstream.models.checkpoint import resolve
from slipstream.models.eagle import Eagle
from slipstream.models.eagle_checkpoint import load_eagle
from slipstream.models.target import Target
from slipstream.serve.autoregressive import AutoregressiveDrafter, TreeOptions


@dataclass(frozen=True, slots=True)
class EagleOptions(TreeOptions):
    """Those of every draft tree."""


class Drafter(AutoregressiveDrafter):
    Options = EagleOptions
    module: Eagle

    def __init__(self, module: Eagle, head: DraftHead, options: EagleOptions) -> None:
        super().__init__(module, head, options)

    @classmethod
    def load(cls, draft: str, options: EagleOptions, target: Target) -> "Drafter":
        weight, path = target.embed_tokens.weight, resolve(draft)
        module = load_eagle(path, target.config, weight.dtype, weight.device)
        ids = module.target_ids
        head = DraftHead(target.head) if ids is None else DraftHead(target.head[ids], ids)
        return cls(module, head, options)

    def head_input(self, hidden: Tensor) -> Tensor:
        return hidden
