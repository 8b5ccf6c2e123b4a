"""The head of a draft in CUDA graphs, with the weights cold: logits of all tokens against those of a set of them, whose
rows are copied or read through an index in random order; then the sample, or the k best that a tree takes.

    python bench/head.py --output bench/results/head.jsonl
    python bench/head.py --tune true --rows "[1,32,64]"

"two steps" stores the logits, "fused" does not. --tune times candidate tilings of the kernels that read through an
index instead (kernels/gathered_head.py, choose_tiling). Prints tables and ends in one JSON line per row.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.bench.gpu import copy_bandwidth, revision
from slipstream.bench.kernel_times import graph_us
from slipstream.bench.lines import Lines
from slipstream.config import parse
from slipstream.kernels.gathered_head import (
    DraftHead,
    choose_tiling,
    gathered_linear_triton,
    head_logits,
    head_sample_reference,
    head_sample_triton,
    head_topk_reference,
    head_topk_triton,
)
from slipstream.kernels.sampling import Sampling
from slipstream.kernels.small_m_gemm import Tiling

COLD_BYTES = 400e6  # of weights that take turns: several times the L2 cache
SETS = 2  # of ids and of copied rows, which take turns
CUTS = [  # outputs, depth, split, stages, warps
    (128, 64, 1, 3, 4),
    (128, 64, 1, 4, 4),
    (128, 64, 1, 6, 4),
    (128, 64, 1, 4, 8),
    (128, 128, 1, 3, 8),
    (64, 64, 1, 4, 4),
    (64, 64, 1, 6, 4),
    (64, 128, 1, 4, 4),
    (256, 64, 1, 3, 8),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Options of this benchmark."""

    rows: list[int] = field(default_factory=lambda: [1, 4, 32])
    """Rows whose logits are asked for: requests, or the nodes of a tree's level."""
    vocab: int = 128_256
    """Tokens of the target."""
    draft_vocab: int = 32_768
    """Tokens of the set."""
    hidden: int = 4096
    """Hidden size."""
    k: int = 4
    """Children of a node."""
    temperature: float = 1.0
    """Of all requests."""
    tune: bool = False
    """Time candidate tilings."""
    output: str | None = None
    """File to append the JSON lines to."""


@dataclass(frozen=True, slots=True)
class Question:
    hidden: Tensor  # (R, H)
    positions: Tensor  # (R,)
    sampling: Sampling


@torch.inference_mode()
def main() -> None:
    config = parse(HeadConfig, prog="bench/head.py", description="A draft's head over all tokens and over a few.")
    limit = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a large copy moves {limit / 1e9:,.0f} GB/s")
    heads = make_heads(config)
    shared: dict[str, Any] = {"bench": "head", "device": torch.cuda.get_device_name(), "date": str(date.today())}
    shared |= {"vocab": config.vocab, "draft_vocab": config.draft_vocab, "hidden": config.hidden, "k": config.k}
    lines = Lines(config.output, shared | {"revision": revision()})
    for rows in config.rows:
        for result in (tune if config.tune else measure)(config, heads, ask(config, rows), limit):
            lines.add(result)
    lines.print()


def make_heads(config: HeadConfig) -> dict[str, list[DraftHead]]:
    """Heads that take turns: of all tokens, of copied rows, and of the same rows where they lie."""
    assert config.draft_vocab * SETS * config.hidden * 2 > COLD_BYTES, "the sets would stay in the L2 cache"
    weight = torch.empty(config.vocab, config.hidden, dtype=torch.bfloat16, device="cuda")
    weight.normal_(std=3 * config.hidden**-0.5)
    sets = [torch.randperm(config.vocab, device="cuda")[: config.draft_vocab] for _ in range(SETS)]
    return {
        "full": [DraftHead(weight)],
        "static": [DraftHead(weight[ids], ids) for ids in sets],
        "gathered": [DraftHead(weight, ids, gathered=True) for ids in sets],
    }


def ask(config: HeadConfig, rows: int) -> Question:
    hidden = torch.randn(rows, config.hidden, device="cuda").bfloat16()
    keys = torch.randint(2**62, (rows,), device="cuda")
    temperature = torch.full((rows,), config.temperature, device="cuda")
    return Question(hidden, torch.arange(rows, device="cuda"), Sampling(keys, temperature, None))


