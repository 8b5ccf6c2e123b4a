"""Linear layers with 16-bit weights, by the kernels that choose.py names; on a CPU, with a path for few rows."""

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.gemm.activation import Activation, activation_mul
from slipstream.kernels.gemm.choose import Choice, choose, device_of, product_of
from slipstream.kernels.gemm.small_m import gated_linear_few_rows_triton, linear_few_rows_triton
from slipstream.kernels.gemm.streamed_linear import streamed_linear
from slipstream.kernels.kv.rope import Rotation

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
    if x.is_cuda:
        flat = x.reshape(rows, x.shape[-1])
        choice = choose(product_of(flat, weight), device_of(x))
        if choice.kernel == "library":
            return F.linear(x, weight, bias)
        return few_rows(choice, flat, weight, bias).view(*x.shape[:-1], len(weight))
    if rows not in TRANSPOSED or weight.requires_grad:
        return F.linear(x, weight, bias)
    flat = x if x.dim() == 2 else x.reshape(rows, x.shape[-1])
    out = (weight @ torch.cat((flat, flat)).t())[:, :1] if rows == 1 else weight @ flat.t()
    out = out.t().contiguous()
    out = out if bias is None else out + bias
    return out if x.dim() == 2 else out.view(*x.shape[:-1], len(weight))


def few_rows(
    choice: Choice,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rotation: Rotation | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x (M, I) @ weight (O, I).T + bias (O,) by one of the kernels for few rows, in `dtype`, by default that of x. All
    but the streamed one, which is for the fewest, store it in `out` (M, O), if given."""
    if choice.kernel == "streamed":
        return streamed_linear(x, weight, bias, choice.tiling, dtype or x.dtype, rotation=rotation)
    return linear_few_rows_triton(x, weight, bias, choice.tiling, rotation, dtype, out)


def gated_few_rows(choice: Choice, x: Tensor, weight: Tensor, activation: Activation, is_early: bool) -> Tensor:
    """activation_mul(x (M, I) @ weight (2 * O, I).T) -> (M, O) by one of the kernels for few rows."""
    if choice.kernel == "streamed":
        return streamed_linear(x, weight, None, choice.tiling, x.dtype, activation=activation, is_early=is_early)
    return gated_linear_few_rows_triton(x, weight, choice.tiling, activation, is_early=is_early)


def rotated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, rotation: Rotation) -> Tensor | None:
    """linear(x (T, I), weight, bias) and `rotate_and_store` of its heads, where one kernel computes both: the queries
    (T, Q * D); else None."""
    if x.dim() != 2 or not x.is_cuda or not rotation.is_whole:
        return None
    choice = choose(product_of(x, weight, "rotated", rotation=rotation), device_of(x))
    return None if choice.kernel == "apart" else few_rows(choice, x, weight, bias, rotation)


def gated_linear(x: Tensor, weight: Tensor, activation: Activation = "silu", *, is_early: bool = False) -> Tensor:
    """activation_mul(linear(x (..., H), weight (2 * I, H))) -> (..., I), gate before up. is_early: see
    `gated_linear_few_rows_triton`."""
    flat = x.reshape(x.numel() // x.shape[-1], x.shape[-1])
    if x.is_cuda:
        choice = choose(product_of(flat, weight, "gated"), device_of(x))
        if choice.kernel != "library":
            out = gated_few_rows(choice, flat, weight, activation, is_early)
            return out.view(*x.shape[:-1], len(weight) // 2)
    return activation_mul(linear(x, weight), activation)
