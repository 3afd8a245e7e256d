"""Puts together the profile of a step from what was seen while it ran."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final, NamedTuple, final

from ebbtide.planning.hardware import Hardware
from ebbtide.planning.profiling.layer_calls import LayerCall
from ebbtide.planning.profiling.recomputed_passes import RecomputedPasses
from ebbtide.planning.profiling.saved_storages import SavedStorages
from ebbtide.planning.profiling.step_positions import OUTSIDE, Position, StepPositions
from ebbtide.planning.profiling.storage_ledger import Part, StorageLedger
from ebbtide.planning.step_profile import LayerProfile, SavedStorage, StepProfile, StorageId


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
class StepAssembly:
    """Puts together the profile of one step.

    Args:
        found: what was seen.
        hardware: the machine.
        optimizer_states: number of tensors of the weights' size that the optimizer keeps.
    """

    def __init__(self, found: StepFindings, hardware: Hardware, optimizer_states: int) -> None:
        self._found = found
        self._hardware = hardware
        self._optimizer_states = optimizer_states
        self._sizes = found.ledger.sizes
        self._positions = StepPositions(
            len(found.calls), found.saved.saves.keys(), between=found.between
        )
        self._parts, self._indices = self._positions.parts, self._positions.indices
        self._count = len(self._parts)
        self._seconds = self._positions.gather(found.seconds, operator.add)
        without = {gradient for _, gradient in found.gradients}
        self._peaks = self._positions.gather(found.ledger.peaks(without), max)
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

    @property
    def recomputable(self) -> Set[int]:
        """Indices of the calls that backward may run again."""
        return set(range(len(self._found.calls))) - self._found.changing

    def recomputed_passes(
        self, peaks: Mapping[Part, int], seconds: Mapping[Part, float]
    ) -> RecomputedPasses:
        """Return what a step needed that recomputed its layers.

        Args:
            peaks: the most bytes that were alive in each part of it, but for gradients.
            seconds: seconds of each part of it.
        """
        peaks_at = self._positions.gather(peaks, max)
        seconds_at = self._positions.gather(seconds, operator.add)
        # Gradients and optimizer state are there throughout.
        added_bytes = sum(each.gradient_bytes + each.optimizer_bytes for each in self._parameters)
        backwards = [Position(True, index) for index in range(self._count)]
        again_s = [seconds_at.get(each, 0.0) - self._seconds.get(each, 0.0) for each in backwards]
        return RecomputedPasses(
            tuple(peaks_at.get(each, 0) + added_bytes for each in self._positions.passes()),
            tuple(max(0.0, each_s) for each_s in again_s),
        )

    def profile(self) -> StepProfile:
        """Return the profile of the step as it ran."""
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
