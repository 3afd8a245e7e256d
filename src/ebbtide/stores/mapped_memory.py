"""Memory-mapped files for weights, gradients and optimizer state that are offloaded to disk.

The host reads and writes them in place. The mapping is shared and the files have no name. Their
pages count as memory of the process (RSS) while they are mapped in. `page_out` removes them from
the process and is safe at any moment, even during reads and writes: written data stays in the file
or in the kernel's page cache, and the next access maps it in again.

[Note: few files] A model has thousands of such tensors, and a process may open only about a
thousand files. So a file is mapped as a whole, and its parts are the slots. The file is sparse:
disk is reserved for a part when the part is allocated, and given back when the last tensor that
refers to the part is gone. Each new file has as much room as all before it, so even a terabyte
takes less than twenty files.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch

from ebbtide.devices.process import watch_forks
from ebbtide.errors import StoreFullError
from ebbtide.stores import host_memory
from ebbtide.stores.disk_file import OpenFile
from ebbtide.stores.host_memory import HostMemory, advise, make_private, whole_pages
from ebbtide.stores.store import ALREADY_REACHED, Extent, ExtentAllocator, RestingSlot
from ebbtide.units import format_size

_MADV_REMOVE = 9
_LEAST_FILE_BYTES = 64 * 2**20  # of address space; the disk has only what is in use


@final
class _MappedFile:
    """One mapped file and the extents of it that are in use.

    Args:
        directory: where to create the file.
        capacity_bytes: the size of the mapping. The file is as large, and empty.

    Attributes:
        file: the file.
        address: where the mapping begins.
    """

    def __init__(self, directory: Path, capacity_bytes: int) -> None:
        self.file = OpenFile(directory)
        os.ftruncate(self.file.fd, capacity_bytes)
        self._mapping = mmap.mmap(self.file.fd, capacity_bytes, access=mmap.ACCESS_WRITE)
        self.address = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()
        self._is_inherited = False  # by this process, from the one that created the file
        self._extents = ExtentAllocator(mmap.PAGESIZE)
        self._extents.grow(capacity_bytes)
        self._given_back: deque[Extent] = deque()  # not in `_extents` yet
        self._keeps_bytes = False  # the system cannot remove the bytes of what is given back
        watch_forks(self)

    @property
    def capacity_bytes(self) -> int:
        return self._extents.capacity_bytes

    def allocate(self, size_bytes: int) -> Extent | None:
        """Allocate an extent, with space on the disk and filled with zeros; None: no room here.

        Raises:
            OSError: the disk has no room.
        """
        while self._given_back:
            self._extents.free(self._given_back.popleft())
        used_bytes = self._extents.peak_end_bytes
        extent = self._extents.allocate(size_bytes)
        if extent is None:
            return None
        try:
            self.file.reserve(extent)
        except OSError:
            self._give_back(extent)
            raise
        if self._keeps_bytes and extent.offset_bytes < used_bytes:
            ctypes.memset(self.address + extent.offset_bytes, 0, extent.size_bytes)
        return extent

    def view(self, extent: Extent) -> memoryview:
        """Return the memory of an extent, which is given back when nothing refers to it."""
        memory = memoryview(self._mapping)[extent.offset_bytes : extent.end_bytes]
        weakref.finalize(memory, self._give_back, extent).atexit = False
        return memory

    def contains(self, address: int) -> bool:
        return self.address <= address < self.address + self.capacity_bytes

    def page_out(self) -> None:
        host_memory.page_out(self.address, self.capacity_bytes)

    def note_fork(self) -> None:
        """Make the mapping private in a forked child, where a write would change the parent.

        The child sees the parent's values until it writes to a page. If the system refuses, the
        child can only read.
        """
        if not self._is_inherited:
            self._is_inherited = True
            make_private(self.address, self.capacity_bytes, self.file.fd)

    def _give_back(self, extent: Extent) -> None:
        """Give the disk space of an extent back. It runs in finalizers, so it takes no lock."""
        if not self._is_inherited:
            address = self.address + extent.offset_bytes
            if not advise(address, extent.size_bytes, _MADV_REMOVE):
                self._keeps_bytes = True
        self._given_back.append(extent)


@final
@dataclass(eq=False)
class FileSlot(RestingSlot):
    """A resting slot in a part of a mapped file; its extent is that part.

    Attributes:
        mapped: the file. The memory keeps it alive, and a slot that was dropped does not.
    """

    mapped: weakref.ref[_MappedFile] = field(kw_only=True)

    @property
    def file(self) -> OpenFile:
        """The file, whose reads and writes are coherent with the mapping.

        Who reads or writes there keeps `tensor` alive, or another slot gets the bytes.
        """
        mapped = self.mapped()
        assert mapped is not None, "the slot was dropped"
        return mapped.file

    @property
    def is_mapped(self) -> bool:
        return True


@final
class MappedFiles:
    """The mapped files of one store; see [Note: few files]. All threads may use them.

    Args:
        directory: where to create the files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: list[_MappedFile] = []
        self._lock = threading.Lock()
        watch_forks(self)

    def allocate(self, size_bytes: int) -> FileSlot:
        """Allocate a slot filled with zeros, whose space on the disk is reserved.

        Its extent is free again when nothing refers to its memory and its file any more.

        Args:
            size_bytes: the size of the slot; it is rounded up to whole pages.

        Raises:
            StoreFullError: the disk has no room for it.
        """
        whole_bytes = whole_pages(max(size_bytes, 1))
        try:
            with self._lock:
                mapped, extent = self._allocate(whole_bytes)
        except OSError as error:
            raise StoreFullError(
                errno.ENOSPC,
                f"no room for {format_size(whole_bytes)} of weights, gradients or optimizer state "
                f"in {self._directory} ({error.strerror}); free some, or choose another directory "
                f'(store="disk:/some/dir")',
            ) from error
        memory = HostMemory(torch.frombuffer(mapped.view(extent), dtype=torch.uint8))
        return FileSlot(
            extent,
            size_bytes,
            ALREADY_REACHED,
            "disk",
            memory=memory,
            mapped=weakref.ref(mapped),
        )

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor is in one of the files."""
        address = tensor.data_ptr()
        return any(mapped.contains(address) for mapped in self._files)

    def page_out(self) -> None:
        """Unmap all pages from RAM; their data stays in the files. Any thread may call this."""
        for mapped in self._files:
            mapped.page_out()

    def take_over(self, other: MappedFiles) -> None:
        """Take over the files of another store, so that they can be found and paged out here."""
        self._files = [*self._files, *other._files]

    def close(self) -> None:
        """Leave each file to the tensors that are still in it; it ends with the last of them."""
        self._files = []

    def note_fork(self) -> None:
        """Leave the files to the parent process. A forked child creates its own."""
        self._files = []
        self._lock = threading.Lock()  # another thread of the parent may hold the other one

    def _allocate(self, size_bytes: int) -> tuple[_MappedFile, Extent]:
        for mapped in self._files:
            extent = mapped.allocate(size_bytes)
            if extent is not None:
                return mapped, extent
        mapped = self._add_file(size_bytes)
        extent = mapped.allocate(size_bytes)
        assert extent is not None
        return mapped, extent

    def _add_file(self, size_bytes: int) -> _MappedFile:
        present_bytes = sum(mapped.capacity_bytes for mapped in self._files)
        try:
            wanted_bytes = max(size_bytes, present_bytes, _LEAST_FILE_BYTES)
            mapped = _MappedFile(self._directory, wanted_bytes)
        except (OSError, ValueError):  # so large a file, or so much address space, is not allowed
            mapped = _MappedFile(self._directory, size_bytes)
        self._files = [*self._files, mapped]  # a new list, because other threads read the old one
        return mapped


def page_out(slot: FileSlot) -> None:
    """Unmap a slot's pages from RAM; their data stays in the file. Any thread may call this."""
    host_memory.page_out(slot.tensor.data_ptr(), slot.tensor.numel())


def page_in(slot: FileSlot) -> None:
    """Read a slot's pages ahead. If the kernel does not support it, they are read on first use."""
    host_memory.page_in(slot.tensor.data_ptr(), slot.tensor.numel())
