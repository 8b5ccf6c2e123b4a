"""Attention over many keys extended by a few that belong to one row alone, as if one softmax had been taken over all:
training-time test (EAGLE-3, arXiv 2503.01840), where a row sees its own keys of the steps before.

Two parts of a softmax join by their log sums (Milakov & Gimelshein 2018, arXiv 1805.02867). The kernels read every
tensor once and hold scores in registers. One program takes a row's heads of a few groups.
Letters: N rows, S own keys, Q/G query and KV heads, R = Q / G, D head dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # numbers of q that a program holds
NUM_WARPS = 8


def extend_attention(q: Tensor, output: Tensor, lse: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The attention of q (N, Q, D) over other keys, `output` (N, Q, D) with its lse (Q, N), extended by a row's own
    `keys` and `values` (S, N, G, D): (N, Q, D) in output's dtype, and the lse (Q, N) of all.

    Scores are q k / sqrt(D), an lse the natural logarithm of a row's summed exponentials, fp32 and finite. All
    contiguous.
    """
    run = extend_attention_triton if q.is_cuda else extend_attention_reference
    return run(q, output, lse, keys, values)


def extend_attention_reference(
    q: Tensor, output: Tensor, lse: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores, values = _scores(q, keys, dtype), _by_head(q, values, dtype)  # (S, N, Q), (S, N, Q, D)
    before = lse.t().to(dtype)
    total = torch.logsumexp(torch.cat((before.unsqueeze(0), scores)), dim=0)  # (N, Q)
    weights = (scores - total).exp().unsqueeze(-1)
    whole = output.to(dtype) * (before - total).exp().unsqueeze(-1) + (weights * values).sum(0)
    return whole.to(output.dtype), total.t().to(lse.dtype).contiguous()


def extend_attention_triton(
    q: Tensor, output: Tensor, lse: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    assert all(x.is_contiguous() for x in (q, output, lse, keys, values))
    whole, total = torch.empty_like(output), torch.empty_like(lse)
    if len(q):
        grid, sizes = _launch(q, keys)
        _forward_kernel[grid](q, output, lse, keys, values, whole, total, q.shape[-1] ** -0.5, **sizes)
    return whole, total


def own_keys_gradients(
    upstream: Tensor, q: Tensor, whole: Tensor, total: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients through the own keys: q's share of it (N, Q, D), that of `keys` and of `values` (S, N, G, D).

    `upstream` (N, Q, D) is the gradient of `whole`, which extend_attention has returned with `total`. What goes through
    the other keys is the gradient of an attention over those alone that has the output `whole` and the lse `total`.
    """
    run = own_keys_gradients_triton if q.is_cuda else own_keys_gradients_reference
    return run(upstream, q, whole, total, keys, values)


def own_keys_gradients_reference(
    upstream: Tensor, q: Tensor, whole: Tensor, total: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    upstream, scale, groups = upstream.to(dtype), q.shape[-1] ** -0.5, keys.shape[2]
    p = (_scores(q, keys, dtype) - total.t().to(dtype)).exp()  # (S, N, Q)
    mean = (upstream * whole.to(dtype)).sum(-1)  # (N, Q)
    score_grad = (p * ((upstream * _by_head(q, values, dtype)).sum(-1) - mean)).unsqueeze(-1) * scale  # (S, N, Q, 1)
    q_grad = (score_grad * _by_head(q, keys, dtype)).sum(0)
    by_group = [x.unflatten(2, (groups, -1)).sum(3) for x in (score_grad * q.to(dtype), p.unsqueeze(-1) * upstream)]
    return q_grad.to(q.dtype), by_group[0].to(keys.dtype), by_group[1].to(values.dtype)


def own_keys_gradients_triton(
    upstream: Tensor, q: Tensor, whole: Tensor, total: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    assert all(x.is_contiguous() for x in (upstream, q, whole, total, keys, values))
    gradients = torch.empty_like(q), torch.empty_like(keys), torch.empty_like(values)
    if len(q):
        grid, sizes = _launch(q, keys)
        _backward_kernel[grid](q, keys, values, whole, total, upstream, *gradients, q.shape[-1] ** -0.5, **sizes)
    return gradients


def _by_head(q: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (S, N, G, D) -> (S, N, Q, D) of `dtype`."""
    return x.to(dtype).repeat_interleave(q.shape[1] // x.shape[2], dim=2)


def _scores(q: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """(S, N, Q)."""
    return (q.to(dtype) * _by_head(q, keys, dtype)).sum(-1) * q.shape[-1] ** -0.5


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
    is_head, heads = (group < G) & (head < R), group * R + head  # (GROUPS, HEADS, 1)
    inside, cells = is_head & (column < D), (row * (G * R) + heads) * D + column
    q = tl.load(q_ptr + cells, mask=inside, other=0.0).to(tl.float32) * scale
    whole = tl.load(output_ptr + cells, mask=inside, other=0.0).to(tl.float32)
    peak = tl.load(lse_ptr + heads * N + row, mask=is_head, other=0.0)
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
    tl.store(total_ptr + heads * N + row, peak + tl.log(weight), mask=is_head)


@triton.jit
def _backward_kernel(
    q_ptr, keys_ptr, values_ptr, whole_ptr, total_ptr, upstream_ptr, q_grad_ptr, keys_grad_ptr, values_grad_ptr, scale,
    N, S,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A key's score has the gradient p (upstream . v - upstream . whole), p its share of the softmax."""
    row, group, head, column = _indices(GROUPS, HEADS, WIDTH)
    is_head, heads = (group < G) & (head < R), group * R + head
    inside, cells = is_head & (column < D), (row * (G * R) + heads) * D + column
    q = tl.load(q_ptr + cells, mask=inside, other=0.0).to(tl.float32) * scale
    upstream = tl.load(upstream_ptr + cells, mask=inside, other=0.0).to(tl.float32)
    whole = tl.load(whole_ptr + cells, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(total_ptr + heads * N + row, mask=is_head, other=0.0)
    mean = tl.sum(upstream * whole, axis=2, keep_dims=True)
    q_grad = tl.zeros((GROUPS, HEADS, WIDTH), tl.float32)
    is_own = (group < G) & (column < D)
    for s in range(S):
        own = ((s * N + row) * G + group) * D + column
        k = tl.load(keys_ptr + own, mask=is_own, other=0.0).to(tl.float32)
        v = tl.load(values_ptr + own, mask=is_own, other=0.0).to(tl.float32)
        p = tl.exp(tl.sum(q * k, axis=2, keep_dims=True) - total)
        score_grad = p * (tl.sum(upstream * v, axis=2, keep_dims=True) - mean)
        q_grad += score_grad * k
        k_grad = tl.sum(score_grad * q, axis=1, keep_dims=True)  # heads beyond R have q = upstream = 0
        v_grad = tl.sum(p * upstream, axis=1, keep_dims=True)
        tl.store(keys_grad_ptr + own, k_grad.to(keys_grad_ptr.dtype.element_ty), mask=is_own)
        tl.store(values_grad_ptr + own, v_grad.to(values_grad_ptr.dtype.element_ty), mask=is_own)
    tl.store(q_grad_ptr + cells, (q_grad * scale).to(q_grad_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _indices(GROUPS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """The program's row, its groups (GROUPS, 1, 1), heads of a group (1, HEADS, 1) and columns (1, 1, WIDTH)."""
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None, None]
    return tl.program_id(0).to(tl.int64), group, tl.arange(0, HEADS)[None, :, None], tl.arange(0, WIDTH)[None, None, :]
