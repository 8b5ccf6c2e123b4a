"""Options of train/mtp.py. Imports nothing that takes long, so that wrong ones are refused at once."""

from dataclasses import dataclass, field

from slipstream.kernels.loss_kinds import Kind
from slipstream.train.draft_options import ChainDraftOptions, DraftRunOptions


@dataclass(frozen=True, kw_only=True)
class DraftOptions(ChainDraftOptions):
    """Network and loss of the draft."""

    ttt_steps: int = 3
    """steps of training-time test: the layer reads its own output in all but the first"""
    loss: Kind = "soft_ce"
    """distance to the target's distribution: soft_ce, forward_kl, reverse_kl, tv, lk or lk_lambda (docs/eagle3.md)"""
    init_from_target: bool = True
    """begin with the MTP layer of the target's files, if they have one; false: with a random one"""


@dataclass(frozen=True, kw_only=True)
class MTPOptions(DraftRunOptions):
    """Trains an MTP head for a target, from the target's own if it has one."""

    DRAFTER = "mtp"

    draft: DraftOptions = field(default_factory=DraftOptions)
