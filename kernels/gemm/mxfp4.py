"""MXFP4 (OCP Microscaling Formats 1.0): 4-bit floating-point codes (e2m1), 32 of which share a power of two.

As gpt-oss stores it: two codes a byte, the even column in the low nibble, and a byte s a block, worth 2^(s - 127).
"""

import torch
from torch import Tensor

BLOCK = 32  # codes that share a scale
BIAS = 127  # of the scales' exponents
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; 8 to 15 are their negatives


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
