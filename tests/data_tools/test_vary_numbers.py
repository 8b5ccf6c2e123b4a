"""Copies of questions differ in their numbers and in nothing else."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from slipstream.data_tools.vary_numbers import main

ROWS = [
    {
        "id": "a",
        "split": "train",
        "messages": [
            {"role": "system", "content": "Use 2 lines."},
            {"role": "user", "content": "Ann has 12 pens and buys 7 more for $1,250.05."},
            {"role": "assistant", "content": "19"},
            {"role": "user", "content": "And 3 more?"},
        ],
    },
    {"id": "b", "split": "heldout", "messages": [{"role": "user", "content": "100?"}]},
]


def vary(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    source, output = folder / "rows.jsonl.gz", folder / "out.jsonl"
    output.unlink(missing_ok=True)
    source.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
    main(["--data", str(source), "--output", str(output), *arguments])
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_originals_come_first_and_copies_end_before_the_answer(tmp_path: Path) -> None:
    rows = vary(tmp_path, "--copies", "3")
    assert rows[:2] == ROWS
    assert [row["id"] for row in rows[2:]] == [f"{name}~{copy}" for copy in (1, 2, 3) for name in "ab"]
    assert [[message["role"] for message in row["messages"]] for row in rows[2:4]] == [["system", "user"], ["user"]]
    assert all(row["split"] == "train" for row in rows[2::2])


def test_numbers_change_and_keep_their_length(tmp_path: Path) -> None:
    texts = [row["messages"][1]["content"] for row in vary(tmp_path, "--copies", "20", "--where", "split=train")]
    original = ROWS[0]["messages"][1]["content"]  # type: ignore[index]
    assert len(set(texts)) == 21
    for text in texts:
        assert re.sub(r"\d", "#", text) == re.sub(r"\d", "#", original)
        assert not re.search(r"\b[01] |\b0\d", text.split("$")[0])


def test_a_copy_depends_on_its_conversation_and_seed_alone(tmp_path: Path) -> None:
    rows = vary(tmp_path, "--copies", "2")
    assert vary(tmp_path, "--copies", "1") == rows[:4]
    assert vary(tmp_path, "--copies", "2", "--where", "split=heldout") == rows[1::2]
    assert vary(tmp_path, "--copies", "2", "--seed", "1")[2:] != rows[2:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--copies", "-1"], "copies is -1"),
        (["--where", "part=train"], "no column 'part'"),
        (["--data", "/nowhere.jsonl"], "/nowhere.jsonl does not exist"),
        (["--output", __file__], f"output {__file__} exists; name another file"),
    ],
)
def test_bad_options_end_in_a_sentence(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        vary(tmp_path, *arguments)
    assert message in f"{stop.value.code} {capsys.readouterr().err}"
