"""What a forward depends on, noted so that it can run again: arguments, numbers, modules, settings.

A recomputed layer needs a `ModuleState` and its `Arguments`, a forward that ran out of memory a
`ForwardState`.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import operator
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ebbtide.devices.process import num_processes
from ebbtide.errors import SavedTensorModifiedError
from ebbtide.runtime.compiled import ModuleHook
from ebbtide.runtime.outside import GONE, Outside, Variable, assign, find_outside, is_iterator
from ebbtide.runtime.parameter_index import ExchangedParameter
from ebbtide.runtime.torch_internals import (
    KERNEL_SETTINGS,
    addresses_of,
    modules_of,
    parametrization_cache,
    parts_of,
    set_parametrization_cache,
    tree_flatten,
    tree_unflatten,
)
from ebbtide.units import format_size

# ---- Copies of the caches that transformers pass to their layers, for a forward that runs again
#
# [Note: caches] Unless it is told `use_cache=False`, a model of Transformers fills a cache with
# keys and values in training, too: each layer is given the cache of the whole model and adds its
# part. When a layer's forward runs again, it must find its part empty, as the first forward did.
# It gets a copy of the cache in which the parts of other layers have their shape and no memory,
# because no layer reads the part of another.

_MODULE = "transformers.cache_utils"


def is_cache(value: object) -> bool:
    """Whether an argument is a cache of Transformers, which is not imported for this."""
    return any(
        kind.__name__ == "Cache" and kind.__module__ == _MODULE for kind in type(value).__mro__
    )


@final
class CopiedCache:
    """A cache as it was when a layer was called with it.

    Args:
        cache: the cache.
    """

    def __init__(self, cache: Any) -> None:
        self._copy = _copied(cache)
        self._filled = [(tensor, tensor._version) for tensor in _tensors_in(cache)]

    def find_change(self, cache: Any) -> str:
        """Say what the layer has read or changed that the cache had before."""
        filled, self._filled = self._filled, []
        now = {id(tensor) for tensor in _tensors_in(cache)}
        if any(id(tensor) not in now or tensor._version != version for tensor, version in filled):
            return (
                f"extends keys and values that its {type(cache).__name__} had before (call the "
                f"model with use_cache=False)"
            )
        return ""

    def fresh(self) -> Any:
        """Return a cache that the layer can fill again."""
        return _copied(self._copy)


def _is_part(value: object) -> bool:
    """Whether a value is a cache or the part of one layer in it."""
    return any(kind.__module__ == _MODULE for kind in type(value).__mro__)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().new_empty(()).expand(value.shape)
    if isinstance(value, list | tuple):
        return type(value)([_copied(each) for each in value])
    if isinstance(value, dict):
        return type(value)({key: _copied(each) for key, each in value.items()})
    if not _is_part(value):
        return value
    copied = copy.copy(value)
    for name, each in vars(value).items():
        copied.__dict__[name] = _copied(each)
    return copied


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
    elif _is_part(value):
        yield from _tensors_in(vars(value))


# ---- Separates the tensors among a call's arguments from the rest, so that they can be saved ----


@final
class Arguments:
    """The arguments of one call: its tensors, and what is needed to make the same call again.

    Tensors are found wherever torch's pytrees find them: in tuples, named tuples, lists and dicts,
    nested or not, and in what a library has registered. These containers are made anew for the
    second call, so it does no harm if the first one changes them; caches are copied, see
    [Note: caches]. All other objects are passed to the second call as they are. A tensor that
    occurs twice is listed once, and the second call gets one tensor for both, because some modules
    ask whether two arguments are the same object.

    Args:
        args: the positional arguments.
        kwargs: the keyword arguments.

    Attributes:
        tensors: the tensors. The caller takes the list, so that they are not held twice. The first
            call takes the arguments themselves, with `take_first`.
        kind: what tells calls apart that may compute something else: the structure of the
            arguments, what is true, false or None among them, and the types of tensors.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[Tensor] = []
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._leaves, self._structure = tree_flatten((args, kwargs), is_leaf=is_cache)
        self._places: dict[int, int] = {}  # of the tensors among the leaves, in `tensors`
        self._caches: dict[int, CopiedCache] = {}
        known: dict[int, int] = {}
        kind: list[Hashable] = [str(self._structure)]
        for number, leaf in enumerate(self._leaves):
            if isinstance(leaf, Tensor):
                place = self._places[number] = known.setdefault(id(leaf), len(known))
                if place == len(self.tensors):
                    self.tensors.append(leaf)
                kind += (place, leaf.dtype, leaf.requires_grad)
                self._leaves[number] = None
            else:
                told: Any = leaf if leaf is None or type(leaf) is bool else type(leaf)
                kind.append(told)
                if is_cache(leaf):
                    self._caches[number] = CopiedCache(leaf)
        self.kind = tuple(kind)

    def take_tensors(self) -> list[Tensor]:
        """Return the tensors and forget them."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def take_first(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments as they were given, and forget them; None if that was done."""
        first, self._first = self._first, None
        return first

    def find_change(self) -> str:
        """Say what the first call has changed that the second call needs."""
        changes = [copied.find_change(self._leaves[n]) for n, copied in self._caches.items()]
        self._leaves = [None if n in self._caches else e for n, e in enumerate(self._leaves)]
        return next(filter(None, changes), "")

    def put_together(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with other tensors in the places of those that were taken."""
        leaves = [*self._leaves]
        for number, place in self._places.items():
            leaves[number] = tensors[place]
        for number, copied in self._caches.items():
            leaves[number] = copied.fresh()
        args, kwargs = tree_unflatten(leaves, self._structure)
        return args, kwargs


# ---- The states of all random numbers that a forward may draw ----


def note_random_numbers(devices: Iterable[torch.device]) -> Callable[[], None]:
    """Note the states of the random numbers of torch, Python and NumPy.

    Args:
        devices: the devices whose random numbers are noted beside the host's.

    Returns:
        What puts the states back.
    """
    drawn_elsewhere = [each for each in devices if each.type not in ("cpu", "meta")]
    modules = [(torch.get_device_module(each), each) for each in drawn_elsewhere]
    states = [module.get_rng_state(device) for module, device in modules]
    host_state, put_back_others = torch.get_rng_state(), _note_numbers_of_python()

    def put_back() -> None:
        for (module, device), state in zip(modules, states, strict=True):
            module.set_rng_state(state, device)
        torch.set_rng_state(host_state)
        put_back_others()

    return put_back


_last_numbers: tuple[tuple[object, ...] | None, Callable[[], None]] | None = None


def _note_numbers_of_python() -> Callable[[], None]:
    """Note the states of the random numbers of Python and NumPy.

    To copy both states takes 40 us, and it is done for each call of a recomputed layer. So the last
    copy is given again while the generators' memory has the bytes that it had.

    Returns:
        What puts the states back, if they differ from the present ones.
    """
    # NumPy loads and seeds this where it is first used, which may be in the forward.
    from numpy import random as numpy_random

    global _last_numbers
    before = _memory_of_generators()
    if _last_numbers is not None and before is not None and _last_numbers[0] == before:
        return _last_numbers[1]
    state, numpy_state = random.getstate(), numpy_random.get_state(legacy=False)
    # If another thread has drawn meanwhile, nothing tells which state was copied.
    memory = before if before == _memory_of_generators() else None

    def put_back() -> None:
        if memory is None or memory != _memory_of_generators():
            random.setstate(state)
            numpy_random.set_state(numpy_state)

    _last_numbers = memory, put_back
    return put_back


def _memory_of_generators() -> tuple[object, ...] | None:
    """Return what changes whenever the states of the random numbers of Python or NumPy do.

    These are the bytes of the objects that have them, without their reference counts. None if
    NumPy draws from a generator whose state may be elsewhere.
    """
    own, numpy_random = vars(random), sys.modules["numpy.random"]
    of_python: Any = own["_inst"]
    of_numpy: Any = numpy_random.mtrand._rand
    bits = of_numpy._bit_generator
    if type(bits) is not numpy_random.MT19937 or type(of_python) is not random.Random:
        return None
    # The second number of a pair that `random.gauss` has drawn is an attribute.
    gauss = vars(of_python)["gauss_next"]
    return gauss, *[_bytes_of(each).raw for each in (of_python, of_numpy, bits)]


@functools.lru_cache(maxsize=8)
def _bytes_of(owner: object) -> Any:
    """Return a view of an object's memory. The cache keeps the object alive."""
    begin = object.__basicsize__
    size_bytes = type(owner).__basicsize__ - begin
    return (ctypes.c_char * size_bytes).from_address(id(owner) + begin)


# ---- What the forward of a module finds besides its arguments, and how a second one finds it again
#
# [Note: what a second forward finds] A forward that runs again must find what the first one found,
# and leave no other traces than the first one did. So all attributes of the module and of its
# submodules are noted when the first forward begins: parameters, buffers, submodules, hooks, modes
# and whatever the program has set, and with them the settings of torch that kernels depend on. The
# second forward finds all of that as it was, and afterwards the present is put back. So it is with
# what the module's code names outside of modules, such as globals (`runtime/outside.py`).

# Long: whatever a forward can depend on besides its arguments is here.

_MOST_COPIED_BYTES: Final = 64 * 2**10
_MOST_ENTRIES: Final = 10_000  # of a list or dict outside of modules that is noted with its content
_PLAIN: Final = frozenset({bool, int, float, str, type(None)})
_CONTAINERS: Final = frozenset({dict, OrderedDict, defaultdict, Counter, list, deque, set})
_OF_TORCH: Final = frozenset(vars(nn.Module())) - {"training"}
"""The attributes of every module that hold its parameters, buffers, submodules and hooks."""


@final
class Note:
    """What some variables hold, which may be put back as it is now.

    Lists, sets and dicts among them are noted with their content, however deep and in tuples, too,
    and so are small arrays of NumPy. Of generators of random numbers the states are noted. What
    other objects are changed to is not known.

    Args:
        variables: variables outside of modules; see `find_outside`.
        module: a module, all of whose attributes are noted, and the content of the dicts that hold
            its parameters, buffers, submodules and hooks.
        lasting: whether the note outlives the forward that runs. Tensors are then noted without
            their graphs, which may hold the note.

    Attributes:
        module: as given.
        attributes: the attributes of the module.
        tensors: tensors among what is noted, and in lists, dicts and tuples there, each with what
            holds it and its name or number there.
        iterator: the name of an iterator; "" without one.
    """

    __slots__ = (
        *("_contents", "_inner", "_lasting", "_own", "_variables"),
        *("attributes", "iterator", "module", "tensors"),
    )

    def __init__(
        self,
        variables: Iterable[Variable] = (),
        module: nn.Module | None = None,
        *,
        lasting: bool = False,
    ) -> None:
        self.module = module
        self.tensors: list[tuple[Any, Any, Tensor]] = []
        self.iterator = ""
        self._lasting = lasting
        self._inner: list[Callable[[], object]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._own: list[tuple[str, Any]] = []
        self._variables = [
            each._replace(value=self._noted(*each))
            for each in variables
            if type(each.value) not in _CONTAINERS or len(each.value) <= _MOST_ENTRIES
        ]
        now = {} if module is None else vars(module)
        self.attributes = attributes = now.copy()
        for name, value in now.items():
            if type(value) in _PLAIN:
                continue
            if name in _OF_TORCH:
                self._own.append((name, _content_of(value, lasting=lasting) if value else ()))
            else:
                attributes[name] = self._noted(now, name, value)

    def _noted(self, holder: Any, name: str, value: Any) -> Any:
        """Note what a variable holds. Returns what it is to hold again."""
        if type(value) in _CONTAINERS or isinstance(value, tuple):
            for held in (value, *_containers_in(value)):
                if not isinstance(held, tuple):
                    self._contents.append((held, _content_of(held, lasting=self._lasting)))
                if held and not isinstance(held, set):
                    pairs = dict.items(held) if isinstance(held, dict) else enumerate(held)
                    self.tensors += ((held, k, t) for k, t in pairs if isinstance(t, Tensor))
        elif isinstance(value, Tensor):
            self.tensors.append((holder, name, value))
            return _without_graph(value) if self._lasting else value
        elif (put_back := _note_inner_state(value)) is not None:
            self._inner.append(put_back)
        elif is_iterator(value):
            self.iterator = name
        return value

    @property
    def variables(self) -> list[Variable]:
        """The variables with their present values."""
        present = [each._replace(value=each.now()) for each in self._variables]
        return [each for each in present if each.value is not GONE]

    def is_present(self) -> bool:
        """Whether the module is surely as it was, so that there is nothing to put back."""
        now, noted = vars(self.module), self.attributes
        return (
            len(now) == len(noted)
            and all(map(operator.is_, now, noted))
            and all(map(operator.is_, now.values(), noted.values()))
            and not self._inner
            and all(_holds(now[name], content) for name, content in self._own)
            and all(_holds(container, content) for container, content in self._contents)
        )

    def put_back(self) -> None:
        """Give the variables their values back, and the module its attributes."""
        if self.module is not None:
            if self.is_present():
                return
            now, noted = vars(self.module), self.attributes
            for name in now.keys() - noted.keys() - {"forward"}:
                del now[name]
            for name, value in noted.items():
                if name != "forward" and name not in _OF_TORCH and now.get(name, now) is not value:
                    now[name] = value
            for name, content in self._own:
                if not _holds(now[name], content):
                    _refill(now[name], content)
        for each in self._variables:
            if each.now() is not each.value:
                assign(each.holder, each.name, each.value)
        for container, content in self._contents:
            if not _holds(container, content):
                _refill(container, content)
        for put_back in self._inner:
            put_back()


def _containers_in(container: Any) -> Iterator[Any]:
    """Yield the lists, sets, dicts and tuples inside one of them, however deep, each once."""
    known = {id(container)}
    rest = [container]
    while rest:
        each = rest.pop()
        if isinstance(each, set):  # of what cannot change
            continue
        for inner in dict.values(each) if isinstance(each, dict) else each:
            is_held = type(inner) in _CONTAINERS or isinstance(inner, tuple)
            if is_held and id(inner) not in known:
                known.add(id(inner))
                rest.append(inner)
                yield inner


def _content_of(container: Any, *, lasting: bool) -> Any:
    """Return what a list, set or dict holds, without what is read through it instead."""
    if isinstance(container, set):
        return container.copy()
    if isinstance(container, dict):
        held = dict.copy(container)
        if lasting:
            for key, value in dict.items(held):
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    held[key] = _without_graph(value)
        return held
    return (
        [_without_graph(e) if isinstance(e, Tensor) else e for e in container]
        if lasting
        else [*container]
    )


def _without_graph(tensor: Tensor) -> Tensor:
    """Return a tensor with the same memory and version that refers to no graph."""
    if tensor.grad_fn is None or isinstance(tensor, ExchangedParameter):
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _holds(container: Any, content: Any) -> bool:
    if len(container) != len(content):
        return False
    if not content:
        return True
    if isinstance(container, dict):
        return dict.keys(container) == content.keys() and all(
            map(operator.is_, dict.values(container), content.values())
        )
    if isinstance(container, set):
        return bool(container == content)
    return all(map(operator.is_, container, content))


def _refill(container: Any, content: Any) -> None:
    """Give a list, set or dict its content back, but for what is exchanged for each call."""
    if isinstance(container, list):
        present = container[:]
        container[:] = [
            present[place] if place < len(present) and _is_exchanged(each, present[place]) else each
            for place, each in enumerate(content)
        ]
        return
    if isinstance(container, set | deque):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(content)
        return
    now, noted = dict.copy(container), dict(content)
    container.clear()
    for key, value in noted.items():
        if not _is_exchanged(value, now.get(key)):
            container[key] = value
        elif key in now:
            container[key] = now[key]
    for key, value in now.items():
        if key not in noted and _is_exchanged(value):
            container[key] = value


def _is_exchanged(*values: object) -> bool:
    """Whether values are ebbtide's own hooks, or offloaded or sharded weights."""
    return any(
        isinstance(value, ExchangedParameter | ModuleHook)
        or hasattr(type(value), "__tensor_flatten__")
        for value in values
    )


def _note_inner_state(value: Any) -> Callable[[], object] | None:
    """Note the state of a generator of random numbers or a small array; return what restores it."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return None
    if isinstance(value, numpy_random.RandomState):
        return functools.partial(value.set_state, value.get_state(legacy=False))
    if isinstance(value, numpy_random.Generator):
        source = value.bit_generator
        return functools.partial(setattr, source, "state", source.state)
    numpy = sys.modules["numpy"]
    if (
        type(value) is numpy.ndarray
        and value.nbytes <= _MOST_COPIED_BYTES
        and value.flags.writeable
    ):
        return functools.partial(numpy.copyto, value, value.copy())
    return None


# ---- settings of torch ------------------------------------------------------------------------


def note_settings(*, lasting: bool = False) -> Callable[[], None]:
    """Note the settings of torch that kernels depend on, and what parametrizations have cached.

    Args:
        lasting: see `Note`.

    Returns:
        What sets them as they were.
    """
    values = [read() for read, _ in KERNEL_SETTINGS]
    enabled, cache = parametrization_cache()
    cached = _content_of(cache, lasting=lasting) if enabled else {}

    def put_back() -> None:
        present = [read() for read, _ in KERNEL_SETTINGS]
        if present != values:
            for (_, write), now, value in zip(KERNEL_SETTINGS, present, values, strict=True):
                if now != value:
                    write(value)
        if enabled or parametrization_cache()[0]:
            set_parametrization_cache(enabled, dict(cached))

    return put_back


# ---- all of it --------------------------------------------------------------------------------


@final
class ModuleState:
    """What a forward of a module finds; see [Note: what a second forward finds].

    Buffers of up to 64 KiB, and other tensors among the attributes, are copied if need be, so that
    the running statistics of a batch norm are updated once. So are parameters of that size that the
    forward does not save, such as biases: plain training may change them before backward. Other
    parameters and larger buffers must be unchanged, which their version counters tell. Python and
    NumPy give the same random numbers again; torch's checkpoint sees to torch's.

    Args:
        module: the module.
        where: names it in errors.
        weight_versions: returns the versions of its weights that rest on the host.
        outside: finds what its code names outside of modules.

    Attributes:
        is_lazy: whether a parameter or buffer has no shape yet.
        iterator: the name of an iterator that it may advance, which nothing sets back; "" without
            one.
        kind: what tells calls apart that may save other tensors: modes, the number of attributes,
            which parameters are trained, and whether they are the module's own.
    """

    def __init__(
        self,
        module: nn.Module,
        where: str,
        weight_versions: Callable[[nn.Module], Hashable],
        outside: Outside,
    ) -> None:
        self._module = module
        self._where = where
        self._put_back_numbers = _note_numbers_of_python()
        self._put_back_settings = note_settings(lasting=True)
        self._weight_versions = weight_versions
        self._weights = weight_versions(module)
        self._notes: list[Note] = []
        self._copies: list[_CopiedTensor] = []
        self._constants: list[_UnchangedTensor] = []
        self._exchanged: list[tuple[Tensor, int]] = []
        self._trained: list[tuple[Tensor, bool]] = []
        self._parameters: list[tuple[dict[str, Any], str, _UnchangedTensor | None]] = []
        self._unsaved: list[tuple[_UnchangedTensor, _CopiedTensor]] = []
        self.is_lazy = False
        kind: list[Hashable] = []
        modules = modules_of(module)
        variables, others = outside.find(module, modules)
        for each in (*modules, *others):
            note = Note(module=each, lasting=True)
            self._notes.append(note)
            kind += (each.training, len(note.attributes))
            parameters, buffers = each._parameters, each._buffers
            if parameters:
                for name, parameter in dict.items(parameters):
                    if parameter is not None:
                        is_own, unchanged = self._note_parameter(parameter)
                        kind += (parameter.requires_grad, is_own)
                        self._parameters.append((parameters, name, unchanged))
            if buffers:
                for name, buffer in buffers.items():
                    if buffer is not None:
                        self._note_tensor(buffers, name, buffer)
        self._outside = Note(variables, lasting=True)
        for note in (*self._notes, self._outside):
            for place in note.tensors:
                self._note_tensor(*place)
        self.iterator = self._outside.iterator or max(note.iterator for note in self._notes)
        self.kind = tuple(kind)

    def _note_parameter(self, parameter: Tensor) -> tuple[bool, _UnchangedTensor | None]:
        """Note a parameter. Returns whether it is the module's own, and if so, what notes it."""
        if type(parameter) is nn.Parameter:
            unchanged = _UnchangedTensor(parameter)
            self._constants.append(unchanged)
            self._trained.append((parameter, parameter.requires_grad))
            return True, unchanged
        if is_lazy(parameter):
            self.is_lazy = True
        elif type(parameter) is Tensor:  # of `functional_call`
            self._constants.append(_UnchangedTensor(_without_graph(parameter)))
            return False, None
        elif isinstance(parameter, ExchangedParameter):
            self._exchanged.append((parameter, parameter._version))
        return True, None  # sharded and offloaded weights are exchanged for each call

    def _note_tensor(self, holder: Any, name: Any, tensor: Tensor) -> None:
        if is_lazy(tensor):
            self.is_lazy = True
        elif not isinstance(tensor, nn.Parameter | ExchangedParameter):
            # Nothing takes the place of a tensor in a tuple, so it has to stay as it is.
            if _size_bytes(tensor) <= _MOST_COPIED_BYTES and not isinstance(holder, tuple):
                self._copies.append(_CopiedTensor(holder, name, tensor))
            elif not tensor.is_inference():
                self._constants.append(_UnchangedTensor(_without_graph(tensor)))

    def find_unsaved(
        self, saved: Container[int], rests: Callable[[Tensor], bool]
    ) -> frozenset[int]:
        """Return the places of small parameters whose memory is not among what was saved.

        Args:
            saved: addresses of the parameters that the forward has saved.
            rests: tells of a parameter whether it rests elsewhere, and its versions are compared.
        """
        return frozenset(
            place
            for place, (_, _, unchanged) in enumerate(self._parameters)
            if unchanged is not None
            and _has_address(unchanged.tensor)
            and unchanged.tensor.nbytes <= _MOST_COPIED_BYTES
            and not rests(unchanged.tensor)
            and not any(address in saved for address in addresses_of(unchanged.tensor))
        )

    def copy_unsaved(self, places: Iterable[int]) -> None:
        """Copy the parameters in these places. A second forward gets the copies of changed ones."""
        for place in places:
            holder, name, unchanged = self._parameters[place]
            if unchanged is not None:
                self._unsaved.append((unchanged, _CopiedTensor(holder, name, unchanged.tensor)))
                self._constants.remove(unchanged)

    def find_change(self) -> str:
        """Say what the first forward, which has ended, has changed that is not put back."""
        changed = [each.tensor for each in self._constants if each.is_modified()]
        changed += [tensor for tensor, version in self._exchanged if tensor._version != version]
        self._exchanged.clear()
        return self._describe(changed[0]) if changed else ""

    def _describe(self, tensor: Tensor) -> str:
        return f"{self._name_of(tensor)} ({format_size(_size_bytes(tensor))})"

    def _name_of(self, tensor: Tensor) -> str:
        for prefix, module in self._module.named_modules():
            held = dict.items(module._parameters), module._buffers.items(), vars(module).items()
            for pairs in held:
                for name, value in pairs:
                    if value is tensor:
                        return f"{prefix}.{name}".lstrip(".")
        return f"a tensor of shape {tuple(tensor.shape)}"

    def unchanged(self) -> list[Tensor]:
        """The tensors that a second forward must not change."""
        return [each.tensor for each in self._constants]

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Within the block all is as it was before the first forward.

        Raises:
            SavedTensorModifiedError: a parameter or a large buffer has been modified since, or has
                other memory.
        """
        change = self.find_later_change()
        if change:
            raise SavedTensorModifiedError(change)
        notes = self._notes
        present = [note if note.is_present() else Note(module=note.module) for note in notes]
        put_back_settings = note_settings()
        outside = Note(self._outside.variables)
        trained = [(weight, weight.requires_grad) for weight, _ in self._trained]
        put_back_numbers = _note_numbers_of_python()
        try:
            self._put_back_numbers()
            self._put_back_settings()
            for note, now in zip(notes, present, strict=True):
                if note is not now:
                    note.put_back()
            self._outside.put_back()
            copied: dict[int, Tensor] = {}
            for each in self._copies:
                each.put_back(copied)
            for unchanged, each in self._unsaved:
                # Only then: the compiler makes another graph for a tensor that is no parameter.
                if unchanged.is_modified() or unchanged.is_elsewhere():
                    each.put_back(copied)
            _set_trained(self._trained)
            yield
        finally:
            _set_trained(trained)
            for now in present:
                now.put_back()
            outside.put_back()
            put_back_settings()
            put_back_numbers()

    def find_later_change(self) -> str:
        """Say which parameter or large buffer is not as the first forward has used it."""
        # A layer is recomputed with the weights that its forward has used.
        # A weight that was written since would give gradients of neither the old nor the new one.
        for each in self._constants:
            tensor = each.tensor
            if each.is_modified():
                return (
                    f"{self._name_of(tensor)} of {self._where} was modified in place after the "
                    f"layer's forward had used it at version {each.version}; it is at version "
                    f"{tensor._version} when backward runs the forward again. Call backward "
                    f"before optimizer.step()"
                )
            if each.is_elsewhere():
                return (
                    f"{self._name_of(tensor)} of {self._where} was given other memory "
                    f"(`parameter.data = ...`) after the layer's forward had used it, and backward "
                    f"runs the forward again. Assign weights after backward"
                )
        if self._weight_versions(self._module) != self._weights:
            return (
                f"a weight of {self._where}, whose values are offloaded, was modified after the "
                f"layer's forward had used it, and backward runs the forward again. Call backward "
                f"before optimizer.step()"
            )
        return ""


def _set_trained(weights: list[tuple[Tensor, bool]]) -> None:
    for weight, trained in weights:
        if weight.requires_grad is not trained:
            weight.requires_grad_(trained)


@final
class _UnchangedTensor:
    """A parameter or a large buffer, with which a second forward computes as it is then.

    Args:
        tensor: the tensor, without a graph.

    Attributes:
        tensor: as given.
        version: its version.
    """

    __slots__ = ("_memory", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version
        # Refers to the memory, so that the allocator gives the same address to nothing else.
        self._memory = tensor.data if _has_address(tensor) else None

    def is_modified(self) -> bool:
        """Whether it was modified in place."""
        return self.tensor._version != self.version

    def is_elsewhere(self) -> bool:
        """Whether the program has given it other memory, which no version tells.

        FSDP1 and DeepSpeed do so themselves when they gather a parameter and when they let it go.
        FSDP2 empties the storage and fills it again, so that it is the same one.
        """
        tensor, memory = self.tensor, self._memory
        if memory is None or (
            tensor.data_ptr() == memory.data_ptr()
            and tensor.stride() == memory.stride()
            and tensor.shape == memory.shape
        ):
            return False
        return not hasattr(tensor, "_fsdp_flattened") and not hasattr(tensor, "ds_id")


def _has_address(tensor: Tensor) -> bool:
    if type(tensor) is not nn.Parameter and type(tensor) is not Tensor:
        return False
    return tensor.layout is torch.strided and not tensor.is_nested


@final
class _CopiedTensor:
    """A small tensor among a module's attributes, and its content.

    The second forward works on a copy: kernels such as that of a batch norm change their buffers
    without a change of version.

    Args:
        holder: what holds it; see `Variable`.
        name: its name there.
        tensor: the tensor.
    """

    __slots__ = ("_content", "_holder", "_key", "_name", "_trained")

    def __init__(self, holder: Any, name: Any, tensor: Tensor) -> None:
        self._holder, self._name, self._key = holder, name, id(tensor)
        self._content = tensor.detach().clone()
        self._trained = tensor.requires_grad

    def put_back(self, copied: dict[int, Tensor]) -> None:
        """Put a copy of what it was into its place.

        Args:
            copied: the copies so far, by the tensors' `id`.
        """
        if self._key not in copied:
            copied[self._key] = self._content.clone().requires_grad_(self._trained)
        assign(self._holder, self._name, copied[self._key])


def _size_bytes(tensor: Tensor) -> int:
    return sum(part.nbytes for part in parts_of(tensor) if part.layout is torch.strided)


# ---- Repeats a forward that ran out of memory, from what it found when it began ----

_MOST_BUFFER_BYTES: Final = 2**20  # of all buffers together


@final
class ForwardState:
    """What a forward of a model begins with, so that it can be repeated as if it had not run.

    These are the random numbers of torch, of the model's device, of Python and of NumPy, the
    buffers, the other attributes of the modules, with the lists, sets and dicts among them, and
    what their code names outside of modules. The arguments, the parameters, their gradients,
    buffers of more than 1 MiB in all, and other tensors among attributes and outside of modules
    must be unchanged. What a forward does to other objects is not known.

    Args:
        model: the model.
        args: the positional arguments of its forward.
        kwargs: the keyword arguments.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._arguments = args, kwargs
        self._leaves, self._structure = tree_flatten((args, kwargs))
        modules = modules_of(model)
        variables, others = find_outside(modules)
        modules += others
        self._notes = [*(Note(module=module) for module in modules), Note(variables)]
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        constants = [each for each in self._leaves if isinstance(each, Tensor)]
        # Offloaded and sharded weights are of other types; each forward gets them anew.
        constants += (each for each in model.parameters() if type(each) is nn.Parameter)
        self._gradients = [(each, each.grad) for each in model.parameters()]
        constants += (each for _, each in self._gradients if each is not None)
        noted = [each for note in self._notes for _, _, each in note.tensors]
        constants += (e for e in noted if not is_lazy(e) and not isinstance(e, ExchangedParameter))
        left_bytes = _MOST_BUFFER_BYTES
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is None or is_lazy(buffer):
                    continue
                left_bytes -= sum(part.nbytes for part in parts_of(buffer))
                if left_bytes >= 0:
                    copied = buffer.detach().clone()
                    self._buffers.append((module, name, buffer, copied))
                else:
                    constants.append(buffer)
        self._versions = [(each, each._version) for each in constants if not each.is_inference()]
        self._put_back_numbers = note_random_numbers({each.device for each in constants})

    def can_be_put_back(self) -> bool:
        """Whether the forward has changed only what `put_back` puts back, as far as is known."""
        if num_processes() > 1:
            return False  # the others wait where this one was
        if any(note.iterator for note in self._notes):
            return False
        if any(each.grad is not before for each, before in self._gradients):
            return False
        leaves, structure = tree_flatten(self._arguments)
        same = len(leaves) == len(self._leaves) and structure == self._structure
        if not same or any(map(is_cache, leaves)):
            return False
        if any(now is not before for now, before in zip(leaves, self._leaves, strict=True)):
            return False
        return all(each._version == version for each, version in self._versions)

    def put_back(self) -> None:
        """Put back what the forward began with."""
        self._put_back_numbers()
        for note in self._notes:
            note.put_back()
        for module, name, buffer, copied in self._buffers:
            module._buffers[name] = buffer
            with torch.no_grad():
                buffer.copy_(copied)
