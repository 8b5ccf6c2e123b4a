"""Token-frequency maps, from a prepared dataset on disk to a map on disk: ours against collections.Counter over lists.

    python bench/frequency_map.py
    python bench/frequency_map.py --data runs/data --output bench/results/frequency_map.jsonl

Both read the same files, by then in memory, in the same run and must give the same map. Prints a table and ends in
one JSON line.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import load_from_disk

from slipstream.bench.lines import Lines
from slipstream.config import parse
from slipstream.data_tools.dataset import Tokens, read_report, write_dataset
from slipstream.data_tools.frequency_map import Counted, build_map, count_tokens
from slipstream.models.token_map import TokenMap

MEAN_ROW_TOKENS = 800
NUM_SPECIAL = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """Options of this benchmark."""

    data: str = ""
    """Prepared dataset to count. Default: a made-up one."""
    tokens: int = 16_000_000
    """Tokens of the made-up dataset."""
    vocab_size: int = 128_256
    """Vocabulary of the made-up dataset."""
    runs: int = 4
    """Times that each side runs; the fastest runs are compared, since what slows one down is not its own."""
    output: str | None = None
    """File to append the JSON line to."""


def main() -> None:
    config = parse(BenchConfig, prog="bench/frequency_map.py", description="Frequency maps: ours against a Counter.")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(config.data) if config.data else make_dataset(Path(folder) / "data", config)
        result = compare(path, Path(folder), config.runs)
    print(f"{'':10}{'seconds':>10}{'tokens/s':>16}")
    for side in ("counter", "ours"):
        print(f"{side:10}{result[f'{side}_s']:10.3f}{result[f'{side}_tokens_per_s']:16,}")
    print(f"{result['tokens']:,} tokens, {result['speed_up']} times as fast on {result['cores']} cores")
    lines = Lines(config.output)
    lines.add({"bench": "frequency_map", **result})
    lines.print()


def make_dataset(path: Path, config: BenchConfig) -> Path:
    """Rows of uneven length, half of their tokens supervised, frequencies falling as 1 / rank like those of text."""
    report = {"vocab_size": config.vocab_size, "kept_ids": list(range(NUM_SPECIAL)), "tokenizer_hash": "made up"}
    write_dataset(_rows(config), path, heldout=0.0, seed=0, describe=lambda: report)
    return path


def compare(path: Path, folder: Path, runs: int) -> dict[str, Any]:
    """Times both sides in turn. Raises AssertionError if their maps differ."""
    report = read_report(path)
    sides: dict[str, Callable[[Path, Path], TokenMap]] = {"counter": with_counter, "ours": with_arrow}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    maps = {}
    for _ in range(runs):
        for side, make in sides.items():
            start = time.perf_counter()
            maps[side] = make(path, folder / f"{side}.safetensors")
            seconds[side].append(time.perf_counter() - start)
    assert torch.equal(maps["ours"].ids, maps["counter"].ids)
    assert torch.equal(maps["ours"].counts, maps["counter"].counts)
    num_tokens = sum(len(row) for row in load_from_disk(path)["train"].data["input_ids"])
    result: dict[str, Any] = {
        "tokens": num_tokens,
        "vocab_size": report["vocab_size"],
        "map_size": len(maps["ours"].ids),
    }
    for side in sides:
        best = min(seconds[side])
        result |= {f"{side}_s": round(best, 4), f"{side}_tokens_per_s": round(num_tokens / best)}
    ratio = min(seconds["counter"]) / min(seconds["ours"])
    machine = {"cores": len(os.sched_getaffinity(0)), "machine": platform.machine(), "date": time.strftime("%Y-%m-%d")}
    return {**result, "speed_up": round(ratio, 1), **machine}


def with_arrow(path: Path, output: Path) -> TokenMap:
    report = read_report(path)
    counts = count_tokens(path, "train", report["vocab_size"])
    return _write(counts, report, output)


def with_counter(path: Path, output: Path) -> TokenMap:
    """What the usual script does: every row becomes Python lists, and a Counter counts them."""
    report = read_report(path)
    counter: Counter[int] = Counter()
    for batch in load_from_disk(path)["train"].iter(batch_size=1000):
        for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True):
            counter.update(compress(ids, mask))
    counts = np.zeros(report["vocab_size"], np.int64)
    counts[list(counter.keys())] = list(counter.values())
    return _write(counts, report, output)


def _write(counts: np.ndarray, report: dict[str, Any], output: Path) -> TokenMap:
    counted = Counted(
        counts=counts,
        tokenizer_hash=report["tokenizer_hash"],
        data_hash=report["data_hash"],
        kept_ids=tuple(report["kept_ids"]),
    )
    token_map = build_map(counted, None)
    token_map.write(output)
    return token_map


def _rows(config: BenchConfig) -> Iterator[Tokens]:
    random = np.random.default_rng(0)
    share = 1.0 / np.arange(1, config.vocab_size + 1)
    edges = np.cumsum(share / share.sum())
    ranks = random.permutation(config.vocab_size).astype(np.int32)
    left = config.tokens
    while left > 0:
        length = min(left, int(random.integers(1, 2 * MEAN_ROW_TOKENS)))
        ids = ranks[np.minimum(np.searchsorted(edges, random.random(length)), config.vocab_size - 1)]
        yield ids, np.arange(length) >= length // 2
        left -= length


if __name__ == "__main__":
    main()
