"""Finds out which saved tensors need no bytes: autograd's graph says what they were made of."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable
from typing import Any, final

import torch
from torch import Tensor

from ebbtide.runtime.kept import LargeKept
from ebbtide.runtime.rebuilt import MOST_STEPS, Call
from ebbtide.runtime.recipes import RECIPES
from ebbtide.runtime.saved import (
    AbstractDeparted,
    OffloadedTensor,
    RebuiltTensor,
    Saved,
    inspect,
    restore,
    share,
)

_LOG = logging.getLogger("ebbtide")
_NOTE = "ebbtide.saved"  # in a node's metadata, with the number of the output


_HOLDERS = frozenset({LargeKept, OffloadedTensor, RebuiltTensor})


@final
class RebuildFinder:
    """Knows what was saved of each operation's output, and which recipes have proven right."""

    def __init__(self) -> None:
        self._proven: dict[Hashable, bool] = {}

    def note(self, tensor: Tensor, saved: Saved) -> None:
        """Remember what holds an operation's output, for those that take it as an input.

        The note lives in the graph, and refers to the handle weakly: it keeps nothing alive.
        """
        node = tensor.grad_fn
        if node is None:
            return
        holder = saved[2] if type(saved) is tuple else saved
        if type(holder) in _HOLDERS:
            metadata: Any = node.metadata
            metadata[_NOTE, tensor.output_nr] = weakref.ref(holder)

    def find(self, tensor: Tensor, storage: torch.UntypedStorage) -> Call | None:
        """What gives the storage of a saved tensor again; None if nothing is known that does.

        Args:
            tensor: what is saved, an operation's output or a view of one.
            storage: the tensor's.
        """
        output = tensor if tensor._base is None else tensor._base
        node = output.grad_fn
        if node is None or output._version:  # what was changed in place is no operation's output
            return None
        recipe = RECIPES.get(node.name())
        if recipe is None or output.storage_offset() or output.nbytes != storage.nbytes():
            return None
        inputs = [_find_input(node, name, place) for place, name in enumerate(recipe.inputs)]
        known = [saved for saved in inputs if saved is not None]
        depth = 1 + max((s.record.call.depth for s in known if type(s) is RebuiltTensor), default=0)
        if len(known) < len(inputs) or depth > MOST_STEPS:
            return None
        constants = {name: getattr(node, f"_saved_{name}") for name in recipe.constants}
        call = Call(recipe, known, constants, output.dtype, depth)
        return call if self._is_proven(call, output) else None

    def _is_proven(self, call: Call, output: Tensor) -> bool:
        """Whether the recipe is right for this shape and type: tried the first time."""
        inputs = call.inputs
        shapes = tuple(_shape_of(saved) for saved in inputs)
        constants = tuple(sorted((name, str(value)) for name, value in call.constants.items()))
        key = (call.recipe, constants, shapes, output.shape, output.stride(), output.dtype)
        if key not in self._proven:
            again = call.run([inspect(saved) for saved in inputs])
            self._proven[key] = same = _same_bits(again, output)
            if not same:
                _LOG.info(
                    "%s of shape %s and type %s cannot be rebuilt bit by bit here; it is kept or "
                    "offloaded instead",
                    call.recipe.node,
                    tuple(output.shape),
                    output.dtype,
                )
        return self._proven[key]


def _find_input(node: Any, name: str, place: int) -> Saved | None:
    """A handle on an operation's input: what the node saved, else what another has saved."""
    saved = _saved_by(node, name)
    if saved is None and place < len(node.next_functions):
        producer, number = node.next_functions[place]
        if producer is not None:
            saved = _noted(producer, number)
    return None if saved is None else share(saved)


def _saved_by(node: Any, name: str) -> Saved | None:
    """What our pack hook made of a tensor that the node saved; not unpacked."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None:
        return None
    try:
        if raw.unpack_hook is not restore:
            return None
        return raw.data  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):  # nothing was saved, or no hook was there
        return None


def _noted(node: Any, number: int) -> Saved | None:
    """What another operation saved of an operation's output.

    Only while that was never changed in place: nothing says which version the operation has read
    whose output is wanted, unless there was only one.
    """
    note = node.metadata.get((_NOTE, number))
    holder = None if note is None else note()
    if isinstance(holder, LargeKept):
        if holder.version or holder.tensor._version:
            return None
        return holder.tensor, holder.version, holder
    if holder is None or holder.version or holder.is_modified():
        return None
    assert isinstance(holder, AbstractDeparted)
    return holder


def _shape_of(saved: Saved) -> Hashable:
    if type(saved) is tuple:
        tensor = saved[0]
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    assert isinstance(saved, AbstractDeparted)
    return saved.shape


def _same_bits(again: Tensor, output: Tensor) -> bool:
    output = output.detach()
    if (again.shape, again.dtype, again.stride()) != (output.shape, output.dtype, output.stride()):
        return False
    if again.untyped_storage().nbytes() != output.untyped_storage().nbytes():
        return False
    return torch.equal(_bits(again), _bits(output))


def _bits(tensor: Tensor) -> Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())
