"""Detach while graphs are alive: they give what they give without offload."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import ebbtide
import softdevice
from soft_bench import PORTFOLIO

WIDTH = 32

Use = Callable[[Tensor, Sequence[nn.Parameter]], Sequence[Tensor | None]]


class _Block(nn.Module):
    """Two biases that get one gradient, and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.first = nn.Parameter(torch.randn(WIDTH))
        self.second = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() + self.first + self.second


class _Shift(nn.Module):
    """Saves no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH))
        self.second = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first + self.second


def _model(kind: type[nn.Module], device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(4))).to(device)


def _clipped(loss: Tensor, parameters: Sequence[nn.Parameter]) -> Sequence[Tensor | None]:
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 0.1)
    return [p.grad for p in parameters]


def _accumulated(loss: Tensor, parameters: Sequence[nn.Parameter]) -> Sequence[Tensor | None]:
    loss.backward(retain_graph=True)
    loss.backward()
    return [p.grad for p in parameters]


def _asked_for(loss: Tensor, parameters: Sequence[nn.Parameter]) -> Sequence[Tensor | None]:
    return torch.autograd.grad(loss, parameters)


def _of_some(loss: Tensor, parameters: Sequence[nn.Parameter]) -> Sequence[Tensor | None]:
    loss.backward(inputs=parameters[::2])
    return [p.grad for p in parameters]


def _penalised(loss: Tensor, parameters: Sequence[nn.Parameter]) -> Sequence[Tensor | None]:
    slopes = torch.autograd.grad(loss, parameters, create_graph=True)
    torch.stack([slope.square().sum() for slope in slopes]).sum().backward()
    return [p.grad for p in parameters]


def _hooked(loss: Tensor, parameters: Sequence[nn.Parameter]) -> Sequence[Tensor | None]:
    seen: dict[int, Tensor] = {}

    def after(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen[id(parameter)] = parameter.grad * 3

    for parameter in parameters:
        parameter.register_hook(lambda gradient: gradient * 2)
        parameter.register_post_accumulate_grad_hook(after)
    loss.backward()
    return [seen[id(p)] for p in parameters]


def _frozen(loss: Tensor, parameters: Sequence[nn.Parameter]) -> Sequence[Tensor | None]:
    for parameter in parameters[::2]:
        parameter.requires_grad_(False)
    loss.backward()
    return [p.grad for p in parameters]


@pytest.mark.parametrize("kind", [_Block, _Shift], ids=["saved", "unsaved"])
@pytest.mark.parametrize(
    "use",
    [_clipped, _accumulated, _asked_for, _of_some, _penalised, _hooked, _frozen],
    ids=lambda use: use.__name__[1:],
)
def test_a_graph_outlives_detach(device: torch.device, use: Use, kind: type[nn.Module]) -> None:
    for order in PORTFOLIO:
        softdevice.choose_order(order)
        plain = _model(kind, device)
        mine = copy.deepcopy(plain)
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
        expected = use(plain(x).square().mean(), list(plain.parameters()))
        with ebbtide.offload(mine, layers=list(mine), weights=ebbtide.WeightPolicy()):
            loss = mine(x).square().mean()
        found = use(loss, list(mine.parameters()))
        for one, other in zip(expected, found, strict=True):
            assert (one is None) == (other is None), order
            assert one is None or torch.equal(one.cpu(), other.cpu()), order
        mine(x).sum().backward()  # the graph from before is no obstacle to the next


@pytest.mark.parametrize("use", [_clipped, _accumulated, _asked_for], ids=lambda use: use.__name__)
def test_layers_are_recomputed_after_detach(device: torch.device, use: Use) -> None:
    """With the parameters that their modules have by then."""
    for order in PORTFOLIO:
        softdevice.choose_order(order)
        plain = _model(_Block, device)
        mine = copy.deepcopy(plain)
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
        expected = use(plain(x).square().mean(), list(plain.parameters()))
        again = ebbtide.ActivationPolicy(mode="recompute", min_bytes=1)
        weights = ebbtide.WeightPolicy()
        with ebbtide.offload(mine, layers=list(mine), weights=weights, activations=again) as handle:
            mine(x).square().mean().backward()  # verifies them
            mine.zero_grad()
            loss = mine(x).square().mean()
            assert handle.inspect().in_flight.saved_tensors
        found = use(loss, list(mine.parameters()))
        for one, other in zip(expected, found, strict=True):
            assert one is not None and other is not None
            assert torch.equal(one.cpu(), other.cpu()), order


def test_hooks_on_parameters_outlive_detach(device: torch.device) -> None:
    """Registered before `offload`, and called with the gradients of a graph that outlived it."""
    for order in PORTFOLIO:
        softdevice.choose_order(order)
        model = _model(_Block, device)
        seen: list[Tensor] = []
        for parameter in model.parameters():
            parameter.register_hook(seen.append)
        with ebbtide.offload(model, layers=list(model), weights=ebbtide.WeightPolicy()):
            loss = model(torch.randn(8, WIDTH, device=device)).square().mean()
        loss.backward()
        assert len(seen) == len(list(model.parameters())), order
        assert all(gradient.device == device for gradient in seen), order


def test_a_penalty_on_weights_outlives_detach(device: torch.device) -> None:
    """It was computed on the host, from the parameters themselves."""
    for order in PORTFOLIO:
        softdevice.choose_order(order)
        plain = _model(_Block, device)
        mine = copy.deepcopy(plain)
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
        (plain(x).square().mean() + _penalty(plain, device)).backward()
        with ebbtide.offload(mine, layers=list(mine), weights=ebbtide.WeightPolicy()):
            loss = mine(x).square().mean() + _penalty(mine, device)
        loss.backward()
        for one, other in zip(plain.parameters(), mine.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            torch.testing.assert_close(one.grad.cpu(), other.grad.cpu())


def test_gradients_of_a_loss_and_a_penalty_come_at_once(device: torch.device) -> None:
    """After detach, one of autograd's threads accumulates the loss's, and another the penalty's."""
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            plain = _model(_Block, device)
            mine = copy.deepcopy(plain)
            x = torch.randn(8, WIDTH, device=device)
            with ebbtide.offload(mine, layers=list(mine), weights=ebbtide.WeightPolicy()):
                loss = mine(x).square().mean() + _penalty(mine, device)
            for _ in range(3):
                (plain(x).square().mean() + _penalty(plain, device)).backward()
                loss.backward(retain_graph=True)
            for one, other in zip(plain.parameters(), mine.parameters(), strict=True):
                assert one.grad is not None and other.grad is not None
                torch.testing.assert_close(one.grad.cpu(), other.grad.cpu())
    finally:
        sys.setswitchinterval(switch_s)


