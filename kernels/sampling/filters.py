"""Top-k, then top-p, then min-p as one number per row: the smallest logit that is kept, found without a sort.

On the GPU a row is cut into tiles of constant size, one program each; the last program of a row to finish merges their
results. Four launches:

  1. summarise  maximum, sum of exponentials, maxima of parts of tiles: decides the search and its lower bound
  2. fill_bins  sums weights in 1,024 bins from that bound to the maximum; finds the bin where the sum from above
                reaches the goal
  3. collect    gathers the few logits of that bin
  4. finish     finds the exact threshold among them

A search finds the largest logit x of a row with weight(x and all above it) >= goal. Top-k: every weight is 1, the goal
k. Top-p: weights exp((x - peak) / T), the goal top_p of their sum. The weight from `low` up reaches the goal. x falls
into one of BINS equal bins between `low` and the peak; the answer is in the first bin from above with which the sum
reaches the goal, and `above` is the sum of the bins before it. Weights are summed as integers, so no sum depends on the
order. Logits are compared unscaled: dividing by T keeps their order and costs more than everything else.

A small top-k skips 2: the k-th largest of the maxima bounds the k-th largest logit from below. Candidates are gathered
in any order and each is compared with all others, so nothing is sorted. If there are too many, or a large top-k comes
with a top-p, one program finds the threshold over the whole row, four bits at a time: slow but rare. Greedy and
unfiltered rows are skipped. No row's threshold depends on other rows. Every launch processes the logits that it loads.
Letters: R rows of logits, V their vocabulary, S tiles of a row, E entries of parameters.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.grid_sync import MAX_ROWS, done_counters, is_last_done
from slipstream.kernels.sampling.processors import (
    Processors,
    load_logits,
    parameter_entry,
    register_limit,
    row_flags,
)

TILE = 4096  # columns per program of `summarise`
SEARCH_TILE = 2048  # columns per program of the search
CHUNKS = 16  # parts of a tile whose maxima are kept, half as many where there are more than 16 tiles

# Kinds of search.
NONE = tl.constexpr(0)  # the threshold is known
RANK = tl.constexpr(1)  # top-k among the few x >= low, then top-p among those
WIDE_RANK = tl.constexpr(2)  # top-k by bins
MASS = tl.constexpr(3)  # top-p by bins

# Floats of a row's search record.
SEARCH = tl.constexpr(10)
KIND = tl.constexpr(0)
PEAK = tl.constexpr(1)
LOW = tl.constexpr(2)
SCALE = tl.constexpr(3)  # bins for each unit of x
ABOVE = tl.constexpr(4)
GOAL = tl.constexpr(5)
FLOOR = tl.constexpr(6)  # lowest logit that min-p keeps
BIN = tl.constexpr(7)  # bin of the answer
RATE = tl.constexpr(8)  # log2(e) / T
FLAGS = tl.constexpr(9)  # which processors the row has; only where a pass has any

PARTIAL = tl.constexpr(32)  # floats that a program stores for the last one
FEW = tl.constexpr(768)  # candidates: three quarters of CANDIDATES
BINS = tl.constexpr(1024)  # from the peak downwards
MASS_UNIT = tl.constexpr(2.0**40)  # integer units of the mass of the row's maximum
LOG2_E = tl.constexpr(1.4426950408889634)
CANDIDATES = tl.constexpr(1024)
COMPARED = tl.constexpr(16)  # candidates compared with all others per step
SCANNED = tl.constexpr(1024)  # columns per step of a descent


@dataclass(frozen=True, slots=True)
class Filters:
    """Parameters by entry, see Sampling."""

    top_k: Tensor  # (E,) int64, 0 = off
    top_p: Tensor  # (E,) fp32, 1 = off
    min_p: Tensor  # (E,) fp32, 0 = off

    def select(self, entries: Tensor) -> "Filters":
        return Filters(self.top_k[entries], self.top_p[entries], self.min_p[entries])


def filter_logits(scaled: Tensor, filters: Filters) -> Tensor:
    """Sets to -inf what top-k, then top-p, then min-p remove from `scaled` (R, V) = logits / T; ties with the last kept
    token stay. `filters` has one entry per row."""
    return scaled.masked_fill(scaled < filter_thresholds_reference(scaled, filters)[:, None], -torch.inf)


def filter_thresholds_reference(scaled: Tensor, filters: Filters) -> Tensor:
    """(R,) the smallest number of each row of `scaled` (R, V) that is kept."""
    ordered = scaled.sort(dim=-1, descending=True).values
    ranks = torch.arange(scaled.shape[-1], device=scaled.device)
    keep = (filters.top_k[:, None] == 0) | (ranks < filters.top_k[:, None])
    probs = ordered.masked_fill(~keep, -torch.inf).softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs  # in fp32 it may exceed 1 before the end
    keep &= (before < filters.top_p[:, None]) | (filters.top_p[:, None] == 1)  # the token that crosses top_p stays
    keep &= probs >= filters.min_p[:, None] * probs[:, :1]
    return ordered.gather(1, keep.sum(dim=-1, keepdim=True).clamp_(min=1) - 1).squeeze(1)


def filter_thresholds_triton(
    logits: Tensor,
    temperature: Tensor,
    filters: Filters,
    rows: Tensor | None,
    repeats: int,
    processors: Processors | None = None,
) -> Tensor:
    """(R,) fp32 the smallest kept logit, once processed, of each row of `logits` (R, V); -inf for greedy and unfiltered
    rows.

    Parameters by entry and `rows` as in Sampling.
    """
    R, V = logits.shape
    assert R <= MAX_ROWS
    assert logits.stride(1) == 1
    tiles = triton.cdiv(V, TILE)
    device = logits.device
    thresholds = torch.empty(R, dtype=torch.float32, device=device)
    searches = torch.empty(R, SEARCH.value, dtype=torch.float32, device=device)
    partials = torch.empty(R, tiles, PARTIAL.value, dtype=torch.float32, device=device)
    bins = torch.empty(R, BINS.value, dtype=torch.int64, device=device)
    candidates = torch.empty(R, CANDIDATES.value, dtype=torch.float32, device=device)
    counters = done_counters(device)
    stride = logits.stride(0)
    k = filters.top_k
    p = filters.top_p
    if R:
        arguments = processors and processors.for_kernels()
        limits = [register_limit(logits, processors, max_registers) for max_registers in (80, 72, 32, 128)]
        chunks = CHUNKS if tiles <= 16 else CHUNKS // 2
        parts = triton.cdiv(V, SEARCH_TILE)
        summarise[(R, tiles)](
            logits, temperature, rows, repeats, arguments, searches, bins, counters, stride, V, tiles, partials, k, p,
            filters.min_p, thresholds, TILE=TILE, TILES=triton.next_power_of_2(tiles), CHUNKS=chunks, num_warps=4,
            **limits[0],
        )  # fmt: skip
        fill_bins[(R, parts)](
            logits, rows, repeats, arguments, searches, bins, counters, stride, V, parts,
            TILE=SEARCH_TILE, num_warps=4, **limits[1],
        )  # fmt: skip
        collect[(R, parts)](
            logits, rows, repeats, arguments, searches, candidates, counters, stride, V,
            TILE=SEARCH_TILE, num_warps=8, **limits[2],
        )  # fmt: skip
        finish[(R,)](
            logits, rows, repeats, arguments, searches, candidates, counters, stride, V, k, p, thresholds,
            num_warps=8, **limits[3],
        )  # fmt: skip
    return thresholds


@triton.jit
def mass(x, peak, rate):
    """The probability of x over that of the peak."""
    return tl.exp2((x - peak) * rate)


@triton.jit(do_not_specialize=["repeats"])
def summarise(
    logits_ptr, temperature_ptr, rows_ptr, repeats, processors, searches_ptr, bins_ptr, counters_ptr, stride, V, tiles,
    partials_ptr, top_k_ptr, top_p_ptr, min_p_ptr, thresholds_ptr,
    TILE: tl.constexpr, TILES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """A tile stores its chunks' maxima, its own maximum, sum of exponentials and smallest finite x. The first tile
    clears the row's bins."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
    entry = parameter_entry(row, rows_ptr, repeats)
    temperature = tl.load(temperature_ptr + entry)
    top_k = tl.load(top_k_ptr + entry).to(tl.int32)
    top_p = tl.load(top_p_ptr + entry)
    min_p = tl.load(min_p_ptr + entry)
    flags = row_flags(row, rows_ptr, repeats, processors)
    search = searches_ptr + row * SEARCH
    if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
        chunk = tl.arange(0, CHUNKS)
        column = tl.arange(0, TILE // CHUNKS)
        columns = tile * TILE + chunk[:, None] * (TILE // CHUNKS) + column[None, :]
        row_ptr = logits_ptr + row.to(tl.int64) * stride
        x = load_logits(row_ptr, columns, V, row, flags, rows_ptr, repeats, processors)
        temperature = tl.maximum(temperature, 1e-6)
        rate = LOG2_E / temperature
        maxima = tl.max(x, axis=1)
        peak = tl.max(maxima, axis=0)
        total = tl.sum(mass(x, tl.maximum(peak, -1e30), rate))
        lowest = tl.min(tl.where(x > float("-inf"), x, float("inf")))
        partials_ptr += row.to(tl.int64) * tiles * PARTIAL
        partial = partials_ptr + tile * PARTIAL
        tl.store(partial + chunk, maxima)
        tl.store(partial + CHUNKS, peak)
        tl.store(partial + CHUNKS + 1, total)
        tl.store(partial + CHUNKS + 2, lowest)
        if tile == 0:
            tl.store(bins_ptr + row.to(tl.int64) * BINS + tl.arange(0, BINS), tl.zeros((BINS,), tl.int64))
        if is_last_done(counters_ptr + row, tiles):
            tl.store(search + RATE, rate)
            if processors is not None:
                tl.store(search + FLAGS, flags.to(tl.float32))
            _begin_search(
                search, thresholds_ptr + row, partials_ptr, V, tiles, temperature, rate, top_k, top_p, min_p,
                TILES, CHUNKS,
            )  # fmt: skip
    else:
        if tile == 0:
            tl.store(search + KIND, 0.0)
            tl.store(thresholds_ptr + row, float("-inf"))


@triton.jit
def _begin_search(
    search, threshold_ptr, partials, V, tiles, temperature, rate, top_k, top_p, min_p,
    TILES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    tile = tl.arange(0, TILES)
    address = partials + tile * PARTIAL + CHUNKS
    valid = tile < tiles
    peaks = tl.load(address, mask=valid, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(address + 1, mask=valid, other=0.0, cache_modifier=".cg")
    lowest = tl.min(tl.load(address + 2, mask=valid, other=float("inf"), cache_modifier=".cg"), axis=0)
    peak = tl.max(peaks, axis=0)
    total = tl.sum(totals * mass(peaks, tl.maximum(peak, -1e30), rate), axis=0)
    distance = tl.minimum(tl.log(tl.maximum(min_p, 1e-30)), 0.0) * temperature
    floor = tl.where(min_p > 0.0, peak + distance, float("-inf"))
    # At most V values x lie below peak - depth: together they hold no more than 1 - top_p of the sum.
    depth = (tl.log(V / (tl.maximum(1.0 - top_p, 1e-9) * total)) + 1e-3) * temperature + 1e-6 * tl.abs(peak)
    low = tl.maximum(lowest, peak - depth)
    kind = tl.where(top_p < 1.0, MASS, NONE)
    goal = top_p * total
    if (top_k > 0) & (top_k < V):
        bound = _kth_largest_maximum(partials, tiles, top_k, TILES, CHUNKS)
        low = tl.where((top_k <= tiles * CHUNKS) & (bound > float("-inf")), bound, lowest)
        kind = tl.where(_expected(top_k, tiles * CHUNKS) < FEW, RANK, WIDE_RANK)
        goal = top_k.to(tl.float32)
    is_over = (top_p <= 0.0) | (peak == float("-inf"))
    kind = tl.where(is_over, NONE, kind)
    tl.store(threshold_ptr, tl.where(is_over, peak, floor))
    tl.store(search + KIND, kind.to(tl.float32))
    tl.store(search + PEAK, peak)
    tl.store(search + LOW, low)
    tl.store(search + SCALE, 1.0 / tl.maximum(peak - low, 1e-30) * BINS)
    tl.store(search + ABOVE, 0.0)
    tl.store(search + GOAL, goal)
    tl.store(search + FLOOR, floor)
    tl.store(search + BIN, 0.0)


@triton.jit
def _expected(top_k, num_maxima):
    """How many x are not below the k-th largest of the maxima of as many random parts: m ln(m / (m - k))."""
    rest = tl.maximum((num_maxima - top_k).to(tl.float32), 1e-30)
    return num_maxima * tl.log(num_maxima / rest)


@triton.jit
def _kth_largest_maximum(partials, tiles, top_k, TILES: tl.constexpr, CHUNKS: tl.constexpr):
    """At least top_k logits of the row reach it, if there are as many maxima; -inf if they are not finite."""
    chunk = tl.arange(0, TILES * CHUNKS)
    address = partials + chunk // CHUNKS * PARTIAL + chunk % CHUNKS
    maxima = tl.load(address, mask=chunk < tiles * CHUNKS, other=float("-inf"), cache_modifier=".cg")
    rank = tl.zeros((TILES * CHUNKS,), tl.int32)
    for start in range(0, tiles * CHUNKS, 64):
        other = start + tl.arange(0, 64)
        other_address = partials + other // CHUNKS * PARTIAL + other % CHUNKS
        other_maxima = tl.load(other_address, mask=other < tiles * CHUNKS, other=float("-inf"), cache_modifier=".cg")
        rank += tl.sum((other_maxima[:, None] > maxima[None, :]).to(tl.int32), axis=0)
    return tl.min(tl.where(rank < top_k, maxima, float("inf")), axis=0)


@triton.jit
def bin_of(x, peak, scale):
    """The bin of each x, from the peak downwards; the last bin takes everything below."""
    places = tl.minimum((peak - x) * scale, BINS - 1.0)
    # Adding 2^23 in fp32 leaves the rounded place in the last bits; a conversion would cost eight times as much.
    return (places + 8388608.0).to(tl.int32, bitcast=True) & (BINS - 1)


@triton.jit
def search_flags(search, processors):
    """The flags of the record's row."""
    return 0 if processors is None else tl.load(search + FLAGS).to(tl.int32)


@triton.jit(do_not_specialize=["repeats"])
def fill_bins(
    logits_ptr, rows_ptr, repeats, processors, searches_ptr, bins_ptr, counters_ptr, stride, V, tiles,
    TILE: tl.constexpr,
):  # fmt: skip
    """Sums the weights of each bin; the last program finds the answer's bin."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
    search = searches_ptr + row * SEARCH
    bins_ptr = bins_ptr + row.to(tl.int64) * BINS
    kind = tl.load(search + KIND).to(tl.int32)
    if kind >= WIDE_RANK:
        peak = tl.load(search + PEAK)
        low = tl.load(search + LOW)
        scale = tl.load(search + SCALE)
        unit = tl.where(kind == MASS, MASS_UNIT, 1.0)
        row_ptr = logits_ptr + row.to(tl.int64) * stride
        flags = search_flags(search, processors)
        columns = tile * TILE + tl.arange(0, TILE)
        x = load_logits(row_ptr, columns, V, row, flags, rows_ptr, repeats, processors)
        weights = tl.where(kind == MASS, mass(x, peak, tl.load(search + RATE)), 1.0) * unit
        tl.atomic_add(bins_ptr + bin_of(x, peak, scale), weights.to(tl.int64), mask=x >= low, sem="relaxed")
        if is_last_done(counters_ptr + row, tiles):
            _choose_bin(search, bins_ptr, unit)


@triton.jit
def _choose_bin(search, bins_ptr, unit):
    index = tl.arange(0, BINS)
    weights = tl.load(bins_ptr + index, cache_modifier=".cg")
    sums = tl.cumsum(weights, axis=0)
    reached = sums.to(tl.float32) / unit >= tl.load(search + GOAL)
    last = tl.max(tl.where(weights > 0, index, 0), axis=0)  # where rounding keeps the sum below the goal
    chosen_bin = tl.min(tl.where(reached, index, last), axis=0)
    above = tl.sum(tl.where(index == chosen_bin, sums - weights, 0), axis=0)
    tl.store(search + BIN, chosen_bin.to(tl.float32))
    tl.store(search + ABOVE, above.to(tl.float32) / unit)


@triton.jit(do_not_specialize=["repeats"])
def collect(
    logits_ptr, rows_ptr, repeats, processors, searches_ptr, candidates_ptr, counters_ptr, stride, V,
    TILE: tl.constexpr,
):  # fmt: skip
    """Appends the logits of the bin to the row's candidates and counts them, also those that do not fit."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
    search = searches_ptr + row * SEARCH
    kind = tl.load(search + KIND).to(tl.int32)
    if kind != NONE:
        row_ptr = logits_ptr + row.to(tl.int64) * stride
        flags = search_flags(search, processors)
        columns = tile * TILE + tl.arange(0, TILE)
        x = load_logits(row_ptr, columns, V, row, flags, rows_ptr, repeats, processors)
        answer = tl.load(search + BIN).to(tl.int32)
        bins = bin_of(x, tl.load(search + PEAK), tl.load(search + SCALE))
        inside = (x >= tl.load(search + LOW)) & (tl.where(kind == RANK, answer, bins) == answer)
        # Few are inside: one atomic addition each costs less than numbering them first.
        counter = counters_ptr + row + tl.zeros((TILE,), tl.int32)
        place = tl.atomic_add(counter, 1, mask=inside, sem="relaxed")
        tl.store(candidates_ptr + row.to(tl.int64) * CANDIDATES + place, x, mask=inside & (place < CANDIDATES))


@triton.jit(do_not_specialize=["repeats"])
def finish(
    logits_ptr, rows_ptr, repeats, processors, searches_ptr, candidates_ptr, counters_ptr, stride, V,
    top_k_ptr, top_p_ptr, thresholds_ptr,
):  # fmt: skip
    """One program per row; resets the count of candidates."""
    row = tl.program_id(0)
    search = searches_ptr + row * SEARCH
    kind = tl.load(search + KIND).to(tl.int32)
    if kind != NONE:
        entry = parameter_entry(row, rows_ptr, repeats)
        top_k = tl.load(top_k_ptr + entry).to(tl.int32)
        top_p = tl.load(top_p_ptr + entry)
        num_candidates = tl.atomic_xchg(counters_ptr + row, 0, sem="relaxed")
        candidates_ptr += row.to(tl.int64) * CANDIDATES
        is_short = (kind != WIDE_RANK) | (top_p >= 1.0)
        if is_short & (num_candidates <= CANDIDATES // 4):
            threshold = _among(candidates_ptr, num_candidates, search, kind, top_k, top_p, CANDIDATES // 4)
        elif is_short & (num_candidates <= CANDIDATES):
            threshold = _among(candidates_ptr, num_candidates, search, kind, top_k, top_p, CANDIDATES)
        else:
            row_ptr = logits_ptr + row.to(tl.int64) * stride
            flags = search_flags(search, processors)
            threshold = _over_row(
                row_ptr, V, row, flags, rows_ptr, repeats, processors, search, kind, top_k, top_p
            )  # fmt: skip
        tl.store(thresholds_ptr + row, tl.maximum(threshold, tl.load(search + FLOOR)))


@triton.jit
def _among(candidates_ptr, num_candidates, search, kind, top_k, top_p, LANES: tl.constexpr):
    """The smallest kept candidate."""
    peak = tl.load(search + PEAK)
    above = tl.load(search + ABOVE)
    goal = tl.load(search + GOAL)
    rate = tl.load(search + RATE)
    lane = tl.arange(0, LANES)
    x = tl.load(candidates_ptr + lane, mask=lane < num_candidates, other=float("-inf"))
    # the larger candidates' number and mass
    rank = tl.zeros((LANES,), tl.int32)
    larger_mass = tl.zeros((LANES,), tl.int64)
    for start in range(0, num_candidates, COMPARED):
        other = start + tl.arange(0, COMPARED)
        other_x = tl.load(candidates_ptr + other, mask=other < num_candidates, other=float("-inf"))
        masses = (mass(other_x, peak, rate) * MASS_UNIT).to(tl.int64)
        is_larger = other_x[:, None] > x[None, :]
        rank += tl.sum(is_larger.to(tl.int32), axis=0)
        larger_mass += tl.sum(tl.where(is_larger, masses[:, None], 0), axis=0)
    share = larger_mass.to(tl.float32) * (1.0 / MASS_UNIT)
    keep = (lane < num_candidates) & (above + tl.where(kind == MASS, share, rank.to(tl.float32)) < goal)
    if (kind == RANK) & (top_p < 1.0):  # the sum counts as many x that tie for place k as fit in the top k
        kth = tl.min(tl.where(keep, x, float("inf")), axis=0)
        num_larger = tl.max(tl.where(keep, rank, 0), axis=0)
        larger = tl.max(tl.where(keep, share, 0.0), axis=0)
        num_tied = tl.minimum(top_k, num_candidates) - num_larger  # a row may have fewer finite x than top_k
        keep = keep & (share < top_p * (larger + num_tied.to(tl.float32) * mass(kth, peak, rate)))
    return tl.minimum(tl.min(tl.where(keep, x, float("inf")), axis=0), peak)


@triton.jit
def _over_row(row_ptr, V, row, flags, rows_ptr, repeats, processors, search, kind, top_k, top_p):
    peak = tl.load(search + PEAK)
    goal = tl.load(search + GOAL)
    rate = tl.load(search + RATE)
    threshold = tl.full((), float("-inf"), tl.float32)
    if kind != MASS:
        goal_k = top_k.to(tl.float32)
        threshold = _descend(row_ptr, V, row, flags, rows_ptr, repeats, processors, peak, rate, goal_k, False)
        counts = tl.zeros((SCANNED,), tl.float32)
        masses = tl.zeros((SCANNED,), tl.float32)
        for start in range(0, V, SCANNED):
            columns = start + tl.arange(0, SCANNED)
            x = load_logits(row_ptr, columns, V, row, flags, rows_ptr, repeats, processors)
            counts += tl.where(x > threshold, 1.0, 0.0)
            masses += tl.where(x > threshold, mass(x, peak, rate), 0.0)
        num_larger = tl.sum(counts, axis=0)
        larger = tl.sum(masses, axis=0)
        goal = top_p * (larger + (top_k.to(tl.float32) - num_larger) * mass(threshold, peak, rate))
    if top_p < 1.0:
        lowest = _descend(row_ptr, V, row, flags, rows_ptr, repeats, processors, peak, rate, goal, True)
        threshold = tl.maximum(threshold, lowest)
    return threshold


@triton.jit
def _descend(row_ptr, V, row, flags, rows_ptr, repeats, processors, peak, rate, goal, BY_MASS: tl.constexpr):
    """The largest x whose weight and that of all above it reach the goal, found four bits at a time from the top."""
    digit = tl.arange(0, 16)
    # the answer's leading digits
    answer = tl.full((), 0, tl.uint32)
    unit = tl.full((), 1 << 28, tl.uint32)
    for _ in range(8):
        pivots = answer + digit.to(tl.uint32) * unit
        weights = tl.zeros((16, SCANNED), tl.float32)
        for start in range(0, V, SCANNED):
            columns = start + tl.arange(0, SCANNED)
            x = load_logits(row_ptr, columns, V, row, flags, rows_ptr, repeats, processors)
            bits = x.to(tl.uint32, bitcast=True)
            order = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)
            weight = tl.where(columns < V, mass(x, peak, rate) if BY_MASS else 1.0, 0.0)
            weights += tl.where(order[None, :] >= pivots[:, None], weight[None, :], 0.0)
        reached = tl.sum((tl.sum(weights, axis=1) >= goal).to(tl.int32), axis=0)
        answer = answer + tl.maximum(reached - 1, 0).to(tl.uint32) * unit
        unit = unit >> 4
    bits = tl.where(answer >= 0x80000000, answer & 0x7FFFFFFF, answer ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)
