"""Products of few rows that request their weights before their rows are ready, in Gluon (streamed.py).

Usually a product of few rows waits for the kernel before it, and memory idles meanwhile. Here a program requests the
first 128 KB of its weights as soon as it is scheduled and finds them in shared memory when its rows are ready; for the
output projection of an 8B Llama that is all of them. Prefetching them to the L2 cache does not help as much: most of
what is prefetched lands in the half that is far from the multiprocessor, from where it comes hardly faster than from
memory.

Where inputs are summed in parts, a program takes fewer outputs and sums all of their parts itself, so that none waits
for others. A tile then holds the weights of its outputs once for each part, and the inputs of all parts lie side by
side; of the products, those of matching parts are added in the order of the parts.

Weights have 16 bits, or are FP8 as in fp8.py. Inputs are cut into the parts, and added in the order, of small_m.py and
fp8.py, so results have the same bits. Scales of blocks are read while the tensor cores multiply two blocks. Heads may
be rotated and stored, and gates multiplied with ups, as by the kernels there.
Letters: M rows, I inputs, O outputs.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from slipstream.kernels.gemm.activation import Activation
from slipstream.kernels.gemm.leaves import end_leaf, end_tree, new_branches
from slipstream.kernels.gemm.small_m import round_activation_mul
from slipstream.kernels.gemm.streamed import (
    MOST_REGISTERS,
    launch_next,
    load_tile,
    programs_of,
    ring_barriers,
    share_barriers,
    store_part,
    tile_rows,
    tiles_of,
    wait_empty,
    wait_full,
    wait_paced,
)
from slipstream.kernels.gemm.tiling import Heads, Tiling, own_parts, part_inputs
from slipstream.kernels.grid_sync import done_counters
from slipstream.kernels.kv.rope import Rotation
from slipstream.kernels.launch import pdl_options

BYTES = gl.constexpr(128)  # of a row of a tile
TILE = gl.constexpr(64)  # rows of weights of a tile: outputs, once for each part that a program adds up
SLOTS = 8  # of the ring of weights, of two tiles each; half as many are of inputs
FEW_SLOTS = 4  # of gates and ups of which a multiprocessor has two programs
PACE = gl.constexpr(4)  # slots of weights that are on their way at once, at first
HEADS_LAUNCH = 4  # steps before queries, keys and values are complete: the attention kernel may start
EARLY_LAUNCH = -1  # not by the steps: only when the kernel before has ended


def streamed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tiling: Tiling,
    dtype: torch.dtype,
    scales: tuple[Tensor, Tensor] | None = None,
    rotation: Rotation | None = None,
    activation: Activation | None = None,
    *,
    is_early: bool = False,
) -> Tensor:
    """x (M, I) @ weight (O, I).T + bias (O,) -> (M, O) in `dtype`; `scales` of FP8: of rows (M,) and outputs (O,), or
    of blocks (B, M) and (ceil O / 128, B).
    A tiling with leaves cuts the inputs into two parts at most.
    With a `rotation` the queries (M, Q * D) as `linear_few_rows_triton` gives them; with an `activation` of 16 bits
    (M, O / 2), and `is_early`, as `gated_linear_few_rows_triton`."""
    num_rows, num_inputs = x.shape
    gated = activation is not None
    num_outputs = len(weight) // (1 + gated)
    device = weight.device
    depth = BYTES.value // weight.element_size()
    rows = tile_rows(num_rows)
    parts = own_parts(rows, num_inputs, tiling)
    split = tiling.split // parts
    assert tiling.leaves == 0 or tiling.split <= 2  # sums of two are a tree
    outputs = TILE.value // parts
    heads = Heads.of(rotation, num_outputs, tiling)
    out = torch.empty(num_rows, heads.num_outputs, dtype=dtype, device=device)
    partial = torch.empty(num_outputs * split * rows if split > 1 else 0, dtype=torch.float32, device=device)
    x_scales, output_scales = scales or (None, None)
    tiles = len(weight) // outputs
    slots = FEW_SLOTS if gated and tiles > programs_of(device) else SLOTS
    arguments: tuple[Any, ...] = (*heads.arguments[:6], *heads.arguments[7:])
    streamed_linear_kernel[(tiles, split)](
        tiles_of(x, [rows, depth]), tiles_of(weight, [outputs // 2 if gated or heads.head_dim else outputs, depth]),
        x_scales, output_scales, bias, out, partial, done_counters(device),
        0 if x_scales is None else x_scales.stride(-1), 0 if x_scales is None else x_scales.stride(0),
        0 if output_scales is None else output_scales.stride(0), num_rows, num_outputs, num_inputs,
        part_inputs(num_inputs, tiling), *arguments, D=heads.head_dim,
        ROWS=rows, DEPTH=depth, PARTS=parts, SPLIT=split, LEVELS=tiling.levels,
        BLOCKS=output_scales is not None and output_scales.dim() == 2,
        LAUNCH=EARLY_LAUNCH if is_early else HEADS_LAUNCH if heads.head_dim else 0,
        GATED=gated, GELU=activation == "gelu_tanh", EARLY=is_early, SLOTS=slots,
        num_warps=4, maxnreg=MOST_REGISTERS, **pdl_options(device),
    )  # fmt: skip
    return out


@gluon.jit
def first_rows(tile, num_outputs, D: gl.constexpr, OUTPUTS: gl.constexpr, GATED: gl.constexpr):
    """The first rows of both halves of a tile: with heads of D dims those of `head_outputs` (kernels/kv/rope.py), GATED
    of gates and of their ups."""
    row = tile * OUTPUTS
    other = tile * OUTPUTS + OUTPUTS // 2
    if GATED:
        row = tile * (OUTPUTS // 2)
        other = num_outputs + row
    if D > 0:
        TILES: gl.constexpr = D // OUTPUTS
        row = tile // TILES * D + tile % TILES * (OUTPUTS // 2)
        other = row + D // 2
    return row, other


@gluon.jit
def load_weights(weights, tile, row, other, column, part_size, bar, HALVES: gl.constexpr, PARTS: gl.constexpr):
    """Asks for a tile: from `column` on for each part the weights of its outputs, in HALVES or in one piece."""
    OUTPUTS: gl.constexpr = TILE // PARTS
    for part in gl.static_range(PARTS):
        at = column + part * part_size
        if HALVES:
            load_tile(weights, [row, at], bar, tile.slice(part * OUTPUTS, OUTPUTS // 2, 0))
            load_tile(weights, [other, at], bar, tile.slice(part * OUTPUTS + OUTPUTS // 2, OUTPUTS // 2, 0))
        else:
            load_tile(weights, [row, at], bar, tile.slice(part * OUTPUTS, OUTPUTS, 0))


@gluon.jit
def _bring_weights(
    weights, ring, full, empty, first, part_size, steps, num_outputs,
    D: gl.constexpr, DEPTH: gl.constexpr, PARTS: gl.constexpr, GATED: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = GATED or D > 0
    row, other = first_rows(gl.program_id(0), num_outputs, D, TILE // PARTS, GATED)
    for number in range(steps):
        wait_paced(full, empty, number, PACE, SLOTS)
        slot = number % SLOTS
        column = first + 2 * number * DEPTH
        bar = full.index(slot)
        mbarrier.expect(bar, 2 * TILE * BYTES)
        load_weights(weights, ring.index(2 * slot), row, other, column, part_size, bar, HALVES, PARTS)
        load_weights(weights, ring.index(2 * slot + 1), row, other, column + DEPTH, part_size, bar, HALVES, PARTS)


@gluon.jit
def load_inputs(x, tile, row, column, part_size, bar, ROWS: gl.constexpr, PARTS: gl.constexpr):
    for part in gl.static_range(PARTS):
        load_tile(x, [row, column + part * part_size], bar, tile.slice(part * ROWS, ROWS, 0))


@gluon.jit
def _bring_inputs(
    x, ring, full, empty, first, part_size, steps,
    ROWS: gl.constexpr, DEPTH: gl.constexpr, PARTS: gl.constexpr, X_SLOTS: gl.constexpr, WAITS: gl.constexpr,
):  # fmt: skip
    if WAITS:
        gdc_wait()
    for number in range(steps):
        wait_empty(empty, number, X_SLOTS)
        slot = number % X_SLOTS
        column = first + 2 * number * DEPTH
        bar = full.index(slot)
        mbarrier.expect(bar, 2 * PARTS * ROWS * BYTES)
        load_inputs(x, ring.index(2 * slot), 0, column, part_size, bar, ROWS, PARTS)
        load_inputs(x, ring.index(2 * slot + 1), 0, column + DEPTH, part_size, bar, ROWS, PARTS)


@gluon.jit
def _add_products(
    ring, full, empty, x_ring, x_full, x_empty, steps, scales, x_scales, block_stride,
    COLUMNS: gl.constexpr, LEVELS: gl.constexpr, IS_FP8: gl.constexpr, BLOCKS: gl.constexpr, LAUNCH: gl.constexpr,
    SLOTS: gl.constexpr, PDL: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Sums (TILE, COLUMNS), of 2 ** LEVELS leaves along a tree. In FP8 every DEPTH inputs are added in the tensor cores
    alone, then to a sum in fp32, BLOCKS times scales: those of the first block are at `scales` (TILE,) and `x_scales`
    (COLUMNS,). The next kernel may start LAUNCH steps before the end; 0: after the last; below: not from here."""
    X_SLOTS: gl.constexpr = SLOTS // 2
    zeros = gl.zeros((TILE, COLUMNS), gl.float32, ACC)
    sums = zeros
    branches = new_branches(zeros, LEVELS)
    leaf_steps = steps >> LEVELS
    for number in range(steps):
        slot = number % SLOTS
        x_slot = number % X_SLOTS
        if BLOCKS:  # read while the tensor cores multiply
            block = 2 * number
            scale = gl.load(scales + block)
            next_scale = gl.load(scales + block + 1)
            x_scale = gl.load(x_scales + block * block_stride)
            next_x_scale = gl.load(x_scales + (block + 1) * block_stride)
        wait_full(full, number, SLOTS)
        wait_full(x_full, number, X_SLOTS)
        if number == gl.maximum(steps - LAUNCH, 0):
            launch_next(PDL)
        x = x_ring.index(2 * x_slot).permute((1, 0))
        next_x = x_ring.index(2 * x_slot + 1).permute((1, 0))
        if IS_FP8:
            some = warpgroup_mma(ring.index(2 * slot), x, zeros, use_acc=False, is_async=True)
            more = warpgroup_mma(ring.index(2 * slot + 1), next_x, zeros, use_acc=False, is_async=True)
            some, more = warpgroup_mma_wait(0, deps=[some, more])
            if BLOCKS:
                sums = gl.fma(some, scale[:, None] * x_scale[None, :], sums)
                sums = gl.fma(more, next_scale[:, None] * next_x_scale[None, :], sums)
            else:
                sums = sums + some + more
        else:
            sums = warpgroup_mma(ring.index(2 * slot), x, sums, is_async=True)
            sums = warpgroup_mma(ring.index(2 * slot + 1), next_x, sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index(slot))
        mbarrier.arrive(x_empty.index(x_slot))
        if LEVELS > 0:  # noqa: SIM102
            if ((number + 1) % leaf_steps == 0) & (number + 1 < steps):
                branches = end_leaf(sums, branches, (number + 1) // leaf_steps - 1, LEVELS)
                sums = zeros
    if LAUNCH == 0:
        launch_next(PDL)
    return end_tree(sums, branches, LEVELS)


@gluon.jit
def add_parts(sums, ROWS: gl.constexpr, PARTS: gl.constexpr, LAYOUT: gl.constexpr):
    """Adds in order the sums whose weights and inputs belong to the same part, of sums (TILE, PARTS * ROWS) of each
    part's weights by each part's inputs: (TILE / PARTS, ROWS)."""
    if PARTS > 1:
        OUTPUTS: gl.constexpr = TILE // PARTS
        CELLS: gl.constexpr = LAYOUT.parent
        pairs = gl.permute(gl.reshape(sums, [PARTS, OUTPUTS, PARTS, ROWS]), (1, 3, 0, 2))
        pairs = gl.convert_layout(gl.reshape(pairs, [OUTPUTS, ROWS, PARTS * PARTS]), CELLS)
        pair = gl.arange(0, PARTS * PARTS, gl.SliceLayout(0, gl.SliceLayout(1, CELLS)))[None, None, :]
        total = gl.zeros((OUTPUTS, ROWS), gl.float32, LAYOUT)
        for part in gl.static_range(PARTS):
            total += gl.sum(gl.where(pair == part * (PARTS + 1), pairs, 0.0), axis=2)
        sums = total
    return sums


@gluon.jit
def load_head_angles(cos_ptr, sin_ptr, positions_ptr, slots_ptr, dim, row, inside, D: gl.constexpr):
    """cos, sin (dims, ROWS) and slots (ROWS,); of no heads none."""
    angles = ()
    if D > 0:
        angle = gl.load(positions_ptr + row, mask=inside, other=0)[None, :] * D + dim[:, None]
        slot = gl.load(slots_ptr + row, mask=inside, other=0)
        angles = gl.load(cos_ptr + angle), gl.load(sin_ptr + angle), slot  # type: ignore[assignment]
    return angles


@gluon.jit
def split_halves(tile, LAYOUT: gl.constexpr):
    """The two halves (OUTPUTS / 2, ROWS) of a tile (OUTPUTS, ROWS)."""
    halves = gl.permute(gl.reshape(tile, [2, tile.shape[0] // 2, tile.shape[1]]), (1, 2, 0))
    return gl.split(gl.convert_layout(halves, LAYOUT))


@gluon.jit
def store_head_tile(
    rounded, angles, dim, row, inside, tile, out_ptr, keys_ptr, values_ptr, Q, G, D: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """`store_heads` of kernels/kv/rope.py of rounded (OUTPUTS, ROWS) in fp32."""
    OUTPUTS: gl.constexpr = rounded.shape[0]
    cos, sin, slot = angles
    first, second = split_halves(rounded, LAYOUT)
    turned = gl.fma(first, cos, -(second * sin))
    other_turned = gl.fma(second, cos, first * sin)
    head = tile // (D // OUTPUTS)
    mask = inside[None, :] & (dim >= 0)[:, None]
    if head < Q:
        cells = out_ptr + (row[None, :].to(gl.int64) * Q + head) * D + dim[:, None]
        gl.store(cells, turned.to(cells.dtype.element_ty), mask=mask)
        gl.store(cells + D // 2, other_turned.to(cells.dtype.element_ty), mask=mask)
    else:
        place = (slot[None, :] * G + (head - Q) % G) * D + dim[:, None]
        if head < Q + G:
            gl.store(keys_ptr + place, turned.to(keys_ptr.dtype.element_ty), mask=mask)
            gl.store(keys_ptr + place + D // 2, other_turned.to(keys_ptr.dtype.element_ty), mask=mask)
        else:
            gl.store(values_ptr + place, first.to(values_ptr.dtype.element_ty), mask=mask)
            gl.store(values_ptr + place + D // 2, second.to(values_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def store_halves(
    rounded, angles, dim, row, inside, tile, out_ptr, num_outputs, keys_ptr, values_ptr, Q, G,
    D: gl.constexpr, GELU: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Stores a tile (OUTPUTS, ROWS) whose halves belong together: dims of a head, or gates and ups."""
    if D > 0:
        store_head_tile(
            rounded.to(gl.float32), angles, dim, row, inside, tile, out_ptr, keys_ptr, values_ptr, Q, G, D, LAYOUT
        )
    else:
        gate, up = split_halves(rounded, LAYOUT)
        cells = out_ptr + row[None, :] * num_outputs + (tile * (rounded.shape[0] // 2) + dim)[:, None]
        gl.store(cells, round_activation_mul(gate, up, GELU), mask=inside[None, :] & (dim >= 0)[:, None])


@gluon.jit
def _multiply(
    ring, full, empty, x_ring, x_full, x_empty, x_scales_ptr, scales_ptr, bias_ptr, out_ptr, partial_ptr, counters_ptr,
    scale_stride, block_stride, output_stride, num_rows, num_outputs, first, part_size, steps,
    cos_ptr, sin_ptr, positions_ptr, slots_ptr, keys_ptr, values_ptr, Q, G,
    D: gl.constexpr, ROWS: gl.constexpr, DEPTH: gl.constexpr, PARTS: gl.constexpr, SPLIT: gl.constexpr,
    LEVELS: gl.constexpr, BLOCKS: gl.constexpr, LAUNCH: gl.constexpr, GATED: gl.constexpr, GELU: gl.constexpr,
    EARLY: gl.constexpr, SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    IS_FP8: gl.constexpr = scales_ptr is not None
    BY_ROW: gl.constexpr = IS_FP8 and not BLOCKS
    OUTPUTS: gl.constexpr = TILE // PARTS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PARTS * ROWS, 32 if IS_FP8 else 16])
    CELLS: gl.constexpr = gl.BlockedLayout([1, 1, PARTS * PARTS], [32, 1, 1], [1, 4, 1], [2, 0, 1])
    OUT: gl.constexpr = ACC if PARTS == 1 else gl.SliceLayout(2, CELLS)
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, 4, 1], [2, 0, 1])  # of both halves
    tile = gl.program_id(0)
    place = gl.arange(0, OUTPUTS, gl.SliceLayout(1, OUT))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, OUT))
    head_row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, PAIRS)))
    first_dim = 0
    first_row, other_row = first_rows(tile, num_outputs, D, OUTPUTS, GATED)
    outputs = gl.where(place < OUTPUTS // 2, first_row, other_row - OUTPUTS // 2) + place
    # Loads data that no kernel writes before the wait: after the products the loads would take time.
    scales = None
    bias = None
    row_scales = None
    block_scales = None
    if BY_ROW:
        scales = gl.load(scales_ptr + outputs)
    elif BLOCKS:
        place_of_part = gl.arange(0, TILE, gl.SliceLayout(1, ACC))
        output = place_of_part % OUTPUTS
        output += gl.where(output < OUTPUTS // 2, first_row, other_row - OUTPUTS // 2)
        start = (first + place_of_part // OUTPUTS * part_size) // DEPTH
        block_scales = scales_ptr + output // DEPTH * output_stride + start
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + outputs).to(gl.float32)
    if PDL and not EARLY:
        gdc_wait()
    x_block_scales = None
    if BY_ROW:
        row_scales = gl.load(x_scales_ptr + row * scale_stride, mask=row < num_rows, other=0.0)
    elif BLOCKS:
        column = gl.arange(0, PARTS * ROWS, gl.SliceLayout(0, ACC))
        start = (first + column // ROWS * part_size) // DEPTH
        # Rows beyond the last are zeros: any scale does.
        x_block_scales = x_scales_ptr + gl.minimum(column % ROWS, num_rows - 1) * scale_stride + start * block_stride
    if D > 0:
        first_dim = tile % (D // OUTPUTS) * (OUTPUTS // 2)
    dim = first_dim + gl.arange(0, OUTPUTS // 2, gl.SliceLayout(1, gl.SliceLayout(2, PAIRS)))
    angles = load_head_angles(cos_ptr, sin_ptr, positions_ptr, slots_ptr, dim, head_row, head_row < num_rows, D)
    sums = _add_products(
        ring, full, empty, x_ring, x_full, x_empty, steps, block_scales, x_block_scales, block_stride,
        PARTS * ROWS, LEVELS, IS_FP8, BLOCKS, LAUNCH, SLOTS, PDL, ACC,
    )  # fmt: skip
    if PDL and EARLY:  # the memory of `out` may have been read by the kernel before
        gdc_wait()
        launch_next(PDL)
    sums = add_parts(sums, ROWS, PARTS, OUT)
    valid = (row < num_rows)[None, :] & (place >= 0)[:, None]
    last = num_rows > 0
    if SPLIT > 1:
        parts = partial_ptr + tile * SPLIT * (TILE * ROWS)
        sums, last = store_part(parts, counters_ptr + tile, sums, gl.program_id(1), place, row, valid, SPLIT)
    if BY_ROW:
        # In the order of the library.
        sums = sums * scales[:, None] * row_scales[None, :]  # type: ignore[index]
    if bias is not None:
        sums += bias[:, None]
    rounded = sums.to(out_ptr.dtype.element_ty)
    if GATED or D > 0:
        store_halves(
            rounded, angles, dim, head_row, (head_row < num_rows) & last, tile, out_ptr, num_outputs, keys_ptr,
            values_ptr, Q, G, D, GELU, PAIRS,
        )  # fmt: skip
    else:
        gl.store(out_ptr + row[None, :] * num_outputs + outputs[:, None], rounded, mask=valid & last)


@gluon.jit(do_not_specialize=["num_rows"])
def streamed_linear_kernel(
    x, weights, x_scales_ptr, scales_ptr, bias_ptr, out_ptr, partial_ptr, counters_ptr,
    scale_stride, block_stride, output_stride, num_rows, num_outputs, num_inputs, part_size,
    cos_ptr, sin_ptr, positions_ptr, slots_ptr, keys_ptr, values_ptr, Q, G,
    D: gl.constexpr, ROWS: gl.constexpr, DEPTH: gl.constexpr, PARTS: gl.constexpr, SPLIT: gl.constexpr,
    LEVELS: gl.constexpr, BLOCKS: gl.constexpr, LAUNCH: gl.constexpr, GATED: gl.constexpr, GELU: gl.constexpr,
    EARLY: gl.constexpr, SLOTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """TILE / PARTS features (axis 0) of all rows from PARTS parts of the inputs, or one of SPLIT parts (axis 1). With
    heads of D dims these are rotated and stored. GATED: half of the features are gates, half their ups. EARLY: the
    rows are older than the kernel before."""
    X_SLOTS: gl.constexpr = SLOTS // 2
    HELD: gl.constexpr = gl.NVMMASharedLayout(128, weights.dtype.primitive_bitwidth, 2)
    ring = gl.allocate_shared_memory(weights.dtype, [2 * SLOTS, TILE, DEPTH], HELD)
    x_ring = gl.allocate_shared_memory(x.dtype, [2 * X_SLOTS, PARTS * ROWS, DEPTH], HELD)
    full, empty = ring_barriers(SLOTS)
    x_full, x_empty = ring_barriers(X_SLOTS)
    share_barriers()
    WAITS: gl.constexpr = PDL and not EARLY
    first = gl.program_id(1) * part_size
    steps = gl.cdiv(gl.minimum(part_size, num_inputs - first), 2 * DEPTH)
    gl.warp_specialize(
        [
            (_multiply, (
                ring, full, empty, x_ring, x_full, x_empty, x_scales_ptr, scales_ptr, bias_ptr, out_ptr, partial_ptr,
                counters_ptr, scale_stride, block_stride, output_stride, num_rows, num_outputs, first, part_size, steps,
                cos_ptr, sin_ptr, positions_ptr, slots_ptr, keys_ptr, values_ptr, Q, G,
                D, ROWS, DEPTH, PARTS, SPLIT, LEVELS, BLOCKS, LAUNCH, GATED, GELU, EARLY, SLOTS, PDL,
            )),
            (_bring_weights, (
                weights, ring, full, empty, first, part_size, steps, num_outputs, D, DEPTH, PARTS, GATED, SLOTS,
            )),
            (_bring_inputs, (x, x_ring, x_full, x_empty, first, part_size, steps, ROWS, DEPTH, PARTS, X_SLOTS, WAITS)),
        ],
        [1, 1],
        [32, 32],
    )  # fmt: skip
