"""Acceptance: from the root of each proposal, follow the child that the target itself sampled.

On the GPU one program per request holds its nodes in registers; masks and acceptance are one launch each.
Letters: B requests, N nodes per request (root included), at most MAX_NODES.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import Op, pdl_options, wait_for_inputs

MAX_NODES = (
    64  # bits of an ancestor mask: of a proposal, and of the frontiers (all levels but the last) of a draft tree
)


@Op
def ancestor_masks(parents: Tensor) -> Tensor:
    """parents (B, N) int32 with parents[:, 0] = -1 and parents[:, i] < i, N <= 64 -> (B, N) int64 bit masks: bit j of
    node i is set if j is i or an ancestor of it. Unused nodes are children of the root."""
    B, N = parents.shape
    rows, above = torch.arange(B, device=parents.device), parents.clamp(min=0).long()
    masks = (torch.ones_like(above) << torch.arange(N, device=parents.device)).contiguous()
    for node in range(1, N):  # parents come first, so their masks are complete
        masks[:, node] |= masks[rows, above[:, node]]
    return masks


@ancestor_masks.kernel()
def ancestor_masks_triton(parents: Tensor) -> Tensor:
    B, N = parents.shape
    assert N <= MAX_NODES
    masks = torch.empty(B, N, dtype=torch.int64, device=parents.device)
    if B:
        _ancestor_masks[(B,)](parents, masks, *parents.stride(), N, BLOCK=triton.next_power_of_2(N), num_warps=1)
    return masks


def unpack(masks: Tensor, count: int | None = None) -> Tensor:
    """Bit masks (..., n) int64 -> (..., n, count) bool; count: default n."""
    count = masks.shape[-1] if count is None else count
    return (masks[..., None] >> torch.arange(count, device=masks.device) & 1).bool()


@Op
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


@verify.kernel()
def verify_triton(
    tokens: Tensor, parents: Tensor, sampled: Tensor, ancestors: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    B, N = tokens.shape
    assert N <= MAX_NODES
    assert sampled.is_contiguous()
    assert ancestors is None or ancestors.is_contiguous()
    nodes, emitted = torch.empty(2, B, N, dtype=torch.int32, device=tokens.device).unbind()
    lengths = torch.empty(B, dtype=torch.int32, device=tokens.device)
    if B:
        _verify[(B,)](
            tokens, parents, sampled, ancestors, nodes, emitted, lengths, *tokens.stride(), *parents.stride(), N,
            BLOCK=triton.next_power_of_2(N), num_warps=1, **pdl_options(tokens.device),
        )  # fmt: skip
    return nodes, emitted, lengths


@triton.jit(do_not_specialize=["stride", "N"])
def _ancestor_masks(parents_ptr, masks_ptr, stride, node_stride, N, BLOCK: tl.constexpr):
    """All nodes walk up to the root in parallel."""
    request, node = tl.program_id(0), tl.arange(0, BLOCK)
    parents_ptr += request * stride
    mask = tl.full((BLOCK,), 1, tl.int64) << node.to(tl.int64)
    above = tl.where(node < N, node, 0)
    for _ in range(1, N):
        parent = tl.maximum(tl.load(parents_ptr + above * node_stride, mask=above > 0, other=0), 0)
        above = tl.where(above > 0, parent, 0)
        mask |= tl.full((BLOCK,), 1, tl.int64) << above.to(tl.int64)
    tl.store(masks_ptr + request * N + node, mask, mask=node < N)


@triton.jit(do_not_specialize=["stride", "parent_stride", "N"])
def _verify(
    tokens_ptr, parents_ptr, sampled_ptr, ancestors_ptr, nodes_ptr, emitted_ptr, lengths_ptr,
    stride, node_stride, parent_stride, parent_node_stride, N, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Bit i of `matches`: node i is what the target sampled at its parent. A node is accepted if that holds for all of
    its ancestors. Accepted nodes are ranked by a running count, since ids grow along the path."""
    wait_for_inputs(PDL)
    request, node = tl.program_id(0), tl.arange(0, BLOCK)
    is_node = node < N
    token = tl.load(tokens_ptr + request * stride + node * node_stride, mask=is_node, other=-1)
    sampled_ptr += request * N
    bit = tl.full((BLOCK,), 1, tl.int64) << node.to(tl.int64)
    if ancestors_ptr is None:
        parent = tl.maximum(node - 1, 0)
        path = bit | (bit - 1)
    else:
        parent_address = parents_ptr + request * parent_stride + node * parent_node_stride
        parent = tl.maximum(tl.load(parent_address, mask=is_node, other=0), 0)
        path = tl.load(ancestors_ptr + request * N + node, mask=is_node, other=0)
    expected = tl.load(sampled_ptr + parent, mask=is_node, other=-2)
    is_match = (node == 0) | ((token == expected) & (token >= 0))
    matches = tl.sum(tl.where(is_match, bit, 0), axis=0)
    accepted = is_node & ((path & ~matches) == 0)
    count = accepted.to(tl.int32)
    rank, length = tl.cumsum(count, axis=0) - count, tl.sum(count, axis=0)
    out = request * N
    sampled = tl.load(sampled_ptr + node, mask=is_node, other=-1).to(tl.int32)
    for_padding = is_node & (node >= length)
    tl.store(nodes_ptr + out + rank, node, mask=accepted)
    tl.store(emitted_ptr + out + rank, sampled, mask=accepted)
    tl.store(nodes_ptr + out + node, -1, mask=for_padding)
    tl.store(emitted_ptr + out + node, -1, mask=for_padding)
    tl.store(lengths_ptr + request, length)
