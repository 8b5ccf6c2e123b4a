"""FP8 experts of many tokens: their products in tiles that a prompt's blocks of pairs fill.

Rows have the bits that the kernels of few tokens give them (kernels/gemm/grouped.py), but are the left operand. Their
scales by block then take two registers of a thread instead of 32, and the weights' are one number of a tile's half, so
a tile has room for twice the outputs, and codes are read half as often. The gated product's tiles are the next one's
blocks of inputs, so it quantises what it stores.
Letters: T tokens, H hidden, E experts, I intermediate, P pairs of a token and an expert, N rows of all blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.kernels.gemm import fp8
from slipstream.kernels.gemm.expert_weights import FP8Weight, pointers
from slipstream.kernels.gemm.fp8 import BLOCK, E4M3, InputScales, QuantizedRows, scale_blocks
from slipstream.kernels.gemm.router import Blocks
from slipstream.kernels.launch import pdl_options, wait_for_inputs

ROWS = 128  # of a tile
GATED_OUTPUTS = 128  # gates of a tile, and ups: inputs of the next product that share a scale
HALF = 64  # of a down projection's outputs: two programs on a multiprocessor are faster than one with twice as many
STAGES = 3
WARPS = 8
DOWN_REGISTERS = 128  # of a thread, so that a multiprocessor has room for two programs
DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def expert_outputs(x: QuantizedRows, blocks: Blocks, gate_up: FP8Weight, down: FP8Weight, top_k: int) -> Tensor:
    """x (T, H) -> (P, H): what each pair's expert makes of its token."""
    num_rows, size = x.codes.shape
    hidden = multiply_gated(x, blocks, gate_up, down.inputs, top_k)
    intermediate = hidden.codes.shape[1]
    device = x.codes.device
    outputs = torch.empty(num_rows * top_k, size, dtype=x.dtype, device=device)
    weights, scales, _ = pointers(down)
    down_kernel[(len(blocks.first) * (size // (2 * HALF)),)](
        TensorDescriptor.from_tensor(hidden.codes, [ROWS, BLOCK]), hidden.scales, *fp8.scale_strides(hidden.scales),
        TensorDescriptor.from_tensor(weights.view(-1, intermediate), [HALF, BLOCK]), scales, outputs,
        *blocks[1:], num_rows, intermediate, size,
        ROWS=ROWS, HALF=HALF, DEPTH=BLOCK, BY_BLOCK=down.inputs.by_block, STAGES=STAGES, num_warps=WARPS,
        maxnreg=None if down.inputs.by_block else DOWN_REGISTERS,  # by block ptxas needs no more; told so, it spills
        **pdl_options(device),
    )  # fmt: skip
    return outputs


def multiply_gated(
    x: QuantizedRows, blocks: Blocks, gate_up: FP8Weight, inputs: InputScales, top_k: int
) -> QuantizedRows:
    """x (T, H) -> silu(gate) * up (N, I), block by block. `inputs`: how the next product's are scaled."""
    num_rows, size = x.codes.shape
    num_hidden = len(blocks.first) * ROWS
    device = x.codes.device
    weights, weight_scales, _ = pointers(gate_up)
    intermediate = weights.shape[1] // 2
    hidden = torch.empty(num_hidden, intermediate, dtype=E4M3 if inputs.by_block else x.dtype, device=device)
    scales = torch.empty(intermediate // BLOCK, num_hidden, device=device) if inputs.by_block else None
    gated_kernel[(len(blocks.first) * (intermediate // GATED_OUTPUTS),)](
        x.codes, x.codes.stride(0), x.scales, *fp8.scale_strides(x.scales),
        TensorDescriptor.from_tensor(weights.view(-1, size), [GATED_OUTPUTS, BLOCK]), weight_scales, hidden, scales,
        num_hidden, *blocks[1:], num_rows, size, intermediate,
        TOP_K=top_k, ROWS=ROWS, HALF=GATED_OUTPUTS, DEPTH=BLOCK, BY_BLOCK=gate_up.inputs.by_block,
        DTYPE=DTYPES[x.dtype], STAGES=STAGES, num_warps=WARPS, **pdl_options(device),
    )  # fmt: skip
    return fp8.quantize_rows(hidden, inputs) if scales is None else QuantizedRows(hidden, scales, x.dtype)


@triton.jit(do_not_specialize=["num_rows", "block_stride", "hidden_stride"])
def gated_kernel(
    x_ptr, x_stride, x_scale_ptr, block_stride, row_stride, weight_desc, scale_ptr, hidden_ptr, hidden_scale_ptr,
    hidden_stride, pairs_ptr, first_ptr, sizes_ptr, num_blocks_ptr, num_rows, num_inputs, size,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, DEPTH: tl.constexpr, BY_BLOCK: tl.constexpr,
    DTYPE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HALF gates and the ups beside them of a block's rows. weight_desc: (E * 2 * size, num_inputs)."""
    wait_for_inputs(PDL)
    tiles = size // HALF
    place = tl.arange(0, ROWS)
    block = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    if block >= tl.load(num_blocks_ptr):
        return
    first = tl.load(first_ptr + block)
    count = tl.load(sizes_ptr + block)
    expert = first // num_rows
    row = tl.load(pairs_ptr + first + tl.minimum(place, count - 1)) // TOP_K
    rows = x_ptr + row.to(tl.int64)[:, None] * x_stride + tl.arange(0, DEPTH)[None, :]
    output = tile * HALF
    blocks = num_inputs // DEPTH
    gate_scales = scale_ptr + (expert * (2 * size // DEPTH) + output // DEPTH) * blocks
    x_scales = x_scale_ptr + row * row_stride
    weight = expert * 2 * size + output
    gate, up = _multiply_halves(
        rows, None, 0, x_scales, block_stride, weight_desc, weight, size, gate_scales,
        gate_scales + size // DEPTH * blocks, blocks, ROWS, HALF, DEPTH, BY_BLOCK, STAGES,
    )  # fmt: skip
    if not BY_BLOCK:
        gate = _scale(gate, x_scales, scale_ptr + weight)
        up = _scale(up, x_scales, scale_ptr + weight + size)
    gate = gate.to(DTYPE).to(tl.float32)
    up = up.to(DTYPE).to(tl.float32)
    gated = ((gate / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32) * up).to(DTYPE)
    row = block * ROWS + place
    cells = hidden_ptr + row.to(tl.int64)[:, None] * size + tile * HALF + tl.arange(0, HALF)[None, :]
    if hidden_scale_ptr is None:
        tl.store(cells, gated)
    else:
        scaled, scale = scale_blocks(gated.to(tl.float32))
        tl.store(cells, scaled.to(hidden_ptr.dtype.element_ty))
        tl.store(hidden_scale_ptr + tile * hidden_stride + row, scale)


@triton.jit(do_not_specialize=["num_rows", "block_stride"])
def down_kernel(
    x_desc, x_scale_ptr, block_stride, row_stride, weight_desc, scale_ptr, outputs_ptr,
    pairs_ptr, first_ptr, sizes_ptr, num_blocks_ptr, num_rows, num_inputs, size,
    ROWS: tl.constexpr, HALF: tl.constexpr, DEPTH: tl.constexpr, BY_BLOCK: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """2 * HALF features of a block's rows. x_desc: (N, num_inputs); weight_desc: (E * size, num_inputs)."""
    wait_for_inputs(PDL)
    tiles = size // (2 * HALF)
    place = tl.arange(0, ROWS)
    block = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    if block >= tl.load(num_blocks_ptr):
        return
    first = tl.load(first_ptr + block)
    count = tl.load(sizes_ptr + block)
    expert = first // num_rows
    output = tile * 2 * HALF
    blocks = num_inputs // DEPTH
    # Both halves are of one block. With one pointer for both, ptxas needs four registers more than two programs have.
    low_scales = scale_ptr + (expert * (size // DEPTH) + output // DEPTH) * blocks
    high_scales = scale_ptr + (expert * (size // DEPTH) + (output + HALF) // DEPTH) * blocks
    x_scales = x_scale_ptr + (block * ROWS + place) * row_stride
    weight = expert * size + output
    low, high = _multiply_halves(
        None, x_desc, block * ROWS, x_scales, block_stride, weight_desc, weight, HALF, low_scales, high_scales,
        blocks, ROWS, HALF, DEPTH, BY_BLOCK, STAGES,
    )  # fmt: skip
    if not BY_BLOCK:
        low = _scale(low, x_scales, scale_ptr + weight)
        high = _scale(high, x_scales, scale_ptr + weight + HALF)
    pair = tl.load(pairs_ptr + first + tl.minimum(place, count - 1))
    cells = outputs_ptr + pair.to(tl.int64)[:, None] * size + output + tl.arange(0, HALF)[None, :]
    tl.store(cells, low.to(outputs_ptr.dtype.element_ty), mask=(place < count)[:, None])
    tl.store(cells + HALF, high.to(outputs_ptr.dtype.element_ty), mask=(place < count)[:, None])


@triton.jit
def _multiply_halves(
    rows, x_desc, x_row, x_scales, block_stride, weight_desc, low, distance, low_scales, high_scales, blocks,
    ROWS: tl.constexpr, HALF: tl.constexpr, DEPTH: tl.constexpr, BY_BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows of x by HALF rows of the weights from `low` on, and from `distance` further -> two times (ROWS, HALF) fp32.

    x: where its `rows` begin, or the descriptor of a tensor that has them from `x_row` on. BY_BLOCK: each block's
    products are scaled before they are added, by a row's scales, at `x_scales` + block * block_stride, and by the
    weights', at low_scales and high_scales + block.
    """
    low_acc = tl.zeros((ROWS, HALF), tl.float32)
    high_acc = tl.zeros((ROWS, HALF), tl.float32)
    for step in tl.range(0, blocks, num_stages=STAGES):
        if rows is None:
            x = x_desc.load([x_row, step * DEPTH])
        else:
            x = tl.load(rows + step * DEPTH)
        low_weight = weight_desc.load([low, step * DEPTH])
        high_weight = weight_desc.load([low + distance, step * DEPTH])
        if BY_BLOCK:
            x_scale = tl.load(x_scales + step * block_stride)
            low_scale = tl.load(low_scales + step)
            high_scale = tl.load(high_scales + step)
            low_acc += tl.dot(x, tl.trans(low_weight)) * (low_scale * x_scale)[:, None]
            high_acc += tl.dot(x, tl.trans(high_weight)) * (high_scale * x_scale)[:, None]
        else:
            low_acc += tl.dot(x, tl.trans(low_weight))
            high_acc += tl.dot(x, tl.trans(high_weight))
    return low_acc, high_acc


@triton.jit
def _scale(sums, x_scales, scales):
    """sums (ROWS, HALF) by the scales of rows and outputs."""
    return sums * tl.load(x_scales)[:, None] * tl.load(scales + tl.arange(0, sums.shape[1]))[None, :]
