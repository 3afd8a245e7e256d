"""The limits of the control group (cgroup) of this process: a container's, or a batch job's.

The kernel kills processes of a group that passes its limit on memory, however much RAM the machine
has free. Both versions of control groups are read. A group is limited by those above it, too.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Final, NamedTuple

_NO_LIMIT_BYTES: Final = 2**60  # version 1 has no word for "no limit", only a very large number
_MEMORY: Final = {  # by version: files with the limits, with the use, and keys of memory.stat
    1: (
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
    2: (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")),
}


class MemoryLimit(NamedTuple):
    """The limit on memory that is nearest.

    Attributes:
        limit_bytes: the most memory that the group may use.
        used_bytes: what it uses now, without the page cache, which the kernel can drop.
    """

    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        """What may still be allocated."""
        return max(0, self.limit_bytes - self.used_bytes)


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Return the limit on the memory of this process that is nearest; None if there is none.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    found = [
        limit
        for version, directory in _directories("memory", root)
        if (limit := _read_memory(version, directory)) is not None
    ]
    return min(found, key=lambda limit: limit.free_bytes, default=None)


def cpu_limit(root: Path = Path("/")) -> float | None:
    """Return how many cores' time this process may use; None if there is no limit.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    found = []
    for version, directory in _directories("cpu", root):
        if version == 2:
            words = _read(directory / "cpu.max").split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [_read(directory / name).strip() for name in names]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def _read_memory(version: int, directory: Path) -> MemoryLimit | None:
    limits, usage, cached = _MEMORY[version]
    words = [_read(directory / name).strip() for name in limits]
    sizes = [int(word) for word in words if word.isdigit()]
    if not sizes or min(sizes) >= _NO_LIMIT_BYTES:
        return None
    used = _read(directory / usage).strip()
    if not used.isdigit():
        return None
    lines = (line.split() for line in _read(directory / "memory.stat").splitlines())
    stat = {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}
    cached_bytes = sum(stat.get(key, 0) for key in cached)
    return MemoryLimit(min(sizes), max(0, int(used) - cached_bytes))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


@functools.lru_cache(maxsize=8)
def _directories(controller: str, root: Path) -> tuple[tuple[int, Path], ...]:
    """Return the version and the directory of this process's group and of those above it.

    They are found once, because groups change rarely and free memory is asked for often.
    """
    if sys.platform != "linux":
        return ()
    groups = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            groups[2] = path
        elif controller in controllers.split(","):
            groups[1] = path
    found: list[tuple[int, Path]] = []
    for version, group in groups.items():
        mounted = _mounted(version, controller, root)
        if mounted is not None:
            inside, mount = mounted
            # A container may see its own group as the root of what is mounted.
            below = group.removeprefix(inside.rstrip("/")).strip("/")
            directory = mount / below if group.startswith(inside) else mount
            found.append((version, directory))
            while directory != mount:
                directory = directory.parent
                found.append((version, directory))
    return tuple(found)


def _mounted(version: int, controller: str, root: Path) -> tuple[str, Path] | None:
    """Return which group a hierarchy is mounted from, and where."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, dash, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if not dash or len(fields) < 5 or not kinds:
            continue
        options = kinds[-1].split(",")
        if (
            kinds[0] == "cgroup2"
            if version == 2
            else kinds[0] == "cgroup" and controller in options
        ):
            return fields[3], root / fields[4].lstrip("/")
    return None
