"""Finds the variables through which a program holds tensors."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from types import CellType, FrameType
from typing import Any, NamedTuple

import torch

from ebbtide.frames import variables_of, visit_frames
from ebbtide.ownership.referrers import Heap
from ebbtide.tensors.memory_parts import parts_of

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
    """Return the tensors with certain storages and who holds them, largest first.

    It reads all objects of the process up to four times, which takes up to a second.

    Args:
        addresses: addresses of the storages.
    """
    found = []
    with Heap() as heap:
        tensors = _tensors_with(addresses, heap.objects)
        on_stacks = _names_on_stacks({id(tensor) for tensor, _ in tensors})
        named = {address for tensor, held in tensors if id(tensor) in on_stacks for address in held}
        others = [tensor for tensor, held in tensors if not named.issuperset(held)]
        names = {**_names_in_containers(others, heap), **on_stacks}
        seen: set[int] = set()
        for tensor, held in tensors:
            name, new = names.get(id(tensor)), held.keys() - seen
            if name and new:
                seen |= new
                size_bytes = sum(held[address] for address in new)
                found.append(HeldTensor(name, _shape_of(tensor), size_bytes))
    return sorted(found, key=lambda each: -each.size_bytes)


def _tensors_with(
    addresses: Container[int], objects: Sequence[Any]
) -> list[tuple[torch.Tensor, dict[int, int]]]:
    """Return the tensors with certain storages, and the bytes of these by their addresses."""
    found = []
    for each in objects:
        if issubclass(type(each), torch.Tensor) and (held := _held_storages(each, addresses)):
            found.append((each, held))
    return found


def _held_storages(tensor: torch.Tensor, addresses: Container[int]) -> dict[int, int]:
    try:
        storages = [part.untyped_storage() for part in parts_of(tensor)]
    except Exception:  # a tensor that is half made, or that raises whatever it is asked
        return {}
    return {each._cdata: each.nbytes() for each in storages if each._cdata in addresses}


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
        elif type(value) in (list, tuple):
            yield from ((f"{name}[{i}]", id(v)) for i, v in enumerate(value) if id(v) in wanted)
        elif type(value) is dict:
            yield from ((f"{name}[{k!r}]", id(v)) for k, v in value.items() if id(v) in wanted)


def _names_in_containers(tensors: Sequence[torch.Tensor], heap: Heap) -> dict[int, str]:
    """Return the attributes, lists, dicts and objects that refer to tensors, by the tensor's `id`.

    Args:
        tensors: the tensors.
        heap: what may refer to them.
    """
    direct = heap.referrers(tensors)
    containers = [
        each for some in direct.values() for each in some if type(each) in (dict, list, tuple)
    ]
    outer = heap.referrers(containers)
    dicts = [each for some in outer.values() for each in some if type(each) is dict]
    search = _Search({**heap.referrers(dicts), **outer, **direct}, {})
    return {id(tensor): search.name(tensor) for tensor in tensors}


class _Search(NamedTuple):
    """What refers to tensors, and to what refers to them.

    Attributes:
        referrers: what refers to an object, by the object's `id`.
        keys: dicts, lists and tuples by their `id`, and the keys or indices of their values by the
            values' `id`.
    """

    referrers: dict[int, list[Any]]
    keys: dict[int, tuple[Any, dict[int, Any]]]

    def name(self, tensor: torch.Tensor) -> str:
        """Return what refers to a tensor; empty if nothing does.

        The order of what refers to it changes with each garbage collection, so the one that says
        most is named.
        """
        referrers = self.referrers.get(id(tensor), [])
        for each in referrers:
            if name := self._name_of_attribute(each, tensor):
                return name
        containers = [each for each in referrers if type(each) in (dict, list, tuple)]
        for container in containers:
            for outer in self.referrers.get(id(container), []):
                if name := self._name_of_attribute(outer, container, self._key(tensor, container)):
                    return name
        for container in containers:
            if type(container) is dict:
                return f"a dict under {self._key(tensor, container)!r}"
            return f"a {type(container).__name__} of {len(container)}"
        for each in referrers:
            if not isinstance(each, (FrameType, CellType)) and not _is_of_package(each):
                return f"an object of the type {type(each).__name__}"
        if any(isinstance(each, CellType) for each in referrers):
            return "a variable that an inner function uses"
        return ""

    def _name_of_attribute(self, referrer: Any, value: Any, key: Any = None) -> str:
        """Return the name of an attribute that holds a value; empty if there is none.

        Args:
            referrer: what refers to the value: an object, or the dict of its attributes.
            value: the value.
            key: where in the value the tensor is, if the value is a container.
        """
        owner, attributes = referrer, _attributes_of(referrer)
        if type(referrer) is dict:
            holders = self.referrers.get(id(referrer), [])
            owner = next((each for each in holders if _attributes_of(each) is referrer), None)
            attributes = referrer
        name = self._key(value, attributes) if attributes else None
        if name is None or owner is None or _is_of_package(owner):
            return ""
        if isinstance(owner, torch.nn.Module) and name in ("_buffers", "_parameters"):
            name, key = key, None
        place = "" if key is None else f"[{key!r}]"
        return f"the attribute {name}{place} of a {type(owner).__name__}"

    def _key(self, value: Any, container: Any) -> Any:
        """Return the first key or index of a value in a container; None if it is not there."""
        if id(container) not in self.keys:
            items = container.items() if type(container) is dict else enumerate(container)
            keys = {id(each): key for key, each in reversed(list(items))}
            self.keys[id(container)] = (container, keys)  # an `id` is another's once it is gone
        return self.keys[id(container)][1].get(id(value))


def _attributes_of(owner: Any) -> dict[str, Any] | None:
    try:
        attributes = getattr(owner, "__dict__", None)
    except Exception:  # whatever an object raises when it is asked
        return None
    return attributes if type(attributes) is dict else None


def _is_of_package(owner: Any) -> bool:
    return str(type(owner).__module__).partition(".")[0] == _PACKAGE
