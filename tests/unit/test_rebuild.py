"""Rebuild instead of keep: the same bits from fewer bytes."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ebbtide
from ebbtide.devices import CpuDevice
from ebbtide.runtime.record import RECIPES
from ebbtide.stores import PinnedStore
from engine_bench import EngineBench

pytestmark = pytest.mark.usefixtures("frozen_imports")

SIZE = (64, 32)
BYTES = 64 * 32 * 4


class Bench(EngineBench):
    """An engine whose saved tensors are rebuilt where that is possible.

    Args:
        offloading: whether the others leave; else they stay.
    """

    def __init__(self, offloading: bool) -> None:
        device = CpuDevice()
        policy = ebbtide.ActivationPolicy(min_bytes=512, num_layers=None if offloading else 0)
        super().__init__(device, PinnedStore(device), 2**20, policy)


@pytest.fixture(params=[True, False], ids=["offloaded", "kept"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    gc.collect()
    gc.disable()
    bench = Bench(request.param)
    yield bench
    gc.enable()
    now = bench.in_flight
    assert now.saved_tensors == now.records == now.reload_bytes == 0
    bench.close()


def gradients(function: Callable[..., Tensor], bench: Bench | None, *shapes: tuple[int, ...]):
    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    loss = bench.run(function, *inputs) if bench else function(*inputs)
    loss.sum().backward()
    return [x.grad for x in inputs]


def check(function: Callable[..., Tensor], bench: Bench, *shapes: tuple[int, ...]) -> int:
    """Bitwise the same gradients; returns the bytes that were rebuilt."""
    plain = gradients(function, None, *shapes)
    rebuilt = gradients(function, bench, *shapes)
    for got, expected in zip(rebuilt, plain, strict=True):
        assert torch.equal(got, expected)
    return bench.stats.rebuilt_bytes


W = (32, 32)

ONE_INPUT: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "softplus": lambda x: F.softplus(x, beta=2, threshold=3),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": lambda x: F.elu(x, 0.7),
    "sin": torch.sin,
    "cos": torch.cos,
    "square": lambda x: x**2,
}


@pytest.mark.parametrize("name", ONE_INPUT)
def test_what_an_operation_saves_gives_its_output(bench: Bench, name: str) -> None:
    """X @ w is saved by the function, its output by the next product: one of them is enough."""
    function = ONE_INPUT[name]
    rebuilt_bytes = check(lambda x, w: function(x @ w) @ w, bench, SIZE, W)
    assert rebuilt_bytes >= BYTES


@pytest.mark.parametrize(
    "function", [torch.tanh, torch.sigmoid, torch.exp], ids=["tanh", "sigmoid", "exp"]
)
def test_what_saves_its_own_output_is_left_alone(
    bench: Bench, function: Callable[[Tensor], Tensor]
) -> None:
    assert check(lambda x, w: function(x @ w) @ w, bench, SIZE, W) == 0


def test_a_cast_comes_from_what_the_operation_before_saved(bench: Bench) -> None:
    """Tanh saves its result; the cast, saved by the product in half precision, follows from it."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).tanh().bfloat16() @ w.bfloat16()).float()

    assert check(function, bench, SIZE, W) == BYTES // 2


