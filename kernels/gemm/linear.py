"""Linear layers, with paths for the few rows of a decode or verify pass, which is bound by reading the weights."""

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.gemm.activation import Activation, activation_mul
from slipstream.kernels.gemm.small_m import (
    FAST_ROWS,
    MAX_GATED_ROWS,
    gated_linear_few_rows_triton,
    linear_few_rows_triton,
    rotates,
)
from slipstream.kernels.gemm.tiling import MAX_OUTPUTS, SHARED_MEMORY
from slipstream.kernels.kv.rope import Rotation
from slipstream.kernels.launch import shared_memory, use_triton

FEW_ROWS = 8
# Numbers of rows for which a CPU computes a product transposed. Without AVX-512 one row is slower that way.
TRANSPOSED = range(1 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 2, FEW_ROWS + 1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., I) @ weight (O, I).T + bias (O,) -> (..., O).

    The CPU library reads row-major weights about twice as fast when they are the left operand with at least two
    columns on the right, so we compute the transposed product there (docs/log/2026-11-21.md, "Linear layers on the
    CPU").
    """
    rows = x.numel() // x.shape[-1]
    if x.is_cuda and len(weight) <= MAX_OUTPUTS and few_on_gpu(x, weight):
        return linear_few_rows_triton(x.reshape(rows, -1), weight, bias).view(*x.shape[:-1], len(weight))
    if x.is_cuda or rows not in TRANSPOSED or weight.requires_grad:
        return F.linear(x, weight, bias)
    flat = x if x.dim() == 2 else x.reshape(rows, x.shape[-1])
    out = (weight @ torch.cat((flat, flat)).t())[:, :1] if rows == 1 else weight @ flat.t()
    out = out.t().contiguous()
    out = out if bias is None else out + bias
    return out if x.dim() == 2 else out.view(*x.shape[:-1], len(weight))


def rotated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, rotation: Rotation) -> Tensor | None:
    """linear(x (T, I), weight, bias) and `rotate_and_store` of its heads, where one kernel computes both: the queries
    (T, Q * D); else None."""
    if x.dim() != 2 or not x.is_cuda or not rotates(weight, rotation) or not few_on_gpu(x, weight):
        return None
    return linear_few_rows_triton(x, weight, bias, rotation=rotation)


def gated_linear(x: Tensor, weight: Tensor, activation: Activation = "silu") -> Tensor:
    """activation_mul(linear(x (..., H), weight (2 * I, H))) -> (..., I), gate before up."""
    if not few_on_gpu(x, weight, gated=True):
        return activation_mul(linear(x, weight), activation)
    flat = x.reshape(x.numel() // x.shape[-1], -1)
    out = gated_linear_few_rows_triton(flat, weight, activation=activation)
    return out.view(*x.shape[:-1], len(weight) // 2)


def few_on_gpu(x: Tensor, weight: Tensor, gated: bool = False) -> bool:
    """Whether our kernel computes the product: few rows, 16-bit weights, row lengths that load 16 bytes at once."""
    max_rows = MAX_GATED_ROWS if gated else FAST_ROWS
    if not use_triton(x) or not 0 < x.numel() <= max_rows * x.shape[-1] or shared_memory(x.device) < SHARED_MEMORY:
        return False
    fits = weight.dtype == x.dtype and weight.dtype in (torch.bfloat16, torch.float16)
    return fits and x.shape[-1] % 64 == 0 and weight.stride(-1) == 1
