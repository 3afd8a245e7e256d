"""Tells which saved tensors are parameters, buffers, or views and casts of them."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, final

import torch
from torch import nn

from ebbtide.errors import PolicyError
from ebbtide.runtime.torch_internals import addresses_of, modules_of, parts_of

_AUTOCAST_TYPES = frozenset({torch.bfloat16, torch.float16})


@final
class ParameterIndex:
    """Recognises the parameters and buffers of some modules, their views and their cast copies.

    These tensors are on the device whether or not autograd saves them, so offloading them frees no
    memory. A view is recognised by its memory. A copy (made by autocast, or of a transposed weight)
    has its own storage; it is recognised because its `grad_fn` leads through copying operations to
    the parameter. A frozen parameter has no `grad_fn`; autocast's copy of one is recognised by its
    shape and type.

    Args:
        modules: modules whose parameters and buffers are recognised.

    Attributes:
        unsharded: recognises those that FSDP gathers while a forward runs.
        resting: offloaded parameters. The cast of a frozen one is treated like any other tensor,
            because the parameter itself is not on the device.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.resting: Container[nn.Parameter] = ()
        self._modules = [weakref.ref(module) for module in modules]
        self.unsharded = UnshardedParameters(self._modules)
        self._pointers: set[int] = set()
        self._frozen_shapes: set[torch.Size] = set()

    def refresh(self, held: Iterable[torch.Tensor] = ()) -> None:
        """Read the modules again, because parameters may have been replaced, frozen or moved.

        Args:
            held: further tensors to recognise, which other code keeps on the device for as long as
                autograd would.
        """
        pointers: set[int] = set()
        for tensor in held:
            _add(pointers, tensor)
        frozen_shapes: set[torch.Size] = set()
        roots = [module for known in self._modules if (module := known()) is not None]
        for each in itertools.chain.from_iterable(map(modules_of, roots)):
            for _, parameter in each._parameters.items():
                if parameter is None:
                    continue
                _add(pointers, parameter)
                if parameter.requires_grad or parameter in self.resting:
                    continue
                if parameter.dtype not in _AUTOCAST_TYPES and parameter.layout is torch.strided:
                    frozen_shapes.add(parameter.shape)
                    frozen_shapes.add(parameter.shape[::-1])
            for buffer in each._buffers.values():
                if buffer is not None:
                    _add(pointers, buffer)
        pointers.discard(0)  # the pointer of empty tensors
        self._pointers, self._frozen_shapes = pointers, frozen_shapes
        self.unsharded.refresh()

    def owns(self, tensor: torch.Tensor, pointer: int) -> bool:
        """Whether a saved tensor is a parameter or buffer, a view of one, or its cast copy.

        Args:
            tensor: the saved tensor.
            pointer: address of the memory of the tensor that it is a view of, or of its storage. It
                is compared with the addresses that `refresh` read. They stay valid because a
                parameter lives as long as its module, and a wrong match would only keep a tensor on
                the device.
        """
        if pointer in self._pointers:
            return True
        node = tensor.grad_fn
        if node is None:
            return isinstance(tensor, nn.Parameter) or self._is_frozen_cast(tensor)
        if not _copies(type(node)):
            return False
        while node is not None and _copies(type(node)):
            node = node.next_functions[0][0]
        return isinstance(getattr(node, "variable", None), nn.Parameter)

    def has_at(self, pointer: int) -> bool:
        """Whether a parameter or a buffer begins at an address."""
        return pointer in self._pointers

    def owns_outer(self, tensor: torch.Tensor) -> bool:
        """Whether a saved tensor of a wrapper subclass is a parameter, a view or a cast of one."""
        return isinstance(tensor._base, nn.Parameter) or self.owns(tensor, 0)

    def _is_frozen_cast(self, tensor: torch.Tensor) -> bool:
        return (
            bool(self._frozen_shapes)
            and tensor.dtype in _AUTOCAST_TYPES
            and tensor.shape in self._frozen_shapes
        )


