"""Captures that are stopped, killed, split over processes or damaged end as the same files."""

import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from slipstream.data_tools import capture_states, state_folders
from slipstream.data_tools.capture_states import main
from slipstream.models.files.atomic import FOLDER_LOCK, staging_path
from slipstream.models.files.state_store import StateIndex, shard_path, write_shard
from slipstream.tests.data_tools.conftest import shards
from slipstream.tests.sources import ROOT


def test_a_stopped_capture_continues_with_what_is_missing(tmp_path, flags, captured, monkeypatch):
    def write_three(folder, number, *rest):
        if number == 3:
            staging_path(shard_path(folder, number)).mkdir()
            (staging_path(shard_path(folder, number)) / "new").write_text("half")
            raise OSError("the process ends here")
        write_shard(folder, number, *rest)

    (tmp_path / ".notes.tmp").touch()
    with monkeypatch.context() as patch:
        patch.setattr(state_folders, "write_shard", write_three)
        with pytest.raises(SystemExit):
            main(flags(tmp_path))
    assert sorted(shards(tmp_path)) == [f"shard-0000{number}.safetensors" for number in range(3)]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    main(flags(tmp_path))
    assert shards(tmp_path) == shards(captured)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert sorted(path.name for path in tmp_path.glob(".*")) == [".notes.tmp"]


def start(arguments: list[str], *launcher: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, *launcher, str(ROOT / "data_tools" / "capture_states.py"), *arguments]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.slow
def test_two_processes_write_what_one_does(tmp_path, flags, captured):
    torch.set_num_threads(1)
    program = start(flags(tmp_path), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    printed, _ = program.communicate(timeout=300)
    assert program.returncode == 0, printed
    assert shards(tmp_path) == shards(captured)


def test_two_ranks_write_what_one_does(tmp_path, flags, captured, monkeypatch):
    """One after the other, each with all shards missing; test_two_processes has them wait for each other."""
    monkeypatch.setattr(StateIndex, "missing", lambda index, _: list(range(len(index.shards))))
    for rank in range(2):
        accelerator = SimpleNamespace(is_main_process=rank == 0, process_index=rank, num_processes=2)
        accelerator.device = torch.device("cpu")
        accelerator.print = print
        accelerator.wait_for_everyone = lambda: None
        monkeypatch.setattr(capture_states, "Accelerator", lambda result=accelerator, **_: result)
        main(flags(tmp_path))
        assert sorted(shards(tmp_path)) == sorted(shards(captured))[:: 2 - rank]
    assert shards(tmp_path) == shards(captured)


@pytest.mark.slow
def test_killed_twenty_times(tmp_path, flags, captured):
    """At random moments of a run of about a second; files end up the same, byte for byte, but for locks of the dead."""
    moments = random.Random(7)
    for _ in range(20):
        program = start(flags(tmp_path))
        while program.poll() is None and not (tmp_path / "index.json").exists():
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.05))
        number = len(list(tmp_path.glob("*.safetensors")))
        while program.poll() is None and len(list(tmp_path.glob("*.safetensors"))) <= number:
            time.sleep(moments.uniform(0, 0.002))
        program.kill()
        program.communicate()
    main(flags(tmp_path))
    assert shards(tmp_path) == shards(captured)
    assert {path.name for path in tmp_path.glob(".*")} <= {FOLDER_LOCK}


def test_files_that_no_capture_wrote_are_left_alone(tmp_path, flags, capture_data, exits, monkeypatch):
    monkeypatch.setattr(capture_states, "Capturer", None)  # all is refused before the target is loaded
    (tmp_path / "file").touch()
    shard_path(tmp_path, 2).write_text("mine")
    for output, message in (
        (tmp_path / "file", "file is a file; name a folder"),
        (tmp_path, "holds shard-00002.safetensors but no index.json"),
        (capture_data / "features", f"lies in data {capture_data}, which is read"),
    ):
        with exits(message):
            main(flags(output))
    assert shard_path(tmp_path, 2).read_text() == "mine"


def test_a_damaged_shard_is_named_and_made_anew_alone(tmp_path, flags, captured, capsys):
    shutil.copytree(captured, tmp_path, dirs_exist_ok=True)
    main(flags(tmp_path, "--verify"))
    assert "shards are whole" in capsys.readouterr().out
    content = bytearray(shard_path(tmp_path, 2).read_bytes())
    content[len(content) // 2] ^= 8
    shard_path(tmp_path, 2).write_bytes(content)
    shard_path(tmp_path, 4).unlink()
    with pytest.raises(SystemExit):
        main(flags(tmp_path, "--verify"))
    message = capsys.readouterr().err
    assert f"{shard_path(tmp_path, 2)} is damaged" in message
    assert f"{shard_path(tmp_path, 4)} is missing" in message
    assert message.count("rebuild it") == 2
    command = message.split("rebuild it: ")[1].split("\n")[0]
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    words = shlex.split(command)[2:]
    assert words[-3:] == ["--shards", "2", "--yes"]
    words[words.index("--output") + 1] = str(tmp_path)  # the folder was copied
    words[-2] = "[4, 2]"
    main(words)
    assert shards(tmp_path) == shards(captured)
    del times[shard_path(tmp_path, 2)]
    assert times == {path: path.stat().st_mtime_ns for path in times}


def test_a_complete_capture_is_left_alone(captured, flags, capsys, monkeypatch):
    monkeypatch.setattr(capture_states, "Capturer", None)
    main(flags(captured))
    assert "is complete" in capsys.readouterr().out
