"""Copies down: device memory is held here until a lower tier has its bytes."""

from __future__ import annotations

from collections import deque
from typing import final

from ebbtide.devices.device import raise_again
from ebbtide.stores.store import AbstractStore
from ebbtide.tracing.step_memory import Owner
from ebbtide.transfers.account import Account
from ebbtide.transfers.layer import in_range, is_profiling
from ebbtide.transfers.record import (
    ACTIVATION,
    DROPPED,
    OFFLOADING,
    PENDING,
    RETAINED,
    STUCK,
    Record,
    State,
)

_LEAVING = Owner.LEAVING  # looked up faster than a member of the enum


@final
class Offloads:
    """Copies records down and holds the device memory that the copies read, their sources.

    A source in the queue is released as soon as its copy is complete, or when the bound on bytes in
    flight asks for room. A source that a schedule retains is released when the schedule says so.
    All methods are called with the gate's lock held.

    Args:
        store: the store that the bytes go to.
        account: counts and records what happens.
        bound_bytes: the most bytes that sources in the queue may have together. One source alone
            may be larger.

    Attributes:
        bound_bytes: as given.
        queue: records whose copies are under way, oldest first.
        queued_bytes: size of the sources in the queue.
        retained_bytes: size of the sources that a schedule retains.
        error: the error that a copy down failed with. The next offload raises it. The bytes of the
            failed copy stay on the device.
    """

    def __init__(self, store: AbstractStore, account: Account, bound_bytes: int) -> None:
        self._store = store
        self._account = account
        self.bound_bytes = bound_bytes
        self.queue: deque[Record] = deque()
        self.queued_bytes = 0
        self.retained_bytes = 0
        self.error: BaseException | None = None

    def offload(self, record: Record, *, retain: bool) -> None:
        """Start the copy down of a new record.

        Args:
            record: a PENDING record with its source on the device.
            retain: whether a schedule releases the source. If not, the source is released when its
                copy is complete.

        Raises:
            StoreFullError: the store has no room, or had none before. Nothing has been started.
        """
        if self.error is not None:
            error, self.error = self.error, None
            raise_again(error)
        if self.queue:
            self.retire_finished()
        if retain:
            self.start(record)
            self._retain(record)
        else:
            if self.queued_bytes + record.size_bytes > self.bound_bytes:
                self.make_room(record.size_bytes)
            self._copy_down(record, OFFLOADING)
            self.enqueue(record)

    def pend(self, record: Record) -> None:
        """Hold the source of a new record until a schedule starts its copy."""
        self._retain(record)

    def start(self, record: Record) -> None:
        """Queue the copy down of a record that is PENDING. Its source is retained from now on.

        Raises:
            StoreFullError: the store has no room. Nothing has been started.
        """
        self._copy_down(record, RETAINED)

    def _copy_down(self, record: Record, state: State) -> None:
        assert record.source is not None
        # The copy may start when the kernels queued so far have run: they write these bytes. They
        # are on the stream that saved them, which need not be the current one.
        written = record.home.record()
        if is_profiling():
            slot = in_range("offload", record.layer, self._store.offload, record.source, written)
        else:
            slot = self._store.offload(record.source, written)
        record.slot, record.offloaded = slot, slot.offloaded
        record.move_to(state)
        self._account.note_offload(record)

    def enqueue(self, record: Record) -> None:
        """Release a source as soon as its copy, which was queued already, is complete."""
        # Guard source-until-copied: the source is held until its copy down is complete.
        # Its memory would be handed out again and overwritten while the copy reads it.
        self.queue.append(record)
        self.queued_bytes += record.size_bytes
        if record.kind is ACTIVATION:
            self._account.take(record.size_bytes, _LEAVING, record.layer, record)

    def stop_retaining(self, record: Record) -> None:
        """Stop retaining a source. If its copy has begun, the copy is completed first."""
        if record.state is PENDING:
            self._give_up_retained(record)
            record.source = None
        elif record.state is STUCK:
            record.source = None
        elif record.state is RETAINED:
            self._give_up_retained(record)
            record.move_to(OFFLOADING)
            # Guard retained-until-copied: a source that a schedule retained is held on when its
            # graph dies. The graph is dropped while the copy is on its way down: the memory would
            # be handed out again and overwritten while the copy reads it.
            self.enqueue(record)

    def release(self, record: Record) -> None:
        """Release a source that is retained: compute waits until its copy is complete."""
        if record.state is RETAINED:
            # Guard release-after-copy: compute waits for the copy down of what a schedule releases.
            # Kernels queued after the anchor would reuse memory that the copy still reads.
            self._wait(record)
            self._give_up_retained(record)
            self._release(record)

    def make_room(self, size_bytes: int) -> None:
        """Hold compute back while too many bytes are on their way down.

        Args:
            size_bytes: of what is to be queued next.
        """
        self.hold_to(self.bound_bytes - size_bytes)

    def hold_to(self, most_bytes: int) -> None:
        """Make compute wait for the oldest copies down until no more than this is on its way."""
        while self.queue and self.queued_bytes > most_bytes:
            # Guard bound-after-copy: compute waits for the oldest copy down before its source is
            # released early. Past the bound on bytes in flight, kernels queued next would reuse
            # memory that the copy still reads.
            self._wait(self.queue[0])
            self._retire()

    def retire_finished(self) -> None:
        """Release the sources at the head of the queue whose copies are complete."""
        # Guard retire-when-complete: a source is released only when its copy down has been seen
        # complete. At any moment at which the engine tidies up, the memory of a source would be
        # handed out again while the copy reads it.
        while self.queue and self.queue[0].is_copied():
            self._retire()

    def _wait(self, record: Record) -> None:
        assert record.offloaded is not None
        # Memory freed now is reused only once the copy has read it: that is in the order of the
        # stream to which the memory belongs.
        self._account.wait(record, record.offloaded, record.home, is_reload=False)

    def _retire(self) -> None:
        """Release the oldest source: its copy is complete, or compute is ordered after it."""
        record = self.queue.popleft()
        self.queued_bytes -= record.size_bytes
        if record.kind is ACTIVATION:
            self._account.give(record.size_bytes, _LEAVING, record.layer, record)
        self._release(record)

    def _retain(self, record: Record) -> None:
        self.retained_bytes += record.size_bytes
        self._account.take(record.size_bytes, _LEAVING, record.layer, record)

    def _give_up_retained(self, record: Record) -> None:
        self.retained_bytes -= record.size_bytes
        self._account.give(record.size_bytes, _LEAVING, record.layer, record)

    def _release(self, record: Record) -> None:
        assert record.offloaded is not None
        failure = record.offloaded.failure
        if failure is None or record.state is DROPPED:
            if is_profiling():
                in_range("release", record.layer, record.release_source)
            else:
                record.release_source()
            if self._account.recorder is not None:
                self._account.note_release(record)
        else:
            record.move_to(STUCK)
            self.error = failure
