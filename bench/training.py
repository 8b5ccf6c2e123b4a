"""A training step at a real model's shape, weights and tokens random: tokens a second, memory, share of the peak.

    python bench/training.py --shape qwen3-8b --sequence 4096 --anchors 512 --profile
    python bench/training.py --shape tiny                       # a few seconds on a CPU
    accelerate launch --config_file configs/accelerate/zero2.yaml --num_processes 2 bench/training.py --shape qwen3-8b

The step is the training loop's: frozen target, draft, loss, backward, clipping, AdamW. `share_of_peak` sets the
arithmetic that the step needs (bench/training_flops.py) against a plain bf16 matrix product of the same run. --profile
lists the kernels by group and by name. Of several processes each has rows of its own, and the first one prints: tokens
a second of all, the rest of one. Prints tables and ends in one JSON line.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import re
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.profiler import DeviceType, ProfilerActivity, profile

from slipstream.bench.gpu import revision
from slipstream.bench.lines import Lines
from slipstream.bench.training_case import StepConfig, build, make_batch
from slipstream.bench.training_flops import step_flops
from slipstream.config import parse
from slipstream.train.batches import Batch
from slipstream.train.loop import start
from slipstream.train.optim import build_optimizers
from slipstream.train.options import DataOptions, OptimOptions, RunOptions
from slipstream.train.training import DraftTraining

WARM_UP = 3  # steps
PEAK_SIZE = {"cuda": 8192, "cpu": 512}  # of the square matrices of the plain product
GROUPS = {  # the first pattern that a kernel's name matches
    "communication": r"nccl",
    "attention": r"flex_attention|triton_tem|flash|fmha|scaled_dot",
    "matrix products": r"gemm|nvjet|cutlass|cublas|::mm|::bmm|::addmm|::baddbmm",
    "optimizer": r"multi_tensor|adam|_foreach|lpnorm",
    "copies and casts": r"copy|memcpy|memset|::cat|fill",
    "sums and indexing": r"softmax|reduce|logsumexp|argmax|sort|scan|index|gather|scatter|::sum|::max|::mean",
    "elementwise and the rest": "",
}
Part = Callable[[], None]


def main(argv: list[str] | None = None) -> None:
    config = parse(StepConfig, argv, prog="bench/training.py", description="A training step at a model's shape.")
    accelerator = start(RunOptions(output="", data=DataOptions(path="")))
    device = accelerator.device
    peak = plain_product(device)
    accelerator.print(f"a plain product does {peak / 1e12:.2f} TFLOP/s")
    training, batch = build(config, device), make_batch(config)
    flops = step_flops(training, batch)
    parts = make_parts(training, accelerator, batch)
    line = describe(config, accelerator) | measure(config, parts, batch, flops, peak, device)
    line["tokens_per_second"] *= accelerator.num_processes
    line["supervised_per_second"] *= accelerator.num_processes
    by_name = profile_step(parts, device) if config.profile else {}
    if not accelerator.is_main_process:
        return
    print_table(line, flops)
    if config.profile:
        line["groups_ms"] = print_profile(by_name)
    lines = Lines(config.output)
    lines.add(line)
    lines.print()


def plain_product(device: torch.device) -> float:
    """Operations per second of a bf16 matrix product, fp32 on the CPU: the median of ten times twenty."""
    size = PEAK_SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(10):
        began = clock(device)
        for _ in range(20):
            left @ right
        times.append(clock(device) - began)
    return 20 * 2 * size**3 / sorted(times)[5]


def clock(device: torch.device) -> float:
    """Seconds, once the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def make_parts(training: DraftTraining, accelerator: Accelerator, batch: Batch) -> dict[str, Part]:
    """The step in its parts, in their order."""
    optim, target = OptimOptions(), training.target
    model, *optimizers = accelerator.prepare(training.train(), *build_optimizers(training, optim))
    scale, losses = 1 / batch.num_supervised, list[Tensor]()
    tokens, positions = batch.tokens.to(accelerator.device), batch.positions.to(accelerator.device)
    read = target.features

    def draft_and_loss() -> None:
        target.features = lambda *_: states[-1]  # type: ignore[method-assign]
        losses.append(model(batch)[0] * scale)
        target.features = read  # type: ignore[method-assign]

    def update() -> None:
        accelerator.clip_grad_norm_(model.parameters(), optim.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        states.clear()

    states: list[tuple[Tensor, Tensor]] = []
    return {
        "target": lambda: states.append(read(tokens, positions)),
        "draft and loss": draft_and_loss,
        "backward": lambda: accelerator.backward(losses.pop()),
        "update": update,
    }


def describe(config: StepConfig, accelerator: Accelerator) -> dict[str, Any]:
    is_gpu = accelerator.device.type == "cuda"
    return {
        "bench": "training",
        "device": torch.cuda.get_device_name() if is_gpu else "CPU",
        "date": date.today().isoformat(),
        "revision": revision(),
        "processes": accelerator.num_processes,
        "distributed": accelerator.distributed_type.value,
        **{name: value for name, value in asdict(config).items() if name not in ("profile", "output")},
    }


def measure(
    config: StepConfig, parts: dict[str, Part], batch: Batch, flops: dict[str, int], peak: float, device: torch.device
) -> dict[str, Any]:
    """Medians over the steps. The parts are timed in steps of their own, since each waits for the device."""
    began = clock(device)
    run(parts)
    first = clock(device) - began
    for _ in range(WARM_UP - 1):
        run(parts)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps, by_part = [], {name: list[float]() for name in parts}
    for _ in range(config.steps):
        began = clock(device)
        run(parts)
        steps.append(clock(device) - began)
    for _ in range(config.steps):
        for name, part in parts.items():
            began = clock(device)
            part()
            by_part[name].append(clock(device) - began)
    seconds = median(steps)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    needed = sum(flops.values())
    return {
        "first_step_s": round(first, 1),
        "step_ms": round(1000 * seconds, 2),
        "parts_ms": {name: round(1000 * median(times), 2) for name, times in by_part.items()},
        "tokens_per_second": round(batch.tokens.numel() / seconds),
        "supervised_per_second": round(batch.num_supervised / seconds),
        "peak_memory_gb": None if memory is None else round(memory, 1),
        "tflop": round(needed / 1e12, 4),
        "tflops": round(needed / seconds / 1e12, 3),
        "plain_product_tflops": round(peak / 1e12, 2),
        "share_of_peak": round(needed / seconds / peak, 3),
    }


def run(parts: dict[str, Part]) -> None:
    for part in parts.values():
        part()


def median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def print_table(line: dict[str, Any], flops: dict[str, int]) -> None:
    total = sum(flops.values())
    print("arithmetic: " + ", ".join(f"{name} {100 * count / total:.0f} %" for name, count in flops.items()))
    print("time: " + ", ".join(f"{name} {value:.1f} ms" for name, value in line["parts_ms"].items()))
    print(
        f"step {line['step_ms']:.1f} ms, {line['tokens_per_second']} tokens/s, {line['tflops']:.2f} TFLOP/s "
        f"({100 * line['share_of_peak']:.0f} % of a plain product), peak memory {line['peak_memory_gb']} GiB; "
        f"the first step, with all compilation, took {line['first_step_s']} s"
    )


def profile_step(parts: dict[str, Part], device: torch.device, repeats: int = 3) -> dict[str, float]:
    """Milliseconds of a step by kernel."""
    is_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(repeats):
            run(parts)
        clock(device)
    by_name: dict[str, float] = {}
    for event in profiler.key_averages():
        if is_gpu and event.device_type != DeviceType.CUDA:
            continue
        time_us = event.self_device_time_total if is_gpu else event.self_cpu_time_total
        by_name[event.key] = by_name.get(event.key, 0.0) + time_us / 1000 / repeats
    return by_name


def print_profile(by_name: dict[str, float]) -> dict[str, float]:
    """Prints the milliseconds of groups of kernels, which it returns, and of the longest kernels."""
    groups = dict.fromkeys(GROUPS, 0.0)
    for name, milliseconds in by_name.items():
        groups[next(group for group, pattern in GROUPS.items() if re.search(pattern, name, re.I))] += milliseconds
    for group, milliseconds in groups.items():
        print(f"{milliseconds:9.2f} ms  {group}")
    for name, milliseconds in sorted(by_name.items(), key=lambda item: -item[1])[:40]:
        print(f"{milliseconds:9.3f} ms  {name[:110]}")
    return {group: round(milliseconds, 2) for group, milliseconds in groups.items()}


if __name__ == "__main__":
    main()
