"""Linear layers with 4-bit weights and 16-bit inputs (W4A16): their inner layout and their product.

Every file format of such weights is brought into one layout when it is loaded. Eight codes make a word. Of 256 inputs,
the words 2 * j and 2 * j + 1 have the inputs 2 * j + 32 * i and 2 * j + 1 + 32 * i for i from 0 to 7: the first word
those of i up to 3, the even inputs in its low half and the odd ones in its high half, each from the low nibble up. So a
shift, a mask and a constant make two neighbouring inputs of such a pair, as 16-bit numbers in one register, and of 32
neighbouring words a tile of 32 neighbouring inputs, without moving numbers between threads. A weight is (code - zero) *
scale. Codes less 8 are exact in 16 bits, so tensor cores multiply these; the sum over inputs of a group is scaled in
fp32. Where zeros are not 8, the sum of the inputs themselves times zero - 8 is taken off it.

One kernel computes any number of rows: the weights are the left operand, inputs are added in their order and cut into
parts as in kernels/gemm/small_m.py. A row has the same bits in a pass of any size.
Letters: M rows, I inputs, O outputs, W = 32 * ceil(I / 256) words, G groups.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.kernels.gemm.activation import silu_mul
from slipstream.kernels.gemm.small_m import (
    PROGRAMS,
    SHARED_MEMORY,
    Tiling,
    merge_parts,
    part_inputs,
    round_silu_mul,
    scratch,
)
from slipstream.kernels.launch import Op, pdl_options, shared_memory, use_triton

CHUNK = 256  # inputs of 32 words
PLANE = 32  # inputs of the i-th nibbles of these
SYMMETRIC_ZERO = 8
FEW_ROWS = 128  # up to here parts are summed side by side, of 64 rows at a time
FEW_GATED_ROWS = 64  # and up to here gate and up in one kernel
MANY_ROWS = 128  # of a program
PART = 1024  # inputs that are not shared out
OFFSETS = {torch.bfloat16: 128.0, torch.float16: 1024.0}  # whose bits, with a code in the mantissa, are the sum


class Int4Weight(NamedTuple):
    """Weights of a layer."""

    words: Tensor  # (O, W) int32
    scales: Tensor  # (O, G), 16 or 32 bits
    zeros: Tensor | None  # (O, G) uint8; None: 8
    group_size: int  # 32, 64, 128, or a multiple of 256
    num_inputs: int


def num_words(num_inputs: int) -> int:
    """W."""
    return PLANE * -(-num_inputs // CHUNK)


def pack_codes(codes: Tensor) -> Tensor:
    """codes (O, I) of 0 to 15, any integer dtype -> words (O, W) int32; inputs beyond I get 8."""
    codes = F.pad(codes.to(torch.uint8), (0, -codes.shape[1] % CHUNK), value=SYMMETRIC_ZERO)
    planes = codes.unflatten(1, (-1, 2, 2, 2, PLANE // 2, 2))  # (O, chunks, word, byte, nibble, pair, half)
    pairs = planes.permute(0, 1, 5, 2, 6, 3, 4)  # (O, chunks, pair, word, half, byte, nibble)
    return (pairs[..., 0] | pairs[..., 1] << 4).flatten(4).view(torch.int32).flatten(1)


def unpack_words(words: Tensor, num_inputs: int) -> Tensor:
    """The inverse: (O, I) uint8."""
    pairs = words.contiguous().view(torch.uint8).unflatten(1, (-1, PLANE // 2, 2, 2, 2))
    planes = torch.stack((pairs & 15, pairs >> 4), dim=-1)  # (O, chunks, pair, word, half, byte, nibble)
    return planes.permute(0, 1, 3, 5, 6, 2, 4).flatten(1)[:, :num_inputs]


def dequantize(weight: Int4Weight) -> Tensor:
    """(O, I) fp32."""
    group = torch.arange(weight.num_inputs, device=weight.words.device) // weight.group_size
    zeros = SYMMETRIC_ZERO if weight.zeros is None else weight.zeros.float()[:, group]
    return (unpack_words(weight.words, weight.num_inputs).float() - zeros) * weight.scales.float()[:, group]


def runs_kernel(x: Tensor, weight: Int4Weight, *_: object, **__: object) -> bool:
    """On GPUs with the shared memory of Hopper's, for rows of 16-bit numbers that are loaded 16 bytes at a time."""
    fits = x.dtype in (torch.bfloat16, torch.float16) and weight.num_inputs % 8 == 0
    return fits and use_triton(x) and shared_memory(x.device) >= SHARED_MEMORY


def is_packed(x: Tensor) -> bool:
    """Whether weights are unpacked two at a time, for inputs like x; the interpreter does not know how."""
    return x.is_cuda and x.dtype in OFFSETS


