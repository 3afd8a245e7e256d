"""Layers: which modules they are, which call is which, and that only the right ones leave."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide import ActivationPolicy, PolicyError, StepStats
from ebbtide.runtime.layers import find_layers, match_layers
from zoo import ENTRIES

BY_NAME = {entry.name: entry for entry in ENTRIES}
ROWS, WIDTH = 64, 256
S = ROWS * WIDTH * 4  # bytes of one activation: 64 KiB


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The kernels here are small: beside other tests, threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Layer(nn.Module):
    """Saves two activations: its input, for the weight's gradient, and the sine's argument."""

    def __init__(self, in_width: int = WIDTH, out_width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(in_width, out_width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()


class Stack(nn.Module):
    """Layers, and outside of them one more saved activation: the last sine's argument."""

    def __init__(self, layers: nn.ModuleList, run_layer: Callable[..., Tensor] | None = None):
        super().__init__()
        self.layers = layers
        self.run_layer = run_layer or (lambda layer, x: layer(x))
        self.skipped: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number not in self.skipped:
                x = self.run_layer(layer, x)
        return x.sin()


def stack(num_layers: int = 4, run_layer: Callable[..., Tensor] | None = None) -> Stack:
    return Stack(nn.ModuleList(Layer() for _ in range(num_layers)), run_layer)


def policy(num_layers: int | None = None, keep_last: int = 0) -> ActivationPolicy:
    return ActivationPolicy(num_layers=num_layers, keep_last=keep_last, min_bytes=1, rebuild=False)


def step(handle: ebbtide.OffloadHandle, model: nn.Module, width: int = WIDTH) -> StepStats:
    model(torch.randn(ROWS, width)).sum().backward()
    return handle.stats


# Which modules are layers


@pytest.mark.parametrize(
    ("name", "layers", "num_calls"),
    [
        ("fno_1d", ["fno_blocks"], 4),
        ("uno", [f"fno_blocks.{number}" for number in range(5)], 5),
        ("llama", [f"model.layers.{number}" for number in range(3)], 3),
        ("gpt2", ["transformer.h.0", "transformer.h.1"], 2),
        ("vit", ["vit.layers.0", "vit.layers.1"], 2),
        ("convnet", ["blocks.0", "blocks.1", "blocks.2"], 3),
        ("mixture_of_experts", ["mixtures.0", "mixtures.1"], 2),
    ],
)
def test_the_repeated_blocks_of_a_model_are_its_layers(
    name: str, layers: list[str], num_calls: int
) -> None:
    """And the number of their calls is the number that a forward then makes."""
    entry = BY_NAME[name]
    model, inputs = entry.build()
    found = find_layers(model)
    assert found.names == layers
    assert found.num_calls == num_calls
    calls: list[nn.Module] = []
    for module in found.modules:
        module.register_forward_hook(lambda module, *_: calls.append(module))
    with torch.no_grad():
        entry.loss(model, inputs)
    assert len(calls) == num_calls


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(4, 4),
        nn.Sequential(nn.Linear(4, 4), nn.GELU()),
        nn.ModuleDict({"one": nn.Linear(4, 4), "other": nn.Linear(4, 4)}),
        nn.Sequential(nn.ReLU(), nn.ReLU()),  # repeated, but there is nothing in them
    ],
    ids=["linear", "two classes", "no list", "no parameters"],
)
def test_a_model_that_repeats_nothing_has_no_layers(model: nn.Module) -> None:
    found = find_layers(model)
    assert (found.names, found.modules, found.num_calls) == ([], [], 0)


