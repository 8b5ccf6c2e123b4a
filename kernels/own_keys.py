"""Attention over many keys extended by a few that belong to one row alone, as if one softmax had been taken over all:
training-time test (EAGLE-3, arXiv 2503.01840), where a row sees its own keys of the steps before.

Two parts of a softmax join by their log sums (Milakov & Gimelshein 2018, arXiv 1805.02867). The kernels read every
tensor once and hold scores in registers; backward computes them again. One program takes a row's heads of a few groups.
Letters: N rows, S own keys, Q/G query and KV heads, R = Q / G, D head dim.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

KeyValue = tuple[Tensor, Tensor]
TILE = 4096  # numbers of q that a program holds
NUM_WARPS = 8


def with_own_keys(q: Tensor, output: Tensor, lse: Tensor, own: list[KeyValue]) -> Tensor:
    """The attention of q (N, Q, D) over other keys, `output` (N, Q, D) with its lse (N, Q), extended by a row's own
    keys and values (N, G, D) each, at least one pair: (N, Q, D) in output's dtype.

    Scores are q k / sqrt(D), lse the natural logarithm of a row's summed exponentials, finite. Differentiable in all.
    """
    if q.is_cuda:  # under autograd, too
        return with_own_keys_triton(q, output, lse, own)
    return with_own_keys_reference(q, output, lse, own)


def with_own_keys_reference(q: Tensor, output: Tensor, lse: Tensor, own: list[KeyValue]) -> Tensor:
    dtype, groups = torch.promote_types(q.dtype, torch.float32), own[0][0].shape[1]
    scaled = (q.to(dtype) * q.shape[-1] ** -0.5).unflatten(1, (groups, -1))  # (N, G, R, D)
    lse = total = lse.unflatten(1, (groups, -1))  # (N, G, R)
    scores = []
    for k, _ in own:
        scores.append((scaled * k.to(dtype).unsqueeze(2)).sum(-1))
        total = torch.logaddexp(total, scores[-1])
    whole = output.to(dtype).unflatten(1, (groups, -1)) * (lse - total).exp().unsqueeze(-1)
    for score, (_, v) in zip(scores, own, strict=True):
        whole = whole + (score - total).exp().unsqueeze(-1) * v.to(dtype).unsqueeze(2)
    return whole.to(output.dtype).flatten(1, 2)


def with_own_keys_triton(q: Tensor, output: Tensor, lse: Tensor, own: list[KeyValue]) -> Tensor:
    assert lse.dtype == torch.float32
    assert q.shape == output.shape
    return _OwnKeys.apply(q, output, lse, *(x for pair in own for x in pair))


class _OwnKeys(torch.autograd.Function):
    """Keeps own keys by reference: they are joined to one tensor, (S, N, G, D), only while a kernel runs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, output: Tensor, lse: Tensor, *own: Tensor) -> Tensor:
        q, output, lse = q.contiguous(), output.contiguous(), lse.contiguous()
        whole, total = torch.empty_like(output), torch.empty_like(lse)
        keys, values = _join(own)
        if len(q):
            grid, sizes = _launch(q, keys)
            _forward_kernel[grid](q, output, lse, keys, values, whole, total, q.shape[-1] ** -0.5, **sizes)
        ctx.save_for_backward(q, output, lse, whole, total, *own)
        return whole

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, output, lse, whole, total, *own = ctx.saved_tensors
        keys, values = _join(own)
        gradients = [torch.empty_like(x) for x in (q, output, lse, keys, values)]
        if len(q):
            grid, sizes = _launch(q, keys)
            _backward_kernel[grid](
                q, output, lse, keys, values, whole, total, upstream.contiguous(), *gradients, q.shape[-1] ** -0.5,
                **sizes,
            )  # fmt: skip
        *shared, own_keys, own_values = gradients
        return *shared, *(x for pair in zip(own_keys, own_values, strict=True) for x in pair)


