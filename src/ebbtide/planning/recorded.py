"""Profiles a training step from the record of one that has run.

[Note: recorded profile] While a program trains, nothing of it runs for the sake of a plan: the
profile is the record of its first step. What autograd saved is on record with sizes, who shares
what, what can leave, and what rebuilt it; so are the inputs of each layer's call, which it saves if
it is recomputed. The record has no seconds and no working memory: these are measured. Work between
layers that saves something is a layer of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

from torch import Tensor, nn

from ebbtide.devices.device import Layer
from ebbtide.devices.hardware import Hardware
from ebbtide.errors import PolicyError
from ebbtide.observe.inspection import InspectedStorage
from ebbtide.observe.trace import Trace
from ebbtide.planning.plan import LayerMode, Plan
from ebbtide.planning.prediction import StepTiming, StorageUses
from ebbtide.planning.profile import LayerProfile, SavedStorage, StepProfile, StorageId
from ebbtide.runtime.events import TraceEvent
from ebbtide.runtime.handles import Decision, StorageRecord
from ebbtide.runtime.recompute import COPIED_BYTES
from ebbtide.runtime.record import Record
from ebbtide.runtime.stats import Account
from ebbtide.runtime.torch_internals import (
    address_of,
    call_after_backward,
    current_graph_task,
    tree_leaves,
)
from ebbtide.stores.measured_memory import AbstractMemory
from ebbtide.weights.model_weights import WeightBytes

_EngineName = tuple[int | None, int]
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
    source: _EngineName | None = None


def profile_recorded_step(
    records: Iterable[InspectedStorage],
    calls: Sequence[RecordedCall],
    hardware: Hardware,
    *,
    min_bytes: int,
) -> StepProfile:
    """Return the profile of a step that has run. See [Note: recorded profile].

    Args:
        records: what autograd saved, in the order in which it did so. What could leave did, or was
            rebuilt.
        calls: the calls of layers in the forward.
        hardware: the machine, for estimates of how long rebuilding takes.
        min_bytes: what is smaller is not on record.

    Returns:
        The profile, without seconds and working memory.

    Raises:
        PolicyError: no layer ran.
    """
    if not calls:
        raise PolicyError("the model called none of its layers; name modules that it calls")
    saves = _saves(each for each in records if not each.microbatch)
    slots = sorted({slot for slot, _, _ in saves} | {2 * call for call in range(len(calls))})
    indices = {slot: index for index, slot in enumerate(slots)}
    storages: list[list[SavedStorage]] = [[] for _ in slots]
    names: dict[_EngineName, StorageId] = {}
    for slot, engine_name, views in saves:
        index = indices[slot]
        own, known = storages[index], names.get(engine_name)
        if known is None:
            sources = (names[each] for each in views[0].rebuilt_from if each in names)
            names[engine_name] = StorageId(index, len(own))
            own.append(_saved(views, len(own), tuple(sources), hardware))
        else:
            size_bytes = storages[known.layer][known.number].size_bytes
            own.append(SavedStorage(number=len(own), size_bytes=size_bytes, same_as=known))
    layers = []
    for index, slot in enumerate(slots):
        call = calls[slot // 2] if slot >= 0 else RecordedCall("")
        source = None if call.source is None else names.get(call.source)
        if source is not None:
            is_whole = storages[source.layer][source.number].size_bytes == call.input_bytes
            source = source if source.layer <= index and is_whole else None
        layers.append(_layer(call, slot, source, tuple(storages[index])))
    return StepProfile(layers=tuple(layers), min_bytes=min_bytes)


def _saves(
    records: Iterable[InspectedStorage],
) -> list[tuple[int, _EngineName, list[InspectedStorage]]]:
    """Return what each part of the forward saves, in the order of its numbers, and the views of it.

    Call n of a layer is part 2n and the work after it 2n + 1; what comes before the first is -1.

    Args:
        records: what was saved first.
    """
    views: dict[_EngineName, list[InspectedStorage]] = defaultdict(list)
    firsts: dict[_EngineName, _EngineName] = {}  # of all names of a storage, the first one
    found: dict[tuple[int, int], _EngineName] = {}
    for record in records:
        own = record.layer, record.number
        first = firsts.setdefault(own, own)
        views[first].append(record)
        for place, number in record.numbers:
            slot, layer = (2 * place, place) if place >= 0 else (2 * ~place - 1, None)
            found[slot, number] = firsts.setdefault((layer, number), first)
    return [(slot, first, views[first]) for (slot, _), first in sorted(found.items())]


def _saved(
    views: Sequence[InspectedStorage],
    number: int,
    sources: tuple[StorageId, ...],
    hardware: Hardware,
) -> SavedStorage:
    """Return a storage at its first save.

    Args:
        views: the views of it that were saved; one, if all of it was.
        number: its number in the layer.
        sources: what it was rebuilt from.
        hardware: the machine.
    """
    size_bytes = sum(each.size_bytes for each in views)
    if len(views) > 1:
        sources = ()
    # To be rebuilt, it is read and written about once for each source.
    traffic_bytes = (1 + len(sources)) * size_bytes
    return SavedStorage(
        number=number,
        size_bytes=size_bytes,
        may_leave=all(each.decision != "keep" for each in views),
        sources=sources,
        rebuild_s=traffic_bytes / hardware.device_memory_bytes_per_s if sources else None,
    )


def _layer(
    call: RecordedCall, slot: int, source: StorageId | None, saved: tuple[SavedStorage, ...]
) -> LayerProfile:
    layer = LayerProfile(name=call.name, forward_s=0.0, backward_s=0.0, storages=saved)
    if slot % 2:
        name = f"after {call.name}" if slot >= 0 else "before layers"
        return dataclasses.replace(layer, name=name, between=True, may_recompute=False)
    return dataclasses.replace(layer, input_bytes=call.input_bytes, input_same_as=source)


# ---- Takes the seconds of a step's layers and copies from its trace ----

_ENOUGH_BYTES: Final = 2**20  # fewer bytes say nothing of how fast copies are
_LEAST_SHARE: Final = 0.3  # of a pass that is taken to be computing, whatever copies cost
_FASTEST: Final = 1e13  # bytes per second; a copy that only maps pages takes no time


def with_weight_bytes(
    profile: StepProfile, sizes: Mapping[str, WeightBytes], hardware: Hardware
) -> StepProfile:
    """Return a profile that has the weights of its layers, which may rest on the host or not.

    Args:
        profile: the step.
        sizes: what the weights occupy, by the name of the first layer that has them.
        hardware: the machine, for an estimate of how long the host takes to update them.
    """
    left, layers = dict(sizes), []
    for layer in profile.layers:
        own = None if layer.between else left.pop(layer.name, None)
        if own is not None:
            layer = dataclasses.replace(layer, **own._asdict())
            update_s = layer.update_bytes / hardware.d2h_bytes_per_s
            layer = dataclasses.replace(layer, host_update_s=update_s)
        layers.append(layer)
    return dataclasses.replace(profile, layers=tuple(layers))


def with_copied_bytes(profile: StepProfile, model: nn.Module) -> StepProfile:
    """Return a profile that has the weights of which layers keep copies if they are recomputed.

    Args:
        profile: the step.
        model: the model.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = []
    for layer in profile.layers:
        if not layer.between and layer.name in modules:
            sizes = (each.nbytes for each in modules[layer.name].parameters())
            copied_bytes = sum(each for each in sizes if each <= COPIED_BYTES)
            layer = dataclasses.replace(layer, copied_bytes=copied_bytes)
        layers.append(layer)
    return dataclasses.replace(profile, layers=tuple(layers))


