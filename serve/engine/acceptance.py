"""Tracks how often drafted nodes are accepted.

Nodes share statistics by what is known of them before they are verified: the place in the proposal with the probability
that the draft gave, or with the host's confidence. Such a class is an acceptance bin. Which nodes are verified depends
on their bins alone, so the others do not bias a bin's acceptance probability. Imports no torch.
"""

from collections.abc import Sequence
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
REQUEST_PRIOR = 4.0  # expected nodes of a request that count as accepted as often as the bins say
REQUEST_MEMORY = 24.0  # expected nodes that a request remembers, at most
REQUEST_KEEP = 0.995  # their decay in a step, so that a request without drafts is tried again
MOST_RATIO = 2.0  # upper bound of a request's ratio


class HostRow(NamedTuple):
    """Bins, -1 for the root, and the bits of fp32 probabilities of a host proposal's nodes, (n,) both."""

    bins: Ints
    probabilities: Ints


class AcceptanceStats:
    """Counts verified and accepted nodes by bin.

    A bin with few verified nodes goes by its prior, times the ratio of accepted to expected nodes at its place and
    before: so we notice an overconfident draft before each of its bins has been tried, and places that are not
    verified at present follow those that are. If the last steps accepted more or fewer nodes at a place, or before it,
    than its bins predicted, we expect that to go on until the bins have learnt it.
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
            self._published = self._steps
            if np.abs(self.probabilities - self.table).max() > MOVED:
                self.publish(self.probabilities.astype(np.float32))

    def publish(self, table: NDArray[np.float32]) -> None:
        """Gives the device and proposals of the host another table, (BINS,)."""
        self.table = table
        self.version += 1
        self._host_rows.clear()

    def join(self, num_running: int) -> None:
        """Forgets a request's share of the last steps, which told of `num_running` others that it joins."""
        self._recent *= num_running / (num_running + 1)
        self._is_new = False

    @property
    def probabilities(self) -> Floats:
        """(BINS,) probability that a node is accepted: the present ones, which the table follows with delay."""
        if not self._is_new:
            counts = _by_place(np.stack((self._accepted, self.num_tried * self._prior)))
            surer, lately = _ratios(np.stack((counts, self._recent), axis=1))
            prior = np.minimum(self._prior * surer, MOST_LIKELY)
            self._learnt = (self._accepted + PRIOR * prior) / (self.num_tried + PRIOR)
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


class RequestRatios:
    """Compares requests with all others: the ratio of accepted to expected nodes in a request's last rounds. Nodes of
    the host do not count."""

    def __init__(self, num_slots: int) -> None:
        self._counts = np.zeros((2, num_slots))  # by slot: accepted nodes, and those that the bins predicted

    def admit(self, slot: int) -> None:
        """Forgets the request that had the slot."""
        self._counts[:, slot] = 0

    def record(self, slots: Ints, accepted: NDArray[np.bool_], expected: Floats, steps: int = 1) -> None:
        """Counts (n,) nodes of these slots, of so many steps: whether each was accepted, and how likely that was."""
        self._counts *= REQUEST_KEEP**steps
        for counts, values in zip(self._counts, (accepted, expected), strict=True):
            counts += np.bincount(slots, values, minlength=len(counts))
        self._counts *= REQUEST_MEMORY / np.maximum(self._counts[1], REQUEST_MEMORY)

    def mean(self, slots: Sequence[int]) -> float:
        """Returns the mean ratio of the requests in these slots."""
        accepted, expected = self._counts[:, slots] + REQUEST_PRIOR
        return float(np.minimum(accepted / expected, MOST_RATIO).mean())


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


def _ratios(counts: Floats) -> Floats:
    """Returns (n, BINS) ratios of accepted to expected nodes, from counts by place, (2, n, PLACES + KINDS * PLACES).
    PRIOR nodes more count as accepted as often as those at the place before."""
    sides = [counts[..., None, :PLACES], counts[..., PLACES:].reshape(2, -1, KINDS, PLACES)]
    accepted, expected = np.moveaxis(np.concatenate(sides, axis=2), 3, 1)  # (PLACES, n, 1 + KINDS)
    shares = 1 / (expected + PRIOR)
    ratios = accepted * shares
    shares *= PRIOR
    before = np.ones(())
    for ratio, share in zip(ratios, shares, strict=True):
        ratio += share * before
        before = ratio
    network = np.repeat(ratios[..., 0].T, BUCKETS, axis=1)
    return np.concatenate((network, ratios[..., 1:].transpose(1, 2, 0).reshape(len(network), -1)), axis=1)


def _network_prior() -> Floats:
    """Returns (NETWORK_BINS,) the draft's probability, in the middle of each bucket."""
    return np.tile((np.arange(BUCKETS) + 0.5) / BUCKETS, PLACES)


def _host_prior() -> Floats:
    """Returns (KINDS * PLACES,): each node follows the one before with one probability, higher for surer kinds."""
    places = np.arange(1, PLACES + 1)
    kinds = np.arange(KINDS)
    return ((1 - 0.5 ** np.maximum(kinds, 1))[:, None] ** places).ravel()
