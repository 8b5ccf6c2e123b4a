"""CPU serving beside busy processes: how much of the idle machine's speed is left.

    python bench/busy.py [--processes 1] [--draft runs/demo/draft/best] [--repeats 3]

Sends the same questions to one server, alternately with nothing else running and beside processes that only compute.
The last line of the output is JSON: tokens per second of either, medians over the repeats, and their ratio.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median

from slipstream.bench.server import running_server
from slipstream.config import parse
from slipstream.serve.bench import read_prompts
from slipstream.serve.load import Prompt, run_load


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyConfig:
    """Options of the benchmark."""

    target: str = "assets/tiny-target"
    """Target to serve."""
    draft: str = "none"
    """Draft to serve it with."""
    processes: int = 1
    """Busy processes beside the server."""
    prompts: str = "assets/gsm8k.jsonl.gz"
    """File of prompts."""
    num_prompts: int = 24
    """Prompts of the file to send each time."""
    concurrency: int = 8
    """Requests open at once."""
    max_tokens: int = 96
    """Longest answer."""
    repeats: int = 3
    """Measurements of either kind; their median counts."""

    def __post_init__(self) -> None:
        for name in ("processes", "num_prompts", "concurrency", "max_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


def measure(config: BusyConfig) -> tuple[list[float], list[float]]:
    """Tokens per second of every repeat: on an idle machine, and beside the busy processes."""
    prompts = read_prompts(config.prompts, config.num_prompts)
    command = [sys.executable, "-m", "slipstream.serve.cli", "--target", config.target, "--draft", config.draft]
    idle, busy = list[float](), list[float]()
    with running_server(command) as base_url:
        speed(base_url, prompts, config)  # fills the prefix cache
        for _ in range(config.repeats):
            idle.append(speed(base_url, prompts, config))
            with busy_processes(config.processes):
                busy.append(speed(base_url, prompts, config))
            print(f"idle {idle[-1]:.0f} tok/s, busy {busy[-1]:.0f} tok/s", flush=True)
    return idle, busy


def speed(base_url: str, prompts: Sequence[Prompt], config: BusyConfig) -> float:
    result = run_load(
        base_url,
        prompts,
        concurrency=config.concurrency,
        num_warmup=2,
        max_tokens=config.max_tokens,
        temperature=0.0,
    )
    if result.errors:
        raise ValueError(f"{len(result.errors)} requests failed, the first with: {result.errors[0]}")
    return result.tokens_per_second


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that use all of a core each."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(argv: Sequence[str] | None = None) -> None:
    config = parse(BusyConfig, argv, prog="bench/busy.py", description="CPU serving beside busy processes.")
    try:
        idle, busy = measure(config)
    except (ValueError, OSError) as error:
        raise SystemExit(f"bench/busy.py: error: {error}") from error
    speeds = {"idle_tok_s": round(median(idle), 1), "busy_tok_s": round(median(busy), 1)}
    print(json.dumps({**asdict(config), **speeds, "ratio": round(median(busy) / median(idle), 3)}))


if __name__ == "__main__":
    main()
