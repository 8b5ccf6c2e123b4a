"""Trains an EAGLE3 draft for a target (arXiv 2503.01840).

    accelerate launch train/eagle3.py --config configs/eagle3/tiny.yaml --optim.lr 1e-3

Writes step-N and best into `output`, both servable (`serve --draft OUTPUT/best`). Run again, it continues.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor

from slipstream.kernels.cross_entropy import Kind, soft_cross_entropy
from slipstream.models.config import default_feature_layers
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.models.frozen_target import FrozenTarget
from slipstream.models.layers import RotaryEmbedding
from slipstream.train.batches import Batch
from slipstream.train.draft_setup import ChainDraftOptions, DraftRunOptions, TargetFiles, run_program
from slipstream.train.training import Metrics
from slipstream.train.ttt import ChainTraining


@dataclass(frozen=True, kw_only=True)
class DraftOptions(ChainDraftOptions):
    feature_layers: tuple[int, ...] | None = None
    """target states that the draft reads: 0..n-1 is a layer's output, n after the final norm; default: by depth"""
    init_from_target: bool = True
    """start with the target's head, final norm and last MLP, and pass the last feature through"""
    step_weights: tuple[float, ...] | None = None
    """weights of the steps, one for each; default: by ttt_decay"""
    loss: Kind = "soft_ce"
    """distance to the target's distribution: soft_ce, forward_kl, reverse_kl, tv or lk (docs/eagle3.md)"""

    def __post_init__(self) -> None:
        super().__post_init__()
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
    draft: DraftOptions = field(default_factory=DraftOptions)


class Eagle3Training(ChainTraining):
    """The draft with its loss and its held-out walk. N asking rows of a batch (see ttt.py), Vd draft vocabulary."""

    def __init__(
        self, draft: Eagle3, target: FrozenTarget, rope: RotaryEmbedding, options: DraftOptions, depth: int
    ) -> None:
        super().__init__(draft, target, rope, depth)
        self.options = options
        self.target_ids = draft.target_ids.cpu()

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Distance of every counting (row, step) from the target's distribution over the draft vocabulary.

        A row whose best target token is outside that vocabulary has no loss; it counts as missed in the metrics
        `accept_rate_i`, the agreement with the target's best token at step i.
        """
        options = self.options
        rows, tokens, features, final = self.read(batch, options.ttt_steps)
        # (N, Vd) logits and (N,) best tokens; step s of row n is taught by entry n + s
        teacher, best = self.target.logits(final[rows.asking + 1], self.target_ids)
        is_known = self.draft.t2d[best]  # (N,)
        loss, metrics = teacher.new_zeros((), dtype=torch.float32), Metrics()
        for step, state in enumerate(self.chain(rows, tokens, features, options.ttt_steps)):
            length = max(len(state) - step, 0)
            counts = rows.counts[step, :length]
            weights = options.weight(step) * (counts & is_known[step:]).float()
            losses, drafted = soft_cross_entropy(
                self.draft.logits(state[:length]), teacher[step:], weights, options.loss, in_place=True
            )
            loss = loss + losses.sum()
            agrees = (drafted + self.draft.d2t[drafted] == best[step:]) & counts
            metrics[f"accept_rate_{step}"] = torch.stack((agrees.sum(), counts.sum()))
        return loss, metrics

    def enter(self, features: Tensor) -> Tensor:
        return self.draft.fuse(features)

    def predictions(self, states: Tensor) -> Tensor:
        best = self.draft.logits(states).argmax(dim=-1)
        return best + self.draft.d2t[best]


def build(options: Eagle3Options, files: TargetFiles, accelerator: Accelerator) -> tuple[Eagle3Training, Eagle3]:
    draft = build_draft(options.draft, files)
    target = files.freeze(draft.config.feature_layers, accelerator.device)
    if options.draft.init_from_target:
        draft.init_from_target(*target.initial_weights())
    num_positions = options.data.max_length + max(options.draft.ttt_steps, options.evaluation.depth)
    rope = RotaryEmbedding(files.config.rope, draft.config.head_dim, num_positions).to(accelerator.device)
    return Eagle3Training(draft, target, rope, options.draft, options.evaluation.depth), draft


def build_draft(options: DraftOptions, files: TargetFiles) -> Eagle3:
    config, layers, ids = files.config, options.feature_layers, files.read_vocabulary(options.vocabulary)
    if ids is None:
        ids = torch.arange(config.vocab_size)
    module = Eagle3(
        Eagle3Config.from_target(
            config,
            draft_vocab_size=len(ids),
            feature_layers=default_feature_layers(config.num_layers) if layers is None else layers,
            **files.draft_fields(options),
        )
    )
    module.set_vocabulary(ids)
    return module


def main(argv: list[str] | None = None) -> None:
    description = "Trains an EAGLE3 draft for a target."
    run_program(Eagle3Options, build, argv, prog="train/eagle3.py", description=description)


if __name__ == "__main__":
    main()
