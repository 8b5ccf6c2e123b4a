"""While the host waits for tokens that its drafter is to hear of, it goes through what follows their arrival, since the
device will wait for that. Milliseconds later code and data would have left the caches, and it would take twice as long.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice

import torch

from slipstream.serve.batch import HostProposal, Rows
from slipstream.serve.drafters.base import Drafter
from slipstream.serve.widths import Offer, WidthPolicy

ROWS = 4  # the drafter goes through at a time: 10 to 20 microseconds, by which an arrival may be noticed late
PAUSE_S = 20e-6  # between two steps: whoever works beside needs the drafter's memory, too
STEPS_PER_STORE = (
    24  # about a millisecond; the device stores behind the pass that is waited for, so it must not be often
)


class Rehearsal:
    """Nothing that can be seen changes: what is stored is the null row's proposal."""

    def __init__(self, drafter: Drafter, state: Rows, width: int) -> None:
        self.drafter, self.state, self.width = drafter, state, width
        self._null = state.upload([state.null])
        blank = torch.full((2, 1, width), -1, dtype=torch.int32, pin_memory=state.device.type == "cuda")
        self._blank = HostProposal(blank, [1], [0])

    def steps(
        self, rows: Sequence[int], offers: Sequence[Offer], policy: WidthPolicy | None
    ) -> Iterator[Callable[[], object]]:
        """Without end, each of some microseconds, for the tokens of `rows` (B,) whose stored proposals are `offers`."""
        if not rows:
            return
        repeated: list[Callable[[], object]] = [
            partial(self.drafter.warm, rows[start : start + ROWS], self.width) for start in range(0, len(rows), ROWS)
        ]
        if policy is not None:
            repeated.append(partial(policy.weigh, offers, self.drafter.device_width))
        turns = cycle(repeated)
        while True:
            yield partial(self.state.store, self._null, self._blank)
            yield from islice(turns, STEPS_PER_STORE - 1)


def paced(steps: Iterator[Callable[[], object]]) -> Callable[[], None]:
    """To be called again and again: takes the next step, if there is one and the last one is over for a while."""
    due = 0.0

    def step() -> None:
        nonlocal due
        if time.perf_counter() >= due:
            next(steps, int)()
            due = time.perf_counter() + PAUSE_S
        else:
            time.sleep(0)  # lets go of the interpreter, which the thread that takes in requests may want

    return step
