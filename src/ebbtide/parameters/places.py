"""The places where a model holds its parameters, and the substitutes that code finds there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, final

import torch
from torch import nn

from ebbtide.frames import visit_frames
from ebbtide.parameters.parameters import PARAMETERS, OffloadedParameter, Place, held_at

Substitute = Callable[[torch.Tensor], torch.Tensor]
"""Maps a parameter to the tensor that code gets when it reads it from a module not running."""


@final
class SubstitutingDict(dict[str, nn.Parameter | None]):
    """A module's parameters by name. Code that reads one by its name gets its substitute.

    `module.weight` reads by name; `module.parameters()` and `state_dict()` do not, and give the
    parameter itself. A copied or unpickled instance is a plain dict.

    Args:
        parameters: the parameters of the module.
        substitute: see `Substitute`.
        settle: called before all parameters are looked at, so that they are there: a module whose
            forward was interrupted in a thread of autograd's can hold device parameters still.
    """

    __slots__ = ("_settle", "_substitute")

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter | None],
        substitute: Substitute,
        settle: Callable[[], None],
    ) -> None:
        super().__init__(parameters)
        self._substitute, self._settle = substitute, settle

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        self._settle()
        return super().items()

    def __getitem__(self, name: str) -> Any:
        held = super().__getitem__(name)
        return held if held is None else self._substitute(held)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (), None, None, iter(self.items())


def start_substituting(
    modules: Iterable[nn.Module], substitute: Substitute, settle: Callable[[], None]
) -> None:
    """Make these modules return substitutes when their parameters are read by name.

    Args:
        modules: the modules.
        substitute: see `Substitute`.
        settle: see `SubstitutingDict`.
    """
    for module in modules:
        module._parameters = SubstitutingDict(module._parameters, substitute, settle)


def stop_substituting(modules: Iterable[nn.Module]) -> None:
    """Undo `start_substituting`."""
    for module in modules:
        if isinstance(module._parameters, SubstitutingDict):
            module._parameters = dict(module._parameters.items())


def running_modules() -> set[nn.Module]:
    """Return the modules whose call is on the stack of some thread."""
    found = set()

    def look(frame: FrameType) -> None:
        if frame.f_code is nn.Module._call_impl.__code__:
            found.add(frame.f_locals["self"])

    visit_frames(look)
    return found


def find_places(model: nn.Module, members: Iterable[OffloadedParameter]) -> None:
    """Add to each parameter the places that hold it: its modules' parameters, lists and dicts.

    Lists matter: `nn.LSTM` computes with a list of its weights, and a head can hold an embedding's
    weight in a list so that it does not register it as its own parameter.
    """
    sought = {id(member.parameter): member for member in members}
    for module in model.modules():
        for place in _places_in(module):
            member = sought.get(id(held_at(vars(module)[place[1]], place[2])))
            if member is not None:
                member.places.append(place)


def _places_in(module: nn.Module) -> Iterator[Place]:
    known = weakref.ref(module)
    for name, value in vars(module).items():
        if isinstance(value, list):
            yield from ((known, name, index) for index in range(len(value)))
        elif isinstance(value, dict) and (name == PARAMETERS or not name.startswith("_")):
            yield from ((known, name, key) for key in value)
