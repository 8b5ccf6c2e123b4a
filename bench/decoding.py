"""Measures requests that decode: what their features cost, and what a long prompt that arrives does to them.

    python bench/decoding.py features --draft runs/llama31-8b/draft --levels 1,8,32 --output runs/lines.jsonl
    python bench/decoding.py long-prompt --draft runs/llama31-8b/draft --prompt-len 8192 --streams 32
    python bench/decoding.py long-prompt --target TARGET --engine.prefill_budget 256

`features`: in each turn one engine answers the same questions without features, then with one after another. Steps
count from when all requests decode until the first one ends. `share` is how many of the requests have the feature; 1 of
many shows what the others pay for it. `stages, us` is the time of the host's stages in a step, which find what grammars
allow. The grammar "any text" allows every text, so tokens and acceptance stay as they are.

`long-prompt`: first the long prompts come alone, one after another; then the streams decode, and more long prompts
come, each after some quiet steps. No prompt shares text with an earlier one. For each arrival:

    longest gap   between two outputs of any stream, some part of it before the prompt's first token and after its start
    first token   time from its start to its first token

`quiet gap` is the longest gap in the quiet steps before an arrival, `streams, tok/s` the speed of the streams while the
prompt is computed and in quiet steps; all are medians over arrivals.

Prints a Markdown table, then JSON lines.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle
from statistics import median
from typing import Any, NamedTuple

from slipstream.bench.engines import PromptBenchConfig, label
from slipstream.bench.lines import Lines, milliseconds, origin, table
from slipstream.bench.streams import Stream, Streams, accept_length, gaps_ended, gaps_touching, num_tokens
from slipstream.bench.workload import Task
from slipstream.config import run
from slipstream.serve.engine.build import build_engine
from slipstream.serve.engine.engine import Engine
from slipstream.serve.load import read_levels
from slipstream.serve.options import EngineConfig, check_at_least
from slipstream.serve.request import Grammar, Request, SamplingParams

WARMUP_ARRIVALS = 1  # alone, and again beside the streams; they compile what is not captured
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "kind": {"enum": ["purchase", "refund", "transfer"]},
        "amounts": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 20},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "note": {"type": ["string", "null"]},
    },
    "required": ["name", "kind", "amounts", "zip", "note"],
}
FEATURES: dict[str, dict[str, Any]] = {
    "penalties": {"frequency_penalty": 0.2, "presence_penalty": 0.1, "repetition_penalty": 1.05},
    "bias": {"logit_bias": {17: 1.0, 18: -1.0, 19: 0.5}},
    "logprobs of 5": {"logprobs": 5},
    "any text": {"grammar": Grammar("regex", r"[\s\S]*")},
    "schema": {"grammar": Grammar("json_schema", json.dumps(SCHEMA))},
}
FEATURE_COLUMNS = (  # heading, key of a line, format
    ("feature", "feature", "s"),
    ("requests", "requests", "d"),
    ("share", "share", "d"),
    ("ms a step", "ms", ".3f"),
    ("without", "plain_ms", ".3f"),
    ("ratio", "ratio", ".3f"),
    ("stages, us", "stages_us", ".0f"),
    ("tokens a step", "tokens", ".2f"),
    ("without", "plain_tokens", ".2f"),
)
ARRIVAL_COLUMNS = (
    ("draft", "draft", "s"),
    ("streams", "streams", "d"),
    ("prompt", "prompt_len", "d"),
    ("longest gap, ms", "gap_ms", ".2f"),
    ("quiet gap", "quiet_gap_ms", ".2f"),
    ("first token, ms", "first_token_ms", ".1f"),
    ("alone", "alone_ms", ".1f"),
    ("ratio", "ratio", ".2f"),
    ("streams, tok/s", "tok_s", ".0f"),
    ("quiet", "quiet_tok_s", ".0f"),
    ("accept length", "accept_length", ".2f"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturesConfig(PromptBenchConfig):
    """Cost of features of requests."""

    levels: str = "1,8,32"
    """Requests at once, separated by commas."""
    features: list[str] = field(default_factory=lambda: list(FEATURES))
    """Features to measure."""
    max_tokens: int = 96
    """Longest answer in tokens."""
    turns: int = 5
    """Turns, each with new questions; the first is not counted."""

    def __post_init__(self) -> None:
        self.check_prompts()
        read_levels(self.levels)
        check_at_least(self, 2, "max_tokens", "turns")
        unknown = sorted(set(self.features) - set(FEATURES))
        if unknown:
            raise ValueError(f"features has {unknown[0]!r}; choose from {', '.join(FEATURES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPromptConfig(PromptBenchConfig):
    """Long prompts that arrive while others decode."""

    streams: int = 32
    """Requests that decode all the time."""
    stream_len: int = 1024
    """Tokens of a stream's answer; another question follows it."""
    prompt_len: int = 8192
    """Tokens of a long prompt."""
    arrivals: int = 20
    """Long prompts beside the streams, and as many alone."""
    quiet_steps: int = 20
    """Steps of the engine between a prompt's first token and the next arrival."""

    def __post_init__(self) -> None:
        self.check_prompts()
        check_at_least(self, 1, "streams", "stream_len", "prompt_len", "arrivals", "quiet_steps")


