"""Runs a training program as it is and with every kind of offload, and compares the bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ebbtide
from ebbtide import ActivationPolicy, OffloadHandle, WeightPolicy
from ebbtide.devices import SimulatedDevice
from ebbtide.stores import PinnedStore
from loops import on_device

WIDTH = 16
ROWS = 8

Offload = Callable[[nn.Module], contextlib.AbstractContextManager[OffloadHandle | None]]
Program = Callable[[Offload], Sequence[Tensor | None]]
"""Trains in whatever way, around it the offload that it is given, and returns all results."""
Compute = Callable[[Any, Tensor], Tensor]


class Block(nn.Module):
    """Two linear layers, used by the function that the test gives."""

    def __init__(self, compute: Compute | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        if self.compute is not None:
            return self.compute(self, x)
        return x + self.second(F.gelu(self.first(x)))


class Net(nn.Module):
    def __init__(self, compute: Compute | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(compute) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(3))


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def train(model: nn.Module, offload: Offload, x: Tensor | None = None) -> list[Tensor | None]:
    """Two steps of plain gradient descent."""
    results: list[Tensor | None] = []
    with offload(model):
        for _ in range(2):
            loss = model(batch() if x is None else x).sum()
            loss.backward()
            results.append(loss.detach())
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p.sub_(p.grad.to_dense() if p.grad.is_sparse else p.grad, alpha=0.01)
        return results + gradients(model)


def training(compute: Compute) -> Program:
    """A program that trains three blocks which compute this."""

    def run(offload: Offload) -> list[Tensor | None]:
        torch.manual_seed(0)
        return train(Net(compute), offload)

    return run


@contextlib.contextmanager
def not_offloaded(model: nn.Module) -> Iterator[None]:  # noqa: ARG001
    yield


def on_cpu(**how: Any) -> Offload:
    return lambda model: ebbtide.offload(model, **how)


def on_simulated_device(**how: Any) -> Offload:
    """Offload as to a device with memory of its own, so that weights really come and go."""

    @contextlib.contextmanager
    def offload(model: nn.Module) -> Iterator[OffloadHandle]:
        device = SimulatedDevice(0, eagerness=0.1)
        with on_device(device, lambda: PinnedStore(device, slab_bytes=2**16)):
            handle = ebbtide.offload(model, **how)
        with handle:
            yield handle

    return offload


EVERYTHING = ActivationPolicy(min_bytes=1, rebuild=False)
REBUILT = ActivationPolicy(min_bytes=1)
ONLY_REBUILT = ActivationPolicy(min_bytes=1, num_layers=0)
RECOMPUTED = ActivationPolicy(min_bytes=1, mode="recompute+offload")

ACTIVATIONS = {
    "offload": on_cpu(activations=EVERYTHING),
    "rebuild+offload": on_cpu(activations=REBUILT),
    "rebuild": on_cpu(activations=ONLY_REBUILT),
    "recompute": on_cpu(activations=RECOMPUTED),
    "device": on_simulated_device(activations=REBUILT),
}
MAPPED_WEIGHTS = {
    "weights": on_cpu(weights=WeightPolicy()),
    "weights+rebuild+offload": on_cpu(weights=WeightPolicy(), activations=REBUILT),
}
DEVICE_WEIGHTS = {
    "device weights": on_simulated_device(weights=WeightPolicy()),
    "device weights+rebuild+offload": on_simulated_device(
        weights=WeightPolicy(), activations=REBUILT
    ),
}
EVERY_WAY = ACTIVATIONS | MAPPED_WEIGHTS | DEVICE_WEIGHTS


def assert_same_bits(program: Program, offload: Offload) -> None:
    """Check that a program gives the same results with an offload and without."""
    expected, got = program(not_offloaded), program(offload)
    assert len(got) == len(expected)
    for mine, plain in zip(got, expected, strict=True):
        assert (mine is None) == (plain is None)
        if mine is not None and plain is not None:
            mine, plain = _dense(mine), _dense(plain)
            assert mine.dtype == plain.dtype
            assert torch.equal(mine, plain)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
