"""Orders for the tests of schedules: drawn at random, and taken from torch's own pipelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st

from ebbtide.schedule import Action, Direction, Pass, Schedule, Unit, Verb
from ebbtide.schedule.builders import TableRow

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


PIPELINE_ORDER = "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
"""Eight microbatches on one model, of which four are in flight."""

TABLE: dict[int, TableRow] = {
    1: (False, 0, True, 4),
    2: (False, 0, True, 5),
    3: (True, 4, True, 6),
    4: (True, 5, True, 7),
    5: (True, 6, False, 4),
    6: (True, 7, False, 5),
}
"""What leaves in that order, and when."""


@st.composite
def orders(draw: st.DrawFn, max_layers: int = 12) -> tuple[Pass, ...]:
    """Any order in which each layer has a forward and, later, a backward."""
    layers = range(draw(st.integers(1, max_layers)))
    turns = draw(st.permutations([*layers, *layers]))
    return tuple(
        Pass(BACKWARD if layer in turns[:place] else FORWARD, Unit(layer))
        for place, layer in enumerate(turns)
    )


def tables(order: Sequence[Pass]) -> st.SearchStrategy[dict[int, TableRow]]:
    """Tables that can be run along this order: out after its forward, back by its backward."""

    @st.composite
    def row(draw: st.DrawFn, forward: int, use: int) -> TableRow:
        out = draw(st.integers(forward + 1, use - 1))
        back = draw(st.integers(out + 1, use))
        return (*said(order[out]), *said(order[back]))

    places = {each: place for place, each in enumerate(order)}
    rows = {}
    for unit in {each.unit for each in order}:
        forward, use = places[Pass(FORWARD, unit)], places[Pass(BACKWARD, unit)]
        if use - forward >= 2:  # one pass in between at least, during which it can be away
            rows[unit.layer] = row(forward, use)
    return st.fixed_dictionaries({}, optional=rows)


def said(anchor: Pass) -> tuple[bool, int]:
    """How a table says an anchor."""
    return anchor.is_forward, anchor.unit.layer


def moves(schedule: Schedule) -> list[tuple[Pass, Action]]:
    """Each action with its anchor."""
    return [(anchor, action) for anchor, actions in schedule.lines for action in actions]


def lives(order: Sequence[Pass]) -> dict[Unit, tuple[int, int, int]]:
    """For each unit, where its forward is, where its backward begins and where it ends.

    What has no backward is in use from its forward to the end of the order.
    """
    places: dict[Unit, list[int]] = {}
    for place, each in enumerate(order):
        places.setdefault(each.unit, []).append(place)
    return {
        unit: (own[0], own[1], own[-1]) if len(own) > 1 else (own[0], own[0], len(order) - 1)
        for unit, own in places.items()
    }


def residents(schedule: Schedule) -> list[set[Unit]]:
    """Who is there during each pass, said otherwise than `Schedule.resident` does it.

    A unit is there from its forward to the end of its backward, but not from its release on to
    just before its reload.
    """
    places = {each: place for place, each in enumerate(schedule.order)}
    when = {(action.verb, action.unit): places[anchor] for anchor, action in moves(schedule)}
    there: list[set[Unit]] = [set() for _ in schedule.order]
    for unit, (forward, _, end) in lives(schedule.order).items():
        away = range(when.get((Verb.RELEASE, unit), 0), when.get((Verb.RELOAD, unit), 0))
        for place in range(forward, end + 1):
            if place not in away:
                there[place].add(unit)
    return there


def peak_without_offload(order: Sequence[Pass]) -> int:
    """The most units at once if each stays from its forward to the end of its backward."""
    spans = lives(order).values()
    return max(
        sum(forward <= place <= end for forward, _, end in spans) for place in range(len(order))
    )


def least_resident(order: Sequence[Pass]) -> int:
    """The most units at once if each is away whenever it can: between forward and backward."""
    spans = lives(order).values()
    return max(
        sum(place == forward or use <= place <= end for forward, use, end in spans)
        for place in range(len(order))
    )


SINGLE = ("ScheduleGPipe", "Schedule1F1B")  # one stage on each rank
LOOPED = ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")  # two stages on each rank


def by_hand(order: str, **lines: str) -> Schedule:
    """The schedule of lines as one writes them; the name of an argument is the anchor."""
    text = [f"order: {order}", *(f"{anchor}: {words}" for anchor, words in lines.items())]
    return Schedule.parse("\n".join(text)).check()


@cache
def torch_schedule(name: str, ranks: int, local_stages: int, microbatches: int) -> Any:
    """One of torch's pipeline schedules, made without a process group.

    Raises:
        ValueError: torch has no such order, such as 1F1B of more stages than microbatches.
    """
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(schedules, name):
        pytest.skip(f"this torch has no {name}")
    num_stages = ranks * local_stages
    stages = [
        SimpleNamespace(
            stage_index=number * ranks,
            num_stages=num_stages,
            group_size=ranks,
            group_rank=0,
            is_first=number == 0,
            is_last=number * ranks == num_stages - 1,
            submod=None,
        )
        for number in range(local_stages)
    ]
    made = getattr(schedules, name)(
        stages[0] if name in SINGLE else stages, microbatches, loss_fn=lambda *_: None
    )
    if not getattr(made, "pipeline_order", None):
        pytest.skip(f"the {name} of this torch does not tell its order")
    return made


def torch_order(
    name: str, ranks: int, local_stages: int, microbatches: int
) -> Mapping[int, list[Any]]:
    """Its ``pipeline_order``: from ranks to rows of actions and None."""
    return torch_schedule(name, ranks, local_stages, microbatches).pipeline_order


def passes_of(row: Sequence[Any]) -> tuple[Pass, ...]:
    """The compute in a row, by what the actions are, not by how they are written."""
    passes = []
    for action in row:
        if action is None:
            continue
        for each in action.sub_actions or (action,):
            kind = each.computation_type.value
            if kind in ("F", "B", "I", "W"):
                passes.append(Pass(Direction(kind), Unit(each.stage_index, each.microbatch_index)))
    return tuple(passes)
