"""Recomputed layers: compiled, copied, traced, reported, restored; and interrupted steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import ebbtide
from ebbtide import PolicyError, WeightPolicy
from ebbtide.devices import SimulatedDevice
from ebbtide.stores import PinnedStore
from loops import on_device
from recompute_bench import (
    MODES,
    ROWS,
    WIDTH,
    Block,
    Dropout,
    Layer,
    S,
    Stack,
    calls_of,
    compare,
    draw,
    policy,
    stack,
    step,
    train,
)
from saying import warned

each_mode = pytest.mark.parametrize("mode", MODES)

# Compiled layers


@pytest.fixture(autouse=True)
def no_compiled_code() -> None:
    torch._dynamo.reset()
    counters.clear()


def each_layer(model: Stack) -> Stack:
    for number, layer in enumerate(model.layers):
        model.layers[number] = torch.compile(layer, backend="aot_eager", fullgraph=True)
    return model


def each_layer_in_place(model: Stack) -> Stack:
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    return model


def each_forward(model: Stack) -> Stack:
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    return model


Compile = Callable[[Stack], Stack]


@each_mode
@pytest.mark.parametrize("compiled", [each_layer, each_layer_in_place])
def test_compiled_after_offload(compiled: Compile, mode: str) -> None:
    """The compiler sees the same two graphs (the first input needs no gradient) and no hook.

    What it has compiled is no operation that could run again by itself, so it is offloaded.
    """
    with warned("not-recomputed"):
        stats = compare(lambda: stack(3), policy(mode), draw, prepare=compiled)
    assert stats.recomputed_bytes == 0
    assert stats.offloaded_bytes > 0
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("compiled", [each_layer, each_layer_in_place, each_forward])
def test_compiled_before_offload(compiled: Compile) -> None:
    model = stack(3)
    again = compiled(copy.deepcopy(model))
    forwards = [layer.forward for layer in again.layers]
    calls = [layer._compiled_call_impl for layer in again.layers]
    expected = train(compiled(model), draw, 2)
    with ebbtide.offload(again, activations=policy("recompute")) as handle:
        with warned("not-recomputed"):
            got = train(again, draw, 2)
        assert handle.stats.offloaded_bytes > 0
    assert all(map(torch.equal, got, expected))
    assert [layer.forward for layer in again.layers] == forwards
    assert [layer._compiled_call_impl for layer in again.layers] == calls


def test_a_part_of_a_layer_is_compiled() -> None:
    """What the compiled part saves is offloaded, and the rest is computed again."""

    class Partly(Block):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(Layer(), backend="aot_eager", fullgraph=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.linear(x).sin()).cos()

    def build() -> Stack:
        torch._dynamo.reset()
        return Stack(nn.ModuleList(Partly() for _ in range(2)))

    stats = compare(build, policy("recompute"), draw, layers=["layers.?"])
    assert stats.recomputed_bytes > 0


def test_a_forward_compiled_after_offload_is_said() -> None:
    model = stack(2)
    with ebbtide.offload(model, activations=policy("recompute"), layers=["layers.?"]) as handle:
        each_forward(model)
        with warned("not-recomputed"):
            step(handle, model)
            stats = step(handle, model)
    assert stats.recomputed_bytes == 0


def test_a_model_compiled_as_one_region() -> None:
    with pytest.raises(PolicyError):
        ebbtide.offload(torch.compile(stack(3)), activations=policy("recompute"))
    model = stack(3)
    with ebbtide.offload(model, activations=policy("recompute")):
        whole = torch.compile(model, backend="aot_eager", fullgraph=True)
        with warned("no-layer-called"):
            whole(*draw())


def test_layers_that_save_only_their_inputs_are_said_to_be_that() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Hardtanh(), nn.Linear(8, 8))
    with ebbtide.offload(model, activations=policy("recompute")):
        model(torch.randn(4, 8)).sum().backward()
        with warned("nothing-offloaded"):
            model(torch.randn(4, 8))


# Reports


def test_what_is_reported() -> None:
    model = stack(3)
    with ebbtide.offload(
        model, activations=policy("recompute", num_layers=2), trace=True
    ) as handle:
        for _ in range(2):
            (model(*draw()).sum() + model(*draw()).sum()).backward()
        inspection, trace = handle.inspect(), handle.trace
        assert "256.0 KiB recomputed" in repr(handle)  # two layers in two microbatches
    found = [
        (each.layer.index, each.layer.name, each.microbatch, each.size_bytes, each.num_saved)
        for each in inspection.recomputed
    ]
    assert found == [
        (number, f"layers.{number}", microbatch, S, 1)
        for microbatch in range(2)
        for number in range(2)
    ]
    again = [each for each in trace.events if each.what == "recompute"]
    assert sorted((each.layer, each.microbatch) for each in again) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    for each in again:
        assert (each.lane, each.size_bytes) == ("compute", S)
        around = [
            other
            for other in trace.events
            if other.what == "backward"
            and (other.layer, other.microbatch) == (each.layer, each.microbatch)
        ]
        assert around[0].begin_s <= each.begin_s <= each.end_s <= around[0].end_s


def test_figures_are_those_of_offloading_but_for_what_is_recomputed() -> None:
    """Whatever becomes of a storage, it is counted once, parameters and number of saves alike."""
    taken = []
    for mode in ("offload", *MODES):
        model = Stack(nn.ModuleList(Dropout() for _ in range(3)))
        with ebbtide.offload(model, activations=policy(mode)) as handle:
            step(handle, model)  # verifies
            stats = step(handle, model)
        taken.append((stats.unique_bytes, stats.parameter_bytes))
    assert len(set(taken)) == 1


def test_reloads_of_inputs_are_on_time_and_nothing_else_leaves() -> None:
    """On a device of its own: each of N inputs and the last argument makes one way down and up."""
    torch.manual_seed(0)
    model = stack(4)
    device = SimulatedDevice(3, eagerness=0.1)
    with (
        on_device(device, lambda: PinnedStore(device)),
        ebbtide.offload(model, activations=policy("recompute+offload")) as handle,
    ):
        step(handle, model)  # verifies
        for _ in range(3):
            loss = model(torch.randn(ROWS, WIDTH)).sum()
            device.finish_copies()  # else what has not left yet need not come back
            assert handle.inspect().in_flight.stored_bytes == 5 * S
            loss.backward()
            stats = handle.stats
            assert stats.num_offloaded == 5
            assert stats.offloaded_bytes == stats.reloaded_bytes == 5 * S
        del loss
        assert handle.inspect().in_flight.is_idle
    device.finish_copies()


def test_the_peak_is_an_input_that_came_back_and_what_is_computed_from_it() -> None:
    """A layer holds its input, which its linear map has saved, too, and its sine's argument.

    With a bound of 0 no other input comes back meanwhile: two storages.
    """
    torch.manual_seed(0)
    model = stack(4)
    device = SimulatedDevice(3)
    with (
        on_device(device, lambda: PinnedStore(device), 0),
        ebbtide.offload(model, activations=policy("recompute+offload")) as handle,
    ):
        step(handle, model)
        loss = model(torch.randn(ROWS, WIDTH)).sum()
        device.finish_copies()
        assert handle.inspect().in_flight.offload_bytes == 0
        handle._engine.transfers.account.meter.peak_device_bytes = 0
        loss.backward()
        del loss
        assert handle.stats.peak_device_bytes == 2 * S
    device.finish_copies()


@each_mode
def test_weights_at_rest_count_as_parameters(mode: str) -> None:
    """With weights on the host, too, a layer's sine's argument is all that is recomputed."""
    model = stack(3)
    device = SimulatedDevice(1)
    with (
        on_device(device, lambda: PinnedStore(device)),
        ebbtide.offload(model, activations=policy(mode), weights=WeightPolicy()) as handle,
    ):
        step(handle, model)  # verifies
        stats = step(handle, model)
        assert stats.recomputed_bytes == 3 * S
        assert stats.weight_reload_bytes > 0
    device.finish_copies()


# Copies, detach, interrupts


def test_detach_restores_the_layers() -> None:
    model = stack(3)
    own = lambda x: model.layers[0].linear(x).sin()  # noqa: E731
    model.layers[0].forward = own
    handle = ebbtide.offload(model, activations=policy("recompute"))
    assert model.layers[0].forward is own
    step(handle, model)  # verifies
    assert step(handle, model).recomputed_bytes == 3 * S
    calls = calls_of(model)
    graph = model(*draw()).sum()
    handle.detach()
    assert model.layers[0].forward is own
    assert "forward" not in model.layers[2].__dict__
    calls.clear()
    step_plainly(model)
    assert calls == [0, 1, 2]
    calls.clear()
    graph.backward()
    assert not calls, "a graph that is alive still computes its layers again, and calls nothing"


def step_plainly(model: nn.Module) -> None:
    model(*draw()).sum().backward()


def test_detach_after_an_interrupt_in_a_part() -> None:
    """Torch calls no hooks then, so what the forward has begun is there until `detach`."""

    class Raises(Layer):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise KeyboardInterrupt

    model = nn.ModuleDict({"net": Stack(nn.ModuleList([Raises()]))})
    with ebbtide.offload(model, activations=policy("recompute"), layers=["net.layers.?"]):
        with pytest.raises(KeyboardInterrupt):
            model["net"](torch.randn(ROWS, WIDTH))
        assert _get_current_dispatch_mode_stack()
    assert not _get_current_dispatch_mode_stack()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("again", [False, True], ids=["forward", "recomputation"])
def test_a_step_after_an_interrupted_one_is_right(error: type[BaseException], again: bool) -> None:
    """The layer raises in its forward, or a kernel does when the layer is computed again."""

    class Raises(Layer):
        due = False

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(super().forward(x))
            if self.due:
                raise error
            return x

    model = Stack(nn.ModuleList(Raises() for _ in range(2)))
    expected = copy.deepcopy(model)
    with ebbtide.offload(model, activations=policy("recompute"), layers=["layers.?"]) as handle:
        step(handle, model)
        model.layers[0].due = not again
        operator = torch.ops.aten.native_batch_norm.default
        fails = mock.patch.object(operator, "_op", mock.Mock(side_effect=error))
        if again:
            loss = model(torch.randn(ROWS, WIDTH)).sum()
            with pytest.raises(error), fails:
                loss.backward()
            del loss
        else:
            with pytest.raises(error):
                model(torch.randn(ROWS, WIDTH))
            assert not _get_current_dispatch_mode_stack(), "nothing is recorded any more"
        model.layers[0].due = False
        model.zero_grad()
        model.load_state_dict(expected.state_dict())
        torch.manual_seed(1)
        step(handle, model)
        torch.manual_seed(1)
        expected(torch.randn(ROWS, WIDTH)).sum().backward()
        assert handle.stats.recomputed_bytes > 0
        assert handle.inspect().in_flight.is_idle
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for one, other in zip(model.buffers(), expected.buffers(), strict=True):
        assert torch.equal(one, other)
