"""Loops written by hand: layers, sync, passing through, by hand, and models under a schedule."""

import gc
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide import PolicyError, ScheduleError, schedule
from saying import warned
from schedule_orders import by_hand

POLICY = ebbtide.ActivationPolicy(min_bytes=1024)


@pytest.fixture(autouse=True)
def _no_surprises() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def blocks(count: int) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(count))


def session(*args: object, **kwargs: object) -> ebbtide.OffloadSession:
    return ebbtide.OffloadSession(*args, activations=POLICY, device="cpu", **kwargs)


def run(loop: ebbtide.OffloadSession | None, layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        if loop is None:
            x = layer(x)
            continue
        with loop.layer():
            x = layer(x)
        x = loop.sync(x)
    return x.square().mean()


def gradients(layers: nn.ModuleList) -> list[Tensor]:
    found = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
    layers.zero_grad()
    return found


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    assert got
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_shapes_change_from_step_to_step() -> None:
    layers = blocks(5)
    with session(2, 5) as loop:
        for rows in (64, 16, 200, 64):
            x = torch.randn(rows, 32)
            run(None, layers, x).backward()
            expected = gradients(layers)
            run(loop, layers, x).backward()
            assert_same(gradients(layers), expected)
            assert loop.stats.offloaded_bytes > 0


def test_nothing_is_counted_where_autograd_does_not_record() -> None:
    layers = blocks(3)
    x = torch.randn(64, 32)
    with session(1, 3) as loop:
        for _ in range(2):
            with torch.no_grad():
                run(loop, layers[:2], x)  # not even a whole forward
            with torch.inference_mode():
                run(loop, layers, x)
            run(loop, layers, x).backward()
            assert loop.stats.num_offloaded > 0


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_an_interrupted_forward_begins_again(keeps_graph: bool) -> None:
    layers, kept = blocks(4), []
    x = torch.randn(64, 32)
    run(None, layers, x).backward()
    expected = gradients(layers)
    with session(2, 4) as loop:
        for stop in (0, 2, 3):
            h = x
            with pytest.raises(ZeroDivisionError):  # noqa: PT012
                for number, layer in enumerate(layers):
                    with loop.layer():
                        h = layer(h)
                        if number == stop:
                            raise ZeroDivisionError
                    h = loop.sync(h)
            kept += [h] * keeps_graph
            del h
            gc.collect()
            run(loop, layers, x).backward()
            assert_same(gradients(layers), expected)
            assert keeps_graph or loop.stats.num_offloaded > 0  # it is part of the step


def test_a_backward_that_never_comes_begins_again() -> None:
    layers = blocks(4)
    x = torch.randn(64, 32)
    with session(2, 4) as loop:
        h = x
        for layer in layers[:3]:  # an evaluation with gradients on, given up
            with loop.layer():
                h = layer(h)
            h = loop.sync(h)
        del h
        run(loop, layers, x).backward()
        assert loop.stats.num_offloaded > 0


def test_a_departure_is_said_once() -> None:
    layers = blocks(4)
    order = "F0 F1 F2 F3 B3 B2 B1 B0"
    plan = by_hand(order, F0="offload 0", F2="release 0", B1="reload 0")
    x = torch.randn(64, 32)
    run(None, layers, x).backward()
    expected = gradients(layers)
    with session(schedule=plan) as loop:

        def run_numbered(*numbers: int) -> None:
            h = x
            for number, layer in zip(numbers, layers, strict=True):
                with loop.layer(number):
                    h = layer(h)
                h = loop.sync(h)
            h.square().mean().backward()

        with warned("schedule-departed"):
            run_numbered(0, 0, 2, 3)
        assert_same(gradients(layers), expected)
        run_numbered(0, 0, 2, 3)  # not a word more
        assert_same(gradients(layers), expected)
        run_numbered(0, 1, 2, 3)
        assert_same(gradients(layers), expected)
        assert loop.stats.num_offloaded > 0


def test_by_hand() -> None:
    layers = blocks(4)
    x = torch.randn(64, 32)
    run(None, layers, x).backward()
    expected = gradients(layers)
    with session(model_layers=4, schedule="manual", trace=True) as loop:
        for _ in range(2):
            h = x
            for number, layer in enumerate(layers):
                with loop.layer():
                    h = layer(h)
                h = loop.sync(h)
                if number < 3:
                    loop.start_offload(number)
            for number in range(3):
                loop.release(number)
            for number in (2, 1):
                loop.start_reload(number)
            h.square().mean().backward()  # layer 0 comes late
            del h
            assert_same(gradients(layers), expected)
        what = [(event.what, event.layer) for event in loop.trace.events]
        for number in range(3):
            assert ("offload", number) in what
            assert ("release", number) in what
        assert ("offload", 3) not in what
        # What layer 2 gave, and layer 3 saved too, stays with layer 3.
        assert loop.stats.offloaded_bytes > loop.stats.reloaded_bytes > 0


def test_by_hand_in_a_wrong_order() -> None:
    layers = blocks(3)
    with session(model_layers=3, schedule="manual") as loop:
        with pytest.raises(ScheduleError):
            loop.start_offload(0)
        with loop.layer():
            h = layers[0](torch.randn(64, 32))
        with pytest.raises(ScheduleError):
            loop.release(0)
        with pytest.raises(ScheduleError):
            loop.start_reload(0)
        loop.start_offload(0)
        with pytest.raises(ScheduleError):
            loop.start_offload(0)
        with pytest.raises(ScheduleError):
            loop.start_reload(0)
        loop.release(0)
        loop.start_reload(0)
        h.sum().backward()
    with session(1, 3) as loop, pytest.raises(PolicyError):
        loop.start_offload(0)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "give model_layers"),
        ((2,), {}, "give model_layers"),
        ((None, 4), {}, "give num_layers"),
        ((4, 4), {}, "from 0 to model_layers - 1 = 3"),
        ((-1, 4), {}, "from 0 to"),
        ((1, 4), {"schedule": schedule.default(1, 4)}, "leave the counts out"),
        ((1, 4), {"schedule": "manual"}, "leave num_layers out"),
        ((None, 4), {"schedule": "F0: offload 0"}, r"Schedule\.parse"),
        ((), {"schedule": schedule.Schedule.parse("order: F0 B0\nF0: offload 0")}, "no release"),
    ],
)
def test_arguments(args: tuple[object, ...], kwargs: dict[str, object], words: str) -> None:
    with pytest.raises((PolicyError, ScheduleError), match=words):
        session(*args, **kwargs)


