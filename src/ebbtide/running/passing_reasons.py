"""Why a module that is called as a model would be is not offloaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from ebbtide.activations.handles import restore
from ebbtide.api import refuse_second_offload
from ebbtide.coexistence.other_hooks import is_traced
from ebbtide.errors import PolicyError

OWN_OFFLOAD: Final = "the script offloads it itself"

_AUTOGRAD: Any = torch._C._autograd
_MOST_MODELS: Final = 16  # that are offloaded at a time: each has threads and a store of its own


def find_passing_reason() -> str | None:
    """Return why the forward that begins now is passed over; None if it is not.

    The next forward may be another matter, so nothing of this is remembered of a module.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        return "its forward runs inside a transform of torch.func"
    if is_traced():
        return "its forward is only exported or traced"
    if not _AUTOGRAD._saved_tensors_hooks_is_enabled():
        return "saved-tensor hooks are disabled around its forward"
    hooks = _AUTOGRAD._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return None
    if hooks[1] is restore:
        return OWN_OFFLOAD
    return "saved-tensor hooks of other code are active around its forward"


def find_obstacle(module: nn.Module, offloaded: Sequence[nn.Module]) -> str | None:
    """Return why a model cannot be offloaded; None if nothing is known to be in the way.

    Args:
        module: the model.
        offloaded: the models that `ebbtide run` has offloaded, and that are alive.
    """
    for other in offloaded:
        if share_modules(module, other):
            return f"it shares modules with {type(other).__name__}, which is offloaded"
    if any(isinstance(each, torch.jit.ScriptModule) for each in module.modules()):
        return "torch.jit has compiled it or a part of it, which has no hooks"
    try:
        refuse_second_offload(module)
    except PolicyError:
        return OWN_OFFLOAD
    if len(offloaded) >= _MOST_MODELS:
        return (
            f"{_MOST_MODELS} models are offloaded already; if these are parts of one model, put "
            f"them into one nn.Module, or use ebbtide.OffloadSession"
        )
    return None


def share_modules(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules are the same, or one of them holds a module that the other holds."""
    inside = {id(each) for each in one.modules()}
    return any(id(each) in inside for each in other.modules())
