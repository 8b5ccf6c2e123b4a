"""Options of train/eagle3.py. Imports nothing that takes long, so that wrong ones are refused at once."""

from dataclasses import dataclass, field
from typing import Literal

from slipstream.kernels.loss_kinds import Kind
from slipstream.models.drafts.interchange import Norm
from slipstream.train.draft_options import ChainDraftOptions, DraftRunOptions


@dataclass(frozen=True, kw_only=True)
class DraftOptions(ChainDraftOptions):
    """Network and loss of the draft."""

    aux_layers: tuple[int, ...] | None = None
    """target states that the draft reads: 0..n-1 is a layer's output, n after the final norm; default: by depth"""
    num_layers: int = 1
    """decoder layers of the draft; the first reads embedding and target states, further ones the states below"""
    head: Literal["frozen", "trained"] = "frozen"
    """frozen: the head stays the target's rows, as in speculators; trained: it starts with them"""
    loss: Kind = "soft_ce"
    """distance to the target's distribution: soft_ce, forward_kl, reverse_kl, tv, lk or lk_lambda (docs/eagle3.md)"""
    norms: tuple[Norm, ...] = ("fc_norm", "norm_before_residual", "norm_output", "qk_norm")
    """which of fc_norm, norm_before_fc (not both), norm_before_residual, norm_output and qk_norm (docs/eagle3.md)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_layers < 1:
            raise ValueError(f"draft.num_layers is {self.num_layers}; give at least 1")


@dataclass(frozen=True, kw_only=True)
class Eagle3Options(DraftRunOptions):
    """Trains an EAGLE3 draft for a target."""

    DRAFTER = "eagle3"

    draft: DraftOptions = field(default_factory=DraftOptions)
