"""The optimizer's step inside backward: random programs, whose worker is early or late."""

import os
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.devices import AbstractEvent, AbstractLane, Origin, SimulatedDevice, Span
from ebbtide.stores import PinnedStore
from ebbtide.stores.host_memory import HostBudget
from loops import BACKWARD_S, FORWARD_S, on_device
from overlap_programs import check_loops, check_overlap

SEEDS = int(os.environ.get("EBBTIDE_SIMULATION_SEEDS", "60")) // 6


def test_random_programs_on_the_simulated_device() -> None:
    content: Counter[str] = Counter()
    for seed in range(SEEDS):
        check_overlap(seed, content)
    assert min(content[what] for what in ("ahead", "again", "clipped", "skipped")) > 0


@pytest.mark.filterwarnings("ignore:ebbtide offloaded nothing:RuntimeWarning")
@pytest.mark.parametrize("policy", [None, ebbtide.WeightPolicy()], ids=["in memory", "in files"])
def test_random_programs_on_a_cpu(policy: ebbtide.WeightPolicy | None) -> None:
    content: Counter[str] = Counter()
    for seed in range(1000, 1000 + SEEDS):
        content += check_loops(seed, lambda net: ebbtide.offload(net, weights=policy))
    assert min(content[what] for what in ("ahead", "again", "clipped", "skipped")) > 0


# ---- Shadows are part of the host budget, and give way

WIDTH = 64
NUM_LAYERS = 4
# Values and two moments of a weight and a bias, of 4 bytes an element, and two counts of steps.
SHADOW_BYTES = 3 * 4 * (WIDTH * WIDTH + WIDTH) + 2 * 4


def build(
    budget_bytes: int | None, *, overlaps: bool
) -> tuple[nn.Module, Any, ebbtide.OffloadHandle, HostBudget]:
    """Layers at rest on a simulated device behind one that stays, and their optimizer."""
    torch.manual_seed(0)
    device = SimulatedDevice(0)
    store = PinnedStore(device, budget_bytes, slab_bytes=8192)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS)]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks)
    with on_device(device, lambda: store), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = ebbtide.offload(
            model,
            activations=ebbtide.ActivationPolicy(min_bytes=1),
            weights=ebbtide.WeightPolicy(min_bytes=1),
            layers=list(model)[1:],
        )
    optimizer: Any = torch.optim.AdamW(list(model.parameters())[2:], fused=True)
    if overlaps:
        optimizer = handle.overlap(optimizer, max_norm=1.0)
    return model, optimizer, handle, store.budget


