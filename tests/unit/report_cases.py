"""Records of made-up runs: layers whose activations leave during forward and come back."""

from __future__ import annotations

from typing import Any

from ebbtide import Finding, StepStats, Trace, TraceEvent
from ebbtide.observe.memory import MemorySample, Owner, StepMemory
from ebbtide.observe.page import render_page
from ebbtide.observe.run_record import LayerFigures, RunRecord
from ebbtide.units import format_size

MIB = 2**20
FORWARD_S, BACKWARD_S, COPY_S = 0.010, 0.020, 0.024
SAVED_BYTES = 64 * MIB  # of a layer
FIXED = {
    Owner.OTHER: 40 * MIB,
    Owner.PARAMETERS: 96 * MIB,
    Owner.OPTIMIZER: 192 * MIB,
    Owner.INPUTS: 16 * MIB,
}


def name_of(layer: int) -> str:
    return f"fno_blocks.{layer}"


def make_events(num_layers: int, num_offloaded: int) -> tuple[TraceEvent, ...]:
    """Layers 0 to num_offloaded - 1 leave one after the other, and come back in reverse order."""
    events: list[TraceEvent] = []

    def add(what: str, lane: str, begin_s: float, end_s: float, layer: int, size: int = 0) -> None:
        events.append(TraceEvent(what, lane, begin_s, end_s, layer, 0, name_of(layer), size))

    free_s = 0.0
    for layer in range(num_layers):
        begin_s = layer * FORWARD_S
        add("forward", "compute", begin_s, begin_s + FORWARD_S, layer)
        if layer < num_offloaded:
            begin_s = max(free_s, begin_s + FORWARD_S)
            free_s = begin_s + COPY_S
            add("offload", "d2h", begin_s, free_s, layer, SAVED_BYTES)
            add("release", "compute", free_s, free_s, layer, SAVED_BYTES)
    now_s = num_layers * FORWARD_S + 0.005
    up_s = now_s
    for layer in reversed(range(num_layers)):
        begin_s = now_s
        if layer < num_offloaded:
            up_s = max(up_s, now_s - 2 * BACKWARD_S)
            add("reload", "h2d", up_s, up_s + COPY_S, layer, SAVED_BYTES)
            up_s += COPY_S
            if up_s > now_s:
                add("wait", "compute", now_s, up_s, layer, SAVED_BYTES)
                begin_s = up_s
        if layer % 2:
            add("rebuild", "compute", begin_s, begin_s + 0.004, layer)
        now_s = begin_s + BACKWARD_S
        add("backward", "compute", begin_s, now_s, layer)
    return Trace(events).events


def make_memory(events: tuple[TraceEvent, ...]) -> StepMemory:
    """Memory in each pass of these events, with sizes that add up."""
    samples = []
    offloaded = {event.layer: event for event in events if event.what == "offload"}
    reloaded = {event.layer: event for event in events if event.what == "reload"}
    passes = [event for event in events if event.what in ("forward", "backward")]
    alive: dict[int, None] = {}
    gradients = 0
    for number, each in enumerate(passes):
        layer = each.layer or 0
        if each.what == "forward":
            alive[layer] = None
        else:
            gradients += 12 * MIB
        owned = dict(FIXED)
        for other in alive:
            copy, back = offloaded.get(other), reloaded.get(other)
            if copy is None:
                owner = Owner.KEPT
            elif back is not None and back.begin_s < each.end_s:
                owner = Owner.RELOADED
            elif copy.end_s > each.begin_s:
                owner = Owner.LEAVING
            else:
                continue
            owned[owner] = owned.get(owner, 0) + SAVED_BYTES
        owned[Owner.RUNNING] = (30 if each.what == "forward" else 55) * MIB
        if gradients:
            owned[Owner.GRADIENTS] = gradients
        end_s = passes[number + 1].begin_s if number + 1 < len(passes) else each.end_s
        owned = {owner: owned[owner] for owner in Owner if owner in owned}
        begin_s = samples[-1].end_s if samples else 0.0
        samples.append(MemorySample(each.label, begin_s, end_s, owned, sum(owned.values())))
        if each.what == "backward":
            alive.pop(layer, None)
    end_s = samples[-1].end_s
    owned = FIXED | {Owner.GRADIENTS: gradients, Owner.RUNNING: 8 * MIB}
    step = MemorySample("optimizer step", end_s, end_s + 0.012, owned, sum(owned.values()))
    samples.append(step)
    peak = max(range(len(samples)), key=lambda number: samples[number].peak_bytes)
    return StepMemory(
        "memory that torch's allocator has handed out",
        tuple(samples),
        peak,
        int(samples[peak].peak_bytes * 1.06),
    )


