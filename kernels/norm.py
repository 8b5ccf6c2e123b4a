"""RMS norms (Zhang & Sennrich 2019) in one launch each: alone, of heads before a gate, after a residual add, of two
inputs side by side, of a residual to which a normed row is added; and of parts of a row, such as query and key heads,
in plain torch.

fp32 inside, rounded once. One program per row, in which a thread reads 16 bytes; the number of threads depends on the
row's size alone, so a row's result does not depend on the number of rows. Results have the input's dtype. Weights
may be fp32 where rows are not, as Gemma's, which are 1 + w: the product is rounded, not they. Under autocast the
references cast them, because torch's fused norms take one dtype.
Letters: T rows (any leading dims), H hidden, K parts, Q/G query and KV heads, D head dim.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.launch import Op, on_gpu, pdl_options, wait_for_inputs
from slipstream.kernels.tiles import load_fp32

LANE_ELEMENTS = 8  # 16 bytes of bf16
GATED_HEADS = 4  # of a program


@Op
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., H) / rms(x) * weight (H,) -> (..., H) in x's dtype."""
    if not torch.is_autocast_enabled(x.device.type):
        if weight.dtype == x.dtype:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    weight = weight.to(x.dtype)
    with torch.autocast(x.device.type, enabled=False):  # autocast would make torch 2.12 return fp32
        return F.rms_norm(x, weight.shape, weight, eps)


@rms_norm.kernel()
def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = as_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(rows):
        _rms_norm[(len(rows),)](rows, weight, out, rows.stride(0), eps, **_launch(weight))
    return out


@Op
def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norms heads x (..., K, H) and multiplies them by silu(gate), gate (..., K * H) -> (..., K * H) in x's dtype."""
    normed = rms_norm.reference(x, weight, eps).flatten(-2)
    return (normed * F.silu(gate.float())).to(x.dtype)


@rms_norm_gated.kernel(when=on_gpu)
def rms_norm_gated_triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    heads = x.reshape(-1, *x.shape[-2:])
    gates = as_rows(gate)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device).flatten(-2)
    count, num_heads, size = heads.shape
    if count:
        _rms_norm_gated[(count, triton.cdiv(num_heads, GATED_HEADS))](
            heads, gates, weight, out, gates.stride(0), num_heads, eps, SIZE=size, BLOCK=triton.next_power_of_2(size),
            HEADS=GATED_HEADS, num_warps=4, **pdl_options(x.device),
        )  # fmt: skip
    return out


