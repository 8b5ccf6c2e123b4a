"""States that the engine keeps while it answers are those of a capture of the same rows, and no target runs twice."""

from pathlib import Path

import pytest
from transformers import Qwen3Config

from slipstream.data_tools import prepare, state_shards
from slipstream.data_tools.capture_states import main as capture
from slipstream.models.files.atomic import FolderLock
from slipstream.models.files.checkpoint import read_header
from slipstream.models.files.state_store import StateStore, shard_path
from slipstream.tests.data_tools.chats import CHATML, build_tokenizer
from slipstream.tests.data_tools.fake_answers import ROWS, error, run
from slipstream.tests.random_targets import SHAPE, save_random_target
from slipstream.tests.state_engines import assert_same_states


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("answering") / "model"
    tokenizer = build_tokenizer(CHATML)
    shape = {**SHAPE, "vocab_size": 320, "head_dim": 16, "eos_token_id": tokenizer.eos_token_id}
    save_random_target(Qwen3Config(**shape), path)
    tokenizer.save_pretrained(path)
    return path


def captured(target: Path, tmp_path: Path, name: str, *words: object) -> StateStore:
    options = [f"--target={target}", f"--data={tmp_path / 'data'}", f"--output={tmp_path / name}", "--yes"]
    capture([*options, "--shard-gb=5e-5", *map(str, words)])
    return StateStore(tmp_path / name)


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-4), ("fp8", 2**-3)])
def test_a_capture_of_answers_runs_no_target(target, tmp_path, dtype, tolerance, monkeypatch):
    """Conversations have several turns, and a draft writes the answers."""
    rows = run(
        *(tmp_path, "--target", target, "--max-tokens", 12, "--states", tmp_path / "states"),
        *("--states-dtype", dtype, "--draft", "ngram"),
        rows=ROWS[:12],
    )
    assert len(rows) == 12
    prepare.main([f"--data={tmp_path / 'out.jsonl'}", f"--target={target}", f"--output={tmp_path / 'data'}"])
    expected = captured(target, tmp_path, "expected", f"--dtype={dtype}")
    with monkeypatch.context() as patch:
        patch.delattr(state_shards, "load_frozen_target")
        store = captured(target, tmp_path, "copied", f"--dtype={dtype}", "--answers", tmp_path / "states")
    assert_same_states(store, expected, tolerance)


def test_what_a_killed_run_lost_is_computed(target, tmp_path, capsys, exits):
    """The second run continues the first; a shard of the first is damaged, later beyond use."""
    for count in (5, 12):
        run(
            *(tmp_path, "--target", target, "--max-tokens", 12),
            *("--states", tmp_path / "states", "--states-dtype", "fp32"),
            rows=ROWS[:count],
        )
    prepare.main([f"--data={tmp_path / 'out.jsonl'}", f"--target={target}", f"--output={tmp_path / 'data'}"])
    file = shard_path(tmp_path / "states", 0)
    content = bytearray(file.read_bytes())
    header, start = read_header(file)
    content[start + header["features"]["data_offsets"][1] - 1] ^= 1  # of the last document
    file.write_bytes(content)
    expected = captured(target, tmp_path, "expected", "--dtype=fp32")
    capsys.readouterr()
    store = captured(target, tmp_path, "copied", "--dtype=fp32", "--answers", tmp_path / "states")
    assert "1 documents were computed anew" in capsys.readouterr().out
    assert_same_states(store, expected, 1e-4)
    file.write_bytes(content[:50])
    with exits("; leave --answers out, and all states are computed anew"):
        captured(target, tmp_path, "again", "--dtype=fp32", "--answers", tmp_path / "states")


def test_states_of_another_format_are_not_mixed(target, tmp_path, capsys):
    folder = tmp_path / "states"
    run(tmp_path, "--target", target, "--max-tokens", 4, "--states", folder, rows=ROWS[:3])
    message = error(
        *(capsys, tmp_path, "--target", target, "--max-tokens", 4, "--states", folder),
        *("--states-dtype", "fp32"),
    )
    assert "holds states of another target, or in another format" in message


def test_a_folder_that_cannot_be_written_costs_no_answers(target, tmp_path, capsys):
    """A file, and a folder to which another run writes its shards."""
    folder = tmp_path / "states"
    file = tmp_path / "rows.jsonl"
    assert f"states {file} is a file" in error(capsys, tmp_path, "--target", target, "--states", file)
    with FolderLock(folder):
        assert "is being written by process" in error(capsys, tmp_path, "--target", target, "--states", folder)
    assert not (tmp_path / "out.jsonl").read_text()
    assert not folder.exists()


def test_an_endpoint_gives_no_states(tmp_path, capsys):
    message = error(capsys, tmp_path, "--endpoint", "http://127.0.0.1:1/v1", "--states", tmp_path / "states")
    assert "states is for a target in this process" in message
