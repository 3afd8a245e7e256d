"""Recomputed layers whose forward depends on more than its arguments, or changes more.

Each test trains a model plainly and with recomputed layers for several steps. Losses, gradients,
weights and buffers are the same to the bit, because no code of the model runs again.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import gc
import itertools
import random
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

import ebbtide
from ebbtide import ActivationPolicy, SavedTensorModifiedError, WeightPolicy
from recompute_bench import (
    MODES,
    ROWS,
    WIDTH,
    Block,
    Calls,
    Dropout,
    S,
    Stack,
    compare,
    draw,
    policy,
    squares,
    stack,
    step,
)
from saying import warned
from waiting import wait_until

LAYERS = ["layers.*"]
GIVES_OTHERS = "gives other values when it runs again"


def build(make: Callable[[], nn.Module], count: int = 2, run: Any = None) -> Callable[[], Stack]:
    return lambda: Stack(nn.ModuleList(make() for _ in range(count)), run)


def recomputed(make: Callable[[], nn.Module], mode: str = "recompute", **options: Any) -> None:
    """The layers train as plainly, and each step recomputes them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        stats = compare(make, policy(mode), draw, 3, layers=LAYERS, **options)
    assert stats.recomputed_bytes > 0


def refused(
    make: Callable[[], nn.Module], why: str, mode: str = "recompute", **options: Any
) -> None:
    """The layers train as plainly, and are not recomputed, of which one warning tells."""
    with pytest.warns(RuntimeWarning, match=f"{why}.*not-recomputed") as said:
        stats = compare(make, policy(mode), draw, 3, layers=LAYERS, **options)
    assert len(said) == 1
    assert stats.recomputed_bytes == 0
    assert stats.offloaded_bytes > 0


# ---- operators that torch computes otherwise where something watches them ------------------------


class Inverse(Block):
    """Inverts a complex matrix: the kernel conjugates lazily within itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).sin()
        inverse = torch.linalg.pinv(torch.complex(y[:8, :8], y[:8, 8:16]))
        return y + torch.view_as_real(inverse).mean()


class Bilinear(Block):
    """Within the operator, and not before it, autocast casts."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Bilinear(WIDTH, 4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.pairs(x, self.linear(x)[:, :4].float()).sin()


@pytest.mark.parametrize("mode", MODES)
def test_kernels_that_conjugate_within_themselves(mode: str) -> None:
    recomputed(build(Inverse), mode)


@pytest.mark.parametrize("mode", MODES)
def test_operators_in_which_autocast_casts(mode: str) -> None:
    def backward(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model, inputs)
        value.backward()
        return value

    recomputed(build(Bilinear), mode)
    refused(build(Bilinear), "gives other values", mode, backward=backward)


# ---- what a forward finds and leaves behind ------------------------------------------------------


class Timed(Block):
    t = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin() * self.t + x


