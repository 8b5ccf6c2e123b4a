"""Costs and yields of steps over a batch, by the rows of the pass and the width of proposals. Imports no torch."""

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FREE = 1.02  # a pass that takes so much longer than one of the roots alone takes no longer


class Batch(NamedTuple):
    decoding: int  # requests
    drafted: int  # requests with drafts among them

    def nodes(self, width: int) -> int:
        """Returns the nodes of the batch if every drafted request has `width`."""
        return self.decoding + self.drafted * (width - 1)


class StepValues(NamedTuple):
    """Values of steps by `k`, the index of a possible pass, and by `j`, the index of a width, which the verified
    proposals have or the next ones get."""

    rows: list[int]  # [k] ascending
    target_ms: list[float]  # [k] time of the target's pass
    arrays: tuple[NDArray[np.int64], NDArray[np.float64]]  # `rows` and `target_ms`
    draft_ms: list[float]  # [j] time of the draft pass
    tokens: NDArray[np.float64]  # [j, k] expected
    best: list[int]  # [j] the best k
    values: list[float]  # [j] its tokens, less those that other steps would yield in the time
    rate: float  # tokens per ms of the best step without prompts

    def ms(self, k: int, j: int) -> float:
        return self.target_ms[k] + self.draft_ms[j]

    def find(self, rows: int) -> int:
        """Returns the index of the smallest pass that takes so many rows, or of the largest."""
        return min(bisect_left(self.rows, rows), len(self.rows) - 1)

    @property
    def free_rows(self) -> int:
        """Rows up to which a pass takes no longer than over the roots alone."""
        k = bisect_left(self.target_ms, FREE * self.target_ms[0])
        return self.rows[max(k - 1, 0)]


def within(ms: NDArray[np.float64], max_ms: float) -> NDArray[np.bool_]:
    """Returns which steps take at most `max_ms`; if none, the fastest."""
    mask = ms <= max_ms
    return mask if mask.any() else ms == ms.min()
