"""The root-to-leaf paths of a pass's draft trees: attention that reads a tree's nodes path by path adds them up in the
order of the text, as a later step does once they are committed, and not in the order in which they lie in the cache.

Letters: T rows of the pass, S segments.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import Op, pdl_options, wait_for_inputs
from slipstream.kernels.limits import MAX_NODES

PATH_NODES: tl.constexpr = tl.constexpr(MAX_NODES)  # that `Paths.nodes` keeps of each path


class Paths(NamedTuple):
    """Paths of the trees of a ragged pass, numbered from 0 in a segment, by leaf. Other rows hold anything."""

    positions: Tensor  # (T,) int64 committed tokens + depth
    of_row: Tensor  # (T,) int32 the first path that a node lies on
    nodes: Tensor  # (T, PATH_NODES) int32: row `start + path` of a segment has the path's nodes by depth; then its leaf


@Op
def trace_paths(starts: Tensor, num_decoding: int, ancestors: Tensor, positions: Tensor) -> Paths:
    """starts (S + 1,) int32 and num_decoding as in `Segments`; ancestors (T,) int64 bit masks of nodes, positions (T,)
    int64. Segments have up to MAX_NODES nodes."""
    paths = _empty_paths(ancestors, positions)
    begins = starts.tolist()
    bits = ancestors.tolist()
    for start, end in zip(begins[:num_decoding], begins[1:], strict=False):
        masks = bits[start:end]
        parents = {node for index, mask in enumerate(masks) for node in range(index) if mask >> node & 1}
        leaves = [node for node in range(end - start) if node not in parents]
        for path, leaf in reversed(list(enumerate(leaves))):
            nodes = [node for node in range(leaf + 1) if masks[leaf] >> node & 1]
            paths.of_row[[start + node for node in nodes]] = path
            paths.nodes[start + path] = torch.tensor((nodes + [leaf] * PATH_NODES.value)[: PATH_NODES.value])
    return paths


def _empty_paths(ancestors: Tensor, positions: Tensor) -> Paths:
    of_row = torch.empty(len(ancestors), dtype=torch.int32, device=ancestors.device)
    return Paths(positions, of_row, of_row.new_empty(len(ancestors), MAX_NODES))


@trace_paths.kernel()
def trace_paths_triton(starts: Tensor, num_decoding: int, ancestors: Tensor, positions: Tensor) -> Paths:
    """One launch, a program per segment."""
    assert all(x.is_contiguous() for x in (starts, ancestors, positions))
    paths = _empty_paths(ancestors, positions)
    if num_decoding:
        _trace_paths[(num_decoding,)](
            starts, ancestors, positions, paths.of_row, paths.nodes,
            num_warps=4, **pdl_options(starts.device),
        )  # fmt: skip
    return paths


@triton.jit
def _trace_paths(starts, ancestors, positions, path_of_row, nodes_of_path, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    segment = tl.program_id(0)
    start = tl.load(starts + segment)
    count = tl.load(starts + segment + 1) - start
    node = tl.arange(0, PATH_NODES)
    bits = tl.load(ancestors + start + node, mask=node < count, other=0)
    position = tl.load(positions + start + node, mask=node < count, other=0)
    depth = (position - tl.load(positions + start, mask=count > 0, other=0)).to(tl.int32)
    holds = ((bits[:, None] >> node[None, :]) & 1) != 0  # whether the path to a node (axis 0) has another (axis 1)
    is_parent = tl.sum((holds & (node[:, None] > node[None, :])).to(tl.int32), axis=0) > 0
    is_leaf = (node < count) & ~is_parent
    path = tl.cumsum(is_leaf.to(tl.int32), axis=0) - 1
    is_on = holds & is_leaf[:, None]
    first = tl.min(tl.where(is_on, path[:, None], PATH_NODES), axis=0)
    tl.store(path_of_row + start + node, first, mask=node < count)
    node_lists = nodes_of_path + (start + path[:, None]).to(tl.int64) * PATH_NODES
    tl.store(node_lists + depth[None, :], node[None, :] + tl.zeros_like(path)[:, None], mask=is_on)
    is_after = is_leaf[:, None] & (node[None, :] > depth[:, None])
    tl.store(node_lists + node[None, :], node[:, None] + tl.zeros_like(path)[None, :], mask=is_after)
