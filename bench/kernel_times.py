"""Times every kernel of a pass inside a CUDA graph and compares it with the bandwidth of a large copy, with FlashInfer,
where it is installed (its first use compiles), and with torch.

    python bench/kernel_times.py
    python bench/kernel_times.py --rows 1 32 --kernels rms_norm sample --output bench/results/kernels.jsonl
    python bench/kernel_times.py --kernels attention --batches 8 --contexts 8192 --nodes 4 16 --page-sizes 16
    python bench/kernel_times.py --kernels "linear qkv" head --rows 1 4 32
    python bench/kernel_times.py --kernels "delta prompt" "delta blocks" "delta walk 27B" --rows 1 32 128 2048 8192
    python bench/kernel_times.py --kernels ragged_attention plan_work --batches 64 --contexts 128 --nodes 1 --chunks 0 5
    python bench/kernel_times.py --kernels ragged_attention --batches 64 --contexts 8192 --nodes 1 4 --page-sizes 16 \\
        --kv-dtypes bf16 fp8

A graph holds many launches in sequence, so times of a few microseconds include the launch latency that a pass pays.
From 33 rows on launches alternate between buffers larger than the L2 cache; matrix products and attention always do.
--tune times other tilings of matrix products and draft heads. Prints a table, then one JSON line per row.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from slipstream.bench.delta_cases import DELTA_MAKERS, LEAST_PROMPT, PROMPTS
from slipstream.bench.gpu import copy_bandwidth, milliseconds
from slipstream.bench.kernel_cases import LARGE, MAKERS, MOST_ROWS, Case, attention, ragged_pass
from slipstream.bench.lines import Lines, origin
from slipstream.config import parse

LAUNCHES = 48
ATTENTION = "attention"
RAGGED = "ragged_attention"
PLAN = "plan_work"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsConfig:
    """Options of this benchmark."""

    rows: list[int] = field(default_factory=lambda: [1, 4, 32, 128, 2048, 8192])
    """Packed tokens. Sampling, masks and matrix products take at most 128. Of gated delta nets: tokens of a
    prompt, or requests."""
    kernels: list[str] = field(default_factory=list)
    """Kernels, by the beginning of their names. Default: all."""
    batches: list[int] = field(default_factory=lambda: [1, 8, 32, 64])
    """Requests of attention."""
    contexts: list[int] = field(default_factory=lambda: [700, 8192])
    """Committed tokens of each."""
    nodes: list[int] = field(default_factory=lambda: [1, 4, 16])
    """New tokens of each."""
    page_sizes: list[int] = field(default_factory=lambda: [16, 64])
    """Tokens per page."""
    windows: list[int] = field(default_factory=lambda: [0])
    """Committed tokens that a new one sees; 0: all."""
    kv_dtypes: list[str] = field(default_factory=lambda: ["bf16"])
    """Contents of attention's KV cache: bf16, fp8."""
    chunks: list[int] = field(default_factory=lambda: [0])
    """Chunks of prompts that share a ragged pass."""
    chunk_rows: int = 80
    """Tokens of each."""
    ragged: bool = False
    """Draw contexts between 0.1 and 1.9 times their length."""
    tune: bool = False
    """Time other tilings instead of other kernels."""
    output: str | None = None
    """File to append the JSON lines to."""

    def __post_init__(self) -> None:
        names = (*MAKERS, *DELTA_MAKERS, ATTENTION, RAGGED, PLAN)
        for kernel in self.kernels:
            if not any(name.startswith(kernel) for name in names):
                raise ValueError(f"kernels holds {kernel!r}; choose of {', '.join(names)}")
        if set(self.kv_dtypes) - {"bf16", "fp8"}:
            raise ValueError(f"kv_dtypes is {self.kv_dtypes}; choose of bf16, fp8")

    def cases(self) -> Iterator[tuple[dict[str, Any], Case]]:
        """Labels and cases of the kernels whose names start with one of `kernels`, or of all. Made lazily."""
        beginnings = tuple(self.kernels or [""])
        for name, make in (MAKERS | DELTA_MAKERS).items():
            for rows in self.rows if name.startswith(beginnings) else ():
                if rows >= LEAST_PROMPT if name.startswith(PROMPTS) else name in LARGE or rows <= MOST_ROWS:
                    yield {"kernel": name, "rows": rows}, make(rows)
        kernels = [kernel for kernel in (ATTENTION, RAGGED, PLAN) if kernel.startswith(beginnings)]
        axes: dict[str, list[Any]] = {
            "batch": self.batches,
            "context": self.contexts,
            "nodes": self.nodes,
            "page_size": self.page_sizes,
        }
        axes |= {"ragged": [self.ragged], "window": self.windows, "kv_dtype": self.kv_dtypes}
        for values in product(*axes.values()) if kernels else ():
            sizes: dict[str, Any] = dict(zip(axes, values, strict=True))
            if ATTENTION in kernels:
                yield {"kernel": ATTENTION, **sizes}, attention(**sizes)
            for chunks in self.chunks if kernels != [ATTENTION] else ():
                more = {"chunks": chunks, "chunk_rows": self.chunk_rows}
                cases = zip((RAGGED, PLAN), ragged_pass(**sizes, **more), strict=True)
                yield from (({"kernel": kernel, **sizes, **more}, case) for kernel, case in cases if kernel in kernels)


