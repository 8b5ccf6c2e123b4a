"""The order in which layers with recurrent state step through a pass, the same for all layers.

A request first steps through the accepted nodes of its last pass again, whose records are kept, which gives the state
that is written; then through the nodes of this pass, parents before children, and of a node's children the largest
subtree last. A leaf reads its parent's state and leaves it as it is, so the next child goes on from it. A subtree after
one with more than a leaf restarts: from the written state, along its path. All kinds of steps compute the same, so
plain decoding, chains and trees give the same bits.

Inputs of a step lie in a buffer of T + B W rows: those of the pass, then W for each request, of its accepted nodes.
Letters: T rows, B decoding requests, M chunks of prompts, R request slots, W nodes that a slot records, E entries of
states.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import Op, pdl_options, use_triton, wait_for_inputs
from slipstream.kernels.speculation.ragged import Layout

TAPS = 4  # of a convolution: a row and the three before it
BLOCK_ROWS = 64  # of one program
BLOCK_TOKENS = 64  # of a prompt, which a layer may take at once
# A step is a row of the buffer with flags.
ROW = (1 << 27) - 1
RESTART = 1 << 27  # from the written state, not from the step before
LEAF = 1 << 28  # the state need not change
EMIT = 1 << 29  # the output is that of the row
# A source is a row of the pass, or -1 - (a row of the records, flattened (R, W)), or a row of the states' inputs,
# flattened (E, 3), from STATE on, or NOTHING.
STATE = 1 << 28
NOTHING = -(1 << 31)


class Walks(NamedTuple):
    """Steps of the decoding requests, and the inputs of all rows of the buffer."""

    steps: Tensor  # (B, L) int32
    counts: Tensor  # (B,) int32 steps; 0 of requests without rows
    replayed: Tensor  # (B,) int32 how many of them replay
    sources: Tensor  # (T + B W, 4) int32: a row's own input and those before it, the nearest first


class Columns(NamedTuple):
    """Columns of the table of states, for each segment of a pass: views of one tensor (S, NUM_COLUMNS)."""

    sources: Tensor  # (S,) int64 the states that chunks begin with, if there is text before them
    entries: Tensor  # (S,) int64 those that requests begin with, and that all write
    snapshots: Tensor  # (S,) int64 entries for a copy of a chunk's state on the way
    positions: Tensor  # (S,) int64 tokens of the text after which it is taken
    prompts: Tensor  # (S,) int64 tokens of the prompt: in a chunk, an answer may follow; 0: all are


NUM_COLUMNS = tl.constexpr(len(Columns._fields))


class Blocks(NamedTuple):
    """The whole blocks of 64 tokens in prompts. Tokens after them, and those of answers, are stepped through."""

    rows: Tensor  # (N,) int32 the first of each block; -1: no block
    starts: Tensor  # (M + 1,) int32 the first block of each chunk


class PassPlan(NamedTuple):
    """Tensors that all layers with recurrent state read of a pass."""

    layout: Layout
    walks: Walks
    columns: Columns
    blocks: Blocks
    num_decoding: int
    is_old: bool = False
    """A kernel without `pdl_options` runs between it and the layers, which then read it, and states of requests, while
    the kernels before theirs still run."""


def max_steps(num_nodes: int, branches: bool) -> int:
    """Returns the most steps of a request: all nodes of the last pass, then paths to each of this one."""
    return num_nodes + (num_nodes * (num_nodes + 1) // 2 if branches else num_nodes)


@Op
def plan_blocks(layout: Layout, columns: Columns, num_decoding: int) -> Blocks:
    """A chunk with blocks begins at a multiple of 64 tokens."""
    prompts = columns.prompts[num_decoding:]
    lengths = layout.segment_lengths[num_decoding:]
    sizes = layout.starts.diff()[num_decoding:]
    counts = torch.where(prompts > 0, torch.minimum(prompts - lengths, sizes), sizes).clamp(min=0) // BLOCK_TOKENS
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
    rows = torch.full((count_blocks(layout, num_decoding),), -1, dtype=torch.int32)
    for first, block, count in zip(
        layout.starts[num_decoding:].tolist(), starts.tolist(), counts.tolist(), strict=False
    ):
        rows[block : block + count] = first + BLOCK_TOKENS * torch.arange(count, dtype=torch.int32)
    return Blocks(rows.to(starts.device), starts)


def count_blocks(layout: Layout, num_decoding: int) -> int:
    """Returns the most blocks of a pass."""
    return len(layout.nodes) // BLOCK_TOKENS if len(layout.segment_slots) > num_decoding else 0


@plan_blocks.kernel(when=lambda layout, *_: use_triton(layout.starts))
def plan_blocks_triton(layout: Layout, columns: Columns, num_decoding: int) -> Blocks:
    """One launch, if there are chunks."""
    num_blocks = count_blocks(layout, num_decoding)
    num_chunks = len(layout.segment_slots) - num_decoding
    device = layout.starts.device
    sizes = num_blocks, num_chunks + 1
    blocks = Blocks(*(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))
    if num_chunks:
        _plan_blocks[(max(triton.cdiv(num_blocks, BLOCK_ROWS), 1),)](
            blocks, layout, columns, num_decoding, num_blocks, num_chunks, ROWS=BLOCK_ROWS,
            CHUNKS=triton.next_power_of_2(num_chunks), TOKENS=BLOCK_TOKENS, num_warps=1,
            **pdl_options(device),
        )  # fmt: skip
    return blocks


@triton.jit(do_not_specialize=["num_decoding", "num_blocks", "num_chunks"])
def _plan_blocks(
    blocks, layout, columns, num_decoding, num_blocks, num_chunks,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    chunk = tl.arange(0, CHUNKS)
    segment = num_decoding + chunk
    exists = chunk < num_chunks
    first_row = tl.load(layout.starts + segment, mask=exists, other=0)
    size = tl.load(layout.starts + segment + 1, mask=exists, other=0) - first_row
    length = tl.load(layout.segment_lengths + segment, mask=exists, other=0)
    prompt = tl.load(columns.prompts + segment * NUM_COLUMNS, mask=exists, other=0)
    left = tl.where(prompt > 0, tl.minimum(prompt - length, size), size).to(tl.int32)
    count = tl.maximum(left, 0) // TOKENS
    end = tl.cumsum(count, axis=0)
    block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.sum((end[None, :] <= block[:, None]).to(tl.int32), axis=1)
    shift = tl.where(chunk[None, :] == place[:, None], (first_row - (end - count) * TOKENS)[None, :], 0)
    row = tl.where(block < tl.max(end, axis=0), tl.sum(shift, axis=1) + block * TOKENS, -1)
    tl.store(blocks.rows + block, row, mask=block < num_blocks)
    if tl.program_id(0) == 0:
        tl.store(blocks.starts + 1 + chunk, end, mask=exists)
        tl.store(blocks.starts, 0)


def path_above(node: int, parents: Sequence[int]) -> list[int]:
    """Returns the ancestors of a node, its parent first."""
    path = []
    while parents[node] >= 0:
        node = parents[node]
        path.append(node)
    return path


def tree_steps(parents: Sequence[int]) -> list[int]:
    """Returns the steps of a tree: nodes with flags. Parents stand before children; that of node 0, the root, is -1."""
    nodes = range(len(parents))
    paths = [path_above(node, parents) for node in nodes]
    sizes = [1 + sum(node in path for path in paths) for node in nodes]
    steps: list[int] = []

    def visit(node: int) -> None:
        children = sorted((child for child in nodes if parents[child] == node), key=lambda child: (sizes[child], child))
        branches = [child for child in children if sizes[child] > 1]
        steps.append(node | EMIT | (0 if children else LEAF))
        for child in children:
            if child in branches[1:]:
                root, *path = paths[child][::-1]
                steps.extend((root | RESTART, *path))
            visit(child)

    visit(0)
    return steps


@Op
def plan_walks(layout: Layout, replays: Tensor, columns: Columns, num_decoding: int) -> Walks:
    """replays (R, W) int32: accepted nodes of each slot's last pass, then -1."""
    num_nodes = replays.shape[1]
    num_rows = len(layout.parents)
    starts = layout.starts.tolist()
    parents = layout.parents.tolist()
    has_text = (layout.segment_lengths > 0).tolist()
    steps = torch.zeros(num_decoding, max_steps(num_nodes, layout.ancestors is not None), dtype=torch.int32)
    counts = torch.zeros(2, num_decoding, dtype=torch.int32)
    inputs = torch.full((num_rows + num_decoding * num_nodes, TAPS), NOTHING, dtype=torch.int32)
    for segment, slot in enumerate(layout.segment_slots.tolist()):
        start = starts[segment]
        size = starts[segment + 1] - start
        is_decoding = segment < num_decoding
        entry = int((columns.entries if is_decoding else columns.sources)[segment])
        state = (
            [STATE + 3 * entry + place for place in (2, 1, 0)] if is_decoding or has_text[segment] else [NOTHING] * 3
        )
        accepted = [node for node in replays[slot].tolist() if node >= 0] if is_decoding and size else []
        records = [-1 - (slot * num_nodes + node) for node in accepted]
        for place in range(len(accepted)):
            before = (records[: place + 1][::-1] + state)[:TAPS]
            inputs[num_rows + segment * num_nodes + place] = torch.tensor(before, dtype=torch.int32)
        above = parents[start : start + size] if is_decoding else list(range(-1, size - 1))
        for node in range(size):
            path = path_above(node, above)
            before = ([start + place for place in (node, *path)] + records[::-1] + state)[:TAPS]
            inputs[start + node] = torch.tensor(before, dtype=torch.int32)
        if is_decoding and size:
            walk = [num_rows + segment * num_nodes + place for place in range(len(accepted))]
            walk += [start + step for step in tree_steps(above)]
            steps[segment, : len(walk)] = torch.tensor(walk, dtype=torch.int32)
            counts[:, segment] = torch.tensor([len(walk), len(accepted)], dtype=torch.int32)
    device = layout.starts.device
    return Walks(steps.to(device), counts[0].to(device), counts[1].to(device), inputs.to(device))


