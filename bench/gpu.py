"""What the GPU benchmarks share: the copy bandwidth as the limit, times by events, a profile by kernel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from slipstream.serve.graphs import RoundGraphs

REPLAYS = 20


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, read and written."""
    source = torch.randint(0, 255, (2**31,), dtype=torch.uint8, device="cuda")
    destination = torch.empty_like(source)
    return 2000 * source.nbytes / milliseconds(lambda: destination.copy_(source))


def kernel_table(run: Callable[[], object], repeats: int = 5) -> str:
    """Kernels of one call by total time, and the time in which none ran."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    spans = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    totals: dict[str, tuple[float, int]] = {}
    for span in spans:
        time_us, count = totals.get(span.name, (0.0, 0))
        totals[span.name] = (time_us + span.time_range.elapsed_us(), count + 1)
    busy = sum(time_us for time_us, _ in totals.values()) / repeats
    wall = (max(span.time_range.end for span in spans) - min(span.time_range.start for span in spans)) / repeats
    rows = sorted(totals.items(), key=lambda item: -item[1][0])
    lines = [
        f"{time_us / repeats:9.1f} us {count / repeats:6.1f} x {time_us / count:7.2f} us  {name[:110]}"
        for name, (time_us, count) in rows[:45]
    ]
    return "\n".join([f"busy {busy:.0f} us of {wall:.0f} us a round, {len(spans) / repeats:.0f} kernels", *lines])


def milliseconds(run: Callable[[], object], restore: Callable[[], object] = lambda: None) -> float:
    """Median over calls of `run`, by device events. `restore` comes before each and is not timed."""
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(REPLAYS):
        restore()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(100_000)  # so that the host is ahead when `run` begins
        start.record()
        run()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in events)
    return times[len(times) // 2]


@contextmanager
def gaps_between_replays(graphs: RoundGraphs | None) -> Iterator[list[float]]:
    """Afterwards the list holds the median time, in microseconds, from the end of a replay to the start of the next."""
    gaps: list[float] = []
    if graphs is None:
        yield gaps
        return
    original, events = graphs.round, list[torch.cuda.Event]()

    def timed(*arguments: Any) -> Tensor:
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        results = original(*arguments)
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        return results

    graphs.round = timed  # type: ignore[method-assign]
    yield gaps
    graphs.round = original  # type: ignore[method-assign]
    torch.cuda.synchronize()
    found = sorted(end.elapsed_time(start) for end, start in zip(events[1::2], events[2::2], strict=False))
    gaps.append(round(1000 * found[len(found) // 2], 1))
