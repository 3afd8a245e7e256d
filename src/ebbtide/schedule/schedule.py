"""A schedule: passes in order, and what moves just before each."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

from ebbtide.errors import ScheduleError
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


@final
@dataclass(frozen=True, init=False)
class Schedule:
    """What moves when, as data and as text: one line an anchor.

    An anchor is the moment just before a pass starts::

        order: F0..F19 B19..B0
        F0: offload 0          # what layer 0 saves leaves as it is saved
        F16: release 0         # before layer 16's forward: layer 0's copy is done, its memory goes
        B15: reload 0          # before layer 15's backward: layer 0 starts to come back

    ``Schedule.parse(str(schedule)) == schedule``. Making a schedule checks nothing; `check` does,
    and so do all who run one.

    Args:
        order: the passes of a round, in order. Further forwards begin further rounds.
        actions: what to do at which anchor. Those of one anchor are done in their order here.

    Attributes:
        order: as given.
        lines: each anchor that has any with its actions, anchors in the order of their passes.
    """

    order: tuple[Pass, ...]
    lines: tuple[tuple[Pass, tuple[Action, ...]], ...]

    def __init__(self, order: Iterable[Pass], actions: Iterable[tuple[Pass, Action]] = ()) -> None:
        passes = tuple(order)
        places = {each: place for place, each in reversed(list(enumerate(passes)))}
        by_anchor: dict[Pass, list[Action]] = defaultdict(list)
        for anchor, action in actions:
            by_anchor[anchor].append(action)
        # Anchors that never come are last, for `check` to show.
        anchors = sorted(by_anchor, key=lambda anchor: places.get(anchor, len(passes)))
        object.__setattr__(self, "order", passes)
        lines = tuple((anchor, tuple(by_anchor[anchor])) for anchor in anchors)
        object.__setattr__(self, "lines", lines)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read what `str` wrote, or somebody by hand; ``#`` begins a comment.

        Raises:
            ScheduleError: a line cannot be read, or no line tells the order of the passes.
        """
        order: list[Pass] = []
        actions: list[tuple[Pass, Action]] = []
        for number, line in enumerate(text.splitlines(), 1):
            content = line.partition("#")[0].strip()
            if not content:
                continue
            head, colon, rest = content.partition(":")
            try:
                if not colon:
                    raise ScheduleError("a line is an anchor, a colon, and what to do there")
                if head.strip() == "order":
                    order += parse_order(rest)
                else:
                    anchor = parse_pass(head)
                    actions += [(anchor, parse_action(word)) for word in rest.split(",")]
            except ScheduleError as error:
                raise ScheduleError(f"line {number}, {line.strip()!r}: {error}") from None
        if not order:
            raise ScheduleError(
                "no line tells in which order the passes come; begin with one such as "
                "order: F0..F19 B19..B0"
            )
        return cls(order, actions)

    def __str__(self) -> str:
        return "\n".join(self._written())

    def _written(self) -> list[str]:
        width = _WIDTH - len("order: ")
        words = textwrap.wrap(format_order(self.order), width, break_long_words=False)
        anchors = [f"{anchor}: {', '.join(map(str, actions))}" for anchor, actions in self.lines]
        return [*(f"order: {line}" for line in words), *anchors]

    @property
    def actions(self) -> Mapping[Pass, tuple[Action, ...]]:
        """What to do at each anchor."""
        return dict(self.lines)

    @property
    def offloaded(self) -> frozenset[Unit]:
        """The units that leave."""
        return frozenset(
            action.unit
            for _, actions in self.lines
            for action in actions
            if action.verb is Verb.OFFLOAD
        )

    @property
    def num_layers(self) -> int:
        """Layers that are numbered in the order: one more than the last."""
        return max((each.unit.layer for each in self.order), default=-1) + 1

    @property
    def num_microbatches(self) -> int:
        """Microbatches in a round."""
        return max((each.unit.microbatch for each in self.order), default=-1) + 1

    def check(self) -> Schedule:
        """Raise unless the schedule can be run. Returns itself.

        Raises:
            ScheduleError: an anchor, a layer or a pass that never comes; a release without an
                offload before it, a reload before its release or after its use, a use with no
                reload before it. The message shows the schedule with the line marked.
        """
        check(self.order, self.lines, self._written())
        return self

    def resident(self) -> tuple[tuple[Unit, ...], ...]:
        """The units whose saved tensors are on the device during each pass of the order.

        A unit is there from its forward on until it is released, and from its reload on until
        its (last) backward is over: to the end if that never comes. The pass at whose anchor it is
        released or reloaded belongs to what follows.

        Returns:
            As many entries as `order` has passes, units in ascending order.
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
        """The most units whose saved tensors are on the device at once."""
        return max(map(len, self.resident()), default=0)
