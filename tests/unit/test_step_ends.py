"""When a step ends: also in loops that have a graph at any moment."""

import functools
import gc
import itertools
import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide import ActivationPolicy, Schedule, StepStats, WeightPolicy
from ebbtide.schedule import default

pytestmark = pytest.mark.usefixtures("frozen_imports")

NUM_LAYERS = 3
EVERYTHING = ActivationPolicy(min_bytes=1)
WAYS: dict[str, dict[str, Any]] = {
    "offload": {"activations": EVERYTHING},
    "keep": {"activations": ActivationPolicy(min_bytes=1, num_layers=0, rebuild=False)},
    "recompute": {"activations": ActivationPolicy(mode="recompute")},
    "weights": {"activations": EVERYTHING, "weights": WeightPolicy()},
    "trace": {"activations": EVERYTHING, "trace": True},
    "schedule": {"activations": EVERYTHING, "schedule": default(2, NUM_LAYERS)},
}


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 16), nn.GELU())


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))


def _inputs() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(8, 16, generator=generator)


def _gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _overlapping(model: nn.Module, num_ahead: int = 1, *, holds: bool = False) -> Iterator[Tensor]:
    """A loop that begins each forward before the backward of the one before."""
    inputs = _inputs()
    held = model(next(inputs)) if holds else None
    waiting = [model(next(inputs)).sum() for _ in range(num_ahead)]
    while True:
        waiting.append(model(next(inputs)).sum())
        model.zero_grad()
        waiting.pop(0).backward()
        yield _gradients(model)
    del held


@functools.cache
def _plainly(num_ahead: int, *, holds: bool) -> list[Tensor]:
    """What 120 steps of such a loop give without ebbtide."""
    return list(itertools.islice(_overlapping(_model(), num_ahead, holds=holds), 120))


def _counts(stats: StepStats) -> dict[str, int]:
    """What a step counts, without what depends on how far copies have come."""
    names = "saved_bytes", "unique_bytes", "parameter_bytes", "kept_bytes", "offloaded_bytes"
    names += "rebuilt_bytes", "recomputed_bytes", "num_saved", "num_offloaded"
    return {name: getattr(stats, name) for name in names}


def _second_step(way: dict[str, Any]) -> StepStats:
    model = _model()
    inputs = _inputs()
    with ebbtide.offload(model, **way) as handle:
        for _ in range(2):  # the first one verifies what is recomputed
            model(next(inputs)).sum().backward()
    return handle.stats


@pytest.mark.parametrize(
    ("way", "num_ahead", "holds"),
    [*((way, 1, False) for way in WAYS), ("offload", 3, False), ("weights", 0, True)],
)
def test_a_loop_that_always_has_a_graph_has_steps(way: str, num_ahead: int, holds: bool) -> None:
    model = _model()
    handle = ebbtide.offload(model, **WAYS[way])
    run = _overlapping(model, num_ahead, holds=holds)
    early, late = list[Counter[str]](), list[Counter[str]]()
    for number, expected in enumerate(_plainly(num_ahead, holds=holds)):
        assert torch.equal(next(run), expected)
        found = early if number in (60, 61, 62) else late
        if found is early or number in (117, 118, 119):  # each has copies under way
            _ = handle.stats
            gc.collect()
            found.append(Counter(type(each).__name__ for each in gc.get_objects()))
    grown = functools.reduce(operator.and_, late) - functools.reduce(operator.or_, early)
    assert sum(grown.values()) < 60, grown
    assert _counts(handle.stats) == _counts(_second_step(WAYS[way]))


def test_a_step_of_such_a_loop_is_traced_from_forward_to_backward() -> None:
    model = _model()
    handle = ebbtide.offload(model, **WAYS["trace"])
    run = _overlapping(model)
    for _ in range(70):
        next(run)
    passes = [(event.what, event.layer) for event in handle.trace.events if event.lane == "compute"]
    passes = [each for each in passes if each[0] in ("forward", "backward")]
    expected = [("forward", layer) for layer in range(NUM_LAYERS)]
    assert passes == expected + [("backward", layer) for layer in reversed(range(NUM_LAYERS))]
    assert all(event.begin_s >= 0 for event in handle.trace.events)


def test_what_overlaps_is_inspected_with_its_own_step() -> None:
    model = _model()
    with ebbtide.offload(model, activations=EVERYTHING) as handle:
        run = _overlapping(model)
        for _ in range(70):
            next(run)
        report = handle.inspect()
    alone = _model()
    with ebbtide.offload(alone, activations=EVERYTHING) as handle:
        alone(next(_inputs())).sum().backward()
        expected = handle.inspect()
    assert [each.size_bytes for each in report.storages] == [
        each.size_bytes for each in expected.storages
    ]
    assert report.in_flight.forwards == 0 and report.in_flight.saved_tensors > 0


ORDER = """order: F0..F2 F0.m1..F2.m1 B2..B0 F0.m2..F2.m2 B2.m1..B0.m1 F0.m3..F2.m3
order: B2.m2..B0.m2 B2.m3..B0.m3"""  # F F B F B F B B


@pytest.mark.parametrize(
    ("order", "schedule"),
    [
        *((order, None) for order in ("FFBFBFBB", "FFFBFBFBBB", "FFFFBBBB")),
        ("FFBFBFBB", default(2, NUM_LAYERS)),
        ("FFBFBFBB", Schedule.parse(ORDER)),
    ],
)
def test_a_pipelines_run_is_one_step(order: str, schedule: Schedule | None) -> None:
    """Its graphs overlap, but there is a moment without graphs after each run."""
    model = _model()
    with ebbtide.offload(model, activations=EVERYTHING, schedule=schedule) as handle:
        for _ in range(3):
            inputs, waiting = _inputs(), list[Tensor]()
            for each in order:
                if each == "F":
                    waiting.append(model(next(inputs)).sum())
                else:
                    waiting.pop(0).backward()
            expected = order.count("F") * _second_step(WAYS["offload"]).num_saved
            assert handle.stats.num_saved == expected


def test_after_such_a_loop_a_pipeline_has_one_step_for_each_run() -> None:
    model = _model()
    with ebbtide.offload(model, activations=EVERYTHING) as handle:
        run = _overlapping(model)
        for _ in range(70):
            next(run)
        del run
        inputs = _inputs()
        first, second = model(next(inputs)).sum(), model(next(inputs)).sum()
        first.backward()
        third = model(next(inputs)).sum()
        second.backward()
        third.backward()
    assert handle.stats.num_saved == 3 * _second_step(WAYS["offload"]).num_saved


def test_what_an_old_graph_holds_is_known_in_all_later_steps() -> None:
    model, inputs = _model(), _inputs()
    with ebbtide.offload(model, activations=EVERYTHING) as handle:
        held = model(next(inputs)).sum()
        held.backward(retain_graph=True)
        num_held = handle.inspect().in_flight.records
        assert num_held > 0
        for _ in range(4):
            model(next(inputs)).sum().backward()
            assert handle.inspect().in_flight.records == num_held
        del held
        assert handle.inspect().in_flight.records == 0


def test_each_step_has_statistics_of_its_own_and_no_step_too() -> None:
    """Callbacks tell by that whether a step has been counted."""
    model = nn.Sequential(nn.Linear(64, 64))
    with ebbtide.offload(model, activations=EVERYTHING) as handle:
        seen = [handle.stats, handle.stats]
        model(torch.randn(8, 64)).sum().backward()
        seen += [handle.stats, handle.stats]
    assert seen[0] is seen[1] is not seen[2] is seen[3]
