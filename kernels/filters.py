"""Top-k, then top-p, then min-p as one number per row: the smallest logit that is kept, found without a sort.

On the GPU the vocabulary is cut into tiles of constant size, one program each; of the programs that share a row, the
last to arrive merges what all of them found. Four launches:

  1. summarise  maximum, sum of exponentials, the maxima of parts of tiles: what is searched, and from where up
  2. fill_bins  sums of the weights in 1,024 bins between there and the maximum, and the bin where the sum from above
                reaches the goal. For top-p the weights are probabilities and the goal a share of their sum; for a top-k
                too large for step 4, ones and k
  3. collect    the few logits of that bin
  4. finish     the exact answer from these

A small top-k skips 2: the k-th largest of the maxima bounds the k-th largest logit from below. A row without
filters, or greedy, does nothing. No row's threshold depends on the other rows.
Letters: R rows of logits, V their vocabulary, S tiles of a row, E entries of parameters.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from slipstream.kernels.filter_finish import CANDIDATES, collect, finish
from slipstream.kernels.filter_search import BINS, PARTIAL, SEARCH, fill_bins, summarise
from slipstream.kernels.grid_sync import MAX_ROWS, done_counters

TILE = 4096  # columns of a program that sums up
SEARCH_TILE = 2048  # of one that searches
CHUNKS = 16  # parts of a tile whose maxima are kept, half as many where there are more than 16 tiles


@dataclass(frozen=True, slots=True)
class Filters:
    """Parameters by entry, see Sampling."""

    top_k: Tensor  # (E,) int64, 0 = off
    top_p: Tensor  # (E,) fp32, 1 = off
    min_p: Tensor  # (E,) fp32, 0 = off

    def select(self, entries: Tensor) -> "Filters":
        return Filters(self.top_k[entries], self.top_p[entries], self.min_p[entries])


def filter_logits(scaled: Tensor, filters: Filters) -> Tensor:
    """Sets to -inf what top-k, then top-p, then min-p cut from `scaled` (R, V) = logits / T; ties with the last kept
    token stay. `filters` by row."""
    return scaled.masked_fill(scaled < filter_thresholds_reference(scaled, filters)[:, None], -torch.inf)


def filter_thresholds_reference(scaled: Tensor, filters: Filters) -> Tensor:
    """(R,) the smallest number of each row of `scaled` (R, V) that is kept."""
    ordered = scaled.sort(dim=-1, descending=True).values
    ranks = torch.arange(scaled.shape[-1], device=scaled.device)
    keep = (filters.top_k[:, None] == 0) | (ranks < filters.top_k[:, None])
    probs = ordered.masked_fill(~keep, -torch.inf).softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs  # in fp32 it passes 1 ahead of the end
    keep &= (before < filters.top_p[:, None]) | (filters.top_p[:, None] == 1)  # the token that crosses top_p stays
    keep &= probs >= filters.min_p[:, None] * probs[:, :1]
    return ordered.gather(1, keep.sum(dim=-1, keepdim=True).clamp_(min=1) - 1).squeeze(1)


def filter_thresholds_triton(
    logits: Tensor, temperature: Tensor, filters: Filters, rows: Tensor | None, repeats: int
) -> Tensor:
    """(R,) fp32 the smallest of each row of `logits` (R, V) that is kept; -inf where the row is greedy or unfiltered.

    Parameters by entry and `rows` as in Sampling.
    """
    R, V = logits.shape
    assert R <= MAX_ROWS
    assert logits.stride(1) == 1
    tiles, device = triton.cdiv(V, TILE), logits.device
    thresholds = torch.empty(R, dtype=torch.float32, device=device)
    searches = torch.empty(R, SEARCH.value, dtype=torch.float32, device=device)
    partials = torch.empty(R, tiles, PARTIAL.value, dtype=torch.float32, device=device)
    bins = torch.empty(R, BINS.value, dtype=torch.int64, device=device)
    candidates = torch.empty(R, CANDIDATES.value, dtype=torch.float32, device=device)
    counters, shape, k, p = done_counters(device), (logits.stride(0), V), filters.top_k, filters.top_p
    if R:
        chunks, parts = CHUNKS if tiles <= 16 else CHUNKS // 2, triton.cdiv(V, SEARCH_TILE)
        summarise[(R, tiles)](
            logits, temperature, rows, repeats, searches, bins, counters, *shape, tiles, partials, k, p, filters.min_p,
            thresholds, TILE=TILE, TILES=triton.next_power_of_2(tiles), CHUNKS=chunks, num_warps=4,
        )  # fmt: skip
        fill_bins[(R, parts)](logits, searches, bins, counters, *shape, parts, TILE=SEARCH_TILE, num_warps=4)
        collect[(R, parts)](logits, searches, candidates, counters, *shape, TILE=SEARCH_TILE, num_warps=8)
        finish[(R,)](logits, searches, candidates, counters, *shape, rows, repeats, k, p, thresholds, num_warps=8)
    return thresholds
