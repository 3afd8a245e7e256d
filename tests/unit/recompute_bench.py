"""Models for the tests of recomputed layers, and the comparison with plain training."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableSequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import ebbtide
from ebbtide import ActivationPolicy, StepStats
from waiting import wait_until

MODES = ("recompute", "recompute+offload")
ROWS, WIDTH = 64, 256
S = ROWS * WIDTH * 4  # bytes of one activation: 64 KiB


class Layer(nn.Module):
    """Saves two activations: its input, for the weight's gradient, and the sine's argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()


class Block(nn.Module):
    """A linear map, and what a test makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Dropout(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.3, self.training).sin() * torch.rand(WIDTH)


class Stack(nn.Module):
    """Layers, and outside of them one more saved activation: the last sine's argument.

    Args:
        layers: the layers.
        run_layer: calls a layer.
    """

    def __init__(
        self, layers: nn.ModuleList, run_layer: Callable[[nn.Module, Any], Any] | None = None
    ) -> None:
        super().__init__()
        self.layers = layers
        self.run_layer = run_layer

    def forward(self, x: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.run_layer is None else self.run_layer(layer, x)
        return x.sin()


def stack(num_layers: int, run_layer: Callable[[nn.Module, Any], Any] | None = None) -> Stack:
    return Stack(nn.ModuleList(Layer() for _ in range(num_layers)), run_layer)


def draw() -> tuple[Tensor]:
    return (torch.randn(ROWS, WIDTH),)


def policy(mode: str, **options: Any) -> ActivationPolicy:
    return ActivationPolicy(mode=mode, min_bytes=1, rebuild=False, **options)


def step(handle: ebbtide.OffloadHandle, model: nn.Module) -> StepStats:
    model(torch.randn(ROWS, WIDTH)).sum().backward()
    return handle.stats


class Calls(MutableSequence[int]):
    """What a second forward adds to this list stays there.

    The class says that it is one of torch, and of objects of torch nobody knows what they hold.
    """

    __module__ = "torch"

    def __init__(self, *numbers: int) -> None:
        self._numbers = [*numbers]

    def __getitem__(self, index: Any) -> Any:
        return self._numbers[index]

    def __setitem__(self, index: Any, number: Any) -> None:
        self._numbers[index] = number

    def __delitem__(self, index: Any) -> None:
        del self._numbers[index]

    def __len__(self) -> int:
        return len(self._numbers)

    def insert(self, index: int, value: int) -> None:
        self._numbers.insert(index, value)

    def __eq__(self, other: object) -> bool:
        return self._numbers == other


def calls_of(model: Stack) -> Calls:
    """Return a list to which the number of each layer is added when its linear map is called."""
    calls = Calls()
    for number, layer in enumerate(model.layers):
        inner = next(layer.children())
        inner.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    return calls


Loss = Callable[[nn.Module, Any], Tensor]


def squares(model: nn.Module, inputs: Any) -> Tensor:
    tensors = [each for each in tree_leaves(model(*inputs)) if isinstance(each, Tensor)]
    return torch.stack([each.float().square().mean() for each in tensors]).sum()


def train(
    model: nn.Module,
    draw_inputs: Callable[[], Any],
    num_steps: int,
    backward: Callable[[nn.Module, Any, Loss], Tensor] | None = None,
) -> list[Tensor]:
    """Train, and return the losses, the gradients of each step, and what the model ends with."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    torch.manual_seed(1)
    taken: list[Tensor] = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        inputs = draw_inputs()
        if backward is None:
            loss = squares(model, inputs)
            loss.backward()
        else:
            loss = backward(model, inputs, squares)
        given = [each for each in tree_leaves(inputs) if isinstance(each, Tensor)]
        gradients = [each.grad for each in [*trained, *given] if each.grad is not None]
        taken += [loss.detach().clone(), *[gradient.clone() for gradient in gradients]]
        optimizer.step()
    taken += [*model.parameters(), *model.buffers(), torch.get_rng_state()]
    return [each.detach().clone() for each in taken]


def compare(
    build: Callable[[], nn.Module],
    activations: ActivationPolicy,
    draw_inputs: Callable[[], Any],
    num_steps: int = 3,
    *,
    backward: Callable[[nn.Module, Any, Loss], Tensor] | None = None,
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    **offload: Any,
) -> StepStats:
    """Train plainly and with recomputed layers, and compare every bit.

    Args:
        build: makes the model.
        activations: the policy.
        draw_inputs: draws the inputs of a step.
        num_steps: number of steps.
        backward: runs forward and backward, and returns the loss; None for one of each.
        prepare: what is done to the model after it was offloaded.
        **offload: other arguments of `ebbtide.offload`.

    Returns:
        The statistics of the last step.
    """
    torch.manual_seed(0)
    model = build()
    again = copy.deepcopy(model)
    expected = train(prepare(model), draw_inputs, num_steps, backward)
    with ebbtide.offload(again, activations=activations, **offload) as handle:
        got = train(prepare(again), draw_inputs, num_steps, backward)
        stats = handle.stats
        # Copies may outlive the step.
        wait_until(lambda: handle.inspect().in_flight.is_idle, "a step leaves something in flight")
        assert handle._engine.transfers.account.device_bytes == 0
    assert len(got) == len(expected)
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(_bits(one), _bits(other)), f"tensor {number} differs"
    return stats


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
