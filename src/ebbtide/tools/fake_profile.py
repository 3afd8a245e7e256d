"""Profiles a training step with fake tensors: no memory, no accelerator, no arithmetic.

What can be rebuilt is what `ebbtide.runtime.rebuild.find_recipe` finds in training, too. Whether a
recipe gives the same bits is known only once it has run; where it does not, the engine keeps the
storage or offloads it.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ebbtide.errors import PolicyError
from ebbtide.planning.contest import rule_plans
from ebbtide.planning.hardware import Hardware
from ebbtide.planning.prediction import StepTiming
from ebbtide.planning.profile import LayerProfile, SavedStorage, StepProfile, StorageId
from ebbtide.policy import DEFAULT_MIN_BYTES
from ebbtide.runtime.handles import Saved, pass_through
from ebbtide.runtime.parameter_index import ParameterIndex
from ebbtide.runtime.rebuild import find_recipe
from ebbtide.runtime.record import MOST_STEPS
from ebbtide.tools.fake_step import (
    Batch,
    FakeStep,
    LayerCalls,
    Loss,
    Part,
)
from ebbtide.weights.model_weights import WeightBytes

# ---- Notes which storages autograd saves in which part of a forward ----


@final
class SavedStorages:
    """Notes the storages that autograd saves in a forward, through its pack hook.

    Args:
        step: the step; storages of its parameters and buffers, and what is on another device, do
            not count.
        min_bytes: smaller storages do not count.

    Attributes:
        firsts: the part of the forward that saved each storage first, by key.
        saves: for each part of the forward, the keys of the storages that it saved, in order.
        recipes: how storages can be rebuilt, by their keys: the keys of the saved storages that one
            is computed from, and the bytes that this reads and writes. Parameters and small
            tensors, which are in memory in any case, are not among those.
        min_bytes: as given, and at least 1.
    """

    def __init__(self, step: FakeStep, min_bytes: int) -> None:
        self.firsts: dict[int, Part] = {}
        self.saves: dict[Part, dict[int, None]] = {}
        self._step, self._ledger = step, step.ledger
        self._parameters = ParameterIndex([step.model])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of addresses, which fake tensors do not have
            self._parameters.refresh()
        self.min_bytes = max(min_bytes, 1)
        self.recipes: dict[int, tuple[tuple[int, ...], int]] = {}
        self._depths: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Saved:
        """Note a tensor that autograd saves. This is the pack hook."""
        if self._counts_as_saved(tensor):
            key = self._ledger.key_of(tensor)
            part = self._ledger.part
            self.saves.setdefault(part, {})[key] = None
            if key not in self.firsts:
                self._find_recipe(tensor, key)
                self.firsts[key] = part
        return pass_through(tensor)

    def _counts_as_saved(self, tensor: Tensor) -> bool:
        if tensor.device != self._step.device or tensor.layout is not torch.strided:
            return False
        whole = tensor if tensor._base is None else tensor._base
        if max(tensor.nbytes, whole.nbytes) < self.min_bytes or not tensor.nbytes:
            return False
        if self._ledger.known_key_of(tensor) in self._step.state:
            return False
        return not self._parameters.owns(tensor, 0)  # a fake tensor has no address

    def _find_recipe(self, tensor: Tensor, key: int) -> None:
        """Find how a storage can be rebuilt, at its first save."""
        found = find_recipe(tensor, tensor.untyped_storage())
        output = tensor if tensor._base is None else tensor._base
        if found is None or not output.is_contiguous():
            return
        recipe, inputs = found
        tensors = [saved[0] for saved in inputs if isinstance(saved, tuple)]
        keys = map(self._ledger.known_key_of, tensors)
        sources = tuple(dict.fromkeys(each for each in keys if each in self.firsts))
        depth = 1 + max((self._depths.get(source, 0) for source in sources), default=0)
        if not sources or depth > MOST_STEPS:
            return
        traffic_bytes = recipe.traffic_bytes([each.nbytes for each in tensors], output.nbytes)
        self.recipes[key] = sources, traffic_bytes
        self._depths[key] = depth


# ---- Layer calls that run again in the backward of a step with fake tensors ----
#
# What is alive then is found by running the step so. A second forward has its own output and the
# gradient of the first one's beside what it saves, and a forward that saves nothing needs less than
# one that does: neither follows from a step in which everything is kept.


def recompute_calls(step: FakeStep, names: Iterable[str], recomputed: Set[int]) -> None:
    """Have calls of layers run again in the backward of a step.

    Args:
        step: the step.
        names: names of the layers.
        recomputed: which calls run again. What is inside one of these runs again with it.
    """
    for name in names:
        module = step.model.get_submodule(name)
        module.forward = functools.partial(_forward, module.forward, step.calls, recomputed)


def _forward(
    forward: Callable[..., Any],
    calls: LayerCalls,
    recomputed: Set[int],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    opened = calls.open
    if not opened or opened[-1] not in recomputed or not recomputed.isdisjoint(opened[:-1]):
        return forward(*args, **kwargs)

    def run(others: dict[str, Any], *given: Any) -> Any:
        return forward(*given, **others)

    # There are no random numbers to bring back.
    return checkpoint(run, kwargs, *args, use_reentrant=False, preserve_rng_state=False)


# ---- Puts together the profile of a step from what was seen while it ran ----

Value = TypeVar("Value", int, float)


@final
class StepAssembly:
    """Puts together the profile of one step.

    Args:
        step: the step, which has run.
        saved: what autograd saved.
        hardware: the machine.
        optimizer_states: number of tensors of the weights' size that the optimizer keeps.
        between: whether work between layers that saves something is a layer of its own.
    """

    def __init__(
        self,
        step: FakeStep,
        saved: SavedStorages,
        hardware: Hardware,
        optimizer_states: int,
        *,
        between: bool,
    ) -> None:
        self._step, self._saved, self._hardware = step, saved, hardware
        self._optimizer_states = optimizer_states
        self._calls, self._sizes = step.calls.calls, step.ledger.sizes
        self._parts = list(self._layer_parts(saved.saves.keys() if between else ()))
        self._indices = {part: index for index, part in enumerate(self._parts)}
        self._count = len(self._parts)
        self._seconds = self._gather(step.seconds, operator.add)
        self._peaks = self._gather(step.peaks(), max)
        # The last one is of what is outside layers.
        self._parameters = [WeightBytes(0, 0, 0)] * (self._count + 1)
        for key in {step.ledger.key_of(each) for each in step.model.parameters()}:
            self._add_parameter(key)
        self._names = self._name_storages()
        self._of_no_layer = (step.inputs | saved.firsts.keys()) - self._names.keys()
        # Resident throughout, but for gradients and optimizer state.
        self._always_bytes = sum(self._sizes[key] for key in self._of_no_layer & step.inputs)
        self._saved_bytes = [0] * self._count
        for key, name in self._names.items():
            self._saved_bytes[name.layer] += self._sizes[key]

    def _layer_parts(self, saving: Container[Part]) -> Iterator[Part]:
        """Yield the parts of the forward that are layers of the profile, in order."""
        for index in range(-1, len(self._calls)):
            inside = Part(backward=False, layer=index, inside=True)
            if index >= 0:
                yield inside
            after = inside._replace(inside=False)
            if after in saving:
                yield after

    def _position(self, part: Part) -> int:
        """Return the position of a part: see [Note: positions] in `planning.step_profile`.

        -1 is what comes before the first pass, and one more than all is what comes after the last.
        """
        index = self._indices.get(part._replace(backward=False))
        if index is None:
            if part.layer == len(self._calls) - 1:  # the loss
                return self._count
            around = Part(backward=False, layer=part.layer, inside=True)
            index = self._indices.get(around, -1)
        return 2 * self._count - index if part.backward else index

    def _gather(
        self, values: Mapping[Part, Value], combine: Callable[[Value, Value], Value]
    ) -> dict[int, Value]:
        """Return one value for each position that has any, from those of its parts."""
        found: dict[int, Value] = {}
        for part, value in values.items():
            position = self._position(part)
            found[position] = combine(found[position], value) if position in found else value
        return found

    def _name_storages(self) -> dict[int, StorageId]:
        """Return the name of each storage's first save; what no layer saves first has none."""
        saved = self._saved
        names: dict[int, StorageId] = {}
        for index, part in enumerate(self._parts):
            numbered = (
                key for key in saved.saves.get(part, ()) if saved.firsts[key] in self._indices
            )
            for number, key in enumerate(numbered):
                names.setdefault(key, StorageId(index, number))
        return names

    def _add_parameter(self, key: int) -> None:
        part = Part(backward=False, layer=self._step.owners.get(key, -1), inside=True)
        owner = self._indices.get(part, -1)
        gradients = (gradient for of, gradient in self._step.gradients if of == key)
        gradient_bytes = sum(self._sizes[gradient] for gradient in gradients)
        before = self._parameters[owner]
        self._parameters[owner] = WeightBytes(
            before.weight_bytes + self._sizes[key],
            before.gradient_bytes + gradient_bytes,
            before.optimizer_bytes + self._optimizer_states * gradient_bytes,
        )

    @property
    def recomputable(self) -> Set[int]:
        """Indices of the calls that backward may run again."""
        return set(range(len(self._calls))) - self._step.calls.changing

    def with_recomputation(self, profile: StepProfile, again: FakeStep) -> StepProfile:
        """Return a profile that predicts what a step needed that recomputed its layers.

        Args:
            profile: the step in which everything was kept.
            again: a step in which all layers that may be recomputed were, and kept their inputs.
        """
        # Gradients and optimizer state are there throughout.
        added_bytes = sum(each.gradient_bytes + each.optimizer_bytes for each in self._parameters)
        peaks = self._gather(again.peaks(), max)
        seconds = self._gather(again.seconds, operator.add)
        plan = dict(rule_plans(profile))["recompute all"]
        predicted = StepTiming(profile, self._hardware).predict(plan).peak_by_position
        more_bytes = [
            peaks.get(position, 0) + added_bytes - expected
            for position, expected in enumerate(predicted)
        ]

        def recomputed(index: int, layer: LayerProfile) -> LayerProfile:
            if not layer.may_recompute:
                return layer
            backward = 2 * self._count - index
            again_s = seconds.get(backward, 0.0) - self._seconds.get(backward, 0.0)
            unsaved_bytes = profile.inside_bytes(index) + layer.forward_working_bytes
            second_bytes = layer.second_working_bytes + more_bytes[backward]
            return dataclasses.replace(
                layer,
                recompute_s=max(0.0, again_s),
                unsaved_forward_bytes=max(0, unsaved_bytes + more_bytes[index]),
                recompute_working_bytes=max(0, second_bytes),
            )

        layers = tuple(recomputed(index, layer) for index, layer in enumerate(profile.layers))
        return dataclasses.replace(profile, layers=layers)

    def profile(self) -> StepProfile:
        """Return the profile of the step as it ran."""
        before, loss, after = -1, self._count, 2 * self._count + 1
        outer = self._parameters[-1]
        inner_bytes = sum(each.weight_bytes for each in self._parameters[:-1])
        update_bytes = sum(map(_update_bytes, self._parameters))
        update_s = update_bytes / self._hardware.device_memory_bytes_per_s
        fixed_bytes = self._always_bytes - inner_bytes
        return StepProfile(
            layers=tuple(self._layer(index) for index in range(self._count)),
            fixed_bytes=fixed_bytes + outer.gradient_bytes + outer.optimizer_bytes,
            before_s=self._seconds.get(before, 0.0),
            loss_s=self._seconds.get(loss, 0.0),
            after_s=self._seconds.get(after, 0.0) + update_s,
            before_working_bytes=self._working_bytes(before, 0),
            loss_working_bytes=self._working_bytes(loss, sum(self._saved_bytes)),
            after_working_bytes=self._working_bytes(after, 0),
        )

    def _working_bytes(self, position: int, resident_bytes: int) -> int:
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
        forward, backward = index, 2 * self._count - index
        parameters, part = self._parameters[index], self._parts[index]
        hardware = self._hardware
        host_bytes_per_s = hardware.d2h_bytes_per_s  # its memory is taken to be no faster
        if hardware.computes_on_host:
            host_bytes_per_s = hardware.device_memory_bytes_per_s
        name = self._calls[part.layer].name if part.layer >= 0 else ""
        if not part.inside:
            name = f"after {name}" if name else "before layers"
        return LayerProfile(
            name=name,
            between=not part.inside,
            may_recompute=part.inside and part.layer in self.recomputable,
            forward_s=self._seconds.get(forward, 0.0),
            backward_s=self._seconds.get(backward, 0.0),
            forward_working_bytes=self._working_bytes(forward, saved_bytes + missing_bytes),
            backward_working_bytes=self._working_bytes(backward, saved_bytes),
            input_bytes=input_bytes,
            input_same_as=input_same_as,
            storages=storages,
            **parameters._asdict(),
            host_update_s=_update_bytes(parameters) / host_bytes_per_s,
        )

    def _storages(self, index: int) -> tuple[SavedStorage, ...]:
        storages: list[SavedStorage] = []
        for key in self._saved.saves.get(self._parts[index], ()):
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
                    may_leave=again or key not in self._step.inputs,  # the loop holds the batch
                    sources=sources,
                    rebuild_s=rebuild_s,
                )
            )
        return tuple(storages)

    def _recipe(self, key: int) -> tuple[tuple[StorageId, ...], float | None]:
        """Return what a storage can be rebuilt from, and how long that takes."""
        recipe = self._saved.recipes.get(key)
        if recipe is None:
            return (), None
        keys, traffic_bytes = recipe
        # A source that is no layer's stays in memory.
        sources = tuple(self._names[each] for each in keys if each in self._names)
        took_s = traffic_bytes / self._hardware.device_memory_bytes_per_s
        return sources, took_s if sources else None

    def _input(self, index: int) -> tuple[int, StorageId | None]:
        """Return the size of a layer's input, and the storage that is the same memory."""
        part = self._parts[index]
        if not part.inside:
            return 0, None
        keys = [key for key in self._calls[part.layer].inputs if key not in self._of_no_layer]
        input_bytes = sum(self._sizes[key] for key in keys)
        first = self._names.get(keys[0]) if len(keys) == 1 else None
        if first is not None and first.layer <= index:
            return input_bytes, first
        return input_bytes, None


