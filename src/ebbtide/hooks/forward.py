"""A replacement for a forward that offloads the activations saved inside it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, final

from torch import nn

from ebbtide.hooks.layers import LayerTracker
from ebbtide.hooks.saved_tensors import SavedTensorHooks
from ebbtide.hooks.weights import WeightHooks


@final
class OffloadedForward:
    """Calls `forward` with the saved-tensor hooks active, and removes them however the call ends.

    `inspect.signature` shows the signature of the wrapped forward. A copy of this object
    (`copy.deepcopy` of the model, an EMA, a pickle) is the plain forward of the copied module.

    Args:
        forward: the callable to wrap.
        hooks: returns the saved-tensor hooks for a call that begins now.
        tracker: numbers the layers; None for a callable without layers.
        weights: hooks of the offloaded weights; None if no weights are offloaded.

    Attributes:
        handle: the `OffloadHandle`; set only by `wrap_forward_with_offload`.
    """

    handle: Any

    def __init__(
        self,
        forward: Callable[..., Any],
        hooks: Callable[[], SavedTensorHooks],
        tracker: LayerTracker | None,
        weights: WeightHooks | None = None,
    ) -> None:
        self._weights = weights
        functools.update_wrapper(self, forward)
        self._forward = forward
        self._hooks = hooks
        self._tracker = tracker
        self._active = True

    def deactivate(self) -> None:
        """Make every later call a plain call of the wrapped forward."""
        self._active = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._active:
            return self._forward(*args, **kwargs)
        if self._weights is None:
            return self._call(*args, **kwargs)
        with self._weights.at_work():
            return self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        hooks = self._hooks()
        if not hooks.begin():
            return self._forward(*args, **kwargs)
        completed = False
        if self._tracker is not None:
            self._tracker.begin_forward()
        try:
            result = self._forward(*args, **kwargs)
            completed = True
        finally:
            hooks.end()
            if self._tracker is not None:
                self._tracker.end_forward(completed=completed)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        owner = getattr(self._forward, "__self__", None)
        copied = memo.get(id(owner))
        if isinstance(copied, nn.Module):
            return types.MethodType(type(copied).forward, copied)
        return self._forward

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        owner = getattr(self._forward, "__self__", None)
        if isinstance(owner, nn.Module):
            return _plain_forward, (owner,)
        return _itself, (self._forward,)


def _plain_forward(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(module).forward, module)


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward
