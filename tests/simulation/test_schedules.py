"""Schedules are followed: releases and reloads where they say, peaks from arithmetic."""

import os
import warnings

import pytest
import torch

import ebbtide
from ebbtide import Trace, schedule
from ebbtide.devices import SimulatedDevice
from ebbtide.schedule import Schedule, Verb
from ebbtide.stores import PinnedStore
from loops import BACKWARD_S, FORWARD_S, SIZE_BYTES, Work, on_device, run_layers, run_microbatches
from schedule_orders import PIPELINE_ORDER, TABLE
from schedule_programs import Tally, check_schedule

FAST = 2 * SIZE_BYTES / FORWARD_S  # bytes/s: a copy takes half a layer's forward
SLOW = FAST / 20
POLICY = ebbtide.ActivationPolicy(min_bytes=SIZE_BYTES, rebuild=False)

SEEDS = int(os.environ.get("EBBTIDE_SIMULATION_SEEDS", "100"))


def timely(bandwidth_bytes_per_s: float) -> SimulatedDevice:
    return SimulatedDevice(0, 0.0, bandwidth_bytes_per_s, timely=True)


def simulated(device: SimulatedDevice, **arguments: object) -> ebbtide.OffloadSession:
    with on_device(device, lambda: PinnedStore(device, slab_bytes=SIZE_BYTES)):
        return ebbtide.OffloadSession(activations=POLICY, trace=True, **arguments)


def begins(plan: Schedule) -> dict[str, float]:
    """When each pass begins, if none of them ever waits."""
    now_s, when_s = 0.0, {}
    for each in plan.order:
        when_s[str(each)] = now_s
        now_s += FORWARD_S if each.is_forward else BACKWARD_S
    return when_s


def assert_followed(trace: Trace, plan: Schedule, when_s: dict[str, float]) -> None:
    """Releases and reloads happened at their anchors and nowhere else, if nothing waited."""
    happened = {
        (event.what, event.layer): event.begin_s
        for event in trace.events
        if event.what in ("release", "reload")
    }
    due = {
        (action.verb.value, action.unit.layer): when_s[str(anchor)]
        for anchor, actions in plan.lines
        for action in actions
        if action.verb is not Verb.OFFLOAD
    }
    origin_s = min(event.begin_s for event in trace.events if event.what == "forward")
    assert happened.keys() == due.keys()
    for key, at_s in due.items():
        if key[0] == "release":
            assert happened[key] - origin_s == pytest.approx(at_s, abs=1e-9), key
        else:  # the copy begins when the link has done the one before it
            assert at_s - 1e-9 <= happened[key] - origin_s <= at_s + FORWARD_S, key


@pytest.mark.parametrize(("num_layers", "model_layers"), [(4, 20), (1, 2), (19, 20), (16, 20)])
def test_k_of_n_layers(num_layers: int, model_layers: int) -> None:
    device = timely(FAST)
    session = simulated(device, num_layers=num_layers, model_layers=model_layers)
    expected = run_layers(None, None, model_layers)
    for _ in range(3):
        assert torch.equal(run_layers(session, device, model_layers), expected)
    # N - k layers stay; layer N-k+i begins when layer i is out, so that is the peak.
    assert session.stats.peak_device_bytes == (model_layers - num_layers) * SIZE_BYTES
    assert session.stats.offloaded_bytes == num_layers * SIZE_BYTES
    assert session.stats.reloaded_bytes == num_layers * SIZE_BYTES


def test_four_of_twenty_move_where_the_schedule_says() -> None:
    device = timely(FAST)
    session = simulated(device, num_layers=4, model_layers=20)
    run_layers(session, device, 20)
    assert_followed(session.trace, session.schedule, begins(session.schedule))
    assert session.stats.stall_s == 0
    assert session.stats.late_reloads == 0
    assert session.trace.duration_s == pytest.approx(20 * (FORWARD_S + BACKWARD_S))


def test_eight_microbatches_move_where_the_table_says() -> None:
    device = timely(FAST)
    plan = schedule.from_table(TABLE, 8, order=PIPELINE_ORDER)
    session = simulated(device, schedule=plan)
    expected = run_microbatches(None, None, PIPELINE_ORDER)
    for _ in range(3):
        assert torch.equal(run_microbatches(session, device, PIPELINE_ORDER), expected)
    assert_followed(session.trace, plan, begins(plan))
    # F0 to F3 are all there when F3 has run. Before B0 two of them leave, and from there on there
    # are never more than three: the one that runs, one on its way out, one on its way back.
    assert session.stats.peak_device_bytes == 4 * SIZE_BYTES == plan.peak_resident * SIZE_BYTES
    assert session.stats.offloaded_bytes == len(TABLE) * SIZE_BYTES
    assert session.stats.stall_s == 0


