"""Sampling as a function of (key, position, distribution): argmax(filter(logits) + T * gumbel(key, position, id)).

The logits are processed first, where a request asks for that (kernels/sampling/processors.py).

The noise comes from a counter-based hash, one number per target token id, so target and drafter draw the same noise
without shared state (drafter-invariant coupling: Daliri, Musco, Suresh 2024). At T = 0 the formula is greedy.
`sample` returns the best column of a row, `perturbed_topk` the k best with their log-probabilities, for draft trees:
the first is the sample, and at T = 0 the values are EAGLE-2's scores (arXiv 2406.16858, section 4.1).
On the GPU a row is cut into tiles of constant size, one program each; nothing as wide as the vocabulary is written, and
a row's token does not depend on other rows. Kernel and reference use the same hash bits but different logarithms: noise
differs in the last places of fp32, so tokens can differ where two scores are that close.
Letters: R rows of logits, V their vocabulary, S tiles of a row, E entries of parameters.
"""

import functools
import hashlib
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from slipstream.kernels.grid_sync import MAX_ROWS, done_counters, is_last_done
from slipstream.kernels.launch import COMPILED, Op, pdl_options, wait_for_inputs
from slipstream.kernels.limits import MAX_K, MOST_SORTED
from slipstream.kernels.sampling.filters import Filters, filter_logits, filter_thresholds_triton
from slipstream.kernels.sampling.processors import (
    Processors,
    load_logits,
    parameter_entry,
    process_logits,
    register_limit,
    row_flags,
)

