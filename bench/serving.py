"""Measures throughput, latency and answers of serving without a draft and with several, in process or over HTTP.

    python bench/serving.py --draft runs/llama31-8b/draft --prompts gsm8k --input-len 512 --output-len 256
    python bench/serving.py --draft CKPT --mode http --concurrency 1,8,32,64 --requests 500 --input-len 1024 \
        --output-len 1024 --range-ratio 0.7
    python bench/serving.py --draft CKPT --simulate-accept-length 2.99 --engine.attention triton --drafter.depth 3
    python bench/serving.py --draft runs/a/best,depth=5 --draft ngram,nodes=8 --target TARGET --prompts gsm8k \
        --input-len 0 --ignore-eos false --output runs/lines.jsonl --resume
    python bench/serving.py --draft ngram --target TARGET --prompts gsm8k --input-len 0 --ignore-eos false --turns 5
    python bench/serving.py --draft none,grammar_drafts=false --target TARGET --prompts gsm8k --input-len 0 \
        --ignore-eos false --schema order.json --turns 5

Write a draft as NAME[,option=value...], with options of its drafter or of the engine. `--engine.NAME` sets an option
of every engine (of `serve` with `--mode http`), `--drafter.NAME` of every drafter. Each concurrency level has its own
prompts and its own cache namespace; all drafts get the same prompts. `same answers` counts answers equal to those
without a draft; `correct` is the share of questions answered correctly. With --schema all answers follow a JSON schema.

Drafts are measured one after another, or with --turns by turns: each turn has new prompts, all engines stay and take
turns going first, and a speed-up is the median over turns, by wall time and (offline) by this process's CPU time, which
other programs on a CPU disturb less.

Prints a Markdown table, then one JSON line per level and draft. Times are milliseconds: `ms` is the median time between
two outputs of a request, that is, of a round. TTFT and ITL are times of outputs; with a draft one output holds several
tokens. With --resume the same command skips what OUTPUT already has.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import gc
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from slipstream.bench.engines import PromptBenchConfig, label, split_draft
from slipstream.bench.lines import Lines, origin, read_lines, table
from slipstream.bench.server import running_server, serve_command
from slipstream.bench.serving_run import Run, pool, run_http, run_offline
from slipstream.bench.workload import Task, Workload
from slipstream.config import run
from slipstream.models.drafts.source import source_of
from slipstream.serve.engine.build import build_engine
from slipstream.serve.load import read_levels
from slipstream.serve.options import EngineConfig, check_at_least, find_target
from slipstream.serve.request import Grammar

WARMUP_TASKS = 2
COLUMNS = (  # heading, key of a line, format
    ("draft", "draft", "s"),
    ("requests at once", "concurrency", "d"),
    ("tok/s", "tok_s", ".1f"),
    ("speed-up", "speed_up", ".2f"),
    ("accept length", "accept_length", ".2f"),
    ("nodes", "width", ".2f"),
    ("ms per round", "ms", ".2f"),
    ("first token, ms: p50", "ttft_ms_p50", ".1f"),
    ("p99", "ttft_ms_p99", ".1f"),
    ("between outputs: p95", "itl_ms_p95", ".2f"),
    ("p99", "itl_ms_p99", ".2f"),
    ("same answers", "num_identical", "d"),
    ("correct", "accuracy", ".1%"),
    ("speed-up by CPU time", "speed_up_cpu", ".2f"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig(PromptBenchConfig):
    """Serving without a draft and with drafts."""

    draft: list[str] = field(default_factory=list)  # type: ignore[assignment]
    """Drafts, each NAME[,option=value...]: checkpoints, or drafters that need none."""
    baseline: bool = True
    """Measure without a draft first."""
    mode: Literal["offline", "http"] = "offline"
    """offline: an engine in this process; http: a server started here and streaming clients."""
    concurrency: str = "1,8,32,64"
    """Requests in flight; several levels, separated by commas, are measured one after another."""
    requests: int | None = None
    """Requests at each level and turn. Default: four times the concurrency, at least 8."""
    turns: int = 1
    """Measure so many times, with new prompts; above 1 the engines of all drafts are in memory together."""
    prompts: str = "random"
    """random: token ids; gsm8k, or a file of questions and answers: questions after solved examples."""
    schema: str | None = None
    """File with a JSON schema that all answers follow."""
    input_len: int = 512
    """Longest prompt in tokens; 0 asks questions without examples."""
    output_len: int = 256
    """Longest answer in tokens."""
    range_ratio: float = 1.0
    """Lengths are drawn between this share of the longest and the longest."""
    ignore_eos: bool = True
    """Continue after end of text, so that answers have the requested length."""
    temperature: float = 0.0
    """0: greedy."""
    simulate_accept_length: float | None = None
    """Simulate rounds that emit this many tokens on average, for drafts with random weights."""
    resume: bool = False
    """Skip what an earlier run with these options has written to OUTPUT."""

    def __post_init__(self) -> None:
        self.check_prompts()
        read_levels(self.concurrency)
        check_at_least(self, 1, "requests", "output_len", "turns")
        for name, valid, remedy in (
            (
                "input_len",
                self.input_len >= (self.prompts == "random"),
                "it must be at least 1; 0 is for questions only",
            ),
            ("range_ratio", 0.0 < self.range_ratio <= 1.0, "it must be above 0 and at most 1"),
            ("resume", not self.resume or self.output, "there is no file to resume: add --output"),
        ):
            if not valid:
                raise ValueError(f"{name} is {getattr(self, name)!r}; {remedy}")
        for draft in self.draft:
            split_draft(draft)

    @property
    def levels(self) -> list[int]:
        return read_levels(self.concurrency)

    @property
    def drafts(self) -> list[str]:
        return list(dict.fromkeys([*(["none"] if self.baseline or not self.draft else []), *self.draft]))

    @property
    def target_name(self) -> str:
        """Raises ValueError if neither the options nor a draft name a target."""
        names = (split_draft(draft)[0] for draft in self.drafts)
        first = next((name for name in names if source_of(name).has_network), "none")
        return find_target(EngineConfig(target=self.target, draft=first))[0]

    def count(self, level: int) -> int:
        return self.requests or max(8, 4 * level)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of an engine that no option sets. Engines beside others take no more than they need."""
        level = max(self.levels)
        length = max(1024, self.input_len + self.output_len)
        shares = {"max_model_len": length, "kv_cache_tokens": (length + 128) * level} if self.turns > 1 else {}
        return {"max_running": level, **shares}

    def draft_options(self, draft: str) -> dict[str, Any]:
        """Fields of EngineConfig, or of ServeConfig, for `draft`."""
        options = self.engine_options(draft, **self.sizes)
        if options["draft"] != "none" and self.simulate_accept_length is not None:
            options["simulate_accept_length"] = self.simulate_accept_length
        return options

    @property
    def params(self) -> dict[str, Any]:
        """Parameters of every request."""
        params: dict[str, Any] = {"temperature": self.temperature, "ignore_eos": self.ignore_eos}
        if self.schema is not None:
            schema = Path(self.schema).read_text()
            is_http = self.mode == "http"
            grammar = {"json": json.loads(schema)} if is_http else Grammar("json_schema", schema)
            params["structured_outputs" if is_http else "grammar"] = grammar
        return params

    def settings(self, draft: str, level: int) -> dict[str, Any]:
        """The settings that identify a measurement."""
        names = ["mode", "turns", "prompts", "input_len", "output_len", "range_ratio", "ignore_eos", "temperature"]
        names += ["seed", "template", "schema"]
        return {
            "target": self.target_name,
            "draft": draft,
            "concurrency": level,
            "batch": min(level, self.count(level)),
            "requests": self.count(level),
            **{name: getattr(self, name) for name in names},
            "simulate_accept_length": None if draft == "none" else self.simulate_accept_length,
            "options": {**self.engine, **({} if draft == "none" else {"drafter": self.drafter})},
        }


