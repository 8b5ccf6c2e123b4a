"""Times a layer's mixture of experts on a GPU by the number of rows, against the bytes that it must read.

    python bench/moe.py
    python bench/moe.py --shape mixtral-8x7b --rows 1 32
    python bench/moe.py --formats bf16 "fp8 blocks" fp8 int4 --rows 1 8 32 128 2048
    python bench/moe.py --shape gpt-oss-20b --formats bf16 mxfp4 --rows 1 8 32 128 2048

Router, gate and up, and down with the sum are launched in one CUDA graph, over copies of the weights that exceed the L2
cache. Rows are random, so experts are hit independently; `hit` is how many. The floor is the time to read router, hit
experts and rows once at the copy bandwidth measured in the same run; for many rows TFLOP/s say more.
`torch` is transformers' way in bf16: a sort by expert, `grouped_mm` twice, and a sum. Other formats have random codes;
`of bf16` is their time over that of 16-bit experts in the same run.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.bench.gpu import copy_bandwidth
from slipstream.bench.kernel_cases import COLD_BYTES, random
from slipstream.bench.kernel_times import graph_us
from slipstream.bench.lines import Lines, origin, table
from slipstream.config import run
from slipstream.kernels.gemm.activation import silu_mul
from slipstream.kernels.gemm.expert_weights import ExpertMatrix, FP8Weight, format_of, pointers
from slipstream.kernels.gemm.fp8 import BLOCK, E4M3, InputScales
from slipstream.kernels.gemm.grouped import ExpertWeights, least_rows, mix_experts_triton
from slipstream.kernels.gemm.int4_weight import Int4Weight, num_pairs, num_words
from slipstream.kernels.gemm.mxfp4 import MXFP4Weight, pack_words
from slipstream.kernels.gemm.router import Routing, choose_block_rows, route_triton

SHAPES = {  # H, I, E, k
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "gpt-oss-20b": (2880, 2880, 32, 4),
}
BYTES = {"bf16": 2, "fp8": 1, "fp8 blocks": 1, "mxfp4": 17 / 32, "int4": 33 / 64}  # of a weight, with its scales
COLUMNS = (
    ("format", "format", "s"),
    ("rows", "rows", "d"),
    ("hit", "hit", "d"),
    ("us", "us", ".1f"),
    ("of bf16", "of_bf16", ".2f"),
    ("floor, us", "floor_us", ".1f"),
    ("share of floor", "share_of_floor", ".2f"),
    ("TFLOP/s", "tflops", ".0f"),
    ("torch, us", "torch_us", ".1f"),
    ("router, us", "router_us", ".1f"),
    ("block", "block_rows", "d"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """A layer's experts by the number of rows."""

    shape: str = "qwen3-30b-a3b"
    """Sizes of the layer."""
    rows: list[int] = field(default_factory=lambda: [1, 4, 8, 32, 128, 512, 2048, 8192])
    """Tokens of a pass."""
    formats: list[str] = field(default_factory=lambda: ["bf16"])
    """Formats of the experts. bf16 is always timed."""
    output: str | None = None
    """File to append the JSON lines to."""

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(f"shape is {self.shape!r}; choose of {', '.join(SHAPES)}")
        if unknown := set(self.formats) - set(BYTES):
            raise ValueError(f"formats has {', '.join(unknown)}; choose of {', '.join(BYTES)}")


