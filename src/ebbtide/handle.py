"""The handle of an offload: what it did, and how to undo it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, final

from torch import nn
from torch.optim import Optimizer

from ebbtide.devices.process import call_weakly
from ebbtide.errors import PolicyError
from ebbtide.observe.explain import Explanation, collect_evidence, describe, explain
from ebbtide.observe.inspection import Inspection, inspect_engine
from ebbtide.observe.recording import trace_of
from ebbtide.observe.trace import Trace
from ebbtide.runtime.engine import Engine
from ebbtide.runtime.forward import OffloadedForward
from ebbtide.runtime.layers import LayerTracker
from ebbtide.runtime.stats import StepStats
from ebbtide.schedule import Schedule
from ebbtide.units import brief, count, format_size, labelled
from ebbtide.weights.overlap import StepOverlap

if TYPE_CHECKING:
    from ebbtide.observe.run_record import RunRecord
    from ebbtide.planning.budget import BudgetController
    from ebbtide.planning.follow import FixedPlan
    from ebbtide.planning.planned_step import PlannedStep


_LOG = logging.getLogger(__name__)

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

_NO_MODEL: Final = (
    "the model is changed in place, so go on with it: write handle = ebbtide.offload(model), "
    "not model = ebbtide.offload(model)"
)


@final
class OffloadHandle:
    """Gives the statistics of an offloaded model's last step, and undoes the offload.

    Used as a context manager, it detaches on exit. It does not keep the model alive, and the model
    stays offloaded without it. When the model is gone, the handle still tells of its last step,
    while the memory, the files and the threads of the offload are freed.
    """

    # Long: it is all that users call on an offload, and each of its methods is short.

    def __init__(
        self,
        engine: Engine,
        layers: Sequence[str] | LayerTracker,
        undo: Sequence[Callable[[], None]],
        planner: BudgetController | FixedPlan | None = None,
        forward: Callable[[], OffloadedForward | None] | None = None,
        owner: object = None,
    ) -> None:
        self._find_forward = forward
        gone = call_weakly(self._note_gone)
        self._owner = None if owner is None else weakref.ref(owner, gone)
        self._planner = planner
        self._layers = layers
        self._engine = engine
        self._undo = list(undo)
        self._overlaps: weakref.WeakSet[StepOverlap] = weakref.WeakSet()

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
        return trace_of(self._engine)

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

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what the offload does on this machine beyond moving bytes.

        On a CPU, the first says how freed memory is returned to the system. If an optimizer steps
        inside backward, the last says how much of that was hidden, and how much was done twice.
        """
        return (*self._engine.notes, *(describe(each.stats) for each in self._overlaps))

    def inspect(self) -> Inspection:
        """Report each storage's fate in the last step, and what is in flight now.

        The report prints as a table. Making it waits until the device has finished that step.
        """
        return inspect_engine(self._engine)

    def report(self, path: str | PathLike[str], *, title: str | None = None) -> None:
        """Write a page of HTML on the last finished step, which any browser opens.

        The page needs no network. Without ``trace=True`` it has neither memory nor lanes over time.

        Args:
            path: path of the file, such as ``"run.html"``.
            title: what tells the run from others; None: the model and its device.

        Raises:
            OSError: the file cannot be written.
        """
        from ebbtide.observe.page import write_page

        write_page(path, [record_run(self, title)])

    def save_run(self, path: str | PathLike[str], *, title: str | None = None) -> None:
        """Write all that `report` shows to a file that ``ebbtide report`` and Perfetto open.

        The file is a trace as `Trace.save` writes it, with the rest beside the events.

        Args:
            path: path of the file, such as ``"run.json"``.
            title: what tells the run from others; None: the model and its device.

        Raises:
            OSError: the file cannot be written.
        """
        from ebbtide.observe.run_record import save_record

        save_record(path, record_run(self, title))

    def explain(self) -> Explanation:
        """Say in words why memory is as high as it is in the last step, and what to change.

        It knows most of a step that was recorded (``trace=True``). Making it waits until the device
        has finished that step.
        """
        overlaps = [each.stats for each in self._overlaps]
        return explain(collect_evidence(self._engine, self.layers, self.plan, overlaps))

    def overlap(
        self,
        optimizer: OptimizerT,
        *,
        max_norm: float | None = None,
        shadow_budget: int | str | None = None,
        num_threads: int | None = None,
    ) -> OptimizerT:
        """Let an optimizer step on the host while backward still runs, with the same bits.

        ``optimizer.step()`` then clips the gradients, too, and has the results of
        ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`` and a plain step: the same
        parameters, state, gradients and norm. As soon as the gradients of a layer have landed on
        the host, a worker steps the layer into shadows of its parameters and state; ``step()``
        commits these unless clipping bites, or something was changed in between. Parameters on an
        accelerator step in ``step()``, as without this.

        ``optimizer.grad_norm`` is the norm before clipping in the last step, and
        ``optimizer.overlap`` says what was stepped ahead (`OverlapStats`). `detach` undoes this.

        Args:
            optimizer: an optimizer of ``torch.optim`` that steps each parameter by itself. Call
                this before you make a learning rate scheduler.
            max_norm: the 2-norm to which the gradients are clipped; None: they are not.
            shadow_budget: the most memory for shadows, in bytes or as text such as ``"24GiB"``.
                Layers beyond it step in ``step()``. None: half of the free host memory; where the
                model computes on a CPU, none for weights that do not rest in files, because the
                worker would need the cores that backward needs.
            num_threads: how many threads the step computes with, in the worker and in ``step()``.
                None: as many as the program, ``torch.get_num_threads()``. The last bits of a step
                depend on it: they are those of a plain step with as many threads.

        Returns:
            The same optimizer.

        Raises:
            PolicyError: the optimizer may need all gradients at once, its step was replaced, or the
                model is not offloaded any more.
        """
        if not self._undo:
            raise PolicyError("the handle is detached; call overlap on that of a new offload")
        owner = None if self._owner is None else self._owner()
        overlap = StepOverlap(
            optimizer,
            self._engine,
            model=owner if isinstance(owner, nn.Module) else None,
            layers=self.layers,
            max_norm=max_norm,
            shadow_budget=shadow_budget,
            num_threads=num_threads,
        )
        self._overlaps.add(overlap)
        self._undo.append(call_weakly(overlap.close))
        return optimizer

    def detach(self) -> None:
        """Restore the model exactly as it was. A second call does nothing.

        Autograd graphs that are still alive keep the bytes they need; the store is freed together
        with the last of them.
        """
        if self._undo:
            _LOG.info("detach: %r", self)
            self._engine.mend()
        while self._undo:
            self._undo.pop()()
        self._engine.close()

    def _note_gone(self, _: object) -> None:
        """Note that what the offload was for is gone."""
        if self._undo:
            self._undo.clear()
            forward = None if self._find_forward is None else self._find_forward()
            if forward is not None:
                forward.let_go()
            self._engine.let_go()

    if not TYPE_CHECKING:  # which would take any name, and any call, then

        def __getattr__(self, name: str) -> NoReturn:
            advice = f"; {_NO_MODEL}" if hasattr(nn.Module, name) else ""
            text = f"'OffloadHandle' object has no attribute {name!r}{advice}"
            raise AttributeError(text, name=name, obj=self)

        def __call__(self, *_: object, **__: object) -> NoReturn:
            raise TypeError(f"'OffloadHandle' object is not callable; {_NO_MODEL}")

    def __reduce__(self) -> NoReturn:
        raise PolicyError(
            "the handle of an offload cannot be copied or pickled, because it belongs to a model "
            "of this process; leave it out of the objects that you copy or send to a process. A "
            "copy of the model itself is a plain model"
        )

    def __repr__(self) -> str:
        about = self._engine.describe()
        layers = [count(len(self.layers), "layer")] if self.layers else []
        plan = self.plan
        if plan is not None:
            about["plan"] = plan.summary
        return brief("OffloadHandle", [self._state, about.pop("model"), *layers, *labelled(about)])

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


