"""Masks as bits: fewer bytes leave, the same come back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ebbtide
from ebbtide.runtime.handles import is_mask, pack, restore, unpack

POLICY = ebbtide.ActivationPolicy(min_bytes=256)


def bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def round_trip(tensor: Tensor) -> int:
    """Packs and unpacks all of a tensor's storage; returns the packed size in bytes."""
    assert is_mask(tensor)
    flat = bytes_of(tensor)
    packed = pack(flat)
    assert packed.dtype is torch.uint8
    assert torch.equal(unpack(packed, flat.numel()), flat)
    return packed.numel()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=100))
def test_a_mask_is_one_bit_an_element(values: list[bool]) -> None:
    assert round_trip(torch.tensor(values)) == -(-len(values) // 8)


@pytest.mark.parametrize("mask_first", [True, False])
def test_bytes_seen_as_a_mask_and_as_numbers(mask_first: bool) -> None:
    """A mask is one bit, but whoever saved the same bytes as numbers gets each of them back."""
    numbers = torch.arange(4096, dtype=torch.uint8)
    mask = numbers.view(torch.bool)
    weight = nn.Linear(1, 1)
    pair = (mask, numbers) if mask_first else (numbers, mask)
    with ebbtide.offload(weight, activations=POLICY, layers=[]) as handle:
        hooks = handle._engine.hooks()
        hooks.begin()
        saved = [hooks.pack(tensor) for tensor in pair]
        hooks.end()
        for tensor, one in zip(pair, saved, strict=True):
            again = restore(one)
            assert again.dtype is tensor.dtype
            assert torch.equal(again, tensor)
        del saved, one


class Model(nn.Module):
    """Saves a mask of 64 x 64 B, which is packed, and indices, which are not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 64)
        self.conv = nn.Conv2d(1, 8, 3, padding=1)

    def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = torch.where(x > 0, x * 2, x * 0.5)
        return x.sum() + F.max_pool2d(self.conv(image), 2).square().sum()


def step(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    tokens, image = torch.randint(300, (64,)), torch.randn(1, 1, 32, 32)
    model.zero_grad()
    model(tokens, image).backward()
    return [p.grad.clone() for p in model.parameters()]


def test_a_model_with_masks_trains_the_same() -> None:
    torch.manual_seed(0)
    model = Model()
    expected = step(model)
    with ebbtide.offload(model, activations=POLICY, layers=["embedding", "conv"]) as handle:
        for got, plain in zip(step(model), expected, strict=True):
            assert torch.equal(got, plain)
        stats = handle.stats
    assert stats.packed_bytes == 64 * 64 * 7 // 8
    assert stats.unique_bytes == stats.kept_bytes + stats.offloaded_bytes + (
        stats.rebuilt_bytes + stats.packed_bytes
    )


def test_what_stays_is_not_packed() -> None:
    model = Model()
    policy = ebbtide.ActivationPolicy(num_layers=0, min_bytes=256)
    with ebbtide.offload(model, activations=policy, layers=["embedding", "conv"]) as handle:
        step(model)
        assert handle.stats.packed_bytes == 0
