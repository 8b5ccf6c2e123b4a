"""The gated activation of the MLP in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.launch import pdl_options, use_triton, wait_for_inputs

BLOCK = 1024  # outputs of one program: 4 warps of 16-byte reads in bf16


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up (..., 2 * I), gate before up -> silu(gate) * up (..., I)."""
    return silu_mul_triton(gate_up) if use_triton(gate_up) else silu_mul_reference(gate_up)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    size = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    rows = gate_up.reshape(-1, 2 * size)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    if len(rows):
        grid = len(rows), triton.cdiv(size, BLOCK)
        _silu_mul[grid](rows, out, rows.stride(0), size, BLOCK=BLOCK, num_warps=4, **pdl_options(rows.device))
    return out


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """silu is rounded before the product, as it is where the two are separate."""
    wait_for_inputs(PDL)
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(gate_up_ptr + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + size + columns, mask=mask, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * size + columns, (silu.to(tl.float32) * up).to(out_ptr.dtype.element_ty), mask=mask)