@torch.inference_mode()
def main() -> None:
    config = parse(KernelsConfig, prog="bench/kernel_times.py", description="Kernels of a pass against the memory.")
    limit = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a large copy moves {limit / 1e9:,.0f} GB/s")
    print(f"{'kernel':72}{'MB':>10}{'us':>9}{'GB/s':>8}{'share':>7}  others, us")
    lines = Lines(config.output, origin("kernels", "cuda"))
    for labels, case in config.cases():
        for result in tune(case, limit) if config.tune else [measure(case, limit)]:
            lines.add({**labels, **result})
            print_row(labels, result, case.bytes)
        del case
        gc.collect()
        torch.cuda.empty_cache()
    lines.print()


def measure(case: Case, limit: float) -> dict[str, Any]:
    """Times our kernel, or torch's if we have none. `limit`: copy bandwidth in bytes per second."""
    times = {
        f"{name}_us": round(graph_us(run, case.beside.get(name, case.sets)), 3) for name, run in case.peers.items()
    }
    time_us = graph_us(case.ours, case.sets) if case.ours else times["torch_us"]
    return {**rated(case, time_us, limit), **times}


def tune(case: Case, limit: float) -> Iterator[dict[str, Any]]:
    """Times each tiling, the chosen one first."""
    for tiling, run in case.tunings() if case.tunings else ():
        yield {**rated(case, graph_us(run, case.sets), limit), "tiling": list(tiling)}


def rated(case: Case, time_us: float, limit: float) -> dict[str, float]:
    rate = case.bytes / time_us * 1e6
    return {"us": round(time_us, 3), "gb_s": round(rate / 1e9, 3), "share": round(rate / limit, 3)}


def graph_us(run: Callable[[Any], Any], sets: Sequence[Any]) -> float:
    """Microseconds of one launch of `run`; the launches of a graph alternate between `sets`."""
    launches = -(-LAUNCHES // len(sets)) * len(sets)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for buffers in sets:
            run(buffers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            run(sets[index % len(sets)])
    return 1000 * milliseconds(graph.replay) / launches


def print_row(labels: dict[str, Any], result: dict[str, Any], num_bytes: int) -> None:
    label = ", ".join(str(value) if name == "kernel" else f"{name} {value}" for name, value in labels.items())
    ours = f"{result['us']:9.2f}{result['gb_s']:8,.0f}{result['share']:7.0%}"
    times = [f"{key.removesuffix('_us')} {value:.2f}" for key, value in result.items() if key.endswith("_us")]
    text = f"tiling {result['tiling']}" if "tiling" in result else "; ".join(times)
    print(f"{label:72}{num_bytes / 1e6:10.3f}{ours}  {text}", flush=True)


if __name__ == "__main__":
    main()
