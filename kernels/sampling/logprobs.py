"""Log-probabilities of emitted tokens, and of the likeliest tokens at their places.

They are those of the target's own logits or, where a Sampling is given, of the distribution that it samples from: after
processors, temperature and filters (a greedy row has neither of these two). Only rows of requests that want them are
read. As in sample.py a row is cut into tiles of constant size: a program takes one tile of each row of a segment, and
the last one to finish a row merges its tiles.
Letters: B decoding requests, S segments, W nodes that a request slot stores, H rows of logits, V their vocabulary, E
entries of parameters, N tokens, K likeliest tokens of each, at most MOST_LOGPROBS.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.grid_sync import MAX_ROWS, done_counters, is_last_done
from slipstream.kernels.launch import Op, pdl_options, use_triton, wait_for_inputs
from slipstream.kernels.sampling.processors import load_logits, parameter_entry, register_limit, row_flags
from slipstream.kernels.sampling.sample import (
    NO_SCORE,
    TILE,
    Sampling,
    filter_thresholds,
    filtered,
    load_sums,
    merge_blocks,
    rank_column,
    rank_score,
    score_order,
    score_rank,
    store_sums,
    take_best,
)

MOST_LOGPROBS = 20  # as OpenAI
COLUMNS = 2 + 2 * MOST_LOGPROBS


class Emitted(NamedTuple):
    """The tokens that a pass emits, and the rows of logits that they were sampled from: those of a request follow its
    first row's, and each later segment, a chunk of a prompt, has one."""

    starts: Tensor  # (S + 1,) int32 first row of each request; of chunks the rows follow starts[B]
    nodes: Tensor  # (B, W) int32 row of each token, counted from its request's first
    tokens: Tensor  # (S, W) int32
    lengths: Tensor  # (S,) int32 tokens of each
    slots: Tensor  # (S,) int64


def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Scores tokens (N,) by logits (N, V) -> (2 + 2 * k, N) int32: the bits of each token's fp32 log-probability, its
    rank (1: no token is likelier), then the bits of the log-probability and the id of each of the k likeliest."""
    logits = logits.float()
    logit = logits.gather(1, tokens.long()[:, None])
    total = logits.logsumexp(dim=1, keepdim=True)
    ranks = 1 + (logits > logit).sum(dim=1)
    top = logits.topk(k)
    pairs = torch.stack(((top.values - total).view(torch.int32), top.indices.int()), dim=2)
    return torch.cat(((logit - total).view(torch.int32), ranks[:, None].int(), pairs.flatten(1)), dim=1).T


@Op
def emitted_logprobs(logits: Tensor, emitted: Emitted, counts: Tensor, sampling: Sampling | None, out: Tensor) -> None:
    """Writes the numbers of `token_logprobs` for token i of segment s to out (COLUMNS, S, W) int32, at [:, s, i].

    logits (H, V); counts (E,) int32, by slot: how many of the likeliest tokens, -1: nothing, then nothing is written.
    `sampling`: None for the logits' own distribution; it has an entry for each row. Equally likely tokens come
    in any order.
    """
    num_decoding, W = emitted.nodes.shape
    starts = emitted.starts.long()
    chunk = torch.arange(len(emitted.slots) - num_decoding, device=logits.device)
    rows = starts[:num_decoding, None] + emitted.nodes
    rows = torch.cat((rows, (starts[num_decoding] + chunk)[:, None].expand(-1, W)))
    numbers = counts[emitted.slots][:, None]
    node = torch.arange(W, device=logits.device)
    segments, places = ((numbers >= 0) & (node < emitted.lengths[:, None])).nonzero(as_tuple=True)
    if len(segments):
        distribution = logits if sampling is None else filtered_over_temperature(logits, sampling)
        k = min(int(numbers.max()), logits.shape[1])
        tokens = emitted.tokens[segments, places].clamp(min=0)
        out[: 2 + 2 * k, segments, places] = token_logprobs(distribution[rows[segments, places]], tokens, k)


def filtered_over_temperature(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits (R, V) fp32 of the distribution that rows are sampled from; of greedy rows without temperature."""
    logits, row_sampling = filtered(logits, sampling)
    if row_sampling.temperature is None:
        return logits
    return logits / torch.where(row_sampling.temperature > 0, row_sampling.temperature, 1.0)[:, None]


