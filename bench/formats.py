"""Times the linear layers of a decoder in every format of weights, against 16-bit ones and against the hardware.

    python bench/formats.py                                  # Llama-3.1-8B's layers
    python bench/formats.py --formats fp8 int4 --rows 1 8 32 --output bench/results/formats.jsonl

A line is a pass through the four products of all layers, inputs quantised and activations included, in one CUDA graph;
every layer has its own weights, so they come from memory. The floor is the larger of the bytes over the bandwidth of
a large copy and of the products over the peak of the tensor cores. On a CPU sizes must be small; times mean nothing.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.bench.gpu import copy_bandwidth, milliseconds
from slipstream.bench.lines import Lines, origin, table
from slipstream.config import run
from slipstream.kernels.gemm import fp8, int4, int4_weight
from slipstream.kernels.gemm.activation import silu_mul
from slipstream.kernels.gemm.fixed_order import FixedOrder, usual_part
from slipstream.kernels.gemm.tiling import choose_tiling

PEAK = {"bf16": 989e12, "fp8": 1979e12, "fp8 blocks": 1979e12, "int4": 989e12, "int4 zeros": 989e12}  # an H100's
GROUP = 128
COLUMNS = (  # heading, key of a line, format
    ("format", "format", "s"),
    ("rows", "rows", "d"),
    ("ms", "ms", ".3f"),
    ("of bf16", "of_bf16", ".3f"),
    ("floor, ms", "floor_ms", ".3f"),
    ("share of floor", "share", ".2f"),
)
Multiply = Callable[[Tensor, bool], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatsConfig:
    """Linear layers by format and number of rows."""

    formats: list[str] = field(default_factory=lambda: list(PEAK))
    """Formats to time. bf16 is always timed."""
    rows: list[int] = field(default_factory=lambda: [1, 4, 8, 32, 128, 512, 2048, 8192])
    """Rows of a pass."""
    hidden: int = 4096
    """Hidden size."""
    intermediate: int = 14336
    """Intermediate size of the MLP."""
    qkv: int = 6144
    """Outputs of the projection of queries, keys and values."""
    layers: int = 32
    """Layers."""
    device: str = "cuda"
    """cuda or cpu."""
    output: str | None = None
    """File to append the JSON lines to."""

    def __post_init__(self) -> None:
        for name in self.formats:
            if name not in PEAK:
                raise ValueError(f"formats holds {name!r}; choose of {', '.join(PEAK)}")

    @property
    def shapes(self) -> list[tuple[int, int, bool]]:
        """Outputs and inputs of a layer's products, and whether they are gated."""
        return [
            (self.qkv, self.hidden, False),
            (self.hidden, self.hidden, False),
            (2 * self.intermediate, self.hidden, True),
            (self.hidden, self.intermediate, False),
        ]


def product_of(
    name: str, outputs: int, inputs: int, gated: bool, config: FormatsConfig, order: FixedOrder
) -> tuple[Multiply, int]:
    """A product with random weights, inputs quantised where the format wants that, and the bytes of the weights.
    `order` is that of 16-bit weights, which takes the library for numbers of rows where it adds alike."""
    device = config.device
    weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) * inputs**-0.5
    if name == "bf16":
        if device == "cuda" and (outputs, inputs, False, gated, usual_part(weight, gated)) not in order.by_library:
            order.check(weight, None, config.rows, gated=gated)
        return lambda x, gated: order.gated_linear(x, weight) if gated else order.linear(x, weight), weight.nbytes
    if name.startswith("fp8"):
        codes, scales = fp8.quantize_weight(weight)
        blocks = name == "fp8 blocks"
        scaling = fp8.InputScales(by_block=blocks)
        scales = scales[:1].expand(-(-outputs // 128), -(-inputs // 128)).contiguous() if blocks else scales

        shape = (outputs, inputs, False, blocks)
        split = choose_tiling(outputs, inputs).split
        if shape not in order.fp8_by_library:
            order.fp8_by_library[shape] = fp8.rows_by_library(config.rows, codes, scales, None)
        by_library = order.fp8_by_library[shape]

        def multiply(x: Tensor, gated: bool) -> Tensor:
            rows = fp8.quantize_rows(x, scaling)
            if len(x) not in by_library:
                return fp8.fp8_linear(rows, codes, scales, None, gated)
            out = fp8.library_linear(rows, codes, scales, None, split)
            return silu_mul(out) if gated else out

        return multiply, codes.nbytes + scales.nbytes
    stored = random_int4(outputs, inputs, name == "int4 zeros", device)
    num_bytes = sum(tensor.nbytes for tensor in stored[:3] if tensor is not None)
    part = int4.part_of(stored, gated)
    if device == "cuda" and (outputs, inputs, False, gated, part) not in order.by_library:
        many = [rows for rows in config.rows if int4.dequantizes(stored, rows, gated)]
        order.check(int4_weight.dequantize(stored, torch.bfloat16), None, many, gated=gated, part=part)
    return lambda x, gated: int4.int4_linear(x, stored, None, gated, order), num_bytes


def random_int4(outputs: int, inputs: int, has_zeros: bool, device: str) -> int4_weight.Int4Weight:
    units = int4_weight.num_pairs(inputs, GROUP), outputs, 2
    words = torch.randint(-(2**31), 2**31, (outputs, int4_weight.num_words(inputs)), device=device).int()
    scales = torch.rand(units, device=device).mul(0.2 * inputs**-0.5).bfloat16()
    zeros = torch.randint(16, units, device=device).to(torch.int16) if has_zeros else None
    return int4_weight.Int4Weight(words, scales, zeros, GROUP, inputs)


@torch.inference_mode()
def formats(config: FormatsConfig) -> None:
    bandwidth = copy_bandwidth() if config.device == "cuda" else 1e10
    lines = Lines(config.output, origin("formats", config.device))
    plain: dict[int, float] = {}
    order = FixedOrder()
    print(f"a large copy moves {bandwidth / 1e9:,.0f} GB/s")
    for index, name in enumerate(dict.fromkeys(["bf16", *config.formats])):
        layers = [[product_of(name, *shape, config, order) for shape in config.shapes] for _ in range(config.layers)]
        num_bytes = sum(size for layer in layers for _, size in layer)
        for rows in config.rows:
            ms = time_pass(config, layers, rows)
            plain.setdefault(rows, ms)
            work = 2 * rows * config.layers * sum(outputs * inputs for outputs, inputs, _ in config.shapes)
            floor = 1000 * max(num_bytes / bandwidth, work / PEAK[name])
            line = {"format": name, "rows": rows, "ms": round(ms, 4), "of_bf16": round(ms / plain[rows], 4)}
            line |= {"floor_ms": round(floor, 4), "share": round(floor / ms, 4)}
            print(table(COLUMNS, [lines.add(line)], heading=index == 0 and rows == config.rows[0]), flush=True)
        del layers
    lines.print()


def time_pass(config: FormatsConfig, layers: Sequence[Sequence[tuple[Multiply, int]]], rows: int) -> float:
    """Milliseconds of all layers' products."""
    shapes = config.shapes
    inputs = {size: torch.randn(rows, size, device=config.device).bfloat16() for _, size, _ in shapes}

    def one_pass() -> None:
        for layer in layers:
            for (multiply, _), (_, size, gated) in zip(layer, shapes, strict=True):
                multiply(inputs[size], gated)

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
    run(formats, FormatsConfig, None, "bench/formats.py")
