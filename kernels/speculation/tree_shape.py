"""The shape of a tree that is drafted level by level. Imports no torch, so that options can be checked at once."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TreeShape:
    topk: int
    depth: int  # levels

    @property
    def candidates(self) -> int:
        """P, the nodes to choose from."""
        return self.topk + (self.depth - 1) * self.topk**2

    @property
    def expanded(self) -> int:
        """Frontier nodes that the draft computes: those of all levels but the last."""
        return self.topk * (self.depth - 1)

    def within(self, width: int) -> "TreeShape":
        """The shape that finds the best `width` nodes, root included: never more levels nor wider ones than that."""
        return TreeShape(min(self.topk, width - 1), min(self.depth, width - 1))
