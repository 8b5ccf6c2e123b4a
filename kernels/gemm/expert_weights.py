"""How the weights of a layer's experts are stored, and the product of a tile of one expert with rows of inputs.

16 bits, FP8 (kernels/gemm/fp8.py), MXFP4 (mxfp4.py) and 4-bit integers (int4_weight.py). All of a layer have one
format. In every one a product adds inputs in their order, whatever the tile, and weights are the left operand, so that
a row has the same bits among any others. Inputs of FP8 weights are quantised row by row.
Letters: E experts, O outputs, I inputs, B = ceil(I / 128) blocks of inputs.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.gemm import fp8, int4, int4_weight, mxfp4
from slipstream.kernels.gemm.int4_weight import Int4Weight
from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.gemm.mxfp4 import MXFP4Weight

Format = Literal["plain", "fp8", "fp8 blocks", "mxfp4", "int4"]


class FP8Weight(NamedTuple):
    """codes * scales."""

    codes: Tensor  # (E, O, I) e4m3
    scales: Tensor  # fp32: (E, O), or (E, ceil(O / 128), B) of blocks
    inputs: fp8.InputScales


ExpertMatrix = Tensor | FP8Weight | MXFP4Weight | Int4Weight
"""A projection of all experts: (E, O, I), or the tensors of a format with E in front."""


def format_of(matrix: ExpertMatrix) -> Format:
    if isinstance(matrix, FP8Weight):
        return "fp8 blocks" if matrix.inputs.by_block else "fp8"
    return "mxfp4" if isinstance(matrix, MXFP4Weight) else "int4" if isinstance(matrix, Int4Weight) else "plain"


def num_inputs_of(matrix: ExpertMatrix) -> int:
    if isinstance(matrix, FP8Weight):
        return matrix.codes.shape[-1]
    return matrix.shape[-1] if isinstance(matrix, Tensor) else matrix.num_inputs


def multiply_expert(x: Tensor, matrix: ExpertMatrix, expert: int, bias: Tensor | None) -> Tensor:
    """x (M, I) by an expert's weights -> (M, O) in x's dtype, in plain torch."""
    if isinstance(matrix, FP8Weight):
        rows = fp8.quantize_rows.reference(x, matrix.inputs)
        return fp8.fp8_linear.reference(rows, matrix.codes[expert], matrix.scales[expert], bias)
    if isinstance(matrix, MXFP4Weight):
        weight = mxfp4.dequantize_words(MXFP4Weight(matrix.words[expert], matrix.scales[expert], matrix.num_inputs))
        return linear(x, weight.to(x.dtype), bias)
    if isinstance(matrix, Int4Weight):
        zeros = None if matrix.zeros is None else matrix.zeros[expert]
        int4_weights = matrix._replace(words=matrix.words[expert], scales=matrix.scales[expert], zeros=zeros)
        return int4.int4_linear.reference(x, int4_weights, bias)
    return linear(x, matrix[expert], bias)


def pointers(matrix: ExpertMatrix) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Weights, scales and zeros, for `multiply`."""
    if isinstance(matrix, FP8Weight):
        tensors: tuple[Tensor, Tensor | None, Tensor | None] = (matrix.codes, matrix.scales, None)
    elif isinstance(matrix, MXFP4Weight):
        tensors = (matrix.words, matrix.scales, None)
    elif isinstance(matrix, Int4Weight):
        tensors = (matrix.words, *int4_weight.unit_words(matrix))
    else:
        tensors = (matrix, None, None)
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    return tensors


