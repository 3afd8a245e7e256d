"""Notes which storages autograd saves, numbered as the engine numbers them."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from ebbtide.planning.profiling.storage_ledger import StorageLedger

_AUTOCAST_TYPES: Final = frozenset({torch.bfloat16, torch.float16})

OUTSIDE: Final = -1
"""Index of the layer of what is saved outside layers."""

# Nodes whose output has the values of their input. The engine keeps copies of parameters that only
# these have made on the device, like the parameters themselves.
_COPYING: Final = frozenset(
    f"{name}Backward0"
    for name in (
        "ToCopy",
        "Clone",
        "T",
        "Transpose",
        "Permute",
        "View",
        "UnsafeView",
        "ReshapeAlias",
        "Alias",
        "Expand",
        "Select",
        "Slice",
        "Unsqueeze",
        "Squeeze",
        "Unbind",
        "Split",
        "AsStrided",
        "ViewAsReal",
        "ViewAsComplex",
        "Conj",
    )
) | {"SqueezeBackward1"}


class Saved(NamedTuple):
    """A storage that a layer saves.

    Attributes:
        layer: index of the layer that saved it first; `OUTSIDE` if no layer did.
        number: its number among those that this layer's call saved first, from 0.
    """

    layer: int
    number: int


@final
class SavedStorages:
    """Notes the storages that autograd saves in a forward, through its pack hook.

    Args:
        ledger: gives storages their keys.
        device: the device of the model; what is elsewhere does not count.
        parameters: keys of the storages of parameters and buffers, which do not count.
        min_bytes: smaller storages do not count.

    Attributes:
        firsts: the storages, by key, in the order in which they were saved first.
        again: for each layer, the keys of storages that were saved before, in order.
    """

    def __init__(
        self, ledger: StorageLedger, device: torch.device, parameters: Set[int], min_bytes: int
    ) -> None:
        self._layer = OUTSIDE
        self.firsts: dict[int, Saved] = {}
        self.again: dict[int, dict[int, None]] = {}
        self._ledger = ledger
        self._device = device
        self._parameters = parameters
        self._min_bytes = max(min_bytes, 1)
        self._counts: dict[int, int] = {}
        self._frozen_shapes: set[torch.Size] = set()

    def know_frozen(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note the shapes of frozen parameters, by which autocast's copies of them are recognised.

        Args:
            parameters: parameters, frozen or not.
        """
        for each in parameters:
            if not each.requires_grad and each.dtype not in _AUTOCAST_TYPES:
                self._frozen_shapes |= {each.shape, each.shape[::-1]}

    def enter(self, layer: int) -> None:
        """Note which layer runs from now on; `OUTSIDE` if none does."""
        self._layer = layer

    def pack(self, tensor: Tensor) -> Tensor:
        """Note a tensor that autograd saves. This is the pack hook.

        Returns:
            What autograd holds. The tensor itself would refer to its own graph and never be freed.
        """
        if self._counts_as_saved(tensor):
            self._note(self._ledger.key_of(tensor))
        return tensor if tensor.grad_fn is None else tensor.detach()

    def _counts_as_saved(self, tensor: Tensor) -> bool:
        if tensor.device != self._device or tensor.layout is not torch.strided:
            return False
        whole = tensor if tensor._base is None else tensor._base
        if max(tensor.nbytes, whole.nbytes) < self._min_bytes or not tensor.nbytes:
            return False
        return not self._is_parameter(tensor)

    def _is_parameter(self, tensor: Tensor) -> bool:
        if self._ledger.known_key_of(tensor) in self._parameters:
            return True
        node: Any = tensor.grad_fn
        if node is None:
            return tensor.dtype in _AUTOCAST_TYPES and tensor.shape in self._frozen_shapes
        if node.name() not in _COPYING:
            return False
        while node is not None and node.name() in _COPYING:
            node = node.next_functions[0][0]
        leaf = getattr(node, "variable", None)
        return leaf is not None and self._ledger.known_key_of(leaf) in self._parameters

    def _note(self, key: int) -> None:
        first = self.firsts.get(key)
        if first is None:
            number = self._counts.get(self._layer, 0)
            self._counts[self._layer] = number + 1
            self.firsts[key] = Saved(self._layer, number)
        elif first.layer != self._layer:
            self.again.setdefault(self._layer, {})[key] = None
