"""Finds the storages of a step that the engine can rebuild, in autograd's graph of fake tensors.

It looks for what `activations.rebuild.RebuildFinder` looks for, by the same rules. Whether a recipe
gives the same bits is known only once it has run; where it does not, the engine keeps the storage
or offloads it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

from torch import Tensor

from ebbtide.planning.profiling.storage_ledger import StorageLedger
from ebbtide.tensors.recipes import MOST_STEPS, RECIPES


class FakeRecipe(NamedTuple):
    """How a storage can be rebuilt.

    Attributes:
        sources: keys of the saved storages that it is computed from. Parameters and small tensors,
            which are in memory in any case, are not among them.
        traffic_bytes: bytes that computing it reads and writes.
    """

    sources: tuple[int, ...]
    traffic_bytes: int


class _Input(NamedTuple):
    """An input of an operation: a saved storage, or a tensor that is in memory in any case."""

    key: int | None
    size_bytes: int


@final
class FakeRecipes:
    """Finds recipes for the storages that autograd saves of a fake step.

    Args:
        ledger: gives storages their keys.
        unpack: the unpack hook of the step, by which tensors that it has packed are recognised.

    Attributes:
        found: recipes of the storages that can be rebuilt, by key.
    """

    def __init__(self, ledger: StorageLedger, unpack: Any) -> None:
        self.found: dict[int, FakeRecipe] = {}
        self._ledger = ledger
        self._unpack = unpack
        self._versions: dict[int, int] = {}  # of the saved storages when they were saved last
        self._depths: dict[int, int] = {}

    def note(self, tensor: Tensor, key: int) -> None:
        """Note a tensor that is saved, and find its recipe if it is the first save of its storage.

        Args:
            tensor: the saved tensor.
            key: key of its storage.
        """
        if key not in self._versions:
            self._find(tensor, key)
        self._versions[key] = tensor._version

    def _find(self, tensor: Tensor, key: int) -> None:
        output = tensor if tensor._base is None else tensor._base
        node: Any = output.grad_fn
        if node is None or output._version:
            return
        recipe = RECIPES.get(node.name())
        whole = not output.storage_offset() and output.nbytes == output.untyped_storage().nbytes()
        if recipe is None or not whole or not output.is_contiguous():
            return
        inputs: list[_Input] = []
        for place, name in enumerate(recipe.inputs):
            found = self._saved_by(node, name) or self._saved_before(node, place)
            if found is None:
                return
            inputs.append(found)
        sources = tuple(dict.fromkeys(each.key for each in inputs if each.key is not None))
        depth = 1 + max((self._depths.get(source, 0) for source in sources), default=0)
        if not sources or depth > MOST_STEPS:
            return
        traffic_bytes = recipe.traffic_bytes([each.size_bytes for each in inputs], output.nbytes)
        self.found[key] = FakeRecipe(sources, traffic_bytes)
        self._depths[key] = depth

    def _saved_by(self, node: Any, name: str) -> _Input | None:
        """Return an operation's input that the operation has saved itself."""
        raw = getattr(node, f"_raw_saved_{name}", None)
        try:
            if raw is None or raw.unpack_hook is not self._unpack:
                return None
            tensor = raw.data
        except (AttributeError, RuntimeError):  # nothing was saved
            return None
        key = self._ledger.known_key_of(tensor)
        if key not in self._versions:
            return _Input(None, tensor.nbytes)
        return _Input(key, tensor.nbytes) if tensor._version == self._versions[key] else None

    def _saved_before(self, node: Any, place: int) -> _Input | None:
        """Return an operation's input that the operation before has saved as its result."""
        if place >= len(node.next_functions):
            return None
        producer, number = node.next_functions[place]
        return None if producer is None or number else self._saved_by(producer, "result")
