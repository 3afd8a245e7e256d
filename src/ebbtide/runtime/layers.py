"""Finds the modules that are a model's layers, and numbers their calls in each forward.

`match_layers` takes those that the user names, `find_layers` finds the blocks of a model, and
`covering_layers` those of a plan. `LayerTracker` numbers the calls.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import inspect
import string
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ebbtide.devices.device import Layer
from ebbtide.devices.process import call_weakly
from ebbtide.errors import PolicyError, warn_user
from ebbtide.policy import ActivationPolicy, check_layers, refuse
from ebbtide.runtime.activations import Scope
from ebbtide.runtime.compiled import HookedLayer, compiler_is_loaded
from ebbtide.runtime.engine import Engine
from ebbtide.runtime.torch_internals import in_backward


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


@final
class LayerTracker:
    """Numbers the layers of each forward.

    Args:
        layers: the modules whose calls are layers.
        engine: notified when forwards and layers begin and end.
        warned: whether the user knows that the model is compiled as one region.

    Attributes:
        warned: whether the user knows that the model is compiled as one region.
        others: hooked modules that are no layers, and that follow what is compiled like layers.
    """

    # Long: it is notified, and tells others, of all that happens to a layer.

    def __init__(self, layers: LayerModules, engine: Engine, *, warned: bool = False) -> None:
        self._engine = engine
        self._recomputes = engine.policy.recomputes
        self._modules = [weakref.ref(module) for module in layers.modules]
        self._names = list(layers.names)
        self._hooked: list[HookedLayer] = []
        self.others: list[HookedLayer] = []
        self.warned = warned
        self._order: list[str] = []  # names of the layers of the last completed forward

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
            key = name.rpartition(".")[2]
            inside = None
            if self._recomputes:
                place = len(self._hooked)
                record = functools.partial(call_weakly(self._begin_recording), place)
                inside = record, call_weakly(self._end_recording)
            self._hooked.append(HookedLayer(parent, key, module, begin, end, inside=inside))

    def detach(self) -> None:
        """Remove all hooks."""
        for hooked in (self._hooked, self.others):
            while hooked:
                hooked.pop().remove()

    @property
    def forward(self) -> Scope | None:
        """The scope of the forward that runs on the calling thread; None if none runs."""
        return self._engine.activations.scopes.forward

    def begin_forward(self, first: int = 0) -> None:
        """Begin a forward.

        Args:
            first: number of its first layer.
        """
        assert self.forward is not None
        self.forward.first = first
        if compiler_is_loaded():
            for layer in (*self._hooked, *self.others):
                layer.follow()
        self._engine.begin_forward()

    def end_forward(self, forward: Scope, *, completed: bool) -> None:
        """Report a forward's number of layers, so that the next one knows which come last."""
        num_calls = forward.first + len(forward.called)
        self._engine.end_forward(num_calls if completed else None)
        if not completed or in_backward():  # a recomputation, whose layers are not counted
            return
        self._order = forward.called
        if not num_calls and self._hooked and compiler_is_loaded() and not self.warned:
            self.warned = True
            warn_user(
                "no-layer-called",
                "a forward has called none of the layers as modules, so none of them counts or is "
                "recomputed. If the whole model is compiled as one region, whose backward needs "
                "all its saved tensors at once, compile its layers one by one instead; if not, "
                "name modules that it calls: layers=[...]",
            )

    def _begin_layer(self, name: str, inputs: Any) -> None:
        forward = self.forward
        if forward is not None and self._counts():
            layer = Layer(forward.first + len(forward.called), name)
            forward.called.append(name)
            self._engine.begin_layer(layer, inputs)

    def _end_layer(self, values: Any) -> None:
        if self._counts():
            self._engine.end_layer(values[-1])

    def _begin_recording(self, place: int, _: Any) -> None:
        if self._counts():
            self._engine.begin_recording(is_compiled=self._hooked[place].is_compiled)

    def _end_recording(self, _: Any) -> None:
        if self._counts():
            self._engine.end_recording()

    def _counts(self) -> bool:
        """Whether this call belongs to the forward, rather than recomputing a checkpointed layer.

        A recomputation runs inside a backward, even if that backward runs inside the forward.
        """
        return self.forward is not None and not in_backward()


