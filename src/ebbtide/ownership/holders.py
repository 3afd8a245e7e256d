"""Finds the variables through which a program holds tensors."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch

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
    seen: set[int] = set()
    for tensor in sorted(tensors, key=lambda each: id(each) not in names):
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
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if package not in (_PACKAGE, "torch", "threading"):
                code = frame.f_code
                place = f"{code.co_name}() ({os.path.basename(code.co_filename)})"
                if code.co_name == "<module>":
                    place = os.path.basename(code.co_filename)
                for variables in (frame.f_locals, frame.f_globals):
                    for what, found in _find_in(variables, wanted):
                        names.setdefault(found, f"the variable {what} in {place}")
            frame = frame.f_back
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
    """Return the object, list or dict that refers to a tensor; empty if none is found."""
    for container in gc.get_referrers(tensor):
        if container is own or isinstance(container, FrameType):
            continue
        if type(container) is dict:
            owner = next(
                (each for each in gc.get_referrers(container) if _has(each, container)), None
            )
            key = next((str(k) for k, v in list(container.items()) if v is tensor), "?")
            if owner is not None:
                return f"the attribute {key} of a {type(owner).__name__}"
            return f"a dict under {key!r}"
        if type(container) in (list, tuple):
            return f"a {type(container).__name__} of {len(container)}"
    return ""


def _has(owner: Any, attributes: dict[str, Any]) -> bool:
    try:
        return getattr(owner, "__dict__", None) is attributes
    except Exception:
        return False
