"""Compares serving with n-gram lookahead (`--draft ngram`) and without (`none`), in turns in one process.

    python bench/ngram_serving.py                                   # the bundled target and questions
    python bench/ngram_serving.py --prompts random --temperature 8  # random prompts and answers: nothing repeats
    python bench/ngram_serving.py --target CKPT --concurrency 1,8,64 --engine.attention triton    # on a GPU

Each turn asks new questions; both engines answer them and take turns going first. The speed-up is the median over
turns, by wall time and by the process's CPU time, which other programs on a CPU disturb less. `host` is how long the
device waits between two rounds, from the arrival of one round's tokens to the launch of the next; `drafter` is the
drafter's part of it. Prints a table, then one JSON line per level.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from slipstream.bench.host_clock import HostClock
from slipstream.bench.lines import Lines, origin, table
from slipstream.bench.serving_run import Run, run_offline
from slipstream.bench.workload import KINDS, Task, Workload, read_levels, read_questions
from slipstream.config import parse
from slipstream.models.checkpoint import resolve
from slipstream.models.pretrained import load_tokenizer
from slipstream.serve.engine import Engine
from slipstream.serve.options import EngineConfig

TINY = Path(__file__).resolve().parent.parent / "assets" / "tiny-target"
RANDOM: dict[str, Any] = {"input_len": 100, "output_len": 160, "range_ratio": 0.2}  # sampled, without end


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """Options of this benchmark."""

    target: str = str(TINY)
    """Target checkpoint."""
    prompts: str = "gsm8k"
    """gsm8k: questions, answered greedily to the end; random: token ids, sampled past end of text."""
    temperature: float = 1.0
    """Temperature of answers to random prompts. Far above 1 answers are random tokens, too."""
    concurrency: str = "1,8"
    """Requests in flight; several levels, separated by commas, are measured one after another."""
    questions: int = 0
    """Questions per turn. 0: twice the concurrency, at least 8."""
    turns: int = 5
    """Turns at each level."""
    output_len: int = 256
    """Longest answer in tokens."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of both engines, by name."""
    drafter: dict[str, Any] = field(default_factory=dict)
    """Options of the n-gram drafter by name."""
    output: str | None = None
    """File to append the JSON lines to."""

    def __post_init__(self) -> None:
        read_levels(self.concurrency)
        if self.prompts not in KINDS:
            raise ValueError(f"prompts is {self.prompts!r}; choose one of {', '.join(KINDS)}")
        most = len(read_questions())
        if self.prompts == "gsm8k" and any(self.count(level) * self.turns > most for level in self.levels):
            raise ValueError(f"there are {most} questions to ask once; lower questions, turns or concurrency")

    @property
    def levels(self) -> list[int]:
        return read_levels(self.concurrency)

    def count(self, level: int) -> int:
        return self.questions or max(8, 2 * level)

    def tasks(self, tokenizer: Any, level: int) -> list[list[Task]]:
        """The tasks of each turn."""
        lengths = RANDOM if self.prompts == "random" else {"input_len": 0, "output_len": self.output_len}
        work = Workload(tokenizer=tokenizer, kind=self.prompts, **lengths)
        tasks, count = work.tasks(self.count(level) * self.turns, str(level)), self.count(level)
        return [tasks[start : start + count] for start in range(0, len(tasks), count)]


@dataclass(slots=True)
class Turn:
    """One engine's answers in a turn, and their CPU time."""

    run: Run
    cpu_s: float

    @property
    def tok_s(self) -> float:
        return self.run.completion_tokens / self.run.wall_s


def measure(config: BenchConfig, tokenizer: Any, level: int) -> dict[str, Any]:
    """Measures one level with new engines, which know no text of other levels."""
    length = 1024
    shared = {"max_running": level, "max_model_len": length, "kv_cache_tokens": (length + 128) * level, **config.engine}
    engines = {
        "none": Engine(EngineConfig(target=config.target, **shared)),
        "ngram": Engine(EngineConfig(target=config.target, draft="ngram", drafter=config.drafter, **shared)),
    }
    params: dict[str, Any] = {"temperature": 0.0}
    if config.prompts == "random":
        params = {"temperature": config.temperature, "ignore_eos": True}
    warmup = Workload(tokenizer=tokenizer, kind="random", input_len=32, output_len=16).tasks(2 * level, "warmup")
    for name, engine in engines.items():
        run_offline(engine, warmup, level, f"{name}: warm-up", namespace="warmup", **params)
    clock, turns = HostClock(engines["ngram"], level), dict[str, list[Turn]](none=[], ngram=[])
    for index, tasks in enumerate(config.tasks(tokenizer, level)):
        for name in ("none", "ngram") if index % 2 == 0 else ("ngram", "none"):
            began = time.process_time()
            title, seed = f"{name} at {level}, turn {index + 1}", index * len(tasks)
            run = run_offline(engines[name], tasks, level, title, seed=seed, **params)
            turns[name].append(Turn(run, time.process_time() - began))
    return {**describe(config, level, engines["ngram"]), **compare(turns["none"], turns["ngram"]), **clock.figures()}


def describe(config: BenchConfig, level: int, engine: Engine) -> dict[str, Any]:
    return {
        **origin("ngram_serving", engine.device.type),
        "target": config.target,
        "draft": "ngram",
        "prompts": config.prompts,
        "temperature": config.temperature if config.prompts == "random" else 0.0,
        "batch": level,
        "requests": config.count(level),
        "turns": config.turns,
        "options": {**config.engine, "drafter": config.drafter},
    }


def compare(none: Sequence[Turn], ngram: Sequence[Turn]) -> dict[str, Any]:
    pairs = list(zip(none, ngram, strict=True))
    rounds = sum(turn.run.rounds for turn in ngram)
    return {
        "tok_s": round(median(turn.tok_s for turn in ngram), 1),
        "tok_s_none": round(median(turn.tok_s for turn in none), 1),
        "speed_up": round(median(after.tok_s / before.tok_s for before, after in pairs), 3),
        "speed_up_cpu": round(median(before.cpu_s / after.cpu_s for before, after in pairs), 3),
        "speed_up_cpu_turns": [round(before.cpu_s / after.cpu_s, 3) for before, after in pairs],
        "accept_length": round(sum(turn.run.decoded_tokens for turn in ngram) / rounds, 3),
        "width": round(1 + sum(turn.run.drafted_tokens for turn in ngram) / rounds, 2),
        "identical": all(before.run.answers == after.run.answers for before, after in pairs),
    }


COLUMNS = (  # heading, key of a line, format
    ("conc", "batch", "d"),
    ("tok/s none", "tok_s_none", ".1f"),
    ("ngram", "tok_s", ".1f"),
    ("speed-up", "speed_up", ".3f"),
    ("by CPU time", "speed_up_cpu", ".3f"),
    ("accept len", "accept_length", ".2f"),
    ("nodes", "width", ".2f"),
    ("ms/round", "ms", ".2f"),
    ("host us", "host_us", ".0f"),
    ("drafter us", "drafter_us", ".0f"),
    ("host share", "host_share", ".3f"),
    ("same answers", "identical", ""),
)


def main(argv: Sequence[str] | None = None) -> None:
    config = parse(BenchConfig, argv, prog="bench/ngram_serving.py", description="n-gram lookahead against no draft.")
    tokenizer = load_tokenizer(resolve(config.target))
    lines = Lines(config.output)
    for level in config.levels:
        lines.add(measure(config, tokenizer, level))
    print(table(COLUMNS, lines.all))
    lines.print()


if __name__ == "__main__":
    main()
