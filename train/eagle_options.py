"""Options of train/eagle.py. Imports nothing that takes long, so that wrong ones are refused at once."""

from dataclasses import dataclass, field

from slipstream.kernels.loss_kinds import Kind
from slipstream.train.draft_options import ChainDraftOptions, DraftRunOptions


@dataclass(frozen=True, kw_only=True)
class DraftOptions(ChainDraftOptions):
    bias: bool = True
    """whether fc has a bias: EAGLE's drafts have one, except those for Llama 3"""
    feature_weight: float = 1.0
    """weight of the smooth L1 loss on features"""
    token_weight: float = 0.1
    """weight of the distance between the head's distributions"""
    loss: Kind = "soft_ce"
    """that distance: soft_ce, forward_kl, reverse_kl, tv, lk or lk_lambda (docs/eagle3.md)"""
    noise: float = 0.2
    """spread of the uniform noise on features in documents of 512 tokens; shorter ones get more, longer ones less"""
    ttt_steps: int = 1
    """steps of training-time test; 1 is EAGLE, more also teach the draft to read its own features"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.feature_weight, self.token_weight, self.noise) < 0 or self.feature_weight == self.token_weight == 0:
            raise ValueError(
                f"draft.feature_weight is {self.feature_weight}, draft.token_weight {self.token_weight} and "
                f"draft.noise {self.noise}; none may be negative, nor both weights 0"
            )


@dataclass(frozen=True, kw_only=True)
class EagleOptions(DraftRunOptions):
    """Trains an EAGLE draft for a target."""

    DRAFTER = "eagle"

    draft: DraftOptions = field(default_factory=DraftOptions)
