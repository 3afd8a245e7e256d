"""What an object needs that stands in the place of a module's forward.

[Note: what a model owns] A model that is dropped must be freed at once, with its parameters, the
threads, the files and the memory of its offload, although nobody has called `detach`: the garbage
collector may not come for a long time. So references point one way. A model owns its hooks and the
forward that stands in the place of its own; these own the engine, and the engine the rest. None of
them refers to the model, or to a module of it, but weakly. Autograd's graphs own what they need of
the engine, and the user's handle owns the engine and no hook.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn


def hold_forward(forward: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    """Return a function that gives a forward again without keeping its module alive.

    Args:
        forward: the method of a module, which is bound again when it is wanted. Any other callable
            is held as it is.

    Returns:
        A function that returns the forward, or None once the module is gone.
    """
    owner = getattr(forward, "__self__", None)
    if not isinstance(forward, types.MethodType) or not isinstance(owner, nn.Module):
        return lambda: forward
    known, function = weakref.ref(owner), forward.__func__

    def bind() -> Callable[..., Any] | None:
        alive = known()
        if alive is None:
            return None
        if torch.compiler.is_compiling():  # the compiler can trace no making of a method
            return functools.partial(function, alive)
        return types.MethodType(function, alive)

    return bind


def pass_for(stand_in: Any, forward: Callable[..., Any]) -> None:
    """Give an object the name, the documentation and the attributes of the forward it stands for.

    It is what `functools.update_wrapper` does, without a reference to the forward.
    """
    for name in functools.WRAPPER_ASSIGNMENTS:
        if hasattr(forward, name):
            setattr(stand_in, name, getattr(forward, name))
    vars(stand_in).update(getattr(forward, "__dict__", {}))
    vars(stand_in).pop("__wrapped__", None)


@final
class WrappedForward:
    """The attribute ``__wrapped__`` of an object that stands for a forward; its class has none."""

    def __get__(self, stand_in: Any, kind: type) -> Callable[..., Any]:
        if stand_in is None:
            raise AttributeError(f"{kind.__name__} wraps nothing")
        return stand_in._forward  # type: ignore[no-any-return]


def plain_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of a module's class; what a pickled replacement of it becomes."""
    return types.MethodType(type(module).forward, module)


def itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward; what a pickled replacement of it becomes."""
    return forward
