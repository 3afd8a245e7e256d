"""The disk tier: one unlinked file, written and read by worker threads.

A write goes straight from the tensor's memory to the file, without a copy in between. A reload maps
the file's bytes instead of reading them into fresh memory: while the page cache still has them that
moves nothing, and fresh memory would cost more in page faults than the copy itself. The mapping is
private, so whoever writes to a reloaded tensor writes to a copy of their own.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import final

import torch

from ebbtide.devices.base import AbstractEvent
from ebbtide.devices.cpu import WorkLane
from ebbtide.errors import PolicyError, StoreFullError
from ebbtide.stores.base import AbstractStore, Slot
from ebbtide.stores.extents import Extent, ExtentAllocator
from ebbtide.units import format_size

_GROWTH_BYTES = 64 * 2**20
_MADV_POPULATE_READ = 22  # Linux 5.14 and later
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@final
class DiskStore(AbstractStore):
    """Bytes of a CPU model in a file without a name, gone when the process is.

    Args:
        directory: where the file lives; None: the system's directory for temporary files.

    Attributes:
        on_progress: called from the writing thread after each finished write, if set.

    Raises:
        PolicyError: ``directory`` is missing or cannot be written to.
    """

    def __init__(self, directory: Path | None = None) -> None:
        super().__init__()
        self.directory = _default_directory() if directory is None else directory
        self._file: _File | None = _File(self.directory)
        self._extents = ExtentAllocator(mmap.ALLOCATIONGRANULARITY)
        self._writer = WorkLane("ebbtide-disk-write", "disk")
        self._reader = WorkLane("ebbtide-disk-read", "disk")
        self.on_progress: Callable[[], None] | None = None

    @property
    def capacity_bytes(self) -> int:
        return self._extents.capacity_bytes

    @property
    def used_bytes(self) -> int:
        self.collect()
        return self._extents.used_bytes

    def offload(self, source: torch.Tensor, ready: AbstractEvent) -> Slot:
        size_bytes = source.numel()
        extent = self._allocate(size_bytes)
        file, view = self._open_file(), source.numpy().data

        def write() -> None:
            ready.synchronize()
            _write_all(file.fd, view, extent.offset_bytes)

        written = self._writer.submit(write, then=self.on_progress)
        return Slot(extent, size_bytes, written, "disk")

    def reload(self, slot: Slot) -> tuple[torch.Tensor, AbstractEvent]:
        file, offset, offloaded = self._open_file(), slot.extent.offset_bytes, slot.offloaded
        try:
            mapping = _Mapping(
                file.fd,
                slot.size_bytes,
                flags=mmap.MAP_PRIVATE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
                offset=offset,
            )
        except OSError:  # out of mappings or of file descriptors: fresh memory always works
            buffer = torch.empty(slot.size_bytes, dtype=torch.uint8)
            view = buffer.numpy().data

            def fill() -> None:
                offloaded.synchronize()
                _read_all(file.fd, view, offset)

            event = self._reader.submit(fill)
            slot.readers.append(event.query)
            return buffer, event
        buffer = torch.frombuffer(mapping, dtype=torch.uint8)
        gone = weakref.ref(mapping)
        slot.readers.append(lambda: gone() is None)
        address = buffer.data_ptr()
        size_bytes = slot.size_bytes

        def read_ahead(_alive: torch.Tensor = buffer) -> None:
            offloaded.synchronize()
            _populate(address, size_bytes)

        return buffer, self._reader.submit(read_ahead)

    def read_ahead(self, slot: Slot) -> None:
        file, extent = self._open_file(), slot.extent

        def advise() -> None:
            os.posix_fadvise(
                file.fd, extent.offset_bytes, extent.size_bytes, os.POSIX_FADV_WILLNEED
            )

        self._reader.submit(advise)

    def close(self) -> None:
        self._writer.close()
        self._reader.close()
        self._file = None

    def _open_file(self) -> _File:
        assert self._file is not None, "the store is closed"
        return self._file

    def _allocate(self, size_bytes: int) -> Extent:
        self.collect()
        extent = self._extents.allocate(size_bytes)
        if extent is None:
            missing_bytes = self._extents.missing_bytes(size_bytes)
            if not self._grow(max(missing_bytes, _GROWTH_BYTES)) and not self._grow(missing_bytes):
                raise StoreFullError(
                    errno.ENOSPC,
                    f"no room for {format_size(missing_bytes)} more in {self.directory}, where "
                    f"{format_size(self._extents.capacity_bytes)} of activations are already; free "
                    f'some, choose another directory (store="disk:/some/dir"), or offload fewer '
                    f"layers (ActivationPolicy(num_layers=...))",
                )
            extent = self._extents.allocate(size_bytes)
            assert extent is not None
        return extent

    def _grow(self, size_bytes: int) -> bool:
        """Reserve bytes on disk now, so that a full disk shows here and not in a write."""
        size_bytes = self._extents.round_up(size_bytes)
        capacity_bytes = self._extents.capacity_bytes
        fd = self._open_file().fd
        try:
            os.posix_fallocate(fd, capacity_bytes, size_bytes)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            os.ftruncate(fd, capacity_bytes)  # what did not suffice is for others to use
            return False
        self._extents.grow(size_bytes)
        return True

    def _free(self, slot: Slot) -> None:
        self._extents.free(slot.extent)


@final
class _Mapping(mmap.mmap):
    """A mapped extent that can be referred to weakly, so that its end can be seen."""


@final
class _File:
    """An open file without a name. Work that is queued holds it, so it closes after the last."""

    def __init__(self, directory: Path) -> None:
        self.fd = -1
        try:
            self.fd, name = tempfile.mkstemp(prefix="ebbtide-", dir=directory)
        except OSError as error:
            raise PolicyError(
                f"cannot create a file in {directory}: {error.strerror}; name a directory that "
                f'exists and can be written to, such as store="disk:/some/dir"'
            ) from error
        os.unlink(name)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def _default_directory() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise PolicyError(
            f'{error.strerror}; name a directory, such as store="disk:/some/dir"'
        ) from error


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _read_all(fd: int, view: memoryview, offset: int) -> None:
    while view:
        read = os.preadv(fd, [view], offset)
        if read == 0:
            raise OSError(errno.EIO, "the file of offloaded activations ended early")
        view, offset = view[read:], offset + read


def _populate(address: int, size_bytes: int) -> None:
    """Read a mapping's bytes ahead. Where the kernel cannot, they come on first use."""
    if _MADVISE is not None:
        _MADVISE(address, size_bytes, _MADV_POPULATE_READ)


def _find_madvise() -> Callable[[int, int, int], int] | None:
    # Through ctypes because mmap.madvise holds the interpreter lock while it reads.
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    madvise.restype = ctypes.c_int
    return madvise


_MADVISE = _find_madvise()