def test_policy_counts_no_layers_here() -> None:
    with pytest.raises(PolicyError):
        ebbtide.OffloadSession(1, 4, activations=ebbtide.ActivationPolicy(keep_last=1))


def test_blocks_are_not_nested_and_sync_comes_after() -> None:
    layers = blocks(2)
    with session(1, 2) as loop:
        with pytest.raises(PolicyError), loop.layer(), loop.layer():
            pass
        with pytest.raises(PolicyError), loop.layer():
            loop.sync(layers[0](torch.randn(64, 32)))
        run(loop, layers, torch.randn(64, 32)).backward()
        with pytest.raises(PolicyError), loop.layer(microbatch=1):
            pass


def test_sync_takes_any_nesting() -> None:
    with session(1, 2) as loop:
        x = torch.randn(64, 32, requires_grad=True)
        with loop.layer():
            h = {"a": [x.sin(), 3], "b": (x.cos(),)}
        h = loop.sync(h)
        with loop.layer():
            y = h["a"][0] * h["b"][0]
        loop.sync(y).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad((x.sin() * x.cos()).sum(), x)[0])


# ---- models under a schedule --------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = blocks(count)

    def forward(self, x: Tensor, count: int | None = None) -> Tensor:
        for block in self.blocks[:count]:
            x = block(x)
        return x.square().mean()


def test_a_model_follows_a_schedule() -> None:
    model, x = Model(6), torch.randn(64, 32)
    model(x).backward()
    expected = gradients(model.blocks)
    plan = schedule.default(3, 6)
    with ebbtide.offload(model, activations=POLICY, schedule=plan, trace=True) as handle:
        assert handle.schedule == plan
        for _ in range(2):
            model(x).backward()
            assert_same(gradients(model.blocks), expected)
            with torch.no_grad():
                model(x)
        moved = {e.layer for e in handle.trace.events if e.what == "release"}
        assert moved == {0, 1, 2}
        losses = [model(x) for _ in range(3)]  # three rounds in flight
        for place in (1, 2, 0):
            losses[place].backward()
        assert_same(gradients(model.blocks), [3 * g for g in expected])


