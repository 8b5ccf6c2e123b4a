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
    prefix: bool = True,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Same signature as `tree_attention`; gathers every request's KV up to the longest one, scores in fp32."""
    B, N, Q, D = q.shape
    page_size, G = keys.shape[1:3]
    positions = torch.arange(int(lengths.max()) + N, device=q.device)  # (S,)
    slots = pages[rows][:, positions // page_size] * page_size + positions % page_size  # (B, S)
    node = positions - lengths[:, None]  # (B, S): which node a position is; negative for committed tokens
    used = (node < N) & (prefix | (node >= 0))
    k, v = (x.flatten(0, 1)[slots].masked_fill(~used[:, :, None, None], 0).float() for x in (keys, values))
    scores = torch.einsum("bngrd,bsgd->bngrs", q.float().view(B, N, G, Q // G, D), k) * scale
    visible = used[:, None] & _visible(node, N, ancestors, mask)  # (B, N, S)
    scores = scores.masked_fill(~visible[:, :, None, None], -torch.inf)
    lse = scores.logsumexp(dim=-1)  # (B, N, G, Q / G)
    out = torch.einsum("bngrs,bsgd->bngrd", (scores - lse[..., None]).exp(), v).reshape(B, N, Q, D).to(q.dtype)
    return (out, lse.reshape(B, N, Q)) if return_lse else out


def _visible(node: Tensor, N: int, ancestors: Tensor | None, mask: Mask) -> Tensor:
    """(B, N, S) bool: which positions each node may see by the mask, committed tokens included."""
    queries = torch.arange(N, device=node.device)[:, None]  # (N, 1)
    if mask == "causal":
        return node[:, None] <= queries
    if mask == "block":
        return (node < N)[:, None].expand(-1, N, -1)
    assert ancestors is not None
    index = node.clamp(0, N - 1)[:, None].expand(-1, N, -1)
    return (node < 0)[:, None] | unpack(ancestors).gather(2, index)
