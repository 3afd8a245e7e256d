"""What has been brought back, and what comes next: buffers on the device within a bound."""

from __future__ import annotations

from typing import final

import torch

from ebbtide.devices.device import AbstractDevice, AbstractEvent
from ebbtide.runtime.account import Account
from ebbtide.runtime.forward import ForwardLog
from ebbtide.runtime.ranges import profiler_range
from ebbtide.runtime.records import RecordState, StorageRecord
from ebbtide.stores.store import AbstractStore

_READ_AHEAD = 4  # times the bound on bytes in flight: what the store is told to expect


@final
class Reloads:
    """The buffers of reloaded records. Its session calls it with the lock held.

    Args:
        device: whose compute stream the buffers belong to.
        store: where they come from.
        account: told of what happens.
        bound_bytes: on buffers brought back ahead of need; one alone may be larger.

    Attributes:
        held: records that have a buffer, in the order of their reloads.
        held_bytes: of their buffers.
        abandoned: buffers that nobody wants any more, and that copies under way still write to.
    """

    def __init__(
        self, device: AbstractDevice, store: AbstractStore, account: Account, bound_bytes: int
    ) -> None:
        self._device = device
        self._store = store
        self._account = account
        self._bound_bytes = bound_bytes
        self.held: dict[StorageRecord, None] = {}
        self.held_bytes = 0
        self.abandoned: list[tuple[torch.Tensor, AbstractEvent]] = []
        self._expected_bytes = 0  # that the store has been told to expect

    def begin(self, record: StorageRecord) -> None:
        """Queue the copy up of a record."""
        self.expect(record, False)
        assert record.slot is not None
        with profiler_range("reload", record.layer):
            buffer, reloaded = self._store.reload(record.slot)
        record.begin_reload(buffer, reloaded, self._device.compute_stream())
        self.held[record] = None
        self.held_bytes += record.size_bytes
        self._account.note_reload(record)
        self._account.take(record.size_bytes)

    def note_read(self, record: StorageRecord, generation: int) -> int:
        """A handle reads a record's buffer, and compute waits for it.

        Args:
            record: has a buffer.
            generation: the reload that the handle has read before; 0 for none.

        Returns:
            The one that it has read now.
        """
        record.awaited = True
        if generation != record.generation:
            record.unread -= 1
            self.release_if_read(record)
        return record.generation

    def release_if_read(self, record: StorageRecord) -> None:
        """Let go of a buffer that all have read; who still computes with it keeps it alive."""
        if record.state is RecordState.RELOADED and not record.unread and not record.stays:
            self.release(record)

    def release(self, record: StorageRecord) -> None:
        """Let go of a buffer; the store has the bytes."""
        assert record.buffer is not None and record.reloaded is not None
        del self.held[record]
        self.held_bytes -= record.size_bytes
        self._account.give(record.size_bytes)
        if not record.awaited:
            # No kernel waits for this copy: freed now, the memory could be handed out again
            # while the copy still writes to it.
            self.abandoned.append((record.buffer, record.reloaded))
        record.release_buffer()
        record.forward.note_offloaded(record.ordinal)

    def let_go_of_finished(self) -> None:
        """Let go of abandoned buffers that no copy writes to any more."""
        if self.abandoned:
            self.abandoned = [held for held in self.abandoned if not held[1].query()]

    # ---- ahead of need ------------------------------------------------------------------------

    def make_room(self, size_bytes: int) -> None:
        """Let go of buffers that were read, for what is wanted now; they come back once more."""
        for record in list(self.held):
            if self.held_bytes + size_bytes <= self._bound_bytes:
                return
            if record.unread < record.handles and not record.stays:
                self.release(record)

    def prefetch(self, log: ForwardLog, beside_bytes: int) -> None:
        """Reload what backward wants next, as far as the bound allows; announce what follows.

        Args:
            log: of the forward whose backward runs.
            beside_bytes: what is held of other kinds, under the same bound.
        """
        while (record := log.next_reload()) is not None:
            if record.state is RecordState.OFFLOADED:
                if not self._has_room(record, beside_bytes):
                    break
                self.begin(record)
            log.pass_reload()
        if self._store.reads_ahead:
            self._announce(log)

    def expect(self, record: StorageRecord, expected: bool) -> None:
        """Note whether the store has been told that a reload will come."""
        self._expected_bytes += (expected - record.expected) * record.size_bytes
        record.expected = expected

    def _announce(self, log: ForwardLog) -> None:
        """Tell the store what to expect, some way ahead."""
        most_bytes = _READ_AHEAD * self._bound_bytes
        while self._expected_bytes <= most_bytes and (record := log.next_announcement()):
            if record.state is RecordState.OFFLOADED and not record.expected:
                assert record.slot is not None
                self.expect(record, True)
                self._store.read_ahead(record.slot)
            log.pass_announcement()

    def _has_room(self, record: StorageRecord, beside_bytes: int) -> bool:
        """Whether a reload stays within the bound, after letting go of buffers read once."""
        room_bytes = self._bound_bytes - beside_bytes
        if self.held_bytes + record.size_bytes > room_bytes:
            self._evict(record, room_bytes)
        fits = self.held_bytes + record.size_bytes <= room_bytes
        return fits or not (self.held or beside_bytes)

    def _evict(self, wanted: StorageRecord, room_bytes: int) -> None:
        """Let go of buffers that were read and have a reader to come, but not before this one."""
        log = wanted.forward
        place = log.next_use(wanted.ordinal)
        for record in list(self.held):
            if self.held_bytes + wanted.size_bytes <= room_bytes:
                return
            sooner = record.forward is log and log.next_use(record.ordinal) < place
            if record.unread < record.handles and not sooner and not record.stays:
                self.release(record)
