"""Trains an EAGLE3 draft for a target (arXiv 2503.01840).

    slipstream train eagle3 --config configs/eagle3/tiny.yaml --optim.lr 1e-3
    accelerate launch train/eagle3.py --config configs/eagle3/tiny.yaml --optim.lr 1e-3

Writes step-N and best into `output`, both servable (`serve --draft OUTPUT/best`). Run again, it continues.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

from slipstream.config import begin, run
from slipstream.train.eagle3_options import DraftOptions, Eagle3Options

if __name__ == "__main__":
    begin(Eagle3Options, "train/eagle3.py")

from functools import partial

from torch import Tensor

from slipstream.kernels.cross_entropy import soft_cross_entropy
from slipstream.models.drafts.eagle3 import Eagle3
from slipstream.models.drafts.interchange import NORMS
from slipstream.models.targets.config import default_aux_layers
from slipstream.train.draft_setup import train
from slipstream.train.loop import leave_processes
from slipstream.train.losses import LOGITS_AT_ONCE, regression_losses
from slipstream.train.target_files import TargetFiles
from slipstream.train.text_noise import RowValues, best_with_noise
from slipstream.train.training import Metrics
from slipstream.train.ttt import ChainStep, ChainTraining


class Eagle3Training(ChainTraining):
    """Distance from the target's distribution over the draft vocabulary."""

    Network = Eagle3
    state_weight = 1.0  # of a smooth L1 loss between the states that the heads of draft and target read

    @classmethod
    def new_draft(cls, options: DraftOptions, files: TargetFiles) -> Eagle3:
        layers = options.aux_layers or default_aux_layers(files.config.num_layers)
        norms = {norm: norm in options.norms for norm in NORMS}
        return files.new_draft(Eagle3, options, aux_layers=layers, num_layers=options.num_layers, **norms)

    def start(self, *, continues: bool = False) -> str:
        weights = self.target.initial_weights(0)
        self.draft.init_from_target(weights)
        self.draft.lm_head.requires_grad_(self.options.head == "trained")
        return "" if "norm.weight" in weights else "the final norm starts at ones: the target has no RMS norm"

    def teach(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.target.logits(states, self.target_ids)

    def objective(self, index: int, step: ChainStep) -> tuple[Tensor, Tensor, Metrics]:
        options = self.options
        states = self.draft.head_input(step.states)
        weight = options.ttt_decay**index
        weights = weight * step.weights
        losses, drafted = soft_cross_entropy(
            self.draft.lm_head(states), step.teacher, weights, options.loss, in_place=True
        )
        regression = (regression_losses(states, step.final) * step.row_weights).sum()
        loss = losses.sum() + self.state_weight * weight * regression
        return loss, drafted + self.draft.d2t[drafted], {"state_loss": regression}

    def predictions(self, states: Tensor, noise: RowValues | None = None) -> Tensor:
        logits = self.draft.logits(states)  # in one call: sharded weights are gathered as often by every process
        if noise is None:
            best = logits.argmax(dim=-1)
        else:
            best = best_with_noise(len(logits), LOGITS_AT_ONCE // logits.shape[1], logits.__getitem__, noise)
        return best + self.draft.d2t[best]


program = partial(train, kind=Eagle3Training)
main = partial(run, program, Eagle3Options, "train/eagle3.py")

if __name__ == "__main__":
    main()
    leave_processes()
