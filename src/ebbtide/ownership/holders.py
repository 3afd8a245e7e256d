"""Finds the variables through which a program holds tensors."""

from __future__ import annotations

import gc
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from types import CellType, FrameType
from typing import Any, NamedTuple

import torch

from ebbtide.frames import variables_of, visit_frames
from ebbtide.tensors.memory_parts import parts_of

_PACKAGE = __name__.partition(".")[0]


class HeldTensor(NamedTuple):
    """A tensor that the program holds.

    Attributes:
        holder: where, such as ``"the variable outputs in train() (train.py)"``.
        shape: its shape.
        size_bytes: size of its storage.
    """

    holder: str
    shape: tuple[int, ...]
    size_bytes: int


def find_holders(addresses: Container[int]) -> list[HeldTensor]:
    """Return the tensors with certain storages and who holds them, largest first.

    It looks at all objects of the process, which takes a tenth of a second or more.

    Args:
        addresses: addresses of the storages.
    """
    found = []
    tensors: list[Any] = []
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and _is_in(each, addresses):
            tensors.append(each)
    names = _names_on_stacks({id(tensor) for tensor in tensors})
    tensors.sort(key=lambda each: id(each) not in names)
    seen: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata in seen:
            continue
        holder = names.get(id(tensor)) or _name_in_containers(tensor, tensors)
        if holder:
            seen.add(storage._cdata)
            found.append(HeldTensor(holder, tuple(tensor.shape), storage.nbytes()))
    return sorted(found, key=lambda each: -each.size_bytes)


def _is_in(tensor: torch.Tensor, addresses: Container[int]) -> bool:
    try:
        return any(part.untyped_storage()._cdata in addresses for part in parts_of(tensor))
    except Exception:  # a tensor that is half made, or that raises whatever it is asked
        return False


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


def _name_in_containers(tensor: Any, own: Sequence[Any]) -> str:
    """Return the attribute, list, dict or object that refers to a tensor; empty if none does.

    The order in which Python lists referrers changes with each garbage collection, so the one that
    says most is named.

    Args:
        tensor: the tensor.
        own: the list of tensors of this search, which is no holder.
    """
    referrers = [each for each in gc.get_referrers(tensor) if each is not own]
    for each in referrers:
        if name := _name_of_attribute(each, tensor):
            return name
    containers = [each for each in referrers if type(each) in (dict, list, tuple)]
    for container in containers:
        for outer in gc.get_referrers(container):
            if name := _name_of_attribute(outer, container, _key_of(tensor, container)):
                return name
    for container in containers:
        if type(container) is dict:
            return f"a dict under {_key_of(tensor, container)!r}"
        return f"a {type(container).__name__} of {len(container)}"
    for each in referrers:
        if not isinstance(each, (FrameType, CellType)) and not _is_of_package(each):
            return f"an object of the type {type(each).__name__}"
    if any(isinstance(each, CellType) for each in referrers):
        return "a variable that an inner function uses"
    return ""


def _name_of_attribute(referrer: Any, value: Any, key: Any = None) -> str:
    """Return the name of an attribute that holds a value; empty if there is none.

    Args:
        referrer: what refers to the value: an object, or the dict of its attributes.
        value: the value.
        key: where in the value the tensor is, if the value is a container.
    """
    owner, attributes = referrer, _attributes_of(referrer)
    if type(referrer) is dict:
        holders = gc.get_referrers(referrer)
        owner = next((each for each in holders if _attributes_of(each) is referrer), None)
        attributes = referrer
    name = _key_of(value, attributes) if attributes else None
    if name is None or owner is None or _is_of_package(owner):
        return ""
    if isinstance(owner, torch.nn.Module) and name in ("_buffers", "_parameters"):
        name, key = key, None
    place = "" if key is None else f"[{key!r}]"
    return f"the attribute {name}{place} of a {type(owner).__name__}"


def _attributes_of(owner: Any) -> dict[str, Any] | None:
    try:
        attributes = getattr(owner, "__dict__", None)
    except Exception:  # whatever an object raises when it is asked
        return None
    return attributes if type(attributes) is dict else None


def _key_of(value: Any, container: Any) -> Any:
    """Return the key or the index of a value in a dict, list or tuple; None if it is not there."""
    pairs = container.items() if type(container) is dict else enumerate(container)
    return next((key for key, each in list(pairs) if each is value), None)


def _is_of_package(owner: Any) -> bool:
    return str(type(owner).__module__).partition(".")[0] == _PACKAGE
