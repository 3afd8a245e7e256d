"""What one training step costs in seconds and bytes, layer by layer: what a plan is made from.

[Note: positions] A step is a sequence of positions: the forward passes F0, F1, ..., the loss, and
the backward passes ..., B1, B0. A plan is judged by the device memory at each of them. A layer's
storages count as there from the begin of its forward pass, and what a pass needs beside them is its
working memory. A layer's input counts as there during the layer's own forward, so it is not part of
the working memory.

[Note: several forwards] A step may run several forwards of a model before a backward, such as those
of two views of a batch that are compared. They follow one plan, which is predicted as it runs: one
forward after the other, and their backwards in the reverse order. The search for it is guided by a
step in which each layer runs once, and saves as much and takes as long as in all forwards together.
While the last forward runs, and the first backward, all that the others have kept is there beside
what a pass needs. So its loss, when all is there that is kept, counts with the need of the
hungriest pass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from ebbtide.documents import check_number
from ebbtide.errors import PolicyError
from ebbtide.policy import DEFAULT_MIN_BYTES


class StorageId(NamedTuple):
    """Names one storage that a layer saves.

    Attributes:
        layer: index of the layer.
        number: number of the storage among those that the layer's call saves, from 0.
    """

    layer: int
    number: int


class StepAhead(NamedTuple):
    """An optimizer that steps inside backward; see `ebbtide.OffloadHandle.overlap`.

    Attributes:
        shadow_bytes: the most memory that its shadows may have.
        host_bytes: the most that shadows may have together with all that rests on the host; None:
            any number of bytes.
        twice_share: the share of what it steps ahead that has to step again.
    """

    shadow_bytes: int
    host_bytes: int | None = None
    twice_share: float = 0.0


@final
@dataclass(frozen=True, kw_only=True)
class SavedStorage:
    """One storage that autograd saves in a layer's forward.

    Args:
        number: its number among the storages that the layer's call saves, in the order in which it
            saves them, from 0. Those that a layer before has saved have numbers, too.
        size_bytes: its size in bytes.
        same_as: the storage saved earlier that is the same memory; None if this is the first save.
            Memory is counted once.
        may_leave: whether it may be offloaded.
        sources: the storages, saved earlier, that it can be rebuilt from. They must be in memory
            when it is rebuilt.
        rebuild_s: seconds that rebuilding takes; None if it cannot be rebuilt.
    """

    number: int
    size_bytes: int
    same_as: StorageId | None = None
    may_leave: bool = True
    sources: tuple[StorageId, ...] = ()
    rebuild_s: float | None = None


@final
@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One layer of the step: one call of a module, or the work between two of them.

    Args:
        name: name of the module.
        between: whether this is work outside the modules, which the engine counts as no layer.
        forward_s: seconds of the forward pass.
        backward_s: seconds of the backward pass.
        forward_working_bytes: device memory that the forward pass needs at its peak beside all that
            is resident, its own storages and its input.
        backward_working_bytes: the same for the backward pass.
        input_bytes: size of the layer's input, which a recomputed layer saves.
        input_same_as: the saved storage that is the input's memory, of this layer or an earlier
            one; None if nothing else saves it.
        storages: what the layer saves, in the order of its numbers.
        may_recompute: whether backward may run the forward again.
        recompute_s: seconds of the second forward; None means `forward_s`.
        recompute_working_bytes: device memory that the second forward and the backward of the
            recomputed layer need beside what is resident and what the layer saves; None means the
            larger of the working memories of its passes.
        copied_bytes: device memory that a recomputed layer keeps until its backward for copies of
            weights, which the program may change.
        unsaved_forward_bytes: device memory beside its input that a forward needs which saves
            nothing; None means all storages and `forward_working_bytes`.
        weight_bytes: size of the weights.
        gradient_bytes: size of the gradients of the weights.
        optimizer_bytes: size of the optimizer's state of the weights.
        host_update_s: seconds that the host takes to update these weights.
    """

    name: str
    between: bool = False
    forward_s: float
    backward_s: float
    forward_working_bytes: int = 0
    backward_working_bytes: int = 0
    input_bytes: int = 0
    input_same_as: StorageId | None = None
    storages: tuple[SavedStorage, ...] = ()
    may_recompute: bool = True
    recompute_s: float | None = None
    recompute_working_bytes: int | None = None
    copied_bytes: int = 0
    unsaved_forward_bytes: int | None = None
    weight_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    host_update_s: float = 0.0

    @property
    def second_forward_s(self) -> float:
        """Seconds of the second forward of the layer, if it is recomputed."""
        return self.forward_s if self.recompute_s is None else self.recompute_s

    @property
    def second_working_bytes(self) -> int:
        """Working memory of the second forward and the backward, if the layer is recomputed."""
        if self.recompute_working_bytes is not None:
            return self.recompute_working_bytes
        return max(self.forward_working_bytes, self.backward_working_bytes)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def update_bytes(self) -> int:
        """Bytes that an update reads and writes: gradients once, weights and their state twice."""
        return 3 * self.gradient_bytes + 2 * self.optimizer_bytes

    @property
    def shadow_bytes(self) -> int:
        """Bytes of what is trained and of its state, of which an update inside backward has two."""
        return self.gradient_bytes + self.optimizer_bytes

    @property
    def ahead_bytes(self) -> int:
        """Bytes that an update inside backward reads and writes: it fills shadows first."""
        return self.update_bytes + 2 * self.shadow_bytes

    @property
    def commit_s(self) -> float:
        """Seconds in which the host copies the new weights from their shadows."""
        bytes_s = 2 * self.gradient_bytes * self.host_update_s
        return bytes_s / self.update_bytes if self.update_bytes else 0.0


