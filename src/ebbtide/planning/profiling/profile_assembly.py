"""Puts together the profile of a step from what was seen while it ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final, NamedTuple, final

from ebbtide.planning.hardware import Hardware
from ebbtide.planning.profiling.layer_calls import LayerCall
from ebbtide.planning.profiling.saved_storages import SavedStorages
from ebbtide.planning.profiling.storage_ledger import Part, StorageLedger
from ebbtide.planning.step_profile import LayerProfile, SavedStorage, StepProfile, StorageId

OUTSIDE: Final = -1
"""Index of the layer of what comes before the first and after the last pass."""


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
        changing: indices of the calls that changed an input in place.
        seconds: seconds of each part of the step.
        owners: index of the layer that each parameter belongs to, by the key of its storage.
        parameters: keys of the storages of parameters, not of buffers.
        gradients: keys of the storages of a parameter and of its gradient.
        inputs: keys of the storages of parameters, buffers and the batch: all that there was before
            the step.
        between: whether work between layers that saves something is a layer of its own.
    """

    ledger: StorageLedger
    saved: SavedStorages
    calls: Sequence[LayerCall]
    changing: Set[int]
    seconds: Mapping[Part, float]
    owners: Mapping[int, int]
    parameters: Set[int]
    gradients: Sequence[tuple[int, int]]
    inputs: Set[int]
    between: bool


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
        self._parts = list(self._layer_parts())
        self._indices = {part: index for index, part in enumerate(self._parts)}
        self._count = len(self._parts)
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
        self._names = self._name_storages()
        of_a_step = found.inputs | found.saved.firsts.keys()
        self._of_no_layer = of_a_step - self._names.keys()
        # Resident throughout, but for gradients and optimizer state.
        self._always_bytes = sum(self._sizes[key] for key in self._of_no_layer & found.inputs)
        self._saved_bytes = [0] * self._count
        for key, name in self._names.items():
            self._saved_bytes[name.layer] += self._sizes[key]

    def _name_storages(self) -> dict[int, StorageId]:
        """Return the name of each storage's first save; what no layer saves first has none."""
        saved = self._found.saved
        names: dict[int, StorageId] = {}
        for index, part in enumerate(self._parts):
            numbered = (
                key for key in saved.saves.get(part, ()) if saved.firsts[key] in self._indices
            )
            for number, key in enumerate(numbered):
                names.setdefault(key, StorageId(index, number))
        return names

    def _layer_parts(self) -> Iterator[Part]:
        """Yield the parts of the forward that are layers of the profile, in order."""
        saves = self._found.saved.saves
        for index in range(-1, len(self._found.calls)):
            inside = Part(backward=False, layer=index, inside=True)
            if index >= 0:
                yield inside
            after = inside._replace(inside=False)
            if self._found.between and after in saves:
                yield after

    def _position(self, part: Part) -> Position:
        index = self._indices.get(part._replace(backward=False))
        if index is None:
            if part.layer == len(self._found.calls) - 1:  # the loss
                return Position(False, self._count)
            around = Part(backward=False, layer=part.layer, inside=True)
            index = self._indices.get(around, OUTSIDE)
        return Position(part.backward, index)

    def _add_parameter(self, key: int) -> None:
        call = self._found.owners.get(key, OUTSIDE)
        part = Part(backward=False, layer=call, inside=True)
        owner = self._indices.get(part, OUTSIDE)
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
        part = self._parts[index]
        name = self._found.calls[part.layer].name if part.layer >= 0 else ""
        if not part.inside:
            name = f"after {name}" if name else "before layers"
        return LayerProfile(
            name=name,
            between=not part.inside,
            may_recompute=part.inside and part.layer not in self._found.changing,
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
        storages: list[SavedStorage] = []
        for key in self._found.saved.saves.get(self._parts[index], ()):
            name = self._names.get(key)
            if name is None:
                continue
            again = name.layer != index
            sources, rebuild_s = ((), None) if again else self._recipe(key)
            storages.append(
                SavedStorage(
                    number=len(storages),
                    size_bytes=self._sizes[key],
                    same_as=name if again else None,
                    may_leave=again or key not in self._found.inputs,  # the loop holds the batch
                    sources=sources,
                    rebuild_s=rebuild_s,
                )
            )
        return tuple(storages)

    def _recipe(self, key: int) -> tuple[tuple[StorageId, ...], float | None]:
        """Return what a storage can be rebuilt from, and how long that takes."""
        recipe = self._found.saved.recipes.found.get(key)
        if recipe is None:
            return (), None
        # A source that is no layer's stays in memory.
        sources = tuple(self._names[each] for each in recipe.sources if each in self._names)
        took_s = recipe.traffic_bytes / self._hardware.device_memory_bytes_per_s
        return sources, took_s if sources else None

    def _input(self, index: int) -> tuple[int, StorageId | None]:
        """Return the size of a layer's input, and the storage that is the same memory."""
        part = self._parts[index]
        if not part.inside:
            return 0, None
        keys = [key for key in self._found.calls[part.layer].inputs if key not in self._of_no_layer]
        input_bytes = sum(self._sizes[key] for key in keys)
        first = self._names.get(keys[0]) if len(keys) == 1 else None
        if first is not None and first.layer <= index:
            return input_bytes, first
        return input_bytes, None
