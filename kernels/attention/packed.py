"""Attention of packed documents for training-time test (EAGLE-3, arXiv 2503.01840): each run of neighbouring rows sees
its document up to itself, and every row also sees its own keys of earlier steps. torch's FlashAttention-2 (Dao 2023,
arXiv 2307.08691) computes the former, `extend_attention` adds the latter as in one softmax: two parts of a softmax
combine by their log sums (Milakov & Gimelshein 2018, arXiv 1805.02867).

The backward pass gives FlashAttention the output and log sums over all keys instead of those over the shared keys: its
formula for the gradients, dS = P (dP - rowsum(dO O)), then is that of the whole softmax. The kernels read every tensor
once and keep scores in registers. One program computes a row's heads of a few groups.
Letters: N query rows, K shared keys, S own keys, Q/G query and KV heads, R = Q / G, D head dim.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import Op, on_gpu
from slipstream.kernels.tiles import load_fp32

KeyValue = tuple[Tensor, Tensor]
DTYPES = (torch.float16, torch.bfloat16)  # that FlashAttention takes
MAX_HEAD_DIM = 256
TILE = 4096  # numbers of q that a program holds
NUM_WARPS = 8


@dataclass(frozen=True, slots=True)
class Runs:
    """Which keys rows see. The last row of a run sees all of the run's keys, the row before it all but one, etc."""

    row_ends: Tensor  # (runs + 1,) int32, from 0
    key_ends: Tensor  # (runs + 1,) int32, from 0, of the runs' concatenated keys
    most_rows: int
    most_keys: int
    keys: Tensor | None  # (key_ends[-1],) int64: the runs' concatenated keys; None: 0 .. K - 1

    @classmethod
    def of(cls, runs: list[tuple[int, int, int]], num_keys: int, device: torch.device) -> "Runs":
        """runs: number of rows, first key and number of keys of each."""
        rows, starts, counts = zip(*runs, strict=True)
        row_ends, key_ends = (torch.tensor([0, *accumulate(x)], dtype=torch.int32).to(device) for x in (rows, counts))
        keys = None
        if list(starts) != [0, *accumulate(counts)][:-1] or sum(counts) != num_keys:
            ranges = [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
            keys = torch.cat(ranges).to(device)
        return cls(row_ends, key_ends, max(rows), max(counts), keys)


def takes(v: Tensor) -> bool:
    """Whether values (K, G, D) have a dtype and a head dim that `packed_attention` takes."""
    return v.dtype in DTYPES and v.shape[-1] % 8 == 0 and v.shape[-1] <= MAX_HEAD_DIM


def packed_attention(q: Tensor, k: Tensor, v: Tensor, runs: Runs, row_pairs: list[KeyValue]) -> Tensor:
    """q (N, Q, D) over the shared k and v (K, G, D), as `runs` says, and over a row's own keys and values `row_pairs`,
    (N, G, D) each: (N, Q, D). All on a GPU and of one dtype. Differentiable in all."""
    return _PackedAttention.apply(q, k, v, runs, *(x for pair in row_pairs for x in pair))


class _PackedAttention(torch.autograd.Function):
    """Saves own keys by reference: they are stacked only while a kernel runs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, runs: Runs, *row_tensors: Tensor) -> Tensor:
        q = q.contiguous()
        output, lse = flash_forward(q, *_seen(k, v, runs), runs)
        if row_tensors:
            output, lse = extend_attention(
                q, output, lse, torch.stack(row_tensors[::2]), torch.stack(row_tensors[1::2])
            )
        ctx.save_for_backward(q, k, v, output, lse, *row_tensors)
        ctx.runs = runs
        return output

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, lse, *row_tensors = ctx.saved_tensors
        upstream = upstream.contiguous()
        runs = ctx.runs
        q_grad, k_grad, v_grad = flash_backward(upstream, q, *_seen(k, v, runs), output, lse, runs)
        if runs.keys is not None:
            k_grad, v_grad = (_returned(gradient, x, runs.keys) for gradient, x in ((k_grad, k), (v_grad, v)))
        if not row_tensors:
            return q_grad, k_grad, v_grad, None
        keys = torch.stack(row_tensors[::2])
        values = torch.stack(row_tensors[1::2])
        own_q_grad, keys_grad, values_grad = own_keys_gradients(upstream, q, output, lse, keys, values)
        own_grads = (x for pair in zip(keys_grad, values_grad, strict=True) for x in pair)
        return q_grad + own_q_grad, k_grad, v_grad, None, *own_grads


def flash_forward(q: Tensor, k: Tensor, v: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """Output (N, Q, D) and lse (Q, N) over the runs' concatenated keys."""
    dropout = 0.0
    is_causal = True  # aligned to the last key
    has_debug_mask = False
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        runs.row_ends,
        runs.key_ends,
        runs.most_rows,
        runs.most_keys,
        dropout,
        is_causal,
        has_debug_mask,
    )
    return output, lse


