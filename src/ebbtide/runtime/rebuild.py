"""Decides what becomes of a storage that autograd saves, and stands for it in the graph.

First come the handles of recorded storages, and what finds saved tensors that backward can compute
again from others; `Placement` is the decision.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Container, Hashable, Mapping, Set
from typing import Any, NamedTuple, NoReturn, final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide.devices.device import Layer
from ebbtide.errors import SavedTensorModifiedError
from ebbtide.policy import ActivationPolicy, refuse
from ebbtide.runtime.activations import Activations, PassWindows, Scope
from ebbtide.runtime.handles import (
    KEEP,
    OFFLOAD,
    REBUILD,
    AbstractProbed,
    Call,
    Decision,
    Saved,
    StorageRecord,
    bits_of,
    restore,
)
from ebbtide.runtime.record import MOST_STEPS, RECIPES, KernelSettings, RebuildRecipe
from ebbtide.runtime.torch_internals import current_node, may_change_unseen, parts_of


@final
class RecordedTensor(AbstractProbed):
    """Stands for a saved tensor whose storage has a record.

    Args:
        activations: the owner of the record.
        record: the record of the storage, or of a view gathered from it. It counts this handle
            already.
        tensor: the tensor that was saved.

    Attributes:
        record: as given.
    """

    __slots__ = ("_activations", "record")

    def __init__(self, activations: Activations, record: StorageRecord, tensor: Tensor) -> None:
        self._activations = activations
        self.record = record
        activations.deaths.expect(self, record)
        if record.decision is KEEP:
            self._size, self.version = tensor.shape, record.version
            # The tensor itself would refer to the graph that it lives in, and leak.
            self._probe = tensor.detach()
        else:
            # Not by `super()`, which takes longer: a step makes thousands of handles.
            AbstractProbed.__init__(self, tensor, record.version, activations.empty)
        if record.dtype is None:
            record.shape, record.dtype = self._size, tensor.dtype

    @property
    def shape(self) -> tuple[object, ...]:
        if self.record.decision is KEEP:
            probe = self._probe
            return probe.shape, probe.stride(), probe.dtype, probe.device
        return super().shape

    def restore(self) -> Tensor:
        if self.is_modified():
            self._raise_modified()
        record, activations = self.record, self._activations
        node = current_node()
        if node is not None:  # the last one to read the storage is the first that saved it
            record.saved_by = node.name()
        try:
            if record.decision is OFFLOAD:
                return self._tensor_of(activations.bring_back(record))
            if record.call is None:
                activations.note_backward(record.forward)
                return self._probe
            value = activations.rebuild(record, functools.partial(_run, record.call))
            return self._tensor_in(value.untyped_storage())
        except BaseException as error:
            activations.transfers.note_error(error)
            raise

    def peek(self) -> Tensor:
        if self.is_modified():
            self._raise_modified()
        record = self.record
        if record.decision is KEEP:
            return self._probe
        if record.call is None:
            return self._tensor_of(self._activations.peek(record))
        value = record.call.run([peek(saved) for saved in record.call.inputs])
        return self._tensor_in(value.untyped_storage())

    def _tensor_of(self, flat: Tensor) -> Tensor:
        record = self.record
        if record.view_size is None:
            return self._tensor_in(flat.untyped_storage())
        return self._tensor_in(self._scatter(flat, record.view_size))

    def _scatter(self, flat: Tensor, view_size: tuple[int, ...]) -> torch.UntypedStorage:
        """Return a storage with the gathered elements at the places where the saved view had them.

        The rest of it is never read, so on a CPU the system never backs it with memory.
        """
        span = self._offset + 1
        span += sum((n - 1) * step for n, step in zip(view_size, self._stride, strict=True))
        spread = torch.empty(span, dtype=self._dtype, device=flat.device)
        gathered = flat.view(self._dtype).view(view_size)
        spread.as_strided(view_size, self._stride, self._offset).copy_(gathered)
        return spread.untyped_storage()


def _run(call: Call) -> Tensor:
    for saved in call.inputs:
        changed = saved[0]._version != saved[1] if type(saved) is tuple else saved.is_modified()  # type: ignore[union-attr]
        if changed:
            _raise_input_modified(call, saved)
    return call.run([restore(saved) for saved in call.inputs])


def _raise_input_modified(call: Call, saved: Saved) -> NoReturn:
    """Raise the error for a tensor that cannot be rebuilt any more.

    Raises:
        SavedTensorModifiedError: always.
    """
    shape = saved[0].shape if type(saved) is tuple else saved.shape[0]  # type: ignore[union-attr]
    raise SavedTensorModifiedError(
        f"a saved tensor cannot be rebuilt by running {call.recipe.node.removesuffix('Backward0')} "
        f"again, because its input of shape {tuple(shape)} was modified in place after it had been "
        f"saved. If backward raises no error without ebbtide, because the input itself is not "
        f"needed there, use ActivationPolicy(rebuild=False). Otherwise clone the input before it "
        f"is modified"
    )


def peek(saved: Saved) -> Tensor:
    """Return a saved tensor during forward, before backward has come to it."""
    if type(saved) is tuple:
        return saved[0]
    assert isinstance(saved, AbstractProbed)
    return saved.peek()


def can_restore(saved: Saved) -> bool:
    """Whether a saved tensor and all that it is rebuilt from are as they were when saved.

    The answer for a composite tensor is no.
    """
    if type(saved) is tuple:
        return bool(saved[0]._version == saved[1])
    if not isinstance(saved, AbstractProbed) or not saved.is_input or saved.is_modified():
        return False
    call = saved.record.call if type(saved) is RecordedTensor else None
    if call is not None:
        for each in call.inputs:  # not by `all`: this runs for every tensor that is rebuilt
            if not can_restore(each):
                return False
    return True


def held_tensor(saved: Saved) -> Tensor | None:
    """Return the tensor that a handle holds in its own memory; None if it is elsewhere."""
    if type(saved) is tuple:
        return saved[0]
    if type(saved) is RecordedTensor and saved.record.decision is KEEP:
        return saved._probe
    return None


# ---- Finds saved tensors that backward can recompute from other saved tensors, by autograd's graph

_LOG = logging.getLogger(__name__)


def find_recipe(
    tensor: Tensor, storage: torch.UntypedStorage
) -> tuple[RebuildRecipe, list[Saved]] | None:
    """Return the recipe that recomputes the storage of a saved tensor, and what holds its inputs.

    Args:
        tensor: the saved tensor, which is an operation's output or a view of one.
        storage: its storage.

    Returns:
        None if there is no recipe, or if an input is not saved or was changed.
    """
    output = tensor if tensor._base is None else tensor._base
    node = output.grad_fn
    # Guard unchanged-output: an output that was changed in place is not rebuilt. Running its
    # operation again would give the values from before the change.
    if node is None or tensor.grad_fn is None or output._version:
        return None
    recipe = RECIPES.get(node.name())
    if recipe is None or output.storage_offset() or output.nbytes != storage.nbytes():
        return None
    found = [_find_input(node, name, place) for place, name in enumerate(recipe.inputs)]
    inputs = [saved for saved in found if saved is not None]
    return (recipe, inputs) if len(inputs) == len(found) else None


def _find_input(node: Any, name: str, place: int) -> Saved | None:
    """Return what holds an operation's input: saved by its own node, or by the one before.

    [Note: inputs of recipes] Only what the graph of the output itself has saved is used. Autograd
    holds it as long as the output, and its own backward refuses to run if it was changed. What
    another operation has saved, such as a metric that is only logged, may be freed before, and the
    program may change it from then on.

    Returns None if neither saved the input, or if it was saved in a form that cannot be shared.
    """
    saved = _saved_by(node, name)
    if saved is None and place < len(node.next_functions):
        producer, number = node.next_functions[place]
        if producer is not None and not number:
            saved = _saved_by(producer, "result")
    if saved is None or not can_restore(saved):
        return None
    held = held_tensor(saved)
    if held is not None and may_change_unseen(held.untyped_storage()):
        return None
    # Not a parameter itself: `parameter.data = ...` would give it other values.
    return (saved[0].detach(), saved[1], None) if type(saved) is tuple else saved


def _saved_by(node: Any, name: str) -> Saved | None:
    """Return what ebbtide's pack hook returned for a tensor that the node saved, not unpacked."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None:
        return None
    try:
        if raw.unpack_hook is not restore:
            return None
        return raw.data  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):  # nothing was saved, or no hook was active
        return None


