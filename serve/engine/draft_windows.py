"""Chooses how much of a long text the draft reads: all of it, or the last tokens alone.

To read all takes time, and a draft that was trained on shorter texts may be accepted less by it, another more. So
proposals of both kinds are compared, for texts of about the same length: how many of their nodes were accepted, and how
long the steps took. Each choice is made as often as it is likely to be the better one (Thompson, Biometrika 25, 1933):
both are spread over the same time, so what else changes in it favours neither. No text depends on a choice. Imports no
torch.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import copysign, inf
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WINDOW = 2048  # tokens that the draft reads, if not all
GRAIN = 128  # a window begins at a multiple of this: kernels read so many tokens at a time, or a part of them
SHORTEST = 2 * WINDOW  # texts from here on may be read in part
CLASSES = 32  # of lengths, an octave each
MEMORY = 4096.0  # rounds that a class remembers
PRIOR = 4.0  # rounds that each choice seems to have had, as good as all
LEAST_SHARE = 0.01  # how often the worse choice is made, at least
KEEP_TIMES = 0.95  # weight of earlier pairs of steps after one more
KEEP_YIELD = 0.99  # weight of earlier steps after one more
RECOMPUTE = 8  # steps for which gains are used again
GOLDEN = 0.6180339887498949  # its multiples modulo 1 spread evenly


class DraftPass(NamedTuple):
    """A draft's pass."""

    slots: tuple[int, ...]
    width: int
    num_read: int  # committed tokens that it reads, of all requests


class DraftWindows:
    """Learns which choice pays, and keeps the present ones. `num_slots`: of requests."""

    def __init__(self, num_slots: int) -> None:
        self.starts = np.zeros(num_slots, np.int64)  # by slot: the first position that the draft reads
        self._rounds = np.zeros((CLASSES, 2, 3))  # by class and choice: rounds, accepted nodes, squares of these
        self._times = defaultdict[int, Floats](lambda: np.zeros(2))  # by width: sums of ms * tokens, of tokens^2
        self._yield = np.zeros(3)  # tokens, ms and steps
        self._last = DraftPass((), 1, 0), 0.0  # and the time of its step beyond the expected one
        self._num_steps = 0
        self._gains = self._compute_gains()

    def has_long(self, lengths: Sequence[int]) -> bool:
        """Whether a text of so many tokens may be read in part."""
        return max(lengths, default=0) >= SHORTEST

    def choose(self, slots: Sequence[int], lengths: Sequence[int], width: int) -> tuple[tuple[int, int], ...]:
        """Chooses for a draft's pass of `width` nodes over texts in these slots, of which so many tokens are committed.
        Returns (slot, start) of those that start elsewhere than before."""
        if not self.has_long(lengths) and not self.starts.any():
            return ()
        self._num_steps += 1
        if self._num_steps % RECOMPUTE == 0:
            self._gains = self._compute_gains()
        texts = np.array(lengths, np.int64)
        starts = np.zeros(len(texts), np.int64)
        if np.any(is_long := texts >= SHORTEST):
            windows = (texts - WINDOW) // GRAIN * GRAIN
            gains, errors = self._gains[:, _classes(texts)]
            pays = gains + self._worth(width) * windows > self._bar() * errors
            starts[is_long & pays] = windows[is_long & pays]
        moved = np.flatnonzero(starts != self.starts[list(slots)])
        changes = tuple([(slots[index], int(starts[index])) for index in moved.tolist()])
        for slot, start in changes:
            self.starts[slot] = start
        return changes

    def record(self, lengths: Ints, are_windows: NDArray[np.bool_], accepted: Ints) -> None:
        """Counts rounds of n requests: (n,) lengths, whether a window drafted, and accepted nodes."""
        rows = np.stack((np.ones(len(accepted)), accepted, accepted**2), axis=1)
        np.add.at(self._rounds, (_classes(lengths), are_windows.astype(int)), rows)
        total = self._rounds[:, :, 0].sum(axis=1)
        self._rounds *= (MEMORY / np.maximum(total, MEMORY))[:, None, None]

    def observe(self, draft_pass: DraftPass, tokens: int, ms: float, expected_ms: float) -> None:
        """Learns from a step that took `ms`; `expected_ms` does not know how much the draft read."""
        self._yield = KEEP_YIELD * self._yield + (tokens, ms, 1.0)
        last, late_ms = self._last
        self._last = draft_pass, ms - expected_ms
        num_more = draft_pass.num_read - last.num_read
        if draft_pass[:2] == last[:2] and abs(num_more) >= WINDOW:  # else no choice has changed
            usual_ms = self._yield[1] / self._yield[2]
            more_ms = np.clip(ms - expected_ms - late_ms, -usual_ms, usual_ms)
            times = self._times[draft_pass.width]
            times *= KEEP_TIMES
            times += more_ms * num_more, num_more**2

    def _bar(self) -> float:
        """Returns the gain in standard errors from which on this step's passes take a window."""
        level = GOLDEN * self._num_steps % 1
        is_usual = LEAST_SHARE < level < 1 - LEAST_SHARE
        return NormalDist().inv_cdf(level) if is_usual else copysign(inf, level - 0.5)

    def _worth(self, width: int) -> float:
        """Returns the tokens that all requests gain in the time in which the draft reads one token."""
        tokens, ms, _ = self._yield
        product, square = self._times[width]
        return float(tokens / ms * max(product, 0.0) / square) if square else 0.0

    def _compute_gains(self) -> Floats:
        """Returns, by class, how many more nodes are accepted with a window, and the standard error: (2, CLASSES)."""
        count, accepted, squares = np.moveaxis(self._rounds, 2, 0)  # (CLASSES, 2) each
        total = count.sum(axis=1)
        mean = accepted.sum(axis=1) / np.maximum(total, 1)
        means = (accepted + PRIOR * mean[:, None]) / (count + PRIOR)
        variance = (squares.sum(axis=1) - mean * accepted.sum(axis=1) + PRIOR) / (total + PRIOR)
        return np.stack((means[:, 1] - means[:, 0], np.sqrt(variance * (1 / (count + 1)).sum(axis=1))))


def _classes(lengths: Ints) -> NDArray[np.int32]:
    """Returns the octave of each length in windows; the first is of texts that one window holds."""
    return np.frexp(lengths // WINDOW)[1]