class DownAndUp(nn.Module):
    """Two lists of one length in one module, as in FNOBlocks, but it is called only once."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(4, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for down in self.down:
            x = down(x)
        for up in self.up:
            x = up(x)[..., :4]
        return x


def test_a_model_has_the_same_layers_inside_a_wrapper() -> None:
    """DistributedDataParallel, LightningModule and their like hold the model as a child."""
    bare = find_layers(DownAndUp())
    assert bare.names == ["down.0", "down.1", "down.2", "up.0", "up.1", "up.2"]
    wrapped = find_layers(nn.ModuleDict({"module": DownAndUp()}))
    assert wrapped.names == [f"module.{name}" for name in bare.names]
    assert wrapped.num_calls == bare.num_calls == 6


# Naming layers


def test_patterns_and_modules_are_resolved_in_model_order() -> None:
    model = stack(3)
    found = match_layers(model, [model.layers[2], "layers.[01]", "layers.0"])
    assert found.names == ["layers.0", "layers.1", "layers.2"]
    assert found.modules == list(model.layers)
    assert found.num_calls is None, "only a run tells how often they are called"


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("layers.*.linear", ["layers.0.linear", "layers.1.linear"]),
        ("layers.*", ["layers.0", "layers.1"]),  # not what is inside of them as well
        ("*.1", ["layers.1"]),
    ],
)
def test_a_star_stands_for_one_part_of_a_name(pattern: str, names: list[str]) -> None:
    assert match_layers(stack(2), [pattern]).names == names


def test_a_pattern_that_matches_nothing_names_what_is_close() -> None:
    with pytest.raises(PolicyError) as raised:
        match_layers(stack(2), ["layers.0", "layer.*.linaer"])
    assert "layers.0.linear" in str(raised.value)


def test_a_module_of_another_model_is_refused() -> None:
    with pytest.raises(PolicyError):
        match_layers(stack(2), [Layer()])


def test_a_pattern_without_its_list_is_refused_as_such() -> None:
    """A str is a sequence of str: its letters must not be taken for patterns."""
    for pattern in ("layers.*", "*"):
        with pytest.raises(PolicyError):
            ebbtide.offload(stack(2), layers=pattern)


# Only the right ones leave


@pytest.mark.parametrize("num_layers", [0, 1, 2, 3, 4])
def test_the_first_layers_leave_and_nothing_else(num_layers: int) -> None:
    model = stack(4)
    with ebbtide.offload(model, activations=policy(num_layers)) as handle:
        for _ in range(2):
            stats = step(handle, model)
            assert stats.offloaded_bytes == num_layers * 2 * S
            assert stats.num_offloaded == num_layers * 2
            # The other layers' two each, and the one saved outside of layers.
            assert stats.kept_bytes == (4 - num_layers) * 2 * S + S


@pytest.mark.parametrize(
    ("num_layers", "keep_last", "leaving"),
    [(None, 1, {0, 1, 2}), (None, 4, set()), (3, 2, {0, 1}), (2, 1, {0, 1}), (1, 0, {0})],
)
def test_each_layer_is_told_by_its_size(
    num_layers: int | None, keep_last: int, leaving: set[int]
) -> None:
    """Layer i goes from width 8 x 2^i to twice that, so it saves 3 x 2^i units.

    Every set of layers has a sum of its own. Outside of layers 2^4 units are saved.
    """
    widths = [8 * 2**number for number in range(5)]
    model = Stack(nn.ModuleList(Layer(widths[i], widths[i + 1]) for i in range(4)))
    unit_bytes = ROWS * 8 * 4
    with ebbtide.offload(model, activations=policy(num_layers, keep_last)) as handle:
        stats = step(handle, model, width=8)
    units = sum(3 * 2**number for number in leaving)
    if num_layers is None:
        units += 2**4
    assert stats.offloaded_bytes == units * unit_bytes


def test_keep_last_of_named_layers_begins_once_their_number_is_known() -> None:
    model = stack(4)
    with ebbtide.offload(model, activations=policy(None, 3), layers=["layers.?"]) as handle:
        assert step(handle, model).offloaded_bytes == 4 * 2 * S + S
        assert step(handle, model).offloaded_bytes == 1 * 2 * S + S


def test_keep_last_follows_a_model_that_changes_its_depth() -> None:
    """Layer drop: 4 layers, then 3, then 3. What is last is known from the forward before."""
    model = stack(4)
    with ebbtide.offload(model, activations=policy(None, 1)) as handle:
        assert step(handle, model).offloaded_bytes == 3 * 2 * S + S
        model.skipped = {1}
        assert step(handle, model).offloaded_bytes == 3 * 2 * S + S
        assert step(handle, model).offloaded_bytes == 2 * 2 * S + S


def test_the_innermost_layer_decides() -> None:
    """Numbered as they begin: block 0 and its linear map are 0 and 1, block 1 is 2, its map 3.

    The map saves its input, the block around it the sine's argument.
    """
    for num_layers in range(5):
        model = stack(2)
        layers = ["layers.?", "layers.*.linear"]
        with ebbtide.offload(model, activations=policy(num_layers), layers=layers) as handle:
            assert step(handle, model).offloaded_bytes == num_layers * S


@pytest.mark.parametrize("num_layers", [0, 1, 3, 4])
def test_one_module_in_a_list_four_times_is_four_layers(num_layers: int) -> None:
    model = Stack(nn.ModuleList([Layer()] * 4))
    with ebbtide.offload(model, activations=policy(num_layers)) as handle:
        assert handle.layers == ("layers.0",)
        assert step(handle, model).offloaded_bytes == num_layers * 2 * S


@pytest.mark.parametrize("num_layers", [0, 1, 4, 6])
def test_two_modules_called_three_times_each_are_six_layers(num_layers: int) -> None:
    def three_times(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(layer(layer(x)))

    model = stack(2, three_times)
    with ebbtide.offload(model, activations=policy(num_layers), layers=["layers.?"]) as handle:
        for _ in range(2):
            assert step(handle, model).offloaded_bytes == num_layers * 2 * S


def test_a_refused_count_says_what_to_do_about_modules_called_more_than_once() -> None:
    """The structure shows the two cells of a recurrent operator, not that they run three times."""
    model, _ = BY_NAME["rno"].build()
    with pytest.raises(PolicyError, match="num_layers=4"):
        ebbtide.offload(model, activations=policy(4))
    ebbtide.offload(model, activations=policy(4), layers=["cells.*"]).detach()


def test_an_fno_has_one_layer_for_each_call_of_its_blocks() -> None:
    """Layers 1 and 2 of the four are alike in all that they save; 0 and 3 are not."""
    entry = BY_NAME["fno_1d"]
    offloaded_bytes = []
    for num_layers in range(5):
        model, inputs = entry.build()
        with ebbtide.offload(model, activations=policy(num_layers)) as handle:
            entry.loss(model, inputs).backward()
            offloaded_bytes.append(handle.stats.offloaded_bytes)
    assert offloaded_bytes[0] == 0
    by_layer = [more - less for less, more in itertools.pairwise(offloaded_bytes)]
    assert all(size_bytes > 0 for size_bytes in by_layer)
    assert by_layer[1] == by_layer[2]


# What must not disturb the numbering


def checkpointed(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def test_the_second_forward_of_a_checkpointed_layer_is_no_layer() -> None:
    """Layers 0 and 2 are checkpointed; of 1 and 3 only 1 is among the first 3.

    A checkpoint saves its layer's input before the layer begins, outside of layers.
    """
    model = stack(4)
    plain = model.layers[1], model.layers[3]
    model.run_layer = lambda layer, x: layer(x) if layer in plain else checkpointed(layer, x)
    calls: list[nn.Module] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda layer, _: calls.append(layer))
    with ebbtide.offload(model, activations=policy(3)) as handle:
        for number in range(1, 4):
            assert step(handle, model).offloaded_bytes == 1 * 2 * S
            assert len(calls) == number * (4 + 2), "two layers ran a second time"
    # Without num_layers the layers' inputs leave too; keep_last keeps what layer 3 itself saves.
    with ebbtide.offload(model, activations=policy(None, 1)) as handle:
        for _ in range(3):
            assert step(handle, model).offloaded_bytes == (2 + 2 * 1) * S + S


class WithInnerGradient(nn.Module):
    """Like a physics-informed loss: the derivative of the net is part of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = stack(4, checkpointed)
        self.tail = nn.ModuleList([Layer()])

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return self.tail[0](slope)


