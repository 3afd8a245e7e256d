"""Random plans on torch's own streams: each is followed, and the bits stay those of plain steps."""

import gc

import pytest
import torch
from torch import Tensor, nn

import ebbtide
import softdevice
from ebbtide import ActivationPolicy
from ebbtide.budgeting.planned_step import PlannedStep
from gpu_bench import assert_at_rest
from test_placed_plan import CPU, profile_of, random_plan
from test_planning_profiling_bytes import CASES

ORDERS = ("threads", "compute-first", "copies-first", "random")
SEEDS = 8
STEPS = 2


def train(model: nn.Module, batch: Tensor, seed: int) -> list[Tensor]:
    """Some steps, after which the losses and all gradients are on the host."""
    torch.manual_seed(seed)
    losses = []
    for _ in range(STEPS):
        loss = model(batch).square().mean()
        loss.backward()
        losses.append(loss.detach())
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return [each.cpu() for each in losses + gradients]


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", CASES)
def test_any_plan_changes_no_bit(name: str, seed: int, device: torch.device) -> None:
    order = ORDERS[seed % len(ORDERS)]
    softdevice.choose_order(f"random:{seed}" if order == "random" else order)
    torch.manual_seed(seed)
    make_model, make_batch = CASES[name]
    model, batch = make_model().to(device), make_batch().to(device)
    expected = train(model, batch, seed)
    model.zero_grad()
    profile = profile_of(model, batch)
    step = PlannedStep(
        plan=random_plan(profile, seed), profile=profile, hardware=CPU, budget_bytes=0
    )
    with ebbtide.offload(model, plan=step, activations=ActivationPolicy(min_bytes=1)) as handle:
        found = train(model, batch, seed)
        model.zero_grad()
        gc.collect()
        assert_at_rest(handle)
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))
