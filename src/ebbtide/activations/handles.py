"""Handles: what the pack hook leaves in autograd's graph and the unpack hook turns into tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NoReturn, final

import torch
from torch import Tensor

from ebbtide.errors import SavedTensorModifiedError
from ebbtide.transfers.gate import Gate


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
class SmallTensors:
    """Counts the small tensors that one forward left on the device.

    There are thousands of them, so they are not counted down one by one. Each of their handles
    refers to this object. It dies with the last handle, and then all of them are counted down at
    once. Until then all of them count as held.

    Args:
        gate: the gate at which the end is announced.
        forget: called with `size_bytes` when the last handle has died.

    Attributes:
        pointers: addresses of the memory that was counted. Handles keep that memory alive.
        size_bytes: size of that memory.
    """

    __slots__ = ("_forget", "_gate", "pointers", "size_bytes")

    def __init__(self, gate: Gate, forget: Callable[[int], None]) -> None:
        self._gate = gate
        self._forget = forget
        self.pointers: set[int] = set()
        self.size_bytes = 0

    def __del__(self) -> None:
        if self.pointers:
            self._gate.leave(self._forget, self.size_bytes)


PassedTensor = tuple[Tensor, int, SmallTensors | None]
"""A tensor that is passed through: the tensor, detached, its version, and the counter if small.

It is a plain tuple because most saved tensors are small and a tuple is cheapest to make. The tensor
is detached because the saved tensor itself refers to the graph that holds it, and would leak.
"""

Saved = AbstractSaved | PassedTensor


def pass_through(tensor: Tensor) -> PassedTensor:
    """Leave a tensor where it is because it is no activation of this device."""
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


class AbstractAway(AbstractSaved):
    """Stands for a plain tensor and has everything but its bytes.

    Args:
        tensor: the tensor that was saved.

    Attributes:
        version: the tensor's version when it was saved.
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

    def __init__(self, tensor: Tensor) -> None:
        dtype = self._dtype = tensor.dtype
        self._size = tensor.shape
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset()
        self._conj = tensor.is_conj()
        self._neg = tensor.is_neg()
        self.version = tensor._version
        # Shares the version counter and, emptied, not the memory: modifications made after the
        # bytes have left are seen as native autograd sees them.
        probe = self._probe = tensor.detach()
        kind = dtype, tensor.device
        probe.data = _EMPTY[kind] if kind in _EMPTY else _make_empty(*kind)

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
        tensor = self._probe.new_empty(0)
        tensor.set_(storage, self._offset, self._size, self._stride)
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


def _make_empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    empty = _EMPTY[dtype, device] = torch.empty(0, dtype=dtype, device=device)
    return empty


_EMPTY: dict[tuple[torch.dtype, torch.device], Tensor] = {}
