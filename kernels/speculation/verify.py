"""Acceptance in plain torch: from the root of each proposal, follow the child that the target itself sampled.

The kernels of a ragged pass (ragged.py) must equal it; their references use it.
Letters: B requests, N nodes per request (root included), at most MAX_NODES.
"""

import torch
from torch import Tensor


def ancestor_masks(parents: Tensor) -> Tensor:
    """parents (B, N) int32 with parents[:, 0] = -1 and parents[:, i] < i, N <= 64 -> (B, N) int64 bit masks: bit j of
    node i is set if j is i or an ancestor of it. Unused nodes are children of the root."""
    above = parents.clamp(min=0).long()
    masks = (torch.ones_like(above) << torch.arange(parents.shape[1], device=parents.device)).contiguous()
    for _ in range((parents.shape[1] - 1).bit_length()):  # each round adds as many levels as are there
        masks = masks | masks.gather(1, above)
        above = above.gather(1, above)
    return masks


def unpack(masks: Tensor, count: int | None = None) -> Tensor:
    """Bit masks (..., n) int64 -> (..., n, count) bool; count: default n."""
    count = masks.shape[-1] if count is None else count
    return (masks[..., None] >> torch.arange(count, device=masks.device) & 1).bool()


def verify(tokens: Tensor, parents: Tensor, sampled: Tensor, ancestors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The accepted path of each proposal.

    tokens, parents (B, N) int32 as in Proposal (unused nodes -1); sampled (B, N): the target's token after each node
    or -1, which ends the path; ancestors (B, N) int64 from ancestor_masks, or None for a chain.
    Returns nodes (B, N) int32 accepted node ids, root first, -1 padded; emitted (B, N) int32 the target's token after
    each accepted node, -1 padded; lengths (B,) int32.
    """
    N = tokens.shape[1]
    above = None if ancestors is None else parents[:, 1:].clamp(min=0).long()
    expected = sampled[:, :-1] if above is None else sampled.gather(1, above)
    matches = torch.ones_like(tokens, dtype=torch.bool)  # the root is always accepted
    matches[:, 1:] = (tokens[:, 1:] == expected) & (expected >= 0)  # unused nodes are -1, too
    if ancestors is None:
        accepted = matches.cummin(dim=1).values
        nodes = torch.arange(N, device=tokens.device).expand_as(tokens)
    else:
        accepted = (matches[:, None, :] | ~unpack(ancestors)).all(dim=-1)
        # Siblings are distinct, so the accepted nodes are one path, and ids grow along it: sorting keeps its order.
        nodes = torch.where(accepted, torch.arange(N, device=tokens.device), N).sort(dim=1).values.clamp(max=N - 1)
    lengths = accepted.sum(dim=1)
    padding = torch.arange(N, device=tokens.device) >= lengths[:, None]
    emitted = sampled.gather(1, nodes).masked_fill(padding, -1)
    return nodes.masked_fill(padding, -1).int(), emitted.int(), lengths.int()