def test_a_penalty_on_weights_with_hooks_says_why_it_cannot(device: torch.device) -> None:
    model = _model(_Block, device)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))
    with ebbtide.offload(model, layers=list(model), weights=ebbtide.WeightPolicy()):
        loss = model(torch.randn(8, WIDTH, device=device)).mean() + _penalty(model, device)
    with pytest.raises(RuntimeError):
        loss.backward()


def _penalty(model: nn.Module, device: torch.device) -> Tensor:
    return torch.stack([p.square().sum().to(device) for p in model.parameters()]).sum()


class _Scale(nn.Module):
    """Saves the weight itself, not a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize("again", [False, True])
def test_a_graph_from_before_offload_adds_its_gradients(device: torch.device, again: bool) -> None:
    for order in PORTFOLIO:
        softdevice.choose_order(order)
        plain = _model(_Scale, device)
        mine = copy.deepcopy(plain)
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
        expected = _clipped(plain(x).square().mean(), list(plain.parameters()))
        policy = ebbtide.WeightPolicy()
        if again:
            with ebbtide.offload(mine, layers=list(mine), weights=policy):
                loss = mine(x).square().mean()
        else:
            loss = mine(x).square().mean()
        with ebbtide.offload(mine, layers=list(mine), weights=policy):
            found = _clipped(loss, list(mine.parameters()))
            for number, (one, other) in enumerate(zip(expected, found, strict=True)):
                assert one is not None and other is not None
                # Of layers that are single modules, the model's first parameter stays.
                assert other.device.type == ("cpu" if number else device.type), order
                assert torch.equal(one.cpu(), other.cpu()), order
            mine(x).sum().backward()


def test_a_dead_graph_that_somebody_holds_takes_no_memory(device: torch.device) -> None:
    """A notebook keeps the last loss. The parameters' former tensors must not stay with it."""
    softdevice.choose_order("threads")
    model = _model(_Block, device)
    x = torch.randn(8, WIDTH, device=device)
    with ebbtide.offload(model, layers=list(model), weights=ebbtide.WeightPolicy()):
        loss = model(x).square().mean()
        loss.backward()
    torch.accelerator.synchronize()
    with_loss_bytes = torch.accelerator.memory_allocated()
    shown = loss.item()
    del loss
    assert shown
    # Beside the loss: one element, for each block one output, and for each parameter one scalar.
    most_bytes = 512 * (2 + 4 + 12)
    assert with_loss_bytes - torch.accelerator.memory_allocated() <= most_bytes


def test_offload_and_detach_inside_autocast(device: torch.device) -> None:
    """Autocast refers weakly to each parameter whose cast it keeps."""
    plain = nn.Sequential(_Block(), nn.GELU(), _Block()).to(device)
    model = copy.deepcopy(plain)
    x = torch.randn(8, WIDTH, device=device)

    def gradients(model: nn.Module, before: Callable[[], object], after: Callable[[], object]):
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            model(x).float().sum().backward()
            before()
            model(x).float().square().sum().backward(retain_graph=True)
            after()
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    handles: list[ebbtide.OffloadHandle] = []
    weights = ebbtide.WeightPolicy(min_bytes=1)
    found = gradients(
        model,
        lambda: handles.append(ebbtide.offload(model, weights=weights)),
        lambda: handles.pop().detach(),
    )
    expected = gradients(plain, lambda: None, lambda: None)
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]


def _devices_of_state(optimizer: torch.optim.Optimizer) -> set[str]:
    states = (each for state in optimizer.state.values() for each in state.values())
    return {each.device.type for each in states if each.dim()}


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_an_optimizer_goes_on_after_detach(
    device: torch.device, param_dtype: torch.dtype | None, overlaps: bool
) -> None:
    x = torch.randn(8, WIDTH, device=device)

    def train(model: nn.Module, *, offloads: bool) -> list[Tensor]:
        policy = ebbtide.WeightPolicy(min_bytes=1, param_dtype=param_dtype)
        handle = ebbtide.offload(model, weights=policy) if offloads else None
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if handle is not None and overlaps:
            optimizer = handle.overlap(optimizer)
        for step in range(4):
            if step == 2 and handle is not None:
                handle.detach()
                assert _devices_of_state(optimizer) == {"cpu"}, "it goes when it is needed"
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert _devices_of_state(optimizer) == {device.type}
        return [each.detach().cpu() for each in model.parameters()]

    expected = train(_model(_Block, device), offloads=False)
    got = train(_model(_Block, device), offloads=True)
    assert all(map(torch.equal, expected, got))
