"""Run a schedule without a model or hardware, in virtual time, to see what its step looks like."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

import torch

from ebbtide.devices.device import Layer
from ebbtide.devices.simulated import SimulatedDevice
from ebbtide.errors import PolicyError
from ebbtide.observe.recording import Recording
from ebbtide.observe.trace import Trace
from ebbtide.policy import ActivationPolicy, refuse
from ebbtide.runtime.activations import Activations
from ebbtide.runtime.executor import ScheduleExecutor, ScheduleMode
from ebbtide.runtime.handles import Saved, restore
from ebbtide.runtime.parameter_index import ParameterIndex
from ebbtide.runtime.rebuild import Placement
from ebbtide.runtime.saved_tensors import SavedTensorHooks
from ebbtide.runtime.transfers import Transfers
from ebbtide.schedule import Direction, Pass, Schedule, Unit
from ebbtide.stores.pinned import PinnedStore
from ebbtide.units import parse_size_bytes

_LARGEST_BYTES: Final = 4096  # size that the largest layer is scaled down to

PerLayer = float | Mapping[int, float]


def rehearse(
    schedule: Schedule,
    *,
    layer_bytes: int | str | Mapping[int, int | str] = "64MiB",
    forward_s: PerLayer = 1e-3,
    backward_s: PerLayer | None = None,
    bandwidth_bytes_per_s: float = 25e9,
) -> Trace:
    """Run a schedule on a simulated device, with kernels and copies that take given times.

    The engine is the one that trains, so a wait in the trace would occur in training too, for the
    same reason. Print ``trace.timeline()`` or call ``trace.plot("step.png")`` to see the step.

    Args:
        schedule: the schedule to run.
        layer_bytes: number of bytes that a layer saves, for all layers or per layer.
        forward_s: seconds that a layer's forward takes, for all layers or per layer.
        backward_s: seconds that a layer's backward takes, for all layers or per layer; None means
            twice its forward. Each part of a split backward takes half of that.
        bandwidth_bytes_per_s: bandwidth of the link in each direction.

    Returns:
        The trace of one step, with sizes and times at the scale of the arguments.

    Raises:
        ScheduleError: the schedule cannot be run.
        PolicyError: a size, a time or the bandwidth is not positive, or is missing for a layer.

    Not modelled: latency, a link that is slower when both directions are busy, kernels that are
    slower while copies use the memory, a host that is too slow to queue work.
    """
    if not isinstance(schedule, Schedule):
        refuse("schedule", "an ebbtide.Schedule", schedule, "read text by Schedule.parse(text)")
    schedule.check()
    layers = {each.unit.layer for each in schedule.order}
    real_bytes = {layer: _size(layer_bytes, layer) for layer in layers}
    if not _is_positive(bandwidth_bytes_per_s):
        raise PolicyError(
            f"bandwidth_bytes_per_s must be a positive number: {bandwidth_bytes_per_s!r}"
        )
    scale = max(real_bytes.values()) / _LARGEST_BYTES
    device = SimulatedDevice(0, 0.0, bandwidth_bytes_per_s / scale, timely=True)
    store = PinnedStore(device, slab_bytes=64 * _LARGEST_BYTES)
    transfers = Transfers(device, store, bound_bytes=0, traced=True)
    transfers.account.listener = recording = Recording(device)
    activations = Activations(transfers)
    executor = ScheduleExecutor(ScheduleMode(schedule), activations)
    placement = Placement(ActivationPolicy(min_bytes=1, rebuild=False), layers_only=True)
    hooks = SavedTensorHooks(activations, placement, ParameterIndex([]))
    last = {each.unit: each for each in schedule.order}
    kept: dict[Unit, Saved] = {}

    def run_forward(unit: Unit, duration_s: float) -> None:
        """Compute, and then save one tensor."""
        records, log = executor.begin_unit(unit)
        hooks.begin()
        activations.scopes.begin_layer(
            Layer(unit.layer, ""), offloads=records.leaves, unit=records, forward=log
        )
        device.compute(duration_s)
        size_bytes = max(1, round(real_bytes[unit.layer] / scale))
        kept[unit] = hooks.pack(torch.zeros(size_bytes, dtype=torch.uint8, device="cpu"))
        activations.scopes.end_layer()
        hooks.end()

    def run_backward(each: Pass, duration_s: float) -> None:
        """Read the saved tensor, and then compute."""
        executor.begin_backward_of(each.unit, each.direction)
        restore(kept[each.unit])
        device.compute(duration_s)
        if each == last[each.unit]:
            del kept[each.unit]

    for each in schedule.order:
        layer = each.unit.layer
        if each.is_forward:
            run_forward(each.unit, _positive("forward_s", forward_s, layer))
            continue
        if backward_s is None:
            duration_s = 2 * _positive("forward_s", forward_s, layer)
        else:
            duration_s = _positive("backward_s", backward_s, layer)
        whole = each.direction is Direction.BACKWARD
        run_backward(each, duration_s if whole else duration_s / 2)
    kept.clear()
    transfers.poll()
    events = recording.trace.events
    transfers.close()
    origin_s = min((event.begin_s for event in events), default=0.0)
    return Trace(
        dataclasses.replace(
            event,
            begin_s=event.begin_s - origin_s,
            end_s=event.end_s - origin_s,
            size_bytes=real_bytes[event.layer or 0] if event.size_bytes else 0,
        )
        for event in events
    )


def _size(layer_bytes: int | str | Mapping[int, int | str], layer: int) -> int:
    given = layer_bytes
    if isinstance(given, Mapping):
        if layer not in given:
            raise PolicyError(f"layer_bytes says nothing of layer {layer}; give it a size, too")
        given = given[layer]
    size = parse_size_bytes(given, name="layer_bytes")
    if not size:
        raise PolicyError(f"layer_bytes of layer {layer} must be 1 or more")
    return size


def _positive(name: str, given: PerLayer, layer: int) -> float:
    value = given.get(layer) if isinstance(given, Mapping) else given
    if value is None or not _is_positive(value):
        raise PolicyError(
            f"{name} of layer {layer} must be a positive number of seconds: {value!r}"
        )
    return value


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
