"""A gated MLP of few rows in FP8 in one kernel: gates, ups and activation, codes of the hidden rows, down projection.

For few rows a layer takes as long as reading its weights. A kernel begins some 2.5 us after the previous one has read
its last weights. Here each multiprocessor has one program, whose weights come through a ring
in shared memory (streamed.py): one warp asks for tiles of gates and ups and then, without a break, of the down
projection, while the others multiply, store their part of the hidden rows and wait for those of all programs. The first
tiles are asked for while the kernels before run.

The largest number of a hidden row is found by atomic maxima of bits while the row is computed, so that after one wait
each program quantises a share of the rows, and after another one multiplies. Sums and their order are those of the
kernels of fp8.py, bit by bit.
Letters: M rows, H inputs and outputs, I hidden.
"""

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from slipstream.kernels.gemm.fp8 import ALIGNMENT, BLOCK, LARGEST, SMALLEST_SCALE, QuantizedRows
from slipstream.kernels.gemm.small_m import round_silu_mul
from slipstream.kernels.gemm.streamed import (
    MOST_REGISTERS,
    fence_copies,
    launch_next,
    load_tile,
    programs_of,
    ring_barriers,
    share_barriers,
    store_part,
    tile_rows,
    tiles_of,
    wait_empty,
    wait_for_all,
    wait_full,
)
from slipstream.kernels.gemm.tiling import choose_split
from slipstream.kernels.grid_sync import barriers, done_counters, new_words
from slipstream.kernels.launch import pdl_options

MOST_ROWS = 32
TILE = gl.constexpr(64)  # outputs of a tile
DEPTH = gl.constexpr(BLOCK)  # inputs of a tile
SLOTS = gl.constexpr(8)  # of the ring of weights, of two tiles each
X_SLOTS = gl.constexpr(4)  # likewise of inputs
ALIGNED = gl.constexpr(ALIGNMENT)
THREADS = gl.constexpr(128)  # that multiply
MOST = gl.constexpr(LARGEST)
LEAST_SCALE = gl.constexpr(SMALLEST_SCALE)


class FP8Matrix(NamedTuple):
    """codes * scales."""

    codes: Tensor  # (O, I) e4m3
    scales: Tensor  # (O,) fp32


@functools.cache
def most_words(device: torch.device) -> Tensor:
    """(MOST_ROWS,) int32 bits of the largest number of each hidden row; zero between launches."""
    return new_words(device)[:MOST_ROWS]


