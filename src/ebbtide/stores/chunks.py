"""Pieces of tensors, and the page-locked chunks that stage them between a device and a file."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import final

import torch

from ebbtide.devices.device import AbstractDevice, AbstractEvent, Origin, Span
from ebbtide.memory.disk_file import AbstractFile
from ebbtide.stores.store import Slot


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
class Written(AbstractEvent):
    """The end of a write to a resting slot, which is done piece by piece.

    Args:
        last: reached when the write of the last piece has ended or failed.
        refusals: the errors of failed writes; complete once `last` is reached.
    """

    def __init__(self, last: AbstractEvent, refusals: deque[OSError]) -> None:
        self._last = last
        self._refusals = refusals

    def query(self) -> bool:
        return self._last.query()

    def synchronize(self) -> None:
        self._last.synchronize()
        if self._refusals:
            raise OSError(self._refusals[0].errno, self._refusals[0].strerror)

    def since(self, origin: Origin) -> float:
        return self._last.since(origin)

    def spans(self, origin: Origin) -> list[Span]:
        return self._last.spans(origin)


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
    file: AbstractFile,
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