def _join(own: list[Tensor] | tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Keys and values in turns -> (S, N, G, D) each."""
    return torch.stack(own[::2]), torch.stack(own[1::2])


def _launch(q: Tensor, keys: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """A grid, and the keywords that both kernels share."""
    (N, Q, D), (S, _, G, _) = q.shape, keys.shape
    heads, width = triton.next_power_of_2(Q // G), triton.next_power_of_2(D)
    groups = min(triton.next_power_of_2(G), max(TILE // (heads * width), 1))
    sizes = {"N": N, "S": S, "G": G, "R": Q // G, "D": D, "GROUPS": groups, "HEADS": heads, "WIDTH": width}
    return (N, triton.cdiv(G, groups)), sizes | {"num_warps": NUM_WARPS}


@triton.jit
def _forward_kernel(
    q_ptr, output_ptr, lse_ptr, keys_ptr, values_ptr, whole_ptr, total_ptr, scale, N, S,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, group, head, column = _indices(GROUPS, HEADS, WIDTH)
    is_head, heads = (group < G) & (head < R), (row * G + group) * R + head  # (GROUPS, HEADS, 1)
    inside, cells = is_head & (column < D), heads * D + column
    q = tl.load(q_ptr + cells, mask=inside, other=0.0).to(tl.float32) * scale
    whole = tl.load(output_ptr + cells, mask=inside, other=0.0).to(tl.float32)
    peak = tl.load(lse_ptr + heads, mask=is_head, other=0.0)
    weight = tl.full((GROUPS, HEADS, 1), 1.0, tl.float32)  # of all keys so far: their sum is exp(peak) weight
    is_own = (group < G) & (column < D)  # (GROUPS, 1, WIDTH)
    for s in range(S):
        own = ((s * N + row) * G + group) * D + column
        k = tl.load(keys_ptr + own, mask=is_own, other=0.0).to(tl.float32)
        v = tl.load(values_ptr + own, mask=is_own, other=0.0).to(tl.float32)
        score = tl.sum(q * k, axis=2, keep_dims=True)
        higher = tl.maximum(peak, score)
        before, new = tl.exp(peak - higher), tl.exp(score - higher)
        whole = whole * before + new * v
        weight, peak = weight * before + new, higher
    tl.store(whole_ptr + cells, (whole / weight).to(whole_ptr.dtype.element_ty), mask=inside)
    tl.store(total_ptr + heads, peak + tl.log(weight), mask=is_head)


@triton.jit
def _backward_kernel(
    q_ptr, output_ptr, lse_ptr, keys_ptr, values_ptr, whole_ptr, total_ptr, upstream_ptr,
    q_grad_ptr, output_grad_ptr, lse_grad_ptr, keys_grad_ptr, values_grad_ptr, scale, N, S,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A key's score has the gradient p (upstream . v - upstream . whole), p its share of the softmax."""
    row, group, head, column = _indices(GROUPS, HEADS, WIDTH)
    is_head, heads = (group < G) & (head < R), (row * G + group) * R + head
    inside, cells = is_head & (column < D), heads * D + column
    q = tl.load(q_ptr + cells, mask=inside, other=0.0).to(tl.float32) * scale
    upstream = tl.load(upstream_ptr + cells, mask=inside, other=0.0).to(tl.float32)
    output = tl.load(output_ptr + cells, mask=inside, other=0.0).to(tl.float32)
    whole = tl.load(whole_ptr + cells, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(total_ptr + heads, mask=is_head, other=0.0)
    share = tl.exp(tl.load(lse_ptr + heads, mask=is_head, other=0.0) - total)  # of the other keys
    mean = tl.sum(upstream * whole, axis=2, keep_dims=True)
    lse_grad = share * (tl.sum(upstream * output, axis=2, keep_dims=True) - mean)
    tl.store(lse_grad_ptr + heads, lse_grad, mask=is_head)
    tl.store(output_grad_ptr + cells, (share * upstream).to(output_grad_ptr.dtype.element_ty), mask=inside)
    q_grad = tl.zeros((GROUPS, HEADS, WIDTH), tl.float32)
    is_own = (group < G) & (column < D)
    for s in range(S):
        own = ((s * N + row) * G + group) * D + column
        k = tl.load(keys_ptr + own, mask=is_own, other=0.0).to(tl.float32)
        v = tl.load(values_ptr + own, mask=is_own, other=0.0).to(tl.float32)
        p = tl.exp(tl.sum(q * k, axis=2, keep_dims=True) - total)
        score_grad = p * (tl.sum(upstream * v, axis=2, keep_dims=True) - mean)
        q_grad += score_grad * k
        k_grad = tl.sum(score_grad * q, axis=1, keep_dims=True)  # masked heads have q = upstream = 0
        v_grad = tl.sum(p * upstream, axis=1, keep_dims=True)
        tl.store(keys_grad_ptr + own, k_grad.to(keys_grad_ptr.dtype.element_ty), mask=is_own)
        tl.store(values_grad_ptr + own, v_grad.to(values_grad_ptr.dtype.element_ty), mask=is_own)
    tl.store(q_grad_ptr + cells, (q_grad * scale).to(q_grad_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _indices(GROUPS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """The program's row, its groups (GROUPS, 1, 1), heads of a group (1, HEADS, 1) and columns (1, 1, WIDTH)."""
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None, None]
    return tl.program_id(0).to(tl.int64), group, tl.arange(0, HEADS)[None, :, None], tl.arange(0, WIDTH)[None, None, :]