def fp8_mlp(x: QuantizedRows, gate_up: FP8Matrix, down: FP8Matrix) -> Tensor:
    """x (M, H), gate_up (2 * I, H), gates before ups, down (H, I) -> down(silu(gates) * ups) (M, H) in x's dtype."""
    num_rows, num_inputs = x.codes.shape
    num_outputs, size = down.codes.shape
    device = x.codes.device
    rows = tile_rows(num_rows)
    split = choose_split(num_outputs, size)
    shares = 1 << ((programs_of(device) // rows).bit_length() - 1)  # programs that quantise a row
    share = triton.cdiv(size, shares * ALIGNMENT) * ALIGNMENT
    hidden = torch.empty(num_rows, size, dtype=x.dtype, device=device)
    codes = torch.empty_like(hidden, dtype=x.codes.dtype)
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=device)
    partial = torch.empty(num_outputs * split * rows, dtype=torch.float32, device=device)
    fp8_mlp_kernel[(programs_of(device),)](
        tiles_of(x.codes, [rows, BLOCK]), tiles_of(gate_up.codes, [TILE.value, BLOCK]),
        tiles_of(codes, [rows, BLOCK]), tiles_of(down.codes, [TILE.value, BLOCK]),
        x.scales, gate_up.scales, down.scales, hidden, codes, most_words(device), partial, done_counters(device),
        barriers(device), out, x.scales.stride(0), num_rows, num_inputs, size, num_outputs,
        SPLIT=split, ROWS=rows, WIDTH=max(triton.next_power_of_2(share), THREADS.value), SHARES=shares,
        num_warps=4, maxnreg=MOST_REGISTERS, **pdl_options(device),
    )  # fmt: skip
    return out


@gluon.jit
def _ask(desc, row, column, other_row, other_column, ring, full, slot, BYTES: gl.constexpr):
    """Asks for the two tiles of a slot."""
    bar = full.index(slot)
    mbarrier.expect(bar, BYTES)
    load_tile(desc, [row, column], bar, ring.index(2 * slot))
    load_tile(desc, [other_row, other_column], bar, ring.index(2 * slot + 1))


@gluon.jit
def _bring_weights(
    gate_up, down, ring, full, empty, units, down_units, size, steps, down_steps, SPLIT: gl.constexpr
):  # fmt: skip
    """For each of the program's tiles of gates and ups DEPTH inputs of both at a time, then for each part of a tile of
    the down projection twice as many."""
    number = 0
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    for index in range(units):
        row = (program + index * programs) * TILE
        for step in range(2 * steps):
            wait_empty(empty, number, SLOTS)
            column = step * DEPTH
            _ask(gate_up, row, column, size + row, column, ring, full, number % SLOTS, 2 * TILE * DEPTH)
            number += 1
    for index in range(down_units):
        unit = programs - 1 - program + index * programs
        row = unit // SPLIT * TILE
        first = unit % SPLIT * (2 * down_steps) * DEPTH
        for step in range(down_steps):
            wait_empty(empty, number, SLOTS)
            column = first + 2 * step * DEPTH
            _ask(down, row, column, row, column + DEPTH, ring, full, number % SLOTS, 2 * TILE * DEPTH)
            number += 1


@gluon.jit
def _bring_inputs(
    x, hidden, ring, full, empty, is_hidden, units, down_units, steps, down_steps,
    SPLIT: gl.constexpr, ROWS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """All rows' inputs, those of the down projection once they are there."""
    if PDL:
        gdc_wait()
    number = 0
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    for _ in range(units):
        for step in range(steps):
            wait_empty(empty, number, X_SLOTS)
            column = 2 * step * DEPTH
            _ask(x, 0, column, 0, column + DEPTH, ring, full, number % X_SLOTS, 2 * ROWS * DEPTH)
            number += 1
    mbarrier.wait(is_hidden.index(0), 0)
    fence_copies(gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0])))
    for index in range(down_units):
        first = (programs - 1 - program + index * programs) % SPLIT * (2 * down_steps) * DEPTH
        for step in range(down_steps):
            wait_empty(empty, number, X_SLOTS)
            column = first + 2 * step * DEPTH
            _ask(hidden, 0, column, 0, column + DEPTH, ring, full, number % X_SLOTS, 2 * ROWS * DEPTH)
            number += 1


@gluon.jit
def _scale(bits, largest):
    """Scale of a row whose largest number has these bits (`_store_codes` of fp8.py). largest: MOST, shaped like
    `bits`."""
    return gl.maximum(gl.div_rn(bits.to(gl.float32, bitcast=True), largest), LEAST_SCALE)