@dataclass(frozen=True, slots=True)
class Layer:
    router: Tensor
    weights: ExpertWeights
    top_k: int

    @property
    def least_rows(self) -> int:
        return least_rows(format_of(self.weights.gate_up))

    def route(self, x: Tensor) -> Routing:
        return route_triton(x, self.router, None, self.top_k, True, self.least_rows)

    def __call__(self, x: Tensor) -> Tensor:
        return mix_experts_triton(x, self.route(x), self.weights, None)

    def by_torch(self, x: Tensor) -> Tensor:
        """In bf16, with the outputs of an expert side by side."""
        weights, experts = F.linear(x, self.router).float().softmax(dim=-1).topk(self.top_k)
        order = experts.flatten().argsort()
        numbers = torch.arange(len(self.router), device=x.device)
        ends = (experts.flatten()[:, None] <= numbers).sum(0).int()  # bincount cannot be captured
        assert isinstance(self.weights.gate_up, Tensor)
        assert isinstance(self.weights.down, Tensor)
        gate_up = self.weights.gate_up.transpose(1, 2)
        down = self.weights.down.transpose(1, 2)
        hidden = silu_mul(F.grouped_mm(x[order // self.top_k], gate_up, offs=ends))
        outputs = torch.empty(len(order), x.shape[1], dtype=x.dtype, device=x.device)
        outputs[order] = F.grouped_mm(hidden, down, offs=ends)
        shares = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        return (outputs.view(len(x), self.top_k, -1) * shares[:, :, None]).sum(dim=1)


@torch.inference_mode()
def moe(config: MoEConfig) -> None:
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a large copy moves {bandwidth / 1e9:,.0f} GB/s")
    lines = Lines(config.output, origin("moe", "cuda") | {"shape": config.shape})
    plain: dict[int, float] = {}  # microseconds in bf16, by rows
    for format in dict.fromkeys(["bf16", *config.formats]):
        for result in time_format(config, format, bandwidth):
            of_bf16 = round(result["us"] / plain.setdefault(result["rows"], result["us"]), 3)
            lines.add({"format": format, "of_bf16": of_bf16, **result})
            print(table(COLUMNS, lines.all[-1:], heading=len(lines.all) == 1), flush=True)
        torch.cuda.empty_cache()
    lines.print()


def time_format(config: MoEConfig, format: str, bandwidth: float) -> Iterator[dict[str, Any]]:
    layers = make_layers(SHAPES[config.shape], format)
    for rows in config.rows:
        x = random(rows, SHAPES[config.shape][0])
        yield measure(config, layers, x, bandwidth)


def make_layers(shape: tuple[int, int, int, int], format: str) -> list[Layer]:
    """So many that their weights do not stay in the L2 cache, at least two."""
    size, intermediate, experts, top_k = shape
    num_bytes = int(3 * top_k * size * intermediate * BYTES[format])  # of one row
    return [
        Layer(
            random(experts, size, scale=size**-0.5),
            ExpertWeights(matrix(format, experts, 2 * intermediate, size), matrix(format, experts, size, intermediate)),
            top_k,
        )
        for _ in range(max(2, COLD_BYTES // num_bytes))
    ]


def matrix(format: str, experts: int, outputs: int, inputs: int) -> ExpertMatrix:
    """Random codes; weights spread by inputs^-0.5."""
    scale = inputs**-0.5
    if format == "bf16":
        return random(experts, outputs, inputs, scale=scale)
    if format.startswith("fp8"):
        codes = random(experts, outputs, inputs).to(E4M3)
        blocks = -(-outputs // BLOCK), -(-inputs // BLOCK)
        sizes = blocks if format == "fp8 blocks" else (outputs,)
        scales = torch.full((experts, *sizes), scale, device="cuda")
        return FP8Weight(codes, scales, InputScales(by_block=format == "fp8 blocks"))
    if format == "mxfp4":
        blocks_of = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, device="cuda")
        exponents = torch.full((experts, outputs, inputs // 32), 127 + round(math.log2(scale / 2.7)), device="cuda")
        packed = [pack_words(*expert) for expert in zip(blocks_of, exponents.byte(), strict=True)]
        words, scales = (torch.stack(tensors) for tensors in zip(*packed, strict=True))
        return MXFP4Weight(words, scales, inputs)
    words = torch.randint(-(1 << 31), 1 << 31, (experts, outputs, num_words(inputs)), device="cuda").int()
    scales = random(experts, num_pairs(inputs, BLOCK), outputs, 2).fill_(scale / 5)
    return Int4Weight(words, scales, None, BLOCK, inputs)


def measure(config: MoEConfig, layers: list[Layer], x: Tensor, bandwidth: float) -> dict[str, Any]:
    size, intermediate, experts, top_k = SHAPES[config.shape]
    hit = round(sum(len(layer.route(x).experts.unique()) for layer in layers) / len(layers))
    tensors = [tensor for matrix in layers[0].weights[:2] for tensor in pointers(matrix) if tensor is not None]
    num_bytes = sum(tensor.nbytes for tensor in tensors) * hit / experts + 2 * experts * size + 4 * x.numel()
    floor = 1e6 * num_bytes / bandwidth
    flops = 6 * len(x) * top_k * size * intermediate
    us = graph_us(lambda layer: layer(x), layers)
    is_plain = isinstance(layers[0].weights.gate_up, Tensor)
    return {
        "rows": len(x),
        "hit": hit,
        "us": round(us, 2),
        "floor_us": round(floor, 2),
        "share_of_floor": round(floor / us, 3),
        "tflops": round(flops / us / 1e6, 1),
        "torch_us": round(graph_us(lambda layer: layer.by_torch(x), layers), 1) if is_plain else None,
        "router_us": round(graph_us(lambda layer: layer.route(x), layers), 1),
        "block_rows": choose_block_rows(len(x) * top_k, experts, layers[0].least_rows),
    }


def main() -> None:
    run(moe, MoEConfig, None, "bench/moe.py")


if __name__ == "__main__":
    main()
