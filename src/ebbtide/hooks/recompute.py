"""A replacement for a layer's forward that backward runs again, instead of saving what it saves."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, final

from torch import nn

from ebbtide.coexistence.compiler import is_traced, skip_in_compiler
from ebbtide.coexistence.stand_in import (
    WrappedForward,
    hold_forward,
    itself,
    pass_for,
    plain_forward,
)
from ebbtide.hooks.layers import ReplaceForward
from ebbtide.recomputation.call import Recomputing, recompute_later
from ebbtide.transfers.layer import Layer

FindLayer = Callable[[], Layer | None]
"""Returns the call of a layer that begins now; None where it is not counted as one."""


def replace_forwards(find: Callable[[FindLayer], Recomputing | None]) -> ReplaceForward:
    """Return what makes the replacements of layers' forwards.

    Args:
        find: says whether a call is recomputed.
    """

    def replace(find_layer: FindLayer, module: nn.Module, forward: Any) -> RecomputedForward:
        return RecomputedForward(functools.partial(find, find_layer), module, forward)

    return replace


@final
class RecomputedForward:
    """Calls a layer's forward under a checkpoint where the policy says so; else as it is.

    A copy of this object, with the model or alone, is the plain forward of the copied module.

    Args:
        find: says whether the call that begins now is recomputed.
        module: the module whose forward is replaced.
        forward: the forward to call.
    """

    __wrapped__ = WrappedForward()

    def __init__(
        self,
        find: Callable[[], Recomputing | None],
        module: nn.Module,
        forward: Callable[..., Any],
    ) -> None:
        pass_for(self, forward)
        self._find = find
        self._known = weakref.ref(module)  # see [Note: what a model owns]
        self._find_forward = hold_forward(forward)

    @property
    def _module(self) -> nn.Module | None:
        return self._known()

    @property
    def _forward(self) -> Callable[..., Any]:
        forward = self._find_forward()
        assert forward is not None, "the module of this forward is gone"
        return forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward, module = self._forward, self._module
        if is_traced():
            return forward(*args, **kwargs)
        if args and args[0] is module:
            args = args[1:]  # accelerate binds what it finds in `module.forward` to it again
        recomputing = self._find()
        if recomputing is None or module is None:
            return forward(*args, **kwargs)
        return recompute_later(recomputing, module, forward, args, kwargs)

    def restore(self) -> None:
        """Give the module its own forward back."""
        module = self._module
        if module is None or module.__dict__.get("forward") is not self:
            return  # other code has wrapped this object, which now only forwards calls
        del module.__dict__["forward"]
        if module.forward != self._forward:
            module.__dict__["forward"] = self._forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        copied = memo.get(id(getattr(self._forward, "__self__", None)))
        return plain_forward(copied) if isinstance(copied, nn.Module) else self._forward

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        owner = getattr(self._forward, "__self__", None)
        if isinstance(owner, nn.Module):
            return getattr, (owner, "forward")  # see `OffloadedForward`
        return itself, (self._forward,)


skip_in_compiler(RecomputedForward.__call__, with_callees=False)
for _name in ("_forward", "_module"):
    skip_in_compiler(vars(RecomputedForward)[_name].fget)
