"""Finds the modules that are a model's layers, and numbers their calls in each forward."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import functools
import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ebbtide.coexistence.compiler import HookedLayer, Replacement, compiler_is_loaded, is_traced
from ebbtide.errors import PolicyError
from ebbtide.interface.arguments import check_layers, refuse
from ebbtide.interface.display import few
from ebbtide.interface.warning import warn_user
from ebbtide.transfers.layer import Layer


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


@final
class ModuleHook:
    """A forward hook of one module that does nothing on copies of the module.

    `copy.deepcopy` and pickle copy a module's hooks with the module. A copy must behave like a
    plain model, so a copied hook is replaced by `inert_hook`.
    """

    def __init__(self, module: nn.Module, action: Callable[[Any], None]) -> None:
        self._module = weakref.ref(module)
        self._action = action

    def __call__(self, module: nn.Module, *values: Any) -> None:
        if torch.compiler.is_exporting() or is_traced():
            return
        if self._module() is module:
            self._action(values[-1])

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return inert_hook

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A function of Python's own that does nothing: the file can be read without ebbtide.
        return getattr, (contextlib.nullcontext(), "__exit__")


def inert_hook(*_: Any) -> None:
    """Do nothing; stands in for a `ModuleHook` on a copy of the model."""


class LayerListener(Protocol):
    """Is notified when forwards and layers begin and end."""

    def begin_forward(self) -> None:
        """Called when a forward of the model begins."""

    def end_forward(self, num_layers: int | None) -> None:
        """Called when it has ended after ``num_layers`` layers, or None if it was interrupted."""

    def begin_layer(self, layer: Layer) -> None:
        """Called when a layer's forward begins."""

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
class LayerTracker:
    """Numbers the layers of each forward.

    Args:
        layers: the modules whose calls are layers.
        wanted: number of layers that the policy offloads; None if the policy does not count layers.
        listener: notified when forwards and layers begin and end.
        replace: replaces the layers' forwards; None if they stay as they are.

    Attributes:
        warned: whether the user knows that the model is compiled as one region.
    """

    def __init__(
        self,
        layers: LayerModules,
        wanted: int | None,
        listener: LayerListener,
        replace: ReplaceForward | None = None,
    ) -> None:
        self._replace = replace
        self._entered: Layer | None = None  # the last one whose replaced forward was called
        self._layers = layers
        self._wanted = wanted or 0
        self._listener = listener
        self._num_calls = layers.num_calls
        self._next = 0
        self._open: list[Layer] = []
        self._hooked: list[HookedLayer] = []
        self._active = False
        self.warned = False
        self._is_short = False  # whether the user knows that a forward has fewer layers than wanted
        self._called: list[str] = []  # name of each layer of this forward
        self._order: list[str] = []  # and of the last one that was completed
        self._lost: dict[str, bool] = {}  # layers that are not recomputed; whether the user knows

    @property
    def names(self) -> tuple[str, ...]:
        """The layers' modules, in the order in which the last whole forward first called them.

        Before the first one: in model order. Modules that it did not call come last.
        """
        return tuple(dict.fromkeys([*self._order, *self._layers.names]))

    def attach(self, model: nn.Module) -> None:
        """Hook the layers of a model, until `detach`."""
        parents = {
            (id(child), name): parent
            for prefix, parent in model.named_modules()
            for key, child in parent.named_children()
            for name in (f"{prefix}.{key}" if prefix else key,)
        }
        for name, module in zip(self._layers.names, self._layers.modules, strict=True):
            begin = functools.partial(self._begin_layer, name)
            parent = parents.get((id(module), name))
            register = functools.partial(self._register, begin)
            key = name.rpartition(".")[2]
            replace = None
            if self._replace is not None:
                replace = functools.partial(self._replace, self._find_begun)
            end = self._end_layer
            self._hooked.append(HookedLayer(parent, key, module, register, begin, end, replace))

    def detach(self) -> None:
        while self._hooked:
            self._hooked.pop().remove()

    def _register(self, begin: Callable[[Any], None], module: nn.Module) -> list[RemovableHandle]:
        before, after = ModuleHook(module, begin), ModuleHook(module, self._end_layer)
        return [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, always_call=True),
        ]

    @property
    def is_active(self) -> bool:
        """Whether a forward runs."""
        return self._active

    def begin_forward(self, first: int = 0) -> None:
        """Begin a forward.

        Args:
            first: number of its first layer.
        """
        self._next = first
        self._called = []
        self._open.clear()
        self._active = True
        if compiler_is_loaded():
            for layer in self._hooked:
                layer.follow()
        self._listener.begin_forward()

    def end_forward(self, *, completed: bool) -> None:
        """Report the forward's number of layers, so that the next one knows which come last."""
        self._active = False
        self._listener.end_forward(self._next if completed else None)
        self._warn_of_lost_forwards()
        if not completed or _in_backward():  # a recomputation, whose layers are not counted
            return
        self._order = self._called
        if not self._next and self._hooked and compiler_is_loaded() and not self.warned:
            self.warned = True
            warn_of_one_region(recomputes=self._replace is not None)
        wanted = self._wanted
        if wanted > self._next and self._num_calls != self._next and not self._is_short:
            self._is_short = True
            warn_user(
                "fewer-layers",
                f"num_layers={wanted}, but this forward called only {self._next} layers "
                f"({', '.join(self._layers.names[:3])}, ...); all of them are offloaded. Name the "
                f"layers with layers=..., or ask for fewer",
                UserWarning,
            )
        self._num_calls = self._next

    def _begin_layer(self, name: str, _: Any) -> None:
        if self._counts():
            layer = Layer(self._next, name)
            self._open.append(layer)
            self._called.append(name)
            self._next += 1
            self._listener.begin_layer(layer)

    def _end_layer(self, output: Any) -> None:
        if self._counts() and self._open:
            layer = self._open.pop()
            self._listener.end_layer(layer, output)
            if self._replace is not None and output is not None and self._entered != layer:
                self._lost.setdefault(layer.name, False)

    def _find_begun(self) -> Layer | None:
        """Return the layer whose forward is called now; None if the call is not counted."""
        if not self._counts() or not self._open:
            return None
        self._entered = self._open[-1]
        return self._entered

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
        return self._active and not _in_backward()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
