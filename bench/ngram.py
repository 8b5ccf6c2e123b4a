"""The n-gram drafter's core without an engine: what it costs the host, and how much it drafts rightly.

python bench/ngram.py                         # with the bundled questions, in a minute
python bench/ngram.py --data my_chats.jsonl   # rows with "messages"
"""

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from slipstream.bench.ngram_replay import Exchange, edits, questions, replay
from slipstream.config import parse
from slipstream.serve.drafters.ngram_core import NgramCore

ASSETS = Path(__file__).resolve().parent.parent / "assets"
CONTEXT_TOKENS = 512  # of each request of random tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """Options of this benchmark."""

    data: str = str(ASSETS / "gsm8k.jsonl.gz")
    """Chats whose texts are replayed: lines of JSON with `messages`, perhaps compressed (.gz)."""
    tokenizer: str = str(ASSETS / "tiny-target" / "tokenizer.json")
    """tokenizer.json of the target."""
    texts: int = 300
    """Chats to replay."""
    changes: float = 0.1
    """Share of the words that an edited text has changed."""
    widths: tuple[int, ...] = (8, 16, 32)
    """Nodes per tree, root included."""
    capacity: int = 1_000_000
    """Nodes of the trie."""
    batch: int = 64
    """Requests at once."""
    gained: int = 3
    """Random tokens that a request gains per round."""
    vocab_size: int = 128_256
    """Random tokens are drawn from so many."""
    rounds: int = 500
    """Rounds of random tokens that are timed."""
    output: str | None = None
    """File to append the JSON line to."""


def main() -> None:
    config = parse(BenchConfig, prog="bench/ngram.py", description="The n-gram core: host cost and accept length.")
    result: dict[str, Any] = {"bench": "ngram", "random_tokens": measure_cost(config), "texts": measure_texts(config)}
    result |= {"cores": len(os.sched_getaffinity(0)), "machine": platform.machine(), "date": time.strftime("%Y-%m-%d")}
    line = json.dumps(result)
    if config.output is not None:
        with Path(config.output).open("a") as file:
            file.write(line + "\n")
    print(line)


def measure_cost(config: BenchConfig) -> dict[str, Any]:
    """A full trie of random tokens: nearly every request matches one token and drafts as many as it may."""
    rng = np.random.default_rng(0)
    core = NgramCore(rows=config.batch, capacity=config.capacity)
    fill_seconds, num_filled = fill(core, config, rng)
    rows, width = np.arange(config.batch), 16
    for row in rows:
        core.admit(row, rng.integers(0, config.vocab_size, CONTEXT_TOKENS))
    tokens, parents = np.zeros((2, config.batch, width), np.int32)
    matches = np.zeros(config.batch, np.int32)
    seconds = np.zeros((3, config.rounds))
    for index in range(config.rounds):
        gained = rng.integers(0, config.vocab_size, (config.batch, config.gained)).astype(np.int32)
        core.flush()
        inserted = core.stats()["insert_seconds"]
        times = [time.perf_counter()]
        core.extend(rows, gained)
        times.append(time.perf_counter())
        core.propose(rows, tokens, parents, matches)
        times.append(time.perf_counter())
        core.flush()
        seconds[:, index] = *np.diff(times), core.stats()["insert_seconds"] - inserted
    stats = core.stats()
    assert stats["nodes"] == config.capacity
    print(f"{config.batch} requests gain {config.gained} random tokens each; {stats['nodes']:,} nodes, width {width}")
    print(f"{'microseconds per batch':28}{'fastest':>10}{'median':>10}{'90 %':>10}")
    result: dict[str, Any] = {"batch": config.batch, "gained": config.gained, "nodes": stats["nodes"], "width": width}
    for name, row in zip(
        ("extend: own texts, queue", "propose: match and tree", "insert: in its thread"), seconds, strict=True
    ):
        spread = [float(round(1e6 * value, 1)) for value in (row.min(), np.median(row), np.quantile(row, 0.9))]
        print(f"{name:28}{spread[0]:10.1f}{spread[1]:10.1f}{spread[2]:10.1f}")
        result[name.split(":")[0] + "_us"] = spread
    result["bytes_per_node"] = round(stats["bytes"] / config.capacity, 1)
    result["fill_tokens_per_s"] = round(num_filled / fill_seconds)
    result["drafted"] = round(stats["drafted_tokens"] / config.rounds / config.batch, 2)
    print(
        f"{result['bytes_per_node']} bytes a node; {result['drafted']} tokens drafted per request and round; "
        f"{result['fill_tokens_per_s']:,} tokens a second inserted while the trie was filled\n"
    )
    return result


def fill(core: NgramCore, config: BenchConfig, rng: np.random.Generator) -> tuple[float, int]:
    """Inserts random texts until the trie gives up nodes. Returns seconds and tokens."""
    num_tokens, start = 0, time.perf_counter()
    while core.stats()["evicted_nodes"] < config.capacity // 10:
        core.insert(rng.integers(0, config.vocab_size, CONTEXT_TOKENS))
        num_tokens += CONTEXT_TOKENS
    return time.perf_counter() - start, num_tokens


def measure_texts(config: BenchConfig) -> dict[str, Any]:
    """Greedy replay: a round emits the longest drafted path that the known answer follows, and one token more."""
    tokenizer, path = Tokenizer.from_file(config.tokenizer), Path(config.data)
    asked = questions(path, config.texts, tokenizer)
    corrected = edits(path, config.texts, tokenizer, config.changes)
    passes: list[tuple[str, Sequence[Exchange], bool]] = [
        ("questions", asked, True),
        ("questions, asked again", asked, False),
        (f"edits, {config.changes:.0%} of the words", corrected, True),
    ]
    print(
        f"{config.texts} texts of {path.name}, {config.batch} at once: tokens per round and request, host's time per round"
    )
    print(f"{'':28}" + "".join(f"{f'width {width}':>22}" for width in config.widths))
    cells: dict[str, list[str]] = {name: [] for name, *_ in passes}
    result: dict[str, Any] = {"data": path.name, "texts": config.texts, "batch": config.batch}
    for width in config.widths:
        core = NgramCore(rows=config.batch, capacity=config.capacity)
        for name, exchanges, is_new in passes:
            core = NgramCore(rows=config.batch, capacity=config.capacity) if is_new else core
            replayed = replay(core, exchanges, config.batch, width)
            host_us = round(1e6 * replayed.seconds / replayed.batches, 1)
            figures = {"accept_length": round(replayed.accept_length, 2), "host_us": host_us}
            result[f"{name}, width {width}"] = figures
            cells[name].append(f"{figures['accept_length']:10.2f}{host_us:9.0f} us")
    for name, values in cells.items():
        print(f"{name:28}" + "".join(values))
    return result


if __name__ == "__main__":
    main()
