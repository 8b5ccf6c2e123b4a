"""Temporary folders of programs, of which a killed one leaves nothing for long: the next of its kind removes them.

Invariant: only a folder is removed that this user's program has made here and no living one holds. Its owner holds the
lock in it (flock), which a name of our own has only once it is locked.
"""

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from slipstream.models.files.atomic import FOLDER_LOCK, NEW, InUseError, open_locked


class ScratchFolder(TemporaryDirectory[str]):
    """Removes folders of dead programs of this `kind` first."""

    def __init__(self, kind: str) -> None:
        remove_dead(kind)
        super().__init__(prefix=f"slipstream-{kind}-", ignore_cleanup_errors=True)
        new = Path(self.name, NEW)
        self._lock = open_locked(new)
        new.rename(new.with_name(FOLDER_LOCK))

    def cleanup(self) -> None:
        super().cleanup()
        self._lock.close()


def remove_dead(kind: str) -> None:
    for folder in Path(gettempdir()).glob(f"slipstream-{kind}-{'[a-z0-9_]' * 8}"):
        with suppress(OSError, InUseError):
            status = folder.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and (folder / FOLDER_LOCK).is_file()
            if is_ours:
                with open_locked(folder / FOLDER_LOCK):
                    shutil.rmtree(folder)
