"""Attention of packed documents for training-time test: each run of neighbouring rows sees its document up to itself,
and every row own keys of its own besides. FlashAttention-2 (Dao 2023, arXiv 2307.08691), as torch brings it, takes the
former, kernels/own_keys.py the latter; one softmax over both.

The backward pass hands FlashAttention the whole output and the whole log sums in place of those over the shared keys:
its formula for the gradients, dS = P (dP - rowsum(dO O)), then is the one of the whole softmax.
Letters: N rows that ask, K shared keys, Q/G query and KV heads, D head dim.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.own_keys import extend_attention, own_keys_gradients

KeyValue = tuple[Tensor, Tensor]
DTYPES = (torch.float16, torch.bfloat16)  # that FlashAttention takes
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Runs:
    """Which keys rows see: run i is the next lengths of rows, whose last one sees the last of the run's keys, the one
    before all but that, and so on."""

    row_ends: Tensor  # (runs + 1,) int32, from 0
    key_ends: Tensor  # (runs + 1,) int32, from 0, of the run's keys one behind another
    most_rows: int
    most_keys: int
    keys: Tensor | None  # (key_ends[-1],) int64: the runs' keys one behind another; None: 0 .. K - 1

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


def packed_attention(q: Tensor, k: Tensor, v: Tensor, runs: Runs, own: list[KeyValue]) -> Tensor:
    """q (N, Q, D) over the shared k and v (K, G, D), as `runs` says, and over a row's own keys and values `own`,
    (N, G, D) each: (N, Q, D). All on a GPU and of one dtype. Differentiable in all."""
    return _PackedAttention.apply(q, k, v, runs, *(x for pair in own for x in pair))


class _PackedAttention(torch.autograd.Function):
    """Own keys are kept by reference: they are joined to one tensor only while a kernel runs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, runs: Runs, *own: Tensor) -> Tensor:
        q = q.contiguous()
        output, lse = flash_forward(q, *_seen(k, v, runs), runs)
        if own:
            output, lse = extend_attention(q, output, lse, torch.stack(own[::2]), torch.stack(own[1::2]))
        ctx.save_for_backward(q, k, v, output, lse, *own)
        ctx.runs = runs
        return output

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, lse, *own = ctx.saved_tensors
        upstream, runs = upstream.contiguous(), ctx.runs
        q_grad, k_grad, v_grad = flash_backward(upstream, q, *_seen(k, v, runs), output, lse, runs)
        if runs.keys is not None:
            k_grad, v_grad = (_returned(seen, x, runs.keys) for seen, x in ((k_grad, k), (v_grad, v)))
        if not own:
            return q_grad, k_grad, v_grad, None
        keys, values = torch.stack(own[::2]), torch.stack(own[1::2])
        own_q_grad, keys_grad, values_grad = own_keys_gradients(upstream, q, output, lse, keys, values)
        own_grads = (x for pair in zip(keys_grad, values_grad, strict=True) for x in pair)
        return q_grad + own_q_grad, k_grad, v_grad, None, *own_grads


def flash_forward(q: Tensor, k: Tensor, v: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """Output (N, Q, D) and lse (Q, N) over the runs' keys one behind another."""
    run = torch.ops.aten._flash_attention_forward
    ends = runs.row_ends, runs.key_ends, runs.most_rows, runs.most_keys
    output, lse, *_ = run(q, k, v, *ends, 0.0, True, False)  # no dropout; causal from the last key backwards; no mask
    return output, lse


def flash_backward(
    upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, runs: Runs
) -> tuple[Tensor, Tensor, Tensor]:
    run = torch.ops.aten._flash_attention_backward
    ends = runs.row_ends, runs.key_ends, runs.most_rows, runs.most_keys
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    return run(upstream, q, k, v, output, lse, *ends, 0.0, True, *no_dropout)


def _seen(k: Tensor, v: Tensor, runs: Runs) -> KeyValue:
    """Several runs of a document see its beginning: they get copies of it."""
    return (k, v) if runs.keys is None else (k.index_select(0, runs.keys), v.index_select(0, runs.keys))


def _returned(gradient: Tensor, x: Tensor, keys: Tensor) -> Tensor:
    """The copies' gradients summed, in fp32."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return total.index_add_(0, keys, gradient.float()).to(x.dtype)
