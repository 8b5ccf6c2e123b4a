"""MXFP4 (OCP Microscaling Formats 1.0): 4-bit floating-point codes (e2m1), 32 of which share a power of two.

As gpt-oss stores it: two codes a byte, the even column in the low nibble, and a byte s a block, worth 2^(s - 127).

As it is multiplied: of 128 inputs, the 16-bit word j has inputs j, 32 + j, 64 + j and 96 + j. So the codes at one place
of 32 neighbouring words are those of a block. A shift and a mask bring a code's sign to bit 15 and its other bits to
bits 8 to 6, where they are the lowest of the exponent and the highest of the mantissa of a bf16 number: the value of
the code times 2^-126, also where that is subnormal. A product with 2^(s - 1) makes it the weight. bf16 has that factor
where no scale exceeds 2, as none of a published model does; then two words side by side in a register are decoded at
once. Weights are exact in bf16, since scales are powers of two: tensor cores multiply what the file means.

The words of 32 outputs and 128 inputs lie side by side, 2 KB, since pieces of 64 bytes take longer to load.
Letters: I inputs, O outputs, C = ceil(I / 128) chunks, G = O / 32 groups.
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
WIDEST = 128  # s of the largest scale, 2, by which codes are multiplied at once
PLACES = 4  # codes of a word
CHUNK = PLACES * BLOCK  # inputs of 32 words
GROUP = 32  # outputs whose words lie together
WORDS, OUTPUTS, INPUTS = (tl.constexpr(size) for size in (BLOCK, GROUP, CHUNK))  # of a group and chunk, for kernels
BITS = ((0, 1, 2, 9), (4, 5, 6, 13), (10, 11, 12, 3), (14, 7, 8, 15))
"""Where a word has the bits of the code at each place, from the lowest to the sign."""
CROSSED = (2, 3)
"""The place and the bit that words j and j ^ 1 have of each other's code: a rotation of both brings them home."""


class MXFP4Weight(NamedTuple):
    """Weights of one matrix, or of the experts of a layer (then all tensors have E in front)."""

    words: Tensor  # (G, C, 32, 32) int16: 32 words of each output of a group
    scales: Tensor  # (G, C, 32) int32: four bytes s of neighbouring blocks, the first one the lowest
    num_inputs: int
    is_wide: bool = False  # some scale exceeds 2


def is_packed(x: Tensor, weight: MXFP4Weight) -> bool:
    """Whether weights are decoded two at a time, for inputs like x; the interpreter does not know how."""
    return x.is_cuda and x.dtype == torch.bfloat16 and not weight.is_wide


def mxfp4_values(device: torch.device | None = None) -> Tensor:
    """(16,) fp32: the value of each code."""
    values = torch.tensor(VALUES, device=device)
    return torch.cat((values, -values))


def unpack_mxfp4(blocks: Tensor) -> Tensor:
    """blocks (..., B, 16) uint8 -> codes (..., 32 * B) uint8."""
    return torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-3)


