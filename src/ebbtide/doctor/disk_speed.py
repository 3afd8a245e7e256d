"""Measures the disk behind a directory: what it takes and gives when the page cache does not help.

The file has no name, so nothing is left behind, however the process ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from ebbtide.memory.disk_file import OpenFile
from ebbtide.memory.extents import Extent

_CHUNK_BYTES = 4 * 2**20
_FIRST_BYTES = 16 * 2**20  # written first, to see how much can be written in time
_RESIDENT = 0.1  # a file of which more is in the page cache is not read from the disk


@final
@dataclass(frozen=True)
class DiskFigures:
    """What one file took.

    Attributes:
        size_bytes: size of the file.
        write_s: seconds until all was on the disk.
        cached_write_s: seconds until all was in the page cache.
        read_s: seconds to read it.
        cached_share: the part of the file that was still in the page cache before it was read;
            None: the system does not say.
    """

    size_bytes: int
    write_s: float
    cached_write_s: float
    read_s: float
    cached_share: float | None

    @property
    def write_bytes_per_s(self) -> float:
        return self.size_bytes / self.write_s

    @property
    def read_bytes_per_s(self) -> float:
        return self.size_bytes / self.read_s

    @property
    def read_from_disk(self) -> bool:
        """Whether the page cache is known to have been empty."""
        return self.cached_share is not None and self.cached_share <= _RESIDENT

    def figures(self) -> dict[str, Any]:
        """Return the figures for a JSON file."""
        return {
            "size_bytes": self.size_bytes,
            "write_bytes_per_s": self.write_bytes_per_s,
            "cached_write_bytes_per_s": self.size_bytes / self.cached_write_s,
            "read_bytes_per_s": self.read_bytes_per_s,
            "cached_share_before_read": self.cached_share,
        }


def measure_disk(directory: Path, budget_s: float, room_bytes: int) -> DiskFigures:
    """Write a file, wait until it is on the disk, and read it back.

    Args:
        directory: where.
        budget_s: about how long this may take.
        room_bytes: the largest file to write.

    Raises:
        PolicyError: the directory is missing or cannot be written to.
        OSError: the disk has no room, or fails.
    """
    file = OpenFile(directory)
    # A disk that compresses would store equal bytes in no time.
    chunk = memoryview(os.urandom(min(_CHUNK_BYTES, max(room_bytes, mmap.PAGESIZE))))
    first_bytes = min(_FIRST_BYTES, room_bytes // 2)
    begin_s = time.perf_counter()
    _write(file, chunk, 0, first_bytes)
    os.fsync(file.fd)
    rate_bytes_per_s = first_bytes / (time.perf_counter() - begin_s)
    left_bytes = (budget_s - (time.perf_counter() - begin_s)) * rate_bytes_per_s / 2
    size_bytes = int(max(2 * first_bytes, min(room_bytes, left_bytes)))
    size_bytes -= size_bytes % mmap.PAGESIZE
    file.reserve(Extent(first_bytes, size_bytes - first_bytes))  # as the store does
    begin_s = time.perf_counter()
    _write(file, chunk, 0, size_bytes)
    cached_write_s = time.perf_counter() - begin_s
    os.fsync(file.fd)
    write_s = time.perf_counter() - begin_s
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    cached_share = _cached_share(file, size_bytes)
    target = memoryview(bytearray(len(chunk)))
    begin_s = time.perf_counter()
    for begin in range(0, size_bytes, len(chunk)):
        file.read(target[: size_bytes - begin], begin)
    read_s = time.perf_counter() - begin_s
    return DiskFigures(size_bytes, write_s, cached_write_s, read_s, cached_share)


def _write(file: OpenFile, chunk: memoryview, begin_bytes: int, end_bytes: int) -> None:
    for begin in range(begin_bytes, end_bytes, len(chunk)):
        file.write(chunk[: end_bytes - begin], begin)


def _cached_share(file: OpenFile, size_bytes: int) -> float | None:
    """Return how much of a file is in the page cache; None if the system does not say."""
    try:
        function = ctypes.CDLL(None).mincore
    except (OSError, AttributeError, TypeError):  # Windows
        return None
    with mmap.mmap(file.fd, size_bytes, access=mmap.ACCESS_COPY) as mapping:
        pages = -(-size_bytes // mmap.PAGESIZE)
        resident = (ctypes.c_ubyte * pages)()
        first = ctypes.c_ubyte.from_buffer(mapping)
        failed = function(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size_bytes), resident
        )
        del first  # the mapping cannot be closed while this refers to it
    return None if failed else sum(page & 1 for page in resident) / pages
