"""Products of many rows with 4-bit weights (int4_weight.py) that are decoded on their way to the tensor cores, in
Gluon, with the bits of int4.py.

A program of the usual kernel computes 64 outputs. Beyond 32 rows, reading the inputs again for every 64 outputs takes
longer than reading the weights, and beyond 64 rows all weights are decoded twice. Here a program computes up to 256
outputs of up to 128 rows. Two warpgroups share its inputs: while one decodes, the tensor cores multiply for the other.
Two more warps copy weights and inputs into rings in shared memory.
Letters: M rows, I inputs, O outputs.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from slipstream.kernels.gemm.fixed_order import sum_parts_triton
from slipstream.kernels.gemm.int4_weight import CHUNK, PLANE, Int4Weight, unit_inputs, unit_words, unscaled
from slipstream.kernels.gemm.small_m import round_silu_mul
from slipstream.kernels.gemm.streamed import (
    launch_next,
    load_tile,
    ring_barriers,
    share_barriers,
    tiles_of,
    wait_empty,
    wait_full,
)
from slipstream.kernels.gemm.streamed_int4 import bring_inputs, load_unit_words, two_planes
from slipstream.kernels.gemm.tiling import Tiling, Wide, part_inputs
from slipstream.kernels.launch import pdl_options

DEPTH = gl.constexpr(CHUNK)  # inputs of a step
WORDS = gl.constexpr(PLANE)  # of a step and an output
TILE = gl.constexpr(64)  # outputs, as `wgmma` takes them
GROUPS = gl.constexpr(2)  # warpgroups that multiply
FIRST = gl.constexpr(0)
SECOND = gl.constexpr(1)
PARTS = gl.constexpr(1)  # that a program sums itself
PENDING = gl.constexpr(2)  # products that a warpgroup has on their way while it decodes
REGISTERS = gl.constexpr(240)  # of a thread that multiplies
MOST_REGISTERS = 168  # of a thread, on average: all twelve warps fill a multiprocessor


def wide_int4_linear(
    x: Tensor, weight: Int4Weight, bias: Tensor | None, tiling: Tiling, gated: bool, wide: Wide
) -> Tensor:
    """As `int4_linear_triton`, of rows that begin at multiples of 16 bytes."""
    num_rows, num_inputs = x.shape
    all_outputs = len(weight.words)
    device = x.device
    split = tiling.split
    num_outputs = all_outputs // (1 + gated)
    row_tiles = triton.cdiv(num_rows, wide.rows)
    size = (num_rows, num_outputs) if split == 1 else (split, num_rows, num_outputs)
    out = torch.empty(size, dtype=x.dtype if split == 1 else torch.float32, device=device)
    wide_int4_kernel[(all_outputs // wide.outputs * row_tiles, split)](
        tiles_of(x, [wide.rows, CHUNK]), tiles_of(weight.words, [TILE.value, PLANE]), *unit_words(weight),
        bias if split == 1 else None, out, num_rows, num_outputs, all_outputs, num_inputs,
        part_inputs(num_inputs, tiling), row_tiles,
        GATED=gated, ROWS=wide.rows, TILES=wide.tiles, SLOTS=wide.slots, UNIT=unit_inputs(weight.group_size),
        num_warps=4, maxnreg=MOST_REGISTERS, **pdl_options(device),
    )  # fmt: skip
    return out if split == 1 else sum_parts_triton(out, bias, x.dtype)


@gluon.jit
def _first_rows(tile, num_outputs, GATED: gl.constexpr, TILES: gl.constexpr):
    """The first rows of a warpgroup's tiles: two neighbours, or gates and their ups."""
    first = tile * TILES * TILE
    other = first + TILE
    if GATED:
        first = tile * TILE
        other = num_outputs + first
    return first, other


