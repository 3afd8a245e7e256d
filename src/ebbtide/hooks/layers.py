"""Layers: which modules of a model they are, and which call of one is which layer."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import inspect
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ebbtide.errors import PolicyError
from ebbtide.policy import ActivationPolicy
from ebbtide.runtime.ranges import Layer


@final
class LayerModules:
    """The modules whose calls are a model's layers, by name.

    Attributes:
        names: qualified name of each module, in the order of `modules`.
        modules: the modules.
        num_calls: how many layers one forward has, where the structure of the model tells; None
            where only a run would.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Module]], num_calls: int | None = None
    ) -> None:
        pairs = list(named)
        self.names = [name for name, _ in pairs]
        self.modules = [module for _, module in pairs]
        self.num_calls = num_calls


def find_layers(model: nn.Module) -> LayerModules:
    """Find the repeated blocks of a model.

    A block is an element of an `nn.ModuleList` or `nn.Sequential` with at least two elements of its
    class; the list with the most parameters wins. A module that holds several lists of one length
    (neuralop's `FNOBlocks` has one of convolutions, one of skips, ...) is called once for each
    index: then that module is the block, and one call of it a layer.

    Returns:
        The blocks; empty when the model repeats nothing.
    """
    best = LayerModules([], 0)
    best_size = 0
    for name, module in model.named_modules():
        for layers in _repeated_blocks(name, module, is_root=module is model):
            size = sum(p.numel() for block in layers.modules for p in block.parameters())
            if size > best_size:
                best, best_size = layers, size
    return best


def _repeated_blocks(name: str, module: nn.Module, *, is_root: bool) -> list[LayerModules]:
    """The lists of blocks in one module, or the module itself where it is called by index."""
    lists = {
        child_name: child
        for child_name, child in module.named_children()
        if isinstance(child, nn.ModuleList | nn.Sequential) and _repeats(child)
    }
    lengths = Counter(len(child) for child in lists.values() if isinstance(child, nn.ModuleList))
    if lengths and not is_root and _is_called_by_index(module):
        length, count = max(lengths.items(), key=lambda item: item[1])
        if count > 1:
            return [LayerModules([(name, module)], length)]
    prefix = f"{name}." if name else ""
    if is_root and isinstance(module, nn.ModuleList | nn.Sequential) and _repeats(module):
        lists[""] = module
    return [
        LayerModules(_blocks_of(f"{prefix}{child_name}", child), _count_blocks(child))
        for child_name, child in lists.items()
    ]


def lists_by_index(module: nn.Module) -> dict[str, nn.ModuleList]:
    """The lists of which a module that is called once for each index uses one element a call."""
    if not _is_called_by_index(module):
        return {}
    lists = {n: c for n, c in module.named_children() if isinstance(c, nn.ModuleList) and len(c)}
    lengths = Counter(len(child) for child in lists.values())
    if not lengths:
        return {}
    length = max(lengths.items(), key=lambda item: item[1])[0]
    return {name: child for name, child in lists.items() if len(child) == length}


def _is_called_by_index(module: nn.Module) -> bool:
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return False
    return any(name in ("index", "idx") or name.endswith("_idx") for name in parameters)


def _main_class(blocks: Iterable[nn.Module]) -> tuple[type, int]:
    counts = Counter(type(block) for block in blocks)
    return counts.most_common(1)[0] if counts else (nn.Module, 0)


def _repeats(blocks: nn.ModuleList | nn.Sequential) -> bool:
    return _main_class(blocks)[1] > 1


def _count_blocks(blocks: nn.ModuleList | nn.Sequential) -> int:
    return _main_class(blocks)[1]


def _blocks_of(name: str, blocks: nn.ModuleList | nn.Sequential) -> list[tuple[str, nn.Module]]:
    main = _main_class(blocks)[0]
    prefix = f"{name}." if name else ""
    return [
        (f"{prefix}{child_name}", block)
        for child_name, block in blocks.named_children()
        if type(block) is main
    ]


def match_layers(model: nn.Module, layers: Sequence[nn.Module | str]) -> LayerModules:
    """Resolve what a user named: modules of the model, or patterns such as ``"blocks.*.mlp"``.

    Raises:
        PolicyError: a pattern matches nothing, or a module is not part of the model.
    """
    if isinstance(layers, str):
        raise PolicyError(f"layers is a list: write layers=[{layers!r}]")
    names = {name: module for name, module in model.named_modules() if name}
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
                raise PolicyError(
                    f"layers: a {type(layer).__name__} was given that is no submodule of the model"
                )
        chosen.update((name, names[name]) for name in matched)
    in_model_order = [(name, module) for name, module in names.items() if name in chosen]
    return LayerModules(in_model_order)


