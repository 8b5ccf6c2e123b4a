"""Refusals of the demo before it deletes or runs anything, its questions, and its report."""

import gzip
import json
import subprocess

import pytest

from slipstream.bench.demo import (
    QUESTIONS,
    ROOT,
    DemoConfig,
    bundled_rows,
    choose_questions,
    main,
    open_output,
    split_answers,
)
from slipstream.bench.demo_report import Comparison, write_report
from slipstream.serve.load import Answer, LoadResult
from slipstream.tests.user_errors import user_error


@pytest.mark.parametrize("name", ["train_questions", "heldout_questions", "max_tokens"])
def test_nothing_to_do_is_refused(name, tmp_path):
    with user_error(f"^{name} is 0; give at least 1$"):
        DemoConfig(output=str(tmp_path), **{name: 0})


def test_only_an_earlier_demo_is_replaced(tmp_path):
    output = tmp_path / "work"
    options = {"drafter": "eagle3"}
    open_output(str(output), {"drafter": "dflash"}, {})
    open_output(str(output), options, {})
    assert json.loads((output / "demo.json").read_text()) == options
    assert [path.name for path in output.iterdir()] == ["demo.json"]
    for name in (
        "questions.jsonl",
        "answers.jsonl.report",
        "dataset/report.json",
        "draft/best/config.json",
        "target/tokenizer_config.json",
        "accept/accept.png",
        "samples.jsonl.dropped",
        "draft/step-9/state/optimizer.bin",
        "draft/.best.tmp/new/model.safetensors",
    ):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).touch()
    open_output(str(output), options, {})  # goes on
    assert (output / "questions.jsonl").exists()
    (output / "report.json").touch()
    open_output(str(output), options, {})
    assert [path.name for path in output.iterdir()] == ["demo.json"]
    for name in ("thesis.txt", "draft/step-9-good/config.json"):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text("years")
        with user_error(f"work holds {name} beside an earlier demo and is not replaced"):
            open_output(str(output), options, {})
        assert (output / name).read_text() == "years"
        (output / name).unlink()
    (output / "demo.json").rename(output / "questions.jsonl")
    with user_error("is not an earlier demo .*it has no demo.json.* name another folder"):
        open_output(str(output), options, {})


def test_clean_leaves_the_runs():
    commands = subprocess.run(["make", "-n", "clean"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert ".venv" in commands
    assert "runs" not in commands


def test_questions_are_the_first_of_each_split():
    with gzip.open(QUESTIONS, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    questions = choose_questions(bundled_rows(QUESTIONS), train=5, heldout=3)
    for split, count in (("train", 5), ("heldout", 3)):
        assert [row for row in questions if row["split"] == split] == [row for row in rows if row["split"] == split][
            :count
        ]
    with user_error("heldout_questions is 382; the bundled questions are 381"):
        choose_questions(rows, train=5, heldout=382)


def test_samples_are_in_the_split_of_their_prompt(tmp_path):
    files = {
        "questions.jsonl": [{"id": "a", "split": "train"}, {"id": "b", "split": "heldout"}],
        "answers.jsonl": [{"id": "a", "n": 0}, {"id": "b", "n": 1}],
        "samples.jsonl": [{"id": "a", "n": 2}, {"id": "a#1", "sample_of": "a", "n": 3}],
    }
    for name, rows in files.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = split_answers(tmp_path, ["answers.jsonl", "samples.jsonl"])
    assert [[json.loads(line)["n"] for line in path.open()] for path in paths] == [[0, 2, 3], [1]]


def level(concurrency: int, texts: list[str], seconds: float) -> LoadResult:
    answers = [
        Answer(text=text, completion_tokens=10, rounds=4, decoded_tokens=10, accepted_by_position=[4, 2])
        for text in texts
    ]
    return LoadResult(concurrency=concurrency, wall_s=seconds, answers=answers)


@pytest.mark.parametrize(
    ("drafted", "verdict", "identical"),
    [(["a", "b"], "draft: yes", True), (["a", "c"], "draft: NO, 1 of 2 (on a GPU", False)],
)
def test_the_report(drafted, verdict, identical, tmp_path, capsys):
    comparison = Comparison(
        drafter="eagle3",
        baseline={1: level(1, ["a", "b"], 4.0)},
        drafted={1: level(1, drafted, 2.0)},
        history=[{"step": 1, "loss": 2.0, "eval_accept_length": 2.25}],
        total_s=9.0,
    )
    write_report(comparison, tmp_path)
    printed = capsys.readouterr().out
    assert verdict in printed
    assert "| 2.00 |" in printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["identical"], report["num_identical"]) == (identical, 2 if identical else 1)
    assert report["accept_length"] == 2.5
    assert report["accept_rate_by_position"] == [1.0, 0.5]
    assert (tmp_path / "acceptance.png").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("target", ["moe", "hybrid"])
def test_a_draft_learns_the_other_targets(target, tmp_path):
    """The demo on fewer questions, minutes each: steps of a depth of 3, and the answers of the target alone."""
    main(["--target", target, "--output", str(tmp_path / "demo"), "--train_questions", "600"])
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert report["accept_length"] >= 2.0
    assert report["identical"]