def _add(pointers: set[int], tensor: torch.Tensor) -> None:
    if hasattr(tensor, "__tensor_flatten__"):
        pointers.update(addresses_of(tensor))
        return
    try:
        pointers.add(tensor.data_ptr())
        pointers.add(tensor.untyped_storage().data_ptr())
    except (RuntimeError, ValueError, NotImplementedError):  # no plain tensor: look inside
        pointers.update(addresses_of(tensor))


_COPYING: Final = frozenset(
    f"{name}Backward{number}"
    for name, numbers in {
        **dict.fromkeys(("Alias", "AsStrided", "Clone", "Conj", "Diagonal", "Expand"), "0"),
        **dict.fromkeys(("Permute", "ReshapeAlias", "Select", "Slice", "Split"), "0"),
        **dict.fromkeys(("SplitWithSizes", "T", "ToCopy", "Transpose", "Unbind"), "0"),
        **dict.fromkeys(("UnsafeView", "Unsqueeze", "View", "ViewAsComplex", "ViewAsReal"), "0"),
        "Squeeze": "012",
    }.items()
    for number in numbers
)
"""The nodes of autograd's graph whose output has the values of their first input."""


@functools.cache
def _copies(node: type) -> bool:
    return node.__name__ in _COPYING


# ---- Recognises the unsharded parameters of modules that FSDP2's `fully_shard` was called for ----

Place = tuple[weakref.ref[nn.Module], str]
"""A module and the name of one of its parameters."""

_Group = tuple[list[Place], tuple[Place, nn.Parameter] | None]
"""The places of what a sharded module gathers; one of them, and the parameter that was seen there.

FSDP2 exchanges all of them together, except those that the user told it to ignore, which are no
DTensors. None: they are gathered now.
"""


@final
class UnshardedParameters:
    """Recognises the storages of parameters that FSDP2 gathers for a module's forward.

    FSDP2 registers a gathered parameter on its module in the place of the sharded one, just before
    the module's forward. Afterwards it empties the parameter's storage, and fills it again for
    backward. The memory has another address then, so the parameter is recognised by its storage,
    which stays the same. Such a storage must never be offloaded: FSDP2 would free it under a copy.
    FSDP1 does the same with the flat parameter of a module, which it never exchanges.

    Args:
        modules: the modules that may contain sharded modules.

    Attributes:
        is_sharded: whether any of them was sharded at the last `refresh`.
    """

    def __init__(self, modules: Sequence[weakref.ref[nn.Module]]) -> None:
        self._modules = modules
        self._groups: list[_Group] = []
        self._flat: list[nn.Parameter] = []  # FSDP1's
        self._storages: set[int] = set()
        self.is_sharded = False

    def refresh(self) -> None:
        """Find the sharded modules, and read their parameters as they are now."""
        alive = [module for known in self._modules if (module := known()) is not None]
        sharded, flat = _find_sharded_modules(alive)
        self._flat = [p for module in flat for p in _flat_parameters(module)]
        self.is_sharded = bool(sharded or self._flat)
        self._storages = set()
        self._groups = [self._read([*_own_places(module, sharded)]) for module in sharded]

    def _read(self, places: list[Place]) -> _Group:
        """Note the storages of the parameters that a sharded module has now."""
        found = [(place, p) for place in places if (p := _parameter_at(place)) is not None]
        for _, parameter in found:
            self._storages.update(part.untyped_storage()._cdata for part in parts_of(parameter))
        return places, next((each for each in found if hasattr(each[1], "device_mesh")), None)

    def own(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage belongs to a parameter of a sharded module, gathered or not."""
        for number, (places, watched) in enumerate(self._groups):
            if watched is not None and _parameter_at(watched[0]) is not watched[1]:
                self._groups[number] = self._read(places)
        address = storage._cdata
        if address in self._storages:
            return True
        return any(flat.untyped_storage()._cdata == address for flat in self._flat)


def _parameter_at(place: Place) -> nn.Parameter | None:
    module = place[0]()
    return None if module is None else module._parameters.get(place[1])


def find_sharded_parameters(model: nn.Module) -> set[int]:
    """Return the identities of the parameters that are DTensors or that FSDP shards or gathers."""
    found = {id(parameter) for parameter in model.parameters() if hasattr(parameter, "device_mesh")}
    sharded, flat = _find_sharded_modules([model])
    for module in sharded:
        for place in _own_places(module, sharded):
            found.add(id(_parameter_at(place)))
    for module in flat:
        found.update(map(id, module.parameters()))
    return found


def _find_sharded_modules(
    roots: Iterable[nn.Module],
) -> tuple[dict[nn.Module, None], list[nn.Module]]:
    """Return the modules that FSDP2 shards, in model order, and those of FSDP1."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nothing is sharded before it is imported
    if fsdp is None:
        return {}, []
    kinds = fsdp.FSDPModule, fsdp.FullyShardedDataParallel
    found = [m for root in roots for m in root.modules() if isinstance(m, kinds)]
    flat = [module for module in found if isinstance(module, kinds[1])]
    return dict.fromkeys(m for m in found if not isinstance(m, kinds[1])), flat


def _flat_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the flat parameter of a module of FSDP1, if it has parameters of its own."""
    handle = getattr(module, "_handle", None)
    if handle is not None:
        yield handle.flat_param


def _own_places(module: nn.Module, sharded: dict[nn.Module, None]) -> Iterator[Place]:
    """Yield the places of a module's parameters, without those of sharded modules inside it."""
    reference = weakref.ref(module)
    yield from ((reference, name) for name in module._parameters)
    for child in module.children():
        if child not in sharded:
            yield from _own_places(child, sharded)


# ---- Where a model's parameters are ----


def find_device(modules: Sequence[nn.Module]) -> torch.device | None:
    """Return the one device of all parameters, or None if there are no parameters.

    Raises:
        PolicyError: the parameters are on several devices, or on `meta`.
    """
    homes: dict[torch.device, str] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            homes.setdefault(home_of(parameter), name)
    if len(homes) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in homes.items())
        raise PolicyError(
            f"the model is on {len(homes)} devices ({places}); move it to one with "
            f"model.to(device), or offload the parts on each device separately"
        )
    device = next(iter(homes), None)
    if device is not None and device.type == "meta":
        raise PolicyError(
            "the model's parameters are on the meta device and hold no values; materialise them "
            "first, for example with model.to_empty(device=...) and by loading a state_dict"
        )
    return device


