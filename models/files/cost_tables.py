"""Times of a server's steps, measured at its start-up, and the files that keep them (serve/engine/cost_files.py).
Imports no torch."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 2  # version of the files and of the measurement; a server measures times of other versions again
MODES = ("plain", "all")  # steps that sample by temperature alone, and those with filters or penalties
SLOWER = 1.02  # a pass counts as slower than one of more rows from there on


@dataclass(frozen=True)
class CostTables:
    """Times in ms measured at start-up, by mode (see MODES)."""

    target: Mapping[str, Mapping[int, float]]  # by rows of the pass
    draft: Mapping[str, Mapping[tuple[int, int], float]]  # by requests and width; none: drafts take no time

    def to_json(self) -> dict[str, Any]:
        return {
            "target": {mode: [[rows, ms] for rows, ms in sorted(table.items())] for mode, table in self.target.items()},
            "draft": {mode: [[*key, ms] for key, ms in sorted(table.items())] for mode, table in self.draft.items()},
        }

    def without_slow(self) -> "CostTables":
        """Leaves out target passes that take longer than some with more rows, as libraries compute some numbers of rows
        slowly."""
        table = self.target["plain"]
        sizes = list[int]()
        for rows in sorted(table, reverse=True):
            if not sizes or table[rows] < SLOWER * min(table[size] for size in sizes):
                sizes.append(rows)
        target = {
            mode: {rows: ms for rows, ms in times.items() if rows in sizes} for mode, times in self.target.items()
        }
        return CostTables(target, self.draft)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "CostTables":
        """Raises ValueError if that is not what `to_json` makes."""
        try:
            target = {mode: {int(rows): float(ms) for rows, ms in data["target"][mode]} for mode in MODES}
            draft = {
                mode: {(int(requests), int(width)): float(ms) for requests, width, ms in data["draft"][mode]}
                for mode in MODES
            }
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no tables of step times: {error!r}") from error
        times = [ms for table in target.values() for ms in table.values()]
        times += [ms for table in draft.values() for ms in table.values()]
        if not all(target.values()) or not all(0 < ms < float("inf") for ms in times):
            raise ValueError("no tables of step times: a time is missing, or not above 0, or infinite")
        if target["plain"].keys() != target["all"].keys() or draft["plain"].keys() != draft["all"].keys():
            raise ValueError("no tables of step times: those with filters and those without have other sizes")
        return cls(target, draft)

    def check_sizes(self, target: Collection[int], draft: Collection[tuple[int, int]]) -> None:
        """Raises ValueError unless these are the sizes of the tables."""
        if self.target["plain"].keys() != set(target) or self.draft["plain"].keys() != set(draft):
            raise ValueError("the step times are those of passes of other sizes")


def read_tables(path: Path) -> CostTables:
    """The tables in a file that a server has written. Raises ValueError for any other file."""
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}, and this version reads {FORMAT}")
        return CostTables.from_json(data["tables"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no step times of a server ({error})") from error
