"""The `Schedule` class: passes in order, and the actions that come just before each pass."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

from ebbtide.errors import ScheduleError
from ebbtide.interface.display import count
from ebbtide.interface.notebook import card, facts, folded, note, table
from ebbtide.schedule.check import check
from ebbtide.schedule.passes import (
    Action,
    Pass,
    Unit,
    Verb,
    format_order,
    parse_action,
    parse_order,
    parse_pass,
)

_WIDTH = 78
_MOST_ROWS = 24  # that a notebook shows before a click unfolds the rest


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
        rows = [(str(anchor), ", ".join(map(str, actions))) for anchor, actions in self.lines]
        begin, rest = rows[:_MOST_ROWS], rows[_MOST_ROWS:]
        heads = ("just before", "do")
        return card(
            "Schedule",
            facts(
                {
                    "order": format_order(self.order),
                    "offloaded": count(len(self.offloaded), "layer"),
                    "peak": f"{count(self.peak_resident, 'layer')} on the device",
                }
            ),
            table(heads, begin, numbers=()) if rows else note("Nothing moves."),
            folded(f"{len(rest)} more", table(heads, rest, numbers=())) if rest else "",
        )

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
