"""Finds what the forward of a module names outside of modules, because it may change that.

A forward that runs again must leave no other traces than the first one. What it can reach without
its arguments and its modules has names in its code: globals, variables of functions around it,
attributes of classes, and attributes of plain objects that have such names. Defaults of arguments
are there from one call to the next, too.
"""

from __future__ import annotations

import argparse
import functools
import sys
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, final

from torch import Tensor, nn

from ebbtide.runtime.torch_internals import modules_of

_MOST_FUNCTIONS: Final = 200  # that are looked through for one module
_LIBRARIES: Final = sys.stdlib_module_names - {"__main__"} | {"torch", "ebbtide", "numpy"}
_IMPLICIT: Final = ("__call__", "__next__", "__iter__", "__getitem__", "__enter__", "__exit__")
"""Methods that code calls without their names."""

_STATELESS: Final = (type, types.ModuleType, types.BuiltinFunctionType, nn.Module, property)


class Variable(NamedTuple):
    """A variable that a forward names.

    Attributes:
        holder: what holds it: a dict, a class, the cell of a variable of a function around another
            one, or the defaults of a function's arguments.
        name: its name there, or its number among the defaults.
        value: its present value.
    """

    holder: Any
    name: Any
    value: Any

    def now(self) -> Any:
        """Return its value now; `GONE` if it has been deleted."""
        holder = self.holder
        try:
            if isinstance(holder, types.CellType):
                return holder.cell_contents
            return (vars(holder) if isinstance(holder, type) else holder)[self.name]
        except (KeyError, ValueError):  # of a dict, of a cell
            return GONE


GONE: Final = object()


def assign(holder: Any, name: Any, value: Any) -> None:
    """Give a variable another value; see `Variable`. The holder may be a list, too."""
    if isinstance(holder, types.CellType):
        holder.cell_contents = value
    elif isinstance(holder, type):
        setattr(holder, name, value)
    else:
        holder[name] = value


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """All names of globals and attributes in a function and in the functions inside it."""
    names = dict.fromkeys(code.co_names)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            names.update(dict.fromkeys(_names_in(each)))
    return tuple(names)


def _is_of_library(module_name: object) -> bool:
    return isinstance(module_name, str) and module_name.partition(".")[0] in _LIBRARIES


def find_outside(modules: Sequence[nn.Module]) -> tuple[list[Variable], list[nn.Module]]:
    """Return what is outside of modules and named by their forwards and their hooks.

    Args:
        modules: a module, and its submodules after it.

    Returns:
        Variables, among which are no functions, classes and modules, and modules that belong to
        others. Those that the given ones are part of are not among them.
    """
    found: dict[tuple[int, Any], Variable] = {}
    named: dict[nn.Module, None] = {}
    for module in modules:
        walk = _Walk(module)
        found |= walk.found
        named |= walk.modules
    own = set(modules)
    others: dict[nn.Module, None] = {}
    for each in named:
        parts = modules_of(each)
        if own.isdisjoint(parts):
            others |= dict.fromkeys(parts)
    return list(found.values()), list(others)