# Answers tasks, so many at a time, in a namespace, from this seed on: only its requests share cached text.
Measure = Callable[[Sequence[Task], int, str, int], Run]


def measure(config: ServingConfig, lines: Lines) -> None:
    """Adds one line per draft and level as soon as it is measured: first lines of an earlier run, then the baseline."""
    for line in read_lines(config.output) if config.resume and config.output else []:
        lines.all += [line] if is_of(config, line) else []
    work = config.workload(**{name: getattr(config, name) for name in ("input_len", "output_len", "range_ratio")})
    for drafts in [config.drafts] if config.turns > 1 else [[draft] for draft in config.drafts]:
        missing = {
            level: [draft for draft in drafts if find(lines.all, draft, level) is None] for level in config.levels
        }
        with ExitStack() as engines:
            started = dict.fromkeys(draft for level in missing.values() for draft in level)
            measures = {draft: engines.enter_context(measuring(config, draft)) for draft in started}
            for level, left in missing.items():
                measure_level(config, work, level, {draft: measures[draft] for draft in left}, lines)


def measure_level(
    config: ServingConfig, work: Workload, level: int, measures: Mapping[str, Measure], lines: Lines
) -> None:
    count = config.count(level)
    runs = {draft: list[Run]() for draft in measures}
    tasks = work.tasks(count * config.turns, f"{config.seed}/{level}")
    warmup = work.tasks(min(level, WARMUP_TASKS), f"{config.seed}/{level}/warmup")
    for draft, answer in measures.items():
        answer(warmup, level, namespace(config, draft, f"warm-up at {level}"), config.seed)
    for turn in range(config.turns):
        batch = tasks[turn * count : (turn + 1) * count]
        for draft in list(measures)[:: -1 if turn % 2 else 1]:
            name = namespace(config, draft, f"at {level}")
            runs[draft].append(measures[draft](batch, level, name, config.seed + turn * count))
    for draft in measures:
        result = pool(runs[draft])
        line: dict[str, Any] = {**result.figures(), "accuracy": accuracy(config, tasks, result, work.tokenizer)}
        line |= {"tok_s_turns": [run.tok_s for run in runs[draft]], "cpu_s_turns": [run.cpu_s for run in runs[draft]]}
        line |= {"answers": checksums(result)}
        line |= compare(config, line, find(lines.all, "none", level), draft)
        lines.add({**origin("serving", config.device), **config.settings(draft, level), **line})


