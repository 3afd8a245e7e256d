"""Code that never calls the forward that `offload` put in place."""

import contextlib
import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide import ActivationPolicy, WeightPolicy
from ebbtide.devices import SimulatedDevice
from ebbtide.stores import PinnedStore
from loops import on_device

POLICY = ActivationPolicy(min_bytes=1, rebuild=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(16, 16)

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.head(self.features(x)))


class Module(nn.Module):
    """As a LightningModule: its forward is never called in training."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def make() -> Module:
    torch.manual_seed(0)
    return Module()


def call(model: Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def replace_forward(model: Module, x: Tensor) -> Tensor:
    """As TRL does: a function of its own, which calls the parts of the model."""

    def fused(self: Module, x: Tensor) -> Tensor:
        return torch.sigmoid(self.net.head(self.net.features(x)))

    model.forward = types.MethodType(fused, model)  # type: ignore[method-assign]
    return model(x).square().mean()


def wrap_forward(model: Module, x: Tensor) -> Tensor:
    inner = model.forward
    model.forward = lambda x: inner(x) * 1.0  # type: ignore[method-assign]
    return model(x).square().mean()


def bind_again(model: Module, x: Tensor) -> Tensor:
    """As accelerate's `unwrap_model(keep_fp32_wrapper=False)` does."""
    if not isinstance(model.forward, types.MethodType):
        model.forward = types.MethodType(model.forward, model)  # type: ignore[method-assign]
    return model(x).square().mean()


def net_only(model: Module, x: Tensor) -> Tensor:
    return model.training_step(x)


def layers_only(model: Module, x: Tensor) -> Tensor:
    return model.net.features(x).square().mean()


def class_forward(model: Module, x: Tensor) -> Tensor:
    return type(model).forward(model, x).square().mean()


WAYS = [call, replace_forward, wrap_forward, bind_again, net_only, layers_only, class_forward]


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_it_offloads_whichever_way_it_is_called(way: Callable[[Module, Tensor], Tensor]) -> None:
    x = torch.randn(8, 16)
    plain, model = make(), make()
    way(plain, x).backward()
    expected = gradients(plain)
    handle = ebbtide.offload(model, activations=POLICY)
    for _ in range(3):
        way(model, x).backward()
        assert all(map(torch.equal, gradients(model), expected))
        assert handle.stats.offloaded_bytes > 0
        assert handle.inspect().in_flight.saved_tensors == 0
    handle.detach()
    way(model, x).backward()
    assert all(map(torch.equal, gradients(model), expected))


def test_a_layer_called_by_itself_keeps_its_number() -> None:
    model = make()
    policy = ActivationPolicy(min_bytes=1, rebuild=False, num_layers=1)
    with ebbtide.offload(model, activations=policy) as handle:
        x = torch.randn(8, 16)
        loss = layers_only(model, x)
        loss.backward()
        layers_only(model, x).backward()
        assert handle.layers[0] == "net.blocks.0"
        first = model.net.blocks[0](x).sum()
        first.backward()
        assert handle.stats.offloaded_bytes > 0
        last = model.net.blocks[2](x).sum()
        last.backward()
        assert handle.stats.offloaded_bytes == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("way", [replace_forward, net_only, layers_only])
def test_an_error_in_a_bypassed_forward(
    way: Callable[[Module, Tensor], Tensor], error: type[BaseException]
) -> None:
    x = torch.randn(8, 16)
    plain, model = make(), make()
    way(plain, x).backward()
    expected = gradients(plain)

    def fail(*_: Any) -> None:
        raise error

    with ebbtide.offload(model, activations=POLICY) as handle:
        for _ in range(2):
            failing = model.net.blocks[1].register_forward_pre_hook(fail)
            with contextlib.suppress(error):
                way(model, x)
            failing.remove()
            way(model, x).backward()
            assert all(map(torch.equal, gradients(model), expected))
            assert handle.inspect().in_flight.forwards == 0
            assert handle.stats.offloaded_bytes > 0
            assert {each.layer for each in handle.inspect().storages} <= {0, 1, 2, None}
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_whole_forward_after_an_interrupted_part() -> None:
    model, x = make(), torch.randn(8, 16)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with ebbtide.offload(model, activations=POLICY) as handle:
        failing = model.net.blocks[1].register_forward_pre_hook(fail)
        with contextlib.suppress(KeyboardInterrupt):
            net_only(model, x)
        failing.remove()
        call(model, x).backward()
        assert handle.stats.offloaded_bytes > 0
        assert handle.inspect().in_flight.forwards == 0
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_parts_begin_forwards_even_if_nothing_else_of_the_offload_is_left() -> None:
    """The handle has been dropped, and other code has taken the place of `model.forward`."""
    model, x = make(), torch.randn(8, 16)
    engine = ebbtide.offload(model, activations=POLICY)._engine
    del model.__dict__["forward"]
    net_only(model, x).backward()
    assert engine.stats.offloaded_bytes > 0


