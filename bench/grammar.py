"""Measures what drafts of forced tokens gain: answers to one schema, with them and without, in turn.

    python bench/grammar.py --target assets/tiny-target --space_bias -20
    python bench/grammar.py --draft runs/qwen3-8b/draft --schema order.json --requests 8 --output runs/lines.jsonl

Two engines, which differ in `grammar_drafts` alone, answer the same requests in turn, each its number at once. Prints a
Markdown table, then one JSON line. Both must give the same tokens; of two that are equally likely the other may win
where arithmetic is not exact. `forced` is the share of the answers' tokens of which the grammar left no choice where
they were sampled; `host` the time between a step's tokens and the next step's masks, mean over steps.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from slipstream.bench.lines import Lines, origin, table
from slipstream.bench.serving import default_device, label
from slipstream.config import run
from slipstream.data_tools.options import check_at_least
from slipstream.serve.engine.constraints import Constraints
from slipstream.serve.llm import LLM
from slipstream.serve.request import Grammar, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "the number of apples": {"const": 12},
        "the total number of oranges": {"type": "integer", "minimum": 0, "maximum": 99},
        "the price of each box": {"enum": ["less than 10 dollars", "more than 10 dollars"]},
        "explanation": {"const": "There are 12 apples in each box, so the total is the number of boxes times 12"},
        "is the answer more than 50": {"type": "boolean"},
        "the name of the person": {"enum": ["Tom", "Maria"]},
    },
    "additionalProperties": False,
}
EXAMPLE = (
    '{"the number of apples": 12, "the total number of oranges": 7, "the price of each box": "less than 10 dollars", '
    '"explanation": "There are 12 apples in each box, so the total is the number of boxes times 12", '
    '"is the answer more than 50": false, "the name of the person": "Maria"}'
)
SCHEMA["required"] = list(SCHEMA["properties"])  # type: ignore[call-overload]
COLUMNS = (  # heading, key of a line, format
    ("draft", "draft", "s"),
    ("requests", "requests", "d"),
    ("forced", "forced", ".2f"),
    ("tok/s without", "plain_tok_s", ".0f"),
    ("tok/s with", "tok_s", ".0f"),
    ("ratio", "ratio", ".2f"),
    ("accept length without", "plain_accept_length", ".2f"),
    ("with", "accept_length", ".2f"),
    ("host, ms a step, without", "plain_host_ms", ".2f"),
    ("with", "host_ms", ".2f"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConfig:
    """What drafts of forced tokens gain."""

    draft: str = "none"
    """Draft checkpoint, or the name of a drafter that needs none."""
    target: str = ""
    """Target checkpoint. Default: the target of the draft."""
    drafter: dict[str, Any] = field(default_factory=dict)
    """Options of the drafter by name."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of the engines by name. On a GPU two of them must fit: each takes mem_fraction 0.45 unless told."""
    schema: str | None = None
    """File with the JSON schema. Default: an object of six members, three of whose values are free."""
    prompt: str = f"Write the answer as JSON: {EXAMPLE}\nWrite the answer as JSON: "
    """What is asked, without a chat template. Without an example, or the schema in words, a model does not expect what
    the grammar forces, and spells it as it does not otherwise."""
    requests: int = 1
    """Requests at once."""
    rounds: int = 10
    """How often each engine answers them; the first time does not count."""
    temperature: float = 0.0
    """Of all requests."""
    max_tokens: int = 400
    """Of an answer."""
    space_bias: float = 0.0
    """Bias of tokens that are white space alone: small models write a lot of it between the parts of JSON."""
    device: str = field(default_factory=default_device)
    """cuda or cpu."""
    output: str | None = None
    """File to append the JSON line to."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "requests", "max_tokens")
        check_at_least(self, 2, "rounds")


class Watched:
    """An engine, what its answers took, and how long its host stages work."""

    def __init__(self, config: GrammarConfig, *, drafts: bool) -> None:
        options = {"mem_fraction": 0.45, "max_running": max(config.requests, 2), **config.engine}
        named: dict[str, Any] = {
            "target": config.target,
            "draft": config.draft,
            "drafter": config.drafter,
            "device": config.device,
        }
        self.llm = LLM(**named, grammar_drafts=drafts, **options)
        self.seconds, self.host_seconds, self.tokens = list[float](), list[float](), list[list[int]]()
        self.accept_length = 1.0
        self.llm.engine.trace = self._trace
        self._read_at = 0.0

    def _trace(self, event: str, _: object) -> None:
        if event == "read":
            self._read_at = time.perf_counter()
        elif event == "drafted":
            self.host_seconds.append(time.perf_counter() - self._read_at)

    def answer(self, prompts: Sequence[str], params: SamplingParams) -> None:
        start = time.perf_counter()
        answers = self.llm.generate(prompts, params)
        self.seconds.append(time.perf_counter() - start)
        self.tokens = [answer.tokens for answer in answers]
        decoded = sum(answer.stats.completion_tokens - answer.stats.prefills for answer in answers)
        self.accept_length = decoded / max(sum(answer.stats.rounds for answer in answers), 1)

    @property
    def rate(self) -> float:
        """Tokens per second, without the first time."""
        return sum(map(len, self.tokens)) / median(self.seconds[1:])


def forced_share(llm: LLM, grammar: Grammar, tokens: Sequence[int]) -> float:
    """Of an answer's tokens: how many were the only one that the grammar allowed, or began like all others."""
    [stage] = [stage for stage in llm.engine.stages if isinstance(stage, Constraints)]
    assert stage.grammars is not None
    matcher, forced, last = (
        stage.grammars.matcher(stage.grammars.compile(grammar).result(), llm.engine.scheduler.stop_ids),
        0,
        0,
    )
    for token in tokens:
        forced += len(matcher.forced(last, 1)[0])
        matcher.push([token])
        last = token
    return forced / len(tokens)