def measured_profile(
    profile: StepProfile,
    plan: Plan,
    trace: Trace,
    step_s: float,
    hardware: Hardware,
    *,
    is_first: bool,
) -> StepProfile:
    """Return a profile with the seconds of a measured step.

    Args:
        profile: the step, with other seconds. What was not measured alone has a share of what was
            measured together, as these seconds have it.
        plan: the plan that was followed.
        trace: what was measured.
        step_s: seconds from the begin of the step to the begin of the next.
        hardware: the machine, by which copies made the passes longer, and the host's updates the
            step.
        is_first: whether the profile's seconds were not measured. On an accelerator, what is lower
            counts otherwise: work takes as long each time there, but a pass that waits for the host
            seems to take longer, and the host has more to do in a step that is measured. So has it
            where a layer offloads more; layers that are alike take equally long.
    """
    alike = not hardware.computes_on_host
    lowest = alike and not is_first
    measured, rebuilding_s = _measured(trace)
    calls = [index for index, each in enumerate(profile.layers) if not each.between]
    if not all(call in measured["forward"] for call in range(len(calls))):
        return profile
    recomputed = [each.mode is not LayerMode.AS_IS for each in plan.layers]
    rebuild_x = _rebuild_factor(profile, plan, rebuilding_s)
    layers = list(profile.layers)
    gaps = _gaps(trace.events, len(calls))
    for call, index in enumerate(calls):
        layers[index] = _of_call(layers[index], measured, call, recomputed=recomputed[index])
        if call in gaps and layers[index + 1].between:
            # The backward of the work after a layer is measured with that of the next one.
            layers[index + 1] = dataclasses.replace(
                layers[index + 1], forward_s=gaps[call], backward_s=0.0, recompute_s=None
            )
    passes_s = sum(each.forward_s + each.backward_s for each in layers)
    passes_s += sum(
        each.second_forward_s for each, again in zip(layers, recomputed, strict=True) if again
    )
    waited_s = sum(each.duration_s for each in trace.events if each.what == "wait")
    rest_s = max(0.0, step_s - passes_s - rebuilding_s - waited_s)
    copy_cost_s = copied_bytes(profile, plan) * (hardware.copy_cost_s_per_byte or 0.0)
    share = max(_LEAST_SHARE, 1 - copy_cost_s / passes_s) if passes_s else 1.0
    layers = [_shortest([each], share) for each in layers]
    if lowest:
        layers = [_shortest(each) for each in zip(layers, profile.layers, strict=True)]
        rebuild_x = min(rebuild_x, 1.0)
    if alike:
        layers = _equally_long(layers)
    update_byte_s = _update_byte_s(trace.events)
    known = tuple(_with_others(each, rebuild_x, update_byte_s) for each in layers)
    found = dataclasses.replace(profile, layers=known, before_s=0.0, loss_s=0.0, after_s=0.0)
    update_s = StepTiming(found, hardware).predict(plan).exposed_update_s
    after_s = max(0.0, rest_s - update_s)
    return dataclasses.replace(found, after_s=min(after_s, profile.after_s) if lowest else after_s)


