"""What one forward saved, and the order in which its backward asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from ebbtide.runtime.records import StorageRecord


@final
class UnpackOrder:
    """The order in which a backward asks for records, known by their ordinals.

    Args:
        ordinals: in that order; a record is listed as often as it is used.
        num_records: how many records there are.
    """

    def __init__(self, ordinals: Sequence[int], num_records: int) -> None:
        self.ordinals = ordinals
        self.num_records = num_records
        self._places: list[list[int]] = [[] for _ in range(num_records)]
        for place, ordinal in enumerate(ordinals):
            self._places[ordinal].append(place)

    def __len__(self) -> int:
        return len(self.ordinals)

    def fits(self, ordinals: Sequence[int], num_records: int) -> bool:
        return self.num_records == num_records and self.ordinals == ordinals

    def next_use(self, ordinal: int, begin: int) -> int:
        """The first place from ``begin`` on where a record is used; the end if there is none."""
        for place in self._places[ordinal]:
            if place >= begin:
                return place
        return len(self.ordinals)


@final
class ForwardLog:
    """The records of one forward in save order, and a guess at what backward wants next.

    The guess is the order that the previous backward really had, if it was over as many records;
    else the reverse of the order of saves. Both list a record as often as it was used, so a
    tensor that two distant layers saved comes back twice. A wrong guess costs time, never bytes:
    what is asked for early is reloaded then.

    Each record is looked at once on the way, however many there are: what has been brought back,
    or announced to the store, is behind a mark of its own.

    Args:
        learned: the order of the previous backward, or None.
        number: which of the step's forwards this is, from 0.

    Attributes:
        prefetches: whether backward brings back what comes next; where a schedule is followed, the
            schedule does.
    """

    def __init__(self, learned: UnpackOrder | None, number: int = 0) -> None:
        self.number = number
        self.prefetches = True
        self.records: list[StorageRecord | None] = []
        self.live = 0
        self._wanted: list[int] = []
        self._saves: list[int] = []
        self._learned = learned
        self._order: UnpackOrder | None = None
        self._used = 0  # places before this one lie behind backward
        self._reloaded = 0  # before this one: brought back, or not gone yet
        self._announced = 0  # before this one: the store knows

    def add(self, record: StorageRecord) -> int:
        """Number a new record."""
        self.records.append(record)
        self.live += 1
        return len(self.records) - 1

    def remove(self, record: StorageRecord) -> None:
        self.records[record.ordinal] = None
        self.live -= 1

    def note_save(self, ordinal: int) -> None:
        if not self._saves or self._saves[-1] != ordinal:
            self._saves.append(ordinal)

    def note_backward(self) -> None:
        """Backward has begun: no more is saved, so the guess can be made."""
        if self._order is None:
            self._order = self._learned
            if self._order is None or self._order.num_records != len(self.records):
                self._order = UnpackOrder(self._saves[::-1], len(self.records))
            self._saves = []

    def note_unpack(self, ordinal: int) -> None:
        """Backward has asked for a record: move on to what comes after it."""
        if self._wanted and self._wanted[-1] == ordinal:
            return
        self._wanted.append(ordinal)
        self.note_backward()
        place = self.next_use(ordinal)
        if place < self.end:  # after an unexpected use, the old guess stands
            self._used = place + 1

    def note_offloaded(self, ordinal: int) -> None:
        """A record has left, or left again: it may have to come back."""
        if self._order is not None:
            self._reloaded = min(self._reloaded, self.next_use(ordinal))

    @property
    def end(self) -> int:
        """The place after the last expected use."""
        return 0 if self._order is None else len(self._order)

    def next_use(self, ordinal: int) -> int:
        """The place at which backward is expected to want a record next; `end` if never."""
        if self._order is None or ordinal >= self._order.num_records:
            return self.end
        return self._order.next_use(ordinal, self._used)

    def next_reload(self) -> StorageRecord | None:
        """The live record behind the mark of reloads that backward wants soonest."""
        self._reloaded, record = self._next_live(max(self._reloaded, self._used))
        return record

    def pass_reload(self) -> None:
        """Move the mark past that record."""
        self._reloaded += 1

    def next_announcement(self) -> StorageRecord | None:
        """The live record behind the mark of announcements that backward wants soonest."""
        self._announced, record = self._next_live(max(self._announced, self._reloaded, self._used))
        return record

    def pass_announcement(self) -> None:
        """Move the mark past that record."""
        self._announced += 1

    def _next_live(self, place: int) -> tuple[int, StorageRecord | None]:
        if self._order is not None:
            ordinals = self._order.ordinals
            while place < len(ordinals):
                record = self.records[ordinals[place]]
                if record is not None:
                    return place, record
                place += 1
        return place, None

    def learned(self) -> UnpackOrder | None:
        """The order that backward had, for the next forward; None if there was no backward."""
        if not self._wanted:
            return None
        known = self._order
        if known is not None and known.fits(self._wanted, len(self.records)):
            return known
        return UnpackOrder(self._wanted, len(self.records))
