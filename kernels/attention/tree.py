"""Attention of a proposal's nodes over a paged KV cache: flash-decoding for grouped queries, one launch a layer.

A request's N nodes times the query heads of one KV head are the rows of a tile. Long contexts are split over programs;
those that share a tile meet at a barrier and merge a share of its rows each, in a fixed order. Lengths and page tables
are read on the device and the grid depends on shapes only: nothing is planned on the host.

A cache of e4m3 codes (kernels/kv/fp8.py) is read as fp16, which holds every code and is one instruction for two; the
scale of a head's keys becomes a factor of its scores, that of its values of its results.

Letters: B requests, N nodes per request (root included), Q/G query and KV heads, D head dim, R rows and P pages of the
page table.
"""

import math
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attention.dense import cap
from slipstream.kernels.grid_sync import MAX_ROWS, all_resident, barrier_wait, barriers, done_counters, is_last_done
from slipstream.kernels.kv.fp8 import E4M3, decode
from slipstream.kernels.launch import COMPILED, Op, pdl_options, shared_memory
from slipstream.kernels.limits import MAX_NODES
from slipstream.kernels.speculation.verify import unpack

Mask = Literal["causal", "tree", "block"]

MAX_HEAD_DIM = 512  # wider tiles do not fit in registers and shared memory
PROGRAMS = 264  # two at a time on each of the 132 multiprocessors of an H100 or H200
SMALL_PROGRAMS = 396  # three each with 16 rows and heads of up to 128; more programs queue
FEW_REQUESTS = 4  # up to here the device is not full, and longer tiles mean fewer latencies in sequence
MIN_PART_TOKENS = 64  # of a shorter part, the start costs more than the reading
MIN_EVEN_PART_TOKENS = 2048  # of shorter parts, merging costs more than a half-empty last wave
MAX_SPLITS = 32  # parts of a context
MAX_MERGED_ROWS = 1024  # rows of partial results; storing and merging more costs more than it saves


class Blocks(NamedTuple):
    """A tile of the work."""

    rows: int  # query rows
    tokens: int  # KV tokens
    warps: int
    stages: int  # of the load pipeline


class Parts(NamedTuple):
    """How contexts are split over programs."""

    max_parts: int
    tokens: int = MIN_PART_TOKENS  # of a part, at least


