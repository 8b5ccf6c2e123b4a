"""Seconds from a command to its first result: the first answer of `serve`, the first step of a training program.

    python bench/startup.py --cold --command "serve --target CKPT --draft DRAFT"
    python bench/startup.py --command "accelerate launch train/eagle3.py --config configs/eagle3/tiny.yaml"

--cold gives the program empty caches of Triton, TorchInductor and FlashInfer; else it takes the user's. The program's
own log, on stderr, says what the seconds went into. Ends in one JSON line.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import torch

from slipstream.bench.lines import Lines, origin
from slipstream.config import parse

CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
TIMEOUT = 600.0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupConfig:
    """Options of this benchmark."""

    command: str
    """The program with its options, without --port or --output."""
    cold: bool = False
    """Start with empty caches of compiled kernels."""
    output: str | None = None
    """File to append the JSON line to."""


def main(argv: list[str] | None = None) -> None:
    config = parse(
        StartupConfig, argv, prog="bench/startup.py", description="Seconds from a command to its first result."
    )
    words = shlex.split(config.command)
    scripts = Path(sys.executable).parent
    words[0] = str(scripts / words[0]) if (scripts / words[0]).exists() else words[0]
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: f"{folder}/{cache}" for name, cache in CACHES.items()} if config.cold else {}
        if "serve" in Path(words[0]).name or "slipstream.serve.cli" in words:
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", 0))
                port = listener.getsockname()[1]
            seconds = measure([*words, "--port", str(port)], caches, lambda: has_answered(port))
        else:
            metrics = Path(folder, "run", "metrics.jsonl")
            seconds = measure(
                [*words, "--output", str(metrics.parent)],
                caches,
                lambda: metrics.exists() and metrics.stat().st_size > 0,
            )
    print(f"{seconds:.1f} s")
    lines = Lines(config.output, origin("startup", "cuda" if torch.cuda.is_available() else "cpu"))
    caches_were = "empty" if config.cold else "filled"
    lines.add({"command": config.command, "caches": caches_were, "seconds": round(seconds, 1)})
    lines.print()


def measure(command: list[str], environment: dict[str, str], has_result: Callable[[], bool]) -> float:
    """Ends the program once it has a result. Raises ValueError if it ends without one."""
    began = time.monotonic()
    process = subprocess.Popen(command, env=os.environ | environment, stdout=sys.stderr, start_new_session=True)
    try:
        while not has_result():
            if process.poll() is not None or time.monotonic() - began > TIMEOUT:
                raise ValueError(f"no result after {time.monotonic() - began:.0f} s; exit status {process.poll()}")
            time.sleep(0.05)
        return time.monotonic() - began
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


def has_answered(port: int) -> bool:
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), headers)
    try:
        return urlopen(request, timeout=60).status == 200
    except URLError:
        return False  # it is not listening yet


if __name__ == "__main__":
    main()
