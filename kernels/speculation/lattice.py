"""Chains and trees out of a lattice: k candidates for each of the K tokens that a block draft proposes at once.

`scores` (B, K, k, k) says how well candidate j of slot s follows candidate i of slot s - 1; of slot 0 only row 0 is
read, which follows the root. Scores are unnormalised logits, with the request's noise where it samples. A draft without
a head that joins slots has the same row for every i (`expand`, stride 0).

`transition_scores` adds to the unary logits the product of low-rank factors of the two tokens: DFlash 2's path selector
and DSpark's Markov heads (arXiv 2607.05147, section 3). All k * k pairs of a slot are one small product on tensor
cores; a walk, which needs one row of each slot, would read half as many rows, one slot after another.
Letters: B requests, K slots, k candidates of a slot, r rank of the factors, V target and Vd draft vocabulary, N nodes.
"""

import heapq
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import logsigmoid

from slipstream.kernels.launch import Op, pdl_options, use_triton, wait_for_inputs
from slipstream.kernels.sampling.processors import parameter_entry
from slipstream.kernels.sampling.sample import Sampling, bits_to_gumbel, gumbel, row_noise_bits
from slipstream.kernels.tiles import load_fp32

DEPTH = 64  # of the rank: numbers of each factor that a program multiplies at once


class Factors(NamedTuple):
    """Factors of the tokens before and after: the score of b after a is f(a) . successors[b]. With `slots` (B, K, r),
    from a slot's own state, f(a) is predecessors[a] * slots; with `gates`, too, predecessors[a] * sigmoid(slots +
    gates[a]); otherwise predecessors[a]."""

    predecessors: Tensor  # (V, r) by target id
    successors: Tensor  # (Vd, r) by column of the draft's logits
    gates: Tensor | None = None  # (V, r) by target id

    def of(self, before: Tensor, slots: Tensor | None) -> Tensor:
        """f (..., r) of tokens `before` (...), where `slots` is (..., r), in the dtype of the weights."""
        features = self.predecessors[before]
        if slots is None:
            return features
        factor = slots.float() if self.gates is None else torch.sigmoid(slots.float() + self.gates[before].float())
        return (features.float() * factor).to(features.dtype)


class Confidence(NamedTuple):
    """How probably the token of a slot is accepted if those before are: sigmoid((slots + by_token[a]) / temperatures)
    after token a (arXiv 2607.05147, section 3.3)."""

    slots: Tensor  # (B, K)
    temperatures: Tensor  # (K or more,) fp32
    by_token: Tensor | None = None  # (V,) fp32

    def of(self, slot: int, before: Tensor) -> Tensor:
        """Its logarithm (B,) of one slot, after tokens `before` (B,)."""
        logits = self.slots[:, slot].float()
        if self.by_token is not None:
            logits = logits + self.by_token[before.clamp(min=0)]
        return logsigmoid(logits / self.temperatures[slot])

    def of_all(self, before: Tensor) -> Tensor:
        """Its logarithm (B, K, k) of every slot, after each of the tokens `before` (B, K, k)."""
        logits = self.slots.float().unsqueeze(2).expand(before.shape)
        if self.by_token is not None:
            logits = logits + self.by_token[before.clamp(min=0)]
        return logsigmoid(logits / self.temperatures[: before.shape[1], None])


@Op
def transition_scores(
    unary: Tensor, columns: Tensor, tokens: Tensor, roots: Tensor, factors: Factors, slots: Tensor | None
) -> Tensor:
    """unary (B, K, k) fp32, the candidates' own scores; columns and tokens (B, K, k) int64, their columns and target
    ids; roots (B,) int64; slots (B, K, r) -> scores (B, K, k, k) fp32, `unary` + f(before) . successors."""
    k = unary.shape[2]
    before = torch.cat((roots.clamp(min=0)[:, None, None].expand(-1, 1, k), tokens[:, :-1]), dim=1)
    features = factors.of(before, None if slots is None else slots[:, :, None].expand(-1, -1, k, -1))
    return unary[:, :, None] + features.float() @ factors.successors[columns].float().mT


