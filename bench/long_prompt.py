"""Measures what a long prompt that arrives does to requests that decode.

    python bench/long_prompt.py --draft runs/llama31-8b/draft --prompt-len 8192 --streams 32
    python bench/long_prompt.py --target TARGET --engine.prefill_budget 256

First the long prompts come alone, one after another; then the streams decode, and more long prompts come, each after
some quiet steps. No prompt shares text with an earlier one. For each arrival:

    longest gap   between two outputs of any stream, some part of it before the prompt's first token and after its start
    first token   time from its start to its first token

`quiet gap` is the longest gap in the quiet steps before an arrival, `streams, tok/s` the speed of the streams while the
prompt is computed and in quiet steps; all are medians over arrivals.

Prints a Markdown table, then a JSON line.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, cycle
from statistics import median
from typing import Any, NamedTuple

from slipstream.bench.engines import PromptBenchConfig, label
from slipstream.bench.lines import Lines, milliseconds, origin, table
from slipstream.bench.streams import Stream, Streams, accept_length, gaps_ended, gaps_touching, num_tokens
from slipstream.bench.workload import Task
from slipstream.config import run
from slipstream.serve.engine.build import build_engine
from slipstream.serve.options import EngineConfig, check_at_least
from slipstream.serve.request import Request, SamplingParams

WARMUP_ARRIVALS = 1  # alone, and again beside the streams; they compile what is not captured
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
    sizes |= {name: getattr(config, name) for name in ("draft", "prompts", "engine", "drafter")}
    shared = {**origin("long_prompt", config.device), "target": config.target_name}
    lines = Lines(config.output, shared | sizes)
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


if __name__ == "__main__":
    run(long_prompts, LongPromptConfig, "bench/long_prompt.py")
