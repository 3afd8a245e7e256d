"""Random plans on torch's own streams: each is followed, and the bits stay those of plain steps."""

import dataclasses
import gc

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import ebbtide
import softdevice
from ebbtide import ActivationPolicy
from ebbtide.planning import (
    CautiousTiming,
    Hardware,
    PlanBudget,
    PlannedStep,
    find_frugal,
    rule_plans,
    search,
)
from ebbtide.stores import DeviceMemory
from gpu_bench import assert_at_rest
from plan_cases import fake_profile
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


@pytest.mark.parametrize("order", ORDERS[:3])
@pytest.mark.parametrize("rule", ["recompute all", "offload all", "searched for"])
def test_a_plan_needs_no_more_than_predicted(rule: str, order: str, device: torch.device) -> None:
    """Nor does it with no bytes in flight, where the last copy is not seen to be complete."""
    softdevice.choose_order(order)
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()) for _ in range(4)
    ]
    model, batch = nn.Sequential(*blocks).to(device), torch.randn(4096, 64).to(device)
    hardware = Hardware.named("h100")
    profile = fake_profile(model, batch, hardware, layers=blocks, min_bytes=1, optimizer_states=0)
    timing = CautiousTiming(profile, hardware, 1.0)
    if rule == "searched for":
        figures = ("h2d_bytes_per_s", "d2h_bytes_per_s", "duplex_bytes_per_s")
        slow = dataclasses.replace(hardware, **dict.fromkeys(figures, 1e9))
        timing = CautiousTiming(profile, slow, 1.0)
        least_bytes = timing.predict(find_frugal(profile, slow, timing)).peak_bytes
        plan = search(profile, slow, PlanBudget(device_bytes=least_bytes * 6 // 4), timing)
        assert plan.windows
    else:
        plan = dict(rule_plans(profile))[rule]
    predicted = timing.predict(plan).peak_bytes
    step = PlannedStep(plan=plan, profile=profile, hardware=hardware, budget_bytes=0)
    gc.collect()
    torch.accelerator.synchronize()
    others = torch.accelerator.memory_allocated() - batch.nbytes
    others -= sum(parameter.nbytes for parameter in model.parameters())
    with ebbtide.offload(model, plan=step, activations=ActivationPolicy(min_bytes=1)) as handle:
        for _ in range(2):
            model.zero_grad()
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            output = model(batch)
            output.sum().backward()
        peak_bytes = torch.accelerator.max_memory_allocated() - others
        del output
        gc.collect()
        assert_at_rest(handle)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert peak_bytes <= predicted + 64 * 512  # the allocator rounds up
    if rule != "offload all":
        assert peak_bytes >= predicted - gradients


class Wait(nn.Module):
    """Waits for all copies; what they have read could be let go of."""

    def forward(self, x: Tensor) -> Tensor:
        torch.accelerator.synchronize()
        return x


class Narrow(nn.Module):
    """Saves nothing, and lets go of most of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :16] * 2.0


def test_what_a_budget_measures_does_not_depend_on_when_copies_end(device: torch.device) -> None:
    """The host may be far ahead of them in any other step."""
    softdevice.choose_order("compute-first")
    batch, found = torch.randn(4096, 16).to(device), []
    for between in (nn.Identity, Wait):
        blocks = [
            nn.Sequential(
                *(nn.Linear(16, 64), nn.Tanh(), between()),
                *(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 256), Narrow()),
            )
            for _ in range(4)
        ]
        model = nn.Sequential(*blocks).to(device)
        with ebbtide.offload(
            model, budget="256MiB", activations=ActivationPolicy(min_bytes=1)
        ) as handle:
            for _ in range(2):
                model.zero_grad()
                model(batch).sum().backward()
            assert handle.plan is not None
            layers = handle.plan.profile.layers
            found.append([each.forward_working_bytes for each in layers])
        del handle, model, blocks
        gc.collect()
    assert found[0] == found[1] != [512] * 4


def _settings() -> str:
    return torch._C._accelerator_getAllocatorSettings()


def test_segments_are_expandable_as_long_as_a_budget_is_in_force(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that freed memory is used again in other sizes."""

    def offloaded() -> ebbtide.OffloadHandle:
        return ebbtide.offload(nn.Sequential(nn.Linear(4, 4)).to(device), budget="2GiB")

    with offloaded():
        with offloaded():
            assert _settings() == "expandable_segments:True"
        dropped = offloaded()
        del dropped
        gc.collect()
        assert _settings() == "expandable_segments:True"
    assert _settings() == "expandable_segments:False"
    alone = offloaded()
    del alone
    gc.collect()
    assert _settings() == "expandable_segments:False"
    for own in ("expandable_segments:False", "max_split_size_mb:512"):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", own)
        with offloaded():
            added = "" if own.startswith("expandable") else ",expandable_segments:True"
            assert _settings().endswith(added or "False")
            assert own.startswith("expandable") or _settings() == own + added


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        half = [nn.GroupNorm(4, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1)]
        again = [nn.GroupNorm(4, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1)]
        self.inside = nn.Sequential(*half, *again)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x)


@pytest.mark.parametrize(
    ("share", "retains", "num_forwards"), [(0.3, False, 1), (0.5, True, 1), (0.16, False, 4)]
)
def test_no_step_is_over_a_tight_budget(
    share: float, retains: bool, num_forwards: int, device: torch.device
) -> None:
    """Not the first with the optimizer's state, nor those of plans whose layers have not run so.

    What a graph that is retained keeps is there until the end of backward. Of the forwards of a
    rollout, one at a time has what it saves on the device.
    """
    torch.manual_seed(0)
    blocks = [Residual(24) for _ in range(6)]
    model = nn.Sequential(nn.Conv2d(1, 24, 3, padding=1), *blocks).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    image = torch.randn(4, 1, 32, 32).to(device)

    # Its peak lasts while the budget resets torch's, to measure passes.
    memory = DeviceMemory(device)

    def peak_of_step() -> int:
        memory.reset_peak()
        optimizer.zero_grad()
        state = image
        for _ in range(num_forwards):
            state = state + model(state).mean(1, keepdim=True)
        state.square().mean().backward(retain_graph=retains)
        optimizer.step()
        return memory.peak_bytes()

    idle_bytes = memory.now_bytes()
    room_bytes = peak_of_step() - idle_bytes
    optimizer = torch.optim.Adam(model.parameters())  # without a state, and gradients
    model.zero_grad()
    budget_bytes = idle_bytes + int(share * room_bytes)
    policy = ActivationPolicy(min_bytes=16 * 1024)
    with ebbtide.offload(model, budget=budget_bytes, activations=policy) as handle:
        peaks = [peak_of_step() for _ in range(7)]
        plan = handle.plan
    assert max(peaks) <= budget_bytes
    assert plan is not None and plan.settled and plan.plan.peak_bytes is not None
    assert (
        peaks[-1] <= plan.plan.peak_bytes <= budget_bytes
    )  # less, if copies are seen to end early


def test_a_step_without_autocast_is_within_the_budget_where_weights_rest(
    device: torch.device,
) -> None:
    """It is no step of the kind of those with autocast, which need less."""
    torch.manual_seed(0)
    layers = ((nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))
    model = nn.Sequential(*(nn.Sequential(*each) for each in layers)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(512, 64).to(device)
    memory = DeviceMemory(device)

    def peak_of_step(casts: bool) -> int:
        memory.reset_peak()
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=casts):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return memory.peak_bytes()

    budget_bytes = int(0.7 * peak_of_step(casts=False))
    policy = ActivationPolicy(min_bytes=1024)
    weights = ebbtide.WeightPolicy()
    with ebbtide.offload(model, budget=budget_bytes, activations=policy, weights=weights):
        peaks = [peak_of_step(casts=number != 5) for number in range(7)]
    assert max(peaks) <= budget_bytes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(64), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def test_no_step_of_a_partly_frozen_model_is_over_its_budget(device: torch.device) -> None:
    """Its first layers have no backward, and the first step tells all that there is to know."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(8)])
    model[:4].requires_grad_(False)
    batch, memory = torch.randn(512, 64).to(device), DeviceMemory(device)
    peaks = []

    def train(steps: int) -> None:
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
        for _ in range(steps):
            memory.reset_peak()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            peaks.append(memory.peak_bytes())

    model.to(device)
    idle_bytes = memory.now_bytes()
    train(2)
    budget_bytes = idle_bytes + (max(peaks) - idle_bytes) * 4 // 10
    model.zero_grad()
    peaks.clear()
    policy = ActivationPolicy(min_bytes=16 * 1024)
    with ebbtide.offload(model, budget=budget_bytes, activations=policy):
        train(6)
    assert max(peaks) <= budget_bytes


@pytest.mark.filterwarnings("ignore:.*over-budget")
def test_a_step_with_a_replaced_layer_is_recorded_anew(device: torch.device) -> None:
    """Hooks of the new one are missing: what it saves is work between the others."""

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    def new_optimizer() -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    gc.collect()
    idle_bytes = torch.accelerator.memory_allocated()
    model = nn.Sequential(*[Block() for _ in range(5)]).to(device)
    batch, optimizer = torch.randn(512, 64).to(device), new_optimizer()
    torch.accelerator.reset_peak_memory_stats()
    train(2)
    plain_bytes = torch.accelerator.max_memory_allocated() - idle_bytes
    budget_bytes = idle_bytes + plain_bytes * 38 // 100
    model.zero_grad()
    optimizer = new_optimizer()
    policy = ActivationPolicy(min_bytes=1024)
    with ebbtide.offload(model, budget=budget_bytes, activations=policy):
        train(7)
        model[2] = Block().to(device)
        optimizer = new_optimizer()
        train(9)
        torch.accelerator.reset_peak_memory_stats()
        train(2)
        torch.accelerator.synchronize()
        assert torch.accelerator.max_memory_allocated() <= budget_bytes
        del model[4]  # nor do its weights rest any more
        train(2)


def test_weights_move_where_a_mode_sees_operations(device: torch.device) -> None:
    """The first plan brings some of the weights back to the device, and no mode sees it."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6))
    model = nn.Sequential(*blocks).to(device)
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    budget_bytes = DeviceMemory(device).now_bytes() + 2 * weight_bytes
    rows, policy = torch.randn(64, 128).to(device), ActivationPolicy(min_bytes=1)
    places = []
    with ebbtide.offload(model, budget=budget_bytes, activations=policy):
        for _ in range(4):
            with FlopCounterMode(display=False) as counter:
                model(rows).square().mean().backward()
            places.append(len({parameter.device for parameter in model.parameters()}))
            assert counter.get_total_flops() == 17 * 2 * 64 * 128 * 128
    assert places[0] == 1
    assert places[-1] == 2
