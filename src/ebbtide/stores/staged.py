"""Pieces of tensors, and the page-locked chunks that stage them between a device and a file."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch

from ebbtide.devices.device import AbstractDevice, AbstractEvent, Origin, Span
from ebbtide.errors import StoreFullError
from ebbtide.stores.disk import AbstractDiskStore
from ebbtide.stores.disk_file import GROWTH_BYTES, OpenFile
from ebbtide.stores.host_memory import HostMemory, allocate_host_memory
from ebbtide.stores.mapped_memory import FileSlot
from ebbtide.stores.store import RestingSlot, Slot, Target, allocate_target


@final
@dataclass(eq=False)
class Piece:
    """A part of a tensor: where it begins in the tensor, and at which offset of a file."""

    begin_bytes: int
    size_bytes: int
    offset_bytes: int
    chunk: Chunk | None = None  # the chunk that still contains the bytes
    refusal: OSError | None = None  # the write failed: only the chunk contains the bytes
    dropped: bool = False

    def drop(self) -> None:
        """Drop the piece, so that its chunk need not keep the bytes."""
        self.dropped = True
        if self.chunk is not None:
            self.chunk.piece = None
            self.chunk = None


@final
@dataclass(eq=False)
class Chunk:
    """A part of the staging memory, and the work that must end before its next use."""

    memory: torch.Tensor
    piece: Piece | None = None
    written: AbstractEvent | None = None  # the end of the piece's write to the file
    reads: list[AbstractEvent] = field(default_factory=list)  # reloads that copy from the chunk

    def view(self, size_bytes: int) -> memoryview:
        return self.memory[:size_bytes].numpy().data


@final
@dataclass(eq=False, slots=True)
class StagedSlot(Slot):
    pieces: list[Piece] = field(default_factory=list)


@final
class Arrival(AbstractEvent):
    """The end of a reload from disk. The worker that reads the file queues the reload's copies."""

    def __init__(self) -> None:
        self.reading: AbstractEvent | None = None
        self.copies: list[AbstractEvent] = []

    def settled(self) -> AbstractEvent:
        assert self.reading is not None
        # Guard backward-after-read: backward waits until a worker has read the bytes and queued
        # their copy. Backward would go on before the copy is on a stream, with nothing to wait for.
        self.reading.synchronize()
        return self.copies[-1]  # all copies are on one stream, so the last one ends last

    def query(self) -> bool:
        assert self.reading is not None
        # Guard arrival-with-copies: a reload from disk ends only when all its copies have ended,
        # even if a read failed. A buffer that is no longer needed would be freed while a copy still
        # writes to it.
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


def read_piece(
    device: AbstractDevice,
    chunks: deque[Chunk],
    file: OpenFile,
    part: torch.Tensor,
    offset_bytes: int,
    allocated: AbstractEvent,
) -> AbstractEvent:
    """Read a piece from the file into the least recently used chunk and queue its reload.

    Args:
        device: the device to reload to.
        chunks: the chunks for reads, least recently used first.
        file: the file to read.
        part: the device memory of the piece.
        offset_bytes: where the piece begins in the file.
        allocated: the event after which no kernel uses `part`.

    Returns:
        The end of the copy to `part`.
    """
    chunk = chunks.popleft()
    size_bytes = part.numel()
    try:
        for read in chunk.reads:
            # Guard read-after-copy-up: a chunk is filled from disk only after its previous piece
            # has been copied to the device. The previous piece would get the bytes of this one.
            read.synchronize()
        file.read(chunk.view(size_bytes), offset_bytes)
        # Guard read-up-after-kernels: a reload of bytes that were read from disk waits for the
        # kernels queued before its buffer was allocated. The copy would overwrite memory that these
        # kernels still read.
        copied = device.copy_up(part, chunk.memory[:size_bytes], allocated)
        chunk.reads = [copied]
    finally:
        chunks.append(chunk)
    return copied


# ---- The disk store of a model on an accelerator, which stages bytes in page-locked chunks ----
#
# A tensor is offloaded in pieces: the device copies a piece to a chunk of host memory, and a
# worker writes it to the file. To reload a piece, another worker reads it into a chunk of its own
# and queues its copy to the device. A chunk keeps its piece until the chunk is needed again. The
# tensors that were offloaded last are needed first in backward, so they are often reloaded
# without disk access.
#
# The host waits for the disk in only two places: when no chunk has been written yet, and when
# backward needs bytes that have not been read yet.

STAGING_BYTES = 128 * 2**20
LEAST_STAGING_BYTES = 64 * 2**10
_CHUNKS = 8  # in each direction


