"""Kernels of kernels/filters.py that bracket a row's threshold.

A search asks for the largest of a row's scaled logits x with weight(x and all above it) >= goal. Top-k: every weight is
1, the goal k. Top-p: weights exp(x - peak), the goal top_p of their sum. The bracket is low <= x < high, with `above`
the weight from `high` up, below the goal; the weight from `low` up reaches it.
"""

import triton
import triton.language as tl

from slipstream.kernels.arrivals import arrives_last

NONE = tl.constexpr(0)  # kinds of search: the threshold is known
RANK = tl.constexpr(1)  # top-k among the few x >= low, then top-p among those
WIDE_RANK = tl.constexpr(2)  # top-k by narrowing
MASS = tl.constexpr(3)  # top-p by narrowing

# Floats of a row's search record.
SEARCH = tl.constexpr(8)
KIND = tl.constexpr(0)
PEAK = tl.constexpr(1)
LOW = tl.constexpr(2)
HIGH = tl.constexpr(3)
ABOVE = tl.constexpr(4)
GOAL = tl.constexpr(5)
FLOOR = tl.constexpr(6)  # what min-p keeps begins here

PIVOTS = tl.constexpr(32)  # also the floats that a program leaves for the last one
FEW = tl.constexpr(768)  # candidates: three quarters of the room for them
COLUMNS = tl.constexpr(256)  # compared with all pivots at a time


@triton.jit
def parameter_entry(row, rows_ptr, repeats):
    """Where the parameters of a row of logits are, see Sampling."""
    entry = row // repeats
    return entry if rows_ptr is None else tl.load(rows_ptr + entry)


@triton.jit
def scale(logits, temperature):
    """Like the reference's division, not an approximate one: equal logits stay equal, others keep their order."""
    return tl.div_rn(logits.to(tl.float32), tl.maximum(temperature, 1e-6))


@triton.jit
def load_scaled(row_ptr, columns, V, temperature):
    return scale(tl.load(row_ptr + columns, mask=columns < V, other=float("-inf")), temperature)


