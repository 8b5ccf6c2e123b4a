"""Tells how many tokens proposals of drafts, and steps over a batch, will yield. Imports no torch."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.serve.engine.acceptance import (
    BUCKETS,
    MOST_LIKELY,
    NETWORK_BINS,
    PLACES,
    AcceptanceStats,
    Floats,
    Ints,
    host_bins,
)

FREE = 1.02  # a pass that takes so much longer than one of the roots alone takes no longer
SEEN = 100.0  # proposals that the shares of a place remember

# A request's proposal: its nodes, root included, and its kind. 0: drafted by a network; others: see HostProposal.
Offer = tuple[int, int]


class Curve(NamedTuple):
    """Expected tokens by number of a request's likeliest nodes after the root: (n,) both, from 0, concave between."""

    nodes: Floats
    tokens: Floats


class ProposalStats:
    """Counts how often each bucket of probabilities occurs at each place of the draft network's proposals.

    Nodes come best first, so a narrow proposal counts as the beginning of a wide one. But those of up to `chain_nodes`
    nodes are chains, which tell nothing of wider ones, trees; 0: all are alike.
    """

    def __init__(self, most_nodes: int, chain_nodes: int = 0) -> None:
        self._chain_nodes = chain_nodes
        places = np.arange(most_nodes - 1)
        self._bins = np.minimum(places, PLACES - 1)[:, None] * BUCKETS + np.arange(BUCKETS)
        self._seen = np.zeros((2, most_nodes - 1, BUCKETS))  # chains and others, decayed
        buckets = (BUCKETS * 0.8 ** (places + 1)).astype(int)  # until some are seen
        self._seen[:, places, np.minimum(buckets, BUCKETS - 1)] = 1.0

    def record(self, bins: Ints) -> None:
        """Counts proposals: (B, N) bins of all nodes of each, verified or not; -1 roots and unused nodes. Proposals of
        the host do not count."""
        drafted = bins[:, 1 : self._seen.shape[1] + 1]
        is_drafted = (drafted >= 0) & (drafted < NETWORK_BINS)
        kinds = (is_drafted.sum(axis=1) >= self._chain_nodes).astype(int)
        rows, columns = is_drafted.nonzero()
        index = np.ravel_multi_index((kinds[rows], columns, drafted[rows, columns] % BUCKETS), self._seen.shape)
        self._seen += np.bincount(index, minlength=self._seen.size).reshape(self._seen.shape)
        total = self._seen.sum(axis=2, keepdims=True)
        self._seen *= SEEN / np.maximum(total, SEEN)

    def curves(self, widths: Sequence[int], probabilities: Floats) -> list[Curve]:
        """Returns the curve of the mean proposal of each width."""
        shares = self._seen / self._seen.sum(axis=2, keepdims=True)
        kinds, places, buckets = (shares > 1e-4).nonzero()
        shares = shares[kinds, places, buckets]
        expected = probabilities[self._bins[places, buckets]]
        order = np.argsort(-expected)
        shares = shares[order]
        expected = expected[order]
        places = places[order]
        kinds = kinds[order]
        nodes = np.array(widths)[:, None]
        is_of_width = (places < nodes - 1) & (kinds == (nodes > self._chain_nodes))
        width_shares = np.where(is_of_width, shares, 0.0)
        return list(map(Curve, _sums(width_shares), _sums(width_shares * expected)))


class Yields:
    """Expected tokens of proposals by the statistics of now. Keeps what it has computed: make another later. `ratio`:
    accepted nodes of the draft network over those that the bins predict, for the requests of now."""

    def __init__(
        self, acceptance: AcceptanceStats, proposals: ProposalStats, widths: Sequence[int], ratio: float = 1.0
    ) -> None:
        self._acceptance = acceptance
        self._proposals = proposals
        self._widths = widths
        self._ratio = ratio
        self._nodes: dict[Offer, tuple[Floats, Floats]] = {}
        self._joint_curves: dict[tuple[Offer, ...], Curve] = {}

    @cached_property
    def curves(self) -> list[Curve]:
        """Curves of the mean proposals of all widths."""
        return self._network_curves(self._widths)

    def joint_curve(self, offers: Sequence[Offer]) -> Curve:
        """Returns the curve of the likeliest nodes of all these offers together."""
        key = tuple(sorted(offers))
        if key not in self._joint_curves:
            numbers = Counter(key)
            parts = [self._nodes_of(offer) for offer in numbers]
            shares = np.concatenate(
                [number * counts for number, (counts, _) in zip(numbers.values(), parts, strict=True)]
            )
            probabilities = np.concatenate([part for _, part in parts])
            order = np.argsort(-probabilities)
            self._joint_curves[key] = Curve(_sums(shares[order]), _sums((shares * probabilities)[order]))
        return self._joint_curves[key]

    def _nodes_of(self, offer: Offer) -> tuple[Floats, Floats]:
        """Returns (n,) numbers of nodes in such a proposal, and (n,) their probabilities."""
        if offer not in self._nodes:
            count, kind = offer
            if kind == 0:
                (curve,) = self._network_curves([count])
                shares = np.diff(curve.nodes)
                self._nodes[offer] = shares, np.diff(curve.tokens) / np.maximum(shares, 1e-9)
            else:
                probabilities = self._acceptance.probabilities[host_bins(count, kind)[1:]]
                self._nodes[offer] = np.ones(count - 1), np.minimum.accumulate(probabilities)
        return self._nodes[offer]

    def _network_curves(self, widths: Sequence[int]) -> list[Curve]:
        probabilities = np.minimum(self._ratio * self._acceptance.probabilities, MOST_LIKELY)
        return self._proposals.curves(widths, probabilities)


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
    arrays: tuple[NDArray[np.int64], Floats]  # `rows` and `target_ms`
    draft_ms: list[float]  # [j] time of the draft pass
    tokens: Floats  # [j, k] expected
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


def has_host_nodes(offers: Sequence[Offer] | None) -> bool:
    """Whether the host proposed something."""
    return offers is not None and any(kind for _, kind in offers)


def within(ms: Floats, max_ms: float) -> NDArray[np.bool_]:
    """Returns which steps take at most `max_ms`; if none, the fastest."""
    mask = ms <= max_ms
    return mask if mask.any() else ms == ms.min()


def _sums(values: Floats) -> Floats:
    """Returns (..., n + 1) sums of the first 0, 1, ... n of (..., n) values."""
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums
