"""Storage records: the unit of copying, and the states one goes through.

Which copies of a record's bytes exist in each state:

| state      | on the device             | in the store               |
|------------|---------------------------|----------------------------|
| HELD       | the source                | nothing yet                |
| OFFLOADING | the source                | on the way                 |
| OFFLOADED  | nothing of ours           | yes                        |
| RELOADED   | a buffer (or on its way)  | yes                        |
| DROPPED    | nothing of ours           | no, or until a copy ends   |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from enum import IntEnum, auto
from typing import TYPE_CHECKING, final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide.devices.device import AbstractEvent, AbstractStream
from ebbtide.runtime.forward import ForwardLog
from ebbtide.runtime.ranges import Layer
from ebbtide.stores.store import Slot

if TYPE_CHECKING:
    from ebbtide.runtime.units import UnitRecords


class RecordState(IntEnum):
    HELD = auto()
    OFFLOADING = auto()
    OFFLOADED = auto()
    RELOADED = auto()
    DROPPED = auto()


_TRANSITIONS = {
    RecordState.HELD: {RecordState.OFFLOADING, RecordState.DROPPED},
    RecordState.OFFLOADING: {RecordState.OFFLOADED, RecordState.DROPPED},
    RecordState.OFFLOADED: {RecordState.RELOADED, RecordState.DROPPED},
    RecordState.RELOADED: {RecordState.OFFLOADED, RecordState.DROPPED},
    RecordState.DROPPED: set(),
}


class AbstractPacking(ABC):
    """How a storage's bytes become fewer before they leave, and what they were again."""

    @abstractmethod
    def pack(self, flat: torch.Tensor) -> torch.Tensor:
        """The bytes that leave.

        Shape:
            flat: (size_bytes,), uint8. Returns (packed_bytes,), uint8.
        """

    @abstractmethod
    def unpack(self, packed: torch.Tensor, size_bytes: int) -> torch.Tensor:
        """The storage's bytes as they were.

        Shape:
            packed: (packed_bytes,), uint8. Returns (size_bytes,), uint8.
        """


@final
class StorageRecord:
    """The bytes of one storage, or of one view gathered from it, that left the device.

    Attributes:
        key: where the session finds it; valid while `identity` lives, see below.
        identity: a weak reference to the source storage. While it exists no other storage can
            have the same address, so a lookup by address finds this storage or nothing.
        version: of the saved tensors that share this record.
        home: the compute stream to which the memory of `source`, later of `buffer`, belongs.
        source: the device bytes until the copy down is complete, (size_bytes,) uint8.
        slot: where they go, None until their copy has begun.
        owner: what a schedule knows of the unit that saved it last; None without a schedule.
        held: a schedule says when the source goes.
        stays: a schedule brought the buffer back: it stays until the graph lets go.
        buffer: the device bytes after a reload, (size_bytes,) uint8.
        reloaded: after this event `buffer` holds the bytes.
        layer: that saved it first, None outside layers.
        packing: what `source`, slot and `buffer` hold is packed by it; None if it is not.
        unpacked_bytes: of the storage, or of the gathered view.
        awaited: the compute stream waits for `reloaded`, so `buffer` may be freed in its order.
        expected: the store has been told that a reload will come.
        generation: counts reloads, so that a handle knows which one it has read.
        handles: saved tensors alive that share the record.
        unread: those of them that have not been unpacked since the last reload.
    """

    __slots__ = (
        "awaited",
        "buffer",
        "expected",
        "forward",
        "generation",
        "handles",
        "held",
        "home",
        "identity",
        "key",
        "layer",
        "ordinal",
        "owner",
        "packing",
        "reloaded",
        "size_bytes",
        "slot",
        "source",
        "state",
        "stays",
        "unpacked_bytes",
        "unread",
        "version",
    )

    def __init__(
        self,
        key: Hashable,
        storage: torch.UntypedStorage,
        version: int,
        source: torch.Tensor,
        forward: ForwardLog,
        home: AbstractStream,
        layer: Layer | None = None,
    ) -> None:
        self.key = key
        self.layer = layer
        self.identity = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.version = version
        self.size_bytes = source.numel()
        self.home = home
        self.source: torch.Tensor | None = source
        self.slot: Slot | None = None
        self.owner: UnitRecords | None = None
        self.held = False
        self.stays = False
        self.forward = forward
        self.ordinal = forward.add(self)
        self.packing: AbstractPacking | None = None
        self.unpacked_bytes = self.size_bytes
        self.state = RecordState.HELD
        self.buffer: torch.Tensor | None = None
        self.reloaded: AbstractEvent | None = None
        self.awaited = False
        self.expected = False
        self.generation = 0
        self.handles = 0
        self.unread = 0

    def unpack(self, flat: torch.Tensor) -> torch.Tensor:
        """What `flat`, the record's bytes, were before they left."""
        return flat if self.packing is None else self.packing.unpack(flat, self.unpacked_bytes)

    def move_to(self, state: RecordState) -> None:
        assert state in _TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state

    def begin_offload(self, slot: Slot) -> None:
        """The copy down is queued."""
        self.move_to(RecordState.OFFLOADING)
        self.slot = slot

    def release_source(self) -> None:
        """The store has the bytes: the device memory goes, unless the model holds it too."""
        self.source = None
        if self.state is RecordState.OFFLOADING:
            self.move_to(RecordState.OFFLOADED)

    def begin_reload(
        self, buffer: torch.Tensor, reloaded: AbstractEvent, home: AbstractStream
    ) -> None:
        self.move_to(RecordState.RELOADED)
        self.buffer, self.reloaded, self.home, self.awaited = buffer, reloaded, home, False
        self.generation += 1
        self.unread = self.handles

    def release_buffer(self) -> None:
        """The bytes are in the store still: backward can ask again."""
        self.move_to(RecordState.OFFLOADED)
        self.buffer = self.reloaded = None
        self.stays = False
