"""Confidence intervals of ratios that were measured in pairs.

The interval is that of Wilcoxon's signed ranks (Hodges and Lehmann, 1963; Hollander and Wolfe, Nonparametric
Statistical Methods, 3.2 and 3.3). It assumes only that disturbances are as likely to hit either side of
a pair. Where a few pairs were disturbed much, by other programs say, it stays narrow, unlike the interval of a mean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from statistics import median

CONFIDENCE = 0.95
LEAST_PAIRS = 6  # fewer cannot exclude anything with this confidence


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio and its interval of 95 % confidence; `low` and `high` are None with fewer than LEAST_PAIRS pairs."""

    value: float
    low: float | None
    high: float | None

    @property
    def differs(self) -> bool:
        """Whether 1 is outside the interval."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


def paired_ratio(ones: Sequence[float], others: Sequence[float]) -> Ratio:
    """The ratio of `others` to `ones`, positive numbers in pairs: of the logarithms of the pairs' ratios, the median of
    the means of any two."""
    logs = [math.log(other / one) for one, other in zip(ones, others, strict=True)]
    means = sorted((one + other) / 2 for one, other in combinations_with_replacement(logs, 2))
    value = math.exp(median(means))
    if len(logs) < LEAST_PAIRS:
        return Ratio(value, None, None)
    outside = critical_rank_sum(len(logs))
    return Ratio(value, math.exp(means[outside]), math.exp(means[-1 - outside]))


def critical_rank_sum(pairs: int, confidence: float = CONFIDENCE) -> int:
    """The largest sum of positive ranks that is so unlikely without a difference that it is outside `confidence`.
    A set of ranks 1..n is as likely as any other, so sets are counted by their sum."""
    limit = (1 - confidence) / 2
    most = pairs * (pairs + 1) // 2
    shares = [1.0] + [0.0] * (most // 2)
    for rank in range(1, pairs + 1):
        shares = [(share + (shares[total - rank] if total >= rank else 0.0)) / 2 for total, share in enumerate(shares)]
    below = 0.0
    total = -1
    while below + shares[total + 1] <= limit:
        total += 1
        below += shares[total]
    return total
