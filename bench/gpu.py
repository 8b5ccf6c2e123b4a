"""Measures on a GPU: copy bandwidth, times by events, a profile by kernel."""

from collections.abc import Callable

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

REPLAYS = 20


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, read and written. Raises ValueError without a GPU."""
    if not torch.cuda.is_available():
        raise ValueError("torch finds no GPU, which this benchmark measures; run it on one, with a CUDA build of torch")
    source = torch.randint(0, 255, (2**31,), dtype=torch.uint8, device="cuda")
    destination = torch.empty_like(source)
    return 2000 * source.nbytes / milliseconds(lambda: destination.copy_(source))


def profile_kernels(run: Callable[[], object], is_gpu: bool = True, repeats: int = 5) -> dict[str, tuple[float, float]]:
    """Kernels of one call of `run`, operators on a CPU: name -> milliseconds, launches. Kernels begin while others run,
    so a kernel's time is that from the end of the one that ended before it, and all times together are the call's."""
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(repeats):
            run()
        if is_gpu:
            torch.cuda.synchronize()
    if not is_gpu:
        return {x.key: (x.self_cpu_time_total / 1000 / repeats, x.count / repeats) for x in profiler.key_averages()}
    kernels: dict[str, tuple[float, float]] = {}
    last_end = 0.0
    for event in sorted(profiler.events(), key=lambda event: event.time_range.end):
        if event.device_type == DeviceType.CUDA:
            ms, count = kernels.get(event.key, (0.0, 0.0))
            begin = max(event.time_range.start, last_end)
            last_end = event.time_range.end
            kernels[event.key] = ms + (last_end - begin) / 1000 / repeats, count + 1 / repeats
    return kernels


def print_kernels(kernels: dict[str, tuple[float, float]]) -> None:
    """The longest, and the sum of all."""
    print(
        f"{sum(ms for ms, _ in kernels.values()):9.3f} ms in {sum(count for _, count in kernels.values()):.0f} kernels"
    )
    for name, (ms, count) in sorted(kernels.items(), key=lambda item: -item[1][0])[:45]:
        print(f"{ms:9.3f} ms {count:6.1f} x {1000 * ms / count:9.2f} us  {name[:110]}")


def milliseconds(run: Callable[[], object], restore: Callable[[], object] = lambda: None) -> float:
    """Median over calls of `run`, by device events. `restore` runs before each call, untimed."""
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(REPLAYS):
        restore()
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(100_000)  # lets the host get ahead of the device
        start.record()
        run()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in events)
    return times[len(times) // 2]
