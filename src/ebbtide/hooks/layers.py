"""Finds the modules that are a model's layers, and numbers their calls in each forward."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import inspect
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ebbtide.coexistence.compiler import (
    HookedLayer,
    ModuleHook,
    Replacement,
    compiler_is_loaded,
)
from ebbtide.errors import PolicyError
from ebbtide.interface.arguments import check_layers, refuse
from ebbtide.interface.display import few
from ebbtide.interface.warning import warn_user
from ebbtide.transfers.layer import Layer
from ebbtide.weak import call_weakly


@final
class LayerModules:
    """The modules whose calls count as a model's layers.

    Attributes:
        names: qualified name of each module, in the order of `modules`.
        modules: the modules.
        num_calls: number of layers in one forward, if the structure of the model tells; None if
            only running the model would tell.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Module]], num_calls: int | None = None
    ) -> None:
        pairs = list(named)
        self.names = [name for name, _ in pairs]
        self.modules = [module for _, module in pairs]
        self.num_calls = num_calls


def lists_by_index(module: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the lists of which a module called once per index uses one element in each call."""
    if not _is_called_by_index(module):
        return {}
    lists = {n: c for n, c in module.named_children() if isinstance(c, nn.ModuleList) and len(c)}
    lengths = Counter(len(child) for child in lists.values())
    if not lengths:
        return {}
    length = max(lengths.items(), key=lambda item: item[1])[0]
    return {name: child for name, child in lists.items() if len(child) == length}


def count_calls_by_index(module: nn.Module) -> int:
    """Return how often a module is called in a forward if each call takes one element of its lists.

    0 means that it is not called by index, or holds no two lists of one length.
    """
    lists = lists_by_index(module)
    return len(next(iter(lists.values()))) if len(lists) > 1 else 0


def _is_called_by_index(module: nn.Module) -> bool:
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return False
    return any(name in ("index", "idx") or name.endswith("_idx") for name in parameters)


def is_script(module: nn.Module) -> bool:
    """Whether a module was made by `torch.jit`, which allows no hooks on it, nor inside of it."""
    return isinstance(module, torch.jit.ScriptModule)


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module as the model defines it.

    FSDP2's `fully_shard` changes the class of a module to one that derives from `FSDPModule` and
    from the module's own class. `torch.compile(module)` returns a module around it. Modules that
    are neither sharded nor compiled still count as equal to it.
    """
    if is_script(module):
        return type(module)
    kind = type(module._modules.get("_orig_mod") or module)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and fsdp.FSDPModule in kind.__bases__:
        return kind.__bases__[-1]
    return kind


def match_layers(model: nn.Module, layers: Sequence[nn.Module | str]) -> LayerModules:
    """Find the modules that a user named, directly or by patterns such as ``"blocks.*.mlp"``.

    Raises:
        PolicyError: a pattern matches nothing, or a module is not part of the model.
    """
    check_layers(layers)
    names = {
        name: module for name, module in model.named_modules() if name and not is_script(module)
    }
    chosen: dict[str, nn.Module] = {}
    for layer in layers:
        if isinstance(layer, str):
            matched = [name for name in names if _matches(name, layer)]
            if not matched:
                close = difflib.get_close_matches(layer, names, n=5, cutoff=0.3)
                raise PolicyError(
                    f"layers: no module is called {layer!r}; the model has, among others, "
                    f"{', '.join(close or list(names)[:5])}"
                )
        else:
            matched = [name for name, module in names.items() if module is layer]
            if not matched:
                if not isinstance(layer, nn.Module):
                    refuse("each of layers", "a module of the model or a pattern", layer)
                if is_script(layer):
                    raise PolicyError(
                        "layers: a script module was given, which can have no hooks; name the "
                        "module that calls it"
                    )
                raise PolicyError(
                    f"layers: a {type(layer).__name__} was given that is no submodule of the model"
                )
        chosen.update((name, names[name]) for name in matched)
    in_model_order = [(name, module) for name, module in names.items() if name in chosen]
    return LayerModules(in_model_order)


def _matches(name: str, pattern: str) -> bool:
    """Match a name part by part, so that ``"blocks.*"`` does not match ``blocks.0.mlp``."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def warn_of_one_region(*, recomputes: bool = False) -> None:
    """Warn of a model compiled as one region, whose backward first unpacks all its tensors."""
    if recomputes:
        warn_user(
            "compiled-whole",
            "the whole model is compiled as one region, in which no layer is recomputed. Compile "
            "its layers one by one instead, and offload the model that holds them",
        )
        return
    warn_user(
        "compiled-whole",
        "the whole model is compiled as one region, whose backward needs all its saved tensors "
        "at once: offloading saves memory in forward only, not at the peak. Compile its "
        "layers one by one instead, and offload the model that holds them",
    )


class LayerListener(Protocol):
    """Is notified when forwards and layers begin and end."""

    def begin_forward(self) -> None:
        """Called when a forward of the model begins."""

    def end_forward(self, num_layers: int | None) -> None:
        """Called when it has ended after ``num_layers`` layers, or None if it was interrupted."""

    def begin_layer(self, layer: Layer, inputs: Any) -> None:
        """Called when a layer's forward begins with these arguments, in nested containers."""

    def end_layer(self, layer: Layer, output: Any) -> None:
        """Called when a layer's forward has returned ``output``, which is None if it raised."""


class ReplaceForward(Protocol):
    """Makes the replacement of a layer's forward."""

    def __call__(
        self, find_layer: Callable[[], Layer | None], module: nn.Module, forward: Any
    ) -> Replacement:
        """Make it.

        Args:
            find_layer: returns the call of the layer that has just begun; None where the call is
                not counted.
            module: the module.
            forward: its forward.
        """


@final
class _RunningForward(threading.local):
    """The forward that runs on one thread, or the last one.

    Attributes:
        active: whether it runs.
        num_calls: number of layers that it has called.
        called: the name of each of them.
        open: those that run now, innermost last.
        entered: the last one whose replaced forward was called.
    """

    active = False
    num_calls = 0
    entered: Layer | None = None

    def __init__(self) -> None:
        self.called: list[str] = []
        self.open: list[Layer] = []


@final
class LayerTracker:
    """Numbers the layers of each forward.

    Args:
        layers: the modules whose calls are layers.
        wanted: number of layers that the policy offloads; None if the policy does not count layers.
        listener: notified when forwards and layers begin and end.
        replace: replaces the layers' forwards; None if they stay as they are.

    Attributes:
        warned: whether the user knows that the model is compiled as one region.
        others: hooked modules that are no layers, and that follow what is compiled like layers.
    """

    # Long: it is notified, and tells others, of all that happens to a layer.

    def __init__(
        self,
        layers: LayerModules,
        wanted: int | None,
        listener: LayerListener,
        replace: ReplaceForward | None = None,
    ) -> None:
        self._replace = replace
        self._modules = [weakref.ref(module) for module in layers.modules]
        self._names = list(layers.names)
        self._wanted = wanted or 0
        self._listener = listener
        self._num_calls = layers.num_calls
        self._running = _RunningForward()
        self._hooked: list[HookedLayer] = []
        self.others: list[HookedLayer] = []
        self.warned = False
        self._is_short = False  # whether the user knows that a forward has fewer layers than wanted
        self._order: list[str] = []  # and of the last one that was completed
        self._lost: dict[str, bool] = {}  # layers that are not recomputed; whether the user knows

    @property
    def names(self) -> tuple[str, ...]:
        """The layers' modules, in the order in which the last whole forward first called them.

        Before the first one: in model order. Modules that it did not call come last.
        """
        return tuple(dict.fromkeys([*self._order, *self._names]))

    def attach(self, model: nn.Module) -> None:
        """Hook the layers of a model, until `detach`."""
        parents = {
            (id(child), name): parent
            for prefix, parent in model.named_modules()
            for key, child in parent.named_children()
            for name in (f"{prefix}.{key}" if prefix else key,)
        }
        # This object owns the `HookedLayer`s, and so they refer to it weakly.
        end = call_weakly(self._end_layer)
        for name, known in zip(self._names, self._modules, strict=True):
            module = known()
            assert module is not None, "it is a part of the model"
            begin = functools.partial(call_weakly(self._begin_layer), name)
            parent = parents.get((id(module), name))
            register = functools.partial(register_hooks, begin, end)
            key = name.rpartition(".")[2]
            replace = None
            if self._replace is not None:
                replace = functools.partial(self._replace, call_weakly(self._find_begun))
            self._hooked.append(HookedLayer(parent, key, module, register, begin, end, replace))

    def detach(self) -> None:
        while self._hooked:
            self._hooked.pop().remove()

    @property
    def is_active(self) -> bool:
        """Whether a forward runs on the calling thread."""
        return self._running.active

    def begin_forward(self, first: int = 0) -> None:
        """Begin a forward.

        Args:
            first: number of its first layer.
        """
        running = self._running
        running.num_calls, running.called, running.active = first, [], True
        running.open.clear()
        if compiler_is_loaded():
            for layer in (*self._hooked, *self.others):
                layer.follow()
        self._listener.begin_forward()

    def end_forward(self, *, completed: bool) -> None:
        """Report the forward's number of layers, so that the next one knows which come last."""
        running = self._running
        running.active, num_calls = False, running.num_calls
        self._listener.end_forward(num_calls if completed else None)
        self._warn_of_lost_forwards()
        if not completed or _in_backward():  # a recomputation, whose layers are not counted
            return
        self._order = running.called
        if not num_calls and self._hooked and compiler_is_loaded() and not self.warned:
            self.warned = True
            warn_of_one_region(recomputes=self._replace is not None)
        wanted = self._wanted
        if wanted > num_calls and self._num_calls != num_calls and not self._is_short:
            self._is_short = True
            warn_user(
                "fewer-layers",
                f"num_layers={wanted}, but this forward called only {num_calls} layers "
                f"({', '.join(self._names[:3])}, ...); all of them are offloaded. Name the "
                f"layers with layers=..., or ask for fewer",
                UserWarning,
            )
        self._num_calls = num_calls

    def _begin_layer(self, name: str, inputs: Any) -> None:
        if self._counts():
            running = self._running
            layer = Layer(running.num_calls, name)
            running.open.append(layer)
            running.called.append(name)
            running.num_calls += 1
            self._listener.begin_layer(layer, inputs)

    def _end_layer(self, values: Any) -> None:
        running = self._running
        if self._counts() and running.open:
            output = values[-1]
            layer = running.open.pop()
            self._listener.end_layer(layer, output)
            if self._replace is not None and output is not None and running.entered != layer:
                self._lost.setdefault(layer.name, False)

    def _find_begun(self) -> Layer | None:
        """Return the layer whose forward is called now; None if the call is not counted."""
        running = self._running
        running = self._running
        if not self._counts() or not running.open:
            return None
        running.entered = running.open[-1]
        return running.entered

    def _warn_of_lost_forwards(self) -> None:
        """Warn of the layers that were not recomputed in this forward and were in all others."""
        names = [name for name in self._lost if not self._lost[name]]
        self._lost.update(dict.fromkeys(names, True))
        if names:
            warn_user(
                "forward-replaced",
                f"layers that are not recomputed: {few(names)}. Other code has replaced or "
                f"compiled their forward after ebbtide.offload; call ebbtide.offload after that "
                f"code",
            )

    def _counts(self) -> bool:
        """Whether this call belongs to the forward, rather than recomputing a checkpointed layer.

        A recomputation runs inside a backward, even if that backward runs inside the forward.
        """
        return self._running.active and not _in_backward()


def register_hooks(
    begin: Callable[[Any], None], end: Callable[[Any], None], module: nn.Module
) -> list[RemovableHandle]:
    """Register hooks of a module that are called before its other hooks, and after its forward."""
    return [
        module.register_forward_pre_hook(ModuleHook(module, begin), prepend=True, with_kwargs=True),
        module.register_forward_hook(ModuleHook(module, end), always_call=True),
    ]


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
