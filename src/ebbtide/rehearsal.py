"""A schedule run without a model: what its step would look like, in virtual time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

import torch

from ebbtide.devices.simulated import SimulatedDevice
from ebbtide.errors import PolicyError
from ebbtide.hooks.activations import ActivationHooks
from ebbtide.hooks.parameters import ParameterIndex
from ebbtide.runtime.ranges import Layer
from ebbtide.runtime.saved import Saved, restore
from ebbtide.runtime.session import Session
from ebbtide.runtime.units import Following
from ebbtide.schedule import Direction, Pass, Schedule, Unit
from ebbtide.stores.pinned import PinnedStore
from ebbtide.tracing.trace import Trace
from ebbtide.units import parse_size_bytes

_LARGEST_BYTES: Final = 4096  # what the largest layer takes in the rehearsal's own memory

PerLayer = float | Mapping[int, float]


def rehearse(
    schedule: Schedule,
    *,
    layer_bytes: int | str | Mapping[int, int | str] = "64MiB",
    forward_s: PerLayer = 1e-3,
    backward_s: PerLayer | None = None,
    bandwidth_bytes_per_s: float = 25e9,
) -> Trace:
    """Run a schedule on a device that has no hardware, with kernels that take a given time.

    The engine that trains does it: what waits here would wait there, for the same reason. Print
    ``trace.timeline()`` or save ``trace.plot("step.png")`` to see it.

    Args:
        schedule: what moves when.
        layer_bytes: that a layer saves, for all layers or for each.
        forward_s: seconds that a layer's forward takes, for all layers or for each.
        backward_s: the same for its backward; None: twice as long. A backward that is split takes
            half of it for each part.
        bandwidth_bytes_per_s: of the link, each way.

    Returns:
        The trace of one step, bytes and seconds as given.

    Raises:
        ScheduleError: the schedule cannot be run.
        PolicyError: a size, a time or the bandwidth is not positive, or a layer has none.

    Not modelled: latency, a link that is slower when both directions are busy, kernels that are
    slower while copies use the memory, a host that is too slow to queue work.
    """
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
    """A session on a simulated device, with sizes scaled down to a few KiB."""

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
        if not bandwidth_bytes_per_s > 0:
            raise PolicyError(f"bandwidth_bytes_per_s must be positive: {bandwidth_bytes_per_s}")
        self._real_bytes = sizes
        bandwidth = bandwidth_bytes_per_s / self._scale
        self._device = SimulatedDevice(0, 0.0, bandwidth, timely=True)
        store = PinnedStore(self._device, slab_bytes=64 * _LARGEST_BYTES)
        self._session = Session(
            self._device, store, max_inflight_bytes=0, traced=True, following=Following(schedule)
        )
        self._hooks = ActivationHooks(self._session, ParameterIndex([]), min_bytes=1)
        last = {each.unit: each for each in schedule.order}
        self._last = set(last.values())
        self._saved: dict[Unit, Saved] = {}

    def forward(self, unit: Unit, duration_s: float) -> None:
        """A layer computes, and saves one tensor at the end of it."""
        session, hooks = self._session, self._hooks
        layer = Layer(unit.layer, "")
        assert session.conductor is not None
        records = session.conductor.begin_unit(unit)
        hooks.begin()
        session.switch_unit(records)
        session.layer, hooks.offloading = layer, records.leaves
        session.begin_layer(layer)
        self._device.compute(duration_s)
        saved = hooks.pack(torch.zeros(self._sizes[unit.layer], dtype=torch.uint8))
        session.end_layer()
        session.layer = None
        session.switch_unit(None)
        hooks.end()
        self._saved[unit] = saved

    def backward(self, each: Pass, duration_s: float) -> None:
        """A layer's backward reads what it saved, and computes."""
        saved = self._saved[each.unit]
        conductor = self._session.conductor
        assert conductor is not None
        conductor.begin_backward_of(each.unit, each.direction)
        restore(saved)
        self._device.compute(duration_s)
        if each in self._last:
            del self._saved[each.unit], saved

    def trace(self) -> Trace:
        self._saved.clear()
        self._session.poll()
        events = self._session.trace.events
        self._session.close()
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
    if value is None or not value > 0:
        raise PolicyError(f"{name} of layer {layer} must be a positive number of seconds: {value}")
    return value
