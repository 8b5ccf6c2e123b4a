"""What the demo refuses before it deletes or runs anything, and which questions it takes."""

import gzip
import json
from pathlib import Path

import pytest

from slipstream.bench.demo import QUESTIONS, DemoConfig, choose_questions


@pytest.mark.parametrize("name", ["train_questions", "heldout_questions", "max_tokens"])
def test_nothing_to_do_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{name} is 0; it must be at least 1$"):
        DemoConfig(output=str(tmp_path), **{name: 0})


def test_only_an_earlier_demo_is_replaced(tmp_path: Path) -> None:
    output = tmp_path / "work"
    DemoConfig(output=str(output))
    output.mkdir()
    DemoConfig(output=str(output))
    (output / "thesis.txt").write_text("years")
    for taken in (output, output / "thesis.txt"):
        with pytest.raises(ValueError, match="exists and is no earlier demo's; name another folder"):
            DemoConfig(output=str(taken))
    (output / "questions.jsonl").write_text("")
    DemoConfig(output=str(output))


def test_questions_are_the_first_of_each_split(tmp_path: Path) -> None:
    with gzip.open(QUESTIONS, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    chosen = choose_questions(DemoConfig(output=str(tmp_path), train_questions=5, heldout_questions=3))
    for split, count in (("train", 5), ("heldout", 3)):
        assert [row for row in chosen if row["split"] == split] == [row for row in rows if row["split"] == split][
            :count
        ]
    with pytest.raises(ValueError, match="heldout_questions is 382; the bundled file has 381"):
        choose_questions(DemoConfig(output=str(tmp_path), heldout_questions=382))
