"""Weights at rest on the host: everything that training does with them gives the same bits."""

import copy
import functools
import gc
import io
import itertools
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ebbtide
from ebbtide import ActivationPolicy, OffloadHandle, PolicyError, WeightPolicy
from ebbtide.devices import SimulatedDevice
from ebbtide.errors import SavedTensorModifiedError
from ebbtide.stores import PinnedStore
from ebbtide.weights.hooks import AbstractWeights, stepped_at_once
from ebbtide.weights.parameters import DeviceParameter
from loops import on_device
from zoo import assert_bitwise_equal, tensors_in

WIDTH = 16


def _saves_products(_: Any, operation: Any, *__: Any, **___: Any) -> bool:
    return operation is torch.ops.aten.addmm.default


class Block(nn.Module):
    """A perceptron with a scale of its own, computed in one of several ways."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "plain":
            return self.compute(x)
        if self.kind == "selective":
            contexts = functools.partial(create_selective_checkpoint_contexts, _saves_products)
            return checkpoint(self.compute, x, use_reentrant=False, context_fn=contexts)
        return checkpoint(self.compute, x, use_reentrant=self.kind == "reentrant")

    def compute(self, x: Tensor) -> Tensor:
        return x + self.second(nn.functional.gelu(self.first(x))) * self.scale


class Given(Block):
    """Gives its checkpoint a weight that the part inside reads itself, too."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight
        return checkpoint(self.weighed, x, weight, use_reentrant=self.kind == "reentrant")

    def weighed(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.compute(x) + weight.mean()


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks or [Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def batch(number: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))


class OnDevice(TorchFunctionMode):
    """While a model works, nothing computes with a weight that rests on the host."""

    def __init__(self, hooks: AbstractWeights) -> None:
        self.hooks = hooks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ in ("__get__", "detach") or not isinstance(result, Tensor):
            return result
        looked_at = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        if not looked_at and self.hooks.is_working():
            for tensor in tensors_in((*args, *(kwargs or {}).values())):
                assert tensor not in self.hooks, f"{func} has a weight of the host"
        return result


def weights_of(handle: OffloadHandle) -> AbstractWeights:
    hooks = handle._engine.weights
    assert hooks is not None
    return hooks


@contextmanager
def offloaded(
    model: nn.Module, seed: int = 0, weights: WeightPolicy | None = None, **how: Any
) -> Iterator[OffloadHandle]:
    """Within, the weights of the blocks rest on the host; after, nothing is left of it."""
    device = SimulatedDevice(seed, eagerness=(0.0, 0.1, 0.6)[seed % 3])
    with on_device(device, lambda: PinnedStore(device, slab_bytes=2**16)):
        handle = ebbtide.offload(model, weights=weights or WeightPolicy(), **how)
    with OnDevice(weights_of(handle)):
        yield handle
    resting = weights_of(handle)
    assert resting.peak_groups <= 2
    groups = sorted(group.size_bytes for group in resting.groups)
    resting.settle()
    assert sum(groups[-2:]) >= handle.inspect().in_flight.weight_bytes
    handle.detach()
    device.finish_copies()
    assert handle.inspect().in_flight.weight_bytes == 0
    assert device.allocated_bytes() == 0
    assert device.pinned_bytes == 0


Run = Callable[[nn.Module], list[Tensor | None]]


def state(model: nn.Module) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {n: p.detach().clone() for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found[f"{name}.grad"] = None if parameter.grad is None else parameter.grad.clone()
    return found | {n: b.clone() for n, b in model.named_buffers()}


def check(make: Callable[[], nn.Module], run: Run, **how: Any) -> None:
    """A run gives the same with weights at rest as without, whatever the order of copies."""
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(1)
    expected = dict(enumerate(run(plain)))
    for seed in (0, 2):  # copies that run as late as they may, and copies that run early
        torch.manual_seed(0)
        model = make()
        torch.manual_seed(1)
        with offloaded(model, seed, **how):
            got = dict(enumerate(run(model)))
            assert_bitwise_equal(state(model), state(plain))
        assert_bitwise_equal(got, expected)
        assert_bitwise_equal(state(model), state(plain))


def steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    count: int = 3,
    loss: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x),
) -> list[Tensor | None]:
    """Plain training. Every weight that had a gradient has changed."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses: list[Tensor | None] = []
    for number in range(count):
        optimizer.zero_grad()
        value = loss(model, batch(number))
        value.backward()
        optimizer.step()
        losses.append(value.detach().clone())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert not torch.equal(parameter, before[name]), f"{name} did not change"
    states = [optimizer.state[p] for p in model.parameters() if p in optimizer.state]
    return losses + [v.clone() for s in states for v in s.values() if isinstance(v, Tensor)]


# ---- optimizers ---------------------------------------------------------------------------------

OPTIMIZERS = {
    **{
        name: getattr(torch.optim, name)
        for name in [
            "Adadelta",
            "Adafactor",
            "Adagrad",
            "Adam",
            "Adamax",
            "ASGD",
            "NAdam",
            "RAdam",
            "RMSprop",
            "Rprop",
        ]
    },
    "AdamW": torch.optim.AdamW,
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    # RAdam divides by the second moment from its sixth step on.
    check(Net, lambda model: steps(model, OPTIMIZERS[name](model.parameters()), count=6))


def test_lbfgs() -> None:
    def run(model: nn.Module) -> list[Tensor | None]:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(batch(0))
            loss.backward()
            return loss

        return [optimizer.step(closure).detach().clone() for _ in range(3)]

    check(Net, run)


def test_schedulers_accumulation_and_clipping() -> None:
    def run(model: nn.Module) -> list[Tensor | None]:
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        norms: list[Tensor | None] = []
        for number in range(6):
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            for microbatch in range(3):
                model(batch(10 * number + microbatch)).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).clone())
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                norms.append(model(batch(99)).clone())
        return norms

    check(Net, run)


def test_gradient_scaler() -> None:
    def run(model: nn.Module) -> list[Tensor | None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**126, backoff_factor=2.0**-40
        )  # the first steps overflow
        scales: list[Tensor | None] = []
        for number in range(10):
            optimizer.zero_grad()
            scaler.scale(model(batch(number))).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(torch.tensor(scaler.get_scale()))
        return scales

    check(Net, run)


def test_an_optimizer_that_steps_in_backward() -> None:
    def run(model: nn.Module) -> list[Tensor | None]:
        for parameter in model.parameters():
            optimizer = torch.optim.AdamW([parameter])

            def step(parameter: Tensor, optimizer: Any = optimizer) -> None:
                optimizer.step()
                parameter.grad = None

            parameter.register_post_accumulate_grad_hook(step)
        losses: list[Tensor | None] = []
        for number in range(5):
            loss = model(batch(number))
            loss.backward()
            losses.append(loss.detach().clone())
        return losses

    check(Net, run)


# ---- models -------------------------------------------------------------------------------------


def _tied() -> Net:
    net = Net(*[Block() for _ in range(4)])
    net.blocks[1].first.weight = net.blocks[0].first.weight
    net.blocks[3] = net.blocks[2]
    return net


def _outside() -> Net:
    net = Net()
    net.enter.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    net.blocks[2].second = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), net.enter)
    return net


def _frozen() -> Net:
    net = Net()
    net.blocks[1].requires_grad_(False)
    net.blocks[2].first.weight.requires_grad_(False)
    return net


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        image = x.reshape(-1, 4, 2, 2).contiguous(memory_format=torch.channels_last)
        return self.norm(self.conv(image)).reshape(x.shape)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x.unsqueeze(1))[0].squeeze(1)


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight.sum(0).conj())


class Sometimes(nn.Module):
    """Another branch in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.branches[(self.calls - 1) // 2 % 3](x)


class Borrower(nn.Module):
    """Works with a weight that another module owns."""

    def __init__(self, hold: Callable[[nn.Module], Any], take: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.hold, self.take = hold, take
        self.held: Any = ()

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.linear(self.first(x), self.take(self.held)[:WIDTH])


def _borrowing(hold: Callable[[nn.Module], Any], take: Callable[[Any], Tensor]) -> Net:
    net = Net(*[Block() for _ in range(3)], *[Borrower(hold, take) for _ in range(2)])
    for borrower in net.blocks[3:]:
        borrower.held = hold(net.blocks[0].first)
    return net


class Functional(Net):
    """Whose own forward takes weights out of the layers, before, while and after they work."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0].first.weight
        x = x @ first.t() @ self.blocks[0].second.weight.t()
        kept = self.blocks[2].second.weight
        for block in self.blocks:
            x = block(x) * self.blocks[0].scale
        x = x @ first.t() @ kept.t()  # held over all layers
        x = x @ self.blocks[3].first.weight.t() @ first
        return self.head(x).square().mean()


class Codebook(nn.Module):
    """A table that the forward itself moves, as those of VQ-VAE do."""

    def __init__(self, change: Callable[[nn.Module, Tensor], None]) -> None:
        super().__init__()
        self.table = nn.Embedding(6, WIDTH)
        self.table.weight.requires_grad_(False)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.table.weight).argmin(1)
        y = x + self.table(nearest) * 0.1
        if self.training:
            self.change(self.table, x.detach()[:6])
        return y


def _copied(table: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        table.weight.mul_(0.9).add_(x, alpha=0.1)


def _copied_unseen(table: nn.Module, x: Tensor) -> None:
    table.weight.data.mul_(0.9).add_(x, alpha=0.1)


def _replaced(table: nn.Module, x: Tensor) -> None:
    table.weight.data = table.weight.data * 0.9 + x * 0.1


class Codebooks(Net):
    """Moved from within a layer, and from outside all of them, and used again afterwards."""

    def __init__(self, change: Callable[[nn.Module, Tensor], None]) -> None:
        super().__init__(*[Codebook(change) for _ in range(3)])
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.blocks[2].table, x.detach()[:6])  # it goes before its layer works
        loss = super().forward(x)
        self.change(self.blocks[2].table, x.detach()[:6])
        again = self.blocks[2].table(torch.arange(6))
        return loss + (self.blocks[0].table.weight * again).mean() * self.head.weight.sum()


class Stashing(Codebook):
    def forward(self, x: Tensor) -> Tensor:
        self.stash = (self.table.weight,)
        return super().forward(x)


class Stashed(Net):
    """Works with what a layer held while it worked, when it does no longer."""

    def __init__(self) -> None:
        super().__init__(*[Stashing(_copied) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        if self.training:
            with torch.no_grad():
                self.blocks[0].stash[0].mul_(0.9)
        again = self.blocks[0].table(torch.arange(6)) * self.blocks[0].stash[0]
        for block in self.blocks:
            block.stash = ()  # else the model itself would keep the device's memory
        return loss + again.mean() * self.head.weight.sum()


class Holding(Net):
    """Takes a table before its layer works, and moves it when others have worked since."""

    def __init__(self) -> None:
        super().__init__(*[Codebook(_copied) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        held = self.blocks[0].table.weight
        unseen = self.blocks[1].table.weight
        loss = super().forward(x)
        if self.training:
            with torch.no_grad():
                held.mul_(0.9)
            unseen.data.add_(0.1)
        again = self.blocks[0].table(torch.arange(6)) + self.blocks[1].table.weight
        return loss + (again * held).mean() * self.head.weight.sum()


def _reparametrized(wrap: Callable[[nn.Linear], nn.Module]) -> Callable[[], Net]:
    def make() -> Net:
        net = Net()
        for block in net.blocks:
            wrap(block.first)
        return net

    return make


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: nn.Sequential(*[Block() for _ in range(4)]),
    "tied": _tied,
    "tied with a module outside": _outside,
    "frozen": _frozen,
    "checkpoint": lambda: Net(*[Block("checkpoint") for _ in range(4)]),
    "selective checkpoint": lambda: Net(*[Block("selective") for _ in range(4)]),
    "checkpoint of a weight": lambda: Net(*[Given() for _ in range(4)]),
    "reentrant checkpoint of a weight": lambda: Net(*[Given("reentrant") for _ in range(4)]),
    "reentrant checkpoint": lambda: Net(*[Block("reentrant") for _ in range(4)]),
    "channels_last": lambda: Net(*[Convolution() for _ in range(3)]).to(
        memory_format=torch.channels_last
    ),
    "lstm": lambda: Net(*[Recurrent() for _ in range(3)]),
    "borrowed module": lambda: _borrowing(lambda m: (m,), lambda held: held[0].weight),
    "borrowed in a list": lambda: _borrowing(lambda m: [m.weight], lambda held: held[0]),
    "borrowed in a dict": lambda: _borrowing(lambda m: {"w": m.weight}, lambda held: held["w"]),
    "functional": Functional,
    "codebook": lambda: Codebooks(_copied),
    "codebook, unseen": lambda: Codebooks(_copied_unseen),
    "codebook, replaced": lambda: Codebooks(_replaced),
    "held over layers and changed": Holding,
    "stashed by a layer and changed": Stashed,
    "complex": lambda: Net(*[Spectral() for _ in range(3)]),
    "sometimes": lambda: Net(*[Sometimes() for _ in range(3)]),
    "weight_norm": _reparametrized(nn.utils.weight_norm),
    "weight_norm parametrization": _reparametrized(nn.utils.parametrizations.weight_norm),
    "spectral_norm": _reparametrized(nn.utils.spectral_norm),
    "orthogonal": _reparametrized(nn.utils.parametrizations.orthogonal),
    "double": lambda: Net().double(),
    "bfloat16": lambda: Net().bfloat16(),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("how", ["weights", "weights and activations"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, how: str) -> None:
    def run(model: nn.Module) -> list[Tensor | None]:
        dtype = next(model.parameters()).real.dtype
        return steps(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.01),
            count=6 if name == "sometimes" else 3,  # it has been through its branches by then
            loss=lambda model, x: model(x.to(dtype)).square().mean(),
        )

    both = ActivationPolicy(min_bytes=256) if how != "weights" else None
    check(MODELS[name], run, activations=both)


def test_weights_that_are_taken_in_a_loop_go_again() -> None:
    """Each is let go of by the model when it takes the next, and by ebbtide then."""

    class Looping(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                weight = block.first.weight
                x = (x @ weight.t()).tanh() @ weight
            return x.square().mean()

    model = Looping(*[Block() for _ in range(8)])
    device = SimulatedDevice(0)
    with on_device(device, lambda: PinnedStore(device, slab_bytes=2**16)):
        handle = ebbtide.offload(model, weights=WeightPolicy())
    allocate, peak_bytes = device.allocate, 0

    def watched(size_bytes: int) -> Tensor:
        nonlocal peak_bytes
        device.finish_copies()
        memory = allocate(size_bytes)
        peak_bytes = max(peak_bytes, device.allocated_bytes())
        return memory

    device.allocate = watched
    with torch.no_grad():
        model(batch(0))
    model(batch(0)).backward()
    group = weights_of(handle).groups[0]
    assert peak_bytes <= 3 * group.size_bytes  # two, and the one that the loop still holds
    handle.detach()


def test_autocast() -> None:
    def run(model: nn.Module) -> list[Tensor | None]:
        def loss(model: nn.Module, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(x)

        return steps(model, count=5, loss=loss)

    check(Net, run)


def test_autocast_without_its_cache_and_a_layer_that_repeats() -> None:
    """Its cache sums such a layer's gradient in bfloat16; see docs/guides/weights.md."""

    def make() -> nn.Module:
        net = Net(*[Block() for _ in range(3)])
        net.blocks[2] = net.blocks[1] = net.blocks[0]
        net.blocks.append(Block())
        return net

    def run(model: nn.Module) -> list[Tensor | None]:
        def loss(model: nn.Module, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                return model(x)

        return steps(model, count=5, loss=loss)

    check(make, run)


def _autocast(model: nn.Module, number: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(batch(number))


def _casts(model: nn.Module) -> list[Tensor]:
    """Tensors that look like what autocast makes of the model's weights."""
    shapes = {s for p in model.parameters() if p.dim() > 1 for s in (p.shape, p.t().shape)}
    known = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    return [t for t in known if t.dtype is torch.bfloat16 and t.shape in shapes]


@pytest.mark.parametrize("how", ["weights", "weights and activations", "without the rule"])
def test_casts_of_weights_hold_no_memory(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "without the rule":
        monkeypatch.setattr("ebbtide.weights.device_weights.cast_parameter", lambda _: None)
    model = Net()
    others = {model.enter.weight.shape, model.head.weight.shape, model.head.weight.t().shape}
    both = ActivationPolicy(min_bytes=64) if how == "weights and activations" else None
    with offloaded(model, activations=both) as handle:
        loss = _autocast(model, 0)
        held = [t for t in _casts(model) if t.shape not in others]
        loss.backward()
        assert bool(held) == (how == "without the rule")
        cast_bytes = sum(b.first.weight.nbytes + b.second.weight.nbytes for b in model.blocks) // 2
        assert (handle.stats.parameter_bytes >= cast_bytes) == (how != "without the rule")


def test_casts_of_frozen_weights_leave_with_the_activations() -> None:
    """Nothing tells them from activations, and they are on the device for no other reason."""

    def run(model: nn.Module) -> list[Tensor | None]:
        losses: list[Tensor | None] = []
        for number in range(3):
            loss = _autocast(model, number)
            held = _casts(model) if number == 2 else []
            loss.backward()
            losses.append(loss.detach().clone())
        found.append(bool([t for t in held if t.shape != model.head.weight.t().shape]))
        return losses

    found: list[bool] = []
    check(_frozen_blocks, run, activations=ActivationPolicy(min_bytes=64))
    assert found == [False] * 3
    check(_frozen_blocks, run)
    assert found[3:] == [False, True, True]


def _frozen_blocks() -> Net:
    net = Net()
    net.blocks.requires_grad_(False)
    return net


def test_a_cast_of_a_weight_that_the_forward_changes() -> None:
    """It is made before or after the change, which nobody may forget."""

    class Changing(Block):
        def forward(self, x: Tensor) -> Tensor:
            before = self.first.weight.to(torch.bfloat16)
            with torch.no_grad():
                self.first.weight.mul_(0.9)
            after = self.first.weight.to(torch.bfloat16)
            y = nn.functional.linear(x.bfloat16(), before) + nn.functional.linear(
                x.bfloat16(), after
            )
            return x + self.second(y.float())

    check(lambda: Net(*[Changing() for _ in range(3)]), steps)


@pytest.mark.parametrize("when", ["in the layer", "after the layer", "after the forward"])
def test_a_weight_changed_after_its_cast_is_seen(when: str) -> None:
    def change(module: nn.Module, *_: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(2)

    model = Net()
    second = model.blocks[1].second
    with offloaded(model):
        if when == "in the layer":
            second.register_forward_hook(change)
        elif when == "after the layer":
            model.blocks[1].register_forward_hook(lambda *_: change(second))
        loss = _autocast(model, 0)
        if when == "after the forward":
            change(second)
        with pytest.raises(SavedTensorModifiedError, match=r"blocks\.1\.second\.weight"):
            loss.backward()
        del loss


# ---- masters on the host, and half of their bytes on the device

MASTERS = WeightPolicy(param_dtype=torch.bfloat16)


def _train_with_autocast(model: nn.Module, optimizer: Any = None) -> list[Tensor | None]:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    # A fused step raises no version of a weight.
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return steps(model, optimizer, count=5, loss=loss)


@pytest.mark.parametrize("kind", ["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize(
    "activations",
    [
        None,
        ActivationPolicy(min_bytes=64),
        ActivationPolicy(min_bytes=64, mode="recompute"),
        ActivationPolicy(min_bytes=64, mode="recompute+offload"),
    ],
)
def test_masters_train_as_autocast_does(kind: str, activations: ActivationPolicy | None) -> None:
    def make() -> nn.Module:
        return Net(*[Block(kind) for _ in range(4)])

    check(make, _train_with_autocast, weights=MASTERS, activations=activations)


def test_masters_that_the_program_writes_and_moves() -> None:
    def run(model: nn.Module) -> list[Tensor | None]:
        losses = _train_with_autocast(model)
        with torch.no_grad():
            for p in model.blocks.parameters():
                p.mul_(0.9)
        losses += _train_with_autocast(model)
        average = [p.detach() * 0.5 for p in model.parameters()]
        own = [p.data for p in model.parameters()]
        for p, values in zip(model.parameters(), average, strict=True):
            p.data = values
        losses.append(_autocast(model, 3).detach())
        for p, values in zip(model.parameters(), own, strict=True):
            p.data = values
        saved = {name: value * 2 for name, value in model.state_dict().items()}
        assert {value.dtype for value in saved.values()} == {torch.float32}
        model.load_state_dict(saved, assign=True)
        return losses + _train_with_autocast(model)

    check(Net, run, weights=MASTERS)


def test_a_master_that_changes_before_its_layer_is_recomputed() -> None:
    def run(model: nn.Module) -> list[Tensor | None]:
        losses = []
        for number in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(batch(number))
            with torch.no_grad():
                model.blocks[1].second.weight.mul_(1.5)  # not seen by torch: nothing has saved it
            loss.backward()
            losses.append(loss.detach())
        return losses

    check(lambda: Net(*[Block("reentrant") for _ in range(3)]), run, weights=MASTERS)


def test_masters_have_half_of_their_bytes_on_the_device_and_twice_the_digits_on_the_host() -> None:
    model = Net()
    with offloaded(model, weights=MASTERS) as handle:
        loss = _autocast(model, 0)
        loss.backward()
        # 2 matrices of 16 x 32 in bfloat16; vectors of 32, 16 and 16, in blocks of 512 bytes.
        assert {group.size_bytes for group in weights_of(handle).groups} == {2 * 1024 + 3 * 512}
        # Four layers for forward, and two for backward: it begins with the last two there still.
        assert handle.stats.weight_reload_bytes == 6 * (2 * 1024 + 3 * 512)
        weight = model.blocks[0].first.weight
        assert weight.dtype is torch.float32
        assert weight.grad is not None
        assert weight.grad.dtype is torch.float32
        assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["blocks.1.scale", "blocks.1.second.weight"])
def test_a_master_that_changes_before_backward_is_an_error(name: str) -> None:
    model = Net()
    with offloaded(model, weights=MASTERS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch(0))
        with torch.no_grad():
            model.get_parameter(name).mul_(2)
        with pytest.raises(SavedTensorModifiedError, match=re.escape(name)):
            loss.backward()
        del loss


def test_a_forward_cannot_change_what_has_a_master() -> None:
    class Clamped(Block):
        def compute(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.first.weight.clamp_(-0.2, 0.2)
            return super().compute(x)

    model = Net(*[Clamped() for _ in range(3)])
    with offloaded(model, weights=MASTERS):
        with pytest.raises(PolicyError, match="param_dtype"):
            _autocast(model, 0).backward()
        for block in model.blocks:
            block.__class__ = Block
        _train_with_autocast(model)


def test_gradients_of_gradients_with_masters() -> None:
    def run(model: nn.Module) -> list[Tensor | None]:
        weights = [block.second.weight for block in model.blocks]
        loss = _autocast(model, 0)
        found = torch.autograd.grad(loss, weights, create_graph=True)
        sum(each.square().sum() for each in found).backward()
        return [loss.detach(), *(each.detach() for each in found)]

    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    expected = run(plain)
    with offloaded(model, weights=MASTERS):
        got = run(model)
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other)  # of the second, autograd adds parts in another order
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=0.05, atol=1e-4)
        del got


def test_masters_are_for_an_accelerator() -> None:
    with pytest.raises(PolicyError, match="accelerator"):
        ebbtide.offload(Net(), weights=MASTERS)


def test_sparse_gradients() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, WIDTH, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table(x.argmax(-1) % 10)

    def run(model: nn.Module) -> list[Tensor | None]:
        losses: list[Tensor | None] = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            for microbatch in range(2):
                loss = model(batch(10 * number + microbatch))
                loss.backward()
                losses.append(loss.detach().clone())
            losses += [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
            optimizer.step()
        optimizer.zero_grad()
        return losses

    check(lambda: Net(*[Table() for _ in range(3)]), run)


def test_a_schedule_of_activations() -> None:
    schedule = ebbtide.schedule.default(2, 4)
    check(
        Net,
        steps,
        activations=ActivationPolicy(min_bytes=256),
        schedule=schedule,
    )


# ---- backward -----------------------------------------------------------------------------------


def between_blocks(model: nn.Module, x: Tensor) -> Tensor:
    """Two forwards that are not of the whole model, around one that is."""
    first, last = model.blocks[0], model.blocks[-1]
    return first(x).sum() + model(x) + first(last(x)).square().mean()


@pytest.mark.parametrize("kind", ["plain", "checkpointed", "reentrant"])
@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x: model(x) + model(-x) + model(x.flip(0)),
        between_blocks,
        lambda model, x: model(x).square() * model(-x),
    ],
    ids=["three forwards", "between blocks", "product"],
)
def test_gradients_of_several_forwards_are_added_in_the_order_of_plain_training(
    loss: Callable[[nn.Module, Tensor], Tensor], kind: str
) -> None:
    def make() -> nn.Module:
        shared = Block(kind)
        return Net(shared, Block(kind), shared, Block(kind), Block(kind), shared)

    check(make, lambda model: steps(model, loss=loss))


def test_a_move_is_shared_by_graphs_of_which_one_has_had_its_backward() -> None:
    def run(model: nn.Module) -> list[Tensor | None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for number in range(3):
            first, second = model(batch(number)), model(-batch(number))
            first.backward(retain_graph=number == 1)
            third = model(batch(number).flip(0))
            (second + third + (first if number == 1 else 0)).backward()
            losses += [first.detach(), third.detach()]
            optimizer.step()
            optimizer.zero_grad()
        return losses

    check(Net, run)


def _asked_for(model: nn.Module) -> list[Tensor | None]:
    parameters = list(model.parameters())
    found = list(torch.autograd.grad(model(batch(0)), parameters))
    model(batch(1)).backward()
    found += torch.autograd.grad(model(batch(2)), parameters)
    model(batch(3)).backward(inputs=parameters[:3])
    return found


def _retained(model: nn.Module) -> list[Tensor | None]:
    loss = model(batch(0))
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    return [*first, loss.detach()]


def _double(model: nn.Module) -> list[Tensor | None]:
    x = batch(0).requires_grad_()
    parameters = list(model.parameters())
    (slope,) = torch.autograd.grad(model(x), x, create_graph=True)
    slope.square().sum().backward()
    gradients = torch.autograd.grad(model(x), parameters, create_graph=True)
    penalty = sum(g.square().sum() for g in gradients)
    penalty.backward()
    return [slope.detach(), penalty.detach(), x.grad]


def _create_graph(model: nn.Module) -> list[Tensor | None]:
    model(batch(0)).backward(create_graph=True)
    total = sum(p.grad.square().sum() for p in model.parameters())
    found = list(torch.autograd.grad(total, list(model.parameters())))
    model.zero_grad()
    return found


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # noqa: ARG004
        raise ArithmeticError


def _raises(model: nn.Module) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for where in (0, 2):
        model(batch(0)).backward()
        block = model.blocks[where]
        handle = block.register_forward_hook(lambda *call: _Fail.apply(call[-1]))
        loss = model(batch(1))
        handle.remove()
        with pytest.raises(ArithmeticError):
            loss.backward()
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
        found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        found += steps(model)
    return found


def _raises_in_forward(model: nn.Module) -> list[Tensor | None]:
    def fail(*_: Any) -> None:
        raise ArithmeticError

    found = steps(model)
    handle = model.blocks[2].second.register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        model(batch(0))
    handle.remove()
    return found + steps(model)


def _evaluated(model: nn.Module) -> list[Tensor | None]:
    found = steps(model)
    with torch.no_grad():
        found.append(model(batch(5)))
    with torch.inference_mode():
        found.append(model(batch(6)).clone())
    with torch.inference_mode():
        found.append(model.blocks[0](batch(7)).clone())
    return [f.detach().clone() for f in found] + steps(model)


def _in_flight(model: nn.Module) -> list[Tensor | None]:
    losses = [model(batch(n)) for n in range(4)]
    losses[2].backward()
    with torch.no_grad():
        between = model(batch(9))
    (losses[0] + losses[1]).backward()
    del losses
    return [between, *steps(model)]


def _no_backward(model: nn.Module) -> list[Tensor | None]:
    first = model(batch(0)).detach()
    kept = model(batch(1))
    found = steps(model)
    return [first, kept.detach(), *found]


def _alone(model: nn.Module) -> list[Tensor | None]:
    """Blocks without the model, with other saved-tensor hooks and without any."""
    x = model.blocks[1](batch(0))
    x = model.blocks[3](model.blocks[1](x))
    x.square().mean().backward()
    with torch.autograd.graph.save_on_cpu():
        y = model.blocks[2](batch(1))
    y.square().mean().backward()
    with torch.no_grad(), torch.enable_grad():
        model.blocks[0](batch(2)).sum().backward()
    return [x.detach(), y.detach(), *steps(model)]


def _zeroed(model: nn.Module) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for to_none in (True, False):
        model(batch(0)).backward()
        loss = model(batch(1))
        model.zero_grad(set_to_none=to_none)
        loss.backward()
        found += [p.grad.clone() for p in model.parameters()]
        held = [p.grad for p in model.parameters()]
        copies = [g.clone() for g in held]
        model.zero_grad()
        found += steps(model, count=1)
        model.zero_grad()
        model(batch(2)).backward()
        for gradient, expected in zip(held, copies, strict=True):
            assert torch.equal(gradient, expected), "a gradient that somebody holds was overwritten"
    return found


def _hooked(model: nn.Module) -> list[Tensor | None]:
    seen: dict[Tensor, list[Tensor | None]] = {p: [] for p in model.parameters()}

    def before(parameter: Tensor, gradient: Tensor) -> Tensor:
        seen[parameter].append(gradient.clone())
        return gradient * 0.5

    def after(parameter: Tensor) -> None:
        seen[parameter].append(parameter.grad.clone())
        parameter.grad.clamp_(-0.01, 0.01)

    handles = [p.register_hook(functools.partial(before, p)) for p in seen]
    handles += [p.register_post_accumulate_grad_hook(after) for p in seen]
    for number in range(3):
        model(batch(number)).backward()
    while handles:
        handles.pop().remove()
    return [*itertools.chain(*seen.values()), *steps(model)]


def _given(model: nn.Module) -> list[Tensor | None]:
    found = steps(model)
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    with torch.no_grad():
        for parameter in model.blocks[0].parameters():
            parameter.mul_(0.5)
    found += steps(model)
    nn.init.ones_(model.blocks[1].scale)
    return found + steps(model)


def _thawed(model: nn.Module) -> list[Tensor | None]:
    model.blocks[1].requires_grad_(False)
    found = steps(model)
    assert model.blocks[1].scale.grad is None
    model.blocks[1].requires_grad_(True)
    model.blocks[2].requires_grad_(False)
    return found + steps(model)


def _restored(model: nn.Module) -> list[Tensor | None]:
    """A checkpoint is written and read again, by a model and an optimizer that are offloaded."""
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    values = sum(p.nbytes for p in model.parameters())
    assert file.tell() < 3 * values + 200 * len(list(model.parameters())) * 10
    steps(model, optimizer)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    return steps(model, optimizer)


def _assigned(model: nn.Module) -> list[Tensor | None]:
    """Other parameters take the place of those that rest."""
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, optimizer)
    before = model.blocks[0].scale
    found: list[Tensor | None] = []
    values = {name: value.clone() * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    found += steps(model)
    model.blocks[2].second.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH))
    model.blocks[2].scale = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
    found += steps(model)
    held = before.detach().clone()
    with torch.no_grad():
        before.mul_(2)  # nobody's any more
    found += steps(model)
    return [*found, held, before.detach()]


def _averaged(model: nn.Module) -> list[Tensor | None]:
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    found: list[Tensor | None] = []
    for _ in range(3):
        found += steps(model)
        average.update_parameters(model)
    copied = copy.deepcopy(model)
    found += steps(copied)
    with torch.no_grad():
        found.append(average(batch(5)).clone())
    return [*found, *(p.detach().clone() for p in copied.parameters())]


def _changed_in_forward(model: nn.Module) -> list[Tensor | None]:
    def clamp(module: nn.Module, *_: Any) -> None:
        with torch.no_grad():
            module.scale.clamp_(max=0.9)

    handle = model.blocks[1].register_forward_pre_hook(clamp)
    found = steps(model)
    handle.remove()
    return found


def _inside_no_grad(model: nn.Module) -> list[Tensor | None]:
    """A layer that differentiates by itself, as models of forces do, while evaluating."""

    def force(x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            weight = block.first.weight
            assert weight.requires_grad
            energy = (inner @ weight.t()).square().sum()
            slope, own = torch.autograd.grad(energy, [inner, weight], create_graph=True)
            (own.square().sum() + energy).backward(retain_graph=True)
        return block.second(block.first(x)) + slope

    block = model.blocks[1]
    block.compute = force
    with torch.no_grad():
        first = model(batch(0))
    return [first, *steps(model)]


def _penalized(model: nn.Module) -> list[Tensor | None]:
    """A loss that looks at the weights themselves, where they rest."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x) + 0.1 * sum(p.square().sum() for p in model.parameters())

    return steps(model, count=5, loss=loss)


CASES = (
    _asked_for,
    _retained,
    _double,
    _create_graph,
    _raises,
    _raises_in_forward,
    _evaluated,
    _in_flight,
    _no_backward,
    _alone,
    _zeroed,
    _hooked,
    _given,
    _thawed,
    _restored,
    _assigned,
    _averaged,
    _changed_in_forward,
    _inside_no_grad,
    _penalized,
)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[1:])
def test_cases(case: Run) -> None:
    check(Net, case)


# ---- ends ---------------------------------------------------------------------------------------


def test_state_dict_is_no_larger_than_the_model() -> None:
    plain, model = Net(), Net()
    files = io.BytesIO(), io.BytesIO()
    torch.save(plain.state_dict(), files[0])
    with offloaded(model):
        steps(model)
        torch.save(model.state_dict(), files[1])
    assert files[1].tell() == files[0].tell()
    assert b"ebbtide" not in files[1].getvalue()


def test_detach_between_forward_and_backward() -> None:
    torch.manual_seed(0)
    plain = Net()
    plain(batch(0)).backward()
    plain(batch(1)).backward()
    torch.manual_seed(0)
    model = Net()
    with offloaded(model):
        model(batch(0)).backward()
        loss = model(batch(1))
    loss.backward()
    assert_bitwise_equal(state(model), state(plain))


@pytest.mark.parametrize("detaches", [False, True])
@pytest.mark.parametrize("comes", [False, True], ids=["dropped", "backward"])
def test_a_graph_leaves_nothing_behind(comes: bool, detaches: bool) -> None:
    model, device = Net(), SimulatedDevice(0)
    with on_device(device, lambda: PinnedStore(device, slab_bytes=2**16)):
        handle = ebbtide.offload(model, weights=WeightPolicy())
    loss = model(batch(0))
    if detaches:
        handle.detach()
    if comes:
        loss.backward()
    del loss
    handle.inspect()  # notes what has died
    device.finish_jobs()  # gives memory back
    in_flight = handle.inspect().in_flight
    assert in_flight.saved_tensors == 0
    assert detaches or in_flight.host_capacity_bytes > 0
    handle.detach()
    assert handle.inspect().in_flight.host_capacity_bytes == 0


def test_a_weight_changed_before_backward_is_seen() -> None:
    model = Net()
    with offloaded(model):
        loss = model(batch(0))
        with torch.no_grad():
            model.blocks[1].second.weight.mul_(2)
        with pytest.raises(SavedTensorModifiedError):
            loss.backward()
        del loss


def test_values_given_between_forward_and_backward_are_seen() -> None:
    """Autograd alone would still have the values from before, and they are gone."""
    model = Net()
    with offloaded(model):
        loss = model(batch(0))
        model.blocks[1].scale.data = model.blocks[1].scale.data * 0.5
        other = model(batch(1))
        with pytest.raises(SavedTensorModifiedError, match=r"blocks\.1\.scale"):
            loss.backward()
        other.backward()
        del loss, other


def _resting(model: nn.Module, handle: OffloadHandle) -> list[str]:
    """The model's parameters that are in the memory of their group."""
    addresses = {each.address for each in handle.inspect().parameters}
    return [name for name, p in model.named_parameters() if p.data_ptr() in addresses]


def test_given_parameters_rest_from_the_next_step_on() -> None:
    model = Net()
    with offloaded(model) as handle:
        expected = _resting(model, handle)
        assert len(expected) == 4 * 5
        values = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(values, assign=True)
        assert not _resting(model, handle)
        steps(model, count=1)
        assert not _resting(model, handle), "their memory is the program's, too"
        del values
        steps(model, count=1)
        assert _resting(model, handle) == expected


def test_parameters_for_one_call_are_left_alone() -> None:
    """`torch.func.functional_call` puts them in the place of the model's own."""
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    others = {name: nn.Parameter(p * 0.5) for name, p in plain.named_parameters()}
    addresses = [p.data_ptr() for p in others.values()]
    with offloaded(model) as handle:
        expected = _resting(model, handle)
        for net in (plain, model):
            steps(net)
            loss = torch.func.functional_call(net, others, (batch(3),))
            loss.backward()
            steps(net)
        assert [p.data_ptr() for p in others.values()] == addresses
        assert _resting(model, handle) == expected
        assert_bitwise_equal(state(model), state(plain))


@pytest.mark.parametrize("bad", [False, True])
def test_given_parameters_of_the_host_rest_at_once(bad: bool) -> None:
    """They could not work where they are."""
    model = _tied()
    with offloaded(model) as handle:
        expected = _resting(model, handle)
        # To be told from the simulated device.
        weights_of(handle)._home = torch.device("meta")
        before = model.blocks[0].first.weight
        given = nn.Parameter(torch.rand(2 * WIDTH, WIDTH))
        model.blocks[1].first.weight = given
        with pytest.raises(PolicyError):
            model(batch(0))
        model.blocks[0].first.weight = given
        if bad:
            model.blocks[2].scale = nn.Parameter(torch.rand(1))
            with pytest.raises(PolicyError):
                model(batch(0))
            model.blocks[2].scale = nn.Parameter(torch.rand(WIDTH))
        model(batch(0)).backward()
        assert given.grad is not None
        assert before.grad is None
        assert set(expected) - set(_resting(model, handle)) >= {"blocks.0.first.weight"}
        del before  # who holds it still has its memory
        model(batch(0))
        assert _resting(model, handle) == expected


def test_a_weight_replaced_in_forward_is_seen() -> None:
    """What was saved of it before is gone: autograd alone would still have it."""

    class Replacing(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = x * self.scale
            self.scale.data = self.scale.data * 0.5
            return y

    model = Net(*[Replacing() for _ in range(3)])
    with offloaded(model):
        loss = model(batch(0))
        with pytest.raises(SavedTensorModifiedError):
            loss.backward()
        del loss


def test_a_copy_and_a_detached_model_hold_plain_parameters() -> None:
    model = Net()
    before = type(model.head._parameters)
    with offloaded(model):
        copied = copy.deepcopy(model)
        for module in copied.modules():
            assert type(module._parameters) is before
    for module in model.modules():
        assert type(module._parameters) is before


def test_without_the_handle_the_model_trains_on() -> None:
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    device = SimulatedDevice(0)
    with on_device(device, lambda: PinnedStore(device, slab_bytes=2**16)):
        handle = ebbtide.offload(model, weights=WeightPolicy())
    del handle
    steps(plain)
    steps(model)
    assert_bitwise_equal(state(model), state(plain))


@pytest.mark.parametrize("how", ["detached", "dropped"])
def test_nothing_is_left_behind(how: str) -> None:
    """With the cyclic collector off: what is detached goes at once, whatever else lives on."""
    device = SimulatedDevice(0)
    # The first optimizer of a process imports modules whose frames refer to its caller.
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    gc.collect()
    gc.disable()
    try:
        model = Net()
        with on_device(device, lambda: PinnedStore(device, slab_bytes=2**16)):
            handle = ebbtide.offload(model, weights=WeightPolicy())
        steps(model)
        weights = weights_of(handle)
        known = [weakref.ref(group) for group in weights.groups]
        known += [weakref.ref(m) for group in weights.groups for m in group.members]
        del weights
        if how == "detached":
            handle.detach()
            device.finish_copies()
            assert device.allocated_bytes() == 0
            assert device.pinned_bytes == 0
        else:
            del model
        del handle
        if how == "dropped":
            gc.collect()  # a model that is offloaded refers to itself
            device.finish_copies()
            assert device.allocated_bytes() == 0
        assert not [reference() for reference in known if reference() is not None]
    finally:
        gc.enable()


# ---- refusals -----------------------------------------------------------------------------------


def test_a_second_offload_is_refused() -> None:
    model = Net()
    with offloaded(model), pytest.raises(PolicyError):
        ebbtide.offload(model, weights=WeightPolicy())


class Special(nn.Parameter):
    """A parameter of a class that ebbtide does not know."""


@pytest.mark.parametrize("bad", ["special", "meta", "nothing"])
def test_what_cannot_rest_is_refused(bad: str) -> None:
    model: nn.Module = Net()
    if bad == "special":
        model.blocks[2].second.weight = Special(torch.randn(WIDTH, 2 * WIDTH))
    elif bad == "meta":
        model = model.to("meta")
    else:
        model = nn.Linear(2, 2)
    said = {"special": "leave that layer out", "meta": "materialise", "nothing": "layers="}
    before = list(model.parameters())
    device = SimulatedDevice(0)
    with (
        on_device(device, lambda: PinnedStore(device, slab_bytes=2**16)),
        pytest.raises(PolicyError, match=said[bad]),
    ):
        ebbtide.offload(model, weights=WeightPolicy())
    assert "forward" not in model.__dict__
    assert [id(p) for p in model.parameters()] == [id(p) for p in before]


def test_another_type_is_refused() -> None:
    model = Net()
    with offloaded(model):
        model.double()
        with pytest.raises(PolicyError):
            model(batch(0).double())
        model.float()
        steps(model)


def test_room_for_gradients_that_never_came_is_not_set_aside_for_ever() -> None:
    """A budget places weights anew between steps, in the same store."""
    model = Net()
    with offloaded(model) as handle:
        store = handle._engine.transfers.store
        assert store.budget.reserved_bytes > 0
        with torch.no_grad():
            model(batch(0))
    assert store.budget.reserved_bytes == 0


class Scaled(nn.Module):
    """Changes its weight after it has used it, in a way that no version shows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.linear.weight.data.mul_(0.5)
        return y


def test_a_weight_changed_after_its_cast_is_not_cast_again() -> None:
    """Backward casts it again, where autograd itself would still have the first cast."""
    model = Net(Scaled(), Scaled())
    with offloaded(model), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(batch(0))
        with pytest.raises(SavedTensorModifiedError):
            loss.backward()


def test_an_optimizer_steps_a_new_parameter_that_does_not_fit() -> None:
    """It is not offloaded, and works where it is."""
    model = Net()
    with offloaded(model):
        layer = model.blocks[0].first
        before, given = layer.weight, nn.Parameter(torch.zeros(3, WIDTH))
        layer.weight, given.grad = given, torch.ones(3, WIDTH)
        torch.optim.SGD([given], 1.0).step()
        assert torch.equal(given.detach(), -torch.ones(3, WIDTH))
        layer.weight = before


class Slopes(Net):
    """Differentiates by a graph that saves a weight itself, when the weight's layer has gone."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            energy = (inner * self.blocks[0].scale).square().sum()
            x = super().forward(x)
            (slope,) = torch.autograd.grad(energy, inner)
        return x + slope.sum()


def test_a_graph_that_no_hooks_see_keeps_its_weights() -> None:
    def run(model: nn.Module) -> list[Tensor | None]:
        with torch.no_grad():  # so that ebbtide registers no hooks
            return [model(batch(number)).clone() for number in range(3)]

    check(Slopes, run)


def test_views_that_are_gone_are_no_longer_watched() -> None:
    model = Net()
    taken: list[Tensor] = []
    layer = model.blocks[3].second
    layer.register_forward_hook(lambda *_: taken.append(layer.weight.detach()))
    with offloaded(model), torch.no_grad():
        counts = []
        for number in range(6):
            model(batch(number))
            taken.clear()
            known = [each for each in gc.get_objects() if type(each) is DeviceParameter]
            counts.append(len(known))
            del known
        assert counts[-1] == counts[1]


class Rewritten(Net):
    """Holds a weight of a layer, and writes the layer's weights before it runs again."""

    def forward(self, x: Tensor) -> Tensor:
        held = self.blocks[0].scale
        x = super().forward(x) + x
        for parameter in self.blocks[0].parameters():
            parameter.detach().mul_(0.5)
        return (self.blocks[0](x) * held).square().mean()


def test_a_layer_whose_weight_is_held_sees_what_was_written_since() -> None:
    def run(model: nn.Module) -> list[Tensor | None]:
        with torch.no_grad():
            return [model(batch(number)).clone() for number in range(3)]

    check(Rewritten, run)


@pytest.mark.parametrize(
    ("make", "how", "counts"),
    [
        (torch.optim.AdamW, {}, [2]),
        (torch.optim.AdamW, {"foreach": True}, [2]),
        (torch.optim.AdamW, {"foreach": False}, []),
        (torch.optim.AdamW, {"fused": True}, []),
        (torch.optim.SGD, {"momentum": 0.9}, []),  # changes them in place
        (torch.optim.SGD, {"weight_decay": 0.1}, [2]),
        (torch.optim.SGD, {"maximize": True}, [2]),
    ],
)
def test_which_weights_an_optimizer_steps_at_once(
    make: type[torch.optim.Optimizer], how: dict[str, Any], counts: list[int]
) -> None:
    optimizer = make(nn.Linear(2, 2).parameters(), **how)
    assert [len(group) for group in stepped_at_once(optimizer)] == counts
