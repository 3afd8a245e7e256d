"""Begins a forward where code calls a part of a model without going through `model.forward`."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
import weakref
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ebbtide.coexistence.compiler import CompiledCall, HookedLayer
from ebbtide.hooks.forward import OffloadedForward
from ebbtide.hooks.layers import LayerModules, LayerTracker, is_script, register_hooks
from ebbtide.interface.warning import warn_user
from ebbtide.weak import call_weakly


@final
class _BypassedForward(threading.local):
    """The bypassed forward that runs on one thread.

    Attributes:
        last: the module whose call it is; None if none runs.
        end: ends it.
    """

    def __init__(self) -> None:
        self.last: weakref.ref[nn.Module] | None = None
        self.end = contextlib.ExitStack()

    @property
    def opened(self) -> nn.Module | None:
        """The module whose call it is; None if none runs."""
        return None if self.last is None else self.last()


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
        self._running = _BypassedForward()
        self._hooked = tracker.others
        for module in _openers(model, layers.names):
            if follows_schedule and id(module) in self._numbers:
                continue
            known, is_model = weakref.ref(module), module is model
            begin = functools.partial(call_weakly(self._begin_call), known, is_model)
            end = functools.partial(call_weakly(self._end_call), known)
            register = functools.partial(call_weakly(self._register), known, is_model)
            self._hooked.append(HookedLayer(None, "", module, register, begin, end, None))

    def _register(
        self, known: weakref.ref[nn.Module], is_model: bool, module: nn.Module
    ) -> list[RemovableHandle]:
        # The modules own this object by these hooks, so that it lives without `model.forward`.
        begin = functools.partial(self._begin_call, known, is_model)
        return register_hooks(begin, functools.partial(self._end_call, known), module)

    def detach(self) -> None:
        """Remove the hooks."""
        self._forward.was_bypass_interrupted = None
        while self._hooked:
            self._hooked.pop().remove()

    def _begin_call(self, known: weakref.ref[nn.Module], is_model: bool, _: Any) -> None:
        module = known()
        assert module is not None, "it is called"
        if is_model and module.__dict__.get("forward") is self._forward:
            return  # it is not bypassed
        again = module is self._running.opened and self.was_interrupted()
        if not again and (self._tracker.is_active or torch._C._current_graph_task_id() != -1):
            return  # it belongs to the forward that runs, or recomputes a checkpointed part
        if not again and self._forward.is_running():
            return  # that forward runs without grad mode
        end = self._forward.begin_bypassed(self._numbers.get(id(module), 0), interrupted=again)
        self._running.last = known
        self._running.end.callback(end)

    def was_interrupted(self) -> bool:
        """Whether the last bypassed forward ended without its clean-up; it is forgotten then.

        torch calls no hooks after Ctrl-C.
        """
        opened = self._running.opened
        # A call whose hooks are only about to run is another one.
        if opened is None or _count_calls(opened) > _is_beginning(opened):
            return False
        self._running.last = None
        self._running.end.pop_all()
        return True

    def _end_call(self, known: weakref.ref[nn.Module], _: Any) -> None:
        module, running = known(), self._running
        if module is not None and module is running.opened and _count_calls(module) < 2:
            running.last = None
            running.end.close()
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
            return frame.f_locals.get("module") is module
        frame = frame.f_back
    return False


def _count_calls(module: nn.Module) -> int:
    """Count the calls of a module that are on the stack of the calling thread."""
    count = 0
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code is nn.Module._call_impl.__code__:
            count += frame.f_locals["self"] is module
        elif code is CompiledCall.__call__.__code__:
            count += frame.f_locals["self"] is module._compiled_call_impl
        frame = frame.f_back
    return count
