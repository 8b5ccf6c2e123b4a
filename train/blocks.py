"""The blocks of a packed batch: where they are anchored, what they read and see, what their slots predict and weigh.

A block begins at its anchor a, a token of an answer that the next one follows (a possible root of a round). It reads
the tokens of a's document before a; slot k of it stands at the position of token a + k and predicts that token, slot 0
nothing. In the anchor-first convention (DSpark) slot k predicts the token after its place, slot 0 too. Either way its
proposals are tokens a + 1 .. a + K; one counts if all tokens from a up to it are supervised and of one document.

Slots see the context before their anchor in its document, and their block's slots, both ways. A windowed layer sees the
last W positions only, its own included, and its own slots both ways or up to itself. One rule, `sees`, makes the mask
of both implementations: FlexAttention on a GPU, elsewhere SDPA with a boolean mask for a few blocks at a time.

Letters: C rows of the flattened batch, N blocks of S slots, the anchor's included, that propose K tokens, C + N * S
keys, Q/G query and KV heads, D head dim, W window.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch._dynamo
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from slipstream.kernels.kv.rope import rotate
from slipstream.kernels.norm import norm_heads
from slipstream.models.layers.attention import Attention, AttentionLayer, Mask
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.train.batches import Batch, possible_roots

GAMMAS = {8: 4.0, 10: 5.0, 16: 7.0}  # DFLASH's own choice by block size (arXiv 2602.06036)
DPACE_ALPHA = 0.5  # arXiv 2605.18810
BLOCKS_AT_ONCE = 16  # SDPA computes every block against every other: more blocks waste work, fewer need more calls
RECOMPILATIONS = 32  # beyond the limit torch silently computes all scores; its default is 8


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows are indices into the flattened batch. Built on the host: no synchronisation with a device."""

    anchors: Tensor  # (N,) int64 rows, ascending
    starts: Tensor  # (N,) int64 rows: where the anchor's document begins, the first row that the block reads
    positions: Tensor  # (N, S) int64 positions in the document
    labels: Tensor  # (N, K) int64 target ids of the proposals, anything where one does not count
    counts: Tensor  # (N, K) bool

    def __len__(self) -> int:
        return len(self.anchors)

    @property
    def size(self) -> int:
        return self.positions.shape[1]

    @property
    def num_proposals(self) -> int:
        return self.labels.shape[1]

    @property
    def rows_before(self) -> Tensor:
        """(N, K) int64 rows of the tokens before the labels; whatever is in reach where one does not count."""
        return self.anchors.unsqueeze(1) + torch.arange(self.num_proposals, device=self.anchors.device)

    def parts(self, count: int) -> Iterator["Blocks"]:
        """The same blocks, `count` at a time."""
        columns = [getattr(self, field.name).split(count) for field in fields(self)]
        for column in zip(*columns, strict=True):
            yield Blocks(*column)


def draw_anchors(batch: Batch, limit: int, seed: int) -> tuple[Tensor, Tensor]:
    """At most `limit` of each row's possible anchors, drawn by (seed, number of the row in the run) alone.

    Returns rows (N,) int64, ascending, and (N,) fp32 how many possible anchors each of them represents.
    """
    width = batch.tokens.shape[1]
    possible = possible_roots(batch).numpy()
    bounds = np.searchsorted(possible, np.arange(len(batch.tokens) + 1) * width)
    anchors = []
    weights = []
    for number, (first, last) in zip(batch.numbers.tolist(), pairwise(bounds.tolist()), strict=True):
        row = possible[first:last]
        if len(row) > limit:
            row = np.sort(np.random.default_rng((seed, number)).choice(row, limit, replace=False))
        anchors.append(row)
        weights.append(np.full(len(row), (last - first) / max(len(row), 1), np.float32))
    return torch.from_numpy(np.concatenate(anchors)), torch.from_numpy(np.concatenate(weights))


