"""Check that a schedule can be run; an error shows the schedule with the faulty line marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from ebbtide.errors import ScheduleError
from ebbtide.schedule.passes import Action, Direction, Pass, Unit, Verb, parse_order

_AROUND = 4  # number of lines that an error shows before and after the marked one

Lines = Sequence[tuple[Pass, Sequence[Action]]]
# Index of an anchor in the order, and index of an action among those of its anchor.
_Place = tuple[int, int]


def check(order: Sequence[Pass], lines: Lines, written: Sequence[str]) -> None:
    """Raise unless the actions can be run at their anchors in this order of passes.

    Args:
        order: the passes in order.
        lines: anchors with their actions.
        written: the schedule as text, for the message: the lines of the order, then one line for
            each anchor.

    Raises:
        ScheduleError: the schedule cannot be run; the message marks the faulty line.
    """
    if not order:
        raise ScheduleError("the order has no passes; write one such as order: F0..F19 B19..B0")
    fault = _fault_in_order(order)
    if fault is not None:
        number = _line_of_order(written, fault[0])
        raise ScheduleError(_marked(written, number, f"order: {fault[1]}"))
    places = {each: place for place, each in enumerate(order)}
    done: dict[Unit, dict[Verb, _Place]] = {}

    def fail(number: int, why: str) -> NoReturn:
        raise ScheduleError(_marked(written, len(written) - len(lines) + number, why))

    # Look for unknown anchors first. An action at an anchor that never comes would otherwise be
    # reported as missing from the place where it is needed.
    for number, (anchor, _) in enumerate(lines):
        if anchor not in places:
            fail(number, f"{anchor} never comes: it is not in the order of the passes")
    for number, (anchor, actions) in enumerate(lines):
        for turn, action in enumerate(actions):
            earlier = done.setdefault(action.unit, {})
            why = _why_not(action, (places[anchor], turn), earlier, places)
            if why is not None:
                fail(number, f"{action}: {why}")
            earlier[action.verb] = (places[anchor], turn)
    for unit, verbs in done.items():
        why = _what_lacks(unit, verbs, order, places)
        if why is not None:
            anchor = order[max(verbs.values())[0]]
            fail([line[0] for line in lines].index(anchor), why)


def _fault_in_order(order: Sequence[Pass]) -> tuple[int, str] | None:
    """Return the index of the first pass that cannot come there and why, or None if all can."""
    seen: set[Pass] = set()
    for place, each in enumerate(order):
        unit = each.unit
        had = {way for way in Direction if Pass(way, unit) in seen}
        split = had & {Direction.BACKWARD_INPUT, Direction.BACKWARD_WEIGHT}
        if each in seen:
            return place, f"{each} comes twice"
        if had and (split if each.direction is Direction.BACKWARD else Direction.BACKWARD in had):
            return place, (
                f"the backward of {unit} is either whole (B{unit}) or split (I{unit} and "
                f"W{unit}); it cannot be both"
            )
        if not each.is_forward and Direction.FORWARD not in had:
            return place, f"{each} comes with no forward F{unit} before it"
        if each.direction is Direction.BACKWARD_WEIGHT and not split:
            return place, f"{each} comes with no I{unit}, the backward for the input, before it"
        seen.add(each)
    return None


def _line_of_order(written: Sequence[str], place: int) -> int:
    """Return the number of the text line that contains the pass at index ``place``."""
    for number, line in enumerate(written):
        place -= len(parse_order(line.removeprefix("order:")))
        if place < 0:
            return number
    raise AssertionError("the order's lines hold fewer passes than the order")


def first_use(unit: Unit, places: dict[Pass, int]) -> int | None:
    """Return the index of the pass in which a unit's backward begins; None if there is none."""
    found = [
        places[each]
        for way in Direction
        if way is not Direction.FORWARD and (each := Pass(way, unit)) in places
    ]
    return min(found, default=None)


def _why_not(
    action: Action, here: _Place, earlier: dict[Verb, _Place], places: dict[Pass, int]
) -> str | None:
    """Return why an action is not allowed at its anchor, given the unit's earlier actions.

    None means that it is allowed.
    """
    unit = action.unit
    forward = places.get(Pass(Direction.FORWARD, unit))
    if forward is None:
        return f"there is no such layer: F{unit} is not in the order"
    use = first_use(unit, places)
    if use is None:
        return f"its backward never comes: there is no B{unit} in the order, so keep it"
    if action.verb in earlier:
        return f"this comes a second time; a unit can have only one {action.verb.value}"
    if action.verb is Verb.OFFLOAD:
        if here[0] < forward:
            return f"before its forward F{unit} there is nothing to offload; write it at F{unit}"
        late = here[0] >= use
        return "its backward has begun by then; offload it earlier" if late else None
    if action.verb is Verb.RELEASE:
        return _why_not_release(here, earlier, use)
    if Verb.RELEASE not in earlier:
        return "it was not released before, so there is nothing to reload"
    if here[0] == earlier[Verb.RELEASE][0]:
        return "it is released at this very anchor; reload it at a later one, or do not offload it"
    return "its backward has begun by then; reload it earlier" if here[0] > use else None


def _why_not_release(here: _Place, earlier: dict[Verb, _Place], use: int) -> str | None:
    if Verb.OFFLOAD not in earlier:
        return "it was not offloaded before, so its bytes would be lost"
    if here[0] == earlier[Verb.OFFLOAD][0]:
        return "its offload begins at this very anchor; release it at a later one"
    return "its backward has begun by then" if here[0] >= use else None


def _what_lacks(
    unit: Unit, verbs: dict[Verb, _Place], order: Sequence[Pass], places: dict[Pass, int]
) -> str | None:
    """Return which action is missing after a unit's last one; None if none is."""
    use = first_use(unit, places)
    assert use is not None
    if Verb.RELEASE not in verbs:
        why = f"offload {unit}: no release follows, so the copy would save no memory; "
        if use - verbs[Verb.OFFLOAD][0] < 2:
            return f"{why}no pass is left before {order[use]} to release it at, so keep it"
        return f"{why}add a line such as {order[use - 1]}: release {unit}"
    if Verb.RELOAD not in verbs:
        return (
            f"release {unit}: no reload follows, and {order[use]} uses it; add a line such as "
            f"{order[use]}: reload {unit}, or reload it at an earlier anchor"
        )
    return None


def _marked(written: Sequence[str], number: int, why: str) -> str:
    begin, end = max(0, number - _AROUND), min(len(written), number + _AROUND + 1)
    lines = [f"the schedule cannot be run: {why}"]
    if begin:
        lines.append("    ...")
    for place in range(begin, end):
        marker = "--> " if place == number else "    "
        lines.append(f"{marker}{written[place]}")
    if end < len(written):
        lines.append("    ...")
    return "\n".join(lines)
