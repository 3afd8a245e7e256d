"""Plans a model from its first step, in which nothing leaves, for `ebbtide run --dry`."""

from __future__ import annotations

import time
from typing import Any, NamedTuple, final

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ebbtide.api import offload
from ebbtide.budgeting.budget_controller import assumed_hardware
from ebbtide.budgeting.budget_size import parse_budget_bytes
from ebbtide.budgeting.budget_study import BudgetStudy
from ebbtide.budgeting.fixed_plan import layers_of, load_plan
from ebbtide.budgeting.pass_watch import PassWatch
from ebbtide.budgeting.planned_step import PlannedStep
from ebbtide.layers.covering import covering_layers
from ebbtide.memory.measured_memory import memory_of
from ebbtide.planning.profiling.recorded_profile import profile_recorded_step
from ebbtide.planning.searching.simple_plans import keep_all
from ebbtide.policy import ActivationPolicy
from ebbtide.running.run_options import RunOptions


class DryPlan(NamedTuple):
    """What would be done with a model.

    Attributes:
        layers: names of the modules whose calls are its layers.
        saved_bytes: bytes of the saved tensors of a step that are large enough to leave.
        planned: the plan; None without a budget.
    """

    layers: tuple[str, ...]
    saved_bytes: int
    planned: PlannedStep | None


@final
class DryStep:
    """The first training step of a model, in which nothing leaves the device.

    Args:
        model: the model, whose first training forward is about to begin.
        args: the positional arguments of the forward.
        kwargs: its keyword arguments.
        options: how the model would be offloaded.

    Raises:
        PolicyError: it could not be.
        OSError: the file of the plan cannot be read.
    """

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: RunOptions
    ) -> None:
        self._options = options
        self._given = None if options.plan is None else load_plan(options.plan)
        layers = options.layers or covering_layers(model)  # only what layers save is planned
        if self._given is not None:
            layers = layers_of(self._given, model)
        policy = ActivationPolicy(num_layers=0, min_bytes=options.min_bytes)
        self._handle = offload(model, activations=policy, layers=layers, trace=True)
        self._engine = self._handle._engine
        self._memory = memory_of(self._engine.torch_device)
        held = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self._watch = PassWatch(self._memory, None, None, self._engine.find_record, held)
        self._engine.passes = self._watch
        self._begin_s = time.perf_counter()

    def result(self) -> DryPlan | None:
        """Return what would be done, and leave the model alone from now on.

        Returns:
            None while the step has not ended.

        Raises:
            PolicyError: the model cannot be planned.
            BudgetError: no plan fits into the budget.
        """
        engine = self._engine
        if engine.is_in_step() or not engine.num_steps or not engine.had_backward:
            return None
        step_s = time.perf_counter() - self._begin_s
        self._watch.finish()
        storages, trace = engine.inspect().storages, engine.trace
        names = self._handle.layers
        self.end()
        saved_bytes = sum(each.size_bytes for each in storages)
        if self._options.budget is None:
            return DryPlan(names, saved_bytes, self._given)
        hardware = assumed_hardware(engine.torch_device)
        profile = profile_recorded_step(
            storages,
            self._watch.calls,
            hardware,
            min_bytes=engine.placement.min_bytes,
            keeps_all=True,
        )
        budget_bytes = parse_budget_bytes(self._options.budget, self._memory.total_bytes)
        begin_bytes = self._watch.begin_bytes
        study = BudgetStudy(profile, hardware, budget_bytes, begin_bytes, keep_all(profile))
        study.learn_record(self._watch, trace, step_s)
        return DryPlan(names, saved_bytes, study.estimate())

    def end(self) -> None:
        """Put the model back as it was."""
        self._engine.passes = None
        self._memory.reuse_freed(True)
        self._handle.detach()
