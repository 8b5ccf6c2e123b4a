"""How many nodes to verify in a round: as many as give the most tokens per millisecond at this load.

A target pass over few rows costs what its weights cost to read, so drafts are free; over many rows it costs by the row,
and drafts that are refused slow everyone down. Both sides of the choice are measured: the time of rounds at start-up,
the acceptance of drafts as it happens. Imports no torch.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

DECAY = 0.99  # weight of a round's acceptance after one more round
PRIOR = 4.0  # drafts of each place believed in before any was seen
PROBE_SHARE = 0.01  # of the time goes into rounds wider than the best one, to see whether that has changed
PROBE_ROUNDS = 3  # the first one only drafts
PATIENCE = 2  # rounds that verify none of the host's drafts, before rounds no longer wait for those
HYSTERESIS = 1.01  # a change costs a round without drafts, so it has to pay


# What a request has to verify: nodes, root included, and their kind. Proposals of one kind are accepted alike; 0 is a
# network's, others see HostProposal.
Offer = tuple[int, int]
RoundTimes = Mapping[tuple[int, int], float]


class WidthPolicy:
    """Chooses among `widths` (1 included). `ms` holds the times of rounds, `filtered_ms` of those that sample with
    top-k and the like, if they differ."""

    def __init__(self, widths: Sequence[int], ms: RoundTimes, filtered_ms: RoundTimes | None = None) -> None:
        self.widths = sorted(widths)
        self.ms = ms  # of the present batch: one of the two below
        self._tables = (ms, ms if filtered_ms is None else filtered_ms)
        self.sizes = sorted({size for size, _ in ms})
        self.wait_ms = 0.0  # that a round costs more if it waits for the host's drafts; the engine measures it
        self.width = self.widths[-1]
        self._seen: dict[int, Acceptance] = {}  # by kind
        self._budget = 0.0  # ms that probes may cost
        self._probes_left = 0

    def choose(self, offers: Sequence[Offer], least: int = 1, *, filtered: bool = False) -> int:
        """The width of the next round. The device drafts as many nodes as it is asked for, up to `least`; for more the
        round has to wait for the host."""
        self.ms = self._tables[filtered]
        numbers = Counter(offers)  # a large batch has few different ones
        if least > 1:
            numbers = Counter((max(least, nodes), kind) for nodes, kind in offers)
        most, _ = max(numbers)
        rates = self.rates(numbers, self.widths[: bisect_left(self.widths, most) + 1], least)
        offered = list(rates)
        best = max(offered, key=rates.__getitem__)
        current = min(self.width, offered[-1])
        if rates[best] > HYSTERESIS * rates[current]:
            current = best
        self.width = current
        return self._probe(len(offers), offered[offered.index(current) + 1 :], least)

    def rates(self, offers: Counter[Offer], widths: Sequence[int], least: int) -> dict[int, float]:
        """Expected tokens per millisecond of the batch, by width."""
        tokens = [0.0] * len(widths)
        for (nodes, kind), number in offers.items():
            expected = self._of(kind).expected
            for index, width in enumerate(widths):
                tokens[index] += number * expected[(width if width < nodes else nodes) - 1]  # min() takes longer
        batch = offers.total()
        return {width: sum_ / self._time(batch, width, least) for width, sum_ in zip(widths, tokens, strict=True)}

    def record(self, offers: Sequence[Offer], width: int, accepted: Sequence[Sequence[int]]) -> None:
        """A round verified the offers, cut to `width`, and accepted the nodes with ids accepted[i] behind the root of
        request i."""
        kinds: dict[int, tuple[list[int], list[Sequence[int]]]] = {}
        for (nodes, kind), ids in zip(offers, accepted, strict=True):
            if nodes > 1:
                drafted, right = kinds.setdefault(kind, ([], []))
                drafted.append(min(nodes, width))
                right.append(ids)
        for kind, verified in kinds.items():
            self._of(kind).record(*verified)

    def _of(self, kind: int) -> "Acceptance":
        if kind not in self._seen:
            self._seen[kind] = Acceptance(self.widths[-1], kind)
        return self._seen[kind]

    def _probe(self, batch: int, wider: list[int], least: int) -> int:
        """The present width, or now and then the next wider one."""
        if not wider:
            return self.width
        base = self._time(batch, self.width, least)
        extra = self._time(batch, wider[0], least) - base
        rounds = PROBE_ROUNDS + (PATIENCE if self.width <= least < wider[0] else 0)  # in the end it waits in vain
        self._budget += PROBE_SHARE * base
        if self._probes_left == 0 and self._budget >= rounds * extra:
            self._probes_left, self._budget = PROBE_ROUNDS, 0.0
        if self._probes_left == 0:
            return self.width
        self._probes_left -= 1
        return wider[0]

    def _time(self, batch: int, width: int, least: int) -> float:
        wait = self.wait_ms if width > least else 0.0
        return self.ms[self.sizes[bisect_left(self.sizes, batch)], width] + wait


class Acceptance:
    """How often the nodes of one kind's proposals were accepted lately, by place in the proposal."""

    def __init__(self, width: int, kind: int) -> None:
        prior = 1.0 - 0.5**kind if kind else 1.0
        self._tried = [PRIOR] * (width - 1)  # by node behind the root: how often it was verified, decayed
        self._accepted = [PRIOR * prior**node for node in range(1, width)]
        self.expected = self._expect()

    def record(self, nodes: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        """Proposals with nodes[i] > 1 nodes were verified; the nodes accepted[i] of them were right."""
        ends, trying = Counter(nodes), len(nodes)
        last = max(nodes) - 2  # place of the last node verified
        before = self._accepted[last] / self._tried[last]
        for index in range(last + 1):
            self._tried[index] = DECAY * self._tried[index] + trying
            self._accepted[index] *= DECAY
            trying -= ends[index + 2]
        for ids in accepted:
            for node in ids:
                self._accepted[node - 1] += 1
        self._follow(last, before)
        self.expected = self._expect()  # now: a choice may have a device wait for it

    def _expect(self) -> list[float]:
        """[n - 1]: tokens that n nodes yield on average, the root's and one per accepted node. Nodes come best first
        and a parent before its children, so a proposal is cut behind any of them."""
        rates = (accepted / tried for accepted, tried in zip(self._accepted, self._tried, strict=True))
        return list(accumulate(rates, initial=1.0))

    def _follow(self, last: int, before: float) -> None:
        """Nodes behind the last one verified have changed as it has: else narrow rounds would never see that texts
        have begun to repeat."""
        change = self._accepted[last] / self._tried[last] / before
        for index in range(last + 1, len(self._tried)):
            self._accepted[index] = min(change * self._accepted[index], self._tried[index])
