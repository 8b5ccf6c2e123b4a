"""A fake engine whose steps take as long as they say, for tests of what benchmarks measure."""

from typing import Any

from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Output
from slipstream.tests.serve.fake_engine import FakeEngine


class Clock:
    """Stands for the module `time`: time passes only where it is told to."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    process_time = perf_counter


class ClockedEngine(FakeEngine):
    """Its steps take 1 s each."""

    def __init__(self, clock: Clock):
        super().__init__(EngineConfig(target="x"))
        self.clock = clock

    @property
    def num_open(self) -> int:
        return len(self.running)

    def check(self, request: Any):
        assert not self.running, "every request is checked before the first one begins"

    def step(self) -> list[Output]:
        self.clock.now += 1.0
        return super().step()
