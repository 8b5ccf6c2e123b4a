"""Linear layers in FP8 (e4m3): quantisation of a layer's inputs, and products of few and of many rows.

Inputs are quantised row by row, or by row and 128 inputs, or by a static scale of the file: none is taken over several
rows. Hopper's tensor cores add FP8 products in less than fp32, so every 128 inputs a sum is added to one in fp32
(DeepSeek-V3, arXiv 2412.19437, section 3.3.2). Both kernels cut the inputs into the same parts, add 128 inputs at a
time in their order and have the weights as the left operand, so a row has the same bits in a pass of any size. Scales
of rows and outputs are applied to the sums; those of blocks to the sum of their 128 inputs. Without its fast
accumulation the library adds likewise, and is faster for many rows.
Letters: M rows, I inputs, O outputs, B = ceil(I / 128) blocks of inputs.
"""

import functools
import logging
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.kernels.collectives.tree import add_along_tree
from slipstream.kernels.gemm.activation import round_sigmoid_mul, sigmoid_mul, silu_mul
from slipstream.kernels.gemm.choose import (
    FEW_GATED_ROWS,
    FEW_ROWS,
    STREAMED_ROWS,
    Kernel,
    Kind,
    Product,
    are_aligned,
    choose,
    device_of,
    library_takes,
)
from slipstream.kernels.gemm.fixed_order import LEAF_TILE, milliseconds, sum_parts_triton
from slipstream.kernels.gemm.leaves import end_leaf, end_tree, new_branches
from slipstream.kernels.gemm.small_m import inputs_ahead, merge_parts, round_silu_mul, scratch, store_outputs
from slipstream.kernels.gemm.streamed_linear import streamed_linear
from slipstream.kernels.gemm.tiling import Heads, Tiling, choose_fp8_tiling, choose_split, part_inputs
from slipstream.kernels.kv.rope import Rotation, head_outputs, load_angles
from slipstream.kernels.launch import Op, pdl_options, prefetch, use_triton, wait_for_inputs
from slipstream.kernels.norm import (
    Increment,
    add_rms_norm,
    as_rows,
    grow_and_norm,
    grown_row,
    increment_arguments,
    load_factor,
    load_optional,
    rms_norm,
)
from slipstream.kernels.tiles import load_fp32, load_inputs, load_weights, store_tile, tile_of_program

E4M3 = torch.float8_e4m3fn
logger = logging.getLogger(__name__)
LARGEST = 448.0  # of e4m3
SMALLEST_SCALE = 1e-12  # of a row of zeros
BLOCK = 128  # inputs and outputs of a block that shares a scale; inputs whose products are added in tensor cores alone
ALIGNMENT = 16  # numbers: rows are loaded 16 bytes at a time
AHEAD_ROWS = 32  # up to here programs prefetch weights
SHARES = 8  # programs that quantise a row, at most
SHARED_ROWS = 64


class QuantizedRows(NamedTuple):
    """Inputs of a layer: codes * scales."""

    codes: Tensor  # (M, I) e4m3
    scales: Tensor  # fp32: (M,), or (B, M) of blocks of 128 inputs, in any order in memory
    dtype: torch.dtype  # of what was quantised, and of products
    rows: Tensor | None = None  # (M, I) what was quantised, where something else reads it, too


class InputScales(NamedTuple):
    """How a layer's inputs are scaled."""

    static: Tensor | None = None  # () fp32, of all inputs; None: by what a row holds
    by_block: bool = False  # by row and 128 inputs, else by row


