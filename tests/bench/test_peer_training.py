"""Drafts of speculators' trainer: the commands, what is kept and how it is measured; and the trainer itself."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from slipstream.bench.peer_training import INSTALL, PeerConfig, main, ours, read_prompts, recipe
from slipstream.data_tools.dataset import write_dataset
from slipstream.models.files.checkpoint import tokenizer_hash
from slipstream.tests.random_drafts import save_random_draft

TINY = Path(__file__).parents[2] / "assets" / "tiny-target"
# tokens of each row
PROMPT = 6
ANSWER = 12
FAKE = """#!{python}
import json, shutil, sys
from pathlib import Path
if sys.argv[1] == "-c":
    print(json.dumps(["0.9.0", False]))
else:
    folder = Path(sys.argv[sys.argv.index("--save-path") + 1])
    with open({log!r}, "a") as log:
        log.write(json.dumps(sys.argv[1:]) + "\\n")
    sys.exit(3) if "--fail" in sys.argv else shutil.copytree({draft!r}, folder / "checkpoint_best")
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peer") / "data"
    generator = np.random.default_rng(0)
    mask = np.arange(PROMPT + ANSWER) >= PROMPT
    rows = [(generator.integers(4, 4000, PROMPT + ANSWER, dtype=np.int32), mask) for _ in range(16)]
    described = {"tokenizer_hash": tokenizer_hash(AutoTokenizer.from_pretrained(TINY))}
    write_dataset([[row] for row in rows], path, heldout=0.25, seed=0, describe=lambda: described)
    return path


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python whose speculators copies a draft instead of training it, and writes its command to `log` beside it."""
    folder = tmp_path_factory.mktemp("fake")
    save_random_draft(TINY, folder / "draft")
    path = folder / "python"
    path.write_text(FAKE.format(python=sys.executable, log=str(folder / "log"), draft=str(folder / "draft")))
    path.chmod(0o755)
    return path


def words(data: Path, output: Path, *more: str) -> list[str]:
    return ["--target", str(TINY), "--data", str(data), "--output", str(output), "--questions", "3", *more]


@pytest.mark.slow
def test_drafts_are_trained_once_and_measured_with_ours(
    data: Path, fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(fake.parent)
    flags = words(data, tmp_path, "--peer-python", "./python", "--draft", "draft", "--target", os.path.relpath(TINY))
    flags += ["--lr", "6e-3", "--seeds", "0", "1", "--layers", "1", "3", "5", "--flags=--no-norm-output"]
    main(flags)
    log = fake.with_name("log").read_text().splitlines()
    main(flags)
    assert fake.with_name("log").read_text().splitlines() == log  # kept, not trained again
    commands = [json.loads(line) for line in log]
    assert [command[command.index("--seed") + 1] for command in commands] == ["0", "1"]
    for command in commands:
        assert command[command.index("--data-path") + 1] == str(tmp_path / "states-eagle3")
        assert command[command.index("--target-layer-ids") + 1 :][:3] == ["2", "4", "6"]
        assert Path(command[command.index("--verifier-name-or-path") + 1]).is_absolute()
        assert "--no-norm-output" in command
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["seed"] for line in lines] == [0, 1, None] * 2
    for line in lines:  # the same draft each time
        assert (line["bench"], line["equal"], line["questions"]) == ("peer_training", "3 of 3", 3)
        assert line["accept_length"] == lines[0]["accept_length"] >= 1
        assert line["accept_length"] <= 1 + sum(line["accept_rates"]) + 1e-3
    assert (lines[0]["trainer"], lines[0]["tokens"], lines[0]["lr"]) == ("speculators 0.9.0", 2 * 12 * ANSWER, 6e-3)


def test_a_failed_training_is_not_kept(
    data: Path, fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        with pytest.raises(SystemExit):
            main(words(data, tmp_path, "--peer-python", str(fake), "--flags=--fail"))
        assert "speculators train failed with status 3" in capsys.readouterr().err
    assert not (tmp_path / "results.jsonl").exists()


def test_a_draft_that_cannot_be_served_is_named(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text('{"architectures": ["Other"]}')
    with pytest.raises(SystemExit):
        main(words(data, tmp_path / "output", "--draft", str(tmp_path / "draft")))
    assert f"{tmp_path / 'draft'} is not served: " in capsys.readouterr().err


def test_what_is_missing_is_named(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without = tmp_path / "python"
    without.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    without.chmod(0o755)
    for python, message in (
        ("/nowhere/python", "peer_python /nowhere/python is not a program"),
        (str(without), f"peer_python {without} has no speculators (ModuleNotFoundError: No module named 'torch')"),
    ):
        with pytest.raises(SystemExit):
            main(words(data, tmp_path / "output", "--peer-python", python))
        assert f"{message}; {INSTALL}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(words(data, tmp_path / "output"))
    assert "nothing to measure: name checkpoints by --draft" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "--speculator-type eagle3 --epochs 2 --total-seq-len 1024"),
        (
            {"drafter": "dflash", "lr": 0.006, "flags": "--block-size 8"},
            "--speculator-type dflash --epochs 2 --total-seq-len 1024 --lr 0.006 --block-size 8",
        ),
    ],
)
def test_the_recipe_in_its_flags(options: dict[str, Any], expected: str) -> None:
    config = PeerConfig(target="t", data="d", output="o", peer_python="p", **options)
    assert recipe(config) == expected.split()


@pytest.mark.parametrize(
    ("run", "trainer"),
    [('{"git_revision": "0123456789"}', "slipstream 0123456"), ('{"git_revision": null}', "slipstream unknown")],
)
def test_who_trained_a_draft(run: str, trainer: str, tmp_path: Path) -> None:
    assert ours(str(tmp_path))["trainer"] == "unknown"
    (tmp_path / "run.json").write_text(run)
    assert ours(str(tmp_path))["trainer"] == trainer


def test_prompts_end_where_the_first_answer_begins() -> None:
    masks = [[0, 0, 1, 1, 0, 1], [1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0]]
    rows = Dataset.from_dict({"input_ids": [list(range(6))] * 5, "loss_mask": [list(map(bool, row)) for row in masks]})
    assert read_prompts(rows, 4) == ([[0, 1], [0], [0, 1, 2, 3, 4]], [2, 1, 1])
    with pytest.raises(ValueError, match="no held-out answers to measure on"):
        read_prompts(rows.select([3]), 4)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--drafter=dflash", "--flags=--num-layers 1 --block-size 4")])
def test_the_package_trains_what_is_served(more: list[str], data: Path, tmp_path: Path) -> None:
    pytest.importorskip("speculators")
    main(words(data, tmp_path, "--peer-python", sys.executable, "--epochs", "1", "--row-tokens", "64", *more))
    [line] = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert line["equal"] == "3 of 3"
    assert line["accept_length"] >= 1
