"""Measures an OpenAI-compatible server: speed, latency and, if its answers tell, acceptance.

    python -m slipstream.serve.bench --prompts questions.jsonl --base-url http://127.0.0.1:8000 --concurrency 1,8

Prompts are JSON lines (also .gz) with `prompt` (text or token ids), `messages` (without a final assistant turn) or
`turns` (only the first is sent). Every level of concurrency sends the same prompts, so a prefix cache has them from the
second level on. The last line of the output is JSON; the exit status is 1 if any request failed.
"""

import gzip
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.config import parse
from slipstream.models.chat.messages import read_messages
from slipstream.serve.load import LoadResult, Prompt, read_levels, run_load

COLUMNS = (  # heading, key of the summary, factor
    ("conc", "concurrency", 1),
    ("req", "requests", 1),
    ("err", "errors", 1),
    ("tok/s", "tok_s", 1),
    ("latency p50 s", "latency_p50_s", 1),
    ("p99", "latency_p99_s", 1),
    ("ttft p50 ms", "ttft_p50_s", 1000),
    ("p99", "ttft_p99_s", 1000),
    ("itl p50 ms", "itl_p50_s", 1000),
    ("p99", "itl_p99_s", 1000),
    ("accept len", "accept_length", 1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """Options of the load client."""

    prompts: str
    """File of prompts."""
    base_url: str = "http://127.0.0.1:8000"
    """URL of the server, with or without /v1."""
    model: str | None = None
    """Model to request. Default: the first that the server lists."""
    concurrency: str = "1,8"
    """Requests open at once; several comma-separated levels are measured one after another."""
    num_prompts: int = 64
    """Prompts to send at each level, from the beginning of the file."""
    num_warmup: int = 2
    """Requests before each level that are not measured."""
    max_tokens: int = 128
    """Longest answer in tokens."""
    temperature: float = 0.0
    """0: greedy."""
    seed: int = 0
    """Seed of the first request; each further request adds 1."""
    stream: bool = False
    """Stream the answers: measures time to first token and between pieces; costs the client more."""
    ignore_eos: bool = False
    """Request answers of exactly max_tokens; not every server supports this."""

    def __post_init__(self) -> None:
        read_levels(self.concurrency)
        if self.num_prompts < 1:
            raise ValueError(f"num_prompts is {self.num_prompts}; it must be at least 1")


def read_prompts(path: str, count: int) -> list[Prompt]:
    """The first `count` prompts. Raises ValueError naming a line without one."""
    prompts: list[Prompt] = []
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as lines:
        for number, line in enumerate(lines, start=1):
            if len(prompts) == count:
                break
            try:
                prompts.append(read_prompt(json.loads(line)))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise ValueError(f"{path}:{number} has no prompt, messages or turns: {error!r}") from error
    if not prompts:
        raise ValueError(f"{path} is empty; it must hold at least one prompt")
    return prompts


def read_prompt(row: dict[str, Any]) -> Prompt:
    if "prompt" in row:
        return row["prompt"]
    if "turns" in row:
        return [{"role": "user", "content": row["turns"][0]}]
    messages = [{name: message[name] for name in ("role", "content")} for message in read_messages(row["messages"])]
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def table(results: Sequence[LoadResult]) -> str:
    """One line per level; accept rates by position come last."""
    rows = [[*(heading for heading, _, _ in COLUMNS), "accept rate by position"]]
    for summary in (result.summary() for result in results):
        cells = [cell(summary[key], factor) for _, key, factor in COLUMNS]
        rows.append([*cells, " ".join(f"{rate:.2f}" for rate in summary["accept_rate_by_position"]) or "-"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows)


def cell(value: float | None, factor: int) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value * factor:.2f}"


def main(argv: Sequence[str] | None = None) -> None:
    config = parse(BenchConfig, argv, prog="bench", description="Load client for OpenAI-compatible servers.")
    try:
        results = measure(config)
    except (ValueError, OSError) as error:
        print(f"bench: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    print(table(results))
    for message, count in Counter(error for result in results for error in result.errors).most_common():
        print(f"{count} x {message}", file=sys.stderr)
    print(json.dumps({**asdict(config), "results": [result.summary() for result in results]}))
    raise SystemExit(1 if any(result.errors for result in results) else 0)


def measure(config: BenchConfig) -> list[LoadResult]:
    prompts = read_prompts(config.prompts, config.num_prompts)
    fields: dict[str, Any] = {"max_tokens": config.max_tokens, "temperature": config.temperature}
    if config.ignore_eos:  # not every server knows the field
        fields["ignore_eos"] = True
    # With one seed for all, answers would be alike.
    seeds = [{"seed": config.seed + index} for index in range(len(prompts))]
    return [
        run_load(
            config.base_url,
            prompts,
            model=config.model,
            concurrency=level,
            num_warmup=config.num_warmup,
            stream=config.stream,
            each=seeds,
            **fields,
        )
        for level in read_levels(config.concurrency)
    ]


if __name__ == "__main__":
    main()
