"""Markdown tables of measurements."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Columns = Sequence[tuple[str, str, str]]  # heading, key of a line, format


def table(columns: Columns, lines: Iterable[Mapping[str, Any]], *, heading: bool = True) -> str:
    """Returns a Markdown table, or more rows of one. None is shown as "-"."""
    rows = ["| " + " | ".join(name for name, _, _ in columns) + " |", "|---" * len(columns) + "|"] if heading else []
    for line in lines:
        cells = ["-" if line[key] is None else format(line[key], form) for _, key, form in columns]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)
