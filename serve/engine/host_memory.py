"""Host memory that this process may still use, limited by the machine and by its cgroups.

The file cache, such as a checkpoint just read, counts as free, since the kernel drops it on demand.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil


class Hierarchy(NamedTuple):
    """Files in which a cgroup version keeps memory limits, and the keys of the file cache in memory.stat."""

    controller: str  # in /proc/self/cgroup; also the folder
    limit: str
    usage: str
    cached: tuple[str, str]


HIERARCHIES = (
    Hierarchy("", "memory.max", "memory.current", ("active_file", "inactive_file")),  # version 2
    Hierarchy(
        *("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"), ("total_active_file", "total_inactive_file")
    ),
)


def available_bytes(root: Path = Path("/")) -> int:
    """Returns the available bytes. `root`: folder in which proc/ and sys/ are mounted."""
    return max(0, min([psutil.virtual_memory().available, *_left_in_cgroups(root)]))


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Yields the bytes left in each cgroup of this process, from the innermost to the outermost visible one."""
    membership = root / "proc" / "self" / "cgroup"
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        for hierarchy in HIERARCHIES:
            if hierarchy.controller not in controllers.split(","):
                continue
            mount = root / "sys" / "fs" / "cgroup" / hierarchy.controller
            group = mount / path.lstrip("/")
            for folder in (group, *group.parents[: len(group.parts) - len(mount.parts)]):
                yield from _left(folder, hierarchy)


def _left(folder: Path, hierarchy: Hierarchy) -> Iterator[int]:
    limit = folder / hierarchy.limit
    usage = folder / hierarchy.usage
    if not limit.exists() or not usage.exists() or limit.read_text().strip() == "max":
        return
    lines = (folder / "memory.stat").read_text().splitlines()
    cached = sum(int(value) for name, value in map(str.split, lines) if name in hierarchy.cached)
    yield int(limit.read_text()) - int(usage.read_text()) + cached