@emitted_logprobs.kernel(when=lambda logits, *_: use_triton(logits))
def emitted_logprobs_triton(
    logits: Tensor, emitted: Emitted, counts: Tensor, sampling: Sampling | None, out: Tensor
) -> None:
    """One launch, and four more with filters."""
    H, V = logits.shape
    B, W = emitted.nodes.shape
    S = len(emitted.slots)
    device = logits.device
    tiles = triton.cdiv(V, TILE)
    assert H <= MAX_ROWS
    assert V >= MOST_LOGPROBS
    assert logits.stride(1) == 1
    assert out.shape == (COLUMNS, S, W)
    assert out.stride()[1:] == (W, 1)
    assert all(x.is_contiguous() for x in emitted)
    processors = arguments = thresholds = temperature = rows = None
    if sampling is not None:
        assert sampling.repeats == 1
        temperature = sampling.temperature
        rows = sampling.rows
        processors = sampling.processors
        arguments = processors and processors.for_kernels()
        thresholds = filter_thresholds(logits, sampling, None)
    candidates = torch.empty(H, tiles * MOST_LOGPROBS, dtype=torch.int64, device=device)
    sums = torch.empty(H, tiles, 3, dtype=torch.float32, device=device)
    if S:
        _emitted_logprobs[(S, tiles)](
            logits, emitted, counts, temperature, rows, arguments, thresholds, candidates, sums,
            done_counters(device), out, logits.stride(0), out.stride(0), B, W, V, tiles,
            K=MOST_LOGPROBS, TILE=TILE, **merge_blocks(tiles, MOST_LOGPROBS), num_warps=8, **pdl_options(device),
            **register_limit(logits, processors, 56),
        )  # fmt: skip


@triton.jit(do_not_specialize=["B", "W"])
def _emitted_logprobs(
    logits, emitted, counts, temperatures, rows, processors, thresholds, candidates, sums, counters, out,
    stride, out_stride, B, W, V, tiles,
    K: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    segment = tl.program_id(0)
    tile = tl.program_id(1)
    k = tl.load(counts + tl.load(emitted.slots + segment))
    if k >= 0:
        for index in range(tl.load(emitted.lengths + segment)):
            place = segment * W + index
            row = tl.load(emitted.starts + tl.minimum(segment, B)) + tl.maximum(segment - B, 0)
            row += tl.load(emitted.nodes + place, mask=segment < B, other=0)
            token = tl.maximum(tl.load(emitted.tokens + place), 0)
            token_x = _distribution(
                logits, temperatures, rows, processors, thresholds, row, token + tl.zeros((1,), tl.int32), stride, V
            )  # fmt: skip
            columns = tile * TILE + tl.arange(0, TILE)
            x = _distribution(logits, temperatures, rows, processors, thresholds, row, columns, stride, V)
            token_x = tl.max(token_x, axis=0)
            first = row.to(tl.int64) * tiles
            _reduce_tile(x, columns, token_x, candidates + first * K + tile * k, sums + (first + tile) * 3, k)
            if is_last_done(counters + row, tiles):
                _merge_tiles(
                    candidates + first * K, sums + first * 3, token_x, out + place, out_stride, tiles, k,
                    TILES, CANDIDATES,
                )  # fmt: skip


@triton.jit
def _distribution(logits, temperatures, rows, processors, thresholds, row, columns, stride, V):
    """Logits of some columns of a row, as `emitted_logprobs` says; -inf beyond the last column."""
    flags = row_flags(row, rows, 1, processors)
    row_ptr = logits + row.to(tl.int64) * stride
    x = load_logits(row_ptr, columns, V, row, flags, rows, 1, processors)
    if thresholds is not None:
        x = tl.where(x < tl.load(thresholds + row), float("-inf"), x)  # -inf where the row is greedy
    if temperatures is not None:
        temperature = tl.load(temperatures + parameter_entry(row, rows, 1))
        x = x / tl.where(temperature > 0.0, temperature, 1.0)
    return x


@triton.jit
def _reduce_tile(x, columns, token_x, candidates, sums, k):
    """Stores a tile's k best ranks, its peak, the sum of exponentials below it, and how many logits exceed
    `token_x`."""
    store_sums(sums, x)
    tl.store(sums + 2, tl.sum((x > token_x).to(tl.float32), axis=0))
    ranks = score_rank(score_order(x), columns)  # columns beyond the last one rank lowest
    for choice in range(k):
        best, ranks = take_best(ranks)
        tl.store(candidates + choice, best)


@triton.jit
def _merge_tiles(
    candidates, sums, token_x, out, out_stride, tiles, k, TILES: tl.constexpr, CANDIDATES: tl.constexpr
):  # fmt: skip
    tile = tl.arange(0, TILES)
    candidate = tl.arange(0, CANDIDATES)
    peak, log_total = load_sums(sums + tile * 3, tile < tiles)
    larger = tl.load(sums + tile * 3 + 2, mask=tile < tiles, other=0.0, cache_modifier=".cg")
    ranks = tl.load(candidates + candidate, mask=candidate < tiles * k, other=NO_SCORE, cache_modifier=".cg")
    tl.store(out, ((token_x - peak) - log_total).to(tl.int32, bitcast=True))
    tl.store(out + out_stride, 1 + tl.sum(larger, axis=0).to(tl.int32))
    for choice in range(k):
        best, ranks = take_best(ranks)
        value = (rank_score(best) - peak) - log_total
        tl.store(out + (2 + 2 * choice) * out_stride, value.to(tl.int32, bitcast=True))
        tl.store(out + (3 + 2 * choice) * out_stride, rank_column(best).to(tl.int32))
