"""Schedules: text that round-trips, builders that can be run, and faults shown where they stand."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ebbtide import EbbtideError
from ebbtide.errors import ScheduleError
from ebbtide.schedule import (
    Action,
    Direction,
    Pass,
    Schedule,
    Unit,
    Verb,
    default,
    from_table,
    parse_action,
    parse_pass,
)
from schedule_orders import (
    BACKWARD,
    FORWARD,
    PIPELINE_ORDER,
    TABLE,
    by_hand,
    moves,
    orders,
    residents,
    tables,
)

UNITS = st.builds(Unit, st.integers(0, 10**20), st.integers(0, 3)) | st.builds(
    Unit, st.integers(0, 4), st.integers(0, 4)
)
PASSES = st.builds(Pass, st.sampled_from(Direction), UNITS)
ACTIONS = st.builds(Action, st.sampled_from(Verb), UNITS)
# k and N with k < N.
COUNTS = st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n)))


def marked(error: pytest.ExceptionInfo[ScheduleError]) -> str:
    """The one line that the message marks."""
    lines = [line for line in str(error.value).splitlines() if line.startswith("--> ")]
    assert len(lines) == 1, str(error.value)
    return lines[0].removeprefix("--> ")


# What is written can be read.


def test_a_schedule_reads_as_a_table() -> None:
    assert str(default(2, 4)).splitlines() == [
        "order: F0..F3 B3..B0",
        "F0: offload 0",
        "F1: offload 1",
        "F2: release 0",  # N-k+i = 4-2+0
        "F3: release 1",
        "B2: reload 1",  # N-k+i-1 = 4-2+1-1
        "B1: reload 0",
    ]


@settings(deadline=None, max_examples=40)
@given(st.lists(PASSES, min_size=1, max_size=30), st.lists(st.tuples(PASSES, ACTIONS), max_size=20))
def test_any_schedule_round_trips(order: list[Pass], actions: list[tuple[Pass, Action]]) -> None:
    """Those too that cannot be run, with passes that come twice and anchors that never come."""
    schedule = Schedule(order, actions)
    assert Schedule.parse(str(schedule)) == schedule
    assert hash(Schedule.parse(str(schedule))) == hash(schedule)


def test_a_number_longer_than_a_line_is_not_broken() -> None:
    schedule = Schedule([Pass(FORWARD, Unit(10**100)), Pass(BACKWARD, Unit(10**100))])
    assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("F0..F2", "F0 F1 F2"),
        ("B2..B0", "B2 B1 B0"),
        ("F3..F3.m2", "F3 F3.m1 F3.m2"),
        ("I1.m2..I1", "I1.m2 I1.m1 I1"),
        ("F0.m1..F2.m1", "F0.m1 F1.m1 F2.m1"),
        ("F0, W1,B2.m3", "F0 W1 B2.m3"),
        ("F5..F5", "F5"),
        ("F0..F1 F2", "F0 F1 F2"),
    ],
)
def test_ranges(text: str, passes: str) -> None:
    order = Schedule.parse(f"order: {text}").order
    assert [str(each) for each in order] == passes.split()


def test_comments_and_blank_lines_are_passed_over() -> None:
    text = """
        # a comment, with a colon: and F0 offload 0
        order: F0..F2     # forwards

        order: B2..B0     # and backwards
        B1: reload 0      # lines stand in any order,
        F0 : offload   0  # with any space
        F1: release 0, offload 1
        F2:release 1
        B1: reload 1      # an anchor's second line goes on with the first
    """
    schedule = Schedule.parse(text).check()
    assert str(schedule).splitlines() == [
        "order: F0..F2 B2..B0",
        "F0: offload 0",
        "F1: release 0, offload 1",
        "F2: release 1",
        "B1: reload 0, reload 1",
    ]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("F0 offload 0", "write an anchor, a colon and actions, such as F16: release 0"),
        ("F0: drop 0", "'drop 0' is not an action; write offload, release or reload and a layer"),
        ("F0: offload", "'offload' is not an action; write offload"),
        ("F0: offload -1", "'offload -1' is not an action; write offload"),
        ("F0: offload 1.5", "'offload 1.5' is not an action; write offload"),
        ("F0: offload True", "'offload True' is not an action; write offload"),
        ("F0: offload 0 release 1", "'offload 0 release 1' is not an action; write offload"),
        ("F0: offload 0,", "'' is not an action; write offload"),
        ("F0:", "'' is not an action; write offload"),
        ("G0: offload 0", "'G0' is not a pass; write F, B, I or W and a layer, such as F3"),
        ("F-1: offload 0", "'F-1' is not a pass; write F, B, I or W"),
        ("F0.m: offload 0", "'F0.m' is not a pass; write F, B, I or W"),
        ("f0: offload 0", "'f0' is not a pass; write F, B, I or W"),
        ("order: F0 F", "'F' is not a pass; write F, B, I or W"),
        ("order: F0..", "'' is not a pass; write F, B, I or W"),
        ("order: F0..B3", "'F0..B3' is not a range: both ends must have the same direction"),
        ("order: F0..F3.m3", "'F0..F3.m3' is not a range: .* such as F0..F19"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(line: str, why: str) -> None:
    text = f"# first\n\norder: F0 B0\n  {line}  # last"
    where = re.escape(f"line 4, {f'{line}  # last'!r}: ")
    with pytest.raises(ScheduleError, match=f"^{where}{why}"):
        Schedule.parse(text)


@pytest.mark.parametrize("text", ["", "# nothing", "F0: offload 0", "order:"])
def test_a_schedule_without_an_order_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError):
        Schedule.parse(text)


def test_an_empty_order_cannot_be_run() -> None:
    with pytest.raises(ScheduleError):
        Schedule([]).check()


@pytest.mark.parametrize("text", ["F3", "B0", "I7.m2", "W12.m34"])
def test_passes_round_trip(text: str) -> None:
    assert str(parse_pass(f" {text} ")) == text


@pytest.mark.parametrize("text", ["offload 0", "release 3.m2", "reload 19"])
def test_actions_round_trip(text: str) -> None:
    assert str(parse_action(f" {text} ")) == text


def test_a_schedule_error_is_a_value_error() -> None:
    assert issubclass(ScheduleError, ValueError)
    assert issubclass(ScheduleError, EbbtideError)


# The default for k of N layers.


def test_the_default_has_the_two_lines_of_the_design() -> None:
    schedule = default(4, 20)
    lines = str(schedule).splitlines()
    assert "F16: release 0" in lines  # N-k+i = 20-4+0
    assert "B17: reload 2" in lines  # N-k+i-1 = 20-4+2-1
    assert schedule.peak_resident == 20 - 4
    assert (schedule.num_layers, schedule.num_microbatches) == (20, 1)
    assert schedule.offloaded == {Unit(0), Unit(1), Unit(2), Unit(3)}


@settings(deadline=None, max_examples=40)
@given(COUNTS)
def test_the_default_keeps_all_but_k(counts: tuple[int, int]) -> None:
    k, n = counts
    schedule = default(k, n)
    assert Schedule.parse(str(schedule)) == schedule.check() == schedule
    assert schedule.peak_resident == n - k
    assert schedule.offloaded == {Unit(layer) for layer in range(k)}
    actions = {str(action): str(anchor) for anchor, action in moves(schedule)}
    for i in range(k):
        assert actions[f"offload {i}"] == f"F{i}"
        assert actions[f"release {i}"] == f"F{n - k + i}"
        assert actions[f"reload {i}"] == f"B{n - k + i - 1}"


@pytest.mark.parametrize("k", [-1, 4, 5, True, 1.0, "1", None])
def test_other_numbers_of_layers_are_refused(k: object) -> None:
    with pytest.raises(ScheduleError):
        default(k, 4)


# A table.


def test_a_table_of_eight_microbatches_on_the_first_of_four_stages() -> None:
    schedule = from_table(TABLE, 8, order=PIPELINE_ORDER)
    during = {
        "F0": {0},
        "F1": {0, 1},
        "F2": {0, 1, 2},
        "F3": {0, 1, 2, 3},
        "B0": {0, 3},  # 1 and 2 are out
        "F4": {1, 4},  # 0 is over, 3 out, 1 comes
        "B1": {1, 4},
        "F5": {2, 5},  # 1 is over, 4 out, 2 comes
        "B2": {2, 5},
        "F6": {3, 6},
        "B3": {3, 6},
        "F7": {4, 7},
        "B4": {4, 5, 7},  # 5 comes
        "B5": {5, 6, 7},
        "B6": {6, 7},
        "B7": {7},
    }
    units = [tuple(map(Unit, sorted(layers))) for layers in during.values()]
    assert [str(each) for each in schedule.order] == list(during)
    assert list(schedule.resident()) == units
    assert list(map(len, units)) == [1, 2, 3, 4, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 2, 1]
    assert schedule.peak_resident == 4
    assert str(schedule).splitlines()[1:] == [
        "F1: offload 1",
        "F2: offload 2",
        "F3: offload 3",
        "B0: release 1, release 2",
        "F4: release 3, offload 4, reload 1",
        "F5: release 4, offload 5, reload 2",
        "F6: release 5, offload 6, reload 3",
        "F7: release 6, reload 4",
        "B4: reload 5",
        "B5: reload 6",
    ]


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_random_tables_of_random_orders_can_be_run(data: st.DataObject) -> None:
    order = data.draw(orders())
    table = data.draw(tables(order))
    schedule = from_table(table, len(order) // 2, order=order)
    assert Schedule.parse(str(schedule)).check() == schedule
    assert schedule.offloaded == {Unit(layer) for layer in table}
    assert [set(there) for there in schedule.resident()] == residents(schedule)


@pytest.mark.parametrize(
    ("layer", "row"),
    [
        (1, (True, 2, False)),
        (1, (True, 2, False, 1, 1)),
        (1, ()),
        (1, 2),
        (1, None),
        (1, "TFTF"),
        (1, (2, True, 1, False)),
        (1, (1, 2, 0, 1)),
        (1, (True, True, False, 1)),
        (1, (True, 2, False, False)),
        (1, (True, -2, False, 1)),
        (1, (True, 2.0, False, 1)),
        (1, ("F", 2, "B", 1)),
        (-1, (True, 2, False, 1)),
        (True, (True, 2, False, 1)),
        ("1", (True, 2, False, 1)),
    ],
)
def test_other_rows_of_a_table_are_refused(layer: object, row: object) -> None:
    why = re.escape(f"the table's row {layer!r}: {row!r} is not of the form layer: (offload_fwd, ")
    with pytest.raises(ScheduleError, match=f"^{why}.* such as 1: "):
        from_table({layer: row}, 4)


def test_a_table_is_of_the_layers_that_the_order_has() -> None:
    with pytest.raises(ScheduleError):
        from_table(TABLE, 6, order=PIPELINE_ORDER)


@pytest.mark.parametrize("order", ["F0 F1 B1 B0", ["F0", "F1", "B1", "B0"]])
def test_an_order_is_text_or_passes(order: str | list[str]) -> None:
    assert from_table({}, 2, order=order) == default(0, 2)


@pytest.mark.parametrize("item", [None, 0, "F0..F1"])
def test_an_order_of_other_things_is_refused(item: object) -> None:
    with pytest.raises(ScheduleError):
        from_table({}, 1, order=["F0", item])


# What cannot be run is shown where it stands.


def test_an_error_shows_the_lines_around_it() -> None:
    """Of 1 + 3 * 4 lines those four before and after the one without its release: `F16` is gone."""
    lines = str(default(4, 20)).splitlines()
    lines.remove("F16: release 0")
    with pytest.raises(ScheduleError) as error:
        Schedule.parse("\n".join(lines)).check()
    assert str(error.value).splitlines() == [
        "the schedule cannot be run: reload 0: it was not released before, so there is nothing to "
        "reload",
        "    ...",
        "    F19: release 3",
        "    B18: reload 3",
        "    B17: reload 2",
        "    B16: reload 1",
        "--> B15: reload 0",
    ]


@dataclass
class Case:
    """An order and actions to be broken, in place, for one unit."""

    data: st.DataObject
    order: list[Pass]
    actions: list[tuple[Pass, Action]]
    unit: Unit

    def find(self, verb: Verb) -> int:
        """Where among the actions the unit's is."""
        return [action for _, action in self.actions].index(Action(verb, self.unit))

    def draw_anchor(self, begin: int, end: int | None = None) -> Pass:
        """One of the order's places from ``begin`` until before ``end``."""
        last = (len(self.order) if end is None else end) - 1
        assume(begin <= last)
        return self.order[self.data.draw(st.integers(begin, last))]


