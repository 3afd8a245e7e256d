"""Weights at rest on a device that is behind the host: the program may do anything in between."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
import softdevice
from soft_bench import PORTFOLIO, on
from weight_swaps import (
    SWAPS,
    WITHOUT_GRAPH,
    differentiate_in_threads,
    make,
    swap_while_a_graph_is_alive,
    train_and_swap,
)

WIDTH = 64

Program = Callable[[nn.Module, Tensor], list[Tensor]]


def _tower(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5))).to(
        device
    )


def _evolution(model: nn.Module, x: Tensor) -> list[Tensor]:
    """MeZO: two forwards at disturbed weights, one step along the difference."""
    losses = []
    for step in range(4):
        values = []
        for sign in (1, -2):
            _disturb(model, step, sign)
            with torch.no_grad():
                values.append(model(x).square().mean())
        _disturb(model, step, 1)
        losses += values
    return losses


def _disturb(model: nn.Module, seed: int, by: float) -> None:
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draws)
            parameter.add_(noise.to(parameter.device), alpha=0.01 * by)


def _loaded(model: nn.Module, x: Tensor) -> list[Tensor]:
    found = []
    for scale in (1.0, 0.5, 2.0):
        state = {name: value.clone() * scale for name, value in model.state_dict().items()}
        with torch.no_grad():
            found.append(model(x).square().mean())
        model.load_state_dict(state)
        with torch.inference_mode():
            found.append(model(x).square().mean().clone())
    return found


def _swapped(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Weights of an average are swapped in for an evaluation, and out again."""
    averages = [p.detach().clone() * 0.9 for p in model.parameters()]
    found = []
    for _ in range(3):
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        found.append(loss.detach())
        for _ in range(2):
            for parameter, average in zip(model.parameters(), averages, strict=True):
                present = parameter.data.clone()
                parameter.data.copy_(average)
                average.copy_(present)
            with torch.no_grad():
                found.append(model(x).square().mean())
    return found


def _assigned(model: nn.Module, x: Tensor) -> list[Tensor]:
    found = []
    for _ in range(4):
        with torch.no_grad():
            found.append(model(x).square().mean())
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.9
    return found


def _dropped(model: nn.Module, x: Tensor) -> list[Tensor]:
    """A graph is made and dropped without a backward."""
    found = []
    for _ in range(4):
        found.append(model(x).square().mean().detach())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
    return found


def _frozen(model: nn.Module, x: Tensor) -> list[Tensor]:
    """No weight needs a gradient, so that no gradient comes to the host in backward."""
    model.requires_grad_(False)
    found = []
    for _ in range(4):
        wanted = x.clone().requires_grad_()
        model(wanted).square().mean().backward()
        assert wanted.grad is not None
        found.append(wanted.grad)
        for parameter in model.parameters():
            parameter.mul_(0.9)
    return found


def _alone(model: nn.Module, x: Tensor) -> list[Tensor]:
    """A layer is called by itself."""
    assert isinstance(model, nn.Sequential)
    found = []
    for layer in [*model, *model]:
        with torch.no_grad():
            found.append(layer(x))
            for parameter in layer.parameters():
                parameter.mul_(0.5)
    return found


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x * 1

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:  # noqa: ARG004
        raise ArithmeticError


def _raised(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Other weights are loaded right after a backward that raised, and used at once."""
    assert isinstance(model, nn.Sequential)
    found = []
    for number in (0, 2, 4):
        handle = model[number].register_forward_hook(lambda *call: _FailInBackward.apply(call[-1]))
        loss = model(x).square().mean()
        handle.remove()
        with pytest.raises(ArithmeticError):
            loss.backward()
        model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach(), *(_gradient(p) for p in model.parameters())]
    return found


def _interrupted(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Ctrl-C in a layer; then the weights change, and training goes on."""
    assert isinstance(model, nn.Sequential)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    found = []
    for number in (0, 2, 4):
        handle = model[number].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(x)
        handle.remove()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach(), *(_gradient(p) for p in model.parameters())]
    return found


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()