def _update_bytes(parameters: WeightBytes) -> int:
    """Return the bytes that an update reads and writes, as `LayerProfile.update_bytes`."""
    return 3 * parameters.gradient_bytes + 2 * parameters.optimizer_bytes


# ---- Profiles a training step with fake tensors: no memory, no accelerator, no arithmetic ----
#
# [Note: fake profile] The step runs on tensors without values. Operators are seen one by one, so
# the bytes that autograd saves and the bytes that are alive at any time are those of a real step.
# Seconds are estimates: see [Note: roofline] in `operator_costs`.
#
# - What is saved outside layers, or too small to be offloaded, is no layer's. It counts as working
# memory of all passes in which it is alive.
# - Work after one layer and before the next counts with the layer before it.
# - A parameter belongs to the layer whose call reads it first; others count as fixed.
# - Gradients count as there throughout the step.
# - A pass's working memory is the peak of what is alive in it, less what a plan that keeps
#   everything has resident then: see [Note: positions] in `planning.step_profile`. That of a
#   recomputed layer's passes is found in a second step, in which all layers that may be
#   recomputed are.
#
# Not modelled: workspaces inside operators, rounding by the allocator, what a fused optimizer
# allocates, storages that are saved again after they were changed in place, packing, recipes that
# do not give the same bits here, views that are gathered before they are offloaded (their storage
# counts whole), layers inside a reentrant checkpoint or another `torch.autograd.Function`, whose
# backward counts with what comes before it.


