"""Output folders when a run begins: runs are continued, foreign files are refused or left alone."""

import fcntl
import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import cli
from slipstream.models.drafts.token_map import TokenMap
from slipstream.models.files.atomic import FolderLock
from slipstream.models.files.checkpoint import named_target
from slipstream.models.files.outputs import step_folders
from slipstream.tests.tables import each_case
from slipstream.tests.train.conftest import DRAFT_VOCAB_SIZE
from slipstream.tests.train.runs import assert_same_run, refusal
from slipstream.train import checkpoints, dflash, eagle, eagle3
from slipstream.train.checkpoints import provenance
from slipstream.train.loop import Loop
from slipstream.train.trackers import read_metrics

PROGRAMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "eagle3": (eagle3, {}),
    "eagle": (eagle, {}),
    "dflash": (dflash, {"draft__num_layers": 2, "draft__mask_token_id": 7}),
}


@pytest.fixture
def run(tmp_path, finished) -> Path:
    """A copy that the test may change."""
    return shutil.copytree(finished, tmp_path / "run")


def remove_steps(run: Path):
    for folder in step_folders(run):
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "program", ["eagle3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("eagle", "dflash"))]
)
def test_another_token_map_at_the_same_place_is_refused(tmp_path, run_flags, vocabulary_path, program):
    path = tmp_path / "map.safetensors"
    output = tmp_path / "run"
    shutil.copy(vocabulary_path, path)
    module, changes = PROGRAMS[program]
    words = run_flags(output, draft__vocabulary=path, optim__steps=1, **changes)
    module.main(words)
    module.main(words)
    before = (output / "step-1" / "state" / "progress.json").read_text()
    counts = torch.zeros(120, dtype=torch.int64)
    counts[6 : 6 + 2 * DRAFT_VOCAB_SIZE : 2] = 3
    TokenMap.build(counts, DRAFT_VOCAB_SIZE, [], {}).write(path)
    message = refusal(words, module.main)
    assert "vocabulary_hash is " in message
    assert "pass the original draft.vocabulary to continue it, or another output" in message
    assert (output / "step-1" / "state" / "progress.json").read_text() == before


def test_what_a_run_reads_may_lie_elsewhere(
    tmp_path, run, finished, arguments, target_path, data_path, vocabulary_path
):
    shutil.rmtree(run / "step-6")
    target, data = (shutil.copytree(path, tmp_path / path.name) for path in (target_path, data_path))
    vocabulary = shutil.copy(vocabulary_path, tmp_path / "another.safetensors")
    eagle3.main(arguments(run, target=target, data__path=data, draft__vocabulary=vocabulary))
    weights = "model.safetensors"
    assert (run / "step-6" / weights).read_bytes() == (finished / "step-6" / weights).read_bytes()


@pytest.mark.parametrize(
    ("saved", "changes", "message"),
    [
        ({"optim.momentum": ..., "draft.norms": ..., "init_from": ...}, {}, None),
        ({"vocabulary_hash": ..., "draft.dropped": None, "tracker.dropped": 5}, {}, None),
        ({"draft.norms": ...}, {"draft__norms": "[]"}, r"draft.norms is \[\], but the run in .* has \['fc_norm', "),
        ({"optim.lr": ...}, {}, "optim.lr is 0.01, but the run in .* has None; pass the saved value"),
        ({"draft.dropped": 5}, {}, "step-6 has draft.dropped 5, an option that this version does not have; "),
    ],
)
def test_a_run_of_another_version_continues_if_its_options_mean_the_same(run, arguments, saved, changes, message):
    """`saved`: ... removes an option, as if the run's version had not had it yet."""
    path = run / "step-6" / "state" / "progress.json"
    values = json.loads(path.read_text())
    identity = values["identity"] | saved
    path.write_text(json.dumps(values | {"identity": {k: v for k, v in identity.items() if v is not ...}}))
    flags = arguments(run, optim__steps=6, **changes)
    if message is None:
        eagle3.main(flags)
    else:
        assert re.search(message, refusal(flags))


