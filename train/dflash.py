"""Trains a DFLASH block draft for a target (arXiv 2602.06036).

    accelerate launch train/dflash.py --config configs/dflash/tiny.yaml --optim.lr 1e-3

Writes step-N and best into `output`, both servable (`serve --draft OUTPUT/best`). Run again, it continues.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from slipstream.config import run
from slipstream.models.drafts.dflash import DFlash, default_block_aux_layers, default_mask_token
from slipstream.models.files.weights import public_tensors
from slipstream.models.targets.frozen import FrozenTarget
from slipstream.train.acceptance import count_accepted
from slipstream.train.batches import Batch, possible_roots
from slipstream.train.blocks import (
    BlockAttention,
    Blocks,
    block_attention,
    decay_weights,
    default_gamma,
    dpace_weights,
    draw_anchors,
    find_blocks,
)
from slipstream.train.draft_setup import BaseDraftOptions, DraftRunOptions, TargetFiles, train
from slipstream.train.losses import TargetHead, head_losses
from slipstream.train.options import EvaluationOptions
from slipstream.train.state_source import target_states
from slipstream.train.training import DraftTraining, Metrics

EVALUATED_AT_ONCE = 256  # blocks


@dataclass(frozen=True, kw_only=True)
class DraftOptions(BaseDraftOptions):
    aux_layers: tuple[int, ...] | None = None
    """target states that the draft reads: 0..n-1 is a layer's output, n after the final norm; default: by depth"""
    num_layers: int = 5
    """layers of the draft"""
    block_size: int = 16
    """tokens of a block, the last emitted one included: it drafts one fewer"""
    sliding_window: int | None = None
    """positions that the windowed layers see, their own included; default: all"""
    windowed_layers: tuple[int, ...] | None = None
    """layers that have the window; default: all if there is one"""
    sliding_window_non_causal: bool = False
    """slots see later ones of their block in these layers, too, as in z-lab's DFlash 2"""
    mask_token_id: int | None = None
    """token of the slots to fill; default: the tokenizer's mask token, an unused embedding, or pad, eos, unk"""
    init_from_target: bool = True
    """start with the target's last layers and final norm, and pass the last aux hidden state through"""
    anchors: int = 512
    """most blocks drawn from a packed row in a step"""
    loss: Literal["decay", "dpace"] = "decay"
    """weight of a slot: by its distance (decay), or by what it would add to the accepted length (dpace)"""
    gamma: float | None = None
    """slots over which `decay` falls to 1/e; default by block size: 4, 5 and 7 for 8, 10 and 16"""

    @property
    def reach(self) -> int:
        return self.block_size

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchors < 1 or self.num_layers < 1:
            raise ValueError(f"draft.anchors is {self.anchors} and draft.num_layers {self.num_layers}; give at least 1")
        if self.gamma is not None and self.gamma <= 0:
            raise ValueError(f"draft.gamma is {self.gamma}; give a positive number such as 7")
        if self.gamma is not None and self.loss != "decay":
            raise ValueError(f"draft.gamma is {self.gamma}, which loss {self.loss} does not use; leave it out")


