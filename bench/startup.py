"""Seconds from a command to its first result: the first answer of `serve`, the first step of a training program.

    python bench/startup.py --cold --command "serve --target CKPT --draft DRAFT"
    python bench/startup.py --command "accelerate launch train/eagle3.py --config configs/eagle3/tiny.yaml"

--cold gives the program empty caches of Triton, TorchInductor and FlashInfer; else it takes the user's. The program's
own log, on stderr, says what the seconds went into. Ends in one JSON line.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.bench.lines import Lines, origin
from slipstream.bench.server import START_SECONDS, running_server
from slipstream.config import run
from slipstream.serve.load import run_load

CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupConfig:
    """Seconds from a command to its first result."""

    command: str
    """The program with its options, without --port or --output."""
    cold: bool = False
    """Start with empty caches of compiled kernels."""
    output: str | None = None
    """File to append the JSON line to."""


def startup(config: StartupConfig) -> None:
    words = shlex.split(config.command)
    scripts = Path(sys.executable).parent
    words[0] = str(scripts / words[0]) if (scripts / words[0]).exists() else words[0]
    is_server = "serve" in Path(words[0]).name or "slipstream.serve.cli" in words
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: f"{folder}/{cache}" for name, cache in CACHES.items()} if config.cold else {}
        seconds = (first_answer if is_server else first_step)(words, os.environ | environment, Path(folder, "run"))
    print(f"{seconds:.1f} s")
    lines = Lines(config.output, origin("startup", "cuda" if torch.cuda.is_available() else "cpu"))
    caches_were = "empty" if config.cold else "filled"
    lines.add({"command": config.command, "caches": caches_were, "seconds": round(seconds, 1)})
    lines.print()


def first_answer(command: list[str], environment: dict[str, str], _output: Path) -> float:
    began = time.monotonic()
    with running_server(command, environment) as server:
        answered = run_load(server.url, [[5, 6, 7, 8]], max_tokens=8, temperature=0.0)
        seconds = time.monotonic() - began
    if answered.errors:
        raise ValueError(f"the first request failed: {answered.errors[0]}")
    return seconds


def first_step(command: list[str], environment: dict[str, str], output: Path) -> float:
    """Ends the program once it has a result. Raises ValueError if it ends without one."""
    began = time.monotonic()
    metrics = output / "metrics.jsonl"
    command = [*command, "--output", str(output)]
    process = subprocess.Popen(command, env=environment, stdout=sys.stderr, start_new_session=True)
    try:
        while not metrics.exists() or metrics.stat().st_size == 0:
            if process.poll() is not None or time.monotonic() - began > START_SECONDS:
                raise ValueError(f"no result after {time.monotonic() - began:.0f} s; exit status {process.poll()}")
            time.sleep(0.05)
        return time.monotonic() - began
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


if __name__ == "__main__":
    run(startup, StartupConfig, "bench/startup.py")
