"""Loads request state at the start of a round and commits it at the end: one kernel each.

Letters: B requests of the round, N nodes per request, R slots of request state, W nodes that a slot stores (W >= N).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from slipstream.kernels.launch import Op, pdl_options, wait_for_inputs


class Start(NamedTuple):
    """The inputs of a round."""

    tokens: Tensor  # (B, N) int32 proposed nodes, unused ones -1
    parents: Tensor  # (B, N) int32
    lengths: Tensor  # (B,) int64 committed tokens
    inputs: Tensor  # (B * N,) int64 token ids to embed; 0 for unused nodes


class End(NamedTuple):
    """The results of a round, for the next one and for the host."""

    lengths: Tensor  # (B,) int64 committed tokens
    roots: Tensor  # (B,) int64 the last token of each request; 0 where it is -1
    results: Tensor  # (B, 1 + N) int32 number of tokens, tokens


@Op
def start_round(tokens: Tensor, parents: Tensor, lengths: Tensor, rows: Tensor, width: int) -> Start:
    """Loads the first `width` nodes of slots `rows` (B,) int64 from tokens, parents (R, W) and lengths (R,) int32."""
    nodes = tokens[rows, :width]
    return Start(nodes, parents[rows, :width], lengths[rows].long(), nodes.clamp(min=0).long().flatten())


@start_round.kernel()
def start_round_triton(tokens: Tensor, parents: Tensor, lengths: Tensor, rows: Tensor, width: int) -> Start:
    B = len(rows)
    nodes = torch.empty(B, width, dtype=torch.int32, device=rows.device)
    above = torch.empty_like(nodes)
    known = torch.empty(B, dtype=torch.int64, device=rows.device)
    inputs = torch.empty(B * width, dtype=torch.int64, device=rows.device)
    _start_round[(B,)](
        tokens, parents, lengths, rows, nodes, above, known, inputs, tokens.stride(0), width,
        BLOCK=triton.next_power_of_2(width), num_warps=1, **pdl_options(rows.device),
    )  # fmt: skip
    return Start(nodes, above, known, inputs)


@Op
def end_round(
    state_lengths: Tensor, rows: Tensor, padding: int, lengths: Tensor, emitted: Tensor, counts: Tensor
) -> End:
    """Commits counts (B,) int32 tokens of emitted (B, N) int32 after lengths (B,) int64: updates state_lengths (R,)
    int32 at slots `rows` (B,) int64. The slot `padding` may occur several times in a batch; its length stays 0."""
    committed = lengths + counts
    state_lengths[rows] = committed.masked_fill(rows == padding, 0).int()
    roots = emitted.gather(1, counts.long()[:, None] - 1).flatten().long().clamp(min=0)
    return End(committed, roots, torch.cat((counts[:, None], emitted), dim=1))


@end_round.kernel()
def end_round_triton(
    state_lengths: Tensor, rows: Tensor, padding: int, lengths: Tensor, emitted: Tensor, counts: Tensor
) -> End:
    B, N = emitted.shape
    committed, roots = torch.empty_like(lengths), torch.empty_like(lengths)
    results = torch.empty(B, 1 + N, dtype=torch.int32, device=rows.device)
    _end_round[(B,)](
        state_lengths, rows, lengths, emitted, counts, committed, roots, results, padding, N,
        BLOCK=triton.next_power_of_2(N), num_warps=1, **pdl_options(rows.device),
    )  # fmt: skip
    return End(committed, roots, results)


@Op
def store_proposal(
    stored_tokens: Tensor, stored_parents: Tensor, rows: Tensor, tokens: Tensor, parents: Tensor
) -> None:
    """Writes N nodes, tokens and parents (B, N) of any integer type, to slots `rows` (B,) int64 of stored_tokens and
    stored_parents (R, W) int32, and marks the slots' other nodes unused."""
    unused = stored_tokens.shape[1] - tokens.shape[1]
    for stored, nodes in ((stored_tokens, tokens), (stored_parents, parents)):
        stored[rows] = pad(nodes.int(), (0, unused), value=-1)


@store_proposal.kernel()
def store_proposal_triton(
    stored_tokens: Tensor, stored_parents: Tensor, rows: Tensor, tokens: Tensor, parents: Tensor
) -> None:
    assert stored_tokens.is_contiguous()
    assert stored_parents.is_contiguous()
    (B, N), width = tokens.shape, stored_tokens.shape[1]
    _store_proposal[(B,)](
        stored_tokens, stored_parents, rows, tokens, parents, *tokens.stride(), *parents.stride(), N, width,
        BLOCK=triton.next_power_of_2(width), num_warps=1, **pdl_options(rows.device),
    )  # fmt: skip


@triton.jit
def _start_round(
    tokens, parents, lengths, rows, nodes, above, known, inputs, stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait_for_inputs(PDL)
    request, node = tl.program_id(0), tl.arange(0, BLOCK)
    inside = node < width
    row = tl.load(rows + request)
    token = tl.load(tokens + row * stride + node, mask=inside, other=-1)
    out = request * width + node
    tl.store(nodes + out, token, mask=inside)
    tl.store(inputs + out, tl.maximum(token, 0).to(tl.int64), mask=inside)
    tl.store(above + out, tl.load(parents + row * stride + node, mask=inside, other=-1), mask=inside)
    tl.store(known + request, tl.load(lengths + row).to(tl.int64))


@triton.jit
def _end_round(
    state_lengths, rows, lengths, emitted, counts, committed, roots, results, padding, N, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    request, node = tl.program_id(0), tl.arange(0, BLOCK)
    inside = node < N
    row, count = tl.load(rows + request), tl.load(counts + request)
    length = tl.load(lengths + request) + count
    tl.store(state_lengths + row, tl.where(row == padding, 0, length).to(tl.int32))
    tl.store(committed + request, length)
    tl.store(roots + request, tl.maximum(tl.load(emitted + request * N + count - 1), 0).to(tl.int64))
    tl.store(results + request * (1 + N), count)
    tokens = tl.load(emitted + request * N + node, mask=inside, other=-1)
    tl.store(results + request * (1 + N) + 1 + node, tokens, mask=inside)


@triton.jit(do_not_specialize=["stride", "node_stride", "parent_stride", "parent_node_stride", "N", "width"])
def _store_proposal(
    stored_tokens, stored_parents, rows, tokens, parents, stride, node_stride, parent_stride, parent_node_stride, N,
    width, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    request, node = tl.program_id(0), tl.arange(0, BLOCK)
    is_new, is_stored = node < N, node < width
    out = tl.load(rows + request) * width + node
    token = tl.load(tokens + request * stride + node * node_stride, mask=is_new, other=-1)
    parent = tl.load(parents + request * parent_stride + node * parent_node_stride, mask=is_new, other=-1)
    tl.store(stored_tokens + out, token.to(tl.int32), mask=is_stored)
    tl.store(stored_parents + out, parent.to(tl.int32), mask=is_stored)