class CallCounter(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (self.linear(x) / self.calls).sin()


class Queue(Block):
    """Replaces a small buffer, and a large one."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.register_buffer("queue", torch.ones(size, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = (self.linear(x) * self.queue.mean(0)).sin()
        self.queue = torch.cat([self.queue[1:], x.detach()[:1]])
        return x


class Widths(nn.Module):
    """A slimmable layer, whose width the outer loop sets."""

    width = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.linear(x, self.linear.weight[: self.width], self.linear.bias[: self.width])
        return F.linear(inner.sin(), self.linear.weight[:, : self.width])


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "ab"})
        self.active = ["a"]

    def forward(self, x: Tensor) -> Tensor:
        for name in self.active:
            x = self.adapters[name](x).sin()
        return x


class Swapped(Block):
    """Its submodule is exchanged by the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()


class Generators(Block):
    """Draws from generators of its own, and from all global ones."""

    def __init__(self) -> None:
        super().__init__()
        self.of_torch = torch.Generator().manual_seed(1)
        self.of_numpy = np.random.default_rng(1)
        self.of_old_numpy = np.random.RandomState(1)
        self.of_python = random.Random(1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Generators:
        made = Generators()
        made.load_state_dict(self.state_dict())
        return made

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)[torch.randperm(ROWS)].sin()
        x = x * torch.rand(WIDTH, generator=self.of_torch) + torch.rand(WIDTH)
        drawn = self.of_numpy.random() + self.of_old_numpy.rand() + self.of_python.random()
        return (x * drawn).cos()


def each_call_of(name: str, values: list[Any]) -> Any:
    """Run a layer once for each value of one of its attributes."""

    def run(layer: nn.Module, x: Tensor) -> Tensor:
        for value in values:
            setattr(layer, name, value)
            x = layer(x)
        return x

    return run


def swapping(layer: nn.Module, x: Tensor) -> Tensor:
    first = layer.linear
    for other in layer.others:
        layer.linear = other
        x = layer(x)
    layer.linear = first
    return layer(x)


def two_before_one_backward(
    model: nn.Module, inputs: Any, loss: Any, *, name: str, values: list[Any]
) -> Tensor:
    losses = []
    for value in values:
        for layer in model.layers:
            setattr(layer, name, value)
        losses.append(loss(model, inputs))
    torch.stack(losses).sum().backward()
    return losses[-1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("make", "run", "backward"),
    [
        (Timed, each_call_of("t", [0.1, 0.5, 2.0]), None),
        (Timed, None, functools.partial(two_before_one_backward, name="t", values=[0.3, 3.0])),
        (CallCounter, lambda layer, x: layer(layer(x)), None),
        (Queue, lambda layer, x: layer(layer(x)), None),
        (functools.partial(Queue, 200), lambda layer, x: layer(layer(x)), None),
        (Widths, each_call_of("width", [8, 256, 16]), None),
        (Widths, None, functools.partial(two_before_one_backward, name="width", values=[4, 9])),
        (Adapted, each_call_of("active", [["a"], ["b", "a"], []]), None),
        (Generators, lambda layer, x: layer(layer(x)), None),
    ],
    ids=[
        "attribute",
        "attribute_two",
        "counter",
        "queue",
        "large_queue",
        "widths",
        "widths_two",
        "adapters",
        "generators",
    ],
)
def test_what_a_module_has_when_its_forward_runs_counts(
    make: Any, run: Any, backward: Any, mode: str
) -> None:
    recomputed(build(make, run=run), mode, backward=backward)


@pytest.mark.parametrize("mode", MODES)
def test_a_module_whose_parts_are_exchanged(mode: str) -> None:
    recomputed(build(Swapped, run=swapping), mode)


# Weights that are not the module's own


def on_fast_weights(model: nn.Module, inputs: Any, _: Any, *, second_order: bool) -> Tensor:
    """Two steps of an inner loop, and the loss after it (MAML)."""
    weights = dict(model.named_parameters())
    for _ in range(2):
        value = functional_call(model, weights, tuple(inputs)).square().mean()
        slopes = torch.autograd.grad(value, [*weights.values()], create_graph=second_order)
        pairs = zip(weights.items(), slopes, strict=True)
        weights = {name: weight - 0.1 * slope for (name, weight), slope in pairs}
    value = functional_call(model, weights, tuple(inputs)).square().mean()
    value.backward()
    return value


class Hyper(nn.Module):
    """A network that makes the weights of a shared block for each of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block2()])
        self.made = nn.Parameter(torch.randn(3, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        own = dict(self.layers[0].named_parameters())
        for row in self.made:
            scaled = {name: weight * row for name, weight in own.items()}
            x = functional_call(self.layers[0], scaled, (x,))
        return x


class Block2(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()


class Teacher(nn.Module):
    """The same layers called with their own weights, and with others that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block2() for _ in range(2))
        others = {n: torch.randn_like(p) / 8 for n, p in self.layers.named_parameters()}
        self.others = others

    def forward(self, x: Tensor) -> Tensor:
        own = others = x
        for number, layer in enumerate(self.layers):
            given = {n: self.others[f"{number}.{n}"] for n, _ in layer.named_parameters()}
            others = functional_call(layer, given, (others,))
            own = layer(own)
        return (own - others).square()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("second_order", [False, True])