def test_nothing_comes_from_what_another_operation_saved(bench: Bench) -> None:
    """H is saved by sin, whose graph may be dropped before that of its cast."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        s = h.sin().sum()
        return s + (h.bfloat16() @ w.bfloat16()).float().sum()

    assert check(function, bench, SIZE, W) == 0


def test_a_gated_mlp_keeps_gate_and_up_only(bench: Bench) -> None:
    """Saved: gate (by SiLU), its activation and up (by the product), the product (by down)."""

    def mlp(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        return (F.silu(x @ w1) * (x @ w2)) @ w3

    assert check(mlp, bench, SIZE, W, W, W) == 2 * BYTES


def test_chains_end(bench: Bench) -> None:
    """Eight functions in a row: each input is saved; at most four steps lie between two kept."""

    def chain(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        for _ in range(8):
            y = y.sin()
        return y @ w

    rebuilt_bytes = check(chain, bench, SIZE, W)
    # h0 is kept; h1 to h4 follow; h5 would be the fifth step, so it is kept, and h6 to h8 follow.
    assert rebuilt_bytes == 7 * BYTES


def test_a_view_of_an_output_is_rebuilt_with_it(bench: Bench) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = F.gelu(x @ w)
        return (y.view(32, 64) ** 3).sum() + (y.t() @ x).sum() + (y[3:40] * y[3:40]).sum()

    assert check(function, bench, SIZE, W) == BYTES


def test_one_rebuild_serves_all_readers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, runs = RECIPES["GeluBackward0"], []

    def counted(inputs, constants, dtype):
        runs.append(1)
        return recipe.rebuild(inputs, constants, dtype)

    monkeypatch.setitem(
        RECIPES,
        "GeluBackward0",
        ebbtide.RebuildRecipe("GeluBackward0", ("self",), counted, ("approximate",)),
    )

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = F.gelu(x @ w)
        return (y @ w).sum() + (y.t() @ x).sum() + y.sin().sum()

    assert check(function, bench, SIZE, W) == BYTES
    assert len(runs) == 2  # one to prove the recipe, one in backward


# What is not rebuilt


def test_what_follows_from_nothing_saved_is_kept(bench: Bench) -> None:
    """X * x is saved by nobody, and nothing says that it was not changed before it was doubled."""
    assert check(lambda x, w: ((x * x) * 2) @ w, bench, SIZE, W) == 0


def test_what_was_changed_in_place_is_kept(bench: Bench) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = F.gelu(x @ w)
        with torch.no_grad():
            y.mul_(0.5)
        return y @ w

    assert check(function, bench, SIZE, W) == 0


@pytest.mark.parametrize("change", [False, True])
def test_an_input_that_was_changed_is_not_used(bench: Bench, change: bool) -> None:
    """The cast reads h before the change; what tanh saved of it has changed when it is sought."""

    def function(x: Tensor, w: Tensor, low: Tensor) -> Tensor:
        h = (x @ w).tanh()
        cast = h.bfloat16()
        if change:
            h.detach().mul_(0.5)
        return cast @ low

    def gradient(run: Callable[..., Tensor]) -> Tensor:
        """Of the later weight, for which the backward of tanh does not run."""
        torch.manual_seed(0)
        x, w, low = torch.randn(SIZE), torch.randn(W, requires_grad=True), torch.randn(W).bfloat16()
        return torch.autograd.grad(run(function, x, w, low.requires_grad_()).sum(), low)[0]

    plain = gradient(lambda function, *inputs: function(*inputs))
    assert torch.equal(gradient(bench.run), plain)
    assert bench.stats.rebuilt_bytes == (0 if change else BYTES // 2)


def test_a_small_input_that_was_changed_is_not_used(bench: Bench) -> None:
    """It stays where it is, and the first step has proven the recipe. Autograd reads y alone."""

    def function(x: Tensor, w: Tensor, scale: Tensor, low: Tensor, change: bool) -> Tensor:
        y = (x @ w) * scale
        if change:
            scale.detach().mul_(0.5)
        return y @ low

    def gradient(run: Callable[..., Tensor], change: bool) -> Tensor:
        torch.manual_seed(0)
        x, scale = torch.randn(SIZE), torch.randn(W[1], requires_grad=True)
        w, low = (torch.randn(W, requires_grad=True) for _ in range(2))
        return torch.autograd.grad(run(function, x, w, scale, low, change).sum(), low)[0]

    for change in (False, True):
        plain = gradient(lambda function, *inputs: function(*inputs), change)
        assert torch.equal(gradient(bench.run, change), plain)
        assert bench.stats.rebuilt_bytes == (0 if change else BYTES)


def test_a_rebuild_is_shared_at_the_same_version_only(bench: Bench) -> None:
    """Y is saved, changed in place, and saved again: the second one has other bytes."""

    def second(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = F.gelu(x @ w)
        first = y @ w
        with torch.no_grad():
            y.mul_(0.5)
        return first, y @ w

    results = []
    for run in (bench.run, lambda function, *inputs: function(*inputs)):
        torch.manual_seed(0)
        x, w = torch.randn(SIZE), torch.randn(W, requires_grad=True)
        first, loss = run(second, x, w)
        (gradient,) = torch.autograd.grad(loss.sum(), loss.grad_fn.next_functions[1][0].variable)
        results.append(gradient)
        del first, loss
    assert torch.equal(*results)


def test_an_input_changed_after_its_output_was_saved_raises(bench: Bench) -> None:
    """As autograd would, for the function itself needs the input, too."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        y = F.gelu(h) @ w
        with torch.no_grad():
            h.mul_(2)
        return y

    for run in (bench, None):
        with pytest.raises(RuntimeError, match="modified"):
            gradients(function, run, SIZE, W)
    gc.collect()  # the error's traceback


