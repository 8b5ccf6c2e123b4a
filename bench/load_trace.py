"""Measures serving while the number of concurrent requests rises and falls again: with an automatic width, with fixed
ones, and without a draft.

    python bench/load_trace.py --draft runs/llama31-8b/draft --levels 1,8,32,128,32,8,1 --settings auto none width=4

Each phase keeps its number of requests in flight. The next phase begins as soon as the last request of a phase has
started and, where fewer are wanted, enough of them have ended. All settings answer the same questions, so their total
times can be compared. The error of step times is how far the engine's predictions of the last 200 steps were off
(median). The regret is by how much a request's tokens took longer than with the best other setting, which is known in
hindsight: the mean of all requests.

A setting is `auto` (the draft, all options as given), `none` (no draft), or options of the engine or of the drafter as
in width=2 or depth=5,width=4. Engines of different settings run one after another. Prints a Markdown table, then one
JSON line per setting and repeat.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import gc
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import mean, median
from typing import Any

import torch

from slipstream.bench.engines import PromptBenchConfig, split_draft
from slipstream.bench.lines import Lines, milliseconds, origin, table
from slipstream.bench.serving_run import task_namespace
from slipstream.bench.streams import Stream, Streams, accept_length, gaps_ended, num_tokens
from slipstream.bench.workload import Task
from slipstream.config import run
from slipstream.serve.engine.build import build_engine
from slipstream.serve.engine.engine import Engine
from slipstream.serve.load import read_levels
from slipstream.serve.options import EngineConfig, check_at_least
from slipstream.serve.request import Request, SamplingParams

WARMUP_TOKENS = 16
RECORDED = (  # options that a line repeats
    *("draft", "target", "prompts", "input_len", "output_len", "ignore_eos", "temperature", "seed"),
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
    ("regret", "regret", ".3f"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTraceConfig(PromptBenchConfig):
    """Serving under a load that rises and falls."""

    settings: list[str] = field(default_factory=lambda: ["none", "auto", "width=2", "width=4"])
    """Settings to compare: auto, none, or options of engine and drafter as option=value,option=value."""
    levels: str = "1,2,4,8,16,32,64,128,64,32,16,8,4,2,1"
    """Requests in flight in each phase, separated by commas."""
    requests: int | None = None
    """Requests that start in each phase. Default: twice the phase's level, at least 8."""
    repeats: int = 1
    """Run the whole trace so many times with each setting; the table has medians."""
    input_len: int = 0
    """Longest prompt in tokens; 0 asks questions without examples."""
    output_len: int = 256
    """Longest answer in tokens."""
    ignore_eos: bool = False
    """Continue after end of text, so that all answers have the requested length."""
    temperature: float = 0.0
    """0: greedy."""

    def __post_init__(self) -> None:
        self.check_prompts()
        read_levels(self.levels)
        check_at_least(self, 1, "requests", "output_len", "repeats")
        if self.draft == "none" and set(self.settings) != {"none"}:
            raise ValueError(f"draft is none, but settings are {' '.join(self.settings)}; name a draft")
        for setting in self.settings:
            split_draft(self.draft_of(setting))

    @property
    def phases(self) -> list[int]:
        """The level of each phase."""
        return read_levels(self.levels)

    def draft_of(self, setting: str) -> str:
        """NAME[,option=value...] of a setting."""
        return {"none": "none", "auto": self.draft}.get(setting, f"{self.draft},{setting}")

    def engine_config(self, setting: str) -> EngineConfig:
        return EngineConfig(**self.engine_options(self.draft_of(setting), max_running=max(self.phases)))


def trace(config: LoadTraceConfig) -> None:
    lines = Lines(config.output)
    engines = {setting: config.engine_config(setting) for setting in config.settings}  # all options are checked first
    work = read_work(config)
    for setting, engine_config in engines.items():
        engine = build_engine(engine_config)
        warm_up(engine, config, work)
        for repeat in range(config.repeats):
            figures = measure(engine, config, work, repeat)
            labels = {**origin("load_trace", config.device), "setting": setting, "repeat": repeat}
            options = {name: getattr(config, name) for name in RECORDED}
            lines.add({**labels, **options, "levels": config.phases, **figures})
        engine.close()
        del engine  # frees its memory before the next one measures what is free
        gc.collect()
        torch.cuda.empty_cache()
    rows = summary(lines.all)
    print(table((*COLUMNS, *phase_columns(config.phases)), rows))
    lines.print(hidden=["answers", "token_ms"])


def read_work(config: LoadTraceConfig) -> list[list[Task]]:
    """The tasks of each phase."""
    counts = [config.requests or max(8, 2 * level) for level in config.phases]
    work = config.workload(input_len=config.input_len, output_len=config.output_len)
    tasks = iter(work.tasks(sum(counts), str(config.seed)))
    return [[next(tasks) for _ in range(size)] for size in counts]


