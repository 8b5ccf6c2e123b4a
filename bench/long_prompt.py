"""Measures what the arrival of a long prompt does to requests that decode, and what they do to it.

    python bench/long_prompt.py --draft runs/llama31-8b/draft --prompt-len 8192 --streams 32
    python bench/long_prompt.py --target TARGET --engine.prefill_budget 256 --output runs/lines.jsonl

First the long prompts come alone, one after another; then so many streams decode, and others like them come, each after
the streams have had some quiet steps. A prompt has no text in common with those before. Of every arrival are taken:

    longest gap   between two outputs of any stream, some part of it before the prompt's first token and after its start
    first token   time from its start to its first token

Prints medians over arrivals as a Markdown table, then one JSON line with all of them. `quiet gap` is the longest gap in
the quiet steps before an arrival, and `streams, tok/s` what the streams get meanwhile and in quiet steps.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from slipstream.bench.lines import Lines, milliseconds, origin, table
from slipstream.bench.serving import default_device, label
from slipstream.bench.streams import Stream, Streams, accept_length, gaps_ended, gaps_touching, num_tokens
from slipstream.bench.workload import KINDS, Task, Workload
from slipstream.config import run
from slipstream.data_tools.options import check_at_least
from slipstream.models.files.checkpoint import resolve
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.serve.engine.build import build_engine
from slipstream.serve.options import EngineConfig, find_target
from slipstream.serve.request import Request, SamplingParams

WARMUP_ARRIVALS = 1  # alone, and again beside the streams; they compile what is not captured
COLUMNS = (  # heading, key of a line, format
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
class LongPromptConfig:
    """Long prompts that arrive while others decode."""

    draft: str = "none"
    """Draft checkpoint, or the name of a drafter that needs none."""
    target: str = ""
    """Target checkpoint. Default: the target of the draft."""
    drafter: dict[str, Any] = field(default_factory=dict)
    """Options of the drafter by name."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of the engine by name."""
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
    prompts: str = "gsm8k"
    """gsm8k or random: text of the streams' questions and of the long prompts."""
    seed: int = 0
    """Seed of prompts."""
    template: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking."""
    output: str | None = None
    """File to append the JSON line to."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "streams", "stream_len", "prompt_len", "arrivals", "quiet_steps")
        if self.prompts not in KINDS and not Path(self.prompts).is_file():
            raise ValueError(f"prompts is {self.prompts!r}; choose one of {', '.join(KINDS)}, or a file of questions")

    def engine_config(self) -> EngineConfig:
        target = self.target or find_target(EngineConfig(draft=self.draft))[0]
        options = {"max_running": self.streams + 1, **self.engine, "target": target}
        return EngineConfig(**options, draft=self.draft, drafter={} if self.draft == "none" else self.drafter)


class Arrived(NamedTuple):
    """Figures of one long prompt, in seconds and tokens a second."""

    first_token_s: float
    gap_s: float | None  # the longest; None where no stream had two outputs
    quiet_gap_s: float | None
    tok_s: float
    quiet_tok_s: float


