"""RMS norms (Zhang & Sennrich 2019) in one launch each: alone, of heads before a gate, after a residual add, of two
inputs side by side, of a residual to which normed rows are added (`Increment`), by several weights; and of parts of a
row, such as query and key heads, in plain torch.

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
MOST_WEIGHTS = 3  # of norms of the same rows


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


class Branch(NamedTuple):
    """Rows and the norm that is read of them."""

    x: Tensor  # (..., H)
    gain: Tensor  # (H,), the norm's weight
    eps: float


class Increment(NamedTuple):
    """Growth of a residual that is not computed yet, so that the next norm's kernel does it."""

    first: Branch
    second: Branch | None = None  # added to the first
    outer: tuple[Tensor, float] | None = None  # gain (H,) and eps of a norm of their sum
    factor: Tensor | None = None  # (1,), of the new residual


@Op
def grow_and_norm(
    residual: Tensor, increment: Increment, weights: Sequence[Tensor] = (), eps: float = 0.0, out: Tensor | None = None
) -> tuple[list[Tensor], Tensor]:
    """([rms_norm(summed, weight, eps) for `weights`], summed) with summed = (residual + increment) * its factor, each
    step rounded before the next. residual (..., H); at most three `weights` (H,); `out` as in `add_rms_norm`."""
    first, second, outer, factor = increment
    delta = rms_norm.reference(*first)
    if second is not None:
        delta = delta + rms_norm.reference(*second)
    if outer is not None:
        delta = rms_norm.reference(delta, *outer)
    summed = residual + delta
    if factor is not None:
        summed = summed * factor
    if out is not None:
        summed = out.copy_(summed)
    return [rms_norm.reference(summed, weight, eps) for weight in weights], summed


@grow_and_norm.kernel()
def grow_and_norm_triton(
    residual: Tensor, increment: Increment, weights: Sequence[Tensor] = (), eps: float = 0.0, out: Tensor | None = None
) -> tuple[list[Tensor], Tensor]:
    assert len(weights) <= MOST_WEIGHTS
    dtype = torch.result_type(residual, increment.first.x)
    normed = [torch.empty(residual.shape, dtype=dtype, device=residual.device) for _ in weights]
    summed = torch.empty(residual.shape, dtype=dtype, device=residual.device) if out is None else out
    old = as_rows(residual)
    sums = summed.view(-1, summed.shape[-1])
    assert sums.stride(1) == 1
    if len(old):
        unused = (None,) * (MOST_WEIGHTS - len(weights))
        _grow_and_norm[(len(old),)](
            old, *increment_arguments(increment), *weights, *unused, *normed, *unused, sums, old.stride(0),
            sums.stride(0), eps, **_launch(increment.first.gain),
        )  # fmt: skip
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
    """Qwen3's q/k norms: weights of the query heads q (D,) and of the key heads k (D,); and Gemma 4's of values."""

    q: Tensor
    k: Tensor
    eps: float
    last: bool = False  # those of q and k follow the rotation (Hunyuan)
    v: Tensor | None = None


def norm_heads(q: Tensor, k: Tensor, v: Tensor, norms: HeadNorms | None) -> tuple[Tensor, Tensor, Tensor]:
    """Norms q (..., Q, D), k and v (..., G, D); returns what has no norm unchanged. When serving on a GPU, the kernel
    of kernels/kv/rope.py does this."""
    if norms is None:
        return q, k, v
    v = v if norms.v is None else rms_norm(v, norms.v, norms.eps)
    return rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps), v


