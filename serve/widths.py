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
        depth = self.widths[-1] - 1
        self._tried = [PRIOR] * depth  # drafts at each depth whose parent was accepted, decayed
        self._accepted = [PRIOR] * depth
        self._budget = 0.0  # ms that probes may cost
        self._probes_left = 0

    def choose(self, batch: int) -> int:
        """The width of the next round, of `batch` requests."""
        best = max(self.widths, key=lambda width: self.rate(batch, width))
        if self.rate(batch, best) > HYSTERESIS * self.rate(batch, self.width):
            self.width = best
        wider = next((width for width in self.widths if width > self.width), self.width)
        extra = self._time(batch, wider) - self._time(batch, self.width)
        self._budget += PROBE_SHARE * self._time(batch, self.width)
        if wider == self.width or extra <= 0:
            return wider
        if self._probes_left == 0 and self._budget >= PROBE_ROUNDS * extra:
            self._probes_left, self._budget = PROBE_ROUNDS, 0.0
        if self._probes_left == 0:
            return self.width
        self._probes_left -= 1
        return wider

    def _time(self, batch: int, width: int) -> float:
        return self.ms[next(size for size in self.sizes if size >= batch), width]

    def rate(self, batch: int, width: int) -> float:
        """Expected tokens per millisecond and request."""
        return self.expected_tokens(width) / self._time(batch, width)

    def expected_tokens(self, width: int) -> float:
        """Tokens that a round of `width` chained nodes emits on average, by the acceptance seen lately."""
        tokens = reached = 1.0
        for tried, accepted in zip(self._tried[: width - 1], self._accepted, strict=False):
            reached *= accepted / tried
            tokens += reached
        return tokens

    def record(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """A round proposed `drafted[i]` tokens to request i, `accepted[i]` of which it took."""
        for depth in range(max(drafted, default=0)):
            tried = sum(count >= depth < limit for limit, count in zip(drafted, accepted, strict=True))
            taken = sum(count > depth for count in accepted)
            self._tried[depth] = DECAY * self._tried[depth] + tried
            self._accepted[depth] = DECAY * self._accepted[depth] + taken