@plan_walks.kernel(when=lambda layout, *_: use_triton(layout.starts))
def plan_walks_triton(layout: Layout, replays: Tensor, columns: Columns, num_decoding: int) -> Walks:
    """One launch: a program for each decoding request, and one for each block of rows."""
    num_nodes = replays.shape[1]
    num_rows = len(layout.parents)
    num_chunks = len(layout.segment_slots) - num_decoding
    longest = max_steps(num_nodes, layout.ancestors is not None)
    assert replays.is_contiguous()
    assert all(column.stride() == (NUM_COLUMNS.value,) for column in columns)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=replays.device)

    walks = Walks(
        empty(num_decoding, longest),
        empty(num_decoding),
        empty(num_decoding),
        empty(num_rows + num_decoding * num_nodes, TAPS),
    )
    _plan_walks[(num_decoding + triton.cdiv(num_rows, BLOCK_ROWS),)](
        walks, layout, replays, columns, num_decoding, num_rows, num_chunks, num_nodes, longest,
        TAPS=TAPS, ROWS=BLOCK_ROWS, NODES=triton.next_power_of_2(num_nodes),
        CHUNKS=triton.next_power_of_2(max(num_chunks, 1)), RESTART=RESTART, LEAF=LEAF, EMIT=EMIT,
        STATE=STATE, NOTHING=NOTHING,
        num_warps=max(1, triton.next_power_of_2(num_nodes) ** 2 // 1024), **pdl_options(replays.device),
    )  # fmt: skip
    return walks


@triton.jit(do_not_specialize=["num_decoding", "num_rows", "num_chunks"])
def _plan_walks(
    walks, layout, replays, columns, num_decoding, num_rows, num_chunks, num_nodes, longest,
    TAPS: tl.constexpr, ROWS: tl.constexpr, NODES: tl.constexpr, CHUNKS: tl.constexpr,
    RESTART: tl.constexpr, LEAF: tl.constexpr, EMIT: tl.constexpr, STATE: tl.constexpr, NOTHING: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    program = tl.program_id(0)
    if program < num_decoding:
        _plan_request(
            walks, layout, replays, columns, program, num_rows, num_nodes, longest, TAPS, NODES, RESTART, LEAF,
            EMIT, STATE, NOTHING,
        )  # fmt: skip
    else:
        row = (program - num_decoding) * ROWS + tl.arange(0, ROWS)
        _plan_chunk_rows(walks, layout, columns, row, num_decoding, num_rows, num_chunks, TAPS, CHUNKS, STATE, NOTHING)


@triton.jit
def _plan_request(
    walks, layout, replays, columns, request, num_rows, num_nodes, longest,
    TAPS: tl.constexpr, NODES: tl.constexpr, RESTART: tl.constexpr, LEAF: tl.constexpr, EMIT: tl.constexpr,
    STATE: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    start = tl.load(layout.starts + request)
    size = tl.load(layout.starts + request + 1) - start
    slot = tl.load(layout.segment_slots + request).to(tl.int32)
    entry = tl.load(columns.entries + request * NUM_COLUMNS).to(tl.int32)
    node = tl.arange(0, NODES)
    accepted = tl.load(replays + slot * num_nodes + node, mask=node < num_nodes, other=-1)
    num_replayed = tl.sum((accepted >= 0).to(tl.int32), axis=0)
    num_replayed = tl.where(size > 0, num_replayed, 0)
    first = num_rows + request * num_nodes
    steps = walks.steps + request * longest
    tl.store(walks.replayed + request, num_replayed)
    tl.store(steps + node, first + node, mask=node < num_replayed)
    # Inputs of the accepted nodes, then of this pass's: up along the path, then back in time.
    for column in tl.static_range(TAPS):
        place = node - column
        record = tl.load(replays + slot * num_nodes + place, mask=(place >= 0) & (node < num_replayed), other=0)
        source = tl.where(place >= 0, -1 - (slot * num_nodes + record), STATE + 3 * entry + 3 + place)
        source = tl.where(node < num_replayed, source, NOTHING)
        tl.store(walks.sources + (first + node) * TAPS + column, source, mask=node < num_nodes)
    above = node
    age = tl.zeros_like(node)
    exists = node < size
    for column in tl.static_range(TAPS):
        in_pass = above >= 0
        is_record = num_replayed > age
        place = num_replayed - 1 - age
        record = tl.load(replays + slot * num_nodes + place, mask=exists & ~in_pass & is_record, other=0)
        past = tl.where(is_record, -1 - (slot * num_nodes + record), STATE + 3 * entry + 3 + place)
        source = tl.where(in_pass, start + above, past)
        tl.store(walks.sources + (start + node) * TAPS + column, source, mask=exists)
        age += tl.where(in_pass, 0, 1)
        above = tl.load(layout.parents + start + above, mask=exists & in_pass, other=-1)
    if layout.ancestors is None:
        step = (start + node) | EMIT | tl.where(node == size - 1, LEAF, 0)
        tl.store(steps + num_replayed + node, step, mask=exists)
        tl.store(walks.counts + request, num_replayed + size)
    else:
        count = _plan_tree(steps + num_replayed, layout, start, size, NODES, RESTART, LEAF, EMIT)
        tl.store(walks.counts + request, num_replayed + count)


@triton.jit
def _plan_tree(
    steps, layout, start, size,
    NODES: tl.constexpr, RESTART: tl.constexpr, LEAF: tl.constexpr, EMIT: tl.constexpr,
):  # fmt: skip
    """Writes what `tree_steps` returns, all nodes at once, and returns how many. Matrices are (a node, another)."""
    node = tl.arange(0, NODES)
    exists = node < size
    mask = tl.load(layout.ancestors + start + node, mask=exists, other=0)
    parent = tl.load(layout.parents + start + node, mask=exists, other=-2)
    is_self = node[:, None] == node[None, :]
    is_above = (((mask[:, None] >> node[None, :].to(tl.int64)) & 1) == 1) & (node[None, :] < node[:, None]) | is_self
    is_above = (is_above & exists[:, None] & exists[None, :]).to(tl.int32)  # the other one is an ancestor, or the node
    depth = tl.sum(is_above, axis=1)
    width = tl.sum(is_above, axis=0)  # of its subtree
    rank = width * NODES + node  # among its siblings
    is_earlier = (parent[:, None] == parent[None, :]) & (rank[None, :] < rank[:, None]) & exists[:, None]
    offset = 1 + tl.sum(tl.where(is_earlier, width[None, :], 0), axis=1)
    place = tl.sum(is_above * offset[None, :], axis=1) - 1  # without what restarts step through
    restarts = tl.max((is_earlier & (width > 1)[None, :]).to(tl.int32), axis=1) == 1
    length = tl.where(restarts, depth - 1, 0)  # of the path from the root
    place += tl.sum(tl.where(place[None, :] <= place[:, None], length[None, :], 0), axis=1)
    flags = EMIT | tl.where(width == 1, LEAF, 0)
    tl.store(steps + place, (start + node) | flags, mask=exists)
    index = depth - 1  # on a path
    on_path = restarts[:, None] & (is_above == 1) & ~is_self
    step = (start + node) | tl.where(index == 0, RESTART, 0)
    tl.store(steps + (place - length)[:, None] + index[None, :], tl.broadcast_to(step[None, :], on_path.shape), on_path)
    return size + tl.sum(length, axis=0)


@triton.jit
def _plan_chunk_rows(
    walks, layout, columns, row, num_decoding, num_rows, num_chunks,
    TAPS: tl.constexpr, CHUNKS: tl.constexpr, STATE: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    first_row = tl.load(layout.starts + num_decoding)
    is_chunk = (row >= first_row) & (row < num_rows)
    index = tl.load(layout.nodes + row, mask=is_chunk, other=0)
    chunk = tl.arange(0, CHUNKS)
    ends = tl.load(layout.starts + num_decoding + 1 + chunk, mask=chunk < num_chunks, other=1 << 30)
    place = tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1)
    is_used = is_chunk & (place < num_chunks)
    source = columns.sources + (num_decoding + place) * NUM_COLUMNS
    entry = tl.load(source, mask=is_used, other=0).to(tl.int32)
    has_begun = tl.load(layout.segment_lengths + num_decoding + place, mask=is_used, other=0) > 0
    for column in tl.static_range(TAPS):
        past = tl.where(has_begun, STATE + 3 * entry + 3 + index - column, NOTHING)
        source = tl.where(index >= column, row - column, past)
        tl.store(walks.sources + row * TAPS + column, tl.where(is_used, source, NOTHING), mask=is_chunk)
