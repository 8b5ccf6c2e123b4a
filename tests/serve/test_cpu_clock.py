"""Times of steps on a CPU, with clocks that the tests turn."""

import pytest

from slipstream.serve.runner import model_runner
from slipstream.serve.runner.model_runner import CpuClock


class Clocks:
    """Both, in seconds."""

    def __init__(self):
        self.wall = self.own = 100.0

    def perf_counter(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.own

    def compute(self, seconds: float, waiting: float = 0.0):
        self.own += seconds
        self.wall += seconds + waiting


@pytest.fixture
def clocks(monkeypatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(model_runner, "time", clocks)
    return clocks


def test_a_step_includes_the_schedulers_work_but_no_idle_time(clocks):
    clock = CpuClock()
    for idle in (0.0, 5.0):
        clocks.compute(0.001, waiting=idle)
        clock.start()
        clocks.compute(0.010)
        assert clock.stop() == pytest.approx(11.0)


def test_other_programs_slow_all_steps_down_alike(clocks):
    """They take half of the time, in turns that are longer than steps."""
    clock = CpuClock()
    small = []
    large = []
    for index in range(600):
        waiting = 0.080 if index % 4 == 0 else 0.0
        for seconds, times in ((0.010, small), (0.030, large)):
            clock.start()
            clocks.compute(seconds, waiting=waiting / 2)
            times.append(clock.stop())
    assert sum(large[-200:]) / sum(small[-200:]) == pytest.approx(3.0, rel=0.02)
    assert sum(large[-200:]) + sum(small[-200:]) == pytest.approx(200 * 1000 * 0.060, rel=0.05)
    assert max(small[-200:]) < 2 * min(small[-200:]), "though some took five times as long"