def constants(matrix: ExpertMatrix, x: Tensor, depth: int) -> Mapping[str, Any]:
    """Constants of `multiply`, for inputs like x. `depth`: inputs of a tile, where the format does not fix it."""
    format = format_of(matrix)
    size = num_inputs_of(matrix)
    chunk = CHUNKS.get(format, depth)
    if format == "mxfp4":  # a step may take several
        chunk *= max(1, depth // chunk)
    unit = 0
    is_packed = False
    if isinstance(matrix, MXFP4Weight):
        is_packed = mxfp4.is_packed(x, matrix)
    elif isinstance(matrix, Int4Weight):
        unit = int4_weight.unit_inputs(matrix.group_size)
        is_packed = int4_weight.is_packed(matrix)
        assert not is_packed or matrix.scales.dtype == x.dtype
    return {"FORMAT": format, "DEPTH": chunk, "UNIT": unit, "EVEN": size % chunk == 0, "PACKED": is_packed}


CHUNKS = {"fp8": fp8.BLOCK, "fp8 blocks": fp8.BLOCK, "mxfp4": mxfp4.CHUNK, "int4": int4_weight.CHUNK}
"""Inputs of a tile, by format."""
MOST_CHUNKS: tl.constexpr = tl.constexpr(4)  # of a step in MXFP4; a power of two
WEIGHT_BITS = {"fp8": 8, "fp8 blocks": 8, "mxfp4": 4, "int4": 4}


@triton.jit
def multiply(
    weight_ptr, scale_ptr, zeros_ptr, expert, feature, num_outputs,
    x_ptr, row, x_stride, x_scale_ptr, block_stride, row_stride, valid, num_inputs, part,
    SPLIT: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, FORMAT: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, UNIT: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Features (OUTPUTS,) of an expert by the rows `row` (ROWS,) of x -> (OUTPUTS, ROWS) fp32; in
    MXFP4 from one of SPLIT parts of the inputs.

    Rows that are not `valid` are zeros. FP8: the scale of a row, or of a block and a row, is at block * block_stride +
    row * row_stride.
    """
    output = expert.to(tl.int64) * num_outputs + feature
    rows = x_ptr + row.to(tl.int64)[:, None] * x_stride
    x_scales = x_scale_ptr
    if FORMAT == "fp8" or FORMAT == "fp8 blocks":  # noqa: PLR1714  Triton has no `in`
        x_scales = x_scale_ptr + row.to(tl.int64) * row_stride
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    if FORMAT == "mxfp4":
        acc = _multiply_mxfp4(
            acc, weight_ptr, scale_ptr, output, rows, valid, num_inputs, part,
            SPLIT, DEPTH, STAGES, PACKED, EVEN, PRECISION,
        )  # fmt: skip
    elif FORMAT == "int4":
        acc = _multiply_int4(
            acc, weight_ptr, scale_ptr, zeros_ptr, expert, feature, num_outputs, rows, valid, num_inputs,
            DEPTH, UNIT, PACKED, EVEN, PRECISION,
        )  # fmt: skip
    elif FORMAT == "fp8 blocks":
        blocks = tl.cdiv(num_inputs, DEPTH)
        scales = scale_ptr + (expert.to(tl.int64) * tl.cdiv(num_outputs, DEPTH) + feature // DEPTH) * blocks
        acc = _multiply_blocks(
            acc, weight_ptr + output[:, None] * num_inputs, scales, rows, x_scales, block_stride, valid, num_inputs,
            DEPTH, STAGES, EVEN,
        )  # fmt: skip
    else:
        weights = weight_ptr + output[:, None] * num_inputs
        scales = ()
        if FORMAT == "fp8":  # after the products they would be waited for
            scales = tl.load(scale_ptr + output), tl.load(x_scales)
        for start in tl.range(0, num_inputs, DEPTH, num_stages=STAGES):
            k = start + tl.arange(0, DEPTH)[None, :]
            weight, x = _load_tiles(weights, rows, valid, k, num_inputs, EVEN)
            if FORMAT == "fp8":
                acc = tl.dot(weight, tl.trans(x), acc, max_num_imprecise_acc=DEPTH)
            else:
                acc = tl.dot(weight, tl.trans(x), acc, input_precision=PRECISION)
        if len(scales) > 0:
            acc = acc * scales[1][None, :] * scales[0][:, None]
    return acc


@triton.jit
def _load_tiles(weights, rows, valid, k, num_inputs, EVEN: tl.constexpr):
    """Weights (OUTPUTS, DEPTH) and inputs (ROWS, DEPTH)."""
    if EVEN:
        weight = tl.load(weights + k)
        x = tl.load(rows + k, mask=valid[:, None], other=0.0)
    else:
        weight = tl.load(weights + k, mask=k < num_inputs, other=0.0)
        x = tl.load(rows + k, mask=valid[:, None] & (k < num_inputs), other=0.0)
    return weight, x


@triton.jit
def _multiply_blocks(
    acc, weights, scales, rows, x_scales, block_stride, valid, num_inputs,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A loop that states its stages pipelines all its loads, also those that are no operands of a product."""
    for step in tl.range(0, tl.cdiv(num_inputs, DEPTH), num_stages=STAGES):
        weight, x = _load_tiles(weights, rows, valid, step * DEPTH + tl.arange(0, DEPTH)[None, :], num_inputs, EVEN)
        scale = tl.load(scales + step)
        x_scale = tl.load(x_scales + step * block_stride)
        acc += tl.dot(weight, tl.trans(x)) * (scale[:, None] * x_scale[None, :])
    return acc


@triton.jit
def _multiply_mxfp4(
    acc, words_ptr, scale_ptr, output, rows, valid, num_inputs, part,
    SPLIT: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A step takes DEPTH inputs. Pipelines the loads of scales, as `_multiply_blocks` does."""
    chunks = tl.cdiv(num_inputs, mxfp4.INPUTS)
    column = tl.arange(0, mxfp4.WORDS)[None, :]
    group = output // mxfp4.OUTPUTS * chunks
    place = output % mxfp4.OUTPUTS
    scales = group * mxfp4.OUTPUTS + place
    words = words_ptr + scales[:, None] * mxfp4.WORDS
    scales = scale_ptr + scales
    size = tl.cdiv(tl.cdiv(chunks, SPLIT), MOST_CHUNKS) * MOST_CHUNKS  # of a part: the same for any depth
    first = part * size
    last = tl.minimum((part + 1) * size, chunks)
    for step in tl.range(first, last, DEPTH // mxfp4.INPUTS, num_stages=STAGES):
        for index in tl.static_range(DEPTH // mxfp4.INPUTS):
            acc = mxfp4.add_products(
                acc, words, scales, rows + column, valid[:, None], num_inputs, step + index, EVEN, PACKED, PRECISION
            )
    return acc


@triton.jit
def _multiply_int4(
    acc, words_ptr, scale_ptr, zeros_ptr, expert, feature, num_outputs, rows, valid, num_inputs,
    CHUNK: tl.constexpr, UNIT: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    PLANE: tl.constexpr = CHUNK // 8
    chunks = tl.cdiv(num_inputs, CHUNK)
    output = (expert.to(tl.int64) * num_outputs + feature)[:, None]
    words = words_ptr + output * (chunks * PLANE) + tl.arange(0, PLANE)[None, :]
    pairs = expert.to(tl.int64) * chunks * (CHUNK // (2 * UNIT))
    scales = int4_weight.unit_pointers(scale_ptr, pairs, feature[:, None], num_outputs, PACKED)
    zeros = None
    if zeros_ptr is not None:
        zeros = int4_weight.unit_pointers(zeros_ptr, pairs, feature[:, None], num_outputs, PACKED)
    for chunk in range(chunks):
        acc = int4.add_products(
            acc, words, scales, zeros, num_outputs, rows, valid[:, None], num_inputs, chunk,
            UNIT, EVEN, PACKED, PRECISION,
        )  # fmt: skip
    return int4_weight.unscaled(acc, rows.dtype.element_ty, PACKED)
