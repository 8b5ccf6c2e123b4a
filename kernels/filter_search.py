"""Kernels of kernels/filters.py that bracket a row's threshold.

A search asks for the largest of a row's logits x with weight(x and all above it) >= goal. Top-k: every weight is 1, the
goal k. Top-p: weights exp((x - peak) / T), the goal top_p of their sum. The weight from `low` up reaches it. Between
`low` and the peak x falls into one of BINS equal bins, whose weights are summed as integers, so that no sum depends on
the order. The answer lies in the first bin from above with which the sum reaches the goal; `above` is what the bins
before it hold. Logits are compared as they are, since a division by T keeps their order and costs more than all else.
"""

import triton
import triton.language as tl

from slipstream.kernels.grid_sync import is_last_done

NONE = tl.constexpr(0)  # kinds of search: the threshold is known
RANK = tl.constexpr(1)  # top-k among the few x >= low, then top-p among those
WIDE_RANK = tl.constexpr(2)  # top-k by bins
MASS = tl.constexpr(3)  # top-p by bins

# Floats of a row's search record.
SEARCH = tl.constexpr(9)
KIND = tl.constexpr(0)
PEAK = tl.constexpr(1)
LOW = tl.constexpr(2)
SCALE = tl.constexpr(3)  # bins for each unit of x
ABOVE = tl.constexpr(4)
GOAL = tl.constexpr(5)
FLOOR = tl.constexpr(6)  # what min-p keeps begins here
BIN = tl.constexpr(7)  # where the answer lies
RATE = tl.constexpr(8)  # log2(e) / T

PARTIAL = tl.constexpr(32)  # floats that a program leaves for the last one
FEW = tl.constexpr(768)  # candidates: three quarters of the room for them
BINS = tl.constexpr(1024)  # from the peak downwards
MASS_UNIT = tl.constexpr(2.0**40)  # integer units of the mass of the row's maximum
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def parameter_entry(row, rows_ptr, repeats):
    """Where the parameters of a row of logits are, see Sampling."""
    entry = row // repeats
    return entry if rows_ptr is None else tl.load(rows_ptr + entry)


@triton.jit
def load_logits(row_ptr, columns, V):
    return tl.load(row_ptr + columns, mask=columns < V, other=float("-inf")).to(tl.float32)


@triton.jit
def mass(x, peak, rate):
    """The probability of x over that of the peak."""
    return tl.exp2((x - peak) * rate)


@triton.jit(do_not_specialize=["repeats"])
def summarise(
    logits_ptr, temperature_ptr, rows_ptr, repeats, searches_ptr, bins_ptr, counters_ptr, stride, V, tiles,
    partials_ptr, top_k_ptr, top_p_ptr, min_p_ptr, thresholds_ptr,
    TILE: tl.constexpr, TILES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """A tile leaves its chunks' maxima, then its own maximum, sum of exponentials and smallest finite x. The first tile
    empties the row's bins."""
    row, tile = tl.program_id(0), tl.program_id(1)
    entry = parameter_entry(row, rows_ptr, repeats)
    temperature, top_k = tl.load(temperature_ptr + entry), tl.load(top_k_ptr + entry).to(tl.int32)
    top_p, min_p = tl.load(top_p_ptr + entry), tl.load(min_p_ptr + entry)
    search = searches_ptr + row * SEARCH
    if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
        chunk, column = tl.arange(0, CHUNKS), tl.arange(0, TILE // CHUNKS)
        columns = tile * TILE + chunk[:, None] * (TILE // CHUNKS) + column[None, :]
        x = load_logits(logits_ptr + row.to(tl.int64) * stride, columns, V)
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
    address, valid = partials + tile * PARTIAL + CHUNKS, tile < tiles
    peaks = tl.load(address, mask=valid, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(address + 1, mask=valid, other=0.0, cache_modifier=".cg")
    lowest = tl.min(tl.load(address + 2, mask=valid, other=float("inf"), cache_modifier=".cg"), axis=0)
    peak = tl.max(peaks, axis=0)
    total = tl.sum(totals * mass(peaks, tl.maximum(peak, -1e30), rate), axis=0)
    distance = tl.minimum(tl.log(tl.maximum(min_p, 1e-30)), 0.0) * temperature
    floor = tl.where(min_p > 0.0, peak + distance, float("-inf"))
    # Of the x below peak - depth there are at most V: together they hold no more than 1 - top_p of the sum.
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
    """At least top_k of the row's x are not below it, if there are as many maxima; -inf if they are not finite."""
    chunk = tl.arange(0, TILES * CHUNKS)
    address = partials + chunk // CHUNKS * PARTIAL + chunk % CHUNKS
    maxima = tl.load(address, mask=chunk < tiles * CHUNKS, other=float("-inf"), cache_modifier=".cg")
    rank = tl.zeros((TILES * CHUNKS,), tl.int32)
    for start in range(0, tiles * CHUNKS, 64):
        other = start + tl.arange(0, 64)
        other_address = partials + other // CHUNKS * PARTIAL + other % CHUNKS
        others = tl.load(other_address, mask=other < tiles * CHUNKS, other=float("-inf"), cache_modifier=".cg")
        rank += tl.sum((others[:, None] > maxima[None, :]).to(tl.int32), axis=0)
    return tl.min(tl.where(rank < top_k, maxima, float("inf")), axis=0)


@triton.jit
def bin_of(x, peak, scale):
    """The bins of x, from the peak downwards; the last holds all that is further down."""
    places = tl.minimum((peak - x) * scale, BINS - 1.0)
    # In fp32, 2^23 and more have no fraction: the sum's last bits are the rounded place. A conversion costs eight times
    # an addition.
    return (places + 8388608.0).to(tl.int32, bitcast=True) & (BINS - 1)


@triton.jit
def fill_bins(logits_ptr, searches_ptr, bins_ptr, counters_ptr, stride, V, tiles, TILE: tl.constexpr):
    """Sums the weights of each bin; the last program finds the answer's."""
    row, tile = tl.program_id(0), tl.program_id(1)
    search, bins_ptr = searches_ptr + row * SEARCH, bins_ptr + row.to(tl.int64) * BINS
    kind = tl.load(search + KIND).to(tl.int32)
    if kind >= WIDE_RANK:
        peak, low, scale = tl.load(search + PEAK), tl.load(search + LOW), tl.load(search + SCALE)
        unit = tl.where(kind == MASS, MASS_UNIT, 1.0)
        x = load_logits(logits_ptr + row.to(tl.int64) * stride, tile * TILE + tl.arange(0, TILE), V)
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
    chosen = tl.min(tl.where(reached, index, last), axis=0)
    above = tl.sum(tl.where(index == chosen, sums - weights, 0), axis=0)
    tl.store(search + BIN, chosen.to(tl.float32))
    tl.store(search + ABOVE, above.to(tl.float32) / unit)