def _update_byte_s(events: Iterable[TraceEvent]) -> float | None:
    """Return the seconds in which a worker steps a byte of weights ahead; None: not measured."""
    steps = [event for event in events if event.lane == "cpu_optimizer"]
    size_bytes = sum(each.size_bytes for each in steps)
    if size_bytes < _ENOUGH_BYTES:
        return None
    return sum(each.duration_s for each in steps if each.size_bytes) / size_bytes


def _with_others(
    layer: LayerProfile, rebuild_x: float, update_byte_s: float | None
) -> LayerProfile:
    """Return a layer with the seconds of rebuilding, and of the host's updates if measured."""
    storages = tuple(
        each
        if each.rebuild_s is None
        else dataclasses.replace(each, rebuild_s=each.rebuild_s * rebuild_x)
        for each in layer.storages
    )
    update_s = layer.host_update_s
    if update_byte_s is not None and layer.gradient_bytes:
        update_s = update_byte_s * layer.gradient_bytes * layer.update_bytes / layer.ahead_bytes
    return dataclasses.replace(layer, storages=storages, host_update_s=update_s)


def _of_call(
    layer: LayerProfile, measured: Mapping[str, Mapping[int, float]], call: int, *, recomputed: bool
) -> LayerProfile:
    """Return a layer with the seconds of its call; what was not measured stays."""
    layer = dataclasses.replace(layer, forward_s=measured["forward"][call])
    again_s = 0.0
    if recomputed:
        again_s = measured["recompute"].get(call, layer.second_forward_s)
        layer = dataclasses.replace(layer, recompute_s=again_s)
    backward_s = measured["backward"].get(call)
    if backward_s is None:
        return layer
    return dataclasses.replace(layer, backward_s=max(0.0, backward_s - again_s))


def _shortest(layers: Sequence[LayerProfile], share: float = 1.0) -> LayerProfile:
    """Return the first layer with the fewest seconds of all of them, or this share of them."""
    again = [each.recompute_s for each in layers if each.recompute_s is not None]
    return dataclasses.replace(
        layers[0],
        forward_s=share * min(each.forward_s for each in layers),
        backward_s=share * min(each.backward_s for each in layers),
        recompute_s=share * min(again) if again else None,
    )


def _equally_long(layers: Sequence[LayerProfile]) -> list[LayerProfile]:
    """Return the layers, of which those that are alike have the fewest seconds of all of these.

    Alike are layers that save as much, and whose names differ in a number, as those of a list do. A
    forward takes no longer than when it runs again, which is with nothing to offload.
    """
    groups: dict[Hashable, list[LayerProfile]] = defaultdict(list)
    likeness = [index if layer.between else _likeness(layer) for index, layer in enumerate(layers)]
    for key, each in zip(likeness, layers, strict=True):
        groups[key].append(each)
    shortest = {key: _shortest(group) for key, group in groups.items()}
    return [
        dataclasses.replace(
            layer,
            forward_s=min(shortest[key].forward_s, shortest[key].second_forward_s),
            backward_s=shortest[key].backward_s,
            recompute_s=shortest[key].recompute_s,
        )
        for key, layer in zip(likeness, layers, strict=True)
    ]


def _likeness(layer: LayerProfile) -> Hashable:
    sizes = tuple(each.size_bytes for each in layer.storages)
    return re.sub(r"\d+", "#", layer.name), layer.input_bytes, sizes


