"""Takes the seconds of a step's layers and copies from its trace."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ebbtide.planning.hardware import Hardware, Kind, Source
from ebbtide.planning.plan import Decision, LayerMode, Plan
from ebbtide.planning.prediction.storage_uses import StorageUses
from ebbtide.planning.step_profile import LayerProfile, SavedStorage, StepProfile
from ebbtide.tracing.events import TraceEvent
from ebbtide.tracing.trace import Trace

_ENOUGH_BYTES: Final = 2**20  # fewer bytes say nothing of how fast copies are
_LEAST_SHARE: Final = 0.3  # of a pass that is taken to be computing, whatever copies cost
_FASTEST: Final = 1e13  # bytes per second; a copy that only maps pages takes no time


class _Seconds(NamedTuple):
    """Seconds of a step without waits: of the layers' passes, by index, and of all rebuilding."""

    forward: Mapping[int, float]
    again: Mapping[int, float]
    backward: Mapping[int, float]
    rebuilding_s: float


def measured_profile(
    profile: StepProfile, plan: Plan, trace: Trace, step_s: float, copy_cost_s: float
) -> StepProfile:
    """Return a profile with the seconds of a measured step.

    Args:
        profile: the step, with other seconds. What was not measured alone has a share of what was
            measured together, as these seconds have it.
        plan: the plan that was followed.
        trace: what was measured.
        step_s: seconds from the begin of the step to the begin of the next.
        copy_cost_s: seconds by which copies made the passes longer, all together.
    """
    seconds = _seconds(trace)
    calls = [index for index, each in enumerate(profile.layers) if not each.between]
    if not all(call in seconds.forward for call in range(len(calls))):
        return profile
    layers = _with_measured_rebuilds(profile, plan, seconds)
    for call, index in enumerate(calls):
        recomputed = plan.layers[index].mode is not LayerMode.AS_IS
        layers[index] = _measured_layer(layers[index], seconds, call, recomputed=recomputed)
    _share_backward(layers, profile)
    ends = _forward_ends(trace.events, len(calls))
    for call, index in enumerate(calls):
        following = index + 1
        if following < len(layers) and layers[following].between and call in ends:
            layers[following] = dataclasses.replace(layers[following], forward_s=ends[call])
    busy_s = sum(each.forward_s + each.backward_s for each in layers)
    busy_s += sum(
        each.second_forward_s
        for each, chosen in zip(layers, plan.layers, strict=True)
        if chosen.mode is not LayerMode.AS_IS
    )
    passes_s = busy_s
    busy_s += seconds.rebuilding_s
    waited_s = sum(each.duration_s for each in trace.events if each.what == "wait")
    rest_s = max(0.0, step_s - busy_s - waited_s)
    share = max(_LEAST_SHARE, 1 - copy_cost_s / passes_s) if passes_s else 1.0
    layers = [_scaled(each, share) for each in layers]
    return dataclasses.replace(
        profile, layers=tuple(layers), before_s=0.0, loss_s=0.0, after_s=rest_s
    )


def with_shorter_passes(profile: StepProfile, share: float) -> StepProfile:
    """Return a profile whose passes, and the work after them, take this share of their time."""
    layers = tuple(_scaled(each, share) for each in profile.layers)
    return dataclasses.replace(profile, layers=layers, after_s=share * profile.after_s)


def computing_s(trace: Trace, step_s: float) -> float:
    """Return the seconds of a step without waits, rebuilding and second forward passes."""
    seconds = _seconds(trace)
    waits = [event for event in trace.events if event.what == "wait"]
    return step_s - _covered_s(waits) - seconds.rebuilding_s - sum(seconds.again.values())


def copied_bytes(profile: StepProfile, plan: Plan) -> int:
    """Return how many bytes a plan copies, in both directions."""
    uses = StorageUses(profile)
    used = uses.under(plan)
    pairs = zip(uses.memories, used.decisions, used.first, strict=True)
    offloaded = (memory for memory, done, first in pairs if done is Decision.OFFLOAD and first >= 0)
    return 2 * sum(memory.size_bytes for memory in offloaded)


