"""Counts the memory of parameters, gradients, optimizer state, inputs and outputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide.runtime.events import Owner
from ebbtide.runtime.torch_internals import parts_of, tree_leaves


@final
class TensorOwners:
    """Counts the tensors of one model's training that are not saved tensors.

    It keeps no tensor alive. Each storage is counted once.

    Args:
        modules: the modules.
        device: the device whose memory is counted.
        at_rest: returns the parameters whose values rest elsewhere, by `id`.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        device: torch.device,
        at_rest: Callable[[], Container[int]] = frozenset,
    ) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._device = device
        self._at_rest = at_rest
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._parameter_bytes = self._gradient_bytes = self._optimizer_bytes = 0
        self._without_gradient: list[weakref.ref[torch.Tensor]] = []
        self._gradients: set[int] = set()  # addresses of the storages that were counted
        # Storages that belong to somebody, by their addresses, with their sizes.
        self._known: dict[int, tuple[Owner, StorageWeakRef, int]] = {}
        self._claimed: set[int] = set()  # addresses of storages that count as activations now

    def begin_step(self) -> None:
        """Count everything anew: parameters and optimizers may have changed between two steps."""
        self._known.clear()
        at_rest = self._at_rest()
        parameters = [each for each in self._parameters() if id(each) not in at_rest]
        buffers = [buffer for module in self._alive() for buffer in module.buffers()]
        found: set[int] = set()
        self._parameter_bytes = self._sum([*parameters, *buffers], found)
        self._gradients = set(found)  # a gradient may be a parameter's own memory, in odd programs
        self._gradient_bytes = 0
        self._without_gradient = [weakref.ref(each) for each in parameters if each.requires_grad]
        self.count_optimizers()

    def count_optimizers(self) -> None:
        """Count the optimizers' state anew, which grows in the first step."""
        found: set[int] = set()
        self._optimizer_bytes = sum(
            self._sum(_tensors_of(optimizer.state.values()), found)
            for optimizer in self._optimizers
        )

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Note that an optimizer steps. Returns whether it trains one of these modules."""
        if optimizer in self._optimizers:
            return True
        own = {id(parameter) for parameter in self._parameters()}
        for group in optimizer.param_groups:
            if any(id(parameter) in own for parameter in group["params"]):
                self._optimizers.add(optimizer)
                return True
        return False

    def note(self, owner: Owner, values: Any) -> None:
        """Note the owner of the tensors in some values, unless another owner has them already."""
        for storage in self._storages(_tensors_of([values])):
            self.note_storage(owner, storage)

    def note_storage(self, owner: Owner, storage: torch.UntypedStorage) -> None:
        """Note the owner of a storage, unless another owner has it already."""
        address = storage._cdata
        known = self._known.get(address)
        if known is None or _is_gone(known[1]):
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._known[address] = owner, reference, storage.nbytes()

    def count(self) -> dict[Owner, int]:
        """Return the bytes of each owner now."""
        self._count_gradients()
        counted = {
            Owner.PARAMETERS: self._parameter_bytes,
            Owner.GRADIENTS: self._gradient_bytes,
            Owner.OPTIMIZER: self._optimizer_bytes,
        }
        # A copy: a worker thread that releases a source notes its storage meanwhile.
        for address, (owner, reference, size_bytes) in self._known.copy().items():
            if _is_gone(reference):
                self._known.pop(address, None)
            elif address not in self._claimed:
                counted[owner] = counted.get(owner, 0) + size_bytes
        return counted

    def claim(self, address: int) -> tuple[Owner, int] | None:
        """Note that a storage counts as an activation from now on.

        Returns:
            The owner and the bytes that the last `count` gave for it; None if it gave none.
        """
        known = self._known.get(address)
        counted = known is not None and address not in self._claimed
        self._claimed.add(address)
        if known is None or not counted or _is_gone(known[1]):
            return None
        return known[0], known[2]

    def disown(self, address: int) -> None:
        """Note that a storage counts as an activation no more."""
        self._claimed.discard(address)

    def recount_gradients(self) -> None:
        """Count the gradients anew: an optimizer's step may free or replace them."""
        self._gradients.clear()
        self._gradient_bytes = 0
        self._without_gradient = [
            weakref.ref(each) for each in self._parameters() if each.requires_grad
        ]

    def _count_gradients(self) -> None:
        waiting = []
        for reference in self._without_gradient:
            parameter = reference()
            if parameter is None:
                continue
            if parameter.grad is None:
                waiting.append(reference)
            else:
                self._gradient_bytes += self._sum([parameter.grad], self._gradients)
        self._without_gradient = waiting

    def _sum(self, tensors: Iterable[torch.Tensor], found: set[int]) -> int:
        """Add up the storages of tensors, without those found before."""
        size_bytes = 0
        for storage in self._storages(tensors):
            if storage._cdata not in found:
                found.add(storage._cdata)
                size_bytes += storage.nbytes()
        return size_bytes

    def _storages(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
        for tensor in tensors:
            for part in parts_of(tensor):
                if part.device == self._device:
                    try:
                        yield part.untyped_storage()
                    except (RuntimeError, NotImplementedError):  # it has no memory of its own
                        continue

    def _alive(self) -> Iterator[nn.Module]:
        yield from (module for module in (known() for known in self._modules) if module is not None)

    def _parameters(self) -> Iterator[nn.Parameter]:
        for module in self._alive():
            yield from module.parameters()


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


def _tensors_of(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers."""
    for value in values:
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
