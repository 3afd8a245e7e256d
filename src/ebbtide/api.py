"""The user interface: `offload` for a model, `wrap_forward_with_offload` for one callable."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ebbtide.devices.process import call_weakly
from ebbtide.errors import PolicyError, warn_of_untested
from ebbtide.handle import OffloadHandle
from ebbtide.observe.recording import record_model
from ebbtide.policy import (
    ActivationPolicy,
    WeightPolicy,
    check_arguments,
    check_budgeted,
    check_model,
    parse_device,
    refuse,
    refuse_choice,
)
from ebbtide.runtime.compiled import ModuleHook
from ebbtide.runtime.engine import Engine
from ebbtide.runtime.executor import ScheduleMode
from ebbtide.runtime.forward import OffloadedForward, hook_parts
from ebbtide.runtime.layers import (
    LayerModules,
    LayerTracker,
    check_layer_counts,
    check_regions,
    covering_layers,
    find_layers,
    match_layers,
)
from ebbtide.runtime.parameter_index import home_of
from ebbtide.schedule import Schedule
from ebbtide.units import parse_budget_bytes
from ebbtide.version import TESTED_TORCH
from ebbtide.weights.model_weights import Materialize, ModelWeights, check_can_move
from ebbtide.weights.model_weights import materialize as give_values

if TYPE_CHECKING:
    from ebbtide.planning.budget import BudgetController
    from ebbtide.planning.follow import FixedPlan
    from ebbtide.planning.planned_step import PlannedStep


_LOG = logging.getLogger(__name__)

before_offload: list[Callable[[nn.Module], None]] = []
"""Called with each model that a user is about to offload, so that `ebbtide run` can give way."""


def offload(
    model: nn.Module,
    *,
    activations: ActivationPolicy | None = None,
    weights: WeightPolicy | None = None,
    layers: Sequence[nn.Module | str] | None = None,
    store: str = "auto",
    host_budget: int | str | None = None,
    trace: bool = False,
    schedule: Schedule | None = None,
    budget: int | str | None = None,
    plan: PlannedStep | str | PathLike[str] | None = None,
    device: torch.device | str | None = None,
    materialize: Materialize | None = None,
) -> OffloadHandle:
    """Offload a model's saved activations during forward and reload them for backward.

    Losses and gradients stay the same to the bit. The model is changed in place and trains as
    before. Where autograd does not record (`no_grad`, `inference_mode`), nothing is offloaded.

    Args:
        model: any module with its parameters on one device. (`wrap_forward_with_offload` is for
            callables, such as ``model.forward``.)
        activations: what to offload; ``ActivationPolicy()`` is every tensor that is large enough.
            None means the same on a CPU, what ``budget`` decides on an accelerator, and nothing if
            ``weights`` is given.
        weights: which weights stay in host memory between uses. None means none, or those that
            ``budget`` or ``plan`` has there. With a budget, ``WeightPolicy(num_layers=0)`` leaves
            all of them on the device.
        layers: the modules whose calls count as layers, or glob patterns of their names such as
            ``"blocks.*.mlp"``. None means the model's repeated blocks; for a budget, the modules
            beside them as well, and for a plan those that it was made for.
        store: where offloaded bytes go: ``"host"`` (page-locked memory), ``"disk"`` or
            ``"disk:/some/dir"`` (an unnamed file), ``"tiered"`` or ``"tiered:/some/dir"`` (host
            memory until it is full, then disk), or ``"auto"``: host for a model on an accelerator,
            disk for a model on a CPU, whose activations can go nowhere else.
        host_budget: the most host memory to take for a model on an accelerator, in bytes or as text
            such as ``"24GiB"``; or the most for all ranks of this host, ``"96GiB/node"``, of which
            each rank has an equal part. Bytes beyond it go to disk if the store is tiered;
            otherwise the forward raises `StoreFullError`. None means all free host memory, of
            which each rank of a host has an equal part.
        trace: record every step for ``handle.trace``. On an accelerator the host then waits for
            the device once per step, so use it to study a step, not for a whole training run.
        schedule: which layer moves at which pass; see `ebbtide.schedule`. None means that
            activations are offloaded when they are saved, and prefetched in the order in which the
            previous backward read them, within `ActivationPolicy.max_inflight_bytes`.
        budget: the most memory that training may take, in bytes, as text such as ``"24GiB"``, or as
            a share such as ``"90%"``. Each layer and each storage is then kept, offloaded, rebuilt
            or recomputed so that the step is as short as the budget allows; ``handle.plan`` says
            what was chosen and why. On an accelerator the budget bounds what tensors use at once,
            on a CPU the peak of the process's resident memory. The first
            steps run the most frugal plan and are measured. Of ``activations``, only ``min_bytes``
            may be given. None, on an accelerator and with neither ``activations``, ``weights``,
            ``schedule`` nor ``plan``: 90% of the memory that the device has for this process, so
            that what fits stays where it is.
        plan: instead of a budget, a plan that one led to before: ``handle.plan``, or the path of
            the file that ``handle.plan.save(path)`` wrote. It is followed from the first step on,
            and nothing is measured.
        device: where to train a model that is on the CPU or on meta, such as ``"cuda"``. The
            weights that rest on the host go to their place there at once, and only the others and
            the buffers to the device, so the model need not fit on it. `detach` brings all of it
            back to the CPU. None: the device that the model is on.
        materialize: how a model on the meta device gets its values: a function that is called with
            each module that has own parameters or buffers there, when these have memory on the CPU,
            such as ``lambda module: module.reset_parameters()``; or a folder of safetensors files.

    Returns:
        A handle that gives the statistics of the last step and can detach.

    Raises:
        PolicyError: the model has no parameters, is on several devices or is offloaded already, or
            the layers, the policy or the store do not fit it. The model is unchanged.
        ScheduleError: the schedule cannot be run. The model is unchanged.
        OSError: the plan's file cannot be read. The model is unchanged.
        BudgetError: raised by the forward, if no plan fits into the budget, unless steps have been
            within it before.
    """
    warn_of_untested("torch", torch.__version__, TESTED_TORCH[1])
    check_model(model)
    check_arguments(activations=activations, weights=weights, trace=trace)
    if budget is not None:
        parse_budget_bytes(budget)
    policy, planned = activations, None
    is_default = all(each is None for each in (activations, weights, schedule, budget, plan))
    places_weights = weights is not None
    if budget is not None and weights is not None and weights.num_layers == 0:
        weights = None  # all stay on the device, whatever the budget
    if budget is not None or plan is not None:
        given_twice = budget is not None and plan is not None
        policy = check_budgeted(policy, schedule, given_twice=given_twice)
    elif policy is None:
        none = ActivationPolicy(num_layers=0, rebuild=False)
        policy = ActivationPolicy() if weights is None or schedule is not None else none
    home = parse_device(device)
    _give_way_to(model)
    refuse_second_offload(model)
    if next(model.parameters(), None) is None:
        raise PolicyError(
            f"{type(model).__name__} has no parameters that tell which device it is on; wrap "
            f"its forward with ebbtide.wrap_forward_with_offload(model.forward, device=...)"
        )
    if materialize is not None:
        give_values(model, materialize)
    if home is not None:
        check_can_move(model, home)
    resting_names = list[str]()
    if plan is not None:
        from ebbtide.planning.follow import (
            FixedPlan,
            layers_of,
            load_plan,
            policy_of,
            resting_layers_of,
        )

        if layers is not None:
            raise PolicyError("a plan names the layers that it was made for; leave layers out")
        planned = load_plan(plan)
        policy = policy_of(planned, policy, activations)
        layers = layers_of(planned, model)
        if weights is None:
            resting_names = resting_layers_of(planned)
            weights = WeightPolicy() if resting_names else None
    budgeted = budget is not None or (is_default and _plans_by_default(model, home))
    if budgeted:
        policy = check_budgeted(activations, None, given_twice=False)
        layers = covering_layers(model) if layers is None else layers
    found = find_layers(model) if layers is None else match_layers(model, layers)
    check_layer_counts(policy, found)
    _check_schedule(schedule, policy, found)
    one_region = check_regions(model, policy)
    mode = None if schedule is None else ScheduleMode(schedule)
    engine = Engine(
        [model],
        policy,
        store,
        home=home,
        host_budget=host_budget,
        traced=trace,
        mode=mode,
        record=record_model,
    )
    origin = None if home is None else next(model.parameters()).device
    owners = match_layers(model, resting_names) if resting_names else found
    placed = ModelWeights(model, owners, weights or WeightPolicy(), engine, origin)
    plans_weights = budgeted and not places_weights and engine.torch_device.type != "cpu"
    engine.placement.num_calls = found.num_calls
    controller: BudgetController | None = None
    planner: BudgetController | FixedPlan | None = None
    try:
        if not plans_weights and (weights is not None or home is not None):
            placed.place(None if weights is not None else ())
        if budgeted:
            # Here, because it needs SciPy, which takes long to import.
            from ebbtide.planning.budget import BudgetController

            planned_weights = placed if plans_weights else None
            min_bytes = engine.placement.min_bytes
            controller = BudgetController(
                model, found.modules, engine, budget, min_bytes, weights=planned_weights
            )
            planner = controller
        elif planned is not None:
            planner = FixedPlan(engine, planned)
    except BaseException:
        placed.detach()
        raise
    tracker = LayerTracker(found, engine, warned=one_region)
    before = model.__dict__.get("forward")
    prepare = None if controller is None else controller.prepare
    wrapped = OffloadedForward(model.forward, engine, tracker, prepare, before)
    tracker.attach(model)
    known = weakref.ref(model)  # see [Note: what a model owns]
    undo: list[Callable[[], None]] = [functools.partial(_restore_forward, known, wrapped)]
    model.forward = wrapped
    hook_parts(model, found, wrapped, tracker, follows_schedule=schedule is not None)
    undo.append(placed.detach)
    if planner is not None:
        undo.append(planner.detach)
    undo.append(tracker.detach)
    handle = OffloadHandle(engine, tracker, undo, planner, lambda: wrapped, owner=model)
    _LOG.info("offload: %r; activations: %s; weights: %s", handle, policy, weights)
    return handle


def wrap_forward_with_offload(
    forward: Callable[..., Any],
    *,
    activations: ActivationPolicy | None = None,
    store: str = "auto",
    device: torch.device | str | None = None,
    host_budget: int | str | None = None,
    trace: bool = False,
) -> OffloadedForward:
    """Wrap one callable so that what autograd saves inside it is offloaded.

    This is the one-line form of neuraloperator's recipe for CPU offloading::

        model.forward = ebbtide.wrap_forward_with_offload(model.forward)

    Args:
        forward: a module's bound forward, or any callable.
        activations: as for `offload`. A callable has no layers, so `num_layers`, `keep_last` and
            `mode` must keep their defaults.
        store: as for `offload`.
        device: the device that the callable computes on, if it refers to no module with
            parameters. None means the current accelerator if there is one, else the CPU.
        host_budget: as for `offload`.
        trace: as for `offload`.

    Returns:
        The wrapped callable, whose attribute ``handle`` is an `OffloadHandle`.

    Raises:
        PolicyError: ``forward`` is wrapped already, or the policy or the store does not fit it.
    """
    if not callable(forward) or isinstance(forward, type):
        refuse("forward", "a callable, such as model.forward", forward)
    check_arguments(activations=activations, trace=trace)
    policy = ActivationPolicy() if activations is None else activations
    refuse_choice(policy, "a wrapped forward has no layers; use ebbtide.offload(model, ...)")
    if isinstance(forward, OffloadedForward):
        raise PolicyError("this forward is wrapped already; wrap the original one, once")
    modules = list(_modules_of(forward))
    for module in modules:
        _give_way_to(module)
        refuse_second_offload(module)
    home = parse_device(device)
    engine = Engine(
        modules, policy, store, home, host_budget=host_budget, traced=trace, record=record_model
    )
    wrapped = OffloadedForward(forward, engine, None)
    undo = [call_weakly(wrapped.deactivate)]  # the forward owns its handle
    known = weakref.ref(wrapped)
    wrapped.handle = OffloadHandle(engine, (), undo, forward=known, owner=wrapped)
    _LOG.info("wrap_forward_with_offload: %r; activations: %s", wrapped.handle, policy)
    return wrapped


def _plans_by_default(model: nn.Module, home: torch.device | None) -> bool:
    """Whether a model that is offloaded without settings has a budget: on accelerators.

    What fits there is best left where it is. On a CPU, whose memory the model shares with the
    program and others, all that can go to disk goes.
    """
    device = home_of(next(model.parameters())) if home is None else home
    is_accelerator = device.type not in ("cpu", "meta")
    return is_accelerator and hasattr(torch.get_device_module(device), "mem_get_info")


def refuse_second_offload(model: nn.Module) -> None:
    """Check that neither a model nor any of its submodules is offloaded.

    Raises:
        PolicyError: one of them is offloaded already.
    """
    for name, module in model.named_modules():
        wrapped = isinstance(module.__dict__.get("forward"), OffloadedForward)
        if wrapped or any(isinstance(hook, ModuleHook) for hook in module._forward_hooks.values()):
            raise PolicyError(
                f"{name or 'the model'} ({type(module).__name__}) is offloaded already; call "
                f"detach() on the handle of that offload first"
            )


def _give_way_to(model: nn.Module) -> None:
    for give_way in list(before_offload):
        give_way(model)


def _check_schedule(
    schedule: Schedule | None, policy: ActivationPolicy, layers: LayerModules
) -> None:
    if schedule is None:
        return
    if not isinstance(schedule, Schedule):
        raise PolicyError(
            f"schedule must be an ebbtide.Schedule, got {schedule!r}; text is read by "
            f"ebbtide.Schedule.parse(text)"
        )
    schedule.check()
    refuse_choice(policy, "a schedule says which layers leave the device")
    if not layers.modules:
        raise PolicyError(
            "a schedule refers to layers, and the model has no repeated blocks; name its layers, "
            "such as layers=[model.encoder, model.decoder]"
        )
    if layers.num_calls is not None and schedule.num_layers > layers.num_calls:
        raise PolicyError(
            f"the schedule has {schedule.num_layers} layers and the model {layers.num_calls} "
            f"({', '.join(layers.names[:3])}, ...); write microbatches as F0.m1, and if layers "
            f"are called more than once in a forward, name them: layers="
            f"{layers.names[:2]}"
        )


def _restore_forward(known: weakref.ref[nn.Module], wrapped: OffloadedForward) -> None:
    wrapped.deactivate()
    model = known()
    if model is None or model.__dict__.get("forward") is not wrapped:
        return  # other code has wrapped `wrapped`, which now only forwards calls
    if wrapped.replaced is None:
        del model.forward
    else:
        model.__dict__["forward"] = wrapped.replaced


def _modules_of(forward: Callable[..., Any]) -> Iterator[nn.Module]:
    """Yield the modules a callable refers to: itself, its bound object, or in its closure."""
    while isinstance(forward, functools.partial):
        forward = forward.func
    closure = getattr(forward, "__closure__", None) or ()
    candidates = [forward, getattr(forward, "__self__", None)]
    candidates += [cell.cell_contents for cell in closure]
    for candidate in candidates:
        if isinstance(candidate, nn.Module):
            yield candidate
