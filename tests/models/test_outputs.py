"""Programs write to and replace their outputs alone: never an input, never a foreign file."""

import os
import re
from pathlib import Path

import pytest

from slipstream.models.files.outputs import (
    CHECKPOINT,
    DATASET,
    STEP,
    check_output_file,
    check_output_folder,
    check_working_folder,
)
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

KINDS = {
    CHECKPOINT: ("config.json", "run.json", "model.safetensors"),
    STEP: (
        "config.json",
        "run.json",
        "model.safetensors",
        "state/progress.json",
        "state/pytorch_model_fsdp_0/a.distcp",
    ),
    DATASET: (
        *("report.json", "dataset_dict.json", "train/data-00000-of-00001.arrow", "train/state.json"),
        *("train/dataset_info.json", "heldout/data-00000-of-00001.arrow", "train/cache-1f.arrow"),
    ),
}
FOREIGN = (
    "notes.txt",
    "model.safetensors.bak",
    "train/notes.txt",
    "train/a/b.arrow",
    "adapter/model.safetensors",
    ".mine",
)


def fill(folder: Path, *names: str):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_folder_of_ours_holds_what_our_programs_write_and_nothing_else(kind, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    kind.check(folder)
    fill(folder, *KINDS[kind], f".{kind.markers[-1]}.tmp/new", f".{kind.markers[-1]}.tmp/lock")  # as a kill leaves them
    with user_error("folder exists; name another folder or add --overwrite"):
        check_output_folder(str(folder), kind, {}, overwrite=False)
    check_output_folder(str(folder), kind, {}, overwrite=True)
    fill(folder, *FOREIGN)
    (folder / "link").symlink_to(tmp_path)
    assert set(FOREIGN) - {"train/a/b.arrow"} < {*kind.foreign(folder)}
    assert "link" in kind.foreign(folder)
    for overwrite in (True, False):
        with user_error(rf"folder holds \.mine, .*, \.\.\. beside {kind.name} and is not replaced"):
            check_output_folder(str(folder), kind, {}, overwrite=overwrite)
    (folder / kind.markers[0]).unlink()
    with user_error(f"folder is not {kind.name} .*it has no {kind.markers[0]}.* name another"):
        check_output_folder(str(folder), kind, {}, overwrite=True)


def check(kind: str, output: Path, source: Path):
    """Checks an output of this kind, of a program that reads `source`."""
    inputs = {"data": [None, "owner/name", str(source)]}
    if kind == "folder":
        check_output_folder(str(output), DATASET, inputs, overwrite=True)
    elif kind == "file":
        check_output_file(str(output), lambda _: True, "a map", inputs, overwrite=True)
    else:
        check_working_folder(str(output), inputs)


@each_case()
def test_an_output_is_no_input(kind, output, source, relation, tmp_path):
    fill(tmp_path, "folder/sub/file")
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "other").mkdir()
    os.link(tmp_path / "folder/sub/file", tmp_path / "hard")
    if relation is None:
        check(kind, tmp_path / output, tmp_path / source)
        return
    message = f"^output {tmp_path / output} {relation} data {tmp_path / source}, which is read; name another output$"
    with user_error(message):
        check(kind, tmp_path / output, tmp_path / source)
    assert (tmp_path / "folder/sub/file").read_text() == "mine"


def test_a_file_is_replaced_if_it_was_asked_for_and_is_ours(tmp_path):
    path = tmp_path / "map"

    def check(*, overwrite, is_ours=True):
        check_output_file(str(path), lambda _: is_ours, "a map", {}, overwrite=overwrite, option="plot")

    check(overwrite=False)
    path.touch()
    check(overwrite=False)
    path.write_text("mine")
    check(overwrite=True)
    with user_error(f"^plot {path} exists; name another file or add --overwrite$"):
        check(overwrite=False)
    for overwrite in (True, False):
        with user_error(f"^plot {path} is not a map and is not replaced; name another file$"):
            check(overwrite=overwrite, is_ours=False)


@pytest.mark.parametrize("kind", ["folder", "file", "working"])
def test_places_where_nothing_can_be_written_are_refused(kind, tmp_path, monkeypatch):
    fill(tmp_path, "file")
    (tmp_path / "folder").mkdir()
    name, fault = ("folder", "a folder; name a file") if kind == "file" else ("file", "a file; name a folder")
    with user_error(f"output {tmp_path / name} is {fault}"):
        check(kind, tmp_path / name, tmp_path / "absent")
    with user_error(f"lies below {tmp_path}/file, which is a file; name another place"):
        check(kind, tmp_path / "file" / "new", tmp_path / "absent")
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path / "folder")
    with user_error(f"cannot be written: you may not write to {tmp_path}/folder; name another"):
        check(kind, tmp_path / "folder" / "new" / "deeper", tmp_path / "absent")


def test_what_a_killed_writer_left_is_put_back_before_the_check(tmp_path):
    for name in ("new", "old"):
        fill(tmp_path / ".data.tmp" / name, *KINDS[DATASET])
    check_output_folder(str(tmp_path / "data"), DATASET, {}, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    with user_error(re.escape("add --overwrite")):
        check_output_folder(str(tmp_path / "data"), DATASET, {}, overwrite=False)