def measure(
    config: HeadConfig, heads: dict[str, list[DraftHead]], question: Question, limit: float
) -> list[dict[str, Any]]:
    """Every way to the logits, the sample and the k best; `limit` in bytes per second."""
    rows, results = len(question.hidden), []
    print(f"\n{rows} rows\n{'':36}{'us':>9}{'MB':>9}{'GB/s':>8}{'share':>7}{'full / this':>13}{'this / static':>15}")
    for answer, ways in answers(question, config.k).items():
        full = static = float("inf")
        for name, turns in heads.items():
            for way, run in ways.items():
                time_us = graph_us([partial(run, head) for head in turns]) or 0.0
                full = time_us if full == float("inf") else full  # of the first way, two steps
                static = min(static, time_us) if name == "static" else static
                result = {"answer": answer, "head": name, "way": way, **rated(rows, turns[0], time_us, limit)}
                result["full_ratio"] = round(full / time_us, 2)
                result["static_ratio"] = None if name == "full" else round(time_us / static, 3)
                results.append(result)
                print_result(f"{answer}, {name}{way and ', ' + way}", result)
    return results


def answers(question: Question, k: int) -> dict[str, dict[str, Callable[[DraftHead], Any]]]:
    """What is asked of a head -> ways to it."""
    hidden, rest = question.hidden, (question.positions, question.sampling)
    return {
        "logits": {"": lambda head: head_logits(head, hidden)},
        "sample": {
            "two steps": lambda head: head_sample_reference(head, hidden, *rest),
            "fused": lambda head: head_sample_triton(head, hidden, *rest),
        },
        "top-k": {
            "two steps": lambda head: head_topk_reference(head, hidden, k, *rest),
            "fused": lambda head: head_topk_triton(head, hidden, k, *rest),
        },
    }


def tune(
    config: HeadConfig, heads: dict[str, list[DraftHead]], question: Question, limit: float
) -> list[dict[str, Any]]:
    """Times of the candidates by kernel, and their order by the sum over the kernels."""
    hidden, positions, sampling = question.hidden, question.positions, question.sampling
    rows, turns, results = len(hidden), heads["gathered"], []
    print(f"\n{rows} rows: chosen {choose_tiling(rows)}")
    for cut in CUTS:
        tiling = Tiling(*cut)
        kernels = {
            "linear": lambda head, tiling=tiling: gathered_linear_triton(hidden, head.weight, head.ids, tiling),
            "sample": lambda head, tiling=tiling: head_sample_triton(head, hidden, positions, sampling, tiling),
            "topk": lambda head, tiling=tiling: head_topk_triton(head, hidden, config.k, positions, sampling, tiling),
        }
        times = {name: graph_us([partial(run, head) for head in turns]) or 0.0 for name, run in kernels.items()}
        share = round(2 * turns[0].size * hidden.shape[1] / times["linear"] * 1e6 / limit, 3)
        rounded = {f"{name}_us": round(time, 2) for name, time in times.items()}
        results.append({"rows": rows, **rounded, "linear_share": share, **asdict(tiling)})
    results.sort(key=lambda result: sum(result[f"{name}_us"] for name in kernels))
    for result in results:
        print({key: value for key, value in result.items() if key != "rows"}, flush=True)
    best = {name: min(results, key=lambda result: result[f"{name}_us"]) for name in kernels}
    for name, result in best.items():
        print(f"best for {name}: {Tiling(*(result[key] for key in asdict(choose_tiling(rows))))}")
    return results


def rated(rows: int, head: DraftHead, time_us: float, limit: float) -> dict[str, Any]:
    num_bytes = 2 * head.size * head.weight.shape[1]  # the weights alone
    rate = num_bytes / time_us * 1e6
    numbers = {"us": round(time_us, 2), "mb": round(num_bytes / 1e6), "gb_s": round(rate / 1e9)}
    return {"rows": rows, **numbers, "share": round(rate / limit, 3)}


def print_result(label: str, result: dict[str, Any]) -> None:
    static = "-" if result["static_ratio"] is None else f"{result['static_ratio']:.3f}"
    bandwidth = f"{result['mb']:9,}{result['gb_s']:8,}{result['share']:7.0%}"
    print(f"{label:36}{result['us']:9.2f}{bandwidth}{result['full_ratio']:13.2f}{static:>15}", flush=True)


if __name__ == "__main__":
    main()
