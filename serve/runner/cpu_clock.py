"""Times steps on a CPU, where other programs take their share of the cores."""

import time

DECAY = 0.95  # weight of a step among the last ones, after one more


class CpuClock:
    """A step's time is what the calling thread has computed since the last step, the scheduler's work included, times
    wall-clock over computing time of recent passes. So a program that takes a core for a while slows all steps down
    alike, and none seems expensive for its size."""

    def __init__(self) -> None:
        self._ended = time.thread_time()
        self._began = (0.0, 0.0)
        self._wall = self._cpu = 0.0  # seconds of recent passes, decayed

    def start(self) -> None:
        """Begins the passes of a step."""
        self._began = time.perf_counter(), time.thread_time()

    def stop(self) -> float:
        """Ends the passes of a step. Returns the step's time in milliseconds."""
        wall = time.perf_counter()
        cpu = time.thread_time()
        self._wall = DECAY * self._wall + wall - self._began[0]
        self._cpu = DECAY * self._cpu + cpu - self._began[1]
        computed = cpu - self._ended
        self._ended = cpu
        return 1000 * computed * self._wall / max(self._cpu, 1e-9)
