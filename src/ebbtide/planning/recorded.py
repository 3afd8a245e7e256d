"""Profiles a training step from the record of one that has run.

[Note: recorded profile] While a program trains, nothing of it runs for the sake of a plan: the
profile is the record of its first step. What autograd saved is on record with sizes, who shares
what, what can leave, and what rebuilt it; so are the inputs of each layer's call, which it saves if
it is recomputed. The record has no seconds and no working memory: these are measured. Work between
layers that saves something is a layer of its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Final

from torch import nn

from ebbtide.devices.hardware import Hardware
from ebbtide.errors import PolicyError
from ebbtide.observe.inspection import InspectedStorage
from ebbtide.observe.passes import EngineName, RecordedCall
from ebbtide.observe.trace import Trace
from ebbtide.planning.plan import LayerMode, Plan
from ebbtide.planning.prediction import StepTiming, StorageUses
from ebbtide.planning.profile import LayerProfile, SavedStorage, StepProfile, StorageId
from ebbtide.runtime.events import TraceEvent
from ebbtide.runtime.handles import Decision
from ebbtide.runtime.recompute import COPIED_BYTES
from ebbtide.weights.model_weights import WeightBytes


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
    names: dict[EngineName, StorageId] = {}
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
) -> list[tuple[int, EngineName, list[InspectedStorage]]]:
    """Return what each part of the forward saves, in the order of its numbers, and the views of it.

    Call n of a layer is part 2n and the work after it 2n + 1; what comes before the first is -1.

    Args:
        records: what was saved first.
    """
    views: dict[EngineName, list[InspectedStorage]] = defaultdict(list)
    firsts: dict[EngineName, EngineName] = {}  # of all names of a storage, the first one
    found: dict[tuple[int, int], EngineName] = {}
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
