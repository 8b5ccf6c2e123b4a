"""The k best columns of each row by perturbed score, best first, with their log-probabilities: what a draft tree grows.

A score is logit + T * gumbel(key, position, id) with the noise of kernels/sampling.py, so the first of the k is the
sample; its value is log_softmax of the row's scores, which at T = 0 is EAGLE-2's score (arXiv 2406.16858, section 4.1).
On the GPU a row is cut into tiles. Each leaves its k best and its sum of exponentials, and the last program of a row to
arrive merges them; no row depends on the others.
Letters: R rows of logits, V their vocabulary, S tiles of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.filters import filter_thresholds_triton
from slipstream.kernels.grid_sync import MAX_ROWS, done_counters, is_last_done
from slipstream.kernels.launch import pdl_options, use_triton, wait_for_inputs
from slipstream.kernels.sampling import (
    NO_SCORE,
    Sampling,
    load_scores,
    perturbed,
    rank_column,
    score_order,
    score_rank,
)

MAX_K = 16
TILE = 2048  # columns of one program


def perturbed_topk(
    logits: Tensor, k: int, positions: Tensor, sampling: Sampling, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits (R, V), positions (R,) of the token to propose -> log-probabilities (R, k) fp32, columns (R, k) int64.

    Ties go to the lower column. Columns that a row's filters cut have value -inf; a greedy row has no filters.
    `ids` (V,): the target id of each column (default: the column itself). k: 1 to MAX_K, not above V.
    """
    run = perturbed_topk_triton if use_triton(logits) else perturbed_topk_reference
    return run(logits, k, positions, sampling, ids)


def perturbed_topk_reference(
    logits: Tensor, k: int, positions: Tensor, sampling: Sampling, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    scores = perturbed(logits, positions, sampling, ids).float()
    best = scores.sort(dim=-1, descending=True, stable=True)
    return best.values[:, :k] - scores.logsumexp(dim=-1, keepdim=True), best.indices[:, :k]


def perturbed_topk_triton(
    logits: Tensor, k: int, positions: Tensor, sampling: Sampling, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One launch, and four more with filters."""
    R, V = logits.shape
    assert R <= MAX_ROWS
    assert logits.stride(1) == 1
    assert 1 <= k <= min(MAX_K, V)
    thresholds, tiles, device = None, triton.cdiv(V, TILE), logits.device
    if sampling.temperature is not None and sampling.filters is not None:
        entries = sampling.temperature, sampling.filters, sampling.rows, sampling.repeats
        thresholds = filter_thresholds_triton(logits, *entries)
    candidates, sums, values, columns = empty_topk(R, tiles, k, device)
    if R:
        _perturbed_topk[(R, tiles)](
            logits, positions, sampling.keys, sampling.temperature, sampling.rows, thresholds, ids,
            candidates, sums, done_counters(device), values, columns,
            logits.stride(0), V, sampling.repeats, tiles,
            K=k, TILE=TILE, **merge_blocks(tiles, k), num_warps=8, **pdl_options(device),
        )  # fmt: skip
    return values, columns


def empty_topk(rows: int, tiles: int, k: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What tiles leave, candidates (R, S, k) int64 ranks and sums (R, S, 2) fp32; values (R, k), columns (R, k)."""
    return (
        torch.empty(rows, tiles, k, dtype=torch.int64, device=device),
        torch.empty(rows, tiles, 2, dtype=torch.float32, device=device),
        torch.empty(rows, k, dtype=torch.float32, device=device),
        torch.empty(rows, k, dtype=torch.int64, device=device),
    )


def merge_blocks(tiles: int, k: int) -> dict[str, int]:
    return {"TILES": triton.next_power_of_2(tiles), "CANDIDATES": triton.next_power_of_2(tiles * k)}


@triton.jit
def _rank_score(rank):
    order = (rank >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["repeats"])
def _perturbed_topk(
    logits_ptr, positions_ptr, keys_ptr, temperature_ptr, rows_ptr, thresholds_ptr, ids_ptr,
    candidates_ptr, sums_ptr, counters_ptr, values_ptr, columns_ptr, stride, V, repeats, tiles,
    K: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row, tile = tl.program_id(0), tl.program_id(1)
    columns = tile * TILE + tl.arange(0, TILE)
    scores = load_scores(
        logits_ptr, positions_ptr, keys_ptr, temperature_ptr, rows_ptr, thresholds_ptr, ids_ptr,
        row, columns, stride, V, repeats,
    )  # fmt: skip
    peak = tl.max(scores, axis=0)
    place = row.to(tl.int64) * tiles + tile
    tl.store(sums_ptr + place * 2, peak)
    tl.store(sums_ptr + place * 2 + 1, tl.sum(tl.exp(scores - tl.maximum(peak, -1e30)), axis=0))
    ranks = score_rank(score_order(scores), columns)  # columns beyond the last one come after all others
    for choice in range(K):
        best = tl.max(ranks, axis=0)
        ranks = tl.where(ranks == best, NO_SCORE, ranks)
        tl.store(candidates_ptr + place * K + choice, best)
    if is_last_done(counters_ptr + row, tiles):
        merge_topk(candidates_ptr, sums_ptr, values_ptr, columns_ptr, row, tiles, K, TILES, CANDIDATES)


@triton.jit
def merge_topk(
    candidates_ptr, sums_ptr, values_ptr, columns_ptr, row, tiles,
    K: tl.constexpr, TILES: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The k best of a row's candidates, and their values from the sums of its tiles."""
    tile, candidate, row = tl.arange(0, TILES), tl.arange(0, CANDIDATES), row.to(tl.int64)
    sums = sums_ptr + (row * tiles + tile) * 2
    peaks = tl.load(sums, mask=tile < tiles, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(sums + 1, mask=tile < tiles, other=0.0, cache_modifier=".cg")
    found = candidates_ptr + row * tiles * K + candidate
    ranks = tl.load(found, mask=candidate < tiles * K, other=NO_SCORE, cache_modifier=".cg")
    peak = tl.maximum(tl.max(peaks, axis=0), -1e30)
    log_total = tl.log(tl.sum(totals * tl.exp(peaks - peak), axis=0))
    for choice in range(K):
        best = tl.max(ranks, axis=0)
        ranks = tl.where(ranks == best, NO_SCORE, ranks)
        tl.store(values_ptr + row * K + choice, (_rank_score(best) - peak) - log_total)
        tl.store(columns_ptr + row * K + choice, rank_column(best))
