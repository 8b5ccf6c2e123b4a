"""A server of our own for as long as a measurement lasts."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

START_SECONDS = 600.0


@contextmanager
def running_server(command: Sequence[str], start_seconds: float = START_SECONDS) -> Iterator[str]:
    """Starts `command` on a free port and yields its base URL once it is healthy; ends it afterwards."""
    port = free_port()
    base_url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([*command, "--port", str(port)], stdout=sys.stderr)
    try:
        wait_until_healthy(process, base_url, start_seconds)
        yield base_url
    finally:
        process.terminate()
        process.wait(timeout=60)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until_healthy(process: "subprocess.Popen[bytes]", base_url: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ValueError(f"the server ended with status {process.returncode} before it was ready")
        try:
            if httpx.get(f"{base_url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass  # it is not listening yet
        time.sleep(0.2)
    raise ValueError(f"the server was not ready after {seconds:.0f} s")