@final
class StagedDiskStore(AbstractDiskStore):
    """Keeps bytes of a model on an accelerator in an unnamed file, which ends with the process.

    Args:
        device: the device whose copy streams are used.
        directory: where to create the file; None: the system's directory for temporary files.
        staging_bytes: the most host memory for the chunks of both directions.
        growth_bytes: the least by which the file grows, if the disk has that much room.

    Raises:
        PolicyError: ``directory`` is missing or cannot be written to.
    """

    # Long: both directions use the same chunks and the same file.

    def __init__(
        self,
        device: AbstractDevice,
        directory: Path | None = None,
        staging_bytes: int = STAGING_BYTES,
        growth_bytes: int = GROWTH_BYTES,
    ) -> None:
        super().__init__(directory, device.lane, growth_bytes)
        self._device = device
        # A power of two, because torch's own allocator, if it has to be used, rounds up to one.
        self._chunk_bytes = 1 << (staging_bytes // (2 * _CHUNKS)).bit_length() - 1
        self._staging: HostMemory | None = None
        self._down: deque[Chunk] = deque()  # for writes, in the order of their last use
        self._up: deque[Chunk] = deque()  # for reads; only the reading worker uses them
        self._failures: deque[OSError] = deque()

    @property
    def host_capacity_bytes(self) -> int:
        return 0 if self._staging is None else self._staging.tensor.numel()

    # ---- down ---------------------------------------------------------------------------------

    def offload(self, source: torch.Tensor, ready: AbstractEvent) -> Slot:
        """See the base class. Blocks the host while all chunks have yet to be written to disk.

        Raises:
            OSError: an earlier write failed. Its bytes are still in a chunk, and ``source`` has not
                been offloaded.
        """
        if self._failures:
            raise self._failures.popleft()
        if self._staging is None:
            self._take_staging()
        size_bytes = source.numel()
        extent = self._file.allocate(size_bytes)
        slot = StagedSlot(extent, size_bytes, ready, "disk")
        try:
            for begin in range(0, size_bytes, self._chunk_bytes):
                piece_bytes = min(self._chunk_bytes, size_bytes - begin)
                offset_bytes = extent.offset_bytes + begin
                piece = Piece(begin, piece_bytes, offset_bytes)
                slot.offloaded, chunk = self._stage(piece, source, ready, slot, self._failures)
                chunk.piece, piece.chunk = piece, chunk
                slot.pieces.append(piece)
        except OSError:
            # Only `_free_chunk` raises this. It has waited for all writes, and each write for its
            # copy, so no copy still reads the source.
            self._free_slot(slot)
            raise
        return slot

    def write(
        self, slot: RestingSlot, offset_bytes: int, source: torch.Tensor, ready: AbstractEvent
    ) -> tuple[AbstractEvent, AbstractEvent]:
        assert isinstance(slot, FileSlot)
        if self._staging is None:
            self._take_staging()
        refusals: deque[OSError] = deque()
        size_bytes = source.numel()
        for begin in range(0, size_bytes, self._chunk_bytes):
            piece_bytes = min(self._chunk_bytes, size_bytes - begin)
            piece = Piece(begin, piece_bytes, slot.extent.offset_bytes + offset_bytes + begin)
            copied, _ = self._stage(piece, source, ready, slot, refusals)

        def check() -> None:
            if refusals:
                raise refusals[0]

        return copied, self._writer.submit(check)  # behind the writes of all pieces

    def _stage(
        self,
        piece: Piece,
        source: torch.Tensor,
        ready: AbstractEvent,
        slot: Slot,
        refusals: deque[OSError],
    ) -> tuple[AbstractEvent, Chunk]:
        """Queue the copy of a piece to a free chunk, and its write from there to the file.

        Args:
            piece: the part of ``source`` to copy.
            source: the whole tensor.
            ready: the event after which ``source`` contains its values.
            slot: the slot whose file is written to.
            refusals: the worker appends the error if the write fails.

        Returns:
            The end of the copy, and the chunk.
        """
        chunk = self._free_chunk()
        memory = chunk.memory[: piece.size_bytes]
        part = source.narrow(0, piece.begin_bytes, piece.size_bytes)
        # Guard chunk-after-kernels: an offload to a chunk waits for the kernels that write its
        # source. The copy would read memory that queued kernels have not written yet.
        # Guard chunk-after-readers: an offload to a chunk waits for the reloads from that chunk. A
        # reload that copies straight from the chunk would get bytes of another piece.
        copied = self._device.copy_down(memory, part, ready, *chunk.reads)
        chunk.reads.clear()
        view = chunk.view(piece.size_bytes)
        file, memory_of_slot = self._file_of(slot)

        def write(_alive: object = memory_of_slot) -> None:
            if piece.dropped:
                return
            # Guard write-after-copy: a chunk is written to disk only after the device has copied
            # its piece there. The file would get the bytes that were in the chunk before.
            copied.synchronize()
            try:
                file.write(view, piece.offset_bytes)
            except OSError as error:
                # A new error, because the traceback of a raised one can keep a whole forward alive.
                piece.refusal = OSError(error.errno, error.strerror)
                refusals.append(OSError(error.errno, error.strerror))

        chunk.written = self._writer.submit(write)
        self._down.append(chunk)
        return copied, chunk

    def _free_chunk(self) -> Chunk:
        """Return the least recently used chunk; block until its write to disk has ended."""
        for _ in range(len(self._down)):
            chunk = self._down.popleft()
            if chunk.written is not None:
                # Guard chunk-after-write: a chunk is used again only after it has been written to
                # disk. The next piece would overwrite a chunk that is still to be written.
                chunk.written.synchronize()
            piece = chunk.piece
            # Guard chunk-of-failed-write: a chunk whose write failed is not used again. The only
            # copy of its bytes would be overwritten, and backward would read the file's old bytes.
            if piece is None or piece.refusal is None:
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
        try:  # the chunks are part of the margin that stores leave free
            staging = allocate_host_memory(self._device, size_bytes)
        except OSError as error:
            raise StoreFullError(
                errno.ENOMEM,
                "the host has no memory for the chunks that stage bytes for the disk; set a "
                "smaller host_budget or free host memory",
            ) from error
        self._staging = staging
        chunks = [
            Chunk(staging.tensor.narrow(0, begin, self._chunk_bytes))
            for begin in range(0, size_bytes, self._chunk_bytes)
        ]
        self._down.extend(chunks[:_CHUNKS])
        self._up.extend(chunks[_CHUNKS:])

    # ---- up -----------------------------------------------------------------------------------

    def reload(
        self, slot: Slot, target: Target | None = None
    ) -> tuple[torch.Tensor, AbstractEvent]:
        buffer, allocated, _ = target or allocate_target(self._device, slot.size_bytes)
        arrival = Arrival()
        missing = []
        file, memory_of_slot = self._file_of(slot)
        if self._staging is None:
            self._take_staging()
        for piece in self._pieces_of(slot):
            part = buffer.narrow(0, piece.begin_bytes, piece.size_bytes)
            if piece.chunk is None:
                missing.append((part, piece.offset_bytes))
                continue
            memory = piece.chunk.memory[: piece.size_bytes]
            # Guard chunk-up-after-kernels: a reload from a chunk waits for the kernels queued
            # before its buffer was allocated. The copy would overwrite memory that these kernels
            # still read.
            # Guard chunk-up-after-copy-down: a reload from a chunk waits for the offload to that
            # chunk. Nothing else orders the two copy streams: the chunk would be read before it is
            # written.
            copied = self._device.copy_up(part, memory, allocated, slot.offloaded)
            piece.chunk.reads.append(copied)
            arrival.copies.append(copied)
        if not missing:
            return buffer, arrival.copies[-1] if arrival.copies else allocated  # of no bytes
        device, chunks = self._device, self._up

        def read(_alive: object = memory_of_slot) -> None:
            try:
                for part, offset_bytes in missing:
                    copied = read_piece(device, chunks, file, part, offset_bytes, allocated)
                    arrival.copies.append(copied)
            except BaseException as error:
                arrival.failure = error
                raise

        arrival.reading = self._reader.submit(read)
        return buffer, arrival

    def _pieces_of(self, slot: Slot) -> Sequence[Piece]:
        if isinstance(slot, StagedSlot):
            return slot.pieces
        assert isinstance(slot, FileSlot)
        step = self._chunk_bytes
        return [
            Piece(begin, min(step, slot.size_bytes - begin), slot.extent.offset_bytes + begin)
            for begin in range(0, slot.size_bytes, step)
        ]

    # ---- ends ---------------------------------------------------------------------------------

    def drop(self, slot: Slot) -> None:
        """Release a slot. Its extent is free at once.

        A write to it that is still queued runs before any later write, and a read that is still
        queued may return wrong bytes because nobody uses them.
        """
        if isinstance(slot, RestingSlot):
            slot.memory.give_back()
            return
        assert isinstance(slot, StagedSlot)
        self._free_slot(slot)

    def _free_slot(self, slot: StagedSlot) -> None:
        for piece in slot.pieces:
            piece.drop()
        self._file.free(slot.extent)

    def close(self) -> None:
        # Guard close-after-writes: writes to disk end before the chunks are freed. The worker would
        # continue to read host memory that is no longer ours.
        self._writer.close()
        # Guard close-after-reads: reads from disk end before the chunks are freed. The worker would
        # continue to fill host memory that is no longer ours.
        self._reader.close()
        # Guard chunks-after-copies: copies end before the chunks are freed. The device would
        # continue to use host memory that is no longer ours.
        self._device.finish_copies()
        self._down.clear()
        self._up.clear()
        if self._staging is not None:
            self._staging.give_back()
            self._staging = None
        self._file.close()
        self._mapped.close()
