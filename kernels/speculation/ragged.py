"""The steps around a ragged target pass: store proposals, choose the nodes to verify, lay out the rows, accept, commit.

A pass has T rows in S = B + M segments: first the nodes of B decoding requests, any number each, then M chunks of
prompts, then rows that nobody uses. The host says how many nodes the pass verifies in all; `admit` fills them with
those most likely to be accepted. All counts stay on the device, so a pass of given B, M and T can be captured.

Slots keep proposals of up to W <= 64 nodes, best first, so that every prefix of one is a connected tree. The slot
`padding` fills up batches: it may occur many times, its length stays 0, and its nodes have acceptance probability 0, so
that it gets no rows.
Letters: B decoding requests, M chunks, S segments, T rows of the pass, H rows with logits, R slots, W nodes that a slot
stores, P pages per request, C acceptance bins.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from slipstream.kernels.attention.ragged import places_of_parts, places_of_parts_triton
from slipstream.kernels.launch import Op, pdl_options, use_triton, wait_for_inputs
from slipstream.kernels.limits import MAX_NODES
from slipstream.kernels.speculation.verify import ancestor_masks, unpack, verify

BUCKETS = 16  # of the draft's probability, and of places in a proposal: later nodes share the last one
BINS = BUCKETS * BUCKETS  # of a draft network's nodes; the host may append others to the table
# Where the buckets of a node's probability begin, as scores. Comparing puts a node into the same one on every device.
BUCKET_STARTS = tuple(math.log(bucket / BUCKETS) for bucket in range(1, BUCKETS))
MAX_DECODING = 1024  # requests of `admit`
ROOT_KEY = 256  # of roots in `admit`: above those of all other nodes
BLOCK_ROWS = 64  # of one program


class Stored(NamedTuple):
    """The proposals and texts of all slots, which `store` and `verify_rows` update in place."""

    tokens: Tensor  # (R, W) int32, root first, unused nodes -1
    parents: Tensor  # (R, W) int32, of the root and of unused nodes -1
    probabilities: Tensor  # (R, W) fp32 probability that a node is accepted: root 1, unused 0, never rising along W
    bins: Tensor  # (R, W) int32 acceptance bin, of the root and of unused nodes -1
    lengths: Tensor  # (R,) int32 committed tokens
    roots: Tensor  # (R,) int64 the last token, not yet in the KV cache


class Chunks(NamedTuple):
    """The prompts' parts of a pass; M may be 0."""

    slots: Tensor  # (M,) int64
    starts: Tensor  # (M,) int64 tokens before the chunk
    counts: Tensor  # (M,) int64 tokens; 0: padding
    is_last: Tensor  # (M,) int64 whether a prompt ends with it: 0 or 1
    tokens: Tensor  # (sum of counts, or more,) int64, chunk after chunk; not empty unless M is 0
    next_tokens: Tensor  # (M,) int64 the token after the chunk, or -1


class Layout(NamedTuple):
    """Segments and rows of a pass. Rows that nobody uses belong to the slot `padding`."""

    starts: Tensor  # (S + 1,) int32 first row of each segment; the last number counts the rows in use
    segment_slots: Tensor  # (S,) int64
    segment_lengths: Tensor  # (S,) int64 tokens committed before the segment
    requests: Tensor  # (T,) int64 slot
    nodes: Tensor  # (T,) int32 index within the segment; 0 in unused rows
    tokens: Tensor  # (T,) int64 ids to embed; 0 in unused rows
    parents: Tensor  # (T,) int32 node index of the parent; -1 for roots, chunks and unused rows
    positions: Tensor  # (T,) int64 length + depth in the tree, or place in the prompt; 0 in unused rows
    following: Tensor  # (T,) int64 position of the token to sample: the row's and 1
    places: Tensor  # (T,) int64 place among the request's cached tokens, length + index; 0 in unused rows
    kv_slots: Tensor  # (T,) int64 where the KV goes; unused rows: KV slot 0, of the dump page
    ancestors: Tensor | None  # (T,) int64 bit masks (verify.py), -1 of chunks and unused rows; None: all are chains


class Heads(NamedTuple):
    """Rows that need logits: all nodes, then the last row of each chunk."""

    rows: Tensor  # (H,) int64; 0 where unused, here and below
    requests: Tensor  # (H,) int64 slot; `padding` where unused
    positions: Tensor  # (H,) int64 of the token to sample
    nodes: Tensor  # (H,) int32 index within the request's nodes; 0 of chunks


class Verified(NamedTuple):
    """Tokens that a pass emits. Rows in order of acceptance: row i of a request is its i-th accepted node."""

    nodes: Tensor  # (B, W) int32 accepted nodes, root first, -1 padded
    tokens: Tensor  # (S, W) int32 emitted tokens, -1 padded
    lengths: Tensor  # (S,) int32 emitted tokens: 0 of padding and of chunks that do not end their prompt
    next_tokens: Tensor  # (T,) int32 the token after each row in order of acceptance; -1 beyond the accepted ones
    order: Tensor | None  # (T,) int64 row of the node that each row has in order of acceptance; None: rows' own order
    last: Tensor  # (S,) int64 each segment's last row, in order of acceptance; T - 1 of padding


