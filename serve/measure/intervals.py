"""Confidence intervals of ratios that were measured in pairs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio and its interval of 95 % confidence. `low` and `high` are None with fewer than two pairs."""

    value: float
    low: float | None
    high: float | None

    @property
    def differs(self) -> bool:
        """Whether 1 is outside the interval."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


def paired_ratio(ones: Sequence[float], others: Sequence[float]) -> Ratio:
    """The ratio of `others` to `ones`, positive numbers in pairs: the geometric mean over the pairs, and Student's
    interval of the mean of the logarithms."""
    logs = [math.log(other / one) for one, other in zip(ones, others, strict=True)]
    middle = mean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(middle), None, None)
    half = t_quantile(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| <= t) = confidence, of Student's distribution with so many degrees of freedom, by bisection."""
    low, high = 0.0, 1e4
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, degrees) < confidence else (low, middle)
    return high


def t_within(t: float, degrees: int) -> float:
    """P(|T| <= t): the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    square, is_odd = math.cos(angle) ** 2, degrees % 2
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for k in range(2 + is_odd, degrees + 1, 2):
        total += term
        term *= square * (k - 1) / k
    if is_odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
