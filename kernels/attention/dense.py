"""Attention over dense keys in plain torch, with what torch's scaled_dot_product_attention lacks: soft caps of scores
(Gemma 2, arXiv 2408.00118) and sinks (gpt-oss, arXiv 2508.10925), learnt scores without values that join a softmax.

Letters: N queries, S keys, Q/G query and KV heads, D head dim.
"""

import torch
from torch import Tensor

MOST_SCORES = 1 << 26  # computed at once, in fp32: 256 MB


def cap(scores: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(scores / softcap); None: the scores."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def softmax_beside(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of scores (..., S) beside sinks, which broadcast to (...): weights that sum to less than 1."""
    if sinks is None:
        return scores.softmax(dim=-1)
    total = scores.logsumexp(dim=-1).logaddexp(sinks.to(scores.dtype))
    return (scores - total.unsqueeze(-1)).exp()


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention out (..., Q, D) with sinks (Q,), from attention without them and its log-sum-exp (..., Q), natural
    logarithm, over all keys."""
    return (out * torch.sigmoid(lse - sinks.to(lse.dtype)).unsqueeze(-1)).to(out.dtype)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q (..., N, D) attends to k and v (..., S, D), by scores q k * scale, capped, + bias: (..., N, D).

    bias broadcasts to (..., N, S): 0, or -inf where a query does not see a key. sinks broadcast to (..., N). Computed
    in fp32, and in parts of the queries where there are many.
    """
    keys = k.float().transpose(-1, -2)
    values = v.float()
    bias = bias.expand(*bias.shape[:-2], q.shape[-2], -1)
    sinks = None if sinks is None else sinks.float().expand(*sinks.shape[:-1], q.shape[-2])
    count = max(1, MOST_SCORES // (q[..., 0, 0].numel() * k.shape[-2]))
    parts = []
    for start in range(0, q.shape[-2], count):
        part = slice(start, start + count)
        scores = cap(torch.matmul(q[..., part, :].float(), keys) * scale, softcap) + bias[..., part, :]
        weights = softmax_beside(scores, None if sinks is None else sinks[..., part])
        parts.append(torch.matmul(weights, values).to(q.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
