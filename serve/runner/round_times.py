"""Times of rounds that are not captured, for serve/engine/widths.py to choose by."""

import time
from collections.abc import Mapping, Sequence

import torch

from slipstream.serve.engine.plan import SamplingMode
from slipstream.serve.runner.cuda_graphs import MODES, TimeTables
from slipstream.serve.runner.round import Runner

SECONDS = 0.5  # of rounds of one sampling mode that are timed: half as much again goes into making them ready
REPEATS = 4  # the best of them counts
CONTEXT = 256  # committed tokens of each request


def time_modes(runner: Runner, max_batch: int, widths: Sequence[int]) -> TimeTables:
    """Times of rounds that are not captured."""
    with runner.state.random_requests(runner.target.config.vocab_size):
        return {mode: time_rounds(runner, max_batch, widths, mode) for mode in MODES}


def time_rounds(
    runner: Runner, max_batch: int, widths: Sequence[int], mode: SamplingMode
) -> dict[tuple[int, int], float]:
    """(batch size, width) -> milliseconds of a round, the best of a few; inside `state.random_requests`.

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
    requests = torch.arange(size, device=state.device)
    state.lengths.zero_()
    bound = min(CONTEXT, state.pages.shape[-1] * state.page_size - width)
    # The CPU's clock leaves out what other processes take of it.
    clock = time.thread_time if state.device.type == "cpu" else time.perf_counter
    start = clock()
    runner.round(requests, (bound,) * size, mode, width).tolist()  # sync
    return 1000 * (clock() - start)
