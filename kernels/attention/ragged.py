"""Attention of a ragged pass over a paged KV cache: nodes of decoding requests and chunks of prompts, any number each.

The rows of a pass lie in segments, one per request. Tiles of a segment's queries attend to its context part by part.
Where a part begins depends on positions alone, a part's sum starts anew, and parts are added in their order; so a row's
bits do not depend on the rest of the pass, on the height of its tile, or on how many programs share its context. Nodes
of a tree lie in the cache in another order than text; with `paths` they are read in the text's order all the same.

A small kernel plans once per pass, on the device: it lists the tiles and cuts the list, by tokens to read, into equal
ranges for a fixed number of programs. A tile that lies in several ranges is merged by the last of its programs.

Letters: T rows of the pass, S segments, Q/G query and KV heads, D head dim, R request slots, P pages of a request.
"""

import functools
import math
from bisect import bisect_right
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attention.dense import cap, softmax_beside
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
from slipstream.kernels.attention.paths import PATH_NODES, Paths
from slipstream.kernels.gemm.tiling import PROGRAMS
from slipstream.kernels.grid_sync import MAX_ROWS, done_counters
from slipstream.kernels.launch import Op, pdl_options, prefetch_lines, shared_memory, wait_for_inputs
from slipstream.kernels.limits import MAX_NODES

QUANTUM: tl.constexpr = tl.constexpr(128)  # tokens of the shortest part, and the unit in which work is shared out
MOST_PARTS: tl.constexpr = tl.constexpr(24)  # of the tokens before a tile's first query; longer contexts, longer parts
FIRST_PARTS: tl.constexpr = tl.constexpr(QUANTUM.value * MOST_PARTS.value)  # places up to which parts are shortest
LONGEST: tl.constexpr = tl.constexpr(18)  # doublings of a part: of contexts of 2**29 tokens
SCRATCH_PARTS = MOST_PARTS.value + 2  # and one that holds new tokens, and one that a window cuts
# Tokens from which a tile of nodes may be shared: to merge takes as long as to read two tiles of 64.
LEAST_SHARED: tl.constexpr = tl.constexpr(192)
FEW_TOKENS: tl.constexpr = tl.constexpr(1024)  # below, each quantum of them, whole or not, may have its own program
EVEN: tl.constexpr = tl.constexpr(135)  # per cent of the mean: the longest tile up to which each has a program
LONG_RANGE: tl.constexpr = tl.constexpr(12)  # quanta: longer ranges are cut for the sake of an even load
MOST_AT_ONCE = 16  # parts that are merged at once: the loop is unrolled, and of small heads takes minutes to compile
SLACK: tl.constexpr = tl.constexpr(8)  # a program takes the rest of a tile as well if it is 1 / SLACK of a range
FILLED = 0.8  # of the device, at least, by tiles that have a program each
WAVES = 2  # ranges for each program that runs at a time, at most
BUSY_NODES = 1.6  # programs of a multiprocessor that read about as fast as the memory allows
BUSY_PROMPTS = 0.5  # programs of a multiprocessor that compute so fast that prompts' sums need not be stored
FEW_REQUESTS = 4  # up to here longer pipelines pay more than more programs
MANY_QUERIES = 1 << 15  # times heads: from here tiles of 128 rows, which read the KV half as often, fill the device
PREFETCHED = 128  # places of a range, of tiles so low that they wait for memory
INTERPRETED_PROCESSORS = 2  # multiprocessors that the interpreter stands for

FIELDS: tl.constexpr = tl.constexpr(16)  # of a tile's record: the next ones
ROW: tl.constexpr = tl.constexpr(0)  # first row of the pass
COUNT: tl.constexpr = tl.constexpr(1)  # queries
POSITION: tl.constexpr = tl.constexpr(2)  # place of the first query's token
BASE: tl.constexpr = tl.constexpr(3)  # place that decides the parts; a segment of nodes: its committed tokens
SLOT: tl.constexpr = tl.constexpr(4)  # request slot
PART: tl.constexpr = tl.constexpr(5)  # logarithm to base 2 of a part's tokens
SHARED: tl.constexpr = tl.constexpr(6)  # 0: one program takes it; else 1 + where its partial results go
START: tl.constexpr = tl.constexpr(7)  # quanta of all tiles before it; if each has a program, as of the longest
QUANTA: tl.constexpr = tl.constexpr(8)  # its own
LENGTH: tl.constexpr = tl.constexpr(9)  # quanta of every program's range
INDEX: tl.constexpr = tl.constexpr(10)  # the tile's
USED: tl.constexpr = tl.constexpr(11)  # fields
NO_TILE: tl.constexpr = tl.constexpr(2**31 - 1)  # START after the last tile


class Segments(NamedTuple):
    """Which rows of a pass belong to which request. All but the ints are on the device."""

    starts: Tensor  # (S + 1,) int32 first row of each segment; starts[S]: rows in use
    slots: Tensor  # (S,) int64 request slots
    lengths: Tensor  # (S,) int64 committed tokens: row i of a segment is the token at place lengths + i
    num_decoding: int  # segments of nodes, which come first; the others are chunks of prompts
    most_nodes: int  # rows of a segment of nodes, at most; up to 64
    usual_nodes: int = 64  # that most segments have, at most: sizes tiles, if below most_nodes
    by_path: bool = False  # whether `ragged_attention` gets the paths of the nodes' trees: sizes tiles, too


class Tiles(NamedTuple):
    """Tiles of equal height and the programs that share them, the same for every KV head."""

    records: Tensor  # (tiles + 1, FIELDS) int32; the one after the last has START NO_TILE, then they hold anything
    ranges: Tensor  # (programs, FIELDS) int32: of the tile in which each program's range begins
    at_a_time: int  # programs
    most_shared: int  # tiles: those that hold more than 1 / most_shared of all quanta
    queries: int  # of a tile, at most
    blocks: Blocks
    solo_range: tuple[int, int] = (1, 0)  # of so many tiles each has a program, unless some are far longer than others


class Work(NamedTuple):
    """Work of a pass's programs in each layer; None: there are no segments of the kind."""

    nodes: Tiles | None
    prompts: Tiles | None


