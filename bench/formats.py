"""Times the weights of a decoder's layers in every format, against 16-bit ones and against the hardware.

    python bench/formats.py                                  # Llama-3.1-8B's layers
    python bench/formats.py --formats fp8 int4 --rows 1 8 32 --output bench/results/formats.jsonl
    python bench/formats.py --shape qwen3-30b-a3b --parts mlp --formats "fp8 blocks" fp8 int4 --rows 1 8 32 128 2048
    python bench/formats.py --shape gpt-oss-20b --parts mlp --formats mxfp4

A line is a pass through all layers' projections of attention and MLPs or mixtures of experts, inputs quantised and
activations included, in one CUDA graph; every layer has its own weights, random ones, so they come from memory. Rows
are random, so experts are hit independently; `experts` is how many of a layer. The floor is the larger of the bytes, of
experts those that are hit, over the bandwidth of a large copy and of the products over the peak of the tensor cores. On
a CPU sizes must be small; times mean nothing.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, Literal

import torch
from torch import Tensor, nn

from slipstream.bench.gpu import copy_bandwidth, milliseconds
from slipstream.bench.lines import Lines, origin, table
from slipstream.bench.random_targets import CONFIGS, published_target
from slipstream.bench.round import weight_bytes
from slipstream.config import run
from slipstream.kernels.gemm.fixed_order import FixedOrder
from slipstream.models.layers.linear import Linear
from slipstream.models.layers.moe import Experts, Router
from slipstream.models.targets.decoder import Target

FORMATS: dict[str, dict[str, Any] | None] = {  # quantization_config
    "bf16": None,
    "fp8": {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "fp8 blocks": {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
    "int4": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "int4 zeros": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False},
    "mxfp4": {"quant_method": "mxfp4"},
}
PEAK = 989e12  # of an H100's tensor cores in 16 bits; in FP8 twice as much
COLUMNS = (  # heading, key of a line, format
    ("format", "format", "s"),
    ("rows", "rows", "d"),
    ("experts", "experts", ".1f"),
    ("ms", "ms", ".3f"),
    ("of bf16", "of_bf16", ".3f"),
    ("floor, ms", "floor_ms", ".3f"),
    ("share of floor", "share", ".2f"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatsConfig:
    """Layers by format and number of rows."""

    shape: str = "llama31-8b"
    """Sizes of the layers: one of bench/published_configs.yaml."""
    layers: int | None = None
    """Layers to time. Default: all."""
    parts: list[Literal["attention", "mlp"]] = field(default_factory=lambda: ["attention", "mlp"])
    """Parts of the layers to time."""
    formats: list[str] = field(default_factory=lambda: [name for name in FORMATS if name != "mxfp4"])
    """Formats to time; mxfp4 is one of experts. bf16 is always timed."""
    rows: list[int] = field(default_factory=lambda: [1, 4, 8, 32, 128, 512, 2048, 8192])
    """Rows of a pass."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Where the layers are."""
    output: str | None = None
    """File to append the JSON lines to."""

    def __post_init__(self) -> None:
        if self.shape not in CONFIGS:
            raise ValueError(f"shape is {self.shape!r}; choose of {', '.join(CONFIGS)}")
        for name in self.formats:
            if name not in FORMATS:
                raise ValueError(f"formats holds {name!r}; choose of {', '.join(FORMATS)}")


@torch.inference_mode()
def formats(config: FormatsConfig) -> None:
    bandwidth = copy_bandwidth() if config.device == "cuda" else 1e10
    print(f"a large copy moves {bandwidth / 1e9:,.0f} GB/s")
    lines = Lines(config.output, origin("formats", config.device) | {"shape": config.shape, "parts": config.parts})
    plain: dict[int, float] = {}
    for name in dict.fromkeys(["bf16", *config.formats]):
        target = make_target(config, name)
        modules = modules_of(config, target)
        peak = 2 * PEAK if name.startswith("fp8") else PEAK
        for rows in config.rows:
            x = torch.randn(rows, target.config.hidden_size, device=config.device).bfloat16()
            hit = num_hit(modules, x)
            ms = time_pass(config, modules, x)
            plain.setdefault(rows, ms)
            work = 2 * rows * num_products(modules, x.shape[1])
            floor = 1000 * max(weight_bytes(modules, hit) / bandwidth, work / peak)
            line = {"format": name, "rows": rows, "experts": hit, "ms": round(ms, 4), "floor_ms": round(floor, 4)}
            line |= {"of_bf16": round(ms / plain[rows], 4), "share": round(floor / ms, 4)}
            print(table(COLUMNS, [lines.add(line)], heading=len(lines.all) == 1), flush=True)
        del target, modules
        gc.collect()
        torch.cuda.empty_cache()
    lines.print()


def make_target(config: FormatsConfig, name: str) -> Target:
    fields: dict[str, Any] = {"quantization_config": FORMATS[name]}
    if config.layers is not None:
        fields["num_hidden_layers"] = config.layers
    target = published_target(config.shape, torch.bfloat16, torch.device(config.device), **fields)
    linears = [module for module in target.layers.modules() if isinstance(module, Linear)]
    order = FixedOrder()
    for linear in linears:
        linear.order = order
    shapes = {(linear.out_features, linear.in_features, linear.is_gated): linear for linear in linears}
    for linear in shapes.values() if config.device == "cuda" else ():
        linear.check_order(config.rows)
    return target


def modules_of(config: FormatsConfig, target: Target) -> nn.ModuleList:
    """The timed modules of all layers, in their order."""
    modules: list[nn.Module] = []
    for layer in target.layers:
        if "attention" in config.parts:
            modules += [module for module in layer.mixer.modules() if isinstance(module, Linear)]
        if "mlp" in config.parts:
            modules.append(layer.mlp)
    return nn.ModuleList(modules)


def num_hit(modules: nn.ModuleList, x: Tensor) -> float | None:
    """Experts that rows hit in a layer, on average; None without any."""
    routers = [module for module in modules.modules() if isinstance(module, Router)]
    return mean(len(router(x).experts.unique()) for router in routers) if routers else None


def num_products(module: nn.Module, hidden_size: int) -> int:
    """Entries of the matrices that a row is multiplied by."""
    entries = 0
    for part in module.modules():
        if isinstance(part, Linear):
            entries += part.in_features * part.out_features
        elif isinstance(part, Experts):
            entries += 3 * part.spec.top_k * part.spec.intermediate_size * hidden_size
    return entries


def time_pass(config: FormatsConfig, modules: Sequence[nn.Module], x: Tensor) -> float:
    """Milliseconds of all modules. Those that read other sizes than x has get random rows of theirs."""
    inputs = {x.shape[1]: x}
    for module in modules:
        if isinstance(module, Linear) and module.in_features not in inputs:
            inputs[module.in_features] = x.new_empty(len(x), module.in_features).normal_()

    def one_pass() -> None:
        for module in modules:
            module(inputs[module.in_features] if isinstance(module, Linear) else x)

    return (graph_ms if config.device == "cuda" else clock_ms)(one_pass)


def graph_ms(work: Callable[[], object]) -> float:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return milliseconds(graph.replay)


def clock_ms(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - start)


if __name__ == "__main__":
    run(formats, FormatsConfig, "bench/formats.py")
