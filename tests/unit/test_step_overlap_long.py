"""Two hundred steps of models that people train, of which clipping bites in half."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide

STEPS = 200

Loss = Callable[[nn.Module], Tensor]


def gpt() -> tuple[nn.Module, Loss]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=4, n_embd=64, n_head=2, vocab_size=200, n_positions=32)
    text = torch.arange(4 * 33).remainder(200).view(4, 33)

    def loss(model: nn.Module) -> Tensor:
        noisy = torch.where(torch.rand(text.shape) < 0.1, torch.randint(200, text.shape), text)
        return model(noisy[:, :-1], labels=noisy[:, :-1]).loss

    return transformers.GPT2LMHeadModel(config), loss


def fno() -> tuple[nn.Module, Loss]:
    models = pytest.importorskip("neuralop.models")
    torch.manual_seed(0)
    model = models.FNO(
        n_modes=(6, 6), in_channels=1, out_channels=1, hidden_channels=12, n_layers=3
    )

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(4, 1, 16, 16)
        return (model(x) - x.cumsum(-1)).square().mean()

    return model, loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Fused where torch has a kernel: not for complex weights."""
    is_complex = any(parameter.is_complex() for parameter in model.parameters())
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=not is_complex)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, ebbtide.WeightPolicy()], ids=["memory", "files"])
@pytest.mark.parametrize("make", [gpt, fno])
def test_200_steps_are_the_same(make: Any, weights: ebbtide.WeightPolicy | None) -> None:
    model, loss = make()
    optimizer, norms = optimizer_of(model), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), float("inf")))
        optimizer.step()
    max_norm = float(torch.stack(norms).median())

    model, loss = make()
    plain, expected = optimizer_of(model), []
    for _ in range(STEPS):
        plain.zero_grad()
        loss(model).backward()
        expected.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        plain.step()

    mine, loss = make()
    handle = ebbtide.offload(mine, weights=weights)
    optimizer = handle.overlap(optimizer_of(mine), max_norm=max_norm, shadow_budget="1GiB")
    for number in range(STEPS):
        optimizer.zero_grad()
        loss(mine).backward()
        optimizer.step()
        assert torch.equal(optimizer.grad_norm, expected[number])
    for got, wanted in zip(mine.parameters(), model.parameters(), strict=True):
        assert torch.equal(got, wanted)
        for name, value in plain.state[wanted].items():
            assert torch.equal(optimizer.state[got][name], value)
    assert STEPS / 4 < optimizer.overlap.num_clipped < 3 * STEPS / 4
    assert optimizer.overlap.num_overlapped > STEPS / 8
    handle.detach()
