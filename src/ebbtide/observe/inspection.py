"""Reports each storage's fate in the last step, and what an offload holds or copies now."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from ebbtide.devices.device import Layer, Origin
from ebbtide.runtime.activations import Activations
from ebbtide.runtime.engine import Engine
from ebbtide.runtime.handles import StorageRecord
from ebbtide.runtime.stats import RecomputedLayer
from ebbtide.units import format_size, text_block
from ebbtide.weights.hooks import AbstractWeights

_WIDTH = 80
_LARGEST = 3  # storages that are described


@final
@dataclass(frozen=True)
class InspectedStorage:
    """One storage, or one view gathered from it, that autograd saved in the last step.

    Attributes:
        layer: index, in forward order, of the layer that saved the storage first; None outside
            layers.
        name: qualified name of that layer's module.
        microbatch: number of the forward within the step, from 0.
        number: number of the storage among those that the layer's call saved, from 0. Layer and
            number together identify the storage in every step of the same model.
        size_bytes: size of the storage or view.
        moved_bytes: number of bytes in each copy of it; 0 if the storage is not copied.
        decision: ``"keep"``, ``"offload"`` or ``"rebuild"``.
        tier: tier that the bytes were offloaded to, ``"host"`` or ``"disk"``; ``"device"`` if they
            stayed, ``"-"`` if they were rebuilt.
        rebuilt_from: layer and number of the storages that it was rebuilt from.
        saves: number of saved tensors that shared the storage.
        offloaded_s: seconds from the start of the step until its copy to the store was complete.
            None if there was no copy, or the step was not traced (``trace=True``).
        reloaded_s: the same for its last copy back to the device.
        shape: shape of the tensor that was saved first.
        dtype: its type, such as ``"float32"``.
        saved_by: the operation that saved it first, such as ``"Gelu"``; empty if no backward has
            read it.
        numbers: for each place that saved it, the first one first, the place and the number of the
            storage there. A place is the index of a layer, or ``~n`` for the code outside layers
            that runs once n layers have been called.
    """

    layer: int | None
    name: str
    microbatch: int
    number: int
    size_bytes: int
    moved_bytes: int
    decision: str
    tier: str
    rebuilt_from: tuple[tuple[int | None, int], ...]
    saves: int
    offloaded_s: float | None
    reloaded_s: float | None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    saved_by: str = ""
    numbers: tuple[tuple[int, int], ...] = ()

    @property
    def shared_by(self) -> tuple[int | None, ...]:
        """Indices of the other layers that saved it; None for each part outside layers."""
        return tuple(place if place >= 0 else None for place, _ in self.numbers[1:])

    def describe(self) -> str:
        """Return size, type and shape, and which operation of which layer saved it."""
        place = "code outside layers" if self.layer is None else f"layer {self.layer} {self.name}"
        what = f"{format_size(self.size_bytes)} {self.dtype} {list(self.shape)}"
        return f"{what}, saved by {self.saved_by or 'an operation'} in {place.rstrip()}"


@final
@dataclass(frozen=True)
class InspectedParameter:
    """One offloaded parameter.

    Attributes:
        name: qualified name in the model.
        group: number of its weight group, in model order. A group is copied as one; it holds the
            parameters of one layer.
        size_bytes: size of its values.
        tier: where its values are stored, ``"host"`` or ``"disk"``.
        address: address of the stored values, as `torch.Tensor.data_ptr` gives it.
        on_device: whether the group's device buffer exists now, filled or with its copy in flight.
    """

    name: str
    group: int
    size_bytes: int
    tier: str
    address: int
    on_device: bool


@final
@dataclass(frozen=True)
class InFlight:
    """What an offload holds or copies at this moment.

    Attributes:
        saved_tensors: number of saved tensors that autograd graphs hold. Those too small to offload
            count as one per forward.
        forwards: number of forwards that run now, and of backwards that reload weights now.
        records: number of storages that graphs hold.
        offload_bytes: device bytes whose copy to the store is in flight, or that wait for a
            schedule to release them.
        reload_bytes: device bytes that were reloaded or rebuilt and are still held for backward.
        abandoned_buffers: number of device buffers that an unfinished copy writes to although
            nothing will read them.
        kept_bytes: bytes of saved tensors that stay on the device.
        stored_bytes: bytes of activations in the tiers below the device.
        weight_bytes: bytes of offloaded weights that are on the device now.
        peak_weight_groups: most groups of offloaded weights that were ever on the device at once.
        host_capacity_bytes: host memory taken, whether in use now or kept for the next step.
    """

    saved_tensors: int
    forwards: int
    records: int
    offload_bytes: int
    reload_bytes: int
    abandoned_buffers: int
    kept_bytes: int
    stored_bytes: int
    weight_bytes: int
    peak_weight_groups: int
    host_capacity_bytes: int

    @property
    def is_idle(self) -> bool:
        """Whether no step holds, stores or copies anything. Weights may still be on the device."""
        numbers = self.saved_tensors + self.forwards + self.records + self.abandoned_buffers
        sizes = self.offload_bytes + self.reload_bytes + self.kept_bytes + self.stored_bytes
        return numbers + sizes == 0


@final
@dataclass(frozen=True)
class Inspection:
    """The report that `OffloadHandle.inspect` returns; it prints as a table.

    Attributes:
        storages: storages of the last finished step, in the order in which they were first saved.
        parameters: the offloaded parameters, in model order.
        in_flight: what is held or copied now.
        recomputed: the recomputed layers of the last finished step, in the order of their calls.
    """

    storages: tuple[InspectedStorage, ...]
    parameters: tuple[InspectedParameter, ...]
    in_flight: InFlight
    recomputed: tuple[RecomputedLayer, ...] = ()

    def _repr_html_(self) -> str:
        return text_block(str(self))

    def __str__(self) -> str:
        lines = [*_storage_lines(self.storages), ""]
        if self.recomputed:
            lines += [f"{'recomputed layer':<24} {'':>3} {'size':>10}  {'':<15} {'saves':>5}"]
            lines += [*map(str, self.recomputed), ""]
        if self.parameters:
            lines += [*_parameter_lines(self.parameters), ""]
        lines += _in_flight_lines(self.in_flight)
        return "\n".join(line.rstrip() for line in lines)


def inspect(activations: Activations, weights: AbstractWeights | None = None) -> Inspection:
    """Report what is offloaded from a model.

    Args:
        activations: the model's activations.
        weights: the model's offloaded weights, if any.

    Returns:
        The report on the last finished step. If steps are traced, its times are the device's, and
        reading them waits until the device has finished the step.
    """
    transfers = activations.transfers
    transfers.settle()
    origin = transfers.account.last_origin
    storages = tuple(_inspect_storage(record, origin) for record in activations.saved())
    in_flight = _look_at_flight(activations, weights)
    parameters, recomputed = _inspect_parameters(weights), tuple(activations.recomputed())
    return Inspection(storages, parameters, in_flight, recomputed)


def inspect_engine(engine: Engine) -> Inspection:
    """Report each storage's fate in the last step of an engine, and what is in flight now."""
    engine.settle()
    weights = engine.weights if isinstance(engine.weights, AbstractWeights) else None
    return inspect(engine.activations, weights)


