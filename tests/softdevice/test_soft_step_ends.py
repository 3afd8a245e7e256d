"""A loop that always has a graph, on a device that is behind the host: events do not pile up."""

import gc
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import ebbtide
import softdevice
from soft_bench import PORTFOLIO

NUM_LAYERS = 3


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(NUM_LAYERS)))


def _train(model: nn.Module, batches: Tensor) -> tuple[list[Tensor], list[Counter[str]]]:
    """Begins each forward before the backward of the one before, and counts objects on the way."""
    waiting, found, objects = model(batches[0]).sum(), list[Tensor](), list[Counter[str]]()
    for number, batch in enumerate(batches[1:]):
        following = model(batch).sum()
        model.zero_grad()
        waiting.backward()
        found.append(torch.cat([p.grad.cpu().flatten() for p in model.parameters()]))
        waiting = following
        if number in (80, len(batches) - 2):
            torch.accelerator.synchronize()
            gc.collect()
            objects.append(Counter(type(each).__name__ for each in gc.get_objects()))
    return found, objects


@pytest.mark.parametrize("weights", [None, ebbtide.WeightPolicy()], ids=["activations", "weights"])
def test_events_do_not_pile_up_without_a_moment_without_graphs(
    device: torch.device, weights: ebbtide.WeightPolicy | None
) -> None:
    batches = torch.randn(150, 8, 16).to(device)
    softdevice.choose_order(PORTFOLIO[0])
    expected, _ = _train(_model().to(device), batches)
    for order in PORTFOLIO[:2]:
        softdevice.choose_order(order)
        model = _model().to(device)
        policy = ebbtide.ActivationPolicy(min_bytes=1)
        with ebbtide.offload(model, activations=policy, weights=weights) as handle:
            found, objects = _train(model, batches)
            num_saved = handle.stats.num_saved
        assert all(map(torch.equal, found, expected))
        grown = objects[1] - objects[0]
        assert sum(count for name, count in grown.items() if "Event" in name) < 60, grown
        assert sum(grown.values()) < 250, grown  # of these, 69 are the gradients that were found
        one = _model().to(device)
        with ebbtide.offload(one, activations=policy, weights=weights) as handle:
            one(batches[0]).sum().backward()
        assert num_saved == handle.stats.num_saved
