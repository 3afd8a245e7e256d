"""Watches the passes of one step: the calls of its layers, and the peak of memory in each of them.

[Note: measured passes] Torch tells when a layer's backward begins and not when it ends, so what is
measured as the backward of a layer includes the backward of the work before it, up to the layer
before; the first one of all is in the time between the passes. Each measured peak is compared with
the highest of the positions that it stands for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, final

from torch import Tensor, nn

from ebbtide.devices.device import Layer
from ebbtide.planning.profile import StepProfile
from ebbtide.runtime.handles import StorageRecord
from ebbtide.runtime.record import Record
from ebbtide.runtime.stats import Account
from ebbtide.runtime.torch_internals import (
    address_of,
    call_after_backward,
    current_graph_task,
    tree_leaves,
)
from ebbtide.stores.measured_memory import AbstractMemory

EngineName = tuple[int | None, int]
"""Number of the layer's call, None outside layers, and of the storage in it."""


class RecordedCall(NamedTuple):
    """What is on record of one call of a layer.

    Attributes:
        name: name of its module.
        input_bytes: size of its input tensors, without what the loop holds and parameters.
        source: the saved storage that is its only input, by the engine's name; None if there are
            several inputs, nothing has saved it, or the call changes it: recomputed, it saves a
            copy.
    """

    name: str
    input_bytes: int = 0
    source: EngineName | None = None


class Pass(NamedTuple):
    """A part of a step, as the engine tells it.

    Attributes:
        what: the forward or the backward of a layer, the work after a forward, or one of the two
            parts that are no layer's.
        call: number of the layer's call.
    """

    what: str
    call: int = -1


_BEGIN: Final = Pass("begin")
_END: Final = Pass("end")  # what follows a backward, such as the optimizer's step
_MOST_RETURNS: Final = 128  # about so often in a forward, and in a backward


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


FindRecord = Callable[[int, int], StorageRecord | None]
"""Returns the record of a storage, given its address and a version."""


@final
class _IfAllStayed:
    """Finds what a pass would use beside what it saves, if all of that stayed.

    What is offloaded is never there at one time. So each moment counts with what has left by then,
    but for what the program holds itself, which is in use anyway. In a backward, each moment counts
    without what it has let go of for good.

    Attributes:
        here: the pass. The work after a layer is one with its forward, unless it saves something.
        most_bytes: the most so far, with what the pass has saved.
        saved_bytes: what it has saved by now; a backward lets go of it.
    """

    def __init__(self, here: Pass) -> None:
        self.here = here
        self.most_bytes, self.saved_bytes = -sys.maxsize, 0
        self._own: set[Record] = set()  # what it has saved, or lets go of
        self._gone: list[Record] = []  # of that, what only the program may still hold

    @property
    def working_bytes(self) -> int:
        """The most that was in use beside what the pass has saved."""
        return self.most_bytes - (0 if self.here.what == "backward" else self.saved_bytes)

    def note(self, peak_bytes: int, now_bytes: int, *, is_after: bool) -> None:
        """Note what was used, without all saved tensors that are on the device.

        Args:
            peak_bytes: the peak since the last change of these.
            now_bytes: what is used now.
            is_after: whether the layer has returned. Within it, what goes has just been used.
        """
        before_bytes = sum(each.size_bytes for each in self._gone)
        self._gone = [each for each in self._gone if each.find_storage() is not None]
        held_bytes = sum(each.size_bytes for each in self._gone)
        peak_bytes -= held_bytes if is_after else before_bytes
        most_bytes = max(peak_bytes, now_bytes - held_bytes) + self.saved_bytes
        self.most_bytes = max(self.most_bytes, most_bytes)

    def change(self, size_bytes: int, record: Record) -> None:
        """Note that a storage comes, or goes; see `PassListener.before_change`."""
        is_backward = self.here.what == "backward"
        # What goes unread, to make room, comes again.
        is_own = size_bytes < 0 and not record.unread if is_backward else size_bytes >= 0
        if is_own and record not in self._own:
            self._own.add(record)
            self.saved_bytes += -record.size_bytes if is_backward else record.size_bytes
        elif is_backward and not is_own and record in self._own:
            self._own.remove(record)
            self.saved_bytes += record.size_bytes
        if size_bytes <= 0 and not is_backward and record in self._own:
            self._gone.append(record)


