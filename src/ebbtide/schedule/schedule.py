"""The vocabulary of a schedule: units, passes and actions, and how each is written as text."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn, final

from ebbtide.errors import ScheduleError
from ebbtide.units import text_block


class Direction(Enum):
    """Direction of a pass.

    A backward can be split into two passes, one for the gradient of the input and one for the
    gradients of the weights.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


@final
@dataclass(frozen=True, order=True)
class Unit:
    """One layer in one microbatch: what a schedule moves. Written ``3``, or ``3.m2``.

    Attributes:
        layer: number of the layer in forward order, from 0; in a pipeline, number of the stage.
        microbatch: number of the microbatch, from 0.
    """

    layer: int
    microbatch: int = 0

    def __str__(self) -> str:
        return f"{self.layer}.m{self.microbatch}" if self.microbatch else str(self.layer)


@final
@dataclass(frozen=True)
class Pass:
    """The forward or backward of a unit. Written ``F3``, ``B3`` or ``F3.m2``."""

    direction: Direction
    unit: Unit

    def __str__(self) -> str:
        return f"{self.direction.value}{self.unit}"

    @property
    def is_forward(self) -> bool:
        """Whether this is a forward pass, which saves tensors for its backward."""
        return self.direction is Direction.FORWARD


class Verb(Enum):
    """What an action does with the tensors that a unit saved."""

    OFFLOAD = "offload"
    RELEASE = "release"
    RELOAD = "reload"


@final
@dataclass(frozen=True)
class Action:
    """One action on one unit at an anchor. Written ``release 0``."""

    verb: Verb
    unit: Unit

    def __str__(self) -> str:
        return f"{self.verb.value} {self.unit}"


_UNIT = r"(\d+)(?:\.m(\d+))?"
_PASS = re.compile(rf"([FBIW]){_UNIT}")
_ACTION = re.compile(rf"(offload|release|reload)\s+{_UNIT}")


def parse_pass(text: str) -> Pass:
    """Parse a pass such as ``F3`` or ``B3.m2``.

    Raises:
        ScheduleError: the text is not a pass.
    """
    match = _PASS.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(
            f"{text.strip()!r} is not a pass; write F, B, I or W and a layer, such as F3, or F3.m2 "
            f"for microbatch 2"
        )
    return Pass(Direction(match[1]), Unit(int(match[2]), int(match[3] or 0)))


