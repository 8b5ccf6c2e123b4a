"""EAGLE3 drafter (arXiv 2503.01840): one decoder layer over the target's features, with its own head."""

from dataclasses import dataclass

from torch import Tensor

from slipstream.models.checkpoint import resolve
from slipstream.models.draft import load_draft
from slipstream.models.eagle3 import Eagle3
from slipstream.models.target import Target
from slipstream.serve.autoregressive import AutoregressiveDrafter, TreeOptions
from slipstream.serve.draft_vocabulary import DraftVocabulary


@dataclass(frozen=True, slots=True)
class Eagle3Options(TreeOptions):
    token_map: str | None = None
    """Refused: EAGLE3 drafts have their own vocabulary and head."""

    def __post_init__(self) -> None:
        TreeOptions.__post_init__(self)
        if self.token_map is not None:
            raise ValueError(
                f"drafter.token_map is {self.token_map}; an EAGLE3 draft has its own vocabulary (d2t) and head: "
                "train it with --draft.vocabulary instead"
            )


class Drafter(AutoregressiveDrafter):
    Options = Eagle3Options
    module: Eagle3

    def __init__(self, module: Eagle3, options: Eagle3Options) -> None:
        super().__init__(module, DraftVocabulary(module.lm_head.whole(module.target_ids)), options)

    @classmethod
    def load(cls, draft: str, options: Eagle3Options, target: Target) -> "Drafter":
        module = load_draft(Eagle3, resolve(draft), target.config, target.dtype, target.device, target.shared)
        return cls(module, options)

    def head_input(self, hidden: Tensor) -> Tensor:
        return self.module.norm(hidden)
