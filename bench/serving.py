"""Measures throughput, latency and answers of serving without a draft and with several, in process or over HTTP.

    python bench/serving.py --draft runs/llama31-8b/draft --prompts gsm8k --input-len 512 --output-len 256
    python bench/serving.py --draft CKPT --mode http --concurrency 1,8,32,64 --requests 500 --input-len 1024 \
        --output-len 1024 --range-ratio 0.7
    python bench/serving.py --draft CKPT --simulate-accept-length 2.99 --engine.attention triton --drafter.depth 3
    python bench/serving.py --draft runs/a/best,depth=5 --draft ngram,nodes=8 --target TARGET --prompts gsm8k \
        --input-len 0 --ignore-eos false --output runs/lines.jsonl --resume
    python bench/serving.py --draft ngram --target TARGET --prompts gsm8k --input-len 0 --ignore-eos false --turns 5

Write a draft as NAME[,option=value...], with options of its drafter or of the engine. `--engine.NAME` sets an option
of every engine (of `serve` with `--mode http`), `--drafter.NAME` of every drafter. Each concurrency level has its own
prompts and its own cache namespace; all drafts get the same prompts. `same answers` counts answers equal to those
without a draft; `correct` is the share of questions answered correctly.

Drafts are measured one after another, or with --turns by turns: each turn has new prompts, all engines stay and take
turns going first, and a speed-up is the median over turns, by wall time and (offline) by this process's CPU time, which
other programs on a CPU disturb less. For a drafter on the host, `host` is how long the device waits between two rounds,
from the arrival of one round's tokens to the launch of the next; `drafter` is the drafter's part of it.

Prints a Markdown table, then one JSON line per level and draft. Times are milliseconds: `ms` is the median time between
two outputs of a request, that is, of a round. TTFT and ITL are times of outputs; with a draft one output holds several
tokens. With --resume the same command skips what OUTPUT already has.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import gc
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import yaml

from slipstream.bench.host_clock import HostClock
from slipstream.bench.lines import Lines, origin, read_lines, table
from slipstream.bench.server import flags, running_server
from slipstream.bench.serving_run import Run, pool, run_http, run_offline
from slipstream.bench.workload import KINDS, Task, Workload
from slipstream.config import run
from slipstream.data_tools.options import check_at_least
from slipstream.models.files.checkpoint import resolve
from slipstream.models.files.names import is_checkpoint
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.serve.engine.build import build_engine
from slipstream.serve.load import read_levels
from slipstream.serve.options import EngineConfig, find_target

WARMUP_TASKS = 2
ENGINE_OPTIONS = {one.name for one in fields(EngineConfig)} - {"target", "draft", "drafter"}
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
)
HOST_COLUMNS = (
    ("speed-up by CPU time", "speed_up_cpu", ".2f"),
    ("host, us", "host_us", ".0f"),
    ("stages, us", "stages_us", ".0f"),
    ("host's share", "host_share", ".3f"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """Serving without a draft and with drafts."""

    draft: list[str] = field(default_factory=list)
    """Drafts, each NAME[,option=value...]: checkpoints, or drafters that need none."""
    target: str = ""
    """Target checkpoint. Default: the target of the first draft checkpoint."""
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
    seed: int = 0
    """Seed of prompts and lengths. Request i, counted over turns, samples with seed + i."""
    template: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of every engine (with http: of `serve`) by name."""
    drafter: dict[str, Any] = field(default_factory=dict)
    """Options of every drafter by name."""
    simulate_accept_length: float | None = None
    """Simulate rounds that emit this many tokens on average, for drafts with random weights."""
    output: str | None = None
    """File to append the JSON lines to."""
    resume: bool = False
    """Skip what an earlier run with these options has written to OUTPUT."""

    def __post_init__(self) -> None:
        read_levels(self.concurrency)
        check_at_least(self, 1, "requests", "output_len", "turns")
        known = self.prompts in KINDS or Path(self.prompts).is_file()
        for name, valid, remedy in (
            ("prompts", known, f"choose one of {', '.join(KINDS)}, or a file of questions"),
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
        first = next((name for name in names if is_checkpoint(name)), "none")
        return find_target(EngineConfig(target=self.target, draft=first))[0]

    def count(self, level: int) -> int:
        return self.requests or max(8, 4 * level)

    @property
    def sizes(self) -> dict[str, int]:
        """What the options leave open of an engine's sizes. Engines beside others take no more than they need."""
        most, length = max(self.levels), max(1024, self.input_len + self.output_len)
        together = {"max_model_len": length, "kv_cache_tokens": (length + 128) * most} if self.turns > 1 else {}
        return {"max_running": most, **together}

    def engine_options(self, draft: str) -> dict[str, Any]:
        """Fields of EngineConfig, or of ServeConfig, for `draft`."""
        name, own = split_draft(draft)
        options = {**self.sizes, **self.engine, "target": self.target_name, "draft": name}
        if name == "none":
            return options
        simulated: dict[str, Any] = {}
        if self.simulate_accept_length is not None:
            simulated["simulate_accept_length"] = self.simulate_accept_length
            simulated |= {"unsafe_simulate": True} if self.mode == "http" else {}
        drafter = self.drafter | {key: value for key, value in own.items() if key not in ENGINE_OPTIONS}
        own_engine = {key: value for key, value in own.items() if key in ENGINE_OPTIONS}
        return options | own_engine | simulated | ({"drafter": drafter} if drafter else {})

    def settings(self, draft: str, level: int) -> dict[str, Any]:
        """The settings that identify a measurement."""
        names = ("mode", "turns", "prompts", "input_len", "output_len", "range_ratio", "ignore_eos", "temperature")
        return {
            "target": self.target_name,
            "draft": draft,
            "concurrency": level,
            "batch": min(level, self.count(level)),
            "requests": self.count(level),
            **{name: getattr(self, name) for name in (*names, "seed", "template")},
            "simulate_accept_length": None if draft == "none" else self.simulate_accept_length,
            "options": {**self.engine, **({} if draft == "none" else {"drafter": self.drafter})},
        }


def split_draft(draft: str) -> tuple[str, dict[str, Any]]:
    """NAME,option=value,... -> name and options."""
    name, *options = draft.split(",")
    if not name or not all("=" in option for option in options):
        raise ValueError(f"draft is {draft!r}; write NAME or NAME,option=value,option=value")
    pairs = (option.split("=", 1) for option in options)
    return name, {key.strip().replace("-", "_"): yaml.safe_load(value) for key, value in pairs}


# Answers tasks, so many at a time, in a namespace, from this seed on: only its requests share cached text.
Measure = Callable[[Sequence[Task], int, str, int], Run]


def measure(config: ServingConfig, lines: Lines) -> None:
    """Adds one line per draft and level as soon as it is measured: first lines of an earlier run, then the baseline."""
    for line in read_lines(config.output) if config.resume and config.output else []:
        lines.all += [line] if is_of(config, line) else []
    tokenizer = load_tokenizer(resolve(config.target_name))
    lengths = {name: getattr(config, name) for name in ("input_len", "output_len", "range_ratio", "template")}
    work = Workload(tokenizer=tokenizer, kind=config.prompts, **lengths)
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
    count, runs = config.count(level), {draft: list[Run]() for draft in measures}
    tasks = work.tasks(count * config.turns, f"{config.seed}/{level}")
    warmup = work.tasks(min(level, WARMUP_TASKS), f"{config.seed}/{level}/warmup")
    for draft, answer in measures.items():
        answer(warmup, level, namespace(config, draft, f"warm-up at {level}"), config.seed)
    for turn in range(config.turns):
        asked = tasks[turn * count : (turn + 1) * count]
        for draft in list(measures)[:: -1 if turn % 2 else 1]:
            name = namespace(config, draft, f"at {level}")
            runs[draft].append(measures[draft](asked, level, name, config.seed + turn * count))
    for draft in measures:
        result = pool(runs[draft])
        where = origin("serving", "cpu" if config.engine.get("device") == "cpu" else default_device())
        found: dict[str, Any] = {**result.figures(), "accuracy": accuracy(config, tasks, result, work.tokenizer)}
        found |= {"tok_s_turns": [one.tok_s for one in runs[draft]], "cpu_s_turns": [one.cpu_s for one in runs[draft]]}
        found |= {"answers": checksums(result)}
        found |= compare(config, found, find(lines.all, "none", level), draft)
        lines.add({**where, **config.settings(draft, level), **found})


def namespace(config: ServingConfig, draft: str, name: str) -> str:
    """No name for a dynamic token map, which learns from all requests, so that the engine refuses namespaces."""
    return "" if config.engine_options(draft).get("drafter", {}).get("token_map_dynamic") else name


def is_of(config: ServingConfig, line: Mapping[str, Any]) -> bool:
    """Whether this run would measure the same."""
    draft, level = line.get("draft"), line.get("concurrency")
    if draft not in config.drafts or level not in config.levels or "answers" not in line:
        return False
    return all(line.get(name) == value for name, value in config.settings(draft, level).items())


def find(lines: Sequence[dict[str, Any]], draft: str, level: int) -> dict[str, Any] | None:
    return next((line for line in lines if (line["draft"], line["concurrency"]) == (draft, level)), None)


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def measuring(config: ServingConfig, draft: str) -> Iterator[Measure]:
    """Runs an engine or a server while one draft is measured."""
    options = config.engine_options(draft)
    params: dict[str, Any] = {"temperature": config.temperature, "ignore_eos": config.ignore_eos}
    if config.mode == "http":
        with running_server([str(Path(sys.executable).parent / "serve"), *flags(options)]) as url:
            yield lambda tasks, level, name, seed: run_http(url, tasks, level, name, seed, **params)
        return
    held: dict[str, Any] = {"engine": build_engine(EngineConfig(**options))}
    if any(stage.reads == "emitted" for stage in held["engine"].stages):
        held["clock"] = HostClock(held["engine"])
    yield lambda tasks, level, name, seed: run_offline(
        held["engine"], tasks, level, f"{Path(draft).name} at {level}", name, seed, held.get("clock"), **params
    )
    held.clear()  # the caller still holds the lambda: free the memory before the next engine measures it
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
    config: ServingConfig, found: Mapping[str, Any], baseline: Mapping[str, Any] | None, draft: str
) -> dict[str, Any]:
    """Compares speed and answers with the baseline at the same level; None where there is no baseline."""
    compared = dict[str, Any].fromkeys(("speed_up", "speed_up_cpu", "speed_up_cpu_turns", "identical", "num_identical"))
    if baseline is None or draft == "none":
        return compared
    speeds = zip(found["tok_s_turns"], baseline["tok_s_turns"], strict=True)
    compared["speed_up"] = round(median(after / before for after, before in speeds), 3)
    if config.mode == "offline":
        times = zip(found["cpu_s_turns"], baseline["cpu_s_turns"], strict=True)
        compared["speed_up_cpu_turns"] = [round(before / after, 3) for after, before in times]
        compared["speed_up_cpu"] = median(compared["speed_up_cpu_turns"])
    if config.simulate_accept_length is None:
        pairs = zip(baseline["answers"], found["answers"], strict=True)
        compared["num_identical"] = sum(one == other for one, other in pairs)
        compared["identical"] = compared["num_identical"] == len(found["answers"])
    return compared


def label(draft: str) -> str:
    """A draft's name in the table: the last two parts of its path, and its options."""
    name, *options = draft.split(",")
    return ", ".join(("/".join(Path(name).parts[-2:]), *options))


def serving(config: ServingConfig) -> None:
    lines = Lines(config.output)
    try:
        measure(config, lines)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("with --output, add --resume to continue") from None
    lines.all.sort(key=lambda line: (config.drafts.index(line["draft"]), config.levels.index(line["concurrency"])))
    columns = COLUMNS + (HOST_COLUMNS if any(line["host_us"] for line in lines.all) else ())
    print(table(columns, [{**line, "draft": label(line["draft"])} for line in lines.all]))
    lines.print(hidden=["answers"])


def main(argv: Sequence[str] | None = None) -> None:
    run(serving, ServingConfig, argv, "bench/serving.py")


if __name__ == "__main__":
    main()
