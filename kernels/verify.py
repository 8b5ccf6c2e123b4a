"""Acceptance: follow, from the root of each proposal, the child that the target itself sampled.

Letters: B requests, N nodes per request (root included).
"""

import torch
from torch import Tensor


def ancestor_masks(parents: Tensor) -> Tensor:
    """parents (B, N) int32 with parents[:, 0] = -1 and parents[:, i] < i, N <= 64 -> (B, N) int64 bit masks: bit j of
    node i says that j is i or above it."""
    B, N = parents.shape
    rows, above = torch.arange(B, device=parents.device), parents.clamp(min=0).long()
    masks = (torch.ones_like(above) << torch.arange(N, device=parents.device)).contiguous()
    for node in range(1, N):  # a parent's mask is complete before its children ask for it
        masks[:, node] |= masks[rows, above[:, node]]
    return masks


def unpack(masks: Tensor) -> Tensor:
    """Bit masks (..., N) int64 -> (..., N, N) bool."""
    return (masks[..., None] >> torch.arange(masks.shape[-1], device=masks.device) & 1).bool()


def verify(tokens: Tensor, parents: Tensor, sampled: Tensor, ancestors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The accepted path of each proposal.

    tokens, parents (B, N) int32 as in Proposal (unused nodes -1); sampled (B, N): the target's token after each node;
    ancestors (B, N) int64 from ancestor_masks, or None for a chain.
    Returns nodes (B, N) int32 accepted node ids, root first, -1 padded; emitted (B, N) int32 the target's token after
    each accepted node, -1 padded; lengths (B,) int32.
    """
    N = tokens.shape[1]
    matches = torch.ones_like(tokens, dtype=torch.bool)  # the root is accepted always
    if ancestors is None:
        matches[:, 1:] = tokens[:, 1:] == sampled[:, :-1]
        accepted = matches.cummin(dim=1).values
        nodes = torch.arange(N, device=tokens.device).expand_as(tokens)
    else:
        matches[:, 1:] = tokens[:, 1:] == sampled.gather(1, parents[:, 1:].clamp(min=0).long())
        accepted = (matches[:, None, :] | ~unpack(ancestors)).all(dim=-1)
        # Siblings are distinct, so the accepted nodes are one path, and ids grow along it: sorting keeps its order.
        nodes = torch.where(accepted, torch.arange(N, device=tokens.device), N).sort(dim=1).values.clamp(max=N - 1)
    lengths = accepted.sum(dim=1)
    padding = torch.arange(N, device=tokens.device) >= lengths[:, None]
    emitted = sampled.gather(1, nodes).masked_fill(padding, -1)
    return nodes.masked_fill(padding, -1).int(), emitted.int(), lengths.int()
