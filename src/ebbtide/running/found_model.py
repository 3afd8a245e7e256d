"""A model that a script trains, and what was done about it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ebbtide.budgeting.planned_step import PlannedStep
from ebbtide.errors import BudgetError
from ebbtide.handle import LastingFigures, OffloadHandle
from ebbtide.hooks.layers import class_of
from ebbtide.pages.collect_record import RunSources, collect_record
from ebbtide.pages.run_record import RunRecord
from ebbtide.parameters.homes import home_of
from ebbtide.running.dry_plan import DryPlan, DryStep
from ebbtide.tracing.trace import Trace
from ebbtide.transfers.account import Account
from ebbtide.transfers.stats import StepStats


@final
class FoundModel:
    """A model that a script trains. The model is not kept alive.

    Args:
        model: the model.
        died: called when the model is gone.

    Attributes:
        model: the model; what it refers to is None once the model is gone.
        name: its class.
        num_parameters: number of its weights.
        device: the device of its parameters.
        dtypes: names of their types.
        layers: names of its layers, as the last forward called them.
        left_alone: why it is not offloaded; None if it is.
        waits_for_turn: whether other models are planned first.
        notes: what else is to be known.
        budget_error: the last one that its calls have raised; None if none has.
        dry_step: its first step with `--dry`, until that has ended.
        dry: what `--dry` found that would be done.
        last_call: number of its last call among those of all models.
    """

    def __init__(self, model: nn.Module, died: Callable[[object], None]) -> None:
        self.model = weakref.ref(model, died)
        self.name = _name_of(model)
        parameters = [p for p in model.parameters() if not is_lazy(p)]
        self.num_parameters = sum(p.numel() for p in parameters)
        self.device = next((home_of(p) for p in parameters), torch.device("cpu"))
        self.dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
        self.layers: tuple[str, ...] = ()
        self.left_alone: str | None = None
        self.waits_for_turn = False
        self.notes: list[str] = []
        self.budget_error: BudgetError | None = None
        self.dry_step: DryStep | None = None
        self.dry: DryPlan | None = None
        self.last_call = 0
        self._handle: weakref.ref[OffloadHandle] | None = None
        self._figures: LastingFigures | None = None
        self._counts: StepStats | None = None
        self._last_trace: Trace | None = None  # as of its last `freeze`, or of its end
        self._last_plan: PlannedStep | None = None  # of a model that is gone
        self._steps_before_error = 0
        self._earlier_steps = 0  # of accounts that others have followed

    @property
    def handle(self) -> OffloadHandle | None:
        """The handle of its offload; None if it is not offloaded, or gone."""
        return None if self._handle is None else self._handle()

    def attach(self, handle: OffloadHandle) -> None:
        """Note that the model is offloaded from now on.

        The forward that `ebbtide.offload` has put in place keeps the handle alive, and so lets it
        die with the model.
        """
        model = self.model()
        assert model is not None
        model.__dict__["forward"].handle = handle
        self._handle = weakref.ref(handle)
        self.left_alone = None
        self.layers = handle.layers
        self.refresh()

    def detach(self, reason: str) -> None:
        """Put the model back as it was, and say why."""
        handle = self.handle
        if handle is not None:
            self.refresh()
            handle.detach()
        self._handle = None
        self.left_alone = reason

    def refresh(self) -> None:
        """Read what changes from call to call. It waits for nothing."""
        handle = self.handle
        if handle is None:
            return
        figures = handle.lasting_figures()
        account = None if self._figures is None else self._figures.account
        if account is not None and account is not figures.account:
            self._end_account(account)
        self._figures = figures

    def freeze(self) -> None:
        """Keep the figures as they are now. The device is waited for."""
        handle = self.handle
        if handle is not None:
            self.layers = handle.layers
            self._counts = handle.stats  # first: it ends a step that has been read
            self.refresh()
        if self._figures is not None:
            self._note_counts(self._figures.account)

    def note_death(self) -> None:
        """Keep the figures of a model that is gone, and nothing that belonged to it."""
        self._last_plan = self.plan
        if self._figures is not None:
            self._end_account(self._figures.account)
        self._figures = self._handle = None

    def note_budget_error(self, error: BudgetError) -> None:
        """Note that a call found no plan within the budget."""
        self.budget_error = error
        self._steps_before_error = self.num_steps

    @property
    def has_recovered(self) -> bool:
        """Whether steps have been finished since no plan was found."""
        return self.num_steps > self._steps_before_error

    @property
    def num_steps(self) -> int:
        """Number of finished steps."""
        account = None if self._figures is None else self._figures.account
        return self._earlier_steps + (0 if account is None else account.num_steps)

    @property
    def last_step(self) -> StepStats | None:
        """The figures of its last step, as of the last `freeze`; None if it has finished none."""
        return self._counts if self.num_steps else None

    def record(self) -> RunRecord | None:
        """Return the record of its last step; None if it has finished none.

        Of a model that is gone there are statistics, the trace and the plan.
        """
        handle = self.handle
        if handle is not None and handle.stats.num_saved:
            return handle.record(self.name)
        if self._counts is None or not self.num_steps:
            return None
        sources = RunSources(
            title=self.name,
            device=self.device,
            stats=self._counts,
            trace=self._last_trace,
            planned=self.plan,
            notes=self.notes,
        )
        return collect_record(sources)

    @property
    def plan(self) -> PlannedStep | None:
        """The plan of its last step."""
        return self._last_plan if self._figures is None else self._figures.plan()

    def _end_account(self, account: Account) -> None:
        self._earlier_steps += account.num_steps
        self._note_counts(account)

    def _note_counts(self, account: Account) -> None:
        if account.num_steps:
            self._counts = account.stats
            self._last_trace = account.trace


def _name_of(model: nn.Module) -> str:
    if isinstance(model, torch.jit.ScriptModule):
        return str(getattr(model, "original_name", type(model).__name__))
    return class_of(model).__name__