@triton.jit(do_not_specialize=["repeats"])
def summarise(
    logits_ptr, temperature_ptr, rows_ptr, repeats, searches_ptr, partials_ptr, counters_ptr, stride, V, tiles,
    top_k_ptr, top_p_ptr, min_p_ptr, thresholds_ptr, TILE: tl.constexpr, TILES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """A tile leaves its chunks' maxima, then its own maximum, sum of exponentials, smallest and number of finite x."""
    row, tile = tl.program_id(0), tl.program_id(1)
    entry = parameter_entry(row, rows_ptr, repeats)
    temperature, top_k = tl.load(temperature_ptr + entry), tl.load(top_k_ptr + entry).to(tl.int32)
    top_p, min_p = tl.load(top_p_ptr + entry), tl.load(min_p_ptr + entry)
    search = searches_ptr + row * SEARCH
    if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
        chunk, column = tl.arange(0, CHUNKS), tl.arange(0, TILE // CHUNKS)
        columns = tile * TILE + chunk[:, None] * (TILE // CHUNKS) + column[None, :]
        x = load_scaled(logits_ptr + row.to(tl.int64) * stride, columns, V, temperature)
        is_finite = x > float("-inf")
        maxima = tl.max(x, axis=1)
        peak = tl.max(maxima, axis=0)
        total = tl.sum(tl.sum(tl.exp(x - tl.maximum(peak, -1e30)), axis=1), axis=0)
        lowest = tl.min(tl.min(tl.where(is_finite, x, float("inf")), axis=1), axis=0)
        count = tl.sum(tl.sum(is_finite.to(tl.int32), axis=1), axis=0)
        partials_ptr += row.to(tl.int64) * tiles * PIVOTS
        partial = partials_ptr + tile * PIVOTS
        tl.store(partial + chunk, maxima)
        tl.store(partial + CHUNKS, peak)
        tl.store(partial + CHUNKS + 1, total)
        tl.store(partial + CHUNKS + 2, lowest)
        tl.store(partial + CHUNKS + 3, count.to(tl.float32))
        if arrives_last(counters_ptr + row, tiles):
            _begin_search(search, thresholds_ptr + row, partials_ptr, tiles, top_k, top_p, min_p, TILES, CHUNKS)
    else:
        if tile == 0:
            tl.store(search + KIND, 0.0)
            tl.store(thresholds_ptr + row, float("-inf"))


@triton.jit
def _begin_search(
    search, threshold_ptr, partials, tiles, top_k, top_p, min_p, TILES: tl.constexpr, CHUNKS: tl.constexpr
):
    tile = tl.arange(0, TILES)
    address, mask = partials + tile * PIVOTS + CHUNKS, tile < tiles
    peaks = tl.load(address, mask=mask, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(address + 1, mask=mask, other=0.0, cache_modifier=".cg")
    lowest = tl.min(tl.load(address + 2, mask=mask, other=float("inf"), cache_modifier=".cg"), axis=0)
    count = tl.sum(tl.load(address + 3, mask=mask, other=0.0, cache_modifier=".cg"), axis=0)
    peak = tl.max(peaks, axis=0)
    total = tl.sum(totals * tl.exp(peaks - tl.maximum(peak, -1e30)), axis=0)
    floor = tl.where(min_p > 0.0, peak + tl.minimum(tl.log(tl.maximum(min_p, 1e-30)), 0.0), float("-inf"))
    # Of the x below peak - depth there are at most `count`: together they hold no more than 1 - top_p of the sum.
    depth = tl.log(count / (tl.maximum(1.0 - top_p, 1e-9) * total)) + 1e-3 + 1e-6 * tl.abs(peak)
    low = tl.maximum(lowest, peak - depth)
    kind = tl.where(top_p < 1.0, MASS, NONE)
    goal = top_p * total
    if (top_k > 0) & (top_k < count):  # with fewer finite x a top-k keeps them all
        bound = _kth_largest_maximum(partials, tiles, top_k, TILES, CHUNKS)
        low = tl.where((top_k <= tiles * CHUNKS) & (bound > float("-inf")), bound, lowest)
        kind = tl.where(_expected(top_k, tiles * CHUNKS) < FEW, RANK, WIDE_RANK)
        goal = top_k.to(tl.float32)
    is_over = (top_p <= 0.0) | (count == 0.0)
    kind = tl.where(is_over, NONE, kind)
    tl.store(threshold_ptr, tl.where(is_over, peak, floor))
    tl.store(search + KIND, kind.to(tl.float32))
    tl.store(search + PEAK, peak)
    tl.store(search + LOW, low)
    tl.store(search + HIGH, float("inf"))
    tl.store(search + ABOVE, 0.0)
    tl.store(search + GOAL, goal)
    tl.store(search + FLOOR, floor)


@triton.jit
def _expected(top_k, num_maxima):
    """How many x are not below the k-th largest of the maxima of as many random parts: m ln(m / (m - k))."""
    rest = tl.maximum((num_maxima - top_k).to(tl.float32), 1e-30)
    return num_maxima * tl.log(num_maxima / rest)


@triton.jit
def _kth_largest_maximum(partials, tiles, top_k, TILES: tl.constexpr, CHUNKS: tl.constexpr):
    """At least top_k of the row's x are not below it, if there are as many maxima; -inf if they are not finite."""
    chunk = tl.arange(0, TILES * CHUNKS)
    address = partials + chunk // CHUNKS * PIVOTS + chunk % CHUNKS
    maxima = tl.load(address, mask=chunk < tiles * CHUNKS, other=float("-inf"), cache_modifier=".cg")
    rank = tl.zeros((TILES * CHUNKS,), tl.int32)
    for start in range(0, tiles * CHUNKS, 64):
        other = start + tl.arange(0, 64)
        other_address = partials + other // CHUNKS * PIVOTS + other % CHUNKS
        others = tl.load(other_address, mask=other < tiles * CHUNKS, other=float("-inf"), cache_modifier=".cg")
        rank += tl.sum((others[:, None] > maxima[None, :]).to(tl.int32), axis=0)
    return tl.min(tl.where(rank < top_k, maxima, float("inf")), axis=0)


@triton.jit(do_not_specialize=["repeats"])
def narrow(
    logits_ptr, temperature_ptr, rows_ptr, repeats, searches_ptr, partials_ptr, counters_ptr, stride, V, tiles,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Divides the bracket by PIVOTS. A tile leaves the weights within the bracket from each pivot up."""
    row, tile = tl.program_id(0), tl.program_id(1)
    search = searches_ptr + row * SEARCH
    kind = tl.load(search + KIND).to(tl.int32)
    if kind >= WIDE_RANK:
        temperature = tl.load(temperature_ptr + parameter_entry(row, rows_ptr, repeats))
        peak, low, high = tl.load(search + PEAK), tl.load(search + LOW), tl.load(search + HIGH)
        above, goal = tl.load(search + ABOVE), tl.load(search + GOAL)  # before any thread overwrites them
        pivot = tl.arange(0, PIVOTS)
        pivots = low + (tl.minimum(high, peak) - low) * (pivot.to(tl.float32) / PIVOTS)
        logits_ptr += row.to(tl.int64) * stride
        x = load_scaled(logits_ptr, tile * TILE + tl.arange(0, TILE), V, temperature)
        weights = tl.zeros((PIVOTS, COLUMNS), tl.float32)
        if tl.max(((x >= low) & (x < high)).to(tl.int32), axis=0) > 0:
            for start in range(tile * TILE, tile * TILE + TILE, COLUMNS):
                part = load_scaled(logits_ptr, start + tl.arange(0, COLUMNS), V, temperature)
                weight = tl.where(kind == MASS, tl.exp(part - peak), 1.0)
                weight = tl.where((part >= low) & (part < high), weight, 0.0)
                weights += tl.where(part[None, :] >= pivots[:, None], weight[None, :], 0.0)
        partials_ptr += row.to(tl.int64) * tiles * PIVOTS
        tl.store(partials_ptr + tile * PIVOTS + pivot, tl.sum(weights, axis=1))
        if arrives_last(counters_ptr + row, tiles):
            _shrink(search, partials_ptr, tiles, pivot, pivots, above, goal, TILES)


@triton.jit
def _shrink(search, partials, tiles, pivot, pivots, above, goal, TILES: tl.constexpr):
    tile = tl.arange(0, TILES)[:, None]
    weights = tl.load(partials + tile * PIVOTS + pivot[None, :], mask=tile < tiles, other=0.0, cache_modifier=".cg")
    weights = above + tl.sum(weights, axis=0)  # (PIVOTS,) falling
    best = tl.maximum(tl.sum((weights >= goal).to(tl.int32), axis=0) - 1, 0)
    tl.store(search + LOW, tl.sum(tl.where(pivot == best, pivots, 0.0), axis=0))
    if best < PIVOTS - 1:
        tl.store(search + HIGH, tl.sum(tl.where(pivot == best + 1, pivots, 0.0), axis=0))
        tl.store(search + ABOVE, tl.sum(tl.where(pivot == best + 1, weights, 0.0), axis=0))