def _inspect_storage(record: StorageRecord, origin: Origin | None) -> InspectedStorage:
    layer = record.layer
    numbers = list((record.numbers or {}).items())
    if layer is not None:  # elsewhere, its own number is among them
        numbers.insert(0, (layer.index, record.number))
    times = {what: event.since(origin) for what, event in record.copies if origin is not None}
    return InspectedStorage(
        layer=None if layer is None else layer.index,
        name="" if layer is None else layer.name,
        microbatch=record.microbatch,
        number=record.number,
        size_bytes=record.size_bytes,
        moved_bytes=record.size_bytes if record.tier else 0,
        decision=record.decision.value,
        tier=record.tier or ("device" if record.decision.value == "keep" else "-"),
        rebuilt_from=tuple((_index(each.layer), each.number) for each in record.rebuilt_from),
        saves=record.saves,
        offloaded_s=times.get("offload"),
        reloaded_s=times.get("reload"),
        shape=tuple(record.shape),
        dtype=str(record.dtype).removeprefix("torch."),
        saved_by=re.sub(r"(Backward)?\d*$", "", record.saved_by),
        numbers=tuple(numbers),
    )


def _index(layer: Layer | None) -> int | None:
    return None if layer is None else layer.index


def _inspect_parameters(weights: AbstractWeights | None) -> tuple[InspectedParameter, ...]:
    if weights is None:
        return ()
    return tuple(
        InspectedParameter(
            name=member.name,
            group=group.number,
            size_bytes=member.size_bytes,
            tier=group.resting.tier,
            address=member.host.data_ptr(),
            on_device=group.buffer is not None,
        )
        for group, member in weights.members()
    )


