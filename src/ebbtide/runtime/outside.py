"""Finds what a forward can read or change besides its arguments and tensors, to put it back.

A forward that runs again must leave no other traces than the first one, and find what that found.
What it can reach has names: attributes of its modules, and what its code names outside of modules,
such as globals, variables of functions around it, attributes of classes and of plain objects, and
defaults of arguments. Whatever holds such values is a `Place`.
"""

from __future__ import annotations

import array
import contextlib
import functools
import itertools
import operator
import random
import sys
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from ebbtide.runtime.torch_internals import modules_of

_MOST_FUNCTIONS: Final = 200  # that are looked through for one module
_MOST_ENTRIES: Final = 10_000  # of a list or dict whose content counts
_MOST_ARRAY_BYTES: Final = 64 * 2**10
_LIBRARIES: Final = sys.stdlib_module_names - {"__main__"} | {"torch", "ebbtide", "numpy"}
_IMPLICIT: Final = (
    *("__call__", "__next__", "__iter__", "__getitem__", "__setitem__", "__len__", "__contains__"),
    *("__enter__", "__exit__", "__get__", "__set__", "__iadd__", "__eq__", "__bool__"),
)
"""Methods that code calls without their names."""

_PLAIN: Final = frozenset({bool, int, float, str, type(None)})
_CONTAINERS: Final = frozenset({dict, OrderedDict, defaultdict, Counter, list, deque, set, tuple})
_HOLDING: Final = frozenset({"argparse", "collections", "types", "weakref"})
"""Python's modules of classes whose objects hold what the program puts there."""
_SHARED: Final = frozenset({"_ctypes", "multiprocessing", "queue", "threading"})
"""Those of classes whose objects other threads, processes or languages may change meanwhile."""
_ELUSIVE: Final = threading.local, ContextVar
_STATELESS: Final = (type, types.ModuleType, types.BuiltinFunctionType, nn.Module, property)
_NOT_NOTED: Final = frozenset(vars(nn.Module())) - {"training"} | {"forward"}
"""The attributes in which modules hold parameters, buffers, submodules and hooks, and the one that
ebbtide sets."""


# ---- Places: what holds values --------------------------------------------------------------


class Place(NamedTuple):
    """Something that holds values.

    Attributes:
        holder: a module, a class, a dict, a list, a deque, a set, a tuple, an object with slots, or
            the cell of a variable of a function around another one.
        names: the names of the values that count, in a class, a dict or slots; None: all of them.
    """

    holder: Any
    names: Set[str] | None = None

    def read(self) -> Any:
        """Return what it holds now: a list, a set, or a dict."""
        holder, names = self
        if type(holder) is dict:  # most are
            if names is None:
                return holder.copy()
            return {name: holder[name] for name in holder.keys() & names}
        if isinstance(holder, nn.Module):
            return {name: each for name, each in vars(holder).items() if name not in _NOT_NOTED}
        if isinstance(holder, types.CellType):
            try:
                return [holder.cell_contents]
            except ValueError:  # not assigned
                return []
        kind = _container_of(holder)
        if kind is not None and not issubclass(kind, dict):
            values = kind.__iter__(holder)  # what the program's own class may do otherwise
            return {*values} if kind is set else [*values]
        if kind is not None:
            held: Any = dict(kind.items(holder))
        elif isinstance(holder, type):
            held = vars(holder)
        else:
            return {name: getattr(holder, name) for name in names or () if hasattr(holder, name)}
        return held if names is None else {name: held[name] for name in held.keys() & names}

    def write(self, content: Any, now: Any = None) -> None:
        """Have it hold again what `read` has returned.

        Args:
            content: what it has returned.
            now: what it would return now; None: it is asked.
        """
        now, holder = self.read() if now is None else now, self.holder
        if _holds(now, content):
            return
        if isinstance(holder, types.CellType):
            if content:
                holder.cell_contents = content[0]
            else:
                del holder.cell_contents
        elif isinstance(holder, nn.Module) or self.names is not None:
            self._write_names(now, content)
        else:
            kind: Any = _container_of(holder)
            kind.clear(holder)
            if issubclass(kind, dict):
                for key, value in content.items():  # `update` of a Counter adds
                    kind.__setitem__(holder, key, value)
            else:
                (kind.update if kind is set else kind.extend)(holder, content)

    def _write_names(self, now: dict[str, Any], content: dict[str, Any]) -> None:
        holder = self.holder
        held = vars(holder) if isinstance(holder, nn.Module) else holder
        for name in now.keys() - content.keys():
            if isinstance(held, dict):
                del held[name]
            else:
                delattr(holder, name)
        for name, value in content.items():
            if name in now and now[name] is value:
                continue
            if isinstance(held, dict):
                held[name] = value
            else:
                setattr(holder, name, value)


