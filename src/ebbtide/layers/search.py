"""Finds the blocks of a model: the modules whose calls count as its layers by default."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, final

from torch import nn
from torch.nn.parameter import is_lazy

from ebbtide.hooks.layers import LayerModules, class_of, count_calls_by_index, is_script

_FAMILY: Final = 3  # attributes of one class, such as down1, down2, down3, that make a family
_BODY: Final = 0.25  # share of a module's parameters, outside its blocks, that families must have
_ENOUGH: Final = 0.1  # share of all candidates' parameters that blocks, or simpler modules, need
_TINY: Final = 0.01  # share of the blocks' parameters below which a class of blocks is ignored

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
    - Attributes of one class, such as a U-Net's ``down1``, ``down2`` and ``down3``, are blocks if
      they make up a good part of the module that has them. So are those defined between them.
    - A module beside the blocks that is made of the same parts, such as a UNet's ``mid_block``, is
      a block.

    A model without such blocks has the elements of its lists of simpler modules, such as linear
    maps, as its layers.

    Returns:
        The blocks in the order in which the model defines them; empty if it has none.
    """
    return _Search(model).run()


class _Kind(enum.IntEnum):
    """What a module is made of, counted in modules that hold a weight of two dimensions or more."""

    EMPTY = 0
    """None: an activation function, a norm."""
    LEAF = 1
    """It holds one itself, and has none inside: a linear map, a convolution, an LSTM."""
    UNIT = 2
    """One inside: a convolution with its norm and its activation function."""
    BLOCK = 3
    """Several: a residual block, a transformer layer."""