class Load:
    """Streams that decode all the time, and long prompts beside them."""

    def __init__(self, config: LongPromptConfig, streams: Streams, questions: Sequence[Task]) -> None:
        self.config, self.streams, self.questions = config, streams, cycle(questions)
        self.ids = count()

    def request(self, prompt: list[int], max_tokens: int) -> Request:
        name = str(next(self.ids))
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=self.config.seed)
        return Request(id=name, prompt=prompt, params=params, namespace=name)  # so that nothing is cached before

    def alone(self, prompt: list[int]) -> float:
        """Seconds to the first token of a prompt that comes before the streams."""
        added = self.streams.add(self.request(prompt, 1))
        self.streams.finish()
        return added.first_token_s

    def start(self) -> None:
        """Starts the streams and steps until all decode. They end one after another, not all at once."""
        config = self.config
        for index in range(config.streams):
            length = max(1, config.stream_len * (index + 1) // config.streams)
            self.streams.add(self.request(next(self.questions).prompt, length))
        while any(not stream.arrivals for stream in self.streams.open.values()):
            self.step()

    def step(self) -> None:
        """Steps the engine, and has each stream that ended followed by another one."""
        self.streams.step()
        while len(self.streams.open) < self.config.streams:
            self.streams.add(self.request(next(self.questions).prompt, self.config.stream_len))

    def arrive(self, prompt: list[int]) -> Arrived:
        """Quiet steps, then the prompt until its first token, and on until the streams' gaps of that time end."""
        quiet_s = time.perf_counter()
        for _ in range(self.config.quiet_steps):
            self.step()
        request = self.request(prompt, 1)
        added = self.streams.add(request)
        while not added.arrivals:
            self.step()
        first_s = added.arrivals[0].time_s
        waiting = [stream for stream in self.streams.open.values() if stream.arrivals]
        while any(stream.stats is None and stream.arrivals[-1].time_s <= first_s for stream in waiting):
            self.step()
        decoding = [stream for name, stream in self.streams.all.items() if name != request.id]
        return Arrived(
            added.first_token_s,
            max(gaps_touching(decoding, added.added_s, first_s), default=None),
            max(gaps_ended(decoding, quiet_s, added.added_s), default=None),
            num_tokens(decoding, added.added_s, first_s) / (first_s - added.added_s),
            num_tokens(decoding, quiet_s, added.added_s) / (added.added_s - quiet_s),
        )


def long_prompts(config: LongPromptConfig) -> None:
    questions, prompts = read_work(config)
    engine = build_engine(config.engine_config())
    load = Load(config, Streams(engine), questions)
    alone = [load.alone(prompt) for prompt in prompts_of(prompts, config)]
    load.start()
    arrived = [load.arrive(prompt) for prompt in prompts_of(prompts, config)]
    load.streams.finish()
    engine.close()
    device = "cpu" if config.engine.get("device") == "cpu" else default_device()
    names = ("draft", "target", "streams", "stream_len", "prompt_len", "arrivals", "prompts", "engine", "drafter")
    lines = Lines(config.output, {**origin("long_prompt", device), **{name: getattr(config, name) for name in names}})
    ended = [stream for stream in load.streams.all.values() if len(stream.arrivals) > 1]
    lines.add(figures(alone[WARMUP_ARRIVALS:], arrived[WARMUP_ARRIVALS:], ended))
    print(table(COLUMNS, [{**line, "draft": label(line["draft"])} for line in lines.all]))
    lines.print()


def read_work(config: LongPromptConfig) -> tuple[list[Task], Iterator[list[int]]]:
    """The streams' questions, and long prompts, each other than all before."""
    shared: dict[str, Any] = {
        "tokenizer": load_tokenizer(resolve(config.engine_config().target)),
        "kind": config.prompts,
    }
    shared |= {"template": config.template, "output_len": config.stream_len}
    short = 64 if config.prompts == "random" else 0
    questions = Workload(**shared, input_len=short).tasks(4 * config.streams, f"{config.seed}/streams")
    tasks = Workload(**shared, input_len=config.prompt_len).tasks(
        2 * (config.arrivals + WARMUP_ARRIVALS), f"{config.seed}/arrivals"
    )
    return questions, iter([task.prompt for task in tasks])


def prompts_of(prompts: Iterator[list[int]], config: LongPromptConfig) -> Iterator[list[int]]:
    """The next ones: those that warm up, and one for each arrival."""
    return (next(prompts) for _ in range(WARMUP_ARRIVALS + config.arrivals))


def figures(alone: Sequence[float], arrived: Sequence[Arrived], streams: Sequence[Stream]) -> dict[str, Any]:
    """Medians over arrivals, and every one."""
    first, gaps, quiet_gaps, speeds, quiet_speeds = (list(values) for values in zip(*arrived, strict=True))
    known, quiet = ([gap for gap in values if gap is not None] for values in (gaps, quiet_gaps))
    return {
        "gap_ms": milliseconds(median(known)) if known else None,
        "gap_ms_most": milliseconds(max(known)) if known else None,
        "quiet_gap_ms": milliseconds(median(quiet)) if quiet else None,
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


def main(argv: Sequence[str] | None = None) -> None:
    run(long_prompts, LongPromptConfig, argv, "bench/long_prompt.py")


if __name__ == "__main__":
    main()
