"""The order in which sums of leaves and of ranks are added: along a balanced binary tree, whatever their number."""

from collections.abc import Sequence

from torch import Tensor


def first_half(count: int) -> int:
    """How many of `count` > 1 terms the left branch of the tree has: the largest power of two below."""
    return 1 << (count - 1).bit_length() - 1


def add_along_tree(terms: Sequence[Tensor]) -> Tensor:
    """Adds terms of one shape and dtype: (0 + 1) + (2 + 3), of four. Whoever has all terms of a branch may add them
    first, and give their sum in their place."""
    if len(terms) == 1:
        return terms[0]
    half = first_half(len(terms))
    return add_along_tree(terms[:half]) + add_along_tree(terms[half:])
