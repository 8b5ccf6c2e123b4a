"""EAGLE3 drafter (arXiv 2503.01840): one decoder layer over the target's features, with a head of its own."""

from dataclasses import dataclass

from torch import Tensor

from slipstream.kernels.gathered_head import DraftHead
from slipstream.models.checkpoint import resolve
from slipstream.models.eagle3 import Eagle3
from slipstream.models.eagle3_checkpoint import load_eagle3
from slipstream.models.target import Target
from slipstream.serve.autoregressive import AutoregressiveDrafter, TreeOptions


@dataclass(frozen=True, slots=True)
class Eagle3Options(TreeOptions):
    """Those of every draft tree."""


class Drafter(AutoregressiveDrafter):
    Options = Eagle3Options
    module: Eagle3

    def __init__(self, module: Eagle3, options: Eagle3Options) -> None:
        super().__init__(module, DraftHead(module.lm_head.weight, module.target_ids), options)

    @classmethod
    def load(cls, draft: str, options: Eagle3Options, target: Target) -> "Drafter":
        weight = target.embed_tokens.weight
        return cls(load_eagle3(resolve(draft), target.config, weight.dtype, weight.device), options)

    def head_input(self, hidden: Tensor) -> Tensor:
        return self.module.norm(hidden)
