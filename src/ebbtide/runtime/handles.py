"""Handles, which autograd's graph holds instead of saved tensors, and the records that they share.

First come the handles, with the unpack hook and the holds by which their deaths are noted; then
`StorageRecord`, the record of one storage.
"""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, NoReturn, final

import torch
from torch import Tensor

from ebbtide.errors import SavedTensorModifiedError
from ebbtide.runtime.record import (
    KEPT,
    PENDING,
    REBUILDABLE,
    Constants,
    ForwardLog,
    KernelSettings,
    RebuildRecipe,
    Record,
    State,
    as_in_forward,
)
from ebbtide.runtime.torch_internals import (
    aside,
    identity_of,
    neg_view,
    release_identity,
    storage_of_identity,
)
from ebbtide.schedule import Pass, Unit, Verb

# ---- The bytes of storages, and of views of them


def bytes_of(storage: torch.UntypedStorage, no_bytes: Tensor) -> Tensor:
    """Return a storage's bytes as a tensor, which keeps the storage alive.

    Args:
        storage: any storage.
        no_bytes: an empty uint8 tensor on the storage's device.

    Shape:
        (size_bytes,), uint8.
    """
    return no_bytes.new(storage)  # the fastest way, and the oldest


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's elements, for comparisons."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def gather(tensor: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return a view's elements, packed, as bytes. The handle keeps the conj and neg bits."""
    plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    plain.set_(tensor.untyped_storage(), tensor.storage_offset(), size, tensor.stride())
    packed = plain.clone(memory_format=torch.contiguous_format)
    return packed.view(-1).view(torch.uint8)


# ---- Handles: what the pack hook leaves in autograd's graph and the unpack hook turns into tensors


class AbstractSaved(ABC):
    """Stands for one saved tensor in a graph and dies with the graph."""

    __slots__ = ()

    @abstractmethod
    def restore(self) -> Tensor:
        """Return the tensor as it was saved, with its strides, storage offset, conj and neg bits.

        Raises:
            SavedTensorModifiedError: the tensor was modified in place since it was saved.
        """


@final
class Deaths:
    """What the objects in the graphs of one model hold, to be noted after the objects have died.

    [Note: deaths] When such an object dies, the interpreter itself appends the weak reference to it
    to a queue. No Python code runs for that: an interrupt that is raised in a finalizer is lost,
    and so would be the finalizer's work. `Transfers.settle` and whoever next moves bytes look into
    the queue.

    Attributes:
        queue: references to objects that have died and have not been noted yet.
        awaited: what each object holds; nothing if an interrupt came before it was noted. If only
            the object referred to its reference, the garbage collector would free both without a
            word, as with the frames of an exception.
    """

    def __init__(self) -> None:
        self.queue: deque[weakref.ref[Any]] = deque()
        self.awaited: dict[weakref.ref[Any], Any] = {}
        self._append = self.queue.append

    def expect(self, owner: object, holds: object) -> None:
        """Note what an object holds, to be taken from `awaited` once that object has died."""
        self.awaited[weakref.ref(owner, self._append)] = holds


@final
class SmallTensors:
    """Counts the small tensors that one forward left on the device.

    There are thousands of them, so they are not counted down one by one. Each of their handles
    refers to this object. It dies with the last handle, and then all of them are counted down at
    once. Until then all of them count as held.

    Args:
        deaths: where the death of the last handle is noted.

    Attributes:
        sizes: size in bytes of the memory at each address. Handles keep that memory alive.
    """

    __slots__ = ("__weakref__", "sizes")

    def __init__(self, deaths: Deaths) -> None:
        self.sizes: dict[int, int] = {}
        deaths.expect(self, self.sizes)


PassedTensor = tuple[Tensor, int, SmallTensors | None]
"""A tensor that is passed through: the tensor, detached, its version, and the counter if small.

