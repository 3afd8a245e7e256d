"""Saved tensors: what the pack hook leaves in autograd's graph, and how it is a tensor again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NoReturn, final

import torch

from ebbtide.errors import SavedTensorModifiedError
from ebbtide.runtime.kept import LargeKept, SmallKept
from ebbtide.runtime.ranges import profiler_range
from ebbtide.runtime.rebuilt import RebuildRecord
from ebbtide.runtime.records import StorageRecord
from ebbtide.runtime.session import Session


class AbstractSaved(ABC):
    """Stands for one saved tensor in a graph; dies with the graph."""

    __slots__ = ()

    @abstractmethod
    def restore(self) -> torch.Tensor:
        """The tensor as it was saved: dtype, shape, strides, storage offset, conj and neg bits.

        Raises:
            SavedTensorModifiedError: it was modified in place since.
        """


def _raise_modified(tensor: torch.Tensor, version: int, shape: torch.Size) -> NoReturn:
    raise SavedTensorModifiedError(
        f"a tensor of shape {tuple(shape)} and type {tensor.dtype} that autograd saved at version "
        f"{version} is at version {tensor._version} when backward needs it: something modified it "
        f"in place. Find the operation with torch.autograd.set_detect_anomaly(True), or clone the "
        f"tensor before it"
    )


HeldTensor = tuple[torch.Tensor, int, SmallKept | LargeKept | None]
"""A tensor that stays where it is: itself, detached, its version, and what counts it.

A plain tuple, because most saved tensors are small and a tuple is what costs least to make. The
tensor is detached because the tensor itself would refer to the graph that it lives in, and leak.
"""

Saved = AbstractSaved | HeldTensor


def hold(tensor: torch.Tensor, count: SmallKept | LargeKept | None = None) -> HeldTensor:
    """Leave a saved tensor where it is.

    Args:
        tensor: what was saved.
        count: counts it as kept until it is let go; None for what is none of ours: a parameter,
            another device's tensor, another layout.
    """
    return tensor.detach(), tensor._version, count


def restore(saved: Saved) -> torch.Tensor:
    """The unpack hook.

    Raises:
        SavedTensorModifiedError: the tensor was modified in place since it was saved.
    """
    if type(saved) is not tuple:
        return saved.restore()  # type: ignore[union-attr]
    tensor, version, count = saved
    if tensor._version != version:
        _raise_modified(tensor, version, tensor.shape)
    if type(count) is LargeKept:
        count.note_use()
    return tensor


class AbstractDeparted(AbstractSaved):
    """A plain tensor without its bytes: what else it takes to make it again.

    Args:
        tensor: what was saved.
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
        "_version",
    )

    def __init__(self, tensor: torch.Tensor) -> None:
        self._dtype = tensor.dtype
        self._size = tensor.shape
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset()
        self._conj = tensor.is_conj()
        self._neg = tensor.is_neg()
        self._version = tensor._version
        # Shares the version counter and, emptied, not the memory: modifications made after the
        # bytes have left are seen as native autograd sees them.
        self._probe = tensor.detach()
        self._probe.data = _empty_like(self._probe)

    @property
    def shape(self) -> tuple[object, ...]:
        """What the tensor looks like, to compare."""
        return self._size, self._stride, self._dtype, self._probe.device

    @abstractmethod
    def share(self) -> AbstractDeparted:
        """One more handle on the same tensor, for somebody else who needs it."""

    @abstractmethod
    def inspect(self) -> torch.Tensor:
        """The tensor, for a look during forward: backward has not come to it."""

    def _share_geometry(self, other: AbstractDeparted) -> None:
        for name in AbstractDeparted.__slots__[1:]:
            setattr(self, name, getattr(other, name))

    @property
    def version(self) -> int:
        """At which the tensor was saved."""
        return self._version

    def is_modified(self) -> bool:
        """Whether it was changed in place since."""
        return self._probe._version != self._version

    def _check_version(self) -> None:
        if self.is_modified():
            _raise_modified(self._probe, self._version, self._size)

    def _tensor_in(self, storage: torch.UntypedStorage) -> torch.Tensor:
        tensor = torch.empty(0, dtype=self._dtype, device=storage.device)
        tensor.set_(storage, self._offset, self._size, self._stride)
        if self._conj:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if self._neg else tensor