@Op
def store(
    stored: Stored, requests: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, table: Tensor, padding: int
) -> None:
    """Writes proposals of N <= W nodes to slots `requests` (B,) int64 and marks the slots' other nodes unused.

    tokens, parents (B, N) of any integer type, the root first; scores (B, N) fp32 the draft's log-probability that a
    node is reached. Nodes after the root are unused where the token is -1 or the score -inf. A node's bin is
    16 * (min(i, 16) - 1) + its probability's sixteenth; table (C,) fp32: how probably nodes of a bin are accepted.
    """
    node = torch.arange(tokens.shape[1], device=tokens.device)
    starts = scores.new_tensor(BUCKET_STARTS)
    is_root = node == 0
    is_text = (requests != padding)[:, None]
    in_use = is_text & (is_root | (tokens >= 0) & (scores > -torch.inf))
    bins = (node.clamp(1, BUCKETS) - 1) * BUCKETS + torch.searchsorted(starts, scores.contiguous(), right=True)
    probabilities = torch.where(in_use, torch.where(is_root, 1.0, table[bins]), 0.0).cummin(dim=1).values
    unused = stored.tokens.shape[1] - tokens.shape[1]
    drafted = in_use & ~is_root
    stored.probabilities[requests] = pad(probabilities, (0, unused))
    for column, nodes, has in (
        (stored.tokens, tokens, in_use), (stored.parents, parents, drafted), (stored.bins, bins, drafted)
    ):  # fmt: skip
        column[requests] = pad(torch.where(has, nodes, -1).int(), (0, unused), value=-1)


@store.kernel(when=lambda stored, *_: use_triton(stored.tokens))
def store_triton(
    stored: Stored, requests: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, table: Tensor, padding: int
) -> None:
    """One launch, a program per request."""
    (B, N), W = tokens.shape, stored.tokens.shape[1]
    assert N <= W <= MAX_NODES
    assert all(x.is_contiguous() for x in stored)
    if B:
        _store[(B,)](
            *stored[:4], requests, tokens, parents, scores, table,
            *tokens.stride(), *parents.stride(), *scores.stride(), N, W, padding,
            BUCKETS=BUCKETS, STARTS=BUCKET_STARTS, NODES=triton.next_power_of_2(W), num_warps=1,
            **pdl_options(requests.device),
        )  # fmt: skip


@Op
def admit(
    probabilities: Tensor,
    requests: Tensor,
    budget: Tensor,
    max_nodes: int,
    lengths: Tensor | None = None,
    passes: Tensor | None = None,
) -> Tensor:
    """Counts the nodes of each request that a pass verifies, (B,) int32: a prefix of those in its slot.

    Every root is admitted, and of all other nodes the likeliest, up to budget (1,) int32 nodes with the roots, at most
    `max_nodes` of a request. probabilities (R, W) fp32 as in Stored, compared in steps of 1/255; among equals the first
    requests (B,) int64 win. Nodes with probability 0 are never admitted. With lengths (R,) int32 of committed tokens,
    nodes that may lie where attention's parts get longer are not, either: their context would be added up unlike in a
    later step. passes (1,) int64 goes up by one."""
    if passes is not None:
        passes += 1
    keys = (probabilities[requests, :max_nodes] * 255).ceil().int()
    if not keys[:, 1:].any():
        return (keys[:, 0] > 0).int()
    if lengths is not None:
        committed = lengths[requests][:, None]
        keys = torch.where(
            committed + torch.arange(keys.shape[1], device=keys.device) < places_of_parts(committed), keys, 0
        )
    is_text = keys[:, 0] > 0
    drafted = keys[:, 1:]
    order = drafted.flatten().sort(descending=True, stable=True).indices
    spare = (budget - is_text.sum()).clamp(min=0)
    is_admitted = torch.empty_like(order, dtype=torch.bool)
    is_admitted[order] = torch.arange(len(order), device=order.device) < spare
    return (is_text + (is_admitted.view_as(drafted) & (drafted > 0)).sum(dim=1)).int()


