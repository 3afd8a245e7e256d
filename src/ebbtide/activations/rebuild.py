"""Finds saved tensors that backward can recompute from other saved tensors, by autograd's graph."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any, final

import torch
from torch import Tensor

from ebbtide.activations.handles import AbstractAway, Saved, restore
from ebbtide.activations.records import Call
from ebbtide.activations.saved import RecordedTensor, can_restore, held_tensor, peek, share
from ebbtide.tensors.memory_parts import may_change_unseen
from ebbtide.tensors.recipes import MOST_STEPS, RECIPES, KernelSettings

_LOG = logging.getLogger(__name__)


@final
class RebuildFinder:
    """Finds recipes for saved tensors, and remembers which recipes gave the right bits."""

    def __init__(self) -> None:
        self._proven: dict[Hashable, bool] = {}

    def find(
        self, tensor: Tensor, storage: torch.UntypedStorage, settings: KernelSettings
    ) -> Call | None:
        """Return the call that recomputes the storage of a saved tensor; None if there is none.

        Args:
            tensor: the saved tensor, which is an operation's output or a view of one.
            storage: its storage.
            settings: what the kernels of this forward have depended on.
        """
        output = tensor if tensor._base is None else tensor._base
        node = output.grad_fn
        # Guard unchanged-output: an output that was changed in place is not rebuilt. Running its
        # operation again would give the values from before the change.
        if node is None or output._version:
            return None
        recipe = RECIPES.get(node.name())
        if recipe is None or output.storage_offset() or output.nbytes != storage.nbytes():
            return None
        found = [_find_input(node, name, place) for place, name in enumerate(recipe.inputs)]
        inputs = [saved for saved in found if saved is not None]
        depth = 1 + max((_depth(saved) for saved in inputs), default=0)
        if len(inputs) < len(found) or depth > MOST_STEPS:
            return None
        constants = {name: getattr(node, f"_saved_{name}") for name in recipe.constants}
        call = Call(recipe, inputs, constants, output.dtype, depth, settings)
        if not self._is_proven(call, output):
            return None
        # Inputs are shared only now, so that an unused recipe adds no handle to their records.
        shared = [share(saved) for saved in inputs]
        return Call(recipe, shared, constants, output.dtype, depth, settings)

    def _is_proven(self, call: Call, output: Tensor) -> bool:
        """Whether the recipe's first run for this shape and type gave the same bits."""
        inputs = call.inputs
        shapes = tuple(_shape_of(saved) for saved in inputs)
        constants = tuple(sorted((name, str(value)) for name, value in call.constants.items()))
        layout = output.shape, output.stride(), output.dtype, output.device
        key = (call.recipe, constants, shapes, layout, call.settings)
        if key not in self._proven:
            again = call.run([peek(saved) for saved in inputs])
            self._proven[key] = same = _same_bits(again, output)
            if not same:
                _LOG.info(
                    "%s of shape %s and type %s cannot be rebuilt to the bit here; it is kept or "
                    "offloaded instead",
                    call.recipe.node,
                    tuple(output.shape),
                    output.dtype,
                )
        return self._proven[key]


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
    assert isinstance(saved, AbstractAway)
    return saved.shape


def _same_bits(again: Tensor, output: Tensor) -> bool:
    output = output.detach()
    if again.device != output.device:  # a copy from another device
        return False
    if (again.shape, again.dtype, again.stride()) != (output.shape, output.dtype, output.stride()):
        return False
    if again.untyped_storage().nbytes() != output.untyped_storage().nbytes():
        return False
    return torch.equal(_bits(again), _bits(output))


def _bits(tensor: Tensor) -> Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())
