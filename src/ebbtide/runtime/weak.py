"""Callbacks that keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def call_weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A bound method for those who would keep it for ever: a call does nothing once it is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*args)

    return call
