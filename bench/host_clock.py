"""Measures how long the device waits for the host in each round, and how much of that the host's stages take."""

import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.plan import StepPlan


class HostTimes(NamedTuple):
    """Seconds: from one round's begin to the next, of the wait before it, of the stages' part of that."""

    round_s: float
    host_s: float
    stages_s: float


class HostClock:
    """Records the times of an engine's rounds by its trace."""

    def __init__(self, engine: Engine) -> None:
        self.begin(0)
        self._engine = engine
        self._on_gpu = engine.runner.state.device.type == "cuda"
        self._at = dict.fromkeys(("began", "launched", "read", "drafted"), 0.0)
        engine.trace = self.trace
        engine.runner.on_launch = self.launched

    def begin(self, batch: int) -> None:
        """Forgets what it has recorded. Rounds of fewer than `batch` requests are ignored."""
        self.batch = batch
        self.rounds: list[HostTimes] = []
        self._has_landed = False

    def launched(self) -> None:
        """The device has received a pass; before that, on a CPU, it has computed it."""
        self._at["launched"] = time.perf_counter()

    def trace(self, event: str, plan: StepPlan) -> None:
        now = time.perf_counter()
        if plan.chunks:
            self._has_landed &= event not in ("ready", "read")  # the next round waits for more than the host
        elif event == "ready":
            self._ready_at = now
        elif event == "launched":
            self._record(plan)
        else:
            self._at[event] = now
            self._has_landed |= event == "read"

    def _record(self, plan: StepPlan) -> None:
        at, began = self._at, self._ready_at
        if self._has_landed and len(plan.slots) == self.batch:
            received = at["launched"] if self._on_gpu else began
            host_s = 0.0 if self._engine.num_in_flight else received - at["read"]
            self.rounds.append(HostTimes(began - at["began"], host_s, max(0.0, at["drafted"] - at["read"])))
        at["began"] = began


def host_figures(rounds: Sequence[HostTimes]) -> dict[str, float | None]:
    """Medians; None without rounds."""
    if not rounds:
        return dict.fromkeys(("round_ms", "host_us", "stages_us", "host_share"))
    period, host, stages = (median(times) for times in zip(*rounds, strict=True))
    return {
        "round_ms": round(1e3 * period, 3),
        "host_us": round(1e6 * host, 1),
        "stages_us": round(1e6 * stages, 1),
        "host_share": round(host / period, 4),
    }
