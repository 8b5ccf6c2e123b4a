"""The gated activations of MLPs, and the gate of attention's output, in one launch each; and the gradient of SiLU's in
another.

SiLU, or GELU in the form with a tanh (Hendrycks & Gimpel, arXiv 1606.08415), which Gemma has. Both are
x * sigmoid(z): z = x, or z = 2 * sqrt(2 / pi) * (x + 0.044715 x^3), since (1 + tanh(z / 2)) / 2 = sigmoid(z).
"""

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.launch import Op, on_gpu, pdl_options, wait_for_inputs
from slipstream.kernels.norm import as_rows
from slipstream.kernels.tiles import load_fp32

Activation = Literal["silu", "gelu_tanh"]
BLOCK = 1024  # outputs of one program: 4 warps of 16-byte reads in bf16


@Op
def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up (..., 2 * I), gate before up -> silu(gate) * up (..., I)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@silu_mul.kernel(when=on_gpu)
def silu_mul_triton(gate_up: Tensor) -> Tensor:
    return _SiluMul.apply(gate_up) if torch.is_grad_enabled() else _forward(gate_up)


@Op
def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gate_up (..., 2 * I), gate before up -> gelu(gate) * up (..., I)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


@gelu_tanh_mul.kernel()
def gelu_tanh_mul_triton(gate_up: Tensor) -> Tensor:
    return _forward(gate_up, "gelu_tanh")


def activation_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up (..., 2 * I), gate before up -> activation(gate) * up (..., I)."""
    return silu_mul(gate_up) if activation == "silu" else gelu_tanh_mul(gate_up)


@Op
def sigmoid_mul(gate: Tensor, x: Tensor) -> Tensor:
    """sigmoid(gate) * x: gate, x (..., I), rows may be strided -> (..., I)."""
    return x * gate.sigmoid()


@sigmoid_mul.kernel()
def sigmoid_mul_triton(gate: Tensor, x: Tensor) -> Tensor:
    gates = as_rows(gate)
    rows = as_rows(x)
    size = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(rows):
        _sigmoid_mul[len(rows), triton.cdiv(size, BLOCK)](
            gates, rows, out, gates.stride(0), rows.stride(0), size, BLOCK=BLOCK, num_warps=4, **pdl_options(x.device)
        )
    return out


class _SiluMul(torch.autograd.Function):
    """Saves gate_up alone: backward recomputes silu. The gradient is fp32 inside and rounded once."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _forward(gate_up)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gradient = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
        rows = as_rows(gate_up)
        towards = as_rows(upstream)
        size = upstream.shape[-1]
        if len(rows):
            _silu_mul_gradient[len(rows), triton.cdiv(size, BLOCK)](
                rows, towards, gradient, rows.stride(0), towards.stride(0), size, BLOCK=BLOCK, num_warps=4
            )
        return gradient


def _forward(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    rows = as_rows(gate_up)
    size = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    if len(rows):
        grid = len(rows), triton.cdiv(size, BLOCK)
        sizes = {"GELU": activation == "gelu_tanh", "BLOCK": BLOCK, "num_warps": 4}
        _activation_mul[grid](rows, out, rows.stride(0), size, **sizes, **pdl_options(rows.device))
    return out


@triton.jit
def _activation_mul(
    gate_up_ptr, out_ptr, stride, size, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Rounds the activation before the product, as two separate operations would."""
    wait_for_inputs(PDL)
    row, columns, mask, gate, up = _load_gate_up(gate_up_ptr, stride, size, BLOCK)
    activated = activate(gate, GELU).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * size + columns, (activated.to(tl.float32) * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sigmoid_mul(gate_ptr, x_ptr, out_ptr, gate_stride, x_stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=mask, other=0.0)
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    tl.store(out_ptr + row * size + columns, round_sigmoid_mul(gate, x), mask=mask)


@triton.jit
def round_sigmoid_mul(gate, x):
    """Rounds the sigmoid before the product, as two separate operations would."""
    activated = (1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))).to(gate.dtype)
    return (activated.to(tl.float32) * x.to(tl.float32)).to(x.dtype)


@triton.jit
def _load_gate_up(gate_up_ptr, stride, size, BLOCK: tl.constexpr):
    """The program's row and columns, which of these there are, gates and ups."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate_up_ptr += row * stride + columns
    return row, columns, mask, load_fp32(gate_up_ptr, mask), load_fp32(gate_up_ptr + size, mask)


@triton.jit
def activate(gate, GELU: tl.constexpr):
    """gate in fp32 -> gelu(gate), or silu(gate)."""
    exponent = -gate
    if GELU:
        exponent = -1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(exponent))


@triton.jit
def _silu_mul_gradient(gate_up_ptr, upstream_ptr, gradient_ptr, stride, upstream_stride, size, BLOCK: tl.constexpr):
    row, columns, mask, gate, up = _load_gate_up(gate_up_ptr, stride, size, BLOCK)
    upstream = load_fp32(upstream_ptr + row * upstream_stride + columns, mask)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    gate_gradient = upstream * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    gradient_ptr += row * 2 * size + columns
    tl.store(gradient_ptr, gate_gradient.to(gradient_ptr.dtype.element_ty), mask=mask)
    tl.store(gradient_ptr + size, (upstream * gate * sigmoid).to(gradient_ptr.dtype.element_ty), mask=mask)
