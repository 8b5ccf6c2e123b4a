"""How many replicas a deployment should have. Ray calls ScalingPolicy in its controller, which has the code of this
module by value: it imports nothing of the package.
"""

import math
from collections.abc import Mapping
from typing import Any


def wanted_replicas(
    *, running: int, open_requests: float, aim: float, step_ms: float = 0.0, most_ms: float | None = None
) -> float:
    """Returns the number of replicas, not rounded.

    `aim`: open requests of a replica; `step_ms`: mean measured time of the replicas' steps; `most_ms`: the time between
    tokens that the objective allows, if it has one. Steps that take twice as long want twice the replicas, since each
    then has half of the rows; steps that are fast enough let only open requests decide.
    """
    by_requests = open_requests / aim
    if most_ms is None or running == 0:
        return by_requests
    by_times = running * step_ms / most_ms
    return max(by_requests, by_times) if by_times > running else by_requests


class ScalingPolicy:
    """Answers Ray's AutoscalingContext. Ray applies bounds and delays afterwards."""

    def __init__(self, aim: float, most_ms: float | None = None) -> None:
        self._aim = aim
        self._most_ms = most_ms

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        stats: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        times = [value for value in stats.get("step_ms", {}).values() if value > 0]
        number = wanted_replicas(
            running=context.current_num_replicas,
            open_requests=context.total_num_requests,
            aim=self._aim,
            step_ms=sum(times) / len(times) if times else 0.0,
            most_ms=self._most_ms,
        )
        return math.ceil(number), {}
