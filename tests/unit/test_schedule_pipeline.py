"""From a pipeline's order to a schedule, with the orders that torch itself makes.

Numbers of passes and units in these tests are places in the order of one rank.
"""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import ScheduleError
from ebbtide.schedule import Pass, Schedule, Unit, Verb, from_pipeline, parse_pass
from schedule_orders import (
    LOOPED,
    SINGLE,
    V_SHAPED,
    least_resident,
    lives,
    moves,
    orders,
    passes_of,
    peak_without_offload,
    residents,
    torch_order,
    torch_schedule,
)

EVERY_CLASS = (*SINGLE, *LOOPED, *V_SHAPED)


STAGES, MICROBATCHES = range(2, 17), range(1, 65)


@st.composite
def shapes(draw: st.DrawFn, name: str) -> tuple[int, int, int]:
    """Ranks, stages on each and microbatches, of which torch has an order of this class."""
    if name in SINGLE:
        ranks, local_stages = draw(st.sampled_from(STAGES)), 1
    elif name in V_SHAPED:
        ranks, local_stages = draw(st.integers(1, STAGES[-1] // 2)), 2
    else:
        local_stages = draw(st.integers(1, 8))
        ranks = draw(st.integers(2 if local_stages == 1 else 1, STAGES[-1] // local_stages))
    allowed = MICROBATCHES
    if name in ("Schedule1F1B", "ScheduleDualPipeV"):
        allowed = range(ranks * local_stages, MICROBATCHES[-1] + 1)
    elif name in LOOPED[1:]:
        allowed = [n for n in MICROBATCHES if n % max(1, n // ranks) == 0]
    return ranks, local_stages, draw(st.sampled_from(allowed))


def compute_of(name: str, row: list[object]) -> tuple[Pass, ...]:
    """The compute in a row as the rank runs it.

    torch writes the last rank of 1F1B as F1 B0 F2 B1 ... and runs F0 B0 F1 B1 ...
    """
    passes = passes_of(row)
    shift = name == "Schedule1F1B" and passes[0].unit.microbatch == 1
    return tuple(
        Pass(each.direction, Unit(each.unit.layer, each.unit.microbatch - 1))
        if shift and each.is_forward
        else each
        for each in passes
    )


def check_offload(schedule: Schedule, order: tuple[Pass, ...], resident: int, lead: int) -> None:
    """All that is promised of a schedule for this order."""
    assert schedule.order == order
    assert Schedule.parse(str(schedule)).check() == schedule
    there = residents(schedule)
    assert [set(units) for units in schedule.resident()] == there
    assert schedule.peak_resident == max(map(len, there)) <= resident

    spans = lives(order)
    places = {each: place for place, each in enumerate(order)}
    did: dict[Unit, dict[Verb, int]] = {}
    for anchor, action in moves(schedule):
        assert action.verb not in did.setdefault(action.unit, {}), "once a round"
        did[action.unit][action.verb] = places[anchor]
    assert did.keys() == schedule.offloaded <= spans.keys()
    for unit, verbs in did.items():
        forward, use, _ = spans[unit]
        out, back = verbs[Verb.RELEASE], verbs[Verb.RELOAD]
        assert verbs[Verb.OFFLOAD] == forward < out < back <= use
        assert len(there[out]) == resident, "it is out only when its room is needed"
        assert back >= use - lead, "it takes no room before it has to"
        if back > max(use - lead, out + 1):
            before = there[back - 1]
            assert len(before) == resident, "it is late only where there is no room"
            came = {other for other in before & did.keys() if did[other][Verb.RELOAD] < back}
            assert all(spans[other][1] < use for other in came), "who is wanted first comes first"
    by_forward = sorted(did, key=lambda unit: spans[unit][0])
    outs = [did[unit][Verb.RELEASE] for unit in by_forward]
    assert outs == sorted(outs), "copies end in the order in which they begin"


@pytest.mark.parametrize("name", EVERY_CLASS)
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_any_order_of_torch_within_any_number_of_residents(name: str, data: st.DataObject) -> None:
    shape = data.draw(shapes(name))
    rows = torch_order(name, *shape)
    rank = data.draw(st.sampled_from(sorted(rows)))
    order = compute_of(name, rows[rank])
    stage = data.draw(st.sampled_from(sorted({each.unit.layer for each in order})))
    resident = data.draw(st.integers(least_resident(order), peak_without_offload(order)))
    lead = data.draw(st.integers(0, 5))
    schedule = from_pipeline(rows, stage, resident=resident, lead=lead)
    check_offload(schedule, order, resident, lead)
    assert schedule == from_pipeline(rows[rank], resident=resident, lead=lead)


@pytest.mark.parametrize("name", EVERY_CLASS)
@settings(deadline=None, max_examples=6)
@given(data=st.data())
def test_too_few_residents_are_refused_with_the_number_that_does(
    name: str, data: st.DataObject
) -> None:
    rows = torch_order(name, *data.draw(shapes(name)))
    rank = data.draw(st.sampled_from(sorted(rows)))
    least = least_resident(compute_of(name, rows[rank]))
    from_pipeline(rows[rank], resident=least)
    if least > 1:
        for resident in {1, least - 1}:
            with pytest.raises(ScheduleError, match=rf"={resident} is .* resident={least} or more"):
                from_pipeline(rows[rank], resident=resident)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_random_orders(data: st.DataObject) -> None:
    """Some units without a backward among them: these stay to the end."""
    order = data.draw(orders())
    order = tuple(each for each in order if each.is_forward or data.draw(st.integers(0, 9)))
    resident = data.draw(st.integers(least_resident(order), peak_without_offload(order)))
    lead = data.draw(st.integers(0, 5))
    check_offload(from_pipeline(order, resident=resident, lead=lead), order, resident, lead)
    if least_resident(order) > 1:
        with pytest.raises(ScheduleError, match=f"give resident={least_resident(order)} or more"):
            from_pipeline(order, resident=least_resident(order) - 1)


# Every rank of the smallest and of the largest pipeline.


@pytest.mark.parametrize("name", EVERY_CLASS)
@pytest.mark.parametrize("stages", [2, 16])
@pytest.mark.parametrize("microbatches", [1, pytest.param(64, marks=pytest.mark.slow)])
def test_each_rank_of_the_corners(name: str, stages: int, microbatches: int) -> None:
    local_stages = 1 if name in SINGLE else 2
    if name in ("Schedule1F1B", "ScheduleDualPipeV"):
        microbatches = max(microbatches, stages)  # fewer are not to be had
    rows = torch_order(name, stages // local_stages, local_stages, microbatches)
    for row in rows.values():
        order = compute_of(name, row)
        assert len(lives(order)) == local_stages * microbatches
        least = least_resident(order)
        for resident in {least, min(least + 1, peak_without_offload(order))}:
            check_offload(from_pipeline(row, resident=resident), order, resident, lead=1)


def test_the_last_rank_of_1f1b_is_read_as_it_runs() -> None:
    """Not with its forwards counted from 1, as torch writes them: https://github.com/pytorch/pytorch/pull/155935."""
    as_written = "3F1 3B0 3F2 3B1 3F3 3B2"
    as_run = Schedule(map(parse_pass, ["F3", "B3", "F3.m1", "B3.m1", "F3.m2", "B3.m2"]))
    assert from_pipeline(as_written, resident=1) == as_run
    assert from_pipeline(torch_order("Schedule1F1B", 4, 1, 6)[3], resident=1) == from_pipeline(
        " ".join(f"3F{number} 3B{number}" for number in range(6)), resident=1
    )


# How a row may be given.


@pytest.mark.parametrize("name", EVERY_CLASS)
def test_a_row_is_read_from_actions_or_text_with_communication_or_without(name: str) -> None:
    ranks, local_stages = (4, 1) if name in SINGLE else (2, 2)
    made = torch_schedule(name, ranks, local_stages, 8)
    with_comms = getattr(made, "pipeline_order_with_comms", made.pipeline_order)
    for rank, row in made.pipeline_order.items():
        order = compute_of(name, row)
        cells = io.StringIO()
        csv.writer(cells).writerow(row)  # as torch's `_dump_csv` does
        ways = [
            row,
            iter(row),
            with_comms[rank],
            [str(action) for action in with_comms[rank]],
            next(csv.reader([cells.getvalue()])),
            cells.getvalue(),
            " ".join(str(action) for action in row if action is not None),
            order,
            [str(each) for each in order],
        ]
        assert {from_pipeline(way, resident=99) for way in ways} == {Schedule(order)}


def test_the_row_that_has_the_stage_is_taken() -> None:
    rows = {0: ["0F0", "2F0", "2B0", "0B0"], 1: ["1F0", None, "1B0"]}
    assert from_pipeline(rows, 2, resident=2) == from_pipeline(rows, 0, resident=2)
    assert from_pipeline(rows, 2, resident=2) == from_pipeline(rows[0], resident=2)
    assert from_pipeline(rows, 1, resident=1) == from_pipeline(rows[1], 1, resident=1)
    assert str(from_pipeline(rows, 1, resident=1)) == "order: F1 B1"


@pytest.mark.parametrize(
    ("order", "stage", "why"),
    [
        ({0: ["0F0", "0B0"], 1: ["1F0", "1B0"]}, None, "the order has 2 ranks; say which stage"),
        ({0: ["0F0", "0B0"], 1: ["1F0", "1B0"]}, 2, "no rank of the order has stage 2"),
        ("0F0 0B0", 2, "no rank of the order has stage 2"),
        ("", None, "the order has no forward and no backward"),
        ([None, "", "0SEND_F0"], None, "the order has no forward and no backward"),
        ("0F0 0X0", None, "'0X0' is not a pipeline action; .* such as 2F5, 2B5, 2I5 or 2W5"),
        ("0F 0B", None, "'0F' is not a pipeline action"),
        ("0F-1", None, "'0F-1' is not a pipeline action"),
        ("(0F0;1X0)OVERLAP_F_B", None, "'1X0' is not a pipeline action"),
        ([True], None, "'True' is not a pipeline action"),
        ([["0F0", "0B0"], ["1F0", "1B0"]], None, "is not a pipeline action"),
    ],
)
def test_other_orders_are_refused(order: object, stage: int | None, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        from_pipeline(order, stage, resident=1)


@pytest.mark.parametrize("row", ["0F0 0B0 0F0", "0B0 0F0", "0F0 0W0 0I0", "0F0 0B0 0W0"])
def test_an_order_that_cannot_be_run_is_shown(row: str) -> None:
    with pytest.raises(ScheduleError):
        from_pipeline(row, resident=1)


@pytest.mark.parametrize("resident", [0, -1, True, 1.0, "1", None])
def test_residents_are_a_whole_number(resident: object) -> None:
    with pytest.raises(ScheduleError):
        from_pipeline("0F0 0B0", resident=resident)


@pytest.mark.parametrize("lead", [-1, True, 1.0, "1", None])
def test_lead_is_a_whole_number(lead: object) -> None:
    with pytest.raises(ScheduleError):
        from_pipeline("0F0 0B0", resident=1, lead=lead)


# Worked by hand: looped breadth first, stages 0 and 1 on one rank, two microbatches. Between
# forward and backward 0.m0 idles for 6 passes, 0.m1 for 4, 1.m0 for 2 and 1.m1 not at all.

BREADTH_FIRST = "0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0"


def test_the_longest_idle_leaves_first() -> None:
    """Four are there during 1F1 and 1B1. With room for three, 0.m0 leaves, for its turn is last."""
    schedule = from_pipeline(BREADTH_FIRST, resident=3)
    assert str(schedule).splitlines() == [
        "order: F0 F0.m1 F1 F1.m1 B1.m1 B1 B0.m1 B0",
        "F0: offload 0",
        "F1.m1: release 0",  # the fourth comes; the copy had F0.m1 and F1 to hide behind
        "B0.m1: reload 0",  # lead=1 pass before B0
    ]
    # Without offload: 1 2 3 4 4 3 2 1. 0.m0 is away from F1.m1 until B0.m1.
    assert list(map(len, schedule.resident())) == [1, 2, 3, 4 - 1, 4 - 1, 3 - 1, 2, 1]


def test_then_the_second_longest_leaves() -> None:
    """With room for two, 0.m0 and 0.m1 leave; each copy has one pass to hide behind, each way."""
    schedule = from_pipeline(BREADTH_FIRST, resident=2)
    assert str(schedule).splitlines()[1:] == [
        "F0: offload 0",
        "F0.m1: offload 0.m1",
        "F1: release 0",  # copied during F0.m1
        "F1.m1: release 0.m1",  # copied during F1
        "B1: reload 0.m1",  # back during B1, for B0.m1
        "B0.m1: reload 0",
    ]
    assert list(map(len, schedule.resident())) == [1, 2, 3 - 1, 4 - 2, 4 - 2, 3 - 1, 2, 1]


def test_with_room_for_one_no_copy_hides() -> None:
    """Each is out as soon as its forward is over, and comes when its backward is about to start."""
    schedule = from_pipeline(BREADTH_FIRST, resident=1, lead=3)
    assert str(schedule).splitlines()[1:] == [
        "F0: offload 0",
        "F0.m1: release 0, offload 0.m1",
        "F1: release 0.m1, offload 1",
        "F1.m1: release 1",
        "B1: reload 1",
        "B0.m1: reload 0.m1",
        "B0: reload 0",
    ]
    assert list(map(len, schedule.resident())) == [1] * 8


def test_what_waits_for_the_second_half_of_its_backward_is_there() -> None:
    """During I0.m1 both are: W0 is still to come. So one resident is too few, and two suffice."""
    row = "0F0 0F1 0I0 0I1 0W0 0W1"
    with pytest.raises(ScheduleError):
        from_pipeline(row, resident=1)
    assert not from_pipeline(row, resident=2).lines


def test_what_has_no_backward_counts_to_the_end() -> None:
    """0.m0 never leaves; beside it each of the others is there in turn."""
    row = "0F0 0F1 0F2 0B1 0B2"
    with pytest.raises(ScheduleError):
        from_pipeline(row, resident=1)
    schedule = from_pipeline(row, resident=2)
    assert schedule.offloaded == {Unit(0, 1), Unit(0, 2)}
    assert list(map(len, schedule.resident())) == [1, 2, 2, 2, 2]
