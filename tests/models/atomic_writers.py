"""Files and folders that are replaced whole, and writers that are killed before each call of the system. A program,
since a small process forks in a hundredth of the time that tests' own take:

python tests/models/atomic_writers.py ACTION BEFORE AFTER FOLDER      # BEFORE and AFTER: the content, or nothing
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from slipstream.models.files import atomic
from slipstream.models.files.atomic import atomic_file, atomic_folder, recover, remove_folder
from slipstream.models.files.outputs import FolderKind

KIND = FolderKind("a pair", ("a", "b"))


def make(path: Path, content: str):
    """A folder of two files that say the same: half of it shows."""
    path.mkdir()
    for name in KIND.markers:
        (path / name).write_text(content)


def write_folder(path: Path):
    with atomic_folder(path, KIND.check) as folder:
        for name in KIND.markers:
            (folder / name).write_text("new")


def write_folder_without_exchange(path: Path):
    atomic._exchange = lambda *_: False  # in a process that ends with this
    write_folder(path)


def write_file(path: Path):
    with atomic_file(path) as temporary:
        temporary.write_text("new")


def killed(action: Callable[[Path], None], path: Path, number: int) -> bool:
    """Runs `action` in a process that is killed before its `number`-th call of the system; False if it has fewer."""
    child = os.fork()
    if child == 0:
        calls = iter(range(number))

        def count(event, _):
            is_call = event == "open" or event.startswith(("os.", "fcntl."))
            if is_call and next(calls, None) is None:
                signal.raise_signal(signal.SIGKILL)

        sys.addaudithook(count)
        try:
            action(path)
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def content(path: Path) -> str | None:
    """The text in `path`, a file or a folder of equal files; None if it does not exist."""
    if path.is_dir():
        assert sorted(file.name for file in path.iterdir()) == ["a", "b"]
        texts = {file.read_text() for file in path.iterdir()}
        assert len(texts) == 1
        return texts.pop()
    return path.read_text() if path.exists() else None


def check_kills(action: Callable[[Path], None], before: str | None, after: str | None, folder: Path):
    """`before` or `after` is there, once recovered, also if recovering is killed; and nothing beside it."""
    number = 0
    contents = set()
    is_done = False
    while not is_done:
        path = folder / str(number) / "name"
        path.parent.mkdir()
        if before is not None:
            path.write_text(before) if action is write_file else make(path, before)
        is_done = not killed(action, path, number)
        if action is not write_folder_without_exchange:
            assert content(path) in (before, after)
        killed(recover, path, number % 17)
        recover(path)
        contents.add(content(path))
        assert [entry.name for entry in path.parent.iterdir()] == ([] if content(path) is None else ["name"])
        number += 1
    assert number > 8
    assert content(path) == after
    assert contents == {before, after}


if __name__ == "__main__":
    ACTIONS = {
        action.__name__: action for action in (write_folder, write_folder_without_exchange, write_file, remove_folder)
    }
    name, *contents, folder = sys.argv[1:]
    check_kills(ACTIONS[name], *(text or None for text in contents), Path(folder))