def test_a_schedule_over_microbatches_of_a_model() -> None:
    model = Model(2)
    inputs = [torch.randn(64, 32) for _ in range(3)]
    order = "F0 F1 F0.m1 F1.m1 B1 B0 F0.m2 F1.m2 B1.m1 B0.m1 B1.m2 B0.m2"
    lines = {
        "F0": "offload 0",
        "F0.m1": "offload 0.m1, release 0",
        "F1.m1": "offload 1.m1",
        "B1": "reload 0, release 0.m1",
        "F0.m2": "release 1.m1",
        "F1.m2": "reload 0.m1",
        "B1.m1": "reload 1.m1",
    }
    plan = by_hand(order, **lines)
    with ebbtide.offload(model, activations=POLICY, schedule=plan, trace=True) as handle:
        for _ in range(2):
            first, second = model(inputs[0]), model(inputs[1])
            first.backward()
            third = model(inputs[2])
            second.backward()
            third.backward()
        got = gradients(model.blocks)
        moved = {(e.layer, e.microbatch) for e in handle.trace.events if e.what == "release"}
        assert moved == {(0, 0), (0, 1), (1, 1)}
    for _ in range(2):
        for x in inputs:
            model(x).backward()
    assert_same(got, gradients(model.blocks))


def test_a_forward_with_fewer_layers_departs() -> None:
    model, x = Model(4), torch.randn(64, 32)
    plan = schedule.default(2, 4)
    with ebbtide.offload(model, activations=POLICY, schedule=plan) as handle:
        with warned("schedule-departed"):
            model(x, 3).backward()
        got = gradients(model.blocks)
        model(x).backward()
        assert handle.stats.num_offloaded > 0
        gradients(model.blocks)
    model(x, 3).backward()
    assert_same(got, gradients(model.blocks))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"schedule": "F0: release 0"}, r"Schedule\.parse"),
        ({"schedule": schedule.default(2, 9)}, "has 9 layers and the model 4"),
        (
            {
                "schedule": schedule.default(2, 4),
                "activations": ebbtide.ActivationPolicy(num_layers=2),
            },
            "says which layers leave",
        ),
        (
            {"schedule": schedule.Schedule.parse("order: F0..F3 B3..B0\nF1: release 0")},
            "--> F1: release 0",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(arguments: dict[str, object], words: str) -> None:
    model = Model(4)
    with pytest.raises(ValueError, match=words):
        ebbtide.offload(model, **arguments)
    ebbtide.offload(model).detach()  # it is as it was


def test_no_schedule_is_none() -> None:
    with ebbtide.offload(Model(3)) as handle:
        assert handle.schedule is None


def test_no_layers_no_schedule() -> None:
    with pytest.raises(PolicyError):
        ebbtide.offload(nn.Linear(3, 3), schedule=schedule.default(1, 2))


def test_a_session_that_nobody_holds_goes_at_once() -> None:
    layers = blocks(3)
    gc.disable()
    try:
        loop = session(1, 3)
        run(loop, layers, torch.randn(64, 32)).backward()
        gone = weakref.ref(loop._engine.transfers)
        loop.close()
        del loop
        assert gone() is None
    finally:
        gc.enable()


def test_a_forward_that_skipped_layers_is_over_with_its_backward() -> None:
    """The next layer is the first of another forward, not the one that was skipped."""
    layers = blocks(4)
    with session(schedule="manual", model_layers=4) as loop:
        for count in (4, 3, 2, 4, 1, 3, 4):
            x = torch.randn(64, 32)
            run(None, layers[:count], x).backward()
            expected = gradients(layers)
            for number, layer in enumerate(layers[:count]):
                with loop.layer():
                    x = layer(x)
                x = loop.sync(x)
                if number == 0:
                    loop.start_offload(0)
                    loop.release(0)
            loop.start_reload(0)
            x.square().mean().backward()
            assert_same(gradients(layers), expected)
            assert loop.stats.num_offloaded > 0
