"""The statistics against an independent count, and what is not to be copied is not."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide import ActivationPolicy
from zoo import ENTRIES, Entry

BY_NAME = {entry.name: entry for entry in ENTRIES}
EVERYTHING = ActivationPolicy(min_bytes=1, rebuild=False)


@dataclass
class Count:
    saved_bytes: int
    unique_bytes: int
    parameter_bytes: int
    num_saved: int


def _count(entry: Entry, model: nn.Module, inputs: dict[str, Tensor]) -> Count:
    """Counts what autograd saves, holding all of it so that no address is used twice."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    own |= {tensor.untyped_storage().data_ptr() for tensor in model.buffers()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = entry.run(model, inputs)
    parameters = [t for t in saved if t.untyped_storage().data_ptr() in own]
    activations = [t for t in saved if t.untyped_storage().data_ptr() not in own]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in activations}
    del result
    return Count(
        saved_bytes=sum(t.nbytes for t in saved),
        unique_bytes=sum(storages.values()),
        parameter_bytes=sum(t.nbytes for t in parameters),
        num_saved=len(saved),
    )


def _measured(entry: Entry, model: nn.Module, inputs: dict[str, Tensor]) -> ebbtide.StepStats:
    # The entry's loss is outside the model and saves too: offload one module that holds both.
    whole = _WithLoss(entry, model)
    with ebbtide.offload(whole, activations=EVERYTHING, layers=[]) as handle:
        whole(inputs).backward()
    return handle.stats


class _WithLoss(nn.Module):
    def __init__(self, entry: Entry, model: nn.Module) -> None:
        super().__init__()
        self.entry = entry
        self.model = model

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.entry.loss(self.model, inputs)


@pytest.mark.parametrize(
    "name", ["fno_1d", "fno_2d", "fno_3d", "fno_complex", "uno", "rno", "llama", "gpt2", "vit"]
)
def test_bytes_agree_with_an_independent_count(name: str) -> None:
    entry = BY_NAME[name]
    model, inputs = entry.build()
    counted = _count(entry, model, inputs)
    stats = _measured(entry, model, inputs)
    assert stats.num_saved == counted.num_saved
    assert stats.saved_bytes == counted.saved_bytes
    assert stats.parameter_bytes == counted.parameter_bytes
    # A small view of a large storage is gathered: then less moves than the storages hold.
    assert stats.kept_bytes == 0
    assert stats.unique_bytes == stats.offloaded_bytes <= counted.unique_bytes
    if name in ("fno_2d", "fno_3d"):
        assert stats.offloaded_bytes == counted.unique_bytes
        assert stats.offloaded_bytes < 0.85 * (stats.saved_bytes - stats.parameter_bytes)


def test_linear_saves_its_transposed_weight_as_a_parameter() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16))
    with ebbtide.offload(model, activations=EVERYTHING) as handle:
        model(torch.randn(8, 64, requires_grad=True)).sum().backward()
    # Each layer saves its input and its weight; the first one's serves the input's gradient.
    assert handle.stats.parameter_bytes == 4 * (64 * 32 + 32 * 16)
    assert handle.stats.offloaded_bytes == 4 * (8 * 64 + 8 * 32)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_weights_are_never_copied(frozen: bool, autocast: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 16))
    model.requires_grad_(not frozen)
    item = 2 if autocast else 4
    x = torch.randn(8, 64, requires_grad=True)
    with (
        ebbtide.offload(model, activations=EVERYTHING) as handle,
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        model(x).sum().backward()
    assert handle.stats.parameter_bytes == item * (64 * 32 + 32 * 16)
    # GELU's input; and, for the gradients of trained weights, the inputs of both layers.
    inputs = 0 if frozen else item * (8 * 64 + 8 * 32)
    assert handle.stats.offloaded_bytes == item * 8 * 32 + inputs


def test_complex_and_convolution_weights_and_buffers_are_never_copied() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spectral = nn.Parameter(torch.randn(32, 32, dtype=torch.complex64))
            self.mix = nn.Conv1d(32, 32, 1)
            self.register_buffer("window", torch.hann_window(64))

        def forward(self, x: Tensor) -> Tensor:
            x = self.mix(x * self.window)
            spectrum = torch.fft.rfft(x)
            return torch.einsum("bix,io->box", spectrum, self.spectral).abs()

    model = Model()
    with ebbtide.offload(model, activations=EVERYTHING) as handle:
        model(torch.randn(4, 32, 64, requires_grad=True)).sum().backward()
    stats = handle.stats
    assert stats.parameter_bytes == 8 * 32 * 32 + 4 * 32 * 32 + 4 * 64
    # In order: the convolution's input; the FFT's input, which `FftR2C` saves and never reads; the
    # spectrum as einsum's operand; abs keeps its input, einsum's result, and its own result.
    spectrum = 4 * 32 * 33 * 8
    assert stats.offloaded_bytes <= 2 * 4 * 32 * 64 * 4 + 3 * spectrum


def test_peaks_and_counts_of_a_chain() -> None:
    """Exp saves its result: N results of S bytes, each offloaded and reloaded once."""
    steps, size_bytes = 6, 256 * 1024

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.scale
            for _ in range(steps):
                x = (x * 0.1).exp()
            return x

    model = Chain()
    policy = ActivationPolicy(max_inflight_bytes=size_bytes, rebuild=False)
    policy = ActivationPolicy(min_bytes=1, max_inflight_bytes=size_bytes, rebuild=False)
    with ebbtide.offload(model, activations=policy) as handle:
        for _ in range(3):
            model(torch.zeros(size_bytes // 4)).sum().backward()
            stats = handle.stats
            assert stats.num_saved == steps
            assert stats.num_offloaded == steps
            assert stats.offloaded_bytes == steps * size_bytes
            assert stats.peak_disk_bytes == steps * size_bytes
            assert stats.peak_host_bytes == 0
            # One on its way in either direction, and the one whose copy down has just ended.
            assert stats.peak_device_bytes <= 3 * size_bytes
            assert stats.reloaded_bytes <= stats.offloaded_bytes


def test_what_is_in_flight_is_a_small_part_of_what_a_small_model_saves() -> None:
    """All that this model saves, 32 MiB, is less than what may be in flight for a large one."""
    ratios = {}
    for bound in (None, "64MiB"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(15)])
        policy = ActivationPolicy(max_inflight_bytes=bound)
        with ebbtide.offload(model, activations=policy) as handle:
            for _ in range(2):
                model(torch.randn(2048, 256)).square().mean().backward()
        assert handle.stats.unique_bytes == 32 * 2**20
        ratios[bound] = handle.stats.peak_device_bytes / handle.stats.unique_bytes
    # A quarter of it, and the tensor that is being saved or read beside that.
    assert ratios[None] <= 1 / 4 + 1 / 16
    assert ratios["64MiB"] > 0.6  # a bound that is given is used as given


def test_stats_print_as_a_table() -> None:
    text = str(ebbtide.StepStats(saved_bytes=3 * 2**30, num_saved=7, stall_s=0.25))
    assert "saved_bytes             3.00 GiB" in text
    assert "stall_s                  0.250 s" in text
