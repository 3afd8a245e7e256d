"""Losses with derivatives of the model in them, as in physics-informed training."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide import ActivationPolicy, PolicyError, WeightPolicy
from plainly import (
    ACTIVATIONS,
    MAPPED_WEIGHTS,
    Block,
    assert_same_bits,
    on_simulated_device,
    training,
)

POLICY = ActivationPolicy(min_bytes=1, rebuild=False)
ROWS = 256


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    )


def train(model: nn.Module, steps: int, handle: ebbtide.OffloadHandle | None) -> list[float]:
    """As a script does it: what a step makes stays in its variables until the next one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        x = torch.linspace(0, 3, ROWS)[:, None].requires_grad_()
        optimizer.zero_grad()
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        edge = model(torch.zeros(1, 1))
        loss = (curvature + u).square().mean() + (edge - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if handle is not None and step:
            assert handle.stats.num_saved > 0, "no step has ended"
    return losses


def test_the_numbers_are_the_same_and_steps_end() -> None:
    expected = train(build(), 5, None)
    model = build()
    with ebbtide.offload(model, activations=POLICY) as handle:
        assert train(model, 5, handle) == expected


def test_what_a_second_backward_needs_is_kept_from_the_next_step_on() -> None:
    model = build()
    with ebbtide.offload(model, activations=POLICY) as handle:
        train(model, 4, handle)
        stats = handle.stats
    assert stats.kept_bytes > 0
    assert stats.offloaded_bytes < stats.kept_bytes / 10, "only what the first backward never read"


def test_a_step_is_both_forwards_of_one_loss() -> None:
    """The first forward was read by a backward, but not by the one that ends the step."""
    model = build()
    with ebbtide.offload(model, activations=POLICY) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, 3, handle)
        microbatches = {each.microbatch for each in handle.inspect().storages}
    assert microbatches == {0, 1}


def test_forwards_in_flight_are_one_step() -> None:
    model = build()
    x = torch.linspace(0, 3, ROWS)[:, None]
    with ebbtide.offload(model, activations=POLICY) as handle:
        model(x).sum().backward()
        one = handle.stats.num_saved
        first = model(x).sum()
        second = model(x).sum()
        first.backward()
        third = model(x).sum()  # the second has had no backward
        second.backward()
        third.backward()
        assert handle.stats.num_saved == 3 * one


# ---- Functions whose backward differentiates a module itself ------------------------------------


class Adjoint(torch.autograd.Function):
    """As torchdiffeq's `odeint_adjoint`: backward calls the module again, for saved weights."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x, *weights)
        return module(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.module(x)
        found = torch.autograd.grad(y, (x, *weights), *grads, allow_unused=True)
        return None, *found


def solve(block: Block, x: Tensor) -> Tensor:
    return block.second(Adjoint.apply(block.first, x, *block.first.parameters()).sin())


WITHOUT_DEVICE_WEIGHTS = ACTIVATIONS | MAPPED_WEIGHTS


@pytest.mark.parametrize("how", WITHOUT_DEVICE_WEIGHTS)
def test_a_backward_that_differentiates_a_module_itself(how: str) -> None:
    assert_same_bits(training(solve), WITHOUT_DEVICE_WEIGHTS[how])


@pytest.mark.parametrize("mode", ["offload", "recompute"])
def test_weights_that_come_and_go_are_refused_in_it(mode: str) -> None:
    """Their gradients would be zero: the saved weights are of the graph of the forward."""
    policy = ActivationPolicy(min_bytes=1, mode=mode)
    offload = on_simulated_device(weights=WeightPolicy(), activations=policy)
    with pytest.raises(PolicyError):
        training(solve)(offload)
