"""What is known of the units of a schedule while it is followed, and of its rounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from ebbtide.runtime.forward import ForwardLog
from ebbtide.runtime.records import StorageRecord
from ebbtide.schedule import Pass, Schedule, Unit, Verb


@final
@dataclass(frozen=True)
class Following:
    """A schedule, and how it is followed.

    Attributes:
        schedule: what moves when.
        manual: nothing is done at anchors; `act` is told. All units are held until then.
        any_order: passes may come in another order; each anchor is done when its pass comes.
    """

    schedule: Schedule
    manual: bool = False
    any_order: bool = False


@final
class UnitRecords:
    """The records that come and go with a unit.

    A record that several units share comes and goes with the one whose backward is first, and
    stays if one of them stays.

    Attributes:
        unit: which.
        use: place in the order at which its backward begins.
        round: that it belongs to.
        leaves: whether the schedule offloads it.
        at_once: whether it leaves as it is saved; else it is held until its offload is due.
        done: what has been done with it.
        records: alive, in the order of their first save.
    """

    def __init__(self, unit: Unit, use: int, owner: Round, *, leaves: bool, at_once: bool) -> None:
        self.unit = unit
        self.use = use
        self.round = owner
        self.leaves = leaves
        self.at_once = at_once
        self.done: set[Verb] = {Verb.OFFLOAD} if leaves and at_once else set()
        self.records: dict[StorageRecord, None] = {}

    @property
    def followed(self) -> bool:
        """Whether its schedule decides when its records move."""
        return not self.round.departed

    def wants(self, record: StorageRecord) -> bool:
        """Whether a record that it saves too is to come and go with it from now on."""
        owner = record.owner
        if not self.followed or owner is self:
            return False
        if owner is None:
            return True
        first = self.use < owner.use if self.leaves else record.source is not None
        return owner.leaves and owner.round is self.round and first

    def take(self, record: StorageRecord) -> None:
        """Let a record come and go with this unit."""
        if record.owner is not None:
            del record.owner.records[record]
        record.owner = self
        self.records[record] = None

    def forget(self, record: StorageRecord) -> None:
        """A record is no more."""
        del self.records[record]
        record.owner = None


@final
class Round:
    """One pass through the order of a schedule.

    Attributes:
        number: of the round in its step.
        place: in the order, of the first pass that has not begun.
        begun: passes that have.
        to_come: forwards that have not begun, in order; none once no more will come.
        departed: from here on it is offloaded in the default way.
        units: whose forward has begun.
        logs: of its microbatches.

    Args:
        number: of the round in its step.
        forwards: of the schedule, in order.
    """

    def __init__(self, number: int, forwards: Iterable[Pass]) -> None:
        self.number = number
        self.to_come = dict.fromkeys(forwards)
        self.place = 0
        self.begun: set[Pass] = set()
        self.departed = False
        self.units: dict[Unit, UnitRecords] = {}
        self.logs: dict[int, ForwardLog] = {}

    def waits_for_backward(self) -> bool:
        """Whether the forward of a unit has begun and its backward has not."""
        backwards = {each.unit for each in self.begun if not each.is_forward}
        return any(each.unit not in backwards for each in self.begun if each.is_forward)
