"""Separates the tensors among a call's arguments from the rest, so that they can be saved."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, final

from torch import Tensor

from ebbtide.tensors.caches import CopiedCache, is_cache


class _Place(NamedTuple):
    """Stands for a tensor among the arguments: its place in the list of tensors."""

    place: int


@final
class Arguments:
    """The arguments of one call: its tensors, and what is needed to make the same call again.

    Tensors are found in tuples, named tuples, lists and dicts, nested or not. These containers are
    copied, so it does no harm if the call changes them; so is a cache, see [Note: caches]. All
    other objects are passed to the second call as they are. A tensor that occurs twice is listed
    once, and the second call gets one tensor for both, because some modules ask whether two
    arguments are the same object.

    Args:
        args: the positional arguments.
        kwargs: the keyword arguments.
        where: names the module in errors.

    Attributes:
        tensors: the tensors. The caller takes the list, so that they are not held twice.
        kind: what tells calls apart that may compute something else: the structure of the
            arguments, what is true, false or None among them, and the types of tensors.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> None:
        self.tensors: list[Tensor] = []
        self._where = where
        self._caches: list[tuple[CopiedCache, Any]] = []
        places: dict[int, _Place] = {}
        self._kind: list[Hashable] = []
        self._args = self._take_apart(args, places)
        self._kwargs = self._take_apart(kwargs, places)
        self.kind = tuple(self._kind)

    def take_tensors(self) -> list[Tensor]:
        """Return the tensors and forget them."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def find_change(self) -> str:
        """Say what the first call has changed that the second call needs."""
        caches, self._caches = self._caches, []
        changes = [copied.find_change(cache) for copied, cache in caches]
        return next(filter(None, changes), "")

    def put_together(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with other tensors in the places of those that were taken."""
        return _put_together(self._args, tensors), _put_together(self._kwargs, tensors)

    def _take_apart(self, value: Any, places: dict[int, _Place]) -> Any:
        if isinstance(value, Tensor):
            place = places.get(id(value))
            if place is None:
                place = places[id(value)] = _Place(len(self.tensors))
                self.tensors.append(value)
            self._kind += (place.place, value.dtype, value.requires_grad)
            return place
        kind = type(value)
        told: Any = value if value is None or kind is bool else kind
        self._kind.append(told)
        if kind is dict:
            self._kind += map(str, value)
            return {key: self._take_apart(each, places) for key, each in value.items()}
        if kind is list or kind is tuple:
            self._kind.append(len(value))
            return kind([self._take_apart(each, places) for each in value])
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return kind(*[self._take_apart(each, places) for each in value])
        if is_cache(value):
            copied = CopiedCache(value)
            self._caches.append((copied, value))
            return copied
        return value


def _put_together(value: Any, tensors: tuple[Tensor, ...]) -> Any:
    kind = type(value)
    if kind is _Place:
        return tensors[value.place]
    if kind is CopiedCache:
        return value.fresh()
    if kind is dict:
        return {key: _put_together(each, tensors) for key, each in value.items()}
    if kind is list or kind is tuple:
        return kind([_put_together(each, tensors) for each in value])
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return kind(*[_put_together(each, tensors) for each in value])
    return value
