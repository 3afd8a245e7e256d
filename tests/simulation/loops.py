"""Loops written by hand, on the simulated device and in virtual time."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import ebbtide
from ebbtide.devices import AbstractDevice, SimulatedDevice
from ebbtide.runtime.transfers import Transfers
from ebbtide.stores import AbstractStore

SIZE_BYTES = 64 * 1024  # what one layer saves
FORWARD_S = 1e-3
BACKWARD_S = 2e-3


class Work(torch.autograd.Function):
    """Saves its input, and takes its time."""

    @staticmethod
    def forward(ctx, x, device):
        ctx.save_for_backward(x)
        ctx.device = device
        out = x.sin()
        if device is not None:
            device.compute(FORWARD_S)
        return out

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        result = gradient * x.cos()
        del x
        if ctx.device is not None:
            ctx.device.compute(BACKWARD_S)
        return result, None


@contextlib.contextmanager
def on_device(
    device: AbstractDevice, make_store: Callable[[], AbstractStore], bound_bytes: int = 2**20
) -> Iterator[list[Transfers]]:
    """What is offloaded within uses this device. Gives the transfers that were built."""
    built: list[Transfers] = []

    def build_transfers(engine: Any, _: torch.device) -> Transfers:
        built.append(Transfers(device, make_store(), bound_bytes, traced=engine.is_traced))
        return built[-1]

    with mock.patch("ebbtide.runtime.engine.Engine._build_transfers", build_transfers):
        yield built


def run_layers(
    session: ebbtide.OffloadSession | None, device: SimulatedDevice | None, num_layers: int
) -> Tensor:
    """One step over a chain of layers. Returns the gradient of its input."""
    torch.manual_seed(0)
    x = torch.randn(SIZE_BYTES // 4, requires_grad=True)
    h = x * 1.0
    for _ in range(num_layers):
        if session is None:
            h = Work.apply(h, device)
        else:
            with session.layer():
                h = Work.apply(h, device)
            h = session.sync(h)
    h.backward(torch.ones_like(h))
    assert x.grad is not None
    return x.grad


def run_microbatches(
    session: ebbtide.OffloadSession | None, device: SimulatedDevice | None, order: str
) -> Tensor:
    """One layer on several microbatches, which are the layers of the order. Gives all gradients."""
    torch.manual_seed(0)
    passes = order.split()
    inputs = {
        name[1:]: torch.randn(SIZE_BYTES // 4, requires_grad=True)
        for name in passes
        if name[0] == "F"
    }
    outputs: dict[str, Tensor] = {}
    for name in passes:
        number = name[1:]
        if name[0] == "B":
            output = outputs.pop(number)
            output.backward(torch.ones_like(output))
            del output
        elif session is None:
            outputs[number] = Work.apply(inputs[number] * 1.0, device)
        else:
            with session.layer():
                output = Work.apply(inputs[number] * 1.0, device)
            outputs[number] = session.sync(output)
            del output
    return torch.stack([x.grad for x in inputs.values() if x.grad is not None])
