"""Trains an EAGLE draft for a target (arXiv 2401.15077); EAGLE-2's trees are grown from the same weights.

    accelerate launch train/eagle.py --config configs/eagle/tiny.yaml --optim.lr 1e-3

Writes step-N and best into `output`, both servable (`serve --draft OUTPUT/best`). Run again, it continues.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

from dataclasses import dataclass, field

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from slipstream.models.eagle import Eagle, EagleConfig
from slipstream.models.frozen_target import FrozenTarget
from slipstream.models.layers import RotaryEmbedding
from slipstream.train.batches import Batch
from slipstream.train.draft_setup import ChainDraftOptions, DraftRunOptions, TargetFiles, run_program
from slipstream.train.losses import best_rows, distillation_loss, regression_losses
from slipstream.train.training import Metrics
from slipstream.train.ttt import ChainTraining

NOISE_LENGTH = 512  # length of a document whose noise has the spread draft.noise


@dataclass(frozen=True, kw_only=True)
class DraftOptions(ChainDraftOptions):
    bias: bool = True
    """whether fc has a bias: EAGLE's drafts have one, except those for Llama 3"""
    feature_weight: float = 1.0
    """weight of the smooth L1 loss on features"""
    token_weight: float = 0.1
    """weight of the cross-entropy between the head's distributions"""
    noise: float = 0.2
    """spread of the uniform noise on features in documents of 512 tokens; shorter ones get more, longer ones less"""
    ttt_steps: int = 1
    """steps of training-time test; 1 is EAGLE, more also teach the draft to read its own features"""

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = self.feature_weight, self.token_weight
        if min(*weights, self.noise) < 0 or max(weights) == 0:
            raise ValueError(
                f"draft.feature_weight is {weights[0]}, draft.token_weight {weights[1]} and draft.noise {self.noise}; "
                "none may be negative, nor both weights 0"
            )


@dataclass(frozen=True, kw_only=True)
class EagleOptions(DraftRunOptions):
    draft: DraftOptions = field(default_factory=DraftOptions)


class EagleTraining(ChainTraining):
    """The draft with its loss and its held-out walk. N asking rows of a batch (see ttt.py), Vd draft vocabulary."""

    def __init__(
        self, draft: Eagle, target: FrozenTarget, rope: RotaryEmbedding, options: DraftOptions, depth: int, seed: int
    ) -> None:
        super().__init__(draft, target, rope, depth)
        self.options = options
        self.seed = seed
        ids = draft.target_ids
        head = target.model.get_output_embeddings().weight.detach()
        self.head = head if ids is None else head[ids.to(head.device)]  # (Vd, H)
        self.target_ids = torch.arange(len(head)) if ids is None else ids.cpu()  # (Vd,)
        self.device_ids = self.target_ids.to(head.device)  # on the device: a copy in every step would synchronise
        self.is_known = torch.zeros(len(head), dtype=torch.bool, device=head.device)
        self.is_known[self.device_ids] = True

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Per counting (row, step): smooth L1 to the target's feature, and cross-entropy of the head's distributions.

        Where the target's best token is outside the draft vocabulary there is no cross-entropy; such a row counts as
        missed in the metrics `accept_rate_i`, the agreement with the target's best token at step i.
        """
        options, steps = self.options, self.options.ttt_steps
        rows, tokens, _, final = self.read(batch, steps)
        wanted = final[rows.asking + 1]  # (N, H); step s of row n is taught by entry n + s
        best = self.target.logits(wanted, self.target_ids[:0])[1]
        features = self.target.as_read(final + self.noise(batch).flatten(0, 1))  # noise is fp32
        loss, metrics = wanted.new_zeros((), dtype=torch.float32), Metrics()
        for step, state in enumerate(self.chain(rows, tokens, features, steps)):
            state, taught = state[: max(len(state) - step, 0)], wanted[step:]
            counts = rows.counts[step, : len(state)]
            regression = (regression_losses(state, taught) * counts).sum()

            def teach(part: slice, taught: Tensor = taught) -> Tensor:
                return self.target.logits(taught[part], self.target_ids)[0]

            weights = (counts & self.is_known[best[step:]]).float()
            entropy, predicted = distillation_loss(state, self.head, teach, weights)
            own = options.feature_weight * regression + options.token_weight * entropy
            loss = loss + options.ttt_decay**step * own
            agrees = (self.device_ids[predicted] == best[step:]) & counts
            metrics[f"accept_rate_{step}"] = torch.stack((agrees.sum(), counts.sum()))
            metrics[f"feature_loss_{step}"] = torch.stack((regression.detach(), counts.sum()))
        return loss, metrics

    def noise(self, batch: Batch) -> Tensor:
        """(B, S, H) uniform noise, drawn by the seed and each row's number in the run alone."""
        scale = self.options.noise * NOISE_LENGTH / document_lengths(batch.documents)  # (B, S)
        shape, device = (batch.tokens.shape[1], self.head.shape[1]), self.head.device
        generator, noise = torch.Generator(device), []
        for number in batch.numbers.tolist():
            (state,) = np.random.SeedSequence((self.seed, number)).generate_state(1)  # 32 bits: all it uses
            generator.manual_seed(int(state))
            noise.append(torch.rand(shape, generator=generator, device=device) - 0.5)
        return torch.stack(noise) * scale.to(device).unsqueeze(-1)

    def predictions(self, states: Tensor) -> Tensor:
        return self.device_ids[best_rows(states, self.head)]


def document_lengths(documents: Tensor) -> Tensor:
    """documents (B, S) int64, -1 padding -> (B, S) fp32 tokens of each one's document; arbitrary at padding."""
    counts = torch.bincount(documents.flatten() + 1)
    return counts[documents + 1].float()


def build(options: EagleOptions, files: TargetFiles, accelerator: Accelerator) -> tuple[EagleTraining, Eagle]:
    draft = build_draft(options.draft, files)
    target = files.freeze(draft.config.feature_layers, accelerator.device)
    num_positions = options.data.max_length + max(options.draft.ttt_steps, options.evaluation.depth)
    rope = RotaryEmbedding(files.config.rope, draft.config.head_dim, num_positions).to(accelerator.device)
    return EagleTraining(draft, target, rope, options.draft, options.evaluation.depth, options.seed), draft


def build_draft(options: DraftOptions, files: TargetFiles) -> Eagle:
    config, ids = files.config, files.read_vocabulary(options.vocabulary)
    module = Eagle(
        EagleConfig.from_target(
            config,
            fc_bias=options.bias,
            draft_vocab_size=None if ids is None or len(ids) == config.vocab_size else len(ids),
            **files.draft_fields(options),
        )
    )
    if module.config.draft_vocab_size is not None:
        assert ids is not None
        module.set_vocabulary(ids)
    return module


def main(argv: list[str] | None = None) -> None:
    description = "Trains an EAGLE draft for a target."
    run_program(EagleOptions, build, argv, prog="train/eagle.py", description=description)


if __name__ == "__main__":
    main()
