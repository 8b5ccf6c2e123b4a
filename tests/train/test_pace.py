"""A share of the time, against the sum of what was worked."""

import random

import pytest

from slipstream.train.pace import LOOK_SECONDS, Pace


class World:
    """A clock, and another program that is busy in some spans of time."""

    def __init__(self, busy: list[tuple[float, float]]):
        self.now = 0.0
        self.busy = busy

    def is_busy(self) -> bool:
        return any(start <= self.now < end for start, end in self.busy)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float):
        self.now += seconds


def overlap(spans: list[tuple[float, float]], start: float, end: float) -> float:
    return sum(max(0.0, min(end, last) - max(start, first)) for first, last in spans)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5, 1.0])
def test_work_keeps_to_its_share_of_busy_time_and_to_no_share_of_the_rest(share, monkeypatch):
    generator = random.Random(0)
    longest = 0.2
    busy = []
    idle = []
    end = 0.0
    for _ in range(8):
        start = end + generator.uniform(0.5, 30)
        idle.append((end, start))
        end = start + generator.uniform(0.5, 60)
        busy.append((start, end))
    world = World(busy)
    monkeypatch.setattr("slipstream.train.pace.time", world)
    pace = Pace(share, world.is_busy)
    work = []
    while world.now < end:
        pace.begin()
        start = world.now
        world.sleep(generator.uniform(0.01, longest))
        work.append((start, world.now))
        pace.end()
    for first, last in busy:
        assert overlap(work, first, last) == pytest.approx(share * (last - first), abs=longest)
    for first, last in idle:
        assert last - first - overlap(work, first, last) < 1.01 * LOOK_SECONDS
