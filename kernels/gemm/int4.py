"""Linear layers with 4-bit weights (int4_weight.py) and 16-bit inputs (W4A16).

A weight is (code - zero) * scale, rounded to the inputs' 16-bit type once, by at most 2^-8 of itself in bf16: the layer
computes what its dequantised one would, bit by bit, with inputs added in their order and cut into the parts of
`part_of`. Weights are decoded on their way to the tensor cores; for very many rows the layer is dequantised into memory
first, which takes the time of reading and writing it, and multiplied as one of 16 bits.
Letters: M rows, I inputs, O outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.gemm.activation import silu_mul
from slipstream.kernels.gemm.choose import FEW_ROWS, Kind, Product, choose, device_of
from slipstream.kernels.gemm.fixed_order import FixedOrder
from slipstream.kernels.gemm.int4_weight import (
    CHUNK,
    PLANE,
    Int4Weight,
    decode_half,
    dequantize,
    has_kernels,
    is_packed,
    load_units,
    num_words,
    plane,
    unit_inputs,
    unit_pointers,
    unit_words,
    unscaled,
)
from slipstream.kernels.gemm.leaves import end_leaf, end_tree, leaf_linear, new_branches
from slipstream.kernels.gemm.pipelined_int4 import pipelined_int4_linear
from slipstream.kernels.gemm.small_m import merge_parts, round_silu_mul, scratch
from slipstream.kernels.gemm.streamed_int4 import streamed_int4_linear
from slipstream.kernels.gemm.tiling import SHARED_MEMORY, Heads, Tiling, choose_int4_tiling, part_inputs
from slipstream.kernels.gemm.wide_int4 import wide_int4_linear
from slipstream.kernels.kv.rope import Rotation, head_outputs, load_angles, store_heads
from slipstream.kernels.launch import Op, pdl_options, prefetch_lines, read_ahead, shared_memory, use_triton
from slipstream.kernels.tiles import load_fp32

TILE_ROWS = 64  # of a program, at most
AHEAD_CHUNKS = 2  # of each output's weights that programs read ahead, up to AHEAD_ROWS
AHEAD_ROWS = 16
KEEP = tl.constexpr("mov.b32 $0, $1;")


def runs_kernel(x: Tensor, weight: Int4Weight, *_: object, **__: object) -> bool:
    """On GPUs with the shared memory of Hopper's, for rows that are loaded 16 bytes at a time."""
    fits = has_kernels(weight, x.dtype) and weight.num_inputs % 8 == 0
    return fits and use_triton(x) and shared_memory(x.device) >= SHARED_MEMORY


@Op
def int4_linear(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None = None,
    gated: bool = False,
    order: FixedOrder | None = None,  # noqa: ARG001
) -> Tensor:
    """x (M, I) @ weight (O, I).T + bias (O,) -> (M, O) in x's dtype; `gated`, without a bias: silu_mul of that,
    (M, O / 2). With an `order` a row has the same bits in a pass of any size."""
    work = x.dtype if x.is_cuda else torch.float32
    out = x.to(work) @ dequantize(weight, x.dtype).to(work).t()
    out = (out if bias is None else out + bias.to(work)).to(x.dtype)
    return silu_mul.reference(out) if gated else out


@int4_linear.kernel(when=runs_kernel)
def int4_linear_triton(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None = None,
    gated: bool = False,
    order: FixedOrder | None = None,
    tiling: Tiling | None = None,
    rotation: Rotation | None = None,
) -> Tensor:
    """`tiling`, of few rows: by the kernel here, else by the one that choose.py names; its depth is CHUNK. `rotation`,
    of few rows: see `linear_few_rows_triton`."""
    assert bias is None or not gated
    x = x if x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 else x.contiguous()
    kind: Kind = "gated" if gated else "plain" if rotation is None else "rotated"
    choice = choose(int4_product(x, weight, kind, order is not None, rotation), device_of(x))
    if len(x) <= FEW_ROWS and (tiling is not None or choice.kernel == "int4"):
        return _launch(x, weight, bias, gated, tiling or choice.tiling, rotation)
    if choice.wide is not None:
        return wide_int4_linear(x, weight, bias, choice.tiling, gated, choice.wide)
    if choice.kernel == "int4 streamed":
        return streamed_int4_linear(x, weight, bias, choice.tiling)
    if choice.kernel == "int4 pipelined":
        return pipelined_int4_linear(x, weight, bias, choice.tiling, gated, rotation)
    assert choice.kernel == "dequantised"
    dequantized = dequantize.triton(weight, x.dtype)
    if order is None:
        out = F.linear(x, dequantized, bias)
        return silu_mul(out) if gated else out
    if gated:
        return order.gated_linear(x, dequantized)
    return order.linear(x, dequantized, bias, part_of(weight))


