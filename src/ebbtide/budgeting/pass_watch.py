"""Records the passes of one step, with the peak of memory in each of them, or guards that peak.

[Note: measured passes] Torch tells when a layer's backward begins and not when it ends, so what is
measured as the backward of a layer includes the backward of the work before it, up to the layer
before; the first one of all is in the time between the passes. In steps of many layers not every
pass is measured alone, because measuring one takes milliseconds: what is not belongs to the pass
that is measured before it. Each measured peak is compared with the highest of the positions that it
stands for.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ebbtide.memory.measured_memory import AbstractMemory
from ebbtide.planning.profiling.recorded_profile import RecordedCall
from ebbtide.planning.step_profile import StepProfile
from ebbtide.transfers.layer import Layer


class _Pass(NamedTuple):
    """A part of a step, as the engine tells it.

    Attributes:
        what: the forward or the backward of a layer, the work after a forward, or one of the two
            parts that are no layer's.
        call: number of the layer's call.
    """

    what: str
    call: int = -1


_BEGIN: Final = _Pass("begin")
_ALL_MEASURED: Final = 64  # calls of layers whose passes are all measured alone


def _is_measured(call: int) -> bool:
    """Whether the passes of a call are measured alone: of later calls, fewer and fewer are."""
    stride = 1
    while call >= stride * _ALL_MEASURED:
        stride *= 2
    return call % stride == 0


class Positions:
    """Gives the passes of a step their positions, as `Prediction.peak_by_position` numbers them.

    Args:
        profile: the step.

    Attributes:
        calls: index in the profile of each call of a layer.
        loss: position of the loss.
    """

    def __init__(self, profile: StepProfile) -> None:
        self._layers = profile.layers
        self.calls = [index for index, each in enumerate(profile.layers) if not each.between]
        self.loss = len(profile.layers)

    def position(self, what: str, call: int) -> int | None:
        """Return the position of a pass; None for a call that the profile does not have."""
        if call < 0:
            return self.loss if what == "loss" else 0
        if call >= len(self.calls):  # a model may call its layers more often than in other steps
            return None
        index = self.calls[call]
        if what == "backward":
            return 2 * self.loss - index
        following = index + 1
        is_apart = following == self.loss or self._layers[following].between
        return following if what == "after" and is_apart else index

    def covered(self, position: int) -> list[int]:
        """Return the positions that a measured one stands for. See [Note: measured passes]."""
        last = 2 * self.loss
        if position < self.loss:
            return [position]
        before = (last - position if position > self.loss else self.loss) - 1
        found = [position]
        if before >= 0 and self._layers[before].between:
            found.append(last - before)
        return found


class AbstractPasses(abc.ABC):
    """Follows the passes of one step; one of `ebbtide.engine.PassListener`."""

    @abc.abstractmethod
    def _enter(self, what: str, call: int = -1) -> None:
        """Note that a pass begins."""

    def begin_forward_of(self, layer: Layer, inputs: Any) -> None:  # noqa: ARG002
        self._enter("forward", layer.index)

    def end_forward_of(self, layer: Layer) -> None:
        self._enter("after", layer.index)

    def begin_backward_of(self, layer: int) -> None:
        self._enter("backward", layer)

    def end_forward(self) -> None:
        """Note that the model's forward has ended: the work between the passes begins."""
        self._enter("loss")


class _SavedStorage(Protocol):
    """What a record of a saved storage says."""

    @property
    def layer(self) -> Layer | None: ...

    @property
    def number(self) -> int: ...


FindRecord = Callable[[int, int], _SavedStorage | None]
"""Returns the record of a storage, given its address and a version."""


class _OpenCall(NamedTuple):
    """A call of a layer that runs, with its input tensors and their versions."""

    name: str
    number: int
    inputs: list[tuple[Tensor, int]]


