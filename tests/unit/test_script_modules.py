"""Models with modules of `torch.jit`, which allow no hooks, train beside offload."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide import ActivationPolicy, PolicyError, WeightPolicy

SMALL = ActivationPolicy(min_bytes=1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return nn.Sequential(Block(), torch.jit.script(Block()), Block(), Block())


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(torch.ones(64, 32)).sum().backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize(
    "arguments",
    [
        {"activations": SMALL},
        {"activations": SMALL, "layers": ["*"]},
        {"activations": ActivationPolicy(mode="recompute", min_bytes=1)},
        {"activations": SMALL, "budget": "90%"},
        {"weights": WeightPolicy(min_bytes=1)},
    ],
    ids=lambda arguments: "-".join(arguments),
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gradients_are_the_same(model: nn.Module, arguments: dict[str, Any]) -> None:
    expected = gradients(model)
    with ebbtide.offload(model, **arguments):
        found = [gradients(model) for _ in range(3)]
    for each in [*found, gradients(model)]:
        assert len(each) == len(expected) and all(map(torch.equal, each, expected))


def test_a_script_module_is_refused_and_left_as_it_was(model: nn.Module) -> None:
    with pytest.raises(PolicyError):
        ebbtide.offload(model[1])
    with pytest.raises(PolicyError):
        ebbtide.offload(model, layers=[model[1]])
    ebbtide.offload(model, activations=SMALL).detach()  # nothing was left behind


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(32, 32), Block()) for _ in range(3))
        self.blocks = nn.ModuleList(map(torch.jit.script, blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_model_trains_whose_blocks_are_all_scripted() -> None:
    model = Scripted()
    expected = gradients(model)
    with ebbtide.offload(model, activations=SMALL):
        found = [gradients(model) for _ in range(2)]
    for each in found:
        assert all(map(torch.equal, each, expected))
    with pytest.raises(PolicyError):
        ebbtide.offload(model, weights=WeightPolicy(min_bytes=1))
