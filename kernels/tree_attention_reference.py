"""Attention of tree nodes over a paged KV cache in plain torch: the CPU path and the kernel's oracle."""

from typing import Literal

import torch
from torch import Tensor

from slipstream.kernels.verify import unpack

Mask = Literal["causal", "tree", "block"]


def tree_attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    rows: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None,
    mask: Mask,
    scale: float,
    *,
    first_node: int = 0,
    window: int | None = None,
    prefix: bool = True,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Same signature as `tree_attention`; gathers every request's KV up to the longest one, scores in fp32."""
    B, N, Q, D = q.shape
    page_size, G = keys.shape[1:3]
    end = first_node + N
    positions = torch.arange(int(lengths.max()) + end, device=q.device)  # (S,)
    slots = pages[rows][:, positions // page_size] * page_size + positions % page_size  # (B, S)
    node = positions - lengths[:, None]  # (B, S): which node a position is; negative for committed tokens
    used = (node < end) & (prefix | (node >= 0))
    k, v = (x.flatten(0, 1)[slots].masked_fill(~used[:, :, None, None], 0).float() for x in (keys, values))
    scores = torch.einsum("bngrd,bsgd->bngrs", q.float().view(B, N, G, Q // G, D), k) * scale
    queries = torch.arange(first_node, end, device=q.device)  # (N,) nodes
    visible = used[:, None] & _visible(node, queries, ancestors, mask)  # (B, N, S)
    if window is not None:
        visible = visible & (node[:, None] > queries[:, None] - window)
    scores = scores.masked_fill(~visible[:, :, None, None], -torch.inf)
    lse = scores.logsumexp(dim=-1)  # (B, N, G, Q / G)
    out = torch.einsum("bngrs,bsgd->bngrd", (scores - lse[..., None]).exp(), v).reshape(B, N, Q, D).to(q.dtype)
    return (out, lse.reshape(B, N, Q)) if return_lse else out


def _visible(node: Tensor, queries: Tensor, ancestors: Tensor | None, mask: Mask) -> Tensor:
    """(B, N, S) bool: which positions each query may see by the mask, committed tokens included."""
    N = len(queries)
    if mask == "causal":
        return node[:, None] <= queries[:, None]
    if mask == "block":
        return torch.ones_like(node, dtype=torch.bool)[:, None].expand(-1, N, -1)
    assert ancestors is not None
    seen = unpack(ancestors, count=64)
    return (node < 0)[:, None] | seen.gather(2, node.clamp(0, 63)[:, None].expand(-1, N, -1))