def home_of(parameter: nn.Parameter) -> torch.device:
    """Return the device that a parameter is computed with on.

    FSDP2's `CPUOffloadPolicy` keeps shards on the host, and gathers them on the mesh's device.
    """
    device = parameter.device
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or device.type in (mesh.device_type, "meta"):
        return device
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


# ---- Weights that rest outside the device: all that the runtime knows of them ----


class RestingWeights(Protocol):
    """The weights of a model that rest outside the device between uses; it contains those that do.

    Attributes:
        plain_types: types of tensors that stand for a weight while its layer runs.
        pack: returns the handle of a saved tensor that is a part of a weight; None for any other.
            It is given that tensor, and its base or the tensor itself.
    """

    def __contains__(self, parameter: object, /) -> bool: ...

    @property
    def plain_types(self) -> frozenset[type[torch.Tensor]]: ...

    def at_rest(self) -> frozenset[int]:
        """Return the parameters whose values rest elsewhere, by `id`."""

    @property
    def pack(self) -> Callable[[torch.Tensor, torch.Tensor], Any]: ...

    def check_process(self) -> None:
        """Check that this process offloaded the weights.

        Raises:
            ForkedProcessError: this process was forked from the one that did.
        """

    def refuse_transforms(self) -> None:
        """Check that nothing would record how the weights move to the device.

        Raises:
            PolicyError: a transform of `torch.func`, an export or a trace would.
        """

    def begin_forward(self) -> bool:
        """Note that a forward of the model begins; return whether `end_forward` must be called."""

    def end_forward(self) -> None:
        """Note that the forward has ended, normally or by an exception."""

    def start_anew(self, transfers: Any) -> None:
        """Forget what an interrupt may have left half done, and go on with other transfers."""