# Each breaks a case and returns the line to be marked: its anchor, or "order".


def drop_offload(case: Case) -> str:
    del case.actions[case.find(Verb.OFFLOAD)]
    return str(case.actions[case.find(Verb.RELEASE)][0])


def drop_release(case: Case) -> str:
    del case.actions[case.find(Verb.RELEASE)]
    return str(case.actions[case.find(Verb.RELOAD)][0])


def drop_reload(case: Case) -> str:
    del case.actions[case.find(Verb.RELOAD)]
    return str(case.actions[case.find(Verb.RELEASE)][0])


def drop_release_and_reload(case: Case) -> str:
    del case.actions[case.find(Verb.RELEASE)]
    del case.actions[case.find(Verb.RELOAD)]
    return str(case.actions[case.find(Verb.OFFLOAD)][0])


def reload_before_release(case: Case) -> str:
    _, reload = case.actions.pop(case.find(Verb.RELOAD))
    released = case.order.index(case.actions[case.find(Verb.RELEASE)][0])
    anchor = case.draw_anchor(0, released + 1)
    case.actions.append((anchor, reload))
    return str(anchor)


def reload_after_use(case: Case) -> str:
    _, reload = case.actions.pop(case.find(Verb.RELOAD))
    use = case.order.index(Pass(BACKWARD, case.unit))
    anchor = case.draw_anchor(use + 1)
    case.actions.append((anchor, reload))
    return str(anchor)