# ---- Finds the blocks of a model: the modules whose calls count as its layers by default ----

_FAMILY: Final = 3  # attributes of one class, such as down1, down2, down3, that make a family

_Named = tuple[str, nn.Module]


def find_layers(model: nn.Module) -> LayerModules:
    """Find the blocks of a model that a user would name.

    [Note: Which modules are layers]
    The search goes down from the model and stops at blocks, so that no layer is inside another.

    - The elements of `nn.ModuleList` and `nn.Sequential` are blocks, in all lists of the model: an
      encoder's and a decoder's, and the four stages of a ResNet.
    - An element that does nothing but run a list of blocks of one class is a stage, as in Swin; its
      blocks count instead. An element that holds lists of different classes side by side is a block
      (a UNet's cross-attention block holds ResNet blocks and transformers, and calls them in turn).
      So is an element that chooses among experts.
    - A module whose forward takes an index and that holds several lists of one length (neuralop's
      `FNOBlocks`) is a block, and each call of it is a layer.
    - Attributes of one class, such as a U-Net's ``down1``, ``down2`` and ``down3``, are blocks.
    - A module beside the blocks that is made of the same parts, such as a UNet's ``mid_block``, is
      a block.

    A model without such blocks has simpler modules, such as linear maps, as its layers: the
    elements of its lists, or else attributes of one class that are numbered: the ``conv0``,
    ``conv1`` ... and ``w0``, ``w1`` ... of the first Fourier neural operators.

    Returns:
        The blocks in the order in which the model defines them; empty if it has none.
    """
    return _Search(model).run()


