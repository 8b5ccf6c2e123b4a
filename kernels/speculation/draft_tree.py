"""Growing a draft tree level by level, and choosing which of its nodes the target verifies (EAGLE-2, arXiv 2406.16858).

A node's score is the sum of log-probabilities along its path. The k best children of each frontier node are
candidates; the k best of these become the next frontier, which the draft expands. The best candidates of all levels
form the tree. A child scores no more than its parent and ties go to the earlier candidate, so a parent always comes
before its children: every prefix of the chosen nodes is a connected tree.

Candidates are numbered level by level, parent by parent, best child first. Frontier nodes are numbered level by level,
too, and their draft KV follows the committed tokens in this order.
Letters: B requests, k children of a node, n nodes of a frontier (k, and 1 before there is any), P candidates in all.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import Op, pdl_options, use_triton, wait_for_inputs
from slipstream.kernels.limits import MAX_K
from slipstream.kernels.sampling.sample import NO_SCORE, rank_column, score_order, score_rank, take_best
from slipstream.kernels.speculation.tree_shape import TreeShape


class Candidates(NamedTuple):
    """Filled by `grow`."""

    scores: Tensor  # (B, P) fp32
    tokens: Tensor  # (B, P) int32 target ids
    parents: Tensor  # (B, P) int32 candidates; -1: the root

    @classmethod
    def empty(cls, batch_size: int, shape: TreeShape, device: torch.device) -> "Candidates":
        count = shape.candidates
        tokens, parents = torch.empty(2, batch_size, count, dtype=torch.int32, device=device).unbind()
        return cls(torch.empty(batch_size, count, device=device), tokens, parents)


class Frontier(NamedTuple):
    """The nodes to expand next, best first."""

    scores: Tensor  # (B, k) fp32
    nodes: Tensor  # (B, k) int32 candidates
    ancestors: Tensor  # (B, k) int64 bit masks over the frontier nodes of all levels so far, their own included
    tokens: Tensor  # (B * k,) int64
    sources: Tensor  # (B * k,) int64 each node's parent among the rows (B * n,) of the frontier before
    positions: Tensor  # (B * k,) int64 for the draft's rotary embedding
    sampled_at: Tensor  # (B * k,) int64 positions of their children, which seed the noise
    slots: Tensor  # (B * k,) int64 where their draft KV goes


class Place(NamedTuple):
    """Page table and lengths of the requests."""

    pages: Tensor  # (R, pages per request) int64 page table
    page_size: int
    rows: Tensor  # (B,) int64 the requests' rows of the page table
    lengths: Tensor  # (B,) int64 committed tokens; the root follows them


@Op
def grow(
    candidates: Candidates,
    frontier: Frontier | None,
    values: Tensor,
    columns: Tensor,
    ids: Tensor | None,
    place: Place,
    level: int,
    is_last: bool,
) -> Frontier | None:
    """Adds a frontier's children (None: the root's) to the candidates; returns the next frontier unless `is_last`.

    values, columns (B * n, k) from `head_topk`: log-probabilities and columns, best first; ids (Vd,) int64 the target
    id of each column (default: the column). level: 0 for the root's children, then one more each time.
    """
    B = len(place.rows)
    k = values.shape[1]
    device = values.device
    n, first = (1, 0) if frontier is None else (k, k + (level - 1) * k * k)
    above = values.new_zeros(B, 1) if frontier is None else frontier.scores
    nodes = torch.full((B, 1), -1, device=device) if frontier is None else frontier.nodes
    path_masks = torch.zeros(B, 1, dtype=torch.int64, device=device) if frontier is None else frontier.ancestors
    scores = (above[:, :, None] + values.reshape(B, n, k).clamp(max=0.0)).flatten(1)  # (B, n * k)
    tokens = (columns if ids is None else ids[columns]).reshape(B, n * k)
    part = slice(first, first + n * k)
    candidates.scores[:, part] = scores
    candidates.tokens[:, part] = tokens.int()
    candidates.parents[:, part] = nodes.repeat_interleave(k, dim=1).int()
    if is_last:
        return None
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]  # (B, k)
    rank = torch.arange(k, device=device)
    parent = best // k
    depths = place.lengths[:, None] + level + torch.zeros_like(rank)  # (B, k)
    position = place.lengths[:, None] + level * k + rank  # in the cache
    page = place.pages[place.rows[:, None], position // place.page_size]
    slots = page * place.page_size + position % place.page_size
    return Frontier(
        scores=scores.gather(1, best),
        nodes=(first + best).int(),
        ancestors=path_masks.gather(1, parent) | (torch.ones_like(rank) << level * k + rank),
        tokens=tokens.gather(1, best).flatten(),
        sources=(torch.arange(B, device=device)[:, None] * n + parent).flatten(),
        positions=depths.flatten(),
        sampled_at=depths.flatten() + 2,
        slots=slots.flatten(),
    )


@grow.kernel(when=lambda candidates, *_: use_triton(candidates.scores))
def grow_triton(
    candidates: Candidates,
    frontier: Frontier | None,
    values: Tensor,
    columns: Tensor,
    ids: Tensor | None,
    place: Place,
    level: int,
    is_last: bool,
) -> Frontier | None:
    """One launch, a program per request."""
    B = len(place.rows)
    k = values.shape[1]
    device = values.device
    assert k <= MAX_K
    assert values.is_contiguous()
    assert columns.is_contiguous()
    n, first = (1, 0) if frontier is None else (k, k + (level - 1) * k * k)
    grown = None if is_last else _empty_frontier(B, k, device)
    if B:
        above = (None, None, None) if frontier is None else (frontier.scores, frontier.nodes, frontier.ancestors)
        _grow[(B,)](
            *candidates, *above, values, columns, ids, place.pages, place.rows, place.lengths, *(grown or [None] * 8),
            candidates.scores.stride(0), first, n, k, level, place.pages.stride(0), place.page_size,
            BLOCK=triton.next_power_of_2(n * k), num_warps=1, **pdl_options(device),
        )  # fmt: skip
    return grown


def _empty_frontier(batch_size: int, k: int, device: torch.device) -> Frontier:
    scores = torch.empty(batch_size, k, device=device)
    nodes = torch.empty(batch_size, k, dtype=torch.int32, device=device)
    ancestors, *rest = torch.empty(6, batch_size, k, dtype=torch.int64, device=device).unbind()
    return Frontier(scores, nodes, ancestors, *(column.flatten() for column in rest))


@Op
def choose(candidates: Candidates, roots: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tree of roots (B,) int64 and the count - 1 <= P best candidates: tokens, parents (B, count) int32 and scores
    (B, count) fp32, 0 of the root."""
    scores, tokens, parents = candidates
    order = scores.sort(dim=1, descending=True, stable=True).indices  # (B, P)
    places = torch.empty_like(order).scatter_(1, order, torch.arange(1, order.shape[1] + 1).to(order).expand_as(order))
    best = order[:, : count - 1]
    above = parents.gather(1, best).long()
    above = places.gather(1, above.clamp(min=0)).masked_fill(above < 0, 0)
    root = roots[:, None].int()
    return (
        torch.cat((root, tokens.gather(1, best)), 1),
        torch.cat((torch.full_like(root, -1), above.int()), 1),
        torch.cat((torch.zeros_like(scores[:, :1]), scores.gather(1, best)), 1),
    )


