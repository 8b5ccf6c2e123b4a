"""Writes files and folders atomically: a kill at any moment leaves the old or the new one under its name, never a part.

A writer of PATH works in a staging folder beside it, `.NAME.tmp`:

    lock    held by the writer (flock), so a second writer of PATH is refused; the lock of a dead writer is free
    new     the file or folder being written
    old     the previous PATH, on file systems that cannot exchange two names

Invariants:
1. `new` takes PATH's place only when it is complete and on the disk (fsync), in one rename or exchange of names.
2. Without an exchange, PATH is moved to `old` and then `new` to PATH. So if PATH is missing and both `new` and `old`
   exist, `new` is complete: `recover` moves it to PATH. In every other state `new` and `old` can be deleted.
3. A staging folder with any other entry is not ours: nothing in it is touched.

The next writer of PATH cleans up after a killed one; `recover` does that without writing. A program that adds files to
a folder over hours, or replaces it again and again, holds a `FolderLock`.
"""

import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Self

STAGING = re.compile(r"\.(.+)\.tmp")
LOCK = "lock"
NEW = "new"
OLD = "old"
FOLDER_LOCK = ".lock"
# linux/fcntl.h, linux/fs.h
AT_FDCWD = -100
RENAME_EXCHANGE = 2
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)  # an old kernel, or a file system without it


@contextmanager
def atomic_folder(path: Path, check: Callable[[Path], None] | None = None) -> Iterator[Path]:
    """Yields an empty folder that takes the place of `path` if the block succeeds; the old folder is then deleted.

    `check` is called with `path`, if that exists, before the block and again before the exchange; it raises ValueError
    for a folder that must stay (outputs.FolderKind.check). Without `check` only an empty folder is replaced.
    Raises ValueError if `path` is a file or another process is writing it.
    """
    real = path.resolve()
    check = check or refuse_nonempty
    if real.exists() and not real.is_dir():
        raise ValueError(f"{path} is a file; name a folder")
    with _staging(real) as staging:
        if real.exists():
            check(path)
        new = staging / NEW
        new.mkdir()
        yield new
        _sync_tree(new)
        if real.exists():
            check(path)
        _replace_folder(new, real, staging / OLD)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a name for a file that takes the place of `path` if the block succeeds.

    Raises ValueError if `path` is a folder, a device or the like, or another process is writing it.
    """
    real = path.resolve()
    if real.exists() and not real.is_file():
        raise ValueError(f"{path} is {'a folder' if real.is_dir() else 'not a file'}; name a file")
    with _staging(real) as staging:
        yield staging / NEW
        _sync(staging / NEW)
        os.replace(staging / NEW, real)
        _sync(real.parent)


def write_json(path: Path, values: object, indent: int = 2) -> None:
    with atomic_file(path) as temporary:
        put_json(temporary, values, indent)


def put_json(path: Path, values: object, indent: int = 2) -> None:
    """Writes a file of a folder that appears whole."""
    path.write_text(json.dumps(values, indent=indent) + "\n")


def remove_folder(path: Path) -> None:
    """Deletes a folder atomically: a kill leaves all of it or nothing under its name."""
    real = path.resolve()
    with _staging(real) as staging:
        os.rename(real, staging / OLD)


def recover(path: Path) -> None:
    """Cleans up after a killed writer of `path`: afterwards `path` is whole or absent, without a staging folder.

    Does nothing while another process is writing `path`.
    """
    real = path.resolve()
    if staging_path(real).is_dir():
        with suppress(InUseError), _staging(real):
            pass


def check_staging(path: Path) -> None:
    """Raises ValueError if the name of the staging folder of `path` is taken by files that are not ours."""
    folder = staging_path(path.resolve())
    if not folder.exists():
        return
    foreign = sorted({file.name for file in folder.iterdir()} - {LOCK, NEW, OLD}) if folder.is_dir() else [""]
    if foreign:
        raise ValueError(f"{folder / foreign[0]} is in the way of {path}, which is written there first; move it away")


def staging_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def staged_name(name: str) -> str | None:
    """The name whose staging folder `name` is; None if it is not a staging folder's name."""
    match = STAGING.fullmatch(name)
    return match[1] if match else None


class InUseError(ValueError):
    """Another process is writing this file or folder."""


