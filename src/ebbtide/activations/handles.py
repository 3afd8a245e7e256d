"""Handles: what the pack hook leaves in autograd's graph and the unpack hook turns into tensors."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from ebbtide.errors import SavedTensorModifiedError


class AbstractSaved(ABC):
    """Stands for one saved tensor in a graph and dies with the graph."""

    __slots__ = ()

    @abstractmethod
    def restore(self) -> Tensor:
        """Return the tensor as it was saved, with its strides, storage offset, conj and neg bits.

        Raises:
            SavedTensorModifiedError: the tensor was modified in place since it was saved.
        """


class Hold(weakref.ref[Any]):
    """What one object in a graph holds. It is there to be noted after the object has died.

    [Note: deaths] When the object dies, the interpreter itself appends its hold to a queue. No
    Python code runs for that: an interrupt that is raised in a finalizer is lost, and so would be
    the finalizer's work. `Transfers.settle` and whoever next moves bytes look into the queue.

    Args:
        owner: the object.
        died: the `append` of the queue.
    """

    __slots__ = ()
    # By identity. A weak reference takes the hash of its object, and has none if an interrupt came
    # between its making and the first question for it, and the object has died of that.
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def note_death(self) -> None:
        """Note that the object has died. Called with the lock held."""


@final
class Deaths:
    """The holds of the objects in the graphs of one model.

    Attributes:
        queue: holds of objects that have died and have not been noted yet.
        awaited: holds of all other objects. If only the object referred to its hold, the garbage
            collector would free both without a word, as with the frames of an exception.
    """

    def __init__(self) -> None:
        self.queue: deque[Hold] = deque()
        self.awaited: set[Hold] = set()


@final
class SmallHold(Hold):
    """The small tensors of a forward.

    Attributes:
        tally: what they are.
    """

    __slots__ = ("tally",)
    tally: SmallTally


@final
@dataclass
class SmallTally:
    """The small tensors that one forward left on the device.

    Attributes:
        pointers: addresses of the memory that was counted. Handles keep that memory alive.
        size_bytes: size of that memory.
    """

    pointers: set[int] = field(default_factory=set)
    size_bytes: int = 0


@final
class SmallTensors:
    """Counts the small tensors that one forward left on the device.

    There are thousands of them, so they are not counted down one by one. Each of their handles
    refers to this object. It dies with the last handle, and then all of them are counted down at
    once. Until then all of them count as held.

    Args:
        deaths: where the death of the last handle is noted.

    Attributes:
        tally: what is counted.
    """

    __slots__ = ("__weakref__", "tally")

    def __init__(self, deaths: Deaths) -> None:
        self.tally = SmallTally()
        hold = SmallHold(self, deaths.queue.append)
        hold.tally = self.tally
        deaths.awaited.add(hold)


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
        return saved.restore()  # type: ignore[union-attr]
    tensor, version, _ = saved
    if tensor._version != version:
        raise_modified(tensor, version, tensor.shape)
    return tensor


@final
class EmptyTensors(dict[torch.dtype, Tensor]):
    """An empty tensor of each type on one device, made when it is first looked up.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __missing__(self, dtype: torch.dtype) -> Tensor:
        empty = self[dtype] = torch.empty(0, dtype=dtype, device=self._device)
        return empty


def are_hooked() -> bool:
    """Whether autograd keeps no saved tensor itself now: ebbtide or a checkpoint replaces it."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    enabled: bool = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    if hooks is None or not enabled:
        return False
    return hooks[1] is restore or is_of_checkpoint(hooks[0])


def is_of_checkpoint(pack: Any) -> bool:
    """Whether a pack hook belongs to a checkpoint, the user's or that of a recomputed layer."""
    return pack.__module__ == "torch.utils.checkpoint" or is_of_recomputed(pack)


def is_of_recomputed(pack: Any) -> bool:
    """Whether a pack hook belongs to the checkpoint of a recomputed layer."""
    return bool(pack.__module__ == "ebbtide.recomputation.call")


class AbstractAway(AbstractSaved):
    """Stands for a plain tensor and has everything but its bytes.

    Args:
        tensor: the tensor that was saved.
        version: the tensor's version when it was saved.
        empty: empty tensors on the tensor's device.

    Attributes:
        version: as given.
    """

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
        probe.data = empty[dtype]

    @property
    def shape(self) -> tuple[object, ...]:
        """Shape, strides, type and device of the tensor, for comparisons."""
        return self._size, self._stride, self._dtype, self._probe.device

    @abstractmethod
    def share(self) -> AbstractAway:
        """Return one more handle on the same tensor."""

    @abstractmethod
    def peek(self) -> Tensor:
        """Return the tensor during forward, before backward has come to it."""

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
        return torch._neg_view(tensor) if self._neg else tensor


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
