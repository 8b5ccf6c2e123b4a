"""Checks that a program may write its output, before any work and before anything is deleted.

Invariants: an output that is, contains or is inside an input is refused. An existing file or folder is replaced only if
the user asked for it and one of our programs wrote it, and a folder only if it contains nothing else.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from slipstream.models.files.atomic import LOCK, NEW, OLD, check_staging, recover, staged_name

Inputs = Mapping[str, Iterable[str | None]]  # option -> its paths; hub ids and None are ignored
SHOWN = 3


@dataclass(frozen=True, slots=True)
class FolderKind:
    """The files that a program writes into a folder: `markers` identify it, `patterns` are regular expressions for all
    other paths (relative, joined by /)."""

    name: str  # "a prepared dataset"
    markers: tuple[str, ...]
    patterns: tuple[str, ...] = ()

    def below(self, folder: str) -> tuple[str, ...]:
        """Expressions for all its paths inside `folder`, itself an expression."""
        return tuple(f"{folder}/(?:{path})" for path in (*map(re.escape, self.markers), *self.patterns))

    def check(self, folder: Path) -> None:
        """Raises ValueError unless `folder` is empty, or of this kind without foreign files."""
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
        """Sorted paths of the files below `folder`, relative to it, that this kind does not have."""
        files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
        return sorted(str(path) for path in files if not self.holds(path))

    def holds(self, path: PurePath) -> bool:
        """Whether `path`, relative to such a folder, is part of it or was left by a killed writer."""
        parts = _finished(path.parts)
        if parts is None:
            return True
        name = "/".join(parts)
        return name in self.markers or any(re.fullmatch(pattern, name) for pattern in self.patterns)


CHECKPOINT = FolderKind(
    "a draft checkpoint",
    ("config.json", "run.json"),
    (r"model\.safetensors", r"adapter_(config\.json|model\.safetensors)"),
)
STEP = FolderKind(
    "a training checkpoint", ("state/progress.json", *CHECKPOINT.markers), (*CHECKPOINT.patterns, "state/.+")
)
DATASET = FolderKind(
    "a prepared dataset",
    ("report.json", "dataset_dict.json"),
    (r"rows\.arrow", r"(train|heldout)/([^/]+\.arrow|dataset_info\.json|state\.json)"),
)


def check_output_folder(
    output: str, kind: FolderKind, inputs: Inputs, *, overwrite: bool, option: str = "output"
) -> None:
    """Raises ValueError unless `output` may be written and, if it exists and is not empty, is of this kind and
    `overwrite` is set. Recovers from a killed writer of `output` first."""
    path = Path(output)
    _check_is_folder(path, option)
    _check_writable(path, path.resolve().parent, option)
    _check_apart(path, inputs, option)
    check_staging(path)
    recover(path)
    if not path.exists() or not any(path.iterdir()):
        return
    kind.check(path)  # first, so nobody is told to overwrite a foreign folder
    if not overwrite:
        raise ValueError(f"{option} {output} exists; name another folder or add --overwrite")


def check_output_file(
    output: str,
    is_ours: Callable[[Path], bool],
    kind: str,
    inputs: Inputs,
    *,
    overwrite: bool,
    option: str = "output",
) -> None:
    """As `check_output_folder` for a file; an empty file counts as absent. `is_ours` recognises `kind`, for example "a
    token map"."""
    path = Path(output)
    _check_file_place(path, inputs, option)
    if not path.exists() or path.stat().st_size == 0:
        return
    if not is_ours(path):
        raise ValueError(f"{option} {output} is not {kind} and is not replaced; name another file")
    if not overwrite:
        raise ValueError(f"{option} {output} exists; name another file or add --overwrite")


def begins_with(beginning: bytes) -> Callable[[Path], bool]:
    """Returns the function that recognises files by their beginning."""

    def begins(path: Path) -> bool:
        with path.open("rb") as file:
            return file.read(len(beginning)) == beginning

    return begins


def check_working_folder(output: str, inputs: Inputs, option: str = "output") -> None:
    """For programs that add or replace single files in a folder: raises ValueError if `output` is a file, an input or
    inside one, or cannot be written."""
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
    """`place`: the folder that files are created in; it and its parents may not exist yet."""
    existing = next(path for path in (place, *place.parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"{option} {output} lies below {existing}, which is a file; name another place")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {output} cannot be written: you may not write to {existing}; name another place")


def _check_apart(output: Path, inputs: Inputs, option: str, *, may_hold: bool = False) -> None:
    """Raises ValueError if `output` is an input, is inside one or, unless `may_hold`, contains one, links resolved."""
    output_ids = _identities(output)
    for name, path in ((name, Path(value)) for name, values in inputs.items() for value in values if value):
        if not path.exists():  # a hub id, or a path that the program will report as missing
            continue
        input_ids = _identities(path)
        if input_ids[0] in output_ids:
            relation = "is" if input_ids[0] == output_ids[0] and output.exists() else "lies in"
        elif output.exists() and not may_hold and output_ids[0] in input_ids:
            relation = "holds"
        else:
            continue
        raise ValueError(f"{option} {output} {relation} {name} {path}, which is read; name another {option}")


def _identities(path: Path) -> list[tuple[int, int]]:
    """Device and inode of `path`, where it exists, and of every folder above it."""
    real = path.resolve()
    stats = [folder.stat() for folder in (real, *real.parents) if folder.exists()]
    return [(stat.st_dev, stat.st_ino) for stat in stats]


def _finished(parts: tuple[str, ...]) -> tuple[str, ...] | None:
    """The final name of a path that is being written: .NAME.tmp/new/... is NAME/...; None for the writer's lock."""
    for place, part in enumerate(parts[:-1]):
        name = staged_name(part)
        if name is not None and parts[place + 1] == LOCK:
            return None
        if name is not None and parts[place + 1] in (NEW, OLD):
            below = _finished(parts[place + 2 :])
            return None if below is None else (*parts[:place], name, *below)
    return parts


def step_folders(output: Path) -> list[Path]:
    """step-N folders, oldest first; not a user's own, such as a copy named step-N-good."""
    folders = (path for path in output.glob("step-*") if re.fullmatch(r"step-\d+", path.name))
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step-")))
