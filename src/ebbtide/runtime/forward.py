"""What one forward saved, and the order in which its backward asks for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from ebbtide.runtime.records import StorageRecord


@final
class ForwardLog:
    """The records of one forward in save order, and a guess at what backward wants next.

    The guess is the order that the previous backward really had, if it was over as many records;
    else the reverse of the order of saves. Both list a record as often as it was used, so a
    tensor that two distant layers saved comes back twice. A wrong guess costs time, never bytes:
    what is asked for early is reloaded then.

    Args:
        learned: ordinals in the order of the previous backward, or None.
        learned_records: over how many records that was.
        number: which of the step's forwards this is, from 0.
    """

    def __init__(self, learned: list[int] | None, learned_records: int, number: int = 0) -> None:
        self.number = number
        self.records: list[StorageRecord | None] = []
        self.live = 0
        self.wanted: list[int] = []
        self._saves: list[int] = []
        self._learned = learned
        self._learned_records = learned_records
        self._order: list[int] | None = None
        self._cursor = 0

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

    def note_unpack(self, ordinal: int) -> None:
        """Backward has asked for a record: move on to what comes after it."""
        if self.wanted and self.wanted[-1] == ordinal:
            return
        self.wanted.append(ordinal)
        self.note_backward()
        assert self._order is not None
        with contextlib.suppress(ValueError):  # after an unexpected use, the old guess stands
            self._cursor = self._order.index(ordinal, self._cursor) + 1

    def note_backward(self) -> None:
        """Backward has begun: no more is saved, so the guess can be made."""
        if self._order is None:
            known = self._learned is not None and self._learned_records == len(self.records)
            self._order = self._learned if known else self._saves[::-1]
            self._saves = []

    def upcoming(self) -> Iterator[StorageRecord]:
        """The records still alive that backward is expected to want, soonest first."""
        order = self._order or []
        for at in range(self._cursor, len(order)):
            record = self.records[order[at]]
            if record is not None:
                yield record
