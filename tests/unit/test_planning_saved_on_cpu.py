"""What `save_on_cpu` copies, on paper and in torch."""

from __future__ import annotations

import pytest
import torch
from benchmarks.plan_paper import profile_saved_on_cpu
from torch import nn

from ebbtide.planning.contest import keep_all
from ebbtide.planning.hardware import Hardware
from ebbtide.planning.prediction import StepTiming
from ebbtide.tools.fake_profile import profile_with_fake_tensors

H100 = Hardware.named("h100", achievable=True)


class Squares(nn.Module):
    """Saves its product twice, and a number that is expanded to a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y * y * y.new_ones(1).expand_as(y)


def test_every_save_is_copied_whole() -> None:
    """The batch and the weight, the product twice, and the ones as a whole matrix."""
    batch = torch.zeros(8, 16)
    found = profile_saved_on_cpu(Squares(), batch, H100)
    sizes = [16 * 16 * 4 if name == "weight" else 8 * 16 * 4 for name in SAVED]
    assert found.num_copies == len(SAVED)
    assert found.copied_bytes == sum(sizes)
    copies_s = sum(H100.offload_s(size) + H100.reload_s(size) for size in sizes)
    assert found.step_s == pytest.approx(found.compute_s + copies_s)


# The batch has no gradient, so the weight is not saved for it; `y * y` saves both factors, and the
# second product saves the ones for the gradient of the squares.
SAVED = ("batch", "product", "product", "ones")


def test_torch_copies_the_same() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), Squares())
    batch = torch.randn(8, 16)
    sizes = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(torch.empty(tensor.size(), dtype=tensor.dtype).nbytes)  # as save_on_cpu does
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch).sum().backward()
    found = profile_saved_on_cpu(model, batch, H100)
    assert found.copied_bytes == sum(sizes)
    assert found.num_copies == len(sizes)


def test_it_computes_as_long_as_a_step_that_keeps_everything_and_needs_less() -> None:
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(6)]
    model, batch = nn.Sequential(*blocks), torch.zeros(4096, 64)
    profile = profile_with_fake_tensors(model, batch, H100, layers=blocks, min_bytes=1)
    kept = StepTiming(profile, H100).predict(keep_all(profile))
    found = profile_saved_on_cpu(model, batch, H100)
    assert found.compute_s == pytest.approx(kept.step_s)
    # The step keeps 18 matrices of 1 MiB, of which backward has two or three at a time here.
    assert found.peak_bytes < kept.peak_bytes - 10 * 2**20
