"""Device code that the kernels over a paged KV cache (tree.py, ragged.py) share: cache, scores, values, masks.

A cache of e4m3 codes (kernels/kv/fp8.py) is read as fp16, which holds every code and is one instruction for two; the
scale of a head's keys becomes a factor of its scores, that of its values of its results.

The kernels walk over tiles of tokens: `tile_cells`, `load_pages` of the next tile, `score`, the mask, `weigh`,
`add_values`. They differ in how they sum weights and join parts: `ragged.py` fixes the order, whatever the tiles.
"""

import math
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.kv.fp8 import E4M3, decode
from slipstream.kernels.launch import COMPILED
from slipstream.kernels.speculation.verify import unpack

Mask = Literal["causal", "tree", "block"]

MAX_HEAD_DIM = 512  # wider tiles do not fit in registers and shared memory


class Blocks(NamedTuple):
    """A tile of the work."""

    rows: int  # query rows
    tokens: int  # KV tokens
    warps: int
    stages: int  # of the load pipeline


def read_cache(keys: Tensor, values: Tensor, slots: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values (..., G, D) fp32 in `slots` (...) of a layer's cache (num_pages, page_size, G, D)."""
    cache_scales = (None, None) if scales is None else scales[..., None]  # (G, 1) each
    flat = (x.flatten(0, 1) for x in (keys, values))
    k, v = (
        x[slots].float() if scale is None else decode(x.view(torch.uint8)[slots].view(E4M3), scale, torch.float32)
        for x, scale in zip(flat, cache_scales, strict=True)
    )
    return k, v


def sees(node: Tensor, queries: Tensor, ancestors: Tensor | None, mask: Mask, window: int | None) -> Tensor:
    """(B, N, S) bool: which slots each query may see by the mask and the window, committed tokens included."""
    N = len(queries)
    node = node[:, None]
    if mask == "tree":
        assert ancestors is not None
        bits = unpack(ancestors, count=64)
        index = node.clamp(0, 63).expand(-1, N, -1)
        visible = (node < 0) | bits.gather(2, index)
    elif mask == "causal":
        visible = node <= queries[:, None]
    else:
        visible = torch.ones_like(node, dtype=torch.bool).expand(-1, N, -1)
    if window is None:
        return visible
    # positions - lengths
    depths = node  # (B, 1, S)
    query_depths = queries[:, None]  # (N, 1)
    if mask == "tree":
        seen_depths = bits.cumsum(dim=2) - 1  # (B, N, 64): right for the nodes that a query sees
        depths = torch.where(node < 0, node, seen_depths.gather(2, index))
        query_depths = seen_depths[..., -1:]
    return visible & (depths > query_depths - window)


def padded_dim(head_dim: int) -> int:
    """Dims of a head's tile: a product takes at least 16."""
    return max(16, triton.next_power_of_2(head_dim))


def precision(dtype: torch.dtype) -> str:
    """`input_precision` of products of this dtype, which is ignored for 16 bits."""
    return "ieee" if dtype == torch.float32 else "tf32"


def held_words(q: Tensor, keys: Tensor, values: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """A layer's cache as kernels read it: as it is or, where it holds e4m3 codes, in words (int16) of two."""
    if scales is None:
        assert q.dtype == keys.dtype == values.dtype
        return keys, values
    assert keys.dtype == values.dtype == E4M3
    assert scales.shape == (2, keys.shape[2])
    assert scales.is_contiguous()
    return keys.view(torch.int16), values.view(torch.int16)


def load_stages(blocks: Blocks, scales: Tensor | None) -> int:
    """Stages of the load pipeline: tiles of codes have half the bytes, so one more is in flight in the same memory."""
    return blocks.stages + (scales is not None)


def score_factors(scale: float, softcap: float | None) -> tuple[float, float | None]:
    """Factors for kernels that weigh tokens by exp2: of the scores and, with a soft cap, of the products of queries and
    keys before it, for `score`."""
    if softcap is None:
        return scale / math.log(2), None
    return softcap / math.log(2), 2 * scale / (softcap * math.log(2))


def fit_blocks(blocks: Blocks, block_dim: int, element_size: int, memory: int) -> Blocks:
    """Shortens the pipeline if tiles exceed `memory`, a program's bytes of shared memory (99 KB on sm_86, 89 and 120),
    and then lowers the tiles, down to 16 rows.

    A pipeline of n stages holds n - 1 tiles of K and V.
    """
    loaded = blocks.rows + 2 * blocks.tokens * (blocks.stages - 1)  # rows of q, k and v
    needed = (loaded * block_dim + blocks.rows * blocks.tokens) * element_size + 4 * blocks.rows
    if needed <= memory:
        return blocks
    if blocks.stages > 2:
        return fit_blocks(blocks._replace(stages=2), block_dim, element_size, memory)
    is_low = blocks.rows <= 16
    return blocks if is_low else fit_blocks(blocks._replace(rows=blocks.rows // 2), block_dim, element_size, memory)


@triton.jit
def load_queries(q_ptr, rows, D: tl.constexpr, BLOCK_D: tl.constexpr, PACKED: tl.constexpr):
    """(rows, BLOCK_D): heads of queries, `rows` from q_ptr on. Beside codes even dims first, in the dtype in which
    codes are read: fp16, but fp32 for exact products.

    bf16 has fewer bits: what fp16 can reach stays as it is, but for numbers below 2**-14, of which bits below 2**-24
    go; what it cannot saturates."""
    dims = tl.arange(0, BLOCK_D)
    q = tl.load(q_ptr + (rows.to(tl.int64)[:, None] * D + dims[None, :]), mask=(dims < D)[None, :], other=0.0)
    if PACKED > 1:
        if q.dtype.primitive_bitwidth < 32:
            q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
        pairs = tl.reshape(q, (q.shape[0], q.shape[1] // 2, 2))
        q = tl.reshape(tl.permute(pairs, (0, 2, 1)), q.shape)
    return q


@triton.jit
def load_pages(table, start, end, PAGE: tl.constexpr, TOKENS: tl.constexpr):
    """(TOKENS,) int32 page ids of the tokens from start on, each loaded once; 0 past the end."""
    COUNT: tl.constexpr = max(TOKENS // PAGE, 1)
    index = tl.arange(0, COUNT)
    ids = tl.load(table + start // PAGE + index, mask=start + index * PAGE < end, other=0).to(tl.int32)
    return tl.reshape(tl.broadcast_to(ids[:, None], (COUNT, TOKENS // COUNT)), (TOKENS,))


@triton.jit
def cells_in_page(
    head, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr
):
    """(TOKENS, BLOCK_D): a tile's cells, counted from the start of their pages. The same in every tile, so computed
    once, for `tile_cells`."""
    token = tl.arange(0, TOKENS)
    return (token % PAGE * G + head)[:, None] * D + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def tile_cells(
    page, in_page, tile_start, lowest, end,
    G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Cells of the cache that hold a head's tokens from tile_start on, (TOKENS, BLOCK_D), and which of them are read:
    those of tokens before `end` and, unless it is None, from `lowest` on. page (TOKENS,): of `load_pages`.

    Before `lowest` pages may be another request's, and NaN times a weight of 0 is NaN."""
    dims = tl.arange(0, in_page.shape[1])[None, :]
    token = tl.arange(0, in_page.shape[0])
    first_cell = page.to(OFFSET) * (PAGE * G * D)
    if in_page.shape[0] < PAGE:
        first_cell += tile_start % PAGE * (G * D)
    inside = (token < end - tile_start)[:, None] & (dims < D)
    if lowest is not None:
        inside &= (token >= lowest - tile_start)[:, None]
    return first_cell[:, None] + in_page, inside


@triton.jit
def score(q, k, squash, PRECISION: tl.constexpr):
    """q k, of a tile k as loaded, or, with a soft cap, the tanh of its argument, which is q k * squash * ln 2 / 2. The
    kernels multiply by the cap later, with what makes exp2 of exp. tanh x = 1 - 2 / (exp 2x + 1) holds in both
    limits.

    Two products of codes, as in `add_values`. Joined, Triton would add dims in another order in tiles of less than 64
    rows than in others. A product takes at least 16 dims."""
    if k.dtype == tl.int16:
        lower, upper = _unpack(tl.trans(k), q.dtype)  # transposed as words
        if k.shape[1] < 16:
            keys = tl.reshape(tl.permute(tl.join(lower, upper), (2, 0, 1)), (q.shape[1], k.shape[0]))
            scores = tl.dot(q, keys, input_precision=PRECISION)
        else:
            even, odd = _halves(q)
            scores = tl.dot(even, lower, input_precision=PRECISION)
            scores = tl.dot(odd, upper, scores, input_precision=PRECISION)
    else:
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if squash is not None:
        scores = 1.0 - 2.0 / (tl.exp2(scores * squash) + 1.0)
    return scores


@triton.jit
def by_head(factor, scales_ptr, head):
    """One of `score_factors`, of products with a head's codes: the cap's where there is one, since it takes scores that
    are squashed already."""
    if scales_ptr is not None:
        factor *= tl.load(scales_ptr + head)
    return factor


@triton.jit
def nothing(ROWS: tl.constexpr):
    """The largest score of rows that have seen nothing yet. Finite, so that exp2(-inf - top) is 0."""
    return tl.full((ROWS,), -1e30, tl.float32)


@triton.jit
def weigh(scores, scale, top, cache_ptr):
    """The weights (rows, TOKENS) of a tile, relative to the largest scores so far; these; and the factor (rows,) of
    sums that are relative to `top`, the largest before."""
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale - headroom(cache_ptr))
    weights = tl.exp2(scores * scale - new_top[:, None])
    return weights, new_top, tl.exp2(top - new_top)


@triton.jit
def headroom(cache_ptr):
    """By how many powers of two the largest weight beside codes exceeds 1: weights in fp16 then reach as far below it
    as those in bf16 matter. Largest scores are kept that much lower, so sums of weights, sinks and merges agree."""
    HEADROOM: tl.constexpr = 12.0 if cache_ptr.dtype.element_ty == tl.int16 else 0.0
    return HEADROOM


@triton.jit
def add_values(weights, loaded, acc, PRECISION: tl.constexpr):
    """acc (rows, dims) + weights (rows, TOKENS) times a tile of values as loaded; of codes even dims first.

    Codes lie in words of two: tensor cores read values by columns, and nothing transposes bytes on the way from shared
    memory; words are. Two products, since the compiler then copies words straight to shared memory and reads them as
    tensor cores take them; halves of acc lie in registers of their own, so nothing moves. High tiles with words of
    less than 128 bytes a token have one product: Triton 3.6 computes wrong ones of such narrow tiles of values. Low
    tiles of less than 64 bytes do, too, since nobody has checked theirs."""
    if loaded.dtype == tl.int16:
        lower, upper = _unpack(loaded, weights.dtype)
        if loaded.shape[1] < 32 or (loaded.shape[1] < 64 and weights.shape[0] >= 64):
            values = tl.reshape(tl.permute(tl.join(lower, upper), (0, 2, 1)), (loaded.shape[0], acc.shape[1]))
            acc = tl.dot(weights, values, acc, input_precision=PRECISION)
        else:
            even, odd = _halves(acc)
            even = tl.dot(weights, lower, even, input_precision=PRECISION)
            odd = tl.dot(weights, upper, odd, input_precision=PRECISION)
            acc = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), acc.shape)
    else:
        acc = tl.dot(weights, loaded, acc, input_precision=PRECISION)
    return acc


# Codes of two words side by side, (a, b) and (c, d) -> (a, c) and (b, d) in fp16.
UNPACK_PAIRS = tl.constexpr("""{
    .reg .b32 bytes; .reg .b16 low, high;
    prmt.b32 bytes, $2, 0, 0x3120;
    mov.b32 {low, high}, bytes;
    cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high;
}""")


@triton.jit
def _unpack(words, DTYPE: tl.constexpr):
    """The lower and the upper codes of words, as numbers."""
    if tl.float16 == DTYPE and COMPILED:
        lower, upper = tl.inline_asm_elementwise(
            UNPACK_PAIRS, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        lower = (words & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
        upper = ((words >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)
    return lower, upper


@triton.jit
def _halves(x):
    """The first and the second half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def weigh_sinks(sinks_ptr, head, row, top, GROUP: tl.constexpr):
    """The weights of a KV head's sinks relative to scores `top` (rows,), which are for exp2; row = query * GROUP + head
    within the group. An explicit fma: it is rounded alike wherever it is compiled."""
    sinks = tl.load(sinks_ptr + head * GROUP + row % GROUP).to(tl.float32)
    return tl.exp2(tl.fma(sinks, 1.4426950408889634, -top))


@triton.jit
def apply_window(node_bits, node, num_nodes, MASK: tl.constexpr, WINDOW: tl.constexpr):
    """`node_bits` without the nodes of a tree that lie before each row's window, and the rows' depths.

    Kernels compare a window's bound with slots, which are positions but for the nodes of a tree. Of these,
    ancestors are a path with growing indices, so those in the window are the WINDOW highest bits; and none of them is
    hidden by the comparison, since no node's index is below its depth.
    """
    if MASK == "tree":
        count = _count_bits(node_bits)
        for limit in range(WINDOW, num_nodes):
            node_bits = tl.where(count > limit, node_bits & (node_bits - 1), node_bits)  # clears the lowest bit
        node = count - 1
    return node_bits, node


@triton.jit
def _count_bits(words):
    """Set bits of each int32 or int64 as int32, as in Warren, Hacker's Delight, figure 5-2. Right shifts copy the sign,
    which the masks drop."""
    BITS: tl.constexpr = words.dtype.primitive_bitwidth
    BYTES: tl.constexpr = 0x0101010101010101 >> (64 - BITS)  # 1 in each byte
    words = words - ((words >> 1) & (BYTES * 0x55))
    words = (words & (BYTES * 0x33)) + ((words >> 2) & (BYTES * 0x33))
    words = (words + (words >> 4)) & (BYTES * 0x0F)
    return (words * BYTES >> (BITS - 8)).to(tl.int32)


@triton.jit
def node_bit(position, length, end, PREFIX: tl.constexpr, WORD: tl.constexpr):
    """The bit of the node at each position; committed tokens: all bits (0 without PREFIX); past the end: 0."""
    shift = (position - length) & (WORD.primitive_bitwidth - 1)
    bit = tl.full(position.shape, 1, WORD) << shift.to(WORD)
    return tl.where(position < length, -1 if PREFIX else 0, tl.where(position < end, bit, 0))


@triton.jit
def after_codes(result, scale):
    """Results (rows, dims) over codes, even dims first -> those over values, in their order."""
    pairs = tl.reshape(result * scale, (result.shape[0], 2, result.shape[1] // 2))
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), result.shape)


@triton.jit
def query_cells(first_query, row, head, G: tl.constexpr, GROUP: tl.constexpr):
    """Indices into q and the result, which are ordered by query and head; row = query * GROUP + head within the
    group, from first_query on."""
    return (first_query + row // GROUP) * (G * GROUP) + head * GROUP + row % GROUP


@triton.jit
def store_results(
    scales_ptr, out_ptr, result, cells, valid, head, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Stores result (rows, BLOCK_D) in the `query_cells` of valid rows, scaled where values are codes."""
    if scales_ptr is not None:
        result = after_codes(result, tl.load(scales_ptr + G + head))
    dims = tl.arange(0, BLOCK_D)
    out_cells = cells.to(tl.int64)[:, None] * D + dims[None, :]
    tl.store(out_ptr + out_cells, result.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (dims < D)[None, :])
