"""The engine without a model: hooks, activations and transfers over a device and a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ebbtide
from ebbtide import ActivationPolicy, Inspection
from ebbtide.devices import AbstractDevice
from ebbtide.observe.inspection import InFlight, inspect
from ebbtide.observe.recording import Recording
from ebbtide.runtime.activations import Activations
from ebbtide.runtime.parameter_index import ParameterIndex
from ebbtide.runtime.rebuild import Placement, Plan, PlannedLayers
from ebbtide.runtime.saved_tensors import SavedTensorHooks
from ebbtide.runtime.transfers import Transfers
from ebbtide.stores import AbstractStore


class EngineBench:
    """Runs functions whose saved tensors are offloaded.

    Args:
        device: where they compute.
        store: where the bytes go.
        bound_bytes: on bytes in flight.
        policy: what leaves; None: everything, and nothing is rebuilt.
        plan: decisions for single storages.
        traced: whether to record every step.
        scales: whether the bound scales with what a step moves.
        parameters: what is not an activation.
    """

    def __init__(
        self,
        device: AbstractDevice,
        store: AbstractStore,
        bound_bytes: int,
        policy: ActivationPolicy | None = None,
        *,
        plan: Plan | None = None,
        traced: bool = False,
        scales: bool = False,
        parameters: ParameterIndex | None = None,
    ) -> None:
        self.device = device
        self.store = store
        self.transfers = Transfers(device, store, bound_bytes, scales=scales, traced=traced)
        self.recording = self.transfers.account.listener = Recording(device)
        self.activations = Activations(self.transfers)
        policy = policy or ActivationPolicy(min_bytes=1, rebuild=False)
        placement = Placement(policy)
        if plan is not None:
            none, outside = frozenset[int](), not placement.offloads(None)
            placement.follow(PlannedLayers(plan, none, none, outside, rebuilds=policy.rebuild))
        self.hooks = SavedTensorHooks(self.activations, placement, parameters or ParameterIndex([]))

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function with the hooks on."""
        began = self.hooks.begin()
        try:
            return function(*args)
        finally:
            if began:
                self.hooks.end()

    def switch(self, offloading: bool) -> None:
        """Whether what is saved from now on leaves. Called within `run`."""
        self.activations.scopes.current.offloads = offloading

    @property
    def stats(self) -> ebbtide.StepStats:
        self.transfers.poll()
        return self.transfers.account.stats

    def inspect(self) -> Inspection:
        return inspect(self.activations)

    @property
    def in_flight(self) -> InFlight:
        return self.inspect().in_flight

    def close(self) -> None:
        self.transfers.close()