def test_a_second_forward_within_the_first_is_no_layer_either() -> None:
    """Five layers: four checkpointed ones, which run again for the derivative, and the tail.

    The tail alone is layer 4, so num_layers=5 includes it and num_layers=4 does not.
    """
    offloaded_bytes = []
    for num_layers in (4, 5):
        model = WithInnerGradient()
        layers = ["net.layers.*", "tail.0"]
        with ebbtide.offload(model, activations=policy(num_layers), layers=layers) as handle:
            offloaded_bytes.append(step(handle, model).offloaded_bytes)
    assert offloaded_bytes[1] - offloaded_bytes[0] == 2 * S


class Interrupted(Layer):
    """Raises, once, when it is told to; after its linear map has saved its input."""

    stop: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.stop is not None:
            kind, self.stop = self.stop, None
            raise kind("on purpose")
        return x.sin()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_step_after_an_interrupted_one_is_right(kind: type[BaseException], at: int) -> None:
    model = Stack(nn.ModuleList(Interrupted() for _ in range(4)))
    with ebbtide.offload(model, activations=policy(2, 1)) as handle:
        first = step(handle, model)
        assert first.offloaded_bytes == 2 * 2 * S
        model.layers[at].stop = kind
        with contextlib.suppress(kind):
            step(handle, model)
            pytest.fail("it did not stop")
        for _ in range(2):
            stats = step(handle, model)
            assert stats.offloaded_bytes == 2 * 2 * S
            assert stats.kept_bytes == 2 * 2 * S + S
            assert stats.num_saved == first.num_saved