def test_a_recipe_that_is_wrong_is_not_used(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = ebbtide.RebuildRecipe("GeluBackward0", ("self",), lambda x, *_: F.gelu(x[0]) * 1.001)
    monkeypatch.setitem(RECIPES, "GeluBackward0", wrong)
    with caplog.at_level(logging.INFO, "ebbtide"):
        for _ in range(3):
            assert check(lambda x, w: F.gelu(x @ w) @ w, bench, SIZE, W) == 0
    assert len(caplog.records) == 1
    assert "GeluBackward0 of shape (64, 32)" in caplog.text


def test_one_that_gives_another_layout_is_not_used(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ebbtide.RebuildRecipe(
        "GeluBackward0", ("self",), lambda x, *_: F.gelu(x[0]).t().contiguous().t()
    )
    monkeypatch.setitem(RECIPES, "GeluBackward0", other)
    assert check(lambda x, w: F.gelu(x @ w) @ w, bench, SIZE, W) == 0


def test_an_address_that_comes_back_is_another_tensor(bench: Bench) -> None:
    """A GELU's output is freed at once, and the next one gets its address."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        for _ in range(6):
            y = F.gelu(y) @ w
        return y

    assert check(function, bench, SIZE, W) == 6 * BYTES


# What autograd does with it


def test_double_backward(bench: Bench) -> None:
    def penalty(run: Callable[[Callable[[], Tensor]], Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        x, w = torch.randn(SIZE, requires_grad=True), torch.randn(W, requires_grad=True)
        loss = run(lambda: (F.silu(x @ w) @ w).square().sum())
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        g.square().sum().backward()
        return [x.grad, w.grad]

    for got, expected in zip(penalty(bench.run), penalty(lambda f: f()), strict=True):
        assert torch.equal(got, expected)


def test_retained_and_dropped_graphs(bench: Bench) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(SIZE, requires_grad=True), torch.randn(W)
    loss = bench.run(lambda: (F.gelu(x @ w) @ w).square().sum())
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * once)
    bench.run(lambda: (F.gelu(x @ w) @ w).square().sum())  # dropped


def test_autocast(bench: Bench) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (F.gelu(x @ w) @ w).float()

    assert check(function, bench, SIZE, W) >= BYTES // 2


def test_checkpoint_inside(bench: Bench) -> None:
    from torch.utils.checkpoint import checkpoint

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = checkpoint(lambda t: F.gelu(t @ w), x, use_reentrant=False)
        return F.silu(y @ w) @ w

    check(function, bench, SIZE, W)


# The public face


def test_the_policy_turns_it_on_and_off() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(64, 64)
    figures = {}
    for rebuild in (True, False):
        policy = ebbtide.ActivationPolicy(num_layers=0, min_bytes=1024, rebuild=rebuild)
        with ebbtide.offload(model, activations=policy, layers=["0"]) as handle:
            model(x).sum().backward()
            figures[rebuild] = handle.stats
    on, off = figures[True], figures[False]
    assert (off.rebuilt_bytes, on.rebuilt_bytes) == (0, 64 * 64 * 4)
    assert on.unique_bytes == off.unique_bytes
    assert on.kept_bytes == on.unique_bytes - on.rebuilt_bytes
    assert on.offloaded_bytes == off.offloaded_bytes == 0


def test_a_users_recipe_is_used(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    monkeypatch.setattr("ebbtide.runtime.record.RECIPES", RECIPES)
    before = dict(RECIPES)

    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.special.bessel_j0((x @ w).detach()).sum() + (F.logsigmoid(x @ w) @ w).sum()

    assert check(function, bench, SIZE, W) == 0
    ebbtide.register_rebuild(
        ebbtide.RebuildRecipe(
            "LogSigmoidBackward0", ("self",), lambda inputs, *_: F.logsigmoid(inputs[0])
        )
    )
    try:
        assert check(function, bench, SIZE, W) == BYTES
    finally:
        RECIPES.clear()
        RECIPES.update(before)


def test_a_recipe_without_inputs_is_refused() -> None:
    with pytest.raises(ebbtide.PolicyError):
        ebbtide.RebuildRecipe("SinBackward0", (), lambda inputs, *_: inputs[0])


def test_rebuilds_are_in_the_trace_by_layer() -> None:
    block = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    model = nn.Sequential(block, nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
    policy = ebbtide.ActivationPolicy(min_bytes=1024)
    with ebbtide.offload(model, activations=policy, layers=["0", "1"], trace=True) as handle:
        model(torch.randn(64, 64)).sum().backward()
        rebuilds = [event for event in handle.trace.events if event.what == "rebuild"]
    assert [(event.layer, event.size_bytes) for event in rebuilds] == [(1, 16384), (0, 16384)]
    assert all(event.lane == "compute" for event in rebuilds)
