"""Follows a budget from step to step: says which plan each forward follows, and measures."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ebbtide.activations.placement import PlannedLayers
from ebbtide.budgeting.budget_size import parse_budget_bytes
from ebbtide.budgeting.budget_study import BudgetStudy, Phase, Stage
from ebbtide.budgeting.pass_watch import PassGuard, PassWatch
from ebbtide.budgeting.placed_plan import place
from ebbtide.budgeting.planned_step import PlannedStep, describe_briefly
from ebbtide.budgeting.step_signature import signature
from ebbtide.engine import Engine
from ebbtide.errors import PolicyError
from ebbtide.interface.warning import warn_user
from ebbtide.memory.measured_memory import AbstractMemory, memory_of
from ebbtide.planning.hardware import Hardware
from ebbtide.planning.measured_times import measured_profile
from ebbtide.planning.plan import Plan
from ebbtide.planning.profiling.fake_profile import profile_activations
from ebbtide.planning.profiling.fake_step import CallArguments
from ebbtide.planning.profiling.recorded_profile import profile_recorded_step
from ebbtide.planning.searching.simple_plans import offload_first
from ebbtide.planning.searching.solver import load_solver
from ebbtide.tensors.marks import mark_not_offload
from ebbtide.units import format_size

_LOG = logging.getLogger(__name__)


class _Unprofiled(NamedTuple):
    """A kind of step that could not be profiled with fake tensors; its first step is recorded."""

    reason: str


class _Running(NamedTuple):
    """The step that runs, if it is to be learned from."""

    kind: Hashable
    study: BudgetStudy | _Unprofiled
    watch: PassWatch | None
    stage: Stage | None
    begin_s: float
    number: int
    failures: int


@final
class _LastStudy:
    """What is known of the last step. It does not keep the model alive.

    Attributes:
        study: its study; None before the first step, and if it could not be planned.
    """

    study: BudgetStudy | None = None

    def plan(self) -> PlannedStep | None:
        return None if self.study is None else self.study.step


@final
class BudgetController:
    """Plans the steps of one model to a budget.

    Args:
        model: the model.
        layers: the modules whose calls are its layers.
        engine: the engine of the model.
        budget: bytes, text such as ``"24GiB"``, or a share of all memory such as ``"90%"``.
        min_bytes: smaller storages stay where they are.
        memory: what is measured; None means the process on a CPU, else the device.

    Raises:
        PolicyError: the budget cannot be read.
    """

    # Long: it follows a step from its begin to its end, and each of its methods is short.

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        engine: Engine,
        budget: int | str,
        min_bytes: int,
        memory: AbstractMemory | None = None,
    ) -> None:
        self._model = model
        self._layers = layers
        self._engine = engine
        self._traced = engine.is_traced
        self._budget = budget
        self._min_bytes = min_bytes
        self._given = memory
        self._studies: dict[Hashable, BudgetStudy | _Unprofiled | None] = {}
        self._running: _Running | None = None
        self._last = _LastStudy()
        self._followed: Plan | None = None  # the plan that the engine follows
        self._several = False  # whether the step has had more than one forward
        self._was_exceeded = False  # whether the user knows of a step that was over the budget
        self._was_short = False  # whether the user knows of a step that ran out of memory
        self._was_refused = False  # whether the user knows of a step that could not be planned
        self._begin_on(engine.torch_device)
        weakref.finalize(self, self._memory.reuse_freed, True)
        load_solver()

    @property
    def plan(self) -> PlannedStep | None:
        """The plan of the last step; None before the first, or if it could not be planned."""
        return self._last.plan()

    def lasting_plan(self) -> Callable[[], PlannedStep | None]:
        """Return a function that gives the plan of the last step, also when the model is gone."""
        return self._last.plan

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Choose the plan of a forward that begins now.

        Args:
            args: its positional arguments.
            kwargs: its keyword arguments.

        Returns:
            Whether the forward is to be repeated if it runs out of memory.

        Raises:
            BudgetError: no plan fits into the budget.
        """
        if torch._C._current_graph_task_id() != -1:
            return False  # other code computes the forward again
        if self._engine.is_in_step():
            self._several = True
            return False
        self._learn()
        if not _needs_gradients(self._model, args, kwargs):
            return False  # autograd saves nothing
        if self._engine.torch_device != self._device:
            self._begin_on(self._engine.torch_device)
        self._begin(signature(self._model, args, kwargs), args, kwargs)
        learns = self._running is not None and self._running.stage is not None
        return learns and self._device.type != "cpu"

    def learn_failed_forward(self) -> bool:
        """Learn from a forward that ran out of memory; return whether another plan needs less."""
        running = self._running
        if running is None or not isinstance(running.study, BudgetStudy):
            return False
        failed = running.study.plan
        self._learn()
        return running.study.plan is not failed

    def detach(self) -> None:
        """Let the policy decide again, and measure nothing any more."""
        self._running = self._engine.passes = None
        self._memory.reuse_freed(True)
        self._engine.keep_freed_memory(None)
        self._engine.follow(None, None)

    def _begin_on(self, device: torch.device) -> None:
        self._device = device
        self._memory = self._given or memory_of(device)
        self._hardware = assumed_hardware(device)
        self._budget_bytes = parse_budget_bytes(self._budget, self._memory.total_bytes)
        self._studies.clear()
        self._running = None

    def _begin(self, kind: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kind not in self._studies:
            _LOG.info("a new kind of step is profiled: budget %s", format_size(self._budget_bytes))
            self._studies[kind] = self._study(args, kwargs)
        study, self._several = self._studies[kind], False
        self._last.study = study if isinstance(study, BudgetStudy) else None
        if not isinstance(study, BudgetStudy):
            if study is not None:  # the loop holds the batch, so offloading it would save nothing
                leaves = tree_leaves((args, kwargs))
                mark_not_offload(*(each for each in leaves if isinstance(each, torch.Tensor)))
            self._offload_all(kind, study)
            return
        if study.phase is not Phase.SETTLED:
            self._memory.return_freed()
        plan = study.choose(self._memory.now_bytes())
        if study.exceeded_bytes and not self._was_exceeded:
            self._was_exceeded = True
            warn_user(
                "over-budget",
                f"a step needed {format_size(study.exceeded_bytes)} under a budget of "
                f"{format_size(self._budget_bytes)}. A plan that needs less is followed from now "
                f"on; give a larger budget or a smaller batch",
                UserWarning,
            )
        if plan is not self._followed:
            self._memory.return_cached()  # blocks in sizes that another plan's step needed
            self._engine.follow(place(study.profile, plan), plan.max_inflight_bytes)
            self._followed = plan
            if _LOG.isEnabledFor(logging.INFO):
                _LOG.info("the next step follows another plan: %s", describe_briefly(study.step))
        stage = None if study.phase is Phase.SETTLED else study.stage
        watch = guard = None
        if stage is Stage.WARM_UP or stage is Stage.MEMORY:
            ahead = self._device.type != "cpu"  # [Note: a host that runs ahead]
            finish_copies = self._finish_copies if ahead else None
            watch = PassWatch(self._memory, study.profile, finish_copies)
        elif self._device.type == "cpu":
            guard = PassGuard(
                self._memory, study.profile, study.limit_bytes, study.growth, study.regrowth
            )
        self._engine.passes = watch or guard
        self._engine.keep_freed_memory(_has_no_room if guard is None else guard.has_room)
        if stage is Stage.REFILL or stage is Stage.SECONDS:
            self._memory.reset_peak()
        self._engine.record_steps(traced=self._traced or stage is Stage.SECONDS)
        number = self._engine.num_steps
        failures = self._memory.num_failures()
        self._running = _Running(kind, study, watch, stage, time.perf_counter(), number, failures)

    def _offload_all(self, kind: Hashable, study: _Unprofiled | None) -> None:
        """Offload everything in the step that begins now, and record it if it is to be learned."""
        self._engine.follow(PlannedLayers({}, frozenset(), frozenset()), None)
        self._engine.record_steps(traced=self._traced or study is not None)
        self._engine.keep_freed_memory(None)
        self._followed = None
        if study is not None:
            number, failures = self._engine.num_steps, self._memory.num_failures()
            begin_s = time.perf_counter()
            self._running = _Running(kind, study, None, None, begin_s, number, failures)

    def _finish_copies(self) -> None:
        """Wait for the copies under way, and free what they needed."""
        self._engine.transfers.device.finish_copies()
        self._engine.transfers.poll()

    def _study(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BudgetStudy | _Unprofiled:
        call = CallArguments(args, kwargs)
        try:
            profile = profile_activations(
                self._model, self._layers, call, self._hardware, self._min_bytes
            )
        except PolicyError as error:
            _LOG.info("the first step is recorded with everything offloaded: %s", error)
            return _Unprofiled(str(error))
        return BudgetStudy(profile, self._hardware, self._budget_bytes)

    def _study_recorded(self, step_s: float, reason: str) -> BudgetStudy | None:
        """Return the study of the step that was recorded last; None if it cannot be planned."""
        trace = self._engine.trace
        try:
            profile = profile_recorded_step(self._engine.inspect().storages, trace)
        except PolicyError as error:
            if not self._was_refused:
                warn_user(
                    "budget-not-planned",
                    f"the budget cannot be planned, so everything is offloaded: {error}. {reason}",
                    UserWarning,
                )
            self._was_refused = True
            return None
        plan = offload_first(profile, len(profile.layers))
        profile = measured_profile(profile, plan, trace, step_s, 0.0)
        return BudgetStudy(profile, self._hardware, self._budget_bytes)

    def _learn(self) -> None:
        """Learn from the step that has ended."""
        running, self._running = self._running, None
        self._engine.passes = None
        self._memory.reuse_freed(True)
        if running is None:
            return
        study, step_s = running.study, time.perf_counter() - running.begin_s
        if isinstance(study, _Unprofiled):
            ended = self._engine.num_steps > running.number and self._engine.had_backward
            if ended and self._memory.num_failures() == running.failures:
                self._studies[running.kind] = self._study_recorded(step_s, study.reason)
            return
        if self._memory.num_failures() > running.failures:
            self._learn_shortage(study)
            return
        if self._engine.num_steps == running.number:
            return
        if running.watch is not None:
            running.watch.finish()
            peak_bytes = running.watch.reserved_peak_bytes
            if study.has_all_passes(running.watch) and not self._several:
                study.learn_memory(running.watch, step_s)
                return
        else:
            peak_bytes = self._memory.reserved_peak_bytes()
            if running.stage is Stage.REFILL and not self._several:
                study.learn_refill(step_s, peak_bytes)
            if running.stage is Stage.SECONDS and not self._several:
                study.learn_seconds(self._engine.trace, step_s, peak_bytes)
                if study.phase is Phase.FRUGAL:
                    return  # what is more frugal is searched for
        study.note_peak(peak_bytes)
        if peak_bytes > self._budget_bytes:
            self._memory.reset_peak()

    def _learn_shortage(self, study: BudgetStudy) -> None:
        """Learn that the device had not enough memory for the last step."""
        study.learn_shortage()
        self._memory.reset_peak()
        if not self._was_short:
            self._was_short = True
            warn_user(
                "out-of-memory",
                f"the device ran out of memory in a step under a budget of "
                f"{format_size(self._budget_bytes)}: other programs, or other parts of this one, "
                f"use the rest. The next steps follow the plan that needs least, and then one for "
                f"{format_size(study.budget_bytes)}. No parameter has changed. Where the step has "
                f"raised torch.OutOfMemoryError, repeat it; give a smaller budget to be spared "
                f"this",
                UserWarning,
            )


def _has_no_room() -> bool:
    """Say that no freed memory may stay, as in a step whose memory is measured."""
    return False


def _needs_gradients(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a parameter is trained, or a gradient of an argument is wanted."""
    if any(parameter.requires_grad for parameter in model.parameters()):
        return True
    return any(getattr(leaf, "requires_grad", False) for leaf in tree_leaves((args, kwargs)))


def assumed_hardware(device: torch.device) -> Hardware:
    """Return the bandwidths that are assumed of a device until copies have been measured."""
    return Hardware.named("cpu" if device.type == "cpu" else "a100-80gb", achievable=True)