def test_a_run_continues_without_the_draft_that_it_began_from(tmp_path, finished, run_flags):
    """The run has that draft's token map and target states."""
    source = shutil.copytree(finished / "best", tmp_path / "draft")
    run = tmp_path / "run"
    flags = [flag for flag in run_flags(run, init_from=source) if not flag.startswith("--draft.vocabulary")]
    assert "training of eagle drafts starts from eagle drafts: name another init_from" in refusal(flags, eagle.main)
    eagle3.main(flags)
    reference = shutil.copytree(run, tmp_path / "whole")
    shutil.rmtree(source)
    shutil.rmtree(run / "step-6")
    assert "init_from is '/gone', but the run in" in refusal([*flags, "--init_from=/gone"])
    eagle3.main(flags)
    assert_same_run(run, reference)
    assert f"init_from {source} does not exist" in refusal([*flags, f"--output={tmp_path}/another"])


@pytest.mark.parametrize(
    ("file", "content"),
    [("progress.json", b"[]"), ("model.safetensors", b"cut"), ("optimizer.bin", b""), ("optimizer.bin", b"PK\3\4")],
)
def test_a_damaged_checkpoint_is_named(run, arguments, file, content):
    (run / "step-6" / "state" / file).write_bytes(content)
    message = refusal(arguments(run, optim__steps=7))
    assert re.search(r"/step-6 cannot be read \(.+\); move it away, and the same command continues", message)


