"""The optimizer's step inside backward, with weights at rest on the software accelerator."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
import softdevice
from soft_bench import LONG, PORTFOLIO, on, on_the_host
from soft_overlap_programs import check_overlap
from soft_programs import order_of


def test_random_programs_with_steps_ahead(request) -> None:
    order = request.config.getoption("--order")
    content: Counter[str] = Counter()
    for seed in range(12):
        content += check_overlap(seed, order_of(order, seed))
    assert min(content[what] for what in ("ahead", "again", "clipped")) > 5


class _WhereItsWeightsAre(nn.Module):
    """Computes where its weights are; its gradients are long in coming there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        weight = _Late.apply(self.linear.weight)
        x = x.to(weight.device)
        return nn.functional.linear(x, weight, self.linear.bias).tanh().cpu()


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        if gradient.device.type != "cpu":
            softdevice.sleep(LONG // 10)
        return gradient * 2


def _train_and_move(device: torch.device, *, overlaps: bool) -> tuple[dict[str, Tensor], Any]:
    """Four steps, of which a layer is on the device in the last two."""
    torch.manual_seed(0)
    model = nn.Sequential(*[_WhereItsWeightsAre() for _ in range(4)])
    handle = ebbtide.offload(model, activations=ebbtide.ActivationPolicy(min_bytes=1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if overlaps:
        optimizer = handle.overlap(optimizer, max_norm=0.05, shadow_budget=2**30)
    found: dict[str, Tensor] = {}
    for number in range(4):
        optimizer.zero_grad()
        if number == 2:
            for parameter in model[1].parameters():  # as Module.to does where it can
                parameter.data = parameter.data.to(device)
        model(torch.randn(8, 16)).square().mean().backward()
        if overlaps:
            optimizer.step()
            norm = optimizer.grad_norm
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        found[f"norm {number}"] = norm.detach().clone()
    found |= {name: value.detach().clone() for name, value in model.named_parameters()}
    handle.detach()
    return on_the_host(found), optimizer


@pytest.mark.parametrize("order", PORTFOLIO)
def test_weights_that_moved_to_the_device_step_when_the_program_says_so(
    order: str, device: torch.device
) -> None:
    """The worker would compute their norms beside the kernels that compute their gradients."""
    softdevice.choose_order(order)
    with on(torch.Stream(device=device)):
        plain, _ = _train_and_move(device, overlaps=False)
        mine, _ = _train_and_move(device, overlaps=True)
    for name, value in plain.items():
        assert torch.equal(mine[name], value), name
