"""Recognises the unsharded parameters of modules that FSDP2's `fully_shard` was called for."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import final

import torch
from torch import nn

from ebbtide.tensors.memory_parts import parts_of

Place = tuple[weakref.ref[nn.Module], str]
"""A module and the name of one of its parameters."""


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

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._groups: dict[weakref.ref[nn.Module], _Group] = {}
        self._flat: list[nn.Parameter] = []  # FSDP1's
        self._storages: set[int] = set()
        self.is_sharded = False

    def refresh(self) -> None:
        """Find the sharded modules, and read their parameters as they are now."""
        alive = [module for known in self._modules if (module := known()) is not None]
        sharded, flat = _find_sharded_modules(alive)
        self._flat = [p for module in flat for p in _flat_parameters(module)]
        self.is_sharded = bool(sharded or self._flat)
        if not sharded and not self._groups:
            return
        self._storages = set()
        known, self._groups = self._groups, {}
        for module in sharded:
            places = list(_own_places(module, sharded))
            reference = weakref.ref(module)
            group = known.get(reference)
            if group is None or group.places != places:
                group = _Group(places)
            group.read(self._storages)
            self._groups[reference] = group

    def own(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage belongs to a parameter of a sharded module, gathered or not."""
        for group in self._groups.values():
            if group.is_exchanged():
                group.read(self._storages)
        address = storage._cdata
        if address in self._storages:
            return True
        return any(flat.untyped_storage()._cdata == address for flat in self._flat)


@final
class _Group:
    """The parameters that one sharded module gathers.

    FSDP2 exchanges all of them together, except those that the user told it to ignore. Once one of
    them was seen to be exchanged, it is enough to watch that one.
    """

    __slots__ = ("_seen", "_watched", "places")

    def __init__(self, places: list[Place]) -> None:
        self.places = places
        self._watched = places
        self._seen: list[nn.Parameter | None] = []

    def read(self, storages: set[int]) -> None:
        """Add the storages of the present parameters to a set."""
        for place in self.places:
            parameter = _parameter_at(place)
            if parameter is not None:
                storages.update(p.untyped_storage()._cdata for p in parts_of(parameter))
        self._seen = [_parameter_at(place) for place in self._watched]

    def is_exchanged(self) -> bool:
        """Whether FSDP2 has exchanged the parameters since they were read."""
        for place, seen in zip(self._watched, self._seen, strict=True):
            if _parameter_at(place) is not seen:
                self._watched = [place]
                return True
        return False


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
