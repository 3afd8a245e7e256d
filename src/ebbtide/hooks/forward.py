"""A forward whose saved activations are offloaded, in the place of the forward it wraps."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, final

from torch import nn

from ebbtide.hooks.activations import ActivationHooks
from ebbtide.hooks.layers import LayerTracker
from ebbtide.hooks.weights import WeightHooks


@final
class OffloadedForward:
    """Calls `forward` with the saved-tensor hooks on, whatever way the call ends.

    It looks like what it wraps to `inspect.signature`. A copy of it (`copy.deepcopy` of the model,
    an EMA, a pickle) is the plain forward of the copied module.

    Args:
        forward: what is wrapped.
        hooks: gives the saved-tensor hooks for a call that begins now.
        tracker: numbers the layers, where there are any.
        weights: come to the device while their layers work, where they rest on the host.

    Attributes:
        handle: the statistics and the way back, where `wrap_forward_with_offload` made it.
    """

    handle: Any

    def __init__(
        self,
        forward: Callable[..., Any],
        hooks: Callable[[], ActivationHooks],
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
        """Only pass calls on from now on."""
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
