"""The disk tier of a model on a CPU: one file, written and read by worker threads.

A write goes straight from the tensor's memory to the file, without a copy in between. A reload maps
the file's bytes instead of reading them into fresh memory: while the page cache still has them that
moves nothing, and fresh memory would cost more in page faults than the copy itself. The mapping is
private, so whoever writes to a reloaded tensor writes to a copy of their own.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch

from ebbtide.devices.device import AbstractEvent
from ebbtide.devices.lanes import WorkLane
from ebbtide.stores.disk_file import DiskFile
from ebbtide.stores.host_memory import advise
from ebbtide.stores.store import AbstractStore, Slot

_MADV_POPULATE_READ = 22  # Linux 5.14 and later


@final
@dataclass(eq=False)
class _MappedSlot(Slot):
    """A slot with its readers: one for each reload, true once it reads the extent no more."""

    readers: list[Callable[[], bool]] = field(default_factory=list)

    def in_use(self) -> bool:
        """Whether the extent may still be read.

        The write to it may be under way still: the next one to write here is queued behind it.
        """
        self.readers = [finished for finished in self.readers if not finished()]
        return bool(self.readers)


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
        self._dropped: list[_MappedSlot] = []
        self._file = DiskFile(directory)
        self._writer = WorkLane("ebbtide-disk-write", "disk")
        self._reader = WorkLane("ebbtide-disk-read", "disk")
        self.on_progress: Callable[[], None] | None = None

    @property
    def capacity_bytes(self) -> int:
        return self._file.capacity_bytes

    @property
    def used_bytes(self) -> int:
        self._collect()
        return self._file.used_bytes

    def offload(self, source: torch.Tensor, ready: AbstractEvent) -> Slot:
        size_bytes = source.numel()
        self._collect()
        extent = self._file.allocate(size_bytes)
        file, view = self._file.open, source.numpy().data

        def write() -> None:
            ready.synchronize()
            file.write(view, extent.offset_bytes)

        written = self._writer.submit(write, then=self.on_progress)
        return _MappedSlot(extent, size_bytes, written, "disk")

    def reload(self, slot: Slot) -> tuple[torch.Tensor, AbstractEvent]:
        assert isinstance(slot, _MappedSlot)
        file, offset, offloaded = self._file.open, slot.extent.offset_bytes, slot.offloaded
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
                file.read(view, offset)

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
            # Where the kernel cannot, the bytes come on first use.
            advise(address, size_bytes, _MADV_POPULATE_READ)

        return buffer, self._reader.submit(read_ahead)

    def read_ahead(self, slot: Slot) -> None:
        file, extent = self._file.open, slot.extent
        self._reader.submit(lambda: file.read_ahead(extent))

    def drop(self, slot: Slot) -> None:
        assert isinstance(slot, _MappedSlot)
        self._dropped.append(slot)
        self._collect()

    def close(self) -> None:
        self._writer.close()
        self._reader.close()
        self._file.close()

    def _collect(self) -> None:
        """Take back what was dropped and is in use no more."""
        waiting = []
        for slot in self._dropped:
            if slot.in_use():
                waiting.append(slot)
            else:
                self._file.free(slot.extent)
        self._dropped = waiting


@final
class _Mapping(mmap.mmap):
    """A mapped extent that can be referred to weakly, so that its end can be seen."""
