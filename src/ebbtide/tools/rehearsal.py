"""Run a schedule without a model or hardware, in virtual time, to see what its step looks like."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import torch

from ebbtide.devices.simulated import SimulatedDevice
from ebbtide.errors import PolicyError
from ebbtide.observe.trace import Trace
from ebbtide.policy import ActivationPolicy, refuse
from ebbtide.runtime.engine import devices_made_by
from ebbtide.schedule import Direction, Schedule, Unit
from ebbtide.session import OffloadSession
from ebbtide.units import parse_size_bytes

_LARGEST_BYTES: Final = 4096  # size that the largest layer is scaled down to

PerLayer = float | Mapping[int, float]


@torch.inference_mode(False)  # autograd is to record, whatever is around
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
    _positive("bandwidth_bytes_per_s", bandwidth_bytes_per_s, min(layers))
    scale = max(real_bytes.values()) / _LARGEST_BYTES
    device = SimulatedDevice(0, 0.0, bandwidth_bytes_per_s / scale, timely=True)
    with devices_made_by(lambda _: device):
        session = OffloadSession(
            schedule=schedule,
            device="cpu",
            activations=ActivationPolicy(min_bytes=1, rebuild=False),
            trace=True,
        )
    factor = torch.ones((), requires_grad=True, device="cpu")
    graphs: dict[Unit, Any] = {}
    for each in schedule.order:
        layer, microbatch = each.unit.layer, each.unit.microbatch
        duration_s = _positive("forward_s", forward_s, layer)
        if each.is_forward:
            with session.layer(layer, microbatch=microbatch):
                device.compute(duration_s)
                size = max(1, round(real_bytes[layer] / scale / factor.itemsize))
                graphs[each.unit] = (factor * torch.zeros(size, device="cpu")).grad_fn
            continue
        duration_s *= 2
        if backward_s is not None:
            duration_s = _positive("backward_s", backward_s, layer)
        whole = each.direction is Direction.BACKWARD
        session.begin_backward(layer, microbatch=microbatch, part=each.direction.value)
        _ = graphs[each.unit]._saved_other  # is needed now
        device.compute(duration_s if whole else duration_s / 2)
    graphs.clear()
    events = session.trace.events
    session.close()
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
    return int(_positive("layer_bytes", parse_size_bytes(given, name="layer_bytes"), layer))


def _positive(name: str, given: PerLayer, layer: int) -> float:
    value = given.get(layer) if isinstance(given, Mapping) else given
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise PolicyError(f"{name} of layer {layer} must be a positive number: {value!r}")
    return value
