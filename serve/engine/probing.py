"""Decides which steps try more nodes than pay, and other widths, to notice changes. Imports no torch."""

from slipstream.serve.engine.yields import StepValues

PROBE_SHARE = 0.005  # share of the time that goes to more nodes than pay
FITTED_PROBE_SHARE = 0.003  # likewise where times are fitted: a probe's time tells of other sizes, too
PROBE_STEPS = 3  # the first one only drafts; where times are fitted, the last one only verifies


class Prober:
    """Makes a few steps a probe whenever the time for that has come together.

    A probe drafts the next wider proposals and verifies one more node per request. Where times are fitted, every other
    probe is narrower, since the times of such steps may be wrong, and the first steps have each width twice, since
    nothing is known of any. While trees are drafted, every other probe drafts the widest chains, of which trees tell
    nothing. `widest_chain`: index of their width; 0: trees are their beginnings, or there are none.
    """

    def __init__(self, num_widths: int, *, is_fitted: bool, widest_chain: int = 0) -> None:
        self._last_width = num_widths - 1
        self._is_fitted = is_fitted
        self._widest_chain = widest_chain
        self._tour = [j for j in range(num_widths) for _ in range(2)] if is_fitted else []
        self._ms = 0.0  # that probes may take
        self._num_steps = 0  # left of this probe
        self._width = 0  # of this probe
        self._narrows = False  # the next one is narrower

    def next(
        self, steps: StepValues, k: int, width: int, *, last: int, num_drafted: int, has_prompts: bool, max_ms: float
    ) -> tuple[int, int]:
        """Returns the indices of the pass and of the width to draft: `k` and the best `width`, or now and then others.
        `last`: index of the pass that verifies all stored nodes."""
        if self._tour and not has_prompts:
            return last, self._tour.pop()
        k = min(k, last)
        if self._num_steps == 0:
            self._start(steps, k, width, num_drafted, max_ms)
            return k, width
        self._num_steps -= 1
        if self._width < width:
            return k, self._width
        drafts_on = self._num_steps or not self._is_fitted
        return min(steps.find(steps.rows[k] + num_drafted), last), self._width if drafts_on else width

    def _start(self, steps: StepValues, k: int, width: int, num_drafted: int, max_ms: float) -> None:
        """Makes the next steps a probe if their time may be spent."""
        ms = steps.ms(k, width)
        share_ms = ms * (FITTED_PROBE_SHARE if self._is_fitted else PROBE_SHARE)
        self._ms += share_ms
        narrower = self._narrower(width)
        narrows = self._narrows and narrower < width
        j = narrower if narrows else min(width + 1, self._last_width)
        more = k if narrows else steps.find(steps.rows[k] + num_drafted)
        if (more, j) == (k, width):  # there is nothing more
            self._narrows = narrower < width
            return
        extra_ms = (steps.values[width] - steps.values[j]) / steps.rate if narrows else steps.ms(more, j) - ms
        is_allowed = narrows or ms + extra_ms <= max_ms
        if is_allowed and self._ms >= (PROBE_STEPS - self._is_fitted) * max(extra_ms, share_ms):
            self._num_steps = PROBE_STEPS
            self._width = j
            self._ms = 0.0
            self._narrows = narrower < width and not narrows

    def _narrower(self, width: int) -> int:
        """Returns the index of the width that a narrower probe drafts; `width` if there is none."""
        if self._is_fitted:
            return max(width - 1, 0)
        return self._widest_chain if 0 < self._widest_chain < width else width
