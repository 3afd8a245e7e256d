"""Callbacks that do not keep their object alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def call_weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method, or returns None once its object is gone.

    The function refers to the object weakly, so a global registry may hold the function for ever.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call
