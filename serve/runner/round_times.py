"""Times of rounds, for serve/engine/widths.py to choose by: replays of captured rounds, else rounds timed here."""

import time
from collections.abc import Mapping, Sequence

import torch

from slipstream.serve.engine.plan import SamplingMode
from slipstream.serve.engine.widths import WidthPolicy
from slipstream.serve.runner.cuda_graphs import RoundGraphs
from slipstream.serve.runner.round import Runner

SECONDS = 0.5  # of rounds of one sampling mode that are timed: half as much again goes into making them ready
REPEATS = 4  # the best of them counts
CONTEXT = 256  # committed tokens of each request


def width_policy(
    runner: Runner, graphs: RoundGraphs | None, max_batch: int, widths: Sequence[int], *, eager: bool
) -> WidthPolicy | None:
    """`eager`: time rounds also where they are not captured. None: all that is drafted is verified."""
    if graphs is not None:
        tables = graphs.time_all()
        return WidthPolicy(widths, tables["plain"], tables["full"])
    if eager and len(widths) > 1:
        plain = time_rounds(runner, max_batch, widths, "plain")
        with runner.state.filtered_padding():
            return WidthPolicy(widths, plain, time_rounds(runner, max_batch, widths, "full"))
    return None


def time_rounds(
    runner: Runner, max_batch: int, widths: Sequence[int], mode: SamplingMode
) -> dict[tuple[int, int], float]:
    """(batch size, width) -> milliseconds of a round on padding, the best of a few.

    Small rounds are timed first. What there is no time for is taken to cost by the row, as large ones do.
    """
    sizes = [*(2**power for power in range(16) if 2**power < max_batch), max_batch]
    keys = sorted(((size, width) for size in sizes for width in widths), key=lambda key: key[0] * key[1])
    ms: dict[tuple[int, int], float] = {}
    per_row, spent = 0.0, 0.0
    for size, width in keys:
        if spent < 1000 * SECONDS:
            _time(runner, size, width, mode)  # compiles kernels, fills caches
            times = [_time(runner, size, width, mode) for _ in range(REPEATS)]
            per_row, spent = min(times) / (size * width), spent + sum(times)
        ms[size, width] = per_row * size * width
    return {key: cheapest_from(key, ms) for key in ms}


def cheapest_from(key: tuple[int, int], ms: Mapping[tuple[int, int], float]) -> float:
    """The least time of a round of that size and width or more. What disturbs a measurement adds to it, so a round took
    no longer than a larger one; else one late measurement of a narrow round would have wide ones verified for nothing.
    """
    size, width = key
    return min(time for (other, wider), time in ms.items() if other >= size and wider >= width)


def _time(runner: Runner, size: int, width: int, mode: SamplingMode) -> float:
    state = runner.state
    requests = torch.full((size,), state.padding, dtype=torch.int64, device=state.device)
    bound = min(CONTEXT, state.pages.shape[1] * state.page_size - width)
    # The CPU's clock leaves out what other processes take of it.
    clock = time.thread_time if state.device.type == "cpu" else time.perf_counter
    start = clock()
    runner.round(requests, (bound,) * size, mode, width).tolist()  # sync
    return 1000 * (clock() - start)
