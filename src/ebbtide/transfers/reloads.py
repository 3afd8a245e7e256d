"""Copies up: buffers on the device for bytes that were reloaded or rebuilt."""

from __future__ import annotations

from typing import final

import torch

from ebbtide.devices.device import AbstractDevice, AbstractEvent
from ebbtide.stores.store import AbstractStore, Target
from ebbtide.tracing.step_memory import Owner
from ebbtide.transfers.account import Account
from ebbtide.transfers.layer import in_range, is_profiling
from ebbtide.transfers.prefetch import ForwardLog
from ebbtide.transfers.record import REBUILDABLE, REBUILT, RELOADED, STORED, Record, State

_RELOADED = Owner.RELOADED  # looked up faster than a member of the enum
_READ_AHEAD = 4  # times the bound on bytes in flight: what the store is told to expect


@final
class Reloads:
    """Reloads records and holds their buffers on the device.

    The buffers of activations, reloaded and rebuilt ones, share one bound. Which of them are freed
    depends on what backward has read and on what it is expected to read next. Weights have a bound
    of their own: their code calls `start` and `free` itself. All methods are called with the gate's
    lock held.

    Args:
        device: the device whose compute stream the buffers belong to.
        store: the store that the bytes come from.
        account: counts and records what happens.
        bound_bytes: the most bytes that buffers may have which are brought back before they are
            needed. One buffer alone may be larger.

    Attributes:
        bound_bytes: the most bytes that all buffers may have, unless one more is needed now.
        buffered: activations that have a buffer, oldest first.
        buffered_bytes: size of these buffers.
        abandoned: buffers that are not needed any more, each with the event at which the copy that
            may still write to the buffer is complete.
    """

    def __init__(
        self, device: AbstractDevice, store: AbstractStore, account: Account, bound_bytes: int
    ) -> None:
        self._device = device
        self._store = store
        self._account = account
        self.bound(bound_bytes)
        self.buffered: dict[Record, None] = {}
        self.buffered_bytes = 0
        self.abandoned: list[tuple[torch.Tensor, AbstractEvent]] = []
        self._expected_bytes = 0  # that the store has been told to expect

    def bound(self, bound_bytes: int) -> None:
        """Bound the bytes that are brought back ahead of their need; one buffer may be larger."""
        self.bound_bytes = self._ahead_bytes = bound_bytes
        self._own_bytes = 0  # still to be read in the pass that runs, if it has a window
        self._is_window = False

    def window(self, ahead_bytes: int, own_bytes: int) -> None:
        """Bound them for one pass, beside what the pass needs itself; not one may be larger."""
        self.bound_bytes = ahead_bytes + own_bytes
        self._ahead_bytes, self._own_bytes = ahead_bytes, own_bytes
        self._is_window = True

    # ---- any record ---------------------------------------------------------------------------

    def start(self, record: Record, target: Target | None = None) -> None:
        """Queue the copy up of a record that is STORED.

        Args:
            record: the record to reload.
            target: device memory to copy into. If None, memory is allocated.
        """
        slot = record.slot
        assert slot is not None
        home = self._device.compute_stream() if target is None else target.home
        if is_profiling():
            buffer, ready = in_range("reload", record.layer, self._store.reload, slot, target)
        else:
            buffer, ready = self._store.reload(slot, target)
        record.take_buffer(buffer, ready, home, RELOADED)
        self._account.note_reload(record)

    def free(self, record: Record, state: State) -> None:
        """Free a record's buffer, or hold it as abandoned while a copy may still write to it."""
        assert record.buffer is not None and record.ready is not None
        # Guard abandoned-until-copied: a buffer that nobody waited for is held until its copy up is
        # complete. A graph dies, or a layer is left out, while its bytes are on their way up: the
        # buffer would be freed, handed out again, and the copy write over its new contents.
        if not record.awaited:
            self.abandoned.append((record.buffer, record.ready))
        record.release_buffer(state)

    def free_abandoned(self) -> None:
        """Free the abandoned buffers that no copy writes to any more."""
        if self.abandoned:
            # Guard abandoned-when-complete: such a buffer is let go only when its copy up has been
            # seen complete. The copy would write over the memory's new contents.
            self.abandoned = [held for held in self.abandoned if not held[1].query()]

    # ---- activations --------------------------------------------------------------------------

    def begin(self, record: Record) -> None:
        """Queue the reload of an activation and hold its buffer."""
        if record.expected:
            self.expect(record, False)
        self.start(record)
        self.hold(record)

    def hold(self, record: Record) -> None:
        """Hold the new buffer of an activation."""
        self.buffered[record] = None
        self.buffered_bytes += record.size_bytes
        owner = Owner.REBUILT if record.state is REBUILT else _RELOADED
        self._account.take(record.size_bytes, owner, record.layer)

    def release(self, record: Record) -> None:
        """Free the buffer of an activation whose bytes can be reloaded or rebuilt again."""
        owner, state = _RELOADED, STORED
        if record.state is REBUILT:
            owner, state = Owner.REBUILT, REBUILDABLE
        del self.buffered[record]
        self.buffered_bytes -= record.size_bytes
        self._account.give(record.size_bytes, owner, record.layer)
        self.free(record, state)

    def note_read(self, record: Record, generation: int) -> int:
        """Note that a handle reads an activation's buffer. It is freed if all handles have read it.

        Args:
            record: the activation.
            generation: generation of the buffer that the handle read last; 0 for none.

        Returns:
            The generation of the buffer that it reads now.
        """
        if generation != record.generation:
            if record.unread == record.handles and self._own_bytes:
                self._own_bytes = max(0, self._own_bytes - record.size_bytes)
            record.unread -= 1
        if not record.unread and not record.buffer_stays:
            self.release(record)
        return record.generation

    def make_room(self, size_bytes: int) -> None:
        """Free buffers that can be reloaded or rebuilt again, oldest first.

        Args:
            size_bytes: size of the buffer that needs room now.
        """
        if self.buffered_bytes + size_bytes <= self.bound_bytes:
            return
        for record in list(self.buffered):
            if record.state is REBUILT or record.can_go():
                self.release(record)
                if self.buffered_bytes + size_bytes <= self.bound_bytes:
                    return

    def prefetch(self, log: ForwardLog) -> None:
        """Reload what backward needs next as far as the bound allows, and announce what follows.

        Args:
            log: the log of the forward whose backward runs.
        """
        while (record := log.next_reload()) is not None:
            if record.state is STORED:
                fits = self._fits(record)
                if not fits and not self._make_room_before(record):
                    break
                self.begin(record)
            log.pass_reload()
        if self._store.reads_ahead:
            self._announce(log)

    def expect(self, record: Record, expected: bool) -> None:
        """Note whether the store has been told to expect a reload of this record."""
        self._expected_bytes += (expected - record.expected) * record.size_bytes
        record.expected = expected

    def _announce(self, log: ForwardLog) -> None:
        """Tell the store which reloads to expect, some way ahead."""
        most_bytes = _READ_AHEAD * self.bound_bytes
        while self._expected_bytes <= most_bytes and (record := log.next_announcement()):
            if record.state is STORED and not record.expected:
                assert record.slot is not None
                self.expect(record, True)
                self._store.read_ahead(record.slot)
            log.pass_announcement()

    def _fits(self, record: Record) -> bool:
        most_bytes = self._ahead_bytes + self._own_bytes
        return self.buffered_bytes + record.size_bytes <= most_bytes

    def _make_room_before(self, wanted: Record) -> bool:
        """Free buffers that were read and that backward does not need before this record.

        Returns:
            Whether the record's buffer now stays within the bound, or would be the only one.
        """
        for record in list(self.buffered):
            if record.can_go() and not record.precedes(wanted):
                self.release(record)
                if self._fits(wanted):
                    return True
        return not self.buffered and not self._is_window