def test_a_part_that_calls_itself() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    model = Recursive()
    block = model.net
    inner = block.forward
    depth = 0

    def twice(x: Tensor) -> Tensor:
        nonlocal depth
        depth += 1
        x = block(x) if depth < 3 else x
        return inner(x)

    block.forward = twice  # type: ignore[method-assign]
    with ebbtide.offload(model, activations=POLICY, layers=["net"]) as handle:
        model.net(torch.randn(8, 16)).sum().backward()
        assert handle.inspect().in_flight.forwards == 0
        assert handle.stats.offloaded_bytes > 0


@pytest.mark.parametrize("way", [replace_forward, net_only, layers_only])
def test_weights_at_rest(way: Callable[[Module, Tensor], Tensor]) -> None:
    x = torch.randn(8, 16)
    plain, model = make(), make()
    way(plain, x).backward()
    expected = gradients(plain)
    device = SimulatedDevice(0)
    with on_device(device, lambda: PinnedStore(device)):
        handle = ebbtide.offload(model, weights=WeightPolicy())
        for _ in range(2):
            way(model, x).backward()
            device.finish_copies()
            assert all(map(torch.equal, gradients(model), expected))
        with torch.no_grad():
            assert torch.equal(way(model, x), way(plain, x))
        handle.detach()


@pytest.mark.parametrize("way", [call, net_only, layers_only])
def test_weights_written_after_an_interrupted_part(way: Callable[[Module, Tensor], Tensor]) -> None:
    """No hook is called at its end: the weights that it used are on the device still."""
    x = torch.randn(8, 16)
    plain, model = make(), make()
    parameters = [*plain.parameters()], [*model.parameters()]
    device = SimulatedDevice(0)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with on_device(device, lambda: PinnedStore(device)), torch.no_grad():
        handle = ebbtide.offload(model, weights=WeightPolicy())
        failing = model.net.blocks[1].register_forward_pre_hook(fail)
        with contextlib.suppress(KeyboardInterrupt):
            net_only(model, x)
        failing.remove()
        for own in parameters:
            for parameter in own:
                parameter.mul_(0.5)
        assert torch.equal(way(model, x), way(plain, x))
        handle.detach()


def test_copies_and_other_models_are_plain() -> None:
    model = make()
    with ebbtide.offload(model, activations=POLICY) as handle:
        copied = copy.deepcopy(model)
        net_only(copied, torch.randn(8, 16)).backward()
        assert handle.stats.num_saved == 0
        assert handle.inspect().in_flight.is_idle


@pytest.mark.parametrize("active", [True, False], ids=["attached", "detached"])
def test_a_copy_of_a_model_whose_forward_other_code_has_bound(active: bool) -> None:
    """As Accelerate does for mixed precision: the wrapper's function is shared by the copies."""
    model, x = make(), torch.randn(8, 16)
    handle = ebbtide.offload(model, activations=POLICY)
    inner = model.forward.__func__  # as of a bound method

    def around(module: Module, x: Tensor) -> Tensor:
        return inner(module, x)

    model.forward = types.MethodType(around, model)
    if not active:
        handle.detach()
    copied = copy.deepcopy(model)
    copied(x).sum().backward()
    of_copy = gradients(copied)
    assert of_copy and not gradients(model)
    model(x).sum().backward()
    found = gradients(model)
    assert len(found) == len(of_copy) and all(map(torch.equal, of_copy, found))
    handle.detach()


def test_a_step_in_which_nothing_left_says_why() -> None:
    model, x = make(), torch.randn(8, 16)

    def train() -> None:
        for _ in range(3):
            call(model, x).backward()

    with ebbtide.offload(model), pytest.warns(RuntimeWarning) as said:
        train()
    assert len(said) == 1
    text = str(said[0].message)
    assert "offloaded nothing" in text
    assert "min_bytes" in text
    assert said[0].filename == __file__