def namespace(config: ServingConfig, draft: str, name: str) -> str:
    """No name for a dynamic token map, which learns from all requests, so that the engine refuses namespaces."""
    return "" if config.draft_options(draft).get("drafter", {}).get("token_map_dynamic") else name


def is_of(config: ServingConfig, line: Mapping[str, Any]) -> bool:
    """Whether this run would measure the same."""
    draft = line.get("draft")
    level = line.get("concurrency")
    if draft not in config.drafts or level not in config.levels or "answers" not in line:
        return False
    return all(line.get(name) == value for name, value in config.settings(draft, level).items())


def find(lines: Sequence[dict[str, Any]], draft: str, level: int) -> dict[str, Any] | None:
    return next((line for line in lines if (line["draft"], line["concurrency"]) == (draft, level)), None)


@contextmanager
def measuring(config: ServingConfig, draft: str) -> Iterator[Measure]:
    """Runs an engine or a server while one draft is measured."""
    options = config.draft_options(draft)
    params = config.params
    if config.mode == "http":
        with running_server(serve_command(options)) as server:
            yield lambda tasks, level, name, seed: run_http(server.url, tasks, level, name, seed, **params)
        return
    engines = [build_engine(EngineConfig(**options))]
    yield lambda tasks, level, name, seed: run_offline(
        engines[0], tasks, level, f"{Path(draft).name} at {level}", name, seed, **params
    )
    engines.clear()  # the caller still holds the lambda: free the memory before the next engine measures it
    gc.collect()
    torch.cuda.empty_cache()


def checksums(run: Run) -> list[int]:
    return [zlib.crc32(repr(answer).encode()) for answer in run.replies]


def accuracy(config: ServingConfig, tasks: Sequence[Task], run: Run, tokenizer: Any) -> float | None:
    """Share of questions answered correctly; None for random prompts and when end of text is ignored."""
    if config.prompts == "random" or config.ignore_eos:
        return None
    decoded = [answer if isinstance(answer, str) else tokenizer.decode(answer) for answer in run.replies]
    return round(sum(task.is_right(text) for task, text in zip(tasks, decoded, strict=True)) / len(tasks), 4)


def compare(
    config: ServingConfig, line: Mapping[str, Any], baseline: Mapping[str, Any] | None, draft: str
) -> dict[str, Any]:
    """Compares speed and answers with the baseline at the same level; None where there is no baseline."""
    compared = dict[str, Any].fromkeys(("speed_up", "speed_up_cpu", "speed_up_cpu_turns", "identical", "num_identical"))
    if baseline is None or draft == "none":
        return compared
    speeds = zip(line["tok_s_turns"], baseline["tok_s_turns"], strict=True)
    compared["speed_up"] = round(median(after / before for after, before in speeds), 3)
    if config.mode == "offline":
        times = zip(line["cpu_s_turns"], baseline["cpu_s_turns"], strict=True)
        compared["speed_up_cpu_turns"] = [round(before / after, 3) for after, before in times]
        compared["speed_up_cpu"] = median(compared["speed_up_cpu_turns"])
    if config.simulate_accept_length is None:
        pairs = zip(baseline["answers"], line["answers"], strict=True)
        compared["num_identical"] = sum(expected == answer for expected, answer in pairs)
        compared["identical"] = compared["num_identical"] == len(line["answers"])
    return compared


def serving(config: ServingConfig) -> None:
    lines = Lines(config.output)
    try:
        measure(config, lines)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("with --output, add --resume to continue") from None
    lines.all.sort(key=lambda line: (config.drafts.index(line["draft"]), config.levels.index(line["concurrency"])))
    print(table(COLUMNS, [{**line, "draft": label(line["draft"])} for line in lines.all]))
    lines.print(hidden=["answers"])


main = partial(run, serving, ServingConfig, "bench/serving.py")

if __name__ == "__main__":
    main()
