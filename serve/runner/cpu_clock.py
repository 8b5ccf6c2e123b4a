"""How long steps take on a CPU, where other programs take their share of the cores."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

DECAY = 0.95  # weight of a step among the last ones, after one more


class CpuClock:
    """A step's time is what the calling thread has computed since the last step, the scheduler's work included, times
    wall-clock over computing time of recent passes. So a program that takes a core for a while slows all steps down
    alike, and none seems expensive for its size."""

    def __init__(self) -> None:
        self._ended = time.thread_time()
        self._began = (0.0, 0.0)
        self._wall = self._own = 0.0  # seconds of recent passes, decayed

    def start(self) -> None:
        """The passes of a step begin."""
        self._began = time.perf_counter(), time.thread_time()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is computed meanwhile belongs to no step."""
        began = time.thread_time()
        yield
        self._ended += time.thread_time() - began

    def stop(self) -> float:
        """They have ended. Returns the step's time in milliseconds."""
        wall, own = time.perf_counter(), time.thread_time()
        self._wall = DECAY * self._wall + wall - self._began[0]
        self._own = DECAY * self._own + own - self._began[1]
        computed, self._ended = own - self._ended, own
        return 1000 * computed * self._wall / max(self._own, 1e-9)