class StepTimes(NamedTuple):
    """Means over the steps in which all requests decode."""

    ms: float
    stages_us: float
    tokens: float  # of all requests


class FeatureBench:
    def __init__(self, config: FeaturesConfig, engine: Engine) -> None:
        self.config = config
        self.engine = engine
        self.ids = count()
        self.stages_s = 0.0
        self.read_s = 0.0
        engine.trace = self.trace

    def trace(self, event: str, _: object) -> None:
        now = time.perf_counter()
        if event == "read":
            self.read_s = now
        elif event == "drafted":
            self.stages_s += now - self.read_s

    def answer(self, tasks: Sequence[Task], feature: Mapping[str, Any], share: int) -> StepTimes | None:
        """Answers all tasks, the first `share` of them with the feature. None if no step had all of them decode."""
        streams = Streams(self.engine)
        for index, task in enumerate(tasks):
            options = feature if index < share else {}
            params = SamplingParams(max_tokens=self.config.max_tokens, temperature=0.0, seed=index, **options)
            name = str(next(self.ids))
            streams.add(Request(id=name, prompt=task.prompt, params=params, namespace=name))
        while any(not stream.arrivals for stream in streams.open.values()):
            streams.step()
        steps = 0
        start_s = time.perf_counter()
        stages_s = self.stages_s
        while len(streams.open) == len(tasks):
            streams.step()
            steps += 1
        end_s = time.perf_counter()
        stages_s = self.stages_s - stages_s
        tokens = num_tokens(streams.all.values(), start_s, end_s)
        streams.finish()
        return StepTimes(1e3 * (end_s - start_s) / steps, 1e6 * stages_s / steps, tokens / steps) if steps else None

    def level(self, tasks: Sequence[Task], requests: int) -> Iterator[dict[str, Any]]:
        """Lines of all features for `requests` at once."""
        cases = [(name, share) for name in self.config.features for share in dict.fromkeys((requests, 1))]
        times: dict[tuple[str, int], list[tuple[StepTimes, StepTimes]]] = {case: [] for case in cases}
        for turn in range(self.config.turns):
            batch = tasks[turn * requests : (turn + 1) * requests]
            plain = self.answer(batch, {}, 0)
            for name, share in cases:
                timed = self.answer(batch, FEATURES[name], share)
                if turn and plain is not None and timed is not None:
                    times[name, share].append((timed, plain))
        for (name, share), pairs in times.items():
            if pairs:
                yield {"feature": name, "requests": requests, "share": share, **summary(pairs)}


def summary(pairs: Sequence[tuple[StepTimes, StepTimes]]) -> dict[str, Any]:
    """Medians over turns."""
    timed, plain = (StepTimes(*map(median, zip(*times, strict=True))) for times in zip(*pairs, strict=True))
    ratios = [round(times.ms / plain_times.ms, 4) for times, plain_times in pairs]
    return {
        "ms": round(timed.ms, 4),
        "plain_ms": round(plain.ms, 4),
        "ratio": median(ratios),
        "stages_us": round(timed.stages_us, 1),
        "tokens": round(timed.tokens, 3),
        "plain_tokens": round(plain.tokens, 3),
        "ratios": ratios,
    }


def features(config: FeaturesConfig) -> None:
    levels = read_levels(config.levels)
    engine = build_engine(EngineConfig(**config.engine_options(config.draft, max_running=max(levels))))
    work = config.workload(input_len=0, output_len=config.max_tokens)
    lines = Lines(config.output, shared_fields("features", config))
    bench = FeatureBench(config, engine)
    for requests in levels:
        tasks = work.tasks(requests * config.turns, f"{config.seed}/{requests}")
        for line in bench.level(tasks, requests):
            lines.add(line)
            print(table(FEATURE_COLUMNS, lines.all[-1:], heading=len(lines.all) == 1), flush=True)
    engine.close()
    lines.print()


def shared_fields(bench: str, config: PromptBenchConfig) -> dict[str, Any]:
    options = {name: getattr(config, name) for name in ("draft", "prompts", "engine", "drafter")}
    return {**origin(bench, config.device), "target": config.target_name, **options}


class Arrival(NamedTuple):
    """Figures of one long prompt, in seconds and tokens a second."""

    first_token_s: float
    gap_s: float | None  # the longest; None where no stream had two outputs
    quiet_gap_s: float | None
    tok_s: float
    quiet_tok_s: float


