"""A walk over a draft's whole vocabulary: the logits of a slot are its own plus those of the token before it (DSpark's
Markov heads, arXiv 2607.05147, section 3).

The successors' factors are read once for each slot, one slot after another: two launches each, products with the best
of every tile and then the choice, which computes what the next slot multiplies. This reads at most
K * Vd * r weights; `transition_scores` over the best candidates of each slot reads next to nothing.
Letters: B requests, K slots, r rank, V target and Vd draft vocabulary.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import Op, pdl_options, use_triton, wait_for_inputs
from slipstream.kernels.sampling.processors import parameter_entry
from slipstream.kernels.sampling.sample import (
    Sampling,
    bits_to_gumbel,
    perturbed,
    rank_column,
    rank_score,
    row_noise_bits,
    score_order,
    score_rank,
)
from slipstream.kernels.speculation.lattice import Confidence, Factors, log_confidence

OUTPUTS = 128  # columns of a program
DEPTH = 64  # numbers of the factors that it multiplies at once


class Chain(NamedTuple):
    tokens: Tensor  # (B, K + 1) int32, the root first
    scores: Tensor  # (B, K + 1) fp32 sums of log-probabilities, or logarithms of confidences; 0 of the root


@Op
def markov_walk(
    logits: Tensor,
    roots: Tensor,
    factors: Factors,
    slots: Tensor | None,
    positions: Tensor,
    sampling: Sampling,
    ids: Tensor | None = None,
    confidence: Confidence | None = None,
) -> Chain:
    """The chain of each slot's sample, where column v of slot s after token a has the logit
    logits[s, v] + f(a) . successors[v].

    logits (B, K, Vd), roots (B,) int64, slots (B, K, r), positions (B, K) of the slots' tokens; `sampling` has a
    row for each request and no filters; ids (Vd,) int64 the target id of each column (default: the column). Ties
    go to the lowest column.
    """
    assert sampling.temperature is None or sampling.filters is None
    chain = [roots]
    reached = [torch.zeros(len(roots), device=roots.device)]
    for slot in range(logits.shape[1]):
        before = chain[-1].clamp(min=0)
        feature = factors.of(before, None if slots is None else slots[:, slot])
        scores = perturbed(logits[:, slot].float() + feature.float() @ factors.successors.float().T,
                           positions[:, slot], sampling, ids)  # fmt: skip
        best = scores.max(dim=1)
        step = best.values - scores.logsumexp(dim=1) if confidence is None else confidence.of(slot, chain[-1])
        chain.append(best.indices if ids is None else ids[best.indices])
        reached.append(reached[-1] + step.clamp(max=0.0))
    return Chain(torch.stack(chain, dim=1).int(), torch.stack(reached, dim=1))


@markov_walk.kernel(when=lambda logits, *_, **__: use_triton(logits))
def markov_walk_triton(
    logits: Tensor,
    roots: Tensor,
    factors: Factors,
    slots: Tensor | None,
    positions: Tensor,
    sampling: Sampling,
    ids: Tensor | None = None,
    confidence: Confidence | None = None,
) -> Chain:
    """Two launches a slot, and one."""
    B, K, size = logits.shape
    predecessors, successors, gates = factors
    device = logits.device
    rank = predecessors.shape[1]
    assert sampling.temperature is None or sampling.filters is None
    assert logits.is_contiguous()
    assert positions.is_contiguous()
    assert predecessors.stride() == successors.stride() == (rank, 1)
    slots = None if slots is None else slots.contiguous()
    confidence_tensors = confidence or (None, None, None)
    slot_logits, temperatures, by_token = confidence_tensors
    slot_logits = None if slot_logits is None else slot_logits.contiguous()
    chain = Chain(
        torch.empty(B, K + 1, dtype=torch.int32, device=device),
        torch.empty(B, K + 1, dtype=torch.float32, device=device),
    )
    if not B:
        return chain
    tiles = triton.cdiv(size, OUTPUTS)
    rows = min(max(triton.next_power_of_2(B), 16), 64)
    features = torch.empty(B, rank, dtype=predecessors.dtype, device=device)
    ranks = torch.empty(B, tiles, dtype=torch.int64, device=device)
    sums = torch.empty(B, tiles, 2, device=device)
    for slot in range(K + 1):
        _choose[(B,)](
            ranks, sums, roots, ids, predecessors, gates, slots, slot_logits, temperatures, by_token, *chain, features,
            slot, K, rank, tiles, TILES=triton.next_power_of_2(tiles), RANK=triton.next_power_of_2(rank),
            IS_FIRST=slot == 0, IS_LAST=slot == K, num_warps=4, **pdl_options(device),
        )  # fmt: skip
        if slot < K:
            _score[(triton.cdiv(B, rows), tiles)](
                features, successors, logits, ids, positions, sampling.keys, sampling.temperature, sampling.rows,
                ranks, sums, slot, K, B, size, rank, sampling.repeats, tiles,
                ROWS=rows, OUTPUTS=OUTPUTS, DEPTH=DEPTH, num_warps=4, **pdl_options(device),
            )  # fmt: skip
    return chain


@triton.jit(do_not_specialize=["slot", "K", "num_rows", "repeats"])
def _score(
    features_ptr, successors_ptr, logits_ptr, ids_ptr, positions_ptr, keys_ptr, temperature_ptr, rows_ptr, ranks_ptr,
    sums_ptr, slot, K, num_rows, size, rank, repeats, tiles,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile's best score of each request, and its sum of exponentials."""
    wait_for_inputs(PDL)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    depth = tl.arange(0, DEPTH)
    inside = column < size
    in_batch = row < num_rows
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(0, rank, DEPTH):
        part = (start + depth)[None, :]
        feature = tl.load(features_ptr + row[:, None] * rank + part, mask=in_batch[:, None] & (part < rank), other=0.0)
        places = column[:, None].to(tl.int64) * rank + part
        weight = tl.load(successors_ptr + places, mask=inside[:, None] & (part < rank), other=0.0)
        acc = tl.dot(weight, tl.trans(feature), acc, input_precision="ieee")
    cells = (row * K + slot)[None, :] * size + column[:, None]
    valid = inside[:, None] & in_batch[None, :]
    scores = acc + tl.load(logits_ptr + cells, mask=valid, other=0.0).to(tl.float32)
    if temperature_ptr is not None:
        entry = parameter_entry(tl.minimum(row, num_rows - 1), rows_ptr, repeats)
        temperature = tl.load(temperature_ptr + entry)
        if tl.max(temperature, axis=0) > 0.0:
            ids = column if ids_ptr is None else tl.load(ids_ptr + column, mask=inside, other=0)
            position = tl.load(positions_ptr + row * K + slot, mask=in_batch, other=0)
            bits = row_noise_bits(tl.load(keys_ptr + entry)[None, :], position[None, :], ids[:, None])
            scores += temperature[None, :] * bits_to_gumbel(bits)
    scores = tl.where(inside[:, None], scores, float("-inf"))
    peak = tl.max(scores, axis=0)
    order = score_order(scores)
    best = tl.max(order, axis=0)
    first = tl.min(tl.where(order == best[None, :], column[:, None], 0x7FFFFFFF), axis=0)
    place = row * tiles + tl.program_id(1)
    tl.store(ranks_ptr + place, score_rank(best, first), mask=in_batch)
    tl.store(sums_ptr + place * 2, peak, mask=in_batch)
    total = tl.sum(tl.exp(scores - tl.maximum(peak, -1e30)[None, :]), axis=0)
    tl.store(sums_ptr + place * 2 + 1, total, mask=in_batch)


