"""Memory that is a file: on a machine whose model computes on the CPU, the tier below its RAM.

The file is mapped, shared, and has no name. Its pages count as the process's memory (RSS) while
they are mapped in; `page_out` lets go of them, at any moment, whoever reads or writes: what was
written stays in the file, by way of the kernel's page cache, and the next access brings it back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import final

import torch

from ebbtide.devices.device import AbstractDevice
from ebbtide.errors import StoreFullError
from ebbtide.stores.disk_file import OpenFile, default_directory
from ebbtide.stores.host_memory import HostMemory, advise, whole_pages
from ebbtide.units import format_size

_MADV_DONTNEED = 4
_MADV_POPULATE_READ = 22  # Linux 5.14 and later


@final
class MappedMemory:
    """Blocks of memory in a file of their own each.

    Args:
        device: that computes with them: a CPU.
        directory: where the files live; None: the system's directory for temporary files.
    """

    def __init__(self, device: AbstractDevice, directory: Path | None) -> None:
        self._device = device
        self._directory = default_directory() if directory is None else directory

    def allocate(self, size_bytes: int) -> HostMemory:
        """A block, zeros, that is backed by the disk.

        Raises:
            StoreFullError: the disk has no room for it.
        """
        size_bytes = whole_pages(max(size_bytes, 1))
        file = OpenFile(self._directory)
        try:
            os.posix_fallocate(file.fd, 0, size_bytes)
        except OSError as error:
            raise StoreFullError(
                errno.ENOSPC,
                f"no room for {format_size(size_bytes)} of weights, gradients or optimizer state "
                f"in {self._directory} ({error.strerror}); free some, or choose another directory "
                f'(store="disk:/some/dir")',
            ) from error
        mapping = mmap.mmap(file.fd, size_bytes, flags=mmap.MAP_SHARED)
        return HostMemory(torch.frombuffer(mapping, dtype=torch.uint8), self._device)


def page_out(memory: HostMemory) -> None:
    """Let go of a block's pages; they stay in the file."""
    _advise(memory, _MADV_DONTNEED)


def page_in(memory: HostMemory) -> None:
    """Read a block's pages ahead. Where the kernel cannot, they come on first use."""
    _advise(memory, _MADV_POPULATE_READ)


def give_back_free_memory() -> None:
    """Let the C library give back what was freed: it keeps blocks of up to 32 MiB for itself."""
    with contextlib.suppress(OSError, AttributeError):  # another library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _advise(memory: HostMemory, advice: int) -> None:
    advise(memory.tensor.data_ptr(), memory.tensor.numel(), advice)