def step(model: nn.Module, optimizer: Any, rows: int) -> None:
    optimizer.zero_grad()
    torch.manual_seed(rows)
    x = torch.randn(rows, WIDTH).to(next(model.parameters()).device)
    model(x).square().mean().backward()
    if not hasattr(optimizer, "overlap"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def weights_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_shadows_count_in_the_host_budget() -> None:
    """Two layers of four find room. They give it back to a batch that needs it."""
    plain, optimizer, _, budget = build(None, overlaps=False)
    taken = []
    for rows in (8, 8, 8, 56, 8, 8):
        step(plain, optimizer, rows)
        taken.append(budget.taken_bytes + budget.reserved_bytes)
    limit_bytes = taken[2] + 2 * SHADOW_BYTES + 8192
    # The large batch has the room of the shadows, and not that of both.
    assert taken[3] <= limit_bytes < taken[3] + 2 * SHADOW_BYTES

    count, most = HostBudget.take, []

    def counted(budget: HostBudget, size_bytes: int) -> None:
        count(budget, size_bytes)
        shadows = sum(user.leftover_bytes for user in budget.leftover_users)
        most.append(budget.taken_bytes + budget.reserved_bytes + shadows)

    with mock.patch.object(HostBudget, "take", counted):
        model, optimizer, handle, budget = build(limit_bytes, overlaps=True)
        shadows = []
        for rows in (8, 8, 8, 56, 8, 8):
            step(model, optimizer, rows)
            shadows.append(optimizer.overlap.shadow_bytes)
            budget.take(0)
    # The first step is a plain one. A weight of a third layer may have room for its shadow.
    assert shadows[0] == 0
    assert 2 * SHADOW_BYTES <= shadows[1] == shadows[2] <= limit_bytes - taken[2]
    assert shadows[3:] == [0, 0, 0]
    assert max(most) <= limit_bytes
    assert optimizer.overlap.num_overlapped == 2
    assert all(map(torch.equal, weights_of(model), weights_of(plain)))
    handle.detach()


# ---- In virtual time: what of the optimizer's step the device waits for


class TimedLane(AbstractLane):
    """A worker whose jobs take a given time, one after the other, beside the device."""

    def __init__(self, device: SimulatedDevice, job_s: float) -> None:
        self.device, self.job_s, self.free_s = device, job_s, 0.0

    def submit(
        self, work: Callable[[], None], then: Callable[[], None] | None = None
    ) -> AbstractEvent:
        assert then is None
        work()
        begin_s = max(self.free_s, self.device.now_s)
        self.free_s = begin_s + self.job_s
        return TimedEvent(self.device, begin_s, self.free_s)

    def drain(self, end_s: float) -> None:
        """Nothing to do: the work has been done."""

    def close(self) -> None:
        """As `drain`."""


class TimedEvent(AbstractEvent):
    def __init__(self, device: SimulatedDevice, begin_s: float, end_s: float) -> None:
        self.device, self.begin_s, self.end_s = device, begin_s, end_s

    def query(self) -> bool:
        return self.end_s <= self.device.now_s

    def synchronize(self) -> None:
        self.device.compute(max(0.0, self.end_s - self.device.now_s))

    def since(self, origin: Origin) -> float:
        return self.end_s - origin.host_s

    def spans(self, origin: Origin) -> list[Span]:
        return [("cpu_optimizer", self.begin_s - origin.host_s, self.since(origin))]


class Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, device):
        ctx.device = device
        device.compute(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.device.compute(BACKWARD_S)
        return gradient, None


class TimedLayer(nn.Module):
    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self.linear, self.device = nn.Linear(8, 8), device

    def forward(self, x: Tensor) -> Tensor:
        return Takes.apply(self.linear(x), self.device)


@pytest.mark.parametrize("job_s", [BACKWARD_S / 2, BACKWARD_S, 1.5 * BACKWARD_S])
def test_the_device_waits_for_the_step_of_the_last_group_only(job_s: float) -> None:
    num_layers = 6
    device = SimulatedDevice(0, 0.0, 1e15, timely=True)
    model = nn.Sequential(*[TimedLayer(device) for _ in range(num_layers)])
    make_lane = device.lane

    def lane(name: str, lane: str) -> AbstractLane:
        is_ours = name == "ebbtide-optimizer"
        return TimedLane(device, job_s) if is_ours else make_lane(name, lane)

    device.lane = lane  # type: ignore[method-assign]
    with on_device(device, lambda: PinnedStore(device)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = ebbtide.offload(
            model, weights=ebbtide.WeightPolicy(min_bytes=1), layers=list(model), trace=True
        )
    optimizer: Any = handle.overlap(torch.optim.AdamW(model.parameters(), fused=True), max_norm=9.0)
    for _ in range(3):
        optimizer.zero_grad()
        begin_s = device.now_s
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        step_s = device.now_s - begin_s
    # The last layer's step begins when its backward has ended, beside that of the layer before it.
    # Where a step takes longer than a backward, each of the others is that much later, too.
    late_s = (num_layers - 1) * max(0.0, job_s - BACKWARD_S)
    expected_s = num_layers * (FORWARD_S + BACKWARD_S) + job_s + late_s
    assert step_s == pytest.approx(expected_s)
    steps = [event for event in handle.trace.events if event.what == "step"]
    assert len(steps) == num_layers
    assert {event.lane for event in steps} == {"cpu_optimizer"}
    assert min(event.begin_s for event in steps) == pytest.approx(
        num_layers * FORWARD_S + BACKWARD_S
    )
    handle.detach()