It is a plain tuple because most saved tensors are small and a tuple is cheapest to make. A tensor
that an operation made is detached, because it refers to the graph that holds it, and would leak. A
leaf of the graph is held itself, as autograd holds it: `leaf.data = ...` is seen.
"""

Saved = AbstractSaved | PassedTensor


def pass_through(tensor: Tensor) -> PassedTensor:
    """Leave a tensor where it is because it is no activation of this device."""
    if tensor.grad_fn is None and type(tensor) in _PLAIN:
        return tensor, tensor._version, None
    return tensor.detach(), tensor._version, None


def restore(saved: Saved) -> Tensor:
    """The unpack hook.

    Raises:
        SavedTensorModifiedError: the tensor was modified in place since it was saved.
    """
    if type(saved) is not tuple:
        with aside():
            return saved.restore()  # type: ignore[union-attr]
    tensor, version, _ = saved
    if tensor._version != version:
        raise_modified(tensor, version, tensor.shape)
    return tensor


EmptyTensors = Callable[[torch.dtype], Tensor]
"""Returns an empty tensor of a type on one device, the same one each time."""


def empty_tensors(device: torch.device) -> EmptyTensors:
    """Return empty tensors on a device."""
    return functools.cache(lambda dtype: torch.empty(0, dtype=dtype, device=device))


def is_of_checkpoint(pack: Any) -> bool:
    """Whether a pack hook belongs to a checkpoint of torch."""
    return bool(pack.__module__ == "torch.utils.checkpoint")


class AbstractProbed(AbstractSaved):
    """Stands for a plain tensor and has everything but its bytes.

    Args:
        tensor: the tensor that was saved.
        version: the tensor's version when it was saved.
        empty: empty tensors on the tensor's device.

    Attributes:
        version: as given.
        is_input: whether others can be rebuilt from it.
    """

    is_input = True
    __slots__ = (
        "__weakref__",
        "_conj",
        "_dtype",
        "_neg",
        "_offset",
        "_probe",
        "_size",
        "_stride",
        "version",
    )

    def __init__(self, tensor: Tensor, version: int, empty: EmptyTensors) -> None:
        dtype = self._dtype = tensor.dtype
        self._size = tensor.shape
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset()
        self._conj = tensor.is_conj()
        self._neg = tensor.is_neg()
        self.version = version
        # Shares the version counter and, emptied, not the memory: modifications made after the
        # bytes have left are seen as native autograd sees them.
        probe = self._probe = tensor.detach()
        probe.data = empty(dtype)

    @property
    def shape(self) -> tuple[object, ...]:
        """Shape, strides, type and device of the tensor, for comparisons."""
        return self._size, self._stride, self._dtype, self._probe.device

    def peek(self) -> Tensor:
        """Return the tensor during forward, before backward has come to it."""
        return self.restore()

    def is_modified(self) -> bool:
        """Whether the tensor was changed in place after it was saved."""
        # Guard in-place-changes: in-place changes are seen after the bytes have left. Hooks switch
        # autograd's own check off: a modified saved tensor would give wrong gradients without a
        # word.
        return self._probe._version != self.version

    def _raise_modified(self) -> NoReturn:
        raise_modified(self._probe, self.version, self._size)

    def _tensor_in(self, storage: torch.UntypedStorage) -> Tensor:
        values = self._probe.data  # an empty tensor, whose storage may be set
        values.set_(storage, self._offset, self._size, self._stride)
        # Guard one-version: what backward is given has the version of what was saved. A custom
        # backward may change it in place: all other saved tensors that share the memory, and the
        # next backward of a retained graph, would get the changed values without a word.
        tensor = self._probe.detach()
        tensor.data = values
        if self._conj:
            tensor = tensor.conj()
        return neg_view(tensor) if self._neg else tensor


def raise_modified(tensor: Tensor, version: int, shape: torch.Size) -> NoReturn:
    """Raise the error that autograd itself would raise.

    Raises:
        SavedTensorModifiedError: always.
    """
    raise SavedTensorModifiedError(
        f"a tensor of shape {tuple(shape)} and type {tensor.dtype} that autograd saved at version "
        f"{version} is at version {tensor._version} when backward needs it: something modified it "
        f"in place. Find the operation with torch.autograd.set_detect_anomaly(True), or clone the "
        f"tensor before it"
    )


_PLAIN = frozenset({Tensor, torch.nn.Parameter})


# ---- The records of activations: one for every storage that autograd saves in a step ----


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
        with as_in_forward(self.settings, inputs[0].device.type):
            return self.recipe.rebuild(inputs, self.constants, self.dtype)


Form = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int] | None
"""Type, shape, strides and offset of a view that is gathered; None for a whole storage."""


@final
@dataclass(slots=True, eq=False, repr=False)
class StorageRecord(Record):
    """One storage, or one view gathered from it, that autograd saved.

    All saved tensors that alias the storage at the same version share the record, which is dropped
    with the last of them. `layer` and `number` identify the storage in every step of the same
    model.

    Attributes:
        address: address of the storage; valid while `identity` exists or the bytes are KEPT.
        version: version counter of the saved tensors that share this record.
        number: number of the storage among those that the layer's call saves, from 0. Views
            gathered from one storage all have the number of that storage.
        decision: whether the storage is kept, offloaded or rebuilt.
        forward: the log of the forward that saved it first.
        identity: torch's weak reference to the source storage. While it exists, no other storage
            can have the same address, so a lookup by address finds this storage or nothing.
        form: which bytes of the storage the record holds: None for all of them, else a tuple that
            identifies a gathered view.
        ordinal: number of the record in `forward`; -1 if it is not offloaded.
        call: the operation that rebuilds the storage; None unless the decision is to rebuild it.
        rebuilt_from: the records of the call's inputs, which are known when the call is gone, too.
        tier: tier that the bytes were offloaded to; empty if they were not.
        unit: records of the schedule's unit with which this record moves; None if there is none.
        unwritten: whether the operator that saved the storage may still write it, so that its copy
            has not begun.
        numbers: by the place of each scope that saved the storage, its number there; see
            `Scope.place`. None while a layer is the only one.
        saves: number of saved tensors that ever shared the record; `handles` counts the live ones.
        shape: shape of the saved tensor.
        dtype: its type.
        saved_by: name of the node of the graph that read it last; empty if none has.
    """

    address: int
    version: int
    number: int
    decision: Decision
    forward: ForwardLog
    identity: Any = field(default=None, init=False)
    form: Form = field(default=None, init=False)
    ordinal: int = field(default=-1, init=False)
    call: Call | None = field(default=None, init=False)
    rebuilt_from: tuple[StorageRecord, ...] = field(default=(), init=False)
    unit: UnitRecords | None = field(default=None, init=False)
    tier: str = field(default="", init=False)
    unwritten: bool = field(default=False, init=False)
    numbers: dict[int, int] | None = field(default=None, init=False)
    saves: int = field(default=0, init=False)
    shape: tuple[int, ...] = field(default=(), init=False)
    dtype: torch.dtype | None = field(default=None, init=False)
    saved_by: str = field(default="", init=False)

    @property
    def source_address(self) -> int | None:
        return self.address if self.form is None else None

    def find_storage(self) -> torch.UntypedStorage | None:
        if self.identity is None:
            return None
        found: torch.UntypedStorage | None = storage_of_identity(self.identity)
        return found

    @property
    def view_size(self) -> tuple[int, ...] | None:
        """The shape of a gathered view; None for a whole storage."""
        return None if self.form is None else self.form[1]

    @property
    def is_on_device(self) -> bool:
        """Whether the bytes are on the device without a buffer, in their original memory."""
        return self.source is not None or self.state is KEPT

    def pin_identity(self, storage: torch.UntypedStorage) -> None:
        """Keep the storage's address from being reused until `release_identity`."""
        self.identity = identity_of(storage)

    def release_identity(self) -> None:
        """Let the storage's address be reused; the record can no longer be looked up by it."""
        if self.identity is not None:
            release_identity(self.identity)
            self.identity = None

    def note_stored(self) -> None:
        if self.forward.in_backward:
            self.forward.note_stored(self.ordinal)

    def precedes(self, other: Record) -> bool:
        if not isinstance(other, StorageRecord) or self.forward is not other.forward:
            return False
        return self.forward.expects_before(self.ordinal, other.ordinal)