PROGRAMS = (
    _evolution,
    _loaded,
    _swapped,
    _assigned,
    _dropped,
    _frozen,
    _alone,
    _raised,
    _interrupted,
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__[1:])
def test_what_the_host_writes_does_not_overtake_what_the_device_reads(
    device: torch.device, program: Program
) -> None:
    for order in PORTFOLIO:
        softdevice.choose_order(order)
        plain = _tower(device)
        mine = copy.deepcopy(plain)
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
        expected = [value.cpu() for value in program(plain, x)]
        with ebbtide.offload(mine, weights=ebbtide.WeightPolicy()):
            found = program(mine, x)
            right = [torch.equal(v.cpu(), e) for v, e in zip(found, expected, strict=True)]
        assert all(right), f"{order}: {right}"


def test_device_memory_of_gradients_goes_with_the_backward(device: torch.device) -> None:
    for order in PORTFOLIO:
        softdevice.choose_order(order)
        model = _tower(device)
        x = torch.randn(16, WIDTH, device=device)
        with ebbtide.offload(model, weights=ebbtide.WeightPolicy()):
            model(x).square().mean().backward()
            model.zero_grad()
            with torch.no_grad():
                model(x)
            torch.accelerator.synchronize()
            before_bytes = torch.accelerator.memory_allocated()
            model(x).square().mean().backward()
            torch.accelerator.synchronize()
            assert torch.accelerator.memory_allocated() == before_bytes, order


def test_two_threads_evaluate_one_model_on_streams_of_their_own(device: torch.device) -> None:
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)

    def evaluate(model: nn.Module, into: list[Tensor]) -> None:
        stream = torch.Stream(device)
        stream.wait_stream(torch.accelerator.current_stream())
        with on(stream), torch.no_grad():
            into += [model(x * n) for n in range(6)]
        stream.synchronize()

    for order in PORTFOLIO:
        softdevice.choose_order(order)
        model = _tower(device)
        expected: list[Tensor] = []
        evaluate(model, expected)
        with ebbtide.offload(model, weights=ebbtide.WeightPolicy()):
            found: list[list[Tensor]] = [[], []]
            threads = [threading.Thread(target=evaluate, args=(model, into)) for into in found]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for results in found:
                pairs = zip(results, expected, strict=True)
                right = [torch.equal(value.cpu(), plain.cpu()) for value, plain in pairs]
                assert all(right), f"{order}: {right}"


def test_a_layer_that_is_entered_on_a_second_stream_waits_for_its_weights(
    device: torch.device,
) -> None:
    """The layer calls itself on another stream, on which nothing has waited for its weights."""

    class Twice(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer
            self.again = True

        def forward(self, x: Tensor) -> Tensor:
            if not self.again:
                return self.layer(x)
            self.again = False
            stream = torch.Stream(device)
            with on(stream):
                found: Tensor = self(x)
            torch.accelerator.current_stream().wait_stream(stream)
            found.record_stream(torch.accelerator.current_stream())
            self.again = True
            return found

    for order in PORTFOLIO:
        softdevice.choose_order(order)
        model = nn.Sequential(*(Twice(layer) for layer in _tower(device)))
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
        torch.accelerator.synchronize()
        with torch.no_grad():
            expected = [model[0](x).cpu() for _ in range(3)]
            with ebbtide.offload(model, weights=ebbtide.WeightPolicy()):
                right = [torch.equal(model[0](x).cpu(), e) for e in expected]
        assert all(right), f"{order}: {right}"


@pytest.mark.parametrize("mode", ["recompute", "recompute+offload"])
def test_a_recomputed_layer_finds_its_weights_in_a_list(device: torch.device, mode: str) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 8, batch_first=True)
            self.weight = nn.Parameter(torch.randn(8, 8))
            self.weights = [self.weight]

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0] @ self.weights[0]

    def train(model: nn.Module, x: Tensor) -> list[Tensor]:
        model(x).square().mean().backward()
        return [_gradient(parameter).cpu() for parameter in model.parameters()]

    for order in PORTFOLIO:
        softdevice.choose_order(order)
        with device:
            plain = nn.Sequential(Listed(), Listed())
            mine = copy.deepcopy(plain)
            x = torch.randn(2, 5, 8)
        expected = train(plain, x)
        policy = ebbtide.ActivationPolicy(min_bytes=1, mode=mode)
        with ebbtide.offload(mine, activations=policy, weights=ebbtide.WeightPolicy()):
            assert all(map(torch.equal, train(mine, x), expected)), order


