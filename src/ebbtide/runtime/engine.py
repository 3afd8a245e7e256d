"""Builds the device, store, transfers, activations, weights and hooks of one model."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, final

import torch
from torch import nn

from ebbtide.devices.accelerator import AcceleratorDevice
from ebbtide.devices.cpu import CpuDevice
from ebbtide.devices.device import AbstractDevice, Layer
from ebbtide.devices.lanes import defer, watch
from ebbtide.devices.process import call_weakly
from ebbtide.errors import PolicyError
from ebbtide.policy import ActivationPolicy
from ebbtide.runtime.activations import Activations, PassWindows
from ebbtide.runtime.events import PassListener, StepListener, Subject
from ebbtide.runtime.executor import ScheduleExecutor, ScheduleMode
from ebbtide.runtime.handles import UnitRecords
from ebbtide.runtime.parameter_index import (
    ParameterIndex,
    RestingWeights,
    find_device,
    home_of,
)
from ebbtide.runtime.rebuild import Placement, PlannedLayers
from ebbtide.runtime.recompute import COMPILED, Proofs, Recorder
from ebbtide.runtime.record import ForwardLog
from ebbtide.runtime.saved_tensors import SavedTensorHooks, hooks_are_wanted, let_others_disable
from ebbtide.runtime.stats import StepStats, describe_fates, watch_nodes
from ebbtide.runtime.torch_internals import (
    drop_own_modes,
    has_tangents,
    transform_level,
    tree_leaves,
)
from ebbtide.runtime.transfers import Transfers
from ebbtide.schedule import Schedule, Unit
from ebbtide.stores.build import build_store, parse_store
from ebbtide.stores.host_memory import parse_host_budget
from ebbtide.stores.measured_memory import describe
from ebbtide.units import count, format_size

_META = torch.device("meta")
_WITHOUT_STREAMS = frozenset({"mps"})  # devices on which copies cannot run beside compute
INFLIGHT_BYTES = 256 * 2**20
_CPU_INFLIGHT_BYTES = 64 * 2**20
_CLOSING_S = 0.05  # between two looks at an engine that graphs still need after `detach`


DeviceMaker = Callable[[torch.device], AbstractDevice]


def make_device(torch_device: torch.device) -> AbstractDevice:
    """Return the streams, events and copies of a device."""
    return CpuDevice() if torch_device.type == "cpu" else AcceleratorDevice(torch_device)


_device_maker: ContextVar[tuple[DeviceMaker, list[Engine]] | None] = ContextVar(
    "device_maker", default=None
)


@contextlib.contextmanager
def devices_made_by(maker: DeviceMaker) -> Iterator[list[Engine]]:
    """Have the engines that this thread makes in the block compute on other devices.

    An engine keeps its maker, so what it builds anew later is on such a device, too. No argument of
    `ebbtide.offload` says this, because a script that calls it is verified as it is.

    Yields:
        The engines that were made so far.
    """
    engines = list[Engine]()
    before = _device_maker.set((maker, engines))
    try:
        yield engines
    finally:
        _device_maker.reset(before)


Record = Callable[[Transfers, list[nn.Module], Callable[[], frozenset[int]]], StepListener]
"""Makes what is told of a model's steps, given its transfers, its modules, and a function that
returns the parameters whose values rest elsewhere, by `id`."""


@final
class Engine:
    """Owns the parts of one offload, and rebuilds them when the model moves to another device.

    Args:
        modules: modules whose parameters and buffers are not treated as activations; the device of
            their parameters is the device of the offload.
        policy: what to offload.
        store: where offloaded bytes go, as `ebbtide.offload` describes it.
        device: device to compute on if ``modules`` has no parameters.
        home: device to compute on, wherever the parameters are now; they are moved before the first
            forward, as far as they do not rest on the host. None: the device of the parameters.
        host_budget: the most host memory to take, as `ebbtide.offload` describes it.
        traced: whether to record every step.
        mode: the schedule and how to follow it; None means that storages are offloaded when they
            are saved.
        record: makes what is told of the steps that are recorded; None if none ever is.

    Attributes:
        mode: as given.
        policy: as given.
        is_traced: whether each step is recorded.
        placement: decides whether each storage is kept, offloaded or rebuilt.
        transfers: copies between the device and the store.
        activations: the model's activations.
        executor: executes the schedule; None without a schedule.
        weights: hooks of the offloaded weights; None if no weights are offloaded.

    Raises:
        PolicyError: the modules, the device and the store do not fit together.
        ScheduleError: the schedule cannot be run.
    """

    # Long: it is where a model's parts meet, and each of its methods is short.

    def __init__(
        self,
        modules: Sequence[nn.Module],
        policy: ActivationPolicy,
        store: str,
        device: torch.device | None = None,
        *,
        home: torch.device | None = None,
        host_budget: int | str | None = None,
        traced: bool = False,
        mode: ScheduleMode | None = None,
        record: Record | None = None,
    ) -> None:
        let_others_disable()
        self.mode = mode
        self._proofs = Proofs()
        refused = self._proofs.refused
        self.placement = Placement(policy, layers_only=mode is not None, refused=refused)
        self._modules = [weakref.ref(module) for module in modules]
        kinds = [type(module).__name__ for module in modules]
        self._subject = kinds[0] if len(kinds) == 1 else count(len(kinds), "module")
        self._host_limit = None if host_budget is None else parse_host_budget(host_budget)
        self.is_traced = traced
        self._record = record
        self.policy = policy
        self._store = store
        self._fallback = device
        self._microbatch = 0
        self.weights: RestingWeights | None = None
        self._bound_bytes: int | None = None
        self._make_device, made = _device_maker.get() or (make_device, [])
        made.append(self)
        self._build(home or find_device(modules) or self._default_device())

    def let_go(self) -> None:
        """Free what the offload holds of a model that is gone. Graphs keep what they need.

        It may be called in a finalizer, so the store, whose closing can block, is closed later.
        """
        # The weights refer to the parameters, and own the memory in which these rest.
        self.rest(None)
        defer(self.close)

    @property
    def stats(self) -> StepStats:
        """The statistics of the last finished step."""
        self.settle()
        return self.transfers.account.stats

    def settle(self) -> None:
        """Note what has died and what is complete, without waiting, in the process that asks."""
        self._leave_to_parent()
        self.transfers.settle()

    @property
    def schedule(self) -> Schedule | None:
        """The schedule that is followed; None without one."""
        return None if self.mode is None else self.mode.schedule

    @property
    def notes(self) -> tuple[str, ...]:
        """What is done on this machine beyond moving bytes, in sentences."""
        on_host = self.transfers.device.computes_on_host
        return (describe(),) if on_host else ()

    @property
    def torch_device(self) -> torch.device:
        """The device that the model computes on."""
        return self.transfers.device.torch_device

    def follow(self, layers: PlannedLayers | None, bound_bytes: int | None) -> None:
        """Follow a plan from the next forward on. Graphs that are alive stay as they are.

        Args:
            layers: what becomes of each layer and storage; None lets the policy decide.
            bound_bytes: bound on the bytes in flight in each direction; None leaves it as it is.
        """
        self.placement.follow(layers)
        self.activations.scopes.follow(layers)
        if bound_bytes is not None:
            self._bound_bytes = bound_bytes
        self._bound_transfers()

    @property
    def _passes(self) -> PassListener | None:
        """Who is notified of the passes of each step; None if nobody is."""
        return self.transfers.account.passes

    @property
    def _windows(self) -> PassWindows | None:
        """What bounds the bytes in flight pass by pass; None if nothing does."""
        layers = self.placement.layers
        return None if layers is None else layers.windows

    def _bound_transfers(self) -> None:
        layers = self.placement.layers
        self.transfers.offloads.keeps_if_full = layers is not None and layers.keeps_if_full
        if self._bound_bytes is not None:
            self.transfers.bound(self._bound_bytes, self._windows)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules whose parameters are not treated as activations, unless they are gone."""
        return [module for known in self._modules if (module := known()) is not None]

    @property
    def num_steps(self) -> int:
        """Number of finished steps."""
        return self.transfers.account.num_steps

    @property
    def had_backward(self) -> bool:
        """Whether the last finished step had a backward, as far as is known."""
        meter = self.transfers.account.last_meter
        return meter is not None and meter.had_backward

    @property
    def refused_layers(self) -> frozenset[str]:
        """Names of the layers that are not recomputed, because they would not do the same again."""
        return frozenset(self._proofs.refused)

    def is_in_step(self) -> bool:
        """Whether the step of the last forward has not ended. To be asked between forwards."""
        self.activations.end_step_with_graphs()
        return bool(self.transfers.live) and self.transfers.account.origin is not None

    def record_steps(self, *, traced: bool) -> None:
        """Record a trace of each step, or of none, from the next step on."""
        self.is_traced = traced
        self.transfers.account.record(traced=traced)

    def describe(self) -> dict[str, str]:
        """Say in a few words what is offloaded where, and what the last step did. Never waits."""
        kind, directory = parse_store(self._store)
        if kind == "auto":
            kind = "disk" if self.torch_device.type == "cpu" else "host"
        last = self.transfers.account.last_counts
        done = describe_fates(last)
        under_way = self.transfers.live or self.transfers.running
        return {
            "model": f"{self._subject} on {self.torch_device}"
            if self._modules
            else str(self.torch_device),
            "store": kind if directory is None else f"{kind}:{directory}",
            "last step": (done or "nothing offloaded") if last.num_saved else "none yet",
            "now": "a step is under way" if under_way else "no step is under way",
        }

    def settings(self) -> dict[str, str]:
        """Return what the offload was asked for, by the names of the arguments."""
        settings = {"activations": repr(self.policy), "store": self._store}
        if self._host_limit is not None:
            settings["host_budget"] = format_size(self._host_limit)
        if self.weights is not None:
            settings["weights"] = "those of offloaded layers rest on the host"
        if self.mode is not None:
            settings["schedule"] = f"of {count(self.mode.schedule.num_layers, 'layer')}"
        return settings

    def hooks(self) -> SavedTensorHooks:
        """Return the saved-tensor hooks for a forward that begins now.

        If the model has moved to another device, if this process was forked, or if an interrupt may
        have left the engine's parts in disorder, they are built anew first. Graphs that are alive
        keep the old ones.

        Raises:
            ForkedProcessError: this process was forked, and weights are offloaded.
        """
        self._leave_to_parent()
        self.mend()
        if self.weights is not None:
            return self._hooks  # offloaded parameters are on the host: they do not tell the device
        first = next((p for module in self.modules for p in module.parameters()), None)
        # On the meta device nothing is computed, as with `functional_call` and meta parameters.
        if first is not None and home_of(first) not in (self.torch_device, _META):
            device = find_device(self.modules)
            assert device is not None
            before = self.transfers
            self._build(device)
            before.close()
        return self._hooks

    def _leave_to_parent(self) -> None:
        """In a forked child, make parts of its own: a store, its threads, and no records."""
        if self.transfers.gate.is_inherited:
            if self.weights is not None:
                self.weights.check_process()
            self._build(self.torch_device)

    def rest(self, weights: RestingWeights | None) -> None:
        """Note which weights of the model rest outside the device from now on; None: none do."""
        self.weights = weights
        self._hooks.use(weights)

    # ---- called by the hooks on a model's layers ----------------------------------------------

    def begin_forward(self) -> None:
        """Note that a forward of the model begins.

        Raises:
            SavedTensorModifiedError: a layer was recomputed on an accelerator in a step before and
                has given something else.
        """
        self._proofs.warn()
        self._proofs.check_samples(self.transfers.device)
        if self._windows is not None:
            self._windows.begin_forward(self.activations)
        if self.executor is not None:
            self._microbatch = self.executor.next_microbatch()

    def end_forward(self, num_layers: int | None) -> None:
        """Note that the forward has ended.

        Args:
            num_layers: number of layers that it called; None if it was interrupted.
        """
        if self._passes is not None:
            self._passes.end_forward()
        if self._windows is not None:
            self._windows.end_forward(self.activations)
        if num_layers is not None:
            self.placement.num_calls = num_layers
        if self.executor is not None:
            completed = num_layers is not None
            self.executor.end_microbatch(self._microbatch, completed=completed)

    def begin_layer(self, layer: Layer, inputs: Any) -> None:
        """Note that a layer's forward begins with these arguments."""
        self.activations.begin_copies(self.activations.scopes.here.unwritten)
        if self._passes is not None:
            self._passes.begin_forward_of(layer, inputs)
        if self._windows is not None:
            self._windows.begin_forward_of(layer.index, self.activations)
        if self.executor is None:
            self.activations.scopes.begin_layer(layer, offloads=self.placement.offloads(layer))
        else:
            unit = self.executor.begin_unit(Unit(layer.index, self._microbatch))
            self.activations.scopes.begin_layer(layer, offloads=unit.leaves, unit=unit)

    def begin_recording(self, *, is_compiled: bool) -> None:
        """Record the operations of the innermost layer from now on, if it is recomputed.

        It cannot be where its activations are not saved for backward or other code decides what
        becomes of them, such as a checkpoint around the layer. Nor can it be inside a transform of
        `torch.func` or with tangents of forward-mode AD, whose operations would not run again.

        Args:
            is_compiled: whether the layer is compiled.
        """
        scope = self.activations.scopes.current
        layer = None if scope is None else scope.layer
        if scope is None or layer is None or not self.placement.recomputes(layer):
            return
        if not self._hooks.are_on_top() or has_tangents() or transform_level() is not None:
            return
        if is_compiled:
            self._proofs.refuse(layer, COMPILED)
            scope.offloads = True
            return
        is_planned = self.placement.layers is not None
        scope.recorder = Recorder(layer, self._hooks, self._proofs, is_planned=is_planned)
        scope.recorder.begin()

    def end_recording(self) -> None:
        """Note that the forward of the innermost layer has returned, or has raised an error."""
        scope = self.activations.scopes.current
        if scope is not None and scope.recorder is not None:
            recorder, scope.recorder = scope.recorder, None
            recorder.end()

    def end_layer(self, output: Any) -> None:
        """Note that the innermost layer's forward has ended, unless it could not begin."""
        scope = self.activations.scopes.current
        if scope is None or scope.layer is None:
            return
        self.activations.scopes.end_layer()
        self.activations.begin_copies(scope.unwritten)
        layer, unit = scope.layer, scope.unit
        if self._passes is not None:
            self._passes.end_forward_of(layer)
        if self._windows is not None:
            self._windows.end_forward_of(layer.index, self.activations)
        if self.is_traced or any(each is not None for each in (unit, self._passes, self._windows)):
            leaves = tree_leaves(output)
            outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self._watch_outputs(layer, scope.forward, unit, outputs)

    def _watch_outputs(
        self,
        layer: Layer,
        log: ForwardLog,
        unit: UnitRecords | None,
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Watch for the begin of a layer's backward, which is the backward of its outputs."""
        # A graph may outlive the model, and refers only to what works in its backward.
        executor, passes, about = self.executor, self._passes, Subject(layer, log.number)
        account = weakref.ref(self.transfers.account)
        window = self._windows and functools.partial(
            self._windows.begin_backward_of, layer.index, self.activations, log
        )

        def begin(_: object) -> None:
            if unit is not None and executor is not None:
                executor.begin_backward(unit)
            counts = account()
            if passes is not None and counts is not None and counts.passes is passes:
                passes.begin_backward_of(layer.index)
            if counts is not None and counts.recorder is not None:
                counts.meter.had_backward = True
                counts.recorder.begin_backward(about)
            if window is not None:  # last, after what measures the backward
                window()

        watch_nodes(outputs, begin)

    # ---- called by hand-written training loops ------------------------------------------------

    def open_layer(
        self, unit: Unit | None, held: Iterable[torch.Tensor] = ()
    ) -> UnitRecords | None:
        """Begin a block of code that is one layer. Returns None where autograd does not record.

        Args:
            unit: the layer and microbatch; None means the next forward in the schedule's order.
            held: tensors that the caller keeps on the device until the layer's backward anyway.
        """
        hooks = self.hooks()
        if not hooks_are_wanted():
            return None
        self.scheduled.end_given_up_run()
        hooks.begin(held)  # first: the step would be over once the last forward is no more to come
        try:
            records = self.scheduled.begin_unit(unit)
        except BaseException:
            hooks.end()
            raise
        layer = Layer(records.unit.layer, "")
        self.activations.scopes.begin_layer(layer, offloads=records.leaves, unit=records)
        return records

    def close_layer(self, *, interrupted: bool) -> None:
        """Note that the block has ended, normally or by an exception."""
        self.activations.scopes.end_layer()
        self._hooks.end()
        if interrupted:
            self.scheduled.abandon()

    def note_outputs(self, unit: UnitRecords, outputs: Sequence[torch.Tensor]) -> None:
        """Note the tensors that a layer returned."""
        self._watch_outputs(Layer(unit.unit.layer, ""), unit.log, unit, outputs)

    def mend(self) -> None:
        """Put right what an interrupt may have left half done."""
        if self.transfers.is_broken and not self.transfers.gate.is_inherited:
            self._build_after_interrupt()

    def close(self) -> None:
        """Free the store as soon as no graph needs it any more."""
        self.transfers.close()
        if not self.transfers.closed:
            _close_later(weakref.ref(self.transfers))

    def _default_device(self) -> torch.device:
        if self._fallback is not None:
            return self._fallback
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or accelerator.type in _WITHOUT_STREAMS:
            return torch.device("cpu")
        return torch.device(accelerator.type, torch.accelerator.current_device_index())

    def _build_after_interrupt(self) -> None:
        before, device = self.transfers, self.torch_device
        for scope in self.activations.scopes.running.scopes:
            if scope.recorder is not None:
                scope.recorder.end(interrupted=True)
        while self._hooks.pop():  # an interrupted forward has left them behind
            pass
        drop_own_modes()
        before.device.finish_copies()
        self._build(device, is_whole=False)
        if self.weights is not None:
            self.weights.start_anew(self.transfers)
            self._hooks.use(self.weights)
        self.transfers.is_broken = before.is_broken = False
        # What it counts may be wrong now, so its memory is freed with the last graph that needs it
        # at the latest.
        with contextlib.suppress(Exception):
            before.close()

    @property
    def scheduled(self) -> ScheduleExecutor:
        """The executor of the schedule, which there is."""
        assert self.executor is not None, "there is no schedule"
        return self.executor

    def _build(self, torch_device: torch.device, *, is_whole: bool = True) -> None:
        """Build the parts for a device.

        Args:
            torch_device: the device.
            is_whole: whether nothing remains to be done. If something does, or an interrupt comes
                before all parts are there, the next forward builds them again.
        """
        transfers = self._build_transfers(torch_device)
        transfers.is_broken = True  # until all parts belong together
        self.transfers = transfers
        if self._record is not None:
            at_rest = functools.partial(_find_at_rest, weakref.ref(self))
            transfers.account.listener = self._record(transfers, self.modules, at_rest)
        self._bound_transfers()
        self.activations = Activations(self.transfers)
        self.executor = None
        if self.mode is not None:
            self.executor = ScheduleExecutor(self.mode, self.activations)
        index = ParameterIndex(self.modules)
        self._hooks = SavedTensorHooks(self.activations, self.placement, index)
        transfers.is_broken = not is_whole

    def _build_transfers(self, torch_device: torch.device) -> Transfers:
        """Build the transfers between a device and the store.

        Raises:
            PolicyError: the store's name is unknown or does not fit the device, a budget is given
                for a tier that is not used, or copies on the device cannot run beside compute.
        """
        if torch_device.type in _WITHOUT_STREAMS:
            raise PolicyError(
                f"the model is on {torch_device}, for which torch has only one stream, so copies "
                f"cannot run beside compute; move the model to the CPU, from where activations and "
                f'weights can be offloaded to disk: model.to("cpu")'
            )
        bound_bytes = _CPU_INFLIGHT_BYTES if torch_device.type == "cpu" else INFLIGHT_BYTES
        given = self.policy.max_inflight_bytes
        if given is not None:
            bound_bytes = int(given)
        kind, directory = parse_store(self._store)
        device = self._make_device(torch_device)
        store = build_store(device, kind, directory, self._host_limit)
        scales = given is None and self.mode is None
        transfers = Transfers(device, store, bound_bytes, scales=scales, traced=self.is_traced)
        store.on_progress = call_weakly(transfers.poll)
        return transfers


def _find_at_rest(engine: weakref.ref[Engine]) -> frozenset[int]:
    """Return the parameters whose values rest elsewhere, by `id`."""
    alive = engine()
    return frozenset() if alive is None or alive.weights is None else alive.weights.at_rest()


def _close_later(transfers: weakref.ref[Transfers]) -> None:
    """Look from time to time whether the last graph that needs a closed engine has died.

    Nothing else would: no forward or backward of this engine is to come.
    """

    def look() -> bool:
        alive = transfers()
        if alive is None or alive.closed:
            return False
        alive.poll()
        return True

    watch(look, _CLOSING_S, "ebbtide-close")
