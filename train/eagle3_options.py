"""Options of train/eagle3.py. Imports nothing that takes long, so that wrong ones are refused at once."""

from dataclasses import dataclass, field
from typing import Literal

from slipstream.kernels.loss_kinds import Kind
from slipstream.train.draft_options import ChainDraftOptions, DraftRunOptions


@dataclass(frozen=True, kw_only=True)
class DraftOptions(ChainDraftOptions):
    aux_layers: tuple[int, ...] | None = None
    """target states that the draft reads: 0..n-1 is a layer's output, n after the final norm; default: by depth"""
    num_layers: int = 1
    """decoder layers of the draft; the first reads embedding and target states, further ones the states below"""
    init_from_target: bool = True
    """start with the target's head and final norm, and pass the last aux hidden state through"""
    head: Literal["frozen", "trained"] = "frozen"
    """frozen: the head stays the target's rows, as in speculators"""
    step_weights: tuple[float, ...] | None = None
    """weights of the steps, one for each; default: by ttt_decay"""
    loss: Kind = "soft_ce"
    """distance to the target's distribution: soft_ce, forward_kl, reverse_kl, tv, lk or lk_lambda (docs/eagle3.md)"""
    state_weight: float = 1.0
    """weight of a smooth L1 loss between the states that the heads of draft and target read, beside `loss`"""
    norm_before_residual: bool = True
    """the layer adds to the norm of its hidden state (this and the next three: EAGLE-3.1, docs/eagle3.md)"""
    norm_before_fc: bool = False
    """one norm over all target states, before fc"""
    fc_norm: bool = True
    """a norm of each target state, before fc; not together with norm_before_fc"""
    norm_output: bool = True
    """the next step reads the state after the final norm"""
    qk_norm: bool = True
    """norms of queries and keys, as in Qwen3's layers"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head == "frozen" and not self.init_from_target:
            raise ValueError(
                "draft.head is frozen and draft.init_from_target false, so the head stays random; "
                "set draft.head to trained"
            )
        if self.num_layers < 1:
            raise ValueError(f"draft.num_layers is {self.num_layers}; give at least 1")
        if self.state_weight < 0:
            raise ValueError(f"draft.state_weight is {self.state_weight}; give 0 or more")
        steps = self.ttt_steps
        weights = self.step_weights
        if weights is not None and (len(weights) != steps or min(weights) < 0 or not any(weights)):
            raise ValueError(
                f"draft.step_weights is {list(weights)}; give {steps}, one for each of draft.ttt_steps, none negative "
                "and not all 0"
            )

    def weight(self, step: int) -> float:
        """Weight of the loss of `step`."""
        return self.ttt_decay**step if self.step_weights is None else self.step_weights[step]


@dataclass(frozen=True, kw_only=True)
class Eagle3Options(DraftRunOptions):
    """Trains an EAGLE3 draft for a target."""

    DRAFTER = "eagle3"

    draft: DraftOptions = field(default_factory=DraftOptions)
