"""Decides how many rows of prompts a step takes beside requests that decode. Imports no torch."""

from slipstream.serve.engine.step_costs import Costs

LEAST_CHUNK = 64  # rows of prompts that a step takes, however slow that is
LEAST_CHUNK_MS = 30.0  # shorter steps need no limit
STRIDE = 16  # between numbers of rows that are looked at, where a pass may have any


def chunk_rows(
    costs: Costs,
    *,
    nodes: int,
    step_ms: float,
    draft_ms: float,
    max_chunk_ms: float | None,
    max_ms: float,
    filtered: bool,
) -> int:
    """Returns the most rows of prompts beside `nodes`, where a step without prompts takes `step_ms`, its draft pass
    `draft_ms` of it: as many as a step of `max_chunk_ms`, by default twice as long, may have; none takes more than
    `max_ms`."""
    limit_ms = min(max(2 * step_ms, LEAST_CHUNK_MS) if max_chunk_ms is None else max_chunk_ms, max_ms)
    rows = costs.passes(nodes, costs.most_rows, stride=STRIDE)
    fitting = rows[costs.targets(rows, filtered=filtered) + draft_ms <= limit_ms]
    min_rows = costs.round_up(nodes + LEAST_CHUNK)
    return max(min(max(int(fitting.max(initial=0)), min_rows), costs.most_rows) - nodes, 0)
