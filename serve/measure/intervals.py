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


def paired_ratio(base: Sequence[float], values: Sequence[float]) -> Ratio | None:
    """Returns the ratio of `values` to `base`, numbers in pairs: we take the logarithms of the pairs' ratios, the means
    of any two of them, and the median of these. A pair with a 0 has no ratio; None if no pair has one."""
    logs = [math.log(value / reference) for reference, value in zip(base, values, strict=True) if reference and value]
    if not logs:
        return None
    means = sorted((first + second) / 2 for first, second in combinations_with_replacement(logs, 2))
    value = math.exp(median(means))
    if len(logs) < LEAST_PAIRS:
        return Ratio(value, None, None)
    outside = critical_rank_sum(len(logs))
    return Ratio(value, math.exp(means[outside]), math.exp(means[-1 - outside]))


def critical_rank_sum(pairs: int) -> int:
    """Returns the largest sum of positive ranks that is so unlikely without a difference that it is outside CONFIDENCE.
    All sets of ranks 1..n are equally likely, so we count sets by their sum."""
    limit = (1 - CONFIDENCE) / 2
    largest_sum = pairs * (pairs + 1) // 2
    shares = [1.0] + [0.0] * (largest_sum // 2)
    for rank in range(1, pairs + 1):
        shares = [(share + (shares[total - rank] if total >= rank else 0.0)) / 2 for total, share in enumerate(shares)]
    below = 0.0
    total = -1
    while below + shares[total + 1] <= limit:
        total += 1
        below += shares[total]
    return total
