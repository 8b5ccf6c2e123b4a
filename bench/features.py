"""Measures what a request's features cost: milliseconds a step with a feature over those without, in one engine.

    python bench/features.py --draft runs/llama31-8b/draft --levels 1,8,32 --output runs/features.jsonl

In each turn the same questions are answered without features and then with one after another. A step counts while all
requests decode, and until the first one ends. `share` is how many of the requests have the feature; 1 of many shows
what the others pay for it. `masks, us` is the time that the host takes a step to find what grammars allow.
The grammar "any text" allows every text, so tokens and acceptance stay as they are. "schema" is that of a function's
arguments. Prints a Markdown table, then JSON lines.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from slipstream.bench.lines import Lines, origin, table
from slipstream.bench.serving import default_device
from slipstream.bench.workload import Task, Workload
from slipstream.config import run
from slipstream.data_tools.options import check_at_least
from slipstream.models.files.checkpoint import resolve
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.serve.engine.build import build_engine
from slipstream.serve.engine.constraints import Constraints
from slipstream.serve.engine.engine import Engine
from slipstream.serve.load import read_levels
from slipstream.serve.options import EngineConfig, find_target
from slipstream.serve.request import Grammar, Request, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "kind": {"enum": ["purchase", "refund", "transfer"]},
        "amounts": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 20},
        "address": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["city", "zip"],
        },
        "note": {"type": ["string", "null"]},
    },
    "required": ["name", "kind", "amounts", "address", "note"],
}
FEATURES: dict[str, dict[str, Any]] = {
    "penalties": {"frequency_penalty": 0.2, "presence_penalty": 0.1, "repetition_penalty": 1.05},
    "bias": {"logit_bias": {17: 1.0, 18: -1.0, 19: 0.5}},
    "logprobs of 5": {"logprobs": 5},
    "any text": {"grammar": Grammar("regex", r"[\s\S]*")},
    "schema": {"grammar": Grammar("json_schema", json.dumps(SCHEMA))},
}
COLUMNS = (  # heading, key of a line, format
    ("feature", "feature", "s"),
    ("requests", "requests", "d"),
    ("share", "share", "d"),
    ("ms a step", "ms", ".3f"),
    ("without", "plain_ms", ".3f"),
    ("ratio", "ratio", ".3f"),
    ("masks, us", "masks_us", ".0f"),
    ("tokens a step", "tokens", ".2f"),
    ("without", "plain_tokens", ".2f"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturesConfig:
    """What features cost."""

    draft: str = "none"
    """Draft checkpoint, or the name of a drafter that needs none."""
    target: str = ""
    """Target checkpoint. Default: the target of the draft."""
    drafter: dict[str, Any] = field(default_factory=dict)
    """Options of the drafter by name."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of the engine by name, such as width."""
    levels: str = "1,8,32"
    """Requests at once, separated by commas."""
    features: list[str] = field(default_factory=lambda: list(FEATURES))
    """Features to measure."""
    max_tokens: int = 96
    """Longest answer in tokens."""
    turns: int = 5
    """Measure so often, with new questions; the first is not counted."""
    seed: int = 0
    """Seed of questions."""
    template: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking."""
    output: str | None = None
    """File to append the JSON lines to."""

    def __post_init__(self) -> None:
        read_levels(self.levels)
        check_at_least(self, 2, "max_tokens", "turns")
        unknown = sorted(set(self.features) - set(FEATURES))
        if unknown:
            raise ValueError(f"features has {unknown[0]!r}; choose from {', '.join(FEATURES)}")

    def engine_config(self) -> EngineConfig:
        target = self.target or find_target(EngineConfig(draft=self.draft))[0]
        options = {"max_running": max(read_levels(self.levels)), **self.engine, "target": target}
        return EngineConfig(**options, draft=self.draft, drafter={} if self.draft == "none" else self.drafter)


class Timed(NamedTuple):
    """One run of a turn: means over the steps in which all requests decode."""

    ms: float
    masks_us: float
    tokens: float  # of all requests


class Bench:
    def __init__(self, config: FeaturesConfig, engine: Engine) -> None:
        self.config, self.engine = config, engine
        self.masks_s, self.number = 0.0, 0
        for stage in engine.stages:
            if isinstance(stage, Constraints):
                self._time(stage)

    def _time(self, stage: Constraints) -> None:
        find = stage.run

        def timed(*given: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return find(*given, **options)
            finally:
                self.masks_s += time.perf_counter() - start

        stage.run = timed  # type: ignore[method-assign]

    def answer(self, tasks: Sequence[Task], options: Mapping[str, Any], share: int) -> Timed | None:
        """Answers all tasks, the first `share` of them with the options. None: no step had all of them decode."""
        self.number += 1
        for index, task in enumerate(tasks):
            own = options if index < share else {}
            params = SamplingParams(max_tokens=self.config.max_tokens, temperature=0.0, seed=index, **own)
            name = f"{self.number}/{index}"
            self.engine.add(Request(id=name, prompt=task.prompt, params=params, namespace=name))
        started, ended, seconds, masks_s, tokens, steps = set[str](), False, 0.0, 0.0, 0, 0
        while self.engine.has_work:
            counts, start, masks = len(started) == len(tasks) and not ended, time.perf_counter(), self.masks_s
            outputs = self.engine.step()
            started |= {output.request_id for output in outputs if output.tokens}
            ended |= any(output.finish_reason for output in outputs)
            if counts and not ended:
                seconds += time.perf_counter() - start
                masks_s += self.masks_s - masks
                tokens += sum(len(output.tokens) for output in outputs)
                steps += 1
        return Timed(1e3 * seconds / steps, 1e6 * masks_s / steps, tokens / steps) if steps else None

    def level(self, tasks: Sequence[Task], count: int) -> Iterator[dict[str, Any]]:
        """Lines of all features for `count` requests at once."""
        cases = [(name, share) for name in self.config.features for share in dict.fromkeys((count, 1))]
        found: dict[tuple[str, int], list[tuple[Timed, Timed]]] = {case: [] for case in cases}
        for turn in range(self.config.turns):
            own = tasks[turn * count : (turn + 1) * count]
            plain = self.answer(own, {}, 0)
            for name, share in cases:
                timed = self.answer(own, FEATURES[name], share)
                if turn and plain is not None and timed is not None:
                    found[name, share].append((timed, plain))
        for (name, share), pairs in found.items():
            if pairs:
                yield {"feature": name, "requests": count, "share": share, **summary(pairs)}


def summary(pairs: Sequence[tuple[Timed, Timed]]) -> dict[str, Any]:
    """Medians over turns."""
    timed, plain = zip(*pairs, strict=True)
    return {
        "ms": round(median(one.ms for one in timed), 4),
        "plain_ms": round(median(one.ms for one in plain), 4),
        "ratio": round(median(one.ms / other.ms for one, other in pairs), 4),
        "masks_us": round(median(one.masks_us for one in timed), 1),
        "tokens": round(median(one.tokens for one in timed), 3),
        "plain_tokens": round(median(one.tokens for one in plain), 3),
        "ratios": [round(one.ms / other.ms, 4) for one, other in pairs],
    }


def features(config: FeaturesConfig) -> None:
    options = config.engine_config()
    sizes: dict[str, Any] = {"kind": "gsm8k", "input_len": 0, "output_len": config.max_tokens}
    workload = Workload(tokenizer=load_tokenizer(resolve(options.target)), template=config.template, **sizes)
    engine = build_engine(options)
    shared = {**origin("features", default_device()), "target": options.target, "draft": config.draft}
    lines = Lines(config.output, shared | {"options": {**config.engine, "drafter": config.drafter}})
    bench = Bench(config, engine)
    for count in read_levels(config.levels):
        tasks = workload.tasks(count * config.turns, f"{config.seed}/{count}")
        for line in bench.level(tasks, count):
            lines.add(line)
            print(table(COLUMNS, lines.all[-1:], heading=len(lines.all) == 1), flush=True)
    engine.close()
    lines.print()


if __name__ == "__main__":
    run(features, FeaturesConfig, None, "bench/features.py")
