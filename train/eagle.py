"""Trains an EAGLE draft for a target (arXiv 2401.15077); EAGLE-2's trees are grown from the same weights.

    accelerate launch train/eagle.py --config configs/eagle/tiny.yaml --optim.lr 1e-3

Writes step-N and best into `output`, both servable (`serve --draft OUTPUT/best`). Run again, it continues.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from slipstream.models.eagle import Eagle, EagleConfig, save_eagle
from slipstream.models.frozen_target import FrozenTarget
from slipstream.models.layers import RotaryEmbedding
from slipstream.train.acceptance import count_accepted
from slipstream.train.batches import Batch
from slipstream.train.block_loss import best_rows
from slipstream.train.draft_setup import DraftRunOptions, TargetFiles, check_draft_options, run_program
from slipstream.train.eagle3 import token_at
from slipstream.train.feature_loss import distillation_loss, regression_losses
from slipstream.train.feature_source import target_states
from slipstream.train.training import DraftTraining, Metrics
from slipstream.train.ttt import Rows, find_rows
from slipstream.train.ttt_attention import ttt_attention

NOISE_LENGTH = 512  # tokens of a document whose noise spreads over exactly draft.noise


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    vocabulary: str | None = None
    """token map (slipstream frequency-map) of the tokens that the draft can propose; default: all of the target's"""
    intermediate_size: int | None = None
    """width of the draft's MLP; default: the target's"""
    bias: bool = True
    """whether fc has one: EAGLE's drafts do, those for Llama 3 do not"""
    feature_weight: float = 1.0
    """weight of the smooth L1 loss on features"""
    token_weight: float = 0.1
    """weight of the cross-entropy between the head's distributions"""
    noise: float = 0.2
    """spread of the uniform noise on features in documents of 512 tokens; shorter ones get more, longer ones less"""
    ttt_steps: int = 1
    """steps of training-time test; 1 is EAGLE, more also teach the draft to read its own features"""
    ttt_decay: float = 0.8
    """weight of a step's loss relative to the step before"""

    def __post_init__(self) -> None:
        check_draft_options(self.intermediate_size)
        if self.ttt_steps < 1 or self.ttt_decay <= 0:
            steps, decay = self.ttt_steps, self.ttt_decay
            raise ValueError(f"draft.ttt_steps is {steps} and draft.ttt_decay {decay}; give at least 1 and above 0")
        weights = self.feature_weight, self.token_weight
        if min(*weights, self.noise) < 0 or max(weights) == 0:
            raise ValueError(
                f"draft.feature_weight is {weights[0]}, draft.token_weight {weights[1]} and draft.noise {self.noise}; "
                "none may be negative, nor both weights 0"
            )


@dataclass(frozen=True, kw_only=True)
class EagleOptions(DraftRunOptions):
    draft: DraftOptions = field(default_factory=DraftOptions)


