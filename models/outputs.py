"""Whether a program may write where it is told to: checked before any work and before anything is deleted.

Invariants: an output that is, holds or lies in an input is refused. A file or folder that exists is replaced only if
the user asked for it and a program of ours wrote it; a folder moreover only if it holds nothing else.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from slipstream.models.atomic import LOCK, NEW, OLD, check_staging, recover, staged_name

Inputs = Mapping[str, Iterable[str | None]]  # option -> the paths it names; hub ids and None are passed over
SHOWN = 3


@dataclass(frozen=True, slots=True)
class FolderKind:
    """What a program writes into a folder: the files by which it is known, and expressions for the paths of all others
    (relative, parts joined by /)."""

    name: str  # "a prepared dataset"
    markers: tuple[str, ...]
    others: tuple[str, ...] = ()

    def below(self, folder: str) -> tuple[str, ...]:
        """Expressions for all its paths where it lies in `folder`, an expression itself."""
        return tuple(f"{folder}/(?:{path})" for path in (*map(re.escape, self.markers), *self.others))

    def check(self, folder: Path) -> None:
        """Raises ValueError unless `folder` is empty, or of this kind with nothing of anybody else in it."""
        if not folder.is_dir():
            raise ValueError(f"{folder} is a file, not {self.name}, and is not replaced; name another folder")
        if not any(folder.iterdir()):
            return
        missing = [marker for marker in self.markers if not (folder / marker).is_file()]
        if missing:
            raise ValueError(
                f"{folder} is not {self.name} (it has no {missing[0]}) and is not replaced; name another folder"
            )
        foreign = self.foreign(folder)
        if foreign:
            more = ", ..." if len(foreign) > SHOWN else ""
            raise ValueError(
                f"{folder} holds {', '.join(foreign[:SHOWN])}{more} beside {self.name} and is not replaced; move that "
                "away or name another folder"
            )

    def foreign(self, folder: Path) -> list[str]:
        """Files below `folder`, relative to it, that are no part of this kind; sorted."""
        files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
        return sorted(str(path) for path in files if not self.holds(path))

    def holds(self, path: PurePath) -> bool:
        """Is `path`, relative to such a folder, a part of it, or of what a killed writer left there?"""
        parts = _finished(path.parts)
        if parts is None:
            return True
        name = "/".join(parts)
        return name in self.markers or any(re.fullmatch(pattern, name) for pattern in self.others)


CHECKPOINT = FolderKind("a draft checkpoint", ("config.json", "run.json"), (r"model\.safetensors",))
STEP = FolderKind(
    "a training checkpoint", ("state/progress.json", *CHECKPOINT.markers), (*CHECKPOINT.others, "state/.+")
)
DATASET = FolderKind(
    "a prepared dataset",
    ("report.json", "dataset_dict.json"),
    (r"rows\.arrow", r"(train|heldout)/([^/]+\.arrow|dataset_info\.json|state\.json)"),
)


def check_output_folder(
    output: str, kind: FolderKind, inputs: Inputs, *, overwrite: bool, option: str = "output"
) -> None:
    """Raises ValueError unless `output` may be written and, where it exists and is not empty, `overwrite` allows that
    and it is of this kind. Puts back what a killed writer of `output` was about to replace."""
    path = Path(output)
    _check_is_folder(path, option)
    _check_writable(path, path.resolve().parent, option)
    _check_apart(path, inputs, option)
    check_staging(path)
    recover(path)
    if not path.exists() or not any(path.iterdir()):
        return
    kind.check(path)  # first, so that no one is told to overwrite what is not ours
    if not overwrite:
        raise ValueError(f"{option} {output} exists; name another folder or add --overwrite")


def check_output_file(
    output: str,
    is_ours: Callable[[Path], bool],
    what: str,
    inputs: Inputs,
    *,
    overwrite: bool,
    option: str = "output",
) -> None:
    """As `check_output_folder` for a file, where an empty one counts as absent. `is_ours` tells `what`, for example "a
    token map", from other files."""
    path = Path(output)
    _check_file_place(path, inputs, option)
    if not path.exists() or path.stat().st_size == 0:
        return
    if not is_ours(path):
        raise ValueError(f"{option} {output} is not {what} and is not replaced; name another file")
    if not overwrite:
        raise ValueError(f"{option} {output} exists; name another file or add --overwrite")


def check_new_file(output: str, inputs: Inputs, *, option: str = "output") -> None:
    """Raises ValueError unless `output` may be written and does not exist yet, or is empty."""
    path = Path(output)
    _check_file_place(path, inputs, option)
    if path.exists() and path.stat().st_size:
        raise ValueError(f"{option} {output} exists; name another file")


def check_working_folder(output: str, inputs: Inputs, *, option: str = "output") -> None:
    """For programs that add files to a folder and replace single ones: raises ValueError where `output` is a file, an
    input or in one, or cannot be written."""
    path = Path(output)
    _check_is_folder(path, option)
    _check_writable(path, path.resolve(), option)
    _check_apart(path, inputs, option, may_hold=True)


def _check_file_place(output: Path, inputs: Inputs, option: str) -> None:
    if output.exists() and not output.is_file():
        raise ValueError(f"{option} {output} is {'a folder' if output.is_dir() else 'not a file'}; name a file")
    _check_writable(output, output.resolve().parent, option)
    _check_apart(output, inputs, option)
    check_staging(output)
    recover(output)


def _check_is_folder(output: Path, option: str) -> None:
    if output.exists() and not output.is_dir():
        raise ValueError(f"{option} {output} is a file; name a folder")


def _check_writable(output: Path, place: Path, option: str) -> None:
    """`place`: where files and folders are made, some of its parents perhaps, too."""
    existing = next(path for path in (place, *place.parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"{option} {output} lies below {existing}, which is a file; name another place")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {output} cannot be written: you may not write to {existing}; name another place")


def _check_apart(output: Path, inputs: Inputs, option: str, *, may_hold: bool = False) -> None:
    """Raises ValueError where `output` is an input, lies in one or, unless `may_hold`, holds one, by whatever name."""
    written = _identities(output)
    for name, path in ((name, Path(value)) for name, values in inputs.items() for value in values if value):
        if not path.exists():  # a hub id, or what the program will say is missing
            continue
        read = _identities(path)
        if read[0] in written:
            relation = "is" if read[0] == written[0] and output.exists() else "lies in"
        elif output.exists() and not may_hold and written[0] in read:
            relation = "holds"
        else:
            continue
        raise ValueError(f"{option} {output} {relation} {name} {path}, which is read; name another {option}")


def _identities(path: Path) -> list[tuple[int, int]]:
    """Device and inode of `path`, where it exists, and of every folder above it."""
    real = path.resolve()
    stats = [one.stat() for one in (real, *real.parents) if one.exists()]
    return [(stat.st_dev, stat.st_ino) for stat in stats]


def _finished(parts: tuple[str, ...]) -> tuple[str, ...] | None:
    """What a path is called when its writer is done: .NAME.tmp/new/... is NAME/...; None for the writer's lock."""
    for place, part in enumerate(parts[:-1]):
        name = staged_name(part)
        if name is not None and parts[place + 1] == LOCK:
            return None
        if name is not None and parts[place + 1] in (NEW, OLD):
            below = _finished(parts[place + 2 :])
            return None if below is None else (*parts[:place], name, *below)
    return parts
