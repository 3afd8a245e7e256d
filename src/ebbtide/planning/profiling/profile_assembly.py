"""Puts together the profile of a step from what was seen while it ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final, NamedTuple, final

from ebbtide.planning.hardware import Hardware
from ebbtide.planning.profiling.layer_calls import LayerCall
from ebbtide.planning.profiling.saved_storages import OUTSIDE, SavedStorages
from ebbtide.planning.profiling.storage_ledger import Part, StorageLedger
from ebbtide.planning.step_profile import LayerProfile, SavedStorage, StepProfile, StorageId


class Position(NamedTuple):
    """A position of the step: see [Note: positions] in `planning.step_profile`.

    Attributes:
        backward: whether it comes after the loss.
        layer: index of the layer; `OUTSIDE` for what comes before the first and after the last
            pass, and the number of layers for the loss.
    """

    backward: bool
    layer: int


@final
@dataclass(frozen=True, kw_only=True)
class StepFindings:
    """What was seen while a step ran with fake tensors.

    Attributes:
        ledger: the storages.
        saved: what autograd saved.
        calls: the calls of layers.
        seconds: seconds of each part of the step.
        owners: index of the layer that each parameter belongs to, by the key of its storage.
        parameters: keys of the storages of parameters, not of buffers.
        gradients: keys of the storages of a parameter and of its gradient.
        inputs: keys of the storages of parameters, buffers and the batch: all that there was before
            the step.
    """

    ledger: StorageLedger
    saved: SavedStorages
    calls: Sequence[LayerCall]
    seconds: Mapping[Part, float]
    owners: Mapping[int, int]
    parameters: Set[int]
    gradients: Sequence[tuple[int, int]]
    inputs: Set[int]


def assemble(found: StepFindings, hardware: Hardware, optimizer_states: int) -> StepProfile:
    """Return the profile of a step.

    Args:
        found: what was seen.
        hardware: the machine.
        optimizer_states: number of tensors of the weights' size that the optimizer keeps.
    """
    return _Assembly(found, hardware, optimizer_states).profile()


class _ParameterBytes(NamedTuple):
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def update_bytes(self) -> int:
        """Bytes that an update of the weights reads and writes."""
        if not self.gradient_bytes:
            return 0
        return self.gradient_bytes + 2 * (self.gradient_bytes + self.optimizer_bytes)


_NOTHING: Final = _ParameterBytes(0, 0, 0)


@final
class _Assembly:
    """The profile of one step, as it is put together."""

    def __init__(self, found: StepFindings, hardware: Hardware, optimizer_states: int) -> None:
        self._found = found
        self._hardware = hardware
        self._optimizer_states = optimizer_states
        self._sizes = found.ledger.sizes
        self._count = len(found.calls)
        self._seconds: dict[Position, float] = {}
        for part, took_s in found.seconds.items():
            position = self._position(part)
            self._seconds[position] = self._seconds.get(position, 0.0) + took_s
        self._peaks: dict[Position, int] = {}
        for part, peak_bytes in found.ledger.peaks(
            {gradient for _, gradient in found.gradients}
        ).items():
            position = self._position(part)
            self._peaks[position] = max(self._peaks.get(position, 0), peak_bytes)
        self._parameters = [_NOTHING] * (self._count + 1)  # the last one: outside layers
        for key in found.parameters:
            self._add_parameter(key)
        firsts = found.saved.firsts
        outside = {key for key, first in firsts.items() if first.layer == OUTSIDE}
        self._fixed = (found.inputs - firsts.keys()) | outside
        # Resident throughout, but for gradients and optimizer state.
        self._always_bytes = sum(self._sizes[key] for key in self._fixed)
        self._saved_bytes = [0] * self._count
        for key in firsts.keys() - outside:
            self._saved_bytes[firsts[key].layer] += self._sizes[key]

    def _position(self, part: Part) -> Position:
        if part.layer == self._count - 1 and not part.inside:
            return Position(False, self._count)
        if part.layer < 0:
            return Position(part.backward, OUTSIDE)
        return Position(part.backward, part.layer)

    def _add_parameter(self, key: int) -> None:
        owner = self._found.owners.get(key, OUTSIDE)
        gradients = (gradient for of, gradient in self._found.gradients if of == key)
        gradient_bytes = sum(self._sizes[gradient] for gradient in gradients)
        before = self._parameters[owner]
        self._parameters[owner] = _ParameterBytes(
            before.weight_bytes + self._sizes[key],
            before.gradient_bytes + gradient_bytes,
            before.optimizer_bytes + self._optimizer_states * gradient_bytes,
        )

    def profile(self) -> StepProfile:
        """Return the whole profile."""
        outer = self._parameters[OUTSIDE]
        inner_bytes = sum(each.weight_bytes for each in self._parameters[:-1])
        update_bytes = sum(each.update_bytes for each in self._parameters)
        all_saved_bytes = sum(self._saved_bytes)
        after_s = self._seconds.get(Position(True, OUTSIDE), 0.0)
        return StepProfile(
            layers=tuple(self._layer(index) for index in range(self._count)),
            fixed_bytes=self._always_bytes
            - inner_bytes
            + outer.gradient_bytes
            + outer.optimizer_bytes,
            before_s=self._seconds.get(Position(False, OUTSIDE), 0.0),
            loss_s=self._seconds.get(Position(False, self._count), 0.0),
            after_s=after_s + update_bytes / self._hardware.device_memory_bytes_per_s,
            before_working_bytes=self._working_bytes(Position(False, OUTSIDE), 0),
            loss_working_bytes=self._working_bytes(Position(False, self._count), all_saved_bytes),
            after_working_bytes=self._working_bytes(Position(True, OUTSIDE), 0),
        )

    def _working_bytes(self, position: Position, resident_bytes: int) -> int:
        """Return the peak of a position above what is resident.

        Args:
            position: the position.
            resident_bytes: what is resident beside what always is.
        """
        return max(0, self._peaks.get(position, 0) - self._always_bytes - resident_bytes)

    def _layer(self, index: int) -> LayerProfile:
        storages = self._storages(index)
        saved_bytes = sum(self._saved_bytes[: index + 1])
        input_bytes, input_same_as = self._input(index)
        missing_bytes = 0 if input_same_as is not None else input_bytes
        forward, backward = Position(False, index), Position(True, index)
        parameters = self._parameters[index]
        return LayerProfile(
            name=self._found.calls[index].name,
            forward_s=self._seconds.get(forward, 0.0),
            backward_s=self._seconds.get(backward, 0.0),
            forward_working_bytes=self._working_bytes(forward, saved_bytes + missing_bytes),
            backward_working_bytes=self._working_bytes(backward, saved_bytes),
            input_bytes=input_bytes,
            input_same_as=input_same_as,
            storages=storages,
            weight_bytes=parameters.weight_bytes,
            gradient_bytes=parameters.gradient_bytes,
            optimizer_bytes=parameters.optimizer_bytes,
            host_update_s=parameters.update_bytes / self._host_bytes_per_s,
        )

    @property
    def _host_bytes_per_s(self) -> float:
        """Bandwidth of the host's memory; an accelerator's link is taken to be no faster."""
        hardware = self._hardware
        if hardware.computes_on_host:
            return hardware.device_memory_bytes_per_s
        return hardware.d2h_bytes_per_s

    def _storages(self, index: int) -> tuple[SavedStorage, ...]:
        firsts = self._found.saved.firsts
        storages = [
            SavedStorage(
                number=first.number,
                size_bytes=self._sizes[key],
                may_leave=key not in self._found.inputs,  # the training loop holds the batch
            )
            for key, first in firsts.items()
            if first.layer == index
        ]
        for key in self._found.saved.again.get(index, ()):
            if firsts[key].layer != OUTSIDE and firsts[key].layer < index:
                storages.append(
                    SavedStorage(
                        number=len(storages),
                        size_bytes=self._sizes[key],
                        same_as=StorageId(*firsts[key]),
                    )
                )
        return tuple(storages)

    def _input(self, index: int) -> tuple[int, StorageId | None]:
        """Return the size of a layer's input, and the storage that is the same memory."""
        firsts = self._found.saved.firsts
        keys = [key for key in self._found.calls[index].inputs if key not in self._fixed]
        input_bytes = sum(self._sizes[key] for key in keys)
        if len(keys) == 1 and keys[0] in firsts and firsts[keys[0]].layer <= index:
            return input_bytes, StorageId(*firsts[keys[0]])
        return input_bytes, None
