"""The inner layout of 4-bit weights for 16-bit inputs (W4A16), and how kernels decode it.

Every file format of such weights is brought into one layout when it is loaded. Eight codes make a word. In 256 inputs,
the words 2 * j and 2 * j + 1 have the inputs 2 * j + 32 * i and 2 * j + 1 + 32 * i for i from 0 to 7: the first word
those of i up to 3, the even inputs in its low half and the odd ones in its high half, each from the low nibble up. So a
mask, and a shift for half of them, make two neighbouring inputs of such a pair, as 16-bit integers in one register, and
of 32 neighbouring words a tile of 32 neighbouring inputs, without moving numbers between threads. Scales and zeros of
two neighbouring units of inputs (of a group, or of 128 inputs where groups are larger) lie in a word, too.

The bits of an integer n below 256, read as bf16, are n * 2^-133. So one fma, of two numbers at a time, multiplies codes
by scale * 2^117 and takes off 8 * scale * 2^-16, which are exact: a rounded weight times 2^-16, for which sums are
multiplied by 2^16. Other zeros, subtracted first, take an instruction more, and so does fp16, whose range is too small.
Letters: I inputs, O outputs, W = 32 * ceil(I / 256) words, G groups, P pairs of units.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.launch import Op, pdl_options, use_triton

CHUNK = 256  # inputs of 32 words
PLANE = 32  # inputs of the i-th nibbles of these
MOST_UNIT = 128  # inputs that have a scale of their own in the inner layout
SYMMETRIC_ZERO = 8


class Int4Weight(NamedTuple):
    """Weights of a layer. `pack_codes` makes words, `pack_units` the others."""

    words: Tensor  # (O, W) int32
    scales: Tensor  # (P, O, 2) in the inputs' dtype
    zeros: Tensor | None  # (P, O, 2) int16; None: 8
    group_size: int  # 32, 64, 128, or a multiple of 256
    num_inputs: int


def num_words(num_inputs: int) -> int:
    """W."""
    return PLANE * -(-num_inputs // CHUNK)


def num_pairs(num_inputs: int, group_size: int) -> int:
    """P."""
    return -(-num_inputs // CHUNK) * CHUNK // (2 * unit_inputs(group_size))


def unit_inputs(group_size: int) -> int:
    """Inputs of a unit."""
    return min(group_size, MOST_UNIT)


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


def pack_units(groups: Tensor, group_size: int, num_inputs: int) -> Tensor:
    """Scales or zeros (O, G) of groups -> (P, O, 2) of units; beyond I those of the last group."""
    unit = unit_inputs(group_size)
    first = torch.arange(2 * num_pairs(num_inputs, group_size), device=groups.device) * unit
    units = groups[:, (first // group_size).clamp(max=groups.shape[1] - 1)]
    return units.unflatten(1, (-1, 2)).transpose(0, 1).contiguous()


def spread_units(units: Tensor, weight: Int4Weight) -> Tensor:
    """(P, O, 2) of units -> (O, I)."""
    flat = units.transpose(0, 1).flatten(1)
    return flat.repeat_interleave(unit_inputs(weight.group_size), dim=1)[:, : weight.num_inputs]


def is_packed(weight: Int4Weight) -> bool:
    """Whether kernels decode two weights at a time; the interpreter does not know how."""
    return weight.words.is_cuda and weight.scales.dtype in (torch.bfloat16, torch.float16)


def has_kernels(weight: Int4Weight, dtype: torch.dtype) -> bool:
    """Whether kernels decode its weights for inputs of this dtype."""
    return use_triton(weight.words) and is_packed(weight) and weight.scales.dtype == dtype


@Op
def dequantize(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """(O, I)."""
    zeros = SYMMETRIC_ZERO if weight.zeros is None else spread_units(weight.zeros, weight)
    codes = unpack_words(weight.words, weight.num_inputs).to(torch.int16)
    return (codes - zeros).to(dtype) * spread_units(weight.scales, weight).to(dtype)


@dequantize.kernel(when=has_kernels)
def dequantize_triton(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    num_outputs = len(weight.words)
    device = weight.words.device
    out = torch.empty(num_outputs, weight.num_inputs, dtype=dtype, device=device)
    outputs = 16
    dequantize_kernel[(triton.cdiv(num_outputs, outputs), triton.cdiv(weight.num_inputs, CHUNK))](
        weight.words, *unit_words(weight), out, num_outputs, weight.num_inputs,
        OUTPUTS=outputs, PLANE=PLANE, UNIT=unit_inputs(weight.group_size), EVEN=weight.num_inputs % CHUNK == 0,
        PACKED=is_packed(weight), num_warps=4, **pdl_options(device),
    )  # fmt: skip
    return out


def unit_words(weight: Int4Weight) -> tuple[Tensor, Tensor | None]:
    """Scales and zeros as kernels take them: packed, a pair of units is a word."""
    units = (weight.scales, weight.zeros)
    assert all(tensor is None or tensor.is_contiguous() for tensor in units)
    if not is_packed(weight):
        return units
    scales, zeros = (None if tensor is None else tensor.view(torch.int32) for tensor in units)
    assert scales is not None
    return scales, zeros


# Steps that make weights of two integers in a register, t: $7 scales, $9 is added before that or, in one step, after
# it; $11 makes 1 of an integer's unit. Where a product is an fma with -0, sm_80 has no other.
ONE_STEP = "fma.rn.bf16x2 $0, t, $7, $9;"
TWO_STEPS = "fma.rn.bf16x2 t, t, $11, $9; mov.b32 u, 0x80008000; fma.rn.bf16x2 $0, t, $7, u;"
TWO_STEPS_FP16 = "fma.rn.f16x2 t, t, $11, $9; mul.rn.f16x2 $0, t, $7;"
# Takes a pair's first or second word: (word >> $3) & $5 | bits.
TAKE = "{{ .reg .b32 t, u; shr.b32 t, ${word}, $3; mov.b32 u, {bits}; lop3.b32 t, t, $5, u, 0xEA; {steps} }}"
FIRST_BY_ONE, SECOND_BY_ONE, FIRST_BY_TWO, SECOND_BY_TWO, FIRST_FP16, SECOND_FP16 = (
    tl.constexpr(TAKE.format(word=word, bits=bits, steps=steps))
    for bits, steps in (("0", ONE_STEP), ("0", TWO_STEPS), ("0x64006400", TWO_STEPS_FP16))
    for word in (1, 2)
)
SCALE_PAIR = tl.constexpr("{ .reg .b32 u; mov.b32 u, 0x80008000; fma.rn.bf16x2 $0, $1, $2, u; }")
# One half of a register twice, shifted, and with other bits.
TWICE = "{{ .reg .b32 t; prmt.b32 t, $1, 0, {half}; shl.b32 t, t, $2; or.b32 $0, t, $3; }}"
TWICE_LOW, TWICE_HIGH = (tl.constexpr(TWICE.format(half=half)) for half in ("0x1010", "0x3232"))
REGISTERS = tl.constexpr("=r" + ",r" * 12)


@triton.jit
def _scale_pair(pair, BY: tl.constexpr):
    """Both bf16 numbers of a register times those of BY."""
    return tl.inline_asm_elementwise(SCALE_PAIR, "=r,r,r", [pair, BY], tl.int32, is_pure=True, pack=1)


@triton.jit
def _factors(pairs, zeros, INDEX: tl.constexpr, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """The factor and the summand of `plane` for unit INDEX, twice in a register. HIGH: the integers are 16 * code."""
    TWICE: tl.constexpr = TWICE_HIGH if INDEX % 2 else TWICE_LOW
    IS_BF16: tl.constexpr = tl.bfloat16 == DTYPE
    scale = tl.inline_asm_elementwise(TWICE, "=r,r,r,r", [pairs[INDEX // 2], 0, 0], tl.int32, is_pure=True, pack=1)
    by = scale
    if IS_BF16:
        by = _scale_pair(scale, 0x78007800 if HIGH else 0x7A007A00)  # 2^113, 2^117
    # -zero, -64 - zero or -1024 - zero
    SIGN: tl.constexpr = 0x80008000 if IS_BF16 else 0xD400D400 if HIGH else 0xE400E400
    if len(zeros) > 0:
        args = [zeros[INDEX // 2], 4 if HIGH else 0, SIGN]
        add = tl.inline_asm_elementwise(TWICE, "=r,r,r,r", args, tl.int32, is_pure=True, pack=1)
    elif IS_BF16:
        add = _scale_pair(scale, 0xB900B900)  # -8 * 2^-16
    else:
        add = (scale & 0).to(tl.uint32) | (SIGN | (0x00800080 if HIGH else 0x00080008))  # Gluon's `full` wants a layout
    return by, add


@triton.jit
def plane(words, scales, zeros, PLACE: tl.constexpr, UNIT: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """Weights of the inputs 32 * PLACE to 32 * PLACE + 31 of a chunk, of words (..., 32): in bf16 times 2^-16. PACKED:
    two at a time, which Triton cannot say, nor the interpreter do."""
    INDEX: tl.constexpr = PLACE * 32 // UNIT
    if PACKED:
        HIGH: tl.constexpr = PLACE % 2 == 1
        SHIFT: tl.constexpr = 8 * (PLACE // 2 % 2)
        MASK: tl.constexpr = 0x00F000F0 if HIGH else 0x000F000F
        by, add = _factors(scales, zeros, INDEX, HIGH, DTYPE)
        if tl.float16 == DTYPE:
            ASM: tl.constexpr = FIRST_FP16 if PLACE < 4 else SECOND_FP16
            args = [words, SHIFT, MASK, by, add, 0x2C002C00 if HIGH else 0x3C003C00]  # 1 / 16, 1
            weight = tl.inline_asm_elementwise(ASM, REGISTERS, args, tl.float16, is_pure=True, pack=2)
        else:
            BY_ONE: tl.constexpr = FIRST_BY_ONE if PLACE < 4 else SECOND_BY_ONE
            BY_TWO: tl.constexpr = FIRST_BY_TWO if PLACE < 4 else SECOND_BY_TWO
            BY: tl.constexpr = BY_TWO if len(zeros) > 0 else BY_ONE
            args = [words, SHIFT, MASK, by, add, 0x3F803F80]
            weight = tl.inline_asm_elementwise(BY, REGISTERS, args, tl.bfloat16, is_pure=True, pack=2)
    else:
        first, second = tl.split(tl.reshape(words, (words.numel // 2, 2)))
        word = (first if PLACE < 4 else second) >> 4 * (PLACE % 4)
        codes = tl.reshape(tl.join(word & 15, (word >> 16) & 15), words.shape)
        zero = 8
        if len(zeros) > 0:
            zero = zeros[INDEX]
        weight = (codes - zero).to(DTYPE) * scales[INDEX].to(DTYPE)
    return weight


@triton.jit
def _beside(first, second):
    """(O, K) and (O, K) -> (O, 2 * K). Threads keep their numbers."""
    return tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (first.shape[0], 2 * first.shape[1]))


@triton.jit
def decode_half(
    words, scales, zeros, HALF: tl.constexpr, UNIT: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr
):
    """Weights (OUTPUTS, 128) of the first or second half of a chunk, as of `plane`."""
    first = plane(words, scales, zeros, 4 * HALF, UNIT, DTYPE, PACKED)
    second = plane(words, scales, zeros, 4 * HALF + 1, UNIT, DTYPE, PACKED)
    third = plane(words, scales, zeros, 4 * HALF + 2, UNIT, DTYPE, PACKED)
    fourth = plane(words, scales, zeros, 4 * HALF + 3, UNIT, DTYPE, PACKED)
    return _beside(_beside(first, second), _beside(third, fourth))


@triton.jit
def unit_pointers(pointer, row, output, num_outputs, PACKED: tl.constexpr):
    """Pointers to outputs (OUTPUTS, 1) of the pair of units `row`, in the words of `unit_words` or, not packed,
    numbers."""
    STEP: tl.constexpr = 1 if PACKED else 2
    return pointer + (row * num_outputs + output) * STEP


@triton.jit
def load_units(pointers, chunk, num_outputs, COUNT: tl.constexpr, PACKED: tl.constexpr):
    """Scales or zeros of the COUNT units of a chunk: of words a tensor for two units, else one for each."""
    units = ()
    if PACKED:
        for pair in tl.static_range(COUNT // 2):
            units = units + (tl.load(pointers + (chunk * (COUNT // 2) + pair) * num_outputs),)  # type: ignore[assignment]
    else:
        for unit in tl.static_range(COUNT):
            cells = (chunk * (COUNT // 2) + unit // 2) * num_outputs * 2 + unit % 2
            units = units + (tl.load(pointers + cells),)  # type: ignore[assignment]
    return units


@triton.jit
def unscaled(numbers, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """Multiplies the products of weights times 2^-16 by 2^16."""
    return numbers * 65536.0 if PACKED and tl.bfloat16 == DTYPE else numbers


@triton.jit
def dequantize_kernel(
    words_ptr, scales_ptr, zeros_ptr, out_ptr, num_outputs, num_inputs,
    OUTPUTS: tl.constexpr, PLANE: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """OUTPUTS features (axis 0) of a chunk of inputs (axis 1)."""
    CHUNK: tl.constexpr = 8 * PLANE
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    chunk = tl.program_id(1)
    feature = tl.minimum(outputs, num_outputs - 1)[:, None]
    row = feature.to(tl.int64)
    words = tl.load(words_ptr + (row * tl.cdiv(num_inputs, CHUNK) + chunk) * PLANE + tl.arange(0, PLANE)[None, :])
    pointers = unit_pointers(scales_ptr, 0, feature, num_outputs, PACKED)
    scales = load_units(pointers, chunk, num_outputs, CHUNK // UNIT, PACKED)
    zeros = ()
    if zeros_ptr is not None:
        pointers = unit_pointers(zeros_ptr, 0, feature, num_outputs, PACKED)
        zeros = load_units(pointers, chunk, num_outputs, CHUNK // UNIT, PACKED)
    if PDL:  # the kernel before may read what is overwritten here
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = decode_half(words, scales, zeros, 0, UNIT, DTYPE, PACKED)
    weight = unscaled(_beside(first, decode_half(words, scales, zeros, 1, UNIT, DTYPE, PACKED)), DTYPE, PACKED)
    k = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = (outputs < num_outputs)[:, None]
    inside = inside if EVEN else inside & (k < num_inputs)
    tl.store(out_ptr + row * num_inputs + k, weight.to(DTYPE), mask=inside)
