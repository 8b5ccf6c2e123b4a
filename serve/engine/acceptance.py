"""Tracks how often drafted nodes are accepted.

Nodes share statistics by what is known of them before they are verified: the place in the proposal with the probability
that the draft gave, or with the host's confidence. Such a class is an acceptance bin. Which nodes are verified depends
on their bins alone, so the others do not bias a bin's acceptance probability. Imports no torch.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.serve.engine.plan import FORCED

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]

PLACES = BUCKETS = KINDS = 16  # the last place, bucket of probabilities and kind stand for all above, too
NETWORK_BINS = PLACES * BUCKETS
BINS = NETWORK_BINS + KINDS * PLACES
PRIOR = 4.0  # nodes per bin that the prior counts as
MOST_LIKELY = 0.98  # upper bound of an acceptance probability
MEMORY = 64.0  # verified nodes that a bin remembers, at least
DECAY = 0.98  # weight of nodes beyond that, after one more step
RECENT = 0.97  # weight of a step among the last ones, after one more
REVERT = 0.999  # per step: a bin that is never verified returns to its prior, and is tried again
MOVED = 0.02  # change of an acceptance probability after which the device needs the table again
REFRESH = 32  # steps between two refreshes; fewer at the beginning


class HostRow(NamedTuple):
    """Bins, -1 for the root, and the bits of fp32 probabilities of a host proposal's nodes, (n,) both."""

    bins: Ints
    probabilities: Ints


class AcceptanceStats:
    """Counts verified and accepted nodes by bin.

    A bin with few verified nodes goes by its prior, times the ratio of accepted to expected nodes at its place and
    before: so we notice an overconfident draft before each of its bins has been tried, and places that are not
    verified at present follow those that are. If the last steps accepted more or fewer nodes at a place than its bins
    predicted, we expect that to go on until the bins have learnt it.
    """

    def __init__(self) -> None:
        # nodes by bin, decayed
        self.num_tried = np.zeros(BINS)
        self._accepted = np.zeros(BINS)
        self._prior = np.concatenate((_network_prior(), _host_prior()))
        self._recent = np.zeros((2, PLACES + BINS - NETWORK_BINS))  # by place: accepted nodes, and expected ones
        self._learnt = self._prior.copy()  # by the counts alone
        self._survivals = self._prior.copy()
        self._is_new = True  # `_survivals` is up to date
        self.version = 0  # of `table`
        self.table = self._prior.astype(np.float32)  # (BINS,) probabilities for the device
        self._host_rows: dict[tuple[int, int], HostRow] = {}  # by `table`
        self._steps = self._published = 0

    def record(self, bins: Ints, accepted: NDArray[np.bool_], steps: int = 1) -> None:
        """Counts the verified nodes of the last `steps` steps: (n,) bins, and whether each node was accepted."""
        tried = np.bincount(bins, minlength=BINS)
        right = np.bincount(bins[accepted], minlength=BINS)
        recent = _by_place(np.stack((right, tried * self._learnt)))
        self._recent *= np.where(recent[1] > 0, RECENT, REVERT) ** steps
        self._recent += recent
        total = REVERT**steps * self.num_tried + tried
        keep = np.clip(MEMORY / np.maximum(total, MEMORY), DECAY**steps, 1.0)
        self.num_tried = keep * total
        self._accepted = keep * (REVERT**steps * self._accepted + right)
        self._is_new = False
        self._steps += steps
        if self._steps >= min(2 * self._published, self._published + REFRESH):
            self._publish_moved()

    def publish(self, table: NDArray[np.float32]) -> None:
        """Gives the device and proposals of the host another table, (BINS,)."""
        self.table = table
        self.version += 1
        self._host_rows.clear()

    @property
    def probabilities(self) -> Floats:
        """(BINS,) probability that a node is accepted: the present ones, which the table follows with delay."""
        if not self._is_new:
            prior = np.minimum(self._prior * self._surer(), MOST_LIKELY)
            self._learnt = (self._accepted + PRIOR * prior) / (self.num_tried + PRIOR)
            accepted, expected = self._recent
            lately = (accepted + PRIOR) / (expected + PRIOR)
            lately = np.concatenate((np.repeat(lately[:PLACES], BUCKETS), lately[PLACES:]))
            self._survivals = np.minimum(self._learnt * lately, MOST_LIKELY)
            self._is_new = True
        return self._survivals

    def host_row(self, count: int, kind: int) -> HostRow:
        """Returns the bins and, by `table`, the acceptance probabilities of a host proposal's nodes, of which no node
        is likelier than those before it."""
        key = (count, kind)
        if key not in self._host_rows:
            bins = host_bins(count, kind)
            probabilities = np.ones(len(bins), np.float32)
            probabilities[1:] = np.minimum.accumulate(self.table[bins[1:]])
            self._host_rows[key] = HostRow(bins, probabilities.view(np.int32))
        return self._host_rows[key]

    def _surer(self) -> Floats:
        """Returns (BINS,) accepted nodes over those that the priors expected, at the same place of proposals of this
        kind."""
        counts = _by_place(np.stack((self._accepted, self.num_tried * self._prior)))
        host = counts[:, PLACES:].reshape(2, KINDS, PLACES).swapaxes(1, 2)
        accepted, expected = np.concatenate((counts[:, :PLACES, None], host), axis=2)  # (PLACES, 1 + KINDS)
        ratios = np.empty_like(accepted)
        before = np.ones(1 + KINDS)
        for place in range(PLACES):
            before = (accepted[place] + PRIOR * before) / (expected[place] + PRIOR)
            ratios[place] = before
        return np.concatenate((np.repeat(ratios[:, 0], BUCKETS), ratios[:, 1:].T.ravel()))

    def _publish_moved(self) -> None:
        self._published = self._steps
        if np.abs(self.probabilities - self.table).max() > MOVED:
            self.publish(self.probabilities.astype(np.float32))


def host_bins(count: int, kind: int) -> Ints:
    """Returns (count,) bins of the nodes of a host proposal of a kind >= 1; -1 for its root."""
    bins = NETWORK_BINS + min(kind, KINDS - 1) * PLACES + np.minimum(np.arange(count), PLACES) - 1
    bins[0] = -1
    return bins.astype(np.int32)


def is_forced(bins: Ints) -> NDArray[np.bool_]:
    """Whether nodes of these bins are tokens that a grammar forced."""
    return bins >= NETWORK_BINS + FORCED * PLACES


def _by_place(values: Floats) -> Floats:
    """Turns sums by bin, (n, BINS), into sums by place, (n, PLACES + KINDS * PLACES)."""
    network = values[:, :NETWORK_BINS].reshape(len(values), PLACES, BUCKETS).sum(axis=2)
    return np.concatenate((network, values[:, NETWORK_BINS:]), axis=1)


def _network_prior() -> Floats:
    """Returns (NETWORK_BINS,) the draft's probability, in the middle of each bucket."""
    return np.tile((np.arange(BUCKETS) + 0.5) / BUCKETS, PLACES)


def _host_prior() -> Floats:
    """Returns (KINDS * PLACES,): each node follows the one before with one probability, higher for surer kinds."""
    places = np.arange(1, PLACES + 1)
    kinds = np.arange(KINDS)
    return ((1 - 0.5 ** np.maximum(kinds, 1))[:, None] ** places).ravel()
