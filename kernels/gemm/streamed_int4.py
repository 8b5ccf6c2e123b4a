"""Products of few rows that request their 4-bit weights before their rows are ready: as streamed_linear.py, with the
layout and decoding of int4_weight.py and the bits of int4.py.

Letters: M rows, I inputs, O outputs.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from slipstream.kernels.gemm.int4_weight import CHUNK, PLANE, Int4Weight, plane, unit_inputs, unit_words
from slipstream.kernels.gemm.streamed import (
    MOST_REGISTERS,
    launch_next,
    ring_barriers,
    share_barriers,
    store_part,
    tile_rows,
    tiles_of,
    wait_empty,
    wait_full,
    wait_paced,
)
from slipstream.kernels.gemm.streamed_linear import TILE, add_parts, load_inputs, load_weights
from slipstream.kernels.gemm.tiling import Tiling, own_parts, part_inputs
from slipstream.kernels.grid_sync import done_counters
from slipstream.kernels.launch import pdl_options

FEW_REGISTERS = 80  # of a thread, on average, of programs of one part: more of them fit on a multiprocessor
DEPTH = gl.constexpr(CHUNK)  # inputs of a step
WORDS = gl.constexpr(PLANE)  # of a step and an output
SLOTS = gl.constexpr(4)  # of both rings
PACE = gl.constexpr(2)  # of weights that are on their way at once, at first


def streamed_int4_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None, tiling: Tiling) -> Tensor:
    """x (M, I) @ weight (O, I).T + bias (O,) -> (M, O)."""
    num_rows, num_inputs = x.shape
    num_outputs = len(weight.words)
    device = x.device
    rows = tile_rows(num_rows)
    parts = own_parts(rows, num_inputs, tiling)
    split = tiling.split // parts
    outputs = TILE.value // parts
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=device)
    partial = torch.empty(num_outputs * split * rows if split > 1 else 0, dtype=torch.float32, device=device)
    streamed_int4_kernel[(num_outputs // outputs, split)](
        tiles_of(x, [rows, CHUNK]), tiles_of(weight.words, [outputs, PLANE]), *unit_words(weight), bias, out, partial,
        done_counters(device), num_rows, num_outputs, num_inputs, part_inputs(num_inputs, tiling),
        ROWS=rows, UNIT=unit_inputs(weight.group_size), PARTS=parts, SPLIT=split, num_warps=4,
        maxnreg=FEW_REGISTERS if parts == 1 else MOST_REGISTERS, **pdl_options(device),
    )  # fmt: skip
    return out


@gluon.jit
def _bring_weights(weights, ring, full, empty, first, part_steps, steps, PARTS: gl.constexpr):
    row = gl.program_id(0) * (TILE // PARTS)
    for number in range(steps):
        wait_paced(full, empty, number, PACE, SLOTS)
        bar = full.index(number % SLOTS)
        mbarrier.expect(bar, 4 * TILE * WORDS)
        column = (first + number) * WORDS
        load_weights(weights, ring.index(number % SLOTS), row, row, column, part_steps * WORDS, bar, 0, PARTS)


@gluon.jit
def bring_inputs(
    x, ring, full, empty, row, first, part_steps, steps,
    ROWS: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """ROWS rows from `row` on, of each part DEPTH inputs at a time."""
    if PDL:
        gdc_wait()
    for number in range(steps):
        wait_empty(empty, number, SLOTS)
        bar = full.index(number % SLOTS)
        mbarrier.expect(bar, 2 * PARTS * ROWS * DEPTH)
        column = (first + number) * DEPTH
        load_inputs(x, ring.index(number % SLOTS), row, column, part_steps * DEPTH, bar, ROWS, PARTS)


@gluon.jit
def load_unit_words(pointers, step, num_outputs, UNIT: gl.constexpr):
    """`load_units` of int4_weight.py, as words of two units; of no pointers none."""
    PAIRS: gl.constexpr = DEPTH // UNIT // 2
    words = ()
    if pointers is not None:
        for pair in gl.static_range(PAIRS):
            words = words + (gl.load(pointers + (step * PAIRS + pair) * num_outputs),)  # type: ignore[assignment]
    return words


@gluon.jit
def two_planes(words, scales, zeros, PLACE: gl.constexpr, UNIT: gl.constexpr, TYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Weights (TILE, 64) of two planes of a step. Threads keep their numbers."""
    first = plane(words, scales, zeros, PLACE, UNIT, TYPE, True)
    second = plane(words, scales, zeros, PLACE + 1, UNIT, TYPE, True)
    planes = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), [first.shape[0], 2 * first.shape[1]])
    return gl.convert_layout(planes, LAYOUT)