@dataclass(frozen=True, kw_only=True)
class DFlashOptions(DraftRunOptions):
    """Trains a DFLASH block draft for a target."""

    draft: DraftOptions = field(default_factory=DraftOptions)
    evaluation: EvaluationOptions = field(default_factory=lambda: EvaluationOptions(depth=63))


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of a batch's blocks, M of them with a loss: they count, and the draft's vocabulary has their token."""

    states: Tensor  # (M, H) the draft's
    labels: Tensor  # (M,) rows of the head
    places: Tensor  # (M,) int64 among all N * (S - 1)
    known: Tensor  # (N, S - 1) bool: which these are
    counts: Tensor  # (N, S - 1) bool
    stands_for: Tensor  # (N,) fp32 how many possible anchors a block represents

    def spread(self, values: Tensor) -> Tensor:
        """values (M,) -> (N, S - 1), 0 at all other slots."""
        return values.new_zeros(self.known.numel()).index_copy(0, self.places, values).view(self.known.shape)


class DFlashTraining(DraftTraining):
    """The draft with its loss and its held-out walk. C rows of a batch, N blocks of S slots, Vd draft vocabulary."""

    reads_final_state = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.depth = min(self.depth, self.draft.config.block_size - 1)
        self.head = TargetHead(self.target, self.target_ids)
        rows = torch.arange(len(self.target_ids), device="cpu")
        self.head_rows = torch.full((self.vocab_size,), -1, device="cpu").index_copy(0, self.target_ids, rows)  # (V,)

    @classmethod
    def new_draft(cls, options: DraftOptions, files: TargetFiles) -> DFlash:
        mask_token, source = options.mask_token_id, "draft.mask_token_id"
        if mask_token is None:
            mask_token, source = default_mask_token(files.tokenizer, files.config.vocab_size)
        files.accelerator.print(f"mask token {mask_token}, {source}")
        windowed = tuple(range(options.num_layers)) if options.sliding_window is not None else ()
        layers = options.aux_layers or default_block_aux_layers(files.config.num_layers, options.num_layers)
        return files.new_draft(
            DFlash,
            options,
            num_layers=options.num_layers,
            block_size=options.block_size,
            aux_layers=layers,
            sliding_window=options.sliding_window,
            windowed_layers=windowed if options.windowed_layers is None else options.windowed_layers,
            sliding_window_non_causal=options.sliding_window_non_causal,
            mask_token_id=mask_token,
        )

    def start(self) -> None:
        if self.options.init_from_target:
            start_from_target(self.draft, self.target)

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """Weighted cross-entropy of every counting slot against the text, as if every possible anchor had its block.

        A slot whose token is outside the draft vocabulary has no loss; it counts as missed in the metrics
        `accept_rate_i`, the agreement of slot i + 1 with the text.
        """
        slots = self.backbone(batch)
        losses, best = head_losses(slots.states, self.head.rows, slots.labels)
        losses, agrees = slots.spread(losses), slots.spread(best == slots.labels)
        weights = self.weights(losses, slots.known, slots.counts) * slots.stands_for.unsqueeze(1)
        rates = torch.stack((agrees.sum(0), slots.counts.sum(0)), dim=1)  # (S - 1, 2)
        return (weights * losses).sum(), {f"accept_rate_{i}": rate for i, rate in enumerate(rates)}

    def backbone(self, batch: Batch) -> Slots:
        """The draft's states at blocks that are drawn from the batch, and what they are to predict."""
        anchors, stands_for = draw_anchors(batch, self.options.anchors, self.seed)
        blocks = find_blocks(batch, anchors, self.draft.config.block_size)
        labels = self.head_rows[blocks.labels]  # (N, S - 1)
        known = blocks.counts & (labels >= 0)
        places = known.flatten().nonzero().squeeze(1)  # (M,)
        columns = labels.flatten()[places], places, known, stands_for
        labels, places, known, stands_for = (x.to(self.device) for x in columns)
        blocks = blocks.to(self.device)
        states = self.states(blocks, *self.read(batch))[:, 1:].flatten(0, 1)[places]
        return Slots(states, labels, places, known, blocks.counts, stands_for)

    def weights(self, losses: Tensor, known: Tensor, counts: Tensor) -> Tensor:
        """(N, S - 1) fp32; a block's weights sum to at most 1, so that the loss stays near that of one token."""
        if self.options.loss == "dpace":
            return dpace_weights(losses, known, counts) * (2 / (known.shape[1] * (known.shape[1] + 1)))
        size = self.draft.config.block_size
        weights = decay_weights(size, self.options.gamma or default_gamma(size)).to(losses.device)
        return weights / weights.sum() * known

    def evaluate(self, batch: Batch) -> Metrics:
        anchors = possible_roots(batch)
        tokens, attention = self.read(batch)
        accepted = []
        for blocks in find_blocks(batch, anchors, self.depth + 1).parts(EVALUATED_AT_ONCE):
            blocks = blocks.to(self.device)
            states = self.states(blocks, tokens, attention)[:, 1:].flatten(0, 1)
            predicted = self.predictions(states).view(blocks.labels.shape)
            accepted.append(count_accepted(predicted.t(), blocks.labels.t(), blocks.counts.t()))
        return self.walk(batch, anchors - 1, torch.cat(accepted).cpu(), self.depth)  # sync

    def read(self, batch: Batch) -> tuple[Tensor, BlockAttention]:
        """Tokens (C,) of the flattened batch, and an attention that holds the context of every row."""
        aux_states, _ = target_states(self.target, batch, self.device)
        attention = block_attention(batch.positions.to(self.device).flatten(), self.rope)
        self.draft.write_context(self.draft.fuse(aux_states.flatten(0, 1)), attention)
        return batch.tokens.to(self.device).flatten(), attention

    def states(self, blocks: Blocks, tokens: Tensor, attention: BlockAttention) -> Tensor:
        """The draft's final states (N, S, H)."""
        attention.ask(blocks)
        asked = self.draft.block_tokens(tokens[blocks.anchors], blocks.size)
        return self.draft(self.target.embed(asked).flatten(0, 1), attention).view(*asked.shape, -1)

    def predictions(self, states: Tensor) -> Tensor:
        """Target id of the best draft token: (M, H) -> (M,)."""
        return self.head.predictions(states)


@torch.no_grad()
def start_from_target(draft: DFlash, target: FrozenTarget) -> None:
    """The draft's layers and norm become the target's last ones, and fc passes the last aux hidden state on.

    Raises ValueError if the target's layers do not have the draft's shapes.
    """
    own, weights = public_tensors(draft), target.initial_weights(len(draft.layers))
    matrices = [name for name, tensor in own.items() if name.startswith("layers.") and tensor.ndim == 2]
    strange = [name for name in matrices if name not in weights or weights[name].shape != own[name].shape]
    if strange:
        raise ValueError(
            "draft.init_from_target needs a target with at least as many layers as the draft, of the same kind and "
            f"shapes; it has {len(target.layers)} and differs at {', '.join(strange[:3])}; set draft.init_from_target "
            "to false"
        )
    for name in own.keys() & weights.keys():  # a target's biases and a draft's q/k norms may have no counterpart
        own[name].copy_(weights[name])
    own["fc.weight"].zero_()[:, -draft.config.hidden_size :].copy_(torch.eye(draft.config.hidden_size))
    own["hidden_norm.weight"].copy_(own[f"layers.{len(draft.layers) - 1}.input_layernorm.weight"])


def main(argv: list[str] | None = None) -> None:
    run(partial(train, kind=DFlashTraining), DFlashOptions, argv, "train/dflash.py")


if __name__ == "__main__":
    main()