@Op
def add_rms_norm(
    residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(rms_norm(summed), summed) with summed = residual + delta, rounded before it is normed; both have its dtype.

    residual, delta (..., H); `out` (..., H), rows may be strided, receives `summed`: outside autograd only.
    """
    summed = residual + delta if out is None else torch.add(residual, delta, out=out)
    return rms_norm.reference(summed, weight, eps), summed


@add_rms_norm.kernel()
def add_rms_norm_triton(
    residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    dtype = torch.result_type(residual, delta)
    normed = torch.empty(residual.shape, dtype=dtype, device=residual.device)
    summed = torch.empty_like(normed) if out is None else out
    old = as_rows(residual)
    new = as_rows(delta)
    sums = summed.view(-1, summed.shape[-1])
    assert sums.stride(1) == 1
    if len(old):
        _add_rms_norm[(len(old),)](
            old, new, weight, normed, sums, old.stride(0), new.stride(0), sums.stride(0), eps, **_launch(weight)
        )
    return normed, summed


@Op
def norm_add_norm(
    residual: Tensor, delta: Tensor, weights: tuple[Tensor, Tensor], eps: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """(rms_norm(summed), summed) with summed = residual + rms_norm(delta), each rounded before the next; all (..., H).
    weights (H,) and eps: of delta, of the sum."""
    return add_rms_norm.reference(residual, rms_norm.reference(delta, weights[0], eps[0]), weights[1], eps[1])


@norm_add_norm.kernel()
def norm_add_norm_triton(
    residual: Tensor, delta: Tensor, weights: tuple[Tensor, Tensor], eps: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    dtype = torch.result_type(residual, delta)
    normed = torch.empty(residual.shape, dtype=dtype, device=residual.device)
    summed = torch.empty_like(normed)
    old = as_rows(residual)
    new = as_rows(delta)
    if len(old):
        _norm_add_norm[(len(old),)](
            old, new, *weights, normed, summed, old.stride(0), new.stride(0), *eps, **_launch(weights[0])
        )
    return normed, summed


@Op
def rms_norm_pair(first: Tensor, second: Tensor, weights: tuple[Tensor, Tensor], eps: float) -> Tensor:
    """[rms_norm(first) ; rms_norm(second)]: first, second (..., H) -> (..., 2 * H) in their dtype; weights (H,)."""
    normed = [rms_norm.reference(x, weight, eps) for x, weight in zip((first, second), weights, strict=True)]
    return torch.cat(normed, dim=-1)


@rms_norm_pair.kernel()
def rms_norm_pair_triton(first: Tensor, second: Tensor, weights: tuple[Tensor, Tensor], eps: float) -> Tensor:
    dtype = torch.result_type(first, second)
    out = torch.empty(*first.shape[:-1], 2 * first.shape[-1], dtype=dtype, device=first.device)
    left = as_rows(first)
    right = as_rows(second)
    if len(left):
        _rms_norm_pair[(len(left), 2)](
            left, right, *weights, out, left.stride(0), right.stride(0), eps, **_launch(weights[0])
        )
    return out


@Op
def rms_norm_parts(x: Tensor, weights: Sequence[Tensor], eps: float) -> Tensor:
    """Norms each of the K parts of x (..., K * H) by its own of the K `weights` (H,) -> (..., K * H) in x's dtype."""
    parts = x.unflatten(-1, (len(weights), -1))
    return rms_norm_each(parts, torch.stack(tuple(weights)), eps).flatten(-2)


@rms_norm_parts.kernel(when=on_gpu)
def rms_norm_parts_triton(x: Tensor, weights: Sequence[Tensor], eps: float) -> Tensor:
    parts = zip(x.chunk(len(weights), dim=-1), weights, strict=True)
    return torch.cat([rms_norm(part, weight, eps) for part, weight in parts], dim=-1)


def rms_norm_each(x: Tensor, weights: Tensor, eps: float) -> Tensor:
    """x (..., K, H) / rms(x) * weights (K, H) -> (..., K, H) in x's dtype. In plain torch, for the CPU: a norm of a few
    rows costs its operators, not its numbers, so one takes hardly longer than each of K."""
    return (F.rms_norm(x.float(), x.shape[-1:], None, eps) * weights).to(x.dtype)


class HeadNorms(NamedTuple):
    """Qwen3's q/k norms: weights of the query heads q (D,) and of the key heads k (D,)."""

    q: Tensor
    k: Tensor
    eps: float
    last: bool = False  # they follow the rotation (Hunyuan)


def norm_heads(q: Tensor, k: Tensor, norms: HeadNorms | None) -> tuple[Tensor, Tensor]:
    """Norms q (..., Q, D) and k (..., G, D); without norms returns them unchanged. When serving on a GPU, the kernel of
    kernels/kv/rope.py does this."""
    return (q, k) if norms is None else (rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps))