@final
class _Search:
    """Collects candidates from the top of a model down, and then selects among them.

    A block is a module in which several modules hold a weight of two dimensions or more: a residual
    block, a transformer layer. A simpler module has one of them: a convolution, with its norm and
    its activation function or without.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._counts: dict[nn.Module, int] = {}
        # The candidates by name, their calls in a forward, and those that are the only block of
        # their class in their list.
        self._found: dict[nn.Module, str] = {}
        self._num_calls = Counter[nn.Module]()
        self._alone: set[nn.Module] = set()
        self._visited: set[nn.Module] = set()
        self._stages: set[nn.Module] = set()
        self._holders: list[_Named] = []  # modules, other than lists, that are no blocks themselves
        self._in_lists = Counter(
            class_of(element)
            for each in model.modules()
            if _is_list(each)
            for _, element in _entries("", each)
            if self._is_block(element)
        )

    def run(self) -> LayerModules:
        self._visit("", self._model)
        in_lists = not self._alone.issuperset(self._blocks())
        for name, holder in self._holders:
            self._add_families(name, holder, _FAMILY if in_lists else 2)
        if not self._found:
            for name, holder in self._holders:
                self._add_numbered(name, holder)
        # A set: a list would compare modules, and metrics of torchmetrics make a metric of `==`.
        chosen = set(self._blocks() or self._found)
        modules = [module for module in self._model.modules() if module in chosen]
        num_calls = sum(self._num_calls[module] for module in modules)
        # One element in a list may be called several times, as in ALBERT; only a run would tell.
        lone = len(modules) == num_calls == 1
        named = [(self._found[module], module) for module in modules]
        return LayerModules(named, None if lone else num_calls)

    # ---- what a module is made of -------------------------------------------------------------

    def _count(self, module: nn.Module) -> int:
        """Count the modules in a module that hold a weight of two dimensions or more."""
        known = self._counts.get(module)
        if known is None:
            weights = [p for p in module._parameters.values() if p is not None]
            own = any(is_lazy(weight) or weight.dim() > 1 for weight in weights)
            known = own + sum(self._count(child) for child in module.children())
            self._counts[module] = known
        return known

    def _is_block(self, module: nn.Module) -> bool:
        return self._count(module) > 1

    def _is_leaf(self, module: nn.Module) -> bool:
        """Whether a module holds a weight itself, and has none inside."""
        return self._count(module) == 1 and not any(map(self._count, module.children()))

    def _recurs(self, block: nn.Module) -> bool:
        """Whether lists of the model hold several blocks of this class."""
        return class_of(block) is not nn.Sequential and self._in_lists[class_of(block)] > 1

    def _repeated(self, lists: Iterable[nn.Module]) -> set[type]:
        """Return the classes of which one list holds several blocks."""
        counts = [
            Counter(class_of(e) for e in each.children() if self._is_block(e)) for each in lists
        ]
        return {kind for each in counts for kind, number in each.items() if number > 1}

    def _parts(self, module: nn.Module) -> dict[type, bool]:
        """Return the classes of blocks, True, and weights in a module, with its own."""
        parts = [each for each in module.modules() if not _is_list(each)]
        kinds = {class_of(each): each for each in parts}
        return {
            kind: self._is_block(each)
            for kind, each in kinds.items()
            if self._is_block(each) or self._is_leaf(each)
        }

    def _is_like(self, module: nn.Module, blocks: Iterable[nn.Module]) -> bool:
        """Whether a module beside some blocks is made of the same parts as one of them."""
        if not self._is_block(module):
            return False
        one_of_each = {class_of(block): block for block in blocks}
        parts = self._parts(module)
        if class_of(module) in one_of_each or parts.keys() & one_of_each.keys():
            return class_of(module) in one_of_each  # or else the blocks are inside of it
        for kind, block in one_of_each.items():
            needed = {part: of for part, of in self._parts(block).items() if part is not kind}
            if any(needed.values()) and needed.keys() <= parts.keys():
                return True
        return False

    def _is_stage(self, element: nn.Module) -> bool:
        """Whether an element of a list does nothing but run blocks of its own, of one class."""
        if count_calls_by_index(element):
            return False
        if _forward_of(element) is nn.Sequential.forward:
            return bool(self._repeated([element])) or any(map(self._recurs, element.children()))
        children = [("", element)] if _is_list(element) else _entries("", element)
        lists = [(name, child) for name, child in children if _is_list(child)]
        if any(_is_choice(name) for name, _ in lists):
            return False
        repeated = self._repeated([each for _, each in lists])
        others = [child for _, child in children if not _is_list(child)]
        others += [inner for _, each in lists for inner in each.children()]
        return len(repeated) == 1 and all(
            class_of(other) in repeated or not self._is_block(other) for other in others
        )

    # ---- from the top down --------------------------------------------------------------------

    def _visit(self, name: str, module: nn.Module) -> None:
        """Look for blocks inside a module that is no block itself."""
        if module in self._visited or not self._count(module):
            return
        self._visited.add(module)
        num_calls = 0 if module is self._model else count_calls_by_index(module)
        if num_calls:
            self._add(name, module, num_calls)
        elif _is_list(module):
            self._visit_list(name, module)
        else:
            self._visit_attributes(name, module)

    def _visit_list(self, name: str, elements: nn.Module) -> None:
        entries = _entries(name, elements)
        stages = self._find_stages(elements)
        repeated = Counter(class_of(element) for _, element in entries if element not in stages)
        # In other lists a block of a class of its own may be the model's stem or head.
        is_body = isinstance(elements, nn.ModuleList) or elements in self._stages
        for element_name, element in entries:
            is_layer = repeated[class_of(element)] > 1 or (
                self._is_block(element) and (is_body or self._recurs(element))
            )
            if element in stages or not _is_callable(element) or not is_layer:
                self._visit(element_name, element)
            elif self._count(element):
                alone = repeated[class_of(element)] == 1 and isinstance(elements, nn.Sequential)
                self._add(element_name, element, count_calls_by_index(element) or 1, alone)

    def _find_stages(self, elements: nn.Module) -> set[nn.Module]:
        """Return the elements whose own blocks count instead of them."""
        blocks = [
            each for each in elements.children() if self._is_block(each) and _is_callable(each)
        ]
        stages = {element for element in blocks if self._is_stage(element)}
        classes = {class_of(stage) for stage in stages} - {nn.Sequential}
        stages |= {element for element in blocks if class_of(element) in classes}
        if isinstance(elements, nn.ModuleList):
            return stages if len(stages) == len(blocks) else set()
        if stages:  # a stage of one block, of a class of its own, as at the begin of EfficientNet
            stages |= {element for element in blocks if self._holds_blocks_only(element)}
        self._stages |= stages
        return stages

    def _holds_blocks_only(self, element: nn.Module) -> bool:
        inside = [child for child in element.children() if self._count(child)]
        return class_of(element) is nn.Sequential and all(map(self._is_block, inside))

    def _visit_attributes(self, name: str, module: nn.Module) -> None:
        self._holders.append((name, module))
        before = set(self._found)
        entries = _entries(name, module)
        for child_name, child in entries:
            if _is_list(child) and not _is_choice(child_name):
                self._visit(child_name, child)
        blocks = [block for block in self._blocks() if block not in before]
        for child_name, child in entries:
            if _is_list(child):
                continue
            if self._is_like(child, blocks):
                self._add(child_name, child)
            else:
                self._visit(child_name, child)

    def _add_families(self, name: str, holder: nn.Module, least: int) -> None:
        """Add attributes of one class of a module that has no other blocks.

        Args:
            name: name of the module.
            holder: the module.
            least: number of attributes of one class that make a family.
        """
        known = set(self._blocks())
        if any(holder in block.modules() for block in known):
            return
        free = [
            (child_name, child)
            for child_name, child in _entries(name, holder)
            if _is_callable(child)
            and self._count(child)
            and not self._is_leaf(child)
            and (known if _is_list(child) else known - self._alone).isdisjoint(child.modules())
        ]
        counts = Counter(class_of(child) for _, child in free)
        needed = {kind: _FAMILY if kind is nn.Sequential else least for kind in counts}
        family = {child for _, child in free if counts[class_of(child)] >= needed[class_of(child)]}
        for child_name, child in free:
            if child in family or self._is_like(child, family):
                for inside in child.modules():
                    self._found.pop(inside, None)
                    self._num_calls.pop(inside, None)
                    self._alone.discard(inside)
                self._add(child_name, child)

    def _add_numbered(self, name: str, holder: nn.Module) -> None:
        """Add attributes whose names differ in a number at their end, as if they were in a list."""
        entries = [
            (child_name, child)
            for child_name, child in _entries(name, holder)
            if child_name[-1].isdigit() and self._count(child) and _is_callable(child)
        ]
        kinds = [(each.rstrip(string.digits), class_of(child)) for each, child in entries]
        counts = Counter(kinds)
        for (child_name, child), kind in zip(entries, kinds, strict=True):
            if counts[kind] > 1:
                self._add(child_name, child)

    def _add(self, name: str, module: nn.Module, num_calls: int = 1, alone: bool = False) -> None:
        if alone and module not in self._found:
            self._alone.add(module)
        self._found.setdefault(module, name)
        self._num_calls[module] += num_calls

    def _blocks(self) -> list[nn.Module]:
        return [module for module in self._found if self._is_block(module)]


def _entries(name: str, module: nn.Module) -> list[_Named]:
    """Return a module's children; one that is held several times appears several times.

    Script modules are left out: they can be no layers.
    """
    prefix = f"{name}." if name else ""
    children = [(n, child) for n, child in module._modules.items() if child is not None]
    return [(f"{prefix}{n}", child) for n, child in children if not is_script(child)]


def _is_list(module: nn.Module) -> bool:
    """Whether a module runs its children one after another, or leaves that to its parent."""
    by_name = isinstance(module, nn.ModuleDict) and _is_callable(module)  # DenseNet's dense blocks
    return by_name or isinstance(module, nn.ModuleList | nn.Sequential)


def _is_callable(module: nn.Module) -> bool:
    return _forward_of(module) is not nn.Module.forward


def _forward_of(module: nn.Module) -> Any:
    """The forward of a module's class. That of a scripted module only shows it to an object."""
    return inspect.getattr_static(class_of(module), "forward")