# ---- What a schedule moves together ----


@final
@dataclass(eq=False, repr=False)
class ScheduleRun:
    """One traversal of the order of a schedule.

    Attributes:
        number: number of the run in its step, from 0.
        to_come: forwards that have not begun, in order; empty once no more are expected.
        place: place in the order of the pass that is due next.
        begun: passes that have begun.
        departed: whether the run has departed from the schedule and is now offloaded in the default
            way.
        units: records of each unit whose forward has begun.
        logs: the log of each microbatch.
    """

    number: int
    to_come: dict[Pass, None]
    place: int = 0
    begun: set[Pass] = field(default_factory=set)
    departed: bool = False
    units: dict[Unit, UnitRecords] = field(default_factory=dict)
    logs: dict[int, ForwardLog] = field(default_factory=dict)


@final
@dataclass(eq=False, repr=False)
class UnitRecords:
    """The records that move with one unit of a schedule, which is one layer in one microbatch.

    A record that several units save moves with the unit whose backward comes first. It stays on the
    device if the schedule keeps one of these units there.

    Attributes:
        unit: the unit.
        use: place in the order of the schedule at which the unit's backward begins.
        run: the schedule run that the unit belongs to.
        log: the log of its microbatch.
        leaves: whether the schedule offloads the unit.
        immediate: whether the copy of a storage starts when it is saved; otherwise it starts at the
            unit's offload action.
        done: actions already performed on the unit.
        records: its live records, in the order of their first save.
    """

    unit: Unit
    use: int
    run: ScheduleRun
    log: ForwardLog
    leaves: bool
    immediate: bool
    done: set[Verb] = field(default_factory=set)
    records: dict[StorageRecord, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.leaves and self.immediate:
            self.done.add(Verb.OFFLOAD)

    @property
    def followed(self) -> bool:
        """Whether the schedule decides when the records move."""
        return not self.run.departed

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


Unwritten = list[tuple[int, StorageRecord, Callable[[], None]]]
"""The copies of one forward that have not begun, all for the operator that saved last.

For each: autograd's sequence number when the tensor was saved, which each operator that autograd
records takes before it saves anything; the record of the tensor's storage; what begins its copy.
"""
