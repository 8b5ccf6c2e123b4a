"""Copies conversations with other numbers in the user's messages.

    python data_tools/vary_numbers.py --data questions.jsonl --copies 4 --output more.jsonl

A small set of arithmetic questions is soon used up. The target answers the copies much like the originals, so a draft
sees more of its text. Copies end before their first answer; `slipstream regenerate` generates it. Writes the
originals, then each copy of all, with ids "ID~1", "ID~2", ...; other columns stay.

Invariant: a copy depends on its conversation, its number and the seed alone.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config import check_required, run
from slipstream.data_tools.options import ConversationOptions, check_at_least
from slipstream.data_tools.rows import matches, read_rows
from slipstream.models.files.atomic import atomic_file
from slipstream.models.files.outputs import check_new_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Copy questions with other numbers."""

    REQUIRED = {"output": "the file to write"}

    data: tuple[str, ...] = ()
    """Files whose rows hold `id` and `messages` (a list of role and content)."""
    where: tuple[str, ...] = ()
    """Keep rows with this column value: column=value. Several must all hold."""
    output: str = ""
    """.jsonl file to write."""
    copies: int = 1
    """Copies of each conversation."""
    seed: int = 0
    """Seed of the numbers."""

    def __post_init__(self) -> None:
        check_required(self)
        check_at_least(self, 0, "copies")


def vary(row: Mapping[str, Any], copy: int, seed: int) -> dict[str, Any]:
    """The conversation up to its first answer, every number replaced by one of as many digits."""
    rng = random.Random(f"{seed} {copy} {row['id']}")

    def other(match: re.Match[str]) -> str:
        digits = len(match[0])
        return str(rng.randrange(2 if digits == 1 else 10 ** (digits - 1), 10**digits))

    messages: list[dict[str, Any]] = []
    for message in row["messages"]:
        if message["role"] == "assistant":
            break
        is_varied = message["role"] == "user"
        messages.append({**message, "content": re.sub(r"\d+", other, message["content"])} if is_varied else message)
    return {**row, "id": f"{row['id']}~{copy}", "messages": messages}


def vary_numbers(options: Options) -> None:
    """Raises ValueError if the file exists or the data cannot be read."""
    check_new_file(options.output, {"data": options.data})
    chosen = ConversationOptions(data=options.data, where=options.where)
    read = ((row.place, row.columns()) for row in read_rows(chosen))
    rows = [columns for place, columns in read if matches(columns, chosen.conditions, place)]
    with atomic_file(Path(options.output)) as path, open(path, "w", encoding="utf-8") as file:
        for copy in range(options.copies + 1):
            for row in rows:
                line = vary(row, copy, options.seed) if copy else row
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    print(f"{len(rows) * (options.copies + 1)} conversations: {options.output}")


def main(argv: Sequence[str] | None = None) -> None:
    run(vary_numbers, Options, argv, "data_tools/vary_numbers.py")


if __name__ == "__main__":
    main()