def _is_choice(name: str) -> bool:
    """Whether a list holds experts, by its name."""
    return "expert" in name.rpartition(".")[2].lower()


# ---- The modules that are the layers of a plan: blocks and what is beside them, or their parts


def covering_layers(model: nn.Module) -> list[str]:
    """Return the names of a model's blocks and of the modules beside them.

    What modules beside the blocks save, such as an FNO's lifting and projection, would otherwise be
    outside of all layers, and so stay on the device.

    Raises:
        PolicyError: the model has no modules.
    """
    blocks = set(find_layers(model).modules)
    names = list(_cover(model, "", blocks, {model}))
    if not names:
        raise PolicyError(
            f"{type(model).__name__} has no modules with parameters, so it has no layers to plan "
            f"for; put what it computes into modules"
        )
    return names


def _cover(
    module: nn.Module, prefix: str, blocks: set[nn.Module], known: set[nn.Module]
) -> Iterator[str]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if is_script(child) or child in known:
            continue  # it can be no layer, or has the name by which the model knows it first
        if child in blocks:
            known.update(child.modules())
            yield path
        elif isinstance(child, nn.ModuleList | nn.ModuleDict) or not blocks.isdisjoint(
            child.modules()
        ):
            known.add(child)
            yield from _cover(child, f"{path}.", blocks, known)
        elif next(child.parameters(), None) is not None:
            known.update(child.modules())
            yield path


