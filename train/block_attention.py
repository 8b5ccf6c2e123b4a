"""What blocks see: the context before their anchor in its document, and their own slots, both ways.

A windowed layer sees the last W positions only, its own included, and its own slots up to itself. One rule, `sees`,
makes the mask of both implementations: FlexAttention on a GPU, elsewhere SDPA with a boolean mask for a few blocks at a
time.

Letters: C context rows, N blocks of S slots, K = C + N * S keys, Q/G query and KV heads, D head dim, W window.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from slipstream.kernels.norm import HeadNorms, norm_heads
from slipstream.kernels.rope import rotate
from slipstream.models.layers import Mask, RotaryEmbedding
from slipstream.train import flex
from slipstream.train.blocks import Blocks

BLOCKS_AT_ONCE = 16  # SDPA computes every block against every other: more at once is wasted, fewer are many calls


@dataclass(frozen=True, slots=True)
class Places:
    """Queries or keys, (n,) int64 each."""

    block: Tensor  # which block a row belongs to; -1 for context
    row: Tensor  # row of the flattened batch whose position it has: anchor + slot, or the context row itself
    first: Tensor  # queries: first context row that is seen
    anchor: Tensor  # queries: first one that is not

    def followed_by(self, other: "Places") -> "Places":
        mine, others = ((x.block, x.row, x.first, x.anchor) for x in (self, other))
        return Places(*(torch.cat(pair) for pair in zip(mine, others, strict=True)))


def context_places(num_rows: int, device: torch.device) -> Places:
    rows = torch.arange(num_rows, device=device)
    none = torch.full_like(rows, -1)
    return Places(none, rows, none, none)


def block_places(blocks: Blocks) -> Places:
    """Of every slot, (N * S,)."""
    slots = torch.arange(blocks.size, device=blocks.anchors.device)
    numbers = torch.arange(len(blocks), device=slots.device)
    columns = numbers, blocks.anchors, blocks.starts, blocks.anchors
    block, row, first, anchor = (column.repeat_interleave(blocks.size) for column in columns)
    return Places(block, row + slots.repeat(len(blocks)), first, anchor)


def sees(query: Places, q: Any, key: Places, k: Any, window: int | None) -> Tensor:
    """Whether queries `q` see keys `k`; both index, and broadcast."""
    key_block, key_row = key.block[k], key.row[k]
    is_context = (key_block < 0) & (key_row >= query.first[q]) & (key_row < query.anchor[q])
    seen = is_context | (key_block == query.block[q])
    if window is None:
        return seen
    return seen & (key_row <= query.row[q]) & (key_row > query.row[q] - window)


class BlockAttention(ABC):
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
        self.masks: dict[int | None, Any] = {}  # by window; layers share them

    def write(self, k: Tensor, v: Tensor, layer: int) -> None:
        """k and v (C, G, D)."""
        self.context[layer] = rotate(k, self.rope.cos, self.rope.sin, self.positions, v.dtype), v

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        mask: Mask,
        window: int | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """q (N * S, Q, D), k and v (N * S, G, D) -> (N * S, Q, D). Keeps nothing."""
        assert (mask, window is None) in (("block", True), ("causal", False)), "the two kinds of layer that blocks have"
        q, k = norm_heads(q, k, norms)
        q, k = (rotate(x, self.rope.cos, self.rope.sin, self.slot_positions, v.dtype) for x in (q, k))
        if window not in self.masks:
            self.masks[window] = self.make_mask(window)
        return self.compute(q, k, v, *self.context[layer], self.masks[window])

    @abstractmethod
    def make_mask(self, window: int | None) -> Any: ...

    @abstractmethod
    def compute(self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, mask: Any) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring blocks of one document and the context rows that the last of them sees."""

    slots: slice
    rows: slice
    mask: Tensor  # (slots, rows + slots) bool


class SDPABlockAttention(BlockAttention):
    def make_mask(self, window: int | None) -> list[Group]:
        """Waits for the device, which is the CPU."""
        queries = block_places(self.blocks)
        keys = context_places(len(self.positions), self.positions.device)
        size, groups = self.blocks.size, []
        starts, anchors = self.blocks.starts.tolist(), self.blocks.anchors.tolist()
        first = 0
        while first < len(self.blocks):
            last = first + 1
            while last < min(first + BLOCKS_AT_ONCE, len(self.blocks)) and starts[last] == starts[first]:
                last += 1
            slots, rows = slice(first * size, last * size), slice(starts[first], anchors[last - 1])
            own = torch.arange(slots.start, slots.stop)
            asking, seen = own.unsqueeze(1), torch.arange(rows.start, rows.stop).unsqueeze(0)
            parts = sees(queries, asking, keys, seen, window), sees(queries, asking, queries, own.unsqueeze(0), window)
            groups.append(Group(slots, rows, torch.cat(parts, dim=1)))
            first = last
        return groups

    def compute(
        self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, mask: list[Group]
    ) -> Tensor:
        outputs = []
        for group in mask:
            keys = torch.cat((context_k[group.rows], k[group.slots]))
            values = torch.cat((context_v[group.rows], v[group.slots]))
            asked, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q[group.slots], keys, values))
            attended = F.scaled_dot_product_attention(asked, keys, values, attn_mask=group.mask, enable_gqa=True)
            outputs.append(attended.squeeze(0).transpose(0, 1))
        return torch.cat(outputs)


class FlexBlockAttention(BlockAttention):
    def make_mask(self, window: int | None) -> BlockMask:
        queries, device = block_places(self.blocks), self.positions.device
        keys = context_places(len(self.positions), device).followed_by(queries)

        def mask(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return sees(queries, q, keys, k, window)

        return flex.visible_tiles(mask, len(queries.row), len(keys.row), device)

    def compute(self, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, mask: BlockMask) -> Tensor:
        return flex.attend(q, torch.cat((context_k, k)), torch.cat((context_v, v)), mask)


def block_attention(positions: Tensor, rope: RotaryEmbedding) -> BlockAttention:
    kind = FlexBlockAttention if positions.is_cuda else SDPABlockAttention
    return kind(positions, rope)
