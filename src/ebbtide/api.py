"""The user interface: `offload` for a model, `wrap_forward_with_offload` for one callable."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn, final

import torch
from torch import nn

from ebbtide.engine import Engine
from ebbtide.errors import PolicyError
from ebbtide.execution.executor import ScheduleMode
from ebbtide.hooks.bypass import BypassHooks
from ebbtide.hooks.forward import OffloadedForward
from ebbtide.hooks.layers import (
    LayerModules,
    LayerTracker,
    ModuleHook,
    match_layers,
)
from ebbtide.hooks.recompute import replace_forwards
from ebbtide.interface.arguments import (
    check_activations,
    check_model,
    check_trace,
    check_weights,
    parse_device,
    refuse,
    refuse_recomputing,
)
from ebbtide.interface.display import brief, count, few, html_table, labelled
from ebbtide.layers.checks import check_layer_counts, check_regions
from ebbtide.layers.search import find_layers
from ebbtide.policy import ActivationPolicy, WeightPolicy
from ebbtide.reports.inspection import Inspection
from ebbtide.schedule import Schedule
from ebbtide.tracing.trace import Trace
from ebbtide.transfers.stats import StepStats


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
    ) -> None:
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
) -> OffloadHandle:
    """Offload a model's saved activations during forward and reload them for backward.

    Losses and gradients stay the same to the bit. The model is changed in place and trains as
    before. Where autograd does not record (`no_grad`, `inference_mode`), nothing is offloaded.

    Args:
        model: any module with its parameters on one device.
        activations: what to offload. None means every tensor that is large enough, or nothing if
            ``weights`` is given.
        weights: which weights stay in host memory between uses. None means none.
        layers: the modules whose calls count as layers, or glob patterns of their names such as
            ``"blocks.*.mlp"``. None means the model's repeated blocks.
        store: where offloaded bytes go: ``"host"`` (page-locked memory), ``"disk"`` or
            ``"disk:/some/dir"`` (an unnamed file), ``"tiered"`` or ``"tiered:/some/dir"`` (host
            memory until it is full, then disk), or ``"auto"``: host for a model on an accelerator,
            disk for a model on a CPU, whose activations can go nowhere else.
        host_budget: the most host memory to take for a model on an accelerator, in bytes or as text
            such as ``"24GiB"``. Bytes beyond it go to disk if the store is tiered; otherwise the
            forward raises `StoreFullError`. None means all free host memory.
        trace: record every step for ``handle.trace``. On an accelerator the host then waits for
            the device once per step, so use it to study a step, not for a whole training run.
        schedule: which layer moves at which pass; see `ebbtide.schedule`. None means that
            activations are offloaded when they are saved, and prefetched in the order in which the
            previous backward read them, within `ActivationPolicy.max_inflight_bytes`.

    Returns:
        A handle that gives the statistics of the last step and can detach.

    Raises:
        PolicyError: the model has no parameters, is on several devices or is offloaded already, or
            the layers, the policy or the store do not fit it. The model is unchanged.
        ScheduleError: the schedule cannot be run. The model is unchanged.
    """
    check_model(model)
    check_activations(activations)
    check_weights(weights)
    check_trace(trace)
    policy = activations
    if policy is None:
        none = ActivationPolicy(num_layers=0, rebuild=False)
        policy = ActivationPolicy() if weights is None or schedule is not None else none
    refuse_second_offload(model)
    if next(model.parameters(), None) is None:
        raise PolicyError(
            f"{type(model).__name__} has no parameters that tell which device it is on; wrap "
            f"its forward with ebbtide.wrap_forward_with_offload(model.forward, device=...)"
        )
    found = find_layers(model) if layers is None else match_layers(model, layers)
    check_layer_counts(policy, found)
    _check_schedule(schedule, policy, found)
    one_region = check_regions(model, policy)
    mode = None if schedule is None else ScheduleMode(schedule)
    engine = Engine([model], policy, store, host_budget=host_budget, traced=trace, mode=mode)
    resting = None if weights is None else engine.offload_weights(model, found, weights)
    engine.placement.num_calls = found.num_calls
    replace = replace_forwards(engine.find_recomputing) if policy.recomputes else None
    tracker = LayerTracker(found, policy.num_layers, engine, replace)
    wrapped = OffloadedForward(model.forward, engine.hooks, tracker, resting)
    tracker.attach(model)
    tracker.warned = one_region
    undo: list[Callable[[], None]] = [
        functools.partial(_restore_forward, model, wrapped, model.__dict__.get("forward")),
    ]
    model.forward = wrapped
    bypass = BypassHooks(model, found, wrapped, tracker, follows_schedule=schedule is not None)
    wrapped.was_bypass_interrupted = bypass.was_interrupted
    undo.append(bypass.detach)
    if resting is not None:
        undo.append(resting.detach)
    return OffloadHandle(engine, tracker, [*undo, tracker.detach])


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
            `fraction` must keep their defaults.
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
    check_activations(activations)
    check_trace(trace)
    policy = ActivationPolicy() if activations is None else activations
    if policy.counts_layers:
        raise PolicyError(
            "a wrapped forward has no layers to count; use ebbtide.offload(model, "
            "activations=ActivationPolicy(num_layers=..., keep_last=...))"
        )
    refuse_recomputing(policy, "a wrapped forward has no layers to recompute")
    if isinstance(forward, OffloadedForward):
        raise PolicyError("this forward is wrapped already; wrap the original one, once")
    modules = list(_modules_of(forward))
    for module in modules:
        refuse_second_offload(module)
    home = parse_device(device)
    engine = Engine(modules, policy, store, home, host_budget=host_budget, traced=trace)
    wrapped = OffloadedForward(forward, engine.hooks, None)
    wrapped.handle = OffloadHandle(engine, (), [wrapped.deactivate])
    return wrapped


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
    refuse_recomputing(policy, "a schedule says which layers leave the device")
    if policy.counts_layers:
        raise PolicyError(
            "a schedule already says which layers leave the device; remove num_layers, keep_last "
            "and fraction from the policy"
        )
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


def _restore_forward(model: nn.Module, wrapped: OffloadedForward, before: object) -> None:
    wrapped.deactivate()
    if model.__dict__.get("forward") is not wrapped:
        return  # other code has wrapped `wrapped`, which now only forwards calls
    if before is None:
        del model.forward
    else:
        model.__dict__["forward"] = before


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
