"""Programs for guards that only the software accelerator can show to be missing.

The simulated device has no streams of the program's own, and kernels there are never late.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import ebbtide
import softdevice
from soft_bench import LONG, on
from soft_programs import running

WIDTH = 32


def check_late_reads(seed: int, order: str = "threads") -> None:
    """Read what rests on the host on a stream of one's own, let go of it, and detach."""
    with running("late reads", seed, order):
        draw = random.Random(seed)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(4)))
        # Then autograd gets the page-locked memory itself, because nobody else refers to it.
        early = ebbtide.ActivationPolicy(num_layers=0, rebuild=False, max_inflight_bytes=0)
        handle = ebbtide.offload(model, activations=early, weights=ebbtide.WeightPolicy())
        model(torch.ones(4, WIDTH)).square().mean().backward()
        found: list[Tensor] = []
        expected: list[Tensor] = []
        stream = torch.Stream(device="softdevice")
        for values in draw.sample((_weights, _gradients), draw.randint(1, 2)):
            at_rest = values(model)
            expected += [value.clone() for value in at_rest]
            with on(stream):
                softdevice.sleep(LONG)
                found += [value.to("softdevice", non_blocking=True) for value in at_rest]
            del at_rest
        model.zero_grad()
        handle.detach()
        stream.synchronize()
        for got, wanted in zip(found, expected, strict=True):
            assert torch.equal(got.cpu(), wanted), "what rested on the host was read too late"


def _weights(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


class _Block(nn.Module):
    """Two biases that get one gradient, and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.first = nn.Parameter(torch.randn(WIDTH))
        self.second = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() + self.first + self.second


def check_two_gradients(seed: int, order: str = "threads") -> None:
    """After detach, one of autograd's threads adds a loss's gradients, another a penalty's."""
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with running("two gradients", seed, order):
            torch.manual_seed(seed)
            plain = nn.Sequential(*(_Block() for _ in range(4)))
            mine = copy.deepcopy(plain)
            x = torch.randn(8, WIDTH)
            with ebbtide.offload(mine, layers=list(mine), weights=ebbtide.WeightPolicy()):
                loss = mine(x).square().mean() + _penalty(mine)
            for _ in range(3):
                (plain(x).square().mean() + _penalty(plain)).backward()
                loss.backward(retain_graph=True)
            _assert_close(_gradients(mine), _gradients(plain))
    finally:
        sys.setswitchinterval(switch_s)


def _penalty(model: nn.Module) -> Tensor:
    squares = [p.square().sum().to("softdevice") for p in model.parameters()]
    return torch.stack(squares).sum()


def _assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got.cpu(), wanted.cpu())
