"""Saved-tensor hooks: they pass through, keep, offload or leave out what autograd saves."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, final

import torch
from torch import nn

from ebbtide.activations.activations import Activations
from ebbtide.activations.composite import (
    CompositeTensor,
    QuantizedTensor,
    is_plain_subclass,
    is_quantized,
)
from ebbtide.activations.handles import Saved, pass_through, restore
from ebbtide.activations.placement import Placement
from ebbtide.activations.records import OFFLOAD, StorageRecord
from ebbtide.activations.saved import RecordedTensor, can_restore
from ebbtide.activations.scope import Scope
from ebbtide.coexistence.compiler import skip_in_compiler
from ebbtide.coexistence.other_hooks import hooks_are_wanted
from ebbtide.coexistence.unsharded import UnshardedParameters
from ebbtide.hooks.advice import Advice
from ebbtide.tensors.memory_parts import parts_of
from ebbtide.tensors.packing import PACKED, find_packing
from ebbtide.tensors.parameter_index import ParameterIndex
from ebbtide.tensors.recipes import kernel_settings
from ebbtide.tracing.step_memory import Owner
from ebbtide.transfers.prefetch import ForwardLog

_sequence_number = torch._C._autograd._get_sequence_nr

PackWeight = Callable[[torch.Tensor, torch.Tensor], Saved | None]
"""Returns the handle of a saved tensor that is a view, or a cast, of an offloaded weight."""


@final
class SavedTensorHooks:
    """The pack and unpack hooks of one model.

    Args:
        activations: keeps the records of saved storages.
        placement: decides whether a storage is kept, offloaded or rebuilt.
        parameters: recognises tensors that are parameters and no activations.
        unsharded: recognises parameters that FSDP gathers while a forward runs; None if the model
            cannot be sharded.

    Attributes:
        pack_weight: called first where weights are offloaded; None where none are.
        plain_types: types of tensors that are packed as plain tensors.
    """

    # Long: what runs for every saved tensor is in one place, and calls as little as it can.

    def __init__(
        self,
        activations: Activations,
        placement: Placement,
        parameters: ParameterIndex,
        unsharded: UnshardedParameters | None = None,
    ) -> None:
        self.pack_weight: PackWeight | None = None
        self.plain_types: frozenset[type] = frozenset({torch.Tensor, nn.Parameter})
        self._activations = activations
        self._placement = placement
        self._parameters = parameters
        self._unsharded = UnshardedParameters([]) if unsharded is None else unsharded
        self._account = activations.transfers.account
        self._device = activations.transfers.device.torch_device
        self._min_bytes = placement.min_bytes
        self._finds_settings = self._device.type == "cpu"
        self._scopes = activations.scopes
        self._running = activations.scopes.running
        self._advice = Advice(activations, placement)
        placement.wanted_again = activations.wanted_again

    @property
    def running(self) -> list[Scope]:
        """The scopes of the forwards that run now on the calling thread, innermost last."""
        return self._running.forwards

    def begin(self, held: Iterable[torch.Tensor] = ()) -> bool:
        """Hook what autograd saves from now on.

        Nothing is hooked where autograd does not record, nor where other code decides what becomes
        of saved tensors, such as `torch.utils.checkpoint`: see `hooks_are_wanted`.

        Args:
            held: tensors that stay on the device in any case, like parameters.

        Returns:
            Whether `end` must follow.
        """
        if not hooks_are_wanted():
            return False
        self._parameters.refresh(held)
        self._advice.give()
        self._activations.end_step_with_graphs()
        self._unsharded.refresh()
        offloads = self._placement.offloads(None)
        try:
            self._scopes.begin_forward(offloads=offloads)
            torch._C._autograd._push_saved_tensors_default_hooks(self.pack, restore)
        except BaseException as error:
            self._activations.transfers.note_error(error)
            raise
        return True

    def end(self) -> None:
        """End what the last `begin` began."""
        self.pop()
        scope = self._running.forwards[-1]
        try:
            self._activations.begin_copies(scope.unwritten)
        finally:
            self._scopes.end_forward(scope)
            self._activations.transfers.settle()

    def note_values(self, owner: Owner, values: Any) -> None:
        """Note whose the tensors are that a forward was given or returned, for the trace."""
        if self._account.memory is not None and len(self.running) <= 1:
            self._account.memory.note_values(owner, values)

    def pop(self) -> bool:
        """Take the hooks from the top of autograd's stack. Returns False if they are not there."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is None or top[0] != self.pack:
            return False
        torch._C._autograd._pop_saved_tensors_default_hooks()
        return True

    def pack(self, tensor: torch.Tensor) -> Saved:
        """Pack a tensor that autograd saves. This is the pack hook.

        A step packs thousands of small tensors, so each look-up here shows in benchmarks/overhead.
        """
        if (
            type(tensor) not in self.plain_types
            or tensor.device != self._device
            or tensor.layout is not torch.strided
        ):
            return self._pack_unusual(tensor)
        scopes = self._running.scopes
        scope = scopes[-1] if scopes else self._scopes.current
        if scope is None:  # an interrupt has left the hooks behind
            return pass_through(tensor)
        size_bytes = tensor.nbytes
        meter = self._account.meter
        meter.num_saved += 1
        meter.saved_bytes += size_bytes
        base = tensor._base
        whole = tensor if base is None else base
        try:
            pointer = whole.data_ptr()
        except RuntimeError:  # it has no memory of its own, inside a transform of torch.func
            return pass_through(tensor)
        if self.pack_weight is not None:
            saved = self.pack_weight(tensor, whole)
            if saved is not None:
                meter.parameter_bytes += size_bytes
                return saved
        if self._parameters.owns(tensor, pointer):
            meter.parameter_bytes += size_bytes
            return pass_through(tensor)
        if size_bytes < self._min_bytes and whole.nbytes < self._min_bytes:
            small = scope.small
            tally = small.tally
            if pointer not in tally.pointers:
                tally.pointers.add(pointer)
                tally.size_bytes += whole.nbytes
            # A leaf refers to no graph, so holding it leaks nothing, and it is cheaper.
            held = tensor if tensor.grad_fn is None else tensor.detach()
            return held, tensor._version, small
        # No bytes, no copy. A zero tangent has none whatever its shape; a nested tensor no strides.
        if not size_bytes or not pointer or tensor.is_nested:
            return pass_through(tensor)
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        if begin != pointer and self._parameters.owns(tensor, begin):
            meter.parameter_bytes += size_bytes
            return pass_through(tensor)
        try:
            return self._pack_large(tensor, storage, scope)
        except BaseException as error:
            self._activations.transfers.note_error(error)
            raise

    @property
    def device(self) -> torch.device:
        """The device that the model computes on."""
        return self._device

    @property
    def log(self) -> ForwardLog:
        """The log of the forward that runs."""
        return self._scopes.here.forward

    def are_on_top(self) -> bool:
        """Whether what autograd saves now is packed by these hooks."""
        if not hooks_are_wanted() or not self.running:
            return False
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return top is not None and bool(top[0] == self.pack)

    def offload_here(self) -> None:
        """Offload what the layer that runs saves from now on, whatever the policy says."""
        self._activations.scopes.here.offloads = True

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter, or a part of one."""
        for part in parts_of(tensor):
            try:
                begin = part.untyped_storage().data_ptr()
            except (RuntimeError, NotImplementedError):  # it has no memory of its own
                return False
            if self._is_parameter(part, part if part._base is None else part._base, begin):
                return True
        return False

    def look_at(
        self, tensor: torch.Tensor
    ) -> Iterator[tuple[torch.UntypedStorage, StorageRecord | None]]:
        """Count a tensor that is saved inside a recomputed layer, and yield its storages.

        Parameters, and small inputs of the layer, are counted and not yielded.

        Yields:
            A storage, and its record. It has one if it is an input of the layer.
        """
        meter, small = self._account.meter, self._scopes.here.small.tally.pointers
        for part in parts_of(tensor):
            meter.num_saved += 1
            try:
                storage, pointer, size_bytes = part.untyped_storage(), part.data_ptr(), part.nbytes
            except (RuntimeError, NotImplementedError):  # it has no memory of its own
                continue
            meter.saved_bytes += size_bytes
            whole = part if part._base is None else part._base
            if self._is_parameter(part, whole, storage.data_ptr()):
                meter.parameter_bytes += size_bytes
            elif pointer and part.device == self._device and whole.data_ptr() not in small:
                yield storage, self._activations.find(storage._cdata, part._version)

    def _is_parameter(self, tensor: torch.Tensor, whole: torch.Tensor, begin: int) -> bool:
        if self.pack_weight is not None and self.pack_weight(tensor, whole) is not None:
            return True
        if self._unsharded.is_sharded and self._unsharded.own(tensor.untyped_storage()):
            return True
        owns, pointer = self._parameters.owns, whole.data_ptr()
        return owns(tensor, pointer) or (pointer != begin and owns(tensor, begin))

    def _pack_large(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, scope: Scope
    ) -> Saved:
        """Share the record of a storage, or place the storage and make one."""
        activations, version = self._activations, tensor._version
        if scope.unwritten and scope.unwritten[0].sequence != _sequence_number():
            activations.begin_copies(scope.unwritten)
        if self._finds_settings and self._placement.finder is not None:
            scope.forward.note_settings(kernel_settings())
        first = activations.find(storage._cdata, version)
        if first is not None and not self._may_share(first, tensor, scope):
            first = None
        if first is None:
            if self._unsharded.is_sharded and self._unsharded.own(storage):
                self._account.meter.parameter_bytes += tensor.nbytes
                return pass_through(tensor)
            number = scope.count
            scope.count += 1
            decision, call = self._placement.decide(scope, number, tensor, storage)
            if decision is OFFLOAD:
                return self._offload(tensor, version, storage, number, None)
            if call is None:
                return self._keep(tensor, version, storage, number)
            record = activations.leave_out(storage, version, number, call)
            return RecordedTensor(activations, record, tensor)
        if first.decision is OFFLOAD:
            return self._offload(tensor, version, storage, first.number, first)
        activations.share(first)
        return RecordedTensor(activations, first, tensor)

    def _may_share(self, record: StorageRecord, tensor: torch.Tensor, scope: Scope) -> bool:
        """Whether a record of a tensor's storage has the bytes that the tensor has now."""
        # Guard inputs-of-one-forward: the record of a tensor that no operation of the graph has
        # made is not shared across forwards. Other code may have filled the memory anew without a
        # word to torch: backward would get the bytes of the forward before.
        if tensor.grad_fn is None and not self._scopes.is_of(record.forward, scope):
            return False
        call = record.call
        if call is None:
            return True
        # A tensor that its own graph would not rebuild, such as `output.detach()`, may outlive the
        # graph that holds what the record is rebuilt from, and the program may then change that.
        whole = tensor if tensor._base is None else tensor._base
        made_by = None if tensor.grad_fn is None else whole.grad_fn
        if made_by is None or made_by.name() != call.recipe.node:
            return False
        # What it is rebuilt from may have changed. The bytes are still here.
        return all(can_restore(saved) for saved in call.inputs)

    def _keep(
        self, tensor: torch.Tensor, version: int, storage: torch.UntypedStorage, number: int
    ) -> Saved:
        activations, address = self._activations, storage._cdata
        record = activations.keep(address, version, number, storage.nbytes())
        return RecordedTensor(activations, record, tensor)

    def _offload(
        self,
        tensor: torch.Tensor,
        version: int,
        storage: torch.UntypedStorage,
        number: int,
        first: StorageRecord | None,
    ) -> Saved:
        """Share the record of the same bytes if there is one that can be shared, or make one.

        Args:
            tensor: the tensor that is saved.
            version: its version.
            storage: its storage.
            number: number of the storage in its layer's call.
            first: a record of the storage, if there is one.
        """
        activations = self._activations
        form: Hashable = None
        view, packs = None, False
        if first is None or first.form is not None:  # else the first record has all bytes
            if not tensor.is_contiguous() or 2 * tensor.nbytes < storage.nbytes():
                view = _find_view(tensor, storage)
            if view is not None:
                form = tensor.dtype, view, tensor.stride(), int(tensor.storage_offset())
            elif tensor.dtype in PACKED and self._placement.packs:
                packs = True
                # Only other masks can share packed bits. Numbers in the same bytes cannot.
                if tensor.dtype is torch.bool:
                    form = find_packing(tensor, storage)
        if first is not None:
            record = activations.find_form(first, form)
            if record is not None:
                activations.share(record)
                return RecordedTensor(activations, record, tensor)
            if self._scopes.here.must_stay:
                return self._keep(tensor, version, storage, number)
        record = activations.offload(
            tensor, storage, version, number, form=form, packs=packs, view_size=view
        )
        return RecordedTensor(activations, record, tensor)

    def _pack_unusual(self, tensor: torch.Tensor) -> Saved:
        if is_plain_subclass(tensor, self.plain_types):
            # From hooks, torch itself gives backward no tensors of other classes.
            with torch._C.DisableTorchFunctionSubclass():
                return self.pack(tensor.as_subclass(torch.Tensor))
        if tensor.device == self._device and hasattr(tensor, "__tensor_flatten__"):
            if not self._parameters.owns_outer(tensor):
                return CompositeTensor(tensor, self.pack)  # its inner tensors count
            size_bytes = sum(part.nbytes for part in parts_of(tensor))
            meter = self._account.meter
            meter.num_saved += 1
            meter.saved_bytes += size_bytes
            meter.parameter_bytes += size_bytes
            return pass_through(tensor)
        if tensor.device == self._device and is_quantized(tensor):
            return QuantizedTensor(tensor, self.pack)  # so do these
        meter = self._account.meter
        meter.num_saved += 1
        with contextlib.suppress(RuntimeError):  # sparse tensors and some subclasses cannot say
            meter.saved_bytes += tensor.nbytes
        return pass_through(tensor)


def _find_view(tensor: torch.Tensor, storage: torch.UntypedStorage) -> tuple[int, ...] | None:
    """Return the shape to gather a view in that covers less than half of its storage.

    The shape is that of the tensor, with broadcast dimensions of size 1. None means that the whole
    storage is to be offloaded.
    """
    size, stride = tensor.shape, tensor.stride()
    distinct = tuple(n if step else 1 for n, step in zip(size, stride, strict=True))
    if 2 * math.prod(distinct) * tensor.itemsize >= storage.nbytes():
        return None
    return None if _may_overlap(distinct, stride) else distinct


def _may_overlap(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether two elements of a view may share memory. Such a view cannot be scattered back."""
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(size, stride, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += step * (n - 1)
    return False


# Autograd calls these while a compiled region runs, and the compiler would trace them, too.
skip_in_compiler(SavedTensorHooks.pack)
skip_in_compiler(restore)
