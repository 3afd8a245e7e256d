"""Follows a schedule: what the passes of a step do, anchor by anchor.

A round is one pass through the order of a schedule, from its first forward on. A schedule of one
microbatch is followed once for every forward; such rounds can overlap, and then each is at a place
of its own. A schedule of several microbatches is one round for all of them.

A step that does something else than its schedule is not wrong: from there on its round is offloaded
in the default way, as copies end and as backward asks.
"""

from __future__ import annotations

import warnings
from typing import final

from ebbtide.errors import ScheduleError
from ebbtide.runtime.forward import ForwardLog
from ebbtide.runtime.offloads import Offloads
from ebbtide.runtime.records import RecordState
from ebbtide.runtime.reloads import Reloads
from ebbtide.runtime.units import Following, Round, UnitRecords
from ebbtide.schedule import Action, Direction, Pass, Unit, Verb, first_use


@final
class Rounds:
    """The rounds of a session. It calls with the lock held.

    Args:
        following: what to follow, and how.
        offloads: the way down.
        reloads: the way up.
    """

    def __init__(self, following: Following, offloads: Offloads, reloads: Reloads) -> None:
        schedule = following.schedule.check()
        self.schedule = schedule
        self.manual = following.manual
        self._any_order = following.any_order
        self._offloads = offloads
        self._reloads = reloads
        self._actions = schedule.actions
        self._places = {each: place for place, each in enumerate(schedule.order)}
        self._forwards = [each for each in schedule.order if each.is_forward]
        self._leaving = schedule.offloaded
        self._at_once = {
            action.unit
            for anchor, actions in schedule.lines
            for action in actions
            if action.verb is Verb.OFFLOAD and anchor == Pass(Direction.FORWARD, action.unit)
        }
        self._begun_rounds = 0  # of the step
        self._warned = False
        self.current: Round | None = None

    # ---- rounds -------------------------------------------------------------------------------

    def is_open(self) -> bool:
        """Whether forwards of the current round are still to come."""
        return self.current is not None and bool(self.current.to_come)

    def is_given_up(self, live: int) -> bool:
        """Whether all graphs of the current round are gone before it is over.

        Args:
            live: saved tensors that a graph holds.
        """
        current = self.current
        if live or current is None or not current.to_come:
            return False
        return current.waits_for_backward()

    def abandon(self) -> None:
        """The current round will not go on: a forward was interrupted. The next begins another."""
        if self.current is not None:
            self._depart(self.current)
            self.current.to_come.clear()

    def end_microbatch(self, number: int) -> None:
        """All that a forward of the model had to call has been called."""
        current = self.current
        if current is None:
            return
        missing = [each for each in current.to_come if each.unit.microbatch == number]
        if missing:
            self._warn(f"the forward ended without {missing[0]}")
            self.abandon()

    def finish_step(self) -> None:
        """No graph is alive: the next round is the first of a step."""
        self._begun_rounds = 0
        self.current = None

    def next_unit(self) -> Unit:
        """The unit whose forward is next in the order."""
        to_come = self.current.to_come if self.current is not None else None
        return next(iter(to_come or self._forwards)).unit

    def next_microbatch(self) -> int:
        """The first microbatch of which no forward has begun in the current round."""
        if self.current is None or not self.current.to_come:
            return self._forwards[0].unit.microbatch
        begun = {each.unit.microbatch for each in self.current.begun if each.is_forward}
        waiting = [each.unit.microbatch for each in self._forwards]
        return next((number for number in waiting if number not in begun), waiting[0])

    def _begin_round(self) -> Round:
        self.current = Round(self._begun_rounds, self._forwards)
        self._begun_rounds += 1
        return self.current

    # ---- passes -------------------------------------------------------------------------------

    def begin_forward(self, unit: Unit) -> UnitRecords:
        """The forward of a unit begins: in the current round, or as the first of another."""
        current = self.current
        each = Pass(Direction.FORWARD, unit)
        if current is None or not current.to_come or each in current.begun:
            if current is not None and current.to_come:
                if not self.manual:
                    self._warn(f"{each} came where {next(iter(current.to_come))} was due")
                self._depart(current)
            current = self._begin_round()
        self._begin(current, each)
        leaves = self.manual or unit in self._leaving
        at_once = unit in self._at_once and not self.manual
        use = first_use(unit, self._places)
        if use is None:
            use = len(self.schedule.order)
        records = UnitRecords(unit, use, current, leaves=leaves, at_once=at_once)
        current.units[unit] = records
        return records

    def begin_backward(self, records: UnitRecords, direction: Direction) -> None:
        """The backward of a unit begins."""
        self._begin(records.round, Pass(direction, records.unit))

    def log(self, records: UnitRecords) -> ForwardLog:
        """The log of the microbatch that a unit belongs to."""
        current, number = records.round, records.unit.microbatch
        if number not in current.logs:
            shown = number if self.schedule.num_microbatches > 1 else current.number
            current.logs[number] = ForwardLog(None, shown)
            current.logs[number].prefetches = current.departed
        return current.logs[number]

    def _begin(self, current: Round, each: Pass) -> None:
        if each in current.begun:
            return  # a second backward through a retained graph
        place = self._places.get(each)
        strict = not (current.departed or self.manual or self._any_order)
        if strict and not self._is_due(current, place):
            due = self.schedule.order[current.place : current.place + 1]
            instead = f"where {due[0]} was due" if due else "after the last pass"
            self._warn(f"{each} came {instead}")
            self._depart(current)
        current.begun.add(each)
        current.to_come.pop(each, None)
        if current.departed or place is None:
            return
        if self.manual:
            return
        begin = place if self._any_order else current.place
        for passed in self.schedule.order[begin : place + 1]:
            for action in self._actions.get(passed, ()):
                records = current.units.get(action.unit)
                if records is not None:
                    self._act(records, action.verb)
        current.place = place + 1

    def _is_due(self, current: Round, place: int | None) -> bool:
        """Whether a pass is next, but for backwards of units that saved nothing or are gone."""
        if place is None or place < current.place:
            return False
        skipped = self.schedule.order[current.place : place]
        return not any(
            each.is_forward or (each.unit in current.units and current.units[each.unit].records)
            for each in skipped
        )

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"a step departs from its schedule: {what}. Numbers stay right; from there on such "
                f"a step is offloaded in the default way. Give the schedule the order in which "
                f"passes really come",
                RuntimeWarning,
                stacklevel=2,
            )

    def _depart(self, current: Round) -> None:
        current.departed = True
        for records in current.units.values():
            for record in records.records:
                if record.held and record.slot is not None:
                    self._offloads.let_go(record)
        for log in current.logs.values():
            log.prefetches = True

    # ---- actions ------------------------------------------------------------------------------

    def act(self, action: Action) -> None:
        """Do something with a unit of the current round, told by hand.

        Raises:
            ScheduleError: it is not its turn.
        """
        records = None if self.current is None else self.current.units.get(action.unit)
        if records is None:
            raise ScheduleError(
                f"{action}: layer {action.unit} has had no forward in this round; what it has not "
                f"saved cannot move"
            )
        order = [Verb.OFFLOAD, Verb.RELEASE, Verb.RELOAD]
        before = order[: order.index(action.verb)]
        if action.verb in records.done:
            raise ScheduleError(f"{action}: that has been done already in this round")
        if not records.done.issuperset(before):
            raise ScheduleError(
                f"{action}: {before[-1].value} {action.unit} must come before it; the order is "
                f"offload, release, reload"
            )
        self._act(records, action.verb)

    def _act(self, records: UnitRecords, verb: Verb) -> None:
        if verb is Verb.OFFLOAD:
            self._begin_offloads(records)
        elif verb is Verb.RELEASE:
            for record in list(records.records):
                if record.slot is not None:
                    self._offloads.release(record)
                if record.state is RecordState.RELOADED:
                    self._reloads.release(record)  # it came back for a unit before this one
        else:
            for record in reversed(records.records):
                if record.state is RecordState.OFFLOADED:
                    self._reloads.begin(record)
                if record.state is RecordState.RELOADED:
                    record.stays = True
        records.done.add(verb)

    def _begin_offloads(self, records: UnitRecords) -> None:
        for record in records.records:
            if record.state is RecordState.HELD:
                try:
                    self._offloads.begin(record)
                except OSError as error:  # no room below: it stays where it is
                    self._offloads.error = error
                    return