@Op
def tree_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    rows: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None,
    mask: Mask,
    scale: float,
    *,
    first_node: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    prefix: bool = True,
    return_lse: bool = False,
    scales: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """N <= 64 new nodes per request attend to the committed tokens and to each other.

    q (B, N, Q, D) rotated, contiguous; keys, values (num_pages, page_size, G, D) one layer of the cache, which already
    holds node i's KV, in the request's slot lengths + i; pages (R, P) int64 page table; rows (B,) int64
    the requests' rows of it; lengths (B,) int64 committed tokens.
    mask: "causal" node i sees nodes 0..i; "tree" those of its bits in ancestors (B, N) int64: itself and all its
    ancestors, whose indices are smaller; "block" all N. prefix=False leaves the committed tokens out.
    window: a query at position p sees, of what the mask lets it see, positions above p - window. A node's position is
    lengths plus its depth: its index, or with "tree" the number of its ancestors. Up to position lengths - window
    nothing is read, so pages there may be another request's.
    first_node: only the last N of first_node + N <= 64 nodes are queries; row i of q and of ancestors is node
    first_node + i, and the KV of the earlier nodes is in slots lengths + 0..first_node-1.
    softcap: scores s become softcap * tanh(s / softcap) before the mask (Gemma 2, arXiv 2408.00118).
    sinks (Q,), of any floating dtype: one more score of each head, which has no value (gpt-oss): it takes a share of
    the softmax. Not with return_lse: a sink joins when all parts of a softmax are merged (`add_sinks`).
    scales (2, G) fp32, of keys and of values: the cache holds e4m3 codes, each its number / scale.
    Returns (B, N, Q, D) in q's dtype and, with return_lse, the log-sum-exp (B, N, Q) fp32 of the scaled scores, natural
    logarithm: exp(lse) weighs results over disjoint keys when they are combined.
    """
    B, N, Q, D = q.shape
    page_size, G = keys.shape[1:3]
    assert sinks is None or not return_lse
    end = first_node + N
    queries = torch.arange(first_node, end, device=q.device)  # (N,) nodes
    positions = torch.arange(int(lengths.max()) + end, device=q.device)  # (S,)
    node = positions - lengths[:, None]  # (B, S): which node a slot holds; negative for committed tokens
    visible = ((node < end) & (prefix | (node >= 0)))[:, None] & sees(node, queries, ancestors, mask, window)
    is_read = visible.any(dim=1)  # (B, S)
    slots = pages[rows][:, positions // page_size] * page_size + positions % page_size  # (B, S)
    slots = slots.masked_fill(~is_read, 0)
    k, v = (x.masked_fill(~is_read[:, :, None, None], 0) for x in read_cache(keys, values, slots, scales))
    scores = cap(torch.einsum("bngrd,bsgd->bngrs", q.float().view(B, N, G, Q // G, D), k) * scale, softcap)
    scores = scores.masked_fill(~visible[:, :, None, None], -torch.inf)
    lse = scores.logsumexp(dim=-1)  # (B, N, G, Q / G)
    if sinks is not None:
        lse = lse.logaddexp(sinks.float().view(G, Q // G))
    out = torch.einsum("bngrs,bsgd->bngrd", (scores - lse[..., None]).exp(), v).reshape(B, N, Q, D).to(q.dtype)
    return (out, lse.reshape(B, N, Q)) if return_lse else out


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


@tree_attention.kernel()
def tree_attention_triton(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    rows: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None,
    mask: Mask,
    scale: float,
    *,
    first_node: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    prefix: bool = True,
    return_lse: bool = False,
    scales: Tensor | None = None,
    blocks: Blocks | None = None,
    parts: Parts | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`tree_attention` by the kernel; `blocks` and `parts` replace the choice made here (benchmarks, tests)."""
    B, N, Q, D = q.shape
    (page_size, G), group = keys.shape[1:3], Q // keys.shape[2]
    end = first_node + N  # nodes
    assert end <= MAX_NODES
    assert group * G == Q
    keys, values = held_words(q, keys, values, scales)
    assert all(x.is_contiguous() for x in (q, keys, values, pages, rows, lengths))
    assert mask != "tree" or (ancestors is not None and ancestors.is_contiguous())
    assert window is None or window > 0
    assert sinks is None or (sinks.is_contiguous() and not return_lse)
    block_dim = max(16, triton.next_power_of_2(D))
    if blocks is None:
        blocks = choose_blocks(B, N * group, D, q.element_size())
        blocks = fit_blocks(blocks, block_dim, q.element_size(), shared_memory(q.device))
    tiles = G * triton.cdiv(N * group, blocks.rows)  # of one request
    capacity = pages.shape[1] * page_size if prefix else end
    if window is not None:
        capacity = min(capacity, window + end + blocks.tokens)
    parts = parts or choose_parts(B, tiles, blocks.rows, capacity, D)
    out = torch.empty_like(q)
    lse = torch.empty(B, N, Q, dtype=torch.float32, device=q.device) if return_lse else None
    wait = all_resident(q.device, parts.max_parts)
    attend_kernel[(parts.max_parts, tiles, B)](
        q, keys, values, pages, rows, lengths, ancestors if mask == "tree" else None, sinks, scales, out, lse,
        *_scratch(q.device, B * tiles, parts.max_parts, blocks.rows, block_dim, wait), *score_factors(scale, softcap),
        N, first_node, pages.shape[1], parts.tokens,
        G=G, D=D, BLOCK_D=block_dim, GROUP=group, PAGE=page_size, ROWS=blocks.rows, TOKENS=blocks.tokens,
        **choose_shares(blocks, parts, block_dim), WAIT=wait, MASK=mask, WINDOW=window, PREFIX=prefix,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",  # ignored for 16-bit operands
        WORD=tl.int32 if end <= 32 else tl.int64, OFFSET=tl.int32 if keys.numel() < 2**31 else tl.int64,
        num_warps=blocks.warps, num_stages=load_stages(blocks, scales), **pdl_options(q.device),
    )  # fmt: skip
    return out if lse is None else (out, lse)


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
    keys before it, for `_score`."""
    if softcap is None:
        return scale / math.log(2), None
    return softcap / math.log(2), 2 * scale / (softcap * math.log(2))


def choose_blocks(B: int, num_rows: int, D: int, element_size: int) -> Blocks:
    """`num_rows`: N * Q / G query rows per KV head; rows beyond a tile's read the KV once more.

    A stage of 64 tokens is 32 KB of K and V at D = 128. Two in flight in each of two or three programs per
    multiprocessor hide the memory's latency several times over. Wider heads get fewer tokens, and larger
    accumulators more warps, to stay within registers and shared memory.
    """
    rows = min(max(16, triton.next_power_of_2(num_rows)), 128)
    if element_size == 4:  # exact products take no tensor cores: for tests and small models
        return Blocks(min(rows, 16), 16, 4, 2)
    if D > 128:
        rows = min(rows, 64)
        return Blocks(rows, 32, 8 if rows * D > 64 * 128 else 4, 3 if D <= 256 else 2)
    if rows == 16 and B <= FEW_REQUESTS:
        return Blocks(rows, 128, 4, 2)
    return Blocks(rows, 64, 8 if rows == 128 else 4, 3)


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


def choose_parts(B: int, tiles: int, rows: int, capacity: int, D: int) -> Parts:
    """How contexts of up to `capacity` tokens are split, where a request has `tiles` of `rows` rows.

    As many parts as run at once; if whole contexts alone are more programs, as many as fill the last wave best. The
    kernel uses fewer parts for short contexts. The choice, and with it a result's rounding, depends on shapes only, and
    on the batch size only through the next power of two, so padding a batch changes nothing.
    """
    programs = triton.next_power_of_2(B) * tiles
    small = rows == 16 and D <= 128
    if programs > PROGRAMS and small:
        numbers = range(1, min(3, triton.cdiv(capacity, MIN_EVEN_PART_TOKENS)) + 1)
        return Parts(max(numbers, key=lambda number: _fullness(programs * number)), MIN_EVEN_PART_TOKENS)
    max_parts = (SMALL_PROGRAMS if small else PROGRAMS) // programs
    return Parts(max(1, min(max_parts, MAX_SPLITS, MAX_MERGED_ROWS // rows, triton.cdiv(capacity, MIN_PART_TOKENS))))


def _fullness(programs: int) -> float:
    """Share of the device that programs of 16 rows fill, averaged over their waves."""
    waves = programs / SMALL_PROGRAMS
    return waves / math.ceil(waves)


def choose_shares(blocks: Blocks, parts: Parts, block_dim: int) -> dict[str, int]:
    """SHARE, the rows that a program merges, and AT_ONCE, the parts that it loads together (64 registers a thread)."""
    share = max(1, blocks.rows >> (parts.max_parts.bit_length() - 1))
    fitting = 64 * 32 * blocks.warps // (share * block_dim)
    return {"SHARE": share, "AT_ONCE": max(1, min(fitting, parts.max_parts, 16))}


def _scratch(
    device: torch.device, tiles: int, splits: int, rows: int, block_dim: int, wait: bool
) -> tuple[Tensor | None, ...]:
    """Partial results (tiles, splits, rows, D) fp32, their log2-sum-exp2 (tiles, splits, rows), and counters."""
    if splits == 1:
        return None, None, None
    assert tiles <= MAX_ROWS
    partial = torch.empty(tiles, splits, rows, block_dim, dtype=torch.float32, device=device)
    return partial, partial.new_empty(tiles, splits, rows), (barriers if wait else done_counters)(device)


@triton.jit(do_not_specialize=["N", "first_node", "table_width", "min_part"])
def attend_kernel(
    q_ptr, keys_ptr, values_ptr, pages_ptr, rows_ptr, lengths_ptr, ancestors_ptr, sinks_ptr, scales_ptr,
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, counters_ptr, scale, squash, N, first_node, table_width, min_part,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, SHARE: tl.constexpr, AT_ONCE: tl.constexpr, WAIT: tl.constexpr,
    MASK: tl.constexpr, WINDOW: tl.constexpr, PREFIX: tl.constexpr, PRECISION: tl.constexpr, WORD: tl.constexpr,
    OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of one KV head and request (axes 1 and 2) over one part of its context (axis 0).
    scale, squash: `score_factors`. SHARE, AT_ONCE, WAIT: how programs that share rows merge, see _merge; SHARE is ROWS
    where axis 0 has one program."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(2)
    row_tiles = tl.num_programs(1) // G
    head = tl.program_id(1) // row_tiles
    length = tl.load(lengths_ptr + request).to(tl.int32)
    table = pages_ptr + tl.load(rows_ptr + request) * table_width
    end = length + first_node + N
    lowest = _first_position(length, first_node, PREFIX, MASK, WINDOW)
    begin = lowest // TOKENS * TOKENS
    tiles = tl.cdiv(end - begin, TOKENS)
    tiles_each = tl.cdiv(tiles, tl.minimum(tl.num_programs(0), tl.cdiv(end - begin, min_part)))
    parts = tl.cdiv(tiles, tiles_each)
    first = tl.program_id(0) * tiles_each
    first_row = tl.program_id(1) % row_tiles * ROWS
    num_rows = tl.minimum(N * GROUP - first_row, ROWS)
    if (first >= tiles) & ((parts == 1) | (not WAIT) | (tl.program_id(0) * SHARE >= num_rows)):
        return  # other programs without a part help to merge
    PACKED: tl.constexpr = 2 if scales_ptr is not None else 1  # numbers that an element of the cache holds
    row = tl.arange(0, ROWS)
    clipped = first_row + tl.minimum(row, num_rows - 1)  # rows past the last repeat it and are not stored
    query = clipped // GROUP
    q = _load_queries(q_ptr, _row_of(request, N, head, clipped, G, GROUP), D, BLOCK_D, PACKED)
    scale = _by_head(scale, scales_ptr, head) if squash is None else scale
    squash = _by_head(squash, scales_ptr, head) if squash is not None else None
    node_bits = _seen_nodes(ancestors_ptr, request * N + query, first_node + query, MASK, WORD)
    before = None
    if WINDOW is not None:
        node_bits, depth = _apply_window(node_bits, first_node + query, first_node + N, MASK, WINDOW)
        before = length + depth - WINDOW
    acc, log_sum = _attend_tokens(
        q, node_bits, keys_ptr, values_ptr, table, head, begin + first * TOKENS,
        tl.minimum(begin + (first + tiles_each) * TOKENS, end), length, end, scale, squash,
        lowest if WINDOW is not None else None, before,
        G, D // PACKED, BLOCK_D // PACKED, PAGE, ROWS, TOKENS, PREFIX, PRECISION, OFFSET,
    )  # fmt: skip
    if PDL:  # not earlier: the next kernel's programs would occupy places that this kernel's still need
        tl.extra.cuda.gdc_launch_dependents()
    if SHARE < ROWS:
        tile = request * tl.num_programs(1) + tl.program_id(1)
        if parts > 1:
            partial = tile.to(tl.int64) * tl.num_programs(0) * ROWS
            _merge(
                acc, log_sum, partial_ptr + partial * BLOCK_D, partial_lse_ptr + partial, counters_ptr + tile, parts,
                sinks_ptr, scales_ptr, out_ptr, lse_ptr, request, N, head, first_row, num_rows,
                G, D, BLOCK_D, GROUP, ROWS, SHARE, AT_ONCE, WAIT,
            )  # fmt: skip
            num_rows = 0
    _store(sinks_ptr, scales_ptr, out_ptr, lse_ptr, acc, log_sum, request, N, head, first_row, row, num_rows,
           G, D, BLOCK_D, GROUP)  # fmt: skip


@triton.jit
def _first_position(length, first_node, PREFIX: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr):
    """The first position that a row of the request may see; rows of a tree may have any depth."""
    lowest = 0 if PREFIX else length
    if WINDOW is not None:
        lowest = tl.maximum(lowest, length + (0 if MASK == "tree" else first_node) + 1 - WINDOW)
    return lowest


@triton.jit
def _attend_tokens(
    q, node_bits, keys_ptr, values_ptr, table, head, start, stop, length, end, scale, squash, lowest, before,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, PREFIX: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Attention of q (ROWS, dims) to the tokens start..stop - 1, and its log2-sum-exp2 (ROWS,). D, BLOCK_D count
    elements of the cache.

    start is a multiple of TOKENS, so a tile is whole pages or part of one. before (ROWS,): the last position before a
    row's window. Tokens before `lowest` are not read: their pages may be another request's, and NaN times a weight of 0
    is NaN. Both are None without a window.
    """
    dims = tl.arange(0, BLOCK_D)[None, :]
    token = tl.arange(0, TOKENS)
    in_page = (token % PAGE * G + head)[:, None] * D + dims  # the same in every tile, so computed once
    top = tl.full((ROWS,), -1e30, tl.float32)  # finite, so exp2(-inf - top) is 0 where a row sees nothing yet
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, q.shape[1]), tl.float32)
    page = _load_pages(table, start, end, PAGE, TOKENS)
    for tile_start in range(start, stop, TOKENS):
        first_cell = page.to(OFFSET) * (PAGE * G * D)
        if PAGE > TOKENS:
            first_cell += tile_start % PAGE * (G * D)
        kv_cells = first_cell[:, None] + in_page
        inside = (token < end - tile_start)[:, None] & (dims < D)
        if before is not None:
            inside &= (token >= lowest - tile_start)[:, None]
        page = _load_pages(table, tile_start + TOKENS, end, PAGE, TOKENS)  # prefetch for the next tile
        k = tl.load(keys_ptr + kv_cells, mask=inside, other=0)
        scores = _score(q, k, squash, PRECISION)
        if before is not None:
            position = tile_start + token
            visible = (node_bits[:, None] & _node_bit(position, length, end, PREFIX, node_bits.dtype)[None, :]) != 0
            scores = tl.where(visible & (position[None, :] > before[:, None]), scores, float("-inf"))
        elif tile_start + TOKENS > length or not PREFIX:  # a tile of committed tokens alone is visible to all rows
            bit = _node_bit(tile_start + token, length, end, PREFIX, node_bits.dtype)
            scores = tl.where((node_bits[:, None] & bit[None, :]) != 0, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale - _headroom(keys_ptr))
        weights = tl.exp2(scores * scale - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weights, axis=1)
        v = tl.load(values_ptr + kv_cells, mask=inside, other=0)
        acc = _add_values(weights.to(q.dtype), v, acc * rescale[:, None], PRECISION)
        top = new_top
    total = tl.where(total > 0, total, 1.0)  # 0: the row sees nothing in this part, which then weighs exp2(-1e30)
    return acc / total[:, None], top + tl.log2(total)


@triton.jit
def _load_queries(q_ptr, rows, D: tl.constexpr, BLOCK_D: tl.constexpr, PACKED: tl.constexpr):
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
def _after_codes(result, scale):
    """Results (rows, dims) over codes, even dims first -> those over values, in their order."""
    pairs = tl.reshape(result * scale, (result.shape[0], 2, result.shape[1] // 2))
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), result.shape)


@triton.jit
def _add_values(weights, loaded, acc, PRECISION: tl.constexpr):
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


@triton.jit
def _halves(x):
    """The first and the second half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


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
def _headroom(cache_ptr):
    """By how many powers of two the largest weight beside codes exceeds 1: weights in fp16 then reach as far below it
    as those in bf16 matter. Largest scores are kept that much lower, so sums of weights, sinks and merges agree."""
    HEADROOM: tl.constexpr = 12.0 if cache_ptr.dtype.element_ty == tl.int16 else 0.0
    return HEADROOM


@triton.jit
def _by_head(factor, scales_ptr, head):
    """One of `score_factors`, of products with a head's codes: the cap's where there is one, since it takes scores that
    are squashed already."""
    if scales_ptr is not None:
        factor *= tl.load(scales_ptr + head)
    return factor


@triton.jit
def _score(q, k, squash, PRECISION: tl.constexpr):
    """q k, of a tile k as loaded, or, with a soft cap, the tanh of its argument, which is q k * squash * ln 2 / 2. The
    kernels multiply by the cap later, with what makes exp2 of exp. tanh x = 1 - 2 / (exp 2x + 1) holds in both
    limits.

    Two products of codes, as in `_add_values`. Joined, Triton would add dims in another order in tiles of less than 64
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
def _weigh_sinks(sinks_ptr, head, row, top, GROUP: tl.constexpr):
    """The weights of a KV head's sinks relative to scores `top` (rows,), which are for exp2; row = query * GROUP + head
    within the group. An explicit fma: it is rounded alike wherever it is compiled."""
    sinks = tl.load(sinks_ptr + head * GROUP + row % GROUP).to(tl.float32)
    return tl.exp2(tl.fma(sinks, 1.4426950408889634, -top))


@triton.jit
def _load_pages(table, start, end, PAGE: tl.constexpr, TOKENS: tl.constexpr):
    """(TOKENS,) int32 page ids of the tokens from start on, each loaded once; 0 past the end."""
    COUNT: tl.constexpr = max(TOKENS // PAGE, 1)
    index = tl.arange(0, COUNT)
    ids = tl.load(table + start // PAGE + index, mask=start + index * PAGE < end, other=0).to(tl.int32)
    return tl.reshape(tl.broadcast_to(ids[:, None], (COUNT, TOKENS // COUNT)), (TOKENS,))


@triton.jit
def _seen_nodes(ancestors_ptr, row, node, MASK: tl.constexpr, WORD: tl.constexpr):
    """Bit j of a row: its node sees node j. Never 0, so `node_bits & -1` makes committed tokens visible."""
    if MASK == "tree":
        node_bits = tl.load(ancestors_ptr + row).to(WORD)
    elif MASK == "causal":
        bit = tl.full(node.shape, 1, WORD) << node.to(WORD)
        node_bits = bit | (bit - 1)
    else:
        node_bits = tl.full(node.shape, -1, WORD)
    return node_bits


@triton.jit
def _apply_window(node_bits, node, num_nodes, MASK: tl.constexpr, WINDOW: tl.constexpr):
    """`node_bits` without the nodes of a tree that lie before each row's window, and the rows' depths.

    _attend_tokens compares a window's bound with slots, which are positions but for the nodes of a tree. Of these,
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
def _node_bit(position, length, end, PREFIX: tl.constexpr, WORD: tl.constexpr):
    """The bit of the node at each position; committed tokens: all bits (0 without PREFIX); past the end: 0."""
    shift = (position - length) & (WORD.primitive_bitwidth - 1)
    bit = tl.full(position.shape, 1, WORD) << shift.to(WORD)
    return tl.where(position < length, -1 if PREFIX else 0, tl.where(position < end, bit, 0))


@triton.jit
def _merge(
    acc, log_sum, partial_ptr, partial_lse_ptr, counter_ptr, parts, sinks_ptr, scales_ptr, out_ptr, lse_ptr,
    request, N, head, first_row, num_rows,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    SHARE: tl.constexpr, AT_ONCE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Stores the merged rows of the first `parts` programs along axis 0, those that have a part.

    WAIT: each of the first programs, with or without a part, merges SHARE rows once all parts are stored; they are
    neighbours in the grid, so all of them run. Otherwise the last program to finish merges all rows.
    AT_ONCE: parts whose loads are issued together.
    """
    row = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    own_cells = tl.program_id(0) * ROWS + row
    is_row = row < tl.where(tl.program_id(0) < parts, num_rows, 0)
    tl.store(partial_ptr + own_cells[:, None] * BLOCK_D + dims[None, :], acc, mask=is_row[:, None])
    tl.store(partial_lse_ptr + own_cells, log_sum, mask=is_row)
    if WAIT:
        start = tl.program_id(0) * SHARE
        step = ROWS
        programs = tl.maximum(parts, tl.cdiv(num_rows, SHARE))
        barrier_wait(counter_ptr, tl.program_id(0) == 0, programs, start < num_rows)
    else:
        start = tl.where(is_last_done(counter_ptr, parts), 0, ROWS)
        step = SHARE
    for first in range(start, num_rows, step):
        shared = first + tl.arange(0, SHARE)
        top = tl.full((SHARE,), -1e30, tl.float32)
        total = tl.zeros((SHARE,), tl.float32)
        merged = tl.zeros((SHARE, BLOCK_D), tl.float32)
        for begin in range(0, parts, AT_ONCE):
            for index in tl.static_range(AT_ONCE):
                valid = shared < tl.where(begin + index < parts, num_rows, 0)
                cells = (begin + index) * ROWS + shared
                lse = tl.load(partial_lse_ptr + cells, mask=valid, other=-1e30, cache_modifier=".cg")
                cells = cells[:, None] * BLOCK_D + dims[None, :]
                result = tl.load(partial_ptr + cells, mask=valid[:, None], other=0.0, cache_modifier=".cg")
                new_top = tl.maximum(top, lse)
                weight = tl.exp2(lse - new_top)
                rescale = tl.exp2(top - new_top)
                total = total * rescale + weight
                merged = merged * rescale[:, None] + result * weight[:, None]
                top = new_top
        merged = merged / total[:, None]
        lse = top + tl.log2(total)
        _store(
            sinks_ptr, scales_ptr, out_ptr, lse_ptr, merged, lse, request, N, head, first_row, shared, num_rows,
            G, D, BLOCK_D, GROUP,
        )  # fmt: skip


@triton.jit
def _store(
    sinks_ptr, scales_ptr, out_ptr, lse_ptr, result, log_sum, request, N, head, first_row, row, num_rows,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Stores result (R, BLOCK_D) and log_sum (R,) of the tile's rows `row` (R,) below num_rows, which are final:
    their heads' sinks join the softmax here."""
    dims = tl.arange(0, BLOCK_D)
    out_row = _row_of(request, N, head, first_row + row, G, GROUP)
    valid = row < num_rows
    if sinks_ptr is not None:
        result = result / (1.0 + _weigh_sinks(sinks_ptr, head, first_row + row, log_sum, GROUP))[:, None]
    if scales_ptr is not None:
        result = _after_codes(result, tl.load(scales_ptr + G + head))
    cells = out_row.to(tl.int64)[:, None] * D + dims[None, :]
    tl.store(out_ptr + cells, result.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (dims < D)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + out_row, log_sum * 0.6931471805599453, mask=valid)


@triton.jit
def _row_of(request, N, head, row, G: tl.constexpr, GROUP: tl.constexpr):
    """Index into q and the result, ordered by request, node, head; row = node * GROUP + head within the group."""
    return (request * N + row // GROUP) * (G * GROUP) + head * GROUP + row % GROUP
