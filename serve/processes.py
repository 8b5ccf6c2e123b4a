"""Child processes of a server: what they are started with, and how they end."""

import os
import signal
import subprocess
import sys


def child_environment() -> dict[str, str]:
    """Returns an environment in which a child finds the modules that this process finds, with -P none in the working
    directory."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Waits for a process, and kills it when it takes longer."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def how_it_ended(code: int) -> str:
    """Says what an exit status means; negative: the signal that ended the process."""
    if code >= 0:
        return f"ended with status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    return f"was killed by signal {-code} ({name})"
