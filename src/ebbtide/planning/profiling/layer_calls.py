"""Notes which layer's call runs during a forward, and what it gets as input."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]
from torch.utils._pytree import tree_leaves

from ebbtide.planning.profiling.storage_ledger import START, Part, StorageLedger


class LayerCall(NamedTuple):
    """One call of a layer.

    Attributes:
        name: qualified name of the module.
        inputs: keys of the storages of its input tensors.
        tensors: the input tensors with their versions, while the call runs.
    """

    name: str
    inputs: tuple[int, ...]
    tensors: list[tuple[Tensor, int]]


@final
class LayerCalls:
    """Numbers the calls of layers in a forward and tells which of them a backward node belongs to.

    [Note: nodes of layers] Autograd numbers the nodes of a graph in the order in which the forward
    makes them. So the number of a node that runs in backward tells which part of the forward has
    made it.

    Args:
        ledger: is told which part of the step runs.

    Attributes:
        listener: is told which part of the forward runs; None: nobody is.
        calls: the calls so far.
        changing: indices of the calls that changed an input in place. A second forward would find
            other values.
    """

    def __init__(self, ledger: StorageLedger) -> None:
        self.listener: Callable[[Part], None] | None = None
        self.calls: list[LayerCall] = []
        self.changing: set[int] = set()
        self._ledger = ledger
        self._open: list[int] = []
        self._begins = [0]  # the first node of each part of the forward
        self._parts = [START]
        self._end_number = 0

    def hook(self, model: nn.Module, names: Iterable[str]) -> None:
        """Hook the layers of a model, for good.

        Args:
            model: a copy of the model, which is used once.
            names: names of the modules whose calls count.
        """
        for name in names:
            module = model.get_submodule(name)
            begin = functools.partial(self._begin, name)
            module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._end, always_call=True)

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint computes the layer again
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        keys = dict.fromkeys(self._ledger.key_of(tensor) for tensor in tensors)
        self._open.append(len(self.calls))
        versions = [(tensor, tensor._version) for tensor in tensors]
        self.calls.append(LayerCall(name, tuple(keys), versions))
        self._enter()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        if self._open and torch._C._current_graph_task_id() == -1:
            index = self._open.pop()
            tensors = self.calls[index].tensors
            if any(tensor._version != version for tensor, version in tensors):
                self.changing.add(index)
            tensors.clear()
            self._enter()

    def _enter(self) -> None:
        inside = bool(self._open)
        layer = self._open[-1] if inside else len(self.calls) - 1
        part = Part(backward=False, layer=layer, inside=inside)
        self._begins.append(_get_sequence_nr())
        self._parts.append(part)
        self._ledger.enter(part)
        if self.listener is not None:
            self.listener(part)

    @property
    def open(self) -> Sequence[int]:
        """Indices of the calls that run now in the forward, the outermost first."""
        return self._open

    def close(self) -> None:
        """Note that the forward and the loss have ended. Nodes made from now on are no layer's."""
        self._end_number = _get_sequence_nr()

    def part_of(self, node_number: int) -> Part | None:
        """Return the part of the backward that a node belongs to.

        Args:
            node_number: the number that autograd gave to the node.

        Returns:
            The part; None for nodes that no forward made, such as those that accumulate gradients.
        """
        if node_number >= self._end_number:
            return None
        forward = self._parts[bisect.bisect_right(self._begins, node_number) - 1]
        return forward._replace(backward=True)