def find_blocks(batch: Batch, anchors: Tensor, size: int, *, first_slot: int = 1) -> Blocks:
    """Blocks of `size` slots at `anchors` (N,), rows of `batch`, which lies on the host. `first_slot`: the one that
    predicts the token after the anchor, 1 or 0 (DFlashConfig.first_slot)."""
    tokens = batch.tokens.flatten()
    positions = batch.positions.flatten()
    supervised = batch.supervised.flatten()
    documents = batch.documents.flatten()
    rows = anchors.unsqueeze(1) + torch.arange(1, size + 1 - first_slot)  # (N, K)
    inside = rows.clamp(max=len(tokens) - 1)
    goes_on = (rows == inside) & supervised[inside] & (documents[inside] == documents[anchors].unsqueeze(1))
    return Blocks(
        anchors=anchors,
        starts=anchors - positions[anchors],
        positions=positions[anchors].unsqueeze(1) + torch.arange(size),
        labels=tokens[inside],
        counts=goes_on.long().cumprod(dim=1).bool(),
    )


def default_gamma(size: int) -> float:
    """gamma of the decay for blocks of `size`: on the lines through DFLASH's own choices."""
    low, high = (8, 10) if size < 10 else (10, 16)
    return max(1.0, GAMMAS[low] + (size - low) * (GAMMAS[high] - GAMMAS[low]) / (high - low))


def decay_weights(num_proposals: int, gamma: float) -> Tensor:
    """(K,) fp32: exp(-(k - 1) / gamma) for proposals k = 1 .. K."""
    return torch.exp(-torch.arange(num_proposals) / gamma)


def dpace_weights(losses: Tensor, is_known: Tensor, counts: Tensor) -> Tensor:
    """(N, K) fp32 weights of D-PACE: what a better slot k would add to the expected accepted length.

    losses (N, K) cross-entropies where `is_known`; slots that count with a label outside the draft vocabulary are sure
    to fail. w_k = sum over j >= k of P_j, P_j = product over i <= j of (1 - alpha) exp(-loss_i) + alpha.
    """
    confidence = torch.where(is_known, torch.exp(-losses.detach()), 0.0)
    survival = ((1 - DPACE_ALPHA) * confidence + DPACE_ALPHA).cumprod(dim=1) * counts
    return survival.flip(1).cumsum(1).flip(1) * is_known


@dataclass(frozen=True, slots=True)
class Places:
    """Where queries and keys stand. Queries are all slots (N * S,), keys (K,) the context rows and then the slots."""

    key_block: Tensor  # which block a key belongs to; -1 for context
    key_row: Tensor  # row of the flattened batch whose position it has: the context row itself, or anchor + slot
    block: Tensor  # of each query
    row: Tensor
    first: Tensor  # first context row that it sees
    anchor: Tensor  # first one that it does not

    @classmethod
    def of(cls, blocks: Blocks, num_context: int) -> "Places":
        """`num_context`: C. All on the blocks' device."""
        device = blocks.anchors.device
        slots = torch.arange(blocks.size, device=device)
        context = torch.arange(num_context, device=device)
        columns = torch.arange(len(blocks), device=device), blocks.anchors, blocks.starts, blocks.anchors
        block, row, first, anchor = (column.repeat_interleave(blocks.size) for column in columns)
        row = row + slots.repeat(len(blocks))
        key_block = torch.cat((torch.full_like(context, -1), block))
        return cls(key_block, torch.cat((context, row)), block, row, first, anchor)


def sees(places: Places, q: Any, k: Any, window: int | None, mask: Mask) -> Tensor:
    """Whether queries `q` see keys `k`; both index, and broadcast. mask "causal": no later slots."""
    key_block = places.key_block[k]
    key_row = places.key_row[k]
    is_context = (key_block < 0) & (key_row >= places.first[q]) & (key_row < places.anchor[q])
    is_visible = is_context | (key_block == places.block[q])
    if mask == "causal":
        is_visible = is_visible & (key_row <= places.row[q])
    return is_visible if window is None else is_visible & (key_row > places.row[q] - window)