# ---- Checks that a policy fits the layers of a model ----


def check_layer_counts(policy: ActivationPolicy, layers: LayerModules) -> None:
    """Check that a model has the layers that a policy counts or recomputes.

    Raises:
        PolicyError: it has not.
    """
    if not policy.counts_layers and not policy.recomputes:
        return
    if not layers.modules:
        raise PolicyError(
            f"the policy {'recomputes' if policy.recomputes else 'counts'} layers, and the model "
            f"has no repeated blocks; name its layers, such as "
            f"layers=[model.encoder, model.decoder]"
        )
    for name, wanted in (("num_layers", policy.num_layers), ("keep_last", policy.keep_last)):
        if wanted is not None and layers.num_calls is not None and wanted > layers.num_calls:
            raise PolicyError(
                f"{name}={wanted} is out of range: the model has {layers.num_calls} layers "
                f"({', '.join(layers.names[:3])}{', ...' if len(layers.names) > 3 else ''}); if "
                f"they are called more than once in a forward, each call is a layer: name them, "
                f"layers={layers.names[:2]}"
            )


def check_regions(model: nn.Module, policy: ActivationPolicy) -> bool:
    """Return whether the whole model is compiled as one region, and warn of that.

    Raises:
        PolicyError: it is, and the policy recomputes layers.
    """
    if not is_one_region(model):
        return False
    if policy.recomputes:
        raise PolicyError(
            "the whole model is compiled as one region, in which no layer can be recomputed; "
            "compile its layers one by one instead (layer.compile()), and offload the model that "
            "holds them"
        )
    warn_user(
        "compiled-whole",
        "the whole model is compiled as one region, whose backward needs all its saved tensors "
        "at once: offloading saves memory in forward only, not at the peak. Compile its "
        "layers one by one instead, and offload the model that holds them",
    )
    return True


def is_one_region(model: nn.Module) -> bool:
    """Whether the whole model is compiled, by any of torch's three ways."""
    return (
        hasattr(model, "_orig_mod")
        or hasattr(model.forward, "_torchdynamo_orig_callable")
        or model._compiled_call_impl is not None
    )
