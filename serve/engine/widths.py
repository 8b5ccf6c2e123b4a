"""How many nodes to verify in a round: as many as give the most tokens per millisecond at this load.

A target pass over few tokens costs as much as reading the weights, so drafts are free. A pass over many tokens costs by
the token, and refused drafts slow every request down. Both sides are measured: the times of rounds at start-up, the
acceptance of drafts while serving. Imports no torch.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

DECAY = 0.99  # weight of a round's acceptance after one more round
PRIOR = 4.0  # drafts per place that the prior counts as
PROBE_SHARE = 0.01  # of the time is spent on rounds wider than the best one, to notice changes
PROBE_ROUNDS = 3  # the first one only drafts
PATIENCE = 2  # rounds without a draft of the host, after which rounds stop waiting for the host
WAIT_DECAY = 0.95  # per round, of the mean time in which rounds wait for the host
OBSERVED = 0.02  # weight of a measured round in the correction of the tables
MOST_SLOWER = 8.0  # a larger factor is a disturbance
HYSTERESIS = 1.01  # switching costs one draft-less round; require at least 1 % gain


# A request's proposal: its nodes, root included, and its kind. Each kind has its own acceptance rate; 0: drafted by a
# network; others: see HostProposal.
Offer = tuple[int, int]
RoundTimes = Mapping[tuple[int, int], float]


class WidthPolicy:
    """Chooses among `widths` (1 included). `ms` holds the times of rounds; `filtered_ms`, if given, those of rounds
    that sample with top-k, top-p or min-p.

    `observe` corrects them while serving: contexts grow, and what experts a round reads depends on its tokens.
    """

    def __init__(self, widths: Sequence[int], ms: RoundTimes, filtered_ms: RoundTimes | None = None) -> None:
        self.widths = sorted(widths)
        self.ms = ms  # the table for the present batch
        self._tables = (ms, ms if filtered_ms is None else filtered_ms)
        self.sizes = sorted({size for size, _ in ms})
        self.wait_ms = 0.0  # extra cost of a round that waits for the host's drafts; the planner sets it
        self.width = self.widths[-1]
        self._seen: dict[int, Acceptance] = {}  # by kind
        self._slower = 1.0  # measured times over those of the tables, of all rounds lately
        self._deviation: dict[tuple[int, int, bool], float] = {}  # from that, by size, width and filtered
        self._is_filtered = False  # the present batch
        self._budget = 0.0  # ms that probes may cost
        self._probes_left = 0

    def choose(self, offers: Sequence[Offer], least: int = 1, *, filtered: bool = False) -> int:
        """The width of the next round. The device drafts up to `least` nodes; for more the round waits for the host."""
        self.ms, self._is_filtered = self._tables[filtered], filtered
        numbers = Counter(offers)  # a large batch has few distinct offers
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
                tokens[index] += number * expected[(width if width < nodes else nodes) - 1]  # faster than min()
        batch = offers.total()
        return {width: sum_ / self._time(batch, width, least) for width, sum_ in zip(widths, tokens, strict=True)}

    def record(self, offers: Sequence[Offer], width: int, accepted: Sequence[Sequence[int]]) -> None:
        """Counts a round that verified the offers, cut to `width`; request i accepted the nodes accepted[i]."""
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
        """The present width, or now and then the next wider one (a probe)."""
        if not wider:
            return self.width
        base = self._time(batch, self.width, least)
        extra = self._time(batch, wider[0], least) - base
        rounds = PROBE_ROUNDS + (PATIENCE if self.width <= least < wider[0] else 0)  # a failed probe waits in vain
        self._budget += PROBE_SHARE * base
        if self._probes_left == 0 and self._budget >= rounds * extra:
            self._probes_left, self._budget = PROBE_ROUNDS, 0.0
        if self._probes_left == 0:
            return self.width
        self._probes_left -= 1
        return wider[0]

    def observe(self, batch: int, width: int, ms: float, *, filtered: bool = False) -> None:
        """A round of that many requests took `ms`."""
        size = self.sizes[bisect_left(self.sizes, batch)]
        ratio = min(max(ms / self._tables[filtered][size, width], 1 / MOST_SLOWER), MOST_SLOWER)
        self._slower += OBSERVED * (ratio - self._slower)
        before = self._deviation.get((size, width, filtered), 1.0)
        self._deviation[size, width, filtered] = before + OBSERVED * (ratio / self._slower - before)

    def _time(self, batch: int, width: int, least: int) -> float:
        wait = self.wait_ms if width > least else 0.0
        size = self.sizes[bisect_left(self.sizes, batch)]
        slower = self._slower * self._deviation.get((size, width, self._is_filtered), 1.0)
        return self.ms[size, width] * slower + wait


class Acceptance:
    """How often nodes of one kind of proposal were accepted lately, by place in the proposal."""

    def __init__(self, width: int, kind: int) -> None:
        prior = 1.0 - 0.5**kind if kind else 1.0
        self._tried = [PRIOR] * (width - 1)  # by node after the root: verifications, decayed
        self._accepted = [PRIOR * prior**node for node in range(1, width)]
        self.expected = self._expect()

    def record(self, nodes: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        """Counts verified proposals: proposal i had nodes[i] > 1 nodes, of which accepted[i] were accepted."""
        ends, trying = Counter(nodes), len(nodes)
        last = max(nodes) - 2  # index of the last verified node
        before = self._accepted[last] / self._tried[last]
        for index in range(last + 1):
            self._tried[index] = DECAY * self._tried[index] + trying
            self._accepted[index] *= DECAY
            trying -= ends[index + 2]
        for ids in accepted:
            for node in ids:
                self._accepted[node - 1] += 1
        self._follow(last, before)
        self.expected = self._expect()  # now, since the device may wait for the next choice

    def _expect(self) -> list[float]:
        """[n - 1]: tokens that n nodes yield on average: one for the root and one per accepted node. Nodes are sorted
        best first and parents precede children, so a proposal can be cut after any node."""
        rates = (accepted / tried for accepted, tried in zip(self._accepted, self._tried, strict=True))
        return list(accumulate(rates, initial=1.0))

    def _follow(self, last: int, before: float) -> None:
        """Scales the rates of nodes beyond the last verified one by its change. Otherwise narrow rounds would never
        notice that texts have begun to repeat."""
        change = self._accepted[last] / self._tried[last] / before
        for index in range(last + 1, len(self._tried)):
            self._accepted[index] = min(change * self._accepted[index], self._tried[index])
