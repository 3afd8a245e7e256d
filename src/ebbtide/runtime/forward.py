"""A replacement for a forward that offloads the activations saved inside it."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch
from torch import nn

from ebbtide.devices.process import call_weakly, watch_optimizers
from ebbtide.errors import PolicyError, warn_user
from ebbtide.runtime.compiled import (
    CompiledCall,
    ForwardReplacement,
    HookedLayer,
    ModuleHook,
    compiler_is_loaded,
    is_traced,
    skip_in_compiler,
    skip_package_in_compiler,
)
from ebbtide.runtime.engine import Engine
from ebbtide.runtime.events import Owner
from ebbtide.runtime.layers import LayerModules, LayerTracker, is_script
from ebbtide.runtime.saved_tensors import SavedTensorHooks, hooks_are_wanted
from ebbtide.runtime.torch_internals import MODULE_CALL, in_backward, is_exported
from ebbtide.units import brief

_LATER = types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType


@final
class _Here(threading.local):
    """The forwards of one model that run on one thread.

    Attributes:
        depth: number of calls of the model's own forward, with grad mode or without.
        part: the module whose call has begun a forward; see [Note: bypassed forwards].
        end: ends that forward.
    """

    depth = 0
    part: weakref.ref[nn.Module] | None = None
    end = contextlib.ExitStack()

    @property
    def opened(self) -> nn.Module | None:
        """The module whose call has begun a forward; None if none has."""
        return None if self.part is None else self.part()


Prepare = Callable[[tuple[Any, ...], dict[str, Any]], None]
"""Plans what a forward that begins does with what it saves, given the arguments of its call."""


@final
class OffloadedForward(ForwardReplacement):
    """Calls `forward` with the saved-tensor hooks active, and removes them however the call ends.

    `inspect.signature` shows the signature of the wrapped forward.

    Args:
        forward: the callable to wrap.
        engine: the parts of the offload.
        tracker: numbers the layers; None for a callable without layers.
        prepare: is called before each forward that autograd records, and each without grad mode;
            None if nothing is planned.
        replaced: the module's own attribute ``forward`` before this object; None if it had none.

    Attributes:
        here: the forwards that run on the calling thread.
        prepare: as given.
        was_prepared: whether it has been called in grad mode.
        handle: the `OffloadHandle`; set only by `wrap_forward_with_offload`.
        kept: the wrapped forward as long as its module is not known to own this object; None if the
            module owns it. See [Note: what a model owns].
        replaced: as given.
    """

    # Long: it must pass for a bound method, to Python, to torch, and to other code that wraps it.

    handle: Any

    def __init__(
        self,
        forward: Callable[..., Any],
        engine: Engine,
        tracker: LayerTracker | None,
        prepare: Prepare | None = None,
        replaced: Any = None,
    ) -> None:
        super().__init__(forward, keeps=tracker is None)
        self.replaced = replaced
        self._engine = engine
        self._tracker = tracker
        self._active = True
        self.here = _Here()
        self.prepare = prepare
        self.was_prepared = False
        self._has_warned = False
        self._num_unseen = 0  # steps of the model's optimizers of whose forwards nothing was seen
        self._end_watch = None if tracker is None else watch_optimizers(after=self._note_optimized)

    def _note_optimized(self, *_: Any) -> None:
        """Warn if training never calls what is hooked, such as a model that is all methods.

        One step alone may only make the optimizer's state.
        """
        engine, owner = self._engine, self._owner
        is_seen = engine.num_steps or engine.is_in_step()
        wants_any = self.prepare is not None or engine.placement.wants_any
        if self._active and isinstance(owner, nn.Module) and wants_any and not is_seen:
            self._num_unseen += any(each.grad is not None for each in owner.parameters())
            if self._num_unseen < 2:
                return
            warn_user(
                "model-not-called",
                "an optimizer has stepped this model twice, and no call of the model or of a layer "
                "has saved anything for backward: nothing is offloaded, and no budget is followed. "
                "Put what computes the loss into the forward of a module, and offload that",
                UserWarning,
            )
        if self._end_watch is not None:
            self._end_watch()

    def deactivate(self) -> None:
        """Make every later call a plain call of the wrapped forward."""
        self._mend()
        self._active = False

    def let_go(self) -> None:
        """Let go of what the offload holds for a model that is gone."""
        self.prepare = None

    @property
    def __code__(self) -> types.CodeType:
        """The code of the wrapped forward; `torch.export` notes in which file it is."""
        return self._function.__code__  # type: ignore[no-any-return]

    @property
    def __func__(self) -> OffloadedForward:
        """What to call with the model as the first argument, as of a bound method.

        Accelerate wraps this and binds the result to the model. Without it, a deep copy of the
        model would share the wrapper, and train the original.
        """
        return self

    @property
    def __globals__(self) -> dict[str, Any]:
        """The globals of the wrapped forward, in which its annotations are resolved.

        Raises:
            PolicyError: `torch.jit.script` asks, which compiles the source code of functions.
        """
        if sys._getframe(1).f_globals.get("__name__") == "torch._jit_internal":
            raise PolicyError(
                "torch.jit.script cannot compile an offloaded model; call detach() on the "
                "offload's handle first, or use torch.compile or torch.export"
            )
        return self._function.__globals__  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self._owner
        # Accelerate binds what it finds in `model.forward` to the model again.
        if args and type(args[0]) is type(owner) and isinstance(args[0], nn.Module):
            if args[0] is not owner:
                return self._function(*args, **kwargs)  # it is bound to a copy of the model
            args = args[1:]
        of_copy = self.find_forward_of_copy()
        if of_copy is not None:
            return of_copy(*args, **kwargs)
        if self.kept is not None and vars(owner).get("forward") is self:
            self.kept = None
        if not self._active:
            return self._forward(*args, **kwargs)
        if is_exported():
            if self._engine.weights is not None:
                self._engine.weights.refuse_transforms()
            return self._forward(*args, **kwargs)
        try:
            return self._call(*args, **kwargs)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._engine.transfers.note_error(error)  # see [Note: interrupts]
            raise

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self._mend()
        hooks, opened = self.begin(call=(args, kwargs))
        try:
            result = self._forward(*args, **kwargs)
            if hooks is not None:
                hooks.note_values(Owner.OUTPUTS, result)
                hooks.running[-1].completed = not self._runs_later(result)
        finally:
            self._close(opened)
        return result

    def begin(
        self, first: int = 0, call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    ) -> tuple[SavedTensorHooks | None, contextlib.ExitStack]:
        """Begin a forward.

        Args:
            first: number of its first layer.
            call: the arguments of the model's forward; None if a part of the model is called
                instead. See [Note: bypassed forwards].

        Returns:
            The hooks, None where nothing is to be hooked; and what ends the forward when it closes.
        """
        with contextlib.ExitStack() as stack:
            if call is not None:
                stack.callback(setattr, self.here, "depth", self.here.depth)
                self.here.depth += 1
            elif not self._active:
                return None, stack.pop_all()
            if compiler_is_loaded() and not is_traced():
                skip_package_in_compiler()
            hooks = self._engine.hooks() if hooks_are_wanted(self) else None
            is_evaluated = not torch.is_grad_enabled()
            if hooks is None and not is_evaluated and self._end_watch is not None:
                self._end_watch()  # other code, such as a checkpoint, decides what is saved
            prepare = self.prepare if hooks is not None or is_evaluated else None
            if call is not None and prepare is not None and not self._others_run():
                self.was_prepared |= not is_evaluated
                prepare(*call)  # first: it may place weights elsewhere
            weights = self._engine.weights
            if weights is not None and weights.begin_forward():
                stack.callback(weights.end_forward)
            if hooks is not None:
                stack.callback(self._end, hooks, len(hooks.running))
                if not hooks.begin():
                    return None, stack.pop_all()
                if self._tracker is not None:
                    self._tracker.begin_forward(first)
                if call is not None:
                    hooks.note_values(Owner.INPUTS, call)
            return hooks, stack.pop_all()

    def _end(self, hooks: SavedTensorHooks, depth: int) -> None:
        """End the forward, and those in it that an error has left open."""
        scope = None
        while len(hooks.running) > depth:
            scope = hooks.end()
        if self._tracker is not None and scope is not None:
            self._tracker.end_forward(scope, completed=scope.completed)

    def _close(self, opened: contextlib.ExitStack) -> None:
        opened.close()

    def _runs_later(self, result: object) -> bool:
        """Whether a call has returned what will run the forward, such as a generator."""
        if not isinstance(result, _LATER):
            forward = None if self._tracker is None else self._tracker.forward
            if forward is None or forward.first or forward.called:
                return False
            if not isinstance(result, Iterator):  # such as `map`, which may have run already
                return False
        if not self._has_warned:
            self._has_warned = True
            warn_user(
                "forward-yields",
                "the model's forward is a generator, another iterator or a coroutine, which runs "
                "when its call has returned: only its layers are offloaded, each as a forward of "
                "its own. To offload all of it, put what it does into a forward that returns its "
                "result",
            )
        return True

    def _others_run(self) -> bool:
        """Whether another forward of the model runs, on this thread or on another one."""
        return self._engine.transfers.running > (self.here.part is not None)

    def _mend(self, beginning: nn.Module | None = None) -> None:
        """Begin anew after an interrupt; see [Note: interrupts].

        Args:
            beginning: the module whose call has just begun, if it is a part of the model.
        """
        here, transfers = self.here, self._engine.transfers
        if here.part is not None and _was_interrupted(here, beginning):
            transfers.is_broken = True
        if transfers.is_broken:
            here.depth, here.part = 0, None
            self._engine.mend()

    def begin_part(self, known: weakref.ref[nn.Module], first: int, _: Any) -> None:
        """Begin a forward with the call of a module; see [Note: bypassed forwards].

        Args:
            known: the module.
            first: number of its first layer.
        """
        module, here = known(), self.here
        assert module is not None, "it is called"
        if module.__dict__.get("forward") is self:
            return  # it is not bypassed
        self._mend(module)
        if here.depth or in_backward():
            return  # it runs, perhaps without grad mode; or a checkpointed part is recomputed
        if self._tracker is None or self._tracker.forward is not None:
            return  # it belongs to the forward that runs
        _, here.end = self.begin(first)
        here.part = known

    def end_part(self, known: weakref.ref[nn.Module], _: Any) -> None:
        """End the forward that the call of this module has begun."""
        module, here = known(), self.here
        if module is not None and module is here.opened and _count_calls(module) < 2:
            here.part = None
            here.end.close()
            self._warn_of_no_plan()

    def _warn_of_no_plan(self) -> None:
        """Warn once if there is a budget or a plan, and every forward so far was bypassed."""
        if self.prepare is None or self.was_prepared or not torch.is_grad_enabled():
            return
        self.was_prepared = True
        warn_user(
            "budget-bypassed",
            "the budget is not followed, because a part of the model is called and not the model "
            "itself; everything is recomputed and offloaded. Offload the part that is called: "
            "ebbtide.offload(model.net, budget=...)",
            UserWarning,
        )

    def __repr__(self) -> str:
        name = getattr(self._forward, "__qualname__", None) or type(self._forward).__name__
        return brief("OffloadedForward", [name, "active" if self._active else "detached"])


# The compiler would break the graph at the hooks. It skips them, and compiles `forward` as a whole.
skip_in_compiler(OffloadedForward.__call__, with_callees=False)
skip_in_compiler(OffloadedForward._call, with_callees=False)
skip_in_compiler(OffloadedForward._mend)
skip_in_compiler(OffloadedForward.begin)
skip_in_compiler(OffloadedForward._runs_later)
skip_in_compiler(OffloadedForward._close)
skip_in_compiler(ModuleHook.__call__)


# ---- Begins a forward where code calls a part of a model without going through `model.forward`


def hook_parts(
    model: nn.Module,
    layers: LayerModules,
    forward: OffloadedForward,
    tracker: LayerTracker,
    *,
    follows_schedule: bool,
) -> None:
    """Hook the modules that code calls when it bypasses the forward of a model.

    [Note: bypassed forwards] A trainer may put a function of its own in the place of
    `model.forward`, and a training step may call `self.net(x)` and never the model. So the model,
    its children, its layers and all modules around these have hooks. The first of them to be called
    while no forward runs begins a forward, which ends with that module.

    Args:
        model: the model.
        layers: its layers.
        forward: the model's offloaded forward. The modules own it by these hooks, too, so that it
            lives where it is not `model.forward` any more.
        tracker: numbers the layers, and removes the hooks.
        follows_schedule: whether a schedule is followed. It counts the layers of whole forwards, so
            a layer that is called by itself begins none.
    """
    numbers = {id(module): number for number, module in enumerate(layers.modules)}
    for module in _openers(model, layers.names):
        if follows_schedule and id(module) in numbers:
            continue
        known, first = weakref.ref(module), numbers.get(id(module), 0)
        begin = functools.partial(call_weakly(forward.begin_part), known, first)
        end = functools.partial(call_weakly(forward.end_part), known)
        tracker.others.append(HookedLayer(None, "", module, begin, end, owner=forward))


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


def _was_interrupted(here: _Here, beginning: nn.Module | None) -> bool:
    """Whether the call of a part that has begun a forward has ended and could not clean up.

    torch calls no hooks after Ctrl-C, and nothing else tells.
    """
    opened = here.opened
    # The call that has just begun is another one.
    return opened is None or _count_calls(opened) <= (opened is beginning)


def _count_calls(module: nn.Module) -> int:
    """Count the calls of a module that are on the stack of the calling thread."""
    count = 0
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code is MODULE_CALL:
            count += frame.f_locals["self"] is module
        elif code is CompiledCall.__call__.__code__:
            count += frame.f_locals["self"] is module._compiled_call_impl
        frame = frame.f_back
    return count