@gluon.jit
def _add_products(
    ring, full, empty, x_ring, x_full, x_empty, scale_pointers, zero_pointers, scales, zeros, first, steps, num_outputs,
    COLUMNS: gl.constexpr, UNIT: gl.constexpr, ACC: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Sums (TILE, COLUMNS). `scales` and `zeros` of the first step; the others are loaded a step ahead."""
    acc = gl.zeros((TILE, COLUMNS), gl.float32, ACC)
    for number in range(steps):
        following = first + gl.minimum(number + 1, steps - 1)
        next_scales = load_unit_words(scale_pointers, following, num_outputs, UNIT)
        next_zeros = load_unit_words(zero_pointers, following, num_outputs, UNIT)
        wait_full(full, number, SLOTS)
        words = ring.index(number % SLOTS).load(A)
        mbarrier.arrive(empty.index(number % SLOTS))
        wait_full(x_full, number, SLOTS)
        x = x_ring.index(number % SLOTS)
        for quarter in gl.static_range(4):
            weight = two_planes(words, scales, zeros, 2 * quarter, UNIT, gl.bfloat16, A)
            acc = warpgroup_mma(weight, x.slice(quarter * 64, 64, 1).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(x_empty.index(number % SLOTS))
        scales = next_scales
        zeros = next_zeros
    return acc * 65536.0  # weights are times 2^-16


@gluon.jit
def _multiply(
    ring, full, empty, x_ring, x_full, x_empty, scales_ptr, zeros_ptr, bias_ptr, out_ptr, partial_ptr, counters_ptr,
    num_rows, num_outputs, first, part_steps, steps,
    ROWS: gl.constexpr, UNIT: gl.constexpr, PARTS: gl.constexpr, SPLIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    OUTPUTS: gl.constexpr = TILE // PARTS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PARTS * ROWS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    CELLS: gl.constexpr = gl.BlockedLayout([1, 1, PARTS * PARTS], [32, 1, 1], [1, 4, 1], [2, 0, 1])
    OUT: gl.constexpr = ACC if PARTS == 1 else gl.SliceLayout(2, CELLS)
    tile = gl.program_id(0)
    place = gl.arange(0, OUTPUTS, gl.SliceLayout(1, OUT))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, OUT))
    outputs = tile * OUTPUTS + place
    weight_row = gl.arange(0, TILE, gl.SliceLayout(1, A))
    features = tile * OUTPUTS + weight_row % OUTPUTS
    features += weight_row // OUTPUTS * (part_steps * (DEPTH // UNIT // 2)) * num_outputs
    scale_pointers = (scales_ptr + features)[:, None]
    zero_pointers = None
    bias = None
    if zeros_ptr is not None:
        zero_pointers = (zeros_ptr + features)[:, None]
    # Loads data that no kernel writes before the wait: after the products the loads would take time.
    scales = load_unit_words(scale_pointers, first, num_outputs, UNIT)
    zeros = load_unit_words(zero_pointers, first, num_outputs, UNIT)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + outputs).to(gl.float32)
    if PDL:
        gdc_wait()
    sums = _add_products(
        ring, full, empty, x_ring, x_full, x_empty, scale_pointers, zero_pointers, scales, zeros, first, steps,
        num_outputs, PARTS * ROWS, UNIT, ACC, A,
    )  # fmt: skip
    launch_next(PDL)
    sums = add_parts(sums, ROWS, PARTS, OUT)
    valid = (row < num_rows)[None, :] & (place >= 0)[:, None]
    if SPLIT > 1:
        parts = partial_ptr + tile * SPLIT * (TILE * ROWS)
        sums, last = store_part(parts, counters_ptr + tile, sums, gl.program_id(1), place, row, valid, SPLIT)
        valid &= last
    if bias is not None:
        sums += bias[:, None]
    cells = out_ptr + row[None, :] * num_outputs + outputs[:, None]
    gl.store(cells, sums.to(out_ptr.dtype.element_ty), mask=valid)


@gluon.jit(do_not_specialize=["num_rows"])
def streamed_int4_kernel(
    x, weights, scales_ptr, zeros_ptr, bias_ptr, out_ptr, partial_ptr, counters_ptr,
    num_rows, num_outputs, num_inputs, part_size,
    ROWS: gl.constexpr, UNIT: gl.constexpr, PARTS: gl.constexpr, SPLIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """TILE / PARTS features (axis 0) of all rows from PARTS parts of the inputs, or one of SPLIT parts (axis 1)."""
    ring = gl.allocate_shared_memory(gl.int32, [SLOTS, TILE, WORDS], gl.NVMMASharedLayout(128, 32, 2))
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, PARTS * ROWS, DEPTH], gl.NVMMASharedLayout(128, 16, 2))
    full, empty = ring_barriers(SLOTS)
    x_full, x_empty = ring_barriers(SLOTS)
    share_barriers()
    part_steps = part_size // DEPTH
    first = gl.program_id(1) * part_steps
    steps = gl.minimum(part_steps, num_inputs // DEPTH - first)
    gl.warp_specialize(
        [
            (_multiply, (
                ring, full, empty, x_ring, x_full, x_empty, scales_ptr, zeros_ptr, bias_ptr, out_ptr, partial_ptr,
                counters_ptr, num_rows, num_outputs, first, part_steps, steps, ROWS, UNIT, PARTS, SPLIT, PDL,
            )),
            (_bring_weights, (weights, ring, full, empty, first, part_steps, steps, PARTS)),
            (bring_inputs, (x, x_ring, x_full, x_empty, 0, first, part_steps, steps, ROWS, PARTS, SLOTS, PDL)),
        ],
        [1, 1],
        [32, 32],
    )  # fmt: skip
