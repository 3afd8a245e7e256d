"""Notes which storages autograd saves in which part of a forward."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from ebbtide.planning.profiling.fake_recipes import FakeRecipes
from ebbtide.planning.profiling.storage_ledger import START, Part, StorageLedger

_AUTOCAST_TYPES: Final = frozenset({torch.bfloat16, torch.float16})

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


@final
class SavedStorages:
    """Notes the storages that autograd saves in a forward, through its pack hook.

    Args:
        ledger: gives storages their keys.
        device: the device of the model; what is elsewhere does not count.
        parameters: keys of the storages of parameters and buffers, which do not count.
        min_bytes: smaller storages do not count.

    Attributes:
        firsts: the part of the forward that saved each storage first, by key.
        saves: for each part of the forward, the keys of the storages that it saved, in order.
        recipes: finds the storages that can be rebuilt.
        min_bytes: as given, and at least 1.
    """

    def __init__(
        self, ledger: StorageLedger, device: torch.device, parameters: Set[int], min_bytes: int
    ) -> None:
        self._part = START
        self.firsts: dict[int, Part] = {}
        self.saves: dict[Part, dict[int, None]] = {}
        self._ledger = ledger
        self._device = device
        self._parameters = parameters
        self.min_bytes = max(min_bytes, 1)
        self._frozen_shapes: set[torch.Size] = set()
        self.recipes = FakeRecipes(ledger, unpack)

    def know_frozen(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note the shapes of frozen parameters, by which autocast's copies of them are recognised.

        Args:
            parameters: parameters, frozen or not.
        """
        for each in parameters:
            if not each.requires_grad and each.dtype not in _AUTOCAST_TYPES:
                self._frozen_shapes |= {each.shape, each.shape[::-1]}

    def enter(self, part: Part) -> None:
        """Note which part of the forward runs from now on."""
        self._part = part

    def pack(self, tensor: Tensor) -> Tensor:
        """Note a tensor that autograd saves. This is the pack hook.

        Returns:
            What autograd holds.
        """
        if self._counts_as_saved(tensor):
            key = self._ledger.key_of(tensor)
            self._note(key)
            self.recipes.note(tensor, key)
        return without_graph(tensor)

    def _counts_as_saved(self, tensor: Tensor) -> bool:
        if tensor.device != self._device or tensor.layout is not torch.strided:
            return False
        whole = tensor if tensor._base is None else tensor._base
        if max(tensor.nbytes, whole.nbytes) < self.min_bytes or not tensor.nbytes:
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
        self.firsts.setdefault(key, self._part)
        self.saves.setdefault(self._part, {})[key] = None


def without_graph(tensor: Tensor) -> Tensor:
    """Return what autograd is to hold of a tensor, which would refer to its own graph for good."""
    return tensor if tensor.grad_fn is None else tensor.detach()


def unpack(tensor: Tensor) -> Tensor:
    """Return what `SavedStorages.pack` returned. This is the unpack hook."""
    return tensor
