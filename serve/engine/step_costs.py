"""Predicts the time of a step: the target's pass over its rows, and the draft's pass for its requests.

`StepCosts` starts from times measured at start-up for every captured size, `FittedCosts` from nothing. Both learn from
the steps measured while serving: contexts grow, and which experts a pass reads depends on its tokens. A single step may
be slow by chance, so none moves a prediction far. Imports no torch.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from math import exp, log
from statistics import median

import numpy as np
from numpy.typing import NDArray

from slipstream.models.files.cost_tables import MODES, CostTables

Rows = NDArray[np.int64]  # of passes
Floats = NDArray[np.float64]

REMEMBERED = 200  # steps over which errors of predictions are measured
RARELY = 0.95  # the share of steps that `p95` covers
MOST_OFF = 1.5  # a step counts as at most this many times its prediction, and at least one over it
OBSERVED = 0.02  # weight of a measured step in the factor of all steps
# Standard deviations in tables, in logarithms: of the factor and of an entry's deviation before any step was measured,
# and of a step from its expected time. The last one is large, since slow steps come in groups.
FACTOR = 0.7
DEVIATION = 0.15
NOISE = 0.2
MOST_LOG = 0.4  # bound of a deviation's logarithm
AGE_EACH = 16  # steps after which older measurements count less
KEEP_LOG = 0.999  # decay of a deviation's logarithm, then
OFF = 0.05  # least weight of a step in the deviation of its size in a fit
MOST_DEVIATION = 1.5
KEEP_DEVIATION = 0.99  # per step of such a size, so that a fit explains what it can
FORGET = 0.99  # weight of a step in a fit after one more step like it
# Coefficients with which `FittedCosts` starts, up to a common factor that the first measured step sets: a pass takes 1,
# and more by the request, by the row, by the drafted node, for drafting at all, and by the nodes drafted per request.
ROUGH = (1.0, 0.02, 0.05, 0.02, 0.1, 0.05)
ROUGH_SPREAD = (1.0, 0.1, 0.2, 0.1, 0.5, 0.3)
TRUST_ROUGH = 0.01  # weight of these coefficients; a measured step counts as 1
FIRST = 8  # measured steps that are fitted without a prediction to compare with
SOLVE = 4  # steps after which coefficients are computed again,
SOLVE_EACH = 64  # but after each of the first ones


class Costs(ABC):
    """Expected times of steps in ms. `filtered`: the step samples with filters or penalties (the mode "all")."""

    most_rows: int
    is_fitted: bool  # times of sizes that were never seen are guesses

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=REMEMBERED)  # measured over predicted
        self._p95 = 1.0
        self._p95_age = 0

    @abstractmethod
    def passes(self, min_rows: int, max_rows: int, *, stride: int = 1) -> Rows:
        """Rows of the passes that take at least `min_rows` rows, up to the first that takes `max_rows`; those `stride`
        apart where a pass may have any number."""

    @abstractmethod
    def targets(self, rows: Rows, *, filtered: bool) -> Floats:
        """(n,) times of target passes over that many rows, (n,)."""

    @abstractmethod
    def draft(self, requests: int, width: int, *, filtered: bool) -> float:
        """Time of the draft pass that proposes `width` nodes, roots included, for each request."""

    @abstractmethod
    def observe(self, rows: int, requests: int, width: int, ms: float, *, filtered: bool) -> None:
        """Learns that a step took `ms`: a pass over `rows` (nodes and prompts), and a draft pass for `requests`."""

    def target(self, rows: int, *, filtered: bool) -> float:
        """Time of a target pass."""
        return float(self.targets(np.array([rows]), filtered=filtered)[0])

    def time(self, rows: int, requests: int, width: int, *, filtered: bool) -> float:
        """Time of a step: a target pass over `rows`, then a draft pass."""
        return self.target(rows, filtered=filtered) + self.draft(requests, width, filtered=filtered)

    def round_up(self, rows: int) -> int:
        """Rows of the pass that computes so many."""
        return int(self.passes(rows, rows)[0])

    def error(self) -> float:
        """Median relative error of the predictions of recent steps; 0 before any was measured."""
        return median(abs(1 / ratio - 1) for ratio in self._ratios) if self._ratios else 0.0

    def p95(self) -> float:
        """Returns the 95th percentile of time over predicted time in recent steps; at least 1."""
        if self._p95_age >= 16:
            self._p95_age = 0
            self._p95 = max(1.0, sorted(self._ratios)[int(RARELY * (len(self._ratios) - 1))])
        return self._p95

    def _judge(self, ms: float, predicted: float) -> float:
        """Notes a prediction; returns the time to learn from: `ms`, kept close enough to the prediction."""
        ratio = ms / predicted
        self._ratios.append(max(ratio, 1e-6))
        self._p95_age += 1
        return predicted * min(max(ratio, 1 / MOST_OFF), MOST_OFF)


class StepCosts(Costs):
    """Times of captured passes: tables, one factor for all of them, and a small deviation of each entry.

    Logarithms of these are estimated from measured steps by an extended Kalman filter. So a size that text passes
    faster than random tokens did (a mixture of experts reads fewer of them) is told apart from a device that is slower
    throughout, also after a few steps, and is remembered while other sizes are used. An entry that was never measured
    depends on no other, so the filter holds those alone that were: few of some hundred.
    """

    is_fitted = False

    def __init__(self, tables: CostTables) -> None:
        super().__init__()
        self._sizes = tuple(sorted(tables.target["plain"]))
        self.most_rows = self._sizes[-1]
        self._requests = sorted({requests for requests, _ in tables.draft["plain"]})
        self._widths = sorted({width for _, width in tables.draft["plain"]})
        targets = [tables.target[mode][size] for mode in MODES for size in self._sizes]
        drafts = {(mode, *key): ms for mode in MODES for key, ms in tables.draft[mode].items()}
        self._first_target = {mode: 1 + index * len(self._sizes) for index, mode in enumerate(MODES)}
        self._draft_entries = {key: entry for entry, key in enumerate(drafts, 1 + len(targets))}
        # by entry: the factor, target passes by mode, draft passes
        self._table_ms = np.array([1.0, *targets, *drafts.values()])
        self._logs = np.zeros(len(self._table_ms))
        self._measured = [0]  # entries, as in the covariance
        self._covariance = np.full((1, 1), FACTOR**2)
        self._num_observed = 0

    def passes(self, min_rows: int, max_rows: int, *, stride: int = 1) -> Rows:
        sizes = self._sizes[bisect_left(self._sizes, min_rows) : bisect_left(self._sizes, max_rows) + 1]
        return np.array(sizes or (min_rows,))

    def targets(self, rows: Rows, *, filtered: bool) -> Floats:
        index = np.minimum(np.searchsorted(self._sizes, rows), len(self._sizes) - 1)
        entries = self._first_target[MODES[filtered]] + index
        times = self.slower * self._table_ms[entries] * np.exp(self._logs[entries])
        return times * np.maximum(rows / self.most_rows, 1.0)

    def draft(self, requests: int, width: int, *, filtered: bool) -> float:
        entry = self._draft_entry(requests, width, filtered)
        return 0.0 if entry is None else self._ms(entry)

    def observe(self, rows: int, requests: int, width: int, ms: float, *, filtered: bool) -> None:
        if rows > self.most_rows or ms <= 0:
            return
        target = self._first_target[MODES[filtered]] + bisect_left(self._sizes, rows)
        draft = self._draft_entry(requests, width, filtered)
        entries = [0, target] if draft is None else [0, target, draft]
        parts = [self._ms(entry) for entry in entries[1:]]
        predicted = sum(parts)
        error = log(self._judge(ms, predicted) / predicted)
        shares = np.array([predicted, *parts]) / predicted  # how the logarithm of the time follows those of the entries
        places = [self._place_of(entry) for entry in entries]
        spread = self._covariance[:, places] @ shares
        gain = spread / (float(spread[places] @ shares) + NOISE**2)
        self._logs[self._measured] += gain * error
        np.clip(self._logs[1:], -MOST_LOG, MOST_LOG, out=self._logs[1:])
        self._covariance -= gain[:, None] * spread
        self._num_observed += 1
        if self._num_observed % AGE_EACH == 0:
            self._age()

    def _place_of(self, entry: int) -> int:
        """Returns the entry's place in the covariance, which grows by an entry that was never measured."""
        if entry not in self._measured:
            self._measured.append(entry)
            self._covariance = np.pad(self._covariance, (0, 1))
            self._covariance[-1, -1] = DEVIATION**2
        return self._measured.index(entry)

    def _age(self) -> None:
        """Lets measurements age: the factor may have moved since, and a deviation slowly returns to none."""
        self._logs[1:] *= KEEP_LOG
        self._covariance[1:] *= KEEP_LOG
        self._covariance[:, 1:] *= KEEP_LOG
        added = np.full(len(self._measured), (1 - KEEP_LOG**2) * DEVIATION**2)
        added[0] = AGE_EACH * (OBSERVED * NOISE) ** 2  # so that a step that is measured often weighs OBSERVED
        self._covariance[np.diag_indices_from(self._covariance)] += added

    @property
    def slower(self) -> float:
        """Returns measured times over those of the tables, for all recent steps."""
        return exp(self._logs[0])

    def _ms(self, entry: int) -> float:
        return float(self.slower * self._table_ms[entry] * exp(self._logs[entry]))

    def _draft_entry(self, requests: int, width: int, filtered: bool) -> int | None:
        """Returns the entry of such a draft pass; None if there is none, as for roots alone."""
        if not self._requests or requests == 0 or width < self._widths[0]:
            return None
        key = MODES[filtered], _at_least(self._requests, requests), _at_least(self._widths, width)
        return self._draft_entries.get(key)


