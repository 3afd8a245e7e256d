"""Where a model holds its parameters, and what it finds there while they rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import torch
from torch import nn

from ebbtide.runtime.resting import PARAMETERS, Place, RestingParameter, held_at

Lend = Callable[[torch.Tensor], torch.Tensor]
"""Gives what code is to work with that takes this parameter from a module that is not open."""


@final
class LendingParameters(dict[str, nn.Parameter | None]):
    """A module's parameters by name. Who takes one by its name is lent what stands for it.

    `module.weight` is such a taking; `module.parameters()` and `state_dict()` are not, and give
    what is there. A copy, or what is read from a file, is a plain dict again.

    Args:
        parameters: the module's.
        lend: see `Lend`.
    """

    __slots__ = ("_lend",)

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], lend: Lend) -> None:
        super().__init__(parameters)
        self._lend = lend

    def __getitem__(self, name: str) -> Any:
        held = super().__getitem__(name)
        return held if held is None else self._lend(held)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (), None, None, iter(self.items())


def start_lending(modules: Iterable[nn.Module], lend: Lend) -> None:
    """Let these modules lend."""
    for module in modules:
        module._parameters = LendingParameters(module._parameters, lend)


def stop_lending(modules: Iterable[nn.Module]) -> None:
    """Let them hold their parameters as any module does."""
    for module in modules:
        if isinstance(module._parameters, LendingParameters):
            module._parameters = dict(module._parameters.items())


def find_places(model: nn.Module, members: Iterable[RestingParameter]) -> None:
    """Find where a model holds these: its modules' parameters, and lists and dicts of its modules.

    `nn.LSTM` computes with a list of its weights, and a head can hold an embedding's in a list, so
    as not to be its owner.
    """
    sought = {id(member.parameter): member for member in members}
    for module in model.modules():
        for place in _places_in(module):
            member = sought.get(id(held_at(vars(module)[place[1]], place[2])))
            if member is not None:
                member.places.append(place)


def _places_in(module: nn.Module) -> Iterator[Place]:
    for name, value in vars(module).items():
        if isinstance(value, list):
            yield from ((module, name, index) for index in range(len(value)))
        elif isinstance(value, dict) and (name == PARAMETERS or not name.startswith("_")):
            yield from ((module, name, key) for key in value)
