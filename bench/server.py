"""Runs `serve` for the length of a measurement.

    python -m slipstream.bench.server '{"target": "CKPT", "simulate_accept_length": 2.99}' --port 8000

serves with fields of ServeConfig, those without a flag of `serve` among them.
"""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.request import urlopen

from slipstream.serve.cli import run
from slipstream.serve.http.engine_client import EngineClient
from slipstream.serve.options import ServeConfig

START_SECONDS = 600.0


class Server(NamedTuple):
    url: str
    process: "subprocess.Popen[bytes]"


@contextmanager
def running_server(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Starts `command` on a free port, yields the server once it is healthy and stops it by SIGTERM afterwards.

    `environment`: of the server; None: this process's.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    base_url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([*command, "--port", str(port)], env=environment, stdout=sys.stderr)
    try:
        wait_until_healthy(process, base_url)
        yield Server(base_url, process)
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait_until_healthy(process: "subprocess.Popen[bytes]", base_url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ValueError(f"the server ended with status {process.returncode} before it was ready")
        try:
            with urlopen(f"{base_url}/health", timeout=5):
                return
        except OSError:
            pass  # it is not listening or not ready yet
        time.sleep(0.05)
    raise ValueError(f"the server was not ready after {START_SECONDS:.0f} s")


def serve_command(options: Mapping[str, Any]) -> list[str]:
    """The command of a server with these fields of ServeConfig; `running_server` adds the port."""
    return [sys.executable, "-m", "slipstream.bench.server", json.dumps(options)]


if __name__ == "__main__":
    raise SystemExit(run(ServeConfig(**json.loads(sys.argv[1]), port=int(sys.argv[3])), EngineClient()))