@final
class PassWatch(AbstractPasses):
    """Records one step: the calls of its layers, and the memory of its passes.

    Args:
        memory: the memory that is measured. Its peak is reset at each begin of a pass.
        profile: the step; None if it is not known yet: see `bind`.
        finish_copies: waits for the copies that are under way; called at each begin of a pass. None
            where the host sees how far they are.
        find: finds the records of the layers' inputs; None if those are not asked for.
        held: what the loop holds, such as the batch: no input counts that is among it.

    Attributes:
        begin_bytes: memory in use when the step began.
        reserved_peak_bytes: the peak of the whole step, of all that nobody else could use.
        calls: the calls of layers in the first forward of the step.
    """

    def __init__(
        self,
        memory: AbstractMemory,
        profile: StepProfile | None = None,
        finish_copies: Callable[[], None] | None = None,
        find: FindRecord | None = None,
        held: Iterable[Tensor] = (),
    ) -> None:
        self._positions = None if profile is None else Positions(profile)
        self._memory = memory
        self._finish_copies = finish_copies or (lambda: None)
        self._find = find
        self._held = {_address_of(each) for each in held}
        self._open: list[_OpenCall] = []
        self._records_calls = find is not None
        self.calls: list[RecordedCall] = []
        self._entered: dict[_Pass, int] = {}  # the least memory in use when the pass began
        self._peaks: dict[_Pass, int] = {}
        self._merged: dict[_Pass, set[_Pass]] = {}  # passes that were not measured alone
        self._finish_copies()
        memory.reuse_freed(False)
        memory.return_freed()
        self.begin_bytes = self._entered[_BEGIN] = memory.now_bytes()
        self.reserved_peak_bytes = 0
        memory.reset_peak()
        self._pass = _BEGIN

    def bind(self, profile: StepProfile) -> None:
        """Note which step it was, so that its passes have positions."""
        self._positions = Positions(profile)

    @property
    def peaks(self) -> dict[int, int]:
        """The highest peak of each position; a position that was not measured alone has none."""
        return self._by_position(self._peaks, max)

    @property
    def growth(self) -> dict[int, int]:
        """By how much memory grew in each of these positions."""
        entered = self._by_position(self._entered, min)
        return {each: peak_bytes - entered[each] for each, peak_bytes in self.peaks.items()}

    def _by_position(
        self, values: Mapping[_Pass, int], combine: Callable[[int, int], int]
    ) -> dict[int, int]:
        assert self._positions is not None, "the profile is not known yet"
        found: dict[int, int] = {}
        for each, size_bytes in values.items():
            position = self._positions.position(*each)
            if position is not None:
                found[position] = combine(found.get(position, size_bytes), size_bytes)
        return found

    def covered(self, position: int) -> list[int]:
        """Return the positions that a measured one stands for. See [Note: measured passes]."""
        positions = self._positions
        assert positions is not None, "the profile is not known yet"
        found = dict.fromkeys(positions.covered(position))
        for measured, merged in self._merged.items():
            if positions.position(*measured) == position:
                known = [positions.position(*each) for each in merged]
                covered = (positions.covered(each) for each in known if each is not None)
                found.update(dict.fromkeys(other for each in covered for other in each))
        return list(found)

    def finish(self) -> None:
        """Note that the step has ended."""
        self._enter(*self._pass)

    @property
    def is_whole(self) -> bool:
        """Whether the forward and the backward of all layers were measured."""
        assert self._positions is not None, "the profile is not known yet"
        passes = self._peaks.keys() | {each for merged in self._merged.values() for each in merged}
        calls = range(len(self._positions.calls))
        return all(
            _Pass(what, call) in passes for what in ("forward", "backward") for call in calls
        )

    def begin_forward_of(self, layer: Layer, inputs: Any) -> None:
        if self._records_calls:
            tensors = [each for each in tree_leaves(inputs) if isinstance(each, Tensor)]
            versions = [(each, each._version) for each in tensors if not each.is_inference()]
            self._open.append(_OpenCall(layer.name, len(self.calls), versions))
            self.calls.append(RecordedCall(layer.name))
        super().begin_forward_of(layer, inputs)

    def end_forward_of(self, layer: Layer) -> None:
        if self._open:
            call = self._open.pop()
            self.calls[call.number] = self._recorded(call)
        super().end_forward_of(layer)

    def end_forward(self) -> None:
        self._records_calls = False  # another forward of the step is another microbatch
        self._open.clear()
        super().end_forward()

    def _recorded(self, call: _OpenCall) -> RecordedCall:
        """Return what is to be known of a call that has ended."""
        sizes: dict[int, int] = {}
        sources = []
        for tensor, version in call.inputs:
            address = _address_of(tensor)
            if address is None or address in self._held or isinstance(tensor, nn.Parameter):
                continue
            if address not in sizes:
                record = None if self._find is None else self._find(address, version)
                if record is not None:
                    layer = record.layer
                    sources.append((None if layer is None else layer.index, record.number))
            sizes[address] = tensor.untyped_storage().nbytes()
        changes = any(tensor._version != version for tensor, version in call.inputs)
        source = sources[0] if len(sizes) == len(sources) == 1 else None
        return RecordedCall(call.name, sum(sizes.values()), source, changes)

    def _enter(self, what: str, call: int = -1) -> None:
        if call >= 0 and not _is_measured(call):
            self._merged.setdefault(self._pass, set()).add(_Pass(what, call))
            return
        peak_bytes = self._memory.peak_bytes()
        self._peaks[self._pass] = max(self._peaks.get(self._pass, 0), peak_bytes)
        reserved_bytes = self._memory.reserved_peak_bytes()
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, reserved_bytes)
        self._finish_copies()
        self._memory.return_freed()  # what is measured is what is in use
        self._pass, now_bytes = _Pass(what, call), self._memory.now_bytes()
        self._entered[self._pass] = min(self._entered.get(self._pass, now_bytes), now_bytes)
        self._memory.reset_peak()


