"""Which files this process has open below a directory.

Tests count these and not all descriptors of the process: an earlier test's files may close at any
moment, when the garbage collector finds what held them.
"""

from __future__ import annotations

import os
from pathlib import Path

DESCRIPTORS = Path("/proc/self/fd")
"""Where Linux lists them. Other systems have no such directory."""


def open_files(directory: Path) -> list[os.stat_result]:
    """One entry for each descriptor. Files that have been unlinked count, too."""
    found = []
    for descriptor in DESCRIPTORS.iterdir():
        try:
            if os.readlink(descriptor).startswith(f"{directory}/"):
                found.append(descriptor.stat())
        except FileNotFoundError:  # it was the descriptor of the listing itself
            continue
    return found


def num_open(directory: Path) -> int:
    return len(open_files(directory))


def taken_bytes(directory: Path) -> int:
    """What the open files take on the disk. A file with several descriptors counts once."""
    return sum({file.st_ino: file.st_blocks * 512 for file in open_files(directory)}.values())
