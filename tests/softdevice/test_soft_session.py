"""A session whose loop moves the layers itself, on a device that is behind the host."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import ebbtide
import softdevice
from soft_bench import PORTFOLIO

WIDTH = 64


def _gradients(model: nn.Module) -> list[Tensor | None]:
    found = [None if p.grad is None else p.grad.cpu() for p in model.parameters()]
    model.zero_grad()
    return found


def test_a_forward_that_skips_layers_is_over_with_its_backward(device: torch.device) -> None:
    for order in PORTFOLIO:
        softdevice.choose_order(order)
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        layers.to(device)
        session = ebbtide.OffloadSession(
            schedule="manual",
            model_layers=4,
            device=device,
            activations=ebbtide.ActivationPolicy(min_bytes=1),
        )
        for count in (4, 3, 2, 4, 1, 4):
            x = begin = torch.randn(16, WIDTH).to(device)
            for layer in layers[:count]:
                x = layer(x)
            x.square().mean().backward()
            expected = _gradients(layers)
            x = begin
            for number, layer in enumerate(layers[:count]):
                with session.layer():
                    x = layer(x)
                x = session.sync(x)
                if number == 0:
                    session.start_offload(0)
                    session.release(0)
            session.start_reload(0)
            x.square().mean().backward()
            for one, other in zip(_gradients(layers), expected, strict=True):
                assert (one is None) == (other is None), order
                assert one is None or other is None or torch.equal(one, other), order
        session.close()


def test_a_device_without_an_index_is_the_current_one(device: torch.device) -> None:
    everything = ebbtide.ActivationPolicy(min_bytes=1, rebuild=False)
    layer = nn.Linear(WIDTH, WIDTH).to(device)
    x = torch.randn(16, WIDTH).to(device)
    session = ebbtide.OffloadSession(
        num_layers=1, model_layers=2, device=device.type, activations=everything
    )
    output = x
    for _ in range(2):
        with session.layer():
            output = layer(output)
        output = session.sync(output)
    output.sum().backward()
    assert session.stats.offloaded_bytes > 0
    session.close()
    wrapped = ebbtide.wrap_forward_with_offload(
        lambda x: x.sin().sin(), device=device.type, activations=everything
    )
    wrapped(x.requires_grad_()).sum().backward()
    assert wrapped.handle.stats.offloaded_bytes > 0