def as_rows(x: Tensor) -> Tensor:
    """(..., H) -> (T, H) with contiguous rows; copies only if no view has that shape."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(weight: Tensor) -> dict[str, Any]:
    size = weight.shape[0]
    block = triton.next_power_of_2(size)
    num_warps = min(max(block // (32 * LANE_ELEMENTS), 1), 16)
    return {"SIZE": size, "BLOCK": block, "num_warps": num_warps, **pdl_options(weight.device)}


@triton.jit
def _norm_row(x, weight, out_ptr, columns, mask, eps, SIZE: tl.constexpr):
    """Norms and stores one row of fp32 numbers, 0 beyond SIZE."""
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    tl.store(out_ptr + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm(
    x_ptr, weight_ptr, out_ptr, stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    weight = load_fp32(weight_ptr + columns, mask)
    wait_for_inputs(PDL)
    x = load_fp32(x_ptr + row * stride + columns, mask)
    _norm_row(x, weight, out_ptr + row * SIZE, columns, mask, eps, SIZE)


@triton.jit
def _rms_norm_gated(
    x_ptr, gate_ptr, weight_ptr, out_ptr, gate_stride, num_heads, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HEADS heads (axis 1) of a row (axis 0)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < num_heads) & (column < SIZE)
    weight = load_fp32(weight_ptr + column, column < SIZE)
    wait_for_inputs(PDL)
    place = head * SIZE + column
    x = load_fp32(x_ptr + row * num_heads * SIZE + place, inside)
    gate = load_fp32(gate_ptr + row * gate_stride + place, inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)
    normed = (x * scale[:, None] * weight).to(out_ptr.dtype.element_ty).to(tl.float32)
    gated = normed * gate / (1 + tl.exp(-gate))
    tl.store(out_ptr + row * num_heads * SIZE + place, gated.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm(
    residual_ptr, delta_ptr, weight_ptr, normed_ptr, summed_ptr, residual_stride, delta_stride, summed_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    weight = load_fp32(weight_ptr + columns, mask)
    wait_for_inputs(PDL)
    residual = load_fp32(residual_ptr + row * residual_stride + columns, mask)
    delta = load_fp32(delta_ptr + row * delta_stride + columns, mask)
    summed = (residual + delta).to(summed_ptr.dtype.element_ty)
    tl.store(summed_ptr + row * summed_stride + columns, summed, mask=mask)
    _norm_row(summed.to(tl.float32), weight, normed_ptr + row * SIZE, columns, mask, eps, SIZE)


@triton.jit
def _norm_add_norm(
    residual_ptr, delta_ptr, delta_weight_ptr, weight_ptr, normed_ptr, summed_ptr, residual_stride, delta_stride,
    delta_eps, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    delta_weight = load_fp32(delta_weight_ptr + columns, mask)
    weight = load_fp32(weight_ptr + columns, mask)
    wait_for_inputs(PDL)
    residual = load_fp32(residual_ptr + row * residual_stride + columns, mask)
    delta = load_fp32(delta_ptr + row * delta_stride + columns, mask)
    scale = tl.rsqrt(tl.sum(delta * delta, axis=0) / SIZE + delta_eps)
    delta = (delta * scale * delta_weight).to(delta_ptr.dtype.element_ty).to(tl.float32)
    summed = (residual + delta).to(summed_ptr.dtype.element_ty)
    tl.store(summed_ptr + row * SIZE + columns, summed, mask=mask)
    _norm_row(summed.to(tl.float32), weight, normed_ptr + row * SIZE, columns, mask, eps, SIZE)


@triton.jit
def _rms_norm_pair(
    first_ptr, second_ptr, first_weight_ptr, second_weight_ptr, out_ptr, first_stride, second_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    is_first = tl.program_id(1) == 0
    if is_first:
        weight = load_fp32(first_weight_ptr + columns, mask)
    else:
        weight = load_fp32(second_weight_ptr + columns, mask)
    wait_for_inputs(PDL)
    out_ptr += row * 2 * SIZE
    if is_first:
        x = load_fp32(first_ptr + row * first_stride + columns, mask)
        _norm_row(x, weight, out_ptr, columns, mask, eps, SIZE)
    else:
        y = load_fp32(second_ptr + row * second_stride + columns, mask)
        _norm_row(y, weight, out_ptr + SIZE, columns, mask, eps, SIZE)