@admit.kernel()
def admit_triton(
    probabilities: Tensor,
    requests: Tensor,
    budget: Tensor,
    max_nodes: int,
    lengths: Tensor | None = None,
    passes: Tensor | None = None,
) -> Tensor:
    """One program."""
    B = len(requests)
    W = probabilities.shape[1]
    assert B <= MAX_DECODING
    assert B > 0 or passes is None
    assert probabilities.is_contiguous()
    counts = torch.empty(B, dtype=torch.int32, device=requests.device)
    if B:
        max_nodes = min(max_nodes, W)
        block = triton.next_power_of_2(B)
        nodes = triton.next_power_of_2(max_nodes)
        _admit[(1,)](
            probabilities, requests, budget, lengths, passes, counts, B, W, max_nodes,
            ROOT_KEY=ROOT_KEY, REQUESTS=block, NODES=nodes, num_warps=min(max(block * nodes // 128, 1), 16),
            **pdl_options(requests.device),
        )  # fmt: skip
    return counts


@Op
def lay_out(
    stored: Stored,
    counts: Tensor,
    requests: Tensor,
    chunks: Chunks,
    pages: Tensor,
    page_size: int,
    num_rows: int,
    branches: bool,
    padding: int,
) -> Layout:
    """The `num_rows` rows of a pass over counts (B,) int32 nodes of slots `requests` (B,) int64, and chunks.

    pages (R, P) int64: the page table that kv_slots are looked up in. `branches`: proposals may be trees, otherwise all
    are chains. All counts together must not exceed num_rows.
    """
    B = len(requests)
    T = num_rows
    device = requests.device
    slots = torch.cat((requests, chunks.slots))
    lengths = torch.cat((stored.lengths[requests].long(), chunks.starts))
    starts = pad(torch.cat((counts.long(), chunks.counts)).cumsum(dim=0), (1, 0))
    row = torch.arange(T, device=device)
    segment = torch.searchsorted(starts[1:], row, right=True)  # after the last one: unused
    in_use = row < starts[-1]
    is_node = row < starts[B]
    segment = segment.clamp(max=len(slots) - 1)
    index = torch.where(in_use, row - starts[segment], 0)
    places = torch.where(in_use, lengths[segment] + index, 0)
    slot = torch.where(in_use, slots[segment], padding)
    node = torch.where(is_node, index, 0)
    tokens = stored.tokens[slot, node].clamp(min=0).long()
    if len(chunks.slots):
        prompt = chunks.tokens[(row - starts[B]).clamp(0, len(chunks.tokens) - 1)]
        tokens = torch.where(is_node, tokens, prompt)
    ancestors = None
    positions = places
    if branches:
        masks = ancestor_masks(stored.parents[requests])
        masks = pad(masks, (0, 0, 0, 1))[segment.clamp(max=B), node]
        ancestors = torch.where(is_node, masks, -1)
        positions = torch.where(is_node, places - index + unpack(masks, MAX_NODES).sum(dim=-1) - 1, places)
    page = pages[slot, places // page_size]
    return Layout(
        starts=starts.int(),
        segment_slots=slots,
        segment_lengths=lengths,
        requests=slot,
        nodes=index.int(),
        tokens=torch.where(in_use, tokens, 0),
        parents=torch.where(is_node, stored.parents[slot, node], -1),
        positions=positions,
        following=positions + 1,
        places=places,
        kv_slots=torch.where(in_use, page * page_size + places % page_size, 0),
        ancestors=ancestors,
    )


@lay_out.kernel(when=lambda stored, *_: use_triton(stored.tokens))
def lay_out_triton(
    stored: Stored,
    counts: Tensor,
    requests: Tensor,
    chunks: Chunks,
    pages: Tensor,
    page_size: int,
    num_rows: int,
    branches: bool,
    padding: int,
) -> Layout:
    """One launch: a program per decoding request, and one per block of rows for what follows the nodes."""
    B = len(requests)
    M = len(chunks.slots)
    T = num_rows
    W = stored.tokens.shape[1]
    assert W <= MAX_NODES
    assert pages.stride(1) == 1
    assert all(x.is_contiguous() for x in (*stored, *chunks))
    layout = _empty_layout(B, M, T, branches, requests.device)
    decoding = triton.next_power_of_2(max(B, 1))
    prompts = triton.next_power_of_2(max(M, 1))
    _lay_out[(B + triton.cdiv(T, BLOCK_ROWS),)](
        layout, stored.tokens, stored.parents, stored.lengths, counts, requests, chunks, pages,
        B, M, T, W, pages.stride(0), page_size, padding,
        DECODING=decoding, CHUNKS=prompts, NODES=triton.next_power_of_2(W), ROWS=BLOCK_ROWS,
        num_warps=1 if max(decoding, prompts * 8) <= 128 else 4, **pdl_options(requests.device),
    )  # fmt: skip
    return layout


def _empty_layout(decoding: int, chunks: int, num_rows: int, branches: bool, device: torch.device) -> Layout:
    def narrow(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=device)

    def wide(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, device=device)

    S = decoding + chunks
    T = num_rows
    return Layout(
        narrow(S + 1), wide(S), wide(S), wide(T), narrow(T), wide(T), narrow(T), wide(T), wide(T), wide(T), wide(T),
        wide(T) if branches else None,
    )  # fmt: skip


@Op
def select_heads(layout: Layout, num_decoding: int, num_heads: int, padding: int) -> Heads:
    """The rows with logits of a pass whose first `num_decoding` segments are nodes: these are rows 0 to n - 1, and the
    last row of chunk m comes at n + m, unless the chunk is padding. num_heads: H, at least n + M."""
    starts = layout.starts.long()
    entry = torch.arange(num_heads, device=layout.starts.device)
    num_nodes = starts[num_decoding]
    chunk_ends = pad(starts[num_decoding + 1 :], (0, 1))  # of no chunk: 0
    filled = pad(starts[num_decoding + 1 :] > starts[num_decoding:-1], (0, 1))
    chunk = (entry - num_nodes).clamp(0, len(filled) - 1)
    is_node = entry < num_nodes
    in_use = is_node | filled[chunk]
    rows = torch.where(in_use, torch.where(is_node, entry, chunk_ends[chunk] - 1), 0)
    return Heads(
        rows=rows,
        requests=torch.where(in_use, layout.requests[rows], padding),
        positions=torch.where(in_use, layout.following[rows], 0),
        nodes=torch.where(is_node, layout.nodes[rows], 0),
    )


@select_heads.kernel(when=lambda layout, *_: use_triton(layout.starts))
def select_heads_triton(layout: Layout, num_decoding: int, num_heads: int, padding: int) -> Heads:
    """One launch."""
    device = layout.starts.device
    num_chunks = len(layout.segment_slots) - num_decoding
    rows, requests, positions = (torch.empty(num_heads, dtype=torch.int64, device=device) for _ in range(3))
    nodes = torch.empty(num_heads, dtype=torch.int32, device=device)
    if num_heads:
        _select_heads[(triton.cdiv(num_heads, BLOCK_ROWS),)](
            layout.starts, layout.requests, layout.following, layout.nodes, rows, requests, positions, nodes,
            num_decoding, num_chunks, num_heads, padding, ROWS=BLOCK_ROWS, num_warps=1, **pdl_options(device),
        )  # fmt: skip
    return Heads(rows, requests, positions, nodes)


@Op
def verify_rows(
    layout: Layout,
    sampled: Tensor,
    stored: Stored,
    chunks: Chunks,
    num_decoding: int,
    results: Tensor,
    padding: int,
    passes: Tensor | None = None,
) -> Verified:
    """Accepts nodes of the first `num_decoding` segments as `verify` does, and commits what the pass computed.

    sampled (H,) int64: the target's token after each row of `select_heads`; -1, where nothing could be sampled, ends a
    path and is emitted. Slots get their new length and, where tokens are emitted, the last of these (0 for -1) as root
    and as their only node. Writes results (S, 2 + 2 * W, with ancestors 2 + 3 * W) int32 for the host: numbers of
    emitted tokens and of admitted nodes (0 of chunks), tokens, bins of the nodes that were stored, admitted or not,
    and, with ancestors, accepted nodes; each of these lists -1 padded to W. They may lie in pinned memory. With passes
    (1,) int64, a count from `admit`, results (N, S, ...) are those of N passes, which take turns.
    """
    if passes is not None:
        results = results[int(passes) % len(results)]
    B = num_decoding
    W = stored.tokens.shape[1]
    T = len(layout.nodes)
    M = len(chunks.slots)
    starts = layout.starts.long()
    node = torch.arange(W, device=sampled.device)
    counts = (starts[1:] - starts[:-1])[:B, None]  # (B, 1)
    rows = starts[:B, None] + node  # (B, W)
    node_rows = rows.clamp(max=min(T, len(sampled)) - 1)
    paths = None
    parents = layout.parents
    tokens = layout.tokens[node_rows].masked_fill(node >= counts, -1)
    if layout.ancestors is not None:
        paths = layout.ancestors[node_rows].masked_fill(node >= counts, -1)
        parents = layout.parents[node_rows]
    nodes, emitted, accepted = verify(tokens, parents, sampled[node_rows], paths)
    is_padding = counts == 0
    nodes = nodes.masked_fill_(is_padding, -1)
    emitted = emitted.masked_fill_(is_padding, -1)
    lengths = accepted.masked_fill_(is_padding[:, 0], 0)

    following = torch.full((T + 1,), -1, dtype=torch.int32, device=sampled.device)  # one more, for what has no row
    following[torch.where(nodes >= 0, rows, T)] = emitted
    order = None
    if layout.ancestors is not None:
        order = torch.arange(T + 1, device=sampled.device)
        order[torch.where(nodes >= 0, rows, T)] = starts[:B, None] + nodes
        order = order[:T]
    lists = [stored.bins[layout.segment_slots[:B]].masked_fill_(is_padding, -1)]
    lists += [] if order is None else [nodes]
    advances = lengths
    if M:
        chunk_tokens = _follow_chunks(layout, sampled, chunks, B, following)
        emitted = torch.cat((emitted, pad(chunk_tokens[:, None], (0, W - 1), value=-1)))
        lengths = torch.cat((lengths, (chunks.is_last * (chunks.counts > 0)).int()))
        advances = torch.cat((advances, chunks.counts))
        counts = pad(counts, (0, 0, 0, M))
        lists = [pad(x, (0, 0, 0, M), value=-1) for x in lists]
    results.copy_(torch.cat((lengths[:, None], counts, emitted, *lists), dim=1))
    _commit(stored, layout, advances, lengths, emitted, padding)
    last = torch.where(advances > 0, starts[:-1] + advances - 1, T - 1)
    return Verified(nodes, emitted, lengths, following[:T], order, last)


def _follow_chunks(layout: Layout, sampled: Tensor, chunks: Chunks, num_decoding: int, following: Tensor) -> Tensor:
    """Writes the token after each row of a chunk to following (T + 1,), whose last place is of no row. Returns (M,)
    int32 the tokens that chunks emit, or -1."""
    M = len(chunks.slots)
    T = len(following) - 1
    ends = layout.starts[num_decoding + 1 :].long()
    num_nodes = layout.starts[num_decoding]
    tokens = sampled[(num_nodes + torch.arange(M, device=sampled.device)).clamp(max=len(sampled) - 1)]
    index = torch.arange(T, device=sampled.device) - num_nodes
    is_prompt = (index >= 0) & (index < ends[-1] - num_nodes)
    following[:T][is_prompt] = chunks.tokens[(index[is_prompt] + 1).clamp(max=len(chunks.tokens) - 1)].int()
    emits = (chunks.counts > 0) & (chunks.is_last > 0)
    following[torch.where(chunks.counts > 0, ends - 1, T)] = torch.where(emits, tokens, chunks.next_tokens).int()
    return torch.where(emits, tokens, -1).int()


def _commit(stored: Stored, layout: Layout, advances: Tensor, lengths: Tensor, emitted: Tensor, padding: int) -> None:
    """advances (S,): by how many tokens each segment's slot grows."""
    slots = layout.segment_slots
    before = layout.segment_lengths
    W = stored.tokens.shape[1]
    grows = (advances > 0) & (slots != padding)
    emits = grows & (lengths > 0)
    last = (lengths.long() - 1).clamp(min=0)
    roots = emitted.gather(1, last[:, None]).clamp(min=0).masked_fill(~emits[:, None], 0)
    # Segments that have nothing to write get the slot `padding`, whose values stay the same.
    to = torch.where(grows, slots, padding)
    stored.lengths.index_copy_(0, to, (before + advances).masked_fill(~grows, 0).int())
    to = torch.where(emits, slots, padding)
    stored.roots.index_copy_(0, to, roots.squeeze(1).long())
    tokens = roots.masked_fill(~emits[:, None], -1)
    stored.tokens.index_copy_(0, to, pad(tokens, (0, W - 1), value=-1))
    stored.probabilities.index_copy_(0, to, pad(emits[:, None].float(), (0, W - 1)))
    stored.parents.index_fill_(0, to, -1)
    stored.bins.index_fill_(0, to, -1)


@verify_rows.kernel(when=lambda layout, *_: use_triton(layout.starts))
def verify_rows_triton(
    layout: Layout,
    sampled: Tensor,
    stored: Stored,
    chunks: Chunks,
    num_decoding: int,
    results: Tensor,
    padding: int,
    passes: Tensor | None = None,
) -> Verified:
    """One launch: a program per segment, and one per block of rows for what follows the nodes."""
    B = num_decoding
    S = len(layout.segment_slots)
    T = len(layout.nodes)
    W = stored.tokens.shape[1]
    assert W <= MAX_NODES
    assert all(x.is_contiguous() for x in (*stored, *chunks, sampled))
    if passes is None:
        results = results[None]
    assert results.shape[1:] == (S, 2 + (2 if layout.ancestors is None else 3) * W)
    assert results.stride(2) == 1
    device = sampled.device
    nodes, tokens = (torch.empty(n, W, dtype=torch.int32, device=device) for n in (B, S))
    lengths, following = (torch.empty(n, dtype=torch.int32, device=device) for n in (S, T))
    last = torch.empty(S, dtype=torch.int64, device=device)
    order = None if layout.ancestors is None else torch.empty(T, dtype=torch.int64, device=device)
    verified = Verified(nodes, tokens, lengths, following, order, last)
    prompts = triton.next_power_of_2(max(S - B, 1))
    _verify_rows[(S + triton.cdiv(T, BLOCK_ROWS),)](
        verified, layout, sampled, stored, chunks, results, passes, len(results), *results.stride()[:2],
        B, S, T, W, padding,
        CHUNKS=prompts, NODES=triton.next_power_of_2(W), ROWS=BLOCK_ROWS,
        num_warps=1 if prompts <= 16 else 4, **pdl_options(device),
    )  # fmt: skip
    return verified


@triton.jit(
    do_not_specialize=[
        "stride", "node_stride", "parent_stride", "parent_node_stride", "score_stride", "score_node_stride", "N", "W",
        "padding",
    ]
)  # fmt: skip
def _store(
    tokens_out, parents_out, probabilities_out, bins_out, requests, tokens, parents, scores, table,
    stride, node_stride, parent_stride, parent_node_stride, score_stride, score_node_stride, N, W, padding,
    BUCKETS: tl.constexpr, STARTS: tl.constexpr, NODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    request = tl.program_id(0)
    node = tl.arange(0, NODES)
    slot = tl.load(requests + request)
    is_new = node < tl.where(slot == padding, 0, N)
    token = tl.load(tokens + request * stride + node * node_stride, mask=is_new, other=-1).to(tl.int32)
    parent = tl.load(parents + request * parent_stride + node * parent_node_stride, mask=is_new, other=-1).to(tl.int32)
    score = tl.load(scores + request * score_stride + node * score_node_stride, mask=is_new, other=float("-inf"))
    is_root = is_new & (node == 0)
    is_drafted = is_new & (node > 0) & (token >= 0) & (score > float("-inf"))
    bucket = tl.zeros_like(node)
    for index in tl.static_range(BUCKETS - 1):
        bucket += (score >= STARTS[index]).to(tl.int32)
    acceptance_bin = (tl.minimum(tl.maximum(node, 1), BUCKETS) - 1) * BUCKETS + bucket
    probability = tl.where(is_root, 1.0, tl.load(table + acceptance_bin, mask=is_drafted, other=0.0))
    probability = tl.associative_scan(probability, 0, _minimum)
    inside = node < W
    out = slot * W + node
    tl.store(tokens_out + out, tl.where(is_root | is_drafted, token, -1), mask=inside)
    tl.store(parents_out + out, tl.where(is_drafted, parent, -1), mask=inside)
    tl.store(probabilities_out + out, probability, mask=inside)
    tl.store(bins_out + out, tl.where(is_drafted, acceptance_bin, -1), mask=inside)


@triton.jit
def _minimum(a, b):
    return tl.minimum(a, b)


@triton.jit(do_not_specialize=["B", "W", "max_nodes"])
def _admit(
    probabilities, requests, budget, lengths, passes, counts, B, W, max_nodes,
    ROOT_KEY: tl.constexpr, REQUESTS: tl.constexpr, NODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Searches the lowest key of which, and of all above, the budget holds every node; then shares out the rest among
    the nodes one key lower. Probabilities never rise along a proposal, so counts say which nodes these are."""
    wait_for_inputs(PDL)
    if passes is not None:
        tl.store(passes, tl.load(passes) + 1)
    request = tl.arange(0, REQUESTS)
    node = tl.arange(0, NODES)
    is_request = request < B
    slot = tl.load(requests + request, mask=is_request, other=0)
    inside = is_request[:, None] & (node < max_nodes)[None, :]
    if lengths is not None:
        length = tl.load(lengths + slot, mask=is_request, other=0)
        inside &= (length[:, None] + node[None, :]) < places_of_parts_triton(length)[:, None]
    probability = tl.load(probabilities + slot[:, None] * W + node[None, :], mask=inside, other=0.0)
    key = tl.ceil(probability * 255).to(tl.int32)
    key = tl.where((node == 0)[None, :] & (key > 0), ROOT_KEY, key)
    num_nodes = tl.maximum(tl.load(budget), _count(key >= ROOT_KEY))
    # where the lowest key is; all roots fit
    low = 1
    high = ROOT_KEY
    while low < high:
        middle = (low + high) // 2
        fits = _count(key >= middle) <= num_nodes
        low = tl.where(fits, low, middle + 1)
        high = tl.where(fits, middle, high)
    count = tl.sum((key >= high).to(tl.int32), axis=1)
    equal = tl.sum(((key == high - 1) & (key > 0)).to(tl.int32), axis=1)
    spare = num_nodes - tl.sum(count, axis=0) - (tl.cumsum(equal, axis=0) - equal)
    tl.store(counts + request, count + tl.minimum(tl.maximum(spare, 0), equal), mask=is_request)


@triton.jit
def _count(is_counted):
    return tl.sum(tl.sum(is_counted.to(tl.int32), axis=1), axis=0)


@triton.jit(do_not_specialize=["B", "M", "T", "W", "page_stride", "padding"])
def _lay_out(
    layout, stored_tokens, stored_parents, stored_lengths, counts, requests, chunks, pages,
    B, M, T, W, page_stride, page_size, padding,
    DECODING: tl.constexpr, CHUNKS: tl.constexpr, NODES: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    program = tl.program_id(0)
    request = tl.arange(0, DECODING)
    count = tl.load(counts + request, mask=request < B, other=0)
    if program < B:
        first = tl.sum(tl.where(request < program, count, 0), axis=0)
        num_own = tl.load(counts + program)
        slot = tl.load(requests + program)
        length = tl.load(stored_lengths + slot).to(tl.int64)
        tl.store(layout.starts + program, first)
        tl.store(layout.segment_slots + program, slot)
        tl.store(layout.segment_lengths + program, length)
        node = tl.arange(0, NODES)
        inside = node < num_own
        row = first + node
        token = tl.load(stored_tokens + slot * W + node, mask=inside, other=0)
        parent = tl.load(stored_parents + slot * W + node, mask=inside, other=-1)
        depth = node
        if layout.ancestors is not None:
            mask, depth = _walk_up(stored_parents + slot * W, node, inside)
            tl.store(layout.ancestors + row, mask, mask=inside)
        place = length + node
        kv_slot = _kv_slot(pages + slot * page_stride, place, page_size, inside)
        _store_rows(
            layout, row, inside, slot + tl.zeros_like(place), node, token, parent, length + depth, place, kv_slot
        )  # fmt: skip
    else:
        _lay_out_chunks(
            layout, chunks, pages, program - B, tl.sum(count, axis=0), B, M, T, page_stride, page_size, padding,
            CHUNKS, ROWS,
        )  # fmt: skip


@triton.jit
def _lay_out_chunks(
    layout, chunks, pages, block, num_nodes, B, M, T, page_stride, page_size, padding,
    CHUNKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Lays out a block of the rows that follow the nodes."""
    row = block * ROWS + tl.arange(0, ROWS)
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < M
    size = tl.load(chunks.counts + chunk, mask=is_chunk, other=0).to(tl.int32)
    end = num_nodes + tl.cumsum(size, axis=0)
    if block == 0:
        tl.store(layout.starts + B, num_nodes)
        tl.store(layout.starts + B + 1 + chunk, end, mask=is_chunk)
        slots = tl.load(chunks.slots + chunk, mask=is_chunk, other=0)
        tl.store(layout.segment_slots + B + chunk, slots, mask=is_chunk)
        starts = tl.load(chunks.starts + chunk, mask=is_chunk, other=0)
        tl.store(layout.segment_lengths + B + chunk, starts, mask=is_chunk)
    has_ended = is_chunk[None, :] & (end[None, :] <= row[:, None])  # before the row
    chunk_index = tl.sum(has_ended.to(tl.int32), axis=1)
    first = num_nodes + tl.sum(tl.where(has_ended, size[None, :], 0), axis=1)
    in_use = (row >= num_nodes) & (chunk_index < M)
    index = tl.where(in_use, row - first, 0)
    slot = tl.load(chunks.slots + chunk_index, mask=in_use, other=0)
    place = tl.load(chunks.starts + chunk_index, mask=in_use, other=0) + index
    token = tl.load(chunks.tokens + row - num_nodes, mask=in_use, other=0)
    kv_slot = _kv_slot(pages + slot * page_stride, place, page_size, in_use)
    in_pass = (row >= num_nodes) & (row < T)
    slot = tl.where(in_use, slot, padding)
    _store_rows(layout, row, in_pass, slot, index, token, tl.full((ROWS,), -1, tl.int32), place, place, kv_slot)
    if layout.ancestors is not None:
        tl.store(layout.ancestors + row, tl.full((ROWS,), -1, tl.int64), mask=in_pass)


@triton.jit
def _kv_slot(pages, place, page_size, in_use):
    page = tl.load(pages + place // page_size, mask=in_use, other=0)
    return tl.where(in_use, page * page_size + place % page_size, 0)


@triton.jit
def _store_rows(layout, row, in_pass, slot, node, token, parent, position, place, kv_slot):
    tl.store(layout.requests + row, slot, mask=in_pass)
    tl.store(layout.nodes + row, node, mask=in_pass)
    tl.store(layout.tokens + row, tl.maximum(token, 0).to(tl.int64), mask=in_pass)
    tl.store(layout.parents + row, parent, mask=in_pass)
    tl.store(layout.positions + row, position, mask=in_pass)
    tl.store(layout.following + row, position + 1, mask=in_pass)
    tl.store(layout.places + row, place, mask=in_pass)
    tl.store(layout.kv_slots + row, kv_slot, mask=in_pass)


@triton.jit
def _walk_up(parents, node, inside):
    """Bit masks of the nodes' ancestors, themselves included, and the nodes' depths. All walk to the root at once."""
    bit = tl.full(node.shape, 1, tl.int64)
    mask = bit << node.to(tl.int64)
    above = tl.where(inside, node, 0)
    depth = tl.zeros_like(node)
    while tl.max(above, axis=0) > 0:
        depth += (above > 0).to(tl.int32)
        above = tl.maximum(tl.load(parents + above, mask=above > 0, other=0), 0)
        mask |= bit << above.to(tl.int64)
    return mask, depth


@triton.jit(do_not_specialize=["B", "M", "H", "padding"])
def _select_heads(
    starts, layout_requests, layout_following, layout_nodes, rows, requests, positions, nodes, B, M, H, padding,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    num_nodes = tl.load(starts + B)
    inside = entry < H
    chunk = entry - num_nodes
    is_node = entry < num_nodes
    is_chunk = (chunk >= 0) & (chunk < M)
    start = tl.load(starts + B + chunk, mask=is_chunk, other=0)
    end = tl.load(starts + B + 1 + chunk, mask=is_chunk, other=0)
    in_use = inside & (is_node | (end > start))
    row = tl.where(in_use, tl.where(is_node, entry, end - 1), 0)
    tl.store(rows + entry, row.to(tl.int64), mask=inside)
    tl.store(requests + entry, tl.load(layout_requests + row, mask=in_use, other=padding), mask=inside)
    tl.store(positions + entry, tl.load(layout_following + row, mask=in_use, other=0), mask=inside)
    tl.store(nodes + entry, tl.load(layout_nodes + row, mask=in_use & is_node, other=0), mask=inside)


@triton.jit(do_not_specialize=["pass_stride", "stride", "B", "S", "T", "W", "padding"])
def _verify_rows(
    verified, layout, sampled, stored, chunks, results, passes, num_passes, pass_stride, stride, B, S, T, W, padding,
    CHUNKS: tl.constexpr, NODES: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    program = tl.program_id(0)
    if passes is not None:
        results += tl.load(passes) % num_passes * pass_stride
    if program < B:
        _verify_request(verified, layout, sampled, stored, results + program * stride, program, T, W, padding, NODES)
    elif program < S:
        results += program * stride
        _end_chunk(verified, layout, sampled, stored, chunks, results, program, B, T, W, padding, NODES)
    else:
        _follow_rows(verified, layout, sampled, chunks, program - S, B, S, T, CHUNKS, ROWS)


@triton.jit
def _verify_request(verified, layout, sampled, stored, results, request, T, W, padding, NODES: tl.constexpr):
    """`verify` of one request. Bit i of `matches` says whether node i is what the target sampled at its parent, a node
    is accepted if that holds for its whole path, and accepted nodes are ranked by a running count."""
    node = tl.arange(0, NODES)
    first = tl.load(layout.starts + request)
    num_nodes = tl.load(layout.starts + request + 1) - first
    slot = tl.load(layout.segment_slots + request)
    before = tl.load(layout.segment_lengths + request)
    inside = node < W
    is_admitted = node < num_nodes
    row = first + node
    bit = tl.full((NODES,), 1, tl.int64) << node.to(tl.int64)
    path = bit | (bit - 1)
    if layout.ancestors is not None:
        path = tl.load(layout.ancestors + row, mask=is_admitted, other=0)
    token = tl.load(layout.tokens + row, mask=is_admitted, other=0)
    parent = tl.load(layout.parents + row, mask=is_admitted, other=0)
    expected = tl.load(sampled + first + tl.maximum(parent, 0), mask=is_admitted, other=-1)
    after = tl.load(sampled + row, mask=is_admitted, other=-1).to(tl.int32)
    acceptance_bin = tl.load(stored.bins + slot * W + node, mask=node < tl.where(num_nodes > 0, W, 0), other=-1)
    matches = tl.sum(tl.where((node == 0) | (token == expected), bit, 0), axis=0)
    accepted = is_admitted & ((path & ~matches) == 0)
    length = tl.sum(accepted.to(tl.int32), axis=0)
    rank = tl.cumsum(accepted.to(tl.int32), axis=0) - accepted.to(tl.int32)

    unused = inside & (node >= length)
    rejected = is_admitted & (node >= length)
    tl.store(results, length)
    tl.store(results + 1, num_nodes)
    _store_path(results + 2, rank, after, accepted, node, -1, unused)
    tl.store(results + 2 + W + node, acceptance_bin, mask=inside)
    _store_path(verified.tokens + request * W, rank, after, accepted, node, -1, unused)
    _store_path(verified.nodes + request * W, rank, node, accepted, node, -1, unused)
    _store_path(verified.next_tokens + first, rank, after, accepted, node, -1, rejected)
    if layout.ancestors is not None:
        _store_path(results + 2 + 2 * W, rank, node, accepted, node, -1, unused)
        _store_path(verified.order + first, rank, row.to(tl.int64), accepted, node, row.to(tl.int64), rejected)
    tl.store(verified.lengths + request, length)
    tl.store(verified.last + request, tl.where(length > 0, first + length, T).to(tl.int64) - 1)
    if (length > 0) & (slot != padding):
        tl.store(stored.lengths + slot, (before + length).to(tl.int32))
        root = tl.max(tl.where(accepted & (rank == length - 1), after, 0), axis=0)
        _store_root(stored, slot, tl.maximum(root, 0), node, W)


@triton.jit
def _store_path(out, rank, values, accepted, node, value, rest):
    """Stores accepted nodes' values by rank, and another value at other places."""
    tl.store(out + rank, values, mask=accepted)
    tl.store(out + node, value, mask=rest)


@triton.jit
def _store_root(stored, slot, root, node, W):
    is_root = node == 0
    inside = node < W
    out = slot * W + node
    tl.store(stored.roots + slot, root.to(tl.int64))
    tl.store(stored.tokens + out, tl.where(is_root, root, -1), mask=inside)
    tl.store(stored.parents + out, tl.full(node.shape, -1, tl.int32), mask=inside)
    tl.store(stored.probabilities + out, tl.where(is_root, 1.0, 0.0), mask=inside)
    tl.store(stored.bins + out, tl.full(node.shape, -1, tl.int32), mask=inside)


@triton.jit
def _end_chunk(
    verified, layout, sampled, stored, chunks, results, segment, B, T, W, padding, NODES: tl.constexpr
):  # fmt: skip
    """Commits a chunk and, if a prompt ends with it, emits the token after it."""
    node = tl.arange(0, NODES)
    chunk = segment - B
    count = tl.load(chunks.counts + chunk)
    is_last = tl.load(chunks.is_last + chunk)
    slot = tl.load(layout.segment_slots + segment)
    before = tl.load(layout.segment_lengths + segment)
    emits = (count > 0) & (is_last > 0)
    token = tl.load(sampled + tl.load(layout.starts + B) + chunk, mask=emits, other=-1).to(tl.int32)
    inside = node < W
    none = tl.full((NODES,), -1, tl.int32)
    emitted = tl.where(node == 0, token, none)
    tl.store(results, emits.to(tl.int32))
    tl.store(results + 1, 0)
    tl.store(results + 2 + node, emitted, mask=inside)
    tl.store(results + 2 + W + node, none, mask=inside)
    if layout.ancestors is not None:
        tl.store(results + 2 + 2 * W + node, none, mask=inside)
    tl.store(verified.tokens + segment * W + node, emitted, mask=inside)
    tl.store(verified.lengths + segment, emits.to(tl.int32))
    end = tl.load(layout.starts + segment + 1)
    tl.store(verified.last + segment, tl.where(count > 0, end, T).to(tl.int64) - 1)
    if (count > 0) & (slot != padding):
        tl.store(stored.lengths + slot, (before + count).to(tl.int32))
        if emits:
            _store_root(stored, slot, tl.maximum(token, 0), node, W)


@triton.jit
def _follow_rows(
    verified, layout, sampled, chunks, block, B, S, T, CHUNKS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """The tokens after those of a block of rows that follow the nodes."""
    row = block * ROWS + tl.arange(0, ROWS)
    chunk = tl.arange(0, CHUNKS)
    num_nodes = tl.load(layout.starts + B)
    total = tl.load(layout.starts + S)
    end = tl.load(layout.starts + B + 1 + chunk, mask=chunk < S - B, other=T)
    chunk_index = tl.sum((end[None, :] <= row[:, None]).to(tl.int32), axis=1)
    in_pass = (row >= num_nodes) & (row < T)
    in_use = (row >= num_nodes) & (row < total)
    is_end = in_use & (tl.load(layout.starts + B + 1 + chunk_index, mask=in_use, other=0) == row + 1)
    emits = is_end & (tl.load(chunks.is_last + chunk_index, mask=is_end, other=0) > 0)
    token = tl.load(chunks.tokens + row + 1 - num_nodes, mask=in_use & ~is_end, other=-1)
    token = tl.where(is_end, tl.load(chunks.next_tokens + chunk_index, mask=is_end, other=-1), token)
    token = tl.where(emits, tl.load(sampled + num_nodes + chunk_index, mask=emits, other=-1), token)
    tl.store(verified.next_tokens + row, token.to(tl.int32), mask=in_pass)
    if layout.ancestors is not None:
        tl.store(verified.order + row, row.to(tl.int64), mask=in_pass)
