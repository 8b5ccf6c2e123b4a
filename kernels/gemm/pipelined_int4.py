"""Products of up to 8 rows with 4-bit weights (int4_weight.py) that request their first weights before their rows are
ready, in Gluon, with the bits of int4.py.

With so few rows, decoding the weights takes as long as reading them. It needs many warps on each multiprocessor, so
each gets little shared memory and none is set aside for copying: the warps that multiply also copy weights, scales,
zeros and inputs into a ring in shared memory (`cp.async`). They multiply with `mma.sync`, whose sums have the bits of
`wgmma`'s.

Two choices were measured in whole passes on an H200 (docs/log/2026-11-27.md). Before the rows are ready, only one chunk
is requested, since requests slow down the kernel that still runs. And the next kernel may start a few steps early,
which helps attention most.
Letters: M rows, I inputs, O outputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_wait

from slipstream.kernels.gemm.int4_weight import (
    CHUNK,
    PLANE,
    Int4Weight,
    plane,
    unit_inputs,
    unit_words,
    unscaled,
)
from slipstream.kernels.gemm.streamed import launch_next, load_async, store_part, sync
from slipstream.kernels.gemm.streamed_linear import first_rows, load_head_angles, store_halves
from slipstream.kernels.gemm.tiling import Heads, Tiling, own_parts, part_inputs
from slipstream.kernels.grid_sync import done_counters
from slipstream.kernels.kv.rope import Rotation
from slipstream.kernels.launch import pdl_options

MOST_ROWS = 8
ROWS = gl.constexpr(MOST_ROWS)  # of a tile of inputs, as `mma.sync` takes them
DEPTH = gl.constexpr(CHUNK)  # inputs of a step
WORDS = gl.constexpr(PLANE)  # of a step and an output
PLANES = gl.constexpr(CHUNK // PLANE)


class Pipeline(NamedTuple):
    """How a program copies and multiplies."""

    slots: int
    """Steps that the ring holds."""
    warps: int
    outputs: int
    """Rows of the weight; of a gated product half of them are gates, half ups."""
    launch: int
    """How many steps before the end the next kernel may start; 0: after the last step."""


def choose_pipeline(gated: bool, parts: int) -> Pipeline:
    """The fastest on an H200 of those tried. parts: how many a program sums itself."""
    if gated:
        return Pipeline(slots=4, warps=2, outputs=64, launch=4)
    if parts > 1:
        return Pipeline(slots=8 // parts, warps=4, outputs=64, launch=3)
    return Pipeline(slots=3, warps=1, outputs=32, launch=0)


def pipelined_int4_linear(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None,
    tiling: Tiling,
    gated: bool = False,
    rotation: Rotation | None = None,
) -> Tensor:
    """As `int4_linear_triton`."""
    num_rows, num_inputs = x.shape
    all_outputs = len(weight.words)
    device = x.device
    num_outputs = all_outputs // (1 + gated)
    parts = own_parts(MOST_ROWS, num_inputs, tiling)
    split = tiling.split // parts
    pipeline = choose_pipeline(gated, parts)
    heads = Heads.of(rotation, num_outputs, tiling)
    out = torch.empty(num_rows, heads.num_outputs, dtype=x.dtype, device=device)
    partial = torch.empty(all_outputs * split * MOST_ROWS if split > 1 else 0, dtype=torch.float32, device=device)
    pipelined_int4_kernel[(all_outputs // pipeline.outputs, split)](
        x, weight.words, *unit_words(weight), bias, out, partial, done_counters(device),
        num_rows, num_outputs, all_outputs, num_inputs, part_inputs(num_inputs, tiling),
        *heads.arguments[:6], *heads.arguments[7:], D=heads.head_dim, GATED=gated, OUTPUTS=pipeline.outputs,
        UNIT=unit_inputs(weight.group_size), PARTS=parts, SPLIT=split, SLOTS=pipeline.slots, LAUNCH=pipeline.launch,
        num_warps=pipeline.warps, **pdl_options(device),
    )  # fmt: skip
    return out


@gluon.jit
def _allocate(COUNT: gl.constexpr, OUTPUTS: gl.constexpr, PAIRS: gl.constexpr, ZEROS: gl.constexpr, TYPE: gl.constexpr):
    """The rings of words, scales, zeros and inputs, COUNT steps each, without bank conflicts."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = gl.allocate_shared_memory(gl.int32, [COUNT, OUTPUTS, WORDS], gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
    scales = gl.allocate_shared_memory(gl.int32, [COUNT, PAIRS * OUTPUTS], FLAT)
    zeros = scales
    if ZEROS:
        zeros = gl.allocate_shared_memory(gl.int32, [COUNT, PAIRS * OUTPUTS], FLAT)
    x = gl.allocate_shared_memory(TYPE, [COUNT, ROWS, DEPTH], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    return words, scales, zeros, x


@gluon.jit
def _features(place, first_row, other_row, HALF: gl.constexpr):
    """Rows of the weight at the given places of a tile whose halves start at `first_row` and `other_row`."""
    return gl.where(place < HALF, first_row, other_row - HALF) + place


@gluon.jit
def _weight_pointers(
    words_ptr, scales_ptr, zeros_ptr, first_row, other_row, all_outputs, num_inputs,
    OUTPUTS: gl.constexpr, PAIRS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """To a tile's words (OUTPUTS, WORDS), scales and zeros (PAIRS * OUTPUTS,) of the first chunk."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [num_warps, 1], [1, 0])
    COPY_UNITS: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    HALF: gl.constexpr = OUTPUTS // 2
    row = _features(gl.arange(0, OUTPUTS, gl.SliceLayout(1, COPY)), first_row, other_row, HALF)[:, None]
    word = gl.arange(0, WORDS, gl.SliceLayout(0, COPY))[None, :]
    unit = gl.arange(0, PAIRS * OUTPUTS, COPY_UNITS)
    units = _features(unit % OUTPUTS, first_row, other_row, HALF) + unit // OUTPUTS * all_outputs
    zeros = scales_ptr + units
    if zeros_ptr is not None:
        zeros = zeros_ptr + units
    # The stride is written as a multiple of WORDS, so that the compiler knows that 16 bytes can be copied at once.
    return words_ptr + row.to(gl.int64) * (num_inputs // DEPTH * WORDS) + word, scales_ptr + units, zeros


@gluon.jit
def _copy_weights(
    pointers, rings, slot, chunk, part_steps, all_outputs,
    PAIRS: gl.constexpr, PARTS: gl.constexpr, ZEROS: gl.constexpr,
):  # fmt: skip
    """Copies a chunk of each part."""
    for part in gl.static_range(PARTS):
        at = chunk + part * part_steps
        to = slot * PARTS + part
        load_async(rings[0].index(to), pointers[0] + at * WORDS, cache_modifier=".cg")
        load_async(rings[1].index(to), pointers[1] + at * PAIRS * all_outputs)
        if ZEROS:
            load_async(rings[2].index(to), pointers[2] + at * PAIRS * all_outputs)


@gluon.jit
def _copy_inputs(x, inside, rings, slot, chunk, part_steps, PARTS: gl.constexpr):
    for part in gl.static_range(PARTS):
        cells = x + (chunk + part * part_steps) * DEPTH
        to = slot * PARTS + part
        load_async(rings[3].index(to), cells, mask=inside, cache_modifier=".cg")


@gluon.jit
def _fill_ring(
    pointers, x_ptr, rings, first, steps, part_steps, num_rows, num_inputs, all_outputs,
    PAIRS: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr, ZEROS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Requests the inputs of all slots but the last, and their weights but for the first slot's, which are already on
    their way. Returns pointers to the first inputs (ROWS, DEPTH), and a mask (ROWS, 1) of the rows that exist."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [num_warps, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, COPY))[:, None]
    x = x_ptr + row * num_inputs + gl.arange(0, DEPTH, gl.SliceLayout(0, COPY))[None, :]
    for slot in gl.static_range(SLOTS - 1):
        if slot < steps:
            if slot > 0:
                _copy_weights(pointers, rings, slot, first + slot, part_steps, all_outputs, PAIRS, PARTS, ZEROS)
            _copy_inputs(x, row < num_rows, rings, slot, first + slot, part_steps, PARTS)
        async_copy.commit_group()
    return x, row < num_rows


@gluon.jit
def _load_units(ring, OUTPUTS: gl.constexpr, PAIRS: gl.constexpr, LAYOUT: gl.constexpr):
    scales = ()
    for pair in gl.static_range(PAIRS):
        units = ring.slice(pair * OUTPUTS, OUTPUTS, 0).load(gl.SliceLayout(1, LAYOUT))
        scales = scales + (gl.expand_dims(units, 1),)  # type: ignore[assignment]
    return scales


@gluon.jit
def _add_products(
    accs, rings, slot, OUTPUTS: gl.constexpr, UNIT: gl.constexpr, PARTS: gl.constexpr, ZEROS: gl.constexpr,
    TYPE: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """The sums (OUTPUTS, ROWS) of each part, with a step added."""
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    PAIRS: gl.constexpr = DEPTH // UNIT // 2
    sums = ()
    for part in gl.static_range(PARTS):
        at = slot * PARTS + part
        acc = accs[part]
        zeros = ()
        words = rings[0].index(at).load(A)
        scales = _load_units(rings[1].index(at), OUTPUTS, PAIRS, A)
        if ZEROS:
            zeros = _load_units(rings[2].index(at), OUTPUTS, PAIRS, A)
        x = rings[3].index(at)
        for place in gl.static_range(PLANES):
            weight = plane(words, scales, zeros, place, UNIT, TYPE, True)
            acc = mma_v2(weight, x.slice(place * WORDS, WORDS, 1).permute((1, 0)).load(B), acc)
        sums = sums + (acc,)  # type: ignore[assignment]
    return sums


@gluon.jit
def _sum_steps(
    pointers, x, inside, rings, first, steps, part_steps, all_outputs,
    OUTPUTS: gl.constexpr, UNIT: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr, LAUNCH: gl.constexpr,
    ZEROS: gl.constexpr, PDL: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """The sums (OUTPUTS, ROWS) over all steps, those of the parts added in order."""
    PAIRS: gl.constexpr = DEPTH // UNIT // 2
    TYPE: gl.constexpr = x.dtype.element_ty
    accs = ()
    for _ in gl.static_range(PARTS):
        accs = accs + (gl.zeros((OUTPUTS, ROWS), gl.float32, ACC),)  # type: ignore[assignment]
    for number in range(steps):
        async_copy.wait_group(SLOTS - 2)
        sync()
        following = number + SLOTS - 1
        if following < steps:
            to = following % SLOTS
            chunk = first + following
            _copy_weights(pointers, rings, to, chunk, part_steps, all_outputs, PAIRS, PARTS, ZEROS)
            _copy_inputs(x, inside, rings, to, chunk, part_steps, PARTS)
        async_copy.commit_group()
        if number == gl.maximum(steps - LAUNCH, 0):
            launch_next(PDL)
        accs = _add_products(accs, rings, number % SLOTS, OUTPUTS, UNIT, PARTS, ZEROS, TYPE, ACC)
    if LAUNCH == 0:
        launch_next(PDL)
    sums = unscaled(accs[0], TYPE, True)  # type: ignore[misc]
    for part in gl.static_range(1, PARTS):
        sums += unscaled(accs[part], TYPE, True)
    return sums


@gluon.jit(do_not_specialize=["num_rows"])
def pipelined_int4_kernel(
    x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, partial_ptr, counters_ptr,
    num_rows, num_outputs, all_outputs, num_inputs, part_size,
    cos_ptr, sin_ptr, positions_ptr, slots_ptr, keys_ptr, values_ptr, Q, G,
    D: gl.constexpr, GATED: gl.constexpr, OUTPUTS: gl.constexpr, UNIT: gl.constexpr, PARTS: gl.constexpr,
    SPLIT: gl.constexpr, SLOTS: gl.constexpr, LAUNCH: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """OUTPUTS features (axis 0) of all rows from PARTS parts of the inputs, or from one of SPLIT parts (axis 1). The
    halves of a tile are gates and their ups, or dims of a head and those they are rotated with."""
    HALF: gl.constexpr = OUTPUTS // 2
    ZEROS: gl.constexpr = zeros_ptr is not None
    PAIRS: gl.constexpr = DEPTH // UNIT // 2  # of units, in a chunk
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1], [16, 8])
    OUT: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, num_warps, 1], [2, 0, 1])  # one of each half
    rings = _allocate(SLOTS * PARTS, OUTPUTS, PAIRS, ZEROS, x_ptr.dtype.element_ty)
    tile = gl.program_id(0)
    part_steps = part_size // DEPTH
    first = gl.program_id(1) * part_steps
    steps = gl.minimum(part_steps, num_inputs // DEPTH - first)
    first_row, other_row = first_rows(tile, num_outputs, D, OUTPUTS, GATED)
    pointers = _weight_pointers(
        words_ptr, scales_ptr, zeros_ptr, first_row, other_row, all_outputs, num_inputs, OUTPUTS, PAIRS, num_warps
    )
    _copy_weights(pointers, rings, 0, first, part_steps, all_outputs, PAIRS, PARTS, ZEROS)
    place = gl.arange(0, OUTPUTS, gl.SliceLayout(1, ACC))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, ACC))
    outputs = _features(place, first_row, other_row, HALF)
    bias = None
    if bias_ptr is not None:  # before the wait, since no kernel writes it
        bias = gl.load(bias_ptr + outputs).to(gl.float32)
    if PDL:
        gdc_wait()
    x, is_row = _fill_ring(
        pointers, x_ptr, rings, first, steps, part_steps, num_rows, num_inputs, all_outputs,
        PAIRS, PARTS, SLOTS, ZEROS, num_warps,
    )  # fmt: skip
    head_row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, OUT)))
    first_dim = 0
    if D > 0:
        first_dim = tile % (D // OUTPUTS) * HALF
    dim = first_dim + gl.arange(0, HALF, gl.SliceLayout(1, gl.SliceLayout(2, OUT)))
    angles = load_head_angles(cos_ptr, sin_ptr, positions_ptr, slots_ptr, dim, head_row, head_row < num_rows, D)
    sums = _sum_steps(
        pointers, x, is_row, rings, first, steps, part_steps, all_outputs,
        OUTPUTS, UNIT, PARTS, SLOTS, LAUNCH, ZEROS, PDL, ACC,
    )  # fmt: skip
    valid = (row < num_rows)[None, :] & (place >= 0)[:, None]
    last = num_rows > 0
    if SPLIT > 1:
        parts = partial_ptr + tile * SPLIT * (OUTPUTS * ROWS)
        sums, last = store_part(parts, counters_ptr + tile, sums, gl.program_id(1), place, row, valid, SPLIT)
    if bias is not None:
        sums += bias[:, None]
    rounded = sums.to(out_ptr.dtype.element_ty)
    if GATED or D > 0:
        store_halves(
            rounded, angles, dim, head_row, (head_row < num_rows) & last, tile, out_ptr, num_outputs, keys_ptr,
            values_ptr, Q, G, D, False, OUT,
        )  # fmt: skip
    else:
        gl.store(out_ptr + row[None, :] * num_outputs + outputs[:, None], rounded, mask=valid & last)
