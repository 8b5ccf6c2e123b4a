"""Files and folders are replaced whole: writers killed before every system call, second writers, foreign names."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.models.files import atomic
from slipstream.models.files.atomic import (
    FOLDER_LOCK,
    FolderLock,
    InUseError,
    LineFile,
    atomic_file,
    atomic_folder,
    open_locked,
    recover,
    remove_folder,
)
from slipstream.tests.models import atomic_writers
from slipstream.tests.models.atomic_writers import (
    KIND,
    content,
    make,
    write_file,
    write_folder,
    write_folder_without_exchange,
)
from slipstream.tests.user_errors import user_error


@pytest.mark.parametrize(
    ("action", "before", "after"),
    [
        (write_folder, None, "new"),
        (write_folder, "old", "new"),
        (write_folder_without_exchange, "old", "new"),
        (write_file, None, "new"),
        (write_file, "old", "new"),
        (remove_folder, "old", None),
    ],
)
def test_a_kill_before_any_system_call_leaves_old_or_new(action, before, after, tmp_path):
    program = [sys.executable, atomic_writers.__file__, action.__name__, before or "", after or "", str(tmp_path)]
    ended = subprocess.run(program, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("action", [write_file, write_folder])
def test_all_is_on_the_disk_before_it_gets_its_name(action, tmp_path, monkeypatch):
    synced = set()
    sync = os.fsync
    rename = os.rename

    def checked(source, target):
        paths = [source, *source.rglob("*")]
        assert {path.stat().st_ino for path in paths} <= synced
        rename(source, target)

    def note(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", checked)
    monkeypatch.setattr(os, "replace", checked)
    action(tmp_path / "name")
    assert tmp_path.stat().st_ino in synced


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_ones(error, tmp_path):
    folder = tmp_path / "folder"
    file = tmp_path / "file"
    make(folder, "old")
    file.write_text("old")

    def fail():
        with atomic_folder(folder, KIND.check) as new, atomic_file(file) as temporary:
            (new / "a").write_text("new")
            temporary.write_text("new")
            raise error

    with pytest.raises(error):
        fail()
    assert content(folder) == content(file) == "old"
    assert sorted(tmp_path.iterdir()) == [file, folder]


def test_nothing_is_lost_where_the_second_rename_fails(tmp_path, monkeypatch):
    path = tmp_path / "name"
    rename = os.rename
    make(path, "old")

    def fail(source, target):
        if target == path:
            raise OSError("disk error")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "_exchange", lambda *_: False)
        patch.setattr(os, "rename", fail)
        with pytest.raises(OSError, match="disk error"):
            write_folder(path)
        with pytest.raises(OSError, match="disk error"):
            recover(path)
    recover(path)
    assert content(path) == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_gets_its_parents_and_usual_permissions(tmp_path):
    path = tmp_path / "runs" / "name"
    write_folder(path)
    assert path.stat().st_mode & 0o777 == 0o755
    assert list(path.parent.iterdir()) == [path]


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    make(tmp_path / "real", "old")
    (tmp_path / "name").symlink_to(tmp_path / "real")
    write_folder(tmp_path / "name")
    assert (tmp_path / "name").is_symlink()
    assert content(tmp_path / "real") == "new"


@pytest.mark.parametrize("action", [write_folder, write_file])
def test_a_second_writer_is_refused_and_nothing_is_recovered_beneath_the_first(action, tmp_path):
    path = tmp_path / "name"
    with atomic_file(path) as temporary:
        temporary.write_text("first")
        with pytest.raises(InUseError, match="name is being written by another process; wait for it or name another"):
            action(path)
        recover(path)
    assert path.read_text() == "first"


def test_a_lock_is_of_the_file_that_bears_the_name(tmp_path, monkeypatch):
    """Also where its last holder replaces it after it was opened and before it was locked."""
    path = tmp_path / "rows"
    other = tmp_path / "other"
    lock = fcntl.flock
    other.touch()

    def replace_and_lock(file, operation):
        if other.exists():
            other.replace(path)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", replace_and_lock)
    with open_locked(path) as file:
        assert os.path.samestat(os.fstat(file.fileno()), path.stat())
        with pytest.raises(InUseError):
            open_locked(path)


@pytest.mark.parametrize("action", [write_folder, write_file, remove_folder])
@pytest.mark.parametrize("is_folder", [True, False])
def test_what_lies_in_the_way_is_named_and_left_alone(action, is_folder, tmp_path):
    staging = tmp_path / ".name.tmp"
    foreign = staging / "mine" if is_folder else staging
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("years")
    with user_error(rf"{foreign}.* is in the way of .*name, .*; move it away"):
        action(tmp_path / "name")
    assert foreign.read_text() == "years"
    assert list(tmp_path.rglob("*")) == ([staging, foreign] if is_folder else [staging])


def test_names_of_the_other_kind_are_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with user_error("file is a file; name a folder"):
        write_folder(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path, "a folder"), (tmp_path / "pipe", "not a file")):
        with user_error(f"{path} is {kind}; name a file"):
            write_file(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]


def test_a_folder_that_became_somebody_elses_while_it_was_written_is_kept(tmp_path):
    path = tmp_path / "name"
    make(path, "old")

    def write():
        with atomic_folder(path, KIND.check) as folder:
            (folder / "a").write_text("new")
            (path / "notes").write_text("mine")

    with user_error("name holds notes beside a pair and is not replaced"):
        write()
    assert (path / "notes").read_text() == "mine"
    (tmp_path / "other").mkdir()
    write_folder(tmp_path / "other")
    with user_error("other exists and is not empty"), atomic_folder(tmp_path / "other"):
        pass


HOLD_UNTIL_KILLED = """
import os, signal, sys
from pathlib import Path
from slipstream.models.files.atomic import FolderLock
with FolderLock(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_has_one_writer_whose_name_is_told(tmp_path):
    """A dead holder's lock is free. Nothing is left behind, the folder neither if it was made and stayed empty."""
    killed = subprocess.run([sys.executable, "-c", HOLD_UNTIL_KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / FOLDER_LOCK).exists()
    with FolderLock(tmp_path) as lock:
        name = f"is being written by process {os.getpid()} on host {socket.gethostname()}, since 20"
        with pytest.raises(InUseError, match=name), FolderLock(tmp_path):
            pass
        lock.check()
    assert not list(tmp_path.iterdir())
    with FolderLock(tmp_path / "made"):
        pass
    assert not list(tmp_path.iterdir())


def test_the_earlier_of_two_holders_is_told(tmp_path, monkeypatch):
    """As where a file system grants every lock."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    with FolderLock(tmp_path) as earlier:
        later = FolderLock(tmp_path)
        later.holder |= {"host": "another"}
        with later:
            later.check()
            with pytest.raises(InUseError, match="on host another"):
                earlier.check()
        with pytest.raises(InUseError, match="is being written by another process; wait"):
            earlier.check()


def test_what_is_in_the_way_of_a_lock_stays_and_no_folder_is_made(tmp_path):
    (tmp_path / ".a.lock").write_text("mine")
    (tmp_path / ".b.lock").mkdir()
    for name in "ab":
        with (
            user_error(rf"\.{name}\.lock is in the way of the lock .* move it away"),
            FolderLock(tmp_path / name, replaced=True),
        ):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.lock", ".b.lock"]


def test_a_file_of_a_user_is_no_lock(tmp_path):
    (tmp_path / FOLDER_LOCK).write_text("mine")
    with user_error("in the way of the lock .* move it away"), FolderLock(tmp_path):
        pass
    assert (tmp_path / FOLDER_LOCK).read_text() == "mine"


@pytest.mark.parametrize("write", [atomic_file, atomic_folder])
@pytest.mark.parametrize(
    ("code", "file", "named_file"),
    [(errno.ENOSPC, None, "new"), (errno.ENOSPC, "other", "other"), (errno.EIO, None, None)],
)
def test_a_full_disk_is_told_with_the_name_of_what_is_written(tmp_path, write, code, file, named_file):
    """Writing names no file. Other errors pass."""
    with pytest.raises(OSError, match=str(code)) as caught, write(tmp_path / "new"):
        raise OSError(code, "fault", file)
    assert caught.value.filename == (str(tmp_path / "new") if named_file == "new" else named_file)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_with_the_name_of_a_file_of_lines():
    with pytest.raises(OSError, match="No space") as caught, LineFile(Path("/dev/full")) as lines:
        lines.write({})
    assert caught.value.filename == "/dev/full"