def _container_of(value: Any) -> Any:
    """Return the built-in class of a list, a set, a dict and so on; None for other values."""
    kind = type(value)
    if kind in _CONTAINERS:
        return kind
    return next((each for each in kind.__mro__ if each in _CONTAINERS), None)


def _holds(now: Any, content: Any) -> bool:
    if len(now) != len(content):
        return False
    if isinstance(content, set):
        return bool(now == content)
    if isinstance(content, dict):
        if [*now] != [*content]:
            return False
        now, content = now.values(), content.values()
    return all(map(operator.is_, now, content))


def _places_in(value: Any, names: Set[str]) -> Iterator[Place]:
    """Yield the places that a value consists of.

    Args:
        value: the value.
        names: the names of attributes that count.
    """
    kind: Any = type(value)
    container = _container_of(value)
    # Not `len(value)`: the program's own class may do otherwise, such as raise.
    if container is not None and container.__len__(value) <= _MOST_ENTRIES:
        yield Place(value)
    if issubclass(kind, functools.partial):
        yield Place((value.func, value.args, value.keywords))
    elif kind is types.MethodType:
        yield Place((value.__self__, value.__func__))
    elif issubclass(kind, staticmethod | classmethod):
        yield Place((value.__func__,))
    elif issubclass(kind, property):
        yield Place((value.fget,))
    elif issubclass(kind, weakref.ref):
        yield Place((value(),))
    elif issubclass(kind, frozenset):
        yield Place((*value,))
    elif _modules_of_class(kind) & _HOLDING and hasattr(value, "__dict__"):
        yield Place(vars(value))
    elif _is_object(value):
        if hasattr(value, "__dict__"):
            yield Place(vars(value), names)
        if slots := _slots_of(kind) & names:
            yield Place(value, slots)


def _is_object(value: Any) -> bool:
    """Whether a value is an object of the program, whose attributes may change."""
    kind = type(value)
    return not (
        issubclass(kind, (*_STATELESS, types.FunctionType, Tensor))
        or _is_of_library(kind.__module__)
    )


@functools.lru_cache(maxsize=1024)
def _slots_of(kind: type) -> frozenset[str]:
    """The names of the slots of a class and its bases."""
    found = (each for known in kind.__mro__ for each in vars(known).items())
    return frozenset(name for name, each in found if type(each) is types.MemberDescriptorType)


@functools.lru_cache(maxsize=1024)
def _modules_of_class(kind: type) -> frozenset[str]:
    """The names of the modules that a class and its bases come from."""
    return frozenset(each.__module__ for each in kind.__mro__)


def _is_elusive(kind: Any, *, is_place: bool) -> bool:
    """Whether nothing puts back what objects of a class hold.

    Args:
        kind: the class.
        is_place: whether what they hold was found.
    """
    packages = (str(each).partition(".")[0] for each in _modules_of_class(kind))
    if issubclass(kind, _ELUSIVE) or not _SHARED.isdisjoint(packages):
        return True
    return not is_place and hasattr(kind, "__next__")


def _is_of_library(module_name: object) -> bool:
    return isinstance(module_name, str) and module_name.partition(".")[0] in _LIBRARIES


# ---- What places hold, and whatever is in that ------------------------------------------------


