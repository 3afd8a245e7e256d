"""Puts device, store, session and hooks together for one model or one callable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ebbtide.devices.accelerator import AcceleratorDevice
from ebbtide.devices.cpu import CpuDevice
from ebbtide.devices.device import AbstractDevice
from ebbtide.errors import PolicyError
from ebbtide.hooks.activations import ActivationHooks
from ebbtide.hooks.layers import LayerModules
from ebbtide.hooks.parameters import ParameterIndex
from ebbtide.hooks.weights import WeightHooks
from ebbtide.policy import ActivationPolicy, WeightPolicy
from ebbtide.runtime.conductor import Conductor
from ebbtide.runtime.ranges import Layer
from ebbtide.runtime.session import Session
from ebbtide.runtime.stats import StepStats
from ebbtide.runtime.units import Following, UnitRecords
from ebbtide.schedule import Action, Direction, Schedule, Unit
from ebbtide.stores.build import build_store, check_for_cpu, parse_store
from ebbtide.stores.disk import DiskStore
from ebbtide.stores.mapped import MappedMemory
from ebbtide.tracing.trace import Trace
from ebbtide.units import parse_size_bytes

_INFLIGHT_BYTES = 256 * 2**20
_CPU_INFLIGHT_BYTES = 64 * 2**20


@final
class Engine:
    """The session and the hooks of one offload, built again when the model has moved.

    Args:
        modules: whose parameters and buffers are not activations; their device is the device.
        policy: what to offload.
        store: where bytes go, as `ebbtide.offload` describes it.
        device: where to compute when there are no modules to tell.
        host_budget: the most host memory to take, in bytes or as text such as ``"24GiB"``.
        traced: whether to record every step.
        following: the schedule that says what moves when; None: what leaves does so at once.

    Attributes:
        following: as given.

    Raises:
        PolicyError: the modules, the device and the store do not fit together.
        ScheduleError: the schedule cannot be run.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        policy: ActivationPolicy,
        store: str,
        device: torch.device | None = None,
        *,
        host_budget: int | str | None = None,
        traced: bool = False,
        following: Following | None = None,
    ) -> None:
        self.following = following
        self._units: dict[Layer, UnitRecords] = {}  # of the forward that runs now
        self._microbatch = 0
        self._modules = modules
        self._host_budget_bytes = (
            None if host_budget is None else parse_size_bytes(host_budget, name="host_budget")
        )
        self._traced = traced
        self._policy = policy
        self._store = store
        self._fallback = device
        self._session, self._hooks = self._build(find_device(modules) or self._default_device())

    @property
    def stats(self) -> StepStats:
        """The last finished step."""
        return self._session.stats

    @property
    def trace(self) -> Trace:
        """What the last finished step did.

        Raises:
            PolicyError: nothing is recorded.
        """
        if not self._traced:
            raise PolicyError(
                "no step was recorded, because recording costs time; ask for it with "
                "ebbtide.offload(model, trace=True)"
            )
        return self._session.trace

    def hooks(self) -> ActivationHooks:
        """The hooks for a forward that begins now."""
        first = next((p for module in self._modules for p in module.parameters()), None)
        if self._hooks.weights is not None:
            return self._hooks  # parameters rest on the host: they do not tell where the model is
        if first is not None and first.device != self._session.device.torch_device:
            device = find_device(self._modules)
            assert device is not None
            session, hooks = self._build(device)
            self._session.close()
            self._session, self._hooks = session, hooks
        return self._hooks

    def offload_weights(
        self, model: nn.Module, layers: LayerModules, policy: WeightPolicy
    ) -> WeightHooks:
        """Let weights of these layers rest on the host from now on.

        Raises:
            PolicyError: they cannot; nothing has been moved.
        """
        device = self._session.device
        on_cpu = isinstance(device, CpuDevice)
        memory = MappedMemory(device, parse_store(self._store)[1]) if on_cpu else None
        weights = WeightHooks(model, layers, policy, device, _INFLIGHT_BYTES, memory=memory)
        self._hooks.weights = weights
        return weights

    @property
    def schedule(self) -> Schedule | None:
        """What moves when, if a schedule says so."""
        return None if self.following is None else self.following.schedule

    @property
    def _conductor(self) -> Conductor:
        conductor = self._session.conductor
        assert conductor is not None, "there is no schedule"
        return conductor

    def begin_forward(self) -> None:
        """A forward of the model begins."""
        if self.following is not None:
            self._units.clear()
            self._microbatch = self._conductor.next_microbatch()

    def end_forward(self, *, completed: bool) -> None:
        """It has ended, or was interrupted."""
        if self.following is not None:
            self._units.clear()
            self._conductor.end_microbatch(self._microbatch, completed=completed)

    def switch(self, offloading: bool, layer: Layer | None) -> None:
        """Say whether what is saved from now on is to leave, and whose it is."""
        self._session.layer = layer
        if self.following is None:
            self._hooks.offloading = offloading
        else:
            records = None if layer is None else self._units[layer]
            self._session.switch_unit(records)
            self._hooks.offloading = records is not None and records.leaves

    def begin_layer(self, layer: Layer) -> None:
        """A layer's forward begins."""
        if self.following is not None:
            unit = Unit(layer.index, self._microbatch)
            self._units[layer] = self._conductor.begin_unit(unit)
        self._session.begin_layer(layer)

    def end_layer(self, layer: Layer, output: Any) -> None:
        """A layer's forward has ended."""
        self._session.end_layer()
        if self._traced or self.following is not None:
            leaves = tree_leaves(output)
            outputs = [x for x in leaves if isinstance(x, torch.Tensor)]
            self._session.note_outputs(layer, self._units.get(layer), outputs)

    # ---- loops written by hand ----------------------------------------------------------------

    @property
    def torch_device(self) -> torch.device:
        """Where the model computes."""
        return self._session.device.torch_device

    def open_layer(
        self, unit: Unit | None, held: Iterable[torch.Tensor] = ()
    ) -> tuple[Layer, UnitRecords] | None:
        """A block begins that is one layer. Returns None where autograd does not record.

        Args:
            unit: which; None: the forward that is next in the order.
            held: tensors that the caller keeps on the device until its backward in any case.
        """
        hooks = self.hooks()
        if not hooks.are_wanted():
            return None
        session = self._session
        records = self._conductor.begin_unit(unit)
        hooks.begin(held)
        session.switch_unit(records)
        layer = Layer(records.unit.layer, "")
        session.layer, hooks.offloading = layer, records.leaves
        session.begin_layer(layer)
        return layer, records

    def close_layer(self, *, interrupted: bool) -> None:
        """The block has ended, or an exception left it."""
        session = self._session
        session.end_layer()
        session.layer = None
        session.switch_unit(None)
        self._hooks.offloading = False
        self._hooks.end()
        if interrupted:
            self._conductor.abandon()

    def note_outputs(
        self, layer: Layer, records: UnitRecords, outputs: Sequence[torch.Tensor]
    ) -> None:
        """These are what a layer gave."""
        self._session.note_outputs(layer, records, outputs)

    def begin_backward(self, unit: Unit, direction: Direction) -> None:
        """The backward of a unit of the current round begins."""
        self._conductor.begin_backward_of(unit, direction)

    def end_backward(self) -> None:
        """The backward that began last has ended; for the trace alone."""
        self._conductor.end_backward()

    def abandon_round(self) -> None:
        """Passes that the current round still waits for will not come: another one begins."""
        self._conductor.abandon()

    def act(self, action: Action) -> None:
        """Move what a unit saved, where nothing moves by itself.

        Raises:
            ScheduleError: it is not its turn.
        """
        self._conductor.act(action)

    def close(self) -> None:
        """Give the store back when the last graph that needs it is gone."""
        self._session.close()

    def _default_device(self) -> torch.device:
        if self._fallback is not None:
            return self._fallback
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return torch.device("cpu")
        return torch.device(accelerator.type, torch.accelerator.current_device_index())

    def _build(self, torch_device: torch.device) -> tuple[Session, ActivationHooks]:
        session = build_session(
            torch_device,
            self._store,
            self._policy,
            host_budget_bytes=self._host_budget_bytes,
            traced=self._traced,
            following=self.following,
        )
        parameters = ParameterIndex(self._modules)
        policy = self._policy
        hooks = ActivationHooks(session, parameters, int(policy.min_bytes), rebuild=policy.rebuild)
        return session, hooks


