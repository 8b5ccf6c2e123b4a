"""MXFP4 as files have it: blocks of 16 bytes, two codes in each, and a byte of scale a block."""

import torch
from torch import Tensor

from slipstream.kernels.gemm.mxfp4 import BIAS, BLOCK, mxfp4_values, unpack_mxfp4


def pack_mxfp4(codes: Tensor) -> Tensor:
    """codes (..., I), I a multiple of 32 -> blocks (..., I / 32, 16) uint8."""
    pairs = codes.to(torch.uint8).unflatten(-1, (-1, BLOCK // 2, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """blocks (..., B, 16) and scales (..., B), both uint8 -> (..., 32 * B). Values are exact in bf16."""
    values = mxfp4_values(blocks.device)[unpack_mxfp4(blocks).int()].unflatten(-1, (-1, BLOCK))
    return torch.ldexp(values, scales.unsqueeze(-1).int() - BIAS).flatten(-2).to(dtype)
