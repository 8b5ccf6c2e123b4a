"""Keeps a program to a share of the time while another one, on the same device, is busy: it rests after each piece."""

import time
from collections.abc import Callable

LOOK_SECONDS = 0.01  # between looks at whether the other one is still busy


class Pace:
    """Work lies between `begin` and `end`."""

    def __init__(self, share: float, is_busy: Callable[[], bool]) -> None:
        self._rest = 1 / share - 1  # for each second of work
        self._is_busy = is_busy
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.monotonic()

    def end(self) -> None:
        now = time.monotonic()
        due = now + self._rest * (now - self._began)
        while self._is_busy() and (left := due - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_SECONDS))
