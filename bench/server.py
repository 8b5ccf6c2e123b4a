"""A server of our own for as long as a measurement lasts."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.request import urlopen

START_SECONDS = 600.0


@contextmanager
def running_server(command: Sequence[str], start_seconds: float = START_SECONDS) -> Iterator[str]:
    """Starts `command` on a free port and yields its base URL once it is healthy; ends it afterwards."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    base_url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([*command, "--port", str(port)], stdout=sys.stderr)
    try:
        wait_until_healthy(process, base_url, start_seconds)
        yield base_url
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait_until_healthy(process: "subprocess.Popen[bytes]", base_url: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ValueError(f"the server ended with status {process.returncode} before it was ready")
        try:
            with urlopen(f"{base_url}/health", timeout=5):
                return
        except OSError:
            pass  # it is not listening or not ready yet
        time.sleep(0.2)
    raise ValueError(f"the server was not ready after {seconds:.0f} s")