# ---- What the commands of ebbtide ask of a handle, and users need not ----


def record_run(handle: OffloadHandle, title: str | None = None) -> RunRecord:
    """Return what `OffloadHandle.report` shows. The device has finished the step afterwards.

    Args:
        handle: the handle of the offload.
        title: what tells the run from others; None: the model and its device.
    """
    from ebbtide.observe import run_record

    engine, plan = handle._engine, handle.plan
    settings, known = engine.settings(), dict[str, Any]()
    inspection = handle.inspect()
    if plan is not None:
        settings["budget"] = format_size(plan.budget_bytes)
        known["budget_bytes"] = plan.budget_bytes
        known["predicted_step_s"] = plan.plan.step_s
        known["predicted_peak_bytes"] = plan.plan.peak_bytes
        if plan.measured is not None:
            known["measured_step_s"] = plan.measured.step_s
            known["measured_peak_bytes"] = plan.measured.peak_bytes
    if engine.is_traced:
        known |= {"events": handle.trace.events, "memory": handle.trace.memory}
    if engine.stats.num_saved:
        explained = handle.explain()
        for name in ("verdict", "findings", "limit_bytes", "limit_why"):
            known[name] = getattr(explained, name)
    return run_record.RunRecord(
        title=title or engine.describe()["model"],
        settings=settings,
        versions=run_record.versions_with(engine.torch_device),
        stats=handle.stats,
        layers=run_record.layer_figures(inspection, known.get("events", ())),
        notes=handle.notes,
        **known,
    )


def finished_steps(handle: OffloadHandle) -> int:
    """Return the number of finished steps, as far as it is known without waiting for the device."""
    return handle._engine.num_steps


def is_in_step(handle: OffloadHandle) -> bool:
    """Whether autograd holds saved tensors of the last step. To be asked between forwards."""
    return handle._engine.is_in_step()
