"""Trains an EAGLE3 draft for a target (arXiv 2503.01840).

    accelerate launch train/eagle3.py --config configs/eagle3/tiny.yaml --optim.lr 1e-3

Writes step-N and best into `output`, both servable (`serve --draft OUTPUT/best`). Run again, it continues.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from torch import Tensor

from slipstream.config import run
from slipstream.kernels.cross_entropy import Kind, soft_cross_entropy
from slipstream.models.drafts.eagle3 import FLAGS, Eagle3
from slipstream.models.targets.config import default_aux_layers
from slipstream.train.draft_setup import ChainDraftOptions, DraftRunOptions, TargetFiles, train
from slipstream.train.loop import leave_processes
from slipstream.train.losses import regression_losses
from slipstream.train.training import Metrics
from slipstream.train.ttt import ChainStep, ChainTraining


@dataclass(frozen=True, kw_only=True)
class DraftOptions(ChainDraftOptions):
    aux_layers: tuple[int, ...] | None = None
    """target states that the draft reads: 0..n-1 is a layer's output, n after the final norm; default: by depth"""
    num_layers: int = 1
    """decoder layers of the draft; the first reads embedding and target states, further ones the states below"""
    init_from_target: bool = True
    """start with the target's head, final norm and last MLP, and pass the last aux hidden state through"""
    head: Literal["trained", "frozen"] = "trained"
    """frozen: the head stays the target's rows, as in speculators"""
    step_weights: tuple[float, ...] | None = None
    """weights of the steps, one for each; default: by ttt_decay"""
    loss: Kind = "soft_ce"
    """distance to the target's distribution: soft_ce, forward_kl, reverse_kl, tv, lk or lk_lambda (docs/eagle3.md)"""
    state_weight: float = 0.0
    """weight of a smooth L1 loss between the states that the heads of draft and target read, beside `loss`"""
    norm_before_residual: bool = False
    """the layer adds to the norm of its hidden state (this and the next three: EAGLE-3.1, docs/eagle3.md)"""
    norm_before_fc: bool = False
    """one norm over all target states, before fc"""
    fc_norm: bool = False
    """a norm of each target state, before fc; not together with norm_before_fc"""
    norm_output: bool = False
    """the next step reads the state after the final norm"""
    qk_norm: bool = False
    """norms of queries and keys, as in Qwen3's layers; SGLang cannot read such a draft"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head == "frozen" and not self.init_from_target:
            raise ValueError("draft.head is frozen and draft.init_from_target false: a random head; change one of them")
        if self.num_layers < 1:
            raise ValueError(f"draft.num_layers is {self.num_layers}; give at least 1")
        if self.state_weight < 0:
            raise ValueError(f"draft.state_weight is {self.state_weight}; give 0 or more")
        steps, weights = self.ttt_steps, self.step_weights
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

    draft: DraftOptions = field(default_factory=DraftOptions)


class Eagle3Training(ChainTraining):
    """Distance from the target's distribution over the draft vocabulary."""

    Network, drafter = Eagle3, "eagle3"

    @classmethod
    def new_draft(cls, options: DraftOptions, files: TargetFiles) -> Eagle3:
        layers = options.aux_layers or default_aux_layers(files.config.num_layers)
        flags = {name: getattr(options, name) for name in (*FLAGS, "qk_norm", "num_layers")}
        return files.new_draft(Eagle3, options, aux_layers=layers, **flags)

    def start(self, *, continues: bool = False) -> None:
        if self.options.init_from_target:
            self.draft.init_from_target(self.target.initial_weights(1))
        self.draft.lm_head.requires_grad_(self.options.head == "trained")

    def teach(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.target.logits(states, self.target_ids)

    def objective(self, index: int, step: ChainStep) -> tuple[Tensor, Tensor, Metrics]:
        options, states = self.options, self.draft.head_input(step.states)
        weights = options.weight(index) * step.weights
        losses, drafted = soft_cross_entropy(
            self.draft.lm_head(states), step.teacher, weights, options.loss, in_place=True
        )
        loss, sums = losses.sum(), Metrics()
        if options.state_weight:
            regression = regression_losses(states, step.final)
            sums["state_loss"] = (regression * step.counts).sum()
            loss = loss + options.state_weight * options.weight(index) * sums["state_loss"]
        return loss, drafted + self.draft.d2t[drafted], sums

    def predictions(self, states: Tensor) -> Tensor:
        best = self.draft.logits(states).argmax(dim=-1)
        return best + self.draft.d2t[best]


program = partial(train, kind=Eagle3Training)


def main(argv: list[str] | None = None) -> None:
    run(program, Eagle3Options, argv, "train/eagle3.py")


if __name__ == "__main__":
    main()
    leave_processes()
