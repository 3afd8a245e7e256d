"""The unnamed file that the disk stores write activations to, and the allocation of its extents."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import tempfile
from pathlib import Path
from typing import IO, final

from ebbtide.devices.process import watch_forks
from ebbtide.errors import PolicyError, StoreFullError
from ebbtide.stores.host_memory import refuse_other_systems
from ebbtide.stores.store import Extent, ExtentAllocator
from ebbtide.units import format_size

_LOG = logging.getLogger(__name__)

GROWTH_BYTES = 64 * 2**20
_NO_ROOM = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)
_NO_FILES = (errno.EMFILE, errno.ENFILE)


@final
class OpenFile:
    """A file without a name, which worker threads read and write.

    It stays open until no object refers to it.

    Args:
        directory: where to create it.

    Raises:
        PolicyError: ``directory`` is missing or cannot be written to.
    """

    def __init__(self, directory: Path) -> None:
        self._file: IO[bytes] | None = None
        refuse_other_systems()
        try:
            # It never has a name (O_TMPFILE), which a process that is killed could leave behind.
            self._file = tempfile.TemporaryFile(  # noqa: SIM115 - closed by __del__
                prefix="ebbtide-", dir=directory, buffering=0
            )
        except OSError as error:
            if error.errno in _NO_FILES:
                advice = "close files, or raise the limit of open files: `ulimit -n`"
            elif error.errno in _NO_ROOM:
                advice = 'free some space, or name another directory: store="disk:/some/dir"'
            else:
                advice = (
                    'name a directory that exists and is writable, such as store="disk:/some/dir"'
                )
            raise PolicyError(
                f"cannot create a file in {directory}: {error.strerror}; {advice}"
            ) from error
        self.fd = self._file.fileno()

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, view: memoryview, offset_bytes: int) -> None:
        """Write all of ``view`` at an offset."""
        while view:
            written = os.pwrite(self.fd, view, offset_bytes)
            view, offset_bytes = view[written:], offset_bytes + written

    def read(self, view: memoryview, offset_bytes: int) -> None:
        """Fill ``view`` from an offset."""
        while view:
            read = os.preadv(self.fd, [view], offset_bytes)
            if read == 0:
                raise OSError(errno.EIO, "a file of offloaded bytes ended early")
            view, offset_bytes = view[read:], offset_bytes + read

    def reserve(self, extent: Extent) -> None:
        """Reserve the space on the disk of an extent, in which nothing has been written yet.

        The file grows if the extent ends beyond its end.

        Raises:
            OSError: the disk has no room.
        """
        os.posix_fallocate(self.fd, *extent)  # glibc writes where a file system does not have it


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
    def room_bytes(self) -> int:
        disk = os.fstatvfs(self.open.fd)
        return self.capacity_bytes + disk.f_bavail * disk.f_frsize

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
        size_bytes = self._extents.round_up(size_bytes)
        try:
            self.open.reserve(Extent(self.capacity_bytes, size_bytes))
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            os.ftruncate(self.open.fd, self.capacity_bytes)  # frees the part that was reserved
            return False
        self._extents.grow(size_bytes)
        _LOG.debug(
            "file in %s: %s more, %s in all",
            self.directory,
            format_size(size_bytes),
            format_size(self.capacity_bytes),
        )
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