@Op
def int4_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None = None, gated: bool = False) -> Tensor:
    """x (M, I) @ weight (O, I).T + bias (O,) -> (M, O) in x's dtype; `gated`, without a bias: silu_mul of that,
    (M, O / 2)."""
    work = x.dtype if x.is_cuda else torch.float32
    out = x.to(work) @ dequantize(weight).to(work).t()
    out = (out if bias is None else out + bias.to(work)).to(x.dtype)
    return silu_mul.reference(out) if gated else out


@int4_linear.kernel(when=runs_kernel)
def int4_linear_triton(
    x: Tensor, weight: Int4Weight, bias: Tensor | None = None, gated: bool = False, tiling: Tiling | None = None
) -> Tensor:
    """`tiling`: of few rows; its depth is CHUNK."""
    x = x if x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 else x.contiguous()
    if not gated or len(x) <= FEW_GATED_ROWS:
        return _launch(x, weight, bias, gated, tiling)
    return silu_mul(_launch(x, weight, bias, False, tiling, split=1))


def choose_int4_tiling(num_outputs: int, num_inputs: int, gated: bool = False, num_rows: int = 1) -> Tiling:
    """As many parts for any number of rows. Unpacking takes time in which other programs of a multiprocessor load: so
    for few rows there are several."""
    split, tiles = 1, triton.cdiv(num_outputs, 64)
    while not gated and tiles * split < 2 * PROGRAMS and num_inputs >= 2 * PART * split:
        split *= 2
    if num_rows > FEW_ROWS and triton.cdiv(num_outputs, 128) * triton.cdiv(num_rows, MANY_ROWS) >= PROGRAMS // 2:
        return Tiling(outputs=128, depth=CHUNK, split=split, stages=2, warps=8)
    if num_rows > FEW_ROWS:
        return Tiling(outputs=64, depth=CHUNK, split=split, stages=2)
    return Tiling(outputs=64, depth=CHUNK, split=split, stages=4 if split > 4 and num_rows <= 16 else 3)