class Load:
    """Streams that decode all the time, and long prompts beside them."""

    def __init__(self, config: LongPromptConfig, streams: Streams, questions: Sequence[Task]) -> None:
        self.config = config
        self.streams = streams
        self.questions = cycle(questions)
        self.ids = count()

    def add(self, prompt: list[int], max_tokens: int) -> Stream:
        name = str(next(self.ids))
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=self.config.seed)
        return self.streams.add(Request(id=name, prompt=prompt, params=params, namespace=name))  # nothing is cached

    def alone(self, prompt: list[int]) -> float:
        """Seconds to the first token of a prompt that comes before the streams."""
        stream = self.add(prompt, 1)
        self.streams.finish()
        return stream.first_token_s

    def start(self) -> None:
        """Starts the streams and steps until all decode. They end one after another, not all at once."""
        config = self.config
        for index in range(config.streams):
            self.add(next(self.questions).prompt, max(1, config.stream_len * (index + 1) // config.streams))
        while any(not stream.arrivals for stream in self.streams.open.values()):
            self.step()

    def step(self) -> None:
        """Steps the engine, and has each stream that ended followed by another one."""
        self.streams.step()
        while len(self.streams.open) < self.config.streams:
            self.add(next(self.questions).prompt, self.config.stream_len)

    def arrive(self, prompt: list[int]) -> Arrival:
        """Quiet steps, then the prompt until its first token, and on until the streams' gaps of that time end."""
        quiet_s = time.perf_counter()
        for _ in range(self.config.quiet_steps):
            self.step()
        arrival = self.add(prompt, 1)
        while not arrival.arrivals:
            self.step()
        start_s = arrival.added_s
        first_s = arrival.arrivals[0].time_s
        waiting = [stream for stream in self.streams.open.values() if stream.arrivals]
        while any(stream.stats is None and stream.arrivals[-1].time_s <= first_s for stream in waiting):
            self.step()
        decoding = [stream for stream in self.streams.all.values() if stream is not arrival]
        return Arrival(
            arrival.first_token_s,
            max(gaps_touching(decoding, start_s, first_s), default=None),
            max(gaps_ended(decoding, quiet_s, start_s), default=None),
            num_tokens(decoding, start_s, first_s) / (first_s - start_s),
            num_tokens(decoding, quiet_s, start_s) / (start_s - quiet_s),
        )


def long_prompts(config: LongPromptConfig) -> None:
    work = config.workload(input_len=64 if config.prompts == "random" else 0, output_len=config.stream_len)
    questions = work.tasks(4 * config.streams, f"{config.seed}/streams")
    number = WARMUP_ARRIVALS + config.arrivals
    work = config.workload(input_len=config.prompt_len, output_len=1)
    prompts = [task.prompt for task in work.tasks(2 * number, f"{config.seed}/arrivals")]
    engine = build_engine(EngineConfig(**config.engine_options(config.draft, max_running=config.streams + 1)))
    load = Load(config, Streams(engine), questions)
    alone = [load.alone(prompt) for prompt in prompts[:number]]
    load.start()
    arrivals = [load.arrive(prompt) for prompt in prompts[number:]]
    load.streams.finish()
    engine.close()
    sizes = {name: getattr(config, name) for name in ("streams", "stream_len", "prompt_len", "arrivals")}
    lines = Lines(config.output, shared_fields("long_prompt", config) | sizes)
    streams = [stream for stream in load.streams.all.values() if len(stream.arrivals) > 1]
    lines.add(figures(alone[WARMUP_ARRIVALS:], arrivals[WARMUP_ARRIVALS:], streams))
    print(table(ARRIVAL_COLUMNS, [{**line, "draft": label(line["draft"])} for line in lines.all]))
    lines.print()


def figures(alone: Sequence[float], arrivals: Sequence[Arrival], streams: Sequence[Stream]) -> dict[str, Any]:
    """Medians over arrivals, and all gaps and times to first tokens."""
    first, gaps, quiet_gaps, speeds, quiet_speeds = (list(values) for values in zip(*arrivals, strict=True))
    gaps_s, quiet_gaps_s = ([gap for gap in values if gap is not None] for values in (gaps, quiet_gaps))
    return {
        "gap_ms": milliseconds(median(gaps_s)) if gaps_s else None,
        "gap_ms_most": milliseconds(max(gaps_s, default=None)),
        "quiet_gap_ms": milliseconds(median(quiet_gaps_s)) if quiet_gaps_s else None,
        "first_token_ms": milliseconds(median(first)),
        "alone_ms": milliseconds(median(alone)),
        "ratio": round(median(first) / median(alone), 3),
        "tok_s": round(median(speeds), 1),
        "quiet_tok_s": round(median(quiet_speeds), 1),
        "accept_length": accept_length(streams),
        "gaps_ms": [milliseconds(gap) for gap in gaps],
        "first_tokens_ms": [milliseconds(seconds) for seconds in first],
        "alones_ms": [milliseconds(seconds) for seconds in alone],
    }


MODES: dict[str, tuple[Any, Any]] = {
    "features": (features, FeaturesConfig),
    "long-prompt": (long_prompts, LongPromptConfig),
}


def main(argv: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else list(argv)
    if not words or words[0] not in MODES:
        sys.exit(f"bench/decoding.py: error: begin with one of {', '.join(MODES)}; then --help lists its options")
    program, config = MODES[words[0]]
    run(program, config, f"bench/decoding.py {words[0]}", words[1:])


if __name__ == "__main__":
    main()