class BlockAttention(Attention, ABC):
    """Attention of the blocks over one batch. Call order: write (the context, every layer), then `ask` for some blocks
    and attend with them; again for others."""

    def __init__(self, positions: Tensor, rope: RotaryEmbedding) -> None:
        """positions (C,) of the flattened batch's rows in their documents."""
        self.positions = positions
        self.rope = rope
        self.context: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> k (C, G, D), rotated, and v (C, G, D)

    def ask(self, blocks: Blocks) -> None:
        """`blocks` on the device."""
        self.blocks = blocks
        self.slot_positions = blocks.positions.flatten()
        self.masks: dict[tuple[int | None, Mask], Any] = {}  # by window and kind; layers share them

    def write(self, k: Tensor, v: Tensor, layer: AttentionLayer) -> None:
        """k and v (C, G, D)."""
        self.context[layer.id] = rotate(k, self.rope.cos, self.rope.sin, self.positions, v.dtype), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        """q (N * S, Q, D), k and v (N * S, G, D) -> (N * S, Q, D). Keeps nothing."""
        window = layer.spec.window
        assert mask == "block" or window is not None, "the kinds of layer that blocks have"
        q, k, v = norm_heads(q, k, v, layer.norms)
        q, k = (rotate(x, self.rope.cos, self.rope.sin, self.slot_positions, v.dtype) for x in (q, k))
        if (window, mask) not in self.masks:
            self.masks[window, mask] = self.make_mask(window, mask)
        return self.compute(q, k, v, *self.context[layer.id], self.masks[window, mask])

    @abstractmethod
    def make_mask(self, window: int | None, mask: Mask) -> Any: ...

    @abstractmethod
    def compute(self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, mask: Any) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring blocks of one document and the context rows that the last of them sees."""

    slots: slice
    rows: slice
    mask: Tensor  # (slots, rows + slots) bool


class SDPABlockAttention(BlockAttention):
    def make_mask(self, window: int | None, mask: Mask) -> list[Group]:
        """Reads lengths on the host: for the CPU only."""
        places = Places.of(self.blocks, len(self.positions))
        num_context = len(self.positions)
        size = self.blocks.size
        groups = []
        starts = self.blocks.starts.tolist()
        anchors = self.blocks.anchors.tolist()
        first = 0
        while first < len(self.blocks):
            last = first + 1
            while last < min(first + BLOCKS_AT_ONCE, len(self.blocks)) and starts[last] == starts[first]:
                last += 1
            slots = slice(first * size, last * size)
            rows = slice(starts[first], anchors[last - 1])
            queries = torch.arange(slots.start, slots.stop)
            keys = torch.cat((torch.arange(rows.start, rows.stop), num_context + queries))
            groups.append(Group(slots, rows, sees(places, queries.unsqueeze(1), keys, window, mask)))
            first = last
        return groups

    def compute(
        self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, mask: list[Group]
    ) -> Tensor:
        outputs = []
        for group in mask:
            keys = torch.cat((context_k[group.rows], k[group.slots]))
            values = torch.cat((context_v[group.rows], v[group.slots]))
            queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q[group.slots], keys, values))
            attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask, enable_gqa=True)
            outputs.append(attended.squeeze(0).transpose(0, 1))
        return torch.cat(outputs)


class FlexBlockAttention(BlockAttention):
    def make_mask(self, window: int | None, mask: Mask) -> BlockMask:
        places = Places.of(self.blocks, len(self.positions))

        def visible(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return sees(places, q, k, window, mask)

        return visible_tiles(visible, len(places.row), len(places.key_row), self.positions.device)

    def compute(self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, mask: BlockMask) -> Tensor:
        return attend_tiles(q, torch.cat((context_k, k)), torch.cat((context_v, v)), mask)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled again for a window, with gradients or without, and once more as soon as sizes change."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILATIONS)
    return torch.compile(function)


def visible_tiles(sees: Callable[..., Tensor], num_queries: int, num_keys: int, device: torch.device) -> BlockMask:
    """The tiles of 128 x 128 that hold a pair of which sees(batch, head, query, key) holds: others are skipped."""
    make = compiled(create_block_mask) if device.type == "cuda" else create_block_mask
    return make(sees, None, None, num_queries, num_keys, device=device)


def attend_tiles(q: Tensor, k: Tensor, v: Tensor, tiles: BlockMask) -> Tensor:
    """q (N, Q, D), k and v (K, G, D) of one dtype -> (N, Q, D)."""
    heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    run: Any = compiled(flex_attention) if q.is_cuda else flex_attention
    # By itself torch takes its decoding kernel below 128 queries, which has no tiles for some numbers of them.
    options = {"BACKEND": "TRITON"}
    out = run(*heads_first, block_mask=tiles, enable_gqa=True, kernel_options=options)
    return out.squeeze(0).transpose(0, 1)


def block_attention(positions: Tensor, rope: RotaryEmbedding) -> BlockAttention:
    kind = FlexBlockAttention if positions.is_cuda else SDPABlockAttention
    return kind(positions, rope)