def test_a_layer_whose_failure_the_model_catches_has_ended() -> None:
    """Layer 1 fails and is left out. What the model saves next is outside of layers, and stays."""

    def forgiving(layer: nn.Module, x: Tensor) -> Tensor:
        with contextlib.suppress(ValueError):
            return layer(x)
        return x.cos()  # saves its argument

    model = Stack(nn.ModuleList(Interrupted() for _ in range(3)), forgiving)
    with ebbtide.offload(model, activations=policy(2)) as handle:
        assert step(handle, model).offloaded_bytes == 2 * 2 * S
        model.layers[1].stop = ValueError
        stats = step(handle, model)
        # Layer 0 saves two, and layer 1 one before it fails.
        assert stats.offloaded_bytes == (2 + 1) * S
        # The cosine's argument, layer 2's two, and the one outside of layers.
        assert stats.kept_bytes == (1 + 2 + 1) * S


def test_forwards_that_autograd_does_not_record_do_not_count() -> None:
    model = stack(4)
    with ebbtide.offload(model, activations=policy(None, 1), layers=["layers.?"]) as handle:
        with torch.no_grad():
            model(torch.randn(ROWS, WIDTH))
        assert step(handle, model).offloaded_bytes == 4 * 2 * S + S
        model.skipped = {0, 1}
        with torch.inference_mode():
            model(torch.randn(ROWS, WIDTH))
        model.skipped = set()
        assert step(handle, model).offloaded_bytes == 3 * 2 * S + S


def test_fewer_layers_than_num_layers_are_all_offloaded() -> None:
    model = stack(4)
    with ebbtide.offload(model, activations=policy(6), layers=["layers.?"]) as handle:
        assert step(handle, model).offloaded_bytes == 4 * 2 * S


class Nested(nn.Module):
    """Calls itself between its layers, as a model of trees does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        x = self.layers[0](x)
        if depth:
            x = self(x, depth - 1)
        return self.layers[1](x)


def test_layers_behind_a_call_of_the_model_itself_are_layers_of_its_forward() -> None:
    model = Nested()
    with ebbtide.offload(model, activations=ActivationPolicy(min_bytes=1)) as handle:
        model(torch.randn(ROWS, WIDTH)).sum().backward()
        names = [f"{each.name}.m{each.microbatch}" for each in handle.inspect().storages]
    places = ["layers.0.m0", "layers.0.m1", "layers.1.m1", "layers.1.m0"]
    assert list(dict.fromkeys(names)) == places
