"""The records of activations: one for every storage that autograd saves in a step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import Enum
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ebbtide.activations.handles import Hold, Saved
from ebbtide.devices.device import AbstractEvent
from ebbtide.schedule import Unit, Verb
from ebbtide.tensors.packing import unpack
from ebbtide.tensors.recipes import (
    Constants,
    KernelSettings,
    RebuildRecipe,
    in_force,
    kernel_settings,
)
from ebbtide.transfers.layer import Layer
from ebbtide.transfers.prefetch import ForwardLog
from ebbtide.transfers.record import DROPPED, KEPT, PENDING, REBUILDABLE, REBUILT, Record, State


class Decision(Enum):
    """Whether a storage is kept, offloaded or rebuilt, decided once when it is first saved."""

    KEEP = "keep"
    OFFLOAD = "offload"
    REBUILD = "rebuild"

    state: State  # the first state of a record with this decision


KEEP, OFFLOAD, REBUILD = Decision
KEEP.state, OFFLOAD.state, REBUILD.state = KEPT, PENDING, REBUILDABLE


class Call(NamedTuple):
    """One operation of the forward, ready to run again.

    Attributes:
        recipe: the recipe of the operation.
        inputs: saved handles of the operation's input tensors.
        constants: the operation's other arguments.
        dtype: type of the output.
        depth: number of operations in a row to run if inputs are rebuilt too, this one included.
        settings: what the operation's kernels depended on beside their arguments.
    """

    recipe: RebuildRecipe
    inputs: Sequence[Saved]
    constants: Constants
    dtype: torch.dtype
    depth: int
    settings: KernelSettings

    def run(self, inputs: Sequence[Tensor]) -> Tensor:
        """Compute the output again. Its kernels are queued on the current stream."""
        settings = self.settings
        if settings is None or settings == kernel_settings():
            return self._run(inputs)
        with in_force(settings):
            return self._run(inputs)

    def _run(self, inputs: Sequence[Tensor]) -> Tensor:
        with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
            return self.recipe.rebuild(inputs, self.constants, self.dtype)


@final
class StorageRecord(Record):
    """One storage, or one view gathered from it, that autograd saved.

    All saved tensors that alias the storage at the same version share the record, which is dropped
    with the last of them. `layer` and `number` identify the storage in every step of the same
    model.

    Args:
        address: address of the storage.
        version: version counter of the saved tensors that share this record.
        layer: the layer that saved the storage first; None outside layers.
        number: number of the storage among those that the layer's call saved first, from 0. Views
            gathered from one storage all have the number of that storage.
        size_bytes: size of the storage, or of the gathered view.
        decision: whether the storage is kept, offloaded or rebuilt.
        forward: the log of the forward that saved it first.

    Attributes:
        address: as given; valid while `identity` exists or the bytes are KEPT.
        version: as given.
        number: as given.
        decision: as given.
        forward: as given.
        unpacked_bytes: size of the storage or view; `size_bytes` is smaller if it is packed.
        identity: torch's weak reference to the source storage. While it exists, no other storage
            can have the same address, so a lookup by address finds this storage or nothing.
        form: which bytes of the storage the record holds: None for all of them, else a key that
            identifies a gathered view.
        sibling: another record of the same storage, with another form.
        view_size: the shape of a gathered view; None for a whole storage.
        ordinal: number of the record in `forward`; -1 if it is not offloaded.
        packing: packing of the source, slot and buffer; see `ebbtide.tensors.packing`. None if
            they are not packed.
        call: the operation that rebuilds the storage; None unless the decision is to rebuild it.
        rebuilt_from: the records of the call's inputs, which are known when the call is gone, too.
        begun: event before the rebuild on the compute stream; set only if steps are traced.
        tier: tier that the bytes were offloaded to; empty if they were not.
        unit: records of the schedule's unit with which this record moves; None if there is none.
        unwritten: whether the operator that saved the storage may still write it, so that its copy
            has not begun.
        shared: layers other than `layer` that also saved the storage.
        saves: number of saved tensors that ever shared the record; `handles` counts the live ones.
    """

    __slots__ = (
        "address",
        "begun",
        "call",
        "decision",
        "form",
        "forward",
        "identity",
        "number",
        "ordinal",
        "packing",
        "rebuilt_from",
        "saves",
        "shared",
        "sibling",
        "tier",
        "unit",
        "unpacked_bytes",
        "unwritten",
        "version",
        "view_size",
    )

    def __init__(
        self,
        address: int,
        version: int,
        layer: Layer | None,
        number: int,
        size_bytes: int,
        decision: Decision,
        forward: ForwardLog,
    ) -> None:
        # Not by `super()`, which takes longer: a step makes thousands of records.
        Record.__init__(self, layer, forward.number, size_bytes, decision.state)
        self.address = address
        self.version = version
        self.number = number
        self.unpacked_bytes = size_bytes
        self.decision = decision
        self.forward = forward
        self.identity: Any = None
        self.form: Hashable = None
        self.sibling: StorageRecord | None = None
        self.view_size: tuple[int, ...] | None = None
        self.ordinal = -1
        self.packing: torch.dtype | None = None
        self.call: Call | None = None
        self.rebuilt_from: tuple[StorageRecord, ...] = ()
        self.begun: AbstractEvent | None = None
        self.unit: UnitRecords | None = None
        self.tier = ""
        self.unwritten = False
        self.shared: tuple[Layer | None, ...] = ()
        self.saves = 0

    @property
    def source_address(self) -> int | None:
        return self.address if self.form is None and self.packing is None else None

    def find_storage(self) -> torch.UntypedStorage | None:
        if self.identity is None:
            return None
        return torch.UntypedStorage._new_with_weak_ptr(self.identity)

    @property
    def is_on_device(self) -> bool:
        """Whether the bytes are on the device without a buffer, in their original memory."""
        return self.source is not None or self.state is KEPT

    def pin_identity(self, storage: torch.UntypedStorage) -> None:
        """Keep the storage's address from being reused until `release_identity`."""
        self.identity = storage._weak_ref()

    def release_identity(self) -> None:
        """Let the storage's address be reused; the record can no longer be looked up by it."""
        if self.identity is not None:
            torch.UntypedStorage._free_weak_ref(self.identity)  # type: ignore[no-untyped-call]
            self.identity = None

    def unpack(self, flat: Tensor) -> Tensor:
        """Return the bytes of the storage or view, given the record's bytes, which may be packed.

        Shape:
            flat: (size_bytes,), uint8.
            Returns: (unpacked_bytes,), uint8.
        """
        return flat if self.packing is None else unpack(flat, self.packing, self.unpacked_bytes)

    def note_stored(self) -> None:
        if self.forward.in_backward:
            self.forward.note_stored(self.ordinal)

    def precedes(self, other: Record) -> bool:
        log = self.forward
        if not isinstance(other, StorageRecord) or log is not other.forward:
            return False
        return log.next_use(self.ordinal) < log.next_use(other.ordinal)

    def check(self) -> None:
        super().check()
        rebuilds = self.state in (REBUILDABLE, REBUILT)
        assert rebuilds == (self.call is not None), f"{self.state.name} with call {self.call}"
        assert self.state is DROPPED or self.handles > 0, "a record without a handle"
        assert 0 <= self.unread <= self.handles, "more readers than handles"
        moves = self.decision is OFFLOAD
        assert moves == (self.ordinal >= 0), "only what moves has an ordinal"