@final
class Outside:
    """The variables outside of a model's layers, which are looked for once.

    They are looked for again if the layer has other hooks or forwards, or if an object that holds
    some of them was replaced. What the first forward makes is there in the second one.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def find(
        self, layer: nn.Module, modules: Sequence[nn.Module]
    ) -> tuple[list[Variable], list[nn.Module]]:
        """Return the variables with their present values, and modules; see `find_outside`.

        Args:
            layer: the layer.
            modules: the layer and its submodules.
        """
        beginnings = tuple(id(each) for module in modules for each in _beginnings(module))
        known = self._known.get(layer)
        if known is not None and known.beginnings == beginnings:
            present = [each._replace(value=each.now()) for each in known.variables]
            others = [module for each in known.others if (module := each()) is not None]
            pairs = zip(known.variables, present, strict=True)
            same = len(others) == len(known.others) and not any(
                old.value is not None and new.value is not old.value for old, new in pairs
            )
            if same:
                return [each for each in present if each.value is not GONE], others
        found, others = find_outside(modules)
        if layer in self._seen:
            # Values are not kept, but for objects, whose attributes are among the variables.
            kept = [v if _is_object(v.value) else v._replace(value=None) for v in found]
            self._known[layer] = _Known(beginnings, kept, [weakref.ref(each) for each in others])
        self._seen.add(layer)
        return found, others


class _Known(NamedTuple):
    """What was found for a layer, and the functions that it was found in begin with."""

    beginnings: tuple[int, ...]
    variables: list[Variable]
    others: list[weakref.ref[nn.Module]]


def _beginnings(module: nn.Module) -> Iterator[Any]:
    """The functions that torch calls in a call of a module."""
    yield type(module).forward
    if "forward" in vars(module):
        yield vars(module)["forward"]
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        if hooks:
            yield from hooks.values()


@final
class _Walk:
    """Looks through the functions that a forward can call, as far as their names tell.

    Args:
        module: the module.

    Attributes:
        found: the variables, by where they are.
        modules: modules that are named, in lists, tuples and dicts, too.
    """

    def __init__(self, module: nn.Module) -> None:
        self.found: dict[tuple[int, Any], Variable] = {}
        self.modules: dict[nn.Module, None] = {}
        self._functions: list[types.FunctionType] = []  # grows while they are looked through
        self._objects: dict[int, Any] = {}
        self._names: dict[str, None] = {}
        for each in _beginnings(module):
            self._look_at(each)
        if not self._functions:
            return
        self._add_object(module)
        for function in self._functions:
            self._look_through(function)

    def _look_at(self, value: Any) -> None:
        """Note a function that may be called, or what it is made of."""
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, functools.partial):
            self._look_at(value.func)
        elif isinstance(value, types.MethodType):
            self._add_object(value.__self__)
            self._look_at(value.__func__)
        elif (
            isinstance(value, types.FunctionType)
            and not _is_of_library(value.__module__)
            and value not in self._functions
            and len(self._functions) < _MOST_FUNCTIONS
        ):
            self._functions.append(value)

    def _add_object(self, value: Any) -> None:
        """Note an object, so that the methods and attributes that are named are found."""
        if id(value) not in self._objects:
            self._objects[id(value)] = value
            for name in [*self._names, *_IMPLICIT]:
                self._find_attribute(value, name)

    def _add_modules(self, value: Any) -> None:
        values = value.values() if type(value) is dict else value
        if type(value) not in (list, tuple, dict):
            values = (value,)
        self.modules |= {each: None for each in values if isinstance(each, nn.Module)}

    def _look_through(self, function: types.FunctionType) -> None:
        names = function.__globals__
        for name in _names_in(function.__code__):
            if name in names:
                self._note(names, name, names[name])
            if name not in self._names:
                self._names[name] = None
                for each in [*self._objects.values()]:
                    self._find_attribute(each, name)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if name != "__class__":
                self._note(cell, name, content)
        for number, value in enumerate(function.__defaults__ or ()):
            self._note(function.__defaults__, number, value)
        for name, value in (function.__kwdefaults__ or {}).items():
            self._note(function.__kwdefaults__, name, value)

    def _find_attribute(self, owner: Any, name: str) -> None:
        """Note an attribute of an object or of its class."""
        for each in _own_classes(owner):
            if name in vars(each):
                self._note(each, name, vars(each)[name])
                break
        if isinstance(owner, nn.Module):  # its attributes are noted with the module
            value = vars(owner).get(name)
            self._add_modules(value)
            if _is_object(value):
                self._add_object(value)
        elif isinstance(owner, type):
            return
        elif name in getattr(owner, "__dict__", ()):
            self._note(vars(owner), name, vars(owner)[name])

    def _note(self, holder: Any, name: Any, value: Any) -> None:
        self._look_at(value)
        self._add_modules(value)
        if isinstance(value, type) and not _is_of_library(value.__module__):
            self._add_object(value)
        if isinstance(value, _STATELESS) or hasattr(type(value), "__get__"):
            return
        if callable(value) and not _is_object(value):
            return
        self.found.setdefault((id(holder), name), Variable(holder, name, value))
        if _is_object(value):
            self._add_object(value)


def is_iterator(value: Any) -> bool:
    """Whether a value is an iterator that nothing can set back, unlike one of the program's own."""
    return hasattr(type(value), "__next__") and not _is_object(value)


_PLAIN_OBJECTS: Final = (bool, int, float, str, tuple, list, dict, set, Tensor)


def _is_object(value: Any) -> bool:
    """Whether a value is an object of the program, whose attributes may change."""
    if isinstance(value, types.SimpleNamespace | argparse.Namespace):
        return True
    return (
        not isinstance(value, (*_STATELESS, *_PLAIN_OBJECTS, types.FunctionType))
        and hasattr(value, "__dict__")
        and not _is_of_library(type(value).__module__)
    )


def _own_classes(owner: Any) -> Iterator[type]:
    """The classes of an object, or a class and its bases, but for those of libraries."""
    for each in (owner if isinstance(owner, type) else type(owner)).__mro__:
        if not _is_of_library(each.__module__):
            yield each