@final
class _Anatomy:
    """Tells what the modules of a model are made of."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model  # keeps the modules alive, so that `_counts` can be by id
        self._counts: dict[int, int] = {}
        self._in_lists = Counter(
            class_of(element)
            for each in model.modules()
            if _is_list(each)
            for _, element in _entries("", each)
            if self.kind(element) is _Kind.BLOCK
        )

    def kind(self, module: nn.Module) -> _Kind:
        count = self._count_matrices(module)
        if count > 1:
            return _Kind.BLOCK
        inside = any(self._count_matrices(child) for child in module.children())
        return (_Kind.UNIT if inside else _Kind.LEAF) if count else _Kind.EMPTY

    def recurs(self, block: nn.Module) -> bool:
        """Whether lists of the model hold several blocks of this class."""
        return class_of(block) is not nn.Sequential and self._in_lists[class_of(block)] > 1

    def parts(self, module: nn.Module) -> dict[type, _Kind]:
        """Return the classes of the blocks and weights that a module consists of, with its own."""
        kinds = {class_of(each): self.kind(each) for each in module.modules() if not _is_list(each)}
        return {each: kind for each, kind in kinds.items() if kind in (_Kind.LEAF, _Kind.BLOCK)}

    def is_like(self, module: nn.Module, blocks: Iterable[nn.Module]) -> bool:
        """Whether a module beside some blocks is made of the same parts as one of them."""
        if self.kind(module) is not _Kind.BLOCK:
            return False
        one_of_each = {class_of(block): block for block in blocks}
        parts = self.parts(module)
        if class_of(module) in one_of_each or parts.keys() & one_of_each.keys():
            return class_of(module) in one_of_each  # or else the blocks are inside of it
        for kind, block in one_of_each.items():
            needed = {part: of for part, of in self.parts(block).items() if part is not kind}
            if _Kind.BLOCK in needed.values() and needed.keys() <= parts.keys():
                return True
        return False

    def is_stage(self, element: nn.Module) -> bool:
        """Whether an element of a list does nothing but run blocks of its own, of one class."""
        if count_calls_by_index(element):
            return False
        if class_of(element).forward is nn.Sequential.forward:
            return bool(self._repeated([element])) or any(map(self.recurs, element.children()))
        children = _entries("", element)
        lists = [(name, child) for name, child in children if _is_list(child)]
        if _is_list(element):
            lists, children = [("", element)], []
        if any(_is_choice(name, each, element) for name, each in lists):
            return False
        repeated = self._repeated([each for _, each in lists])
        others = [child for _, child in children if not _is_list(child)]
        others += [inner for _, each in lists for inner in each.children()]
        return len(repeated) == 1 and all(
            class_of(other) in repeated or self.kind(other) is not _Kind.BLOCK for other in others
        )

    def holds_blocks_only(self, element: nn.Module) -> bool:
        kinds = {self.kind(child) for child in element.children()} - {_Kind.EMPTY}
        return class_of(element) is nn.Sequential and kinds == {_Kind.BLOCK}

    def _repeated(self, lists: Iterable[nn.Module]) -> set[type]:
        """Return the classes of which one list holds several blocks."""
        counts = [
            Counter(class_of(child) for child in each.children() if self.kind(child) is _Kind.BLOCK)
            for each in lists
        ]
        return {kind for each in counts for kind, number in each.items() if number > 1}

    def _count_matrices(self, module: nn.Module) -> int:
        known = self._counts.get(id(module))
        if known is None:
            own = any(
                is_lazy(p) or p.dim() > 1 for p in module._parameters.values() if p is not None
            )
            known = own + sum(self._count_matrices(child) for child in module.children())
            self._counts[id(module)] = known
        return known


@dataclass
class _Candidate:
    """A module that may be a layer.

    Attributes:
        name: qualified name.
        module: the module.
        kind: what it is made of.
        source: name of the outermost list that it is in, or of the module that it belongs to.
        num_calls: number of its calls in a forward.
        alone: whether it is the only block of its class in its list.
    """

    name: str
    module: nn.Module
    kind: _Kind
    source: str
    num_calls: int = 1
    alone: bool = False


@final
class _Search:
    """Collects candidates from the top of a model down, and then selects among them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._anatomy = _Anatomy(model)
        self._found: dict[nn.Module, _Candidate] = {}
        self._visited: set[nn.Module] = set()
        self._stages: set[nn.Module] = set()
        self._holders: list[_Named] = []  # modules, other than lists, that are no blocks themselves

    def run(self) -> LayerModules:
        self._visit("", self._model, "")
        in_lists = [block for block in self._blocks() if not self._found[block].alone]
        for least in (_FAMILY,) if in_lists else (_FAMILY, 2):
            for name, holder in self._holders:
                self._add_families(name, holder, least)
        order = {module: number for number, module in enumerate(self._model.modules())}
        chosen = sorted(self._select(), key=lambda each: order[each.module])
        # One element in a list may be called several times, as in ALBERT; only a run would tell.
        lone = len(chosen) == 1 and chosen[0].num_calls == 1
        num_calls = None if lone else sum(each.num_calls for each in chosen)
        return LayerModules([(each.name, each.module) for each in chosen], num_calls)

    def _visit(self, name: str, module: nn.Module, source: str) -> None:
        """Look for blocks inside a module that is no block itself."""
        if module in self._visited or not self._anatomy.kind(module):
            return
        self._visited.add(module)
        num_calls = 0 if module is self._model else count_calls_by_index(module)
        if num_calls:
            self._add(name, module, source or name, num_calls)
        elif _is_list(module):
            self._visit_list(name, module, source or name)
        else:
            self._visit_attributes(name, module, source)

    def _visit_list(self, name: str, elements: nn.Module, source: str) -> None:
        entries = _entries(name, elements)
        stages = self._find_stages(elements)
        repeated = Counter(class_of(element) for _, element in entries if element not in stages)
        for element_name, element in entries:
            kind = self._anatomy.kind(element)
            is_layer = repeated[class_of(element)] > 1 or self._is_body(element, elements)
            if element in stages or not _is_callable(element) or not is_layer:
                self._visit(element_name, element, source)
            elif kind:
                alone = repeated[class_of(element)] == 1 and isinstance(elements, nn.Sequential)
                self._add(element_name, element, source, count_calls_by_index(element) or 1, alone)

    def _is_body(self, element: nn.Module, elements: nn.Module) -> bool:
        """Whether an element of its own class is a block, rather than the model's stem or head."""
        has_blocks_only = isinstance(elements, nn.ModuleList) or elements in self._stages
        is_block = self._anatomy.kind(element) is _Kind.BLOCK
        return is_block and (has_blocks_only or self._anatomy.recurs(element))

    def _find_stages(self, elements: nn.Module) -> set[nn.Module]:
        """Return the elements whose own blocks count instead of them."""
        blocks = [
            element
            for element in elements.children()
            if self._anatomy.kind(element) is _Kind.BLOCK and _is_callable(element)
        ]
        stages = {element for element in blocks if self._anatomy.is_stage(element)}
        classes = {class_of(stage) for stage in stages} - {nn.Sequential}
        stages |= {element for element in blocks if class_of(element) in classes}
        if isinstance(elements, nn.ModuleList):
            return stages if len(stages) == len(blocks) else set()
        if stages:  # a stage of one block, of a class of its own, as at the begin of EfficientNet
            stages |= {element for element in blocks if self._anatomy.holds_blocks_only(element)}
        self._stages |= stages
        return stages

    def _visit_attributes(self, name: str, module: nn.Module, source: str) -> None:
        self._holders.append((name, module))
        before = set(self._found)
        entries = _entries(name, module)
        for child_name, child in entries:
            if _is_list(child) and not _is_named_choice(child_name):
                self._visit(child_name, child, source)
        blocks = [block for block in self._blocks() if block not in before]
        for child_name, child in entries:
            if _is_list(child):
                continue
            if self._anatomy.is_like(child, blocks):
                self._add(child_name, child, source or name)
            else:
                self._visit(child_name, child, source)

    def _add_families(self, name: str, holder: nn.Module, least: int) -> None:
        """Add attributes of one class, if they are a good part of a module without other blocks.

        Args:
            name: name of the module.
            holder: the module.
            least: number of attributes of one class that make a family.
        """
        known = set(self._blocks())
        if any(holder in block.modules() for block in known):
            return
        alone = {block for block in known if self._found[block].alone}
        free = [
            (child_name, child)
            for child_name, child in _entries(name, holder)
            if _is_callable(child)
            and self._anatomy.kind(child) >= _Kind.UNIT
            and (known if _is_list(child) else known - alone).isdisjoint(child.modules())
        ]
        counts = Counter(class_of(child) for _, child in free)
        needed = {kind: _FAMILY if kind is nn.Sequential else least for kind in counts}
        family = [child for _, child in free if counts[class_of(child)] >= needed[class_of(child)]]
        others = known.intersection(holder.modules()).difference(*(m.modules() for m in family))
        if not family or _size(family) < _BODY * (_size([holder]) - _size(others)):
            return
        children = [child for _, child in free]
        first, last = children.index(family[0]), children.index(family[-1])
        for number, (child_name, child) in enumerate(free):
            if child in family:
                pass
            elif self._anatomy.kind(child) is not _Kind.BLOCK or not (
                first < number < last or self._anatomy.is_like(child, family)
            ):
                continue
            for inside in child.modules():
                self._found.pop(inside, None)
            self._add(child_name, child, name)

    def _add(
        self, name: str, module: nn.Module, source: str, num_calls: int = 1, alone: bool = False
    ) -> None:
        if module in self._found:
            self._found[module].num_calls += num_calls
        else:
            kind = self._anatomy.kind(module)
            self._found[module] = _Candidate(name, module, kind, source, num_calls, alone)

    def _blocks(self) -> list[nn.Module]:
        return [module for module, each in self._found.items() if each.kind is _Kind.BLOCK]

    def _select(self) -> list[_Candidate]:
        """Choose the blocks, or simpler modules, too, if those hold hardly any parameters."""
        found = list(self._found.values())
        enough = _ENOUGH * _size(self._found)
        for least in (_Kind.BLOCK, _Kind.UNIT, _Kind.LEAF):
            chosen = [each for each in found if each.kind >= least]
            if chosen and _size(each.module for each in chosen) >= enough:
                return _without_tiny(chosen)
        return []