def copied_bytes(profile: StepProfile, plan: Plan) -> int:
    """Return how many bytes a plan copies, in both directions."""
    uses = StorageUses(profile)
    used = uses.under(plan)
    pairs = zip(uses.memories, used.decisions, used.first, strict=True)
    offloaded = (memory for memory, done, first in pairs if done is Decision.OFFLOAD and first >= 0)
    return 2 * sum(memory.size_bytes for memory in offloaded)


def measured_hardware(hardware: Hardware, trace: Trace) -> Hardware:
    """Return hardware with the bandwidths at which a step copied."""
    rates = {
        "d2h_bytes_per_s": _rate(trace.events, "offload"),
        "h2d_bytes_per_s": _rate(trace.events, "reload"),
    }
    known = {figure: rate for figure, rate in rates.items() if rate is not None}
    if not known:
        return hardware
    figures = {name: getattr(hardware, name) for name in rates} | known
    figures["duplex_bytes_per_s"] = sum(figures.values())
    return hardware.with_measured(figures, "the copies of a training step")


def _measured(trace: Trace) -> tuple[dict[str, dict[int, float]], float]:
    """Return the seconds of the layers' passes without waits, by call, and of all rebuilding."""
    compute = [event for event in trace.events if event.lane == "compute"]
    waits = [event for event in compute if event.what == "wait"]
    rebuilds = [event for event in compute if event.what == "rebuild"]
    found: dict[str, dict[int, float]] = {"forward": {}, "recompute": {}, "backward": {}}
    for event in compute:
        if event.what not in found or event.layer is None or event.microbatch:
            continue
        other = [*waits, *rebuilds] if event.what == "backward" else waits
        took_s = event.duration_s - _covered_s(each for each in other if _begins_in(event, each))
        by_layer = found[event.what]
        by_layer[event.layer] = by_layer.get(event.layer, 0.0) + max(0.0, took_s)
    inner = [each for each in waits if any(_begins_in(event, each) for event in rebuilds)]
    return found, max(0.0, _covered_s(rebuilds) - _covered_s(inner))


def _begins_in(event: TraceEvent, other: TraceEvent) -> bool:
    return event.begin_s <= other.begin_s < event.end_s


def _covered_s(events: Iterable[TraceEvent]) -> float:
    """Return the seconds in which at least one of the events goes on."""
    covered_s, until_s = 0.0, 0.0
    for event in sorted(events, key=lambda each: each.begin_s):
        covered_s += max(0.0, event.end_s - max(until_s, event.begin_s))
        until_s = max(until_s, event.end_s)
    return covered_s


def _rebuild_factor(profile: StepProfile, plan: Plan, took_s: float) -> float:
    """Return how many times longer all rebuilding took than was known before."""
    uses = StorageUses(profile)
    decisions = uses.under(plan).decisions
    before_s = sum(
        memory.rebuild_s or 0.0
        for memory, decision in zip(uses.memories, decisions, strict=True)
        if decision is Decision.REBUILD
    )
    return took_s / before_s if before_s else 1.0


def _gaps(events: Sequence[TraceEvent], count: int) -> dict[int, float]:
    """Return the seconds between the end of each layer's forward and the begin of the next."""
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for event in events:
        if event.what == "forward" and event.layer is not None and not event.microbatch:
            begins.setdefault(event.layer, event.begin_s)
            ends[event.layer] = event.end_s
    return {
        call: max(0.0, begins[call + 1] - ends[call])
        for call in range(count - 1)
        if call in ends and call + 1 in begins
    }


def _rate(events: Iterable[TraceEvent], what: str) -> float | None:
    """Return bytes per second of the slowest lane; None if too few bytes were copied."""
    sizes: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        if event.what == what:
            sizes[event.lane] += event.size_bytes
            seconds[event.lane] += event.duration_s
    rates = [
        min(_FASTEST, sizes[lane] / took_s) if took_s else _FASTEST
        for lane, took_s in seconds.items()
        if sizes[lane] >= _ENOUGH_BYTES
    ]
    return min(rates) if rates else None


# ---- Records the passes of one step, with the peak of memory in each of them
#
# [Note: measured passes] Torch tells when a layer's backward begins and not when it ends, so what
# is measured as the backward of a layer includes the backward of the work before it, up to the
# layer before; the first one of all is in the time between the passes. Each measured peak is
# compared with the highest of the positions that it stands for.


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

    @property
    def is_whole(self) -> bool:
        """Whether the forward and the backward of all layers were measured."""
        assert self._positions is not None, "the profile is not known yet"
        calls = range(len(self._positions.calls))
        return all(
            Pass(what, call) in self._peaks for what in ("forward", "backward") for call in calls
        )

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