def flash_backward(
    upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, runs: Runs
) -> tuple[Tensor, Tensor, Tensor]:
    dropout = 0.0
    is_causal = True
    rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        upstream,
        q,
        k,
        v,
        output,
        lse,
        runs.row_ends,
        runs.key_ends,
        runs.most_rows,
        runs.most_keys,
        dropout,
        is_causal,
        rng_state,
        unused,
    )


def _seen(k: Tensor, v: Tensor, runs: Runs) -> KeyValue:
    """Runs of one document share its beginning: each gets a copy."""
    return (k, v) if runs.keys is None else (k.index_select(0, runs.keys), v.index_select(0, runs.keys))


def _returned(gradient: Tensor, x: Tensor, keys: Tensor) -> Tensor:
    """Sums the copies' gradients in fp32."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return total.index_add_(0, keys, gradient.float()).to(x.dtype)


@Op
def extend_attention(q: Tensor, output: Tensor, lse: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The attention of q (N, Q, D) over shared keys, `output` (N, Q, D) with its lse (Q, N), extended by each row's own
    `keys` and `values` (S, N, G, D): (N, Q, D) in output's dtype, and the lse (Q, N) of all.

    Scores are q k / sqrt(D), an lse the natural logarithm of a row's summed exponentials, fp32 and finite. All
    contiguous.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = _scores(q, keys, dtype)  # (S, N, Q)
    values = _by_head(q, values, dtype)  # (S, N, Q, D)
    before = lse.t().to(dtype)
    total = torch.logsumexp(torch.cat((before.unsqueeze(0), scores)), dim=0)  # (N, Q)
    weights = (scores - total).exp().unsqueeze(-1)
    extended = output.to(dtype) * (before - total).exp().unsqueeze(-1) + (weights * values).sum(0)
    return extended.to(output.dtype), total.t().to(lse.dtype).contiguous()


@extend_attention.kernel(when=on_gpu)
def extend_attention_triton(
    q: Tensor, output: Tensor, lse: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    assert all(x.is_contiguous() for x in (q, output, lse, keys, values))
    extended = torch.empty_like(output)
    total = torch.empty_like(lse)
    if len(q):
        grid, sizes = _launch(q, keys)
        _extend_forward[grid](q, output, lse, keys, values, extended, total, q.shape[-1] ** -0.5, **sizes)
    return extended, total


@Op
def own_keys_gradients(
    upstream: Tensor, q: Tensor, extended: Tensor, total: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients through the own keys: of q (N, Q, D), of `keys` and of `values` (S, N, G, D).

    `upstream` (N, Q, D) is the gradient of `extended`, which extend_attention returned with `total`. The gradients
    through the shared keys are those of attention over them alone with the output `extended` and the lse `total`."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    upstream = upstream.to(dtype)
    scale = q.shape[-1] ** -0.5
    groups = keys.shape[2]
    p = (_scores(q, keys, dtype) - total.t().to(dtype)).exp()  # (S, N, Q)
    mean = (upstream * extended.to(dtype)).sum(-1)  # (N, Q)
    score_grad = (p * ((upstream * _by_head(q, values, dtype)).sum(-1) - mean)).unsqueeze(-1) * scale  # (S, N, Q, 1)
    q_grad = (score_grad * _by_head(q, keys, dtype)).sum(0)
    by_group = [x.unflatten(2, (groups, -1)).sum(3) for x in (score_grad * q.to(dtype), p.unsqueeze(-1) * upstream)]
    return q_grad.to(q.dtype), by_group[0].to(keys.dtype), by_group[1].to(values.dtype)


@own_keys_gradients.kernel(when=on_gpu)
def own_keys_gradients_triton(
    upstream: Tensor, q: Tensor, extended: Tensor, total: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    assert all(x.is_contiguous() for x in (upstream, q, extended, total, keys, values))
    q_grad = torch.empty_like(q)
    keys_grad = torch.empty_like(keys)
    values_grad = torch.empty_like(values)
    if len(q):
        grid, sizes = _launch(q, keys)
        scale = q.shape[-1] ** -0.5
        _extend_backward[grid](
            q, keys, values, extended, total, upstream, q_grad, keys_grad, values_grad, scale, **sizes
        )
    return q_grad, keys_grad, values_grad


def _by_head(q: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (S, N, G, D) -> (S, N, Q, D) of `dtype`."""
    return x.to(dtype).repeat_interleave(q.shape[1] // x.shape[2], dim=2)


def _scores(q: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """(S, N, Q)."""
    return (q.to(dtype) * _by_head(q, keys, dtype)).sum(-1) * q.shape[-1] ** -0.5


def _launch(q: Tensor, keys: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """A grid, and the keywords that both kernels share."""
    (N, Q, D), (S, _, G, _) = q.shape, keys.shape
    heads = triton.next_power_of_2(Q // G)
    width = triton.next_power_of_2(D)
    groups = min(triton.next_power_of_2(G), max(TILE // (heads * width), 1))
    sizes = {"N": N, "S": S, "G": G, "R": Q // G, "D": D, "GROUPS": groups, "HEADS": heads, "WIDTH": width}
    return (N, triton.cdiv(G, groups)), sizes | {"num_warps": NUM_WARPS}


@triton.jit
def _extend_forward(
    q_ptr, output_ptr, lse_ptr, keys_ptr, values_ptr, whole_ptr, total_ptr, scale, N, S,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, group, column, heads, is_head, cells, inside = _indices(G, R, D, GROUPS, HEADS, WIDTH)
    q = load_fp32(q_ptr + cells, inside) * scale
    acc = load_fp32(output_ptr + cells, inside)
    peak = tl.load(lse_ptr + heads * N + row, mask=is_head, other=0.0)
    weight = tl.full((GROUPS, HEADS, 1), 1.0, tl.float32)  # all keys so far sum to exp(peak) weight
    for s in range(S):
        k, v, _, _ = _load_own(keys_ptr, values_ptr, (s * N + row) * G, group, column, G, D)
        score = tl.sum(q * k, axis=2, keep_dims=True)
        higher = tl.maximum(peak, score)
        before = tl.exp(peak - higher)
        new = tl.exp(score - higher)
        acc = acc * before + new * v
        weight = weight * before + new
        peak = higher
    tl.store(whole_ptr + cells, (acc / weight).to(whole_ptr.dtype.element_ty), mask=inside)
    tl.store(total_ptr + heads * N + row, peak + tl.log(weight), mask=is_head)


@triton.jit
def _extend_backward(
    q_ptr, keys_ptr, values_ptr, whole_ptr, total_ptr, upstream_ptr, q_grad_ptr, keys_grad_ptr, values_grad_ptr, scale,
    N, S,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A key's score has the gradient p (upstream . v - upstream . whole), p its share of the softmax."""
    row, group, column, heads, is_head, cells, inside = _indices(G, R, D, GROUPS, HEADS, WIDTH)
    q = load_fp32(q_ptr + cells, inside) * scale
    upstream = load_fp32(upstream_ptr + cells, inside)
    output = load_fp32(whole_ptr + cells, inside)
    total = tl.load(total_ptr + heads * N + row, mask=is_head, other=0.0)
    mean = tl.sum(upstream * output, axis=2, keep_dims=True)
    q_grad = tl.zeros((GROUPS, HEADS, WIDTH), tl.float32)
    for s in range(S):
        k, v, kv_cells, is_own = _load_own(keys_ptr, values_ptr, (s * N + row) * G, group, column, G, D)
        p = tl.exp(tl.sum(q * k, axis=2, keep_dims=True) - total)
        score_grad = p * (tl.sum(upstream * v, axis=2, keep_dims=True) - mean)
        q_grad += score_grad * k
        k_grad = tl.sum(score_grad * q, axis=1, keep_dims=True)  # heads beyond R have q = upstream = 0
        v_grad = tl.sum(p * upstream, axis=1, keep_dims=True)
        tl.store(keys_grad_ptr + kv_cells, k_grad.to(keys_grad_ptr.dtype.element_ty), mask=is_own)
        tl.store(values_grad_ptr + kv_cells, v_grad.to(values_grad_ptr.dtype.element_ty), mask=is_own)
    tl.store(q_grad_ptr + cells, (q_grad * scale).to(q_grad_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _indices(
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The program's row, its groups (GROUPS, 1, 1) and columns (1, 1, WIDTH); its heads (GROUPS, HEADS, 1) and which
    there are; and the cells of q (GROUPS, HEADS, WIDTH) and which there are."""
    row = tl.program_id(0).to(tl.int64)
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None, None]
    head = tl.arange(0, HEADS)[None, :, None]
    column = tl.arange(0, WIDTH)[None, None, :]
    heads = group * R + head
    is_head = (group < G) & (head < R)
    return row, group, column, heads, is_head, (row * (G * R) + heads) * D + column, is_head & (column < D)


@triton.jit
def _load_own(keys_ptr, values_ptr, first, group, column, G: tl.constexpr, D: tl.constexpr):
    """Own keys and values (GROUPS, 1, WIDTH), `first` of all heads before them, their cells, and which there are."""
    cells = (first + group) * D + column
    inside = (group < G) & (column < D)
    return load_fp32(keys_ptr + cells, inside), load_fp32(values_ptr + cells, inside), cells, inside
