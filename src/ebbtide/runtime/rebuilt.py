"""Rebuild records: bytes that are computed again instead of kept or moved.

A rebuild record stands where a storage record would: one for a storage, shared by all saved tensors
that alias it, gone with the last of them. Instead of bytes it holds handles on its inputs, which
keep those recorded for exactly as long as they are needed. An input can be rebuilt itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide.devices.device import AbstractDevice, AbstractEvent, AbstractStream
from ebbtide.runtime.account import Account
from ebbtide.runtime.ranges import Layer
from ebbtide.runtime.recipes import Constants, RebuildRecipe
from ebbtide.runtime.recorder import Subject

if TYPE_CHECKING:
    from ebbtide.runtime.saved import Saved

MOST_STEPS = 4  # in a chain of rebuilds, each of which waits for the one before


@final
@dataclass(frozen=True)
class Call:
    """One operation of the forward, ready to run again.

    Args:
        recipe: what to run.
        inputs: on what.
        constants: with what else.
        dtype: of the output.
        depth: how many operations deep its inputs are rebuilt themselves, this one counted.
    """

    recipe: RebuildRecipe
    inputs: Sequence[Saved]
    constants: Constants
    dtype: torch.dtype
    depth: int

    def run(self, inputs: Sequence[Tensor]) -> Tensor:
        """The output as it was; kernels run on the current stream."""
        device_type = inputs[0].device.type
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            return self.recipe.rebuild(inputs, self.constants, self.dtype)


@final
class RebuildRecord:
    """A storage that is rebuilt when it is needed.

    Attributes:
        key: where the session finds it.
        identity: a weak reference to the storage that was saved, see `StorageRecord`.
        version: of the saved tensors that share this record.
        call: what rebuilds it.
        size_bytes: of the storage.
        layer: that saved it first.
        number: of the forward that saved it.
        home: the compute stream to which the memory of `value` belongs.
        value: the storage's bytes while somebody is still to read them.
        ready: `value` holds them after this event.
        generation: counts rebuilds, so that a handle knows which one it has read.
        handles: saved tensors alive that share the record.
        unread: those of them that have not been unpacked since the last rebuild.
    """

    __slots__ = (
        "call",
        "generation",
        "handles",
        "home",
        "identity",
        "key",
        "layer",
        "number",
        "ready",
        "size_bytes",
        "unread",
        "value",
        "version",
    )

    def __init__(
        self,
        key: Hashable,
        storage: torch.UntypedStorage,
        version: int,
        call: Call,
        layer: Layer | None,
        number: int,
    ) -> None:
        self.key = key
        self.identity = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.version = version
        self.call = call
        self.size_bytes = storage.nbytes()
        self.layer = layer
        self.number = number
        self.value: Tensor | None = None
        self.ready: AbstractEvent | None = None
        self.home: AbstractStream | None = None
        self.generation = 0
        self.handles = 0
        self.unread = 0


@final
class Rebuilds:
    """The values of rebuild records. Its session calls it with the lock held.

    Args:
        device: whose compute streams rebuild them.
        account: told of the bytes that they hold.
        bound_bytes: on values that wait for another reader, with the reloads that do.

    Attributes:
        held: records whose value is there, oldest first.
        held_bytes: of their values.
    """

    def __init__(self, device: AbstractDevice, account: Account, bound_bytes: int) -> None:
        self._device = device
        self._account = account
        self._bound_bytes = bound_bytes
        self._begun: dict[RebuildRecord, AbstractEvent] = {}  # where compute began to rebuild
        self.held: dict[RebuildRecord, None] = {}
        self.held_bytes = 0

    def begin(self, record: RebuildRecord, beside_bytes: int) -> Tensor | None:
        """A record's value if it is there, ready for what the calling thread queues next.

        If not, it is about to be rebuilt.

        Args:
            record: wanted.
            beside_bytes: what is held of other kinds, under the same bound.
        """
        if record.value is None:
            self.make_room(record.size_bytes, beside_bytes)
            if self._account.recorder is not None:
                self._begun[record] = self._account.recorder.mark()
        value, ready, home = record.value, record.ready, record.home
        if value is not None and ready is not None and home is not None:
            # Another reader rebuilt it, perhaps on another stream.
            self._device.compute_stream().wait(ready)
            self._device.note_use(value, home)
        return value

    def hold(self, record: RebuildRecord, value: Tensor) -> None:
        """A record has been rebuilt on the current compute stream."""
        record.value, record.home = value, self._device.compute_stream()
        record.ready = record.home.record()
        record.generation += 1
        record.unread = record.handles
        self.held[record] = None
        self.held_bytes += record.size_bytes
        self._account.take(record.size_bytes)
        begun, recorder = self._begun.pop(record, None), self._account.recorder
        if recorder is not None and begun is not None:
            about = Subject(record.layer, record.number, record.size_bytes)
            recorder.compute("rebuild", about, begun)

    def note_read(self, record: RebuildRecord, generation: int, beside_bytes: int) -> int:
        """A handle has read a value.

        Args:
            record: has been rebuilt.
            generation: the rebuild that the handle has read before; 0 for none.
            beside_bytes: what is held of other kinds, under the same bound.

        Returns:
            The one that it has read now.
        """
        if generation != record.generation:
            record.unread -= 1
        self._release_if_read(record)
        self.make_room(0, beside_bytes)
        return record.generation

    def make_room(self, size_bytes: int, beside_bytes: int) -> None:
        """Let go of values while there is more than the bound; who comes later rebuilds them again.

        Args:
            size_bytes: of what is to come.
            beside_bytes: what is held of other kinds, under the same bound.
        """
        while self.held and self.held_bytes + beside_bytes + size_bytes > self._bound_bytes:
            self._release(next(iter(self.held)))

    def forget_handle(self, record: RebuildRecord, generation: int) -> None:
        """A handle has died that had read that rebuild."""
        record.handles -= 1
        if record.value is not None and generation != record.generation:
            record.unread -= 1
        self._release_if_read(record)

    def _release_if_read(self, record: RebuildRecord) -> None:
        if record.value is not None and not record.unread:
            self._release(record)

    def _release(self, record: RebuildRecord) -> None:
        record.value = record.ready = record.home = None
        del self.held[record]
        self.held_bytes -= record.size_bytes
        self._account.give(record.size_bytes)