def parse_action(text: str) -> Action:
    """Parse an action such as ``release 0`` or ``reload 3.m2``.

    Raises:
        ScheduleError: the text is not an action.
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(
            f"{text.strip()!r} is not an action; write offload, release or reload and a layer, "
            f"such as release 0"
        )
    return Action(Verb(match[1]), Unit(int(match[2]), int(match[3] or 0)))


def parse_order(text: str) -> tuple[Pass, ...]:
    """Parse passes in order, such as ``F0..F3 B3..B0``.

    Raises:
        ScheduleError: a pass cannot be read, or the two ends of a range do not fit together.
    """
    order: list[Pass] = []
    for word in text.replace(",", " ").split():
        first, dots, last = word.partition("..")
        if dots:
            order += _spread(parse_pass(first), parse_pass(last), word)
        else:
            order.append(parse_pass(first))
    return tuple(order)


def read_order(order: str | Iterable[str | Pass]) -> tuple[Pass, ...]:
    """Return the passes of an order that is given as text or as a sequence of passes."""
    if isinstance(order, str):
        return parse_order(order)
    return tuple(item if isinstance(item, Pass) else parse_pass(str(item)) for item in order)


def format_order(order: Sequence[Pass]) -> str:
    """Write passes as text, runs of three and more as ranges. The inverse of `parse_order`."""
    words: list[str] = []
    place = 0
    while place < len(order):
        end = _run_end(order, place)
        if end - place >= 3:
            words.append(f"{order[place]}..{order[end - 1]}")
            place = end
        else:
            words.append(str(order[place]))
            place += 1
    return " ".join(words)


def _run_end(order: Sequence[Pass], begin: int) -> int:
    """Return the index after the last pass of the range that begins at ``begin``."""
    if begin + 1 >= len(order):
        return begin + 1
    step = _step(order[begin], order[begin + 1])
    end = begin + 1
    while step is not None and end < len(order) and _step(order[end - 1], order[end]) == step:
        end += 1
    return end


def _step(before: Pass, after: Pass) -> tuple[int, int] | None:
    """Return the step in (layer, microbatch) between two neighbours of a range.

    None if the two cannot be neighbours: they differ in direction, or not by exactly one layer or
    one microbatch.
    """
    if before.direction is not after.direction:
        return None
    step = (
        after.unit.layer - before.unit.layer,
        after.unit.microbatch - before.unit.microbatch,
    )
    return step if step in {(0, 1), (0, -1), (1, 0), (-1, 0)} else None


def _spread(first: Pass, last: Pass, word: str) -> list[Pass]:
    layers = last.unit.layer - first.unit.layer
    microbatches = last.unit.microbatch - first.unit.microbatch
    if first.direction is not last.direction or (layers and microbatches):
        raise ScheduleError(
            f"{word!r} is not a range: both ends must have the same direction and differ in the "
            f"layer or in the microbatch, such as F0..F19"
        )
    count = abs(layers) + abs(microbatches)
    return [
        Pass(
            first.direction,
            Unit(
                first.unit.layer + (layers // count * number if layers else 0),
                first.unit.microbatch + (microbatches // count * number if microbatches else 0),
            ),
        )
        for number in range(count + 1)
    ]


# ---- Check that a schedule can be run; an error shows the schedule with the faulty line marked

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


# ---- The `Schedule` class: passes in order, and the actions that come just before each pass ----

_WIDTH = 78


@final
@dataclass(frozen=True, init=False)
class Schedule:
    """What moves when, as data and as text with one line per anchor.

    An anchor is the moment just before a pass starts::

        order: F0..F19 B19..B0
        F0: offload 0          # copy layer 0's tensors to the host as autograd saves them
        F16: release 0         # before F16: wait for layer 0's copy, drop its device memory
        B15: reload 0          # before B15: start to copy layer 0's tensors back

    ``Schedule.parse(str(schedule)) == schedule``. The constructor checks nothing; `check` does, and
    so does everything that runs a schedule.

    Args:
        order: the passes in order. When they are through, the next forward begins the order again.
        actions: anchors with what to do there. The actions of one anchor are done in the order in
            which they are given.

    Attributes:
        order: the passes in order.
        lines: anchors with their actions, in the order of their passes; anchors without actions are
            left out.
    """

    order: tuple[Pass, ...]
    lines: tuple[tuple[Pass, tuple[Action, ...]], ...]

    def __init__(self, order: Iterable[Pass], actions: Iterable[tuple[Pass, Action]] = ()) -> None:
        passes = tuple(order)
        places = {each: place for place, each in reversed(list(enumerate(passes)))}
        by_anchor: dict[Pass, list[Action]] = defaultdict(list)
        for anchor, action in actions:
            by_anchor[anchor].append(action)
        # Anchors that are not in the order are kept, at the end, so that `check` can report them.
        anchors = sorted(by_anchor, key=lambda anchor: places.get(anchor, len(passes)))
        object.__setattr__(self, "order", passes)
        lines = tuple((anchor, tuple(by_anchor[anchor])) for anchor in anchors)
        object.__setattr__(self, "lines", lines)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse a schedule's text, written by `str` or by hand; ``#`` begins a comment.

        Raises:
            ScheduleError: a line cannot be read, or no line gives the order of the passes.
        """
        if not isinstance(text, str):
            raise ScheduleError(f"a schedule is parsed from text, got {type(text).__name__}")
        order: list[Pass] = []
        actions: list[tuple[Pass, Action]] = []
        for number, line in enumerate(text.splitlines(), 1):
            content = line.partition("#")[0].strip()
            if not content:
                continue
            head, colon, rest = content.partition(":")
            try:
                if not colon:
                    raise ScheduleError(
                        "write an anchor, a colon and actions, such as F16: release 0"
                    )
                if head.strip() == "order":
                    order += parse_order(rest)
                else:
                    anchor = parse_pass(head)
                    actions += [(anchor, parse_action(word)) for word in rest.split(",")]
            except ScheduleError as error:
                raise ScheduleError(f"line {number}, {line.strip()!r}: {error}") from None
        if not order:
            raise ScheduleError(
                "no line gives the order of the passes; begin with one such as "
                "order: F0..F19 B19..B0"
            )
        return cls(order, actions)

    def _repr_html_(self) -> str:
        return text_block(str(self))

    def __str__(self) -> str:
        return "\n".join(self._written())

    def _written(self) -> list[str]:
        width = _WIDTH - len("order: ")
        words = textwrap.wrap(format_order(self.order), width, break_long_words=False)
        anchors = [f"{anchor}: {', '.join(map(str, actions))}" for anchor, actions in self.lines]
        return [*(f"order: {line}" for line in words), *anchors]

    @property
    def actions(self) -> Mapping[Pass, tuple[Action, ...]]:
        """The actions at each anchor."""
        return dict(self.lines)

    @property
    def offloaded(self) -> frozenset[Unit]:
        """The units that are offloaded."""
        return frozenset(
            action.unit
            for _, actions in self.lines
            for action in actions
            if action.verb is Verb.OFFLOAD
        )

    @property
    def num_layers(self) -> int:
        """Number of layers, which is one more than the highest layer number in the order."""
        return max((each.unit.layer for each in self.order), default=-1) + 1

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches, which is one more than the highest number in the order."""
        return max((each.unit.microbatch for each in self.order), default=-1) + 1

    def check(self) -> Schedule:
        """Raise unless the schedule can be run.

        Returns:
            The schedule itself.

        Raises:
            ScheduleError: an anchor, a layer or a pass never comes; a release has no offload before
                it; a reload comes before its release or after its use; or a released unit is used
                without a reload. The message shows the schedule with the faulty line marked.
        """
        check(self.order, self.lines, self._written())
        return self

    def resident(self) -> tuple[tuple[Unit, ...], ...]:
        """Return the units whose saved tensors are on the device during each pass of the order.

        A unit is on the device from its forward until its release, and from its reload until the
        end of its (last) backward, or of the order if it has no backward. An action at the anchor
        of a pass takes effect before that pass.

        Returns:
            One entry for each pass of `order`, its units in ascending order.
        """
        last = {each.unit: place for place, each in enumerate(self.order)}
        actions = self.actions
        there: set[Unit] = set()
        during = []
        for place, each in enumerate(self.order):
            for action in actions.get(each, ()):
                if action.verb is Verb.RELEASE:
                    there.discard(action.unit)
                elif action.verb is Verb.RELOAD:
                    there.add(action.unit)
            if each.is_forward:
                there.add(each.unit)
            during.append(tuple(sorted(there)))
            if last[each.unit] == place and not each.is_forward:
                there.discard(each.unit)
        return tuple(during)

    @property
    def peak_resident(self) -> int:
        """Largest number of units whose saved tensors are on the device at once."""
        return max(map(len, self.resident()), default=0)
