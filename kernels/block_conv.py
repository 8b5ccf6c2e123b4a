"""The convolution along the rows of a block of draft slots (DFlash 2): every row has a kernel of its own.

Letters: T rows, blocks of S rows one after another, H channels, G groups of channels that share what a row's kernel
adds.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.launch import Op, on_gpu, pdl_options, wait_for_inputs
from slipstream.kernels.tiles import load_fp32

CHANNELS = 1024  # of a program
# a program's share of the gradient
GRADIENT_CHANNELS = 512
GRADIENT_ROWS = 64


@Op
def block_conv(x: Tensor, delta: Tensor, base: Tensor, block_size: int) -> Tensor:
    """x (..., H), delta (..., taps, G), base (taps, H) -> (..., H), with taps beyond a block's first row left out:

    y[i, c] = sum over t of (base[t, c] + delta[i, t, c // (H / G)]) * x[i - t, c]
    """
    taps, groups = delta.shape[-2:]
    kernel = (base.unflatten(-1, (groups, -1)) + delta.unsqueeze(-1)).to(x.dtype)  # (..., taps, G, H / G)
    rows = x.reshape(-1, block_size, groups, x.shape[-1] // groups)
    kernel = kernel.view(-1, block_size, *kernel.shape[-3:])
    total = kernel[:, :, 0] * rows
    for tap in range(1, min(taps, block_size)):
        total = total + kernel[:, :, tap] * F.pad(rows[:, :-tap], (0, 0, 0, 0, tap, 0))
    return total.view(x.shape)


def runs_kernel(x: Tensor, delta: Tensor, *_: object) -> bool:
    """The gradient wants groups of a power of two channels that fit into a program."""
    group = x.shape[-1] // delta.shape[-1]
    fits = not torch.is_grad_enabled() or (group <= GRADIENT_CHANNELS and group.bit_count() == 1)
    return on_gpu(x) and fits


@block_conv.kernel(when=runs_kernel)
def block_conv_triton(x: Tensor, delta: Tensor, base: Tensor, block_size: int) -> Tensor:
    """One launch, in fp32 until it is stored; the gradient is another."""
    if torch.is_grad_enabled():
        return _BlockConv.apply(x, delta, base, block_size)
    return _forward(x, delta, base, block_size)


class _BlockConv(torch.autograd.Function):
    """Keeps the inputs alone. Gradients are fp32 inside and rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, base: Tensor, block_size: int) -> Tensor:
        ctx.save_for_backward(x, delta, base)
        ctx.block_size = block_size
        return _forward(x, delta, base, block_size)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Sums the programs' shares of the gradient of `base` in a fixed order."""
        x, delta, base = ctx.saved_tensors
        rows = _as_rows(x)
        deltas = _as_deltas(delta)
        towards = _as_rows(upstream)
        (num_rows, size), (taps, groups) = rows.shape, delta.shape[-2:]
        towards = towards if towards.stride(1) == 1 else towards.contiguous()
        grid = triton.cdiv(num_rows, GRADIENT_ROWS), triton.cdiv(size, GRADIENT_CHANNELS)
        x_gradient = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        delta_gradient = torch.empty(delta.shape, dtype=delta.dtype, device=x.device)
        parts = torch.empty(grid[0], taps, size, device=x.device)
        if num_rows:
            _block_conv_gradient[grid](
                rows, deltas, base, towards, x_gradient, delta_gradient, parts, rows.stride(0), deltas.stride(0),
                deltas.stride(1), base.stride(0), towards.stride(0), num_rows, size, groups, ctx.block_size,
                TAPS=taps, GROUP=size // groups, ROWS=GRADIENT_ROWS, BLOCK=GRADIENT_CHANNELS, num_warps=4,
            )  # fmt: skip
        return x_gradient, delta_gradient, parts.sum(dim=0).to(base.dtype), None


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _as_deltas(delta: Tensor) -> Tensor:
    """(T, taps, G)."""
    return delta.flatten(0, -3) if delta.dim() > 2 else delta[None]


def _forward(x: Tensor, delta: Tensor, base: Tensor, block_size: int) -> Tensor:
    size, (taps, groups) = x.shape[-1], delta.shape[-2:]
    rows = _as_rows(x)
    deltas = _as_deltas(delta)
    assert rows.stride(1) == base.stride(1) == deltas.stride(2) == 1
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if len(rows):
        block = min(CHANNELS, triton.next_power_of_2(size))
        _block_conv[(len(rows), triton.cdiv(size, block))](
            rows, deltas, base, out, rows.stride(0), deltas.stride(0), deltas.stride(1), base.stride(0), size,
            size // groups, block_size, TAPS=taps, BLOCK=block, num_warps=4, **pdl_options(x.device),
        )  # fmt: skip
    return out.view(x.shape)


@triton.jit(do_not_specialize=["block_size"])
def _block_conv(
    x_ptr, delta_ptr, base_ptr, out_ptr, x_stride, delta_stride, tap_stride, base_stride, size, group_size, block_size,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < size
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        valid = inside & (channel < tl.where(row % block_size >= tap, size, 0))
        delta = tl.load(
            delta_ptr + row * delta_stride + tap * tap_stride + channel // group_size, mask=valid, other=0.0
        )
        base = tl.load(base_ptr + tap * base_stride + channel, mask=valid, other=0.0)
        x = tl.load(x_ptr + (row - tap) * x_stride + channel, mask=valid, other=0.0)
        total += (delta.to(tl.float32) + base.to(tl.float32)) * x.to(tl.float32)
    tl.store(out_ptr + row * size + channel, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "block_size"])
def _block_conv_gradient(
    x_ptr, delta_ptr, base_ptr, upstream_ptr, x_gradient_ptr, delta_gradient_ptr, parts_ptr, x_stride, delta_stride,
    tap_stride, base_stride, upstream_stride, num_rows, size, groups, block_size,
    TAPS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes gradients of ROWS rows and BLOCK channels; parts (programs, TAPS, size) of the gradient of `base`."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < size
    count = tl.minimum(num_rows - first, ROWS).to(tl.int32)
    group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    for tap in tl.static_range(TAPS):
        total = tl.zeros((BLOCK,), tl.float32)
        for index in range(count):
            row = first + index
            valid = inside & (channel < tl.where(row % block_size >= tap, size, 0))
            upstream = load_fp32(upstream_ptr + row * upstream_stride + channel, valid)
            product = upstream * load_fp32(x_ptr + (row - tap) * x_stride + channel, valid)
            total += product
            delta_sum = tl.sum(tl.reshape(product, (BLOCK // GROUP, GROUP)), axis=1)
            cells = delta_gradient_ptr + (row * TAPS + tap) * groups + group
            tl.store(cells, delta_sum.to(delta_gradient_ptr.dtype.element_ty), mask=group < groups)
        tl.store(parts_ptr + (tl.program_id(0).to(tl.int64) * TAPS + tap) * size + channel, total, mask=inside)
    for index in range(count):
        row = first + index
        total = tl.zeros((BLOCK,), tl.float32)
        for tap in tl.static_range(TAPS):
            reader = row + tap  # which has read this row with that tap
            valid = inside & (channel < tl.where(row % block_size + tap < block_size, size, 0))
            cells = delta_ptr + reader * delta_stride + tap * tap_stride + channel // GROUP
            kernel = load_fp32(cells, valid)
            kernel += load_fp32(base_ptr + tap * base_stride + channel, valid)
            upstream = tl.load(upstream_ptr + reader * upstream_stride + channel, mask=valid, other=0.0)
            total += kernel * upstream.to(tl.float32)
        tl.store(x_gradient_ptr + row * size + channel, total.to(x_gradient_ptr.dtype.element_ty), mask=inside)
