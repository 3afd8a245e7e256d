"""Weights that rest on the host, on the device: the same bits, and the memory that they free."""

import copy

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from gpu_bench import (
    MIB,
    batch,
    finish_device,
    mean_square,
    needs_accelerator,
    needs_sleep,
    tower,
)

LAYERS = 6
pytestmark = needs_accelerator


def train_on_host(model: nn.Module, x: Tensor, steps: int = 4) -> dict[str, Tensor]:
    """Train with an optimizer that steps on the host, wherever parameters are."""
    optimizer: torch.optim.Optimizer | None = None
    mirror: list[nn.Parameter] = []
    for _ in range(steps):
        model.zero_grad()
        for turn in range(2):
            mean_square(model(x * (turn + 1))).backward()
        parameters = list(model.parameters())
        if not mirror:
            mirror = [nn.Parameter(p.detach().cpu().clone()) for p in parameters]
            optimizer = torch.optim.AdamW(mirror, lr=1e-3)
        for resting, parameter in zip(mirror, parameters, strict=True):
            assert parameter.grad is not None
            resting.grad = parameter.grad.cpu()
        assert optimizer is not None
        optimizer.step()
        with torch.no_grad():
            for resting, parameter in zip(mirror, parameters, strict=True):
                parameter.copy_(resting)
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def test_gradients_are_where_their_copies_have_written_them(device: torch.device) -> None:
    """In page-locked memory: autograd takes them as they are, and does not copy them again."""
    model, x = tower(device, LAYERS), batch(device)
    with ebbtide.offload(model, activations=None, weights=ebbtide.WeightPolicy()):
        for _ in range(3):
            model.zero_grad()
            mean_square(model(x)).backward()
            gradients = [p.grad for p in model.parameters() if p.device.type == "cpu"]
            assert gradients and all(g is not None and g.is_pinned() for g in gradients)


@pytest.mark.parametrize("double_buffering", [True, False])
@pytest.mark.parametrize("activations", [None, ebbtide.ActivationPolicy(min_bytes=1)])
def test_training_is_the_same(
    device: torch.device, activations: ebbtide.ActivationPolicy | None, double_buffering: bool
) -> None:
    model, x = tower(device, LAYERS), batch(device)
    expected = train_on_host(copy.deepcopy(model), x)
    policy = ebbtide.WeightPolicy(double_buffering=double_buffering)
    with ebbtide.offload(model, activations=activations, weights=policy):
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        got = train_on_host(model, x)
    assert {p.device for p in model.parameters()} == {device}
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


class Scaled(nn.Module):
    """A block that is given a keyword argument, and perhaps a number on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return self.linear(x) * scale


class OfScaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=scale)
        return x


@pytest.mark.parametrize(
    ("num_layers", "scale_on"),
    # The weights of other blocks would be on the device, and a scale on the host is given to all.
    [(None, "parameters"), (None, "host"), (1, "host")],
)
def test_inputs_may_be_made_where_the_first_parameter_rests(
    device: torch.device, num_layers: int | None, scale_on: str
) -> None:
    """As on `next(model.parameters()).device`, which is the host then."""
    torch.manual_seed(0)
    model = OfScaled().to(device)

    def gradients() -> list[Tensor]:
        home = next(model.parameters()).device
        x = torch.ones(8, 64, device=home, requires_grad=True)
        scale = torch.tensor(0.5) if scale_on == "host" else torch.full((64,), 0.5, device=home)
        model.zero_grad()
        loss = model(x, scale).square().mean()
        loss.backward()
        assert x.grad is not None
        return [x.grad.cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]

    expected = gradients()
    policy = ebbtide.WeightPolicy(num_layers=num_layers)
    with ebbtide.offload(model, weights=policy, layers=["blocks.*"]):
        got = gradients()
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one, other)


class Decaying(nn.Module):
    """Changes its own weight in its forward."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(64, 64), change

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        if self.change == "in place":
            with torch.no_grad():
                weight.mul_(0.9)
        elif self.change == "through data":
            weight.data.mul_(0.9)
        elif self.change == "reads data":
            x = x + weight.data.mean()
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("change", ["in place", "through data", "reads data"])
def test_a_weight_that_a_later_forward_changes_is_refused_as_torch_does(
    device: torch.device, change: str, forwards: int
) -> None:
    """Two forwards and one backward: torch raises where a version shows the change.

    At rest, a version shows what was changed through `data`, too.
    """
    torch.manual_seed(0)
    plain = nn.Sequential(Decaying(change), Decaying(change)).to(device)
    model = copy.deepcopy(plain)
    x = torch.randn(8, 64, device=device)

    def gradients(of: nn.Module) -> list[Tensor]:
        sum(mean_square(of(x * (n + 1))) for n in range(forwards)).backward()
        return [p.grad.cpu() for p in of.parameters()]

    with ebbtide.offload(model, weights=ebbtide.WeightPolicy(), layers=["?"]):
        if change != "reads data" and forwards == 2:
            for each in (plain, model)[change == "through data" :]:
                with pytest.raises(RuntimeError, match="modified"):
                    gradients(each)
            return
        for one, other in zip(gradients(plain), gradients(model), strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)


@needs_sleep
def test_a_step_waits_for_the_copies_of_a_forward_without_backward(device: torch.device) -> None:
    """The host is ahead of the device: it changes weights that the device has yet to copy."""
    model, x = tower(device, LAYERS), batch(device)
    with ebbtide.offload(model, weights=ebbtide.WeightPolicy()), torch.no_grad():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        expected = model(x).cpu()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        finish_device(device)
        torch.get_device_module(device)._sleep(100_000_000)
        got = model(x)
        optimizer.step()
        assert torch.equal(got.cpu(), expected), "it computed with weights from after the step"
        assert not torch.equal(model(x).cpu(), expected)


