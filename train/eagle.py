"""Trains an EAGLE draft for a target (arXiv 2401.15077); EAGLE-2's trees are grown from the same weights.

    slipstream train eagle --config configs/eagle/tiny.yaml --optim.lr 1e-3
    accelerate launch train/eagle.py --config configs/eagle/tiny.yaml --optim.lr 1e-3

Writes step-N and best into `output`, both servable (`serve --draft OUTPUT/best`). Run again, it continues.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

from slipstream.config import begin, run
from slipstream.train.eagle_options import DraftOptions, EagleOptions

if __name__ == "__main__":
    begin(EagleOptions, "train/eagle.py")

from functools import partial

import numpy as np
import torch
from torch import Tensor

from slipstream.models.drafts.eagle import Eagle
from slipstream.train.batches import Batch
from slipstream.train.draft_setup import train
from slipstream.train.loop import leave_processes
from slipstream.train.losses import regression_losses
from slipstream.train.target_files import TargetFiles
from slipstream.train.training import Metrics
from slipstream.train.ttt import ChainStep, FrozenHeadTraining

NOISE_LENGTH = 512  # length of a document whose noise has the spread `noise_spread`


class EagleTraining(FrozenHeadTraining):
    """Smooth L1 to the target's feature, and a distance of the head's distributions."""

    Network = Eagle
    token_weight = 0.1  # of the distance of the distributions, beside 1 for the features
    noise_spread = 0.2

    @classmethod
    def new_draft(cls, options: DraftOptions, files: TargetFiles) -> Eagle:
        return files.new_draft(Eagle, options, fc_bias=options.bias)

    def objective(self, index: int, step: ChainStep) -> tuple[Tensor, Tensor, Metrics]:
        regression = (regression_losses(step.states, step.teacher) * step.row_weights).sum()
        entropy, drafted = self.distance(step, "soft_ce")
        loss = regression + self.token_weight * entropy
        return self.options.ttt_decay**index * loss, drafted, {"feature_loss": regression}

    def augment(self, batch: Batch, aux_states: Tensor, final: Tensor) -> Tensor:
        return self.target.as_read(final + self.noise(batch).flatten(0, 1))  # noise is fp32

    def noise(self, batch: Batch) -> Tensor:
        """(B, S, H) uniform noise, drawn by the seed and each row's number in the run alone."""
        scale = self.noise_spread * NOISE_LENGTH / document_lengths(batch.documents)  # (B, S)
        shape = (batch.tokens.shape[1], self.draft.config.hidden_size)
        device = self.device
        generator = torch.Generator(device)
        noise = []
        for number in batch.numbers.tolist():
            (state,) = np.random.SeedSequence((self.seed, number)).generate_state(1)  # 32 bits: all it uses
            generator.manual_seed(int(state))
            noise.append(torch.rand(shape, generator=generator, device=device) - 0.5)
        return torch.stack(noise) * scale.to(device).unsqueeze(-1)


def document_lengths(documents: Tensor) -> Tensor:
    """documents (B, S) int64, -1 padding -> (B, S) fp32 tokens of each one's document; arbitrary at padding."""
    counts = torch.bincount(documents.flatten() + 1)
    return counts[documents + 1].float()


program = partial(train, kind=EagleTraining)
main = partial(run, program, EagleOptions, "train/eagle.py")

if __name__ == "__main__":
    main()
    leave_processes()
