"""Loops with weights at rest in which anything may come between two statements."""

import gc
import os
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide.devices import SimulatedDevice
from ebbtide.stores import PinnedStore
from loops import on_device
from weight_statements import STATEMENTS, check_statements

SEEDS = int(os.environ.get("EBBTIDE_SIMULATION_SEEDS", "24"))
CHUNK = min(SEEDS, 50)
WIDTH = 16


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_random_statements(first: int) -> None:
    content: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        content += check_statements(seed)
    assert content.keys() == STATEMENTS.keys() | {"interrupted", "said so"}
    assert min(content.values()) > CHUNK // 12


@pytest.mark.parametrize("kind", ["disk", "tiered"])
def test_random_statements_with_files(kind: str) -> None:
    for seed in range(SEEDS // 10):
        check_statements(seed, kind)


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False).sin()
        return x.square().sum()


def _offloaded(model: nn.Module, device: SimulatedDevice) -> ebbtide.OffloadHandle:
    with on_device(device, lambda: PinnedStore(device, slab_bytes=2**15)):
        return ebbtide.offload(model, weights=ebbtide.WeightPolicy())


@pytest.mark.parametrize("number", [0, 1])
def test_a_recomputed_layer_sees_what_was_written_since_the_forward(number: int) -> None:
    """Its weights may still be on the device, with the values of the forward."""
    plain, model = _Checkpointed(), _Checkpointed()
    with _offloaded(model, SimulatedDevice(0)):
        gradients = []
        for each in (plain, model):
            loss = each(torch.ones(2, WIDTH))
            with torch.no_grad():
                each.layers[number].weight.mul_(0.5)
            loss.backward()
            gradients.append([p.grad for p in each.parameters()])
        assert all(map(torch.equal, *gradients))


def test_a_recomputed_layer_sees_what_was_assigned_since_the_forward() -> None:
    plain, model = _Checkpointed(), _Checkpointed()
    with _offloaded(model, SimulatedDevice(0)):
        gradients = []
        for each in (plain, model):
            loss = each(torch.ones(2, WIDTH))
            weight = each.layers[0].weight
            weight.data = weight.data * 0.5
            loss.backward()
            gradients.append([p.grad for p in each.parameters()])
        assert all(map(torch.equal, *gradients))


def test_copies_under_way_keep_their_memory_when_the_engine_is_collected() -> None:
    """The simulated device raises where a copy finds its memory freed."""
    device = SimulatedDevice(0, eagerness=0.0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    with on_device(device, lambda: PinnedStore(device, slab_bytes=2**15)):
        handle = ebbtide.offload(model, activations=ebbtide.ActivationPolicy(min_bytes=1))
    loss = model(torch.ones(2, WIDTH)).sum()
    handle.detach()
    del handle, model
    gc.collect()
    del loss  # the copies down have not run, and nothing refers to the engine any more
    gc.collect()
    device.finish_copies()
    device.finish_jobs()
    assert device.allocated_bytes() == 0
