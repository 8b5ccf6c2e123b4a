"""The output layer of a draft: logits over a set of the target's tokens, or the best of them without storing logits.

The set may be rows of the target's head, read through an index: nothing is copied, so it can change between steps. The
layer is bound by reading weights, four times fewer for 32,768 tokens than for 128,256 (FR-Spec, arXiv 2502.14856). The
fused kernels round a logit to the dtype of `hidden` and continue in fp32, as if it had been stored: they equal the two
separate steps up to the summation order of the product. Weights stream through shared memory as in
kernels/gemm/small_m.py. A program computes OUTPUTS logits (axis 1) of ROWS rows (axis 0). Programs that read the same
weights are neighbours, so more than ROWS rows find them in the L2 cache.
Letters: R rows, H hidden size, V target and Vd draft vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.collectives.ranks import Ranks
from slipstream.kernels.gemm.choose import choose, device_of, product_of
from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.gemm.tiling import Tiling
from slipstream.kernels.launch import Op, pdl_options, use_triton, wait_for_inputs
from slipstream.kernels.limits import MAX_K
from slipstream.kernels.sampling.processors import parameter_entry
from slipstream.kernels.sampling.sample import (
    NO_ORDER,
    Sampling,
    bits_to_gumbel,
    empty_topk,
    merge_blocks,
    merge_topk,
    perturbed_topk,
    row_noise_bits,
    score_order,
    score_rank,
)
from slipstream.kernels.sampling.softcap import softcap
from slipstream.kernels.tiles import load_inputs, load_weights

MOST_ROWS = 64  # per program
FUSED_ROWS = 32  # with more, the fused kernels' epilogue takes too many registers
FUSED_OUTPUTS = 2**16  # smaller contiguous heads are faster with the library and a second kernel


@dataclass(frozen=True, slots=True)
class DraftHead:
    """Weights and the target id of each logit."""

    weight: Tensor  # (Vd, H); if gathered (V, H), of which row ids[j] gives logit j
    ids: Tensor | None = None  # (Vd,) int64; None: logit j belongs to id j. Gathered only: -1 marks an unused place
    gathered: bool = False
    softcap: float | None = None  # of the logits (kernels/sampling/softcap.py)
    ranks: Ranks | None = None  # which share the rows of `weight`: each has as many; None: all are here

    def __post_init__(self) -> None:
        assert self.ids is not None or not self.gathered
        assert self.gathered or self.ids is None or len(self.ids) == len(self.weight)

    @property
    def size(self) -> int:
        """Vd, unused places included."""
        if self.ids is not None:
            return len(self.ids)
        return len(self.weight) * (1 if self.ranks is None else self.ranks.world)


def choose_tiling(num_rows: int) -> Tiling:
    """The fastest that bench/kernel_times.py --tune finds on an H200 at 32,768 x 4,096."""
    if num_rows <= 16:
        return Tiling(outputs=128, depth=64, split=1, stages=4)
    if num_rows <= 32:
        return Tiling(outputs=128, depth=64, split=1, stages=3)
    return Tiling(outputs=128, depth=64, split=1, stages=3, warps=8)


def _fits_kernel(hidden: Tensor, weight: Tensor, _ids: Tensor | None) -> bool:
    """16-bit weights whose rows load 16 bytes at once; any number of rows of `hidden`."""
    if not use_triton(hidden):
        return False
    return choose(product_of(hidden[:1], weight, "gated"), device_of(hidden)).kernel != "library"


def _fits_fused(head: DraftHead, hidden: Tensor, k: int, sampling: Sampling) -> bool:
    plain = sampling.temperature is None or sampling.filters is None
    pays = head.gathered or head.size >= FUSED_OUTPUTS
    return (
        plain
        and pays
        and k <= MAX_K
        and head.softcap is None
        and head.ranks is None
        and len(hidden) <= FUSED_ROWS
        and _fits_kernel(hidden, head.weight, head.ids)
    )


def head_logits(head: DraftHead, hidden: Tensor) -> Tensor:
    """(R, H) -> (R, Vd). A gathered head gives -inf at unused places, sums in fp32 and rounds once; on the GPU it reads
    only the named rows of 16-bit weights."""
    if head.gathered:
        assert head.ids is not None
        logits = gathered_linear(hidden, head.weight, head.ids)
    else:
        logits = linear(hidden, head.weight)
    if head.ranks is not None:
        logits = head.ranks.gather(logits)
    return logits if head.softcap is None else softcap(logits, head.softcap)


@Op
def gathered_linear(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """hidden (R, H) @ weight (V, H)[ids].T -> (R, Vd) for ids (Vd,) int64, -inf where an id is -1."""
    return linear(hidden, weight.index_select(0, ids.clamp(min=0))).masked_fill(ids < 0, -torch.inf)


@gathered_linear.kernel(when=_fits_kernel)
def gathered_linear_triton(hidden: Tensor, weight: Tensor, ids: Tensor, tiling: Tiling | None = None) -> Tensor:
    out = torch.empty(len(hidden), len(ids), dtype=hidden.dtype, device=hidden.device)
    if len(hidden):
        hidden, grid, options = _launch_options(hidden, weight, len(ids), tiling)
        gathered_linear_kernel[grid](
            hidden, weight, ids, out, hidden.stride(0), weight.stride(0), *out.shape, weight.shape[1], **options
        )
    return out


@Op
def head_topk(
    head: DraftHead, hidden: Tensor, k: int, positions: Tensor, sampling: Sampling, *, as_ids: bool = False
) -> tuple[Tensor, Tensor]:
    """hidden (R, H), positions (R,) of the token to propose -> log-probabilities (R, k) fp32, places (R, k) int64.

    Equals perturbed_topk(head_logits(head, hidden), k, ...): best first, ties to the lowest place; the first place is
    the sample. Needs at least k used places, 1 <= k <= MOST_SORTED; the fused kernel takes up to MAX_K and no soft cap.
    `as_ids`: target ids instead of places.
    """
    return perturbed_topk(head_logits(head, hidden), k, positions, sampling, head.ids, as_ids=as_ids)


@head_topk.kernel(when=lambda head, hidden, k, _, sampling, **__: _fits_fused(head, hidden, k, sampling))
def head_topk_triton(
    head: DraftHead,
    hidden: Tensor,
    k: int,
    positions: Tensor,
    sampling: Sampling,
    tiling: Tiling | None = None,
    *,
    as_ids: bool = False,
) -> tuple[Tensor, Tensor]:
    """Without filters. Two launches."""
    assert 1 <= k <= min(MAX_K, head.size)
    R = len(hidden)
    tiling = tiling or choose_tiling(len(hidden))
    tiles = triton.cdiv(head.size, tiling.outputs)
    candidates, sums, values, places = empty_topk(R, tiles, k, hidden.device)
    if R:
        out = candidates, sums
        _launch_fused(head_topk_kernel, head, hidden, positions, sampling, out, tiling, K=k)
        merge_topk_kernel[(R,)](
            candidates, sums, values, places, head.ids if as_ids else None, head.size, tiles,
            K=k, **merge_blocks(tiles, k), num_warps=8, **pdl_options(hidden.device),
        )  # fmt: skip
    return values, places


def _launch_fused(
    kernel: Any, head: DraftHead, hidden: Tensor, positions: Tensor, sampling: Sampling, out: tuple[Tensor, ...],
    tiling: Tiling | None, **constants: int,
) -> None:  # fmt: skip
    hidden, grid, options = _launch_options(hidden, head.weight, head.size, tiling)
    kernel[grid](
        hidden, head.weight, head.ids, positions, sampling.keys, sampling.temperature, sampling.rows, *out,
        hidden.stride(0), head.weight.stride(0), len(hidden), head.size, hidden.shape[1], sampling.repeats, grid[1],
        GATHERED=head.gathered, **constants, **options,
    )  # fmt: skip


def _launch_options(
    hidden: Tensor, weight: Tensor, num_outputs: int, tiling: Tiling | None
) -> tuple[Tensor, tuple[int, int], dict[str, Any]]:
    """`hidden` with contiguous rows, the grid (blocks of rows, tiles of outputs), constants and launch options."""
    assert weight.stride(1) == 1
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    num_rows, num_inputs = hidden.shape
    tiling = tiling or choose_tiling(num_rows)
    rows = min(max(triton.next_power_of_2(num_rows), 16), MOST_ROWS)
    grid = triton.cdiv(num_rows, rows), triton.cdiv(num_outputs, tiling.outputs)
    constants = {"ROWS": rows, "OUTPUTS": tiling.outputs, "DEPTH": tiling.depth}
    constants |= {"EVEN": num_inputs % tiling.depth == 0, "PRECISION": "ieee"}
    options = {"num_stages": tiling.stages, "num_warps": tiling.warps}
    return hidden, grid, constants | options | pdl_options(hidden.device)


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
def head_topk_kernel(
    x_ptr, weight_ptr, ids_ptr, positions_ptr, keys_ptr, temperature_ptr, rows_ptr, candidates_ptr, sums_ptr,
    x_stride, weight_stride, num_rows, num_outputs, num_inputs, repeats, tiles,
    K: tl.constexpr, GATHERED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program stores the K best of each of its rows, their maximum, and their sum of exponentials."""
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
    candidates_ptr, sums_ptr, values_ptr, columns_ptr, names_ptr, num_outputs, tiles,
    K: tl.constexpr, TILES: tl.constexpr, CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per row. A separate launch, since the last program to finish would have all rows to merge."""
    wait_for_inputs(PDL)
    merge_topk(
        candidates_ptr, sums_ptr, values_ptr, columns_ptr, names_ptr, num_outputs, tl.program_id(0), tiles,
        K, TILES, CANDIDATES,
    )  # fmt: skip


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
    """(OUTPUTS, ROWS) fp32: rows `places` of the weights times rows `row` of x."""
    weights = weight_ptr + places[:, None].to(tl.int64) * weight_stride
    inputs = x_ptr + row[:, None].to(tl.int64) * x_stride
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for step in range(tl.cdiv(num_inputs, DEPTH)):
        k = step * DEPTH + tl.arange(0, DEPTH)[None, :]
        x = load_inputs(inputs, k, row, num_rows, num_inputs, EVEN)
        weight = load_weights(weights + k, k, num_inputs, EVEN)
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
    if temperature_ptr is not None:  # loaded early to hide the latency
        entry = parameter_entry(tl.minimum(row, num_rows - 1), rows_ptr, repeats)
        temperature = tl.load(temperature_ptr + entry)
        key = tl.load(keys_ptr + entry)
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
    valid = inside & (ids >= 0) if GATHERED else inside
    return tl.where(valid[:, None], scores, float("-inf"))


@triton.jit
def _first_best(order, outputs):
    """The rank and column of the best of (OUTPUTS, ROWS) orders, for each row."""
    best = tl.max(order, axis=0)
    column = tl.min(tl.where(order == best[None, :], outputs[:, None], 0x7FFFFFFF), axis=0)
    return score_rank(best, column), column