def test_the_command_trains_in_this_process(tmp_path, arguments, capsys):
    cli.main(["train", "eagle3", *arguments(tmp_path, optim__steps=1)])
    assert (tmp_path / "step-1").exists()
    for words, status, message in (
        (["train", "eagle4"], 2, "unknown verb 'train eagle4'; did you mean train eagle?"),
        (["train", "eagle3", *arguments(tmp_path, target="/absent")], 1, "/absent"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert stop.value.code == status
        assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_run_begins_anew_over_records_alone(run, arguments):
    """As a kill before the first checkpoint leaves them."""
    remove_steps(run)
    shutil.rmtree(run / "best", ignore_errors=True)
    (run / "metrics.jsonl").write_text('{"step": 9}\n')
    eagle3.main(arguments(run, optim__steps=1))
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [1]


def test_a_folder_named_like_a_step_is_left_alone(run, arguments):
    (run / "step-6").rename(run / "step-6-good")
    (run / "step-").mkdir()
    assert [path.name for path in step_folders(run)] == ["step-4"]
    eagle3.main(arguments(run, checkpoint__keep=1))
    assert {path.name for path in run.glob("step-*")} == {"step-", "step-6", "step-6-good"}


OTHERS = {".notes.tmp": "notes", ".vimrc.old": "vimrc", ".cache.tmp/x": "cache", ".best.tmp/new/x": "half of a best"}


@each_case()
def test_files_of_others_under_a_runs_names_are_refused_and_kept(name, message, tmp_path, finished, arguments):
    """Before the target is read, and with nothing deleted or renamed."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    files = OTHERS | {name: "mine"}
    if name == "best":
        shutil.rmtree(tmp_path / "best")
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    before = sorted(tmp_path.rglob("*"))
    assert message in refusal(arguments(tmp_path, target="nobody/absent"))
    assert sorted(tmp_path.rglob("*")) == before
    assert {path: (tmp_path / path).read_text() for path in files} == files


def test_only_a_run_that_may_begin_cleans_up_and_under_its_own_names(run, arguments):
    for path, text in OTHERS.items():
        (run / path).parent.mkdir(parents=True, exist_ok=True)
        (run / path).write_text(text)
    (run / "step-4" / "notes.txt").write_text("mine")
    before = sorted(run.rglob("*"))
    assert "optim.lr is 0.5" in refusal(arguments(run, optim__lr=0.5))
    assert sorted(run.rglob("*")) == before
    eagle3.main(arguments(run, checkpoint__keep=1))
    assert sorted(run.rglob("*")) == [path for path in before if run / ".best.tmp" not in (path, *path.parents)]


def test_an_output_that_cannot_be_is_refused_before_anything_is_read(tmp_path, arguments, monkeypatch):
    (tmp_path / "file").touch()
    for output, changes, message in (
        (tmp_path / "file", {}, f"output {tmp_path}/file is a file; name a folder"),
        (tmp_path / "file" / "run", {}, f"lies below {tmp_path}/file, which is a file; name another place"),
        (tmp_path / "run", {"target": tmp_path}, f"output {tmp_path}/run lies in target {tmp_path}, which is read"),
    ):
        assert message in refusal(arguments(output, **({"target": "nobody/absent"} | changes)))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert f"you may not write to {tmp_path}; name another" in refusal(
        arguments(tmp_path / "run", target="nobody/absent")
    )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def call_in_third_step(patch: pytest.MonkeyPatch, second: Callable[[], None]):
    """Lets `second` run while a run trains, once."""
    train_step = Loop.train_step
    calls = [second]

    def next_step(loop, interrupted):
        if loop.progress.step == 2 and calls:
            calls.pop()()
        return train_step(loop, interrupted)

    patch.setattr(Loop, "train_step", next_step)


def test_a_second_run_in_the_folder_is_refused(tmp_path, arguments, finished, monkeypatch):
    """Before it reads anything; the first one does not notice."""
    messages = []
    other = arguments(tmp_path, optim__lr=9e-3, target="nobody/absent")
    call_in_third_step(monkeypatch, lambda: messages.append(refusal(other)))
    eagle3.main(arguments(tmp_path))
    [message] = messages
    assert re.search(rf"{tmp_path} is being written by process {os.getpid()} on host \S+, since \S+; wait", message)
    assert_same_run(tmp_path, finished)


def test_where_locks_do_not_hold_the_later_run_goes_on(tmp_path, arguments, finished, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(FolderLock, "check", lambda _: None)  # a stale view of the lock
    call_in_third_step(monkeypatch, lambda: eagle3.main(arguments(tmp_path)))
    message = refusal(arguments(tmp_path))
    assert "holds step-6 of another run, and the newest of this one is 2" in message
    assert_same_run(tmp_path, finished)


def test_a_target_is_named_as_it_was_given_and_found_from_elsewhere(tmp_path, arguments, target_path, monkeypatch):
    monkeypatch.chdir(target_path.parent)
    eagle3.main(arguments(tmp_path / "run", optim__steps=1, target=target_path.name))
    best = tmp_path / "run" / "best"
    assert json.loads((best / "config.json").read_text())["target"] == target_path.name
    assert str(target_path.parent) not in (best / "config.json").read_text()
    assert json.loads((best / "run.json").read_text())["target_path"] == str(target_path)
    assert named_target(best) == target_path.name
    monkeypatch.chdir(tmp_path)
    assert named_target(best) == str(target_path)


def test_a_machine_without_git_has_no_revision(tmp_path, monkeypatch):
    assert provenance("0123")["git_revision"] == checkpoints.git_revision()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance("0123")["git_revision"] is None


@pytest.mark.parametrize("largest", [20_000, 120_000])  # bytes: smaller than the draft's file, than the optimizer's
def test_a_disk_too_small_ends_in_a_sentence_and_the_run_continues(tmp_path, arguments, finished, largest):
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard_limit))
    try:
        message = refusal(arguments(tmp_path, evaluation__every=6))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard_limit, hard_limit))
    assert re.fullmatch(
        r"train/eagle3.py: error: .*/\.step-2.* could not be written .*run the same command again", message
    )
    assert not list(tmp_path.glob("*step-*"))
    eagle3.main(arguments(tmp_path, evaluation__every=6))
    assert [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [
        line["loss"] for line in read_metrics(finished / "metrics.jsonl")
    ]
