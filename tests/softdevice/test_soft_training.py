"""Training on the device by itself has the same bits in every order: neural operators above all."""

import copy

import pytest
import torch
from torch import Tensor, nn

import ebbtide
import softdevice
from soft_bench import PORTFOLIO
from zoo import assert_bitwise_equal


def _train(model: nn.Module, x: Tensor, steps: int = 3) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


def _fno() -> nn.Module:
    models = pytest.importorskip("neuralop.models")
    return models.FNO(n_modes=(6, 6), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2)


def test_an_fno_trains_to_the_same_bits_in_every_order(device: torch.device) -> None:
    x = torch.randn(2, 1, 16, 16)
    found = {}
    for order in PORTFOLIO:
        softdevice.choose_order(order)
        torch.manual_seed(0)
        found[order] = _train(_fno().to(device), x.to(device))
    for trained in found.values():
        assert_bitwise_equal(trained, found["threads"])
    torch.manual_seed(0)
    on_cpu = _train(_fno(), x)
    for name, value in found["threads"].items():
        torch.testing.assert_close(value, on_cpu[name], rtol=1e-3, atol=1e-5)


def test_a_failed_step_leaves_nothing_and_training_goes_on(device: torch.device) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device)
    x = torch.randn(64, 256, device=device)
    expected = _train(model, x, steps=1)
    torch.accelerator.synchronize()
    model.zero_grad()
    torch.accelerator.empty_cache()
    before_bytes = torch.accelerator.memory_allocated()
    softdevice.set_capacity(torch.accelerator.memory_reserved() + 2**20)
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.randn(4096, 256, device=device)).sum().backward()
    assert torch.accelerator.memory_allocated() == before_bytes
    softdevice.set_capacity(2**30)
    assert set(_train(model, x, steps=1)) == set(expected)


class _Jacobian(nn.Module):
    """Calls a layer inside transforms of `torch.func`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.second = copy.deepcopy(self.first)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.jacfwd(self.second))(self.first(x))


@pytest.mark.parametrize("mode", ["offload", "recompute+offload"])
def test_a_layer_inside_transforms_is_offloaded(device: torch.device, mode: str) -> None:
    torch.manual_seed(0)
    models = [_Jacobian().to(device)]
    models.append(copy.deepcopy(models[0]))
    x = torch.randn(8, 16).to(device)
    policy = ebbtide.ActivationPolicy(mode=mode, min_bytes=1)
    plain = _train(models[0], x)
    layers = ["first.*", "second.*"]
    with ebbtide.offload(models[1], activations=policy, layers=layers) as handle:
        assert_bitwise_equal(_train(models[1], x), plain)
        assert handle.stats.offloaded_bytes > 0
