"""Throughput and latency of serving, without a draft and with one in the same run, in this process or over HTTP.

    python bench/serving.py --draft runs/llama31-8b/draft --prompts gsm8k --input-len 512 --output-len 256
    python bench/serving.py --draft CKPT --mode http --concurrency 1,8,32,64 --requests 500 --input-len 1024 \
        --output-len 1024 --range-ratio 0.7
    python bench/serving.py --draft CKPT --simulate-accept-length 2.99 --engine.attention triton --drafter.depth 3

`--engine.NAME` sets any option of the engine (of `serve` with `--mode http`), `--drafter.NAME` one of the drafter. Each
level of concurrency has prompts of its own, the same ones with and without the draft. Prints a table and ends in one
JSON line per level and draft, in which times are milliseconds: `ms` is a round's (the median time between two outputs
of a request), TTFT and ITL are between outputs, which hold several tokens where drafts are accepted.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import gc
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any, Protocol

import torch

from slipstream.bench.gpu import revision
from slipstream.bench.lines import Lines
from slipstream.bench.serving_options import ServingConfig, flags
from slipstream.bench.serving_run import Run, device_name, run_offline
from slipstream.bench.workload import Task, Workload
from slipstream.config import parse
from slipstream.models.pretrained import load_tokenizer
from slipstream.serve.engine import Engine
from slipstream.serve.options import EngineConfig, find_target

WARMUP_TASKS = 2
COLUMNS = (  # heading, key of a line, format
    ("draft", "draft", "s"),
    ("conc", "concurrency", "d"),
    ("req", "requests", "d"),
    ("width", "width", "g"),
    ("tok/s", "tok_s", ".1f"),
    ("speed-up", "speed_up", ".2f"),
    ("accept len", "accept_length", ".2f"),
    ("ms/round", "ms", ".2f"),
    ("floor", "floor_ms", ".2f"),
    ("ttft p50", "ttft_ms_p50", ".1f"),
    ("p99", "ttft_ms_p99", ".1f"),
    ("itl p50", "itl_ms_p50", ".2f"),
    ("p99", "itl_ms_p99", ".2f"),
    ("same answers", "num_identical", "d"),
)


class Measure(Protocol):
    """Answers tasks, `concurrency` at a time. Requests share what was said only with those of their namespace."""

    def __call__(self, tasks: Sequence[Task], concurrency: int, namespace: str = "") -> Run: ...


def measure(config: ServingConfig) -> Iterator[dict[str, Any]]:
    """One line of results per draft and level, the baseline's first, as soon as it is measured."""
    _, path = find_target(EngineConfig(target=config.target, draft=config.draft))
    tokenizer = load_tokenizer(path)
    work = Workload(
        tokenizer=tokenizer,
        kind=config.prompts,
        input_len=config.input_len,
        output_len=config.output_len,
        range_ratio=config.range_ratio,
    )
    baselines: dict[int, Run] = {}
    floors: Iterator[Any] = iter(config.floor_ms or [None] * config.num_lines)
    for draft in config.drafts:
        with measuring(config, draft) as run:
            for level in config.levels:
                run(work.tasks(min(level, WARMUP_TASKS), f"{config.seed}/{level}/warmup"), level)
                count = config.requests or max(8, 4 * level)
                tasks = work.tasks(count, f"{config.seed}/{level}")
                result = run(tasks, level)
                if config.answers is not None:
                    write_answers(config.answers, tasks, result, draft, level, config.temperature)
                if draft == "none":
                    baselines[level] = result
                compared = against(baselines.get(level), draft, result, config)
                yield {**origin(config, draft, level, result), **result.figures(), **compared, "floor_ms": next(floors)}


@contextmanager
def measuring(config: ServingConfig, draft: str) -> Iterator[Measure]:
    """An engine or a server for as long as one draft is measured."""
    options = config.engine_options(draft)
    params = {"temperature": config.temperature, "ignore_eos": config.ignore_eos, "seed": config.seed}
    if config.mode == "http":
        # Imported here: measuring offline needs no HTTP package.
        from slipstream.bench.server import running_server
        from slipstream.bench.serving_http import run_http

        with running_server([str(Path(sys.executable).parent / "serve"), *flags(options)]) as base_url:
            yield lambda tasks, level, name="": run_http(base_url, tasks, level, cache_salt=name, **params)
        return
    engines = [Engine(EngineConfig(**options))]
    title = Path(draft).name
    yield lambda tasks, level, name="": run_offline(engines[0], tasks, level, f"{title} at {level}", name, **params)
    engines.clear()  # the caller still holds the function: free the memory before the next engine looks for it
    gc.collect()
    torch.cuda.empty_cache()


def write_answers(path: str, tasks: Sequence[Task], run: Run, draft: str, level: int, temperature: float) -> None:
    """As token ids."""
    with open(path, "a") as file:
        for task, answer in zip(tasks, run.answers, strict=True):
            row = {"draft": draft, "concurrency": level, "temperature": temperature}
            file.write(json.dumps({**row, "prompt": task.prompt, "answer": answer}) + "\n")


def origin(config: ServingConfig, draft: str, level: int, run: Run) -> dict[str, Any]:
    """What was measured, where and when."""
    on_gpu = torch.cuda.is_available() and config.engine.get("device") != "cpu"
    return {
        "bench": "serving",
        "device": device_name("cuda" if on_gpu else "cpu"),
        "date": date.today().isoformat(),
        "revision": revision(),
        "target": config.target_name,
        "draft": draft,
        "mode": config.mode,
        "concurrency": level,
        "batch": min(level, len(run.answers)),
        "requests": len(run.answers),
        "prompts": config.prompts,
        "input_len": config.input_len,
        "output_len": config.output_len,
        "range_ratio": config.range_ratio,
        "temperature": config.temperature,
        "simulate_accept_length": None if draft == "none" else config.simulate_accept_length,
        "options": {**config.engine, **({} if draft == "none" else {"drafter": config.drafter})},
    }


def against(baseline: Run | None, draft: str, run: Run, config: ServingConfig) -> dict[str, Any]:
    """Speed and answers beside those without the draft at the same level; None where there is nothing to compare."""
    if baseline is None or draft == "none":
        return dict.fromkeys(("speed_up", "identical", "num_identical"))
    speed_up = round(run.completion_tokens / run.wall_s / (baseline.completion_tokens / baseline.wall_s), 3)
    if config.simulate_accept_length is not None:
        return {"speed_up": speed_up, "identical": None, "num_identical": None}
    num_identical = sum(one == other for one, other in zip(baseline.answers, run.answers, strict=True))
    return {"speed_up": speed_up, "identical": num_identical == len(run.answers), "num_identical": num_identical}


def table(lines: Sequence[dict[str, Any]]) -> str:
    rows = [[heading for heading, _, _ in COLUMNS]]
    for line in lines:
        values = line | {"draft": Path(line["draft"]).name}
        rows.append(["-" if values[key] is None else format(values[key], form) for _, key, form in COLUMNS])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows)


def main(argv: Sequence[str] | None = None) -> None:
    config = parse(ServingConfig, argv, prog="bench/serving.py", description="Serving, with a draft and without.")
    lines = Lines(config.output)
    try:
        for line in measure(config):
            lines.add(line)
    except (ValueError, OSError) as error:
        raise SystemExit(f"bench/serving.py: error: {error}") from error
    print(table(lines.all))
    lines.print()


if __name__ == "__main__":
    main()