def test_a_slow_link_makes_a_step_later_and_changes_nothing_else() -> None:
    device = timely(SLOW)
    plan = schedule.from_table(TABLE, 8, order=PIPELINE_ORDER)
    session = simulated(device, schedule=plan)
    expected = run_microbatches(None, None, PIPELINE_ORDER)
    assert torch.equal(run_microbatches(session, device, PIPELINE_ORDER), expected)
    # The schedule holds compute back until a copy is done, however long that takes.
    assert session.stats.peak_device_bytes == 4 * SIZE_BYTES
    assert session.stats.stall_s > 0
    work_s = 8 * (FORWARD_S + BACKWARD_S)
    assert session.trace.duration_s == pytest.approx(work_s + session.stats.stall_s)


def test_both_cases_on_the_cpu() -> None:
    with ebbtide.OffloadSession(4, 20, activations=POLICY, trace=True, device="cpu") as session:
        expected = run_layers(None, None, 20)
        for _ in range(2):
            assert torch.equal(run_layers(session, None, 20), expected)
        assert_order(session.trace, session.schedule)
        assert session.stats.peak_device_bytes == 16 * SIZE_BYTES
    plan = schedule.from_table(TABLE, 8, order=PIPELINE_ORDER)
    with ebbtide.OffloadSession(
        schedule=plan, activations=POLICY, trace=True, device="cpu"
    ) as session:
        expected = run_microbatches(None, None, PIPELINE_ORDER)
        for _ in range(2):
            assert torch.equal(run_microbatches(session, None, PIPELINE_ORDER), expected)
        assert_order(session.trace, plan)
        assert session.stats.peak_device_bytes == 4 * SIZE_BYTES


def assert_order(trace: Trace, plan: Schedule) -> None:
    """Every release and reload began after the pass before its anchor and before the one there."""
    ends = {event.label: event.end_s for event in trace.events if event.what in PASSES}
    began = {event.label: event.begin_s for event in trace.events if event.what in PASSES}
    order = [str(each) for each in plan.order]
    seen = 0
    for event in trace.events:
        if event.what not in ("release", "reload"):
            continue
        anchor = next(
            str(anchor)
            for anchor, actions in plan.lines
            for action in actions
            if str(action) == f"{event.what} {event.layer}"
        )
        place = order.index(anchor)
        if event.what == "release":  # it is queued with compute, between the two passes
            assert event.begin_s <= ends[anchor]
            assert event.begin_s >= began[order[place - 1]]
        else:  # its copy begins then, or later
            assert event.begin_s >= began[order[place - 1]]
        seen += 1
    assert seen == 2 * len(plan.offloaded)


PASSES = ("forward", "backward")


def test_several_forwards_of_the_default_schedule_in_flight() -> None:
    """Each forward is a round of its own, whatever the order of the backwards."""
    device = timely(FAST)
    session = simulated(device, num_layers=2, model_layers=4)
    inputs = [torch.randn(SIZE_BYTES // 4, requires_grad=True) for _ in range(3)]
    outputs = []
    for x in inputs:
        h = x * 1.0
        for _ in range(4):
            with session.layer():
                h = Work.apply(h, device)
            h = session.sync(h)
        outputs.append(h)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in (1, 0, 2):
            outputs[number].sum().backward()
    del outputs, h
    for x in inputs:
        plain = x.detach().clone().requires_grad_()
        h = plain * 1.0
        for _ in range(4):
            h = h.sin()
        h.sum().backward()
        assert torch.equal(x.grad, plain.grad)
    # In each of them two layers stay at the end of forward.
    assert session.stats.peak_device_bytes == 3 * 2 * SIZE_BYTES
    assert session.stats.offloaded_bytes == 3 * 2 * SIZE_BYTES


@pytest.mark.parametrize("first", range(0, SEEDS, 100))
def test_random_schedules(first: int) -> None:
    tally = Tally()
    for seed in range(first, first + 100):
        check_schedule(seed, tally)
    tally.check(100)