def open_locked(path: Path) -> BinaryIO:
    """`path` opened for reading and appending, created if missing, and locked until closed.

    Raises InUseError if another process, or another part of this one, has locked it.
    """
    while True:
        with ExitStack() as stack:
            file = stack.enter_context(path.open("a+b"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InUseError(f"{path} is being written by another process; wait for it or name another") from error
            if _is_same_file(file, path):  # otherwise the previous holder renamed or deleted it before we got the lock
                stack.pop_all()
                return file


class LineFile:
    """A file of JSON lines, made if missing and locked until closed; lines are appended whole. A context manager."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = open_locked(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with full_disk_errors(self.path):  # what a failed write left is written again
            self._file.close()

    def write(self, line: Mapping[str, Any]) -> None:
        with full_disk_errors(self.path):
            self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self._file.flush()


class FolderLock:
    """Keeps other processes from writing a folder, which `option` names, while a program does. A context manager.

    The file `.lock` in the folder, or `.NAME.lock` beside one that is `replaced`, is locked and names its holder. Where
    a file system grants a lock twice, as NFS may, the later holder's name replaces the earlier one's: so call `check`
    before each write.
    """

    def __init__(self, folder: Path, option: str = "output", *, replaced: bool = False) -> None:
        self.folder = folder
        self.option = option
        real = folder.resolve()
        self.path = real.with_name(f".{real.name}{FOLDER_LOCK}") if replaced else folder / FOLDER_LOCK
        self.holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        }

    def __enter__(self) -> Self:
        """Raises InUseError if another process holds the lock, ValueError if a foreign file has its name."""
        if self.path.exists() and (not self.path.is_file() or self.path.stat().st_size and self._read() is None):
            raise ValueError(f"{self.path} is in the way of the lock of {self.folder}; move it away")
        self._makes_folder = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._file = open_locked(self.path)
        except InUseError as error:
            raise self._in_use() from error
        with full_disk_errors(self.path):
            self._file.truncate(0)
            self._file.write(json.dumps(self.holder).encode() + b"\n")
            self._file.flush()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._read() == self.holder:
            self.path.unlink()
        self._file.close()
        if self._makes_folder:
            with suppress(OSError):  # the folder is not empty
                self.folder.rmdir()

    def check(self) -> None:
        """Raises InUseError if another process has taken the lock since."""
        if self._read() != self.holder:
            raise self._in_use()

    def _read(self) -> dict[str, object] | None:
        """The holder that the file names; None without the file, or for other content."""
        try:
            holder = json.loads(self.path.read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return holder if isinstance(holder, dict) and holder.keys() == self.holder.keys() else None

    def _in_use(self) -> InUseError:
        holder = self._read()
        name = "another process"
        if holder is not None:
            name = f"process {holder['pid']} on host {holder['host']}, since {holder['since']}"
        return InUseError(
            f"{self.option} {self.folder} is being written by {name}; wait for it, end it, or name another folder"
        )


@contextmanager
def full_disk_errors(path: Path) -> Iterator[None]:
    """Gives errors of a full disk, which name no file, the name of `path`, which the block writes."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL and error.filename is None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def refuse_nonempty(path: Path) -> None:
    """Raises ValueError unless the folder `path` is empty."""
    if any(path.iterdir()):
        raise ValueError(f"{path} exists and is not empty; name another folder")


@contextmanager
def _staging(real: Path) -> Iterator[Path]:
    """The staging folder of `real`, locked and otherwise empty; removed afterwards."""
    folder = staging_path(real)
    real.parent.mkdir(parents=True, exist_ok=True)
    with full_disk_errors(real), _open_staging(folder, real):
        _finish(folder, real)
        try:
            yield folder
        finally:
            _finish(folder, real)  # also where the second of two renames failed
            (folder / LOCK).unlink(missing_ok=True)
            with suppress(OSError):  # the next writer has already entered it
                folder.rmdir()


def _open_staging(folder: Path, real: Path) -> BinaryIO:
    while True:
        with suppress(FileExistsError):
            folder.mkdir()
        try:
            check_staging(real)
            return open_locked(folder / LOCK)
        except FileNotFoundError:  # its last user has just removed the folder
            continue
        except InUseError as error:
            raise InUseError(f"{real} is being written by another process; wait for it or name another") from error


def _finish(folder: Path, real: Path) -> None:
    """Invariant 2. Deletes nothing if it cannot move `new` to its place."""
    new = folder / NEW
    old = folder / OLD
    if new.is_dir() and old.is_dir() and not real.exists():
        os.rename(new, real)
        _sync(real.parent)
    for path in (new, old):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _replace_folder(new: Path, real: Path, old: Path) -> None:
    if not real.exists():
        os.rename(new, real)
    elif not _exchange(new, real):
        os.rename(real, old)
        os.rename(new, real)
    _sync(real.parent)


def _exchange(source: Path, target: Path) -> bool:
    """Exchanges two names atomically; False if the system cannot. Raises OSError."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(target))


def _is_same_file(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync(Path(parent, name))
        _sync(Path(parent))


def _sync(path: Path) -> None:
    """fsync of a file's content or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
