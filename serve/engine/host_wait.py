"""Decides whether steps wait for the host's proposals: while these yield more than the wait costs. Imports no torch."""

import numpy as np
from numpy.typing import NDArray

from slipstream.serve.engine.yields import StepValues

PATIENCE = 2  # steps without a node of the host that paid, after which steps stop waiting for the host
WAIT_DECAY = 0.95  # EMA decay of the time in which steps wait for the host
FORGET_WAIT = 0.995  # decay of that time, per step that does not wait
LIFT_DECAY = 0.98  # EMA decay of the gain from host proposals


class HostWait:
    """Tracks how long steps waited for the host, what its proposals added, and whether they paid lately."""

    def __init__(self) -> None:
        self.ms = 0.0  # mean time in which the device waits for the host's proposals
        self._num_useless = 0  # steps in a row whose proposals did not pay
        # mean tokens of a step, and those that it would have to yield
        self._tokens = 1.0
        self._usual_tokens = 1.0

    @property
    def pays(self) -> bool:
        """Whether steps should wait: not after PATIENCE steps in a row where no proposal paid, until a step that did
        not wait would have gained by it."""
        return self._num_useless < PATIENCE

    def rate(self, steps: StepValues) -> float:
        """Returns tokens per ms without prompts, with the average gain from the host's proposals."""
        return steps.rate * max(self._tokens / self._usual_tokens, 1.0)

    def is_worth(self, steps: StepValues, tokens: NDArray[np.float64], j: int) -> bool:
        """Whether passes that yield `tokens`, by index, instead of those of proposals of width `j`, are worth a
        wait."""
        rate = self.rate(steps)
        target_ms = steps.arrays[1]
        gain = (tokens - rate * target_ms).max() - (steps.tokens[j] - rate * target_ms).max()
        return bool(gain > rate * self.ms)

    def record_step(self, *, pays: bool) -> None:
        """Learns whether the host's proposals for a step were worth a wait."""
        self._num_useless = 0 if pays else self._num_useless + 1

    def record_tokens(self, tokens: float, rate: float, ms: float) -> None:
        """Learns that a step of `ms`, the wait left out, yields `tokens` where others yield `rate` per ms."""
        self._tokens = LIFT_DECAY * self._tokens + (1 - LIFT_DECAY) * tokens
        self._usual_tokens = LIFT_DECAY * self._usual_tokens + (1 - LIFT_DECAY) * (rate * (ms + self.ms))

    def record_wait(self, ms: float) -> None:
        """Learns how long the device waited for the host before a step."""
        self.ms += (1 - WAIT_DECAY) * (ms - self.ms)

    def forget(self) -> None:
        """Forgets the time of waits slowly, since it changes with the load and is measured only where steps wait."""
        self.ms *= FORGET_WAIT
