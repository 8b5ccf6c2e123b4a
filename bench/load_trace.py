"""Measures serving while the number of concurrent requests rises and falls again: with an automatic width, with fixed
ones, and without a draft.

    python bench/load_trace.py --draft runs/llama31-8b/draft --levels 1,8,32,128,32,8,1 --settings auto none width=4

Each phase keeps its number of requests in flight. The next phase begins as soon as the last request of a phase has
started and, where fewer are wanted, enough of them have ended. All settings answer the same questions, so their total
times can be compared; with --seconds the phases last equally long instead, and tokens per second count. The error of
step times is how far the engine's predictions of the last 200 steps were off (median).

A setting is `auto` (the draft, all options as given), `none` (no draft), or options of the engine or of the drafter as
in width=2 or depth=5,width=4. Engines of different settings run one after another. Prints a Markdown table, then one
JSON line per setting and repeat; --plot draws both.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import gc
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch

from slipstream.bench.lines import Lines, milliseconds, origin, table
from slipstream.bench.serving import ENGINE_OPTIONS, default_device, split_draft
from slipstream.bench.serving_run import own_namespace
from slipstream.bench.streams import Stream, Streams, accept_length, gaps_ended, num_tokens
from slipstream.bench.workload import KINDS, Task, Workload
from slipstream.config import run
from slipstream.data_tools.options import check_at_least
from slipstream.models.files.checkpoint import resolve
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.serve.engine.build import build_engine
from slipstream.serve.engine.engine import Engine
from slipstream.serve.load import read_levels
from slipstream.serve.options import EngineConfig, find_target
from slipstream.serve.request import Request, SamplingParams

WARMUP_TOKENS = 16
RECORDED = (  # options that a line repeats
    *("draft", "target", "seconds", "prompts", "input_len", "output_len", "ignore_eos", "temperature", "seed"),
    *("engine", "drafter"),
)
COLUMNS = (  # heading, key of a line, format
    ("setting", "setting", "s"),
    ("total, s", "total_s", ".2f"),
    ("tok/s", "tok_s", ".1f"),
    ("speed-up", "speed_up", ".3f"),
    ("accept length", "accept_length", ".2f"),
    ("error of step times", "step_time_error", ".1%"),
    ("same answers", "num_identical", "d"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTraceConfig:
    """Serving under a load that rises and falls."""

    draft: str = "none"
    """Draft checkpoint, or the name of a drafter that needs none."""
    target: str = ""
    """Target checkpoint. Default: the target of the draft."""
    settings: list[str] = field(default_factory=lambda: ["none", "auto", "width=2", "width=4"])
    """Settings to compare: auto, none, or options of engine and drafter as option=value,option=value."""
    levels: str = "1,2,4,8,16,32,64,128,64,32,16,8,4,2,1"
    """Requests in flight in each phase, separated by commas."""
    requests: int | None = None
    """Requests that start in each phase. Default: twice the phase's level, at least 8."""
    seconds: float | None = None
    """Let each phase last so long, instead of a number of requests."""
    repeats: int = 1
    """Run the whole trace so many times with each setting; the table has medians."""
    prompts: str = "gsm8k"
    """gsm8k, random (token ids), or a file of questions and answers."""
    input_len: int = 0
    """Longest prompt in tokens; 0 asks questions without examples."""
    output_len: int = 256
    """Longest answer in tokens."""
    ignore_eos: bool = False
    """Continue after end of text, so that all answers have the requested length."""
    temperature: float = 0.0
    """0: greedy."""
    seed: int = 0
    """Seed of prompts. Request i samples with seed + i."""
    template: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of every engine by name."""
    drafter: dict[str, Any] = field(default_factory=dict)
    """Options of every drafter by name."""
    output: str | None = None
    """File to append the JSON lines to."""
    plot: str | None = None
    """PNG file to draw the phases and total times to."""

    def __post_init__(self) -> None:
        read_levels(self.levels)
        check_at_least(self, 1, "requests", "output_len", "repeats")
        if self.seconds is not None and self.seconds <= 0:
            raise ValueError(f"seconds is {self.seconds}; it must be above 0")
        if self.seconds is not None and self.requests is not None:
            raise ValueError(f"requests is {self.requests} and seconds {self.seconds}; give one of them")
        if self.prompts not in KINDS and not Path(self.prompts).is_file():
            raise ValueError(f"prompts is {self.prompts!r}; choose one of {', '.join(KINDS)}, or a file of questions")
        if self.draft == "none" and set(self.settings) != {"none"}:
            raise ValueError(f"draft is none, but settings are {' '.join(self.settings)}; name a draft")
        for setting in self.settings:
            self.own_options(setting)

    @property
    def phases(self) -> list[int]:
        """The level of each phase."""
        return read_levels(self.levels)

    def own_options(self, setting: str) -> dict[str, Any]:
        """Options of engine and drafter that `setting` names."""
        return {} if setting in ("none", "auto") else split_draft(f"draft,{setting}")[1]

    def engine_config(self, setting: str) -> EngineConfig:
        target = self.target or find_target(EngineConfig(draft=self.draft))[0]
        options = {"max_running": max(self.phases), **self.engine, "target": target}
        if setting == "none":
            return EngineConfig(**options)
        own = self.own_options(setting)
        options |= {name: value for name, value in own.items() if name in ENGINE_OPTIONS}
        drafter = self.drafter | {name: value for name, value in own.items() if name not in ENGINE_OPTIONS}
        return EngineConfig(**options, draft=self.draft, drafter=drafter)


@dataclass(frozen=True, slots=True)
class Phase:
    """`requests` of them started within it. Gaps are times between two outputs of a request."""

    level: int
    requests: int
    seconds: float
    tok_s: float
    gap_ms_p50: float | None
    gap_ms_p99: float | None


def trace(config: LoadTraceConfig) -> None:
    lines = Lines(config.output)
    engines = {setting: config.engine_config(setting) for setting in config.settings}  # all options are checked first
    work = read_work(config)
    for setting, engine_config in engines.items():
        engine = build_engine(engine_config)
        warm_up(engine, config, work)
        for repeat in range(config.repeats):
            found = measure(engine, config, work, repeat)
            place = {**origin("load_trace", device_of(config)), "setting": setting, "repeat": repeat}
            lines.add({**place, **{name: getattr(config, name) for name in RECORDED}, "levels": config.phases, **found})
        engine.close()
        del engine  # frees its memory before the next one measures what is free
        gc.collect()
        torch.cuda.empty_cache()
    rows = summary(lines.all)
    print(table((*COLUMNS, *phase_columns(config.phases)), rows))
    lines.print(hidden=["answers"])
    if config.plot is not None:
        from slipstream.bench.load_trace_plot import plot_trace  # matplotlib takes a second

        plot_trace(rows, config.phases, Path(config.plot))


def device_of(config: LoadTraceConfig) -> str:
    return "cpu" if config.engine.get("device") == "cpu" else default_device()


def read_work(config: LoadTraceConfig) -> list[list[Task]]:
    """The tasks of each phase; with `seconds` they start over where a phase needs more."""
    names = ("input_len", "output_len", "template")
    tokenizer = load_tokenizer(resolve(config.engine_config("none").target))
    work = Workload(tokenizer=tokenizer, kind=config.prompts, **{name: getattr(config, name) for name in names})
    counts = [config.requests or max(8, 2 * level) for level in config.phases]
    tasks = iter(work.tasks(sum(counts), str(config.seed)))
    return [[next(tasks) for _ in range(size)] for size in counts]


def warm_up(engine: Engine, config: LoadTraceConfig, work: Sequence[Sequence[Task]]) -> None:
    """Short answers to as many requests at once as there will ever be."""
    streams, most = Streams(engine), max(config.phases)
    tasks = [task for phase in work for task in phase][:most]
    params = SamplingParams(max_tokens=WARMUP_TOKENS, temperature=config.temperature, seed=config.seed, ignore_eos=True)
    for index, task in enumerate(tasks):
        streams.add(Request(id=str(index), prompt=task.prompt, params=params, namespace="warm-up"))
    streams.finish()


def measure(engine: Engine, config: LoadTraceConfig, work: Sequence[Sequence[Task]], repeat: int) -> dict[str, Any]:
    """Runs the trace once. Prompts of a repeat share cached text with no other."""
    streams, started = Streams(engine), time.perf_counter()
    begins = run_phases(streams, config, work, f"repeat {repeat}")
    streams.finish()
    ended = time.perf_counter()
    seconds, all_streams = ended - started, list(streams.all.values())
    total = num_tokens(all_streams, started, ended)
    times = zip(config.phases, begins, [*begins[1:], ended], strict=True)
    phases = [phase_figures(all_streams, *phase) for phase in times]
    return {
        "requests": len(all_streams),
        "step_time_error": round(engine.metrics()["step_time_error"], 4),
        "total_s": round(seconds, 3),
        "tokens": total,
        "tok_s": round(total / seconds, 2),
        "accept_length": accept_length(all_streams),
        "phases": [asdict(phase) for phase in phases],
        "answers": None if config.seconds else [zlib.crc32(repr(one.tokens).encode()) for one in all_streams],
    }


def run_phases(
    streams: Streams, config: LoadTraceConfig, work: Sequence[Sequence[Task]], namespace: str
) -> list[float]:
    """Returns when each phase began. Answers of the last one are still open then."""
    begins, number = list[float](), count(config.seed)
    params = {name: getattr(config, name) for name in ("temperature", "ignore_eos")}
    for index, (level, tasks) in enumerate(zip(config.phases, work, strict=True)):
        wait_for_room(streams, level)
        begins.append(time.perf_counter())
        until_s = None if config.seconds is None else begins[-1] + config.seconds
        for task in tasks if until_s is None else endless(tasks):
            seed = next(number)
            sampling = SamplingParams(max_tokens=task.max_tokens, seed=seed, **params)
            own = own_namespace(f"{namespace}, phase {index}", task)
            streams.add(Request(id=str(seed), prompt=task.prompt, params=sampling, namespace=own))
            wait_for_room(streams, level, until_s)
            if until_s is not None and time.perf_counter() >= until_s:
                break
    return begins


def endless(tasks: Sequence[Task]) -> Iterator[Task]:
    """The tasks again and again, each time as repeats of their own."""
    for turn in count():
        yield from (replace(task, repeat=task.repeat + turn * len(tasks)) for task in tasks)


def wait_for_room(streams: Streams, level: int, until_s: float | None = None) -> None:
    """Steps until fewer than `level` requests are open, but not beyond `until_s`."""
    while len(streams.open) >= level and (until_s is None or time.perf_counter() < until_s):
        streams.step()


def phase_figures(streams: Sequence[Stream], level: int, begin_s: float, end_s: float) -> Phase:
    gaps = sorted(gaps_ended(streams, begin_s, end_s))
    seconds = end_s - begin_s
    return Phase(
        level=level,
        requests=sum(begin_s <= stream.added_s < end_s for stream in streams),
        seconds=round(seconds, 4),
        tok_s=round(num_tokens(streams, begin_s, end_s) / seconds, 2),
        gap_ms_p50=milliseconds(median(gaps)) if gaps else None,
        gap_ms_p99=milliseconds(gaps[int(0.99 * len(gaps))]) if gaps else None,
    )


def summary(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per setting: medians over repeats, compared with those without a draft."""
    by_setting: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_setting.setdefault(line["setting"], []).append(line)
    rows = []
    for setting, runs in by_setting.items():
        row: dict[str, Any] = {"setting": setting, "accept_length": runs[0]["accept_length"]}
        row |= {name: median(line[name] for line in runs) for name in ("total_s", "tok_s", "step_time_error")}
        row |= {f"phase {index}": speed for index, speed in enumerate(phase_speeds(runs))}
        row["speed_up"] = row["num_identical"] = None
        rows.append(row)
    plain = next((row for row in rows if row["setting"] == "none"), None)
    for row in rows:
        if plain is not None and row is not plain:
            row["speed_up"] = row["tok_s"] / plain["tok_s"]
            row["num_identical"] = num_identical(by_setting["none"], by_setting[row["setting"]])
    return rows


def phase_speeds(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Tokens per second of each phase, the median over repeats."""
    speeds = [[phase["tok_s"] for phase in line["phases"]] for line in runs]
    return [median(phase) for phase in zip(*speeds, strict=True)]


def num_identical(plain: Sequence[Mapping[str, Any]], drafted: Sequence[Mapping[str, Any]]) -> int | None:
    """Equal answers, over all repeats; None where the number of answers was left to the clock."""
    if plain[0]["answers"] is None:
        return None
    pairs = zip(plain, drafted, strict=True)
    return sum(a == b for one, other in pairs for a, b in zip(one["answers"], other["answers"], strict=True))


def phase_columns(levels: Sequence[int]) -> list[tuple[str, str, str]]:
    """Tokens per second by phase."""
    return [(f"at {level}", f"phase {index}", ".0f") for index, level in enumerate(levels)]


def main(argv: Sequence[str] | None = None) -> None:
    run(trace, LoadTraceConfig, argv, "bench/load_trace.py")


if __name__ == "__main__":
    main()