def profile_with_fake_tensors(
    model: nn.Module,
    batch: Batch,
    hardware: Hardware,
    *,
    layers: Sequence[str],
    loss: Loss | None = None,
    min_bytes: int = DEFAULT_MIN_BYTES,
    optimizer_states: int = 2,
    between: bool = False,
) -> StepProfile:
    """Profile one training step of a model without running it. See [Note: fake profile].

    The model and its gradients stay as they are, and so do random number generators. The model may
    be on the meta device; it is then taken to be on the CPU.

    Args:
        model: the model, in training mode if its training is meant.
        batch: what the model is called with: a tuple or list of positional arguments, a mapping of
            arguments by name, or else one argument. Only shapes and types matter.
        hardware: the machine whose seconds are estimated.
        layers: names of the modules whose calls are layers, in model order.
        loss: computes the loss from what the model returns; may use tensors that it closes over.
            None means the attribute ``loss`` of what the model returns, or else the sum of all
            floating-point tensors in it.
        min_bytes: the same as the policy's; smaller storages are not numbered.
        optimizer_states: tensors of the weights' size that the optimizer keeps: 2 for Adam, 1 for
            SGD with momentum, 0 for plain SGD.
        between: whether work between layers that saves something is a layer of its own. Otherwise
            what it saves is working memory of the passes in which it is alive.

    Returns:
        The profile.

    Raises:
        PolicyError: no layer was called, or the model cannot run with fake tensors because its code
            looks at values.
    """
    # Many arguments: a step has that many parts, and most of them have defaults.
    step = FakeStep(model, batch, hardware, layers)
    saved = SavedStorages(step, min_bytes)
    step.run(loss, saved.pack)
    if not step.calls.calls:
        raise PolicyError("the model called none of its layers; name modules that it calls")
    assembly = StepAssembly(step, saved, hardware, optimizer_states, between=between)
    profile = dataclasses.replace(assembly.profile(), min_bytes=saved.min_bytes)
    again = FakeStep(model, batch, hardware, layers)
    recompute_calls(again, layers, assembly.recomputable)
    try:
        again.run(loss)
    except PolicyError:  # what cannot run again here is not planned to
        layers_once = (dataclasses.replace(each, may_recompute=False) for each in profile.layers)
        return dataclasses.replace(profile, layers=tuple(layers_once))
    return assembly.with_recomputation(profile, again)
