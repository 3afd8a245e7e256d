"""Tells whose memory is: by which variables a program holds tensors, and what trains a model."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from types import CellType, FrameType
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide.devices.process import variables_of, visit_frames
from ebbtide.runtime.events import Owner
from ebbtide.runtime.torch_internals import parts_of, tree_leaves

# ---- Finds the variables through which a program holds tensors ----

_MOST_HOLDERS = 10  # storages whose holders are looked for, the largest first
_MOST_AROUND = 3  # levels of containers around a tensor, and containers in each
_PACKAGE = __name__.partition(".")[0]


class HeldTensor(NamedTuple):
    """A tensor that the program holds.

    Attributes:
        holder: where, such as ``"the variable outputs in train() (train.py)"``.
        shape: its shape; (elements,) for a nested tensor with the strided layout.
        size_bytes: size of its storages.
    """

    holder: str
    shape: tuple[int, ...]
    size_bytes: int


def find_holders(addresses: Container[int]) -> list[HeldTensor]:
    """Return the largest tensors with certain storages and who holds them, largest first.

    It reads all objects of the process some times, which takes up to a second.

    Args:
        addresses: addresses of the storages.
    """
    tensors = _tensors_with(addresses)
    on_stacks = _names_on_stacks({id(tensor) for tensor, _ in tensors})
    # A variable says more of where a storage is held than a container that has it, too.
    tensors.sort(key=lambda each: (sum(each[1].values()), id(each[0]) in on_stacks))
    found: list[HeldTensor] = []
    seen: set[int] = set()
    while tensors and len(found) < _MOST_HOLDERS:
        tensor, held = tensors.pop()
        new = held.keys() - seen
        name = new and (on_stacks.get(id(tensor)) or _name_of_holder(tensor))
        if name:
            seen |= new
            size_bytes = sum(held[address] for address in new)
            found.append(HeldTensor(name, _shape_of(tensor), size_bytes))
    return found


def _tensors_with(addresses: Container[int]) -> list[tuple[torch.Tensor, dict[int, int]]]:
    """Return the tensors with certain storages, and the bytes of these by their addresses."""
    found = []
    for each in gc.get_objects():
        if not issubclass(type(each), torch.Tensor):
            continue
        # A tensor may be half made, or raise whatever it is asked.
        with contextlib.suppress(Exception):
            storages = [part.untyped_storage() for part in parts_of(each)]
            held = {one._cdata: one.nbytes() for one in storages if one._cdata in addresses}
            if held:
                found.append((each, held))
    return found


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    if tensor.is_nested and tensor.layout is torch.strided:  # its rows have shapes of their own
        return (tensor.numel(),)
    return tuple(tensor.shape)


def _names_on_stacks(wanted: set[int]) -> dict[int, str]:
    """Return what local and global variables of running functions hold, by `id`."""
    names: dict[int, str] = {}

    def look(frame: FrameType) -> None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in (_PACKAGE, "torch", "threading"):
            return
        code = frame.f_code
        place = f"{code.co_name}() ({os.path.basename(code.co_filename)})"
        if code.co_name == "<module>":
            place = os.path.basename(code.co_filename)
        for variables in (variables_of(frame), frame.f_globals):
            for what, found in _find_in(variables, wanted):
                names.setdefault(found, f"the variable {what} in {place}")

    visit_frames(look)
    return names


def _find_in(variables: Mapping[str, Any], wanted: set[int]) -> Iterator[tuple[str, int]]:
    """Yield the names under which variables hold what is wanted, also in a list or a dict."""
    for name, value in list(variables.items()):
        if id(value) in wanted:
            yield name, id(value)
        elif type(value) in (list, tuple, dict):
            yield from ((f"{name}[{k!r}]", id(v)) for k, v in _items(value) if id(v) in wanted)


def _items(container: Any) -> list[tuple[Any, Any]]:
    return list(container.items() if type(container) is dict else enumerate(container))


def _key_of(value: Any, container: Any) -> Any:
    """Return the first key or index of a value in a container; None if it is not there."""
    return next((key for key, each in _items(container) if each is value), None)


def _name_of_holder(tensor: torch.Tensor) -> str:
    """Return which attribute of an object has a tensor, or else what refers to it.

    The names are words such as ``"the attribute outputs['last'] of a Model"``; empty if nothing
    refers to it.
    """
    found = ""
    looked_at: deque[tuple[Any, tuple[Any, ...]]] = deque([(tensor, ())])
    while looked_at:
        value, keys = looked_at.popleft()  # or it would be a container that refers to the value
        num_containers = 0
        for each in gc.get_referrers(value):
            kind = type(each)
            if kind in (dict, list, tuple):
                if not keys:
                    place = f"under {_key_of(value, each)!r}" if kind is dict else f"of {len(each)}"
                    found = f"a {kind.__name__} {place}"
                num_containers += 1
                if len(keys) < _MOST_AROUND and num_containers <= _MOST_AROUND:
                    looked_at.append((each, (_key_of(value, each), *keys)))
            elif isinstance(each, CellType):
                found = found or "a variable that an inner function uses"
            elif not isinstance(each, FrameType) and not _is_of_package(each):
                attributes = _attributes_of(each)
                path = keys if attributes is value else (_key_of(value, attributes), *keys)
                if path and path[0] is not None:
                    name, *rest = path
                    place = "".join(f"[{key!r}]" for key in rest)
                    return f"the attribute {name}{place} of a {kind.__name__}"
                if not keys:
                    found = found or f"an object of the type {kind.__name__}"
    return found


def _attributes_of(owner: Any) -> dict[str, Any]:
    try:
        attributes = getattr(owner, "__dict__", None)
    except Exception:  # whatever an object raises when it is asked
        return {}
    return attributes if type(attributes) is dict else {}


def _is_of_package(owner: Any) -> bool:
    return str(type(owner).__module__).partition(".")[0] == _PACKAGE


# ---- Counts the memory of parameters, gradients, optimizer state, inputs and outputs ----

_MANY = 0.05  # of the memory in use


class _Known(NamedTuple):
    """A storage that belongs to somebody; the reference does not keep it alive."""

    owner: Owner
    reference: StorageWeakRef
    size_bytes: int

    @property
    def is_gone(self) -> bool:
        """Whether the storage was freed."""
        return bool(self.reference.expired())  # type: ignore[no-untyped-call]


@final
class TensorOwners:
    """Counts the tensors of one model's training that are not saved tensors.

    It keeps no tensor alive. Each storage is counted once.

    Attributes:
        held: offloaded activations that the program held when a backward began, and by which
            variables. They are looked for once.

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
        self._known: dict[int, _Known] = {}  # by the address of the storage
        self.held: tuple[HeldTensor, ...] | None = None
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
        if known is None or known.is_gone:
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._known[address] = _Known(owner, reference, storage.nbytes())

    def count(self) -> dict[Owner, int]:
        """Return the bytes of each owner now."""
        self._count_gradients()
        counted = {
            Owner.PARAMETERS: self._parameter_bytes,
            Owner.GRADIENTS: self._gradient_bytes,
            Owner.OPTIMIZER: self._optimizer_bytes,
        }
        # A copy: a worker thread that releases a source notes its storage meanwhile.
        for address, known in self._known.copy().items():
            if known.is_gone:
                self._known.pop(address, None)
            elif address not in self._claimed:
                counted[known.owner] = counted.get(known.owner, 0) + known.size_bytes
        return counted

    def look_for_holders(self, whole_bytes: int) -> None:
        """Look for the variables that hold offloaded activations, if these are many.

        Args:
            whole_bytes: the memory in use.
        """
        if self.held is None and self.count().get(Owner.REFERENCED, 0) > _MANY * whole_bytes:
            referenced = {
                address
                for address, known in self._known.copy().items()
                if known.owner is Owner.REFERENCED and address not in self._claimed
            }
            self.held = tuple(find_holders(referenced))

    def claim(self, address: int) -> tuple[Owner, int] | None:
        """Note that a storage counts as an activation from now on.

        Returns:
            The owner and the bytes that the last `count` gave for it; None if it gave none.
        """
        known = self._known.get(address)
        counted = known is not None and address not in self._claimed
        self._claimed.add(address)
        if known is None or not counted or known.is_gone:
            return None
        return known.owner, known.size_bytes

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


def _tensors_of(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers."""
    for value in values:
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