def _address_of(tensor: Tensor) -> int | None:
    """Return the address of a tensor's storage; None if it has none of its own."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None


@final
class PassGuard(AbstractPasses):
    """Returns freed memory at the begin of a pass that would not fit into a limit otherwise.

    Returning memory costs time twice, now and when the memory is needed again. So it stays where
    the limit leaves room for it.

    Args:
        memory: the memory.
        profile: the step.
        limit_bytes: how much may be in use.
        growth: by how much memory grows in each position. One that is not there is taken to grow
            like the one that grows most.
        times: freed memory stays in a pass that could grow this many times as much. What a pass
            frees may not be reused by it.
    """

    def __init__(
        self,
        memory: AbstractMemory,
        profile: StepProfile,
        limit_bytes: int,
        growth: Mapping[int, int],
        times: float,
    ) -> None:
        self._positions = Positions(profile)
        self._memory = memory
        self._limit_bytes = limit_bytes
        self._times = times
        self._growth = growth
        self._most_bytes = max(growth.values(), default=0)
        self._position = 0
        self._enter("begin")

    def has_room(self) -> bool:
        """Whether freed memory may stay in the pass that runs.

        A pass may have less in use than when it began and still be before its peak.
        """
        growth_bytes = self._growth.get(self._position, self._most_bytes)
        from_bytes = max(self._memory.now_bytes(), self._entered_bytes)
        return from_bytes + self._times * growth_bytes <= self._limit_bytes

    def _enter(self, what: str, call: int = -1) -> None:
        position = self._positions.position(what, call)
        if position is None or position == self._position > 0:
            return
        self._position, self._entered_bytes = position, 0
        has_room = self.has_room()
        self._memory.reuse_freed(has_room)  # see [Note: blocks of their own] in `huge_pages`
        if not has_room:
            self._memory.return_freed()
        self._entered_bytes = self._memory.now_bytes()