def as_rows(x: Tensor) -> Tensor:
    """(..., H) -> (T, H) with contiguous rows; copies only if no view has that shape."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def increment_arguments(delta: Tensor | Increment | None) -> tuple[Any, ...]:
    """Arguments of kernels that call `grown_row`: rows, weights and the factor, then strides and eps."""
    if delta is None:
        return (None,) * 6 + (0, 0, 0.0, 0.0, 0.0)
    if isinstance(delta, Tensor):
        rows = as_rows(delta)
        return rows, None, None, None, None, None, rows.stride(0), 0, 0.0, 0.0, 0.0
    first, second, outer, factor = delta
    rows = as_rows(first.x)
    outer_gain, outer_eps = outer or (None, 0.0)
    if second is None:
        return rows, None, first.gain, None, outer_gain, factor, rows.stride(0), 0, first.eps, 0.0, outer_eps
    added = as_rows(second.x)
    return (
        rows, added, first.gain, second.gain, outer_gain, factor, rows.stride(0), added.stride(0),
        first.eps, second.eps, outer_eps,
    )  # fmt: skip


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
def _grow_and_norm(
    residual_ptr, first_ptr, second_ptr, first_weight_ptr, second_weight_ptr, outer_weight_ptr, factor_ptr,
    first_stride, second_stride, first_eps, second_eps, outer_eps, weight_ptr, weight_2_ptr, weight_3_ptr,
    normed_ptr, normed_2_ptr, normed_3_ptr, summed_ptr, residual_stride, summed_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    first_weight = load_fp32(first_weight_ptr + columns, mask)
    second_weight = load_optional(second_weight_ptr, columns, mask)
    outer_weight = load_optional(outer_weight_ptr, columns, mask)
    factor = load_factor(factor_ptr)
    weight = load_optional(weight_ptr, columns, mask)
    weight_2 = load_optional(weight_2_ptr, columns, mask)
    weight_3 = load_optional(weight_3_ptr, columns, mask)
    wait_for_inputs(PDL)
    residual = load_fp32(residual_ptr + row * residual_stride + columns, mask)
    summed = grown_row(
        residual, first_ptr, second_ptr, first_weight, second_weight, outer_weight, factor, first_stride,
        second_stride, first_eps, second_eps, outer_eps, row, columns, mask, summed_ptr, SIZE,
    )  # fmt: skip
    tl.store(summed_ptr + row * summed_stride + columns, summed, mask=mask)
    x = summed.to(tl.float32)
    if weight_ptr is not None:
        _norm_row(x, weight, normed_ptr + row * SIZE, columns, mask, eps, SIZE)
    if weight_2_ptr is not None:
        _norm_row(x, weight_2, normed_2_ptr + row * SIZE, columns, mask, eps, SIZE)
    if weight_3_ptr is not None:
        _norm_row(x, weight_3, normed_3_ptr + row * SIZE, columns, mask, eps, SIZE)


@triton.jit
def load_optional(weight_ptr, columns, mask):
    """A weight (SIZE,) in fp32; None where there is none."""
    weight = None
    if weight_ptr is not None:
        weight = load_fp32(weight_ptr + columns, mask)
    return weight


@triton.jit
def load_factor(factor_ptr):
    factor = None
    if factor_ptr is not None:
        factor = tl.load(factor_ptr).to(tl.float32)
    return factor


@triton.jit
def grown_row(
    residual, first_ptr, second_ptr, first_weight, second_weight, outer_weight, factor, first_stride, second_stride,
    first_eps, second_eps, outer_eps, row, columns, mask, summed_ptr, SIZE: tl.constexpr,
):  # fmt: skip
    """A row of a residual, fp32, after an `Increment`, whose `arguments` these are, with weights and factor loaded;
    rounded as `summed_ptr` is. Without `first_weight` the first row is added as it is."""
    delta = load_fp32(first_ptr + row * first_stride + columns, mask)
    if first_weight is not None:
        delta = _rounded_norm(delta, first_weight, first_eps, first_ptr, SIZE)
    if second_ptr is not None:
        second = load_fp32(second_ptr + row * second_stride + columns, mask)
        delta += _rounded_norm(second, second_weight, second_eps, first_ptr, SIZE)
        delta = delta.to(first_ptr.dtype.element_ty).to(tl.float32)
    if outer_weight is not None:
        delta = _rounded_norm(delta, outer_weight, outer_eps, first_ptr, SIZE)
    summed = (residual + delta).to(summed_ptr.dtype.element_ty)
    if factor is not None:
        summed = (summed.to(tl.float32) * factor).to(summed_ptr.dtype.element_ty)
    return summed


@triton.jit
def _rounded_norm(x, weight, eps, like_ptr, SIZE: tl.constexpr):
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    return (x * scale * weight).to(like_ptr.dtype.element_ty).to(tl.float32)


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
