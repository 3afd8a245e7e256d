"""The disk tier of a model on an accelerator: through page-locked chunks to a file and back.

A tensor goes down in pieces, each over a chunk of host memory: the device copies it there, a worker
writes it to the file. On the way back another worker reads a piece into a chunk of its own and has
the device copy it up. A chunk keeps its piece until it is needed again, so what was offloaded last,
and is wanted first, comes back without the disk.

The host waits for the disk in two places only: when all chunks are still to be written, and when
backward has come to bytes that are still to be read.
"""

from __future__ import annotations

import errno
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch

from ebbtide.devices.device import AbstractDevice, AbstractEvent, Origin, Span
from ebbtide.errors import StoreFullError
from ebbtide.stores.disk_file import GROWTH_BYTES, DiskFile, OpenFile
from ebbtide.stores.host_memory import HostMemory, allocate_by_torch, map_exactly, warn_of_pageable
from ebbtide.stores.store import AbstractStore, Slot

STAGING_BYTES = 128 * 2**20
LEAST_STAGING_BYTES = 64 * 2**10
_CHUNKS = 8  # each way


@final
@dataclass(eq=False)
class _Piece:
    """Part of a tensor: where it is in the tensor and in the file."""

    begin_bytes: int
    size_bytes: int
    offset_bytes: int
    chunk: _Chunk | None = None  # that has the bytes still
    unwritten: bool = False  # the disk refused: the chunk is the only place that has the bytes
    dropped: bool = False


@final
@dataclass(eq=False)
class _Chunk:
    """A part of the staging memory, and what must be over before its next use."""

    memory: torch.Tensor
    piece: _Piece | None = None
    written: AbstractEvent | None = None  # by the worker that writes the piece
    reads: list[AbstractEvent] = field(default_factory=list)  # copies up from it

    def view(self, size_bytes: int) -> memoryview:
        return self.memory[:size_bytes].numpy().data


@final
@dataclass(eq=False)
class _StagedSlot(Slot):
    pieces: list[_Piece] = field(default_factory=list)


@final
class _Arrival(AbstractEvent):
    """The end of a reload whose copies up are queued by the worker that reads the file."""

    def __init__(self) -> None:
        self.reading: AbstractEvent | None = None
        self.copies: list[AbstractEvent] = []

    def settled(self) -> AbstractEvent:
        assert self.reading is not None
        self.reading.synchronize()
        return self.copies[-1]  # they share a stream: the last is complete after the others

    def query(self) -> bool:
        assert self.reading is not None
        # Also after a failed read: a copy that was queued before it writes to the buffer still.
        return self.reading.query() and all(copy.query() for copy in self.copies)

    def synchronize(self) -> None:
        self.settled().synchronize()

    def since(self, origin: Origin) -> float:
        last = self.reading if self.failure is not None else self.settled()
        assert last is not None
        return last.since(origin)

    def spans(self, origin: Origin) -> list[Span]:
        assert self.reading is not None
        return [span for event in (self.reading, *self.copies) for span in event.spans(origin)]


