"""The schedule executor: performs a pass's actions (offload, release, reload) as the pass begins.

A run is one traversal of the order of a schedule, beginning with its first forward. A schedule of
one microbatch runs once for every forward; such runs can overlap, and each has its own place in the
order. A schedule of several microbatches is one run for all of them.

A step may depart from its schedule: its results stay right, and the rest of the run is offloaded in
the default way, where sources are released as their copies end and backward prefetches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from ebbtide.devices.device import Layer
from ebbtide.devices.process import call_weakly
from ebbtide.errors import ScheduleError, warn_user
from ebbtide.runtime.activations import Activations
from ebbtide.runtime.events import Subject
from ebbtide.runtime.handles import ScheduleRun, UnitRecords
from ebbtide.runtime.record import RELOADED, RETAINED, STORED, ForwardLog
from ebbtide.schedule import Action, Direction, Pass, Schedule, Unit, Verb, first_use


@final
@dataclass(frozen=True)
class ScheduleMode:
    """A schedule, and how it is followed.

    Attributes:
        schedule: the schedule.
        manual: whether actions are performed only by `ScheduleExecutor.act`, and not when passes
            begin.
        any_order: whether passes may come in another order than the schedule's. The actions
            anchored at a pass are then performed when that pass begins.
    """

    schedule: Schedule
    manual: bool = False
    any_order: bool = False


@final
class ScheduleExecutor:
    """Runs a schedule on the activations of a model.

    Args:
        mode: the schedule, and how it is followed.
        activations: the activations to offload and reload.

    Attributes:
        mode: as given.
        activations: as given.
        current: the newest run, which the next forward belongs to unless the run is complete; None
            before the first forward.

    Raises:
        ScheduleError: the schedule cannot be run.
    """

    # Long: the verbs of a schedule share the place that it has come to.

    def __init__(self, mode: ScheduleMode, activations: Activations) -> None:
        schedule = mode.schedule.check()
        self.mode = mode
        self.current: ScheduleRun | None = None
        self.activations = activations
        self._transfers = activations.transfers
        self._gate = activations.transfers.gate
        self._offloads = activations.transfers.offloads
        self._reloads = activations.transfers.reloads
        self._schedule = schedule
        self._actions = schedule.actions
        self._places = {each: place for place, each in enumerate(schedule.order)}
        self._forwards = [each for each in schedule.order if each.is_forward]
        self._leaving = schedule.offloaded
        self._immediate = {
            action.unit
            for anchor, actions in schedule.lines
            for action in actions
            if action.verb is Verb.OFFLOAD and anchor == Pass(Direction.FORWARD, action.unit)
        }
        self._warned = False
        activations.scopes.prefetches = False
        self._transfers.has_more = call_weakly(self._step_has_more)

    # ---- called from outside, without the lock ------------------------------------------------

    def begin_unit(self, unit: Unit | None = None) -> UnitRecords:
        """Note that the forward of a unit begins, and perform the actions anchored at it.

        Args:
            unit: the unit; None means the next one in the order.

        Returns:
            The unit's records, for `Scopes.begin_layer`.
        """
        self.end_given_up_run()
        manual = self.mode.manual
        with self._transfers, self._gate:
            run = self.current
            if unit is None:
                unit = next(iter((run and run.to_come) or self._forwards)).unit
            each = Pass(Direction.FORWARD, unit)
            if run is None or not run.to_come or each in run.begun:
                if run is not None and run.to_come:
                    if not manual:
                        self._warn(f"{each} came where {next(iter(run.to_come))} was due")
                    self._depart(run)
                meter = self._transfers.account.meter
                run = self.current = ScheduleRun(meter.num_runs, dict.fromkeys(self._forwards))
                meter.num_runs += 1
            self.begin(run, each)
            use = first_use(unit, self._places)
            records = run.units[unit] = UnitRecords(
                unit,
                len(self._schedule.order) if use is None else use,
                run,
                self._log(run, unit.microbatch),
                leaves=manual or unit in self._leaving,
                immediate=unit in self._immediate and not manual,
            )
            return records

    def end_given_up_run(self) -> None:
        """Abandon the current run if its graphs have died although passes are still to come."""
        self._transfers.settle()
        run = self.current
        if self._transfers.live or run is None or not run.to_come:
            return
        forwards = {each.unit for each in run.begun if each.is_forward}
        backwards = [each for each in run.begun if not each.is_forward]
        last = max((self._places.get(each, -1) for each in backwards), default=-1)
        skips = any(self._places[each] < last for each in run.to_come)
        if skips or not forwards.issubset(each.unit for each in backwards):
            self.abandon()

    def begin_backward(self, records: UnitRecords) -> None:
        """Note that the backward of a unit begins, and perform the actions anchored at it."""
        with self._transfers, self._gate:
            self.activations.note_deaths()
            self.begin(records.run, Pass(Direction.BACKWARD, records.unit))

    def begin_backward_of(self, unit: Unit, direction: Direction) -> None:
        """Note that the backward of a unit of the current run begins."""
        with self._transfers, self._gate:
            self.activations.note_deaths()
            records = None if self.current is None else self.current.units.get(unit)
            if records is None:
                return
            self.begin(records.run, Pass(direction, unit))
            recorder = self._transfers.account.recorder
            if recorder is not None:
                recorder.begin_backward(Subject(Layer(unit.layer, ""), records.log.number))

    def end_backward(self) -> None:
        """Note that the last backward to begin has ended; only the trace uses this."""
        with self._transfers, self._gate:
            recorder = self._transfers.account.recorder
            if recorder is not None:
                recorder.begin_backward(None)

    def next_microbatch(self) -> int:
        """Return the first microbatch of the current run none of whose forwards has begun."""
        if self.current is None or not self.current.to_come:
            return self._forwards[0].unit.microbatch
        begun = {each.unit.microbatch for each in self.current.begun if each.is_forward}
        waiting = [each.unit.microbatch for each in self._forwards]
        return next((number for number in waiting if number not in begun), waiting[0])

    def end_microbatch(self, number: int, *, completed: bool) -> None:
        """Note that a forward of the whole model has ended, or was interrupted.

        Args:
            number: number of its microbatch.
            completed: False if it was interrupted.
        """
        if not completed:
            self.abandon()
            return
        with self._transfers, self._gate:
            current = self.current
            to_come = () if current is None else current.to_come
            missing = [each for each in to_come if each.unit.microbatch == number]
            if missing:
                self._warn(f"the forward ended without {missing[0]}")
                self._abandon()
            self._transfers.finish_step_if_over()

    def abandon(self) -> None:
        """Abandon the current run, as after an interrupted forward; the next one begins a run."""
        with self._transfers, self._gate:
            self._abandon()
            self._transfers.finish_step_if_over()

    def act(self, action: Action) -> None:
        """Perform one action on what a unit of the current run saved, in manual mode.

        Raises:
            ScheduleError: the action is out of turn.
        """
        with self._transfers, self._gate:
            self.activations.note_deaths()
            records = None if self.current is None else self.current.units.get(action.unit)
            self._check_turn(action, records)
            assert records is not None
            self.do(records, action.verb)

    @staticmethod
    def _check_turn(action: Action, records: UnitRecords | None) -> None:
        if records is None:
            raise ScheduleError(
                f"{action}: layer {action.unit} has had no forward in this run, so it has saved "
                f"nothing that could move"
            )
        order = [Verb.OFFLOAD, Verb.RELEASE, Verb.RELOAD]
        before = order[: order.index(action.verb)]
        if action.verb in records.done:
            raise ScheduleError(f"{action}: this has been done already in this run")
        if not records.done.issuperset(before):
            raise ScheduleError(
                f"{action}: {before[-1].value} {action.unit} must come before it; the order is "
                f"offload, release, reload"
            )

    # ---- runs ---------------------------------------------------------------------------------

    def _step_has_more(self) -> bool:
        """Whether forwards of the current run are still to come; the step goes on until then."""
        return self.current is not None and bool(self.current.to_come)

    def _abandon(self) -> None:
        if self.current is not None:
            self._depart(self.current)
            self.current.to_come.clear()

    # ---- passes -------------------------------------------------------------------------------

    def _log(self, run: ScheduleRun, number: int) -> ForwardLog:
        """Return the log of a microbatch of a run."""
        if number not in run.logs:
            shown = number if self._schedule.num_microbatches > 1 else run.number
            run.logs[number] = ForwardLog(None, shown)
            run.logs[number].prefetches = run.departed
        return run.logs[number]

    def begin(self, run: ScheduleRun, each: Pass) -> None:
        """Begin a pass of a run. Called with the lock held."""
        if each in run.begun:
            return  # a second backward through a retained graph
        place = self._places.get(each)
        strict = not (run.departed or self.mode.manual or self.mode.any_order)
        if strict and not self._is_due(run, place):
            due = self._schedule.order[run.place : run.place + 1]
            instead = f"where {due[0]} was due" if due else "after the last pass"
            self._warn(f"{each} came {instead}")
            self._depart(run)
        run.begun.add(each)
        run.to_come.pop(each, None)
        if run.departed or place is None or self.mode.manual:
            return
        begin = place if self.mode.any_order else run.place
        for passed in self._schedule.order[begin : place + 1]:
            for action in self._actions.get(passed, ()):
                records = run.units.get(action.unit)
                if records is not None:
                    self.do(records, action.verb)
        run.place = place + 1

    def _is_due(self, run: ScheduleRun, place: int | None) -> bool:
        """Whether a pass is due: only backwards of units without live records precede it."""
        if place is None or place < run.place:
            return False
        skipped = self._schedule.order[run.place : place]
        return not any(
            each.is_forward or (each.unit in run.units and run.units[each.unit].records)
            for each in skipped
        )

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warn_user(
                "schedule-departed",
                f"a step departs from its schedule: {what}. Its results stay right, and the rest "
                f"of such a step is offloaded in the default way. Give the schedule the order in "
                f"which passes really come",
            )

    def _depart(self, run: ScheduleRun) -> None:
        run.departed = True
        for records in run.units.values():
            for record in records.records:
                if record.state is RETAINED:
                    self._offloads.stop_retaining(record)
        for log in run.logs.values():
            log.prefetches = True

    # ---- actions ------------------------------------------------------------------------------

    def do(self, records: UnitRecords, verb: Verb) -> None:
        """Perform one action on what a unit saved. Called with the lock held."""
        if verb is Verb.OFFLOAD:
            for record in records.records:
                self._offloads.start_pending(record)
        elif verb is Verb.RELEASE:
            for record in list(records.records):
                self._offloads.release(record)
                if record.state is RELOADED:
                    self._reloads.release(record)  # an earlier unit had it reloaded
        else:
            for record in reversed(records.records):
                if record.state is STORED:
                    self._reloads.begin(record)
                if record.state is RELOADED:
                    record.buffer_stays = True
        records.done.add(verb)
