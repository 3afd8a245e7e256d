"""Saved-tensor hooks: what autograd saves is passed through, kept or offloaded here."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Iterable
from typing import final

import torch
from torch import nn

from ebbtide.hooks.marks import is_marked
from ebbtide.hooks.packing import PACKED, BitPacking, find_packing
from ebbtide.hooks.parameters import ParameterIndex
from ebbtide.hooks.rebuild import RebuildFinder
from ebbtide.hooks.weights import WeightHooks
from ebbtide.runtime.composite import CompositeTensor, QuantizedTensor, is_quantized
from ebbtide.runtime.kept import LargeKept, SmallKept
from ebbtide.runtime.resting import StandIn
from ebbtide.runtime.saved import (
    OffloadedTensor,
    RebuiltTensor,
    Saved,
    hold,
    restore,
)
from ebbtide.runtime.session import Session

_PLAIN_TYPES = frozenset({torch.Tensor, nn.Parameter, StandIn})


@final
class ActivationHooks:
    """The pack and unpack hooks of one session.

    Args:
        session: moves what is offloaded.
        parameters: what is not an activation.
        min_bytes: smaller storages stay on the device.
        rebuild: whether what a recipe gives again is neither kept nor moved, and masks and indices
            are packed before they leave.

    Attributes:
        offloading: whether what is saved now is to leave; layers switch it.
    """

    def __init__(
        self,
        session: Session,
        parameters: ParameterIndex,
        min_bytes: int,
        *,
        rebuild: bool = False,
    ) -> None:
        self.offloading = True
        self._weights: WeightHooks | None = None
        self._finder = RebuildFinder() if rebuild else None
        self._packs = rebuild
        self._session = session
        self._device = session.device.torch_device
        self._parameters = parameters
        self._small: list[SmallKept] = []  # of the forwards that run now, innermost last
        self._min_bytes = max(min_bytes, 1)  # no bytes, no copy

    @property
    def weights(self) -> WeightHooks | None:
        """Weights that rest on the host, if there are any."""
        return self._weights

    @weights.setter
    def weights(self, weights: WeightHooks) -> None:
        self._weights = weights
        self._parameters.resting = weights.resting

    @staticmethod
    def are_wanted() -> bool:
        """Whether `begin` would hook anything here."""
        return torch.is_grad_enabled() and not _checkpoint_is_recording()

    def begin(self, held: Iterable[torch.Tensor] = ()) -> bool:
        """Hook what autograd saves from now on. Returns whether `end` must follow.

        Nothing is hooked where autograd does not record, nor inside `torch.utils.checkpoint`: what
        that saves is to be recomputed, and taking it away would undo that.

        Args:
            held: tensors that stay on the device in any case, as parameters do.
        """
        if not self.are_wanted():
            return False
        self._parameters.refresh(held)
        self._small.append(self._session.begin_forward())
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, restore)
        return True

    def end(self) -> None:
        """End what `begin` began."""
        torch._C._autograd._pop_saved_tensors_default_hooks()
        self._session.end_forward(self._small.pop())

    def pack(self, tensor: torch.Tensor) -> Saved:
        """Take a tensor that autograd saves (design section 4 gives the order of the rules).

        Thousands of small tensors come this way in a step: each look-up here shows in
        benchmarks/overhead.
        """
        if (
            type(tensor) not in _PLAIN_TYPES
            or tensor.device != self._device
            or tensor.layout is not torch.strided
        ):
            return self._pack_unusual(tensor)
        size_bytes = tensor.nbytes
        meter = self._session.meter
        meter.num_saved += 1
        meter.saved_bytes += size_bytes
        base = tensor._base
        whole = tensor if base is None else base
        if self._weights is not None:
            saved = self._weights.pack(tensor, whole)
            if saved is not None:
                meter.parameter_bytes += size_bytes
                return saved
        pointer = whole.data_ptr()
        if self._parameters.owns(tensor, pointer):
            meter.parameter_bytes += size_bytes
            return hold(tensor)
        if size_bytes < self._min_bytes and whole.nbytes < self._min_bytes:
            small = self._small[-1]
            if pointer not in small.pointers:
                small.pointers.add(pointer)
                small.size_bytes += whole.nbytes
            return tensor.detach(), tensor._version, small
        return self._pack_large(tensor, size_bytes)

    def _pack_large(self, tensor: torch.Tensor, size_bytes: int) -> Saved:
        storage = tensor.untyped_storage()
        if self._parameters.owns(tensor, storage.data_ptr()):
            self._session.meter.parameter_bytes += size_bytes
            return hold(tensor)
        if self._finder is None or tensor.grad_fn is None or storage.nbytes() < self._min_bytes:
            return self._keep_or_offload(tensor, storage)
        saved = self._rebuild(tensor, storage, self._finder)
        if saved is None:
            saved = self._keep_or_offload(tensor, storage)
        self._finder.note(tensor, saved)
        return saved

    def _rebuild(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, finder: RebuildFinder
    ) -> Saved | None:
        session, address, version = self._session, storage._cdata, tensor._version
        record = session.rebuilt(address, version)
        if record is None:
            if session.has(address, version) or session.keeps(address):
                return None  # its bytes are there already
            call = finder.find(tensor, storage)
            if call is None:
                return None
            record = session.leave_out(address, storage, version, call)
        return RebuiltTensor(session, record, tensor)

    def _keep_or_offload(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Saved:
        address, version = storage._cdata, tensor._version
        shared = self._session.has(address, version)  # then it has left already
        leaves = self.offloading and storage.nbytes() >= self._min_bytes
        if is_marked(storage):
            shared = leaves = False
        if (shared or leaves) and not tensor.is_quantized:
            return self._offload(tensor, storage, address)
        plain = tensor.detach()
        size_bytes = storage.nbytes()
        return plain, version, LargeKept(self._session, plain, version, address, size_bytes)

    def _offload(self, tensor: torch.Tensor, storage: torch.UntypedStorage, address: int) -> Saved:
        session, version = self._session, tensor._version
        size, stride = tensor.shape, tensor.stride()
        distinct = tuple(n if step else 1 for n, step in zip(size, stride, strict=True))
        covered_bytes = math.prod(distinct) * tensor.itemsize
        if (
            2 * covered_bytes >= storage.nbytes()
            or session.has(address, version)
            or _may_overlap(distinct, stride)
        ):
            key: Hashable = address
            packing = None
            if self._packs and tensor.dtype in PACKED and not session.has(address, version):
                packing = find_packing(tensor, storage)
                if type(packing) is BitPacking:
                    # For other masks alone: who sees the same bytes as numbers wants them all.
                    key = (address, torch.bool)
            record = session.offload(key, storage, version, lambda: _bytes_of(storage), packing)
            return OffloadedTensor(session, record, tensor, None)
        offset = int(tensor.storage_offset())
        key = (address, tensor.dtype, distinct, stride, offset)
        record = session.offload(
            key, storage, version, lambda: _gather(tensor, distinct, stride, offset)
        )
        return OffloadedTensor(session, record, tensor, distinct)

    def _pack_unusual(self, tensor: torch.Tensor) -> Saved:
        if tensor.device == self._device and hasattr(tensor, "__tensor_flatten__"):
            return CompositeTensor(tensor, self.pack)  # its inner tensors count
        if tensor.device == self._device and is_quantized(tensor):
            return QuantizedTensor(tensor, self.pack)  # so do these
        self._session.meter.num_saved += 1
        with contextlib.suppress(RuntimeError):  # sparse tensors and some subclasses cannot say
            self._session.meter.saved_bytes += tensor.nbytes
        return hold(tensor)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage's bytes as a tensor that keeps it alive."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _gather(
    tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """A view's elements, packed, as bytes; conj and neg bits are left to the handle."""
    plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    plain.set_(tensor.untyped_storage(), offset, size, stride)
    packed = plain.clone(memory_format=torch.contiguous_format)
    return _bytes_of(packed.untyped_storage())


def _may_overlap(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether two elements of a view could share memory: such a view cannot be scattered back."""
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(size, stride, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += step * (n - 1)
    return False


def _checkpoint_is_recording() -> bool:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"