@transition_scores.kernel()
def transition_scores_triton(
    unary: Tensor, columns: Tensor, tokens: Tensor, roots: Tensor, factors: Factors, slots: Tensor | None
) -> Tensor:
    """One launch, a program per slot."""
    B, K, k = unary.shape
    predecessors, successors, gates = factors
    rank = predecessors.shape[1]
    assert unary.is_contiguous()
    assert columns.is_contiguous()
    assert tokens.is_contiguous()
    assert predecessors.stride() == successors.stride() == (rank, 1)
    assert gates is None or (slots is not None and gates.stride() == (rank, 1))
    slots = None if slots is None else slots.contiguous()
    scores = torch.empty(B, K, k, k, device=unary.device)
    if B:
        _transition_scores[(B * K,)](
            unary, columns, tokens, roots, predecessors, successors, gates, slots, scores, K, k, rank,
            BLOCK=max(16, triton.next_power_of_2(k)), DEPTH=DEPTH, num_warps=4, **pdl_options(unary.device),
        )  # fmt: skip
    return scores


@Op
def walk_lattice(
    scores: Tensor, tokens: Tensor, roots: Tensor, values: Tensor, confidence: Confidence | None = None
) -> tuple[Tensor, Tensor]:
    """The chain of the best candidate after the one before, left to right from the root; ties go to the first.

    scores (B, K, k, k) fp32, tokens (B, K, k) int64 target ids, roots (B,) int64 -> tokens (B, K + 1) int32, the root
    first, and scores (B, K + 1) fp32: the sum up to each of log-probabilities, or, with `confidence`, of its
    logarithms; 0 of the root. A token's probability is that among the candidates times theirs among all tokens:
    `values` (B, K, k) fp32 are their log-probabilities by the slot alone.
    """
    B, K, _, _ = scores.shape
    device = scores.device
    request = torch.arange(B, device=device)
    candidate = torch.zeros(B, dtype=torch.int64, device=device)
    chain = [roots]
    reached = [torch.zeros(B, device=device)]
    for slot in range(K):
        row = scores[request, slot, candidate]  # (B, k)
        best = row.max(dim=1)
        if confidence is None:
            step = best.values - row.logsumexp(dim=1) + values[:, slot].logsumexp(dim=1).clamp(max=0.0)
        else:
            step = confidence.of(slot, chain[-1])
        candidate = best.indices
        chain.append(tokens[request, slot, candidate])
        reached.append(reached[-1] + step.clamp(max=0.0))
    return torch.stack(chain, dim=1).int(), torch.stack(reached, dim=1)


@walk_lattice.kernel()
def walk_lattice_triton(
    scores: Tensor, tokens: Tensor, roots: Tensor, values: Tensor, confidence: Confidence | None = None
) -> tuple[Tensor, Tensor]:
    """One launch, a program per request."""
    B, K, _, k = scores.shape
    assert scores.stride(3) == 1
    assert tokens.is_contiguous()
    assert values.is_contiguous()
    chain = torch.empty(B, K + 1, dtype=torch.int32, device=scores.device)
    reached = torch.empty(B, K + 1, device=scores.device)
    if B:
        _walk_lattice[(B,)](
            scores, tokens, roots, values, *_arguments(confidence), chain, reached, *scores.stride()[:3], K, k,
            BLOCK=triton.next_power_of_2(k), num_warps=1, **pdl_options(scores.device),
        )  # fmt: skip
    return chain, reached


