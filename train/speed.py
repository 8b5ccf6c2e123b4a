"""The expected speed of a draft: accept length over the time of a step, at the depth where that is best.

A step of R requests that draft d tokens each is a pass of the target over R (d + 1) rows, and a pass of the draft that
proposes d + 1 nodes for each, the root included; without a draft it is a pass over R rows. A server measured how long
they take. Each request gets as many tokens a step as the accept length at depth d says.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.models.files.cost_tables import read_tables
from slipstream.train.options import EvaluationOptions


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of the steps of `requests` requests."""

    requests: int
    plain: float  # ms without a draft
    by_depth: Mapping[int, float]  # ms, from depth 1 on

    @classmethod
    def read(cls, options: EvaluationOptions, depth: int) -> "StepTimes | None":
        """The times in the file that `options` name; None if they name none. Raises ValueError for another file, and
        for one that lacks passes of this size."""
        name = options.costs
        if name is None:
            return None
        tables = read_tables(Path(name))
        requests = options.requests
        target = tables.without_slow().target["plain"]
        draft = tables.draft["plain"]
        if not draft:
            raise ValueError(f"evaluation.costs {name} has no passes of a draft; name step times of a server with one")
        most_rows = max(target)
        if requests * (depth + 1) > most_rows or not passes_from(draft, requests, depth + 1):
            raise ValueError(
                f"evaluation.requests is {requests} and the depth of evaluations {depth}, but evaluation.costs {name} "
                f"ends at {max(number for number, _ in draft)} requests, {most_rows} rows and "
                f"{max(width for _, width in draft) - 1} drafted tokens; lower evaluation.requests or "
                "evaluation.depth, or start that server with a larger max_running or depth"
            )
        times = {
            limit: target[least_from(requests * (limit + 1), target)]
            + draft[min(passes_from(draft, requests, limit + 1))]
            for limit in range(1, depth + 1)
        }
        return cls(requests, target[least_from(requests, target)], times)

    def metrics(self, accept_lengths: Mapping[int, float]) -> dict[str, float]:
        """`expected_speed`, in tokens per second of all requests, at the depth where it is highest, `fastest_depth`;
        `expected_speedup`: that over the speed without a draft. `accept_lengths` by depth."""
        speeds = {depth: accept_lengths[depth] / ms for depth, ms in self.by_depth.items()}
        depth = max(speeds, key=speeds.__getitem__)
        return {
            "expected_speed": 1000 * self.requests * speeds[depth],
            "expected_speedup": speeds[depth] * self.plain,
            "fastest_depth": float(depth),
        }


def least_from(size: int, sizes: Collection[int]) -> int:
    """The smallest of `sizes` that is at least `size`: passes are filled up to it."""
    return min(number for number in sizes if number >= size)


def passes_from(sizes: Collection[tuple[int, int]], requests: int, width: int) -> list[tuple[int, int]]:
    """The passes of a draft that have room for so many requests with so many nodes each."""
    return [(number, nodes) for number, nodes in sizes if number >= requests and nodes >= width]