def release_after_use(case: Case) -> str:
    _, release = case.actions.pop(case.find(Verb.RELEASE))
    del case.actions[case.find(Verb.RELOAD)]
    use = case.order.index(Pass(BACKWARD, case.unit))
    anchor = case.draw_anchor(use)
    case.actions.append((anchor, release))
    return str(anchor)


def offload_after_use(case: Case) -> str:
    del case.actions[case.find(Verb.RELEASE)]
    del case.actions[case.find(Verb.RELOAD)]
    _, offload = case.actions.pop(case.find(Verb.OFFLOAD))
    anchor = case.draw_anchor(case.order.index(Pass(BACKWARD, case.unit)))
    case.actions.append((anchor, offload))
    return str(anchor)


def release_at_its_offload(case: Case) -> str:
    _, release = case.actions.pop(case.find(Verb.RELEASE))
    anchor, _ = case.actions[case.find(Verb.OFFLOAD)]
    case.actions.append((anchor, release))
    return str(anchor)


def offload_before_forward(case: Case) -> str:
    place = case.find(Verb.OFFLOAD)
    forward = case.order.index(Pass(FORWARD, case.unit))
    anchor = case.draw_anchor(0, forward)
    case.actions[place] = (anchor, case.actions[place][1])
    return str(anchor)


