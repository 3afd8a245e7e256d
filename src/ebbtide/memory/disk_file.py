"""The unnamed file that the disk stores write activations to, and the allocation of its extents."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import final

from ebbtide.errors import PolicyError, StoreFullError
from ebbtide.forks import watch_forks
from ebbtide.memory.extents import Extent, ExtentAllocator
from ebbtide.units import format_size

GROWTH_BYTES = 64 * 2**20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class AbstractFile(ABC):
    """A file, or a part of one, that worker threads read and write."""

    @abstractmethod
    def write(self, view: memoryview, offset_bytes: int) -> None:
        """Write all of ``view`` at an offset."""

    @abstractmethod
    def read(self, view: memoryview, offset_bytes: int) -> None:
        """Fill ``view`` from an offset."""

    @abstractmethod
    def read_ahead(self, extent: Extent) -> None:
        """Tell the kernel that an extent will be read soon."""


@final
class OpenFile(AbstractFile):
    """A file without a name, which stays open until no object refers to it.

    Args:
        directory: where to create it.

    Raises:
        PolicyError: ``directory`` is missing or cannot be written to.
    """

    def __init__(self, directory: Path) -> None:
        self.fd = -1
        try:
            self.fd, name = tempfile.mkstemp(prefix="ebbtide-", dir=directory)
        except OSError as error:
            raise PolicyError(
                f"cannot create a file in {directory}: {error.strerror}; name a directory that "
                f'exists and is writable, such as store="disk:/some/dir"'
            ) from error
        os.unlink(name)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def write(self, view: memoryview, offset_bytes: int) -> None:
        while view:
            written = os.pwrite(self.fd, view, offset_bytes)
            view, offset_bytes = view[written:], offset_bytes + written

    def read(self, view: memoryview, offset_bytes: int) -> None:
        while view:
            read = os.preadv(self.fd, [view], offset_bytes)
            if read == 0:
                raise OSError(errno.EIO, "a file of offloaded bytes ended early")
            view, offset_bytes = view[read:], offset_bytes + read

    def read_ahead(self, extent: Extent) -> None:
        os.posix_fadvise(self.fd, extent.offset_bytes, extent.size_bytes, os.POSIX_FADV_WILLNEED)


@final
class DiskFile:
    """An unnamed file, which disappears when the process ends, and the allocator of its extents.

    Args:
        directory: where to create it; None: the system's directory for temporary files.
        growth_bytes: the least by which the file grows, if the disk has that much room.

    Raises:
        PolicyError: ``directory`` is missing or cannot be written to.
    """

    def __init__(self, directory: Path | None = None, growth_bytes: int = GROWTH_BYTES) -> None:
        self._growth_bytes = growth_bytes
        self.directory = default_directory() if directory is None else directory
        self._extents = ExtentAllocator(mmap.ALLOCATIONGRANULARITY)
        self._open: OpenFile | None = OpenFile(self.directory)
        watch_forks(self)

    def note_fork(self) -> None:
        """Leave the file to the parent process: a child that lives long would keep its space."""
        self.close()

    @property
    def open(self) -> OpenFile:
        """The open file. A job that reads or writes must keep a reference to it."""
        assert self._open is not None, "the store is closed"
        return self._open

    def close(self) -> None:
        """Drop the file. It is closed after the last job that refers to it."""
        self._open = None

    @property
    def capacity_bytes(self) -> int:
        return self._extents.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._extents.used_bytes

    def allocate(self, size_bytes: int) -> Extent:
        """Allocate an extent whose space on the disk is reserved.

        Raises:
            StoreFullError: the disk has no room for it.
        """
        extent = self._extents.allocate(size_bytes)
        if extent is None:
            missing_bytes = self._extents.missing_bytes(size_bytes)
            if not self._grow(max(missing_bytes, self._growth_bytes)) and not self._grow(
                missing_bytes
            ):
                raise StoreFullError(
                    errno.ENOSPC,
                    f"no room for {format_size(missing_bytes)} more in {self.directory}, where "
                    f"{format_size(self.capacity_bytes)} of activations are already; free "
                    f'some, choose another directory (store="disk:/some/dir"), or offload fewer '
                    f"layers (ActivationPolicy(num_layers=...))",
                )
            extent = self._extents.allocate(size_bytes)
            assert extent is not None
        return extent

    def free(self, extent: Extent) -> None:
        self._extents.free(extent)

    def _grow(self, size_bytes: int) -> bool:
        """Reserve space on disk now, so that a full disk is noticed here and not by a write.

        Returns:
            Whether the disk had room.
        """
        fd, size_bytes = self.open.fd, self._extents.round_up(size_bytes)
        try:
            os.posix_fallocate(fd, self.capacity_bytes, size_bytes)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            os.ftruncate(fd, self.capacity_bytes)  # free the part that could be reserved
            return False
        self._extents.grow(size_bytes)
        return True


def default_directory() -> Path:
    """The system's directory for temporary files.

    Raises:
        PolicyError: the system has none that is writable.
    """
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise PolicyError(
            f'{error.strerror}; name a directory, such as store="disk:/some/dir"'
        ) from error