def test_an_optimizer_steps_on_the_host(device: torch.device) -> None:
    model, x = tower(device, LAYERS), batch(device)
    with ebbtide.offload(model, weights=ebbtide.WeightPolicy()):
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(3):
            optimizer.zero_grad()
            mean_square(model(x)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                model(x)
        for old, parameter in zip(before, model.parameters(), strict=True):
            assert not torch.equal(old, parameter), "a weight was never updated"
        state = torch.optim.Optimizer.state_dict(optimizer)["state"]
        assert all(v.device.type == "cpu" for s in state.values() for v in s.values())


def test_the_device_holds_two_layers(device: torch.device) -> None:
    width = 2048  # a layer's weights: 2048 x 2048 x 4 B = 16 MiB, and a bias
    model, x = tower(device, LAYERS, width), batch(device, 64, width)
    layer_bytes = (width * width + width) * 4
    policy = ebbtide.WeightPolicy()
    with ebbtide.offload(model, weights=policy):
        mean_square(model(x)).backward()
        finish_device(device)
        torch.accelerator.reset_peak_memory_stats(device)
        resting_bytes = torch.accelerator.memory_allocated(device)
        mean_square(model(x)).backward()
        finish_device(device)
        peak_bytes = torch.accelerator.max_memory_allocated(device) - resting_bytes
    # Two layers' weights, the gradients of as many that are on their way, and activations.
    assert peak_bytes < 5 * layer_bytes + 32 * MIB
    assert peak_bytes < LAYERS * layer_bytes * 2, "more than weights and gradients without offload"


def test_autocast_copies_hold_no_memory(device: torch.device) -> None:
    width = 2048
    model, x = tower(device, LAYERS, width), batch(device, 64, width)
    layer_bytes = (width * width + width) * 4

    def loss(net: nn.Module) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return mean_square(net(x))

    expected = torch.autograd.grad(loss(model), list(model.parameters()))
    expected = [gradient.cpu() for gradient in expected]
    with ebbtide.offload(model, weights=ebbtide.WeightPolicy()):
        resting_bytes = torch.accelerator.memory_allocated(device)
        value = loss(model)
        finish_device(device)
        held_bytes = torch.accelerator.memory_allocated(device) - resting_bytes
        got = torch.autograd.grad(value, list(model.parameters()))
    # Two layers' weights and activations; a copy of each layer in bfloat16 would be half of one.
    assert held_bytes < 2 * layer_bytes + 8 * MIB
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine.cpu(), theirs)


def test_masters_stay_on_the_host(device: torch.device) -> None:
    """Half of the bytes come, and losses and gradients have the bits of autocast."""
    width = 1024
    model, x = tower(device, LAYERS, width), batch(device, 64, width)
    # A matrix in bfloat16 and a bias in fp32: both are whole blocks of 512 bytes.
    layer_bytes = width * width * 2 + width * 4

    def loss(net: nn.Module) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return mean_square(net(x))

    value = loss(model)
    expected = torch.autograd.grad(value, list(model.parameters()))
    expected = [value.detach().cpu(), *(gradient.cpu() for gradient in expected)]
    policy = ebbtide.WeightPolicy(param_dtype=torch.bfloat16)
    with ebbtide.offload(model, weights=policy) as handle:
        assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.float32, "cpu")}
        for number in range(3):
            value = loss(model)
            value.backward()
            got = [value.detach().cpu(), *(p.grad for p in model.parameters())]
            for mine, theirs in zip(got, expected, strict=True):
                assert torch.equal(mine, theirs), f"step {number}"
            model.zero_grad()
        # The last two layers' weights are still there when backward begins.
        assert handle.stats.weight_reload_bytes == (2 * LAYERS - 2) * layer_bytes
        assert handle.stats.peak_weight_bytes <= 2 * layer_bytes


def test_torch_finds_gradients_that_are_asked_for(device: torch.device) -> None:
    model, x = tower(device, LAYERS), batch(device)
    expected = torch.autograd.grad(mean_square(model(x)), list(model.parameters()))
    with ebbtide.offload(model, weights=ebbtide.WeightPolicy()):
        got = torch.autograd.grad(mean_square(model(x)), list(model.parameters()))
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine.cpu(), theirs.cpu())


class Borrowing(nn.Module):
    """Takes weights out of layers that do not work, and moves one as a codebook is moved."""

    def __init__(self, device: torch.device, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, device=device) for _ in range(LAYERS))
        self.recurrent = nn.ModuleList(nn.LSTM(width, width, device=device) for _ in range(2))
        self.layers[1].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        tied = self.layers[0].weight
        with torch.no_grad():
            self.layers[1].bias.mul_(0.9)
        self.layers[1].bias.data.add_(0.1)
        for layer in self.layers:
            x = layer(x).tanh()
        for layer in self.recurrent:
            x = x + layer(x)[0]
        return x @ tied.t() @ self.layers[3].weight


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
def test_weights_taken_out_of_their_layers(device: torch.device) -> None:
    model, x = Borrowing(device), torch.randn(8, 16, 64, device=device)
    other = copy.deepcopy(model)
    layers = [*model.layers, *model.recurrent]
    with ebbtide.offload(model, layers=layers, weights=ebbtide.WeightPolicy()):
        losses = []
        for net in (model, other):
            loss = mean_square(net(x))
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(mine.cpu(), theirs.cpu()), name
            if theirs.grad is not None:
                assert torch.equal(mine.grad.cpu(), theirs.grad.cpu()), name