@choose.kernel(when=lambda candidates, *_: use_triton(candidates.scores))
def choose_triton(candidates: Candidates, roots: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """One launch, a program per request."""
    B, P = candidates.scores.shape
    assert 1 < count <= P + 1
    tokens, parents = torch.empty(2, B, count, dtype=torch.int32, device=roots.device).unbind()
    scores = torch.empty(B, count, device=roots.device)
    if B:
        block = triton.next_power_of_2(P)
        _choose[(B,)](
            *candidates, roots, tokens, parents, scores, P, count,
            BLOCK=block, num_warps=1 if block <= 256 else 4, **pdl_options(roots.device),
        )  # fmt: skip
    return tokens, parents, scores


@Op
def join_chain(roots: Tensor, tokens: tuple[Tensor, ...], log_probs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The chain of roots (B,) int64 and N - 1 tokens (B,) int64 with log_probs (B, 1) fp32: tokens (B, N) int64 and
    scores (B, N) fp32, 0 of the root."""
    zeros = torch.zeros(len(roots), 1, device=roots.device)
    return torch.stack((roots, *tokens), dim=1), torch.cat((zeros, *log_probs), dim=1).cumsum(dim=1)


@join_chain.kernel()
def join_chain_triton(
    roots: Tensor, tokens: tuple[Tensor, ...], log_probs: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """One launch, a program per request."""
    shape = len(roots), 1 + len(tokens)
    assert all(x.is_contiguous() for x in (roots, *tokens, *log_probs))
    chain = torch.empty(shape, dtype=torch.int64, device=roots.device)
    scores = torch.empty(shape, device=roots.device)
    if len(roots):
        _join_chain[(len(roots),)](
            roots,
            tokens or None,
            log_probs or None,
            chain,
            scores,
            LENGTH=shape[1],
            num_warps=1,
            **pdl_options(roots.device),
        )
    return chain, scores


@triton.jit
def _join_chain(roots, tokens, log_probs, chain, scores, LENGTH: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    request = tl.program_id(0)
    out = request * LENGTH
    score = 0.0
    tl.store(chain + out, tl.load(roots + request))
    tl.store(scores + out, score)
    for node in tl.static_range(LENGTH - 1):
        score += tl.load(log_probs[node] + request)
        tl.store(chain + out + 1 + node, tl.load(tokens[node] + request))
        tl.store(scores + out + 1 + node, score)


@triton.jit
def _best_first(scores, inside, index, count, BLOCK: tl.constexpr):
    """(BLOCK,) int32: rank of each of the `count` best scores, from 0; BLOCK for the others. Ties: lowest index."""
    ranks = tl.where(inside, score_rank(score_order(scores), index), NO_SCORE)
    places = tl.full((BLOCK,), BLOCK, tl.int32)
    for place in range(count):
        best, ranks = take_best(ranks)
        places = tl.where(index == rank_column(best).to(tl.int32), place, places)
    return places


@triton.jit(do_not_specialize=["stride", "first", "n", "k", "level", "table_width"])
def _grow(
    all_scores, all_tokens, all_parents, above_scores, above_nodes, above_ancestors, values_ptr, columns_ptr, ids_ptr,
    pages_ptr, rows_ptr, lengths_ptr, scores_ptr, nodes_ptr, ancestors_ptr, tokens_ptr, sources_ptr, positions_ptr,
    sampled_at_ptr, slots_ptr, stride, first, n, k, level, table_width, page_size, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    request = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    inside = index < n * k
    parent = index // k
    scores = tl.minimum(tl.load(values_ptr + request * n * k + index, mask=inside, other=float("-inf")), 0.0)
    tokens = tl.load(columns_ptr + request * n * k + index, mask=inside, other=0)
    if ids_ptr is not None:
        tokens = tl.load(ids_ptr + tokens, mask=inside, other=0)
    nodes = tl.full((BLOCK,), -1, tl.int32)
    ancestors = tl.zeros((BLOCK,), tl.int64)
    if above_scores is not None:
        above = request * k + parent
        scores += tl.load(above_scores + above, mask=inside, other=0.0)
        nodes = tl.load(above_nodes + above, mask=inside, other=-1)
        ancestors = tl.load(above_ancestors + above, mask=inside, other=0)
    out = request * stride + first + index
    tl.store(all_scores + out, scores, mask=inside)
    tl.store(all_tokens + out, tokens.to(tl.int32), mask=inside)
    tl.store(all_parents + out, nodes, mask=inside)

    if scores_ptr is not None:
        place = _best_first(scores, inside, index, k, BLOCK)
        inside_frontier = inside & (place < k)
        out = request * k + place
        number = level * k + place
        length = tl.load(lengths_ptr + request)
        position = length + number  # in the cache
        page = tl.load(
            pages_ptr + tl.load(rows_ptr + request) * table_width + position // page_size, mask=inside_frontier, other=0
        )
        bit = tl.full((BLOCK,), 1, tl.int64) << (number & 63).to(tl.int64)
        depth = length + level + tl.zeros((BLOCK,), tl.int64)
        tl.store(scores_ptr + out, scores, mask=inside_frontier)
        tl.store(nodes_ptr + out, first + index, mask=inside_frontier)
        tl.store(ancestors_ptr + out, ancestors | bit, mask=inside_frontier)
        tl.store(tokens_ptr + out, tokens, mask=inside_frontier)
        tl.store(sources_ptr + out, (request * n + parent).to(tl.int64), mask=inside_frontier)
        tl.store(positions_ptr + out, depth, mask=inside_frontier)
        tl.store(sampled_at_ptr + out, depth + 2, mask=inside_frontier)
        tl.store(slots_ptr + out, page * page_size + position % page_size, mask=inside_frontier)


@triton.jit(do_not_specialize=["P", "count"])
def _choose(
    all_scores, all_tokens, all_parents, roots_ptr, tokens_ptr, parents_ptr, scores_ptr, P, count,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    request = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    inside = index < P
    row = request * P + index
    scores = tl.load(all_scores + row, mask=inside, other=float("-inf"))
    tokens = tl.load(all_tokens + row, mask=inside, other=0)
    above = tl.load(all_parents + row, mask=inside, other=-1)
    places = _best_first(scores, inside, index, count - 1, BLOCK) + 1
    parents = tl.where(above < 0, 0, tl.gather(places, tl.maximum(above, 0), 0))
    inside_tree = inside & (places < count)
    out = request * count
    tl.store(tokens_ptr + out, tl.load(roots_ptr + request).to(tl.int32))
    tl.store(parents_ptr + out, -1)
    tl.store(scores_ptr + out, 0.0)
    tl.store(tokens_ptr + out + places, tokens, mask=inside_tree)
    tl.store(parents_ptr + out + places, parents, mask=inside_tree)
    tl.store(scores_ptr + out + places, scores, mask=inside_tree)