@final
class OffloadedTensor(AbstractDeparted):
    """A tensor whose bytes are in a record.

    Args:
        session: that moves the record.
        record: the record, this handle counted among its `handles` already.
        tensor: what was saved.
        packed_size: None if the record holds the tensor's whole storage; else the record holds a
            gathered copy of this shape: the tensor's, with broadcast dimensions of size 1.

    Attributes:
        generation: the reload of the record that this handle has read; 0 for none.
    """

    __slots__ = ("_packed_size", "_session", "generation", "record")

    def __init__(
        self,
        session: Session,
        record: StorageRecord,
        tensor: torch.Tensor,
        packed_size: tuple[int, ...] | None,
    ) -> None:
        self._session = session
        self.record = record
        self.generation = 0
        self._packed_size = packed_size
        super().__init__(tensor)

    def share(self) -> OffloadedTensor:
        other = OffloadedTensor.__new__(OffloadedTensor)
        other._session, other.record, other.generation = self._session, self.record, 0
        other._packed_size = self._packed_size
        self._session.share(self.record)
        other._share_geometry(self)
        return other

    def restore(self) -> torch.Tensor:
        self._check_version()
        return self._tensor_of(self._session.bring_back(self))

    def inspect(self) -> torch.Tensor:
        self._check_version()
        return self._tensor_of(self._session.inspect(self.record))

    def _tensor_of(self, flat: torch.Tensor) -> torch.Tensor:
        if self._packed_size is None:
            return self._tensor_in(self.record.unpack(flat).untyped_storage())
        return self._tensor_in(self._scatter(flat, self._packed_size))

    def _scatter(self, flat: torch.Tensor, packed_size: tuple[int, ...]) -> torch.UntypedStorage:
        """A storage with the gathered elements where the saved view had them.

        The rest of it is never read, so on a CPU the system never backs it with memory.
        """
        span = self._offset + 1
        span += sum((n - 1) * step for n, step in zip(packed_size, self._stride, strict=True))
        spread = torch.empty(span, dtype=self._dtype, device=flat.device)
        packed = flat.view(self._dtype).view(packed_size)
        spread.as_strided(packed_size, self._stride, self._offset).copy_(packed)
        return spread.untyped_storage()

    def __del__(self) -> None:
        self._session.forget(self.record, self.generation)


@final
class RebuiltTensor(AbstractDeparted):
    """A tensor whose bytes are computed again.

    Args:
        session: that knows the record.
        record: the record, this handle counted among its `handles` already.
        tensor: what was saved.

    Attributes:
        generation: the rebuild of the record that this handle has read; 0 for none.
    """

    __slots__ = ("_session", "generation", "record")

    def __init__(self, session: Session, record: RebuildRecord, tensor: torch.Tensor) -> None:
        self._session = session
        self.record = record
        self.generation = 0
        super().__init__(tensor)

    def share(self) -> RebuiltTensor:
        other = RebuiltTensor.__new__(RebuiltTensor)
        other._session, other.record, other.generation = self._session, self.record, 0
        self._session.share(self.record)
        other._share_geometry(self)
        return other

    def restore(self) -> torch.Tensor:
        self._check_version()
        record = self.record
        value = self._session.begin_rebuild(record)
        if value is None:
            with profiler_range("rebuild", record.layer):
                value = record.call.run([restore(saved) for saved in record.call.inputs])
        # Two threads may have rebuilt it at once: either result will do.
        self._session.end_rebuild(self, value)
        return self._tensor_in(value.untyped_storage())

    def inspect(self) -> torch.Tensor:
        self._check_version()
        call = self.record.call
        value = call.run([inspect(saved) for saved in call.inputs])
        return self._tensor_in(value.untyped_storage())

    def __del__(self) -> None:
        self._session.forget(self.record, self.generation)


def share(saved: Saved) -> Saved | None:
    """One more handle on a saved tensor; None if it is of a kind that has none."""
    if type(saved) is tuple:
        return saved
    return saved.share() if isinstance(saved, AbstractDeparted) else None


def inspect(saved: Saved) -> torch.Tensor:
    """A saved tensor, for a look during forward: backward has not come to it."""
    if type(saved) is tuple:
        return saved[0]
    assert isinstance(saved, AbstractDeparted)
    return saved.inspect()


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    key = (tensor.dtype, tensor.device)
    if key not in _EMPTY:
        _EMPTY[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return _EMPTY[key]


_EMPTY: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
