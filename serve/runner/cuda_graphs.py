"""Rounds captured as CUDA graphs at start-up, one for each (batch size, width, sampling mode); a replay waits for
nothing, and nothing is captured while serving.

All graphs share one memory pool, and all rounds write into one result buffer, so a replay's result must be copied away
before the next replay, in stream order.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from slipstream.kernels.compile_ahead import short_run
from slipstream.serve.engine.plan import SamplingMode
from slipstream.serve.runner.round import Runner

logger = logging.getLogger(__name__)

# Sampling modes with graphs of their own. In the second a request without filters has neutral ones.
MODES: tuple[SamplingMode, ...] = ("plain", "all")
TIMED_ROUNDS = 2  # of each size, width and mode at start-up: the faster one counts
TimeTables = dict[SamplingMode, dict[tuple[int, int], float]]  # mode -> (batch size, width) -> milliseconds


def buckets(max_batch: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, then steps that waste at most a quarter of a pass, up to `max_batch`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_batch, 64)]
    return [size for size in sizes if size < max_batch] + [max_batch]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage that owns device memory, such as another engine's graphs, would break a capture by being freed in it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Capturer:
    """Captures passes that share one memory pool."""

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._has_warned = False

    def capture_all(self, what: str, sizes: str, keys: Sequence[tuple[Any, ...]], capture: Callable[..., bool]) -> None:
        """Calls `capture`, which says whether memory sufficed, with each key. Logs what it took; `sizes` names them."""
        gc.collect()
        start, before = time.monotonic(), torch.cuda.mem_get_info()[0]
        bar = tqdm(keys, desc=f"capturing {what}", unit="graph", leave=False)
        count = sum(capture(*key) for key in bar)
        seconds, used = time.monotonic() - start, before - torch.cuda.mem_get_info()[0]
        message = "captured %d %s (%s; with and without filters) in %.1f s, %.2f GB"
        logger.info(message, count, what, sizes, seconds, used / 1e9)

    def capture(self, run: Callable[[], None], what: str, remedy: str) -> torch.cuda.CUDAGraph | None:
        """None, and once a warning that names `what` and the `remedy`, where memory does not hold the graph.

        Raises ValueError in the same words where it does not even hold the pass.
        """
        try:
            self._warm_up(run)
        except torch.cuda.OutOfMemoryError as error:
            raise ValueError(f"{what} does not fit into memory; {remedy}") from error
        graph = torch.cuda.CUDAGraph()
        try:
            with _no_collection(), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                run()
        except torch.cuda.OutOfMemoryError:
            self._warn(what, remedy)
            return None
        return graph

    def _warm_up(self, run: Callable[[], None]) -> None:
        """Loads kernels, and gives libraries their workspaces on the stream of the captures."""
        torch.cuda.synchronize()  # sync
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), short_run():
            run()
        torch.cuda.current_stream().wait_stream(self._stream)

    def _warn(self, what: str, remedy: str) -> None:
        if not self._has_warned:
            message = "no memory is left for the CUDA graph of %s: it runs kernel by kernel, as may others; %s"
            logger.warning(message, what, remedy)
        self._has_warned = True


class RoundGraphs:
    """Runs `runner.round` by replay."""

    def __init__(self, runner: Runner, max_batch: int, widths: Sequence[int], capturer: Capturer) -> None:
        state = runner.state
        self.runner, self.capturer = runner, capturer
        self.sizes, self.widths = buckets(max_batch), sorted(widths)
        self.requests = torch.full((max_batch,), state.padding, dtype=torch.int64, device=state.device)
        self.results = torch.zeros(max_batch, 1 + 2 * state.tokens.shape[1], dtype=torch.int32, device=state.device)
        self._columns: dict[int, int] = {}  # of the results, by width
        self._graphs: dict[tuple[int, int, SamplingMode], torch.cuda.CUDAGraph] = {}
        self._held: tuple[list[int], int] = ([], 0)  # what self.requests holds

    def run_all(self) -> None:
        """Runs every batch size in every mode on padding, uncaptured."""
        self._hold([], self.sizes[-1])
        for key in self._keys():
            self._round(*key)

    def capture_all(self) -> None:
        """Captures every batch size in every mode, largest first."""
        sizes = f"batch {', '.join(map(str, self.sizes))}; width {', '.join(map(str, self.widths))}"
        self.capturer.capture_all("rounds", sizes, self._keys(), self._capture)

    def time_all(self) -> TimeTables:
        """Milliseconds of rounds with random tokens and no committed ones to read, in every mode, size and width."""
        tables: TimeTables = {mode: {} for mode in MODES}
        with self.runner.state.random_requests(self.runner.target.config.vocab_size):
            for size, width, mode in self._keys():
                tables[mode][size, width] = self._time(size, width, mode)
        return tables

    def round(self, requests: list[int], mode: SamplingMode, width: int) -> Tensor | None:
        """What `runner.round` returns, on the device; None where memory held no graph for it."""
        mode = "all" if mode == "all" else "plain"
        fitting = (size for size in self.sizes if size >= len(requests) and (size, width, mode) in self._graphs)
        size = next(fitting, None)
        if size is None:
            return None
        self._hold(requests, size)
        self._graphs[size, width, mode].replay()
        return self.results[: len(requests), : self._columns[width]]

    def expect(self, requests: list[int]) -> None:
        """The next `round` is theirs: what the device must know of them is on its way before that."""
        self._hold(requests, next(size for size in self.sizes if size >= len(requests)))

    def _keys(self) -> list[tuple[int, int, SamplingMode]]:
        """Largest first: the later ones find memory in the pool."""
        widths = sorted(self.widths, reverse=True)
        return [(size, width, mode) for size in reversed(self.sizes) for width in widths for mode in reversed(MODES)]

    def _hold(self, requests: list[int], size: int) -> None:
        if self._held != (requests, size):
            padding = [self.runner.state.padding] * (size - len(requests))
            self.requests[:size] = self.runner.state.upload(requests + padding)
            self._held = (list(requests), size)

    def _time(self, size: int, width: int, mode: SamplingMode) -> float:
        """The best of a few rounds."""
        self._hold(list(range(size)), size)
        graph = self._graphs.get((size, width, mode))
        run = graph.replay if graph is not None else partial(self._round, size, width, mode)
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(TIMED_ROUNDS + 1)]
        for start, end in pairs:
            self.runner.state.lengths.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()  # sync
        return min(start.elapsed_time(end) for start, end in pairs[1:])  # the first is slower

    def _capture(self, size: int, width: int, mode: SamplingMode) -> bool:
        """On padding: nothing but the dump page is written."""
        self._held = ([], 0)
        self.requests.fill_(self.runner.state.padding)
        what = f"a round with {size} requests and {width} nodes ({mode} sampling)"
        remedy = "lower max_running or mem_fraction"
        graph = self.capturer.capture(partial(self._round, size, width, mode), what, remedy)
        if graph is not None:
            self._graphs[size, width, mode] = graph
        return graph is not None

    def _round(self, size: int, width: int, mode: SamplingMode) -> None:
        results = self.runner.round(self.requests[:size], (0,) * size, mode, width)
        self._columns[width] = results.shape[1]
        self.results[:size, : results.shape[1]] = results