@final
class StagedDiskStore(AbstractStore):
    """Bytes of an accelerator's model in a file without a name, gone when the process is.

    Args:
        device: whose copy streams move the bytes between it and the chunks.
        directory: where the file lives; None: the system's directory for temporary files.
        staging_bytes: host memory for the chunks of both ways, at most.
        growth_bytes: by how much the file grows at a time, at least.

    Raises:
        PolicyError: ``directory`` is missing or cannot be written to.
    """

    def __init__(
        self,
        device: AbstractDevice,
        directory: Path | None = None,
        staging_bytes: int = STAGING_BYTES,
        growth_bytes: int = GROWTH_BYTES,
    ) -> None:
        self._device = device
        self._file = DiskFile(directory, growth_bytes)
        # A power of two: torch's own allocator, where it must serve, would round up to one.
        self._chunk_bytes = 1 << (staging_bytes // (2 * _CHUNKS)).bit_length() - 1
        self._staging: HostMemory | None = None
        self._down: deque[_Chunk] = deque()  # the one that was written first comes first
        self._up: deque[_Chunk] = deque()  # used by the reading worker alone
        self._writer = device.lane("ebbtide-disk-write", "disk")
        self._reader = device.lane("ebbtide-disk-read", "disk")
        self._failures: deque[OSError] = deque()

    @property
    def capacity_bytes(self) -> int:
        return self._file.capacity_bytes

    @property
    def host_capacity_bytes(self) -> int:
        return 0 if self._staging is None else self._staging.tensor.numel()

    @property
    def used_bytes(self) -> int:
        return self._file.used_bytes

    # ---- down ---------------------------------------------------------------------------------

    def offload(self, source: torch.Tensor, ready: AbstractEvent) -> Slot:
        """See the base class. Blocks the host while all chunks wait for the disk.

        Raises:
            OSError: a write before this one failed. Its bytes are safe; nothing has been started.
        """
        if self._failures:
            raise self._failures.popleft()
        if self._staging is None:
            self._take_staging()
        size_bytes = source.numel()
        extent = self._file.allocate(size_bytes)
        slot = _StagedSlot(extent, size_bytes, ready, "disk")
        try:
            for begin in range(0, size_bytes, self._chunk_bytes):
                piece_bytes = min(self._chunk_bytes, size_bytes - begin)
                piece = _Piece(begin, piece_bytes, extent.offset_bytes + begin)
                slot.offloaded = self._stage(piece, source, ready)
                slot.pieces.append(piece)
        except OSError:
            # Who found no chunk has waited for all writes, and they for their copies: none is left
            # that reads the source.
            self._let_go(slot)
            raise
        return slot

    def _stage(self, piece: _Piece, source: torch.Tensor, ready: AbstractEvent) -> AbstractEvent:
        """Copy a piece to a chunk and let it be written from there."""
        chunk = self._free_chunk()
        memory = chunk.memory[: piece.size_bytes]
        part = source.narrow(0, piece.begin_bytes, piece.size_bytes)
        # Copies up may still read the bytes that were in the chunk before.
        copied = self._device.copy_down(memory, part, ready, *chunk.reads)
        chunk.reads.clear()
        chunk.piece, piece.chunk = piece, chunk
        file, failures, view = self._file.open, self._failures, chunk.view(piece.size_bytes)

        def write() -> None:
            if piece.dropped:
                return
            copied.synchronize()  # or the chunk's old bytes would be written
            try:
                file.write(view, piece.offset_bytes)
            except OSError as error:
                piece.unwritten = True
                # Not the error itself, whose context may hold on to a whole forward.
                failures.append(OSError(error.errno, error.strerror))

        chunk.written = self._writer.submit(write)
        self._down.append(chunk)
        return copied

    def _free_chunk(self) -> _Chunk:
        """The chunk that has been written for longest; waits until one has been."""
        for _ in range(len(self._down)):
            chunk = self._down.popleft()
            if chunk.written is not None:
                chunk.written.synchronize()  # the worker reads it until then
            piece = chunk.piece
            if piece is None or not piece.unwritten:
                if piece is not None:
                    piece.chunk = None
                    chunk.piece = None
                return chunk
            self._down.append(chunk)
        raise (
            self._failures.popleft()
            if self._failures
            else OSError(errno.EIO, f"none of the last writes to {self._file.directory} succeeded")
        )

    def _take_staging(self) -> None:
        size_bytes = 2 * _CHUNKS * self._chunk_bytes
        try:
            staging = map_exactly(self._device, size_bytes)
        except OSError as error:
            raise StoreFullError(
                errno.ENOMEM,
                "the host has no memory for the chunks in which bytes go to disk; set a smaller "
                "host_budget or free host memory",
            ) from error
        if staging is None:
            staging = allocate_by_torch(self._device, size_bytes)
        if staging.refusal is not None:
            warn_of_pageable(size_bytes, staging.refusal)
        self._staging = staging
        chunks = [
            _Chunk(staging.tensor.narrow(0, begin, self._chunk_bytes))
            for begin in range(0, size_bytes, self._chunk_bytes)
        ]
        self._down.extend(chunks[:_CHUNKS])
        self._up.extend(chunks[_CHUNKS:])

    # ---- up -----------------------------------------------------------------------------------

    def reload(self, slot: Slot) -> tuple[torch.Tensor, AbstractEvent]:
        assert isinstance(slot, _StagedSlot)
        buffer = self._device.allocate(slot.size_bytes)
        # The allocator may hand out memory that queued kernels still read: copies wait.
        allocated = self._device.compute_stream().record()
        arrival = _Arrival()
        missing = []
        for piece in slot.pieces:
            part = buffer.narrow(0, piece.begin_bytes, piece.size_bytes)
            if piece.chunk is None:
                missing.append((part, piece.offset_bytes))
                continue
            memory = piece.chunk.memory[: piece.size_bytes]
            copied = self._device.copy_up(part, memory, allocated, slot.offloaded)
            piece.chunk.reads.append(copied)
            arrival.copies.append(copied)
        if not missing:
            return buffer, arrival.copies[-1]
        device, chunks, file = self._device, self._up, self._file.open

        def read() -> None:
            try:
                for part, offset_bytes in missing:
                    copied = _read_piece(device, chunks, file, part, offset_bytes, allocated)
                    arrival.copies.append(copied)
            except BaseException as error:
                arrival.failure = error
                raise

        arrival.reading = self._reader.submit(read)
        return buffer, arrival

    def read_ahead(self, slot: Slot) -> None:
        file, extent = self._file.open, slot.extent
        self._reader.submit(lambda: file.read_ahead(extent))

    # ---- ends ---------------------------------------------------------------------------------

    def drop(self, slot: Slot) -> None:
        """Forget a slot. Its extent is free at once.

        Writes are in order, and bytes that are still to be read are wanted by nobody.
        """
        assert isinstance(slot, _StagedSlot)
        self._let_go(slot)

    def _let_go(self, slot: _StagedSlot) -> None:
        for piece in slot.pieces:
            piece.dropped = True
            if piece.chunk is not None:
                piece.chunk.piece = None
                piece.chunk = None
        self._file.free(slot.extent)

    def close(self) -> None:
        self._writer.close()
        self._reader.close()
        # A copy must not outlive the memory it reads or writes.
        self._device.finish_copies()
        self._down.clear()
        self._up.clear()
        if self._staging is not None:
            self._staging.give_back()
            self._staging = None
        self._file.close()


def _read_piece(
    device: AbstractDevice,
    chunks: deque[_Chunk],
    file: OpenFile,
    part: torch.Tensor,
    offset_bytes: int,
    allocated: AbstractEvent,
) -> AbstractEvent:
    """Read a piece into the chunk that has rested longest and queue its copy up."""
    chunk = chunks.popleft()
    size_bytes = part.numel()
    try:
        for read in chunk.reads:
            read.synchronize()  # the copy up of another piece reads the chunk
        file.read(chunk.view(size_bytes), offset_bytes)
        copied = device.copy_up(part, chunk.memory[:size_bytes], allocated)
        chunk.reads = [copied]
    finally:
        chunks.append(chunk)
    return copied
