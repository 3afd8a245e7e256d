"""Runs a program on the simulated device and checks what must hold after it."""

import gc
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from ebbtide.devices.simulated import SimulatedDevice
from ebbtide.hooks.activations import ActivationHooks
from ebbtide.hooks.parameters import ParameterIndex
from ebbtide.runtime.session import Session
from ebbtide.stores.pinned import PinnedStore
from programs import Outcome, Program

KIB = 1024


class Simulation:
    """One session on a simulated device, whose bounds and eagerness follow from the seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.bound_bytes = (0, 4 * KIB, 16 * KIB, 256 * KIB)[seed % 4]
        self.device = SimulatedDevice(seed, eagerness=(0.0, 0.1, 0.6)[seed % 3])
        self.store = PinnedStore(self.device, slab_bytes=32 * KIB)
        self.session = Session(self.device, self.store, "host", self.bound_bytes)
        self.hooks = ActivationHooks(self.session, ParameterIndex([]), min_bytes=512)
        self._backward_stream = seed % 5 == 0

    def forward(self, function: Callable[[], Tensor]) -> Tensor:
        """Run a forward with hooks; what comes after it may run on another compute stream."""
        began = self.hooks.begin()
        self.device.current = 0
        try:
            return function()
        finally:
            if began:
                self.hooks.end()
            self.device.current = int(self._backward_stream)

    def switch(self, offloading: bool) -> None:
        self.hooks.offloading = offloading

    def check_at_rest(self) -> None:
        """Nothing is under way, held or stored any more."""
        gc.collect()  # tracebacks of programs that raised
        if self.seed % 2:
            self.session.close()  # with copies still under way
            assert not self.session._offloading, "memory is held after close"
        self.device.finish_copies()
        self.session.poll()
        session = self.session
        assert session._live == 0
        assert not session._records
        assert not session._offloading
        assert session._offloading_bytes == 0
        assert not session._reloaded
        assert session._reloaded_bytes == 0
        assert session._kept_bytes == 0
        assert session._stored_bytes == 0
        assert not [held for held in session._abandoned if not held[1].query()]
        session._abandoned.clear()
        assert self.store.used_bytes == 0
        assert self.device.allocated_bytes() == 0


def simulate(seed: int) -> tuple[Outcome, Outcome, Simulation]:
    """The outcome of a seed's program plainly, and offloaded on the simulated device."""
    plain = Program(seed).run(lambda function: function())
    simulation = Simulation(seed)
    offloaded = Program(seed, simulation.switch).run(simulation.forward)
    return plain, offloaded, simulation


def check(seed: int) -> Simulation:
    """Simulate a seed and check everything; the message of a failure names the seed."""
    try:
        plain, offloaded, simulation = simulate(seed)
        assert offloaded.errors == plain.errors
        assert len(offloaded.tensors) == len(plain.tensors)
        for got, expected in zip(offloaded.tensors, plain.tensors, strict=True):
            same = torch.equal(_bits(got), _bits(expected))
            assert same, "numbers differ from plain autograd"
        if set(plain.errors) <= {"interrupted forward"} or not torch_leaks(seed):
            simulation.check_at_rest()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return simulation


class _Held:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version

    def restore(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError("modified in place")
        return self.tensor


def torch_leaks(seed: int) -> bool:
    """Whether torch itself never lets go of a program's graph, with hooks that only hold.

    It can when a backward raises inside the backward of a reentrant checkpoint.
    """
    alive: weakref.WeakSet[_Held] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Held:
        held = _Held(tensor)
        alive.add(held)
        return held

    def forward(function: Callable[[], Tensor]) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, _Held.restore):
            return function()

    Program(seed).run(forward)
    gc.collect()
    return bool(alive)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
