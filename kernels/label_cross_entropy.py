"""Cross-entropy against labels, and its gradient over the logits: no softmax is written, and no copy in fp32.

A program takes a row, which it reads once with a running maximum (Milakov & Gimelshein 2018, arXiv 1805.02867), and
once more for the gradient. Letters: M rows, V columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # columns that a program holds at a time, at most
LEAST_TILE = 128
NUM_WARPS = 8


def label_cross_entropy(logits: Tensor, labels: Tensor, *, with_gradient: bool) -> tuple[Tensor, Tensor]:
    """(losses (M,) fp32; best (M,) int64, each row's likeliest column, ties to the lowest).

    logits (M, V) of any float type, whose rows may lie apart; labels (M,) int64, of 0 .. V - 1. `with_gradient`: writes
    the gradient of each row's loss, softmax - onehot, over its logits, computed in fp32 and rounded once. For the
    forward of an autograd function: makes no graph itself.
    """
    assert not logits.requires_grad
    run = label_cross_entropy_triton if logits.is_cuda else label_cross_entropy_reference
    return run(logits, labels, with_gradient=with_gradient)


def label_cross_entropy_reference(logits: Tensor, labels: Tensor, *, with_gradient: bool) -> tuple[Tensor, Tensor]:
    """float64 logits are computed in float64."""
    label, best = labels.unsqueeze(1), logits.argmax(dim=-1)
    log_q = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
    losses = -log_q.gather(1, label).squeeze(1).float()
    if with_gradient:
        logits.copy_(log_q.exp_().scatter_add_(1, label, torch.full_like(label, -1, dtype=log_q.dtype)))
    return losses, best


def label_cross_entropy_triton(logits: Tensor, labels: Tensor, *, with_gradient: bool) -> tuple[Tensor, Tensor]:
    M, V = logits.shape
    assert labels.shape == (M,)
    assert logits.stride(1) == labels.stride(0) == 1
    losses = torch.empty(M, dtype=torch.float32, device=logits.device)
    best = torch.empty(M, dtype=torch.int64, device=logits.device)
    if M:
        tile = min(max(triton.next_power_of_2(V), LEAST_TILE), TILE)
        sizes = {"WITH_GRADIENT": with_gradient, "TILE": tile, "num_warps": NUM_WARPS}
        _label_cross_entropy[(M,)](logits, labels, losses, best, logits.stride(0), V, **sizes)
    return losses, best


@triton.jit
def _label_cross_entropy(
    logits_ptr, labels_ptr, losses_ptr, best_ptr, stride, V, WITH_GRADIENT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row)
    label_logit = tl.load(logits_ptr + label).to(tl.float32)
    peak, total = -1e30, 0.0  # a finite stand-in for -inf: differences of maxima stay numbers
    best_values, best_columns = tl.full((TILE,), float("-inf"), tl.float32), lanes
    for start in range(0, V, TILE):
        columns = start + lanes
        x = tl.load(logits_ptr + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
        best_columns = tl.where(x > best_values, columns, best_columns)
        best_values = tl.maximum(x, best_values)
        higher = tl.maximum(peak, tl.max(x, axis=0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), axis=0)
        peak = higher

    log_total = tl.log(total)
    tl.store(losses_ptr + row, peak - label_logit + log_total)
    best = tl.max(best_values, axis=0)
    tl.store(best_ptr + row, tl.min(tl.where(best_values == best, best_columns, V - 1), axis=0).to(tl.int64))
    if WITH_GRADIENT:
        tl.debug_barrier()  # every warp has read the row before one writes over it
        for start in range(0, V, TILE):
            columns = start + lanes
            x = tl.load(logits_ptr + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(x - peak - log_total) - tl.where(columns == label, 1.0, 0.0)
            tl.store(logits_ptr + columns, gradient.to(logits_ptr.dtype.element_ty), mask=columns < V)
