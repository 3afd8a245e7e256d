"""The vocabulary of a schedule: units, passes and actions, and how each is written as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import final

from ebbtide.errors import ScheduleError


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