class FittedCosts(Costs):
    """Times of passes of any size: (a + c * rows) * off[rows] + b * requests + d * requests * (width - 1) +
    e * (width > 1) + f * (width - 1) ms, with coefficients >= 0 fitted to the measured steps by least squares of
    relative errors, and the deviations `off` of passes of about so many rows, since libraries compute some numbers of
    rows faster than others. f: of the draft's passes, without which few requests would make many seem dear.

    A measured step replaces a little of what is known of steps like it, and nothing of what is known of others: what
    wide proposals cost is not forgotten while narrow ones are drafted.
    """

    is_fitted = True

    def __init__(self, most_rows: int) -> None:
        super().__init__()
        self.most_rows = most_rows
        self.coefficients = np.array(ROUGH)  # (6,) a to f
        self._first: list[tuple[Floats, float]] = []  # measured steps, whose fastest sets the scale
        # normal equations
        self._matrix = np.eye(len(ROUGH))
        self._vector = np.zeros(len(ROUGH))
        self._num_fitted = 0
        self._filtered = 1.0  # time of a filtered step over that of a plain one
        num_sizes = int(_size(np.array(most_rows))) + 2
        # by `_size`; steps that were measured
        self._off = np.ones(num_sizes)
        self._seen = np.zeros(num_sizes)

    def passes(self, min_rows: int, max_rows: int, *, stride: int = 1) -> Rows:
        return np.arange(min_rows, max(min(max_rows, self.most_rows), min_rows) + 1, stride)

    def targets(self, rows: Rows, *, filtered: bool) -> Floats:
        factor = self._filtered if filtered else 1.0
        return factor * self._plain_targets(rows) * self._off[self._sizes_of(rows)]

    def draft(self, requests: int, width: int, *, filtered: bool) -> float:
        """Returns times that include the time per request."""
        ms = float(_features(0, requests, width)[1:] @ self.coefficients[1:])
        return ms * self._filtered if filtered else ms

    def observe(self, rows: int, requests: int, width: int, ms: float, *, filtered: bool) -> None:
        if rows == 0 or ms <= 0:
            return
        features = _features(rows, requests, width)
        predicted = self.time(rows, requests, width, filtered=filtered)
        if len(self._first) < FIRST:
            self._first.append((features, ms))
            self._start()
            return
        ms = self._judge(ms, predicted)
        if filtered:
            self._filtered *= 1 + OBSERVED * (ms / predicted - 1)
            ms /= self._filtered
        size = int(self._sizes_of(np.array(rows)))
        plain = float(self._plain_targets(np.array(rows)))
        deviation = (self._off[size] - 1) * plain
        self._seen[size] += 1
        wrong = ms - deviation - float(features @ self.coefficients)
        weight = max(1 / (self._seen[size] + 4), OFF)
        self._off[size] = _near_one(1 + (self._off[size] - 1) * KEEP_DEVIATION + weight * wrong / plain)
        self._fit(features / max(ms - deviation, ms / MOST_OFF))
        self._num_fitted += 1
        if self._num_fitted < SOLVE_EACH or self._num_fitted % SOLVE == 0:
            self.coefficients = _solve(self._matrix, self._vector)

    def _plain_targets(self, rows: Rows) -> Floats:
        fitted: Floats = self.coefficients[0] + self.coefficients[2] * rows
        return fitted

    def _sizes_of(self, rows: Rows) -> Rows:
        return np.minimum(_size(rows), len(self._off) - 1)

    def _start(self) -> None:
        """Fits the first steps, some of which may be slow, since much is done for the first time."""
        scale = min(ms / float(features @ ROUGH) for features, ms in self._first)
        self._matrix = np.diag(TRUST_ROUGH / (scale * np.array(ROUGH_SPREAD)) ** 2)
        self._vector = self._matrix @ (scale * np.array(ROUGH))
        for features, ms in self._first:
            self._fit(features / ms)
        self.coefficients = _solve(self._matrix, self._vector)

    def _fit(self, features: Floats) -> None:
        """Adds an equation features @ coefficients = 1, and forgets a part of earlier equations for that product."""
        product = self._matrix @ features
        forgotten = (1 - FORGET) / float(features @ product) * product
        self._vector = self._vector - forgotten * float(features @ self._vector) + features
        self._matrix = self._matrix - np.outer(forgotten, product) + np.outer(features, features)


