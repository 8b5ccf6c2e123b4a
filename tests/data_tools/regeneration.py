"""Runs of `slipstream regenerate`, and the answers that the stand-ins of fake_answers.py must leave in its file."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.data_tools import regenerate
from slipstream.data_tools.dialogue import row_seed
from slipstream.tests.data_tools.chats import chat, write_jsonl
from slipstream.tests.data_tools.fake_answers import reply

ROWS: list[dict[str, Any]] = [{"id": f"row{n}", "messages": chat(f"What is {n}?", "unknown")} for n in range(30)]
ROWS[4]["messages"] = chat("Hello", "unknown", "How are you?", "unknown", "Are you?")
ROWS[9]["messages"] = [{"role": "system", "content": "You are fine."}, *chat("Hello")]


def run(folder: Path, *options: object, rows: list[Any] = ROWS) -> list[dict[str, Any]]:
    data = write_jsonl(folder / "rows.jsonl", rows)
    regenerate.main(["--data", str(data), "-o", str(folder / "out.jsonl"), *map(str, options)])
    return lines(folder)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out.jsonl.report").read_text())


def answered(row: dict[str, Any], seed: int = 0) -> list[dict[str, str]]:
    """The conversation as the stand-ins complete it."""
    messages: list[dict[str, str]] = []
    for message in row["messages"]:
        if message["role"] != "assistant":
            messages.append(message)
        if message["role"] == "user":
            text = reply(message["content"], row_seed(seed, row["id"]))
            messages.append({"role": "assistant", "content": text})
    return messages


EXPECTED = [answered(row) for row in ROWS]


def error(capsys: pytest.CaptureFixture[str], folder: Path, *options: object, rows: list[Any] = ROWS) -> str:
    with pytest.raises(SystemExit) as caught:
        run(folder, *options, rows=rows)
    assert caught.value.code != 0
    return capsys.readouterr().err.strip().splitlines()[-1]
