"""The records that one forward saved, and the expected order of their use in backward."""

from __future__ import annotations

from typing import final

from ebbtide.tensors.recipes import KernelSettings
from ebbtide.transfers.order import AccessLog, AccessOrder
from ebbtide.transfers.record import Record


@final
class ForwardLog:
    """The offloaded records of one forward, and the order in which backward should read them.

    The expected order is that of the previous backward if it used as many records, else the reverse
    of the order of saves. Both list a record once per use, so a tensor that two distant layers
    saved is reloaded twice. A wrong expectation costs time but never loses bytes: a record that is
    read earlier than expected is reloaded then.

    Two positions in the order, one for reloads and one for announcements to the store, only move
    forward past records that are done, so finding the next record does not search from the start.

    Args:
        learned: the order of the previous backward, or None.
        number: number of the forward in its step, from 0.

    Attributes:
        number: as given.
        prefetches: whether backward prefetches the records that are expected next. It does not
            while a schedule starts the reloads.
        records: the records by ordinal; None in place of a dropped record.
        live: number of records that are not dropped.
        in_backward: whether backward has begun, so that the expected order is set.
        task: id of autograd's graph task that last read one of the forward's saved tensors.
        settings: what the kernels of the forward depended on when it saved tensors, such as the
            number of threads; None before, and on an accelerator.
        is_mixed: whether they have depended on different settings.
    """

    def __init__(self, learned: AccessOrder | None, number: int = 0) -> None:
        self.number = number
        self.prefetches = True
        self.records: list[Record | None] = []
        self.live = 0
        self.in_backward = False
        self.task = -1
        self.settings: KernelSettings = None
        self.is_mixed = False
        self._learned = learned
        self._log = AccessLog()
        self._saves: list[int] = []
        self._reloaded = 0  # records before this place: reloaded, or still on the device
        self._announced = 0  # records before this place: announced to the store

    def note_settings(self, settings: KernelSettings) -> None:
        """Note what the kernels depend on now."""
        if settings != self.settings:
            self.is_mixed = self.settings is not None
            self.settings = settings

    def add(self, record: Record) -> int:
        """Add a record that autograd has just saved. Returns its ordinal."""
        ordinal = len(self.records)
        self.records.append(record)
        self._saves.append(ordinal)
        self.live += 1
        return ordinal

    def remove(self, ordinal: int) -> None:
        """Remove a record that nothing can read any more."""
        self.records[ordinal] = None
        self.live -= 1

    def note_save(self, ordinal: int) -> None:
        """Note that autograd saved another tensor that shares this record."""
        if not self._saves or self._saves[-1] != ordinal:
            self._saves.append(ordinal)

    def note_backward(self) -> None:
        """Note that backward has begun. Nothing more is saved, so the expected order is now set."""
        if self._log.expected is None:
            order, count = self._learned, len(self.records)
            if order is None or order.num_items != count:
                order = AccessOrder(self._saves[::-1], count)
            self._log.expected = order
            self._saves = []
        self.in_backward = True

    def note_unpack(self, ordinal: int) -> None:
        """Note that backward reads a record, and move on in the expected order."""
        if not self.in_backward:
            self.note_backward()
        self._log.use(ordinal)  # after an unexpected use, the place stays where it is

    def note_stored(self, ordinal: int) -> None:
        """Note that a record's bytes are only in the store, so it may have to be reloaded."""
        order = self._log.expected
        if order is not None:
            place = order.next_use(ordinal, self._log.place)
            if place < self._reloaded:
                self._reloaded = place

    def next_use(self, ordinal: int) -> int:
        """Return the place of a record's next expected use; the order's length if there is none.

        Before backward has begun, every record's next use is at place 0.
        """
        order = self._log.expected
        return 0 if order is None else order.next_use(ordinal, self._log.place)

    def next_reload(self) -> Record | None:
        """Return the live record expected soonest in backward and not yet reloaded, if any."""
        log = self._log
        place = self._reloaded if self._reloaded > log.place else log.place
        if log.expected is None or place >= len(log.expected.items):
            return None
        self._reloaded, record = self._next_live(place)
        return record

    def pass_reload(self) -> None:
        """Move past the record that `next_reload` returned."""
        self._reloaded += 1

    def next_announcement(self) -> Record | None:
        """Return the live record expected soonest and not yet announced to the store, if any."""
        place = max(self._announced, self._reloaded, self._log.place)
        self._announced, record = self._next_live(place)
        return record

    def pass_announcement(self) -> None:
        """Move past the record that `next_announcement` returned."""
        self._announced += 1

    def _next_live(self, place: int) -> tuple[int, Record | None]:
        if self._log.expected is not None:
            ordinals = self._log.expected.items
            while place < len(ordinals):
                record = self.records[ordinals[place]]
                if record is not None:
                    return place, record
                place += 1
        return place, None

    def learned(self) -> AccessOrder | None:
        """Return backward's order, for the next forward; None if there was no backward."""
        return self._log.learned(len(self.records))
