"""What a benchmark ends in: JSON lines, printed at the end, and in a file as soon as each is measured."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Lines:
    """Results so far. `shared` goes before each."""

    def __init__(self, output: str | Path | None, shared: Mapping[str, Any] | None = None) -> None:
        """`output`: file to append to; None: only print."""
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

    def print(self) -> None:
        for line in self.all:
            print(json.dumps(line))
