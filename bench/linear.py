"""Linear layers of few rows in CUDA graphs, with the weights cold, against the memory and torch's library.

    python bench/linear.py --output bench/results/linear.jsonl
    python bench/linear.py --tune true --shapes "[qkv,o]"

--tune times the candidate tilings of the shapes instead (kernels/small_m_gemm.py, choose_tiling). Prints tables and
ends in one JSON line per row.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.bench.gpu import copy_bandwidth, revision
from slipstream.bench.kernel_times import graph_us
from slipstream.bench.lines import Lines
from slipstream.config import parse
from slipstream.kernels.activation import silu_mul
from slipstream.kernels.small_m_gemm import (
    MAX_GATED_ROWS,
    MAX_ROWS,
    Tiling,
    choose_tiling,
    gated_linear_few_rows_triton,
    linear_few_rows_triton,
)

GATED = "gated"
COLD_BYTES = 400e6  # of weights that take turns: several times the L2 cache
SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    GATED: (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
    "draft fc": (4096, 12288),
    "draft qkv": (6144, 8192),
    "draft head": (32000, 4096),
    "qwen3 gate_up": (24576, 4096),
    "qwen3 head": (151936, 4096),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfig:
    """Options of this benchmark."""

    rows: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32])
    """Rows of the products, up to 32; of the gated one up to 128."""
    shapes: list[str] = field(default_factory=list)
    """Names of shapes. Default: all."""
    tune: bool = False
    """Time the candidate tilings, at the last of --rows."""
    output: str | None = None
    """File to append the JSON lines to."""


@torch.inference_mode()
def main() -> None:
    config = parse(LinearConfig, prog="bench/linear.py", description="Linear layers of few rows against the memory.")
    limit = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a large copy moves {limit / 1e9:,.0f} GB/s")
    shared = {"bench": "linear", "device": torch.cuda.get_device_name(), "date": str(date.today())}
    lines = Lines(config.output, shared | {"revision": revision()})
    if not config.tune:
        print(f"{'shape':16}{'rows':>5}{'us':>9}{'GB/s':>8}{'share':>7}{'torch us':>10}")
    for name in config.shapes or list(SHAPES):
        for result in tune(name, config.rows[-1], limit) if config.tune else measure(name, config.rows, limit):
            lines.add(result)
    lines.print()


def measure(name: str, row_counts: list[int], limit: float) -> list[dict[str, Any]]:
    """Our kernel and torch's for each number of rows; `limit` in bytes per second."""
    weights, results = cold_weights(name), []
    for rows in row_counts:
        if rows > (MAX_GATED_ROWS if name == GATED else MAX_ROWS):
            continue
        x = random_rows(rows, weights[0])
        ours = gated_linear_few_rows_triton if name == GATED else linear_few_rows_triton
        others = gated_by_torch if name == GATED else F.linear
        result = rated(name, rows, graph_us([partial(ours, x, weight) for weight in weights]), limit)
        result["cublas_us"] = round(graph_us([partial(others, x, weight) for weight in weights]) or 0, 2)
        results.append(result)
        print(row_text(result) + f"{result['cublas_us']:10.2f}", flush=True)
    return results


def tune(name: str, rows: int, limit: float) -> list[dict[str, Any]]:
    weights, results = cold_weights(name), []
    x = random_rows(rows, weights[0])
    run = gated_linear_few_rows_triton if name == GATED else linear_few_rows_triton
    print(f"{name}: chosen {chosen(name, rows)}")
    for tiling in candidates(name):
        time_us = graph_us([partial(run, x, weight, tiling=tiling) for weight in weights])
        results.append({**rated(name, rows, time_us, limit), **asdict(tiling)})
    results.sort(key=lambda result: result["us"])
    for result in results[:12]:
        print(row_text(result), {key: result[key] for key in asdict(chosen(name, rows))}, flush=True)
    return results


def chosen(name: str, rows: int) -> Tiling:
    outputs, inputs = SHAPES[name]
    if name == GATED:
        return choose_tiling(outputs // 2, inputs, gated=True, num_rows=rows)
    return choose_tiling(outputs, inputs)


def candidates(name: str) -> list[Tiling]:
    """Few enough to compile and time in a minute for the five shapes of a target; compiled ones are shared."""
    if name == GATED:
        cuts = [(64, 64, 1, 3), (64, 64, 1, 4), (64, 64, 1, 6), (64, 128, 1, 3), (128, 64, 1, 3)]
        cuts += [(128, 64, 1, 3, 8), (128, 64, 1, 4, 8)]
    elif SHAPES[name][0] >= 20_000:
        cuts = [(128, 64, 1, 3), (128, 64, 1, 4), (128, 64, 1, 6), (128, 128, 1, 3), (64, 128, 1, 3), (64, 128, 1, 5)]
    else:
        cuts = [(64, 128, split, stages) for split in (1, 2, 4) for stages in (4, 6)]
        cuts += [(64, 64, 4, 6), (128, 64, 4, 4), (128, 64, 8, 4)]
    return [Tiling(*cut) for cut in cuts]


def rated(name: str, rows: int, time_us: float | None, limit: float) -> dict[str, Any]:
    assert time_us is not None
    (outputs, inputs), rate = SHAPES[name], 0.0
    rate = 2 * outputs * inputs / time_us * 1e6  # the weights alone
    share = round(rate / limit, 3)
    return {"shape": name, "rows": rows, "us": round(time_us, 2), "gb_s": round(rate / 1e9), "share": share}


def row_text(result: dict[str, Any]) -> str:
    return f"{result['shape']:16}{result['rows']:5}{result['us']:9.2f}{result['gb_s']:8,}{result['share']:7.0%}"


def cold_weights(name: str) -> list[Tensor]:
    outputs, inputs = SHAPES[name]
    copies = 1 + int(COLD_BYTES / (2 * outputs * inputs))
    weights = [torch.empty(outputs, inputs, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(copies)]
    torch.cuda.synchronize()
    return weights


def random_rows(rows: int, weight: Tensor) -> Tensor:
    return torch.randn(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)


def gated_by_torch(x: Tensor, weight: Tensor) -> Tensor:
    return silu_mul(F.linear(x, weight))


if __name__ == "__main__":
    main()
