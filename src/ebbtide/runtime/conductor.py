"""What the one who runs the layers says: which pass begins, and what is given up."""

from __future__ import annotations

from typing import final

from ebbtide.runtime.account import Account
from ebbtide.runtime.gate import Gate
from ebbtide.runtime.ranges import Layer
from ebbtide.runtime.recorder import Subject
from ebbtide.runtime.rounds import Rounds
from ebbtide.runtime.units import UnitRecords
from ebbtide.schedule import Action, Direction, Unit


@final
class Conductor:
    """Tells rounds what happens, with the session's lock held.

    Args:
        rounds: what follows the schedule.
        gate: of the session.
        account: of the session.

    Attributes:
        news: a round may have ended, and with it a step; the session looks on leaving the gate.
    """

    def __init__(self, rounds: Rounds, gate: Gate, account: Account) -> None:
        self._rounds = rounds
        self._gate = gate
        self._account = account
        self.news = False

    def begin_unit(self, unit: Unit | None = None) -> UnitRecords:
        """The forward of a unit begins: what its schedule hangs on that is done now.

        Args:
            unit: which; None: the one that is next in the order.

        Returns:
            What the schedule knows of it, for `Session.switch_unit` and `begin_backward`.
        """
        rounds = self._rounds
        if rounds.is_given_up(self._account.live):
            self.abandon()
        with self._gate:
            return rounds.begin_forward(rounds.next_unit() if unit is None else unit)

    def next_microbatch(self) -> int:
        """The microbatch of a forward of the whole model that begins now."""
        return self._rounds.next_microbatch()

    def end_microbatch(self, number: int, *, completed: bool) -> None:
        """A forward of the whole model has ended."""
        if not completed:
            self.abandon()
            return
        with self._gate:
            self._rounds.end_microbatch(number)
            self.news = True

    def abandon(self) -> None:
        """A forward was interrupted: the next one begins another round of the schedule."""
        with self._gate:
            self._rounds.abandon()
            self.news = True

    def begin_backward(
        self, records: UnitRecords, direction: Direction = Direction.BACKWARD
    ) -> None:
        """The backward of a unit begins: what its schedule hangs on that is done now."""
        with self._gate:
            self._rounds.begin_backward(records, direction)

    def begin_backward_of(self, unit: Unit, direction: Direction) -> None:
        """The backward of a unit begins, of the newest round that has it."""
        with self._gate:
            current = self._rounds.current
            records = None if current is None else current.units.get(unit)
            if records is None:
                return
            self._rounds.begin_backward(records, direction)
            if self._account.recorder is not None:
                number = self._rounds.log(records).number
                self._account.recorder.begin_backward(Subject(Layer(unit.layer, ""), number))

    def end_backward(self) -> None:
        """The backward that began last has ended; for the trace alone."""
        with self._gate:
            if self._account.recorder is not None:
                self._account.recorder.begin_backward(None)

    def act(self, action: Action) -> None:
        """Move what a unit saved, told by hand.

        Raises:
            ScheduleError: it is not its turn.
        """
        with self._gate:
            self._rounds.act(action)