@gluon.jit
def _quantize(hidden_ptr, codes_ptr, most_ptr, row, share, size, WIDTH: gl.constexpr, SHARES: gl.constexpr):
    """Stores a share of a row's codes, divided as by `_divide` of fp8.py."""
    EACH: gl.constexpr = WIDTH // THREADS
    LAYOUT: gl.constexpr = gl.BlockedLayout([8 if EACH > 8 else EACH], [32], [THREADS // 32], [0])
    share_size = gl.cdiv(size, SHARES * ALIGNED) * ALIGNED
    column = gl.arange(0, WIDTH, LAYOUT)
    at = share * share_size + column
    inside = (column < share_size) & (at < size)
    x = gl.load(hidden_ptr + row.to(gl.int64) * size + at, mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32)
    scale = _scale(gl.load(most_ptr + row, cache_modifier=".cg"), MOST)
    inverse = gl.div_rn(1.0, scale)
    all_ones = gl.full((WIDTH,), 1.0, gl.float32, LAYOUT)
    quotient = x * inverse
    scaled = gl.fma(gl.fma(-quotient, all_ones * scale, x), all_ones * inverse, quotient)
    scaled = gl.minimum(gl.maximum(scaled, -MOST), MOST)
    gl.store(codes_ptr + row.to(gl.int64) * size + at, scaled.to(gl.float8e4nv), mask=inside)


@gluon.jit
def _multiply_gated(
    ring, full, empty, x_ring, x_full, x_empty, row_scales, scales_ptr, hidden_ptr, most_ptr, units, steps, num_rows,
    size, ROWS: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Stores the program's part of the hidden rows. Returns how many slots it has read, of weights and of inputs."""
    DTYPE: gl.constexpr = hidden_ptr.dtype.element_ty
    output = gl.arange(0, TILE, gl.SliceLayout(1, ACC))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, ACC))
    zeros = gl.zeros((TILE, ROWS), gl.float32, ACC)
    number = 0
    x_number = 0
    largest = zeros
    for index in range(units):
        first = (gl.program_id(0) + index * gl.num_programs(0)) * TILE
        gate_scales = gl.load(scales_ptr + first + output)
        up_scales = gl.load(scales_ptr + size + first + output)
        gates = zeros
        ups = zeros
        for _ in range(steps):
            slot = number % SLOTS
            next_slot = (number + 1) % SLOTS
            x_slot = x_number % X_SLOTS
            wait_full(x_full, x_number, X_SLOTS)
            wait_full(full, number, SLOTS)
            x = x_ring.index(2 * x_slot).permute((1, 0))
            gate = warpgroup_mma(ring.index(2 * slot), x, zeros, use_acc=False, is_async=True)
            up = warpgroup_mma(ring.index(2 * slot + 1), x, zeros, use_acc=False, is_async=True)
            wait_full(full, number + 1, SLOTS)
            x = x_ring.index(2 * x_slot + 1).permute((1, 0))
            next_gate = warpgroup_mma(ring.index(2 * next_slot), x, zeros, use_acc=False, is_async=True)
            next_up = warpgroup_mma(ring.index(2 * next_slot + 1), x, zeros, use_acc=False, is_async=True)
            gate, up, next_gate, next_up = warpgroup_mma_wait(0, deps=[gate, up, next_gate, next_up])
            mbarrier.arrive(empty.index(slot))
            mbarrier.arrive(empty.index(next_slot))
            mbarrier.arrive(x_empty.index(x_slot))
            gates = gates + gate + next_gate
            ups = ups + up + next_up
            number += 2
            x_number += 1
        gate = (gates * gate_scales[:, None] * row_scales[None, :]).to(DTYPE)
        up = (ups * up_scales[:, None] * row_scales[None, :]).to(DTYPE)
        cells = hidden_ptr + row[None, :].to(gl.int64) * size + (first + output)[:, None]
        hidden = round_silu_mul(gate, up)
        gl.store(cells, hidden, mask=(row < num_rows)[None, :] & (output >= 0)[:, None])
        largest = gl.maximum(largest, gl.abs(hidden.to(gl.float32)))
    bits = gl.max(largest, axis=0).to(gl.int32, bitcast=True)
    gl.atomic_max(most_ptr + row, bits, mask=row < num_rows, sem="relaxed")
    return number, x_number


@gluon.jit
def _multiply(
    ring, full, empty, x_ring, x_full, x_empty, is_hidden, x_scales_ptr, gate_up_scales_ptr, down_scales_ptr,
    hidden_ptr, codes_ptr, most_ptr, partial_ptr, counters_ptr, barriers_ptr, out_ptr,
    scale_stride, units, down_units, steps, down_steps, num_rows, size, num_outputs,
    SPLIT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, SHARES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    output = gl.arange(0, TILE, gl.SliceLayout(1, ACC))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, ACC))
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    if PDL:
        gdc_wait()
    row_scales = gl.load(x_scales_ptr + row * scale_stride, mask=row < num_rows, other=0.0)
    number, x_number = _multiply_gated(
        ring, full, empty, x_ring, x_full, x_empty, row_scales, gate_up_scales_ptr, hidden_ptr, most_ptr, units, steps,
        num_rows, size, ROWS, ACC,
    )  # fmt: skip
    wait_for_all(barriers_ptr, program, programs)
    if program < num_rows * SHARES:
        _quantize(hidden_ptr, codes_ptr, most_ptr, program // SHARES, program % SHARES, size, WIDTH, SHARES)
        fence_copies(row)
    bits = gl.load(most_ptr + row, mask=row < num_rows, other=0, cache_modifier=".cg")
    row_scales = _scale(bits, gl.full((ROWS,), MOST, gl.float32, gl.SliceLayout(0, ACC)))
    wait_for_all(barriers_ptr + 1, program, programs)
    fence_copies(row)
    mbarrier.arrive(is_hidden.index(0))
    if program == 0:
        gl.store(most_ptr + row, 0 * row, mask=row < num_rows)
    zeros = gl.zeros((TILE, ROWS), gl.float32, ACC)
    valid = (row < num_rows)[None, :] & (output >= 0)[:, None]
    for index in range(down_units):
        unit = programs - 1 - program + index * programs
        tile = unit // SPLIT
        part = unit % SPLIT
        scales = gl.load(down_scales_ptr + tile * TILE + output)
        sums = zeros
        for _ in range(down_steps):
            slot = number % SLOTS
            x_slot = x_number % X_SLOTS
            wait_full(full, number, SLOTS)
            wait_full(x_full, x_number, X_SLOTS)
            x = x_ring.index(2 * x_slot).permute((1, 0))
            next_x = x_ring.index(2 * x_slot + 1).permute((1, 0))
            some = warpgroup_mma(ring.index(2 * slot), x, zeros, use_acc=False, is_async=True)
            more = warpgroup_mma(ring.index(2 * slot + 1), next_x, zeros, use_acc=False, is_async=True)
            some, more = warpgroup_mma_wait(0, deps=[some, more])
            mbarrier.arrive(empty.index(slot))
            mbarrier.arrive(x_empty.index(x_slot))
            sums = sums + some + more
            number += 1
            x_number += 1
        launch_next(PDL)
        place = partial_ptr + tile * SPLIT * (TILE * ROWS)
        sums, last = store_part(place, counters_ptr + tile, sums, part, output, row, valid, SPLIT)
        result = sums * scales[:, None] * row_scales[None, :]
        cells = out_ptr + row[None, :].to(gl.int64) * num_outputs + (tile * TILE + output)[:, None]
        gl.store(cells, result.to(out_ptr.dtype.element_ty), mask=valid & last)


@gluon.jit(do_not_specialize=["num_rows"])
def fp8_mlp_kernel(
    x, gate_up, codes, down, x_scales_ptr, gate_up_scales_ptr, down_scales_ptr,
    hidden_ptr, codes_ptr, most_ptr, partial_ptr, counters_ptr, barriers_ptr, out_ptr,
    scale_stride, num_rows, num_inputs, size, num_outputs,
    SPLIT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, SHARES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Programs have tiles of gates and ups from the first program on, and parts of the down projection from the last
    one on: one that has a tile more of the first has fewer of the second. Until all have arrived at the second wait all
    run, so that programs of the next kernel, which start later, take no place that is needed here."""
    HELD: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    ring = gl.allocate_shared_memory(gl.float8e4nv, [2 * SLOTS, TILE, DEPTH], HELD)
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [2 * X_SLOTS, ROWS, DEPTH], HELD)
    full, empty = ring_barriers(SLOTS)
    x_full, x_empty = ring_barriers(X_SLOTS)
    is_hidden = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(is_hidden.index(0), count=1)
    share_barriers()
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    steps = num_inputs // (2 * DEPTH)
    down_steps = size // (2 * DEPTH) // SPLIT
    units = gl.cdiv(size // TILE - program, programs)
    down_units = gl.cdiv(num_outputs // TILE * SPLIT - (programs - 1 - program), programs)
    gl.warp_specialize(
        [
            (_multiply, (
                ring, full, empty, x_ring, x_full, x_empty, is_hidden, x_scales_ptr, gate_up_scales_ptr,
                down_scales_ptr, hidden_ptr, codes_ptr, most_ptr, partial_ptr, counters_ptr, barriers_ptr, out_ptr,
                scale_stride, units, down_units, steps, down_steps, num_rows, size, num_outputs,
                SPLIT, ROWS, WIDTH, SHARES, PDL,
            )),
            (_bring_weights, (
                gate_up, down, ring, full, empty, units, down_units, size, steps, down_steps, SPLIT,
            )),
            (_bring_inputs, (
                x, codes, x_ring, x_full, x_empty, is_hidden, units, down_units, steps, down_steps, SPLIT, ROWS, PDL,
            )),
        ],
        [1, 1],
        [32, 32],
    )  # fmt: skip
