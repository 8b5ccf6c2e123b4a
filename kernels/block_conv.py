"""The convolution along the rows of a block of draft slots (DFlash 2): every row has a kernel of its own.

Letters: T rows, blocks of S rows one after another, H channels, G groups of channels that share what a row's kernel
adds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.launch import Op, pdl_options, wait_for_inputs

CHANNELS = 1024  # of a program


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


@block_conv.kernel()
def block_conv_triton(x: Tensor, delta: Tensor, base: Tensor, block_size: int) -> Tensor:
    """One launch, in fp32 until it is stored."""
    size, (taps, groups) = x.shape[-1], delta.shape[-2:]
    rows, deltas = x.reshape(-1, size), delta.flatten(0, -3) if delta.dim() > 2 else delta[None]
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
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < size
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        there = inside & (channel < tl.where(row % block_size >= tap, size, 0))
        own = tl.load(delta_ptr + row * delta_stride + tap * tap_stride + channel // group_size, mask=there, other=0.0)
        base = tl.load(base_ptr + tap * base_stride + channel, mask=there, other=0.0)
        x = tl.load(x_ptr + (row - tap) * x_stride + channel, mask=there, other=0.0)
        total += (own.to(tl.float32) + base.to(tl.float32)) * x.to(tl.float32)
    tl.store(out_ptr + row * size + channel, total.to(out_ptr.dtype.element_ty), mask=inside)
