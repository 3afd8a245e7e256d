"""Sees each operator of a step: how long it takes, what it allocates, whose weights it reads."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ebbtide.planning.profiling.layer_calls import LayerCalls
from ebbtide.planning.profiling.operator_costs import OperatorCosts
from ebbtide.planning.profiling.storage_ledger import Part, StorageLedger


@final
class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operator while it is the innermost mode.

    Args:
        ledger: is told of each storage that an operator allocates.
        calls: tells which layer an operator of the backward belongs to.
        costs: tells how long an operator takes.
        parameters: keys of the storages of parameters.

    Attributes:
        seconds: seconds of the operators in each part of the step.
        owners: the index of the layer that first read each parameter in the forward, by key; -1 if
            that was outside layers.
    """

    def __init__(
        self,
        ledger: StorageLedger,
        calls: LayerCalls,
        costs: OperatorCosts,
        parameters: Set[int],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds: dict[Part, float] = {}
        self.owners: dict[int, int] = {}
        self._ledger = ledger
        self._calls = calls
        self._costs = costs
        self._parameters = parameters

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator and note what it costs."""
        kwargs = kwargs or {}
        self._follow_backward()
        if not self._ledger.part.backward:
            self._note_owners(args, kwargs)
        output = operator(*args, **kwargs)
        part = self._ledger.part
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self._ledger.key_of(leaf)
        took_s = self._costs.seconds(operator, args, kwargs, output)
        self.seconds[part] = self.seconds.get(part, 0.0) + took_s
        return output

    def _follow_backward(self) -> None:
        if torch._C._current_graph_task_id() == -1:
            return
        node: Any = torch._C._current_autograd_node()
        part = None if node is None else self._calls.part_of(node._sequence_nr())
        if part is not None:
            self._ledger.enter(part)
        elif not self._ledger.part.backward:  # the gradient of the loss itself
            self._ledger.enter(self._ledger.part._replace(backward=True))

    def _note_owners(self, args: Any, kwargs: Any) -> None:
        part = self._ledger.part
        for leaf in tree_leaves((args, kwargs)):
            if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
                continue
            key = self._ledger.known_key_of(leaf)
            if key is not None and key in self._parameters:
                self.owners.setdefault(key, part.layer if part.inside else -1)
