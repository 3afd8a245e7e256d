"""Callbacks that do not keep their object alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def call_weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a bound method, or does nothing once its object is gone.

    The function refers to the object weakly, so a global registry may hold the function for ever.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*args)

    return call