def _look_at_flight(activations: Activations, weights: AbstractWeights | None) -> InFlight:
    transfers = activations.transfers
    offloads, reloads, account = transfers.offloads, transfers.reloads, transfers.account
    return InFlight(
        saved_tensors=transfers.live,
        forwards=transfers.running,
        records=len(activations.alive()),
        offload_bytes=offloads.queued_bytes + offloads.retained_bytes,
        reload_bytes=reloads.buffered_bytes,
        abandoned_buffers=len(reloads.abandoned),
        kept_bytes=account.kept_bytes,
        stored_bytes=sum(account.stored_bytes.values()),
        weight_bytes=account.weight_bytes,
        peak_weight_groups=0 if weights is None else weights.peak_groups,
        host_capacity_bytes=transfers.store.host_capacity_bytes,
    )


def _storage_lines(storages: Sequence[InspectedStorage]) -> Iterable[str]:
    if not storages:
        yield "no step has finished, or autograd saved nothing large in the last one"
        return
    yield f"{'layer':<24} {'no':>3} {'size':>10}  {'decision':<8} {'tier':<6} {'saves':>5}  also by"
    for each in storages:
        place = "outside layers" if each.layer is None else f"{each.layer} {each.name}".rstrip()
        if each.microbatch:
            place = f"{place}.m{each.microbatch}"
        others = dict.fromkeys("-" if other is None else str(other) for other in each.shared_by)
        also = ", ".join(others)
        yield _shorten(
            f"{place[:24]:<24} {each.number:>3} {format_size(each.size_bytes):>10}  "
            f"{each.decision:<8} {each.tier:<6} {each.saves:>5}  {also}"
        )
    yield ""
    largest = sorted(storages, key=lambda each: -each.size_bytes)[:_LARGEST]
    yield from (_shorten(f"largest: {each.describe()}") for each in largest)


def _shorten(line: str) -> str:
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..."


def _parameter_lines(parameters: Sequence[InspectedParameter]) -> Iterable[str]:
    yield f"{'parameter at rest':<48} {'group':>5} {'size':>10}  {'tier':<5} now"
    for each in parameters:
        now = "device" if each.on_device else each.tier
        size = format_size(each.size_bytes)
        yield f"{each.name[-48:]:<48} {each.group:>5} {size:>10}  {each.tier:<5} {now}"


def _in_flight_lines(now: InFlight) -> Iterable[str]:
    if now.is_idle:
        yield "now: nothing is held or moved for a step"
    else:
        yield (
            f"now: {now.saved_tensors} saved tensors, {format_size(now.kept_bytes)} kept, "
            f"{format_size(now.offload_bytes)} on their way down,"
        )
        yield (
            f"     {format_size(now.reload_bytes)} brought back, "
            f"{format_size(now.stored_bytes)} in the tiers below"
        )
    yield f"     {format_size(now.host_capacity_bytes)} of host memory taken"