@Op
def int4_leaf_linear(
    x: Tensor,
    weight: Int4Weight,
    leaves: int,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    order: FixedOrder | None = None,  # noqa: ARG001
) -> Tensor:
    """x (M, I) @ weight (O, I).T + bias (O,) -> (M, O) in `dtype`, by default that of x: the leaves of the inputs are
    added along a tree (leaves.py)."""
    return leaf_linear(x, dequantize(weight, x.dtype), leaves, bias).to(dtype or x.dtype)


@int4_leaf_linear.kernel(when=runs_kernel)
def int4_leaf_linear_triton(
    x: Tensor,
    weight: Int4Weight,
    leaves: int,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    order: FixedOrder | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    assert weight.num_inputs % (leaves * CHUNK) == 0
    x = x if x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 else x.contiguous()
    if len(x) <= FEW_ROWS:
        tiling = tiling or int4_product(x, weight, "plain", True)._replace(leaves=leaves).tiling(device_of(x))
        return _launch(x, weight, bias, False, tiling, dtype=dtype)
    dequantized = dequantize.triton(weight, x.dtype)
    return (order or FixedOrder()).leaf_linear(x, dequantized, leaves, bias, dtype)


def int4_product(
    x: Tensor, weight: Int4Weight, kind: Kind, is_exact: bool, rotation: Rotation | None = None
) -> Product:
    return Product(
        "int4",
        len(x),
        len(weight.words),
        weight.num_inputs,
        kind,
        is_exact,
        x.dtype,
        0 if rotation is None else rotation.head_dim,
        rotation is not None and rotation.scales is not None,
        x.data_ptr() % 16 == 0,
        x.is_contiguous(),
    )


def part_of(weight: Int4Weight, gated: bool = False) -> int:
    """Inputs that are added up in one part."""
    num_outputs = len(weight.words)
    num_inputs = weight.num_inputs
    return min(part_inputs(num_inputs, choose_int4_tiling(num_outputs, num_inputs, gated)), num_inputs)


def dequantizes(weight: Int4Weight, num_rows: int, gated: bool = False) -> bool:
    """Whether so many rows are multiplied, in a fixed order, by dequantised weights."""
    product = Product(
        "int4", num_rows, len(weight.words), weight.num_inputs, "gated" if gated else "plain", True, weight.scales.dtype
    )
    return choose(product, device_of(weight.words)).kernel == "dequantised"


def _launch(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None,
    gated: bool,
    tiling: Tiling,
    rotation: Rotation | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    num_rows = len(x)
    all_outputs = len(weight.words)
    num_inputs = weight.num_inputs
    num_outputs = all_outputs // 2 if gated else all_outputs
    heads = Heads.of(rotation, num_outputs, tiling)
    out = torch.empty(num_rows, heads.num_outputs, dtype=dtype or x.dtype, device=x.device)
    if num_rows == 0:
        return out
    rows = min(max(triton.next_power_of_2(num_rows), tiling.least_rows), TILE_ROWS)
    row_tiles = triton.cdiv(num_rows, rows)
    tiles = triton.cdiv(num_outputs, tiling.outputs // (1 + gated)) * row_tiles
    partial, counters = scratch(x.device, tiles * tiling.split * tiling.outputs * rows, tiling.split)
    int4_kernel[(tiles, tiling.split)](
        x, weight.words, *unit_words(weight), bias, out, partial, counters, x.stride(0),
        num_rows, num_outputs, num_inputs, part_inputs(num_inputs, tiling), *heads.arguments, D=heads.head_dim,
        ROWS=rows, ROW_TILES=row_tiles, OUTPUTS=tiling.outputs, PLANE=PLANE, UNIT=unit_inputs(weight.group_size),
        SPLIT=tiling.split, GATED=gated, EVEN=num_inputs % CHUNK == 0,
        AHEAD=chunks_ahead(weight, tiling) if num_rows <= AHEAD_ROWS else 0,
        PACKED=is_packed(weight), PRECISION="ieee", LEVELS=tiling.levels, TREE=tiling.leaves > 0,
        num_stages=tiling.stages, num_warps=tiling.warps, **pdl_options(x.device),
    )  # fmt: skip
    return out


def chunks_ahead(weight: Int4Weight, tiling: Tiling) -> int:
    """Chunks of a part whose weights and scales are read ahead: a power of two."""
    chunks = min(part_inputs(weight.num_inputs, tiling) // CHUNK, num_words(weight.num_inputs) // PLANE)
    return min(AHEAD_CHUNKS, 1 << (chunks.bit_length() - 1)) if is_packed(weight) else 0


@triton.jit
def add_products(
    acc, words, scales, zeros, num_outputs, x_row, inside, num_inputs, chunk,
    UNIT: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc (OUTPUTS, ROWS) plus the products of a chunk of inputs, in bf16 times 2^-16: `words` (OUTPUTS, 32) by rows
    of x that begin at `x_row` (ROWS, 1). `scales` and `zeros` as of `unit_pointers`."""
    CHUNK: tl.constexpr = 8 * words.shape[1]
    word = tl.load(words + chunk * words.shape[1])
    own_scales = load_units(scales, chunk, num_outputs, CHUNK // UNIT, PACKED)
    own_zeros = ()
    if zeros is not None:
        own_zeros = load_units(zeros, chunk, num_outputs, CHUNK // UNIT, PACKED)
    # A plane at a time, for which Triton makes `mma.sync` multiply neighbouring inputs. Of joined ones it takes inputs
    # from here and there, so that they are added in another order.
    IS_SMALL: tl.constexpr = x_row.shape[0] < 16
    DEPTH: tl.constexpr = CHUNK // 8 if IS_SMALL else CHUNK // 2
    for index in tl.static_range(CHUNK // DEPTH):
        k = chunk * CHUNK + index * DEPTH + tl.arange(0, DEPTH)[None, :]
        x = tl.load(x_row + k, mask=inside if EVEN else inside & (k < num_inputs), other=0.0)
        if IS_SMALL:
            weight = plane(word, own_scales, own_zeros, index, UNIT, x.dtype, PACKED)
        else:
            weight = decode_half(word, own_scales, own_zeros, index, UNIT, x.dtype, PACKED)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision=PRECISION)
    if PACKED:
        # ptxas makes each wgmma wait for the one before where sums are on their way into the next round of a loop.
        acc = tl.inline_asm_elementwise(KEEP, "=f,f", [acc], tl.float32, is_pure=True, pack=1)
    return acc


@triton.jit
def _read_chunks_ahead(
    words_ptr, scales, zeros, feature, num_outputs, num_inputs, first,
    COUNT: tl.constexpr, PLANE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """COUNT chunks of the features (OUTPUTS, 1), with their scales and zeros."""
    CHUNK: tl.constexpr = 8 * PLANE
    read_ahead(words_ptr + feature.to(tl.int64) * (tl.cdiv(num_inputs, CHUNK) * PLANE), first * PLANE, COUNT * PLANE)
    pairs = first * (CHUNK // (2 * UNIT)) + tl.arange(0, COUNT * CHUNK // (2 * UNIT))[None, :]
    prefetch_lines(scales + pairs * num_outputs)
    if zeros is not None:
        prefetch_lines(zeros + pairs * num_outputs)


@triton.jit(do_not_specialize=["num_rows"])
def int4_kernel(
    x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, partial_ptr, counters_ptr, x_stride,
    num_rows, num_outputs, num_inputs, part,
    cos_ptr, sin_ptr, positions_ptr, slots_ptr, keys_ptr, values_ptr, kv_scales_ptr, Q, G, D: tl.constexpr,
    ROWS: tl.constexpr, ROW_TILES: tl.constexpr, OUTPUTS: tl.constexpr, PLANE: tl.constexpr, UNIT: tl.constexpr,
    SPLIT: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, LEVELS: tl.constexpr, TREE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """OUTPUTS features of ROWS rows (axis 0) from one part of the inputs (axis 1). Gated: half of them gates, half the
    ups beside them, num_outputs further on."""
    CHUNK: tl.constexpr = 8 * PLANE
    OWN: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    first_row = tl.program_id(0) % ROW_TILES * ROWS
    tile = tl.program_id(0) // ROW_TILES
    place = tl.arange(0, OUTPUTS)
    first_output = tile * OWN
    outputs = head_outputs(tile, OUTPUTS, D) if D > 0 else first_output + place % OWN
    feature = (tl.minimum(outputs, num_outputs - 1) + place // OWN * num_outputs)[:, None]
    all_outputs = num_outputs * (OUTPUTS // OWN)
    words = words_ptr + feature.to(tl.int64) * (tl.cdiv(num_inputs, CHUNK) * PLANE) + tl.arange(0, PLANE)[None, :]
    scales = unit_pointers(scales_ptr, 0, feature, all_outputs, PACKED)
    zeros = None
    if zeros_ptr is not None:
        zeros = unit_pointers(zeros_ptr, 0, feature, all_outputs, PACKED)
    row = first_row + tl.arange(0, ROWS)
    x_row = x_ptr + row[:, None] * x_stride
    inside = (row < num_rows)[:, None]
    first = tl.program_id(1) * (part // CHUNK)
    last = tl.minimum(first + part // CHUNK, tl.cdiv(num_inputs, CHUNK))
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    bias = None
    if bias_ptr is not None:  # no kernel writes it, and after the products it would be waited for
        bias = load_fp32(bias_ptr + outputs, outputs < num_outputs)
    if PDL:
        if AHEAD > 0:
            begin = tl.minimum(first, tl.cdiv(num_inputs, CHUNK) - AHEAD)
            _read_chunks_ahead(words_ptr, scales, zeros, feature, all_outputs, num_inputs, begin, AHEAD, PLANE, UNIT)
        tl.extra.cuda.gdc_wait()
    angles = load_angles(cos_ptr, sin_ptr, positions_ptr, slots_ptr, row, num_rows, tile, OUTPUTS, D)
    branches = new_branches(acc, LEVELS)
    leaf_chunks = part // CHUNK >> LEVELS
    for chunk in range(first, last):
        acc = add_products(
            acc, words, scales, zeros, all_outputs, x_row, inside, num_inputs, chunk, UNIT, EVEN, PACKED, PRECISION
        )
        if LEVELS > 0:  # noqa: SIM102
            if ((chunk + 1 - first) % leaf_chunks == 0) & (chunk + 1 < last):
                branches = end_leaf(acc, branches, (chunk + 1 - first) // leaf_chunks - 1, LEVELS)
                acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    acc = end_tree(acc, branches, LEVELS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    result = tl.trans(unscaled(acc, x_ptr.dtype.element_ty, PACKED))  # (ROWS, OUTPUTS)
    valid = inside
    dtype = out_ptr.dtype.element_ty
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(result, (ROWS, 2, OWN)), (0, 2, 1)))
        rounded = round_silu_mul(gate.to(dtype), up.to(dtype))
        outputs = first_output + tl.arange(0, OWN)
    else:
        if SPLIT > 1:
            own_rows = num_rows - first_row
            result, valid = merge_parts(result, valid, partial_ptr, counters_ptr, own_rows, ROWS, OUTPUTS, SPLIT, TREE)
        if bias is not None:
            result += bias[None, :]
        rounded = result.to(dtype)
    if D > 0:
        store_heads(rounded, angles, valid, row[:, None], tile, out_ptr, keys_ptr, values_ptr, kv_scales_ptr, Q, G, D)
    else:
        cells = out_ptr + row[:, None].to(tl.int64) * num_outputs + outputs[None, :]
        tl.store(cells, rounded, mask=valid & (outputs < num_outputs)[None, :])