BY_ROW = InputScales()


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight (O, I) -> e4m3 (O, I) and a scale of each output (O,) fp32."""
    scales = (weight.float().abs().amax(dim=1) / LARGEST).clamp(min=SMALLEST_SCALE)
    return (weight.float() / scales[:, None]).to(E4M3), scales


def dequantize_weight(weight: Tensor, scales: Tensor) -> Tensor:
    """e4m3 (O, I) times scales (O,), or (ceil O / 128, B) of blocks -> (O, I) fp32."""
    if scales.dim() == 1:
        return weight.float() * scales[:, None]
    rows, columns = weight.shape
    return weight.float() * scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


def runs_kernels(x: Tensor, num_inputs: int) -> bool:
    """On Hopper and later, for rows that are loaded 16 bytes at a time."""
    if not use_triton(x) or num_inputs % ALIGNMENT:
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (9, 0)


@Op
def quantize_rows(x: Tensor, input_scales: InputScales = BY_ROW) -> QuantizedRows:
    """x (M, I), any float dtype. Without a static scale the largest number of each row, or of each row's blocks of 128,
    becomes 448."""
    rows, columns = x.shape
    static, by_block = input_scales
    if static is not None:
        scales = static.float().expand(rows)
        spread = scales[:, None]
    elif by_block:
        padded = F.pad(x.float(), (0, -columns % BLOCK)).unflatten(1, (-1, BLOCK))
        by_row = (padded.abs().amax(dim=2) / LARGEST).clamp(min=SMALLEST_SCALE)  # (M, B)
        spread = by_row.repeat_interleave(BLOCK, dim=1)[:, :columns]
        scales = by_row.t().contiguous()
    else:
        scales = (x.float().abs().amax(dim=1) / LARGEST).clamp(min=SMALLEST_SCALE)
        spread = scales[:, None]
    return QuantizedRows((x.float() / spread).clamp(-LARGEST, LARGEST).to(E4M3), scales, x.dtype)


@quantize_rows.kernel(when=lambda x, *_, **__: runs_kernels(x, x.shape[-1]))
def quantize_rows_triton(x: Tensor, input_scales: InputScales = BY_ROW) -> QuantizedRows:
    rows, columns = x.shape
    static, by_block = input_scales
    x = as_rows(x)
    codes, scales, *_ = new = _empty_rows(x, input_scales)
    if rows == 0:
        return new
    # A program that must find a row's scale reads all of the row. Of few rows several do, each for a share of it.
    finds_scale = static is None and not by_block
    width = triton.next_power_of_2(columns) if finds_scale else 1024
    share = min(width, max(width // SHARES, 512)) if finds_scale and rows <= SHARED_ROWS else width
    warps = min(max(width // (BLOCK if by_block else 512), 4), 16)  # of blocks, each has one
    _quantize_rows[(rows, triton.cdiv(columns, share))](
        x, static, codes, scales, x.stride(0), *scale_strides(scales), columns,
        WIDTH=width, SHARE=share, BY_BLOCK=by_block, GROUP=BLOCK, num_warps=warps, **pdl_options(x.device),
    )  # fmt: skip
    return new


def _empty_rows(x: Tensor, input_scales: InputScales) -> QuantizedRows:
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=E4M3, device=x.device)
    if input_scales.static is not None:
        return QuantizedRows(codes, input_scales.static.expand(rows), x.dtype)
    blocks = triton.cdiv(columns, BLOCK)
    new = partial(torch.empty, dtype=torch.float32, device=x.device)
    if not input_scales.by_block:
        scales = new(rows)
    elif rows <= FEW_ROWS:  # a program that goes from block to block finds the next one's in its L1 cache
        scales = new(rows, blocks).t()
    else:
        scales = new(blocks, rows)
    return QuantizedRows(codes, scales, x.dtype)


def scale_strides(scales: Tensor | None) -> tuple[int, int]:
    """From block to block and from row to row."""
    if scales is None:
        return 0, 0
    return (scales.stride(0), scales.stride(1)) if scales.dim() == 2 else (0, scales.stride(0))


@Op
def quantized_rms_norm(
    residual: Tensor, delta: Tensor | Increment | None, weight: Tensor, eps: float, input_scales: InputScales,
    out: Tensor | None = None, *, keeps_rows: bool = False,
) -> tuple[QuantizedRows, Tensor]:  # fmt: skip
    """(quantize_rows(rms_norm(summed)), summed) with summed = residual + delta (M, I), as kernels/norm.py computes it;
    without `delta` it is `residual`. `out` (M, I), rows may be strided, receives `summed`. keeps_rows: the normed rows
    come with the quantised ones."""
    if delta is None:
        normed = rms_norm.reference(residual, weight, eps)
        summed = residual
    elif isinstance(delta, Increment):
        (normed,), summed = grow_and_norm.reference(residual, delta, [weight], eps, out)
    else:
        normed, summed = add_rms_norm.reference(residual, delta, weight, eps, out)
    return quantize_rows.reference(normed, input_scales)._replace(rows=normed if keeps_rows else None), summed


@quantized_rms_norm.kernel(when=lambda x, *_, **__: runs_kernels(x, x.shape[-1]))
def quantized_rms_norm_triton(
    residual: Tensor, delta: Tensor | Increment | None, weight: Tensor, eps: float, input_scales: InputScales,
    out: Tensor | None = None, *, keeps_rows: bool = False,
) -> tuple[QuantizedRows, Tensor]:  # fmt: skip
    old = as_rows(residual)
    sums = residual if delta is None else torch.empty_like(old) if out is None else out
    rows, columns = old.shape
    normed = torch.empty(old.shape, dtype=old.dtype, device=old.device) if keeps_rows else None
    codes, scales, *_ = quantized = _empty_rows(old, input_scales)._replace(rows=normed)
    if rows == 0:
        return quantized, sums
    width = max(triton.next_power_of_2(columns), BLOCK)
    warps = min(max(width // (BLOCK if input_scales.by_block else 256), 1), 16)
    _norm_and_quantize[(rows,)](
        old, *increment_arguments(delta), weight, sums, normed, input_scales.static, codes, scales,
        old.stride(0), sums.stride(0), *scale_strides(scales), eps,
        SIZE=columns, WIDTH=width, BY_BLOCK=input_scales.by_block, GROUP=BLOCK, num_warps=warps,
        **pdl_options(old.device),
    )  # fmt: skip
    return quantized, sums


@Op
def quantized_silu_mul(gate_up: Tensor, input_scales: InputScales) -> QuantizedRows:
    """quantize_rows(silu_mul(gate_up (M, 2 * I))): the inputs of a layer after a gated one."""
    return quantize_rows.reference(silu_mul.reference(gate_up), input_scales)


@quantized_silu_mul.kernel(when=lambda x, *_, **__: runs_kernels(x, x.shape[-1] // 2))
def quantized_silu_mul_triton(gate_up: Tensor, input_scales: InputScales) -> QuantizedRows:
    gate, up = as_rows(gate_up).chunk(2, dim=1)
    return _gated_codes(gate, up, input_scales, sigmoid=False)


@Op
def quantized_sigmoid_mul(gate: Tensor, x: Tensor, input_scales: InputScales) -> QuantizedRows:
    """quantize_rows(sigmoid_mul(gate, x)), both (M, I): the inputs of the layer after an attention with a gate."""
    return quantize_rows.reference(sigmoid_mul.reference(gate, x), input_scales)


@quantized_sigmoid_mul.kernel(when=lambda x, *_, **__: runs_kernels(x, x.shape[-1]))
def quantized_sigmoid_mul_triton(gate: Tensor, x: Tensor, input_scales: InputScales) -> QuantizedRows:
    return _gated_codes(as_rows(gate), as_rows(x), input_scales, sigmoid=True)


def _gated_codes(gate: Tensor, x: Tensor, input_scales: InputScales, *, sigmoid: bool) -> QuantizedRows:
    rows, columns = x.shape
    codes, scales, *_ = quantized = _empty_rows(x, input_scales)
    if rows == 0:
        return quantized
    width = 1024 if input_scales.by_block or input_scales.static is not None else triton.next_power_of_2(columns)
    warps = min(max(width // (BLOCK if input_scales.by_block else 512), 4), 16)
    _gate_and_quantize[(rows, triton.cdiv(columns, width))](
        gate, x, input_scales.static, codes, scales, gate.stride(0), x.stride(0), *scale_strides(scales), columns,
        WIDTH=width, BY_BLOCK=input_scales.by_block, GROUP=BLOCK, SIGMOID=sigmoid, num_warps=warps,
        **pdl_options(x.device),
    )  # fmt: skip
    return quantized


@Op
def fp8_linear(
    x: QuantizedRows,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """(codes * scales of x) (M, I) @ (weight (O, I) e4m3 * scales).T + bias (O,) -> (M, O) in x's dtype.

    `scales`: (O,), or (ceil O / 128, B) of blocks; then inputs have scales by block, too. `gated`, without a bias:
    silu_mul of that, (M, O / 2). On the CPU in fp64, in which sums of e4m3 products are exact in any order.
    """
    work = torch.float32 if x.codes.is_cuda else torch.float64
    out = (x.codes.to(work) @ weight.to(work).t()) if scales.dim() == 1 else _blockwise(x, weight, scales, work)
    if scales.dim() == 1:
        out = out * x.scales.to(work)[:, None] * scales.to(work)
    out = (out if bias is None else out + bias.to(work)).to(x.dtype)
    return silu_mul.reference(out) if gated else out


def quantize_leaves(x: Tensor, input_scales: InputScales, leaves: int) -> QuantizedRows:
    """`quantize_rows` of x (M, I), in which each leaf of a row has a scale of its own: scales (L, M). A rank has some
    leaves of a row, and cannot know the largest number of the others'."""
    if leaves == 1 or input_scales.static is not None or input_scales.by_block:
        return quantize_rows(x, input_scales)
    rows, columns = x.shape
    codes, scales, *_ = quantize_rows(x.reshape(rows * leaves, columns // leaves), input_scales)
    return QuantizedRows(codes.view(rows, columns), scales.view(rows, leaves).t(), x.dtype)


@Op
def fp8_leaf_linear(
    x: QuantizedRows,
    weight: Tensor,
    scales: Tensor,
    leaves: int,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`fp8_linear`, to `dtype`, of rows that `quantize_leaves` quantised: the leaves' sums, scaled, are added along a
    tree (leaves.py)."""
    x_leaves = x.codes.chunk(leaves, 1)
    weight_leaves = weight.chunk(leaves, 1)
    by_block = scales.dim() == 2
    x_scales = x.scales.chunk(leaves) if by_block else x.scales if x.scales.dim() == 2 else [x.scales] * leaves
    weight_scales = scales.chunk(leaves, 1) if by_block else [scales] * leaves
    parts = [
        fp8_linear.reference(QuantizedRows(codes, row_scales, torch.float32), part, part_scales)
        for codes, row_scales, part, part_scales in zip(x_leaves, x_scales, weight_leaves, weight_scales, strict=True)
    ]
    out = add_along_tree(parts)
    return (out if bias is None else out + bias.float()).to(dtype or x.dtype)


@fp8_leaf_linear.kernel(when=lambda x, weight, *_, **__: runs_kernels(x.codes, weight.shape[1]))
def fp8_leaf_linear_triton(
    x: QuantizedRows,
    weight: Tensor,
    scales: Tensor,
    leaves: int,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    assert weight.shape[1] % (leaves * BLOCK) == 0
    product = fp8_product(x, weight, scales)._replace(leaves=leaves)
    choice = choose(product, device_of(x.codes))
    if tiling is not None or choice.kernel == "fp8 few rows":
        return _few_rows(x, weight, scales, bias, False, tiling or choice.tiling, dtype=dtype)
    return _many_rows(x, weight, scales, bias, leaves, leaves=leaves, dtype=dtype)


def _blockwise(x: QuantizedRows, weight: Tensor, scales: Tensor, work: torch.dtype) -> Tensor:
    columns = weight.shape[1]
    spread = x.scales.t().repeat_interleave(BLOCK, dim=1)[:, :columns]
    return (x.codes.to(work) * spread.to(work)) @ dequantize_weight(weight, scales).to(work).t()


@fp8_linear.kernel(when=lambda x, weight, *_, **__: runs_kernels(x.codes, weight.shape[1]))
def fp8_linear_triton(
    x: QuantizedRows,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    gated: bool = False,
    tiling: Tiling | None = None,
    rotation: Rotation | None = None,
) -> Tensor:
    """`tiling`, of few rows: by the kernel here; `rotation`: see `linear_few_rows_triton`."""
    kind: Kind = "gated" if gated else "plain" if rotation is None else "rotated"
    choice = choose(fp8_product(x, weight, scales, kind, rotation=rotation), device_of(x.codes))
    if tiling is None and choice.kernel == "streamed":
        return streamed_linear(x.codes, weight, bias, choice.tiling, x.dtype, (x.scales, scales), rotation)
    if rotation is not None or choice.kernel in ("fp8 few rows", "streamed"):
        return _few_rows(x, weight, scales, bias, gated, tiling or choice.tiling, rotation)
    split = 1 if gated else choose_split(*weight.shape)
    out = _many_rows(x, weight, scales, bias, split)
    return silu_mul(out) if gated else out


def fp8_product(
    x: QuantizedRows,
    weight: Tensor,
    scales: Tensor,
    kind: Kind = "plain",
    rotation: Rotation | None = None,
    is_exact: bool = True,
    library: Kernel | None = None,
) -> Product:
    """Describes a product; without further arguments one that our kernels compute in their order."""
    num_rows = len(x.codes)
    by_block = scales.dim() == 2
    return Product(
        "fp8 blocks" if by_block else "fp8",
        num_rows,
        len(weight),
        weight.shape[1],
        kind,
        is_exact,
        x.dtype,
        0 if rotation is None else rotation.head_dim,
        rotation is not None and rotation.scales is not None,
        num_rows <= STREAMED_ROWS["fp8"] and are_aligned(x.codes, weight),
        not by_block or x.scales.is_contiguous(),
        library,
    )


def library_linear(
    x: QuantizedRows, weight: Tensor, scales: Tensor, bias: Tensor | None = None, split: int = 1, *, fast: bool = False
) -> Tensor:
    """`fp8_linear` by the library, for bf16. `split`: parts of the inputs, which are computed in fp32; a kernel adds
    them, and scales those that have no scales by block. `fast`: without a bias in one part, which the tensor cores add
    up alone, in less than fp32 (not where scales are by block)."""
    by_block = scales.dim() == 2
    if (split == 1 or fast) and bias is None:
        scale_pair = (x.scales.t(), scales.t()) if by_block else (x.scales[:, None].contiguous(), scales[None])
        return torch._scaled_mm(
            x.codes, weight.t(), *scale_pair, out_dtype=x.dtype, use_fast_accum=fast and not by_block
        )
    parts = torch.empty(split, len(x.codes), len(weight), dtype=torch.float32, device=weight.device)
    pairs = [(_one(weight.device), _one(weight.device))] * split
    if by_block:
        of_parts = zip(x.scales.chunk(split), scales.chunk(split, dim=1), strict=True)
        pairs = [(of_rows.t(), of_weight.contiguous().t()) for of_rows, of_weight in of_parts]
    operands = zip(x.codes.chunk(split, dim=1), weight.chunk(split, dim=1), pairs, parts, strict=True)
    for codes, part_weight, pair, part in operands:
        torch._scaled_mm(codes, part_weight.t(), *pair, out_dtype=torch.float32, use_fast_accum=False, out=part)
    return sum_parts_triton(parts, bias, x.dtype, None if by_block else (scales, x.scales))


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def rows_by_library(rows: Iterable[int], weight: Tensor, scales: Tensor, bias: Tensor | None) -> set[int]:
    """The numbers of rows for which `library_linear`, in the parts of few rows, gives the bits of our kernels, and is
    faster."""
    by_block = scales.dim() == 2
    counts = sorted(count for count in set(rows) if count > (FEW_ROWS if by_block else FEW_GATED_ROWS))
    num_outputs, num_inputs = weight.shape
    tiling = choose_fp8_tiling(num_outputs, num_inputs, gated=False, num_rows=1)
    is_even = part_inputs(num_inputs, tiling) * tiling.split == num_inputs
    device = device_of(weight)
    if not counts or ("fp8 blocks" if by_block else "fp8") not in device.library or not is_even:
        return set()
    generator = torch.Generator(weight.device).manual_seed(0)
    inputs = torch.randn(counts[-1], num_inputs, generator=generator, device=weight.device).bfloat16()
    full_product = partial(fp8_linear, quantize_rows(inputs, InputScales(by_block=by_block)), weight, scales, bias)
    equal_counts = set()
    for count in counts:
        x = quantize_rows(inputs[:count], InputScales(by_block=by_block))
        if not library_takes(fp8_product(x, weight, scales), device, tiling.split):
            continue
        ways = [
            partial(library_linear, x, weight, scales, bias, tiling.split),
            partial(fp8_linear, x, weight, scales, bias),
        ]
        try:
            is_equal = torch.equal(ways[0](), ways[1]())
        except (RuntimeError, ValueError) as error:  # versions of the library take different operands
            message = "FP8 products of %d x %d stay with our kernels, since torch._scaled_mm does not take them: %s"
            logger.warning(message, *weight.shape, str(error).partition("\n")[0])
            return set()
        if is_equal and milliseconds(ways[0], full_product) < milliseconds(ways[1], full_product):
            equal_counts.add(count)
    return equal_counts


def choose_fp8_tile(num_rows: int, num_outputs: int, by_block: bool) -> tuple[int, int]:
    """Rows and outputs of a program of the kernel of many rows, the fastest of eight (H200). Each block's products are
    scaled, which takes registers."""
    if num_rows * num_outputs <= 1 << 20:
        return 64, 64
    return (128, 64) if by_block or num_rows <= 512 else (128, 256)


def _few_rows(
    x: QuantizedRows, weight: Tensor, scales: Tensor, bias: Tensor | None, gated: bool,
    tiling: Tiling, rotation: Rotation | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    num_rows, num_inputs = x.codes.shape
    num_outputs = len(weight) // (2 if gated else 1)
    heads = Heads.of(rotation, num_outputs, tiling)
    out = torch.empty(num_rows, heads.num_outputs, dtype=dtype or x.dtype, device=weight.device)
    if num_rows == 0:
        return out
    assert bias is None or not gated
    rows = max(triton.next_power_of_2(num_rows), tiling.least_rows)
    tiles = triton.cdiv(num_outputs, tiling.outputs)
    part = part_inputs(num_inputs, tiling)
    unit = num_inputs // tiling.leaves if tiling.leaves else part
    pairs = scales.dim() == 2 and num_inputs % (2 * BLOCK) == unit % (2 * BLOCK) == tiling.stages % 2 == 0
    at_once = 2 if pairs else 1
    partial, counters = scratch(weight.device, tiles * tiling.split * tiling.outputs * rows, tiling.split)
    fp8_few_kernel[(tiles, tiling.split)](
        x.codes, x.scales, weight, scales, bias, out, partial, counters,
        num_rows, num_outputs, num_inputs, part, *scale_strides(x.scales),
        *heads.arguments, D=heads.head_dim,
        ROWS=rows, OUTPUTS=tiling.outputs, DEPTH=BLOCK, SPLIT=tiling.split, GATED=gated, BLOCKS=scales.dim() == 2,
        EVEN=num_inputs % BLOCK == 0, AT_ONCE=at_once,
        AHEAD=inputs_ahead(weight, part) if num_rows <= AHEAD_ROWS else 0,
        LEVELS=tiling.levels if tiling.leaves else -1, enable_fp_fusion=tiling.leaves == 0 or scales.dim() == 2,
        num_stages=tiling.stages // at_once, num_warps=tiling.warps, **pdl_options(weight.device),
    )  # fmt: skip
    return out


def _many_rows(
    x: QuantizedRows, weight: Tensor, scales: Tensor, bias: Tensor | None, split: int,
    tile: tuple[int, int] | None = None, leaves: int = 0, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    num_rows, num_inputs = x.codes.shape
    num_outputs = len(weight)
    out = torch.empty(num_rows, num_outputs, dtype=dtype or x.dtype, device=weight.device)
    if num_rows == 0:
        return out
    by_block = scales.dim() == 2
    rows, outputs = tile or (LEAF_TILE if leaves else choose_fp8_tile(num_rows, num_outputs, by_block))
    parts = Tiling(outputs, BLOCK, split, leaves=leaves)
    describe: Any = TensorDescriptor.from_tensor
    fp8_many_kernel[(triton.cdiv(num_rows, rows) * triton.cdiv(num_outputs, outputs),)](
        describe(x.codes, [rows, BLOCK]), describe(weight, [outputs, BLOCK]), x.scales, scales, bias, out,
        num_rows, num_outputs, num_inputs, part_inputs(num_inputs, parts), *scale_strides(x.scales),
        ROWS=rows, OUTPUTS=outputs, DEPTH=BLOCK, SPLIT=split, GROUP=8, BLOCKS=by_block,
        LEVELS=leaves.bit_length() - 1 if leaves else -1, enable_fp_fusion=leaves == 0 or by_block,
        num_stages=3 if outputs > 128 else 4, num_warps=8 if outputs > 64 else 4,
    )  # fmt: skip
    return out


@triton.jit
def _quantize_rows(
    x_ptr, static_ptr, codes_ptr, scales_ptr, stride, block_stride, row_stride, num_inputs,
    WIDTH: tl.constexpr, SHARE: tl.constexpr, BY_BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * SHARE
    columns = first + tl.arange(0, SHARE)
    x = load_fp32(x_ptr + row * stride + columns, columns < num_inputs)
    row_inputs = x
    if SHARE < WIDTH:
        columns = tl.arange(0, WIDTH)
        row_inputs = load_fp32(x_ptr + row * stride + columns, columns < num_inputs)
    strides = block_stride, row_stride
    _store_codes(x, row_inputs, row, first, static_ptr, codes_ptr, scales_ptr, strides, num_inputs, BY_BLOCK, GROUP)


@triton.jit
def _norm_and_quantize(
    residual_ptr, first_ptr, second_ptr, first_weight_ptr, second_weight_ptr, outer_weight_ptr, factor_ptr,
    first_stride, second_stride, first_eps, second_eps, outer_eps, weight_ptr, summed_ptr, normed_ptr, static_ptr,
    codes_ptr, scales_ptr, residual_stride, summed_stride, block_stride, row_stride, eps,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BY_BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rounds where the separate kernels round."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    mask = columns < SIZE
    first_weight = load_optional(first_weight_ptr, columns, mask)
    second_weight = load_optional(second_weight_ptr, columns, mask)
    outer_weight = load_optional(outer_weight_ptr, columns, mask)
    factor = load_factor(factor_ptr)
    weight = load_fp32(weight_ptr + columns, mask)
    wait_for_inputs(PDL)
    summed = tl.load(residual_ptr + row * residual_stride + columns, mask=mask, other=0.0)
    if first_ptr is not None:
        summed = grown_row(
            summed.to(tl.float32), first_ptr, second_ptr, first_weight, second_weight, outer_weight, factor,
            first_stride, second_stride, first_eps, second_eps, outer_eps, row, columns, mask, summed_ptr, SIZE,
        )  # fmt: skip
        tl.store(summed_ptr + row * summed_stride + columns, summed, mask=mask)
    x = summed.to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) * weight).to(summed_ptr.dtype.element_ty)
    if normed_ptr is not None:
        tl.store(normed_ptr + row * SIZE + columns, normed, mask=mask)
    normed = normed.to(tl.float32)
    strides = block_stride, row_stride
    _store_codes(normed, normed, row, 0, static_ptr, codes_ptr, scales_ptr, strides, SIZE, BY_BLOCK, GROUP)


@triton.jit
def _gate_and_quantize(
    gate_ptr, x_ptr, static_ptr, codes_ptr, scales_ptr, gate_stride, x_stride, block_stride, row_stride, num_inputs,
    WIDTH: tl.constexpr, BY_BLOCK: tl.constexpr, GROUP: tl.constexpr, SIGMOID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rounds where the separate kernels round."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * WIDTH
    columns = first + tl.arange(0, WIDTH)
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=columns < num_inputs, other=0.0)
    x = tl.load(x_ptr + row * x_stride + columns, mask=columns < num_inputs, other=0.0)
    gated = (round_sigmoid_mul(gate, x) if SIGMOID else round_silu_mul(gate, x)).to(tl.float32)
    strides = block_stride, row_stride
    _store_codes(gated, gated, row, first, static_ptr, codes_ptr, scales_ptr, strides, num_inputs, BY_BLOCK, GROUP)


@triton.jit
def _store_codes(
    x, row_inputs, row, first, static_ptr, codes_ptr, scales_ptr, strides, num_inputs,
    BY_BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """x (WIDTH,): the inputs of a row from `first` on, 0 beyond the last. row_inputs: all of them, where they share
    a scale."""
    WIDTH: tl.constexpr = x.shape[0]
    columns = first + tl.arange(0, WIDTH)
    if static_ptr is not None:
        scaled = tl.div_rn(x, tl.zeros((WIDTH,), tl.float32) + tl.load(static_ptr))  # an infinite number becomes 448
    elif BY_BLOCK:
        scaled, scale = scale_blocks(tl.reshape(x, (WIDTH // GROUP, GROUP)))
        scaled = tl.reshape(scaled, (WIDTH,))
        block = first // GROUP + tl.arange(0, WIDTH // GROUP)
        cells = scales_ptr + block.to(tl.int64) * strides[0] + row * strides[1]
        tl.store(cells, scale, mask=block * GROUP < num_inputs)
    else:
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(row_inputs), axis=0), 448.0), 1e-12)
        scaled = _divide(x, scale)
        tl.store(scales_ptr + row, scale)  # whoever has a share of the row: the same
    scaled = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
    tl.store(codes_ptr + row * num_inputs + columns, scaled.to(tl.float8e4nv), mask=columns < num_inputs)


@triton.jit
def scale_blocks(x):
    """x (n, BLOCK) fp32 -> x / scales, at most 448, and the scales (n,)."""
    scale = tl.div_rn(tl.max(tl.abs(x), axis=1), tl.full((x.shape[0],), 448.0, tl.float32))
    scale = tl.maximum(scale, 1e-12)
    return _divide(x, scale[:, None]), scale


@triton.jit
def _divide(x, divisor):
    """x / divisor in fp32, rounded once; NaN where one is infinite. A divisor that many numbers share is inverted once;
    a step by the remainder (Markstein, IBM Journal of Research and Development 34(1), 1990) makes up for the rounding
    of its inverse."""
    inverse = tl.broadcast_to(tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor), x.shape)
    quotient = x * inverse
    remainder = tl.fma(-quotient, tl.broadcast_to(divisor, x.shape), x)
    return tl.fma(remainder, inverse, quotient)


@triton.jit
def _load_scales(
    weight_scale_ptr, x_scales, block_stride, outputs, rows, block, num_rows, num_outputs, num_inputs,
    GROUP: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Scales of a block of inputs: (OUTPUTS,) of the weights and (ROWS,) of x, which begin at `x_scales`. Empty
    where scales are not by block."""
    if BLOCKS:
        num_blocks = tl.cdiv(num_inputs, GROUP)
        block = tl.minimum(block, num_blocks - 1)
        weight_scale = tl.load(weight_scale_ptr + tl.minimum(outputs, num_outputs - 1) // GROUP * num_blocks + block)
        x_scale = tl.load(x_scales + block * block_stride, mask=rows < num_rows, other=0.0)
        scales = weight_scale, x_scale
    else:
        scales = ()  # type: ignore[assignment]
    return scales


@triton.jit
def _load_step_scales(
    weight_scale_ptr, x_scales, block_stride, outputs, rows, block, num_rows, num_outputs, num_inputs,
    GROUP: tl.constexpr, BLOCKS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Calls `_load_scales` for COUNT blocks, one after the other."""
    scales = ()
    for index in tl.static_range(COUNT):
        scales = scales + _load_scales(
            weight_scale_ptr, x_scales, block_stride, outputs, rows, block + index, num_rows, num_outputs, num_inputs,
            GROUP, BLOCKS,
        )  # fmt: skip
    return scales


@triton.jit
def _add_products(acc, weight, x, scales, INDEX: tl.constexpr, DEPTH: tl.constexpr):
    """acc (OUTPUTS, ROWS) plus the products of weight (OUTPUTS, DEPTH) and x (ROWS, DEPTH), by the scales of the block
    INDEX, if blocks have any."""
    if len(scales) > 0:
        acc += tl.dot(weight, tl.trans(x)) * (scales[2 * INDEX][:, None] * scales[2 * INDEX + 1][None, :])
    else:
        acc = tl.dot(weight, tl.trans(x), acc, max_num_imprecise_acc=DEPTH)
    return acc


@triton.jit
def _load_own_scales(scales_ptr, index, count, BLOCKS: tl.constexpr):
    """Loads the scales of rows or outputs `index`, of which there are `count`, where each has a scale of its own."""
    if BLOCKS:
        scales = ()
    else:
        scales = (tl.load(scales_ptr, mask=index < count, other=0.0),)  # type: ignore[assignment]
    return scales


@triton.jit
def _scale_sums(sums, output_scales, row_scales):
    """sums (ROWS, OUTPUTS) times the scales of rows and outputs, where these have any."""
    if len(row_scales) == 1:
        sums = sums * output_scales[0][None, :] * row_scales[0][:, None]  # in the order of the library
    return sums


@triton.jit
def _few_products(
    x_ptr, x_scales, block_stride, weights, weight_scale_ptr, outputs, row, first, last,
    num_rows, num_outputs, num_inputs, own_scales, leaf,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, GATED: tl.constexpr, BLOCKS: tl.constexpr,
    EVEN: tl.constexpr, AT_ONCE: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Sums (OUTPUTS, ROWS) over units `first` to `last` of DEPTH inputs, AT_ONCE in a step, and those of the features
    num_outputs further on. Scales of blocks are loaded a step ahead, so that nothing waits for them. LEVELS: of the
    tree of leaves, from `leaf` on, whose sums are scaled before they are added; -1: these are parts."""
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    branches = new_branches(acc, LEVELS)
    leaf_units = last - first
    if LEVELS > 0:
        leaf_units = leaf_units >> LEVELS
    up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up_weights = weights + num_outputs.to(tl.int64) * num_inputs
    all_outputs = num_outputs * 2 if GATED else num_outputs
    scales = _load_step_scales(
        weight_scale_ptr, x_scales, block_stride, outputs, row, first, num_rows, all_outputs, num_inputs,
        DEPTH, BLOCKS, AT_ONCE,
    )  # fmt: skip
    if GATED:
        ups = _load_step_scales(
            weight_scale_ptr, x_scales, block_stride, outputs + num_outputs, row, first, num_rows, all_outputs,
            num_inputs, DEPTH, BLOCKS, AT_ONCE,
        )  # fmt: skip
    for step in range(first, last, AT_ONCE):
        next_scales = _load_step_scales(
            weight_scale_ptr, x_scales, block_stride, outputs, row, step + AT_ONCE, num_rows, all_outputs, num_inputs,
            DEPTH, BLOCKS, AT_ONCE,
        )  # fmt: skip
        if GATED:
            next_ups = _load_step_scales(
                weight_scale_ptr, x_scales, block_stride, outputs + num_outputs, row, step + AT_ONCE, num_rows,
                all_outputs, num_inputs, DEPTH, BLOCKS, AT_ONCE,
            )  # fmt: skip
        for index in tl.static_range(AT_ONCE):
            k = (step + index) * DEPTH + tl.arange(0, DEPTH)[None, :]
            x = load_inputs(x_ptr + row[:, None] * num_inputs, k, row, num_rows, num_inputs, EVEN)
            acc = _add_products(acc, load_weights(weights + k, k, num_inputs, EVEN), x, scales, index, DEPTH)
            if GATED:
                weight = load_weights(up_weights + k, k, num_inputs, EVEN)
                up = _add_products(up, weight, x, ups, index, DEPTH)
        if GATED:
            ups = next_ups
        scales = next_scales
        if LEVELS > 0:  # noqa: SIM102
            if ((step + AT_ONCE - first) % leaf_units == 0) & (step + AT_ONCE < last):
                ended = (step + AT_ONCE - first) // leaf_units - 1
                total = _scale_leaf(acc, own_scales, x_scales, block_stride, row, num_rows, leaf + ended, BLOCKS)
                branches = end_leaf(total, branches, ended, LEVELS)
                acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    if LEVELS >= 0:
        end = leaf + (1 << LEVELS) - 1
        acc = _scale_leaf(acc, own_scales, x_scales, block_stride, row, num_rows, end, BLOCKS)
        acc = end_tree(acc, branches, LEVELS)
    return acc, up


@triton.jit
def _scale_leaf(acc, own_scales, x_scales, leaf_stride, row, num_rows, leaf, BLOCKS: tl.constexpr):
    """A leaf's sums (OUTPUTS, ROWS) times the scales of outputs and of the leaf of each row; blocks have theirs. They
    are rounded before they are added: launches switch the fusion of products and sums off."""
    if not BLOCKS:
        row_scales = tl.load(x_scales + leaf * leaf_stride, mask=row < num_rows, other=0.0)
        acc = acc * own_scales[0][:, None] * row_scales[None, :]
    return acc


@triton.jit(do_not_specialize=["num_rows", "num_outputs"])
def fp8_few_kernel(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, bias_ptr, out_ptr, partial_ptr, counters_ptr,
    num_rows, num_outputs, num_inputs, part, block_stride, row_stride,
    cos_ptr, sin_ptr, positions_ptr, slots_ptr, keys_ptr, values_ptr, kv_scales_ptr, Q, G, D: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr, GATED: tl.constexpr,
    BLOCKS: tl.constexpr, EVEN: tl.constexpr, AT_ONCE: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """OUTPUTS features (axis 0) of all rows from one part of the inputs (axis 1), as in kernels/gemm/small_m.py."""
    outputs = head_outputs(tl.program_id(0), OUTPUTS, D)
    weights = weight_ptr + tl.minimum(outputs, num_outputs - 1)[:, None].to(tl.int64) * num_inputs
    first = tl.program_id(1) * (part // DEPTH)
    last = tl.minimum(first + part // DEPTH, tl.cdiv(num_inputs, DEPTH))
    row = tl.arange(0, ROWS)
    # Loads data that no kernel writes before the wait: after the products the loads would take time.
    scales = _load_own_scales(weight_scale_ptr + outputs, outputs, num_outputs, BLOCKS)
    up_scales = ()
    bias = None
    if GATED:
        up_scales = _load_own_scales(weight_scale_ptr + num_outputs + outputs, outputs, num_outputs, BLOCKS)
    if bias_ptr is not None:
        bias = load_fp32(bias_ptr + outputs, outputs < num_outputs)
    if PDL:
        start = tl.minimum(first * DEPTH, num_inputs - AHEAD)
        prefetch(weights, start, AHEAD)
        if GATED:
            prefetch(weights + num_outputs.to(tl.int64) * num_inputs, start, AHEAD)
        tl.extra.cuda.gdc_wait()
    x_scales = x_scale_ptr + row.to(tl.int64) * row_stride
    row_scales = _load_own_scales(x_scales, row, num_rows, BLOCKS)
    angles = load_angles(cos_ptr, sin_ptr, positions_ptr, slots_ptr, row, num_rows, tl.program_id(0), OUTPUTS, D)
    leaf = 0
    if LEVELS > 0:
        leaf = tl.program_id(1) << LEVELS
    elif LEVELS == 0:
        leaf = tl.program_id(1)
    acc, up = _few_products(
        x_ptr, x_scales, block_stride, weights, weight_scale_ptr, outputs, row, first, last,
        num_rows, num_outputs, num_inputs, scales, leaf,
        ROWS, OUTPUTS, DEPTH, GATED, BLOCKS, EVEN, AT_ONCE, LEVELS,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()

    valid = (row < num_rows)[:, None]
    result = tl.trans(acc)  # (ROWS, OUTPUTS)
    if SPLIT > 1:
        result, valid = merge_parts(
            result, valid, partial_ptr, counters_ptr, num_rows, ROWS, OUTPUTS, SPLIT, LEVELS >= 0
        )  # fmt: skip
    if LEVELS < 0:
        result = _scale_sums(result, scales, row_scales)
    if bias is not None:
        result += bias[None, :]
    rounded = result.to(out_ptr.dtype.element_ty)
    if GATED:
        rounded = round_silu_mul(rounded, _scale_sums(tl.trans(up), up_scales, row_scales).to(rounded.dtype))
    store_outputs(
        rounded, angles, valid, row, outputs, num_outputs, tl.program_id(0), out_ptr, keys_ptr, values_ptr,
        kv_scales_ptr, Q, G, D,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def fp8_many_kernel(
    x_desc, weight_desc, x_scale_ptr, weight_scale_ptr, bias_ptr, out_ptr,
    num_rows, num_outputs, num_inputs, part, block_stride, row_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr,
    BLOCKS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """One tile. LEVELS: of the tree of parts, which are scaled before they are added; -1: they are added in order."""
    row, output = tile_of_program(num_rows, num_outputs, ROWS, OUTPUTS, GROUP)
    rows = row + tl.arange(0, ROWS)
    outputs = output + tl.arange(0, OUTPUTS)
    x_scales = x_scale_ptr + rows.to(tl.int64) * row_stride
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    own_scales = _load_own_scales(weight_scale_ptr + outputs, outputs, num_outputs, BLOCKS)
    branches = new_branches(sums, LEVELS)
    for index in range(SPLIT):
        acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
        block = index * part // DEPTH
        scales = _load_scales(
            weight_scale_ptr, x_scales, block_stride, outputs, rows, block, num_rows, num_outputs, num_inputs,
            DEPTH, BLOCKS,
        )  # fmt: skip
        for k in range(index * part, tl.minimum((index + 1) * part, num_inputs), DEPTH):
            block += 1
            next_scales = _load_scales(
                weight_scale_ptr, x_scales, block_stride, outputs, rows, block, num_rows, num_outputs, num_inputs,
                DEPTH, BLOCKS,
            )  # fmt: skip
            # loads beyond the last input are zeros
            x = x_desc.load([row, k])
            weight = weight_desc.load([output, k])
            acc = _add_products(acc, weight, x, scales, 0, DEPTH)
            scales = next_scales
        if LEVELS < 0:
            sums += acc
        else:
            sums = _scale_leaf(acc, own_scales, x_scales, block_stride, rows, num_rows, index, BLOCKS)
            branches = end_leaf(sums, branches, index, LEVELS)
    if LEVELS < 0:
        result = _scale_sums(tl.trans(sums), own_scales, _load_own_scales(x_scales, rows, num_rows, BLOCKS))
    else:
        result = tl.trans(end_tree(sums, branches, LEVELS))
    store_tile(result, bias_ptr, out_ptr, rows, outputs, num_rows, num_outputs)
