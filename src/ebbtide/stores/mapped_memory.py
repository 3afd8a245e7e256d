"""Memory-mapped files for weights, gradients and optimizer state that are offloaded to disk.

The host reads and writes them in place. The mapping is shared and the file has no name. Its pages
count as memory of the process (RSS) while they are mapped in. `page_out` removes them from the
process and is safe at any moment, even during reads and writes: written data stays in the file or
in the kernel's page cache, and the next access maps it in again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch

from ebbtide.errors import StoreFullError
from ebbtide.memory.disk_file import OpenFile
from ebbtide.memory.extents import Extent
from ebbtide.memory.host_memory import HostMemory, advise, whole_pages
from ebbtide.stores.store import REACHED, RestingSlot
from ebbtide.units import format_size

_MADV_DONTNEED = 4
_MADV_POPULATE_READ = 22  # Linux 5.14 and later


@final
@dataclass(eq=False)
class FileSlot(RestingSlot):
    """A resting slot in a mapped file of its own.

    Attributes:
        file: the mapped file; its reads and writes are coherent with the mapping.
    """

    file: OpenFile = field(kw_only=True)

    @property
    def is_mapped(self) -> bool:
        return True


def map_file(directory: Path, size_bytes: int) -> FileSlot:
    """Map a new file without a name, filled with zeros, whose space on the disk is reserved.

    Args:
        directory: where to create the file.
        size_bytes: the size of the slot; the file is rounded up to whole pages.

    Raises:
        StoreFullError: the disk has no room for it.
    """
    whole_bytes = whole_pages(max(size_bytes, 1))
    file = OpenFile(directory)
    try:
        os.posix_fallocate(file.fd, 0, whole_bytes)
    except OSError as error:
        raise StoreFullError(
            errno.ENOSPC,
            f"no room for {format_size(whole_bytes)} of weights, gradients or optimizer state "
            f"in {directory} ({error.strerror}); free some, or choose another directory "
            f'(store="disk:/some/dir")',
        ) from error
    mapping = mmap.mmap(file.fd, whole_bytes, flags=mmap.MAP_SHARED)
    memory = HostMemory(torch.frombuffer(mapping, dtype=torch.uint8))
    extent = Extent(0, whole_bytes)
    return FileSlot(extent, size_bytes, REACHED, "disk", memory=memory, file=file)


def page_out(slot: FileSlot) -> None:
    """Unmap a slot's pages from RAM; their data stays in the file. Any thread may call this."""
    _advise(slot, _MADV_DONTNEED)


def page_in(slot: FileSlot) -> None:
    """Read a slot's pages ahead. If the kernel does not support it, they are read on first use."""
    _advise(slot, _MADV_POPULATE_READ)


def give_back_free_memory() -> None:
    """Make the C library return freed memory to the system; it keeps blocks of up to 32 MiB."""
    with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _advise(slot: FileSlot, advice: int) -> None:
    advise(slot.tensor.data_ptr(), slot.tensor.numel(), advice)