def _matches(name: str, pattern: str) -> bool:
    """A wildcard stands for one part of a name: ``"blocks.*"`` is not ``blocks.0.mlp``."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


@final
class ModuleHook:
    """A forward hook of one module, that does nothing on copies of the module.

    `copy.deepcopy` and pickle copy the hooks of a module with it; a copy is a plain model, so there
    the hook is inert.
    """

    def __init__(self, module: nn.Module, action: Callable[[Any], None]) -> None:
        self._module = weakref.ref(module)
        self._action = action

    def __call__(self, module: nn.Module, *values: Any) -> None:
        if self._module() is module:
            self._action(values[-1])

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return inert_hook

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _make_inert_hook, ()


def inert_hook(*_: Any) -> None:
    """What a hook of ours is on a copy of the model: nothing."""


def _make_inert_hook() -> Callable[..., Any]:
    return inert_hook


class LayerListener(Protocol):
    """Who wants to know where a forward is."""

    def begin_forward(self) -> None:
        """A forward of the model begins."""

    def end_forward(self, *, completed: bool) -> None:
        """It has ended, or was interrupted."""

    def switch(self, offloading: bool, layer: Layer | None) -> None:
        """What is saved from now on belongs to ``layer`` and is to leave, or not."""

    def begin_layer(self, layer: Layer) -> None:
        """A layer's forward begins."""

    def end_layer(self, layer: Layer, output: Any) -> None:
        """A layer's forward has ended with ``output``; None if it raised."""


@final
class LayerTracker:
    """Numbers the layers of each forward and says which of them leave the device.

    Args:
        layers: the modules whose calls are layers.
        policy: which of them leave; if it counts layers, nothing outside layers does, but for
            `keep_last` alone.
        told: told of every change, see `LayerListener`.
    """

    def __init__(
        self,
        layers: LayerModules,
        policy: ActivationPolicy,
        told: LayerListener,
    ) -> None:
        self._layers = layers
        self._policy = policy
        self._num_layers = policy.num_layers
        self._keep_last = policy.keep_last
        self._told = told
        self._num_calls = layers.num_calls
        self._next = 0
        self._open: list[Layer] = []
        self._active = False

    def attach(self) -> list[RemovableHandle]:
        """Hook the layers. Returns what removes the hooks."""
        handles = []
        for name, module in zip(self._layers.names, self._layers.modules, strict=True):
            begin = ModuleHook(module, functools.partial(self._begin_layer, name))
            end = ModuleHook(module, self._end_layer)
            handles.append(module.register_forward_pre_hook(begin, prepend=True))
            handles.append(module.register_forward_hook(end, always_call=True))
        return handles

    def begin_forward(self) -> None:
        self._next = 0
        self._open.clear()
        self._active = True
        self._told.begin_forward()
        self._tell()

    def end_forward(self, *, completed: bool) -> None:
        """Learn how many layers a forward has; the next one knows which of them are the last."""
        self._active = False
        self._told.end_forward(completed=completed)
        if not completed:
            return
        wanted = self._num_layers or 0
        if wanted > self._next and self._num_calls != self._next:
            warnings.warn(
                f"num_layers={wanted}, but this forward called only {self._next} layers "
                f"({', '.join(self._layers.names[:3])}, ...); all of them are offloaded",
                stacklevel=6,  # the call of the model
            )
        self._num_calls = self._next

    def _begin_layer(self, name: str, _: Any) -> None:
        if self._counts():
            layer = Layer(self._next, name)
            self._open.append(layer)
            self._next += 1
            self._told.begin_layer(layer)
            self._tell()

    def _end_layer(self, output: Any) -> None:
        if self._counts() and self._open:
            self._told.end_layer(self._open.pop(), output)
            self._tell()

    def _counts(self) -> bool:
        """Whether this call belongs to the forward, and is not a checkpointed layer's second one.

        That runs in a backward, which may itself be part of the forward.
        """
        return self._active and torch._C._current_graph_task_id() == -1

    def _tell(self) -> None:
        if not self._open:
            self._told.switch(self._num_layers is None and self._policy.fraction == 1, None)
            return
        layer = self._open[-1]
        within = self._num_layers is None or layer.index < self._num_layers
        within = within and self._policy.chooses(layer.index)
        num_calls = self._num_calls
        last = num_calls is not None and layer.index >= num_calls - self._keep_last
        self._told.switch(within and not last, layer)