def warm_up(engine: Engine, config: LoadTraceConfig, work: Sequence[Sequence[Task]]) -> None:
    """Short answers to as many requests at once as there will ever be."""
    streams = Streams(engine)
    tasks = [task for phase in work for task in phase][: max(config.phases)]
    params = SamplingParams(max_tokens=WARMUP_TOKENS, temperature=config.temperature, seed=config.seed, ignore_eos=True)
    for index, task in enumerate(tasks):
        streams.add(Request(id=str(index), prompt=task.prompt, params=params, namespace="warm-up"))
    streams.finish()


def measure(engine: Engine, config: LoadTraceConfig, work: Sequence[Sequence[Task]], repeat: int) -> dict[str, Any]:
    """Runs the trace once. Prompts of a repeat share cached text with no other."""
    streams = Streams(engine)
    start_s = time.perf_counter()
    begins = run_phases(streams, config, work, f"repeat {repeat}")
    streams.finish()
    end_s = time.perf_counter()
    seconds = end_s - start_s
    all_streams = list(streams.all.values())
    total = num_tokens(all_streams, start_s, end_s)
    times = zip(config.phases, begins, [*begins[1:], end_s], strict=True)
    phases = [phase_figures(all_streams, *phase) for phase in times]
    return {
        "requests": len(all_streams),
        "step_time_error": round(engine.metrics()["step_time_error"], 4),
        "total_s": round(seconds, 3),
        "tokens": total,
        "tok_s": round(total / seconds, 2),
        "accept_length": accept_length(all_streams),
        "phases": phases,
        "token_ms": [token_ms(stream) for stream in all_streams],
        "answers": [zlib.crc32(repr(stream.tokens).encode()) for stream in all_streams],
    }


def run_phases(
    streams: Streams, config: LoadTraceConfig, work: Sequence[Sequence[Task]], namespace: str
) -> list[float]:
    """Returns when each phase began. Answers of the last one are still open then."""
    begins = list[float]()
    seeds = count(config.seed)
    params = {name: getattr(config, name) for name in ("temperature", "ignore_eos")}
    for index, (level, tasks) in enumerate(zip(config.phases, work, strict=True)):
        streams.wait_for_room(level)
        begins.append(time.perf_counter())
        for task in tasks:
            seed = next(seeds)
            sampling = SamplingParams(max_tokens=task.max_tokens, seed=seed, **params)
            salt = task_namespace(f"{namespace}, phase {index}", task)
            streams.add(Request(id=str(seed), prompt=task.prompt, params=sampling, namespace=salt))
            streams.wait_for_room(level)
    return begins


def phase_figures(streams: Sequence[Stream], level: int, begin_s: float, end_s: float) -> dict[str, Any]:
    """`requests` started in the phase; gaps are times between two outputs of a request."""
    gaps = sorted(gaps_ended(streams, begin_s, end_s))
    seconds = end_s - begin_s
    return {
        "level": level,
        "requests": sum(begin_s <= stream.added_s < end_s for stream in streams),
        "seconds": round(seconds, 4),
        "tok_s": round(num_tokens(streams, begin_s, end_s) / seconds, 2),
        "gap_ms_p50": milliseconds(median(gaps)) if gaps else None,
        "gap_ms_p99": milliseconds(gaps[int(0.99 * len(gaps))]) if gaps else None,
    }


def token_ms(stream: Stream) -> float | None:
    """The time per token after the first output; None if there are none."""
    first = stream.arrivals[0]
    count = sum(arrival.num_tokens for arrival in stream.arrivals[1:])
    return milliseconds((stream.arrivals[-1].time_s - first.time_s) / count) if count else None


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
        row["regret"] = regret(by_setting, row["setting"])
    return rows


def regret(by_setting: Mapping[str, Sequence[Mapping[str, Any]]], setting: str) -> float | None:
    """The mean of requests, over all repeats; None without another setting."""
    times = {name: [ms for line in runs for ms in line["token_ms"]] for name, runs in by_setting.items()}
    rows = [row for row in zip(times.pop(setting), *times.values(), strict=True) if None not in row]
    return mean(row[0] / min(row[1:]) - 1 for row in rows) if times and rows else None


def phase_speeds(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Tokens per second of each phase, the median over repeats."""
    speeds = [[phase["tok_s"] for phase in line["phases"]] for line in runs]
    return [median(phase) for phase in zip(*speeds, strict=True)]


def num_identical(plain: Sequence[Mapping[str, Any]], drafted: Sequence[Mapping[str, Any]]) -> int:
    """Equal answers, over all repeats."""
    runs = zip(plain, drafted, strict=True)
    return sum(a == b for before, after in runs for a, b in zip(before["answers"], after["answers"], strict=True))


def phase_columns(levels: Sequence[int]) -> list[tuple[str, str, str]]:
    """Tokens per second by phase."""
    return [(f"at {level}", f"phase {index}", ".0f") for index, level in enumerate(levels)]


main = partial(run, trace, LoadTraceConfig, "bench/load_trace.py")

if __name__ == "__main__":
    main()