def measure(config: GrammarConfig) -> dict[str, Any]:
    schema = json.dumps(SCHEMA) if config.schema is None else Path(config.schema).read_text()
    grammar = Grammar("json_schema", schema)
    plain, drafting = Watched(config, drafts=False), Watched(config, drafts=True)
    tokenizer = plain.llm.tokenizer
    spaces = [token for token in range(len(tokenizer)) if str(tokenizer.decode([token])).isspace()]
    bias = dict.fromkeys(spaces, config.space_bias) if config.space_bias else {}
    params = SamplingParams(
        max_tokens=config.max_tokens, temperature=config.temperature, seed=0, grammar=grammar, logit_bias=bias
    )
    prompts = [f"{config.prompt}{index or ''}" for index in range(config.requests)]
    for turn in range(config.rounds):
        for one in (plain, drafting) if turn % 2 else (drafting, plain):
            one.answer(prompts, params)
    return {
        "draft": label(config.draft),
        "requests": config.requests,
        "temperature": config.temperature,
        "forced": float(np.mean([forced_share(drafting.llm, grammar, own) for own in drafting.tokens])),
        "plain_tok_s": plain.rate,
        "tok_s": drafting.rate,
        "ratio": drafting.rate / plain.rate,
        "plain_accept_length": plain.accept_length,
        "accept_length": drafting.accept_length,
        "plain_host_ms": 1000 * float(np.mean(plain.host_seconds)),
        "host_ms": 1000 * float(np.mean(drafting.host_seconds)),
        "tokens": sum(map(len, drafting.tokens)),
        "same_tokens": plain.tokens == drafting.tokens,
        "text": tokenizer.decode(drafting.tokens[0], skip_special_tokens=True),
    }


def grammar_drafts(config: GrammarConfig) -> None:
    lines = Lines(config.output, origin("grammar", config.device))
    line = lines.add(measure(config))
    print(table(COLUMNS, [line]))
    lines.print()


def main(argv: Sequence[str] | None = None) -> None:
    run(grammar_drafts, GrammarConfig, argv, prog="bench/grammar.py")


if __name__ == "__main__":
    main()