@Op
def grow_lattice(
    scores: Tensor,
    tokens: Tensor,
    roots: Tensor,
    values: Tensor,
    topk: int,
    count: int,
    confidence: Confidence | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The tree of the `count` most probable nodes: tokens, parents (B, count) int32 and scores (B, count) fp32.

    A node's score is the sum of log-probabilities along its path, as in EAGLE-2 (arXiv 2406.16858, section 4.2); of a
    node's children the best `topk` are considered. Nodes come in the order of their scores, ties in that of their
    parents, then of the candidates' scores, so a parent always comes first. Unused nodes have token -1, parent 0 and
    score -inf. With `confidence` that is the probability of a node's best child; the others keep theirs. Otherwise as
    `walk_lattice`.
    """
    best = scores.log_softmax(dim=-1).clamp(max=0.0).sort(dim=-1, descending=True, stable=True)
    log_probs = best.values + values.logsumexp(dim=-1).clamp(max=0.0)[:, :, None, None]
    if confidence is not None:
        before = torch.cat((roots[:, None, None].expand(-1, 1, tokens.shape[2]), tokens[:, :-1]), dim=1)
        log_probs[..., 0] = torch.where(log_probs[..., 0] > -torch.inf, confidence.of_all(before), log_probs[..., 0])
    children = zip(
        log_probs[..., :topk].tolist(), best.indices[..., :topk].tolist(), strict=True
    )  # sync: the CPU's path
    trees = [_grow_one(steps, candidates, count=count) for steps, candidates in children]
    slots, candidates, parents, reached = (torch.tensor(x, device=scores.device) for x in zip(*trees, strict=True))
    node_tokens = (
        tokens.flatten(1).gather(1, slots * tokens.shape[2] + candidates.clamp(min=0)).where(candidates >= 0, -1)
    )
    node_tokens[:, 0] = roots
    return node_tokens.int(), parents.int(), reached


def _grow_one(
    steps: list[list[list[float]]], candidates: list[list[list[int]]], count: int
) -> tuple[list[int], list[int], list[int], list[float]]:
    """Slots, candidates (-1 of unused nodes), parents and scores of one request's nodes, of each slot's and candidate's
    children, best first."""
    slots = [-1]
    candidate_indices = [0]
    parents = [-1]
    reached = [0.0]
    waiting = list[tuple[float, int, int, int]]()
    while len(candidate_indices) < count:
        node = len(candidate_indices) - 1
        slot = slots[-1] + 1
        if candidate_indices[node] >= 0 and slot < len(steps):
            for rank, step in enumerate(steps[slot][candidate_indices[node]]):
                if step > -math.inf:
                    child = -(reached[node] + step), node, rank, candidates[slot][candidate_indices[node]][rank]
                    heapq.heappush(waiting, child)
        score, parent, _, candidate = heapq.heappop(waiting) if waiting else (math.inf, 0, 0, -1)
        slots.append(slots[parent] + 1)
        candidate_indices.append(candidate)
        parents.append(parent)
        reached.append(-score)
    slots[0] = 0
    return slots, candidate_indices, parents, reached


@grow_lattice.kernel()
def grow_lattice_triton(
    scores: Tensor,
    tokens: Tensor,
    roots: Tensor,
    values: Tensor,
    topk: int,
    count: int,
    confidence: Confidence | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One launch, a program per request: it takes the best of the waiting nodes and adds that node's children."""
    B, K, _, k = scores.shape
    assert scores.stride(3) == 1
    assert tokens.is_contiguous()
    assert values.is_contiguous()
    node_tokens, parents = torch.empty(2, B, count, dtype=torch.int32, device=scores.device).unbind()
    reached = torch.empty(B, count, device=scores.device)
    if B:
        children = triton.next_power_of_2(min(topk, k))
        _grow_lattice[(B,)](
            scores, tokens, roots, values, *_arguments(confidence), node_tokens, parents, reached,
            *scores.stride()[:3], K, k, min(topk, k), count,
            BLOCK=triton.next_power_of_2(k), CHILDREN=children, NODES=triton.next_power_of_2(count),
            num_warps=1 if k <= 16 else 4, **pdl_options(scores.device),
        )  # fmt: skip
    return node_tokens, parents, reached


@Op
def add_noise(scores: Tensor, tokens: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
    """scores (R, k) fp32 of target ids tokens (R, k) int64 at positions (R,) -> scores + T * gumbel, as `sample` adds
    it."""
    if sampling.temperature is None:
        return scores
    row_sampling = sampling.by_row()
    assert row_sampling.temperature is not None
    return scores + row_sampling.temperature[:, None] * gumbel(row_sampling.keys, positions, tokens)


@add_noise.kernel(when=lambda scores, *_: use_triton(scores))
def add_noise_triton(scores: Tensor, tokens: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
    """One launch, a program per row."""
    if sampling.temperature is None:
        return scores
    R, k = scores.shape
    assert scores.is_contiguous()
    assert tokens.is_contiguous()
    out = torch.empty_like(scores)
    if R:
        _add_noise[(R,)](
            scores, tokens, positions, sampling.keys, sampling.temperature, sampling.rows, out, k, sampling.repeats,
            BLOCK=triton.next_power_of_2(k), num_warps=1, **pdl_options(scores.device),
        )  # fmt: skip
    return out


def _arguments(confidence: Confidence | None) -> tuple[Tensor | None, ...]:
    slots, temperatures, by_token = confidence or (None, None, None)
    return None if slots is None else slots.contiguous(), temperatures, by_token


@triton.jit
def _log_sum_exp(scores):
    """About -1e30 where all are -inf."""
    top = tl.maximum(tl.max(scores, axis=0), -1e30)
    return top + tl.log(tl.maximum(tl.sum(tl.exp(scores - top), axis=0), 1e-30))


@triton.jit
def log_confidence(slots_ptr, temperatures_ptr, by_token_ptr, slot, before):
    """`Confidence.of` one request, whose slots are at `slots_ptr`."""
    logit = tl.load(slots_ptr + slot).to(tl.float32)
    if by_token_ptr is not None:
        logit += tl.load(by_token_ptr + tl.maximum(before, 0))
    logit = logit / tl.load(temperatures_ptr + slot)
    return tl.minimum(logit, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(logit)))


@triton.jit(do_not_specialize=["K"])
def _transition_scores(
    unary_ptr, columns_ptr, tokens_ptr, roots_ptr, predecessors_ptr, successors_ptr, gates_ptr, slots_ptr, scores_ptr,
    K, k, rank, BLOCK: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    depth = tl.arange(0, DEPTH)
    inside = index < k
    after = tl.load(columns_ptr + row * k + index, mask=inside, other=0)
    if row % K == 0:
        before = tl.maximum(tl.load(roots_ptr + row // K), 0) + tl.zeros((BLOCK,), tl.int64)
    else:
        before = tl.load(tokens_ptr + (row - 1) * k + index, mask=inside, other=0)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, rank, DEPTH):
        column = start + depth
        within = inside[:, None] & (column < rank)[None, :]
        factor_cells = before[:, None] * rank + column[None, :]
        left = tl.load(predecessors_ptr + factor_cells, mask=within, other=0.0)
        if slots_ptr is not None:
            factor = load_fp32(slots_ptr + row * rank + column, column < rank)[None, :]
            if gates_ptr is not None:
                factor = tl.sigmoid(factor + load_fp32(gates_ptr + factor_cells, within))
            left = (left.to(tl.float32) * factor).to(left.dtype)
        right = tl.load(successors_ptr + after[:, None] * rank + column[None, :], mask=within, other=0.0)
        acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    unary = tl.load(unary_ptr + row * k + index, mask=inside, other=0.0)
    cells = scores_ptr + (row * k + index[:, None]) * k + index[None, :]
    tl.store(cells, acc + unary[None, :], mask=inside[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["K"])
def _walk_lattice(
    scores_ptr, tokens_ptr, roots_ptr, values_ptr, slots_ptr, temperatures_ptr, by_token_ptr, chain_ptr, reached_ptr,
    request_stride, slot_stride, row_stride, K, k, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    out = request * (K + 1)
    token = tl.load(roots_ptr + request)
    reached = 0.0
    candidate = tl.min(tl.zeros((BLOCK,), tl.int32), axis=0)
    tl.store(chain_ptr + out, token.to(tl.int32))
    tl.store(reached_ptr + out, reached)
    for slot in range(K):
        row = scores_ptr + request * request_stride + slot * slot_stride + candidate * row_stride
        scores = tl.load(row + index, mask=index < k, other=float("-inf"))
        top = tl.max(scores, axis=0)
        candidate = tl.min(tl.where(scores == top, index, BLOCK - 1), axis=0)
        if slots_ptr is None:
            log_probs = tl.load(values_ptr + (request * K + slot) * k + index, mask=index < k, other=float("-inf"))
            step = tl.minimum(_log_sum_exp(log_probs), 0.0) - tl.log(tl.sum(tl.exp(scores - top), axis=0))
        else:
            step = log_confidence(slots_ptr + request * K, temperatures_ptr, by_token_ptr, slot, token)
        reached += tl.minimum(step, 0.0)
        token = tl.load(tokens_ptr + (request * K + slot) * k + tl.minimum(candidate, k - 1))
        tl.store(chain_ptr + out + slot + 1, token.to(tl.int32))
        tl.store(reached_ptr + out + slot + 1, reached)


@triton.jit(do_not_specialize=["K", "count"])
def _grow_lattice(
    scores_ptr, tokens_ptr, roots_ptr, values_ptr, slots_ptr, temperatures_ptr, by_token_ptr, chosen_ptr, parents_ptr,
    reached_ptr, request_stride, slot_stride, row_stride, K, k, topk, count,
    BLOCK: tl.constexpr, CHILDREN: tl.constexpr, NODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Waiting nodes are numbered by their parent's place and their rank among its children."""
    wait_for_inputs(PDL)
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    place = tl.arange(0, NODES)
    number = tl.arange(0, NODES * CHILDREN)
    rank = tl.arange(0, CHILDREN)
    waiting = tl.full((NODES * CHILDREN,), float("-inf"), tl.float32)
    candidates = tl.zeros((NODES * CHILDREN,), tl.int32)
    depths = tl.zeros((NODES,), tl.int32)
    depth = tl.sum(depths, axis=0)
    candidate = tl.sum(depths, axis=0)
    out = request * count
    score = depth.to(tl.float32)
    token = tl.load(roots_ptr + request)
    tl.store(chosen_ptr + out, token.to(tl.int32))
    tl.store(parents_ptr + out, -1)
    tl.store(reached_ptr + out, score)
    for node in range(1, count):
        is_open = (depth < K) & (score > float("-inf"))
        inside = index < tl.where(is_open, k, 0)
        row = scores_ptr + request * request_stride + depth * slot_stride + candidate * row_stride
        candidate_scores = tl.load(row + index, mask=inside, other=float("-inf"))
        alone = tl.load(values_ptr + (request * K + depth) * k + index, mask=inside, other=float("-inf"))
        steps = tl.minimum(candidate_scores - _log_sum_exp(candidate_scores), 0.0) + tl.minimum(
            _log_sum_exp(alone), 0.0
        )
        is_better = (steps[None, :] > steps[:, None]) | (
            (steps[None, :] == steps[:, None]) & (index[None, :] < index[:, None])
        )
        order = tl.sum(is_better.to(tl.int32), axis=1)  # of each candidate
        if slots_ptr is not None:
            slot = tl.minimum(depth, K - 1)
            sure = log_confidence(slots_ptr + request * K, temperatures_ptr, by_token_ptr, slot, token)
            steps = tl.where((order == 0) & (steps > float("-inf")), sure, steps)
        is_ranked = order[:, None] == rank[None, :]
        ranked = tl.max(tl.where(is_ranked, steps[:, None], float("-inf")), axis=0)  # (CHILDREN,)
        ranked = tl.where(rank < topk, ranked, float("-inf"))
        ranked_candidates = tl.sum(tl.where(is_ranked, index[:, None], 0), axis=0)
        is_child = number // CHILDREN == node - 1
        waiting = tl.where(is_child, score + tl.gather(ranked, number % CHILDREN, 0), waiting)
        candidates = tl.where(is_child, tl.gather(ranked_candidates, number % CHILDREN, 0), candidates)

        score = tl.max(waiting, axis=0)
        is_used = score > float("-inf")
        best = tl.min(tl.where(waiting == score, number, NODES * CHILDREN - 1), axis=0)
        waiting = tl.where(number == best, float("-inf"), waiting)
        candidate = tl.sum(tl.where(number == best, candidates, 0), axis=0)
        parent = tl.where(is_used, best // CHILDREN, 0)
        depth = tl.sum(tl.where(place == parent, depths, 0), axis=0) + 1
        depths = tl.where(place == node, depth, depths)
        token = tl.load(tokens_ptr + (request * K + tl.minimum(depth, K) - 1) * k + candidate)
        tl.store(chosen_ptr + out + node, tl.where(is_used, token, -1).to(tl.int32))
        tl.store(parents_ptr + out + node, parent)
        tl.store(reached_ptr + out + node, score)


@triton.jit(do_not_specialize=["repeats"])
def _add_noise(
    scores_ptr, tokens_ptr, positions_ptr, keys_ptr, temperature_ptr, rows_ptr, out_ptr, k, repeats,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    inside = index < k
    scores = tl.load(scores_ptr + row * k + index, mask=inside, other=0.0)
    entry = parameter_entry(row, rows_ptr, repeats)
    temperature = tl.load(temperature_ptr + entry)
    if temperature > 0.0:
        ids = tl.load(tokens_ptr + row * k + index, mask=inside, other=0)
        bits = row_noise_bits(tl.load(keys_ptr + entry), tl.load(positions_ptr + row), ids)
        scores += temperature * bits_to_gumbel(bits)
    tl.store(out_ptr + row * k + index, scores, mask=inside)
