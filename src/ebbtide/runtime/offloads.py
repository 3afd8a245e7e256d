"""What is on its way down: sources that hold device memory until the store has their bytes."""

from __future__ import annotations

from collections import deque
from typing import final

from ebbtide.devices.device import raise_again
from ebbtide.runtime.account import Account
from ebbtide.runtime.ranges import profiler_range
from ebbtide.runtime.records import RecordState, StorageRecord
from ebbtide.stores.store import AbstractStore


@final
class Offloads:
    """The sources of records that leave. Its session calls it with the lock held.

    A source in the queue goes as soon as its copy is complete, or when the bound asks for room. A
    source that is held goes when its schedule says so.

    Args:
        store: where they go.
        account: told of what happens.
        bound_bytes: on the queue; one source alone may be larger.

    Attributes:
        queue: oldest first.
        queued_bytes: of the sources in the queue.
        held_bytes: of the sources that are held.
        error: why a copy down failed; the next offload raises it. The bytes stay where they are.
    """

    def __init__(self, store: AbstractStore, account: Account, bound_bytes: int) -> None:
        self._store = store
        self._account = account
        self._bound_bytes = bound_bytes
        self.queue: deque[StorageRecord] = deque()
        self.queued_bytes = 0
        self.held_bytes = 0
        self.error: BaseException | None = None

    def depart(self, record: StorageRecord, *, held: bool) -> None:
        """Let a new record leave.

        Args:
            record: whose source is on the device.
            held: a schedule says when the source goes; else it goes when its copy is complete.

        Raises:
            StoreFullError: the store has no room, or had none before. The record is none.
        """
        try:
            if self.error is not None:
                error, self.error = self.error, None
                raise_again(error)
            self.retire_finished()
            if not held:
                self.make_room(record.size_bytes)
            self.begin(record)
        except BaseException:
            record.forward.remove(record)
            raise
        if held:
            self.hold(record)
        else:
            self.enqueue(record)

    def begin(self, record: StorageRecord) -> None:
        """Queue the copy down of a record."""
        assert record.source is not None
        # The copy may start when the kernels queued so far have run: they write these bytes. They
        # are on the stream that saved them, which need not be the current one.
        slot = self._store.offload(record.source, record.home.record())
        record.begin_offload(slot)
        self._account.note_offload(record)

    def enqueue(self, record: StorageRecord) -> None:
        """Let a source go as soon as its copy is complete."""
        self.queue.append(record)
        self.queued_bytes += record.size_bytes
        self._account.take(record.size_bytes)

    def hold(self, record: StorageRecord) -> None:
        """Hold a source until somebody says otherwise."""
        record.held = True
        self.held_bytes += record.size_bytes
        self._account.take(record.size_bytes)

    def let_go(self, record: StorageRecord) -> None:
        """Hold a source no longer: it goes when its copy, if one has begun, is complete."""
        if record.held:
            self._unhold(record)
            if record.slot is None:
                record.source = None
            else:
                self.enqueue(record)

    def release(self, record: StorageRecord) -> None:
        """Let go of a held source now: compute waits until its copy is complete."""
        if record.held:
            assert record.slot is not None
            # Memory freed now is reused only once the copy has read it: that is in the order of
            # the stream to which it belongs.
            self._account.wait(record, record.slot.offloaded, record.home)
            self._unhold(record)
            self._let_go_of_source(record)

    def _unhold(self, record: StorageRecord) -> None:
        record.held = False
        self.held_bytes -= record.size_bytes
        self._account.give(record.size_bytes)

    def make_room(self, size_bytes: int) -> None:
        """Hold the compute stream back while too many bytes are on their way down."""
        while self.queue and self.queued_bytes + size_bytes > self._bound_bytes:
            oldest = self.queue[0]
            assert oldest.slot is not None
            # After this wait, memory freed now is reused only once the copy has read it: that is
            # in the order of the stream to which it belongs.
            self._account.wait(oldest, oldest.slot.offloaded, oldest.home)
            self._retire()

    def retire_finished(self) -> None:
        """Let go of the sources at the head of the queue whose copies are complete."""
        while self.queue and self._is_complete(self.queue[0]):
            self._retire()

    @staticmethod
    def _is_complete(record: StorageRecord) -> bool:
        assert record.slot is not None
        return record.slot.offloaded.query()

    def _retire(self) -> None:
        """The oldest copy down is complete, or compute is ordered after it: its source can go."""
        record = self.queue.popleft()
        self.queued_bytes -= record.size_bytes
        self._account.give(record.size_bytes)
        self._let_go_of_source(record)

    def _let_go_of_source(self, record: StorageRecord) -> None:
        assert record.slot is not None
        failure = record.slot.offloaded.failure
        if failure is None:
            with profiler_range("release", record.layer):
                record.release_source()
            record.forward.note_offloaded(record.ordinal)
            self._account.note_release(record)
        elif record.state is not RecordState.DROPPED:
            self.error = failure
