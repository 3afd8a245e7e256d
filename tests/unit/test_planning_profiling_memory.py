"""Working memory of each pass, by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide.planning import Hardware, StepProfile, StepTiming, StorageId, keep_all, rule_plans
from live_memory import LiveMemory
from plan_cases import fake_profile
from waiting import await_copies

H100 = Hardware.named("h100")
WIDTH, ROWS = 16, 64
PIECE = ROWS * WIDTH * 4  # bytes of one activation
ONE = 4  # bytes of the loss, and of its gradient


def perceptron() -> nn.Sequential:
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
    ]
    return nn.Sequential(*blocks)


def profile_of(model: nn.Module, layers: nn.Module | list[nn.Module]) -> StepProfile:
    return fake_profile(model, torch.randn(ROWS, WIDTH), H100, layers=layers, min_bytes=1)


def test_working_memory_of_a_perceptron() -> None:
    """A layer saves its input, the GELU's input and its output; then its output is there."""
    model = perceptron()
    profile = profile_of(model, model)
    assert [layer.forward_working_bytes for layer in profile.layers] == [PIECE] * 3
    # The model's output, the loss and its gradient are there throughout. The last layer's backward
    # gets one expanded number; it holds one more gradient at a time, because what was saved goes
    # as fast. The other layers hold the gradient of their output, too.
    ends = PIECE + 2 * ONE
    assert [layer.backward_working_bytes for layer in profile.layers] == [
        ends + 2 * PIECE,
        ends + 2 * PIECE,
        ends + PIECE,
    ]
    assert profile.loss_working_bytes == ends
    assert profile.fixed_bytes == 0
    assert profile.before_working_bytes == PIECE  # the batch, which the first layer will save
    saved = 9 * PIECE
    parameters = 4 * 6 * (WIDTH * WIDTH + WIDTH) * 4
    peak = StepTiming(profile, H100).predict(keep_all(profile)).peak_bytes
    assert peak == parameters + saved + ends + PIECE


class Skip(nn.Module):
    """Holds a tensor over two layers, which save nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        skip = x + 1
        for block in self.blocks:
            x = F.relu(block(x))
        return x + skip


def test_what_code_holds_is_working_memory() -> None:
    model = Skip()
    profile = profile_of(model, model.blocks)
    # The layers save their inputs: the batch, and the first ReLU's output, saved outside first.
    assert [len(layer.storages) for layer in profile.layers] == [1, 1, 1, 1]
    assert profile.layers[2].storages[0].same_as == StorageId(1, 0)
    assert profile.fixed_bytes == 0
    # The first layer has the skip and its product, which the ReLU takes. The second one has the
    # skip and its product.
    assert [layer.forward_working_bytes for layer in profile.layers[:3]] == [2 * PIECE] * 3
    # When the second ReLU's backward makes a gradient, the model's output, the loss and its
    # gradient are there beside what is saved.
    assert profile.layers[3].backward_working_bytes == 2 * PIECE + 2 * ONE


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def test_what_a_checkpoint_computes_again_belongs_to_its_layer() -> None:
    model = Checkpointed(reentrant=False)
    profile = profile_of(model, model.blocks)
    layers = [layer for layer in profile.layers if not layer.between]
    assert [layer.name for layer in layers] == ["blocks.0", "blocks.1", "blocks.2"]
    plain = profile_of(model.blocks, model.blocks)
    saved = [sum(each.size_bytes for each in layer.storages) for layer in layers]
    assert max(saved) <= PIECE
    for ours, theirs in zip(layers, plain.layers, strict=True):
        assert ours.backward_s > theirs.backward_s
        assert ours.backward_working_bytes >= theirs.backward_working_bytes


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(WIDTH) * random.random() * np.random.rand()
        return F.dropout(self.linear(x) + noise).sin()


class Gated(nn.Module):
    """Saves four tensors of twice its input's size, and adds its input at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return x + self.down(F.gelu(y) * y.sigmoid())


class Pair(nn.Module):
    """Its layers take and return two tensors, and one layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Both(), Both()

    def forward(self, x: Tensor) -> Tensor:
        x, y = self.first(x, other=2 * x)
        x, y = self.second(x, other=y)
        x, y = self.second(y, other=x)
        return (x * y).sum(1)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gated = Gated()

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self.gated(x) * other, other.exp()


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gated = Gated()

    def forward(self, x: Tensor) -> Tensor:
        return self.gated(x.relu_())


class Changes(nn.Module):
    """The input of its second layer is changed in place, so that one cannot run again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.changes, self.last = Gated(), InPlace(), Gated()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.changes(self.first(x)))


RECOMPUTED = {
    "perceptron": lambda: (model := perceptron(), list(model)),
    "gated": lambda: (model := nn.Sequential(*[Gated() for _ in range(4)]), list(model)),
    "pair": lambda: (model := Pair(), [model.first, model.second]),
    "changes": lambda: (model := Changes(), list(model.children())),
    "one": lambda: (model := nn.Sequential(nn.Linear(WIDTH, WIDTH), Gated()), [model[1]]),
}


@pytest.mark.parametrize("mode", ["none", "recompute"])
@pytest.mark.parametrize("name", RECOMPUTED)
def test_a_step_needs_what_was_profiled(name: str, mode: str) -> None:
    """The most bytes of real tensors are those that are predicted, with layers run again or not."""
    rows = 4096  # so many that the batch, saved or not, outweighs the parameters
    with LiveMemory() as memory:
        model, layers = RECOMPUTED[name]()
        batch = torch.randn(rows, WIDTH)
        profile = fake_profile(model, batch, H100, layers=layers, min_bytes=1, optimizer_states=0)
        if mode == "recompute":
            again = [layer for layer in layers if not isinstance(layer, InPlace)]
            handle = ebbtide.offload(
                model, layers=again, activations=ebbtide.ActivationPolicy(mode="recompute")
            )
            model(batch).sum().backward()  # operations are proven first
            model.zero_grad()
            await_copies(handle)
        memory.reset_peak()
        output = model(batch)  # which a training loop holds
        output.sum().backward()
        peak_bytes = memory.peak_bytes()
    rule = "keep all" if mode == "none" else "recompute all"
    predicted = StepTiming(profile, H100).predict(dict(rule_plans(profile))[rule]).peak_bytes
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    # A layer that runs again holds no variables of its code: at most one activation is less.
    freed = rows * 2 * WIDTH * 4 if mode == "recompute" else 0
    # Small weights are copied for it.
    copied = gradients if mode == "recompute" else 0
    # Gradients count from the begin of a step; here they are made in the course of it.
    assert predicted - gradients - freed <= peak_bytes <= predicted + copied


class Once(nn.Module):
    """Cannot run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.ran = False

    def forward(self, x: Tensor) -> Tensor:
        if self.ran:
            raise RuntimeError("once is enough")
        self.ran = True
        return self.linear(x).relu()


def test_what_cannot_run_again_is_not_recomputed() -> None:
    blocks = [Once(), Once()]
    profile = profile_of(nn.Sequential(*blocks), blocks)
    assert not any(layer.may_recompute for layer in profile.layers)
    assert not any(block.ran for block in blocks)


def test_profiling_draws_no_random_numbers() -> None:
    def states() -> list[object]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1:3]]

    model, batch = nn.Sequential(Draws(), Draws()), torch.randn(ROWS, WIDTH)
    before = repr(states())
    fake_profile(model, batch, H100, layers=list(model), min_bytes=1)
    assert repr(states()) == before
