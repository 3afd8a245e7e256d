"""Handles on recorded storages: they stand for saved tensors in the graph and restore them."""

from __future__ import annotations

from typing import NoReturn, final

import torch
from torch import Tensor

from ebbtide.activations.activations import Activations
from ebbtide.activations.handles import AbstractAway, Saved, restore
from ebbtide.activations.records import KEEP, OFFLOAD, Call, RecordHold, StorageRecord
from ebbtide.errors import SavedTensorModifiedError
from ebbtide.transfers.layer import in_range


@final
class RecordedTensor(AbstractAway):
    """Stands for a saved tensor whose storage has a record.

    Args:
        activations: the owner of the record.
        record: the record of the storage, or of a view gathered from it. It counts this handle
            already.
        tensor: the tensor that was saved.

    Attributes:
        record: as given.
    """

    __slots__ = ("_activations", "_hold", "record")

    def __init__(self, activations: Activations, record: StorageRecord, tensor: Tensor) -> None:
        self._activations = activations
        self.record = record
        deaths = activations.deaths
        self._hold = hold = RecordHold(self, deaths.queue.append)
        hold.record, hold.generation = record, 0
        deaths.awaited.add(hold)
        if record.decision is KEEP:
            self._size, self.version = tensor.shape, record.version
            # The tensor itself would refer to the graph that it lives in, and leak.
            self._probe = tensor.detach()
        else:
            # Not by `super()`, which takes longer: a step makes thousands of handles.
            AbstractAway.__init__(self, tensor, record.version, activations.empty)

    @property
    def shape(self) -> tuple[object, ...]:
        if self.record.decision is KEEP:
            probe = self._probe
            return probe.shape, probe.stride(), probe.dtype, probe.device
        return super().shape

    def share(self) -> RecordedTensor:
        if self.record.decision is KEEP:
            return self  # it holds the tensor as long as anybody holds it
        other = RecordedTensor.__new__(RecordedTensor)
        for name in AbstractAway.__slots__[1:]:
            setattr(other, name, getattr(self, name))
        self._activations.share(self.record)
        other._activations, other.record = self._activations, self.record
        deaths = self._activations.deaths
        other._hold = hold = RecordHold(other, deaths.queue.append)
        hold.record, hold.generation = self.record, 0
        deaths.awaited.add(hold)
        return other

    def restore(self) -> Tensor:
        if self.is_modified():
            self._raise_modified()
        record, activations = self.record, self._activations
        try:
            if record.decision is OFFLOAD:
                flat = activations.bring_back(self._hold)
                if record.view_size is None and record.packing is None:
                    return self._tensor_in(flat.untyped_storage())
                return self._tensor_of(flat)
            if record.call is None:
                activations.note_backward(record.forward)
                return self._probe
            value = activations.begin_rebuild(record)
            if value is None:
                value = in_range("rebuild", record.layer, _run, record.call)
            activations.end_rebuild(self._hold, value)
            return self._tensor_in(value.untyped_storage())
        except BaseException as error:
            activations.transfers.note_error(error)
            raise

    def peek(self) -> Tensor:
        if self.is_modified():
            self._raise_modified()
        record = self.record
        if record.decision is KEEP:
            return self._probe
        if record.call is None:
            return self._tensor_of(self._activations.peek(record))
        value = record.call.run([peek(saved) for saved in record.call.inputs])
        return self._tensor_in(value.untyped_storage())

    def _tensor_of(self, flat: Tensor) -> Tensor:
        record = self.record
        if record.view_size is None:
            return self._tensor_in(record.unpack(flat).untyped_storage())
        return self._tensor_in(self._scatter(flat, record.view_size))

    def _scatter(self, flat: Tensor, view_size: tuple[int, ...]) -> torch.UntypedStorage:
        """Return a storage with the gathered elements at the places where the saved view had them.

        The rest of it is never read, so on a CPU the system never backs it with memory.
        """
        span = self._offset + 1
        span += sum((n - 1) * step for n, step in zip(view_size, self._stride, strict=True))
        spread = torch.empty(span, dtype=self._dtype, device=flat.device)
        gathered = flat.view(self._dtype).view(view_size)
        spread.as_strided(view_size, self._stride, self._offset).copy_(gathered)
        return spread.untyped_storage()


def _run(call: Call) -> Tensor:
    for saved in call.inputs:
        changed = saved[0]._version != saved[1] if type(saved) is tuple else saved.is_modified()  # type: ignore[union-attr]
        if changed:
            _raise_input_modified(call, saved)
    return call.run([restore(saved) for saved in call.inputs])


def _raise_input_modified(call: Call, saved: Saved) -> NoReturn:
    """Raise the error for a tensor that cannot be rebuilt any more.

    Raises:
        SavedTensorModifiedError: always.
    """
    shape = saved[0].shape if type(saved) is tuple else saved.shape[0]  # type: ignore[union-attr]
    raise SavedTensorModifiedError(
        f"a saved tensor cannot be rebuilt by running {call.recipe.node.removesuffix('Backward0')} "
        f"again, because its input of shape {tuple(shape)} was modified in place after it had been "
        f"saved. If backward raises no error without ebbtide, because the input itself is not "
        f"needed there, use ActivationPolicy(rebuild=False). Otherwise clone the input before it "
        f"is modified"
    )


def share(saved: Saved) -> Saved:
    """Return one more handle on a saved tensor, which must not be a composite one."""
    if type(saved) is tuple:
        return saved
    assert isinstance(saved, AbstractAway)
    return saved.share()


def peek(saved: Saved) -> Tensor:
    """Return a saved tensor during forward, before backward has come to it."""
    if type(saved) is tuple:
        return saved[0]
    assert isinstance(saved, AbstractAway)
    return saved.peek()


def can_restore(saved: Saved) -> bool:
    """Whether a saved tensor and all that it is rebuilt from are as they were when saved.

    The answer for a composite tensor is no.
    """
    if type(saved) is tuple:
        return bool(saved[0]._version == saved[1])
    if not isinstance(saved, AbstractAway) or saved.is_modified():
        return False
    call = saved.record.call if type(saved) is RecordedTensor else None
    if call is not None:
        for each in call.inputs:  # not by `all`: this runs for every tensor that is rebuilt
            if not can_restore(each):
                return False
    return True


def held_tensor(saved: Saved) -> Tensor | None:
    """Return the tensor that a handle holds in its own memory; None if it is elsewhere."""
    if type(saved) is tuple:
        return saved[0]
    if type(saved) is RecordedTensor and saved.record.decision is KEEP:
        return saved._probe
    return None
