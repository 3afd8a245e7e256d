"""Weights at rest on the host, under adversarial orders of copies."""

import os

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.devices import SimulatedDevice
from ebbtide.stores import PinnedStore
from loops import on_device
from weight_programs import Tally, check_weights

SEEDS = int(os.environ.get("EBBTIDE_SIMULATION_SEEDS", "36"))
CHUNK = min(SEEDS, 100)
CONTENT = {
    "another order",
    "asked for",
    "backward",
    "changed by hand",
    "dropped",
    "evaluated",
    "written after an evaluation",
    "held gradients",
    "interrupted backward",
    "interrupted forward",
    "retained",
}


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_random_training(first: int) -> None:
    tally = Tally()
    for seed in range(first, first + CHUNK):
        check_weights(seed, tally)
    assert set(tally.content) == CONTENT
    assert min(tally.content.values()) > CHUNK // 10


def equal_layers(
    device: SimulatedDevice, *, double_buffering: bool
) -> tuple[nn.Module, ebbtide.OffloadHandle]:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)])
    policy = ebbtide.WeightPolicy(double_buffering=double_buffering)
    with on_device(device, lambda: PinnedStore(device, slab_bytes=2**15)):
        return model, ebbtide.offload(model, weights=policy)


@pytest.mark.parametrize(("double_buffering", "groups"), [(True, 2), (False, 1)])
def test_the_peak_is_two_groups(double_buffering: bool, groups: int) -> None:
    """Of equal layers, two are on the device at once, or one: no more, no less."""
    device = SimulatedDevice(0)
    model, handle = equal_layers(device, double_buffering=double_buffering)
    peak_bytes = 0
    allocate = device.allocate

    def watched(size_bytes: int) -> Tensor:
        nonlocal peak_bytes
        device.finish_copies()  # what nobody waits for goes when its copy has ended
        memory = allocate(size_bytes)
        peak_bytes = max(peak_bytes, device.allocated_bytes())
        return memory

    device.allocate = watched
    for _ in range(3):
        model(torch.randn(4, 32)).sum().backward()
    # 32 x 32 weights and 32 of the bias, 4 bytes each, in whole blocks of 512 bytes.
    layer_bytes = 32 * 32 * 4 + 512
    assert peak_bytes == groups * layer_bytes
    handle.detach()


@pytest.mark.parametrize(("double_buffering", "buffers"), [(True, 2), (False, 1)])
def test_equal_layers_take_turns_in_the_same_buffers(double_buffering: bool, buffers: int) -> None:
    device = SimulatedDevice(0)
    model, handle = equal_layers(device, double_buffering=double_buffering)
    allocate, made = device.allocate, []
    device.allocate = lambda size_bytes: made.append(size_bytes) or allocate(size_bytes)
    for _ in range(3):
        model(torch.randn(4, 32)).sum().backward()
    assert len(made) == buffers
    handle.detach()


def test_copies_hide_behind_compute() -> None:
    """In virtual time, a link that is fast enough makes no layer wait but the first."""
    size_bytes = (64 * 64 + 64) * 4
    compute_s = 1e-3
    device = SimulatedDevice(0, 0.0, 2 * size_bytes / compute_s, timely=True)

    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            device.compute(compute_s)
            return self.linear(x).tanh()

    model = nn.Sequential(*[Timed() for _ in range(8)])
    with on_device(device, lambda: PinnedStore(device, slab_bytes=2**15)):
        handle = ebbtide.offload(model, weights=ebbtide.WeightPolicy())
    for _ in range(2):
        begin_s = device.now_s
        with torch.no_grad():
            model(torch.randn(4, 64))
        took_s = device.now_s - begin_s
    moved_bytes = handle._engine.weights.groups[0].size_bytes
    copy_s = moved_bytes * compute_s / 2 / size_bytes
    assert took_s == pytest.approx(8 * compute_s + copy_s)
    handle.detach()