def unknown_layer(case: Case) -> str:
    verb = case.data.draw(st.sampled_from(Verb))
    place = case.find(verb)
    case.actions[place] = (
        case.actions[place][0],
        Action(verb, Unit(case.unit.layer, microbatch=7)),
    )
    return str(case.actions[place][0])


def anchor_that_never_comes(case: Case) -> str:
    place = case.find(case.data.draw(st.sampled_from(Verb)))
    never = Pass(case.data.draw(st.sampled_from(Direction)), Unit(99))
    case.actions[place] = (never, case.actions[place][1])
    return str(never)


def action_twice(case: Case) -> str:
    anchor, action = case.actions[case.find(case.data.draw(st.sampled_from(Verb)))]
    later = case.draw_anchor(case.order.index(anchor))
    case.actions.append((later, action))
    return str(later)


def pass_twice(case: Case) -> str:
    each = Pass(case.data.draw(st.sampled_from([FORWARD, BACKWARD])), case.unit)
    case.order.insert(case.data.draw(st.integers(0, len(case.order))), each)
    return "order"


def backward_that_never_comes(case: Case) -> str:
    """Shown where something hangs on it, else where the unit leaves and is never wanted again."""
    backward = Pass(BACKWARD, case.unit)
    case.order.remove(backward)
    hangs_on_it = any(anchor == backward for anchor, _ in case.actions)
    return str(backward if hangs_on_it else case.actions[case.find(Verb.OFFLOAD)][0])


def forward_that_never_comes(case: Case) -> str:
    case.order.remove(Pass(FORWARD, case.unit))
    return "order"


def forward_after_its_backward(case: Case) -> str:
    case.order.remove(Pass(FORWARD, case.unit))
    case.order.append(Pass(FORWARD, case.unit))
    return "order"


def backward_both_whole_and_split(case: Case) -> str:
    way = case.data.draw(st.sampled_from([Direction.BACKWARD_INPUT, Direction.BACKWARD_WEIGHT]))
    forward = case.order.index(Pass(FORWARD, case.unit))
    case.order.insert(
        case.data.draw(st.integers(forward + 1, len(case.order))), Pass(way, case.unit)
    )
    return "order"