@gluon.jit
def _bring_weights(
    weights, ring, full, empty, program, num_outputs, first, steps,
    GATED: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    COUNT: gl.constexpr = GROUPS * TILES
    for number in range(steps):
        wait_empty(empty, number, SLOTS)
        bar = full.index(number % SLOTS)
        at = number % SLOTS * COUNT
        mbarrier.expect(bar, 4 * COUNT * TILE * WORDS)
        for group in gl.static_range(GROUPS):
            rows = _first_rows(program * GROUPS + group, num_outputs, GATED, TILES)
            for index in gl.static_range(TILES):
                load_tile(weights, [rows[index], (first + number) * WORDS], bar, ring.index(at + group * TILES + index))


@gluon.jit
def _load_units(pointers, step, all_outputs, UNIT: gl.constexpr, TILES: gl.constexpr):
    """Loads the words of each tile's units."""
    units = ()
    for index in gl.static_range(TILES):
        units = units + (load_unit_words(pointers[index], step, all_outputs, UNIT),)  # type: ignore[assignment]
    return units


@gluon.jit
def _add_products(
    accs, ring, x, at, scales, zeros, UNIT: gl.constexpr, TILES: gl.constexpr, TYPE: gl.constexpr, A: gl.constexpr
):
    """The sums (TILE, ROWS) of each tile, with a step added."""
    sums = ()
    for index in gl.static_range(TILES):
        words = ring.index(at + index).load(A)
        acc = accs[index]
        for quarter in gl.static_range(4):
            weight = two_planes(words, scales[index], zeros[index], 2 * quarter, UNIT, TYPE, A)
            acc = warpgroup_mma(weight, x.slice(quarter * 64, 64, 1).permute((1, 0)), acc, is_async=True)
            if index < TILES - 1 or quarter < 3:
                acc = warpgroup_mma_wait(PENDING, deps=[acc])
        sums = sums + (acc,)  # type: ignore[assignment]
    return warpgroup_mma_wait(0, deps=sums) if TILES > 1 else (warpgroup_mma_wait(0, deps=sums),)


@gluon.jit
def _multiply(
    ring, full, empty, x_ring, x_full, x_empty, scales_ptr, zeros_ptr, bias_ptr, out_ptr,
    num_rows, num_outputs, all_outputs, program, row, first, steps,
    GROUP: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr,
    UNIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The tiles of a warpgroup."""
    TYPE: gl.constexpr = x_ring.dtype
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    rows = _first_rows(program * GROUPS + GROUP, num_outputs, GATED, TILES)
    row_in_tile = gl.arange(0, TILE, gl.SliceLayout(1, A))
    features = (rows[0] + row_in_tile)[:, None], (rows[1] + row_in_tile)[:, None]
    scale_pointers = (scales_ptr + features[0], scales_ptr + features[1])
    zero_pointers = (None, None)
    if zeros_ptr is not None:
        zero_pointers = zeros_ptr + features[0], zeros_ptr + features[1]
    scales = _load_units(scale_pointers, first, all_outputs, UNIT, TILES)
    zeros = _load_units(zero_pointers, first, all_outputs, UNIT, TILES)
    accs = ()
    for _ in gl.static_range(TILES):
        accs = accs + (gl.zeros((TILE, ROWS), gl.float32, ACC),)  # type: ignore[assignment]
    for number in range(steps):
        following = first + gl.minimum(number + 1, steps - 1)
        next_scales = _load_units(scale_pointers, following, all_outputs, UNIT, TILES)
        next_zeros = _load_units(zero_pointers, following, all_outputs, UNIT, TILES)
        slot = number % SLOTS
        wait_full(full, number, SLOTS)
        wait_full(x_full, number, SLOTS)
        at = slot * (GROUPS * TILES) + GROUP * TILES
        sums = _add_products(accs, ring, x_ring.index(slot), at, scales, zeros, UNIT, TILES, TYPE, A)
        accs = sums
        mbarrier.arrive(empty.index(slot))
        mbarrier.arrive(x_empty.index(slot))
        scales = next_scales
        zeros = next_zeros
    launch_next(PDL)
    _store(accs, rows, bias_ptr, out_ptr, row, num_rows, num_outputs, GATED, ROWS, TILES, TYPE, ACC)


@gluon.jit
def _store(
    accs, rows, bias_ptr, out_ptr, first_row, num_rows, num_outputs,
    GATED: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr, TYPE: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    place = gl.arange(0, TILE, gl.SliceLayout(1, ACC))
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, ACC))
    out_ptr += gl.program_id(1).to(gl.int64) * num_rows * num_outputs
    cells = out_ptr + (row.to(gl.int64) * num_outputs)[None, :] + place[:, None]
    inside = (row < num_rows)[None, :] & (place >= 0)[:, None]
    if GATED:
        gate = unscaled(accs[0], TYPE, True).to(TYPE)
        up = unscaled(accs[1], TYPE, True).to(TYPE)
        gl.store(cells + rows[0], round_silu_mul(gate, up), mask=inside)
    else:
        for index in gl.static_range(TILES):
            sums = unscaled(accs[index], TYPE, True)
            if bias_ptr is not None:
                sums += gl.load(bias_ptr + rows[index] + place).to(gl.float32)[:, None]
            gl.store(cells + rows[index], sums.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["num_rows", "row_tiles"])
def wide_int4_kernel(
    x, weights, scales_ptr, zeros_ptr, bias_ptr, out_ptr, num_rows, num_outputs, all_outputs, num_inputs, part_size,
    row_tiles, GATED: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr, UNIT: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """GROUPS * TILES tiles of features of ROWS rows (axis 0) from one part of the inputs (axis 1); of several parts the
    sums are stored."""
    COUNT: gl.constexpr = SLOTS * GROUPS * TILES
    ring = gl.allocate_shared_memory(gl.int32, [COUNT, TILE, WORDS], gl.NVMMASharedLayout(128, 32, 2))
    x_ring = gl.allocate_shared_memory(x.dtype, [SLOTS, ROWS, DEPTH], gl.NVMMASharedLayout(128, 16, 2))
    full, empty = ring_barriers(SLOTS, GROUPS)
    x_full, x_empty = ring_barriers(SLOTS, GROUPS)
    share_barriers()
    program = gl.program_id(0) // row_tiles
    row = gl.program_id(0) % row_tiles * ROWS
    part_steps = part_size // DEPTH
    first = gl.program_id(1) * part_steps
    steps = gl.minimum(part_steps, num_inputs // DEPTH - first)
    gl.warp_specialize(
        [
            (_multiply, (
                ring, full, empty, x_ring, x_full, x_empty, scales_ptr, zeros_ptr, bias_ptr, out_ptr, num_rows,
                num_outputs, all_outputs, program, row, first, steps, FIRST, GATED, ROWS, TILES, SLOTS, UNIT, PDL,
            )),
            (_multiply, (
                ring, full, empty, x_ring, x_full, x_empty, scales_ptr, zeros_ptr, bias_ptr, out_ptr, num_rows,
                num_outputs, all_outputs, program, row, first, steps, SECOND, GATED, ROWS, TILES, SLOTS, UNIT, PDL,
            )),
            (_bring_weights, (weights, ring, full, empty, program, num_outputs, first, steps, GATED, TILES, SLOTS)),
            (bring_inputs, (x, x_ring, x_full, x_empty, row, first, part_steps, steps, ROWS, PARTS, SLOTS, PDL)),
        ],
        [4, 1, 1],
        [REGISTERS, 24, 24],
    )  # fmt: skip