@pytest.mark.parametrize("double_buffering", [True, False])
@pytest.mark.parametrize("name", SWAPS)
def test_weights_are_swapped_by_pointer(
    device: torch.device, name: str, double_buffering: bool
) -> None:
    """Plain training has its average on the device; at rest, it is on the host like the weights."""
    policy = ebbtide.WeightPolicy(double_buffering=double_buffering)
    for order in ("threads", "compute-first", "random:1"):
        softdevice.choose_order(order)
        for run in (train_and_swap, swap_while_a_graph_is_alive):
            if run is swap_while_a_graph_is_alive and name in WITHOUT_GRAPH:
                continue
            plain, mine = make(device), make(device)
            expected = [value.cpu() for value in run(plain, SWAPS[name], device)]
            with ebbtide.offload(mine, weights=policy):
                found = run(mine, SWAPS[name], device)
                right = [torch.equal(v.cpu(), e) for v, e in zip(found, expected, strict=True)]
            assert all(right), f"{run.__name__} {order}: {right}"
            assert all(p.device == device for p in mine.parameters())


def test_an_average_on_the_device_is_used_where_it_is(device: torch.device) -> None:
    """It was made before `offload`, so the parameters are on the device while it is swapped in."""
    for order in ("threads", "compute-first", "random:1"):
        softdevice.choose_order(order)

        def run(model: nn.Module, average: list[Tensor]) -> list[Tensor]:
            found = []
            x = torch.ones(4, 16, device=device)
            for step in range(3):
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                held = [p.data for p in model.parameters()]
                for p, value in zip(model.parameters(), average, strict=True):
                    p.data = value
                found.append(model(x).detach())
                if step == 1:  # an average is trained, too
                    model(x).square().mean().backward()
                    found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
                    model.zero_grad()
                for p, value in zip(model.parameters(), held, strict=True):
                    p.data = value
            return [*found, *average, *(p.detach().clone() for p in model.parameters())]

        plain, mine = make(device), make(device)
        averages = [[p.detach() * 0.5 for p in model.parameters()] for model in (plain, mine)]
        expected = [value.cpu() for value in run(plain, averages[0])]
        with ebbtide.offload(mine, weights=ebbtide.WeightPolicy()):
            found = run(mine, averages[1])
            right = [torch.equal(v.cpu(), e) for v, e in zip(found, expected, strict=True)]
        assert all(right), f"{order}: {right}"


def test_threads_differentiate_one_graph(device: torch.device) -> None:
    for order in PORTFOLIO:
        softdevice.choose_order(order)
        model = make(device)
        with ebbtide.offload(model, weights=ebbtide.WeightPolicy()):
            found = differentiate_in_threads(model, device)
            first, *others = ([gradient.cpu() for gradient in each] for each in found)
            assert len(others) == 3 * 6, order
            assert all(all(map(torch.equal, each, first)) for each in others), order


def test_a_model_says_the_device_that_it_computes_on(device: torch.device) -> None:
    """Programs place what they make beside the model's first parameter, as Transformers does."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=32, n_positions=32, n_embd=16, n_layer=3, n_head=2)
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(config).to(device).eval()
    mine = copy.deepcopy(plain)
    mine.tie_weights()
    tokens = torch.arange(8, device=device).reshape(2, 4)
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = plain.generate(tokens, **how).cpu()
    layers = [mine.transformer.wte, mine.transformer.wpe, *mine.transformer.h]
    with ebbtide.offload(mine, layers=layers, weights=ebbtide.WeightPolicy()) as handle:
        assert mine.device == next(mine.parameters()).device == device
        rest = {parameter.name for parameter in handle.inspect().parameters}
        assert "transformer.wpe.weight" in rest
        assert "transformer.wte.weight" not in rest
        for _ in range(2):
            assert torch.equal(mine.generate(tokens, **how).cpu(), expected)
            mine(tokens, labels=tokens).loss.backward()
            mine.zero_grad()
    assert torch.equal(mine.generate(tokens, **how).cpu(), expected)


def test_weights_that_the_program_moves_to_the_device_rest_again(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]).to(device)
    x = torch.randn(4, 16, device=device)
    weights = ebbtide.WeightPolicy(min_bytes=1)
    with ebbtide.offload(model, layers=list(model), weights=weights):
        resting = [parameter.device.type == "cpu" for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.data.to(device)
        assert not any(parameter.device.type == "cpu" for parameter in model.parameters())
        model(x).sum().backward()
        assert [parameter.device.type == "cpu" for parameter in model.parameters()] == resting
        assert any(resting)