def _scaled(layer: LayerProfile, share: float) -> LayerProfile:
    """Return a layer with passes that take this share of their time."""
    return dataclasses.replace(
        layer,
        forward_s=layer.forward_s * share,
        backward_s=layer.backward_s * share,
        recompute_s=None if layer.recompute_s is None else layer.recompute_s * share,
    )


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
    return _with_figures(hardware, figures, "the copies of a training step")


def with_copy_cost(hardware: Hardware, cost_s_per_byte: float) -> Hardware:
    """Return hardware with a measured `copy_cost_s_per_byte`."""
    figures = {"copy_cost_s_per_byte": cost_s_per_byte}
    return _with_figures(hardware, figures, "training steps that copied more and less")


def _with_figures(hardware: Hardware, figures: Mapping[str, float], text: str) -> Hardware:
    sources = tuple(
        Source(each.figure, Kind.MEASURED, text) if each.figure in figures else each
        for each in hardware.sources
    )
    changes: dict[str, Any] = dict(figures)
    return dataclasses.replace(hardware, sources=sources, **changes)


def _seconds(trace: Trace) -> _Seconds:
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
    rebuilding_s = max(0.0, _covered_s(rebuilds) - _covered_s(inner))
    return _Seconds(found["forward"], found["recompute"], found["backward"], rebuilding_s)


def _begins_in(event: TraceEvent, other: TraceEvent) -> bool:
    return event.begin_s <= other.begin_s < event.end_s


def _covered_s(events: Iterable[TraceEvent]) -> float:
    """Return the seconds in which at least one of the events goes on."""
    covered_s, until_s = 0.0, 0.0
    for event in sorted(events, key=lambda each: each.begin_s):
        covered_s += max(0.0, event.end_s - max(until_s, event.begin_s))
        until_s = max(until_s, event.end_s)
    return covered_s


def _with_measured_rebuilds(
    profile: StepProfile, plan: Plan, seconds: _Seconds
) -> list[LayerProfile]:
    """Return the layers with other seconds of rebuilding.

    They change as the sum of those that were measured does; or, if nothing was rebuilt, as the sum
    of the forward passes.
    """
    uses = StorageUses(profile)
    decisions = uses.under(plan).decisions
    before_s = sum(
        memory.rebuild_s or 0.0
        for memory, decision in zip(uses.memories, decisions, strict=True)
        if decision is Decision.REBUILD
    )
    after_s = seconds.rebuilding_s
    if not before_s:
        before_s = sum(each.forward_s for each in profile.layers if not each.between)
        after_s = sum(seconds.forward.values())
    factor = after_s / before_s if before_s else 1.0
    return [
        dataclasses.replace(
            layer, storages=tuple(_with_rebuild(each, factor) for each in layer.storages)
        )
        for layer in profile.layers
    ]


def _with_rebuild(storage: SavedStorage, factor: float) -> SavedStorage:
    if storage.rebuild_s is None:
        return storage
    return dataclasses.replace(storage, rebuild_s=storage.rebuild_s * factor)


def _measured_layer(
    layer: LayerProfile, seconds: _Seconds, call: int, *, recomputed: bool
) -> LayerProfile:
    layer = dataclasses.replace(layer, forward_s=seconds.forward[call])
    again_s = seconds.again.get(call, layer.second_forward_s) if recomputed else 0.0
    if recomputed:
        layer = dataclasses.replace(layer, recompute_s=again_s)
    backward_s = seconds.backward.get(call)
    if backward_s is None:
        return layer
    return dataclasses.replace(layer, backward_s=max(0.0, backward_s - again_s))


def _share_backward(layers: list[LayerProfile], before: StepProfile) -> None:
    """Give the work before each layer its share of what was measured as the layer's backward."""
    for index, layer in enumerate(layers):
        if layer.between and index + 1 < len(layers):
            one, two = before.layers[index].backward_s, before.layers[index + 1].backward_s
            whole_s = layers[index + 1].backward_s
            share = one / (one + two) if one + two else 0.0
            layers[index] = dataclasses.replace(layer, backward_s=whole_s * share)
            rest_s = whole_s * (1 - share)
            layers[index + 1] = dataclasses.replace(layers[index + 1], backward_s=rest_s)


def _forward_ends(events: Sequence[TraceEvent], count: int) -> dict[int, float]:
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