def make_record(title: str, num_layers: int = 8, num_offloaded: int = 0) -> RunRecord:
    """Return a record with all that a record can have."""
    events = make_events(num_layers, num_offloaded)
    memory = make_memory(events)
    waits = {event.layer: event.duration_s for event in events if event.what == "wait"}
    layers = tuple(
        LayerFigures(
            layer, name_of(layer), 0, FORWARD_S, BACKWARD_S + layer * 1e-4, waits.get(layer, 0.0),
            0 if layer < num_offloaded else SAVED_BYTES,
            SAVED_BYTES if layer < num_offloaded else 0, 8 * MIB, 0,
        )
        for layer in range(num_layers)
    )  # fmt: skip
    moved = num_offloaded * SAVED_BYTES
    saved = num_layers * SAVED_BYTES
    stats = StepStats(
        saved_bytes=int(saved * 1.4), unique_bytes=saved, kept_bytes=saved - moved,
        offloaded_bytes=moved, reloaded_bytes=moved, rebuilt_bytes=8 * MIB * num_layers,
        num_saved=11 * num_layers, num_offloaded=num_offloaded, late_reloads=len(waits),
        stall_s=sum(waits.values()), peak_device_bytes=saved - moved // 2,
    )  # fmt: skip
    return RunRecord(
        title=title,
        settings={"activations": f"ActivationPolicy(num_layers={num_offloaded})", "store": "host"},
        versions={"ebbtide": "0.1", "torch": "2.13.0", "Python": "3.11.7", "device": "cuda:0"},
        stats=stats,
        layers=layers,
        events=events,
        memory=memory,
        verdict=f"The peak is {format_size(memory.peak_bytes)}.",
        findings=make_findings(memory, num_offloaded),
        limit_bytes=sum(FIXED.values()) + 55 * MIB + 96 * MIB + SAVED_BYTES,
        limit_why="No offloader of activations gets below 559.0 MiB: parameters, optimizer state "
        "and gradients stay, and backward of a layer needs what that layer saved.",
        predicted_peak_bytes=int(memory.peak_bytes * 0.97) if num_offloaded else None,
        predicted_step_s=memory.samples[-2].end_s if num_offloaded else None,
        notes=("The link was measured at 25 GB/s.",),
    )


def make_findings(memory: StepMemory, num_offloaded: int) -> tuple[Finding, ...]:
    if not num_offloaded:
        return (
            Finding(
                "nothing offloaded",
                "No activation leaves the device, because num_layers is 0.",
                "Of 8 layers 0 are offloaded; 512.0 MiB of activations stay.",
                "ActivationPolicy(num_layers=None)",
                512 * MIB,
            ),
        )
    return (
        Finding(
            "copies are late",
            "Copies do not keep up with compute, so activations were still there at the peak.",
            "4 of 6 reloads were late, and compute waited for them.",
            'budget="768MiB" lets the planner recompute what cannot be copied in time.',
            2 * SAVED_BYTES,
        ),
        Finding(
            "optimizer state",
            "The optimizer's state stays on the device throughout the step.",
            f"192.0 MiB of {memory.peak_bytes / MIB:.0f} MiB.",
            "activations=ebbtide.ActivationPolicy(min_bytes=...), weights=ebbtide.WeightPolicy()",
            192 * MIB,
        ),
    )


def page_of(*records: RunRecord) -> str:
    """The page that shows these runs."""
    return render_page(list(records))


def empty_record(title: str, **more: Any) -> RunRecord:
    """Return a record that lacks all but what is given."""
    return RunRecord(title=title, **more)
