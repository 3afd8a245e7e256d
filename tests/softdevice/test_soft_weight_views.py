"""Views of weights that a forward changes after the layer has run, or after the forward."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ebbtide
import softdevice
from soft_bench import PORTFOLIO

WIDTH = 32

Take = Callable[[Tensor], Tensor]


class _Net(nn.Module):
    """Takes a view of the first layer's weight, and changes it later on.

    Args:
        take: the view.
        at: after which layer the view is changed.
        drop: whether the view dies right after the change.
    """

    def __init__(self, take: Take, at: int, *, drop: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)
        )
        self.take, self.at, self.drop = take, at, drop

    def forward(self, x: Tensor) -> Tensor:
        taken: list[Tensor] = []
        first = self.layers[0][0]  # type: ignore[index]
        hook = first.register_forward_hook(lambda *_: taken.append(self.take(first.weight)))
        for number, layer in enumerate(self.layers):
            x = layer(x)
            hook.remove()
            if number == self.at:
                with torch.no_grad():
                    taken[0].mul_(1.5)
                if self.drop:
                    taken.clear()
        for layer in self.layers[:2]:
            x = layer(x)
        return x


TAKES: dict[str, Take] = {
    "detach": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "row": lambda weight: weight.data[0],
    "transposed": lambda weight: weight.t().detach(),
    "weight": lambda weight: weight,
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES.keys())
def test_what_a_forward_changes_through_a_view_later_is_kept_or_refused(
    device: torch.device, take: Take, grad: bool
) -> None:
    """It is kept if the weights are where they were, and always if it is the weight itself."""
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    for order in PORTFOLIO:
        softdevice.choose_order(order)
        for at, drop in ((0, True), (1, False), (3, True), (3, False), (4, False)):
            plain = _Net(take, at, drop=drop).to(device)
            mine = copy.deepcopy(plain)
            case = f"{order}, after layer {at}, {'dropped' if drop else 'held'}"
            num_refused = 0
            with (
                torch.set_grad_enabled(grad),
                ebbtide.offload(mine, layers=list(mine.layers), weights=ebbtide.WeightPolicy()),
            ):
                for _ in range(3):
                    try:
                        found = mine(x).cpu()
                    except ebbtide.PolicyError:
                        num_refused += 1
                    else:
                        assert torch.equal(found, plain(x).cpu()), case
            is_kept = take is TAKES["weight"] or at == 0
            assert num_refused == 0 if is_kept else num_refused > 0, case
            for one, other in zip(plain.parameters(), mine.parameters(), strict=True):
                assert torch.equal(one.cpu(), other.cpu()), case


def _model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers).to(device)


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES.keys())
def test_what_is_changed_through_a_view_after_the_forward_is_noticed(
    device: torch.device, take: Take, layer: int
) -> None:
    for order in PORTFOLIO:
        softdevice.choose_order(order)
        model = _model(device)
        x = torch.randn(8, WIDTH, device=device)
        taken: list[Tensor] = []
        linear = model[layer][0]
        with ebbtide.offload(model, weights=ebbtide.WeightPolicy()):
            hook = linear.register_forward_hook(lambda *_: taken.append(take(linear.weight)))  # noqa: B023
            model(x)
            hook.remove()
            for _ in range(2):
                model(x)  # a view that is only read is no obstacle
            with torch.no_grad():
                taken[0].mul_(2)
            with pytest.raises(ebbtide.PolicyError):
                model(x)
            model(x)
