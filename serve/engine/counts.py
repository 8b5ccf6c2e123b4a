"""Counts of an engine since it started: steps, their rows, drafts by source and position, and times.

Plain data that is pickled to the server with the engine's gauges. Counts only grow; /metrics shows them
(serve/http/metrics.py). Imports no torch.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

NODE_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
SECOND_BOUNDS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.012, 0.016, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
RATIO_BOUNDS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)  # measured over predicted
VERSION_DIGITS = 12
IN_TREE = "tree"  # the position of nodes of trees, whose depths only the device knows


@dataclass(slots=True)
class Histogram:
    """Observations by bucket, each up to and including its bound; the last bucket is above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class RecentAcceptance:
    """Means over the last segments of requests: the rate of the first drafted token and tokens a round, and what the
    records say of the same requests."""

    segments: int = 0
    rate: float = 0.0
    length: float = 0.0
    record_rate: float = 0.0
    record_length: float = 0.0

    def add(self, weight: float, rate: float, length: float, record_rate: float, record_length: float) -> None:
        """Counts a segment with `weight`, or as much as each of those before if that is more."""
        self.segments += 1
        share = max(weight, 1 / self.segments)
        self.rate += share * (rate - self.rate)
        self.length += share * (length - self.length)
        self.record_rate += share * (record_rate - self.record_rate)
        self.record_length += share * (record_length - self.record_length)


class CategoryState(NamedTuple):
    """A chart of the acceptance alarm (acceptance_alarm.py). `record`: day or training; `clients`: one or several
    during an alarm, else empty; `share`: evidence over what raises one."""

    category: str
    record: str
    clients: str
    share: float
    recent: RecentAcceptance


@dataclass(frozen=True, slots=True)
class AcceptanceView:
    """`new_prompts`: share of chats whose prompts begin or end as none before; `facts` of draft and target by name."""

    states: tuple[CategoryState, ...] = ()
    new_prompts: float = 0.0
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DraftState:
    """The draft's weights. `trial`: open, passed or worse; empty without one."""

    fingerprint: str = ""  # of their files, or the name of a drafter without a network
    has_network: bool = False
    num_swaps: int = 0
    num_returns: int = 0  # of weights whose successors were worse
    trial: str = ""

    @property
    def version(self) -> str:
        """The beginning of the fingerprint, by which answers name the weights; empty where no network drafts."""
        return self.fingerprint[:VERSION_DIGITS] if self.has_network else ""


@dataclass(slots=True)
class EngineCounts:
    """Counts since the start. Sources are those of traces: the drafter's name, and host stages (ngram, grammar)."""

    steps: int = 0
    node_rows: int = 0  # rows of passes that were nodes of proposals, roots included
    prompt_rows: int = 0
    emitted_tokens: int = 0
    idle_tokens: int = 0  # of ended conversations, computed while nothing else was to do; no step counts them
    rounds: Counter[str] = field(default_factory=Counter)  # by source: proposals that were verified
    drafted: Counter[tuple[str, str]] = field(default_factory=Counter)  # by source and position: verified tokens
    accepted: Counter[tuple[str, str]] = field(default_factory=Counter)  # likewise: those that were emitted
    budget: Histogram = field(default_factory=lambda: Histogram(NODE_BOUNDS))  # nodes that steps that decode may verify
    seconds: Histogram = field(default_factory=lambda: Histogram(SECOND_BOUNDS))  # steps' times
    time_ratio: Histogram = field(default_factory=lambda: Histogram(RATIO_BOUNDS))  # over those predicted
    kv_pages: dict[tuple[str, str], int] = field(default_factory=dict)  # now, by group and state
    rank_memory: list[int] = field(default_factory=list)  # now, bytes by rank; empty where there is one rank
    rank_sum_seconds: list[float] = field(default_factory=list)  # likewise: at start-up, of a pass of one row
    acceptance: AcceptanceView = field(default_factory=AcceptanceView)  # now
    draft: DraftState = field(default_factory=DraftState)  # now

    def add_step(self, *, budget: int, node_rows: int, prompt_rows: int, ms: float, predicted_ms: float) -> None:
        """Counts a step. `budget`: nodes that the policy allowed, of which the pass verified `node_rows`; 0 if no
        request decodes. `predicted_ms`: 0 if the policy predicted nothing."""
        self.steps += 1
        self.node_rows += node_rows
        self.prompt_rows += prompt_rows
        self.seconds.observe(ms / 1000)
        if budget:
            self.budget.observe(budget)
        if predicted_ms > 0:
            self.time_ratio.observe(ms / predicted_ms)

    def add_round(self, source: str, *, num_drafted: int, num_accepted: int, is_tree: bool) -> None:
        """Counts that a pass verified `num_drafted` tokens of a request's proposal, of which the first `num_accepted`
        places became text."""
        if not num_drafted:
            return
        self.rounds[source] += 1
        if is_tree:
            self.drafted[source, IN_TREE] += num_drafted
        else:
            for place in _places(source, num_drafted):
                self.drafted[place] += 1
        for place in _places(source, num_accepted):
            self.accepted[place] += 1


@cache
def _places(source: str, count: int) -> tuple[tuple[str, str], ...]:
    """Returns the first places of a source's proposals."""
    return tuple((source, str(place)) for place in range(1, count + 1))
