"""Writes results as JSON lines: to a file as soon as each is measured, and to the screen at the end."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from slipstream.serve.measure.tables import table as table


class Lines:
    """Collects results. The fields in `shared` are put in front of each."""

    def __init__(self, output: str | Path | None, shared: Mapping[str, Any] | None = None) -> None:
        """`output`: file to append to, or None to print only."""
        self.output = output
        self.shared = shared or {}
        self.all: list[dict[str, Any]] = []

    def add(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the whole line."""
        line = {**self.shared, **result}
        self.all.append(line)
        if self.output is not None:
            with open(self.output, "a") as file:
                file.write(json.dumps(line) + "\n")
        return line

    def print(self, hidden: Iterable[str] = ()) -> None:
        """Prints every line without the keys in `hidden`."""
        for line in self.all:
            print(json.dumps({key: value for key, value in line.items() if key not in hidden}))


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Reads the lines of an interrupted run, if any, and removes an incomplete last line from the file."""
    path = Path(path)
    text = path.read_text() if path.exists() else ""
    lines = text[: text.rfind("\n") + 1]
    if lines != text:
        path.write_text(lines)
    return [json.loads(line) for line in lines.splitlines()]


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


def origin(bench: str, device: str) -> dict[str, str]:
    """Names the benchmark, device, date and revision. `device`: "cuda" or "cpu"."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "bench": bench,
        "device": device_name(device),
        "date": date.today().isoformat(),
        "revision": git.stdout.strip() or "unknown",
    }


def device_name(kind: str) -> str:
    """The device's name in results. `kind`: "cuda" or "cpu"."""
    if kind == "cuda":
        import torch  # not needed by programs that only send requests

        return torch.cuda.get_device_name()
    return f"{len(os.sched_getaffinity(0))} CPU cores, {platform.machine()}"
