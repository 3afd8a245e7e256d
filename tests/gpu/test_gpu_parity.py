"""On the accelerator, too: whatever the model, the same numbers to the bit."""

import pytest
import torch

import ebbtide
from ebbtide import ActivationPolicy
from gpu_bench import KIB, STORES, assert_at_rest, fft_takes
from zoo import ENTRIES, Entry, Inputs, Snapshot, assert_bitwise_equal, snapshot

SMALL = ActivationPolicy(min_bytes="4KiB", max_inflight_bytes="64KiB")
"""Nearly every activation of the zoo's small models moves. All models save several above 64 KiB, so
some have left and must come back, even where the device is a whole forward behind the host."""
STEPS = 2  # the first prefetches by reverse save order, the second by the order learned
BY_NAME = {entry.name: entry for entry in ENTRIES}

pytestmark = pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")


def _step(entry: Entry, model: torch.nn.Module, inputs: Inputs) -> Snapshot:
    model.zero_grad()
    for tensor in inputs.values():
        tensor.grad = None
    return snapshot(entry, model, inputs)


def _plain(entry: Entry, device: torch.device) -> list[Snapshot]:
    model, inputs = entry.build(device=device)
    return [_step(entry, model, inputs) for _ in range(STEPS)]


def _expected(entry: Entry, device: torch.device) -> list[Snapshot]:
    """Plain steps. Skips the test of a model whose kernels do not repeat themselves."""
    expected = _plain(entry, device)
    for once, again in zip(expected, _plain(entry, device), strict=True):
        try:
            assert_bitwise_equal(again, once)
        except AssertionError as difference:
            pytest.skip(f"{entry.name} differs from itself without offload: {difference}")
    return expected


def _assert_offloaded_parity(entry: Entry, device: torch.device, **arguments: object) -> None:
    if "fno" in entry.name and entry.autocast and not fft_takes(entry.autocast, device):
        # Only for CPUs does torch's autocast give FFTs single precision.
        pytest.skip(f"torch has no FFT in {entry.autocast} on {device.type}, so no plain step")
    expected = _expected(entry, device)
    model, inputs = entry.build(device=device)
    with ebbtide.offload(model, activations=SMALL, **arguments) as handle:
        for plain in expected:
            assert_bitwise_equal(_step(entry, model, inputs), plain)
            assert handle.stats.offloaded_bytes > 64 * KIB
            assert handle.stats.reloaded_bytes > 0
        assert_at_rest(handle)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_zoo_is_bit_identical(entry: Entry, device: torch.device) -> None:
    _assert_offloaded_parity(entry, device)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", ["convnet", "recurrent", "llama", "fno_2d"])
def test_bit_identical_from_every_store(name: str, store: str, device: torch.device) -> None:
    # 1 MiB: 256 KiB of it are chunks on the way to disk, the rest is not enough for these models.
    budget = "1MiB" if store == "tiered" else None
    _assert_offloaded_parity(BY_NAME[name], device, store=store, host_budget=budget)


def test_wrapped_forward_is_bit_identical(device: torch.device) -> None:
    entry = BY_NAME["recurrent"]
    expected = _expected(entry, device)
    model, inputs = entry.build(device=device)
    model.forward = ebbtide.wrap_forward_with_offload(model.forward, activations=SMALL)
    for plain in expected:
        assert_bitwise_equal(_step(entry, model, inputs), plain)
    assert model.forward.handle.stats.offloaded_bytes > 64 * KIB
