"""Finds what refers to objects: for many of them at once, in one reading of the heap."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from types import TracebackType
from typing import Any

_AT_ONCE = 256  # objects that are asked together whether they refer to anything wanted


class Heap:
    """The objects that Python's garbage collector knows, which are those that refer to others.

    `gc.get_referrers` reads all of them for each call, and compares each of their references with
    each object that it was asked for; this compares with a set.

    Use it as a context manager: what it has found stays alive until its end, and no longer.
    """

    def __init__(self) -> None:
        self.objects: list[Any] = gc.get_objects()

    def __enter__(self) -> Heap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        # A debugger's frames of this search are in the list, and they would hold the list.
        self.objects.clear()

    def referrers(self, values: Iterable[Any]) -> dict[int, list[Any]]:
        """Return the objects that refer to each of some values, by the value's `id`.

        Objects that were made after this heap was read, such as the lists of a search, are not
        among them.
        """
        wanted = {id(each) for each in values}
        found: dict[int, list[Any]] = {}
        for begin in range(0, len(self.objects) if wanted else 0, _AT_ONCE):
            some = self.objects[begin : begin + _AT_ONCE]
            if wanted.isdisjoint(map(id, gc.get_referents(*some))):
                continue
            for each in some:
                for number in wanted.intersection(map(id, gc.get_referents(each))):
                    found.setdefault(number, []).append(each)
        return found
