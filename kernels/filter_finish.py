"""Kernels of kernels/filters.py that find the row's threshold in the answer's bin (words: kernels/filter_search.py).

The x of the bin, or for a small top-k those from `low` up, are gathered in any order. Each is compared with all others,
so ranks and masses need no sort; masses are summed as integers, so no result depends on the order. Where there are too
many x, or a large top-k goes with a top-p, one program finds the threshold over the whole row, four bits of it at a
time: slower, and rare.
"""

import triton
import triton.language as tl

from slipstream.kernels.filter_search import (
    ABOVE,
    BIN,
    FLOOR,
    GOAL,
    KIND,
    LOW,
    MASS,
    MASS_UNIT,
    NONE,
    PEAK,
    RANK,
    RATE,
    SCALE,
    SEARCH,
    WIDE_RANK,
    bin_of,
    load_logits,
    mass,
    parameter_entry,
)

CANDIDATES = tl.constexpr(1024)
COMPARED = tl.constexpr(16)  # candidates that all others are compared with at a time
SCANNED = tl.constexpr(1024)  # columns that a descent reads at a time


@triton.jit
def collect(logits_ptr, searches_ptr, candidates_ptr, counters_ptr, stride, V, TILE: tl.constexpr):
    """Appends the x in question to the row's candidates and counts them, also those beyond the last place."""
    row, tile = tl.program_id(0), tl.program_id(1)
    search = searches_ptr + row * SEARCH
    kind = tl.load(search + KIND).to(tl.int32)
    if kind != NONE:
        x = load_logits(logits_ptr + row.to(tl.int64) * stride, tile * TILE + tl.arange(0, TILE), V)
        answer = tl.load(search + BIN).to(tl.int32)
        bins = bin_of(x, tl.load(search + PEAK), tl.load(search + SCALE))
        inside = (x >= tl.load(search + LOW)) & (tl.where(kind == RANK, answer, bins) == answer)
        # Few are inside, so that an addition for each costs less than to number them first.
        counter = counters_ptr + row + tl.zeros((TILE,), tl.int32)
        place = tl.atomic_add(counter, 1, mask=inside, sem="relaxed")
        tl.store(candidates_ptr + row.to(tl.int64) * CANDIDATES + place, x, mask=inside & (place < CANDIDATES))