@final
class Content:
    """What some places hold now, and the lists, sets, dicts, tuples and objects in them.

    Args:
        places: the places.
        names: the names of attributes of objects that count.
        lasting: whether this outlives the forward that runs. Tensors are then held without their
            graphs, which may hold this.

    Attributes:
        tensors: the tensors.
        elusive: the name of what nothing puts back, such as an iterator, a variable of a thread or
            of a context, or a proxy; "" if there is none.
    """

    def __init__(self, places: Iterable[Place], names: Set[str], *, lasting: bool = False) -> None:
        self.tensors: list[Tensor] = []
        self._held: list[tuple[Place, Any]] = []
        self._constant: list[Any] = []
        self._states: list[tuple[Callable[[], Any], Callable[[Any], object], Any]] = []
        self.elusive = ""
        known: set[int] = set()
        rest = [*places]
        while rest:
            place = rest.pop()
            content = place.read()
            pairs = content.items() if isinstance(content, dict) else enumerate(content)
            for name, value in [*pairs]:
                if type(value) in _PLAIN:
                    continue
                if isinstance(value, Tensor):
                    if lasting and value.grad_fn is not None:
                        value = _exchange(content, name, value)
                    self.tensors.append(value)
                elif id(value) not in known:
                    known.add(id(value))
                    inner = [*_places_in(value, names)]
                    rest += inner
                    if (state := _state_of(value)) is not None:
                        self._states.append((*state, state[0]()))
                    elif _is_elusive(type(value), is_place=bool(inner)):
                        self.elusive = str(name)
            if isinstance(place.holder, tuple):
                self._constant += content
            else:
                self._held.append((place, content))

    def values(self) -> Iterator[Any]:
        """Yield all values that were found."""
        yield from self._constant
        for _, content in self._held:
            yield from content.values() if isinstance(content, dict) else content

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Within the block all places hold again what they held."""
        present = [place.read() for place, _ in self._held]
        states = [(write, read()) for read, write, _ in self._states]
        try:
            self.put_back_for_good(present)
            yield
        finally:
            for (place, _), now in zip(self._held, present, strict=True):
                place.write(now)
            for write, state in states:
                write(state)

    def put_back_for_good(self, present: Iterable[Any] = itertools.repeat(None)) -> None:
        """Have all places hold again what they held.

        Args:
            present: what they hold now, in their order.
        """
        for (place, content), now in zip(self._held, present):  # noqa: B905
            place.write(content, now)
        for _, write, state in self._states:
            write(state)


def _exchange(content: Any, name: Any, tensor: Tensor) -> Tensor:
    """Have a tensor without a graph take the place of one in a list, a dict or a set."""
    plain = without_graph(tensor)
    if isinstance(content, set):
        content.remove(tensor)
        content.add(plain)
    else:
        content[name] = plain
    return plain


def without_graph(tensor: Tensor) -> Tensor:
    """Return a tensor with the same memory and version that refers to no graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _state_of(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Return what reads and what sets the state of a generator of random numbers or an array.

    Returns None for other values, and for large arrays.
    """
    if isinstance(value, bytearray | array.array) and len(value) <= _MOST_ENTRIES:
        return (lambda: value[:]), functools.partial(value.__setitem__, slice(None))
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    numpy, numpy_random = sys.modules["numpy"], sys.modules.get("numpy.random")
    if type(value) is numpy.ndarray:
        is_small = value.nbytes <= _MOST_ARRAY_BYTES and value.flags.writeable
        return (value.copy, functools.partial(numpy.copyto, value)) if is_small else None
    if numpy_random is not None and isinstance(value, numpy_random.RandomState):
        return value.get_state, value.set_state
    if numpy_random is not None and isinstance(value, numpy_random.Generator):
        source = value.bit_generator
        return (lambda: source.state), functools.partial(setattr, source, "state")
    return None


# ---- The places that code names ---------------------------------------------------------------


class Reach(NamedTuple):
    """What the code of some modules names. Nothing here keeps anything alive.

    Attributes:
        owners: functions, classes and modules around the given ones, each with the names of the
            variables in it that may change.
        names: names of attributes.
        others: modules that are named and do not belong to the given ones.
    """

    owners: list[tuple[weakref.ref[Any], Set[str]]]
    names: Set[str]
    others: list[weakref.ref[nn.Module]]

    def places(self) -> Iterator[Place]:
        """Yield the places outside of modules."""
        for known, names in self.owners:
            owner = known()
            if isinstance(owner, types.FunctionType):
                if names:
                    yield Place(owner.__globals__, names)
                yield from _own_places(owner)
            elif isinstance(owner, type):
                yield Place(owner, names)
            elif owner is not None:
                yield Place(vars(owner), names)


def find_reach(modules: Sequence[nn.Module]) -> Reach:
    """Return what the forwards and the hooks of a module and its submodules name.

    Args:
        modules: the module, and its submodules after it.
    """
    own, looked_at = set(modules), dict.fromkeys(modules)
    names: set[str] = {*_IMPLICIT}
    owners: dict[Any, None] = {}
    size = 0
    while size != (size := len(names) + len(owners) + len(looked_at)):
        roots = [
            # The second forward runs inside a call of the first module, whose hooks do not run.
            Place((*_beginnings(each, hooks=each is not modules[0]), *Place(each).read().values()))
            for each in looked_at
        ]
        roots += (Place(_named_in(each, names)) for each in owners)
        for owner in [each for each in owners if isinstance(each, types.FunctionType)]:
            roots += _own_places(owner)
        for each in looked_at:
            owners |= dict.fromkeys(_own_classes(type(each)))
        values = [*Content(roots, names).values()]
        for value in values:  # which grow
            if isinstance(value, types.FunctionType):
                is_new = value not in owners and not _is_of_library(value.__module__)
                if is_new and len(owners) < _MOST_FUNCTIONS:
                    owners[value] = None
                    names |= _names_in(value.__code__)
                    values += _named_in(value, names).values()
            elif issubclass(type(value), nn.Module):  # a proxy says that it is one
                parts = modules_of(value)
                if own.isdisjoint(parts):
                    looked_at |= dict.fromkeys(parts)
                elif value not in own:  # around the given ones, of which it is no part
                    owners |= dict.fromkeys((value, *_own_classes(type(value))))
            elif isinstance(value, type) or _is_object(value):
                kind = value if isinstance(value, type) else type(value)
                owners |= dict.fromkeys(_own_classes(kind))
    found: list[tuple[weakref.ref[Any], Set[str]]] = []
    for each in owners:
        if isinstance(each, nn.Module):  # its forward may set what it does not have yet
            found.append((weakref.ref(each), names - _NOT_NOTED))
            continue
        named = frozenset(n for n, v in _named_in(each, names).items() if _may_change(v))
        if named or (isinstance(each, types.FunctionType) and [*_own_places(each)]):
            found.append((weakref.ref(each), named))
    others = [weakref.ref(each) for each in looked_at if each not in own]
    return Reach(found, frozenset(names), others)


def _named_in(owner: Any, names: Set[str]) -> dict[str, Any]:
    """Return the variables that count in a function's globals, a class or a module."""
    if isinstance(owner, types.FunctionType):
        if _is_of_library(owner.__globals__.get("__name__")):
            return {}  # a library's wrapper, such as the compiler's, with the name of what it wraps
        return Place(owner.__globals__, _names_in(owner.__code__)).read()  # type: ignore[no-any-return]
    held = vars(owner)
    return {name: held[name] for name in held.keys() & names - _NOT_NOTED}


def _own_places(function: types.FunctionType) -> Iterator[Place]:
    """Yield what a function holds itself."""
    for held in (*(function.__closure__ or ()), function.__kwdefaults__):
        if held:
            yield Place(held)
    defaults = function.__defaults__
    if defaults and any(type(each) not in _PLAIN for each in defaults):
        yield Place(defaults)


def _beginnings(module: nn.Module, *, hooks: bool = True) -> Iterator[Any]:
    """The functions that torch calls in a call of a module, with or without its hooks."""
    yield type(module).forward
    forward = vars(module).get("forward")
    if forward is not None:
        yield from (forward, getattr(forward, "__wrapped__", forward))
    for held in (module._forward_hooks, module._forward_pre_hooks) if hooks else ():
        if held:
            yield from held.values()


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> frozenset[str]:
    """All names of globals and attributes in a function and in the functions inside it."""
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _own_classes(kind: type) -> list[type]:
    """A class and its bases, but for those of libraries."""
    return [each for each in kind.__mro__ if not _is_of_library(each.__module__)]


def _may_change(value: Any) -> bool:
    """Whether a value is no function, class or module."""
    if isinstance(value, _STATELESS):
        return False
    return _is_object(value) or not (callable(value) or hasattr(type(value), "__get__"))


@final
class Outside:
    """What the code of a model's layers names, which is looked for once.

    It is looked for again if the layer has other hooks or forwards, or if something that was named
    is gone. What the first forward makes is there in the second one.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[nn.Module, tuple[object, Reach]]
        self._known = weakref.WeakKeyDictionary()

    def find(self, layer: nn.Module, modules: Sequence[nn.Module]) -> Reach:
        """Return what the code of a layer names.

        Args:
            layer: the layer.
            modules: the layer and its submodules.
        """
        beginnings = tuple(id(each) for module in modules for each in _beginnings(module))
        known = self._known.get(layer)
        if known is not None and known[0] == beginnings:
            reach = known[1]
            if all(each() is not None for each in (*(o for o, _ in reach.owners), *reach.others)):
                return reach
        reach = find_reach(modules)
        # What was looked for before the first forward is looked for once more.
        self._known[layer] = (None if known is None else beginnings), reach
        return reach
