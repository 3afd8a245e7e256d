"""Recomputed layers on an accelerator, and what the program changes before backward."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide import ActivationPolicy, SavedTensorModifiedError, WeightPolicy

WIDTH = 64
SETTING = {"shift": 1.0}
find_setting = SETTING.__getitem__


class Block(nn.Module):
    t = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.norm(self.linear(x)), 0.2, self.training)
        return (x + find_setting("shift")).sin() * self.t


class Data(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.mul_(0.99)
        return super().forward(x)


class Model(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate([*self.layers, *self.layers]):
            layer.t = 1 + number / 8
            x = layer(x)
        return x


def train(model: nn.Module, device: torch.device, num_steps: int = 4) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(torch.randn(32, WIDTH, device=device)).square().mean()
        loss.backward()
        found += [loss.detach().cpu(), *[p.grad.cpu() for p in model.parameters()]]
        optimizer.step()
    return [*found, *[each.detach().cpu() for each in model.state_dict().values()]]


@pytest.mark.parametrize("weights", [None, WeightPolicy()], ids=["", "weights at rest"])
@pytest.mark.parametrize("mode", ["recompute", "recompute+offload"])
def test_what_is_recomputed_is_right(
    device: torch.device, mode: str, weights: WeightPolicy | None
) -> None:
    """A shared layer with an attribute for each call; and one that changes its own weight."""
    torch.manual_seed(0)
    for kind in (Block, Data) if weights is None else (Block,):
        model = Model([Block(), kind(), Block()]).to(device)
        again = copy.deepcopy(model)
        expected = train(model, device)
        policy: Any = ActivationPolicy(mode=mode, min_bytes=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with ebbtide.offload(
                again, activations=policy, weights=weights, layers=["layers.?"]
            ) as handle:
                found = train(again, device)
                assert handle.stats.recomputed_bytes > 0
                names = {each.layer.name for each in handle.inspect().recomputed}
        assert not [each for each in caught if "not-recomputed" in str(each.message)]
        assert "layers.1" in names
        assert all(map(torch.equal, expected, found))


def test_a_layer_that_writes_a_weight_at_rest_after_its_use_is_an_error(
    device: torch.device,
) -> None:
    """Without an offload, no version tells of it, and backward has the weight of the last call."""
    model = Model([Block(), Data(), Block()]).to(device)
    policy = ActivationPolicy(mode="recompute", min_bytes=1)
    with (
        ebbtide.offload(model, activations=policy, weights=WeightPolicy(), layers=["layers.?"]),
        pytest.raises(SavedTensorModifiedError),
    ):
        train(model, device)


def test_what_the_program_changes_before_backward_does_not_count(device: torch.device) -> None:
    """Neither a setting nor a weight: the forward has computed with what was there."""

    def run(model: Model) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        loss = model(x).square().sum()
        SETTING["shift"] = 1.5
        norm = model.layers[1].norm.weight
        norm.data = norm.data * 1.0
        loss.backward()
        SETTING["shift"] = 1.0
        return [p.grad.clone() for p in model.parameters()]

    plain = Model([Block(), Block()]).to(device)
    model = copy.deepcopy(plain)
    x = torch.randn(32, WIDTH, device=device)
    policy = ActivationPolicy(mode="recompute", min_bytes=1)
    with ebbtide.offload(model, activations=policy, layers=["layers.?"]) as handle:
        for _ in range(3):
            assert all(map(torch.equal, run(plain), run(model)))
        assert handle.stats.recomputed_bytes > 0


@pytest.mark.parametrize("how", ["replaced", "in place"])
def test_a_bias_may_change_before_backward(device: torch.device, how: str) -> None:
    """Autograd does not save it: the second forward computes with what it was."""

    def gradients(model: Model) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        loss = model(x).square().sum()
        bias = model.layers[1].linear.bias
        if how == "replaced":
            bias.data = bias.data * 1.01
        else:
            with torch.no_grad():
                bias.mul_(1.01)
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = Model([Block(), Block()]).to(device)
    model = copy.deepcopy(plain)
    x = torch.randn(32, WIDTH, device=device)
    policy = ActivationPolicy(mode="recompute", min_bytes=1, rebuild=False)
    with ebbtide.offload(model, activations=policy, layers=["layers.?"]) as handle:
        for _ in range(4):
            assert all(map(torch.equal, gradients(plain), gradients(model)))
        assert handle.stats.recomputed_bytes > 0


@pytest.mark.parametrize("how", ["replaced", "in place"])
def test_a_weight_at_rest_that_is_written_before_backward(device: torch.device, how: str) -> None:
    model = Model([Block(), Block()]).to(device)
    x = torch.randn(32, WIDTH, device=device)
    policy = ActivationPolicy(mode="recompute", min_bytes=1)
    with ebbtide.offload(
        model, activations=policy, weights=WeightPolicy(), layers=["layers.?"]
    ) as handle:
        for _ in range(2):
            model(x).sum().backward()
        assert handle.stats.recomputed_bytes > 0
        loss = model(x).sum()
        if how == "replaced":
            weight = model.layers[1].linear.weight
            weight.data = weight.data * 2
        else:
            with torch.no_grad():
                model.layers[1].linear.weight.mul_(2)
        with pytest.raises(SavedTensorModifiedError):
            loss.backward()


class Pairs(nn.Module):
    """Autocast casts before a bilinear product on an accelerator, and within it on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.pairs = nn.Bilinear(WIDTH, 4, WIDTH)
        self.t = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).float().sin()
        inverse = torch.linalg.pinv(torch.complex(y[:8, :8], y[:8, 8:16]))
        return self.pairs(y, y[:, :4]).float().sin() + torch.view_as_real(inverse).mean()


@pytest.mark.parametrize("casts", [False, True])
def test_operators_compute_as_without_a_mode(device: torch.device, casts: bool) -> None:
    def run(*, offloads: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Model([Pairs(), Pairs()]).to(device)
        policy = ActivationPolicy(min_bytes=1, mode="recompute")
        if offloads:
            ebbtide.offload(model, activations=policy)
        with torch.autocast(device.type, torch.bfloat16, enabled=casts):
            return train(model, device, 3)

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert all(map(torch.equal, run(offloads=False), run(offloads=True)))


class SinOnHost(torch.autograd.Function):
    """Notes where backward finds what was saved."""

    found: list[str] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        SinOnHost.found.append(x.device.type)
        return gradient * x.to("cpu").cos()


class PartlyOnHost(nn.Module):
    """Adds up two gradients at most, as threads of autograd do so in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        return x * SinOnHost.apply(x.cpu()).to(x.device)


@pytest.mark.parametrize("mode", ["recompute", "recompute+offload"])
def test_what_a_layer_computes_on_the_host_is_there_in_backward(
    device: torch.device, mode: str
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(PartlyOnHost() for _ in range(3))).to(device)
    model = copy.deepcopy(plain)
    expected = train(plain, device)
    SinOnHost.found.clear()
    policy = ActivationPolicy(mode=mode, min_bytes=1)
    with ebbtide.offload(model, activations=policy, layers=["?"]) as handle:
        assert all(map(torch.equal, train(model, device), expected))
        assert handle.stats.recomputed_bytes > 0
    assert set(SinOnHost.found) == {"cpu"}