@triton.jit(do_not_specialize=["repeats"])
def finish(
    logits_ptr, searches_ptr, candidates_ptr, counters_ptr, stride, V,
    rows_ptr, repeats, top_k_ptr, top_p_ptr, thresholds_ptr,
):  # fmt: skip
    """One program per row. Resets the count of candidates."""
    row = tl.program_id(0)
    search = searches_ptr + row * SEARCH
    kind = tl.load(search + KIND).to(tl.int32)
    if kind != NONE:
        entry = parameter_entry(row, rows_ptr, repeats)
        top_k, top_p = tl.load(top_k_ptr + entry).to(tl.int32), tl.load(top_p_ptr + entry)
        found = tl.atomic_xchg(counters_ptr + row, 0, sem="relaxed")
        candidates_ptr += row.to(tl.int64) * CANDIDATES
        is_short = (kind != WIDE_RANK) | (top_p >= 1.0)
        if is_short & (found <= CANDIDATES // 4):
            threshold = _among(candidates_ptr, found, search, kind, top_k, top_p, CANDIDATES // 4)
        elif is_short & (found <= CANDIDATES):
            threshold = _among(candidates_ptr, found, search, kind, top_k, top_p, CANDIDATES)
        else:
            threshold = _over_row(logits_ptr + row.to(tl.int64) * stride, V, search, kind, top_k, top_p)
        tl.store(thresholds_ptr + row, tl.maximum(threshold, tl.load(search + FLOOR)))


@triton.jit
def _among(candidates_ptr, found, search, kind, top_k, top_p, LANES: tl.constexpr):
    """The smallest kept candidate."""
    peak, above, goal = tl.load(search + PEAK), tl.load(search + ABOVE), tl.load(search + GOAL)
    rate = tl.load(search + RATE)
    lane = tl.arange(0, LANES)
    x = tl.load(candidates_ptr + lane, mask=lane < found, other=float("-inf"))
    rank, larger_mass = tl.zeros((LANES,), tl.int32), tl.zeros((LANES,), tl.int64)  # of the larger candidates
    for start in range(0, found, COMPARED):
        other = start + tl.arange(0, COMPARED)
        others = tl.load(candidates_ptr + other, mask=other < found, other=float("-inf"))
        masses = (mass(others, peak, rate) * MASS_UNIT).to(tl.int64)
        is_larger = others[:, None] > x[None, :]
        rank += tl.sum(is_larger.to(tl.int32), axis=0)
        larger_mass += tl.sum(tl.where(is_larger, masses[:, None], 0), axis=0)
    share = larger_mass.to(tl.float32) * (1.0 / MASS_UNIT)
    keep = (lane < found) & (above + tl.where(kind == MASS, share, rank.to(tl.float32)) < goal)
    if (kind == RANK) & (top_p < 1.0):  # of the x that tie for place k, the sum holds as many as have a place
        kth = tl.min(tl.where(keep, x, float("inf")), axis=0)
        num_larger, larger = tl.max(tl.where(keep, rank, 0), axis=0), tl.max(tl.where(keep, share, 0.0), axis=0)
        num_tied = tl.minimum(top_k, found) - num_larger  # a row may have fewer finite x than top_k
        keep = keep & (share < top_p * (larger + num_tied.to(tl.float32) * mass(kth, peak, rate)))
    return tl.minimum(tl.min(tl.where(keep, x, float("inf")), axis=0), peak)


@triton.jit
def _over_row(row_ptr, V, search, kind, top_k, top_p):
    peak, goal, rate = tl.load(search + PEAK), tl.load(search + GOAL), tl.load(search + RATE)
    threshold = tl.full((), float("-inf"), tl.float32)
    if kind != MASS:
        threshold = _descend(row_ptr, V, peak, rate, top_k.to(tl.float32), False)
        counts, masses = tl.zeros((SCANNED,), tl.float32), tl.zeros((SCANNED,), tl.float32)
        for start in range(0, V, SCANNED):
            x = load_logits(row_ptr, start + tl.arange(0, SCANNED), V)
            counts += tl.where(x > threshold, 1.0, 0.0)
            masses += tl.where(x > threshold, mass(x, peak, rate), 0.0)
        num_larger, larger = tl.sum(counts, axis=0), tl.sum(masses, axis=0)
        goal = top_p * (larger + (top_k.to(tl.float32) - num_larger) * mass(threshold, peak, rate))
    if top_p < 1.0:
        threshold = tl.maximum(threshold, _descend(row_ptr, V, peak, rate, goal, True))
    return threshold


@triton.jit
def _descend(row_ptr, V, peak, rate, goal, BY_MASS: tl.constexpr):
    """The largest x whose weight and that of all above it reach the goal, by the digits of its bits in order."""
    digit = tl.arange(0, 16)
    known, unit = tl.full((), 0, tl.uint32), tl.full((), 1 << 28, tl.uint32)  # leading digits of the answer
    for _ in range(8):
        pivots = known + digit.to(tl.uint32) * unit
        weights = tl.zeros((16, SCANNED), tl.float32)
        for start in range(0, V, SCANNED):
            columns = start + tl.arange(0, SCANNED)
            x = load_logits(row_ptr, columns, V)
            bits = x.to(tl.uint32, bitcast=True)
            order = tl.where(bits >= 0x80000000, ~bits, bits | 0x80000000)
            weight = tl.where(columns < V, mass(x, peak, rate) if BY_MASS else 1.0, 0.0)
            weights += tl.where(order[None, :] >= pivots[:, None], weight[None, :], 0.0)
        reached = tl.sum((tl.sum(weights, axis=1) >= goal).to(tl.int32), axis=0)
        known = known + tl.maximum(reached - 1, 0).to(tl.uint32) * unit
        unit = unit >> 4
    bits = tl.where(known >= 0x80000000, known & 0x7FFFFFFF, ~known)
    return bits.to(tl.float32, bitcast=True)
