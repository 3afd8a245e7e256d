"""`handle.inspect()`: what became of each storage, where each weight rests, what is in flight."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide import ActivationPolicy, WeightPolicy
from ebbtide.devices import SimulatedDevice
from ebbtide.stores import PinnedStore
from loops import on_device

ROWS, WIDTH = 256, 64
BYTES = ROWS * WIDTH * 4


def make(num_layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(num_layers)]
    )


def step(model: nn.Module) -> None:
    model(torch.randn(ROWS, WIDTH, requires_grad=True)).square().mean().backward()


def test_every_storage_of_the_last_step() -> None:
    """A layer saves its input and its linear map's result. The input is the GELU of before."""
    model = make()
    with ebbtide.offload(model, activations=ActivationPolicy(min_bytes=1, num_layers=2)) as handle:
        assert handle.inspect().storages == ()
        for _ in range(2):
            step(model)
        found = [
            (each.layer, each.number, each.decision, each.tier, each.size_bytes)
            for each in handle.inspect().storages
        ]
    assert found == [
        (0, 0, "offload", "disk", BYTES),
        (0, 1, "offload", "disk", BYTES),
        (1, 0, "rebuild", "-", BYTES),
        (1, 1, "offload", "disk", BYTES),
        (2, 0, "rebuild", "-", BYTES),
        (2, 1, "keep", "device", BYTES),
    ]
    # The input is what the linear map's backward reads, and its result what the GELU's reads.
    kinds = [(each.shape, each.dtype, each.saved_by) for each in handle.inspect().storages]
    assert kinds == 3 * [((ROWS, WIDTH), "float32", "Addmm"), ((ROWS, WIDTH), "float32", "Gelu")]


def test_names_shares_and_times() -> None:
    """Times are those of the trace, in seconds since the step began."""
    model = make()
    policy = ActivationPolicy(min_bytes=1, rebuild=False)
    with ebbtide.offload(model, activations=policy, trace=True) as handle:
        step(model)
        storages = handle.inspect().storages
        events = [each for each in handle.trace.events if each.lane == "disk"]
        ends = {
            what: sorted(each.end_s for each in events if each.what == what)
            for what in ("offload", "reload")
        }
    assert [each.name for each in storages] == ["0", "0", "1", "1", "2", "2"]
    assert all(each.saves == 1 and each.shared_by == () for each in storages)
    assert sorted(each.offloaded_s for each in storages) == pytest.approx(ends["offload"])
    reloaded = sorted(each.reloaded_s for each in storages if each.reloaded_s is not None)
    assert reloaded == pytest.approx(ends["reload"])
    untraced = make()
    with ebbtide.offload(untraced, activations=policy) as handle:
        step(untraced)
        assert {each.offloaded_s for each in handle.inspect().storages} == {None}


def test_a_tensor_that_two_layers_save() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(block(x) for block in self.blocks)

    model = Skip()
    policy = ActivationPolicy(min_bytes=1, rebuild=False)
    with ebbtide.offload(model, activations=policy) as handle:
        step(model)
        (only,) = handle.inspect().storages
        assert (only.layer, only.saves, only.shared_by) == (0, 3, (1, 2))


def test_what_cannot_be_rebuilt_counts_for_nobody() -> None:
    """A look at what an operation could be rebuilt from leaves no trace where nothing comes of it.

    The sum's second input is saved by nobody, so it cannot be rebuilt from the first.
    """

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x

    found = []
    for rebuild in (False, True):
        model = Residual()
        policy = ActivationPolicy(min_bytes=1, rebuild=rebuild)
        with ebbtide.offload(model, activations=policy) as handle:
            step(model)
            found.append([(each.saves, each.shared_by) for each in handle.inspect().storages])
    assert found[0] == found[1] == [(1, ()), (1, ()), (1, ())]


def test_what_is_in_flight() -> None:
    model = make()
    policy = ActivationPolicy(min_bytes=1, num_layers=2, rebuild=False)
    device = SimulatedDevice(0, eagerness=0.0)
    with on_device(device, lambda: PinnedStore(device, slab_bytes=2**20), 2**30):
        handle = ebbtide.offload(model, activations=policy)
    assert handle.inspect().in_flight.is_idle
    loss = model(torch.randn(ROWS, WIDTH)).square().mean()
    now = handle.inspect().in_flight
    assert not now.is_idle
    assert (now.forwards, now.records, now.saved_tensors) == (0, 6, 6)
    assert now.kept_bytes == 2 * BYTES
    assert now.stored_bytes == now.offload_bytes == 4 * BYTES
    device.finish_copies()
    now = handle.inspect().in_flight
    assert (now.offload_bytes, now.stored_bytes) == (0, 4 * BYTES)
    loss.backward()
    del loss
    now = handle.inspect().in_flight
    assert now.is_idle
    assert now.host_capacity_bytes > 0
    handle.detach()
    assert handle.inspect().in_flight.host_capacity_bytes == 0


def test_parameters_at_rest() -> None:
    model = make()
    device = SimulatedDevice(0)
    with on_device(device, lambda: PinnedStore(device)):
        handle = ebbtide.offload(model, weights=WeightPolicy(num_layers=2))
    parameters = handle.inspect().parameters
    assert [each.name for each in parameters] == [
        "0.0.weight", "0.0.bias", "1.0.weight", "1.0.bias",
    ]  # fmt: skip
    assert [each.group for each in parameters] == [0, 0, 1, 1]
    assert {each.tier for each in parameters} == {"host"}
    assert [each.address for each in parameters] == [
        p.data_ptr() for p in list(model.parameters())[:4]
    ]
    assert not any(each.on_device for each in parameters)
    step(model)
    looked = handle.inspect()
    assert any(each.on_device for each in looked.parameters)
    assert 0 < looked.in_flight.weight_bytes == handle.stats.peak_weight_bytes
    assert looked.in_flight.peak_weight_groups == 2
    handle.detach()


def test_it_prints_as_a_table_of_80_columns() -> None:
    model = make()
    device = SimulatedDevice(0)
    with on_device(device, lambda: PinnedStore(device)):
        handle = ebbtide.offload(
            model, activations=ActivationPolicy(min_bytes=1), weights=WeightPolicy()
        )
    assert str(handle.inspect()).startswith("no step has finished")
    step(model)
    text = str(handle.inspect())
    assert max(map(len, text.splitlines())) <= 80
    assert "0 0                        0   64.0 KiB  offload  host       1" in text
    assert "now: nothing is held or moved for a step" in text
    assert "0.0.weight" in text
    handle.detach()
