"""A JSONL file that grows row by row and survives a kill at any moment.

Invariant: every line in the file is whole; a row that was begun but not ended is cut off when the file is opened again.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.models.atomic import atomic_file, open_locked


class Journal:
    """Rows with an `id`, appended and flushed one by one. `ids` are those in the file. A context manager.

    Locks the file before it reads it or, with `anew`, empties it. Raises ValueError for a file that holds something
    else or that another process is writing; neither is changed.
    """

    def __init__(self, path: Path, *, anew: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.is_new = not path.exists()
        self.ids: set[str] = set()
        self._file = open_locked(path)
        try:
            self._file.truncate(0 if anew else self._read())
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read(self) -> int:
        """Fills `ids`; returns the number of bytes in whole lines."""
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, 1):
            if line.endswith(b"\n"):
                self.ids.add(_row_id(self.path, number, line))
                whole += len(line)
        return whole

    def append(self, row: Mapping[str, Any]) -> None:
        assert row["id"] not in self.ids
        self._file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.ids.add(row["id"])


def sort_rows(path: Path, position: Mapping[str, int]) -> None:
    """Puts the rows in the order of `position`, those without one last: the file no longer shows which came first."""
    places, start = [], 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            places.append((position.get(_row_id(path, number, line), len(position)), start, len(line)))
            start += len(line)
        with atomic_file(path) as temporary, temporary.open("wb") as ordered:
            for _, start, length in sorted(places):
                file.seek(start)
                ordered.write(file.read(length))


def _row_id(path: Path, number: int, line: bytes) -> str:
    try:
        return str(json.loads(line)["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}, line {number}: holds no row with an id; name another file") from error
