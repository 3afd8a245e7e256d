"""Recomputed layers with arguments, state and side effects of all kinds: bits as in plain training.

Each test trains a model twice, plainly and with recomputed layers, and compares losses, gradients,
weights, buffers and the random numbers' state.
"""

from __future__ import annotations

import copy
import random
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

import ebbtide
from ebbtide import ActivationPolicy, PolicyError, SavedTensorModifiedError
from recompute_bench import (
    MODES,
    ROWS,
    WIDTH,
    Block,
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

each_mode = pytest.mark.parametrize("mode", MODES)


class Pair(NamedTuple):
    one: Tensor
    other: Tensor


# Arguments and outputs


class Keyword(Block):
    def forward(
        self, x: Tensor, *, scale: float, bias: Tensor | None = None, masks: dict[str, Any]
    ) -> Tensor:
        x = self.linear(x) * scale * masks["inner"][0]
        return (x if bias is None else x + bias).sin()


class Many(Block):
    """Takes a tuple, a dict and None; returns a tuple with a dict, None and a number in it."""

    def forward(self, pair: Pair, more: dict[str, Any], nothing: None) -> Any:
        assert nothing is None
        assert type(pair) is Pair
        x = self.linear(pair.one).sin()
        return x, {"other": (pair.other * x).tanh(), "list": [more["number"] * x.cos()]}, None, 3


class Attention(nn.Module):
    """torch's attention asks whether query, key and value are the same object."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.2, batch_first=True)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert query is key is value
        return query + self.attention(query, key, value, need_weights=False)[0]


def run_keyword(layer: nn.Module, x: Tensor) -> Tensor:
    mask = torch.rand_like(x) > 0.5
    return layer(x=x, scale=1.5, bias=x[:1], masks={"inner": [mask, "text"]})


def run_many(layer: nn.Module, x: Tensor) -> Tensor:
    x, others, nothing, number = layer(Pair(x, x * 2), {"number": 2}, None)
    assert (nothing, number) == (None, 3)
    return x + others["other"] + others["list"][0]


def run_same(layer: nn.Module, x: Tensor) -> Tensor:
    x = x[None]
    return layer(x, x, x)[0]


@each_mode
@pytest.mark.parametrize(
    ("layer", "run"),
    [
        (Keyword, run_keyword),
        (Many, run_many),
        (Attention, run_same),
    ],
    ids=["keyword", "many", "same object"],
)
def test_arguments_and_outputs(layer: type[nn.Module], run: Any, mode: str) -> None:
    def build() -> nn.Module:
        return Stack(nn.ModuleList(layer() for _ in range(3)), run)

    stats = compare(build, policy(mode), draw)
    assert stats.recomputed_bytes > 0


@each_mode
def test_a_list_that_the_layer_appends_to_is_appended_to_once(mode: str) -> None:
    class Appends(Block):
        def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
            x = self.linear(x + len(seen))
            seen.append(x.detach().mean())
            return x.sin()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Appends() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            seen: list[Tensor] = []
            for layer in self.layers:
                x = layer(x, seen)
            assert len(seen) == 3
            return x + torch.stack(seen).sum()

    compare(Model, policy(mode), draw)


@each_mode
def test_an_object_that_the_layer_is_given_changes_once(mode: str) -> None:
    class Counting(Block):
        def forward(self, x: Tensor, seen: types.SimpleNamespace) -> Tensor:
            seen.calls += 1
            return (self.linear(x) / seen.calls).sin()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Counting() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = types.SimpleNamespace(calls=0)
            for layer in self.layers:
                x = layer(x, self.seen)
            return x

    def backward(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
        value: Tensor = loss(model, inputs)
        value.backward()
        assert model.seen.calls == 3
        return value

    stats = compare(Model, policy(mode), draw, backward=backward)
    assert stats.recomputed_bytes > 0


def test_a_buffer_in_memory_that_nobody_can_write(tmp_path: Path) -> None:
    np.ones(WIDTH, np.float32).tofile(tmp_path / "mask")
    mapped = np.memmap(tmp_path / "mask", np.float32, "r")
    model = stack(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it cannot be written
        model.layers[1].register_buffer("mask", torch.from_numpy(mapped))
    with ebbtide.offload(model, activations=policy("recompute"), layers=["layers.?"]) as handle:
        for _ in range(2):
            stats = step(handle, model)
    assert stats.recomputed_bytes == 2 * S


def test_tensors_in_containers_leave_the_device() -> None:
    """The layer saves no sine of them; only its three inputs are held, whatever they are in."""
    model = Stack(nn.ModuleList([Many()]), run_many)
    with ebbtide.offload(
        model, activations=policy("recompute+offload", num_layers=1), layers=["layers.0"]
    ) as handle:
        step(handle, model)  # verifies
        model(torch.randn(ROWS, WIDTH)).sum()
        model(torch.randn(ROWS, WIDTH)).sum().backward()
        inputs = [each for each in handle.inspect().storages if each.layer == 0]
        assert [each.decision for each in inputs] == ["offload"] * 2


class Sparse(Block):
    """Computes with the values of a sparse matrix, which are a view of it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        diagonal = torch.arange(ROWS).expand(2, ROWS)
        matrix = torch.sparse_coo_tensor(diagonal, x[:, 0], check_invariants=True).coalesce()
        return (x * matrix.values()[:, None]).sin()


@each_mode
def test_values_of_a_sparse_matrix(mode: str) -> None:
    make = lambda: Stack(nn.ModuleList(Sparse() for _ in range(2)))  # noqa: E731
    assert compare(make, policy(mode), draw).recomputed_bytes > 0


# Random numbers, autocast, modes


@each_mode
def test_the_same_random_numbers_are_drawn_again(mode: str) -> None:
    compare(lambda: Stack(nn.ModuleList(Dropout() for _ in range(3))), policy(mode), draw)


class Poisson(Block):
    """Draws from a generator of its own, to which the schema of `poisson` gives no keyword."""

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        x = self.linear(x)
        scale = torch.poisson(x.detach().exp(), generator=generator)
        return (x * scale * torch.rand(WIDTH, generator=generator)).sin()


@each_mode
def test_the_same_numbers_of_an_own_generator_are_drawn_again(mode: str) -> None:
    make = lambda: Stack(nn.ModuleList(Poisson() for _ in range(3)))  # noqa: E731
    assert compare(make, policy(mode), draw).recomputed_bytes > 0


class Chance(Block):
    """Draws numbers of Python and NumPy, counts its forwards, and remembers what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.num_forwards = 0
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        self.drawn.append(random.random() * np.random.rand())
        self.last = self.drawn[-1]
        return (self.linear(x) * self.last).sin()


@pytest.fixture(params=["MT19937", "PCG64"])
def numpy_generator(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Has NumPy draw its global numbers from a generator anew: its own, or another one."""
    yield lambda: np.random.set_bit_generator(getattr(np.random, request.param)(1))
    np.random.set_bit_generator(np.random.MT19937(1))


@each_mode
def test_python_and_numpy_draw_the_same_numbers_again_and_nothing_counts_twice(
    mode: str, numpy_generator: Callable[[], None]
) -> None:
    def backward(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
        random.seed(1)
        numpy_generator()
        value = loss(model, inputs)
        then = random.getstate(), str(np.random.get_state(legacy=False))
        value.backward()
        assert (random.getstate(), str(np.random.get_state(legacy=False))) == then
        for layer in model.layers:
            assert (layer.num_forwards, layer.last) == (len(layer.drawn), layer.drawn[-1])
            assert len(layer.drawn) == layer.num_forwards <= 3
        return value

    compare(
        lambda: Stack(nn.ModuleList(Chance() for _ in range(3))),
        policy(mode),
        draw,
        backward=backward,
    )


@each_mode
def test_autocast(mode: str) -> None:
    def backward(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model, inputs)
        value.backward()  # the recomputation runs outside of the region
        return value

    compare(lambda: stack(3), policy(mode), draw, backward=backward)


@each_mode
def test_the_mode_of_the_forward_counts(mode: str) -> None:
    """The model is put into evaluation mode between forward and backward."""

    def backward(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
        value = loss(model.train(), inputs)
        model.eval()
        value.backward()
        assert not any(module.training for module in model.modules())
        return value

    compare(
        lambda: Stack(nn.ModuleList(Dropout() for _ in range(3))),
        policy(mode),
        draw,
        backward=backward,
    )


# Buffers


class Normed(Block):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).sin()


NORMS = {
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "cumulative": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "without statistics": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "evaluating": lambda: nn.BatchNorm1d(WIDTH).eval(),
    "spectral": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
}


@each_mode
@pytest.mark.parametrize("norm", NORMS)
def test_buffers_change_once(norm: str, mode: str) -> None:
    """Running statistics, and the vectors of spectral norm, from which the weight is computed."""
    compare(
        lambda: Stack(nn.ModuleList(Normed(NORMS[norm]()) for _ in range(3))), policy(mode), draw
    )


class Listed(Block):
    """Statistics that are no buffers, in lists, dicts and tuples."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = copy.deepcopy(kept)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for each in tree_leaves(self.kept):
            with torch.no_grad():
                each.lerp_(x.detach().mean(), 0.5)
        return (x + tree_leaves(self.kept)[0].sum()).sin()


@each_mode
@pytest.mark.parametrize(
    "kept",
    [
        [torch.zeros(3)],
        {"a": torch.zeros(1), "b": [torch.zeros(2)]},
        (torch.zeros(3),),
        [{"a": (torch.zeros(3),)}],
    ],
)
def test_tensors_in_lists_dicts_and_tuples_change_once(kept: Any, mode: str) -> None:
    def backward(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
        value = loss(model, inputs)
        then = [each.clone() for each in tree_leaves([each.kept for each in model.layers])]
        value.backward()
        assert all(map(torch.equal, tree_leaves([each.kept for each in model.layers]), then))
        return value

    def build() -> nn.Module:
        return Stack(nn.ModuleList(Listed(kept) for _ in range(3)))

    stats = compare(build, policy(mode), draw, backward=backward)
    assert stats.recomputed_bytes > 0


@each_mode
@pytest.mark.parametrize("norm", ["batch norm", "spectral"])
def test_buffers_with_two_forwards_before_the_backwards(norm: str, mode: str) -> None:
    def backward(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
        first, second = loss(model, inputs), loss(model, [2 * inputs[0]])
        first.backward(retain_graph=True)
        first.backward()
        second.backward()
        return first + second

    compare(
        lambda: Stack(nn.ModuleList(Normed(NORMS[norm]()) for _ in range(2))),
        policy(mode),
        draw,
        backward=backward,
    )


class Counts(Block):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(size))
        self.counts = True

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.seen += 1
        return self.linear(x + self.seen[0]).sin()


def as_plainly(model: Stack, change: Callable[[Stack, Tensor], Tensor]) -> None:
    """A step that a program changes, after others that it does not, gives the plain bits."""
    plain = copy.deepcopy(model)
    with ebbtide.offload(model, activations=policy("recompute"), layers=["layers.?"]) as handle:
        for _ in range(2):
            step(handle, model)
        plain.load_state_dict(model.state_dict())
        model.zero_grad()
        x = torch.randn(ROWS, WIDTH)
        for each in (model, plain):
            change(each, x.clone()).backward()
        assert handle.stats.recomputed_bytes > 0
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert all(map(torch.equal, model.buffers(), plain.buffers()))


@pytest.mark.parametrize("size", [2**10, 2**16])
def test_a_buffer_that_the_forward_changes_later(size: int) -> None:
    compare(
        lambda: Stack(nn.ModuleList([Counts(size)])),
        policy("recompute"),
        draw,
        layers=["layers.0"],
    )
    model = Stack(nn.ModuleList([Counts(size)]))
    model.layers[0].counts = False

    def change(each: Stack, x: Tensor) -> Tensor:
        each.layers[0].counts = True
        return squares(each, (x,))

    as_plainly(model, change)


# Changes in place


class InPlace(Block):
    def __init__(self) -> None:
        super().__init__()
        self.in_place = False

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.relu_() if self.in_place else x.relu()).sin()


def test_a_layer_that_changes_its_input_later() -> None:
    def change(each: Stack, x: Tensor) -> Tensor:
        each.layers[1].in_place = True
        torch.manual_seed(2)
        return squares(each, (x,))

    as_plainly(Stack(nn.ModuleList([Dropout(), InPlace()])), change)


def test_a_weight_modified_before_backward_is_noticed() -> None:
    model = stack(2)
    with ebbtide.offload(model, activations=policy("recompute"), layers=["layers.?"]) as handle:
        step(handle, model)  # verifies
        loss = squares(model, draw())
        with torch.no_grad():
            model.layers[1].linear.weight.mul_(2)
        with pytest.raises(SavedTensorModifiedError):
            loss.backward()


class Masked(Block):
    """Has a buffer of more than 64 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.rand(2 * ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.mask[:ROWS]).sin()


def _tensor_of(model: Stack, which: str) -> Tensor:
    layer = model.layers[1]
    return layer.mask if which == "mask" else getattr(layer.linear, which)


def _replaced(tensor: Tensor) -> None:
    tensor.data = tensor.data * 1.001


def _replaced_by_equal_values(tensor: Tensor) -> None:
    tensor.data = tensor.data.clone()


def _replaced_twice(tensor: Tensor) -> None:
    """The allocator may give the second one the address of the first memory."""
    tensor.data = tensor.data * 1.001
    tensor.data = tensor.data * 1.001


def _replaced_by_a_part(tensor: Tensor) -> None:
    tensor.data = torch.cat([tensor.data, tensor.data])[len(tensor) :]


REPLACE = [_replaced, _replaced_by_equal_values, _replaced_twice, _replaced_by_a_part]


@pytest.mark.parametrize("which", ["weight", "mask"])
@pytest.mark.parametrize("replace", REPLACE)
def test_memory_that_is_replaced_before_backward(
    replace: Callable[[Tensor], None], which: str
) -> None:
    """Autograd sees what a leaf that it has saved is given; what was computed stays as it was."""

    def change(each: Stack, x: Tensor) -> Tensor:
        loss = squares(each, (x,))
        replace(_tensor_of(each, which))
        return loss

    as_plainly(Stack(nn.ModuleList([Masked(), Masked()])), change)


def _doubled(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(2)


class Shared(Block):
    """Holds its bias twice, once in another module."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.bias = self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.linear(x).sin()).cos()


@each_mode
@pytest.mark.parametrize("layer", [Masked, Shared])
@pytest.mark.parametrize("change", [*REPLACE, _doubled])
def test_a_bias_may_change_before_backward(
    change: Callable[[Tensor], None], layer: type[Block], mode: str
) -> None:
    """Autograd does not save it, so plain training may."""

    def backward(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
        value: Tensor = loss(model, inputs)
        for each in model.layers:
            change(each.linear.bias)
        value.backward()
        return value

    def build() -> Stack:
        torch.manual_seed(0)
        return Stack(nn.ModuleList([layer(), layer()]))

    stats = compare(build, policy(mode), draw, backward=backward, layers=["layers.?"])
    assert stats.recomputed_bytes > 0


class OwnBias(Block):
    """Changes its bias in its forward; nothing that it saves depends on the bias."""

    def __init__(self, change: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.linear.bias)
        return self.linear(x)


def _halved_through_data(tensor: Tensor) -> None:
    tensor.data.mul_(0.5)


@each_mode
@pytest.mark.parametrize("change", [_doubled, _replaced, _halved_through_data])
def test_a_bias_that_the_forward_itself_changes_changes_once(
    change: Callable[[Tensor], None], mode: str
) -> None:
    def build() -> Stack:
        torch.manual_seed(0)
        return Stack(nn.ModuleList([OwnBias(change), OwnBias(change)]))

    compare(build, policy(mode), draw, layers=["layers.?"])


def test_a_bias_that_changes_between_two_backwards() -> None:
    def change(each: Stack, x: Tensor) -> Tensor:
        loss = squares(each, (x,))
        loss.backward(retain_graph=True)
        _doubled(each.layers[1].linear.bias)
        return loss

    as_plainly(stack(2), change)


@each_mode
def test_memory_that_is_swapped_and_swapped_back_before_backward(mode: str) -> None:
    """As for an evaluation with averaged weights between forward and backward."""

    def backward(model: nn.Module, inputs: Any, loss: Any) -> Tensor:
        value: Tensor = loss(model, inputs)
        own = [parameter.data for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5
        with torch.no_grad():
            model(*inputs)
        for parameter, memory in zip(model.parameters(), own, strict=True):
            parameter.data = memory
        value.backward()
        return value

    stats = compare(lambda: stack(2), policy(mode), draw, backward=backward, layers=["layers.?"])
    assert stats.recomputed_bytes == 2 * S


def test_an_input_modified_before_backward_is_noticed() -> None:
    model = stack(1)
    with ebbtide.offload(model, activations=policy("recompute"), layers=["layers.0"]) as handle:
        step(handle, model)  # verifies
        x = torch.randn(ROWS, WIDTH)
        loss = model(x).sum()
        x.mul_(2)
        with pytest.raises(SavedTensorModifiedError):
            loss.backward()


def test_a_forward_that_finds_a_shape_by_fake_tensors() -> None:
    """As a DTensor does, once for each operation."""

    class Shaped(Block):
        def forward(self, x: Tensor) -> Tensor:
            with FakeTensorMode():
                shape = torch.empty(x.shape).sin().shape
            return self.linear(x).sin().view(shape)

    def build() -> Stack:
        return Stack(nn.ModuleList(Shaped() for _ in range(2)))

    assert compare(build, policy("recompute"), draw, layers=["layers.?"]).recomputed_bytes == 2 * S


# Refused


def test_where_layers_cannot_be_recomputed() -> None:
    recompute = ActivationPolicy(mode="recompute")
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(PolicyError):
        ebbtide.offload(nn.Linear(4, 4), activations=recompute)
    with pytest.raises(PolicyError):
        ebbtide.wrap_forward_with_offload(model.forward, activations=recompute)
    with pytest.raises(PolicyError):
        ebbtide.OffloadSession(2, 4, activations=recompute)
    schedule = ebbtide.schedule.default(1, 3)
    with pytest.raises(PolicyError):
        ebbtide.offload(stack(3), activations=recompute, schedule=schedule)
    with pytest.raises(PolicyError):
        ActivationPolicy(mode="checkpoint")


def test_a_forward_that_was_replaced_after_offload_is_recomputed() -> None:
    model = stack(3)
    with ebbtide.offload(model, activations=policy("recompute")) as handle:
        layer = model.layers[1]
        layer.forward = lambda x: layer.linear(x).sin()
        step(handle, model)  # verifies
        assert step(handle, model).recomputed_bytes == 3 * ROWS * WIDTH * 4
        del layer.forward


def test_a_layer_called_where_an_error_is_handled() -> None:
    """Its forward raises none of its own, so it is recomputed."""
    model = stack(2)
    with ebbtide.offload(model, activations=policy("recompute"), layers=["layers.?"]) as handle:
        step(handle, model)  # verifies
        try:
            raise MemoryError
        except MemoryError:
            assert step(handle, model).recomputed_bytes == 2 * S


class FeatureError(Exception):
    """Ends a forward where the program has what it wants."""


class Features(Dropout):
    def forward(self, x: Tensor) -> Tensor:
        raise FeatureError(super().forward(x).tanh())


@each_mode
@pytest.mark.parametrize("caught", ["in the model", "in the loop"])
def test_backward_from_where_an_error_has_left_a_layer(mode: str, caught: str) -> None:
    """Programs leave a forward so that they need no further than to some features."""

    def run_layer(layer: nn.Module, x: Tensor) -> Tensor:
        try:
            return layer(x)
        except FeatureError as error:
            if caught == "in the loop":
                raise
            return error.args[0].cos()

    def backward(model: nn.Module, inputs: Any, _: Any) -> Tensor:
        try:
            features = model(*inputs)
        except FeatureError as error:
            features = error.args[0]
        loss = features.square().mean()
        loss.backward()
        return loss

    build = lambda: Stack(nn.ModuleList([Dropout(), Features(), Dropout()]), run_layer)  # noqa: E731
    compare(build, policy(mode), draw, backward=backward, layers=["layers.?"])


@each_mode
def test_backward_from_where_an_interrupt_has_left_a_layer_is_refused(mode: str) -> None:
    """What the recorder of the layer had noted by then may lack an operation."""
    found: list[Tensor] = []

    class Interrupted(Dropout):
        def forward(self, x: Tensor) -> Tensor:
            found.append(super().forward(x).tanh())
            if len(found) == 1:
                raise KeyboardInterrupt
            return found[-1]

    model = Stack(nn.ModuleList([Dropout(), Interrupted(), Dropout()]), lambda layer, x: layer(x))
    with ebbtide.offload(model, activations=policy(mode), layers=["layers.?"]) as handle:
        with pytest.raises(KeyboardInterrupt):
            step(handle, model)
        with pytest.raises(RuntimeError):
            found[0].sum().backward()
        step(handle, model)
        assert step(handle, model).recomputed_bytes


def test_the_hooks_of_other_code_are_not_recorded() -> None:
    """What hooks do around the forward does not belong to it."""
    model = stack(2)
    seen: list[int] = []
    with ebbtide.offload(model, activations=policy("recompute"), layers=["layers.?"]) as handle:
        count = lambda *_: seen.append(len(_get_current_dispatch_mode_stack()))  # noqa: E731
        model.layers[0].register_forward_pre_hook(count, prepend=True)
        model.layers[0].register_forward_hook(count)
        step(handle, model)
    assert seen == [0, 0]


def cached_model(name: str) -> nn.Module:
    """A model of Transformers that fills a cache in training, as they do by default."""
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 64, "use_cache": True}
    if name == "llama":
        config = transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            **small,
        )
        return transformers.LlamaForCausalLM(config)
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, **small)
        return transformers.GPT2LMHeadModel(config)
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(decoder_start_token_id=0, **sizes, **small)
    return transformers.T5ForConditionalGeneration(config)


@each_mode
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_a_cache_that_each_layer_fills(name: str, mode: str) -> None:
    """Each layer adds its keys and values once, and what the model returns is the whole cache."""

    def backward(model: nn.Module, inputs: Any, _: Any) -> Tensor:
        result = model(input_ids=inputs[0], labels=inputs[0])
        cache = result.past_key_values
        assert cache.get_seq_length() == 8
        result.loss.backward()
        assert cache.get_seq_length() == 8
        return result.loss

    stats = compare(
        lambda: cached_model(name).train(),
        policy(mode),
        lambda: (torch.randint(0, 64, (2, 8)),),
        backward=backward,
    )
    assert stats.recomputed_bytes > 0


def test_layers_that_extend_a_filled_cache() -> None:
    model = cached_model("llama")
    tokens = torch.randint(0, 64, (2, 8))

    def run() -> Tensor:
        with torch.no_grad():
            filled = model(input_ids=tokens).past_key_values
        model.zero_grad()
        model(input_ids=tokens, past_key_values=filled).logits.square().mean().backward()
        return model.model.embed_tokens.weight.grad.clone()

    expected = run()
    with ebbtide.offload(model, activations=policy("recompute")) as handle:
        assert torch.equal(run(), expected)
        assert torch.equal(run(), expected)
        assert handle.stats.recomputed_bytes > 0
