"""Working memory of each pass, by hand."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ebbtide.planning.hardware import Hardware
from ebbtide.planning.prediction.step_timing import StepTiming
from ebbtide.planning.profiling.fake_profile import profile_with_fake_tensors
from ebbtide.planning.searching.simple_plans import keep_all
from ebbtide.planning.step_profile import StepProfile

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
    return profile_with_fake_tensors(
        model, torch.randn(ROWS, WIDTH), H100, layers=layers, min_bytes=1
    )


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
    first, second = profile.layers
    # The layers save their inputs: the batch, and the first ReLU's output, saved outside first.
    assert [len(layer.storages) for layer in profile.layers] == [1, 0]
    assert profile.fixed_bytes == 0
    # After the first layer, its product, the ReLU's output and the skip are there. When the second
    # one has its product, the ReLU's output is there because autograd saved it outside layers.
    assert first.forward_working_bytes == 3 * PIECE
    assert second.forward_working_bytes == 3 * PIECE
    # When the second ReLU's backward makes a gradient, the model's output, the loss and its
    # gradient are there beside both ReLUs' outputs.
    assert profile.loss_working_bytes == 4 * PIECE + 2 * ONE


class Wide(nn.Module):
    """Computes with eight times the width, and saves little of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.cat([x] * 8).sum(0)
        return x * self.scale + wide


def test_a_peak_inside_a_layer() -> None:
    blocks = [Wide(), Wide()]
    profile = profile_of(nn.Sequential(*blocks), blocks)
    # While eight copies are summed to one row, nothing else is there; x is saved afterwards, and is
    # the batch, or the output of the layer before.
    row = WIDTH * 4
    assert [layer.forward_working_bytes for layer in profile.layers] == [8 * PIECE + row] * 2


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
    assert [layer.name for layer in profile.layers] == ["blocks.0", "blocks.1", "blocks.2"]
    plain = profile_of(model.blocks, model.blocks)
    saved = [sum(each.size_bytes for each in layer.storages) for layer in profile.layers]
    assert max(saved) <= PIECE
    for ours, theirs in zip(profile.layers, plain.layers, strict=True):
        assert ours.backward_s > theirs.backward_s
        assert ours.backward_working_bytes >= theirs.backward_working_bytes


def test_what_a_reentrant_checkpoint_computes_again_is_not_the_loss() -> None:
    ours, theirs = (Checkpointed(reentrant=reentrant) for reentrant in (True, False))
    nested, plain = profile_of(ours, ours.blocks), profile_of(theirs, theirs.blocks)
    assert nested.loss_s == plain.loss_s > 0


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(WIDTH) * random.random() * np.random.rand()
        return F.dropout(self.linear(x) + noise).sin()


def test_profiling_draws_no_random_numbers() -> None:
    def states() -> list[object]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1:3]]

    model, batch = nn.Sequential(Draws(), Draws()), torch.randn(ROWS, WIDTH)
    before = repr(states())
    profile_with_fake_tensors(model, batch, H100, layers=list(model), min_bytes=1)
    assert repr(states()) == before