class EagleTraining(DraftTraining):
    """The draft with its loss and its held-out walk. N asking rows of a batch (see ttt.py), Vd draft vocabulary."""

    def __init__(
        self, draft: Eagle, target: FrozenTarget, rope: RotaryEmbedding, options: DraftOptions, depth: int, seed: int
    ) -> None:
        super().__init__()
        self.draft = draft
        self.target = target
        self.rope = rope
        self.options = options
        self.depth = depth
        self.seed = seed
        ids = draft.target_ids
        head = target.model.get_output_embeddings().weight.detach()
        self.head = head if ids is None else head[ids.to(head.device)]  # (Vd, H)
        self.target_ids = torch.arange(len(head)) if ids is None else ids.cpu()  # (Vd,)
        self.device_ids = self.target_ids.to(head.device)  # the same: a copy in every step would wait for the device
        self.is_known = torch.zeros(len(head), dtype=torch.bool, device=head.device)
        self.is_known[self.device_ids] = True

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Per counting (row, step): smooth L1 to the target's feature, and cross-entropy of the head's distributions.

        Where the target's best token is outside the draft vocabulary there is no cross-entropy; such a row counts as
        missed in the metrics `accept_rate_i`, the agreement with the target's best token at step i.
        """
        options, steps = self.options, self.options.ttt_steps
        rows, tokens, features = self.read(batch, steps)
        wanted = features[rows.asking + 1]  # (N, H); step s of row n is taught by entry n + s
        best = self.target.logits(wanted, self.target_ids[:0])[1]
        features = features + self.noise(batch).flatten(0, 1)
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

    def evaluate(self, batch: Batch) -> Metrics:
        rows, tokens, features = self.read(batch, self.depth)
        predicted = torch.stack(
            [self.predictions(state) for state in self.chain(rows, tokens, features, self.depth)]
        )  # (depth, N)
        text = torch.stack([token_at(tokens, rows.asking + 2 + step) for step in range(self.depth)])
        accepted = count_accepted(predicted, text, rows.counts)
        return self.walk(batch, rows.asking.cpu(), accepted.cpu(), self.depth)  # sync

    def read(self, batch: Batch, num_steps: int) -> tuple[Rows, Tensor, Tensor]:
        """Rows, and flattened over the batch: tokens (B * S,) and the target's features (B * S, H)."""
        device = self.head.device
        rows = find_rows(batch, num_steps).to(device)
        tokens = batch.tokens.to(device)
        _, features = target_states(self.target, batch, device)
        return rows, tokens.flatten(), features.flatten(0, 1)

    def noise(self, batch: Batch) -> Tensor:
        """(B, S, H) uniform; what a row of the run gets depends on it and the seed alone."""
        scale = self.options.noise * NOISE_LENGTH / document_lengths(batch.documents)  # (B, S)
        shape, device = (batch.tokens.shape[1], self.head.shape[1]), self.head.device
        generator, noise = torch.Generator(device), []
        for number in batch.numbers.tolist():
            (state,) = np.random.SeedSequence((self.seed, number)).generate_state(1)  # 32 bits: all that count
            generator.manual_seed(int(state))
            noise.append(torch.rand(shape, generator=generator, device=device) - 0.5)
        return torch.stack(noise) * scale.to(device).unsqueeze(-1)

    def chain(self, rows: Rows, tokens: Tensor, features: Tensor, num_steps: int) -> Iterator[Tensor]:
        """The draft's features (N, H) of each step; from step 1 on it reads its own."""
        attention, features = ttt_attention(rows, self.rope), self.target.as_read(features)  # noise is fp32
        context = self.target.embed(token_at(tokens, rows.context + 1))
        self.draft.write_context(context, features[rows.context], attention)
        state = features[rows.asking]
        for step in range(num_steps):
            state = self.draft(self.target.embed(token_at(tokens, rows.asking + 1 + step)), state, attention)
            yield state
            attention.next_step()

    def predictions(self, states: Tensor) -> Tensor:
        """Target id of the best draft token: (N, H) -> (N,)."""
        return self.device_ids[best_rows(states, self.head)]

    def write(self, state: Mapping[str, Tensor], folder: Path, run: Mapping[str, Any]) -> None:
        save_eagle(self.draft, {name.removeprefix("draft."): tensor for name, tensor in state.items()}, folder, run)


def document_lengths(documents: Tensor) -> Tensor:
    """documents (B, S) int64, -1 padding -> (B, S) fp32 tokens of each one's document; those of padding: any number."""
    counts = torch.bincount(documents.flatten() + 1)
    return counts[documents + 1].float()


def build(options: EagleOptions, files: TargetFiles, accelerator: Accelerator) -> tuple[EagleTraining, Eagle]:
    draft = build_draft(options.draft, files)
    target = files.freeze(draft.config.feature_layers, accelerator.device)
    num_positions = options.data.max_length + max(options.draft.ttt_steps, options.evaluation.depth)
    rope = RotaryEmbedding(files.config.rope, draft.config.head_dim, num_positions).to(accelerator.device)
    return EagleTraining(draft, target, rope, options.draft, options.evaluation.depth, options.seed), draft


def build_draft(options: DraftOptions, files: TargetFiles) -> Eagle:
    config = files.config
    ids, width = files.read_vocabulary(options.vocabulary), options.intermediate_size
    module = Eagle(
        EagleConfig.from_target(
            config,
            intermediate_size=config.intermediate_size if width is None else width,
            fc_bias=options.bias,
            draft_vocab_size=None if ids is None or len(ids) == config.vocab_size else len(ids),
            **files.origin(),
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
