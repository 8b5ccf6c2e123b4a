"""The n-gram drafter's core without an engine: what it costs the host, and how much it drafts rightly.

python bench/ngram.py                         # with the bundled questions, in a minute
python bench/ngram.py --data my_chats.jsonl   # rows with "messages"
"""

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from slipstream.bench.lines import Lines
from slipstream.bench.ngram_replay import edits, questions, replay
from slipstream.config import parse
from slipstream.serve.drafters.ngram_core import NgramCore

ASSETS = Path(__file__).resolve().parent.parent / "assets"
CONTEXT_TOKENS = 512  # of each request of random tokens
RANDOM_WIDTH = 16  # nodes per tree there
PROMPT_TOKENS = 32_768


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
    result: dict[str, Any] = {"bench": "ngram", "random_tokens": measure_cost(config), "replays": measure_texts(config)}
    result |= {
        "data": Path(config.data).name,
        "texts": config.texts,
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }
    lines = Lines(config.output)
    lines.add(result)
    lines.print()


def measure_cost(config: BenchConfig) -> dict[str, Any]:
    """A full trie of random tokens: nearly every request matches one token and drafts as many as it may."""
    rng = np.random.default_rng(0)
    core = NgramCore(rows=config.batch, capacity=config.capacity)
    tokens_per_s = fill(core, config, rng)
    spreads = time_rounds(core, config, rng)
    stats = core.stats()
    assert stats["nodes"] == config.capacity
    drafted = round(stats["drafted_tokens"] / config.rounds / config.batch, 2)
    print(
        f"{config.batch} requests gain {config.gained} random tokens each and draft {drafted}; "
        f"{stats['nodes']:,} nodes of {stats['bytes'] / config.capacity:.1f} bytes"
    )
    print(f"{'microseconds per batch':32}{'fastest':>10}{'median':>10}{'90 %':>10}")
    for name, spread in spreads.items():
        print(f"{name:32}" + "".join(f"{figure:10.1f}" for figure in spread))
    admit_us = time_admission(config, rng)
    print(f"a prompt of {PROMPT_TOKENS:,} tokens is admitted in {admit_us:,} microseconds")
    print(f"{tokens_per_s:,} tokens a second are inserted while the trie fills\n")
    return {
        "batch": config.batch,
        "gained": config.gained,
        "nodes": stats["nodes"],
        "bytes_per_node": round(stats["bytes"] / config.capacity, 1),
        "drafted": drafted,
        **{name.split(":")[0] + "_us": spread for name, spread in spreads.items()},
        "admit_us": admit_us,
        "fill_tokens_per_s": tokens_per_s,
    }


def fill(core: NgramCore, config: BenchConfig, rng: np.random.Generator) -> int:
    """Inserts random texts until the trie has given up a tenth of its nodes. Returns tokens per second."""
    num_tokens, start = 0, time.perf_counter()
    while core.stats()["evicted_nodes"] < config.capacity // 10:
        core.insert(rng.integers(0, config.vocab_size, CONTEXT_TOKENS))
        num_tokens += CONTEXT_TOKENS
    return round(num_tokens / (time.perf_counter() - start))


def time_rounds(core: NgramCore, config: BenchConfig, rng: np.random.Generator) -> dict[str, list[float]]:
    """Microseconds of each part of a round: the fastest, the median, and what 90 % of the rounds stay below."""
    rows = np.arange(config.batch)
    for row in rows:
        core.admit(row, rng.integers(0, config.vocab_size, CONTEXT_TOKENS))
    tokens, parents = np.zeros((2, config.batch, RANDOM_WIDTH), np.int32)
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
    parts = ("extend: own texts and queue", "propose: match and tree", "insert: in the core's thread")
    quantiles = np.quantile(1e6 * seconds, (0.0, 0.5, 0.9), axis=1).T.round(1).tolist()
    return dict(zip(parts, quantiles, strict=True))


def time_admission(config: BenchConfig, rng: np.random.Generator) -> int:
    core, times = NgramCore(), []
    for _ in range(20):
        prompt = rng.integers(0, config.vocab_size, PROMPT_TOKENS).astype(np.int32)
        start = time.perf_counter()
        core.admit(0, prompt)
        times.append(time.perf_counter() - start)
        core.release(0)
    return round(1e6 * min(times))


def measure_texts(config: BenchConfig) -> list[dict[str, Any]]:
    """Greedy replay: a round emits the longest drafted path that the known answer follows, and one token more."""
    tokenizer, path = Tokenizer.from_file(config.tokenizer), Path(config.data)
    asked = questions(path, config.texts, tokenizer)
    corrected = edits(path, config.texts, tokenizer, config.changes)
    results: list[dict[str, Any]] = []
    print(f"{config.texts} texts of {path.name}, {config.batch} at once; emitted tokens and host time per round")
    print(f"{'':32}" + "".join(f"{f'width {width}':>22}" for width in config.widths))
    for name, exchanges, num_passes in (
        ("questions", asked, 1),
        ("questions asked again", asked, 2),
        (f"edits of {config.changes:.0%} of the words", corrected, 1),
    ):
        line = f"{name:32}"
        for width in config.widths:
            core = NgramCore(rows=config.batch, capacity=config.capacity)
            replayed = [replay(core, exchanges, config.batch, width) for _ in range(num_passes)][-1]
            accept_length, host_us = round(replayed.accept_length, 2), round(1e6 * replayed.seconds / replayed.batches)
            results.append({"traffic": name, "width": width, "accept_length": accept_length, "host_us": host_us})
            line += f"{accept_length:11.2f}{host_us:8} us"
        print(line)
    return results


if __name__ == "__main__":
    main()