def find_device(modules: Sequence[nn.Module]) -> torch.device | None:
    """The one device of all parameters, or None when there are no parameters.

    Raises:
        PolicyError: they are on several devices, or on `meta`.
    """
    homes: dict[torch.device, str] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            homes.setdefault(parameter.device, name)
    if len(homes) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in homes.items())
        raise PolicyError(
            f"the model is on {len(homes)} devices ({places}); move it to one with "
            f"model.to(device), or offload the parts on each device separately"
        )
    device = next(iter(homes), None)
    if device is not None and device.type == "meta":
        raise PolicyError(
            "the model's parameters are on the meta device and hold no values; materialise them "
            "first, for example with model.to_empty(device=...) and by loading a state_dict"
        )
    return device


def build_session(
    torch_device: torch.device,
    store: str,
    policy: ActivationPolicy,
    *,
    host_budget_bytes: int | None = None,
    traced: bool = False,
    following: Following | None = None,
) -> Session:
    """A session for a device, with the store that was asked for.

    Raises:
        PolicyError: the store's name is unknown or does not fit the device, or there is a budget
            for a tier that is not used.
    """
    on_cpu = torch_device.type == "cpu"
    bound_bytes = _CPU_INFLIGHT_BYTES if on_cpu else _INFLIGHT_BYTES
    if policy.max_inflight_bytes is not None:
        bound_bytes = int(policy.max_inflight_bytes)
    kind, directory = parse_store(store)
    if on_cpu:
        check_for_cpu(kind, host_budget_bytes)
        disk = DiskStore(directory)
        session = Session(CpuDevice(), disk, bound_bytes, traced=traced, following=following)
        disk.on_progress = session.weak_poll()
        return session
    device: AbstractDevice = AcceleratorDevice(torch_device)
    chosen = build_store(device, kind, directory, host_budget_bytes)
    return Session(device, chosen, bound_bytes, traced=traced, following=following)
