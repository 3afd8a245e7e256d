"""Weights at rest in every store and budget, on the simulated device."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.devices import SimulatedDevice
from ebbtide.stores import AbstractStore, build_store
from harness import FaultyOs, Knobs, drain_autograd, without_collector
from loops import on_device
from weight_programs import check_weights

KIB = 1024
PAGE = 4 * KIB
WIDTH = 128
LAYERS = 6
GROUP_BYTES = WIDTH * WIDTH * 4 + 512  # a weight, and a bias of 128 x 4 B in 512 B
GROUP_PAGES = -(-GROUP_BYTES // PAGE) * PAGE
STAGING = 256 * KIB


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    )


def train(model: nn.Module, steps: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(32, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


@contextlib.contextmanager
def offloaded(
    model: nn.Module, store: AbstractStore, device: SimulatedDevice, **how: object
) -> Iterator[ebbtide.OffloadHandle]:
    """Within, its weights rest in a store; after, nothing is left of it."""
    with on_device(device, lambda: store):
        handle = ebbtide.offload(model, weights=ebbtide.WeightPolicy(), **how)
    yield handle
    handle.detach()
    device.finish_jobs()
    device.finish_copies()
    assert handle.inspect().in_flight.weight_bytes == 0
    assert device.allocated_bytes() == 0
    assert device.pinned_bytes == 0


def make_device(seed: int) -> SimulatedDevice:
    device = SimulatedDevice(seed, eagerness=(0.0, 0.1, 0.6)[seed % 3])
    device.pins_host_memory = True
    return device


@pytest.mark.parametrize("activations", [None, ebbtide.ActivationPolicy(min_bytes=1)])
@pytest.mark.parametrize(
    ("kind", "budget_bytes", "tiers"),
    [
        ("host", None, {"host"}),
        ("host", 2 * LAYERS * GROUP_PAGES + 512 * KIB, {"host"}),
        ("disk", None, {"disk"}),
        ("disk", STAGING, {"disk"}),
        ("tiered", None, {"host"}),
        ("tiered", 4 * STAGING, {"host"}),
        # Chunks take a quarter of it. Two groups fit into the rest, and no more.
        ("tiered", STAGING, {"host", "disk"}),
    ],
)
def test_every_store_and_budget(
    tmp_path: Path,
    kind: str,
    budget_bytes: int | None,
    tiers: set[str],
    activations: ebbtide.ActivationPolicy | None,
) -> None:
    """Same numbers, the budget held to the byte at every moment, and every copy in the trace."""
    expected = train(make())
    for seed in range(3):
        device, model = make_device(seed), make()
        if budget_bytes is not None and kind == "tiered":
            budget_bytes = max(budget_bytes, 4 * 64 * KIB)
        store = build_store(device, kind, tmp_path, budget_bytes)
        with (
            watched(store, budget_bytes),
            offloaded(model, store, device, activations=activations, trace=True) as handle,
        ):
            for got, wanted in zip(train(model), expected, strict=True):
                assert torch.equal(got, wanted)
            assert {parameter.tier for parameter in handle.inspect().parameters} == tiers
            check_trace(handle)
        assert store.host_capacity_bytes == 0


@contextlib.contextmanager
def watched(store: AbstractStore, budget_bytes: int | None) -> Iterator[None]:
    """Check the budget whenever something is taken, page-locked memory of the device included."""
    most_bytes = 0

    def watch(name: str) -> None:
        method = getattr(store, name)

        def call(*args: object, **kwargs: object) -> object:
            nonlocal most_bytes
            result = method(*args, **kwargs)
            most_bytes = max(most_bytes, store.host_capacity_bytes)
            assert budget_bytes is None or most_bytes <= budget_bytes
            return result

        setattr(store, name, call)

    for name in ("allocate_resting", "offload", "write", "reload"):
        watch(name)
    yield
    assert most_bytes > 0


def check_trace(handle: ebbtide.OffloadHandle) -> None:
    """The last step's copies of weights and gradients, each once."""
    events = handle.trace.events
    stats = handle.stats
    gradients = [each for each in events if each.kind == "gradients" and each.lane == "d2h"]
    assert sum(each.size_bytes for each in gradients) == stats.gradient_bytes
    assert stats.gradient_bytes == LAYERS * (WIDTH * WIDTH + WIDTH) * 4
    assert {each.label for each in gradients} == {f"offload g{n}" for n in range(LAYERS)}
    weights = [each for each in events if each.kind == "weights" and each.what == "reload"]
    assert {each.label for each in weights} == {f"reload w{n}" for n in range(LAYERS)}
    assert all(each.lane in ("h2d", "disk") for each in weights)
    # All of them for the forward, and for the backward all but those that are there still.
    assert (2 * LAYERS - 2) * GROUP_BYTES <= stats.weight_reload_bytes <= 2 * LAYERS * GROUP_BYTES
    assert stats.peak_weight_bytes == 2 * GROUP_BYTES


@pytest.mark.parametrize("kind", ["host", "disk", "tiered"])
def test_weights_without_elements(tmp_path: Path, kind: str) -> None:
    """A layer may have a parameter of no elements, or no other."""

    class Empty(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.empty(0))
            self.linear = nn.Linear(width, width) if width else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + self.empty.sum()

    def make_empty() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Empty(WIDTH), Empty(0), Empty(WIDTH), Empty(0))

    expected = train(make_empty())
    model, device = make_empty(), make_device(1)
    store = build_store(device, kind, tmp_path, None)
    with offloaded(model, store, device):
        for got, wanted in zip(train(model), expected, strict=True):
            assert torch.equal(got, wanted)