CORRUPTIONS = [
    (drop_offload, "it was not offloaded before"),
    (drop_release, "it was not released before"),
    (drop_reload, "no reload follows, and B.* uses it; add a line such as B.*: reload"),
    (drop_release_and_reload, "no release follows, .* add a line such as .*: release"),
    (reload_before_release, "it was not released before|it is released at this very anchor"),
    (reload_after_use, "its backward has begun by then; reload it earlier"),
    (release_after_use, "its backward has begun by then"),
    (offload_after_use, "its backward has begun by then; offload it earlier"),
    (release_at_its_offload, "its offload begins at this very anchor"),
    (offload_before_forward, "there is nothing to offload; write it at F"),
    (unknown_layer, r"there is no such layer: F\d+\.m7 is not in the order"),
    (anchor_that_never_comes, r"[FBIW]99 never comes"),
    (action_twice, "a second time"),
    (pass_twice, "order: [FB].* comes twice|order: B.* comes with no forward"),
    (backward_that_never_comes, "never comes"),
    (forward_that_never_comes, r"order: B\d+ comes with no forward F\d+ before it"),
    (forward_after_its_backward, r"order: B\d+ comes with no forward F\d+ before it"),
    (backward_both_whole_and_split, "cannot be both|comes with no I"),
]


@pytest.mark.parametrize(
    ("corrupt", "why"), CORRUPTIONS, ids=lambda it: getattr(it, "__name__", "")
)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_a_corrupted_schedule_is_refused_where_it_is_wrong(
    corrupt: Callable[[Case], str], why: str, data: st.DataObject
) -> None:
    order = list(data.draw(orders()))
    table = data.draw(tables(order))
    assume(table)
    actions = moves(from_table(table, len(order) // 2, order=order))
    case = Case(data, order, actions, Unit(data.draw(st.sampled_from(sorted(table)))))
    where = corrupt(case)
    with pytest.raises(ScheduleError, match=f"^the schedule cannot be run: .*({why})") as error:
        Schedule(case.order, case.actions).check()
    line = marked(error)
    assert line.startswith(f"{where}: ")
    assert where == "order" or str(case.unit.layer) in line


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ("F0 B0 I0", "the backward of 0 is either whole (B0) or split (I0 and W0)"),
        ("F0 I0 B0", "the backward of 0 is either whole (B0) or split (I0 and W0)"),
        ("F0 I0 W0 B0", "the backward of 0 is either whole (B0) or split (I0 and W0)"),
        ("F0 W0 I0", "W0 comes with no I0, the backward for the input, before it"),
        ("I0 F0 W0", "I0 comes with no forward F0 before it"),
        ("F0 I0 I0", "I0 comes twice"),
        ("F1 F0 B0 B1.m1", "B1.m1 comes with no forward F1.m1 before it"),
    ],
)
def test_orders_that_cannot_be_run(order: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(f"order: {why}")) as error:
        by_hand(order)
    assert marked(error) == f"order: {order}"


def test_a_split_backward_uses_from_its_first_half_on_to_its_second() -> None:
    order = "F0 F1 I1 I0 W1 W0"
    lines = {"F0": "offload 0", "F1": "release 0"}
    schedule = by_hand(order, **lines, I0="reload 0")
    assert [len(there) for there in schedule.resident()] == [1, 1, 1, 2, 2, 1]
    with pytest.raises(ScheduleError) as error:
        by_hand(order, **lines, W1="reload 0")
    assert marked(error) == "W1: reload 0"
    with pytest.raises(ScheduleError) as error:
        by_hand(order, F0="offload 0", W1="release 0")
    assert marked(error) == "W1: release 0"


def test_what_has_no_backward_stays_to_the_end() -> None:
    schedule = by_hand("F0 F1 B1 F2 B2")
    assert [len(there) for there in schedule.resident()] == [1, 2, 2, 2, 2]
    with pytest.raises(ScheduleError) as error:
        by_hand("F0 F1 B1", F1="offload 0")
    assert marked(error) == "F1: offload 0"


def test_a_hint_of_check_can_be_followed() -> None:
    """What each message says to add, added, leads to a schedule that can be run."""
    lines = ["order: F0..F2 B2..B0", "F0: offload 0"]
    for _ in range(2):
        with pytest.raises(ScheduleError) as error:
            Schedule.parse("\n".join(lines)).check()
        hint = re.search(r"add a line such as ([FB]\d: \w+ \d)", str(error.value))
        assert hint is not None
        lines.append(hint[1])
    Schedule.parse("\n".join(lines)).check()
    assert lines[2:] == ["B1: release 0", "B0: reload 0"]


def test_the_last_layer_has_to_stay() -> None:
    with pytest.raises(ScheduleError):
        by_hand("F0 F1 B1 B0", F1="offload 1")