@triton.jit(do_not_specialize=["slot", "K", "tiles"])
def _choose(
    ranks_ptr, sums_ptr, roots_ptr, ids_ptr, predecessors_ptr, gates_ptr, slots_ptr, own_ptr, temperatures_ptr,
    by_token_ptr, chain_ptr, reached_ptr, features_ptr, slot, K, rank, tiles,
    TILES: tl.constexpr, RANK: tl.constexpr, IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Node `slot` of the chain, the root first, and what slot `slot` multiplies."""
    wait_for_inputs(PDL)
    request = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    depth = tl.arange(0, RANK)
    out = request * (K + 1) + slot
    if IS_FIRST:
        token = tl.load(roots_ptr + request)
        reached = 0.0
    else:
        place = request * tiles + tile
        is_tile = tile < tiles
        ranks = tl.load(ranks_ptr + place, mask=is_tile, other=-(2**63))
        peaks = tl.load(sums_ptr + place * 2, mask=is_tile, other=float("-inf"))
        totals = tl.load(sums_ptr + place * 2 + 1, mask=is_tile, other=0.0)
        best = tl.max(ranks, axis=0)
        peak = tl.max(peaks, axis=0)
        step = rank_score(best) - peak - tl.log(tl.sum(totals * tl.exp(peaks - peak), axis=0))
        token = rank_column(best)
        if ids_ptr is not None:
            token = tl.load(ids_ptr + token)
        if own_ptr is not None:
            before = tl.load(chain_ptr + out - 1)
            step = log_confidence(own_ptr + request * K, temperatures_ptr, by_token_ptr, slot - 1, before)
        reached = tl.load(reached_ptr + out - 1) + tl.minimum(step, 0.0)
    tl.store(chain_ptr + out, token.to(tl.int32))
    tl.store(reached_ptr + out, reached)
    if not IS_LAST:
        within = depth < rank
        before = tl.maximum(token, 0).to(tl.int64) * rank + depth
        feature = tl.load(predecessors_ptr + before, mask=within, other=0.0)
        if slots_ptr is not None:
            factor = tl.load(slots_ptr + (request * K + slot) * rank + depth, mask=within, other=0.0).to(tl.float32)
            if gates_ptr is not None:
                factor = tl.sigmoid(factor + tl.load(gates_ptr + before, mask=within, other=0.0).to(tl.float32))
            feature = (feature.to(tl.float32) * factor).to(feature.dtype)
        tl.store(features_ptr + request * rank + depth, feature, mask=within)