@final
class PassWatch:
    """Records one step: the calls of its layers, and the memory of its passes.

    It is one of `ebbtide.runtime.events.PassListener`.

    Args:
        memory: the memory. Its peak is measured and reset at each begin of a pass, and each time
            before saved tensors come to the device or leave it.
        account: counts those.
        profile: the step; None if it is not known yet: see `bind`.
        finish_copies: waits for the copies that are under way, and lets go of what they read;
            called at each begin of a pass. None where the host sees how far they are.
        find: finds the records of the layers' inputs; None if those are not asked for.
        held: what the loop holds, such as the batch: no input counts that is among it.
        count_live: counts the saved tensors that graphs hold.
        has_gradients: whether weights have gradients as the step begins.
        measures: whether the memory of passes is measured. If not, what was freed is returned at
            the same places, where it would count for a budget, so that the step needs as much as
            one that is measured.

    Attributes:
        has_gradients: as given.
        has_update: whether an optimizer has stepped at its end, or none is expected to.
        retains: whether a backward has let go of nothing, as with ``retain_graph=True``.
        begin_bytes: memory in use when the step began.
        peak_bytes: the peak of the whole step.
        calls: the calls of layers in the first forward of the step.
    """

    def __init__(
        self,
        memory: AbstractMemory,
        account: Account,
        profile: StepProfile | None = None,
        finish_copies: Callable[[], None] | None = None,
        find: FindRecord | None = None,
        held: Iterable[Tensor] = (),
        *,
        count_live: Callable[[], int] = lambda: 0,
        has_gradients: bool = False,
        measures: bool = True,
    ) -> None:
        self._measures = measures
        self._count_live, self.retains = count_live, False
        self.has_gradients, self.has_update = has_gradients, True
        self._positions = None if profile is None else Positions(profile)
        self._memory, self._account = memory, account
        # Returning it takes milliseconds, so that long steps do not do it in each pass.
        self._stride = 1 if profile is None else 1 + len(profile.layers) // _MOST_RETURNS
        self._task = -1  # the backward that runs, by its number
        self.holds_sources = finish_copies is not None
        self._finish_copies = finish_copies or (lambda: None)
        self._find = find
        self._held = {address_of(each) for each in held}
        # The calls that run, by their numbers, with their input tensors and the versions of these.
        self._open: list[tuple[int, list[tuple[Tensor, int]]]] = []
        self._records_calls = find is not None
        self.calls: list[RecordedCall] = []
        self._peaks: dict[Pass, int] = {}
        self._working: dict[Pass, int] = {}  # see `working`
        self._small_bytes = 0  # what has no record, and so is none of what a profile has
        self._stayed = _IfAllStayed(_BEGIN)
        self._finish_copies()
        self._memory.return_freed()
        self.begin_bytes = self._memory.now_bytes()
        self._without_weights_bytes = self.begin_bytes - account.weight_bytes
        self.peak_bytes = 0
        self._memory.reset_peak()
        self._pass = _BEGIN

    def bind(self, profile: StepProfile) -> None:
        """Note which step it was, so that its passes have positions."""
        self._positions = Positions(profile)

    @property
    def peaks(self) -> dict[int, int]:
        """The highest peak of each position; see `covered` for those that have none."""
        return self._by_position(self._peaks)

    @property
    def working(self) -> dict[int, int]:
        """What each position would need at most beside saved tensors, if these stay.

        What is offloaded is never there at one time; each moment counts with what would be. Where
        what was freed counts, this is not known.
        """
        found = {} if self._memory.keeps_freed else self._by_position(self._working)
        return {each: size - self._without_weights_bytes for each, size in found.items()}

    def _by_position(self, sizes: Mapping[Pass, int]) -> dict[int, int]:
        assert self._positions is not None, "the profile is not known yet"
        found: dict[int, int] = {}
        for each, size_bytes in sizes.items():
            position = self._positions.position(*each)
            if position is not None and each != _END:
                found[position] = max(found.get(position, 0), size_bytes)
        return found

    @property
    def end_peak_bytes(self) -> int:
        """The peak of what follows the backwards; 0 if no backward was seen to end."""
        return self._peaks.get(_END, 0)

    def covered(self, position: int) -> list[int]:
        """Return the positions that a measured one stands for. See [Note: measured passes]."""
        assert self._positions is not None, "the profile is not known yet"
        return self._positions.covered(position)

    def finish(self) -> None:
        """Note that the step has ended."""
        self._enter(*self._pass)

    def begin_forward_of(self, layer: Layer, inputs: Any) -> None:
        if self._records_calls:
            tensors = [each for each in tree_leaves(inputs) if isinstance(each, Tensor)]
            versions = [(each, each._version) for each in tensors if not each.is_inference()]
            self._open.append((len(self.calls), versions))
            self.calls.append(RecordedCall(layer.name))
        self._enter("forward", layer.index)

    def end_forward_of(self, layer: Layer) -> None:
        if self._open:
            number, inputs = self._open.pop()
            self.calls[number] = self._recorded(layer.name, inputs)
        self._enter("after", layer.index)

    def begin_backward_of(self, layer: int) -> None:
        task = current_graph_task()
        if task not in (-1, self._task):
            self._task = task
            call_after_backward(functools.partial(self._end_backward, self._count_live()))
        self._enter("backward", layer)

    def _end_backward(self, num_saved: int) -> None:
        self.retains |= self._count_live() >= num_saved > 0
        self._enter(*_END)

    def end_forward(self) -> None:
        """Note that the model's forward has ended: the work between the passes begins."""
        self._records_calls = False  # another forward of the step is another microbatch
        self._open.clear()
        self._enter("loss")

    def _recorded(self, name: str, inputs: Iterable[tuple[Tensor, int]]) -> RecordedCall:
        """Return what is to be known of a call that has ended.

        Args:
            name: name of the layer.
            inputs: its input tensors, with the versions that they had when it began.
        """
        sizes: dict[int, int] = {}
        sources = []
        for tensor, version in inputs:
            address = address_of(tensor)
            if not address or address in self._held or isinstance(tensor, nn.Parameter):
                continue
            if address not in sizes:
                record = None if self._find is None else self._find(address, version)
                if record is not None:
                    layer = record.layer
                    sources.append((None if layer is None else layer.index, record.number))
            sizes[address] = tensor.untyped_storage().nbytes()
        changes = any(tensor._version != version for tensor, version in inputs)
        source = sources[0] if len(sizes) == len(sources) == 1 and not changes else None
        return RecordedCall(name, sum(sizes.values()), source)

    def _enter(self, what: str, call: int = -1) -> None:
        if not self._measures:
            self._pass = Pass(what, call)
            self._return_freed()
            return
        positions, here = self._positions, Pass(what, call)
        if positions is None or positions.position(*here) != positions.position(*self._pass):
            self._finish_copies()  # the work after a layer may belong to its pass
        self._end_pass()
        self._pass = here
        if what != "after":
            self._stayed = _IfAllStayed(here)

    def _end_pass(self) -> None:
        self._note_peak()
        working_bytes = self._stayed.working_bytes
        self._working[self._pass] = max(self._working.get(self._pass, 0), working_bytes)
        self._stayed.most_bytes = -sys.maxsize
        self._return_freed()
        self._memory.reset_peak()

    def _return_freed(self) -> None:
        if self._pass.call % self._stride == 0 or self._pass.call < 0:
            self._memory.return_freed()

    def _note_peak(self) -> None:
        """Note the peak since it was reset last."""
        peak_bytes, account = self._memory.peak_bytes(), self._account
        self._peaks[self._pass] = max(self._peaks.get(self._pass, 0), peak_bytes)
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        saved_bytes = account.device_bytes + account.weight_bytes - self._small_bytes
        peak_bytes, now_bytes = peak_bytes - saved_bytes, self._memory.now_bytes() - saved_bytes
        self._stayed.note(peak_bytes, now_bytes, is_after=self._pass.what == "after")

    def before_change(self, size_bytes: int, record: Record | None) -> None:
        """Note that saved tensors are about to come to the device, or to leave it."""
        if self._memory.keeps_freed or not self._measures:  # what was freed before would count, too
            return
        if size_bytes >= 0 and self._stayed.here != self._pass:
            self._stayed = _IfAllStayed(self._pass)
        self._note_peak()
        self._memory.reset_peak()
        if record is None:
            self._small_bytes += size_bytes
        else:
            self._stayed.change(size_bytes, record)
