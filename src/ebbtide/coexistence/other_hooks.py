"""Where ebbtide steps aside, because other code decides what becomes of saved tensors.

[Note: torch.func inside a forward] `torch.func.grad`, `vjp`, `jacrev` and `hessian` cannot work
with saved-tensor hooks, so they call `disable_saved_tensors_hooks`. That function raises if hooks
are pushed already, as ours are during a forward. It need not: while hooks are disabled, autograd
calls none, so pushed hooks do no harm. `let_others_disable` makes torch disable our hooks there
instead of raising. Hooks of other code are treated as before.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ebbtide.activations.handles import is_of_checkpoint, is_of_recomputed, restore
from ebbtide.errors import PolicyError
from ebbtide.interface.warning import warn_user

_AUTOGRAD: Any = torch._C._autograd
_MODES = torch._C._TorchDispatchModeKey

_warned: weakref.WeakSet[object] = weakref.WeakSet()


def hooks_are_wanted(forward: object = None) -> bool:
    """Whether saved-tensor hooks of ebbtide should be pushed now.

    They are not wanted where autograd records nothing, where hooks are disabled (as inside
    `torch.func.grad`), while a model is exported or traced, and where other code has hooked what
    autograd saves: torch calls only the innermost hooks, so ours would replace those.

    Args:
        forward: the offloaded forward that asks, which is warned of other code's hooks once.
    """
    if not torch.is_grad_enabled() or not _AUTOGRAD._saved_tensors_hooks_is_enabled():
        return False
    hooks = _AUTOGRAD._top_saved_tensors_default_hooks(True)
    if hooks is not None and hooks[1] is not restore:
        if not is_of_checkpoint(hooks[0]):
            _warn_of_other_hooks(hooks[0], forward)
        return False
    return not is_traced()


def is_traced() -> bool:
    """Whether a forward runs only to be written down: exported, traced, or with fake tensors."""
    return (
        torch.compiler.is_exporting()
        or torch._C._get_tracing_state() is not None
        or torch._C._get_dispatch_mode(_MODES.PROXY) is not None
        or torch._C._get_dispatch_mode(_MODES.FAKE) is not None
    )


def refuse_moving_weights() -> None:
    """Check that weights can be moved to the device for a forward that begins now.

    Raises:
        PolicyError: the forward is transformed or traced, which would record the move itself.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        what = "runs inside a transform of torch.func (grad, vmap, jvp, ...)"
    elif is_traced():
        what = "is exported, traced, or run with fake tensors"
    else:
        return
    raise PolicyError(
        f"the model {what} while its weights are offloaded to the host, which is not possible: "
        f"call detach() on the offload's handle first, or offload without weights=..."
    )


def let_others_disable() -> None:
    """See [Note: torch.func inside a forward]. Calling this again does nothing."""
    disable = _AUTOGRAD._saved_tensors_hooks_disable
    if not hasattr(disable, "__wrapped__"):
        _AUTOGRAD._saved_tensors_hooks_disable = _tolerating_ours(disable)


def _tolerating_ours(disable: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(disable)
    def disable_hooks(message: str, fail_if_non_empty: bool = True) -> None:
        hooks = _AUTOGRAD._top_saved_tensors_default_hooks(True)
        ours = hooks is not None and (hooks[1] is restore or is_of_recomputed(hooks[0]))
        disable(message, fail_if_non_empty and not ours)

    return disable_hooks


def _warn_of_other_hooks(pack: Any, forward: object) -> None:
    if forward is not None:
        if forward in _warned:
            return
        _warned.add(forward)
    name = f"{getattr(pack, '__module__', '')}.{getattr(pack, '__qualname__', type(pack).__name__)}"
    warn_user(
        "other-hooks",
        f"saved-tensor hooks of other code ({name}) are active around this forward. torch calls "
        f"only the innermost hooks, so ebbtide leaves what this forward saves to them. To offload "
        f"with ebbtide, call the model outside that context",
    )
