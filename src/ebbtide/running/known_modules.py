"""Which modules have been met, and to which model each belongs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple, final

from torch import nn

from ebbtide.errors import BudgetError
from ebbtide.running.found_model import FoundModel

NoteError = Callable[[Exception], None]
"""Is told of an error that a call has raised."""


class KnownModule(NamedTuple):
    """A module that has been met.

    Attributes:
        module: the module.
        model: the model that it is, or is a part of.
        note_error: notes for the model what a call of the module has raised.
    """

    module: weakref.ref[nn.Module]
    model: FoundModel
    note_error: NoteError


@final
class KnownModules:
    """The modules that have been called as models, and the parts of models that were."""

    def __init__(self) -> None:
        self._known: dict[int, KnownModule] = {}  # by identity: modules may define what is equal

    def get(self, module: nn.Module) -> KnownModule | None:
        """Return what is known of a module; None if it has not been met."""
        known = self._known.get(id(module))
        return None if known is None or known.module() is not module else known

    def add(self, module: nn.Module, model: FoundModel) -> NoteError:
        """Note to which model a module belongs. Returns what is told of errors in its calls."""

        def note(error: Exception) -> None:
            if isinstance(error, BudgetError):
                model.note_budget_error(error)

        key = id(module)
        known = self._known
        reference = weakref.ref(module, lambda _: known.pop(key, None) and None)
        known[key] = KnownModule(reference, model, note)
        return note

    def forget(self, model: FoundModel) -> None:
        """Treat the modules of a model as if they had not been met."""
        for key in [key for key, known in self._known.items() if known.model is model]:
            del self._known[key]

    def find_model_around(self, module: nn.Module) -> FoundModel | None:
        """Return the model that a module is a part of."""
        for model in self._alive():
            whole = model.model()
            if whole is not None and any(each is module for each in whole.modules()):
                return model
        return None

    def parts_of(self, module: nn.Module) -> list[FoundModel]:
        """Return the offloaded models that are a module or parts of it."""
        inside = {id(each) for each in module.modules()}
        return [m for m in self._alive() if m.handle is not None and id(m.model()) in inside]

    def find_common_owner(self, module: nn.Module, least: int) -> nn.Module | None:
        """Return the smallest module that holds a module and some offloaded models.

        Args:
            module: the module.
            least: how many offloaded models it must hold.
        """
        if sum(model.handle is not None for model in self._alive()) < least:
            return None
        owners = [
            each
            for each in _all_modules()
            if any(inner is module for inner in each.modules())
            and len(self.parts_of(each)) >= least
        ]
        return min(owners, key=lambda owner: sum(1 for _ in owner.modules()), default=None)

    def _alive(self) -> Iterator[FoundModel]:
        models = {id(known.model): known.model for known in list(self._known.values())}
        return (model for model in models.values() if model.model() is not None)


def _all_modules() -> Iterator[nn.Module]:
    # Not isinstance: some objects pretend to have another class, and run code to do so.
    return (each for each in gc.get_objects() if issubclass(type(each), nn.Module))
