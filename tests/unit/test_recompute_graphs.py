"""Recomputed layers in graphs and calls of all kinds: bits as in plain training."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import ebbtide
from recompute_bench import (
    MODES,
    ROWS,
    WIDTH,
    Block,
    Dropout,
    Stack,
    compare,
    draw,
    policy,
    stack,
    step,
)

each_mode = pytest.mark.parametrize("mode", MODES)


# Calls


@each_mode
def test_a_module_that_is_called_twice(mode: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Dropout() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in [*self.layers, *self.layers]:
                x = layer(x)
            return x

    stats = compare(Twice, policy(mode, num_layers=3), draw, layers=["layers.*"])
    assert stats.recomputed_bytes > 0


@each_mode
def test_nested_layers_are_recomputed_with_the_outer_one(mode: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Dropout()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).cos()

    compare(
        lambda: Stack(nn.ModuleList(Outer() for _ in range(3))),
        policy(mode),
        draw,
        layers=["layers.*", "layers.*.inner"],
    )


@each_mode
def test_layers_in_and_around_checkpoints_of_the_user(mode: str) -> None:
    def run(layer: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False)

    class Inside(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: self.linear(x).sin(), x, use_reentrant=False).cos()

    compare(lambda: stack(3, run), policy(mode), draw)
    compare(lambda: Stack(nn.ModuleList(Inside() for _ in range(3))), policy(mode), draw)


@each_mode
def test_nothing_is_recomputed_where_autograd_records_nothing(mode: str) -> None:
    model = stack(3)
    with ebbtide.offload(model, activations=policy(mode)) as handle:
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                model(torch.randn(ROWS, WIDTH))
        assert handle.stats.num_saved == 0
        step(handle, model)  # verifies
        assert step(handle, model).recomputed_bytes > 0
        model.eval()
        step(handle, model)
        assert step(handle, model).recomputed_bytes > 0, "evaluation mode with gradients is a step"


@each_mode
def test_frozen_layers(mode: str) -> None:
    """Layers 0 and 1 of four save nothing: neither their weights nor their inputs need gradients.

    Layer 3 is frozen too, and needs its sine's argument for the gradient of its input. Inputs of
    layers that save nothing are not saved, either.
    """

    def build() -> nn.Module:
        model = stack(4)
        for number in (0, 1, 3):
            model.layers[number].requires_grad_(False)
        return model

    stats = compare(build, policy(mode), draw)
    assert stats.recomputed_bytes == 2 * ROWS * WIDTH * 4
    # The inputs of layers 2 and 3, and what the stack saves itself.
    assert stats.kept_bytes + stats.offloaded_bytes == 3 * ROWS * WIDTH * 4


@each_mode
def test_gradients_of_inputs(mode: str) -> None:
    compare(lambda: stack(3), policy(mode), lambda: (draw()[0].requires_grad_(),))


# Graphs


def backward_retained(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
    value = loss(model, inputs)
    value.backward(retain_graph=True)
    value.backward()
    return value


def backward_twice(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
    """A penalty on the gradient: the second backward needs what the first one recomputed."""
    value = loss(model, inputs)
    weights = list(model.parameters())
    gradients = torch.autograd.grad(value, weights, create_graph=True)
    (value + sum(gradient.square().sum() for gradient in gradients)).backward()
    return value


def backward_accumulated(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
    values = [loss(model, [number * inputs[0]]) for number in (1, 2)]
    for value in values:
        value.backward()
    last = loss(model, inputs)
    last.backward()
    return last


def backward_interleaved(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
    """A graph that is dropped, one that goes through a part only, and forwards in between."""
    loss(model, inputs)
    first, second = loss(model, inputs), loss(model, [inputs[0].cos()])
    torch.autograd.grad(second, [model.layers[-1].linear.weight], retain_graph=True)
    first.backward()
    second.backward()
    return first


@each_mode
@pytest.mark.parametrize(
    "backward", [backward_retained, backward_twice, backward_accumulated, backward_interleaved]
)
def test_graphs(backward: Any, mode: str) -> None:
    with warnings.catch_warnings():  # create_graph=True with offloading is warned of
        warnings.filterwarnings("ignore", "a backward with create_graph=True", RuntimeWarning)
        compare(
            lambda: Stack(nn.ModuleList(Dropout() for _ in range(3))),
            policy(mode),
            draw,
            backward=backward,
        )


@each_mode
def test_a_derivative_inside_a_layer(mode: str) -> None:
    """A layer that computes the gradient of a part of it, with a graph, in its own forward."""

    class Physics(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                y = x if x.requires_grad else x.detach().requires_grad_()
                (slope,) = torch.autograd.grad(self.linear(y).sin().sum(), y, create_graph=True)
            return slope.tanh() + x

    compare(lambda: Stack(nn.ModuleList(Physics() for _ in range(2))), policy(mode), draw)


# Where other code decides


def test_forward_mode_and_transforms_run_the_forward_once() -> None:
    """Tangents and transforms of torch.func are not known to a second forward."""
    model = stack(2)
    x, direction = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)

    def weigh(x: Tensor) -> Tensor:
        return model(x).sum()

    def both() -> tuple[Tensor, ...]:
        model.zero_grad()
        with forward_ad.dual_level():
            dual = model(forward_ad.make_dual(x, direction))
            tangent = forward_ad.unpack_dual(dual).tangent
            tangent.sum().backward()
        return (
            tangent.detach(),
            model.layers[0].linear.weight.grad.clone(),
            torch.func.grad(weigh)(x),
            *torch.autograd.grad(torch.vmap(model)(x[None]).sum(), [*model.parameters()]),
        )

    expected = both()
    with ebbtide.offload(model, activations=policy("recompute"), layers=["layers.?"]) as handle:
        assert all(map(torch.equal, both(), expected))
        step(handle, model)  # verifies
        assert step(handle, model).recomputed_bytes > 0


def test_hooks_of_other_code_get_what_a_layer_saves() -> None:
    model = stack(2)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    class Hooked(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return model.layers[1](x)

    outer = Stack(nn.ModuleList([model.layers[0], Hooked()]))
    with ebbtide.offload(outer, activations=policy("recompute"), layers=["layers.0"]) as handle:
        step(handle, outer)  # verifies
        saved.clear()
        assert step(handle, outer).recomputed_bytes > 0
        assert len(saved) == 3, "a linear map's input and weight, and the sine's argument"


def test_an_offloaded_forward_inside_a_recomputed_layer_steps_aside() -> None:
    class Wraps(Block):
        def __init__(self) -> None:
            super().__init__()
            self.wrapped = ebbtide.wrap_forward_with_offload(self.inner)

        def inner(self, x: Tensor) -> Tensor:
            return self.linear(x).sin()

        def forward(self, x: Tensor) -> Tensor:
            return self.wrapped(x)

    model = Stack(nn.ModuleList([Wraps(), Wraps()]))
    with (
        ebbtide.offload(model, activations=policy("recompute"), layers=["layers.?"]) as handle,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        assert step(handle, model).recomputed_bytes == 2 * ROWS * WIDTH * 4
        assert model.layers[0].wrapped.handle.stats.num_saved == 0
    assert not any("ebbtide: other-hooks" in str(each.message) for each in said)


def test_layers_inside_another_offloaded_callable_belong_to_that_one() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Dropout() for _ in range(2))
            self.wrapped = ebbtide.wrap_forward_with_offload(self.run, device="cpu")

        def run(self, x: Tensor) -> Tensor:
            return self.layers[0](x)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.wrapped(x))

    model = Inside()
    with ebbtide.offload(model, activations=policy("recompute"), layers=["layers.?"]) as handle:
        step(handle, model)  # verifies
        assert step(handle, model).recomputed_bytes > 0
        recomputed = [each.layer.name for each in handle.inspect().recomputed]
    assert recomputed == ["layers.1"]