def test_a_budget_without_room_for_weights_names_what_would_do(tmp_path: Path) -> None:
    """Nothing has moved, nothing is taken, and the model trains as before."""
    expected = train(make())
    model, device = make(), make_device(0)
    store = build_store(device, "host", tmp_path, 64 * KIB)
    with (
        on_device(device, lambda: store),
        pytest.raises(
            ebbtide.StoreFullError, match=r"host_budget allows 64\.0 KiB .*raise host_budget"
        ),
    ):
        ebbtide.offload(model, weights=ebbtide.WeightPolicy())
    assert store.host_capacity_bytes == 0
    assert device.pinned_bytes == 0
    for got, wanted in zip(train(model), expected, strict=True):
        assert torch.equal(got, wanted)


def test_room_for_gradients_is_set_aside(tmp_path: Path) -> None:
    """A budget for weights alone is refused before a backward could meet it."""
    model, device = make(), make_device(0)
    store = build_store(device, "host", tmp_path, (LAYERS + 2) * GROUP_PAGES)
    with (
        on_device(device, lambda: store),
        pytest.raises(ebbtide.StoreFullError),
    ):
        ebbtide.offload(model, weights=ebbtide.WeightPolicy())
    model.requires_grad_(False)
    store = build_store(device, "host", tmp_path, (LAYERS + 2) * GROUP_PAGES)
    with offloaded(model, store, device), torch.no_grad():
        model(torch.randn(2, WIDTH))


def test_gradients_that_the_program_keeps_need_no_room_in_the_store(tmp_path: Path) -> None:
    """The next ones are added to them, although the store has room for one of each weight."""

    def accumulate(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(0)
        for _ in range(4):
            model(torch.randn(2, WIDTH)).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = accumulate(make())
    model, device = make(), make_device(0)
    store = build_store(device, "host", tmp_path, 2 * LAYERS * GROUP_PAGES)
    with offloaded(model, store, device):
        got = accumulate(model)
    assert len(expected) == 2 * LAYERS
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def test_activations_leave_the_reserve_to_gradients(tmp_path: Path) -> None:
    """Their slabs take what is left, and a forward that does not fit says so in time."""
    model, device = make(), make_device(0)
    budget_bytes = 2 * LAYERS * GROUP_PAGES + 2 * PAGE
    store = build_store(device, "host", tmp_path, budget_bytes)
    activations = ebbtide.ActivationPolicy(min_bytes=1, rebuild=False)
    with offloaded(model, store, device, activations=activations) as handle:
        with pytest.raises(ebbtide.StoreFullError):
            model(torch.randn(64, WIDTH))
        drain_autograd()
        assert store.host_capacity_bytes <= budget_bytes
        assert handle.inspect().in_flight.saved_tensors == 0


def test_the_optimizers_state_follows_weights_to_disk(tmp_path: Path) -> None:
    model, device = make(), make_device(0)
    store = build_store(device, "disk", tmp_path, None)
    with offloaded(model, store, device):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
        states = list(optimizer.state.values())
        averages = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
        assert len(averages) == 2 * 2 * LAYERS
        assert all(_is_in_a_file(average, tmp_path) for average in averages)


def _is_in_a_file(tensor: torch.Tensor, directory: Path) -> bool:
    """Whether the memory of a tensor is a mapped file in a directory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        if f" {directory}/" in line and begin <= tensor.data_ptr() < end:
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100, 50))
@pytest.mark.parametrize("kind", ["disk", "tiered"])
def test_random_training_on_disk(kind: str, first: int) -> None:
    for seed in range(first, first + 50):
        check_weights(seed, kind=kind)


@pytest.mark.parametrize("seed", range(20))
def test_a_gradient_that_the_disk_refuses_raises(tmp_path: Path, seed: int) -> None:
    """It never trains on with another one; afterwards the next step is right."""
    knobs = Knobs(seed, 0, 0.1, False, False, failures=0.0)
    faulty, draw = FaultyOs(knobs), random.Random(seed)
    model, plain, device = make(), make(), make_device(seed)
    x = torch.randn(32, WIDTH)
    with mock.patch("ebbtide.stores.disk_file.os", faulty), without_collector():
        store = build_store(device, "disk", tmp_path, None)
        with offloaded(model, store, device):
            loss = model(x).square().mean()
            faulty._knobs = Knobs(seed, 0, 0.1, False, False, failures=draw.choice((0.2, 0.9)))
            with contextlib.suppress(OSError):
                loss.backward()
                plain(x).square().mean().backward()
                for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                    assert torch.equal(mine.grad, theirs.grad)
            faulty._knobs = knobs
            del loss
            drain_autograd()
            for each in (model, plain):
                each.zero_grad()
                each(x).square().mean().backward()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine.grad, theirs.grad)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_gradient_of_one_element_is_copied_like_any_other(tmp_path: Path) -> None:
    """A copy by torch itself would make the host wait."""
    model, device = nn.Sequential(*[Scaled() for _ in range(LAYERS)]), make_device(0)
    store = build_store(device, "host", tmp_path, None)
    with offloaded(model, store, device, layers=list(model)) as handle:
        train(model)
        assert handle.stats.gradient_bytes >= LAYERS * 4
