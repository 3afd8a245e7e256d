"""The engine follows any plan, storage by storage, and the numbers stay the same to the bit."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide import ActivationPolicy
from ebbtide.devices import SimulatedDevice
from ebbtide.planning import (
    Decision,
    Hardware,
    LayerMode,
    LayerPlan,
    LayerProfile,
    Plan,
    PlannedStep,
    SavedStorage,
    StepProfile,
    StorageId,
    keep_all,
    place,
)
from ebbtide.stores import PinnedStore
from loops import on_device
from plan_cases import engine_name_of, fake_profile
from test_planning_profiling_bytes import CASES

CPU = Hardware.named("cpu")


def seeds(count: int, slow_count: int) -> list[Any]:
    """The first seeds, and more that only ``make test-all`` runs."""
    slow = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(count, slow_count)]
    return [*range(count), *slow]


def random_plan(profile: StepProfile, seed: int) -> Plan:
    """A plan that does anything with any layer.

    Every third has some weights on the host, and half of them have windows.
    """
    rng = random.Random(seed)
    resting = {name for name in profile.weight_owners() if seed % 3 == 2 and rng.random() < 0.6}
    layers = []
    for layer in profile.layers:
        mode = rng.choice(list(LayerMode)) if layer.may_recompute else LayerMode.AS_IS
        decisions = tuple(
            rng.choice(list(Decision) if storage.sources else [Decision.KEEP, Decision.OFFLOAD])
            for storage in layer.storages
        )
        rests = layer.name in resting
        layers.append(LayerPlan(mode=mode, decisions=decisions, weights_on_host=rests))
    sizes = [0, 10_000, 10**6]
    windows = tuple(rng.choice(sizes) for _ in range(2 * len(layers) + 1))
    return Plan(
        layers=tuple(layers),
        max_inflight_bytes=rng.choice(sizes),
        windows=windows if rng.random() < 0.5 else (),
    )


def profile_of(model: nn.Module, batch: Tensor) -> StepProfile:
    return fake_profile(model, batch, CPU, optimizer_states=0)


def train(model: nn.Module, batch: Tensor, seed: int) -> list[Tensor]:
    """Two steps, after which the loss and all gradients are returned."""
    torch.manual_seed(seed)
    losses = []
    for _ in range(2):
        loss = model(batch).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses + [each.grad for each in model.parameters() if each.grad is not None]


def planned_case(
    name: str, seed: int, plan_seed: int
) -> tuple[nn.Module, Tensor, PlannedStep, list[Tensor]]:
    """A model, its batch, a random plan for it, and what plain training gives."""
    torch.manual_seed(seed)
    make_model, make_batch = CASES[name]
    model, batch = make_model(), make_batch()
    expected = train(model, batch, seed)
    model.zero_grad()
    profile = profile_of(model, batch)
    plan = random_plan(profile, plan_seed)
    step = PlannedStep(plan=plan, profile=profile, hardware=CPU, budget_bytes=0)
    return model, batch, step, expected


@pytest.mark.parametrize("seed", seeds(4, 12))
@pytest.mark.parametrize("name", CASES)
def test_any_plan_is_followed_and_changes_no_bit(name: str, seed: int) -> None:
    model, batch, step, expected = planned_case(name, seed, seed)
    profile, plan = step.profile, step.plan
    policy = ActivationPolicy(min_bytes=1)
    torch.manual_seed(seed)
    with ebbtide.offload(model, plan=step, activations=policy) as handle:
        assert handle.plan is step
        found = train(model, batch, seed)
        storages = handle.inspect().storages
        weights = handle._engine.weights
        at_rest = {member.name for _, member in weights.members()} if weights else set()
    resting = {
        layer.name
        for layer, chosen in zip(profile.layers, plan.layers, strict=True)
        if chosen.weights_on_host and layer.parameter_bytes
    }
    assert at_rest == {
        name
        for name, _ in model.named_parameters()
        if any(name.startswith(f"{module}.") for module in resting)
    }
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))
    placed = place(profile, plan)
    followed = {(each.layer, each.number): each.decision for each in storages}
    names = set(engine_name_of(profile, plan).values())
    assert {name: followed.get(name) for name in names} == {
        name: placed.decisions[name].value for name in names
    }
    sizes: dict[tuple[int | None, int], int] = {}
    for each in storages:
        if each.decision == "keep":
            sizes[each.layer, each.number] = each.size_bytes
    for first, engine_name in engine_name_of(profile, plan).items():
        if engine_name in sizes:
            assert sizes[engine_name] == profile.storage(first).size_bytes


@pytest.mark.parametrize("seed", seeds(3, 12))
@pytest.mark.parametrize("name", CASES)
def test_a_plan_from_a_step_that_ran_names_the_storages_that_it_is_for(
    name: str, seed: int
) -> None:
    """Layers of a UNet share what layers before them save, in any place of their order."""
    torch.manual_seed(seed)
    make_model, make_batch = CASES[name]
    model, batch = make_model(), make_batch()
    policy = ActivationPolicy(min_bytes=1)
    with ebbtide.offload(model, budget="1024GiB", activations=policy) as handle:
        for _ in range(2):
            model(batch).square().mean().backward()
        assert handle.plan is not None
        profile = handle.plan.profile
    plan = random_plan(profile, seed)
    step = PlannedStep(plan=plan, profile=profile, hardware=CPU, budget_bytes=0)
    with ebbtide.offload(model, plan=step, activations=policy) as handle:
        train(model, batch, seed)
        kept = [each for each in handle.inspect().storages if each.decision == "keep"]
    sizes = {(each.layer, each.number): each.size_bytes for each in kept}
    for each, engine_name in engine_name_of(profile, plan).items():
        planned_bytes = profile.storage(each).size_bytes
        assert sizes.get(engine_name, planned_bytes) == planned_bytes, each


@pytest.mark.parametrize("seed", seeds(3, 6))
@pytest.mark.parametrize("name", ["gpt", "fno", "unet"])
def test_any_plan_is_followed_on_a_device_that_is_behind(name: str, seed: int) -> None:
    """Copies run late and in adversarial orders; a wait that is missing would change bits."""
    model, batch, step, expected = planned_case(name, seed, seed + 100)
    device = SimulatedDevice(seed, eagerness=(0.0, 0.1, 0.6)[seed % 3])
    with on_device(device, lambda: PinnedStore(device, slab_bytes=2**16)):
        handle = ebbtide.offload(model, plan=step, activations=ActivationPolicy(min_bytes=1))
    found = train(model, batch, seed)
    handle.detach()
    device.finish_copies()
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))
    assert device.allocated_bytes() == 0


def layer(*storages: SavedStorage, **more) -> LayerProfile:
    return LayerProfile(name="layer", forward_s=1.0, backward_s=1.0, storages=storages, **more)


def test_the_input_of_a_recomputed_layer_that_the_loop_holds_does_not_leave() -> None:
    """The batch: as the first layer's input and as that of the last one, which does not save it."""
    batch, product = StorageId(0, 0), StorageId(1, 0)
    profile = StepProfile(
        layers=(
            layer(
                SavedStorage(number=0, size_bytes=8, may_leave=False),
                input_bytes=8,
                input_same_as=batch,
            ),
            layer(SavedStorage(number=0, size_bytes=4), input_bytes=4, input_same_as=product),
            layer(SavedStorage(number=0, size_bytes=4)),
        )
    )
    modes = [LayerMode.RECOMPUTE_OFFLOAD] * 3
    placed = place(profile, Plan(layers=tuple(LayerPlan(mode=mode) for mode in modes)))
    assert placed.recomputed == {0, 1, 2}
    assert placed.kept_inputs == {0, 2}


@pytest.mark.parametrize("mode", [LayerMode.RECOMPUTE, LayerMode.RECOMPUTE_OFFLOAD])
def test_inputs_stay_or_leave_as_the_plan_says(mode: LayerMode) -> None:
    torch.manual_seed(0)
    make_model, make_batch = CASES["gpt"]
    model, batch = make_model(), make_batch()
    profile = profile_of(model, batch)
    keep = keep_all(profile)
    layers = tuple(
        dataclasses.replace(chosen, mode=mode if layer.may_recompute else LayerMode.AS_IS)
        for chosen, layer in zip(keep.layers, profile.layers, strict=True)
    )
    plan = dataclasses.replace(keep, layers=layers)
    step = PlannedStep(plan=plan, profile=profile, hardware=CPU, budget_bytes=0)
    with ebbtide.offload(model, plan=step, activations=ActivationPolicy(min_bytes=1)) as handle:
        for _ in range(2):  # the first step verifies, and offloads what it compares
            model(batch).sum().backward()
        assert bool(handle.stats.offloaded_bytes) is (mode is LayerMode.RECOMPUTE_OFFLOAD)
