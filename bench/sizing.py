"""Compares numbers of nodes that the engine chooses with fixed ones on a CPU: all answer the same questions, in turns.

    python bench/sizing.py --target CKPT --draft DRAFT --batch "[1,4,16]" --width "[4,8]"
    python bench/sizing.py --target assets/tiny-target --draft ngram --batch "[4]" --questions 40 --runs 6

Figures are tokens per second of the CPU time of an engine's thread, so it matters little what else runs meanwhile, and
what does touches all engines alike. Each engine has one thread, in which nothing else is computed: its clock of steps
(serve/runner/cpu_clock.py) reads that thread's time, too. Each run has questions of its own.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import gc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from time import thread_time
from typing import Any

import torch

from slipstream.bench.lines import Lines, origin, table
from slipstream.bench.workload import Task, Workload
from slipstream.config import check_required, run
from slipstream.data_tools.options import check_at_least
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.serve.engine.build import build_engine
from slipstream.serve.engine.engine import Engine
from slipstream.serve.options import EngineConfig, find_target
from slipstream.serve.request import Request, SamplingParams

TURN = 20  # steps
WARM = 3  # requests before the measured ones, for each that runs at once
COLUMNS = (
    ("draft", "draft", "s"),
    ("requests", "batch", "d"),
    ("run", "run", "d"),
    ("nodes", "nodes", "s"),
    ("tok/s", "tok_s", ".0f"),
    ("tokens a step", "tokens_a_step", ".1f"),
    ("ms a step", "ms_a_step", ".1f"),
    ("to the best fixed", "to_best", ".3f"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingConfig:
    """Options of this benchmark."""

    REQUIRED = {"draft": "a draft checkpoint, or a drafter that needs none", "batch": "numbers of requests"}

    target: str = ""
    """Target checkpoint. Default: the target of the draft."""
    draft: str = ""
    """Draft checkpoint, or the name of a drafter that needs none."""
    drafter: dict[str, Any] = field(default_factory=dict)
    """Options of the drafter by name, such as depth."""
    width: list[int] = field(default_factory=lambda: [4, 8])
    """Fixed numbers of nodes of a request, measured beside no draft and what the engine chooses; none: []."""
    batch: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16])
    """Requests at once."""
    questions: int = 0
    """Held-out GSM8K questions of a run. Default: 8 for each request at once, at least 16."""
    runs: int = 1
    """Runs of each number of requests, with other questions."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of the engines by name."""
    output: str | None = None
    """File to append the JSON lines to."""

    def __post_init__(self) -> None:
        check_required(self)
        check_at_least(self, 0, "questions")
        check_at_least(self, 1, "runs")
        for name in ("batch", "width"):
            if wrong := [number for number in getattr(self, name) if number < 1]:
                raise ValueError(f"{name} has {wrong[0]}; give positive numbers")


class Contender:
    """An engine in a thread of its own, and what it has answered so far."""

    def __init__(self, nodes: str, config: SizingConfig, batch: int) -> None:
        """nodes: none, a number, or auto."""
        self.nodes = nodes
        self.tokens = self.steps = 0
        self.seconds = 0.0
        self.pool = ThreadPoolExecutor(max_workers=1)
        self.engine: Engine = self.pool.submit(self._build, config, batch).result()

    def _build(self, config: SizingConfig, batch: int) -> Engine:
        options: dict[str, Any] = {"max_model_len": 1024, **config.engine}
        if self.nodes != "none":
            options |= {"drafter": config.drafter, "width": None if self.nodes == "auto" else int(self.nodes)}
        draft = "none" if self.nodes == "none" else config.draft
        asked = EngineConfig(target=config.target, draft=draft, device="cpu", max_running=batch, **options)
        engine = build_engine(asked)
        torch.set_num_threads(1)  # what other threads of a library computed would not be counted
        return engine

    def warm_up(self, tasks: Sequence[Task]) -> None:
        """Answers tasks that do not count."""
        self.ask(tasks, "warm")
        while self.engine.has_work:
            self.turn()
        self.tokens, self.steps, self.seconds = 0, 0, 0.0

    def ask(self, tasks: Sequence[Task], name: str) -> None:
        for index, task in enumerate(tasks):
            params = SamplingParams(max_tokens=task.max_tokens, temperature=0.0)
            self.engine.add(Request(id=f"{name} {index}", prompt=task.prompt, params=params))

    def turn(self) -> None:
        self.pool.submit(self._turn).result()

    def _turn(self) -> None:
        began = thread_time()
        for _ in range(TURN):
            if not self.engine.has_work:
                break
            self.tokens += sum(len(output.tokens) for output in self.engine.step())
            self.steps += 1
        self.seconds += thread_time() - began

    def figures(self) -> dict[str, Any]:
        return {
            "nodes": self.nodes,
            "tok_s": round(self.tokens / self.seconds, 1),
            "tokens_a_step": round(self.tokens / self.steps, 2),
            "ms_a_step": round(1000 * self.seconds / self.steps, 2),
        }


def sizing(config: SizingConfig) -> None:
    target, path = find_target(EngineConfig(target=config.target, draft=config.draft))
    work = Workload(tokenizer=load_tokenizer(path), kind="gsm8k", input_len=0, output_len=256)
    lines, is_first = Lines(config.output), True
    for batch in config.batch:
        for index in range(config.runs):
            count = config.questions or max(16, 8 * batch)
            measured = compete(
                replace(config, target=target),
                batch,
                work.tasks(WARM * batch, "warm"),
                work.tasks(count, f"run {index}"),
            )
            shared = {**origin("sizing", "cpu"), "target": target, "draft": config.draft}
            rows = [lines.add({**shared, "batch": batch, "run": index, **line}) for line in measured]
            print(table(COLUMNS, rows, heading=is_first), flush=True)
            is_first = False
    lines.print()


def compete(config: SizingConfig, batch: int, warm: Sequence[Task], tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """A line for each contender, that of what the engine chooses last."""
    contenders = [Contender(nodes, config, batch) for nodes in ("none", *map(str, config.width), "auto")]
    for one in contenders:
        one.warm_up(warm)
        one.ask(tasks, "measured")
    while any(one.engine.has_work for one in contenders):
        for one in contenders:
            one.turn()
    found = [one.figures() for one in contenders]
    best = max(line["tok_s"] for line in found[:-1])
    for one in contenders:
        one.pool.shutdown()
    del contenders
    gc.collect()
    return [{**line, "to_best": round(line["tok_s"] / best, 3)} for line in found]


if __name__ == "__main__":
    run(sizing, SizingConfig, None, "bench/sizing.py")