@final
class RecordHold(Hold):
    """The hold of a saved tensor on a record.

    Attributes:
        record: the record, which counts this saved tensor among its handles.
        generation: generation of the record's buffer that the saved tensor read last; 0 for none.
    """

    __slots__ = ("generation", "record")
    generation: int
    record: StorageRecord


@final
class UnitRecords:
    """The records that move with one unit of a schedule, which is one layer in one microbatch.

    A record that several units save moves with the unit whose backward comes first. It stays on the
    device if the schedule keeps one of these units there.

    Args:
        unit: the unit.
        use: place in the order of the schedule at which the unit's backward begins.
        run: the schedule run that the unit belongs to; it is only compared by identity.
        leaves: whether the schedule offloads the unit.
        immediate: whether the copy of a storage starts when it is saved; otherwise it starts at the
            unit's offload action.

    Attributes:
        unit: as given.
        use: as given.
        run: as given.
        leaves: as given.
        immediate: as given.
        followed: whether the schedule decides when the records move; False once the run has
            departed from its schedule.
        done: actions already performed on the unit.
        records: its live records, in the order of their first save.
    """

    def __init__(self, unit: Unit, use: int, run: object, *, leaves: bool, immediate: bool) -> None:
        self.unit = unit
        self.use = use
        self.run = run
        self.leaves = leaves
        self.immediate = immediate
        self.followed = True
        self.done: set[Verb] = {Verb.OFFLOAD} if leaves and immediate else set()
        self.records: dict[StorageRecord, None] = {}

    def claim(self, record: StorageRecord) -> bool:
        """Take over a record that the unit saves, unless another unit has the better claim.

        Returns:
            Whether to start the record's copy now, because it is pending and this unit's offload
            has been started already.
        """
        if not self._has_claim(record):
            return False
        if record.unit is not None:
            del record.unit.records[record]
        record.unit = self
        self.records[record] = None
        return record.state is PENDING and Verb.OFFLOAD in self.done

    def _has_claim(self, record: StorageRecord) -> bool:
        unit = record.unit
        if not self.followed or unit is self or record.decision is KEEP:
            return False
        if unit is None:
            return True
        first = self.use < unit.use if self.leaves else record.source is not None
        return unit.leaves and unit.run is self.run and first

    def forget(self, record: StorageRecord) -> None:
        """Remove a record that nothing can read any more."""
        del self.records[record]
        record.unit = None


class UnwrittenCopy(NamedTuple):
    """A copy that begins once the operator that saved the tensor has returned.

    Attributes:
        sequence: autograd's sequence number when the tensor was saved. Each operator that autograd
            records takes one before it saves anything.
        record: the record of the tensor's storage.
        tensor: the tensor. It refers to no graph.
        packs: whether the bytes are packed if they can be.
        unit: records of the unit of a schedule that saved it; None without a schedule.
    """

    sequence: int
    record: StorageRecord
    tensor: Tensor
    packs: bool
    unit: UnitRecords | None


Unwritten = list[UnwrittenCopy]
"""The copies of one forward that have not begun, all for the operator that saved last."""