@final
@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """One training step. See [Note: positions].

    Args:
        layers: the layers in the order of their forward passes.
        fixed_bytes: what is on the device throughout the step and belongs to no layer: the batch,
            parameters outside of layers. The weights, gradients and optimizer state of the layers
            count beside it.
        before_s: seconds of work before the first layer.
        loss_s: seconds of work between the last forward pass and the first backward pass.
        after_s: seconds of work after the last backward pass, such as the optimizer's step.
        before_working_bytes: device memory that the work before the first layer needs.
        loss_working_bytes: device memory that the work between the passes needs.
        after_working_bytes: device memory that the work after the last pass needs.
        at_once_bytes: device memory that this work needs beside that if no weights are at rest: an
            optimizer whose weights are all on one device may compute with all of them at once.
        min_bytes: smaller storages are not numbered, because they stay where they are.
        keeps_gradients: whether the gradients of weights on the device are there throughout the
            step; otherwise they come with the first backward of a call of their layer.
        retains: whether what is saved is there until the end of backward, as with
            ``retain_graph=True``; otherwise each pass lets go of what it has read.
        ahead: how the host updates weights while backward still runs; None: it does so after it.

    Raises:
        PolicyError: a figure is negative or not a number.
    """

    layers: tuple[LayerProfile, ...]
    fixed_bytes: int = 0
    before_s: float = 0.0
    loss_s: float = 0.0
    after_s: float = 0.0
    before_working_bytes: int = 0
    loss_working_bytes: int = 0
    after_working_bytes: int = 0
    at_once_bytes: int = 0
    min_bytes: int = DEFAULT_MIN_BYTES
    keeps_gradients: bool = True
    retains: bool = False
    ahead: StepAhead | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple) or not self.layers:
            raise PolicyError("layers must be a tuple of at least one LayerProfile")
        _check_figures("the step", self)
        for index, layer in enumerate(self.layers):
            _check_figures(f"layer {index}", layer)
            for storage in layer.storages:
                _check_figures(f"storage {storage.number} of layer {index}", storage)

    def with_forwards(self, count: int) -> StepProfile:
        """Return the step with so many forwards before a backward. See [Note: several forwards]."""
        if count == 1:
            return self
        needs_bytes = [self.loss_working_bytes]
        for index, layer in enumerate(self.layers):
            working_bytes = max(layer.forward_working_bytes, layer.backward_working_bytes)
            saved_bytes = self.inside_bytes(index) + max(working_bytes, layer.second_working_bytes)
            pass_bytes = max(saved_bytes, layer.unsaved_forward_bytes or 0)
            needs_bytes.append(layer.input_bytes + pass_bytes)
        layers = tuple(_repeated(each, count) for each in self.layers)
        return dataclasses.replace(self, layers=layers, loss_working_bytes=max(needs_bytes))

    def one_after_the_other(self, count: int) -> StepProfile:
        """Return the step with so many forwards as one with so many times as many layers."""
        if count == 1:
            return self
        own: dict[str, Any] = dict.fromkeys(
            ("weight_bytes", "gradient_bytes", "optimizer_bytes"), 0
        )
        layers, num = list(self.layers), len(self.layers)
        for first in range(num, count * num, num):  # a layer's weights are those of the first call

            def moved(name: StorageId, first: int = first) -> StorageId:
                return StorageId(first + name.layer, name.number)

            for layer in self.layers:
                storages = tuple(
                    dataclasses.replace(
                        each,
                        same_as=each.same_as and moved(each.same_as),
                        sources=tuple(map(moved, each.sources)),
                    )
                    for each in layer.storages
                )
                source = layer.input_same_as and moved(layer.input_same_as)
                again = dataclasses.replace(
                    layer, storages=storages, input_same_as=source, host_update_s=0.0, **own
                )
                layers.append(again)
        return dataclasses.replace(self, layers=tuple(layers))

    def storage(self, name: StorageId) -> SavedStorage:
        """Return a storage by its name."""
        return self.layers[name.layer].storages[name.number]

    def storage_ids(self) -> Iterator[StorageId]:
        """Yield the names of all storages, in the order of their saves."""
        for index, layer in enumerate(self.layers):
            for storage in layer.storages:
                yield StorageId(index, storage.number)

    def weight_owners(self) -> dict[str, list[int]]:
        """Return the layers of each module that has weights, by its name.

        The weights of a module rest in one place, however often it is called.
        """
        owners: dict[str, list[int]] = {}
        for index, layer in enumerate(self.layers):
            if layer.parameter_bytes:
                owners.setdefault(layer.name, []).append(index)
        return owners

    def coming_gradients(self, resting: Sequence[bool]) -> list[int]:
        """Return the bytes of gradients that the backward of each layer brings to stay.

        Args:
            resting: whether each layer's weights rest on the host, where their gradients go, too.
        """
        coming = [0] * len(self.layers)
        if not self.keeps_gradients:
            triples = zip(self.layers, self.last_calls, resting, strict=True)
            for layer, last, rests in triples:
                coming[last] += 0 if rests else layer.gradient_bytes
        return coming

    @functools.cached_property
    def owners(self) -> list[int]:
        """The layer whose weights each layer computes with: another call, or itself."""
        by_name = self.weight_owners()
        return [
            index if layer.parameter_bytes else by_name.get(layer.name, [index])[0]
            for index, layer in enumerate(self.layers)
        ]

    @functools.cached_property
    def last_calls(self) -> list[int]:
        """The last layer that computes with the weights of each layer.

        Its backward comes first, and brings the gradients, which all calls add to.
        """
        last = {owner: index for index, owner in enumerate(self.owners)}
        return [last.get(index, index) for index in range(len(self.layers))]

    def inside_bytes(self, index: int) -> int:
        """Return the size of what a layer saves beside its input.

        Args:
            index: index of the layer.
        """
        layer = self.layers[index]
        sizes = {
            each.same_as or StorageId(index, each.number): each.size_bytes
            for each in layer.storages
        }
        if layer.input_same_as is not None:
            sizes.pop(layer.input_same_as, None)
        return sum(sizes.values())


@functools.cache
def _figures(kind: type) -> list[tuple[str, bool, bool]]:
    """Return the names of figures, whether they are whole numbers, and whether they may be None."""
    return [
        (field.name, field.name.endswith("_bytes"), field.default is None)
        for field in dataclasses.fields(kind)
        if field.name.endswith(("_bytes", "_s"))
    ]


def _check_figures(where: str, entry: StepProfile | LayerProfile | SavedStorage) -> None:
    for name, whole, may_miss in _figures(type(entry)):  # type: ignore[arg-type]
        value = getattr(entry, name)
        if not (value is None and may_miss):
            check_number(f"{name} of {where}", value, whole=whole)


def _repeated(layer: LayerProfile, count: int) -> LayerProfile:
    """Return a layer that saves and computes so many times as much."""
    storages = tuple(
        dataclasses.replace(
            each,
            size_bytes=count * each.size_bytes,
            rebuild_s=None if each.rebuild_s is None else count * each.rebuild_s,
        )
        for each in layer.storages
    )
    return dataclasses.replace(
        layer,
        storages=storages,
        input_bytes=count * layer.input_bytes,
        forward_s=count * layer.forward_s,
        backward_s=count * layer.backward_s,
        recompute_s=count * layer.second_forward_s,
    )