def test_weights_of_an_inner_loop(second_order: bool, mode: str) -> None:
    backward = functools.partial(on_fast_weights, second_order=second_order)
    compare(build(Dropout), policy(mode), draw, 3, layers=LAYERS, backward=backward)


def test_weights_of_a_call() -> None:
    recomputed(Hyper)
    recomputed(Teacher)


# Settings of torch, and what surrounds the forward only


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3 - min(before, 2))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Sensitive(nn.Module):
    """What it computes depends on the settings of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * torch.ones(WIDTH).sum().sin().item()
        x = F.gelu(x, approximate="tanh") + self.linear(x)
        heads = x.view(4, ROWS // 4, 4, WIDTH // 4).transpose(1, 2)
        heads = F.scaled_dot_product_attention(heads, heads, heads)
        return x + heads.transpose(1, 2).reshape(x.shape)


CONTEXTS: dict[str, Any] = {
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "sdpa": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "cached": parametrize.cached,
    "dtype": default_dtype,
    "threads": one_thread,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_around_the_forward_only(context: str) -> None:
    def backward(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
        with CONTEXTS[context]():
            value = loss(model, inputs)
        value.backward()
        return value

    recomputed(build(Sensitive), backward=backward)


def test_a_hook_that_is_there_in_the_forward_only() -> None:
    def backward(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
        inner = [layer.linear for layer in model.layers]
        hooks = [each.register_forward_hook(lambda _m, _i, y: y.cos() * 2) for each in inner]
        value = loss(model, inputs)
        for hook in hooks:
            hook.remove()
        late = [each.register_forward_hook(lambda _m, _i, y: y * 3) for each in inner]
        value.backward()
        for hook in late:
            hook.remove()
        assert not any(each._forward_hooks for each in inner)
        return value

    recomputed(build(Block2), backward=backward)


def test_a_hook_of_the_layer_itself_that_is_there_in_the_forward_only() -> None:
    """It runs around the layer's forward, and not when that runs again."""

    def backward(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
        hooks = [each.register_forward_hook(lambda _m, _i, y: y.cos() * 2) for each in model.layers]
        value = loss(model, inputs)
        for hook in hooks:
            hook.remove()
        value.backward()
        return value

    recomputed(build(Block2), backward=backward)


def test_what_a_hook_has_taken_from_a_layer_dies_with_the_hook() -> None:
    """As in an attribution of Captum, the layer's own backward never comes."""
    model = build(Block2)()
    with ebbtide.offload(model, activations=policy("recompute"), layers=LAYERS) as handle:
        for _ in range(3):
            step(handle, model)
            taken = dict[int, Tensor]()
            hook = model.layers[0].register_forward_hook(
                lambda _m, _i, y, taken=taken: taken.setdefault(0, y)
            )
            out = model(*draw())
            hook.remove()
            torch.autograd.grad(out.sum(), taken[0])
            del hook, out, taken
            assert not handle.inspect().in_flight.saved_tensors


@pytest.mark.parametrize("first", [False, True])
def test_weights_that_are_frozen_or_thawed_before_backward(first: bool) -> None:
    def backward(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
        weights = [layer.linear.weight for layer in model.layers]
        for weight in weights:
            weight.requires_grad_(first)
        value = loss(model, inputs)
        for weight in weights:
            weight.requires_grad_(not first)
        value.backward()
        assert all(weight.requires_grad is not first for weight in weights)
        return value

    recomputed(build(Block2), backward=backward)


# Layers of torch


class Noisy(Block):
    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.linear(x).sin())


class ChannelDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout1d(x[None], 0.5, self.training)[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "last",
    [
        ChannelDropout,
        lambda: nn.BatchNorm1d(WIDTH),
        lambda: nn.BatchNorm1d(WIDTH, momentum=None),
        lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        lambda: torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        lambda: parametrizations.orthogonal(nn.Linear(8, WIDTH // 8).double().float()),
        lambda: nn.LazyLinear(WIDTH),
        nn.LazyBatchNorm1d,
    ],
    ids=[
        "dropout", "batch_norm", "cumulative", "spectral", "old_spectral", "orthogonal",
        "lazy", "lazy_batch_norm",
    ],
)  # fmt: skip
def test_layers_of_torch(last: Any, mode: str) -> None:
    def make() -> Stack:
        layers = [Noisy(last()) for _ in range(2)]
        if isinstance(layers[0].last, nn.Linear) and layers[0].last.in_features == 8:
            for layer in layers:
                layer.last = nn.Sequential(nn.Linear(WIDTH, 8), layer.last, nn.LazyLinear(WIDTH))
        return Stack(nn.ModuleList(layers))

    built = make()
    if any(nn.parameter.is_lazy(each) for each in [*built.parameters(), *built.buffers()]):
        lazily(make, mode)
    else:
        recomputed(make, mode)


_unfilled = itertools.count()


def _attend(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    garbage = next(_unfilled)
    seed = torch.full((), garbage, dtype=torch.int64)
    return x.sin(), torch.full((ROWS,), float(garbage)), seed


@torch.library.custom_op("ebbtide_tests::flash_attention", mutates_args=())
def flash_attention(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Leaves memory, as attention's kernels do without dropout, that nobody has filled."""
    return _attend(x)


@torch.library.custom_op("ebbtide_tests::other", mutates_args=())
def other(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Not an attention: what it saves counts."""
    return _attend(x)


def _save(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _attend_back(ctx: Any, gradient: Tensor, *_: Any) -> Tensor:
    return gradient * ctx.saved_tensors[0].cos()


for _operator in (flash_attention, other):
    _operator.register_autograd(_attend_back, setup_context=_save)


class Attention(Block):
    def forward(self, x: Tensor) -> Tensor:
        return flash_attention(self.linear(x))[0] + x


class LastAttention(Block):
    def forward(self, x: Tensor) -> Tensor:
        return flash_attention(self.linear(x))[0]


class Other(Block):
    def forward(self, x: Tensor) -> Tensor:
        return other(self.linear(x))[0] + x


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [Attention, LastAttention])
def test_state_that_an_attention_leaves_unfilled(make: Any, mode: str) -> None:
    recomputed(build(make), mode)


def test_state_of_other_functions_is_compared() -> None:
    refused(build(Other), GIVES_OTHERS)


@pytest.mark.parametrize("mode", MODES)
def test_noise_that_is_saved_before_it_is_drawn(mode: str) -> None:
    """Nothing here reaches 1 MiB. The noise is the last tensor saved, and its kernel must run."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        warnings.filterwarnings("ignore", ".*nothing-offloaded", RuntimeWarning)
        make = build(lambda: Noisy(nn.RReLU()))
        stats = compare(make, ActivationPolicy(mode=mode), draw, 3, layers=LAYERS)
    assert stats.recomputed_bytes > 0


def lazily(make: Callable[[], Stack], mode: str) -> None:
    models = []
    for _ in range(2):  # lazy modules cannot be copied
        torch.manual_seed(0)
        models.append(make())
    plain, again = models
    losses = []
    for model in (plain, again):
        torch.manual_seed(1)
        offloaded = contextlib.nullcontext()
        if model is again:
            offloaded = ebbtide.offload(model, activations=policy(mode), layers=LAYERS)
        with offloaded as handle:
            for _ in range(3):
                model.zero_grad()
                loss = squares(model, draw())
                loss.backward()
                losses.append(loss.detach())
        if handle is not None:
            assert handle.stats.recomputed_bytes > 0
    assert losses[:3] == losses[3:]
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert all(map(torch.equal, plain.buffers(), again.buffers()))


# ---- what a second forward would not do again ----------------------------------------------------

_VALUES = {"scale": 1.0, "calls": 0}
SETTING = types.MappingProxyType(_VALUES)
"""What a second forward depends on and cannot find as it was."""


class OfGlobal(Block):
    """The loop changes what the code does not name between forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * SETTING["scale"]).sin()


class OfIterator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = Numbers()

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * next(self.numbers)).sin()


class Numbers:
    """An iterator, which nothing can set back."""

    def __init__(self) -> None:
        self._held = Calls(0)

    @property
    def number(self) -> int:
        return self._held[0]

    @number.setter
    def number(self, number: int) -> None:
        self._held[0] = number

    def __next__(self) -> int:
        self._held[0] += 1
        return self._held[0]


class Branches(Block):
    """Computes something else every second time."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = Numbers()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).sin()
        return x.cos().tanh() if next(self.numbers) % 2 else x


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.relu_()).sin()


class LargeBuffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2**14 + 1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.linear(x + self.seen[0]).sin()


class LargeQueue(Block):
    """A queue of 1 MiB that is written in place, as in contrastive learning."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(1024, WIDTH))
        self.at = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).sin()
        similar = x @ self.queue.clone().T
        self.queue[self.at : self.at + ROWS] = x.detach()
        self.at = (self.at + ROWS) % len(self.queue)
        return x + similar.mean()


class Frees(Block):
    """Memory that an operation has freed comes back at once for the result of another one."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for _ in range(4):
            (x * 2).sum()
            x = (x + 1).sin()
        return x


class OwnWeight(Block):
    """Changes its weight in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.05, 0.05).mul_(0.99)
        return self.linear(x).sin()


class OwnData(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.mul_(0.99)
        return self.linear(x).sin()


class OwnDataAfter(Block):
    """Changes its weight after it was used: backward reads the new one, as plain backward does."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).sin()
        self.linear.weight.data.mul_(0.9)
        return x


class LargeNorm(nn.Module):
    """The running statistics are larger than what is copied, and change without a version."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(2**14 + WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).repeat(1, 65))[:, :WIDTH].sin()


def global_changes(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
    _VALUES["scale"] = 1.5
    value = loss(model, inputs)
    _VALUES["scale"] = 2.5
    value.backward()
    return value


def numbers_begin(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
    """Each step begins with one number: the verification itself advances the iterator."""
    for layer in model.layers:
        layer.numbers.number = 0
    value = loss(model, inputs)
    value.backward()
    return value


class Placed(Block):
    """Adds a parameter of more than 64 KiB, which autograd does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(2 * ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x).repeat(2, 1) + self.places).sin()[:ROWS]


class Expanded(Block):
    """Adds an expanded parameter, as a class token is, to what is laid out in columns."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.token.expand(len(x), -1) + self.linear(x).t().contiguous().t()
        return x.sin()


class ExpandedConstant(Block):
    """The constant was made in inference mode: no version would tell that it was changed."""

    with torch.inference_mode():
        token = torch.arange(WIDTH) * 0.1

    def forward(self, x: Tensor) -> Tensor:
        x = self.token.expand(len(x), -1) + self.linear(x).t().contiguous().t()
        return x.sin()


class Gaps(Block):
    """Adds up a part of a parameter, whose rows are further apart in memory than they are long."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 200))

    def forward(self, x: Tensor) -> Tensor:
        part = self.table[:, :32]
        return (self.linear(x) * (part / part.norm()).sum()).sin()


class Scored(Block):
    """The kernel that multiplies a matrix and a vector adds up as their addresses are aligned."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.randn(50, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return (x * (self.scores @ x[0]).sum()).sin()


class OutOfPart(Block):
    """A part of a buffer is filled by `out=`, and the rest is read, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("padded", torch.zeros(ROWS + 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.mul(x, 2, out=self.padded[1:])
        return (self.linear(x) * self.padded[:ROWS].clone()).sin()


class OutOfInput(Block):
    """A running mean is what `out=` fills, and one of the inputs, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.lerp(self.mean, x.mean(0), 0.1, out=self.mean)
        return (self.linear(x) * self.mean.clone()).sin()


def weights_change(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
    value = loss(model, inputs)
    with torch.no_grad():
        for layer in model.layers:
            layer.places.mul_(0.5)
    value.backward()
    return value


def weights_are_replaced(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
    value = loss(model, inputs)
    for layer in model.layers:
        layer.places.data = layer.places.data * 0.5
    value.backward()
    return value


def inputs_change(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
    """Plain autograd does not need what a layer only adds to."""
    value = loss(model, inputs)
    inputs[0].mul_(0.5)
    value.backward()
    return value


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("make", "backward"),
    [
        (OfGlobal, global_changes),
        (OfIterator, numbers_begin),
        (Branches, numbers_begin),
        (LargeBuffer, None),
        (LargeQueue, None),
        (OwnWeight, None),
        (OwnData, None),
        (OwnDataAfter, None),
        (LargeNorm, None),
        (Frees, None),
        (Placed, weights_are_replaced),
        (Expanded, None),
        (ExpandedConstant, None),
        (Gaps, None),
        (OutOfPart, None),
        (OutOfInput, None),
    ],
)
def test_what_a_second_forward_would_not_do_again(make: Any, backward: Any, mode: str) -> None:
    recomputed(build(make), mode, backward=backward)


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_in_the_midst_of_other_memory(mode: str) -> None:
    """Weights begin anywhere where all of a model's are one flat tensor, or a mapped file."""

    def flatten(model: nn.Module) -> nn.Module:
        for layer in model.layers:
            flat = torch.empty(layer.scores.numel() + 1)[1:]
            layer.scores.data = flat.view_as(layer.scores).copy_(layer.scores.data)
        return model

    recomputed(build(Scored), mode, prepare=flatten)


def test_a_layer_that_changes_its_input() -> None:
    recomputed(lambda: Stack(nn.ModuleList([Dropout(), InPlace(), Dropout()])))


# ---- what kernels would not do again, or torch is not told of, is not recomputed -----------------

_count = itertools.count()


@torch.library.custom_op("ebbtide_tests::add_count", mutates_args=())
def add_count(x: Tensor) -> Tensor:
    """Like a kernel that adds in another order each time."""
    return x + 0.001 * (next(_count) % 7)


add_count.register_autograd(lambda _, gradient: gradient)


class Unsteady(Block):
    def forward(self, x: Tensor) -> Tensor:
        return add_count(self.linear(x)).sin()


class Unseen(Block):
    """Writes a result as a kernel of an extension does that torch does not dispatch."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        ctypes.memset(x.data_ptr(), 0, 64)
        return x.sin()


class Filled(Block):
    """Fills memory that torch has allocated; that is saved like a tensor from outside."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.empty(WIDTH)
        mask.numpy()[:] = np.arange(WIDTH) % 2
        return (self.linear(x) * mask).sin()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [Unsteady, Unseen])
def test_what_differs_is_not_recomputed(make: Any, mode: str) -> None:
    def counted(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
        global _count
        _count = itertools.count()
        value = loss(model, inputs)
        value.backward()
        return value

    if make is Unseen:
        refused(build(make), f"layers.1 {GIVES_OTHERS}", mode)
        return
    with warned("not-recomputed"):
        model = build(make)()
        with ebbtide.offload(model, activations=policy(mode), layers=LAYERS) as handle:
            for _ in range(3):
                counted(model, draw(), squares)
            assert handle.stats.recomputed_bytes == 0
            assert handle.stats.offloaded_bytes > 0


class UnseenLater(Block):
    """Writes nothing in the first call, as an adapter that begins with zeros adds nothing."""

    writes = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.lay_out(self.linear(x))
        if self.writes:
            ctypes.memset(x.data_ptr(), 0x3E, x.nbytes)
        return x.sin()

    def lay_out(self, x: Tensor) -> Tensor:
        return x


class UnseenLaterInColumns(UnseenLater):
    def lay_out(self, x: Tensor) -> Tensor:
        return x.t().contiguous().t()


@pytest.mark.parametrize("make", [UnseenLater, UnseenLaterInColumns])
def test_what_differs_later_is_an_error_and_no_wrong_gradient(make: Any) -> None:
    model = build(make)()
    plain = copy.deepcopy(model)
    with ebbtide.offload(model, activations=policy("recompute"), layers=LAYERS) as handle:
        step(handle, model)
        assert handle.stats.recomputed_bytes == 2 * S
        for layer in (*model.layers, *plain.layers):
            layer.writes = True
        errors = num_errors(model, plain, lambda m, i, f: f(m, i).backward(), 4)
    assert 1 <= errors <= 2


_in_columns = False


@torch.library.custom_op("ebbtide_tests::order", mutates_args=())
def order(x: Tensor) -> Tensor:
    """Lays its result out as it likes, as kernels do that are chosen by what is fastest."""
    places = x.argsort(-1)
    return places.t().contiguous().t() if _in_columns else places


class Ordered(Block):
    """Numbers have no gradient, so that no sample of them is taken."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin().gather(-1, order(x.detach()))


def test_what_is_laid_out_otherwise_later_is_an_error_and_no_wrong_gradient() -> None:
    def turned(model: nn.Module, inputs: Any, loss: Any) -> None:
        global _in_columns
        value = loss(model, inputs)
        _in_columns = True
        try:
            value.backward()
        finally:
            _in_columns = False

    model = build(Ordered)()
    plain = copy.deepcopy(model)
    with ebbtide.offload(model, activations=policy("recompute"), layers=LAYERS) as handle:
        step(handle, model)
        assert handle.stats.recomputed_bytes > 0
        errors = num_errors(model, plain, turned, 4)
    assert 1 <= errors <= 2


def test_memory_that_other_code_fills() -> None:
    recomputed(build(Filled))


def test_what_a_budget_is_told() -> None:
    """Calls count as verified if they use an operation for the first time."""
    model = Stack(nn.ModuleList([Dropout(), Unseen(), Dropout()]))
    with ebbtide.offload(model, activations=policy("recompute"), layers=LAYERS) as handle:
        engine = handle._engine
        assert engine.transfers.account.num_verifying == 0
        loss = squares(model, draw())
        assert engine.transfers.account.num_verifying == 3
        assert engine.refused_layers == {"layers.1"}
        loss.backward()
        del loss
        assert engine.transfers.account.num_verifying == 3
        with warned("not-recomputed"):
            step(handle, model)
        assert engine.transfers.account.num_verifying == 0
        recomputed = {each.layer.name for each in handle.inspect().recomputed}
        assert recomputed == {"layers.0", "layers.2"}
        model.layers[0].forward = model.layers[0].forward
        for layer in (0, 2):
            model.layers[layer].linear.register_forward_hook(lambda _m, _i, y: y.tanh())
        step(handle, model)
        assert engine.transfers.account.num_verifying == 2
        step(handle, model)
        assert engine.transfers.account.num_verifying == 0


# ---- what is changed before backward -------------------------------------------------------------


class Shifted(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + SETTING["scale"]).sin()


LATE_CHANGES = {"weight": (Placed, weights_change), "input": (Shifted, inputs_change)}


def num_errors(model: nn.Module, plain: nn.Module, backward: Any, num_steps: int) -> int:
    """Run the same step several times. Returns how many raise; the others are as plain ones."""
    errors = 0
    for _ in range(num_steps):
        model.load_state_dict(plain.state_dict())
        model.zero_grad()
        again, inputs = copy.deepcopy(plain), draw()
        try:
            backward(model, (inputs[0].clone(),), squares)
        except SavedTensorModifiedError:
            errors += 1
            continue
        backward(again, inputs, squares)
        for one, other in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
    return errors


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LATE_CHANGES)
def test_a_layer_that_could_not_run_again_is_not_recomputed_any_more(name: str, mode: str) -> None:
    """Autograd does not save what the program changes, so torch trains: a step a layer raises."""
    make, backward = LATE_CHANGES[name]
    model = build(make)()
    plain = copy.deepcopy(model)
    with ebbtide.offload(model, activations=policy(mode), layers=LAYERS) as handle:
        for _ in range(2):
            step(handle, model)
        assert handle.stats.recomputed_bytes > 0
        with warned("not-recomputed"):
            errors = num_errors(model, plain, backward, 4)
        assert 1 <= errors <= 2


class ChangesInside(Block):
    """torch refuses this: the sine's argument is changed after it was saved."""

    refuses = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        y = x.sin()
        if self.refuses:
            x.mul_(2)
        return (y + x).cos()


def test_an_activation_changed_in_place_is_refused_as_torch_does() -> None:
    model = build(ChangesInside)()
    with pytest.raises(RuntimeError):
        squares(model, draw()).backward()
    with (
        ebbtide.offload(model, activations=policy("recompute"), layers=LAYERS) as handle,
        pytest.raises(SavedTensorModifiedError),
    ):
        step(handle, model)
    model = build(ChangesInside)()
    for layer in model.layers:
        layer.refuses = False
    with ebbtide.offload(model, activations=policy("recompute"), layers=LAYERS) as handle:
        for _ in range(2):
            step(handle, model)
        for layer in model.layers:
            layer.refuses = True
        with pytest.raises(SavedTensorModifiedError):
            step(handle, model)


def test_a_weight_at_rest_that_is_written_before_backward() -> None:
    """Plain training refuses to read such a weight, too; it does not read the bias."""
    for which in ("weight", "bias"):
        model = stack(2)
        with ebbtide.offload(
            model, activations=policy("recompute"), weights=WeightPolicy(), layers=LAYERS
        ) as handle:
            for _ in range(2):
                step(handle, model)
            assert handle.stats.recomputed_bytes == 2 * S
            loss = squares(model, draw())
            with torch.no_grad():
                getattr(model.layers[1].linear, which).mul_(2)
            if which == "bias":
                loss.backward()
            else:
                with pytest.raises(SavedTensorModifiedError):
                    loss.backward()


# ---- graphs and threads --------------------------------------------------------------------------


def test_dropped_graphs_leave_nothing() -> None:
    """Graphs that are dropped hold no memory."""
    import gc
    import weakref

    model = build(Dropout)()
    with ebbtide.offload(model, activations=policy("recompute"), layers=LAYERS) as handle:
        alive = []
        for _ in range(3):
            x = torch.randn(ROWS, WIDTH)
            alive.append(weakref.ref(x))
            gc.disable()
            try:
                model(x)
                del x
                assert alive[-1]() is None, "at once, without the garbage collector"
            finally:
                gc.enable()
        # Copies may outlive the step.
        wait_until(lambda: handle.inspect().in_flight.is_idle, "a step leaves something in flight")
        assert handle._engine.refused_layers == frozenset()


def test_a_layer_that_remembers_its_output_holds_one_graph() -> None:
    class Remembers(Block):
        last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x).sin()
            if self.last is not None:
                y = y + self.last.detach()
            self.last = y
            return y

    model = build(Remembers)()
    with ebbtide.offload(model, activations=policy("recompute"), layers=LAYERS) as handle:
        step(handle, model)
        step(handle, model)
        held = []
        for _ in range(4):
            model(torch.randn(ROWS, WIDTH))
            now = handle.inspect().in_flight
            held.append(now.kept_bytes + now.stored_bytes)
        assert held[1] == held[-1], "that of the last call, and none that this one has remembered"
    recomputed(build(Remembers))


def test_a_graph_whose_backward_two_threads_share() -> None:
    def backward(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
        value = loss(model, inputs)
        weights = list(model.parameters())
        results: list[Any] = []

        def run() -> None:
            results.append(torch.autograd.grad(value, weights, retain_graph=True))

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(map(torch.equal, *results))
        for weight, slope in zip(weights, results[0], strict=True):
            weight.grad = slope
        return value

    recomputed(build(Dropout), backward=backward)


class _Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        _ = self.linear(x) * self.linear.bias  # saves what no operation has made, then what one has
        raise ValueError("a forward that goes wrong")


def test_a_forward_that_raises_leaves_nothing() -> None:
    model = nn.Sequential(_Raises())
    policy = ActivationPolicy(min_bytes=1, mode="recompute")
    with ebbtide.offload(model, activations=policy, layers=list(model)) as handle:
        for _ in range(2):
            with pytest.raises(ValueError, match="goes wrong"):
                model(torch.randn(4, 8))
        gc.collect()  # graphs that hold themselves are not found
        assert handle.inspect().in_flight.saved_tensors == 0
