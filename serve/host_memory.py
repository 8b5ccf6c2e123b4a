"""How many bytes this process may still take on the host: what the machine has left, and what its cgroups allow.

Pages of the file cache count as free, since the kernel drops them on demand: a checkpoint just read is one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil


class Hierarchy(NamedTuple):
    """Where a version of cgroups keeps memory limits, and the names of its files and of the file cache in them."""

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
    """`root`: where proc/ and sys/ are mounted."""
    return max(0, min([psutil.virtual_memory().available, *_left_in_cgroups(root)]))


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Of every group that this process is in, from its own up to the outermost that is visible here."""
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
    limit, usage = folder / hierarchy.limit, folder / hierarchy.usage
    if not limit.exists() or not usage.exists() or limit.read_text().strip() == "max":
        return
    lines = (folder / "memory.stat").read_text().splitlines()
    cached = sum(int(value) for name, value in map(str.split, lines) if name in hierarchy.cached)
    yield int(limit.read_text()) - int(usage.read_text()) + cached