MASK32 = 0xFFFFFFFF
TILE = 2048  # columns of one program
FEW = tl.constexpr(MAX_K)
SORTED = tl.constexpr(MOST_SORTED)
NO_SCORE = tl.constexpr(-(2**63))  # below every score's rank
NO_ORDER = tl.constexpr(-(2**31))  # below every score's order
NAN_ORDER = tl.constexpr(2**31 - 1)  # above every score's order, and a NaN


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters by entry. Row r of the logits takes entry rows[r // repeats], or r // repeats where `rows` is None.

    `temperature` None: every row is greedy; `filters` None: no row filters; `processors` None: no row has any.
    Processors need a temperature, and columns that are target ids.
    """

    keys: Tensor  # (E,) int64 from noise_key
    temperature: Tensor | None  # (E,) fp32
    filters: Filters | None
    rows: Tensor | None = None  # (R / repeats,) int64
    repeats: int = 1
    processors: Processors | None = None

    def __post_init__(self) -> None:
        assert self.processors is None or self.temperature is not None

    def repeat(self, times: int) -> "Sampling":
        """Repeats each row: the parameters of B requests for their B * N nodes."""
        return replace(self, repeats=self.repeats * times)

    def by_row(self) -> "Sampling":
        """The same with one entry for each row of the logits, in order, without processors."""
        if self.temperature is None or (self.rows is None and self.repeats == 1):
            return replace(self, processors=None)
        entries = self.entries()
        return Sampling(self.keys[entries], self.temperature[entries], self.filters and self.filters.select(entries))

    def entries(self) -> Tensor:
        """(R,) int64 the entry of each row of the logits."""
        rows = torch.arange(len(self.keys), device=self.keys.device) if self.rows is None else self.rows
        return rows.repeat_interleave(self.repeats)


def noise_key(seed: int, choice: int) -> int:
    """The key of one choice of one request. Hashed, so that choice 1 of seed 0 is not choice 0 of seed 1."""
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # fits int64


def gumbel(keys: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise (R, V) fp32 for keys (R,), positions (R,) of the sampled token, and target ids (V,)."""
    # 1 - u, not u: small values keep their relative precision in fp32, so the upper tail reaches ln(2^33) = 22.9.
    complement = ((noise_bits(keys, positions, ids).float() + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return complement.neg_().log1p_().neg_().log_().neg_()


def noise_bits(keys: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """The uniform integers (R, V) int64 in [0, 2^32) that gumbel() is made of."""
    low = keys & MASK32
    high = keys >> 32
    row = mix(mix(low ^ (positions.long() * 0x9E3779B1 & MASK32)) ^ high)[:, None]  # (R, 1)
    return mix(mix(row ^ (ids.long() * 0x85EBCA77 & MASK32)) + row)


@Op
def sample(logits: Tensor, positions: Tensor, sampling: Sampling, ids: Tensor | None = None) -> Tensor:
    """logits (R, V), positions (R,) of the token to sample -> index (R,) int64 into V; ties go to the lowest index. -1
    for a row that cannot be sampled: its processed logits hold NaN, or all are -inf.

    `ids` (V,): the target id of each column, for a draft with a reduced vocabulary (default: the column itself).
    """
    scores = perturbed(logits, positions, sampling, ids)
    best = scores.argmax(dim=-1, keepdim=True)  # a NaN, where there is one, is the best
    return torch.where(scores.gather(1, best) > -torch.inf, best, -1).squeeze(1)


def perturbed(logits: Tensor, positions: Tensor, sampling: Sampling, ids: Tensor | None = None) -> Tensor:
    """The scores filter(process(logits)) + T * gumbel (R, V), fp32, whose best is the sample. Greedy rows have neither
    filters nor noise; if all are greedy, returns the logits themselves."""
    if sampling.temperature is None:
        return logits
    assert ids is None or sampling.processors is None
    logits, row_sampling = filtered(logits, sampling)
    assert row_sampling.temperature is not None
    if ids is None:
        ids = torch.arange(logits.shape[-1], device=logits.device)
    return logits + row_sampling.temperature[:, None] * gumbel(row_sampling.keys, positions, ids)


def filtered(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Sampling]:
    """filter(process(logits)) (R, V), fp32, and the parameters by row."""
    if sampling.processors is not None:
        logits = process_logits(logits, sampling.processors, sampling.entries())
    row_sampling = sampling.by_row()
    logits = logits.float()
    if row_sampling.temperature is not None and row_sampling.filters is not None:
        temperature = row_sampling.temperature[:, None]
        scaled = filter_logits(logits / temperature.clamp(min=1e-6), row_sampling.filters)
        logits = logits.masked_fill((scaled == -torch.inf) & (temperature > 0), -torch.inf)
    return logits, row_sampling


@sample.kernel()
def sample_triton(logits: Tensor, positions: Tensor, sampling: Sampling, ids: Tensor | None = None) -> Tensor:
    """One launch, and four more with filters."""
    R, V = logits.shape
    assert R <= MAX_ROWS
    assert logits.stride(1) == 1
    thresholds = filter_thresholds(logits, sampling, ids)
    arguments = sampling.processors and sampling.processors.for_kernels()
    out = torch.empty(R, dtype=torch.int64, device=logits.device)
    if R:
        tiles = triton.cdiv(V, TILE)
        _sample[(R, tiles)](
            logits, positions, sampling.keys, sampling.temperature, sampling.rows, arguments, thresholds, ids,
            best_ranks(logits.device), done_counters(logits.device), out,
            logits.stride(0), V, sampling.repeats, tiles,
            TILE=TILE, num_warps=4, **pdl_options(logits.device), **register_limit(logits, sampling.processors, 56),
        )  # fmt: skip
    return out


@Op
def perturbed_topk(
    logits: Tensor,
    k: int,
    positions: Tensor,
    sampling: Sampling,
    ids: Tensor | None = None,
    *,
    as_ids: bool = False,
) -> tuple[Tensor, Tensor]:
    """logits (R, V), positions (R,) of the token to propose -> log-probabilities (R, k) fp32, columns (R, k) int64.
    `as_ids`: the columns' target ids instead.

    Ties go to the lower column. Columns that a row's filters cut have value -inf; a greedy row has no filters.
    `ids` (V,): the target id of each column (default: the column itself). k: 1 to MOST_SORTED, not above V.
    """
    scores = perturbed(logits, positions, sampling, ids).float()
    # Sorting all for the best one alone would cost a CPU much of a round.
    best = scores.max(-1, keepdim=True) if k == 1 else scores.sort(dim=-1, descending=True, stable=True)
    columns = best.indices[:, :k]
    values = best.values[:, :k] - scores.logsumexp(dim=-1, keepdim=True)
    return values, ids[columns] if as_ids and ids is not None else columns


@perturbed_topk.kernel()
def perturbed_topk_triton(
    logits: Tensor,
    k: int,
    positions: Tensor,
    sampling: Sampling,
    ids: Tensor | None = None,
    *,
    as_ids: bool = False,
) -> tuple[Tensor, Tensor]:
    """One launch, and four more with filters."""
    R, V = logits.shape
    assert R <= MAX_ROWS
    assert logits.stride(1) == 1
    assert 1 <= k <= min(MOST_SORTED, V)
    thresholds = filter_thresholds(logits, sampling, ids)
    tiles = triton.cdiv(V, TILE)
    device = logits.device
    arguments = sampling.processors and sampling.processors.for_kernels()
    candidates, sums, values, columns = empty_topk(R, tiles, k, device)
    if R:
        _perturbed_topk[(R, tiles)](
            logits, positions, sampling.keys, sampling.temperature, sampling.rows, arguments, thresholds, ids,
            candidates, sums, done_counters(device), values, columns, ids if as_ids else None,
            logits.stride(0), V, sampling.repeats, tiles,
            K=k, TILE=TILE, **merge_blocks(tiles, k), num_warps=8, **pdl_options(device),
        )  # fmt: skip
    return values, columns


def empty_topk(rows: int, tiles: int, k: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Buffers: tiles' candidates (R, S, k) int64 ranks and sums (R, S, 2) fp32; results values, columns (R, k)."""
    return (
        torch.empty(rows, tiles, k, dtype=torch.int64, device=device),
        torch.empty(rows, tiles, 2, dtype=torch.float32, device=device),
        torch.empty(rows, k, dtype=torch.float32, device=device),
        torch.empty(rows, k, dtype=torch.int64, device=device),
    )


def merge_blocks(tiles: int, k: int) -> dict[str, int]:
    candidates = triton.next_power_of_2(tiles * k)
    return {
        "TILES": triton.next_power_of_2(tiles),
        "CANDIDATES": max(candidates, MOST_SORTED) if k > MAX_K else candidates,
    }


def filter_thresholds(logits: Tensor, sampling: Sampling, ids: Tensor | None) -> Tensor | None:
    """(R,) fp32: processed logits below it are cut; -inf of greedy rows. None: no row has filters."""
    processors = sampling.processors
    if processors is not None:
        assert ids is None
        processors.check(logits)
    if sampling.temperature is None or sampling.filters is None:
        return None
    return filter_thresholds_triton(
        logits, sampling.temperature, sampling.filters, sampling.rows, sampling.repeats, processors
    )


@functools.cache
def best_ranks(device: torch.device) -> Tensor:
    """(MAX_ROWS,) int64, NO_SCORE between launches, all of which run on one stream."""
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "run once before capture"
    return torch.full((MAX_ROWS,), NO_SCORE.value, dtype=torch.int64, device=device)


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words with full avalanche (murmur3's finaliser), on int64 lanes."""
    x = x & MASK32
    x = (x ^ (x >> 16)) * 0x85EBCA6B & MASK32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & MASK32
    return x ^ (x >> 16)


@triton.jit
def _mix_words(x):
    """mix on uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def row_noise_bits(key, position, ids):
    """noise_bits() of one row: key int64, position integer, ids (TILE,) integer -> uint32, whose products wrap."""
    row = _mix_words(key.to(tl.uint32) ^ (position.to(tl.uint32) * 0x9E3779B1))
    row = _mix_words(row ^ (key >> 32).to(tl.uint32))
    return _mix_words(_mix_words(row ^ (ids.to(tl.uint32) * 0x85EBCA77)) + row)


@triton.jit
def bits_to_gumbel(bits):
    complement = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    # -log1p(-c): its series below 1/8, above it the logarithm, corrected for the rounding of 1 - c.
    series = complement * (1.0 / 7.0) + 1.0 / 6.0
    series = series * complement + 1.0 / 5.0
    series = series * complement + 1.0 / 4.0
    series = series * complement + 1.0 / 3.0
    series = series * complement + 1.0 / 2.0
    series = (series * complement + 1.0) * complement
    rest = 1.0 - complement
    exponential = tl.where(complement < 0.125, series, (rest - 1.0) + complement - _log(rest))
    return -_log(exponential)


@triton.jit
def _log(x):
    """Within 2^-22 of the larger of 1 and the result; one instruction and a product instead of 26."""
    return libdevice.fast_logf(x) if COMPILED else tl.log(x)


@triton.jit
def score_order(scores):
    """Integers in the order of the fp32 scores; -0 and 0 are equal."""
    order = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order)


@triton.jit
def score_rank(order, column):
    """int64: a score's order in the upper half, 2^31 - 1 - column in the lower: the first of the best is largest."""
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - column)


@triton.jit
def rank_column(rank):
    return 0x7FFFFFFF - (rank & 0x7FFFFFFF)


@triton.jit
def load_scores(
    logits_ptr, positions_ptr, keys_ptr, temperature_ptr, rows_ptr, processors, thresholds_ptr, ids_ptr,
    row, columns, stride, V, repeats,
):  # fmt: skip
    """Scores of some columns of a row; -inf beyond the last column."""
    flags = row_flags(row, rows_ptr, repeats, processors)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    scores = load_logits(row_ptr, columns, V, row, flags, rows_ptr, repeats, processors)
    if temperature_ptr is not None:
        entry = parameter_entry(row, rows_ptr, repeats)
        temperature = tl.load(temperature_ptr + entry)
        if thresholds_ptr is not None:
            threshold = tl.load(thresholds_ptr + row)  # -inf where the row is greedy
            if threshold > float("-inf"):
                scores = tl.where(scores < threshold, float("-inf"), scores)
                if tl.max(scores, axis=0) == float("-inf"):
                    temperature = 0.0  # true of most tiles
        if temperature > 0.0:
            ids = columns if ids_ptr is None else tl.load(ids_ptr + columns, mask=columns < V, other=0)
            bits = row_noise_bits(tl.load(keys_ptr + entry), tl.load(positions_ptr + row), ids)
            scores += temperature * bits_to_gumbel(bits)
    return scores


@triton.jit(do_not_specialize=["repeats"])
def _sample(
    logits_ptr, positions_ptr, keys_ptr, temperature_ptr, rows_ptr, processors, thresholds_ptr, ids_ptr,
    best_ptr, counters_ptr, out_ptr, stride, V, repeats, tiles, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    scores = load_scores(
        logits_ptr, positions_ptr, keys_ptr, temperature_ptr, rows_ptr, processors, thresholds_ptr, ids_ptr,
        row, columns, stride, V, repeats,
    )  # fmt: skip
    order = tl.where(scores == scores, score_order(scores), NAN_ORDER)
    best = tl.max(order, axis=0)
    column = tl.min(tl.where(order == best, columns, 0x7FFFFFFF), axis=0)
    tl.atomic_max(best_ptr + row, score_rank(best, column), sem="relaxed")
    if is_last_done(counters_ptr + row, tiles):
        rank = tl.atomic_xchg(best_ptr + row, NO_SCORE, sem="relaxed")
        # Neither NaN nor -inf is above -inf.
        tl.store(out_ptr + row, tl.where(rank_score(rank) > float("-inf"), rank_column(rank), -1))


@triton.jit
def rank_score(rank):
    order = (rank >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["repeats"])
def _perturbed_topk(
    logits_ptr, positions_ptr, keys_ptr, temperature_ptr, rows_ptr, processors, thresholds_ptr, ids_ptr,
    candidates_ptr, sums_ptr, counters_ptr, values_ptr, columns_ptr, names_ptr, stride, V, repeats, tiles,
    K: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    tile = tl.program_id(1)
    columns = tile * TILE + tl.arange(0, TILE)
    scores = load_scores(
        logits_ptr, positions_ptr, keys_ptr, temperature_ptr, rows_ptr, processors, thresholds_ptr, ids_ptr,
        row, columns, stride, V, repeats,
    )  # fmt: skip
    place = row.to(tl.int64) * tiles + tile
    store_sums(sums_ptr + place * 2, scores)
    ranks = score_rank(score_order(scores), columns)  # columns beyond the last one rank lowest
    if K > FEW:
        choice = tl.arange(0, SORTED)
        tl.store(candidates_ptr + place * K + choice, tl.topk(ranks, SORTED), mask=choice < K)
    else:
        for choice in range(K):
            best, ranks = take_best(ranks)
            tl.store(candidates_ptr + place * K + choice, best)
    if is_last_done(counters_ptr + row, tiles):
        merge_topk(
            candidates_ptr, sums_ptr, values_ptr, columns_ptr, names_ptr, V, row, tiles, K, TILES, CANDIDATES
        )  # fmt: skip


@triton.jit
def store_sums(sums, scores):
    """A tile's peak, and the sum of exponentials below it."""
    peak = tl.max(scores, axis=0)
    tl.store(sums, peak)
    tl.store(sums + 1, tl.sum(tl.exp(scores - tl.maximum(peak, -1e30)), axis=0))


@triton.jit
def load_sums(sums, mask):
    """The peak of all tiles, whose `store_sums` are at `sums`, and the logarithm of the sum of exponentials below."""
    peaks = tl.load(sums, mask=mask, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(sums + 1, mask=mask, other=0.0, cache_modifier=".cg")
    peak = tl.maximum(tl.max(peaks, axis=0), -1e30)
    return peak, tl.log(tl.sum(totals * tl.exp(peaks - peak), axis=0))


@triton.jit
def take_best(ranks):
    """The highest rank, and the others."""
    best = tl.max(ranks, axis=0)
    return best, tl.where(ranks == best, NO_SCORE, ranks)


@triton.jit
def merge_topk(
    candidates_ptr, sums_ptr, values_ptr, columns_ptr, names_ptr, V, row, tiles,
    K: tl.constexpr, TILES: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The k best of a row's candidates, by the V names of columns if there are any, and their log-probabilities from
    the sums of its tiles."""
    tile = tl.arange(0, TILES)
    candidate = tl.arange(0, CANDIDATES)
    row = row.to(tl.int64)
    peak, log_total = load_sums(sums_ptr + (row * tiles + tile) * 2, tile < tiles)
    candidate_ptrs = candidates_ptr + row * tiles * K + candidate
    ranks = tl.load(candidate_ptrs, mask=candidate < tiles * K, other=NO_SCORE, cache_modifier=".cg")
    if K > FEW:
        choice = tl.arange(0, SORTED)
        best_ranks = tl.topk(ranks, SORTED)
        tl.store(values_ptr + row * K + choice, (rank_score(best_ranks) - peak) - log_total, mask=choice < K)
        tl.store(columns_ptr + row * K + choice, _name(names_ptr, rank_column(best_ranks), V), mask=choice < K)
    else:
        for choice in range(K):
            best, ranks = take_best(ranks)
            tl.store(values_ptr + row * K + choice, (rank_score(best) - peak) - log_total)
            tl.store(columns_ptr + row * K + choice, _name(names_ptr, rank_column(best), V))


@triton.jit
def _name(names_ptr, column, V):
    return column if names_ptr is None else tl.load(names_ptr + tl.minimum(column, V - 1))  # beyond: a row of NaN
