"""Soft caps of logits (Gemma 2, arXiv 2408.00118, section 2): x becomes cap * tanh(x / cap)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import Op, pdl_options, wait_for_inputs
from slipstream.kernels.tiles import load_fp32

BLOCK = 2048  # logits of a program: 4 warps of two 16-byte reads in bf16


@Op
def softcap(logits: Tensor, cap: float) -> Tensor:
    """logits (..., V) -> the same shape and dtype; fp32 inside, rounded once. On a GPU `logits`, contiguous, are
    overwritten."""
    return (cap * torch.tanh(logits.float() / cap)).to(logits.dtype)


@softcap.kernel()
def softcap_triton(logits: Tensor, cap: float) -> Tensor:
    assert logits.is_contiguous()
    count = logits.numel()
    if count:
        _softcap[(triton.cdiv(count, BLOCK),)](
            logits, count, cap, BLOCK=BLOCK, num_warps=4, **pdl_options(logits.device)
        )
    return logits


@triton.jit(do_not_specialize=["count"])
def _softcap(logits_ptr, count, cap, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    cells = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = cells < count
    logits = load_fp32(logits_ptr + cells, inside)
    capped = cap * (2.0 / (1.0 + tl.exp(-2.0 * logits / cap)) - 1.0)  # tanh(x) = 2 sigmoid(2x) - 1
    tl.store(logits_ptr + cells, capped.to(logits_ptr.dtype.element_ty), mask=inside)
