"""The kernels of kernels/gathered_head.py: rows of a head's weights stream through shared memory as in
kernels/skinny_kernel.py, but the rows may lie anywhere, and what follows the logits may happen before they are stored.

A program computes OUTPUTS logits (axis 1) of ROWS rows (axis 0). Programs of the same weights are neighbours, so that
more than ROWS rows find them in the L2 cache.
"""

import triton
import triton.language as tl

from slipstream.kernels.filter_search import parameter_entry
from slipstream.kernels.grid_sync import is_last_done
from slipstream.kernels.head_topk import merge_topk
from slipstream.kernels.launch import wait_for_inputs
from slipstream.kernels.sampling import (
    NO_ORDER,
    NO_SCORE,
    bits_to_gumbel,
    rank_column,
    row_noise_bits,
    score_order,
    score_rank,
)


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def gathered_linear_kernel(
    x_ptr, weight_ptr, ids_ptr, out_ptr, x_stride, weight_stride, num_rows, num_outputs, num_inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[r, j] = x[r] . weight[ids[j]], -inf where ids[j] is -1."""
    row, outputs = _cells(ROWS, OUTPUTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    ids = tl.load(ids_ptr + outputs, mask=outputs < num_outputs, other=-1)
    acc = _logits(
        x_ptr, weight_ptr, tl.maximum(ids, 0), row, x_stride, weight_stride, num_rows, num_inputs,
        ROWS, OUTPUTS, DEPTH, EVEN, PRECISION, PDL,
    )  # fmt: skip
    result = tl.where((ids >= 0)[None, :], tl.trans(acc), float("-inf"))  # (ROWS, OUTPUTS)
    cells = row[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    valid = (row < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    tl.store(out_ptr + cells, result.to(out_ptr.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "repeats"])
def head_sample_kernel(
    x_ptr, weight_ptr, ids_ptr, positions_ptr, keys_ptr, temperature_ptr, rows_ptr, best_ptr, counters_ptr, out_ptr,
    x_stride, weight_stride, num_rows, num_outputs, num_inputs, repeats, tiles,
    GATHERED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best score of each row: one maximum per program, the last one to arrive stores what all have found."""
    row, outputs = _cells(ROWS, OUTPUTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    scores = _scores(
        x_ptr, weight_ptr, ids_ptr, positions_ptr, keys_ptr, temperature_ptr, rows_ptr, row, outputs,
        x_stride, weight_stride, num_rows, num_outputs, num_inputs, repeats,
        GATHERED, ROWS, OUTPUTS, DEPTH, EVEN, PRECISION, PDL,
    )  # fmt: skip
    rank, _ = _first_best(score_order(scores), outputs)
    mask = row < num_rows
    tl.atomic_max(best_ptr + row, rank, mask=mask, sem="relaxed")
    if is_last_done(counters_ptr + tl.program_id(0), tiles):
        best = tl.atomic_xchg(best_ptr + row, tl.full((ROWS,), NO_SCORE, tl.int64), mask=mask, sem="relaxed")
        tl.store(out_ptr + row, rank_column(best), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "repeats"])
def head_topk_kernel(
    x_ptr, weight_ptr, ids_ptr, positions_ptr, keys_ptr, temperature_ptr, rows_ptr, candidates_ptr, sums_ptr,
    x_stride, weight_stride, num_rows, num_outputs, num_inputs, repeats, tiles,
    K: tl.constexpr, GATHERED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program leaves the K best of each of its rows, their maximum, and their sum of exponentials."""
    row, outputs = _cells(ROWS, OUTPUTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    scores = _scores(
        x_ptr, weight_ptr, ids_ptr, positions_ptr, keys_ptr, temperature_ptr, rows_ptr, row, outputs,
        x_stride, weight_stride, num_rows, num_outputs, num_inputs, repeats,
        GATHERED, ROWS, OUTPUTS, DEPTH, EVEN, PRECISION, PDL,
    )  # fmt: skip
    mask = row < num_rows
    place = row.to(tl.int64) * tiles + tl.program_id(1)
    peak = tl.max(scores, axis=0)
    tl.store(sums_ptr + place * 2, peak, mask=mask)
    total = tl.sum(tl.exp(scores - tl.maximum(peak, -1e30)[None, :]), axis=0)
    tl.store(sums_ptr + place * 2 + 1, total, mask=mask)
    order = score_order(scores)
    for choice in range(K):
        rank, column = _first_best(order, outputs)
        order = tl.where(outputs[:, None] == column[None, :], NO_ORDER, order)
        tl.store(candidates_ptr + place * K + choice, rank, mask=mask)


@triton.jit
def merge_topk_kernel(
    candidates_ptr, sums_ptr, values_ptr, columns_ptr, tiles,
    K: tl.constexpr, TILES: tl.constexpr, CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per row. A launch of its own: the last program to arrive would have all rows to merge."""
    wait_for_inputs(PDL)
    merge_topk(candidates_ptr, sums_ptr, values_ptr, columns_ptr, tl.program_id(0), tiles, K, TILES, CANDIDATES)


@triton.jit
def _cells(ROWS: tl.constexpr, OUTPUTS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return row, tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)


@triton.jit
def _logits(
    x_ptr, weight_ptr, places, row, x_stride, weight_stride, num_rows, num_inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """(OUTPUTS, ROWS) fp32: the rows `places` of the weights times the rows `row` of x."""
    weights = weight_ptr + places[:, None].to(tl.int64) * weight_stride
    inputs = x_ptr + row[:, None].to(tl.int64) * x_stride
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for step in range(tl.cdiv(num_inputs, DEPTH)):
        k = step * DEPTH + tl.arange(0, DEPTH)[None, :]
        if EVEN:
            x = tl.load(inputs + k, mask=(row < num_rows)[:, None], other=0.0)
            weight = tl.load(weights + k)
        else:
            x = tl.load(inputs + k, mask=(row < num_rows)[:, None] & (k < num_inputs), other=0.0)
            weight = tl.load(weights + k, mask=k < num_inputs, other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision=PRECISION)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    return acc


@triton.jit
def _scores(
    x_ptr, weight_ptr, ids_ptr, positions_ptr, keys_ptr, temperature_ptr, rows_ptr, row, outputs,
    x_stride, weight_stride, num_rows, num_outputs, num_inputs, repeats,
    GATHERED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """(OUTPUTS, ROWS) fp32 logits with noise; -inf at unused places and beyond the last output."""
    inside = outputs < num_outputs
    ids = outputs if ids_ptr is None else tl.load(ids_ptr + outputs, mask=inside, other=-1)
    places = tl.maximum(ids, 0) if GATHERED else tl.minimum(outputs, num_outputs - 1)
    if temperature_ptr is not None:  # read here, where the wait is hidden
        entry = parameter_entry(tl.minimum(row, num_rows - 1), rows_ptr, repeats)
        temperature, key = tl.load(temperature_ptr + entry), tl.load(keys_ptr + entry)
        position = tl.load(positions_ptr + row, mask=row < num_rows, other=0)
    acc = _logits(
        x_ptr, weight_ptr, places, row, x_stride, weight_stride, num_rows, num_inputs,
        ROWS, OUTPUTS, DEPTH, EVEN, PRECISION, PDL,
    )  # fmt: skip
    scores = acc.to(x_ptr.dtype.element_ty).to(tl.float32)  # rounded as stored logits are
    if temperature_ptr is not None:  # noqa: SIM102, decided when compiled
        if tl.max(temperature, axis=0) > 0.0:
            bits = row_noise_bits(key[None, :], position[None, :], ids[:, None])
            scores += temperature[None, :] * bits_to_gumbel(bits)
    used = inside & (ids >= 0) if GATHERED else inside
    return tl.where(used[:, None], scores, float("-inf"))


@triton.jit
def _first_best(order, outputs):
    """Of (OUTPUTS, ROWS) orders the rank of each row's best, and its column."""
    best = tl.max(order, axis=0)
    column = tl.min(tl.where(order == best[None, :], outputs[:, None], 0x7FFFFFFF), axis=0)
    return score_rank(best, column), column
