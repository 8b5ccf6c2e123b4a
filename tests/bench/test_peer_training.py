"""Drafts of both trainers: the commands, what is kept, how the best is chosen; and the package itself."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from slipstream.bench import peer_training
from slipstream.bench.peer_runs import INSTALL, Peer, Run
from slipstream.bench.peer_training import (
    PeerConfig,
    Tries,
    accept_flags,
    main,
    our_run,
    peer_run,
    read_prompts,
    report,
    states_folder,
    write_questions,
)
from slipstream.data_tools.dataset import Conversation, write_dataset
from slipstream.models.files.checkpoint import tokenizer_hash
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.sources import TINY

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
    shutil.copytree({draft!r}, folder / "checkpoint_best")
"""
TRAINER = """import sys
from pathlib import Path
folder = Path(sys.argv[-1])
assert not folder.exists()
(folder / "best").mkdir(parents=True)
with open(sys.argv[1], "a") as log:
    log.write("run\\n")
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peer") / "data"
    generator = np.random.default_rng(0)
    mask = np.arange(PROMPT + ANSWER) >= PROMPT
    rows = [(generator.integers(4, 4000, PROMPT + ANSWER, dtype=np.int32), mask) for _ in range(16)]
    described = {"tokenizer_hash": tokenizer_hash(AutoTokenizer.from_pretrained(TINY))}
    write_dataset([Conversation([row]) for row in rows], path, heldout=0.25, seed=0, describe=lambda: described)
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


def words(data: Path, output: Path, tries: dict[str, Any], *more: str) -> list[str]:
    inputs = ["--target", str(TINY), "--data", str(data), "--output", str(output), "--heldout", "3"]
    return [*inputs, "--max-tokens", "8", "--drafts", json.dumps(tries), *more]


def config_of(**options: Any) -> PeerConfig:
    options = {"data": "d", "output": "o", "peer_python": "p", "drafts": {"eagle3": Tries()}} | options
    return PeerConfig(target=str(TINY), **options)


def follows(words: tuple[str, ...] | list[str], flag: str, count: int = 1) -> list[str]:
    place = len(words) - 1 - list(words)[::-1].index(flag)  # the last wins
    return list(words[place + 1 : place + 1 + count])


@pytest.mark.slow
def test_both_sides_are_trained_once_and_measured(data: Path, fake: Path, tmp_path: Path) -> None:
    questions = tmp_path / "made.jsonl"
    questions.write_text('{"turns": ["Hello"]}\n{"prompt": "Once upon"}\n')
    ours = "--optim.steps 1 --data.max_length 64 --draft.ttt_steps 1"
    tries = {"eagle3": {"layers": [1, 3, 5], "depth": 2, "ours": ours, "peer": "--no-norm-output"}}
    flags = words(data, tmp_path / "output", tries, "--peer-python", str(fake), "--questions", str(questions))
    main([*flags, "--jobs", "2"])
    log = fake.with_name("log").read_text().splitlines()
    main([*flags, "--jobs", "2"])
    assert fake.with_name("log").read_text().splitlines() == log  # kept, not trained again
    [command] = [json.loads(line) for line in log]
    assert follows(command, "--data-path") == [str(tmp_path / "output" / "states-1-3-5")]
    assert follows(command, "--target-layer-ids", 3) == ["2", "4", "6"]
    assert "--no-norm-output" in command
    lines = [json.loads(line) for line in (tmp_path / "output" / "results.jsonl").read_text().splitlines()]
    assert [line["trainer"] for line in lines] == ["slipstream", "speculators 0.9.0"] * 2
    for line in lines:
        assert line["is_best"]
        assert list(line["accept_length"]) == ["heldout", "made"]
        for name, length in line["accept_length"].items():
            assert 1 <= length <= 1 + sum(line["accept_rates"][name]) + 1e-3


def trainer(folder: Path, code: str = TRAINER) -> Run:
    program = folder / "trainer.py"
    program.write_text(code)
    command = (sys.executable, str(program), str(folder / "log"), "--output")
    return Run("slipstream", "eagle3", "", command, folder)


def test_a_training_is_kept_once_it_has_ended(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    for _ in range(2):
        run.train({})
    assert (tmp_path / "log").read_text() == "run\n"
    (run.folder / "trained.json").unlink()  # as if it had been stopped: the checkpoints in it are not gone on with
    run.train({})
    assert (tmp_path / "log").read_text() == "run\n" * 2


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('the cause')\nraise SystemExit(3)", r"train\.log: the program ended with status 3:\n(.*\n)*the cause"),
        ("", r"train\.log: the program ended without best"),
    ],
)
def test_a_failed_training_is_not_kept(code: str, message: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, code)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            run.train({})
    assert not (run.folder / "trained.json").exists()


def test_failed_tries_are_named_and_the_others_shown(
    data: Path, fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*_: Any) -> dict[str, dict[str, Any]]:
        return {"heldout": {"by_rounds": 1.5, "accept_rates": [0.5]}, "all": {}}

    (tmp_path / "bad").mkdir()
    commands = {"--good": trainer(tmp_path), "--bad": trainer(tmp_path / "bad", "raise SystemExit(3)")}
    monkeypatch.setattr(peer_training, "our_run", lambda _, __, flags: commands[flags])
    monkeypatch.setattr(peer_training, "peer_run", lambda *_: commands["--good"])
    monkeypatch.setattr(peer_training, "capture", lambda *_: None)
    monkeypatch.setattr(Run, "measure", measure)
    tries = {"eagle3": {"our_tries": ["--good", "--bad"], "peer_tries": ["", ""]}}
    with pytest.raises(SystemExit):
        main(words(data, tmp_path / "output", tries, "--peer-python", str(fake)))
    printed = capsys.readouterr()
    assert "1 of 4 tries failed; the others are kept\neagle3, slipstream" in printed.err
    assert printed.out.count("| 1.500 |") == 3


def test_an_interrupted_comparison_shows_what_has_ended(
    data: Path, fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    figures = {"heldout": {"by_rounds": 1.5, "accept_rates": [0.5]}, "all": {}}
    monkeypatch.setattr(peer_training, "our_run", lambda *_: trainer(tmp_path))
    monkeypatch.setattr(peer_training, "capture", interrupt)
    monkeypatch.setattr(Run, "measure", lambda *_: figures)
    with pytest.raises(SystemExit) as end:
        main(words(data, tmp_path / "output", {"eagle3": {}}, "--peer-python", str(fake)))
    assert end.value.code == 130
    assert capsys.readouterr().out.count("| 1.500 |") == 1
    [line] = (tmp_path / "output" / "results.jsonl").read_text().splitlines()
    assert json.loads(line)["accept_length"] == {"heldout": 1.5}


def test_what_is_missing_is_named(data: Path, tmp_path: Path, exits: Any) -> None:
    without = tmp_path / "python"
    without.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    without.chmod(0o755)
    for python, message in (
        ("/nowhere/python", f"peer_python /nowhere/python is not a program; {INSTALL}"),
        (str(without), f"has no speculators (ModuleNotFoundError: No module named 'torch'); {INSTALL}"),
    ):
        with exits(message):
            main(words(data, tmp_path / "output", {"eagle3": {}}, "--peer-python", python))


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        ({}, "drafts names nothing; choose from eagle3, dflash, dspark"),
        ({"medusa": Tries()}, "drafts names medusa"),
        ({"dspark": Tries(our_tries=("", "--a"))}, "dspark has 2 our_tries and 1 peer_tries; give both sides as many"),
        ({"eagle3": Tries(our_tries=(), peer_tries=())}, "eagle3 has 0 our_tries and 0 peer_tries"),
        ({"eagle3": Tries(depth=0)}, r"drafts\.eagle3\.depth is 0; give at least 1"),
    ],
)
def test_drafts_are_checked(drafts: dict[str, Tries], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(drafts=drafts)


def test_the_commands_of_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_training.StateIndex, "read", lambda _: None)
    monkeypatch.setattr(peer_training, "trainer_flags", lambda path, _: ["--data-path", str(path)])
    tries = Tries(layers=(1, 3), depth=5, ours="--optim.lr 1 --seed 8", peer="--lr 1 --epochs 8")
    config = config_of(drafts={"dspark": tries}, epochs=2, seed=4, ours="--optim.lr 2", peer="--lr 2")
    ours = our_run(config, "dspark", "--optim.lr 3").command
    assert "slipstream.train.dflash" in ours
    assert [follows(ours, flag) for flag in ("--optim.lr", "--seed", "--optim.epochs")] == [["3"], ["4"], ["2"]]
    assert follows(ours, "--draft.aux_layers") == ["[1, 3]"]
    assert ours[-1] == "--output"
    peer = peer_run(config, Peer("python", "0.9.0", True), "dspark", "--lr 3", tmp_path).command
    assert peer[:4] == ("python", "-m", "speculators", "train")
    assert peer[-1] == "--save-path"
    assert [follows(peer, flag) for flag in ("--lr", "--speculator-type", "--seed")] == [["3"], ["dspark"], ["4"]]
    assert follows(accept_flags(config, "dspark", []), "--engine.width") == ["6"]
    assert states_folder(config, "dspark").name == "states-1-3"
    chain = config_of(drafts={"eagle3": Tries(depth=5)})
    assert follows(accept_flags(chain, "eagle3", []), "--drafter.depth") == ["5"]
    assert states_folder(chain, "eagle3").name == "states-eagle3"


def test_the_best_of_a_side_is_chosen_on_heldout_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = {"slipstream": ((1.5, 9.0), (2.5, 1.0)), "speculators": ((2.0, 1.0), (1.0, 2.0))}  # held out, other
    results = []
    for side, pairs in lengths.items():
        for number, (heldout, other) in enumerate(pairs):
            run = Run(side, "eagle3", f"--lr {number}", (side, str(number)), tmp_path)  # type: ignore[arg-type]
            run.folder.mkdir()
            (run.folder / "trained.json").write_text('{"seconds": 7}')
            figures = {"other": other, "heldout": heldout, "all": 0.0}
            results.append(
                (run, {name: {"by_rounds": value, "accept_rates": [0.25]} for name, value in figures.items()})
            )
    report(config_of(output=str(tmp_path)), Peer("python", "0.9.0", True), results)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:6]]
    assert [(row[1], row[2], row[5], row[6], row[8]) for row in rows] == [
        ("slipstream", "--lr 0", "1.500", "9.000", ""),
        ("slipstream", "--lr 1", "2.500", "1.000", "best"),
        ("speculators 0.9.0", "--lr 0", "2.000", "1.000", "best"),
        ("speculators 0.9.0", "--lr 1", "1.000", "2.000", ""),
    ]


def test_prompts_end_where_the_first_answer_begins() -> None:
    masks = [[0, 0, 1, 1, 0, 1], [1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0]]
    rows = Dataset.from_dict({"input_ids": [list(range(6))] * 5, "loss_mask": [list(map(bool, row)) for row in masks]})
    assert read_prompts(rows, 4) == [[0, 1], [0], [0, 1, 2, 3, 4]]
    with pytest.raises(ValueError, match="no held-out answers to measure on"):
        read_prompts(rows.select([3]), 4)


def test_each_file_of_questions_is_a_category(data: Path, tmp_path: Path) -> None:
    questions = tmp_path / "mt.jsonl"
    questions.write_text('{"id": 81, "category": "writing", "turns": ["Hello"]}\n')
    config = config_of(data=str(data), output=str(tmp_path), heldout=2, questions=(str(questions),))
    heldout, other = [list(map(json.loads, path.open())) for path in write_questions(config)]
    assert [(row["id"], row["category"], len(row["prompt"])) for row in heldout] == [
        (f"heldout-{number}", "heldout", PROMPT) for number in range(2)
    ]
    assert other == [{"id": "mt-0", "category": "mt", "turns": ["Hello"]}]
    with pytest.raises(ValueError, match="two files called mt; rename one"):
        write_questions(config_of(data=str(data), output=str(tmp_path), questions=(str(questions),) * 2))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle3", "dflash", "dspark"])
def test_the_package_trains_what_is_served(drafter: str, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("speculators")
    ours = "--optim.steps 1 --data.max_length 64"
    peer = "--total-seq-len 64"
    if drafter != "eagle3":
        ours += " --draft.num_layers 1 --draft.block_size 4"
        peer += " --num-layers 1 --block-size 4"
    tries = {drafter: {"layers": [1, 3, 5], "ours": ours, "peer": peer}}
    main(words(data, tmp_path / "output", tries, "--peer-python", sys.executable))
    lines = [json.loads(line) for line in (tmp_path / "output" / "results.jsonl").read_text().splitlines()]
    assert [line["trainer"] for line in lines] == ["slipstream", "speculators 0.9.0"]
    assert all(line["accept_length"]["heldout"] >= 1 for line in lines)
