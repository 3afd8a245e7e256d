"""A profile from the record of a step has the storages of the one from fake tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ebbtide.compat.transformer_engine import mark_not_offload
from torch import Tensor, nn

import ebbtide
from ebbtide import ActivationPolicy, OffloadHandle
from ebbtide.observe.passes import RecordedCall
from ebbtide.planning import (
    Decision,
    Hardware,
    LayerPlan,
    LayerProfile,
    Plan,
    StepProfile,
    StorageId,
    place,
)
from ebbtide.planning.recorded import profile_recorded_step
from plan_cases import fake_profile
from test_planning_profiling_bytes import CASES

WIDTH, ROWS = 16, 32


class Branches(nn.Module):
    """Saves before, between, in and after layers, in some of them the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = first = torch.sigmoid(self.embed(x))
        for block in self.blocks:
            x = block(x).sin() * first
        return x.exp()


class Quiet(Branches):
    """Its second layer saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = nn.Sequential(nn.Identity(), nn.Identity())


def recorded_profile(handle: OffloadHandle) -> StepProfile:
    """The profile of the last step, whose layers had inputs that nobody noted."""
    names = {event.layer: event.name for event in handle.trace.events if event.what == "forward"}
    calls = [RecordedCall(names[index]) for index in range(len(names))]
    storages = handle.inspect().storages
    return profile_recorded_step(storages, calls, Hardware.named("cpu"), min_bytes=1)


def profiles(model: Branches) -> Iterator[StepProfile]:
    """From fake tensors, and from a record."""
    layers = list(model.blocks)
    x = torch.randn(ROWS, WIDTH)
    yield fake_profile(model, x, Hardware.named("cpu"), layers=layers, min_bytes=1)
    policy = ActivationPolicy(min_bytes=1, rebuild=False)
    with ebbtide.offload(model, activations=policy, layers=layers, trace=True) as handle:
        mark_not_offload(x)  # as the budget does with a batch, which the loop holds
        model(x).sum().backward()
        yield recorded_profile(handle)


@pytest.mark.parametrize("name", CASES)
def test_a_predicted_step_has_the_layers_and_storages_of_a_real_one(name: str) -> None:
    """Also what layers share, what can be rebuilt, and which saved storage is an input."""
    torch.manual_seed(0)
    make_model, make_batch = CASES[name]
    model, batch = make_model(), make_batch()
    policy = ActivationPolicy(min_bytes=1)
    with ebbtide.offload(model, budget="1024GiB", activations=policy) as handle:
        for _ in range(2):
            model(batch).sum().backward()
        assert handle.plan is not None
        real = handle.plan.profile
        layers = [model.get_submodule(each) for each in handle.layers]
    fake = fake_profile(model, batch, Hardware.named("cpu"), layers=layers)
    assert list(map(described, fake.layers)) == list(map(described, real.layers))
    # The batch is held by the loop. It is the input of a layer where nothing is computed.
    for ours, theirs in zip(fake.layers, real.layers, strict=True):
        source = ours.input_same_as
        if source is None or fake.storage(source).may_leave:
            assert (ours.input_bytes, source) == (theirs.input_bytes, theirs.input_same_as)


def described(layer: LayerProfile) -> tuple[Any, ...]:
    storages = [dataclasses.replace(each, sources=(), rebuild_s=None) for each in layer.storages]
    sources = [set(each.sources) for each in layer.storages]
    return layer.name, layer.between, layer.may_recompute, storages, sources


def firsts(profile: StepProfile) -> list[tuple[str, int, bool]]:
    """What layers are the first to save: the layer, sizes, and whether they may leave."""
    return [
        (layer.name, storage.size_bytes, storage.may_leave)
        for layer in profile.layers
        for storage in layer.storages
        if storage.same_as is None
    ]


@pytest.mark.parametrize("kind", [Branches, Quiet])
def test_a_recorded_step_has_the_storages_of_a_profiled_one(kind: type[Branches]) -> None:
    fake, recorded = profiles(kind())
    assert firsts(recorded) == firsts(fake)
    assert [layer.between for layer in recorded.layers] == [layer.between for layer in fake.layers]
    assert [layer.may_recompute for layer in recorded.layers] == [
        layer.may_recompute for layer in fake.layers
    ]


@pytest.mark.parametrize("kind", [Branches, Quiet])
def test_a_plan_for_either_profile_is_followed_alike(kind: type[Branches]) -> None:
    fake, recorded = profiles(kind())
    for odd in (0, 1):
        placed = []
        for profile in (fake, recorded):
            sizes = iter(range(1000))
            first = {
                StorageId(index, storage.number): next(sizes)
                for index, layer in enumerate(profile.layers)
                for storage in layer.storages
                if storage.same_as is None
            }
            plan = Plan(
                layers=tuple(
                    LayerPlan(
                        decisions=tuple(
                            Decision.OFFLOAD
                            if first.get(storage.same_as or StorageId(i, storage.number), 0) % 2
                            == odd
                            else Decision.KEEP
                            for storage in layer.storages
                        )
                    )
                    for i, layer in enumerate(profile.layers)
                )
            )
            placed.append(place(profile, plan))
        assert placed[0] == placed[1]
        assert "offload" in {each.value for each in placed[0].decisions.values()}


def test_what_layers_share_is_known_of_the_later_one() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = x.sin()
            return self.blocks[0](x) + self.blocks[1](x)

    model = Shared()
    policy = ActivationPolicy(min_bytes=1, rebuild=False)
    layers = list(model.blocks)
    with ebbtide.offload(model, activations=policy, layers=layers, trace=True) as handle:
        model(torch.randn(ROWS, WIDTH, requires_grad=True)).sum().backward()
        profile = recorded_profile(handle)
    (before, first, second) = profile.layers
    assert before.between and len(before.storages) == 1
    assert [each.same_as for each in first.storages] == [None]
    assert [each.same_as for each in second.storages] == [StorageId(1, 0)]
