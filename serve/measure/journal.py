"""Keeps what a measurement has found so far, so that an interrupted one continues.

Invariant: the first line of the file holds the options that decide what is measured, every other line one result, and
every line is whole: what a killed writer left unfinished is cut off.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from slipstream.models.files.atomic import open_locked

OPTIONS = "options"


class Journal:
    """The results in `path`, made if missing. A context manager; locks the file.

    Raises ValueError, and leaves the file as it is, if another process writes it, if it is not one of `program`'s, or
    if it was begun with other options. `anew` empties a file of `program`.
    """

    def __init__(self, path: Path, program: str, options: Mapping[str, Any], *, anew: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.results: list[dict[str, Any]] = []
        wanted = json.loads(json.dumps(options))  # as it comes back from the file
        self._file = open_locked(path)
        try:
            begun = self._read(program)
            if begun is not None and not anew:
                self._check(begun, wanted)
            if begun is None or anew:
                self._file.truncate(0)
                self.results = []
                self._write({"program": program, OPTIONS: wanted})
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read(self, program: str) -> dict[str, Any] | None:
        """Fills `results`, cuts off an unfinished line; the options of the earlier run, if there was one."""
        self._file.seek(0)
        lines = self._file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        try:
            head, *self.results = [json.loads(line) for line in whole] or [{"program": program, OPTIONS: None}]
            if head["program"] != program:
                raise ValueError
            options = head[OPTIONS]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} is not a file of {program}; name another output") from error
        self._file.truncate(sum(map(len, whole)))
        return options

    def _check(self, begun: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        for name, value in wanted.items():
            if begun.get(name) != value:
                raise ValueError(
                    f"{name} is {value!r}, but {self.path} was begun with {begun.get(name)!r}; use that, name another "
                    "output, or add --overwrite"
                )

    def add(self, result: Mapping[str, Any]) -> None:
        self.results.append(dict(result))
        self._write(result)

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
