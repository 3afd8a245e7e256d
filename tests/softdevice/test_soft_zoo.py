"""The zoo on the software accelerator: weights on the host and layers recomputed, bit for bit.

`tests/gpu/test_gpu_parity.py` has the zoo with activations offloaded. Plain training on the same
device is what each model is compared with.
"""

import gc

import pytest
import torch

import ebbtide
from ebbtide import ActivationPolicy, WeightPolicy
from gpu_bench import assert_at_rest, fft_takes
from test_weights_zoo import LAYERS, OPTIMIZERS, Train
from zoo import ENTRIES, Entry, assert_bitwise_equal

STEPS = 3  # SFNO makes modules in its first step, the second verifies, and the third recomputes
OPTIMIZERS_HERE = {"adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=False)}
"""One parameter after the other on the device too, as on the host: the same arithmetic."""

MODES = ("offload", "recompute", "recompute+offload")
each_entry = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
pytestmark = pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")


@pytest.fixture(autouse=True)
def _one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in OPTIMIZERS_HERE.items():
        monkeypatch.setitem(OPTIMIZERS, name, make)


def _small(mode: str) -> ActivationPolicy:
    """Nearly every activation of the zoo's small models is large enough to move."""
    return ActivationPolicy(min_bytes="4KiB", max_inflight_bytes="64KiB", mode=mode)


def _skip_without_plain_step(entry: Entry, device: torch.device) -> None:
    if "fno" in entry.name and entry.autocast and not fft_takes(entry.autocast, device):
        pytest.skip(f"torch has no FFT in {entry.autocast} on {device.type}, so no plain step")


def _assert_parity(entry: Entry, device: torch.device, **arguments: object) -> ebbtide.StepStats:
    _skip_without_plain_step(entry, device)
    expected = Train(entry, "adamw", device).steps(STEPS)
    train = Train(entry, "adamw", device)
    with ebbtide.offload(train.model, layers=LAYERS.get(entry.name), **arguments) as handle:
        assert_bitwise_equal(train.steps(STEPS), expected)
        stats = handle.stats
        assert_at_rest(handle)
    assert_bitwise_equal(train.state(), expected)
    del train, handle
    gc.collect()
    return stats


@each_entry
def test_weights_on_the_host(entry: Entry, device: torch.device) -> None:
    """Their optimizer steps on the host, and activations move beside them in one of two ways."""
    activations = _small(MODES[len(entry.name) % 3])
    _assert_parity(entry, device, weights=WeightPolicy(), activations=activations)


@each_entry
def test_recomputed_layers(entry: Entry, device: torch.device) -> None:
    if entry.name == "llama_checkpointed":
        pytest.skip("checkpoints its layers itself")
    mode = MODES[1 + len(entry.name) % 2]
    stats = _assert_parity(entry, device, activations=_small(mode))
    assert stats.recomputed_bytes > 0
