"""Profiles from fake tensors mark the storages that the engine rebuilds, and their sources."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ebbtide
from ebbtide import ActivationPolicy
from ebbtide.planning import Hardware, StepProfile
from plan_cases import engine_name_of, fake_profile
from test_planning_profiling_bytes import CASES

CPU = Hardware.named("cpu")


class Gated(nn.Module):
    """A chain of rebuilds: the product is computed from a SiLU, and that from its input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Two(nn.Module):
    """Has two linear layers; saves of the first one's output differ by case."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)


class ChangedOutput(Two):
    """A sine that is changed in place cannot be rebuilt, but its cosine can be, from the change."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x).sin()
        hidden.mul_(2)
        return self.two(hidden) + self.two(hidden.cos())


class ChangedUnseen(Two):
    """A sine that is changed without autograd's knowledge, whose node still is that of a sine."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x).sin()
        with torch.no_grad():
            hidden.mul_(2)
        return self.two(hidden)


class ChangedInput(Two):
    """A copy of something that was changed before: nothing tells which version was copied."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x)
        with torch.no_grad():
            hidden.mul_(2)
        wave = hidden.cos()
        return self.two(hidden.clone()) + wave


class OtherStrides(Two):
    """A copy that keeps strides which its recipe does not give."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x).t().exp()
        return self.two(hidden.clone()) + hidden


class LateInput(Two):
    """What is copied is saved after the copy was saved first. Each storage is decided once."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x)
        copy = hidden.clone()
        out = self.two(copy)
        return out + hidden.cos() + self.two(copy)


class Powers(nn.Module):
    """Each power is computed from the one before: longer chains than the engine follows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for _ in range(7):
            x = x.sin()
        return x


def blocks(kind: type[nn.Module]) -> Any:
    return lambda: nn.Sequential(*(kind() for _ in range(3)))


def square() -> Tensor:
    return torch.randn(16, 16)


MODELS: dict[str, tuple[Any, Any]] = CASES | {
    "gated": (blocks(Gated), square),
    "changed": (blocks(ChangedOutput), square),
    "changed unseen": (blocks(ChangedUnseen), square),
    "changed input": (blocks(ChangedInput), square),
    "other strides": (blocks(OtherStrides), square),
    "late input": (blocks(LateInput), square),
    "powers": (blocks(Powers), square),
}


def profile_of(model: nn.Module, batch: Tensor, min_bytes: int = 1) -> StepProfile:
    return fake_profile(model, batch, CPU, min_bytes=min_bytes)


def marked(profile: StepProfile) -> set[tuple[int | None, int]]:
    names = engine_name_of(profile)
    return {tuple(names[name]) for name in names if profile.storage(name).sources}


def rebuilt(model: nn.Module, batch: Tensor, min_bytes: int) -> set[tuple[int | None, int]]:
    policy = ActivationPolicy(min_bytes=min_bytes)
    with ebbtide.offload(model, activations=policy) as handle:
        model(batch).square().mean().backward()
        storages = handle.inspect().storages
    return {(each.layer, each.number) for each in storages if each.decision == "rebuild"}


@pytest.mark.parametrize("min_bytes", [1, 1100])
@pytest.mark.parametrize("name", MODELS)
def test_marked_is_what_the_engine_rebuilds(name: str, min_bytes: int) -> None:
    torch.manual_seed(0)
    make_model, make_batch = MODELS[name]
    model, batch = make_model(), make_batch()
    assert marked(profile_of(model, batch, min_bytes)) == rebuilt(model, batch, min_bytes)


def test_marked_under_autocast() -> None:
    torch.manual_seed(0)
    model, batch = blocks(Gated)(), square()
    with torch.autocast("cpu", torch.bfloat16):
        found = marked(profile_of(model, batch))
        assert found == rebuilt(model, batch, 1)
    assert found


def test_sources_and_seconds() -> None:
    """The SiLU is computed from the gate; the product from the SiLU and `up`."""
    model, batch = blocks(Gated)(), square()
    profile = profile_of(model, batch)
    (first, *_) = profile.layers
    kinds = {each.number: each for each in first.storages if each.sources}
    size = 16 * 16 * 4
    seconds = [each.rebuild_s for each in kinds.values()]
    rate = CPU.device_memory_bytes_per_s
    assert seconds == [2 * size / rate, 3 * size / rate]
    silu, product = kinds.values()
    assert len(silu.sources) == 1
    assert len(product.sources) == 2
    assert (0, silu.number) in product.sources


def test_a_chain_ends_where_the_engine_ends_it() -> None:
    """Of seven values, each the sine of the one before, the fifth is not rebuilt."""
    model = nn.Sequential(Powers())
    layers = [model[0]]
    profile = fake_profile(model, square(), CPU, layers=layers, min_bytes=1)
    kept = [each.number for each in profile.layers[0].storages if not each.sources]
    # The batch, the linear layer's output, and the fifth value, from which the sixth is computed.
    assert kept == [0, 1, 6]
