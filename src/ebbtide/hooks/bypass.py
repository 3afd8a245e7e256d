"""Begins a forward where code calls a part of a model without going through `model.forward`."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ebbtide.hooks.forward import OffloadedForward
from ebbtide.hooks.layers import LayerModules, LayerTracker, ModuleHook, is_script
from ebbtide.interface.warning import warn_user


@final
class BypassHooks:
    """Hooks on the modules that code calls when it bypasses the forward of a model.

    [Note: bypassed forwards] A trainer may put a function of its own in the place of
    `model.forward`, and a training step may call `self.net(x)` and never the model. So the model,
    its children, its layers and all modules around these have hooks. The first of them to be called
    while no forward runs begins a forward, which ends with that module.

    Args:
        model: the model.
        layers: its layers.
        forward: the model's offloaded forward.
        tracker: numbers the layers.
        follows_schedule: whether a schedule is followed. It counts the layers of whole forwards, so
            a layer that is called by itself begins none.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: LayerModules,
        forward: OffloadedForward,
        tracker: LayerTracker,
        *,
        follows_schedule: bool,
    ) -> None:
        self._forward = forward
        self._tracker = tracker
        self._numbers = {id(module): number for number, module in enumerate(layers.modules)}
        self._opened: nn.Module | None = None  # the module whose call is the forward that runs
        self._end = contextlib.ExitStack()
        self._handles: list[RemovableHandle] = []
        for module in _openers(model, layers.names):
            if follows_schedule and id(module) in self._numbers:
                continue
            is_model = module is model
            begin = ModuleHook(module, functools.partial(self._begin_call, module, is_model))
            end = ModuleHook(module, functools.partial(self._end_call, module))
            self._handles.append(module.register_forward_pre_hook(begin, prepend=True))
            self._handles.append(module.register_forward_hook(end, always_call=True))

    def detach(self) -> None:
        """Remove the hooks."""
        self._forward.was_bypass_interrupted = None  # it refers to this object
        while self._handles:
            self._handles.pop().remove()

    def _begin_call(self, module: nn.Module, is_model: bool, _: Any) -> None:
        if is_model and module.__dict__.get("forward") is self._forward:
            return  # it is not bypassed
        again = module is self._opened and self.was_interrupted()
        if not again and (self._tracker.is_active or torch._C._current_graph_task_id() != -1):
            return  # it belongs to the forward that runs, or recomputes a checkpointed part
        if not again and self._forward.is_running():
            return  # that forward runs without grad mode
        end = self._forward.begin_bypassed(self._numbers.get(id(module), 0), interrupted=again)
        self._opened = module
        self._end.callback(end)

    def was_interrupted(self) -> bool:
        """Whether the last bypassed forward ended without its clean-up; it is forgotten then.

        torch calls no hooks after Ctrl-C.
        """
        opened = self._opened
        # A call whose hooks are only about to run is another one.
        if opened is None or _count_calls(opened) > _is_beginning(opened):
            return False
        self._opened = None
        self._end.pop_all()
        return True

    def _end_call(self, module: nn.Module, _: Any) -> None:
        if module is self._opened and _count_calls(module) < 2:
            self._opened = None
            self._end.close()
            self._warn_of_no_plan()

    def _warn_of_no_plan(self) -> None:
        """Warn once if there is a budget or a plan, and every forward so far was bypassed."""
        forward = self._forward
        if forward.prepare is None or forward.was_prepared or not torch.is_grad_enabled():
            return
        forward.was_prepared = True
        warn_user(
            "budget-bypassed",
            "the budget is not followed, because a part of the model is called and not the model "
            "itself; everything is recomputed and offloaded. Offload the part that is called: "
            "ebbtide.offload(model.net, budget=...)",
            UserWarning,
        )


def _openers(model: nn.Module, layers: Iterable[str]) -> list[nn.Module]:
    """Return the model, its children, its layers, and the modules that contain layers.

    Script modules allow no hooks, so a training loop that calls one by itself goes unnoticed.
    """
    names = {"", *(name for name, _ in model.named_children())}
    for layer in layers:
        parts = layer.split(".")
        names.update(".".join(parts[:length]) for length in range(1, len(parts) + 1))
    found = {id(module): module for name, module in model.named_modules() if name in names}
    return [module for module in found.values() if not is_script(module)]


def _is_beginning(module: nn.Module) -> bool:
    """Whether the innermost call of a module on this thread's stack is that of a module's hook."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        if frame.f_code is BypassHooks._begin_call.__code__:
            return frame.f_locals["module"] is module
        frame = frame.f_back
    return False


def _count_calls(module: nn.Module) -> int:
    """Count the calls of a module that are on the stack of the calling thread."""
    count = 0
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is module:
            count += 1
        frame = frame.f_back
    return count
