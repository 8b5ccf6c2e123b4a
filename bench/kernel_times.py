"""Every small kernel of a pass, timed inside a CUDA graph, with the bytes that it must move and its share of a large
copy's bandwidth; FlashInfer's and torch's kernels for the same work beside it, and the linears of an 8B target.

    python bench/kernel_times.py
    python bench/kernel_times.py --rows "[1,32]" --kernels "[rms_norm,sample]" --output bench/results/kernels.jsonl

A graph holds many launches one behind another, so a time of a few microseconds is a launch's latency as a pass pays it.
From 33 rows on they take turns over buffers larger than the L2 cache. Prints a table and ends in one JSON line per row;
"-" stands where there is nothing to compare.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from statistics import median
from typing import Any

import torch

from slipstream.bench.gpu import copy_bandwidth, revision
from slipstream.bench.kernel_cases import LAYERS, LINEARS, Calls, Case, all_cases
from slipstream.bench.lines import Lines
from slipstream.config import parse

LAUNCHES = 48
REPLAYS = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsConfig:
    """Options of this benchmark."""

    rows: list[int] = field(default_factory=lambda: [1, 4, 32, 128, 2048, 8192])
    """Packed tokens; for sampling, masks and moves requests or nodes, up to 128, as for linears."""
    kernels: list[str] = field(default_factory=list)
    """Names of kernels. Default: all."""
    flashinfer: bool = True
    """Time FlashInfer's kernels where it is installed; their first use compiles them."""
    output: str | None = None
    """File to append the JSON lines to."""


@torch.inference_mode()
def main() -> None:
    config = parse(KernelsConfig, prog="bench/kernel_times.py", description="Kernels of a pass against the memory.")
    limit = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a large copy moves {limit / 1e9:,.0f} GB/s")
    print(f"{'kernel':20}{'rows':>6}{'MB':>10}{'us':>9}{'GB/s':>8}{'share':>7}{'flashinfer us':>15}{'torch us':>10}")
    shared = {"bench": "kernels", "device": torch.cuda.get_device_name(), "date": str(date.today())}
    lines = Lines(config.output, shared | {"revision": revision()})
    for case in all_cases(config.rows, config.kernels):
        print_row(lines.add(measure(case, limit, config.flashinfer)), case.bytes)
        del case
        gc.collect()
        torch.cuda.empty_cache()
    print_passes(lines.all)
    lines.print()


def measure(case: Case, limit: float, with_flashinfer: bool) -> dict[str, Any]:
    """Our kernel, or torch's where there is none of ours, against the copy bandwidth `limit` in bytes per second."""
    others = {"flashinfer_us": graph_us(case.flashinfer if with_flashinfer else []), "torch_us": graph_us(case.torch)}
    time_us = graph_us(case.ours) if case.ours else others["torch_us"]
    assert time_us is not None
    rate = case.bytes / time_us * 1e6
    result = {"us": time_us, "gb_s": rate / 1e9, "share": rate / limit, **others}
    rounded = {key: None if value is None else round(value, 3) for key, value in result.items()}
    return {"kernel": case.kernel, "rows": case.rows, **rounded}


def graph_us(calls: Calls) -> float | None:
    """Microseconds of one of `calls`, taken in turn by the launches of a graph; None for no calls."""
    if not calls:
        return None
    launches = -(-LAUNCHES // len(calls)) * len(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            calls[index % len(calls)]()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / launches)
    return median(times[1:])


def print_row(result: dict[str, Any], num_bytes: int) -> None:
    others = [f"{value:.2f}" if value is not None else "-" for value in (result["flashinfer_us"], result["torch_us"])]
    ours = f"{result['us']:9.2f}{result['gb_s']:8,.0f}{result['share']:7.0%}"
    print(f"{result['kernel']:20}{result['rows']:6}{num_bytes / 1e6:10.3f}{ours}{others[0]:>15}{others[1]:>10}")


def print_passes(results: Sequence[dict[str, Any]]) -> None:
    """The time of an 8B target's linears in one pass."""
    times = {(result["kernel"], result["rows"]): result["us"] for result in results}
    for rows in sorted({result["rows"] for result in results}):
        parts = [(f"linear {part}", rows) for part in LINEARS]
        if all(part in times for part in parts):
            *layer, head = (times[part] for part in parts)
            print(f"linears of a pass over {rows} rows: {(LAYERS * sum(layer) + head) / 1000:.3f} ms")


if __name__ == "__main__":
    main()