def _size(rows: Rows) -> Rows:
    """Groups passes of about as many rows, which share a deviation: single sizes up to 16, then four an octave."""
    coarse = np.floor(4 * np.log2(np.maximum(rows, 16) / 16)).astype(np.int64)
    return np.minimum(rows, 16) + coarse


def _features(rows: int, requests: int, width: int) -> Floats:
    drafted = width - 1 if requests else 0
    return np.array((1.0, requests, rows, requests * drafted, float(drafted > 0), drafted))


def _solve(matrix: Floats, vector: Floats) -> Floats:
    """Solves normal equations without negative coefficients: sets them to 0, the most negative first."""
    indices = np.arange(len(vector))
    while True:
        values = np.linalg.solve(matrix[np.ix_(indices, indices)], vector[indices])
        if values.min(initial=0.0) >= 0:
            break
        indices = np.delete(indices, values.argmin())
    solution = np.zeros(len(vector))
    solution[indices] = values
    return solution


def _near_one(value: float) -> float:
    return min(max(value, 1 / MOST_DEVIATION), MOST_DEVIATION)


def _at_least(values: Sequence[int], value: int) -> int:
    """Returns the least of ascending `values` that is not below `value`, or the last."""
    return values[min(bisect_left(values, value), len(values) - 1)]
