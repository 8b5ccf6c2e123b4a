"""Measures how long the device waits for the host in each round, and how much of that the drafter takes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from slipstream.serve.engine.engine import Engine


class HostTimes(NamedTuple):
    """Seconds: from one round's begin to the next, of the wait before it, of the drafter's part of that."""

    round_s: float
    host_s: float
    drafter_s: float


class HostClock:
    """Wraps an engine's methods and records the times of each round."""

    def __init__(self, engine: Engine) -> None:
        self.begin(0)
        self._in_flight = engine._in_flight  # launched, not yet read: while there are any, the device does not wait
        self._is_gpu = engine.device.type == "cuda"
        self._drafting_s = self._began = self._replayed = 0.0
        parts: list[tuple[Any, str]] = [
            (engine.drafter, "draft"),
            (engine.executor, "store"),
            (engine.policy, "choose"),
        ]
        parts += (
            [] if engine.overlap else [(engine.policy, "record")]
        )  # with overlap, `record` runs while the device computes
        for owner, name in parts:
            if owner is not None:
                setattr(owner, name, self._timed(getattr(owner, name)))
        self._round, self._prefill = engine.executor.round, engine.executor.prefill
        engine.executor.round, engine.executor.prefill = self.round, self.prefill  # type: ignore[method-assign]
        self._graphs = engine.executor.graphs
        if self._graphs is not None:
            self._replay = self._graphs.round
            self._graphs.round = self.replay  # type: ignore[method-assign]

    def begin(self, batch: int) -> None:
        """Forgets what it has recorded. Rounds of fewer than `batch` requests are ignored."""
        self.batch = batch
        self.rounds: list[HostTimes] = []
        self._landed: float | None = None

    def round(self, planned: Any, width: int) -> Any:
        began = time.perf_counter()
        flight = self._round(planned, width)
        launched = self._launched(began)
        if self._landed is not None and len(planned.slots) == self.batch:
            host_s = 0.0 if self._in_flight else launched - self._landed
            self.rounds.append(HostTimes(began - self._began, host_s, self._drafting_s))
        self._drafting_s, self._began = 0.0, began
        return Landing(flight, self)

    def replay(self, rows: Any, mode: Any, width: int) -> Any:
        results = self._replay(rows, mode, width)
        self._replayed = time.perf_counter()
        return results

    def prefill(self, chunks: Any) -> Any:
        self._landed = None
        return self._prefill(chunks)

    def landed(self) -> None:
        self._landed = time.perf_counter()

    def _launched(self, began: float) -> float:
        """The time at which the device received the round just launched."""
        if not self._is_gpu:
            return began  # on a CPU, launching is computing
        return time.perf_counter() if self._graphs is None else self._replayed

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments, **options)
            self._drafting_s += time.perf_counter() - began
            return result

        return timed


def host_figures(rounds: Sequence[HostTimes]) -> dict[str, float | None]:
    """Medians; None without rounds."""
    if not rounds:
        return dict.fromkeys(("round_ms", "host_us", "drafter_us", "host_share"))
    period, host, drafter = (median(times) for times in zip(*rounds, strict=True))
    return {
        "round_ms": round(1e3 * period, 3),
        "host_us": round(1e6 * host, 1),
        "drafter_us": round(1e6 * drafter, 1),
        "host_share": round(host / period, 4),
    }


@dataclass(frozen=True, slots=True)
class Landing:
    """A flight that tells the clock when its results arrive."""

    flight: Any
    clock: HostClock

    def read(self) -> Any:
        found = self.flight.read()
        self.clock.landed()
        return found
