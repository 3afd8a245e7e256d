"""Plans a call of a model without offloading it, for `ebbtide run --dry`."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from ebbtide.budgeting.budget_controller import assumed_hardware
from ebbtide.budgeting.budget_size import parse_budget_bytes
from ebbtide.budgeting.fixed_plan import layers_of, load_plan
from ebbtide.budgeting.plan_estimates import plan_by_estimate
from ebbtide.budgeting.planned_step import PlannedStep
from ebbtide.hooks.layers import LayerModules, match_layers
from ebbtide.layers.covering import covering_layers
from ebbtide.memory.measured_memory import memory_of
from ebbtide.parameters.homes import find_device
from ebbtide.planning.profiling.fake_profile import profile_activations
from ebbtide.planning.profiling.fake_step import CallArguments
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


def plan_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: RunOptions
) -> DryPlan:
    """Say what would be done with a model that is called with these arguments.

    Gradients that the first backward will make count as in use. The state of an optimizer counts
    only if it is there already.

    Raises:
        PolicyError: the model could not be offloaded, or it cannot run with fake tensors.
        BudgetError: no plan fits into the budget.
        OSError: the file of the plan cannot be read.
    """
    device = find_device([model])
    assert device is not None, "the model has parameters"
    found = _find_layers(model, options)
    hardware = assumed_hardware(device)
    call = CallArguments(args, kwargs)
    profile = profile_activations(model, found.modules, call, hardware, options.min_bytes)
    first = [each for layer in profile.layers for each in layer.storages if each.same_as is None]
    saved_bytes = sum(each.size_bytes for each in first)
    names = tuple(found.names)
    if options.plan is not None:
        return DryPlan(names, saved_bytes, load_plan(options.plan))
    if options.budget is None:
        return DryPlan(names, saved_bytes, None)
    memory = memory_of(device)
    missing_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad and p.grad is None)
    budget_bytes = parse_budget_bytes(options.budget, memory.total_bytes)
    begin_bytes = memory.now_bytes() + missing_bytes
    planned = plan_by_estimate(profile, hardware, budget_bytes, begin_bytes)
    return DryPlan(names, saved_bytes, planned)


def _find_layers(model: nn.Module, options: RunOptions) -> LayerModules:
    if options.plan is not None:
        return match_layers(model, layers_of(load_plan(options.plan), model))
    if options.layers:
        return match_layers(model, options.layers)
    return match_layers(model, covering_layers(model))  # only what layers save is profiled
