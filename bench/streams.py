"""Requests of an engine in this process, with the time of each of their outputs."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from slipstream.serve.engine.engine import Engine
from slipstream.serve.request import Request, RequestStats


class Arrival(NamedTuple):
    """New tokens of a request, at a time of `time.perf_counter`."""

    time_s: float
    num_tokens: int


class Gap(NamedTuple):
    """The time between two outputs of a request."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(slots=True)
class Stream:
    """One request, from its start on."""

    added_s: float
    tokens: list[int] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    stats: RequestStats | None = None  # once it has ended

    @property
    def first_token_s(self) -> float:
        """Seconds from the start to the first token."""
        return self.arrivals[0].time_s - self.added_s


class Streams:
    """Steps an engine and keeps what it yields. `all` and `open` hold streams by request id."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.all: dict[str, Stream] = {}
        self.open: dict[str, Stream] = {}

    def add(self, request: Request) -> Stream:
        """Starts a request, whose id must be new. Raises ValueError if it can never be served."""
        stream = Stream(time.perf_counter())
        self.engine.add(request)
        self.all[request.id] = self.open[request.id] = stream
        return stream

    def step(self) -> None:
        """Raises ValueError if a request failed."""
        outputs = self.engine.step()
        now = time.perf_counter()
        for output in outputs:
            stream = self.open[output.request_id]
            if output.tokens:
                stream.tokens += output.tokens
                stream.arrivals.append(Arrival(now, len(output.tokens)))
            if output.finish_reason == "error":
                raise ValueError(f"request {output.request_id} failed: {output.error}")
            if output.finish_reason is not None:
                stream.stats = output.stats
                del self.open[output.request_id]

    def wait_for_room(self, level: int) -> None:
        """Steps until fewer than `level` requests are open."""
        while len(self.open) >= level:
            self.step()

    def finish(self) -> None:
        """Steps until all requests have ended."""
        self.wait_for_room(1)


def num_tokens(streams: Iterable[Stream], start_s: float, end_s: float) -> int:
    """Tokens that arrived after `start_s`, and not after `end_s`."""
    arrivals = (arrival for stream in streams for arrival in stream.arrivals)
    return sum(arrival.num_tokens for arrival in arrivals if start_s < arrival.time_s <= end_s)


def gaps_touching(streams: Iterable[Stream], start_s: float, end_s: float) -> list[float]:
    """Seconds between two outputs of a request, of all gaps that lie wholly or partly between the two times."""
    return [gap.seconds for gap in gaps_of(streams) if gap.start_s < end_s and gap.end_s > start_s]


def gaps_ended(streams: Iterable[Stream], start_s: float, end_s: float) -> list[float]:
    """Seconds between two outputs of a request, of all gaps that ended after `start_s`, and not after `end_s`."""
    return [gap.seconds for gap in gaps_of(streams) if start_s < gap.end_s <= end_s]


def gaps_of(streams: Iterable[Stream]) -> Iterator[Gap]:
    for stream in streams:
        for before, after in pairwise(stream.arrivals):
            yield Gap(before.time_s, after.time_s)


def accept_length(streams: Iterable[Stream]) -> float | None:
    """Mean tokens per round of the streams that have ended; None without rounds."""
    counts = [stream.stats for stream in streams if stream.stats is not None]
    rounds = sum(stats.rounds for stats in counts)
    return sum(stats.completion_tokens - stats.prefills for stats in counts) / rounds if rounds else None
