"""The order of a product's sums that any number of ranks keeps: its inputs are cut into leaves, each a sum in fp32 in
the order of the inputs, which are added along a balanced binary tree (after IsoExec's leaves of K).

A rank has the inputs of a branch of the tree, adds up its leaves, and sends the sum; the ranks' sums are added along
the rest of the tree (kernels/collectives/). So the bits depend on the inputs of a leaf alone: not on the number of
ranks, nor on how programs share out the leaves. A power of two of leaves lies in a rank, and in a program.
Letters: M rows, I inputs, O outputs, L leaves.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.collectives.tree import add_along_tree

LEAVES = 4  # of a layer's inputs, on all ranks together
MOST_LEAVES = 8
LEAF_UNIT = 64  # inputs that a leaf has a multiple of


def leaves_of_rank(num_inputs: int, world: int, leaves: int = LEAVES) -> int:
    """Returns how many of a layer's leaves lie on each of `world` ranks.

    Raises ValueError where ranks do not divide the leaves, or leaves the layer's inputs.
    """
    if world > leaves or leaves % world or leaves > MOST_LEAVES:
        raise ValueError(f"{world} ranks do not share {leaves} leaves of sums: use a divisor, or more leaves")
    if num_inputs % (leaves * LEAF_UNIT):
        raise ValueError(
            f"{num_inputs} inputs are not cut into {leaves} leaves of a multiple of {LEAF_UNIT}: sums over ranks then "
            "differ from those of one"
        )
    return leaves // world


def leaf_sums(x: Tensor, weight: Tensor, leaves: int) -> Tensor:
    """x (M, I), weight (O, I) -> the leaves' sums (L, M, O) fp32."""
    x_leaves = x.float().unflatten(1, (leaves, -1)).transpose(0, 1)
    weight_leaves = weight.float().unflatten(1, (leaves, -1)).permute(1, 2, 0)
    return torch.bmm(x_leaves, weight_leaves)


def leaf_linear(x: Tensor, weight: Tensor, leaves: int, bias: Tensor | None = None) -> Tensor:
    """x (M, I) @ weight (O, I).T + bias (O,) -> (M, O) fp32, the leaves' sums added along the tree, then the bias; the
    reference of the kernels' order."""
    out = add_along_tree(leaf_sums(x, weight, leaves).unbind())
    return out if bias is None else out + bias.float()


@triton.jit
def new_branches(zeros, LEVELS: tl.constexpr):
    """The sums of the tree's branches that wait for their right neighbours, one at each level."""
    branches = ()
    for _ in tl.static_range(LEVELS):
        branches = branches + (zeros,)  # type: ignore[assignment]
    return branches


@triton.jit
def end_leaf(total, branches, index, LEVELS: tl.constexpr):
    """Keeps the sum of leaf `index` where the branch that it ends waits for its right neighbour."""
    next_branches = ()
    for level in tl.static_range(LEVELS):
        is_left = (index & ((2 << level) - 1)) == (1 << level) - 1
        next_branches = next_branches + (tl.where(is_left, total, branches[level]),)  # type: ignore[assignment]
        total = branches[level] + total
    return next_branches


@triton.jit
def end_tree(total, branches, LEVELS: tl.constexpr):
    """The sum of all leaves; `total` is the last one's."""
    for level in tl.static_range(LEVELS):
        total = branches[level] + total
    return total


@triton.jit
def load_tree(cells, stride, mask, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Adds along the tree what lies at `cells`, pointers, and `stride` further on each: COUNT terms from FIRST on."""
    if COUNT == 1:
        total = tl.load(cells + FIRST * stride, mask=mask, other=0.0, cache_modifier=".cg")
    else:
        left = load_tree(cells, stride, mask, FIRST, COUNT // 2)
        total = left + load_tree(cells, stride, mask, FIRST + COUNT // 2, COUNT // 2)
    return total
