"""Finds the models that a script trains, at the first forward of each, and offloads them.

[Note: which module is the model] A model is the outermost module that is called while autograd
records, that has trained parameters, and that is not called by a backward, as a checkpoint does. A
module that is called inside of it is a part of it. Code that calls the parts of a model one by one
seems to train many models. If the third of them has a module around it that also holds two others,
that module is offloaded in their place: its hooks also notice calls of its parts.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ebbtide.api import offload
from ebbtide.errors import BudgetError, EbbtideError
from ebbtide.forks import watch_forks
from ebbtide.memory.measured_memory import AbstractMemory, memory_of
from ebbtide.running.budget_turns import BudgetTurns
from ebbtide.running.dry_plan import DryStep
from ebbtide.running.found_model import FoundModel
from ebbtide.running.known_modules import KnownModules, NoteError
from ebbtide.running.passing_reasons import (
    OWN_OFFLOAD,
    find_obstacle,
    find_passing_reason,
    share_modules,
)
from ebbtide.running.run_options import RunOptions

_MOST_PARTS: Final = 2  # of one module that count as models of their own


@final
class ModelFinder:
    """Finds and offloads models. See [Note: which module is the model].

    Args:
        options: how to offload them.
        say: tells the user at once what must not wait until the end.
        show: shows a model at once that was planned, as the script may run out of memory.
        is_dry: whether models are only found and planned.

    Attributes:
        found: all models, in the order in which they were found.
        passing: why calls of modules that would have been models were none, by class.
        memory: measures the memory of all models; None before the first, and for a model on a CPU
            without a budget, where the peak of the process is what counts.
        budget_bytes: the budget, in bytes; None without one, and before the first model.
    """

    def __init__(
        self,
        options: RunOptions,
        say: Callable[[str], None],
        show: Callable[[FoundModel], None],
        *,
        is_dry: bool = False,
    ) -> None:
        self.found: list[FoundModel] = []
        self.passing: dict[str, str] = {}
        self.memory: AbstractMemory | None = None
        self.budget_bytes: int | None = None
        self._options = options
        self._say = say
        self._show = show
        self._is_dry = is_dry
        self._lock = threading.RLock()
        self._known = KnownModules()
        self._num_calls = 0
        self._turns = BudgetTurns(self.found)
        self._is_active = True
        self._is_attaching = False
        watch_forks(self)

    def note_fork(self) -> None:
        """Find nothing in a forked child, such as a worker of a data loader."""
        self._is_active = False

    # ---- calls of modules ---------------------------------------------------------------------

    def begin_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> NoteError | None:
        """Look at an outermost call, as `CallWatcher` describes it."""
        if not self._is_active:
            return None
        known = self._known.get(module)
        if known is None:
            return self._look_at(module, args, kwargs)
        if torch._C._current_graph_task_id() == -1:
            self._note_call(known.model)
        return known.note_error

    def _note_call(self, model: FoundModel) -> None:
        self._num_calls += 1
        model.last_call = self._num_calls
        model.refresh()
        if model.dry_step is not None:
            self._end_dry(model)
        if model.waits_for_turn and self._turns.is_next(model):
            self._plan_now(model)

    def _look_at(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> NoteError | None:
        """Look at a module that has not been met yet."""
        if isinstance(module, DistributedDataParallel):
            return None  # the model is inside
        first = next(module.parameters(), None)
        if first is None:
            return None  # a loss, or a module that hides its modules
        if torch._C._current_graph_task_id() != -1 or not _is_trained(module):
            return _ignore
        reason = find_passing_reason()
        if reason is not None:
            self.passing[type(module).__name__] = reason
            return _ignore
        if any(is_lazy(parameter) for parameter in module.parameters()):
            return _ignore  # this forward will make its parameters
        with self._lock:
            model = self._known.find_model_around(module) or self._meet(module, args, kwargs)
        self._note_call(model)
        return self._known.add(module, model)

    # ---- what is done about a model -----------------------------------------------------------

    def _meet(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FoundModel:
        """Decide about a module that is no part of a model that is known."""
        gc.collect()  # a model that the script has dropped may be in a cycle, and holds memory
        owner = None
        if not self._known.parts_of(module):
            owner = self._known.find_common_owner(module, _MOST_PARTS)
        chosen = module if owner is None else owner
        for part in self._known.parts_of(chosen):
            part.detach(f"it is now a part of {type(chosen).__name__}, which is trained as a whole")
            self._known.forget(part)
        model = FoundModel(chosen, self._note_death)
        self.found.append(model)
        if self.memory is None and (self._options.budget or model.device.type != "cpu"):
            self.memory = memory_of(model.device)
            self.budget_bytes = self._options.budget_bytes(model.device)
        if owner is not None:
            model.notes.append("its parts are called one by one")
            self._known.add(owner, model)
        others = [each.model() for each in self.found if each.handle is not None]
        model.left_alone = find_obstacle(chosen, [each for each in others if each is not None])
        if model.left_alone is None and self._is_dry:
            self._begin_dry(model, chosen, args, kwargs)
        elif model.left_alone is None:
            self._attach(model, chosen, by_parts=owner is not None)
        if self._is_dry:
            if model.dry_step is None:
                self._show(model)
        elif model.left_alone is not None and model.left_alone != OWN_OFFLOAD:
            self._say(f"{model.name} is left alone: {model.left_alone}")
        return model

    def _attach(self, model: FoundModel, module: nn.Module, *, by_parts: bool = False) -> None:
        """Offload a model, or note why that cannot be done."""
        budgeted = self._options.budget is not None
        model.waits_for_turn = budgeted and not by_parts and not self._turns.is_next(model)
        frugal = budgeted and (by_parts or model.waits_for_turn)
        if by_parts and budgeted:
            model.notes.append("so there is no plan: all that can leave does")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._is_attaching = True
            try:
                handle = offload(module, **self._options.arguments(module, frugal=frugal))
            except (EbbtideError, OSError) as error:
                model.left_alone = str(error)
                return
            finally:
                self._is_attaching = False
        model.notes += [str(each.message) for each in caught]
        model.attach(handle)

    def _plan_now(self, model: FoundModel) -> None:
        """Plan a model that has waited for its turn."""
        module, handle = model.model(), model.handle
        if module is None or handle is None:
            model.waits_for_turn = False
        elif not handle.is_in_step():
            model.detach("it could not be offloaded again")
            self._attach(model, module)

    def _begin_dry(
        self, model: FoundModel, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record the training step of a model that begins now."""
        self._is_attaching = True
        try:
            model.dry_step = DryStep(module, args, kwargs, self._options)
        except (EbbtideError, OSError) as error:
            model.left_alone = str(error)
        finally:
            self._is_attaching = False

    def _end_dry(self, model: FoundModel) -> None:
        """Plan a model whose recorded step has ended, and say what would be done with it."""
        step = model.dry_step
        assert step is not None
        try:
            model.dry = step.result()
            if model.dry is None:
                return
            model.layers = model.dry.layers
        except BudgetError as error:
            model.note_budget_error(error)
        except (EbbtideError, OSError) as error:
            model.left_alone = str(error)
        model.dry_step = None
        self._show(model)

    def end_dry_steps(self) -> None:
        """Plan the models whose recorded step was the last one of the script."""
        for model in self.found:
            if model.dry_step is not None:
                self._end_dry(model)

    # ---- other code that wants a model as it was ----------------------------------------------

    def give_way_for_good(self, module: nn.Module) -> None:
        """Give way to the script's own call of `ebbtide.offload`."""
        if not self._is_attaching:
            self.give_way(module, for_good=True)

    def give_way(self, module: nn.Module, *, for_good: bool) -> None:
        """Put models back as they were that share modules with one.

        Args:
            module: the module.
            for_good: whether they stay so. Otherwise their next training forward finds them again.
        """
        with self._lock:
            for model in self.found:
                known = model.model()
                if known is None or model.handle is None:
                    continue
                if share_modules(known, module):
                    reason = OWN_OFFLOAD if for_good else "torch.jit.script has compiled it"
                    model.detach(reason)
                    if not for_good:
                        self._known.forget(model)

    def _note_death(self, reference: object) -> None:
        for model in self.found:
            if model.model is reference:
                model.note_death()


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _ignore(_: Exception) -> None:
    """Nothing is to be done about an error in a module that is no model."""
