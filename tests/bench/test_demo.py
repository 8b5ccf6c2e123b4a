"""What the demo refuses before it deletes or runs anything, and which questions it takes."""

import gzip
import json
import subprocess
from pathlib import Path

import pytest

from slipstream.bench.demo import QUESTIONS, ROOT, DemoConfig, choose_questions, empty_output


@pytest.mark.parametrize("name", ["train_questions", "heldout_questions", "max_tokens"])
def test_nothing_to_do_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{name} is 0; it must be at least 1$"):
        DemoConfig(output=str(tmp_path), **{name: 0})


def test_only_an_earlier_demo_is_replaced(tmp_path: Path) -> None:
    output = tmp_path / "work"
    config = DemoConfig(output=str(output))
    empty_output(config)
    assert [path.name for path in output.iterdir()] == ["demo.json"]
    names = ("questions.jsonl", "answers.jsonl.report", "dataset/report.json", "draft/best/config.json")
    for name in (*names, "draft/step-9/state/optimizer.bin", "draft/.best.tmp/new/model.safetensors"):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).touch()
    empty_output(config)
    assert [path.name for path in output.iterdir()] == ["demo.json"]
    for name in ("thesis.txt", "draft/step-9-good/config.json"):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text("years")
        with pytest.raises(ValueError, match=f"work holds {name} beside an earlier demo and is not replaced"):
            empty_output(config)
        assert (output / name).read_text() == "years"
        (output / name).unlink()
    (output / "demo.json").rename(output / "questions.jsonl")
    with pytest.raises(ValueError, match="is not an earlier demo .*it has no demo.json.* name another folder"):
        empty_output(config)


def test_clean_leaves_the_runs() -> None:
    commands = subprocess.run(["make", "-n", "clean"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert ".venv" in commands
    assert "runs" not in commands


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
