"""MXFP4 (OCP Microscaling Formats 1.0): 4-bit floating-point codes (e2m1), 32 of which share a power of two.

As gpt-oss stores it: two codes a byte, the even column in the low nibble, and a byte s a block, worth 2^(s - 127).

As it is multiplied: of 128 inputs, the 16-bit word j has inputs j, 32 + j, 64 + j and 96 + j. So the codes at one place
of 32 neighbouring words are those of a block. A shift and a mask bring a code's sign to bit 15 and its other bits to
bits 8 to 6, where they are the lowest of the exponent and the highest of the mantissa of a bf16 number: the value of
the code times 2^-126, also where that is subnormal. Two words side by side in a register are decoded at once. Weights
are exact in bf16, since scales are powers of two: tensor cores multiply what the file means.
Letters: I inputs, O outputs, W = 32 * ceil(I / 128) words, C = ceil(I / 128) chunks.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

BLOCK = 32  # codes that share a scale
BIAS = 127  # of the scales' exponents
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; 8 to 15 are their negatives
PLACES = 4  # codes of a word
CHUNK = PLACES * BLOCK  # inputs of 32 words
BITS = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (10, 11, 13, 14))
"""Where a word has the bits of the code at each place, from the lowest to the sign."""


class MXFP4Weight(NamedTuple):
    """Weights of one matrix, or of the experts of a layer (then all tensors have E in front)."""

    words: Tensor  # (O, W) int16
    scales: Tensor  # (O, C) int32: four bytes s of neighbouring blocks, the first one the lowest
    num_inputs: int


def mxfp4_values(device: torch.device | None = None) -> Tensor:
    """(16,) fp32: the value of each code."""
    values = torch.tensor(VALUES, device=device)
    return torch.cat((values, -values))


def unpack_mxfp4(blocks: Tensor) -> Tensor:
    """blocks (..., B, 16) uint8 -> codes (..., 32 * B) uint8."""
    return torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-3)


def pack_mxfp4(codes: Tensor) -> Tensor:
    """The inverse: codes (..., I), I a multiple of 32 -> (..., I / 32, 16) uint8."""
    pairs = codes.to(torch.uint8).unflatten(-1, (-1, BLOCK // 2, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """blocks (..., B, 16) and scales (..., B), both uint8 -> (..., 32 * B). Values are exact in bf16.

    Needs five times the memory of the result beside it: callers convert large tensors part by part.
    """
    values = mxfp4_values(blocks.device)[unpack_mxfp4(blocks).int()].unflatten(-1, (-1, BLOCK))
    return torch.ldexp(values, scales.unsqueeze(-1).int() - BIAS).flatten(-2).to(dtype)


def pack_words(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """blocks (..., B, 16) and scales (..., B), both uint8, as in files -> `words` and `scales` of MXFP4Weight.

    Inputs beyond the last are zeros. Needs twenty times the memory of the blocks: callers convert part by part.
    """
    missing = -blocks.shape[-2] % PLACES  # blocks that a chunk lacks
    codes = unpack_mxfp4(F.pad(blocks, (0, 0, 0, missing))).unflatten(-1, (-1, PLACES, BLOCK)).int()
    words = torch.zeros_like(codes[..., 0, :])
    for place, bits in enumerate(BITS):
        for bit, target in enumerate(bits):
            words |= (codes[..., place, :] >> bit & 1) << target
    packed = F.pad(scales, (0, missing)).contiguous().view(torch.int32)
    return torch.where(words < 1 << 15, words, words - (1 << 16)).to(torch.int16).flatten(-2), packed


def dequantize_words(weight: MXFP4Weight) -> Tensor:
    """(..., O, I) fp32."""
    words = weight.words.unflatten(-1, (-1, BLOCK)).int()
    codes = torch.zeros(*words.shape[:-1], PLACES, BLOCK, dtype=torch.int32, device=words.device)
    for place, bits in enumerate(BITS):
        for bit, source in enumerate(bits):
            codes[..., place, :] |= (words >> source & 1) << bit
    exponents = weight.scales.contiguous().view(torch.uint8).int() - BIAS  # (..., O, 4 * C)
    values = mxfp4_values(words.device)[codes].flatten(-3, -2)
    return torch.ldexp(values, exponents.unsqueeze(-1)).flatten(-2)[..., : weight.num_inputs]


@triton.constexpr_function
def _assembly(place):
    """PTX that decodes two words at once. The factor is 2^126; adding -0 keeps a product's sign."""
    mask = "and.b32 bits, bits, 0x81C081C0;"
    if place == 3:
        gather = """
            shl.b32 bits, $1, 1; and.b32 bits, bits, 0x80008000;
            shr.b32 part, $1, 5; and.b32 part, part, 0x01000100; or.b32 bits, bits, part;
            shr.b32 part, $1, 4; and.b32 part, part, 0x00C000C0; or.b32 bits, bits, part;
        """
    else:
        gather = f"shl.b32 bits, $1, {3 * place}; {mask}"
    return f"""{{
        .reg .b32 bits, part, factor, zero;
        {gather}
        mov.b32 factor, 0x7E807E80; mov.b32 zero, 0x80008000;
        fma.rn.bf16x2 $0, bits, factor, zero;
    }}"""


@triton.jit
def decode(words, PLACE: tl.constexpr, DTYPE: tl.constexpr):
    """The values of the codes at a place of words (int16)."""
    if tl.bfloat16 == DTYPE:
        numbers = tl.inline_asm_elementwise(_assembly(PLACE), "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        wide = words.to(tl.int32)
        if PLACE == 3:
            bits = ((wide << 1) & 0x8000) | ((wide >> 5) & 0x100) | ((wide >> 4) & 0xC0)
        else:
            bits = (wide << (3 * PLACE)) & 0x81C0
        numbers = ((bits << 16).to(tl.float32, bitcast=True) * 8.507059173023462e37).to(DTYPE)  # times 2^126
    return numbers


@triton.jit
def _power(scale, DTYPE: tl.constexpr):
    """2^(s - 127), s the lowest byte: the exponent of a number. 2^-127 becomes 0; in fp16 all below 2^-24 do."""
    exponent = scale & 255
    if tl.bfloat16 == DTYPE:
        power = (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        power = (exponent << 23).to(tl.float32, bitcast=True).to(DTYPE)
    return power


@triton.jit
def add_products(
    acc, words_row, scales, x_row, inside, num_inputs, chunk,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc (OUTPUTS, ROWS) plus the products of a chunk of inputs: words (OUTPUTS, BLOCK), which have four scales an
    output, and x (ROWS, CHUNK)."""
    words, scale = tl.load(words_row + chunk * BLOCK), tl.load(scales + chunk)
    x_tiles, k = x_row + chunk * CHUNK, chunk * CHUNK + tl.arange(0, BLOCK)[None, :]
    for place in tl.static_range(CHUNK // BLOCK):
        mask = inside if EVEN else inside & (k + place * BLOCK < num_inputs)
        x = tl.load(x_tiles + place * BLOCK, mask=mask, other=0.0)
        weight = decode(words, place, x.dtype) * _power(scale >> (8 * place), x.dtype)[:, None]
        acc = tl.dot(weight, tl.trans(x), acc, input_precision=PRECISION)
    return acc
