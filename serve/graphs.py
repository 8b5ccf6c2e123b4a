"""Rounds captured as CUDA graphs, one for each (batch bucket, width, sampling mode); a replay waits for nothing.

All graphs share one memory pool, and all rounds write into one result buffer, so a replay's result must be copied away
before the next replay, in stream order.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from slipstream.serve.batch import SamplingMode
from slipstream.serve.round import Runner


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


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What start-up prints."""

    sizes: list[int]
    widths: list[int]
    seconds: float
    bytes: int

    def __str__(self) -> str:
        return (
            f"captured {len(self.sizes) * len(self.widths)} rounds (batch {', '.join(map(str, self.sizes))}; width "
            f"{', '.join(map(str, self.widths))}) in {self.seconds:.1f} s, {self.bytes / 1e9:.2f} GB"
        )


class Capturer:
    """Captures passes that share one memory pool."""

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def capture(self, run: Callable[[], None], what: str, remedy: str) -> torch.cuda.CUDAGraph:
        """Raises ValueError, in words that name `what` and the `remedy`, where the graph does not fit into memory."""
        try:
            return self._capture(run)
        except torch.cuda.OutOfMemoryError as error:
            raise ValueError(
                f"the CUDA graph of {what} does not fit into memory; {remedy}, or add --no-cuda-graph"
            ) from error

    def _capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()  # sync
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # compiles kernels, and gives libraries their workspaces on this stream
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            run()
        return graph


class RoundGraphs:
    """Runs `runner.round` by replay."""

    def __init__(self, runner: Runner, max_batch: int, capturer: Capturer) -> None:
        state = runner.state
        self.runner, self.capturer = runner, capturer
        self.sizes = buckets(max_batch)
        self.rows = torch.full((max_batch,), state.null, dtype=torch.int64, device=state.device)
        self.results = torch.zeros(max_batch, 1 + 2 * state.tokens.shape[1], dtype=torch.int32, device=state.device)
        self._columns: dict[int, int] = {}  # of the results, by width
        self._graphs: dict[tuple[int, int, SamplingMode], torch.cuda.CUDAGraph] = {}
        self._held: tuple[list[int], int] = ([], 0)  # what self.rows holds

    def capture_all(self, widths: Sequence[int]) -> CaptureReport:
        """Captures every bucket, largest first, without top-k and the like: those follow at first need."""
        gc.collect()
        start, before = time.monotonic(), torch.cuda.mem_get_info()[0]
        keys = [(size, width) for size in reversed(self.sizes) for width in sorted(widths, reverse=True)]
        for size, width in tqdm(keys, desc="capturing rounds", unit="graph", leave=False):
            self._capture(size, width, "plain")
        used = before - torch.cuda.mem_get_info()[0]
        return CaptureReport(self.sizes, sorted(widths), time.monotonic() - start, used)

    def time_all(self) -> dict[tuple[int, int], float]:
        """(batch size, width) -> milliseconds of a replay, with no committed tokens to read."""
        return {(size, width): self._time(size, width) for size, width, mode in self._graphs if mode == "plain"}

    def round(self, rows: list[int], mode: SamplingMode, width: int) -> Tensor:
        """What `runner.round` returns, on the device."""
        size = self._size(rows)
        mode = "full" if mode == "full" else "plain"
        if (size, width, mode) not in self._graphs:
            self._capture(size, width, mode)
        self._hold(rows, size)
        self._graphs[size, width, mode].replay()
        return self.results[: len(rows), : self._columns[width]]

    def expect(self, rows: list[int]) -> None:
        """The next `round` is theirs: what the device must know of them is on its way before that."""
        self._hold(rows, self._size(rows))

    def _size(self, rows: list[int]) -> int:
        return next(size for size in self.sizes if size >= len(rows))

    def _hold(self, rows: list[int], size: int) -> None:
        if self._held != (rows, size):
            padding = [self.runner.state.null] * (size - len(rows))
            self.rows[:size] = self.runner.state.upload(rows + padding)
            self._held = (list(rows), size)

    def _time(self, size: int, width: int) -> float:
        """The best of a few replays on null rows."""
        self._hold([], size)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
        for event in events:
            event.record()
            self._graphs[size, width, "plain"].replay()
        torch.cuda.synchronize()  # sync
        return min(start.elapsed_time(end) for start, end in zip(events[1:], events[2:], strict=False))

    def _capture(self, size: int, width: int, mode: SamplingMode) -> None:
        """On null rows: nothing but the dump page is written. Raises ValueError where it does not fit into memory."""
        self._held = ([], 0)
        self.rows.fill_(self.runner.state.null)
        what = f"a round with {size} requests and {width} nodes ({mode} sampling)"
        remedy = "lower max_running or mem_fraction"
        self._graphs[size, width, mode] = self.capturer.capture(lambda: self._round(size, width, mode), what, remedy)

    def _round(self, size: int, width: int, mode: SamplingMode) -> None:
        results = self.runner.round(self.rows[:size], (0,) * size, mode, width, width)
        self._columns[width] = results.shape[1]
        self.results[:size, : results.shape[1]] = results
