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
    rehearsal = _Rehearsal(schedule.check(), layer_bytes, bandwidth_bytes_per_s)
    for each in schedule.order:
        layer = each.unit.layer
        if each.is_forward:
            rehearsal.forward(each.unit, _positive("forward_s", forward_s, layer))
            continue
        if backward_s is None:
            duration_s = 2 * _positive("forward_s", forward_s, layer)
        else:
            duration_s = _positive("backward_s", backward_s, layer)
        whole = each.direction is Direction.BACKWARD
        rehearsal.backward(each, duration_s if whole else duration_s / 2)
    return rehearsal.trace()


class _Rehearsal:
    """Runs the passes of a schedule on a simulated device, with sizes scaled down to a few KiB."""

    def __init__(
        self,
        schedule: Schedule,
        layer_bytes: int | str | Mapping[int, int | str],
        bandwidth_bytes_per_s: float,
    ) -> None:
        layers = {each.unit.layer for each in schedule.order}
        sizes = {layer: _size(layer_bytes, layer) for layer in layers}
        self._scale = max(sizes.values()) / _LARGEST_BYTES
        self._sizes = {layer: max(1, round(size / self._scale)) for layer, size in sizes.items()}
        if not _is_positive(bandwidth_bytes_per_s):
            raise PolicyError(
                f"bandwidth_bytes_per_s must be a positive number: {bandwidth_bytes_per_s!r}"
            )
        self._real_bytes = sizes
        bandwidth = bandwidth_bytes_per_s / self._scale
        self._device = SimulatedDevice(0, 0.0, bandwidth, timely=True)
        store = PinnedStore(self._device, slab_bytes=64 * _LARGEST_BYTES)
        self._transfers = Transfers(self._device, store, bound_bytes=0, traced=True)
        self._recording = Recording(self._device)
        self._transfers.account.listener = self._recording
        self._activations = Activations(self._transfers)
        self._executor = ScheduleExecutor(ScheduleMode(schedule), self._activations)
        policy = ActivationPolicy(min_bytes=1, rebuild=False)
        placement = Placement(policy, layers_only=True)
        self._hooks = SavedTensorHooks(self._activations, placement, ParameterIndex([]))
        last = {each.unit: each for each in schedule.order}
        self._last = set(last.values())
        self._saved: dict[Unit, Saved] = {}

    def forward(self, unit: Unit, duration_s: float) -> None:
        """Run a layer's forward, which computes and then saves one tensor."""
        records, log = self._executor.begin_unit(unit)
        self._hooks.begin()
        layer = Layer(unit.layer, "")
        scopes = self._activations.scopes
        scopes.begin_layer(layer, offloads=records.leaves, unit=records, forward=log)
        self._device.compute(duration_s)
        saved = self._hooks.pack(
            torch.zeros(self._sizes[unit.layer], dtype=torch.uint8, device="cpu")
        )
        scopes.end_layer()
        self._hooks.end()
        self._saved[unit] = saved

    def backward(self, each: Pass, duration_s: float) -> None:
        """Run a layer's backward, which reads the saved tensor and then computes."""
        saved = self._saved[each.unit]
        self._executor.begin_backward_of(each.unit, each.direction)
        restore(saved)
        self._device.compute(duration_s)
        if each in self._last:
            del self._saved[each.unit], saved

    def trace(self) -> Trace:
        self._saved.clear()
        self._transfers.poll()
        events = self._recording.trace.events
        self._transfers.close()
        origin_s = min((event.begin_s for event in events), default=0.0)
        return Trace(
            dataclasses.replace(
                event,
                begin_s=event.begin_s - origin_s,
                end_s=event.end_s - origin_s,
                size_bytes=self._real_bytes[event.layer or 0] if event.size_bytes else 0,
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
