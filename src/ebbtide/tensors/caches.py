"""Copies of the caches that transformers pass to their layers, for a forward that runs again.

[Note: caches] Unless it is told `use_cache=False`, a model of Transformers fills a cache with keys
and values in training, too: each layer is given the cache of the whole model and adds its part.
When a layer's forward runs again, it must find its part empty, as the first forward did. It gets a
copy of the cache in which the parts of other layers have their shape and no memory, because no
layer reads the part of another.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, final

from torch import Tensor

_MODULE = "transformers.cache_utils"


def is_cache(value: object) -> bool:
    """Whether an argument is a cache of Transformers, which is not imported for this."""
    return any(
        kind.__name__ == "Cache" and kind.__module__ == _MODULE for kind in type(value).__mro__
    )


@final
class CopiedCache:
    """A cache as it was when a layer was called with it.

    Args:
        cache: the cache.
    """

    def __init__(self, cache: Any) -> None:
        self._copy = _copied(cache)
        self._filled = [(tensor, tensor._version) for tensor in _tensors_in(cache)]

    def find_change(self, cache: Any) -> str:
        """Say what the layer has read or changed that the cache had before."""
        filled, self._filled = self._filled, []
        now = {id(tensor) for tensor in _tensors_in(cache)}
        if any(id(tensor) not in now or tensor._version != version for tensor, version in filled):
            return (
                f"extends keys and values that its {type(cache).__name__} had before (call the "
                f"model with use_cache=False)"
            )
        return ""

    def fresh(self) -> Any:
        """Return a cache that the layer can fill again."""
        return _copied(self._copy)


def _is_part(value: object) -> bool:
    """Whether a value is a cache or the part of one layer in it."""
    return any(kind.__module__ == _MODULE for kind in type(value).__mro__)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().new_empty(()).expand(value.shape)
    if isinstance(value, list | tuple):
        return type(value)([_copied(each) for each in value])
    if isinstance(value, dict):
        return type(value)({key: _copied(each) for key, each in value.items()})
    if not _is_part(value):
        return value
    copied = copy.copy(value)
    for name, each in vars(value).items():
        copied.__dict__[name] = _copied(each)
    return copied


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
    elif _is_part(value):
        yield from _tensors_in(vars(value))
