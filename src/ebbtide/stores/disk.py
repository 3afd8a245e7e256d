"""What stores on disk have in common, and the store of a model on a CPU.

On a CPU a write goes from the tensor's memory straight to the file, without an intermediate copy. A
reload maps the file's bytes instead of reading them into new memory. While the bytes are in the
page cache, mapping moves no data, whereas the page faults of new memory would cost more than the
copy. The mapping is private, so a write to a reloaded tensor does not reach the file.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch

from ebbtide.devices.device import AbstractEvent, AbstractLane
from ebbtide.devices.lanes import WorkLane
from ebbtide.stores.disk_file import GROWTH_BYTES, DiskFile, OpenFile
from ebbtide.stores.host_memory import page_in
from ebbtide.stores.mapped_memory import FileSlot, MappedFiles
from ebbtide.stores.measured_memory import FreedMemory, return_freed_memory
from ebbtide.stores.store import AbstractStore, RestingSlot, Slot, Target


class AbstractDiskStore(AbstractStore):
    """Keeps bytes in an unnamed file, and weights and the like in mapped files.

    Args:
        directory: where to create the files; None: the system's directory for temporary files.
        make_lane: makes the workers that write and read; see `AbstractDevice.lane`.
        growth_bytes: the least by which the file grows, if the disk has that much room.

    Raises:
        PolicyError: ``directory`` is missing or cannot be written to.
    """

    def __init__(
        self,
        directory: Path | None,
        make_lane: Callable[[str, str], AbstractLane],
        growth_bytes: int = GROWTH_BYTES,
    ) -> None:
        self._file = DiskFile(directory, growth_bytes)
        self._mapped = MappedFiles(self._file.directory)
        self._writer = make_lane("ebbtide-disk-write", "disk")
        self._reader = make_lane("ebbtide-disk-read", "disk")

    @property
    def capacity_bytes(self) -> int:
        return self._file.capacity_bytes

    @property
    def room_bytes(self) -> int:
        return self._file.room_bytes

    @property
    def used_bytes(self) -> int:
        return self._file.used_bytes

    def allocate_resting(self, size_bytes: int, *, reserved: bool = False) -> RestingSlot:  # noqa: ARG002
        return self._mapped.allocate(size_bytes)

    def page_out(self) -> None:
        self._mapped.page_out()

    def maps(self, tensor: torch.Tensor) -> bool:
        return self._mapped.contains(tensor)

    def take_over(self, other: AbstractStore, resting: Iterable[RestingSlot]) -> None:  # noqa: ARG002
        assert isinstance(other, AbstractDiskStore)
        self._mapped.take_over(other._mapped)

    def _file_of(self, slot: Slot) -> tuple[OpenFile, torch.Tensor | None]:
        """Return a slot's file, and what a job that reads or writes there keeps alive."""
        if isinstance(slot, FileSlot):
            return slot.file, slot.tensor
        return self._file.open, None


@final
@dataclass(eq=False)
class _MappedSlot(Slot):
    """A slot and its readers: for each reload, a function that is true once it reads no more."""

    readers: list[Callable[[], bool]] = field(default_factory=list)

    def in_use(self) -> bool:
        """Whether a reload may still read the extent.

        A write to the extent that is still under way does not count, because the next write to the
        same place is queued behind it.
        """
        self.readers = [finished for finished in self.readers if not finished()]
        return bool(self.readers)


@final
class DiskStore(AbstractDiskStore):
    """Keeps bytes of a model on a CPU in an unnamed file, which disappears with the process.

    Args:
        directory: where to create the file; None: the system's directory for temporary files.
        make_lane: makes the workers that write and read; see `AbstractDevice.lane`.

    Raises:
        PolicyError: ``directory`` is missing or cannot be written to.
    """

    def __init__(
        self,
        directory: Path | None = None,
        make_lane: Callable[[str, str], AbstractLane] = WorkLane,
    ) -> None:
        super().__init__(directory, make_lane)
        self._dropped: list[_MappedSlot] = []
        self._freed = FreedMemory()

    @property
    def used_bytes(self) -> int:
        self._collect()
        return self._file.used_bytes

    def offload(self, source: torch.Tensor, ready: AbstractEvent) -> Slot:
        size_bytes = source.numel()
        self._collect()
        extent = self._file.allocate(size_bytes)
        file = self._file.open

        def write() -> None:
            ready.synchronize()
            file.write(_view_of(source), extent.offset_bytes)

        try:
            written = self._writer.submit(write, then=self.on_progress)
        except BaseException:  # there is no thread
            self._file.free(extent)
            raise
        self._return_freed_memory(self._writer, size_bytes)
        return _MappedSlot(extent, size_bytes, written, "disk")

    def reload(
        self, slot: Slot, target: Target | None = None
    ) -> tuple[torch.Tensor, AbstractEvent]:
        assert isinstance(slot, _MappedSlot)
        assert target is None, "on a CPU a reload maps the file's bytes"
        file, offset, offloaded = self._file.open, slot.extent.offset_bytes, slot.offloaded
        try:
            mapping = mmap.mmap(
                file.fd,
                slot.size_bytes,
                access=mmap.ACCESS_COPY,
                offset=offset,
            )
        except OSError:  # no mappings or file descriptors are left, so read into new memory
            buffer = torch.empty(slot.size_bytes, dtype=torch.uint8, device="cpu")
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
            page_in(address, size_bytes)

        ready = self._reader.submit(read_ahead)
        self._return_freed_memory(self._reader, size_bytes)
        return buffer, ready

    def drop(self, slot: Slot) -> None:
        if isinstance(slot, RestingSlot):
            slot.memory.give_back()
            return
        assert isinstance(slot, _MappedSlot)
        self._dropped.append(slot)
        self._collect()

    def close(self) -> None:
        self._writer.close()
        self._reader.close()
        self._file.close()
        self._mapped.close()
        return_freed_memory()

    def note_freed(self, size_bytes: int) -> None:
        self._return_freed_memory(self._reader, size_bytes)

    def _return_freed_memory(self, lane: AbstractLane, size_bytes: int) -> None:
        """Queue the return of freed memory behind a copy, once enough bytes have been moved."""
        if self._freed.is_due(size_bytes, self._file.used_bytes):
            lane.submit(return_freed_memory)

    def _collect(self) -> None:
        """Free the extents of dropped slots that no reload reads any more."""
        waiting = []
        for slot in self._dropped:
            if slot.in_use():
                waiting.append(slot)
            else:
                self._file.free(slot.extent)
        self._dropped = waiting


def _view_of(source: torch.Tensor) -> memoryview:
    """View a tensor's bytes, which the caller keeps alive.

    A storage that `Tensor.numpy` was called for can never be resized again, and the source is the
    program's own storage: it may resize it, as sharded models do.
    """
    size_bytes = source.numel()
    # The memory of a source that was resized since is freed, and may belong to another tensor.
    if source.untyped_storage().nbytes() < size_bytes:
        raise OSError(
            "the storage of a saved tensor was resized before its bytes were copied; keep it "
            "where it is with ebbtide.interop.transformer_engine.mark_not_offload(tensor)"
        )
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(source.data_ptr())).cast("B")
