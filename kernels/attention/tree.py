"""Attention of a proposal's nodes over a paged KV cache: flash-decoding for grouped queries, one launch a layer.

A request's N nodes times the query heads of one KV head are the rows of a tile. Long contexts are split over programs;
those that share a tile meet at a barrier and merge a share of its rows each, in a fixed order. Lengths and page tables
are read on the device and the grid depends on shapes only: nothing is planned on the host.

Letters: B requests, N nodes per request (root included), Q/G query and KV heads, D head dim, R rows and P pages of the
page table.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attention.dense import cap
from slipstream.kernels.attention.paged import (
    Blocks,
    Mask,
    add_values,
    apply_window,
    by_head,
    cells_in_page,
    fit_blocks,
    held_words,
    load_pages,
    load_queries,
    load_stages,
    node_bit,
    nothing,
    padded_dim,
    precision,
    query_cells,
    read_cache,
    score,
    score_factors,
    sees,
    store_results,
    tile_cells,
    weigh,
    weigh_sinks,
)
from slipstream.kernels.grid_sync import MAX_ROWS, all_resident, barrier_wait, barriers, done_counters, is_last_done
from slipstream.kernels.launch import Op, pdl_options, shared_memory
from slipstream.kernels.limits import MAX_NODES

PROGRAMS = 264  # two at a time on each of the 132 multiprocessors of an H100 or H200
SMALL_PROGRAMS = 396  # three each with 16 rows and heads of up to 128; more programs queue
FEW_REQUESTS = 4  # up to here the device is not full, and longer tiles mean fewer latencies in sequence
MIN_PART_TOKENS = 64  # of a shorter part, the start costs more than the reading
MIN_EVEN_PART_TOKENS = 2048  # of shorter parts, merging costs more than a half-empty last wave
MAX_SPLITS = 32  # parts of a context
MAX_MERGED_ROWS = 1024  # rows of partial results; storing and merging more costs more than it saves


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
    starts: Tensor | None = None,
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
    starts (R,) int64, by row of the page table: committed tokens before are not read. Multiples of 128, of every tile.
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
    if starts is not None:
        visible &= (positions >= starts[rows, None])[:, None]
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
    starts: Tensor | None = None,
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
    block_dim = padded_dim(D)
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
        q, keys, values, pages, rows, lengths, starts, ancestors if mask == "tree" else None, sinks, scales, out, lse,
        *_scratch(q.device, B * tiles, parts.max_parts, blocks.rows, block_dim, wait), *score_factors(scale, softcap),
        N, first_node, pages.shape[1], parts.tokens,
        G=G, D=D, BLOCK_D=block_dim, GROUP=group, PAGE=page_size, ROWS=blocks.rows, TOKENS=blocks.tokens,
        **choose_shares(blocks, parts, block_dim), WAIT=wait, MASK=mask, WINDOW=window, PREFIX=prefix,
        PRECISION=precision(q.dtype),
        WORD=tl.int32 if end <= 32 else tl.int64, OFFSET=tl.int32 if keys.numel() < 2**31 else tl.int64,
        num_warps=blocks.warps, num_stages=load_stages(blocks, scales), **pdl_options(q.device),
    )  # fmt: skip
    return out if lse is None else (out, lse)


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
    q_ptr, keys_ptr, values_ptr, pages_ptr, rows_ptr, lengths_ptr, starts_ptr, ancestors_ptr, sinks_ptr, scales_ptr,
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
    row_of_table = tl.load(rows_ptr + request)
    table = pages_ptr + row_of_table * table_width
    end = length + first_node + N
    lowest = _first_position(length, first_node, PREFIX, MASK, WINDOW)
    if starts_ptr is not None:
        lowest = tl.maximum(lowest, tl.load(starts_ptr + row_of_table).to(tl.int32))
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
    q = load_queries(q_ptr, query_cells(request * N, clipped, head, G, GROUP), D, BLOCK_D, PACKED)
    scale = by_head(scale, scales_ptr, head) if squash is None else scale
    squash = by_head(squash, scales_ptr, head) if squash is not None else None
    node_bits = _seen_nodes(ancestors_ptr, request * N + query, first_node + query, MASK, WORD)
    before = None
    if WINDOW is not None:
        node_bits, depth = apply_window(node_bits, first_node + query, first_node + N, MASK, WINDOW)
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
    row's window. Tokens before `lowest` are not read. Both are None without a window.
    """
    in_page = cells_in_page(head, G, D, BLOCK_D, PAGE, TOKENS)
    top = nothing(ROWS)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, q.shape[1]), tl.float32)
    page = load_pages(table, start, end, PAGE, TOKENS)
    for tile_start in range(start, stop, TOKENS):
        kv_cells, inside = tile_cells(page, in_page, tile_start, lowest, end, G, D, PAGE, OFFSET)
        page = load_pages(table, tile_start + TOKENS, end, PAGE, TOKENS)  # prefetch for the next tile
        k = tl.load(keys_ptr + kv_cells, mask=inside, other=0)
        scores = score(q, k, squash, PRECISION)
        if before is not None:
            position = tile_start + tl.arange(0, TOKENS)
            visible = (node_bits[:, None] & node_bit(position, length, end, PREFIX, node_bits.dtype)[None, :]) != 0
            scores = tl.where(visible & (position[None, :] > before[:, None]), scores, float("-inf"))
        elif tile_start + TOKENS > length or not PREFIX:  # a tile of committed tokens alone is visible to all rows
            bit = node_bit(tile_start + tl.arange(0, TOKENS), length, end, PREFIX, node_bits.dtype)
            scores = tl.where((node_bits[:, None] & bit[None, :]) != 0, scores, float("-inf"))
        weights, top, rescale = weigh(scores, scale, top, keys_ptr)
        total = total * rescale + tl.sum(weights, axis=1)
        v = tl.load(values_ptr + kv_cells, mask=inside, other=0)
        acc = add_values(weights.to(q.dtype), v, acc * rescale[:, None], PRECISION)
    total = tl.where(total > 0, total, 1.0)  # 0: the row sees nothing in this part, which then weighs exp2(-1e30)
    return acc / total[:, None], top + tl.log2(total)


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
        top = nothing(SHARE)
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
    cells = query_cells(request * N, first_row + row, head, G, GROUP)
    valid = row < num_rows
    if sinks_ptr is not None:
        result = result / (1.0 + weigh_sinks(sinks_ptr, head, first_row + row, log_sum, GROUP))[:, None]
    store_results(scales_ptr, out_ptr, result, cells, valid, head, G, D, BLOCK_D)
    if lse_ptr is not None:
        tl.store(lse_ptr + cells, log_sum * 0.6931471805599453, mask=valid)
