"""Markdown tables of measurements."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

Columns = Sequence[tuple[str, str, str]]  # heading, key of a line, format


def table(
    columns: Columns, lines: Sequence[Mapping[str, Any]], *, heading: bool = True, optional: Collection[str] = ()
) -> str:
    """Returns a Markdown table, or more rows of one. None is shown as "-"; `optional` columns without values are left
    out."""
    empty = {key for key in optional if all(line[key] is None for line in lines)}
    columns = [column for column in columns if column[1] not in empty]
    rows = ["| " + " | ".join(name for name, _, _ in columns) + " |", "|---" * len(columns) + "|"] if heading else []
    for line in lines:
        cells = ["-" if line[key] is None else format(line[key], form) for _, key, form in columns]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)
