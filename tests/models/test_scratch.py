"""The successor of a killed program removes its temporary folder, and nothing else."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream.models.files.atomic import FOLDER_LOCK
from slipstream.models.files.scratch import ScratchFolder

HOLD = """
import sys
from pathlib import Path
from slipstream.models.files.scratch import ScratchFolder
folder = ScratchFolder(sys.argv[1])
Path(folder.name, "step-1").mkdir()
Path(folder.name, "step-1", "weights").touch()
print(flush=True)
input()
"""
Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path, monkeypatch) -> Iterator[Start]:
    """Starts a program that holds a folder of a kind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    processes = []

    def run(kind):
        environment = os.environ | {"TMPDIR": str(tmp_path)}
        argv = [sys.executable, "-c", HOLD, kind]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        processes.append(process)
        process.stdout.readline()
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def test_folders_of_killed_programs_are_removed(start, tmp_path):
    def entries():
        return {*tmp_path.iterdir()}

    start("ranks")
    living = entries()
    user = {tmp_path / f"slipstream-ranks-{name}" for name in ("abcdefgh", "abcdefgi", "abcdefgj", "mine")}
    without_lock, link, file, other_name = sorted(user)
    without_lock.mkdir()
    link.symlink_to(next(iter(living)))
    file.touch()
    other_name.mkdir()
    (other_name / FOLDER_LOCK).touch()
    killed = [start(kind) for kind in ("ranks", "ranks", "learn")]
    for process in killed:
        process.send_signal(signal.SIGKILL)
        process.wait()
    [learn] = tmp_path.glob("slipstream-learn-*")
    assert len(entries()) == len(living | user) + 3
    with ScratchFolder("ranks") as name:
        assert entries() == living | user | {learn, Path(name)}
    assert entries() == living | user | {learn}
    assert all(list(folder.iterdir()) for folder in living)
