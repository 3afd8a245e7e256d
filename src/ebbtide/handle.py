"""The handle of an offload: what it did, and how to undo it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, NoReturn, final

from ebbtide.engine import Engine
from ebbtide.errors import PolicyError
from ebbtide.hooks.layers import LayerTracker
from ebbtide.interface.display import brief, count, few, html_table, labelled
from ebbtide.reports.inspection import Inspection
from ebbtide.schedule import Schedule
from ebbtide.tracing.trace import Trace
from ebbtide.transfers.account import Account
from ebbtide.transfers.stats import StepStats

if TYPE_CHECKING:
    from ebbtide.budgeting.budget_controller import BudgetController
    from ebbtide.budgeting.fixed_plan import FixedPlan
    from ebbtide.budgeting.planned_step import PlannedStep


class LastingFigures(NamedTuple):
    """What tells of an offload without keeping its model alive.

    Attributes:
        account: the counters of its steps.
        plan: returns the plan of the last step, as `OffloadHandle.plan` does.
    """

    account: Account
    plan: Callable[[], PlannedStep | None]


@final
class OffloadHandle:
    """Gives the statistics of an offloaded model's last step, and undoes the offload.

    Used as a context manager, it detaches on exit.
    """

    def __init__(
        self,
        engine: Engine,
        layers: Sequence[str] | LayerTracker,
        undo: Sequence[Callable[[], None]],
        planner: BudgetController | FixedPlan | None = None,
    ) -> None:
        self._planner = planner
        self._layers = layers
        self._engine = engine
        self._undo = list(undo)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the modules whose calls count as layers.

        They are in the order in which the last forward called them, and before the first forward in
        the order in which the model defines them. A module that is called several times is several
        layers and has one name. Empty for a wrapped forward, which has no layers.
        """
        layers = self._layers
        return layers.names if isinstance(layers, LayerTracker) else tuple(layers)

    @property
    def stats(self) -> StepStats:
        """The statistics of the last finished step; all zero before the first step ends."""
        return self._engine.stats

    @property
    def trace(self) -> Trace:
        """The trace of the last finished step; empty before the first step ends.

        Raises:
            PolicyError: the model was offloaded without ``trace=True``.
        """
        return self._engine.trace

    @property
    def schedule(self) -> Schedule | None:
        """The schedule that the model follows; it prints as a table.

        None means that there is no schedule: each activation is offloaded when it is saved, and
        prefetched shortly before backward needs it.
        """
        return self._engine.schedule

    @property
    def plan(self) -> PlannedStep | None:
        """The plan that a ``budget`` led to, with its reasons; it prints as a table.

        None without a budget, before the first forward, and for a step that could not be planned.
        """
        return None if self._planner is None else self._planner.plan

    def lasting_figures(self) -> LastingFigures:
        """Return what a report can read when the model is gone. It does not wait for the device.

        The account is another one after the model has moved to another device.
        """
        plan = _no_plan if self._planner is None else self._planner.lasting_plan()
        return LastingFigures(self._engine.transfers.account, plan)

    def is_in_step(self) -> bool:
        """Whether autograd holds saved tensors of the last step. To be asked between forwards."""
        return self._engine.is_in_step()

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what the offload does on this machine beyond moving bytes.

        On a CPU, the first says how freed memory is returned to the system.
        """
        return self._engine.notes

    def inspect(self) -> Inspection:
        """Report each storage's fate in the last step, and what is in flight now.

        The report prints as a table. Making it waits until the device has finished that step.
        """
        return self._engine.inspect()

    def detach(self) -> None:
        """Restore the model exactly as it was. A second call does nothing.

        Autograd graphs that are still alive keep the bytes they need; the store is freed together
        with the last of them.
        """
        if self._undo:
            self._engine.mend()
        while self._undo:
            self._undo.pop()()
        self._engine.close()

    def __reduce__(self) -> NoReturn:
        raise PolicyError(
            "the handle of an offload cannot be copied or pickled, because it belongs to a model "
            "of this process; leave it out of the objects that you copy or send to a process. A "
            "copy of the model itself is a plain model"
        )

    def __repr__(self) -> str:
        facts = self._engine.describe()
        layers = [count(len(self.layers), "layer")] if self.layers else []
        return brief("OffloadHandle", [self._state, facts.pop("model"), *layers, *labelled(facts)])

    def _repr_html_(self) -> str:
        layers = f"{len(self.layers)}: {few(self.layers)}" if self.layers else "none"
        facts = {"state": self._state, "layers": layers, **self._engine.describe()}
        return html_table("ebbtide.OffloadHandle", facts.items())

    @property
    def _state(self) -> str:
        return "attached" if self._undo else "detached"

    def __enter__(self) -> OffloadHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()


def _no_plan() -> None:
    return None