def pack_words(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """blocks (..., O, B, 16) and scales (..., O, B), both uint8, as in files -> `words` and `scales` of MXFP4Weight.

    O is a multiple of 32. Inputs beyond the last are zeros. Needs twenty times the memory of the blocks: callers
    convert part by part.
    """
    missing = -blocks.shape[-2] % PLACES  # blocks that a chunk lacks
    codes = unpack_mxfp4(F.pad(blocks, (0, 0, 0, missing))).unflatten(-1, (-1, PLACES, BLOCK)).int()
    words = torch.zeros_like(codes[..., 0, :])  # (..., O, C, 32)
    for place, bits in enumerate(BITS):
        for bit, target in enumerate(bits):
            words |= (_to_words(codes[..., place, :], place, bit) >> bit & 1) << target
    words = torch.where(words < 1 << 15, words, words - (1 << 16)).to(torch.int16)
    packed = F.pad(scales, (0, missing)).contiguous().view(torch.int32)  # (..., O, C)
    words = words.unflatten(-3, (-1, GROUP)).transpose(-3, -2)
    packed = packed.unflatten(-2, (-1, GROUP))
    return words.contiguous(), packed.transpose(-2, -1).contiguous()


def _to_words(codes: Tensor, place: int, bit: int) -> Tensor:
    """The codes of which words have this bit, or the inverse."""
    return codes.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if (place, bit) == CROSSED else codes


def dequantize_words(weight: MXFP4Weight) -> Tensor:
    """(..., O, I) fp32."""
    words = weight.words.transpose(-3, -2).flatten(-4, -3).int()  # (..., O, C, 32)
    codes = torch.zeros(*words.shape[:-1], PLACES, BLOCK, dtype=torch.int32, device=words.device)
    for place, bits in enumerate(BITS):
        for bit, source in enumerate(bits):
            codes[..., place, :] |= (_to_words(words, place, bit) >> source & 1) << bit
    packed = weight.scales.transpose(-2, -1).flatten(-3, -2)  # (..., O, C)
    exponents = (packed.unsqueeze(-1) >> torch.arange(0, 32, 8, device=words.device) & 255).flatten(-2) - BIAS
    values = mxfp4_values(words.device)[codes].flatten(-3, -2)
    return torch.ldexp(values, exponents.unsqueeze(-1)).flatten(-2)[..., : weight.num_inputs]


GATHER = (
    "shl.b32 bits, $1, 6; and.b32 bits, bits, 0x81C081C0;",
    "shl.b32 bits, $1, 2; and.b32 bits, bits, 0x81C081C0;",
    "shf.r.wrap.b32 bits, $1, $1, 4; and.b32 bits, bits, 0x81C081C0;",
    "shr.b32 bits, $1, 8; and.b32 bits, bits, 0x00400040; and.b32 rest, $1, 0x81808180; or.b32 bits, bits, rest;",
)
"""PTX that brings the codes at a place of two words to the bits of two bf16 numbers."""


@triton.constexpr_function
def _assembly(place):
    """Decodes two words at once; $2 has the factor twice. Adding -0 keeps a product's sign."""
    return f"""{{
        .reg .b32 bits, rest, zero;
        {GATHER[place]}
        mov.b32 zero, 0x80008000;
        fma.rn.bf16x2 $0, bits, $2, zero;
    }}"""


@triton.jit
def _gather(words, neighbours, PLACE: tl.constexpr):
    """The bits of bf16 numbers, for words one by one (int32); neighbours are the words j ^ 1."""
    if PLACE == 2:
        bits = ((words >> 4) & 0x1C0) | ((neighbours << 12) & 0x8000)
    elif PLACE == 3:
        bits = ((words >> 8) & 0x40) | (words & 0x8180)
    else:
        bits = (words << (6 - 4 * PLACE)) & 0x81C0
    return bits


@triton.jit
def decode(words, exponents, PLACE: tl.constexpr, DTYPE: tl.constexpr, neighbours=None):
    """The weights at a place of words (outputs, columns) int16, whose outputs have the scales 2^(exponent - 127).

    Without neighbours two words at once, as bf16, for exponents up to WIDEST."""
    if neighbours is None:
        factors = tl.broadcast_to((exponents * 0x00800080 + 0x3F003F00)[:, None], words.shape)
        weights = tl.inline_asm_elementwise(
            _assembly(PLACE), "=r,r,r,r", [words, factors], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        bits = _gather(words.to(tl.int32), neighbours.to(tl.int32), PLACE)
        codes = (bits << 16).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
        # In fp32 all products are exact, but those with 2^-127, which becomes 0.
        weights = (codes * (exponents << 23).to(tl.float32, bitcast=True)[:, None]).to(DTYPE)
    return weights


@triton.jit
def add_products(
    acc, words_row, scales, x_row, inside, num_inputs, chunk,
    EVEN: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc (outputs, rows) plus the products of a chunk of inputs: words (outputs, 32), which have four scales an
    output, and x (rows, 128). A chunk after the last adds zeros; EVEN: there is none, and the last is full."""
    column = tl.arange(0, WORDS)[None, :]
    first = chunk * INPUTS
    if not EVEN:
        chunk = tl.minimum(chunk, tl.cdiv(num_inputs, INPUTS) - 1)
    words_row += chunk * (OUTPUTS * WORDS)
    words = tl.load(words_row + column)
    scale = tl.load(scales + chunk * OUTPUTS)
    neighbours = None
    if not PACKED:
        neighbours = tl.load(words_row + (column ^ 1))
    for place in tl.static_range(INPUTS // WORDS):
        mask = inside if EVEN else inside & (first + place * WORDS + column < num_inputs)
        x = tl.load(x_row + first + place * WORDS, mask=mask, other=0.0)
        weight = decode(words, (scale >> (8 * place)) & 255, place, x.dtype, neighbours)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision=PRECISION)
    return acc
