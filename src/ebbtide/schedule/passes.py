"""What a schedule speaks of: layers, passes, actions, and how each is written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import final

from ebbtide.errors import ScheduleError


class Direction(Enum):
    """Which way a pass goes. A backward can be split in two, for its input and for the weights."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


@final
@dataclass(frozen=True, order=True)
class Unit:
    """What is scheduled: a layer, in one microbatch. Written ``3``, or ``3.m2``.

    Attributes:
        layer: number of the layer in forward order, from 0; in a pipeline, of the stage.
        microbatch: from 0.
    """

    layer: int
    microbatch: int = 0

    def __str__(self) -> str:
        return f"{self.layer}.m{self.microbatch}" if self.microbatch else str(self.layer)


@final
@dataclass(frozen=True)
class Pass:
    """The forward or the backward of a unit. Written ``F3``, ``B3`` or ``F3.m2``."""

    direction: Direction
    unit: Unit

    def __str__(self) -> str:
        return f"{self.direction.value}{self.unit}"

    @property
    def is_forward(self) -> bool:
        """Whether it computes what its backward will want."""
        return self.direction is Direction.FORWARD


class Verb(Enum):
    """What can be done with what a unit saved."""

    OFFLOAD = "offload"
    RELEASE = "release"
    RELOAD = "reload"


@final
@dataclass(frozen=True)
class Action:
    """One thing to do at an anchor. Written ``release 0``."""

    verb: Verb
    unit: Unit

    def __str__(self) -> str:
        return f"{self.verb.value} {self.unit}"


_UNIT = r"(\d+)(?:\.m(\d+))?"
_PASS = re.compile(rf"([FBIW]){_UNIT}")
_ACTION = re.compile(rf"(offload|release|reload)\s+{_UNIT}")


def parse_pass(text: str) -> Pass:
    """Read ``F3`` or ``B3.m2``.

    Raises:
        ScheduleError: it cannot be read.
    """
    match = _PASS.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(
            f"{text.strip()!r} is no pass; write F, B, I or W and a layer, such as F3, or F3.m2 "
            f"for microbatch 2"
        )
    return Pass(Direction(match[1]), Unit(int(match[2]), int(match[3] or 0)))


def parse_action(text: str) -> Action:
    """Read ``release 0`` or ``reload 3.m2``.

    Raises:
        ScheduleError: it cannot be read.
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(
            f"{text.strip()!r} is no action; write offload, release or reload and a layer, such "
            f"as release 0"
        )
    return Action(Verb(match[1]), Unit(int(match[2]), int(match[3] or 0)))


def parse_order(text: str) -> tuple[Pass, ...]:
    """Read passes in order, such as ``F0..F3 B3..B0``.

    Raises:
        ScheduleError: a pass cannot be read, or a range has no end in sight.
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
    """Passes, given as text or one by one."""
    if isinstance(order, str):
        return parse_order(order)
    return tuple(item if isinstance(item, Pass) else parse_pass(str(item)) for item in order)


def format_order(order: Sequence[Pass]) -> str:
    """Write passes, runs of three and more as ranges: the reverse of `parse_order`."""
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
    """One past the last pass of the range that begins at ``begin``."""
    if begin + 1 >= len(order):
        return begin + 1
    step = _step(order[begin], order[begin + 1])
    end = begin + 1
    while step is not None and end < len(order) and _step(order[end - 1], order[end]) == step:
        end += 1
    return end


def _step(before: Pass, after: Pass) -> tuple[int, int] | None:
    """How a unit follows another in a range: one layer or one microbatch further; None if not."""
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
            f"{word!r} is no range: both ends must go the same way and differ in the layer or in "
            f"the microbatch, such as F0..F19"
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
