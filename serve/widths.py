"""How many nodes to verify in a round: as many as give the most tokens per millisecond at this load.

A target pass over few rows costs what its weights cost to read, so drafts are free; over many rows it costs by the row,
and drafts that are refused slow everyone down. Both sides of the choice are measured: the time of each captured round
at start-up, the acceptance of drafts as it happens. Imports no torch.
"""

from collections.abc import Mapping, Sequence

DECAY = 0.99  # weight of a round's acceptance after one more round
PRIOR = 4.0  # drafts believed to be accepted before any was seen
PROBE_SHARE = 0.01  # of the time goes into rounds wider than the best one, to see whether that has changed
PROBE_ROUNDS = 3  # the first one only drafts
HYSTERESIS = 1.01  # a change costs a round without drafts, so it has to pay


class WidthPolicy:
    """Chooses among `widths` (1 included). `ms` (batch size, width) holds the times of rounds."""

    def __init__(self, widths: Sequence[int], ms: Mapping[tuple[int, int], float]) -> None:
        self.widths = sorted(widths)
        self.ms = ms
        self.sizes = sorted({size for size, _ in ms})
        self.width = self.widths[-1]
        num_drafted = self.widths[-1] - 1
        self._tried = [PRIOR] * num_drafted  # by node behind the root: how often it was verified, decayed
        self._accepted = [PRIOR] * num_drafted
        self._budget = 0.0  # ms that probes may cost
        self._probes_left = 0

    def choose(self, proposed: Sequence[int]) -> int:
        """The width of the next round; proposed[i]: nodes that request i has to verify, root included."""
        fitting = [width for width in self.widths if width < max(proposed)]
        offered = self.widths[: len(fitting) + 1]  # wider ones would verify no more
        best = max(offered, key=lambda width: self.rate(proposed, width))
        current = min(self.width, offered[-1])
        if self.rate(proposed, best) > HYSTERESIS * self.rate(proposed, current):
            current = best
        self.width = current
        return self._probe(len(proposed), [width for width in offered if width > current])

    def rate(self, proposed: Sequence[int], width: int) -> float:
        """Expected tokens per millisecond of the batch."""
        tokens = sum(self.expected_tokens(min(width, count)) for count in proposed)
        return tokens / self._time(len(proposed), width)

    def expected_tokens(self, count: int) -> float:
        """Tokens that `count` nodes yield on average, by the acceptance seen lately: the root's, and one per accepted
        node. Nodes come best first and a parent before its children, so a proposal is cut behind any of them."""
        rates = zip(self._accepted[: count - 1], self._tried, strict=False)
        return 1.0 + sum(accepted / tried for accepted, tried in rates)

    def record(self, drafted: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        """A round verified drafted[i] nodes of request i behind its root, and accepted those with ids accepted[i]."""
        for index in range(max(drafted, default=0)):
            self._tried[index] = DECAY * self._tried[index] + sum(index < count for count in drafted)
            self._accepted[index] *= DECAY
        for nodes in accepted:
            for node in nodes:
                self._accepted[node - 1] += 1

    def _probe(self, batch: int, wider: list[int]) -> int:
        """The present width, or now and then the next wider one."""
        if not wider:
            return self.width
        base = self._time(batch, self.width)
        extra = self._time(batch, wider[0]) - base
        self._budget += PROBE_SHARE * base
        if self._probes_left == 0 and self._budget >= PROBE_ROUNDS * extra:
            self._probes_left, self._budget = PROBE_ROUNDS, 0.0
        if self._probes_left == 0:
            return self.width
        self._probes_left -= 1
        return wider[0]

    def _time(self, batch: int, width: int) -> float:
        return self.ms[next(size for size in self.sizes if size >= batch), width]
