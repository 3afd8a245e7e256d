"""Megatron's settings: what each does, and their checks."""

import pytest
import torch
from ebbtide.compat.megatron import CPUOffloadingConfig
from torch import nn
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide import PolicyError
from ebbtide.devices import SimulatedDevice
from ebbtide.stores import PinnedStore
from loops import on_device

ROWS = 4096  # 4096 x 64 x 4 B = 1 MiB: the smallest tensor that leaves


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
        self.layers = nn.ModuleList(blocks)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x.square().mean()


def train(model: Model) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(ROWS, 64)).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("activations", "weights", "double"),
    [(True, False, False), (False, True, False), (False, True, True), (True, True, True)],
)
def test_activations_weights_or_both(
    activations: bool, weights: bool, double: bool, recompute: bool
) -> None:
    expected = train(Model(recompute))
    model = Model(recompute)
    device = SimulatedDevice(0)
    config = CPUOffloadingConfig(
        cpu_offloading=True,
        cpu_offloading_num_layers=2,
        cpu_offloading_activations=activations,
        cpu_offloading_weights=weights,
        cpu_offloading_double_buffering=double,
        cpu_offloading_retain_pinned_cpu_buffers=True,
    )
    with on_device(device, lambda: PinnedStore(device, slab_bytes=2**20), 2**24):
        handle = config.apply(model)
    got = train(model)
    assert all(map(torch.equal, got, expected))
    looked = handle.inspect()
    assert bool(looked.parameters) == weights
    if weights:
        assert len({parameter.group for parameter in looked.parameters}) == 2
        assert looked.in_flight.peak_weight_groups == (2 if double else 1)
    # A recomputed layer saves nothing itself: its input is saved around it, and stays.
    assert (handle.stats.offloaded_bytes > 0) == (activations and not recompute)
    handle.detach()


def test_off_is_off() -> None:
    model = Model()
    handle = CPUOffloadingConfig().apply(model)
    model(torch.randn(ROWS, 64)).backward()
    assert handle.stats.offloaded_bytes == handle.stats.rebuilt_bytes == 0
    handle.detach()


def test_layers_by_name() -> None:
    config = CPUOffloadingConfig(cpu_offloading=True, cpu_offloading_num_layers=1)
    handle = config.apply(Model(), layers=["layers.*.1"])
    assert handle.layers == ("layers.0.1", "layers.1.1", "layers.2.1", "layers.3.1")
    handle.detach()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cpu_offloading_num_layers": -1}, "0 or more"),
        ({"cpu_offloading_num_layers": True}, "0 or more"),
        ({"cpu_offloading": 1}, "True or False"),
        (
            {"cpu_offloading": True, "cpu_offloading_activations": False},
            "activations, weights, or both",
        ),
    ],
)
def test_settings_are_checked(settings: dict[str, object], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        CPUOffloadingConfig(**settings)


def test_too_many_layers() -> None:
    config = CPUOffloadingConfig(cpu_offloading=True, cpu_offloading_num_layers=4)
    with pytest.raises(PolicyError):
        config.apply(Model())
    ebbtide.offload(Model()).detach()