def _without_tiny(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Leave out small heads: classes with few parameters, unless their list has other blocks."""
    sizes: Counter[type] = Counter()
    for each in candidates:
        sizes[class_of(each.module)] += _size([each.module])
    least = _TINY * sizes.total()
    sources = {each.source for each in candidates if sizes[class_of(each.module)] >= least}
    return [each for each in candidates if each.source in sources]


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
    return class_of(module).forward is not nn.Module.forward


def _is_named_choice(name: str) -> bool:
    return "expert" in name.rpartition(".")[2].lower()


def _is_choice(name: str, elements: nn.Module, owner: nn.Module) -> bool:
    """Whether a list holds experts: a weight beside the list gives each element a score."""
    inside = set(elements.modules())
    number = len(elements._modules)
    beside = (module for module in owner.modules() if module not in inside)
    return _is_named_choice(name) or any(_rows(module) == number for module in beside)


def _rows(module: nn.Module) -> int:
    """Number of rows of a module's weight; 0 if it has none that is a matrix."""
    weight = module._parameters.get("weight")
    is_matrix = weight is not None and not is_lazy(weight) and weight.dim() == 2
    return weight.shape[0] if weight is not None and is_matrix else 0


def _size(modules: Iterable[nn.Module]) -> int:
    parameters = {id(p): p for module in modules for p in module.parameters()}
    return sum(0 if is_lazy(parameter) else parameter.numel() for parameter in parameters.values())