@Op
def ragged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    segments: Segments,
    ancestors: Tensor | None,
    mask: Mask,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: Tensor | None = None,
    paths: Paths | None = None,  # noqa: ARG001  how the kernel adds, not what it gives
    work: Work | None = None,  # noqa: ARG001
    is_old_plan: bool = False,  # noqa: ARG001
) -> Tensor:
    """Rows attend to the committed tokens of their segment's request and to rows of their segment.

    q (T, Q, D) rotated, contiguous; keys, values (num_pages, page_size, G, D) one layer of the cache, which already
    holds the KV of every row in use; pages (R, P) int64 page table.
    mask: "causal" row i of a segment sees places 0..lengths + i; "tree" a node sees all committed tokens and, of its
    segment's nodes, those of its bits in ancestors (T,) int64: itself and all its ancestors, whose indices are
    smaller. Chunks of prompts are causal in either case.
    window: a query at position p sees, of what the mask lets it see, positions above p - window. A row's position is
    its place, a tree's node's lengths plus the number of its ancestors. Up to place lengths - window nothing is read.
    softcap, sinks, scales: as in `tree_attention`.
    paths: of `trace_paths` for the same segments; then the bits of a tree's nodes are those that they have in a chain.
    work: of `plan_work` for the same segments, sizes and window; None: it is planned here. is_old_plan: a kernel
    without `pdl_options` has run since it was planned; then it is read while the kernel before these still runs.
    Returns (T, Q, D) in q's dtype; rows not in use hold anything.
    """
    out = torch.zeros_like(q)
    page_size = keys.shape[1]
    group = q.shape[1] // keys.shape[2]
    starts = segments.starts.tolist()
    for s, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        if start == end:
            continue
        length = segments.lengths[s : s + 1]
        rows = slice(start, end)
        positions = torch.arange(int(length) + end - start, device=q.device)
        nodes = positions - length[:, None]
        queries = torch.arange(end - start, device=q.device)
        is_tree = mask == "tree" and s < segments.num_decoding
        bits = ancestors[None, rows] if is_tree and ancestors is not None else None
        visible = sees(nodes, queries, bits, "tree" if is_tree else "causal", window)[0]  # (N, places)
        read = visible.any(dim=0)
        places = pages[segments.slots[s], positions // page_size] * page_size + positions % page_size
        places = places.masked_fill(~read, 0)
        k, v = (x.masked_fill(~read[:, None, None], 0) for x in read_cache(keys, values, places, scales))
        scores = torch.einsum("ngrd,sgd->ngrs", q[rows].float().unflatten(1, (-1, group)), k) * scale
        scores = cap(scores, softcap).masked_fill(~visible[:, None, None], -torch.inf)
        weights = softmax_beside(scores, None if sinks is None else sinks.view(-1, group))
        out[rows] = torch.einsum("ngrs,sgd->ngrd", weights, v).flatten(1, 2).to(q.dtype)
    return out


@Op
def plan_work(
    segments: Segments, T: int, Q: int, G: int, D: int, dtype: torch.dtype, *, window: int | None = None
) -> Work:
    """Lists the tiles of a pass of T rows, in use or not, and shares them out: for all layers with these heads, queries
    of this dtype and this window."""
    work = allot_work(segments, T, Q, G, D, dtype)
    num_segments = len(segments.slots)
    decoding = segments.num_decoding
    for tiles, indices in ((work.nodes, range(decoding)), (work.prompts, range(decoding, num_segments))):
        if tiles is not None:
            _fill(tiles, segments, indices, window)
    return work


def _fill(tiles: Tiles, segments: Segments, indices: range, window: int | None) -> None:
    starts, slots, lengths = (x.tolist() for x in segments[:3])
    records: list[list[int]] = []
    total = 0
    for s in indices:
        is_chunk = indices.start > 0 or segments.num_decoding == 0
        n = starts[s + 1] - starts[s]
        length = lengths[s]
        lead = length % tiles.queries if is_chunk else 0
        for begin in range(-lead, n, tiles.queries) if n else ():
            first = max(begin, 0)
            end = min(begin + tiles.queries, n)
            base = length + begin if is_chunk else length
            lowest = _first_place(base, window)
            if is_chunk:
                quanta = triton.cdiv(base + tiles.queries, QUANTUM.value) - lowest // QUANTUM.value
            else:
                tokens = length + n - lowest
                spare = QUANTUM.value - 1 if tokens < FEW_TOKENS.value else QUANTUM.value // 2
                quanta = 1 if tokens < LEAST_SHARED.value else (tokens + spare) // QUANTUM.value
            records.append(
                [starts[s] + first, end - first, length + first, base, slots[s], _part(base, window), 0, total, quanta]
            )
            total += quanta
    per = min(triton.cdiv(total, tiles.at_a_time), LONG_RANGE.value)
    per = max(1, triton.cdiv(total, len(tiles.ranges)), per)
    longest = max((record[QUANTA.value] for record in records), default=1)
    most_shared = tiles.most_shared
    if (
        tiles.solo_range[0] <= len(records) <= tiles.solo_range[1]
        and 100 * longest * len(records) <= EVEN.value * total
    ):
        per = longest
        total = longest * len(records)
        most_shared = 0
        for index, record in enumerate(records):
            record[START.value] = index * longest
    for index, record in enumerate(records):
        if record[QUANTA.value] * most_shared > total:
            record[SHARED.value] = 1 + record[START.value] * most_shared // total
        record += [per, index]
    after = [NO_TILE.value if field == START.value else 0 for field in range(USED.value)]
    tiles.records[: len(records) + 1, : USED.value] = torch.tensor([*records, after])
    for j, range_record in enumerate(tiles.ranges):
        at = bisect_right(records, j * per, key=lambda record: record[START.value]) - 1
        range_record.copy_(tiles.records[at if j * per < total else len(records)])


def _first_place(base: int, window: int | None) -> int:
    """The first place that a tile may read."""
    return 0 if window is None else max(0, base + 1 - window)


def places_of_parts(lengths: Tensor) -> Tensor:
    """From which place on a query's context comes in longer parts than at place `lengths` (...): what lies on either
    side does not belong in one tile, whose rows are summed alike."""
    limit = torch.full_like(lengths, FIRST_PARTS.value)
    for _ in range(LONGEST.value):
        limit = torch.where(limit <= lengths, 2 * limit, limit)
    return limit


@triton.jit
def places_of_parts_triton(lengths):
    limit = tl.zeros_like(lengths) + FIRST_PARTS
    for _ in tl.static_range(LONGEST):
        limit = tl.where(limit <= lengths, 2 * limit, limit)
    return limit


def _part(base: int, window: int | None) -> int:
    tokens = base if window is None else min(base, window)
    part = QUANTUM.value.bit_length() - 1
    while tokens >= MOST_PARTS.value << part:
        part += 1
    return part


def allot_work(
    segments: Segments,
    T: int,
    Q: int,
    G: int,
    D: int,
    dtype: torch.dtype,
    blocks: tuple[Blocks, Blocks] | None = None,
    programs: int | None = None,
) -> Work:
    """Memory for a plan. `blocks` of nodes and of prompts, and `programs` that run at a time per KV head, replace the
    choice made here (benchmarks, tests)."""
    device = segments.starts.device
    group = Q // G
    max_nodes = segments.most_nodes
    usual = min(max_nodes, segments.usual_nodes)
    decoding = segments.num_decoding
    chunks = len(segments.slots) - segments.num_decoding
    assert max_nodes <= MAX_NODES
    if blocks is None:
        blocks = choose_blocks(decoding, usual, T, Q, G, D, dtype.itemsize, by_path=segments.by_path)
    fitting = (fit_blocks(x, padded_dim(D), dtype.itemsize, shared_memory(device)) for x in blocks)
    (nodes, node_queries), (prompts, prompt_queries) = ((x, _queries(x, group)) for x in fitting)
    node_tiles = min(decoding * triton.cdiv(max_nodes, node_queries), T // node_queries + decoding, T)
    prompt_tiles = min(T // prompt_queries + 2 * chunks, T)

    def allot(kind: Blocks, queries: int, most_tiles: int, busy: float, solo_range: tuple[int, int] = (1, 0)) -> Tiles:
        residents = choose_residents(kind, D, dtype.itemsize)
        if solo_range[
            1
        ]:  # programs without a range take time, too; where tiles are shared, one more on a multiprocessor pays
            residents = min(residents, 1 + own_programs(decoding, G))
        at_a_time = programs or max(1, processors(device) * residents // G)
        waves = WAVES if solo_range[1] == 0 else 1
        ranges = max(1, solo_range[1], min(waves * at_a_time, most_tiles * SCRATCH_PARTS))
        most_shared = min(programs or max(2, int(busy * processors(device) / G)), 2 * most_tiles)
        assert most_shared * G <= MAX_ROWS
        records = torch.empty(most_tiles + 1, FIELDS.value, dtype=torch.int32, device=device)
        return Tiles(
            records, records.new_empty(ranges, FIELDS.value), at_a_time, most_shared, queries, kind, solo_range
        )

    filled = own_programs(decoding, G) * PROGRAMS if programs is None and D <= 128 and nodes.rows <= 32 else 0
    solo_range = (math.ceil(FILLED * filled / G), filled // G) if filled else (1, 0)
    return Work(
        allot(nodes, node_queries, node_tiles, BUSY_NODES, solo_range) if decoding else None,
        allot(prompts, prompt_queries, prompt_tiles, BUSY_PROMPTS) if chunks else None,
    )


def tile_tokens(D: int, element_size: int) -> int:
    """KV tokens of a tile. A row's bits depend on them, so they depend on the model alone."""
    if element_size == 4:  # exact products take no tensor cores: for tests and small models
        return 16
    return 64 if D <= 128 else 32


def choose_blocks(
    decoding: int, nodes: int, T: int, Q: int, G: int, D: int, element_size: int, *, by_path: bool = False
) -> tuple[Blocks, Blocks]:
    """For segments of up to `nodes` nodes, and for prompts. Rows beyond a tile's read the KV once more, rows that none
    needs cost registers. A tile reads its nodes' paths one after the other: of few requests, small tiles side by side.
    """
    tokens = tile_tokens(D, element_size)
    group = Q // G
    min_rows = max(16, triton.next_power_of_2(group))
    needed_rows = triton.next_power_of_2(nodes * group)
    if element_size == 4:
        return Blocks(min_rows, tokens, 4, 2), Blocks(min_rows, tokens, 4, 2)
    is_small = needed_rows <= 16 or (needed_rows <= 64 and by_path and decoding <= FEW_REQUESTS)
    rows = max(min_rows, 16 if is_small else 32 if needed_rows <= 64 else 64)
    if D > 128:
        most_rows = max(min_rows, 64 if D <= 256 else 32)  # of more, the two sums of a tile do not fit in registers
        rows = min(rows, most_rows)
        stages = 3 if rows < 64 and D <= 256 else 2
        warps = 8 if rows * D >= 64 * 256 else 4
        return Blocks(rows, tokens, warps, stages), Blocks(most_rows, tokens, 8, 2)
    is_deep = decoding <= FEW_REQUESTS or own_programs(decoding, G) > 0
    stages = 2 if rows >= 64 or (rows == 16 and not is_deep) else 3
    prompts = Blocks(128, tokens, 8, 3) if T * Q >= MANY_QUERIES or min_rows > 64 else Blocks(64, tokens, 4, 2)
    return Blocks(rows, tokens, 4 if rows <= 64 else 8, stages), prompts


def own_programs(decoding: int, G: int) -> int:
    """Programs of a multiprocessor of an H100 or H200 where there are as many as requests times KV heads, if these fill
    the device once or twice, else 0. Then there is memory for longer pipelines, and no tile needs more than one."""
    tiles = decoding * G
    per_processor = triton.cdiv(tiles, PROGRAMS)
    return per_processor if per_processor <= 2 and tiles >= FILLED * per_processor * PROGRAMS else 0


def choose_residents(blocks: Blocks, D: int, element_size: int) -> int:
    """Programs that run at a time on a multiprocessor of an H100 or H200."""
    if blocks.rows > 64:
        return 1
    if D > 128 or element_size == 4:
        return 1 if blocks.rows > 16 else 2
    if blocks.rows > 16:
        return 2
    return 3 if blocks.stages > 2 else 4


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the device."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _queries(blocks: Blocks, group: int) -> int:
    """Queries of a tile; a power of two, so that tiles of chunks begin at multiples of it and divide a part."""
    return 1 << ((blocks.rows // group).bit_length() - 1)


@plan_work.kernel(when=lambda segments, *_, **__: segments.starts.is_cuda)
def plan_work_triton(
    segments: Segments,
    T: int,
    Q: int,
    G: int,
    D: int,
    dtype: torch.dtype,
    *,
    window: int | None = None,
    blocks: tuple[Blocks, Blocks] | None = None,
    programs: int | None = None,
) -> Work:
    """`plan_work` by the kernel; `blocks` and `programs` as in `allot_work`."""
    work = allot_work(segments, T, Q, G, D, dtype, blocks, programs)
    starts, slots, lengths = segments[:3]
    assert all(x.is_contiguous() for x in (starts, slots, lengths))
    (node_list, node_sizes, node_queries), (prompt_list, prompt_sizes, prompt_queries) = map(_list_of, work)
    plan_kernel[(len(slots) + 2,)](
        starts, slots, lengths, *node_list, *prompt_list, segments.num_decoding, len(slots),
        *node_sizes, *prompt_sizes,
        NODE_QUERIES=node_queries, PROMPT_QUERIES=prompt_queries, WINDOW=window,
        SEGMENTS=max(16, triton.next_power_of_2(len(slots))), num_warps=4, **pdl_options(starts.device),
    )  # fmt: skip
    return work


def _list_of(tiles: Tiles | None) -> tuple[tuple[Tensor | None, ...], tuple[int, ...], int]:
    if tiles is None:
        return (None, None), (0, 0, 0, 0, 1, 0), 1
    sizes = len(tiles.records) - 1, len(tiles.ranges), tiles.at_a_time, tiles.most_shared, *tiles.solo_range
    return (tiles.records, tiles.ranges), sizes, tiles.queries


SIZES = ["num_decoding", "num_segments"]
for kind in ("node", "prompt"):
    SIZES += [f"{kind}_{name}" for name in ("most_tiles", "programs", "at_a_time", "most_shared")]
    SIZES += [f"{kind}_least_own", f"{kind}_most_own"]


@triton.jit(do_not_specialize=SIZES)
def plan_kernel(
    starts_ptr, slots_ptr, lengths_ptr, node_records, node_ranges, prompt_records, prompt_ranges,
    num_decoding, num_segments, node_most_tiles, node_programs, node_at_a_time, node_most_shared,
    node_least_own, node_most_own, prompt_most_tiles, prompt_programs, prompt_at_a_time, prompt_most_shared,
    prompt_least_own, prompt_most_own,
    NODE_QUERIES: tl.constexpr, PROMPT_QUERIES: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program per segment writes its tiles; the last two end the lists of nodes and of prompts."""
    wait_for_inputs(PDL)
    segment = tl.program_id(0)
    if node_records is not None:  # noqa: SIM102  a constant, which Triton evaluates apart
        if (segment < num_decoding) | (segment == num_segments):
            _plan_tiles(
                starts_ptr, slots_ptr, lengths_ptr, node_records, node_ranges, segment, segment == num_segments,
                0, num_decoding, node_most_tiles, node_programs, node_at_a_time, node_most_shared,
                node_least_own, node_most_own, False, NODE_QUERIES, WINDOW, SEGMENTS,
            )  # fmt: skip
    if prompt_records is not None:  # noqa: SIM102
        if (segment >= num_decoding) & (segment != num_segments):
            _plan_tiles(
                starts_ptr, slots_ptr, lengths_ptr, prompt_records, prompt_ranges, segment, segment > num_segments,
                num_decoding, num_segments, prompt_most_tiles, prompt_programs, prompt_at_a_time, prompt_most_shared,
                prompt_least_own, prompt_most_own, True, PROMPT_QUERIES, WINDOW, SEGMENTS,
            )  # fmt: skip


@triton.jit
def _plan_tiles(
    starts_ptr, slots_ptr, lengths_ptr, records_ptr, ranges_ptr, index, is_end, first, last,
    most_tiles, programs, at_a_time, most_shared, least_own, most_own,
    CHUNKS: tl.constexpr, QUERIES: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Lists the tiles of segment `index`, one of the segments first..last - 1 of a kind, or the list's end. least_own
    to most_own tiles of nodes, none far longer than others, have a program each: its range is as long as the
    longest."""
    segment = tl.arange(0, SEGMENTS)
    inside = (segment >= first) & (segment < last)
    starts = tl.load(starts_ptr + segment, mask=inside, other=0)
    stops = tl.load(starts_ptr + segment + 1, mask=inside, other=0)
    lengths = tl.load(lengths_ptr + segment, mask=inside, other=0).to(tl.int32)
    tiles, quanta = _tiles_of(lengths, stops - starts, CHUNKS, QUERIES, WINDOW)
    total = tl.sum(quanta)
    per = tl.minimum(tl.cdiv(total, at_a_time), LONG_RANGE)
    per = tl.maximum(tl.maximum(tl.cdiv(total, programs), per), 1)
    is_before = segment < index
    first_tile = tl.sum(tl.where(is_before, tiles, 0))
    first_quantum = tl.sum(tl.where(is_before, quanta, 0))
    step = 0
    if not CHUNKS:
        num_tiles = tl.sum(tiles)
        longest = tl.max(quanta // tl.maximum(tiles, 1))
        if (least_own <= num_tiles) & (num_tiles <= most_own) & (100 * longest * num_tiles <= total * EVEN):
            per = longest
            total = longest * num_tiles
            step = longest
            first_quantum = longest * first_tile
            most_shared = 0
    if is_end:
        _end_list(records_ptr, ranges_ptr, tl.minimum(tl.sum(tiles), most_tiles), total, per, programs)
    else:
        start = tl.load(starts_ptr + index)
        rows = tl.load(starts_ptr + index + 1) - start
        length = tl.load(lengths_ptr + index).to(tl.int32)
        slot = tl.load(slots_ptr + index).to(tl.int32)
        _list_tiles(
            records_ptr, ranges_ptr, start, rows, length, slot, first_tile, first_quantum, total, most_shared,
            per, step, most_tiles, programs, CHUNKS, QUERIES, WINDOW,
        )  # fmt: skip


@triton.jit
def _tiles_of(length, rows, CHUNKS: tl.constexpr, QUERIES: tl.constexpr, WINDOW: tl.constexpr):
    """The tiles of segments and their quanta together."""
    if CHUNKS:
        first = length // QUERIES
        tiles = tl.where(rows > 0, tl.cdiv(length + rows, QUERIES) - first, 0)
        quanta = (_quanta_before(first + tiles, QUERIES, WINDOW) - _quanta_before(first, QUERIES, WINDOW)).to(tl.int32)
    else:
        tiles = tl.cdiv(rows, QUERIES)
        quanta = tiles * _node_quanta(length, rows, WINDOW)
    return tiles, quanta


@triton.jit
def _node_quanta(length, rows, WINDOW: tl.constexpr):
    """Quanta of a tile of nodes. Rounds to whole quanta, so a few nodes past a boundary do not add one."""
    tokens = length + rows - _lowest(length, WINDOW)
    spare = tl.where(tokens < FEW_TOKENS, QUANTUM - 1, QUANTUM // 2)
    return tl.where(tokens < LEAST_SHARED, 1, (tokens + spare) // QUANTUM)


@triton.jit
def _quanta_before(tile, QUERIES: tl.constexpr, WINDOW: tl.constexpr):
    """Quanta of a request's tiles before `tile`, if all of its tokens were one chunk; int64.

    Tile b reads b // m + 1 quanta, m = QUANTUM / QUERIES, less the max(0, b - c) // m that lie before its window.
    """
    quanta = _sum_of_quotients(tile, QUERIES) + tile
    if WINDOW is not None:
        quanta -= _sum_of_quotients(tl.maximum(tile - (WINDOW - 1 + QUERIES - 1) // QUERIES, 0), QUERIES)
    return quanta


@triton.jit
def _sum_of_quotients(count, QUERIES: tl.constexpr):
    """Sum of b // m over 0 <= b < count, m = QUANTUM / QUERIES; int64."""
    M: tl.constexpr = QUANTUM // QUERIES
    quotient = (count // M).to(tl.int64)
    rest = (count % M).to(tl.int64)
    return M * (quotient * (quotient - 1) // 2) + rest * quotient


@triton.jit
def _lowest(base, WINDOW: tl.constexpr):
    """The first place that a tile may read."""
    lowest = base * 0
    if WINDOW is not None:
        lowest = tl.maximum(base + 1 - WINDOW, 0)
    return lowest


@triton.jit
def _end_list(records_ptr, ranges_ptr, tile, total, per, programs):
    """Ends the list of tiles, and leaves nothing to the programs after the last range."""
    field = tl.arange(0, FIELDS)
    after = tl.where(field == START, NO_TILE, 0)
    tl.store(records_ptr + tile * FIELDS + field, after)
    for begin in range(tl.cdiv(total, per), programs, 32):
        program = begin + tl.arange(0, 32)[:, None]
        tl.store(ranges_ptr + program * FIELDS + field[None, :], after[None, :], mask=program < programs)


@triton.jit
def _list_tiles(
    records_ptr, ranges_ptr, start, rows, length, slot, first_tile, first_quantum, total, most_shared,
    per, step, most_tiles, programs,
    CHUNKS: tl.constexpr, QUERIES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Writes the records of a segment's tiles, and for programs whose ranges begin in one of them, that one again.

    A tile longer than total / most_shared is shared; so far from each other these begin that START says which it is.
    """
    BLOCK: tl.constexpr = 32
    lead = length % QUERIES if CHUNKS else 0
    for begin in range(0, tl.cdiv(lead + rows, QUERIES), BLOCK):
        index = begin + tl.arange(0, BLOCK)
        query = index * QUERIES - lead
        first = tl.maximum(query, 0)
        count = tl.minimum(query + QUERIES, rows) - first
        if CHUNKS:
            base = length + query
            before = _quanta_before(base // QUERIES, QUERIES, WINDOW)
            before = (before - _quanta_before(length // QUERIES, QUERIES, WINDOW)).to(tl.int32)
            quanta = tl.cdiv(base + QUERIES, QUANTUM) - _lowest(base, WINDOW) // QUANTUM
        else:
            base = length + index * 0
            quanta = _node_quanta(length, rows, WINDOW) + index * 0
            before = index * tl.where(step > 0, step, quanta)
        tokens = base
        if WINDOW is not None:
            tokens = tl.minimum(tokens, WINDOW)
        part = tl.full((BLOCK,), 7, tl.int32)
        limit = tl.full((BLOCK,), FIRST_PARTS, tl.int32)  # MOST_PARTS << part
        tl.static_assert(QUANTUM == 1 << 7)
        while tl.max(tl.where(tokens >= limit, 1, 0)) > 0:
            part = part + tl.where(tokens >= limit, 1, 0)
            limit = limit * tl.where(tokens >= limit, 2, 1)
        quantum = first_quantum + before
        shared = tl.where(quanta * most_shared > total, 1 + quantum * most_shared // tl.maximum(total, 1), 0)
        fields = (start + first, count, length + first, base, slot, part, shared, quantum, quanta, per)
        tile = first_tile + index
        valid = (count > 0) & (tile < most_tiles)
        _store_record(records_ptr + tile * FIELDS, fields, tile, valid)
        program = tl.cdiv(quantum, per)
        after = tl.where(valid, tl.minimum(tl.cdiv(quantum + quanta, per), programs), 0)
        while tl.max(after - program) > 0:
            _store_record(ranges_ptr + program * FIELDS, fields, tile, program < after)
            program += 1


@triton.jit
def _store_record(record, fields, tile, valid):
    for field in tl.static_range(INDEX):
        tl.store(record + field, fields[field] + tile * 0, mask=valid)
    tl.store(record + INDEX, tile, mask=valid)


@ragged_attention.kernel()
def ragged_attention_triton(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    segments: Segments,
    ancestors: Tensor | None,
    mask: Mask,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: Tensor | None = None,
    paths: Paths | None = None,
    work: Work | None = None,
    is_old_plan: bool = False,
) -> Tensor:
    """`ragged_attention` by the kernel: a launch for the nodes and one for the prompts."""
    (T, Q, D), G = q.shape, keys.shape[2]
    keys, values = held_words(q, keys, values, scales)
    assert all(x.is_contiguous() for x in (q, keys, values, pages))
    assert mask in ("causal", "tree")
    assert window is None or window > 0
    assert sinks is None or sinks.is_contiguous()
    if work is None:
        work = plan_work_triton(segments, T, Q, G, D, q.dtype, window=window)
    out = torch.empty_like(q)
    factors = score_factors(scale, softcap)
    if work.nodes is not None:
        is_tree = mask == "tree"
        tree_ancestors = ancestors if is_tree else None
        tree_paths = paths if is_tree else None
        _attend(
            q, keys, values, scales, pages, tree_ancestors, tree_paths, sinks, out, work.nodes, segments.most_nodes,
            factors, window, is_old_plan,
        )  # fmt: skip
    if work.prompts is not None:
        _attend(
            q, keys, values, scales, pages, None, None, sinks, out, work.prompts, segments.most_nodes, factors, window,
            is_old_plan,
        )  # fmt: skip
    return out


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: Tensor | None,
    pages: Tensor,
    ancestors: Tensor | None,
    paths: Paths | None,
    sinks: Tensor | None,
    out: Tensor,
    tiles: Tiles,
    most_nodes: int,
    factors: tuple[float, float | None],
    window: int | None,
    is_old_plan: bool,
) -> None:
    page_size, G = keys.shape[1:3]
    D = q.shape[2]
    group = q.shape[1] // keys.shape[2]
    blocks = tiles.blocks
    block_dim = padded_dim(D)
    programs = len(tiles.ranges)
    partial = torch.empty(
        tiles.most_shared * SCRATCH_PARTS * G, blocks.rows, block_dim, dtype=torch.float32, device=q.device
    )
    share = max(blocks.rows // 4, min(blocks.rows, triton.next_power_of_2(group)))
    attend_kernel[(G, programs)](
        q, keys, values, pages, ancestors if paths is None else None, *(paths or (None,) * 3),
        sinks, scales, out, tiles.records, tiles.ranges,
        partial, partial.new_empty(len(partial), 2, blocks.rows), done_counters(q.device),
        *factors, pages.shape[1],
        G=G, D=D, BLOCK_D=block_dim, GROUP=group, PAGE=page_size, ROWS=blocks.rows, TOKENS=blocks.tokens,
        SLOTS=SCRATCH_PARTS, SHARE=share,
        AT_ONCE=min(max(1, 64 * 32 * blocks.warps // (share * block_dim)), MOST_AT_ONCE), WINDOW=window,
        PRECISION=precision(q.dtype),
        WORD=tl.int32 if most_nodes <= 32 else tl.int64, OFFSET=tl.int32 if keys.numel() < 2**31 else tl.int64,
        IS_OLD_PLAN=is_old_plan, AHEAD=PREFETCHED if blocks.rows <= 32 else 0,
        num_warps=blocks.warps, num_stages=load_stages(blocks, scales), **pdl_options(q.device),
        **({"maxnreg": 128} if q.is_cuda and choose_residents(blocks, D, q.element_size()) == 4 else {}),
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_width"])
def attend_kernel(
    q_ptr, keys_ptr, values_ptr, pages_ptr, ancestors_ptr, positions_ptr, paths_ptr, nodes_ptr,
    sinks_ptr, scales_ptr, out_ptr, records_ptr, ranges_ptr, partial_ptr, sums_ptr, counters_ptr, scale, squash,
    table_width,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr, SHARE: tl.constexpr,
    AT_ONCE: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr, WORD: tl.constexpr, OFFSET: tl.constexpr,
    IS_OLD_PLAN: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One KV head (axis 0) of the tiles in a program's range (axis 1); scale and squash are `score_factors`.
    IS_OLD_PLAN: the plan and the page table are complete before the kernel before this one begins, so they can be read
    while that one runs, and AHEAD places of the range be prefetched."""
    head = tl.program_id(0)
    program = tl.program_id(1)
    scale = by_head(scale, scales_ptr, head) if squash is None else scale
    squash = by_head(squash, scales_ptr, head) if squash is not None else None
    if sinks_ptr is not None:
        prefetch_lines(sinks_ptr + head * GROUP + tl.arange(0, ROWS) % GROUP)
    if PDL and not IS_OLD_PLAN:
        tl.extra.cuda.gdc_wait()
    record = ranges_ptr + program * FIELDS
    per = tl.load(record + LENGTH)
    tile = tl.load(record + INDEX)
    start = tl.load(record + START)
    first_row, count, position, base, slot, part, shared, quanta = _load_record(record)
    if PDL:  # the next kernel's programs start when all of these have: they take no places that are needed here
        if IS_OLD_PLAN:
            # In short contexts most programs have nothing to do. The first stays, to end after the previous kernel.
            if (start >= (program + 1) * per) & (program > 0):
                return
            if AHEAD > 0:  # noqa: SIM102  `and` would compile both sides
                if (start < (program + 1) * per) & (base > 0):
                    lowest = _lowest(base, WINDOW)
                    first_part = lowest >> part
                    parts_end = ((position + count - 1) >> part) + 1
                    begin = _part_at(program * per - start, per, lowest, first_part, parts_end, part, quanta, shared)
                    place = tl.maximum(begin << part, lowest) + tl.arange(0, AHEAD)
                    _prefetch_places(
                        keys_ptr, values_ptr, pages_ptr + slot.to(tl.int64) * table_width, tl.minimum(place, base - 1),
                        head, G, D // (2 if scales_ptr is not None else 1), PAGE,
                    )  # fmt: skip
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    while start < (program + 1) * per:
        table = pages_ptr + slot.to(tl.int64) * table_width
        lowest = _lowest(base, WINDOW)
        first_part = lowest >> part
        parts_end = ((position + count - 1) >> part) + 1
        owner = start // per
        begin = _part_at(program * per - start, per, lowest, first_part, parts_end, part, quanta, shared)
        finish = _part_at((program + 1) * per - start, per, lowest, first_part, parts_end, part, quanta, shared)
        own_finish = _part_at((owner + 1) * per - start, per, lowest, first_part, parts_end, part, quanta, shared)
        place = tl.maximum(shared - 1, 0) * G + head
        tile += 1
        record = records_ptr + tile * FIELDS
        start = tl.load(record + START)
        if begin < finish:
            _attend_tile(
                q_ptr, keys_ptr, values_ptr, table, ancestors_ptr, positions_ptr, paths_ptr, nodes_ptr,
                sinks_ptr, scales_ptr, out_ptr, partial_ptr, sums_ptr, counters_ptr + place, scale, squash,
                head, first_row, count, position, base, part, begin, finish, first_part, own_finish, parts_end, lowest,
                place * SLOTS,
                G, D, BLOCK_D, GROUP, PAGE, ROWS, TOKENS, SHARE, AT_ONCE, WINDOW, PRECISION, WORD, OFFSET,
            )  # fmt: skip
        first_row, count, position, base, slot, part, shared, quanta = _load_record(record)


@triton.jit
def _prefetch_places(
    keys_ptr, values_ptr, table, place, head, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """Asks for a head's keys and values at committed places (n,); D counts elements of the cache."""
    LINE: tl.constexpr = 128 * 8 // keys_ptr.dtype.element_ty.primitive_bitwidth
    line = tl.arange(0, triton.next_power_of_2(triton.cdiv(D, LINE))) * LINE
    cell = tl.load(table + place // PAGE) * PAGE + place % PAGE
    cells = ((cell * G + head) * D)[:, None] + tl.minimum(line, D - 1)[None, :]
    prefetch_lines(keys_ptr + cells)
    prefetch_lines(values_ptr + cells)


@triton.jit
def _load_record(record):
    """ROW, COUNT, POSITION, BASE, SLOT, PART, SHARED and QUANTA."""
    return (
        tl.load(record + ROW), tl.load(record + COUNT), tl.load(record + POSITION), tl.load(record + BASE),
        tl.load(record + SLOT), tl.load(record + PART), tl.load(record + SHARED), tl.load(record + QUANTA),
    )  # fmt: skip


@triton.jit
def _part_at(quantum, per, lowest, first_part, parts_end, part, quanta, shared):
    """The first part of a tile that belongs to a range which begins `quantum` quanta after the tile, or before it.

    It is the first that begins there, but a rest of the tile that is short against a range stays with the range before.
    """
    boundary = ((quantum + lowest // QUANTUM - 1) >> (part - 7)) + 1
    boundary = tl.minimum(tl.maximum(boundary, first_part + 1), parts_end)
    boundary = tl.where((shared > 0) & (quantum < quanta - per // SLACK), boundary, parts_end)
    return tl.where(quantum <= 0, first_part, boundary)


@triton.jit
def _attend_tile(
    q_ptr, keys_ptr, values_ptr, table, ancestors_ptr, positions_ptr, paths_ptr, nodes_ptr,
    sinks_ptr, scales_ptr, out_ptr, partial_ptr, sums_ptr, counter_ptr, scale, squash,
    head, first_row, count, position, base, part, begin, finish, first_part, own_finish, parts_end, lowest, slot,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, SHARE: tl.constexpr, AT_ONCE: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr, WORD: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """The parts begin..finish - 1 of a tile's first_part..parts_end - 1.

    If the tile is shared, the owner of its first part adds up its own parts, up to own_finish, and the others store
    each part: sums are then added from left to right whoever computed them. slot: of the first one's sums.
    """
    PACKED: tl.constexpr = 2 if scales_ptr is not None else 1  # numbers that an element of the cache holds
    row = tl.arange(0, ROWS)
    num_rows = count * GROUP
    clipped = tl.minimum(row, num_rows - 1)  # rows past the last repeat it and are not stored
    q = load_queries(q_ptr, query_cells(first_row, clipped, head, G, GROUP), D, BLOCK_D, PACKED)
    place = position + clipped // GROUP
    end = position + count
    node_bits = None
    path = None
    before = place
    certain = position + 1
    if paths_ptr is not None:
        place = tl.load(positions_ptr + first_row + clipped // GROUP).to(tl.int32)
        path = tl.load(paths_ptr + first_row + clipped // GROUP)
        nodes_ptr += (first_row - (position - base)).to(tl.int64) * PATH_NODES
        before = place
        certain = base
        end = tl.max(place) + 1
    if ancestors_ptr is not None:
        node_bits = tl.load(ancestors_ptr + first_row + clipped // GROUP).to(WORD)
        certain = base
    if WINDOW is not None:
        before = place - WINDOW
        if ancestors_ptr is not None:
            node_bits, depth = apply_window(node_bits, place - base, position + count - base, "tree", WINDOW)
            before = base + depth - WINDOW
    pieces = tl.where(begin == first_part, 1, finish - begin)
    for piece in range(begin, begin + pieces):
        stop = tl.where(begin == first_part, finish, piece + 1)
        merged, top, total = _attend_parts(
            q, node_bits, path, place, before, keys_ptr, values_ptr, table, nodes_ptr, head,
            tl.maximum(piece << part, lowest // TOKENS * TOKENS), tl.minimum(stop << part, end), part,
            lowest, certain, base, end, scale, squash,
            G, D // PACKED, BLOCK_D // PACKED, PAGE, ROWS, TOKENS, WINDOW, PRECISION, OFFSET,
        )  # fmt: skip
        if own_finish < parts_end:
            index = slot + tl.where(begin == first_part, 0, piece - own_finish + 1)
            _store_part(partial_ptr, sums_ptr, index, merged, top, total, num_rows, ROWS, BLOCK_D)
        else:
            total = _add_sinks(sinks_ptr, top, total, head, row, GROUP)
            result = merged / total[:, None]
            cells = query_cells(first_row, row, head, G, GROUP)
            store_results(scales_ptr, out_ptr, result, cells, row < num_rows, head, G, D, BLOCK_D)
    if own_finish < parts_end:
        stored = parts_end - own_finish + 1
        if _all_arrived(counter_ptr, pieces, stored):
            for first in range(0, num_rows, SHARE):
                some = first + tl.arange(0, SHARE)
                result = _merge(
                    partial_ptr, sums_ptr, sinks_ptr, slot, head, some, num_rows, stored,
                    BLOCK_D, GROUP, ROWS, SHARE, AT_ONCE,
                )  # fmt: skip
                cells = query_cells(first_row, some, head, G, GROUP)
                store_results(scales_ptr, out_ptr, result, cells, some < num_rows, head, G, D, BLOCK_D)


@triton.jit
def _attend_parts(
    q, node_bits, path, place, before, keys_ptr, values_ptr, table, nodes_ptr, head,
    start, stop, part, lowest, certain, base, end, scale, squash,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """A tile's sums over the tokens start..stop - 1, which are whole parts but for the first and the last.

    Returns values weighted relative to the largest score (ROWS, dims), these scores, and the weights' sums (ROWS,).
    node_bits (ROWS,): the nodes that a tree's rows see; None: rows see up to their own place. before (ROWS,): the last
    position before a row's window. All rows see what lies in `lowest` (and their window)..certain - 1. With path
    (ROWS,) tiles that hold new tokens are read once for each path, by the rows on it. D, BLOCK_D: elements of the
    cache.

    A part ends where the first tile of the next one has its scores: one loop over all parts loads ahead without a
    break, and products with values, which the branch does not follow, overlap with the next tile's scores."""
    token = tl.arange(0, TOKENS)
    in_page = cells_in_page(head, G, D, BLOCK_D, PAGE, TOKENS)
    top = nothing(ROWS)
    total = tl.zeros((ROWS, 16), tl.float32)
    acc = tl.zeros(q.shape, tl.float32)
    all_top = nothing(ROWS)
    all_total = tl.zeros((ROWS,), tl.float32)
    merged = tl.zeros(q.shape, tl.float32)
    if WINDOW is not None:  # noqa: SIM102
        if node_bits is None and path is None:
            lowest = tl.maximum(lowest, certain - WINDOW)
    new = stop if path is None else base // TOKENS * TOKENS  # from here on tiles hold new tokens and are read by path
    page = load_pages(table, start, end, PAGE, TOKENS)
    cell = _first_cells(path, nodes_ptr, table, tl.maximum(start, new) + token, lowest, base, end, PAGE, WINDOW)
    for tile_start in range(start, tl.minimum(stop, new), TOKENS):
        first_read = lowest if WINDOW is not None else None
        cells, inside = tile_cells(page, in_page, tile_start, first_read, end, G, D, PAGE, OFFSET)
        page = load_pages(table, tile_start + TOKENS, end, PAGE, TOKENS)  # prefetch for the next tile
        k = tl.load(keys_ptr + cells, mask=inside, other=0)
        scores = score(q, k, squash, PRECISION)
        if _begins_part(tile_start, start, part):
            merged, all_top, all_total, acc, top, total = _end_part(merged, all_top, all_total, acc, top, total)
        position = (tile_start + token)[None, :]
        if WINDOW is not None:
            visible = _visible(node_bits, place, position, base, end) & (position > before[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        elif tile_start + TOKENS > certain:
            scores = tl.where(_visible(node_bits, place, position, base, end), scores, float("-inf"))
        top, total, acc = _add_tile(scores, values_ptr + cells, inside, scale, top, total, acc, q.dtype, PRECISION)
    if path is not None:
        for tile_start in range(tl.maximum(start, new), stop, TOKENS):
            if _begins_part(tile_start, start, part):
                merged, all_top, all_total, acc, top, total = _end_part(merged, all_top, all_total, acc, top, total)
            top, total, acc, cell = _attend_paths(
                q, path, cell, place, before, keys_ptr, values_ptr, table, nodes_ptr, head, tile_start,
                lowest, base, end, scale, squash, top, total, acc,
                G, D, BLOCK_D, PAGE, TOKENS, WINDOW, PRECISION, OFFSET,
            )  # fmt: skip
    return _add_part(merged, all_top, all_total, acc, top, tl.max(total, axis=1))


@triton.jit
def _add_tile(scores, value_cells, loaded, scale, top, total, acc, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """A part's sums with one more tile: its scores (ROWS, TOKENS), -inf where a row does not see a token.

    Weights are summed by a product with ones: the order of a reduction would depend on the tile's layout.
    """
    weights, new_top, rescale = weigh(scores, scale, top, value_cells)
    weights = weights.to(DTYPE)
    rescale = rescale[:, None]
    all_ones = tl.full((scores.shape[1], 16), 1.0, weights.dtype)
    total = tl.dot(weights, all_ones, total * rescale, input_precision=PRECISION)
    v = tl.load(value_cells, mask=loaded, other=0)
    return new_top, total, add_values(weights, v, acc * rescale, PRECISION)


@triton.jit
def _attend_paths(
    q, path, cell, place, before, keys_ptr, values_ptr, table, nodes_ptr, head, tile_start,
    lowest, base, end, scale, squash, top, total, acc,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Adds to a part's sums the tokens that follow tile_start in the text, of each row's own path.

    A row takes part in one path alone: the products of the others add zeros to it, which leave its bits as they are.
    cell (TOKENS,): `_path_cells` of the first path; with the sums it returns those of the tile after this one.
    """
    dims = tl.arange(0, BLOCK_D)[None, :]
    position = tile_start + tl.arange(0, TOKENS)
    loaded = _is_inside(position, lowest, end, WINDOW)[:, None] & (dims < D)
    first_path = tl.min(path)
    last_path = tl.max(path)
    for index in range(first_path, last_path + 1):
        kv_cells = ((cell * G + head).to(OFFSET) * D)[:, None] + dims
        k = tl.load(keys_ptr + kv_cells, mask=loaded, other=0)
        is_last = index == last_path
        following = tl.where(is_last, first_path, index + 1)
        next_position = tl.where(is_last, position + TOKENS, position)
        cell = _path_cells(nodes_ptr, table, following, next_position, lowest, base, end, PAGE, WINDOW)
        scores = score(q, k, squash, PRECISION)
        visible = (path == index)[:, None] & (position[None, :] <= place[:, None])
        if WINDOW is not None:
            visible &= position[None, :] > before[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        cells = values_ptr + kv_cells
        top, total, acc = _add_tile(scores, cells, loaded, scale, top, total, acc, q.dtype, PRECISION)
    return top, total, acc, cell


@triton.jit
def _first_cells(path, nodes_ptr, table, position, lowest, base, end, PAGE: tl.constexpr, WINDOW: tl.constexpr):
    """`_path_cells` of a tile's first path; without paths, anything."""
    cells = position
    if path is not None:
        cells = _path_cells(nodes_ptr, table, tl.min(path), position, lowest, base, end, PAGE, WINDOW)
    return cells


@triton.jit
def _path_cells(nodes_ptr, table, path, position, lowest, base, end, PAGE: tl.constexpr, WINDOW: tl.constexpr):
    """Where the cache has the tokens that lie at `position` in the text of a path.

    Two loads, one after the other, for a third that needs them: they are made while the path before is read, or the
    text before all paths."""
    inside = _is_inside(position, lowest, end, WINDOW)
    node = tl.load(nodes_ptr + path * PATH_NODES + position - base, mask=inside & (position >= base), other=0)
    place = tl.where(position < base, position, base + node)
    return tl.load(table + place // PAGE, mask=inside, other=0) * PAGE + place % PAGE


@triton.jit
def _is_inside(position, lowest, end, WINDOW: tl.constexpr):
    inside = position < end
    if WINDOW is not None:
        inside &= position >= lowest
    return inside


@triton.jit
def _visible(node_bits, place, position, base, end):
    if node_bits is None:
        visible = position <= place[:, None]
    else:
        visible = (node_bits[:, None] & node_bit(position, base, end, True, node_bits.dtype)) != 0
    return visible


@triton.jit
def _end_part(merged, all_top, all_total, acc, top, total):
    """`_add_part`, and the sums of the next part, which has none yet. The columns of `total` (ROWS, 16) are equal."""
    merged, all_top, all_total = _add_part(merged, all_top, all_total, acc, top, tl.max(total, axis=1))
    return merged, all_top, all_total, tl.zeros_like(acc), nothing(acc.shape[0]), tl.zeros_like(total)


@triton.jit
def _begins_part(tile_start, start, part):
    """Whether a tile is the first of a part, after tiles of others."""
    return (tile_start > start) & ((tile_start & ((1 << part) - 1)) == 0)


@triton.jit
def _add_part(merged, all_top, all_total, acc, top, total):
    """A part's sums added to those of the parts before it: the same operations wherever the parts come from."""
    new_top = tl.maximum(all_top, top)
    rescale = tl.exp2(all_top - new_top)
    weight = tl.exp2(top - new_top)
    scale = tl.broadcast_to(rescale[:, None], merged.shape)
    return tl.fma(merged, scale, acc * weight[:, None]), new_top, tl.fma(all_total, rescale, total * weight)


@triton.jit
def _add_sinks(sinks_ptr, top, total, head, row, GROUP: tl.constexpr):
    """Adds each row's sink to the sum of all parts' weights: the last addition, whichever programs had the parts."""
    if sinks_ptr is not None:
        total += weigh_sinks(sinks_ptr, head, row, top, GROUP)
    return total


@triton.jit
def _store_part(partial_ptr, sums_ptr, index, acc, top, total, num_rows, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    cells = (index.to(tl.int64) * ROWS + row)[:, None] * BLOCK_D + dims[None, :]
    valid = row < num_rows
    tl.store(partial_ptr + cells, acc, mask=valid[:, None])
    tl.store(sums_ptr + index * (2 * ROWS) + row, top, mask=valid)
    tl.store(sums_ptr + index * (2 * ROWS) + ROWS + row, total, mask=valid)


@triton.jit
def _all_arrived(counter_ptr, arriving, parts):
    """Whether these parts are the last to be stored of `parts`; if so, the counter is reset, and the stores of other
    programs must be read past the L1 cache (".cg")."""
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, arriving, sem="acq_rel", scope="gpu") + arriving == parts
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def _merge(
    partial_ptr, sums_ptr, sinks_ptr, tile, head, row, num_rows, parts,
    BLOCK_D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SHARE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The result of SHARE rows of a shared tile. AT_ONCE: parts whose loads are issued together, half as many of short
    contexts: those that are not there take time, too."""
    HALF: tl.constexpr = max(AT_ONCE // 2, 1)
    merged = tl.zeros((SHARE, BLOCK_D), tl.float32)
    top = nothing(SHARE)
    total = tl.zeros((SHARE,), tl.float32)
    stored = partial_ptr, sums_ptr, tile, row, num_rows, parts
    if parts <= HALF:
        merged, top, total = _merge_parts(merged, top, total, stored, 0, BLOCK_D, ROWS, HALF)
    else:
        for begin in range(0, parts, AT_ONCE):
            merged, top, total = _merge_parts(merged, top, total, stored, begin, BLOCK_D, ROWS, AT_ONCE)
    total = _add_sinks(sinks_ptr, top, total, head, row, GROUP)
    return merged / tl.where(total > 0, total, 1.0)[:, None]  # 0: a row past the last


@triton.jit
def _merge_parts(
    merged, top, total, stored, begin, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """Adds COUNT parts from `begin` on, of which there may be fewer."""
    partial_ptr, sums_ptr, tile, row, num_rows, parts = stored
    dims = tl.arange(0, BLOCK_D)
    for index in tl.static_range(COUNT):
        part = begin + index
        valid = row < tl.where(part < parts, num_rows, 0)
        sums = sums_ptr + (tile + part) * (2 * ROWS) + row
        part_top = tl.load(sums, mask=valid, other=-1e30, cache_modifier=".cg")
        part_total = tl.load(sums + ROWS, mask=valid, other=0.0, cache_modifier=".cg")
        cells = ((tile + part).to(tl.int64) * ROWS + row)[:, None] * BLOCK_D + dims[None, :]
        acc = tl.load(partial_ptr + cells, mask=valid[:, None], other=0.0, cache_modifier=".cg")
        merged, top, total = _add_part(merged, top, total, acc, part_top, part_total)
    return merged, top, total
