"""On the simulated device, what each owner has adds up to the account's peak, in any order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.devices import SimulatedDevice
from ebbtide.observe.memory import MemoryLog
from ebbtide.runtime.events import Owner
from ebbtide.stores import PinnedStore
from loops import on_device

SAVED = {
    *(Owner.KEPT, Owner.LEAVING, Owner.RELOADED, Owner.REBUILT, Owner.RECOMPUTED),
}
"""Owners of bytes that the account counts."""

POLICIES = {
    "offload": ebbtide.ActivationPolicy(min_bytes=1, rebuild=False, max_inflight_bytes="2KiB"),
    "rebuild": ebbtide.ActivationPolicy(min_bytes=1),
    "two layers": ebbtide.ActivationPolicy(min_bytes=1, num_layers=2, rebuild=False),
    "recompute": ebbtide.ActivationPolicy(mode="recompute", min_bytes=1),
    "recompute+offload": ebbtide.ActivationPolicy(mode="recompute+offload", min_bytes=1),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.linear(x)).sin()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("seed", range(8))
def test_owners_add_up_to_the_accounts_peak(policy: ebbtide.ActivationPolicy, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(*[Block() for _ in range(4)])
    device = SimulatedDevice(seed, eagerness=0.3)
    with on_device(device, lambda: PinnedStore(device, slab_bytes=2**16)):
        handle = ebbtide.offload(model, activations=policy, trace=True)
    for _ in range(3):
        for _ in range(1 + seed % 2):  # micro-batches
            model(torch.randn(8, 16)).square().mean().backward()
        handle.inspect()  # waits for nothing, and notes what has died
        memory, stats = handle.trace.memory, handle.stats
        assert memory is not None
        assert memory.counted == "saved tensors"
        saved = [
            sum(size for owner, size in sample.owned.items() if owner in SAVED)
            for sample in memory.samples
        ]
        assert max(saved) == stats.peak_device_bytes
    device.finish_copies()
    handle.detach()


def test_weights_at_rest_are_no_memory_of_the_device() -> None:
    model = nn.Sequential(*[Block() for _ in range(4)])
    device = SimulatedDevice(0)
    weights = ebbtide.WeightPolicy(min_bytes=1)
    with on_device(device, lambda: PinnedStore(device, slab_bytes=2**16)):
        handle = ebbtide.offload(model, weights=weights, trace=True)
    model(torch.randn(8, 16)).square().mean().backward()
    samples = handle.trace.memory.samples
    # Two layers at a time: a weight of 16 x 16 x 4 B, and a bias of 16 x 4 B in 512 B.
    assert max(sample.owned.get(Owner.WEIGHTS, 0) for sample in samples) == 2 * (1024 + 512)
    assert not any(Owner.PARAMETERS in sample.owned for sample in samples)
    device.finish_copies()
    handle.detach()


def test_a_source_goes_when_its_copy_is_complete_however_much_may_be_in_flight() -> None:
    model = nn.Sequential(*[Block() for _ in range(6)])
    device = SimulatedDevice(0, eagerness=0.9)
    policy = ebbtide.ActivationPolicy(min_bytes=1, rebuild=False, max_inflight_bytes="1GiB")
    with on_device(device, lambda: PinnedStore(device, slab_bytes=2**16), bound_bytes=2**30):
        handle = ebbtide.offload(model, activations=policy)
    model(torch.randn(8, 16))
    assert handle.stats.peak_device_bytes < handle.stats.offloaded_bytes / 2
    device.finish_copies()
    handle.detach()


def test_a_change_that_nobody_notes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: here nothing that leaves is noted."""
    change = MemoryLog.change

    def note(log: MemoryLog, owner: Owner, size_bytes: int, *rest: int) -> None:
        if size_bytes > 0:
            change(log, owner, size_bytes, *rest)

    monkeypatch.setattr(MemoryLog, "change", note)
    with pytest.raises(AssertionError):
        test_owners_add_up_to_the_accounts_peak(POLICIES["two layers"], 1)