def _depth(saved: Saved) -> int:
    """Number of operations in a row that rebuild a saved tensor; 0 if it is kept or offloaded."""
    call = saved.record.call if type(saved) is RecordedTensor else None
    return 0 if call is None else call.depth


def _shape_of(saved: Saved) -> Hashable:
    if type(saved) is tuple:
        tensor = saved[0]
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    assert isinstance(saved, AbstractProbed)
    return saved.shape


def _same_bits(again: Tensor, output: Tensor) -> bool:
    if again.device != output.device:  # a copy from another device
        return False
    if (again.shape, again.dtype, again.stride()) != (output.shape, output.dtype, output.stride()):
        return False
    if again.untyped_storage().nbytes() != output.untyped_storage().nbytes():
        return False
    return torch.equal(bits_of(again), bits_of(output))


# ---- Marks tensors that must not be offloaded, without setting an attribute on them ----

# torch's weak reference to a storage keeps the storage's address from being reused, so while the
# reference is in this table, no other storage has that address.
_marked: dict[int, StorageWeakRef] = {}
_purge_at = 64


def mark_not_offload(*tensors: torch.Tensor | None) -> None:
    """Keep these tensors and all their views on the device when autograd saves them.

    A mark lasts as long as the tensor's storage. For a wrapper subclass (a DTensor, a quantized
    tensor) and for a sparse tensor its inner tensors are marked.

    Args:
        tensors: the tensors to mark; None is skipped.

    Raises:
        PolicyError: an argument is something else.

    Source: Transformer Engine, `mark_not_offload`.
    """
    global _purge_at
    for tensor in tensors:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            refuse("each argument of mark_not_offload", "a tensor or None", tensor)
        for part in () if tensor is None else parts_of(tensor):
            storage = part.untyped_storage()
            _marked[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    if len(_marked) > _purge_at:
        for address in [key for key, mark in _marked.items() if mark.expired()]:  # type: ignore[no-untyped-call]
            del _marked[address]
        _purge_at = max(64, 2 * len(_marked))


# ---- Placement: the one decision of what becomes of a storage that autograd saves ----

Plan = Mapping[tuple[int | None, int], Decision]
"""A decision for each storage that it names. The key is the index of the layer, None outside
layers, and the number of the storage in the layer's call. The policy or the schedule decides for
all other storages.
"""


class PlannedLayers(NamedTuple):
    """A plan for all layers of a forward.

    Attributes:
        decisions: what becomes of single storages.
        recomputed: indices of the layers that save their inputs alone.
        kept_inputs: those of them whose inputs stay on the device.
        keeps_outside: whether what is saved outside layers stays unless a decision names it.
        windows: what may be in flight in each pass; None: the bound on bytes in flight says.
        rebuilds: whether storages that no decision names are rebuilt where they can be.
        keeps_if_full: whether what the store has no room for stays on the device.
    """

    decisions: Plan
    recomputed: Set[int]
    kept_inputs: Set[int]
    keeps_outside: bool = False
    windows: PassWindows | None = None
    rebuilds: bool = False
    keeps_if_full: bool = False


@final
class Placement:
    """Decides once for each storage, when it is first saved, to keep, offload or rebuild it.

    The first of these that applies decides: a mark on the tensor (`mark_not_offload`) or memory
    that other code than torch's can write, the plan, a recipe that rebuilds the storage, and last
    the policy or the schedule, which say whether the storages of a layer are offloaded.

    Args:
        policy: which layers are offloaded, and from what size.
        layers_only: whether all storages saved outside layers are kept, whatever the policy says.
            That is so where a schedule is followed, because a schedule names layers.
        refused: names of layers that cannot be recomputed. What they save is offloaded instead.

    Attributes:
        layers: the plan for all layers; None if the policy decides.
        min_bytes: smaller storages are kept.
        num_calls: number of layer calls in a forward, once that is known.
        may_rebuild: whether anything has been rebuilt, or may be.
        wanted_again: layer and number of storages that stay on the device because a second
            backward needs them: see `Activations.wanted_again`. The plan can say otherwise.
    """

    def __init__(
        self,
        policy: ActivationPolicy,
        *,
        layers_only: bool = False,
        refused: Container[str] = (),
    ) -> None:
        self._layers_only = layers_only
        self.min_bytes = max(int(policy.min_bytes), 1)  # no bytes, no copy
        self.num_calls: int | None = None
        self.wanted_again: Set[tuple[int | None, int]] = frozenset()
        self._refused = refused
        self._policy = policy
        self.may_rebuild = False
        self._proven: dict[Hashable, bool] = {}  # whether a recipe has given the right bits
        self.follow(None)

    def follow(self, layers: PlannedLayers | None) -> None:
        """Have a plan for all layers decide, instead of the policy, from the next forward on.

        What the plan does not name is offloaded, or kept if it is outside layers and the plan says
        so.

        Args:
            layers: the plan; None lets the policy decide again.
        """
        self.layers = layers
        self._plan: Plan = {} if layers is None else layers.decisions
        self._rebuilds = self._policy.rebuild if layers is None else layers.rebuilds
        self.may_rebuild |= self._rebuilds or REBUILD in self._plan.values()

    @property
    def wants_any(self) -> bool:
        """Whether the policy wants anything to leave; schedules and plans speak for themselves."""
        policy = self._policy
        if self._layers_only or self.layers is not None:
            return False
        return policy.rebuild or policy.num_layers != 0

    def offloads(self, layer: Layer | None) -> bool:
        """Whether the storages of a layer are offloaded by default.

        Args:
            layer: the layer; None for what is saved outside layers.
        """
        policy, planned = self._policy, self.layers
        if layer is not None and layer.name in self._refused and self._wants_recomputed(layer):
            return True
        if planned is not None:
            if layer is None:
                return not planned.keeps_outside
            return layer.index not in planned.kept_inputs
        if not policy.offloads:
            return False
        if layer is None:
            return policy.num_layers is None and not self._layers_only
        return self._chooses(layer)

    def recomputes(self, layer: Layer) -> bool:
        """Whether only the inputs of a layer are saved, and backward runs its forward again."""
        return layer.name not in self._refused and self._wants_recomputed(layer)

    def _wants_recomputed(self, layer: Layer) -> bool:
        if self.layers is not None:
            return layer.index in self.layers.recomputed
        return self._policy.recomputes and self._chooses(layer)

    def _chooses(self, layer: Layer) -> bool:
        policy = self._policy
        if policy.num_layers is not None and layer.index >= policy.num_layers:
            return False
        return self.num_calls is None or layer.index < self.num_calls - policy.keep_last

    def decide(
        self, scope: Scope, number: int, tensor: Tensor, storage: torch.UntypedStorage
    ) -> tuple[Decision, Call | None]:
        """Decide whether a storage is kept, offloaded or rebuilt.

        Args:
            scope: the scope in which the storage is saved first.
            number: number of the storage in the scope.
            tensor: the tensor that is saved.
            storage: storage of the tensor.

        Returns:
            The decision, and the call that rebuilds the storage if that is the decision.
        """
        # What other code may refill is kept in that code's memory: so does autograd, and backward
        # reads what is there then.
        if storage._cdata in _marked or may_change_unseen(storage):
            return KEEP, None
        planned = None
        if self._plan or self.wanted_again:
            name = None if scope.layer is None else scope.layer.index, number
            planned = self._plan.get(name)
            if planned is None and name in self.wanted_again:
                return KEEP, None
        size_bytes = storage.nbytes()
        if planned is None or planned is REBUILD:
            leaves = scope.offloads and size_bytes >= self.min_bytes
            rebuilds = planned is not None or self._rebuilds
            log = scope.forward
            if rebuilds and size_bytes >= self.min_bytes and not log.is_mixed:
                place = scope.layer, number
                call = self._find_call(tensor, storage, log.settings, place)
                if call is not None:
                    return REBUILD, call
        else:
            leaves = planned is OFFLOAD and size_bytes > 0
        # torch's own quantized tensors have scales beside their storage.
        if leaves and not tensor.is_quantized and (scope.unit is None or not scope.must_stay):
            return OFFLOAD, None
        return KEEP, None

    def _find_call(
        self,
        tensor: Tensor,
        storage: torch.UntypedStorage,
        settings: KernelSettings,
        place: Hashable,
    ) -> Call | None:
        """Return the call that recomputes the storage of a saved tensor; None if there is none.

        Args:
            tensor: the saved tensor, which is an operation's output or a view of one.
            storage: its storage.
            settings: what the kernels of this forward have depended on.
            place: where the model saves the storage: in which call of which layer.
        """
        found = find_recipe(tensor, storage)
        if found is None:
            return None
        recipe, inputs = found
        depth = 1 + max(map(_depth, inputs), default=0)
        if depth > MOST_STEPS:
            return None
        output = tensor if tensor._base is None else tensor._base
        node: Any = output.grad_fn
        constants = {name: getattr(node, f"_saved_{name}") for name in recipe.constants}
        call = Call(recipe, inputs, constants, output.dtype, depth, settings)
        return call if self._is_proven(call, output, place) else None

    def _is_proven(self, call: Call, output: Tensor, place: Hashable) -> bool:
        """Whether the recipe has given the same bits: for this shape and type, and in this place.

        A kernel gives the same bits for a shape or does not. But the program may write an output
        without a version, as by ``output.data = output.data.sign()``, in one place of several.
        """
        inputs = call.inputs
        shapes = tuple(_shape_of(saved) for saved in inputs)
        constants = tuple(sorted((name, str(value)) for name, value in call.constants.items()))
        layout = output.shape, output.stride(), output.dtype, output.device
        key = (call.recipe, constants, shapes, layout, call.settings)
        there = (call.recipe, place)
        known = [self._proven.get(each) for each in (key, there)]
        if None not in known or False in known:
            return all(known)
        try:
            again = call.run([peek(saved) for saved in inputs])
        except torch.OutOfMemoryError:
            return False  # another time there may be memory for it
        same = _same_bits(again, output)
        self._proven.setdefault(key, same)
        if self._proven[key]:  # else the kernel may be why, and not the place
            self._proven[there] = same
        if not same:
            _LOG.info(
                "%s of shape %s and type %s cannot be rebuilt to the bit here; it is kept or "
                "offloaded instead",
                call.recipe.node,
                tuple(output.shape),
                output.dtype,
            )
        return same
