"""What a forward depends on, noted so that it can run again: arguments, numbers, modules, settings.

A recomputed layer needs a `ModuleState` and its `Arguments`, a forward that ran out of memory a
`ForwardState`.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import random
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ebbtide.devices.process import num_processes
from ebbtide.runtime.compiled import ModuleHook
from ebbtide.runtime.outside import Content, Outside, Place, without_graph
from ebbtide.runtime.parameter_index import RestingWeights
from ebbtide.runtime.record import in_force, kernel_settings
from ebbtide.runtime.torch_internals import (
    PARAMETRIZATION_CACHE,
    may_change_unseen,
    modules_of,
    set_version,
    tree_flatten,
    tree_unflatten,
)

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


def _is_part(value: object) -> bool:
    """Whether a value is a cache or the part of one layer in it."""
    return any(kind.__module__ == _MODULE for kind in type(value).__mro__)


def _copied(value: Any, copy_tensor: Callable[[Tensor], object]) -> Any:
    """Return a copy of a cache, with what a function returns in the places of its tensors."""
    if isinstance(value, Tensor):
        return copy_tensor(value)
    if isinstance(value, list | tuple):
        return type(value)([_copied(each, copy_tensor) for each in value])
    if isinstance(value, dict):
        return type(value)({key: _copied(each, copy_tensor) for key, each in value.items()})
    if not _is_part(value):
        return value
    copied = copy.copy(value)
    for name, each in vars(value).items():
        copied.__dict__[name] = _copied(each, copy_tensor)
    return copied


def _without_memory(tensor: Tensor) -> Tensor:
    return tensor.detach().new_empty(()).expand(tensor.shape)


def _tensors_in(cache: object) -> list[Tensor]:
    found: list[Tensor] = []
    _copied(cache, found.append)
    return found


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
        tensors: the tensors. The caller empties it, so that they are not held twice. The first
            call takes the arguments themselves, with `take_first`.
        others: the other arguments, but for caches.
        kind: what tells calls apart that may compute something else: the structure of the
            arguments, what is true, false or None among them, and the types of tensors.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[Tensor] = []
        self.others: list[Any] = []
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._leaves, self._structure = tree_flatten((args, kwargs), is_leaf=is_cache)
        self._places: dict[int, int] = {}  # of the tensors among the leaves, in `tensors`
        self._caches: dict[int, Any] = {}
        self._filled: list[tuple[Any, Tensor, int]] = []
        known: dict[int, int] = {}
        kind: list[Hashable] = [str(self._structure)]
        for number, leaf in enumerate(self._leaves):
            if isinstance(leaf, Tensor):
                place = self._places[number] = known.setdefault(id(leaf), len(known))
                if place == len(self.tensors):
                    self.tensors.append(leaf)
                kind += (place, leaf.dtype, leaf.requires_grad)
                self._leaves[number] = None
                continue
            told: Any = leaf if leaf is None or type(leaf) is bool else type(leaf)
            kind.append(told)
            if is_cache(leaf):
                self._caches[number] = _copied(leaf, _without_memory)
                self._filled += ((leaf, each, each._version) for each in _tensors_in(leaf))
                self._leaves[number] = None
            else:
                self.others.append(leaf)
        self.kind = tuple(kind)

    def take_first(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments as they were given, and forget them; None if that was done."""
        first, self._first = self._first, None
        return first

    def find_change(self) -> str:
        """Say what the first call, which has just ended, has changed in a cache."""
        filled, self._filled = self._filled, []
        for cache, tensor, version in filled:
            if tensor._version != version or all(each is not tensor for each in _tensors_in(cache)):
                return (
                    f"keys and values that its {type(cache).__name__} had before (call the model "
                    f"with use_cache=False)"
                )
        return ""

    def put_together(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with other tensors in the places of those that were taken."""
        leaves = [*self._leaves]
        for number, place in self._places.items():
            leaves[number] = tensors[place]
        for number, copied in self._caches.items():
            leaves[number] = _copied(copied, _without_memory)
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
# and leave no other traces than the first one did. So what the module's attributes hold, and what
# its code names outside of modules, is noted when the first forward begins (`runtime/outside.py`),
# and with it the settings of torch that kernels depend on. The second forward finds all of that as
# it was, and afterwards the present is put back. Parameters, submodules, hooks, large tensors,
# arrays and generators of random numbers are not put back: if one of them has changed, by the
# forward itself or by the program, the forward does not run again.

_MOST_COPIED_BYTES: Final = 64 * 2**10


@final
class ModuleState:
    """What a forward of a module finds; see [Note: what a second forward finds].

    Of buffers of up to 64 KiB, and of other such tensors, the values are put back, so that the
    running statistics of a batch norm are updated once: its kernel changes them without a change of
    version. Parameters and larger buffers must be unchanged, which their version counters tell.
    Python and NumPy give the same random numbers again; torch's checkpoint sees to torch's.

    Args:
        module: the module.
        outside: finds what its code names outside of modules.
        weights: those of its weights that rest elsewhere; None: none do.
        arguments: arguments of the forward that are no tensors.
        lasting: whether this outlives the forward; see `Content`.

    Attributes:
        is_lazy: whether a parameter or buffer has no shape yet.
        kind: what tells calls apart that may save other tensors: modes, the number of attributes,
            which parameters are trained, and whether they are the module's own.
    """

    def __init__(
        self,
        module: nn.Module,
        outside: Outside,
        weights: RestingWeights | None = None,
        arguments: Iterable[Any] = (),
        *,
        lasting: bool = True,
    ) -> None:
        self._module = module
        self._weights = weights
        self._versions = None if weights is None else weights.versions_of(module)
        self._put_back_numbers = _note_numbers_of_python()
        self._settings = kernel_settings()
        self._constants: list[_UnchangedTensor] = []
        self._small: dict[int, tuple[Tensor, Tensor]] = {}  # and their values
        self.is_lazy = False
        modules = modules_of(module)
        reach = outside.find(module, modules)
        self._others = [each for known in reach.others if (each := known()) is not None]
        places = [Place((*arguments,)), Place(*PARAMETRIZATION_CACHE), *reach.places()]
        kind: list[Hashable] = []
        for each in (*modules, *self._others):
            places += (Place(each), Place(each._buffers))
            kind += (each.training, len(vars(each)))
            for parameter in each._parameters.values():
                if parameter is not None:
                    kind += (parameter.requires_grad, type(parameter) is Tensor)
                    self._note_constant(parameter)
                    if attributes := vars(parameter):  # such as a hook's counter of its uses
                        places.append(Place(attributes, reach.names))
        self._content = Content(places, reach.names, lasting=lasting)
        for tensor in self._content.tensors:
            self._note_tensor(tensor)
        self._structure = self._read_structure()
        self.kind = tuple(kind)

    def _note_constant(self, tensor: Tensor) -> None:
        """Note a tensor that must stay as it is."""
        if is_lazy(tensor):
            self.is_lazy = True
        elif type(tensor) in (nn.Parameter, Tensor) and not tensor.is_inference():
            # Sharded and offloaded weights are of other types, and exchanged for each call.
            self._constants.append(
                _UnchangedTensor(tensor if tensor.grad_fn is None else without_graph(tensor))
            )

    def _note_tensor(self, tensor: Tensor) -> None:
        if self._weights is not None and self._weights.rests(tensor):
            return
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if is_plain and tensor.nbytes <= _MOST_COPIED_BYTES and tensor.is_contiguous():
            if not tensor.is_inference():
                self._small[id(tensor)] = tensor, tensor.detach().clone()
        else:
            self._note_constant(tensor)

    def _read_structure(self) -> list[Hashable]:
        """Return the modules, their hooks and their parameters; None for what is exchanged.

        Hooks are told by torch's numbers: a hook itself may hold a graph, which may hold this. The
        module's own run around its forward, and not when that runs again.
        """
        found: list[Hashable] = []
        for each in (*modules_of(self._module), *self._others):
            held = () if each is self._module else (each._forward_hooks, each._forward_pre_hooks)
            hooks = (pair for hooks in held for pair in hooks.items())
            found.append((each, *(n for n, hook in hooks if not isinstance(hook, ModuleHook))))
            for parameter in dict.values(each._parameters):
                if parameter is not None and type(parameter) in (nn.Parameter, Tensor):
                    found.append((id(parameter), parameter.requires_grad))
                else:
                    found.append(None)
        return found

    def memory(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return tensors whose memory a forward must not change.

        Args:
            tensors: its inputs.
        """
        own = [w for each in modules_of(self._module) for w in dict.values(each._parameters)]
        constants = [each.tensor for each in self._constants]
        found = {id(each): each for each in (*constants, *own, *tensors) if each is not None}
        rests = self._weights.rests if self._weights is not None else _none_rests
        return [each for each in found.values() if not rests(each)]

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Within the block all is as it was before the first forward; see `find_change`."""
        put_back_numbers = _note_numbers_of_python()
        small = [(t, t.detach().clone(), t._version) for t, _ in self._small.values()]
        try:
            self._put_back_numbers()
            with in_force(self._settings), self._content.put_back():
                self._put_back_small()
                yield
        finally:
            for tensor, content, version in small:
                _fill(tensor, content)
                set_version(tensor, version)
            put_back_numbers()

    def put_back_for_good(self) -> None:
        """Have all be as it was before the forward, with the same tensors."""
        self._put_back_numbers()
        self._content.put_back_for_good()
        self._put_back_small()

    def _put_back_small(self) -> None:
        for tensor, content in self._small.values():
            _fill(tensor, content)

    def find_change(self) -> str:
        """Say what is not as the first forward has found it, and is not put back; "" if nothing."""
        for each in self._constants:
            # A weight that was written since would give gradients of neither the old nor the new.
            if each.is_modified():
                return self._name_of(each.tensor)
        if self._weights is not None and self._weights.versions_of(self._module) != self._versions:
            return "a weight whose values are offloaded"
        structure = self._read_structure()
        if len(structure) != len(self._structure) or any(
            now != then and now is not None and then is not None
            for now, then in zip(structure, self._structure, strict=True)
        ):
            return "parameters, submodules or hooks"
        elusive = self._content.elusive
        return f"{elusive}, which nothing puts back" if elusive else ""

    def _name_of(self, tensor: Tensor) -> str:
        for prefix, module in self._module.named_modules():
            held = dict.items(module._parameters), module._buffers.items(), vars(module).items()
            for pairs in held:
                for name, value in pairs:
                    if value is tensor:
                        return f"{prefix}.{name}".lstrip(".")
        return f"a tensor of shape {tuple(tensor.shape)}"


def _fill(tensor: Tensor, content: Tensor) -> None:
    """Give a tensor other values. No version counts that."""
    # Memory that torch did not allocate, such as a mapped file, may be one that nobody can write.
    if not may_change_unseen(tensor.untyped_storage()) or not torch.equal(tensor, content):
        tensor.data.copy_(content)


def _none_rests(_: Tensor) -> bool:
    return False


@final
class _UnchangedTensor:
    """A parameter or a large buffer, with which a second forward computes as it is then.

    Args:
        tensor: the tensor, without a graph.

    Attributes:
        tensor: as given.
    """

    __slots__ = ("_memory", "_version", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._version = tensor, tensor._version
        # Refers to the memory, so that the allocator gives the same address to nothing else.
        has_address = tensor.layout is torch.strided and not tensor.is_nested
        self._memory = tensor.data if has_address else None

    def is_modified(self) -> bool:
        """Whether it was modified in place, or has been given other memory, which no version tells.

        FSDP1 and DeepSpeed do so themselves when they gather a parameter and when they let it go.
        FSDP2 empties the storage and fills it again, so that it is the same one.
        """
        tensor, memory = self.tensor, self._memory
        if tensor._version != self._version:
            return True
        if memory is None or (
            tensor.data_ptr() == memory.data_ptr()
            and tensor.stride() == memory.stride()
            and tensor.shape == memory.shape
        ):
            return False
        return not hasattr(tensor, "_fsdp_flattened") and not hasattr(tensor, "ds_id")


# ---- Repeats a forward that ran out of memory, from what it found when it began ----


@final
class ForwardState:
    """What a forward of a model begins with, so that it can be repeated as if it had not run.

    What a `ModuleState` puts back is put back, and all random numbers. The rest must be unchanged:
    the arguments, the parameters, their gradients, and large tensors.

    Args:
        model: the model.
        args: the positional arguments of its forward.
        kwargs: the keyword arguments.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._arguments = args, kwargs
        leaves, self._structure = tree_flatten((args, kwargs))
        gradients = [(each, each.grad) for each in model.parameters()]
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        tensors += (each for _, each in gradients if each is not None)
        self._leaves, self._gradients = leaves, gradients
        self._versions = [(each, each._version) for each in tensors if not each.is_inference()]
        self._state = ModuleState(model, Outside(), arguments=leaves, lasting=False)
        devices = {each.device for each in (*tensors, *model.parameters(), *model.buffers())}
        self._put_back_numbers = note_random_numbers(devices)

    def can_be_put_back(self) -> bool:
        """Whether the forward has changed only what `put_back` puts back, as far as is known."""
        leaves, structure = tree_flatten(self._arguments)
        return (
            num_processes() == 1  # the others wait where this one was
            and structure == self._structure
            and all(now is before for now, before in zip(leaves, self._leaves, strict=True))
            and not any(map(is_cache, leaves))
            and all(each.grad is before for each, before in self._gradients)
            and all(each._version == version for each, version in self._versions)
            and not self._state.find_change()
        )

    def put_back(self) -> None:
        """Put back what the forward began with."""
        self._state.put_back_for_good()
        self._put_back_numbers()