def _launch(
    x: Tensor, weight: Int4Weight, bias: Tensor | None, gated: bool, tiling: Tiling | None, split: int | None = None
) -> Tensor:
    num_rows, all_outputs = len(x), len(weight.words)
    num_outputs = all_outputs // 2 if gated else all_outputs
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    assert bias is None or not gated
    tiling = tiling or choose_int4_tiling(num_outputs, weight.num_inputs, gated or split == 1, num_rows)
    is_few = num_rows <= FEW_ROWS
    rows = min(max(triton.next_power_of_2(num_rows), 16), 64) if is_few else MANY_ROWS
    parts, in_turn = (tiling.split, 1) if is_few else (1, tiling.split)
    tiles = triton.cdiv(num_outputs, tiling.outputs) * triton.cdiv(num_rows, rows)
    partial, counters = scratch(x.device, tiles * parts * tiling.outputs * rows, parts)
    pdl = pdl_options(x.device) if is_few else {"PDL": False}
    x_desc: Any = None if is_few else TensorDescriptor.from_tensor(x, [rows, PLANE])
    int4_kernel[(tiles, parts)](
        x, x_desc, weight.words, weight.scales, weight.zeros, bias, out, partial, counters, x.stride(0),
        num_rows, num_outputs, weight.num_inputs, weight.scales.shape[1], part_inputs(weight.num_inputs, tiling),
        ROWS=rows, OUTPUTS=tiling.outputs, CHUNK=CHUNK, PLANE=PLANE, UNIT=min(weight.group_size, CHUNK),
        UNITS=max(weight.group_size // CHUNK, 1), SPLIT=parts, IN_TURN=in_turn, SWIZZLE=8, GATED=gated,
        EVEN=weight.num_inputs % CHUNK == 0, ZERO=OFFSETS.get(x.dtype, 0.0) + SYMMETRIC_ZERO,
        PACKED=is_packed(x), PRECISION="ieee",
        num_stages=tiling.stages, num_warps=tiling.warps, **pdl,
    )  # fmt: skip
    return out


# Two words of a pair, a shift and the offset's bits for each -> two neighbours: (word >> shift) & mask | bits.
UNPACK_FIRST = tl.constexpr("{ .reg .b32 t; shr.b32 t, $1, $3; lop3.b32 $0, t, 0x000F000F, $5, 0xEA; }")
UNPACK_SECOND = tl.constexpr("{ .reg .b32 t; shr.b32 t, $2, $3; lop3.b32 $0, t, 0x000F000F, $5, 0xEA; }")


@triton.jit
def _unpack(words, PLACE: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """The codes of inputs 32 * PLACE to 32 * PLACE + 31 of a chunk, of words (OUTPUTS, 32), as numbers: more by 128 in
    bf16, by 1,024 in fp16. They are bits of the mantissa, since a conversion would take four times as long. PACKED: two
    at a time, which Triton cannot say."""
    SHIFT: tl.constexpr = 4 * (PLACE % 4)
    UNPACK: tl.constexpr = UNPACK_FIRST if PLACE < 4 else UNPACK_SECOND
    if PACKED and tl.bfloat16 == DTYPE:
        numbers = tl.inline_asm_elementwise(
            UNPACK, "=r,r,r,r,r,r,r", [words, SHIFT, 0x43004300], tl.bfloat16, is_pure=True, pack=2
        )
    elif PACKED:
        numbers = tl.inline_asm_elementwise(
            UNPACK, "=r,r,r,r,r,r,r", [words, SHIFT, 0x64006400], tl.float16, is_pure=True, pack=2
        )
    else:
        first, second = tl.split(tl.reshape(words, (words.shape[0], words.shape[1] // 2, 2)))
        word = first if PLACE < 4 else second
        codes = tl.reshape(tl.join((word >> SHIFT) & 15, (word >> (16 + SHIFT)) & 15), words.shape)
        if tl.bfloat16 == DTYPE:
            numbers = (codes | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
        elif tl.float16 == DTYPE:
            numbers = (codes | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
        else:
            numbers = codes.to(DTYPE)
    return numbers


@triton.jit
def load_scales(scales, zeros, chunk, num_groups, UNITS: tl.constexpr, COUNT: tl.constexpr):
    """Of the COUNT groups of a chunk, or of the one that UNITS chunks share: scales, and zeros where there are any.
    Inputs beyond the last are 0."""
    all_scales, all_zeros = (), ()
    for unit in tl.static_range(COUNT):
        group = tl.minimum(chunk * COUNT // UNITS + unit, num_groups - 1)
        all_scales = all_scales + (tl.load(scales + group),)  # type: ignore[assignment]
        if zeros is not None:
            all_zeros = all_zeros + (tl.load(zeros + group),)  # type: ignore[assignment]
    return all_scales, all_zeros


@triton.jit
def add_products(
    acc, words_row, x_desc, first_row, x_row, inside, num_inputs, scales, zeros, chunk,
    CHUNK: tl.constexpr, PLANE: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, ZERO: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc (OUTPUTS, ROWS) plus the products of a chunk of inputs: words (OUTPUTS, PLANE) and x (ROWS, CHUNK), which is
    loaded by `x_desc` or from `x_row`. `scales` and `zeros` as of `load_scales`."""
    DTYPE: tl.constexpr = x_row.dtype.element_ty
    words = tl.load(words_row + chunk * PLANE)
    x_tiles, k = x_row + chunk * CHUNK, chunk * CHUNK + tl.arange(0, PLANE)[None, :]
    for unit in tl.static_range(CHUNK // UNIT):
        total = tl.zeros(acc.shape, tl.float32)
        sums = tl.zeros(acc.shape, tl.float32)
        for plane in tl.static_range(UNIT // PLANE):
            place = unit * (UNIT // PLANE) + plane
            if x_desc is not None:
                x = x_desc.load([first_row, chunk * CHUNK + place * PLANE])  # zeros beyond the last
            elif EVEN:
                x = tl.load(x_tiles + place * PLANE, mask=inside, other=0.0)
            else:
                x = tl.load(x_tiles + place * PLANE, mask=inside & (k + place * PLANE < num_inputs), other=0.0)
            # A literal lets Triton unpack words in the registers from which tensor cores take them.
            weight = _unpack(words, unit * (UNIT // PLANE) + plane, DTYPE, PACKED) - ZERO
            total = tl.dot(weight, tl.trans(x), total, input_precision=PRECISION)
            if len(zeros) > 0:  # a product by ones, since a sum over x would need another layout
                sums = tl.dot(tl.full(weight.shape, 1.0, DTYPE), tl.trans(x), sums, input_precision=PRECISION)
        if len(zeros) > 0:
            total -= sums * (zeros[unit].to(tl.float32) - 8.0)
        acc += total * scales[unit].to(tl.float32)
    return acc


@triton.jit
def _sum_chunks(
    words, scales, zeros, x_desc, first_row, x_row, inside, first, last, num_outputs, num_inputs, num_groups,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, CHUNK: tl.constexpr, PLANE: tl.constexpr, UNIT: tl.constexpr,
    UNITS: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr, ZERO: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums (OUTPUTS, ROWS) over chunks `first` to `last`, and, gated, those of the features num_outputs further on.
    Scales are loaded a chunk ahead: Triton does not do that with numbers of less than 4 bytes."""
    COUNT: tl.constexpr = CHUNK // UNIT
    further = num_outputs.to(tl.int64)
    up_words, up_scales = words + further * tl.cdiv(num_inputs, CHUNK) * PLANE, scales + further * num_groups
    up_zeros = zeros
    if zeros is not None:
        up_zeros = zeros + further * num_groups
    up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    own, own_zeros = load_scales(scales, zeros, first, num_groups, UNITS, COUNT)
    if GATED:
        ups, up_zeros_own = load_scales(up_scales, up_zeros, first, num_groups, UNITS, COUNT)
    for chunk in range(first, last):
        after = chunk + 1
        next_own, next_zeros = load_scales(scales, zeros, after, num_groups, UNITS, COUNT)
        if GATED:
            next_ups, next_up_zeros = load_scales(up_scales, up_zeros, after, num_groups, UNITS, COUNT)
        acc = add_products(
            acc, words, x_desc, first_row, x_row, inside, num_inputs, own, own_zeros, chunk,
            CHUNK, PLANE, UNIT, EVEN, ZERO, PACKED, PRECISION,
        )  # fmt: skip
        if GATED:
            up = add_products(
                up, up_words, x_desc, first_row, x_row, inside, num_inputs, ups, up_zeros_own, chunk,
                CHUNK, PLANE, UNIT, EVEN, ZERO, PACKED, PRECISION,
            )  # fmt: skip
            ups, up_zeros_own = next_ups, next_up_zeros
        own, own_zeros = next_own, next_zeros
    return acc, up


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "num_groups"])
def int4_kernel(
    x_ptr, x_desc, words_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, partial_ptr, counters_ptr, x_stride,
    num_rows, num_outputs, num_inputs, num_groups, part,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, CHUNK: tl.constexpr, PLANE: tl.constexpr, UNIT: tl.constexpr,
    UNITS: tl.constexpr, SPLIT: tl.constexpr, IN_TURN: tl.constexpr, SWIZZLE: tl.constexpr, GATED: tl.constexpr,
    EVEN: tl.constexpr, ZERO: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """OUTPUTS features of ROWS rows (axis 0) from one part of the inputs (axis 1), or from IN_TURN parts one after
    another. UNIT inputs share a scale, or UNITS chunks do. Neighbours share SWIZZLE tiles of weights. Many rows are
    loaded by `x_desc`."""
    row_tiles, output_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_outputs, OUTPUTS)
    program = tl.program_id(0)
    band, within = program // (SWIZZLE * row_tiles), program % (SWIZZLE * row_tiles)
    width = tl.minimum(output_tiles - band * SWIZZLE, SWIZZLE)
    first_row = within // width * ROWS
    row = first_row + tl.arange(0, ROWS)
    outputs = (band * SWIZZLE + within % width) * OUTPUTS + tl.arange(0, OUTPUTS)
    safe = tl.minimum(outputs, num_outputs - 1)[:, None].to(tl.int64)
    words_row, column = tl.cdiv(num_inputs, CHUNK) * PLANE, tl.arange(0, PLANE)[None, :]
    words = words_ptr + safe * words_row + column
    scales = scales_ptr + safe * num_groups
    zeros = None
    if zeros_ptr is not None:
        zeros = zeros_ptr + safe * num_groups
    x_row = x_ptr + row[:, None].to(tl.int64) * x_stride + column
    inside = (row < num_rows)[:, None] & (column < PLANE)
    result = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up = tl.zeros((OUTPUTS, ROWS), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for index in range(IN_TURN):
        first = (tl.program_id(1) + index) * (part // CHUNK)
        last = tl.minimum(first + part // CHUNK, tl.cdiv(num_inputs, CHUNK))
        acc, ups = _sum_chunks(
            words, scales, zeros, x_desc, first_row, x_row, inside, first, last, num_outputs, num_inputs, num_groups,
            ROWS, OUTPUTS, CHUNK, PLANE, UNIT, UNITS, GATED, EVEN, ZERO, PACKED, PRECISION,
        )  # fmt: skip
        result += acc
        up += ups
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()

    cells = row[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    valid = (row < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    result = tl.trans(result)  # (ROWS, OUTPUTS)
    if SPLIT > 1:
        own_rows = num_rows - first_row
        result, valid = merge_parts(result, valid, partial_ptr, counters_ptr, own_rows, ROWS, OUTPUTS, SPLIT)
    if bias_ptr is not None:
        result += tl.load(bias_ptr + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)[None, :]
    rounded = result.to(out_ptr.dtype.element_ty)
    if GATED:
        rounded = round_silu_mul(rounded, tl.trans(up).to(rounded.dtype))
    tl.store(out_ptr + cells, rounded, mask=valid)
