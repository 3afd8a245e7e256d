"""Copies the bytes of one model between its device and a store, and delimits its steps.

`Gate` is the lock of the model's records. `Offloads` holds device memory until a lower tier has its
bytes, `Reloads` holds the buffers of what came back, and `Transfers` owns both and the account.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final, final

import torch

from ebbtide.devices.device import (
    AbstractDevice,
    AbstractEvent,
    AbstractStream,
    in_range,
    is_profiling,
    raise_again,
)
from ebbtide.devices.process import watch_forks
from ebbtide.errors import EbbtideError, ForkedProcessError, StoreFullError
from ebbtide.runtime.events import Owner
from ebbtide.runtime.record import (
    ACTIVATION,
    DROPPED,
    OFFLOADING,
    PENDING,
    REBUILDABLE,
    REBUILT,
    RELOADED,
    RETAINED,
    STORED,
    STUCK,
    ForwardLog,
    Record,
    State,
)
from ebbtide.runtime.stats import Account
from ebbtide.stores.store import AbstractStore, Target


class Gate(_thread.RLock):  # type: ignore[misc, name-defined, unused-ignore]
    """A lock that no interrupt leaves locked.

    [Note: interrupts] Python raises KeyboardInterrupt, and what a signal handler raises, between
    any two instructions of the main thread. A lock that is taken in an `__enter__` written in
    Python can stay locked for ever, because the interrupt can come between the taking and the
    `try`. So this class inherits `__enter__` and `__exit__` from the interpreter's own lock, which
    is written in C. Nothing relies on it being reentrant.

    Attributes:
        is_inherited: whether this process was forked from the one that made the gate. The gate is
            closed then: `with gate` raises `ForkedProcessError`.
    """

    is_inherited = False

    def __init__(self) -> None:
        super().__init__()
        watch_forks(self)

    def note_fork(self) -> None:
        """Close the gate in a forked child.

        The child has the records, but not the threads that copy them, and their bytes are in a file
        to which the parent goes on writing. Another thread of the parent may have held the lock.
        """
        self.__class__ = _ClosedGate


@final
class _ClosedGate(Gate):  # type: ignore[misc, unused-ignore]
    """What a gate becomes in a forked child. It cannot be taken."""

    is_inherited = True

    def __enter__(self, *_: object) -> bool:
        raise ForkedProcessError(
            "this forward began in another process, from which this one was forked, and its "
            "saved tensors are in a file and in threads that only that process has; run a "
            "forward and its backward in the same process"
        )


# ---- Copies down: device memory is held here until a lower tier has its bytes ----

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
        keeps_if_full: whether what the store has no room for stays on the device.
        num_refused: how often that was so.
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
        self.keeps_if_full = False
        self.num_refused = 0
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
            self.retain(record)
        else:
            if self.queued_bytes + record.size_bytes > self.bound_bytes:
                self.make_room(record.size_bytes)
            try:
                self._copy_down(record, OFFLOADING)
            except StoreFullError:
                if not self.keeps_if_full:
                    raise
                self.num_refused += 1
                self.retain(record)
                return
            self.enqueue(record)

    def retain(self, record: Record) -> None:
        """Hold the source of a record until a schedule starts its copy, or releases it."""
        self.retained_bytes += record.size_bytes
        self._account.take(record.size_bytes, _LEAVING, record)

    def start(self, record: Record) -> None:
        """Queue the copy down of a record that is PENDING. Its source is retained from now on.

        Raises:
            StoreFullError: the store has no room. Nothing has been started.
        """
        self._copy_down(record, RETAINED)

    def start_pending(self, record: Record) -> None:
        """Do so if the record is PENDING. Without room in the store, the source stays there."""
        if record.state is PENDING:
            try:
                self.start(record)
            except OSError as error:
                self.error = error

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
            self._account.take(record.size_bytes, _LEAVING, record)

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
            self.retained_bytes -= record.size_bytes
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
        passes = self._account.passes
        if passes is not None and passes.holds_sources:
            return
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
        self._release(record)

    def _give_up_retained(self, record: Record) -> None:
        self.retained_bytes -= record.size_bytes
        self._account.take(-record.size_bytes, _LEAVING, record)

    def _release(self, record: Record) -> None:
        assert record.offloaded is not None
        failure = record.offloaded.failure
        is_out = failure is None or record.state is DROPPED
        if not is_out:
            record.move_to(STUCK)
            self.error = failure
        elif is_profiling():
            in_range("release", record.layer, record.release_source)
        else:
            record.release_source()
        if record.kind is ACTIVATION:  # after that, so that what is in use then is without it
            self._account.take(-record.size_bytes, _LEAVING, record)
        if is_out and self._account.recorder is not None:
            self._account.note_release(record)


# ---- Copies up: buffers on the device for bytes that were reloaded or rebuilt ----

_RELOADED = Owner.RELOADED  # looked up faster than a member of the enum


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
        self.start(record)
        self.hold(record)

    def hold(self, record: Record) -> None:
        """Hold the new buffer of an activation."""
        self.buffered[record] = None
        self.buffered_bytes += record.size_bytes
        owner = Owner.REBUILT if record.state is REBUILT else _RELOADED
        self._account.take(record.size_bytes, owner, record)

    def release(self, record: Record) -> None:
        """Free the buffer of an activation whose bytes can be reloaded or rebuilt again."""
        owner, state = _RELOADED, STORED
        if record.state is REBUILT:
            owner, state = Owner.REBUILT, REBUILDABLE
        del self.buffered[record]
        self.buffered_bytes -= record.size_bytes
        self._account.take(-record.size_bytes, owner, record)
        self.free(record, state)

    def note_read(self, record: Record) -> None:
        """Note that an activation's buffer is read. It is freed with one read for each handle."""
        if record.unread == record.handles:
            self._own_bytes -= min(record.size_bytes, self._own_bytes)
        if record.unread:
            record.unread -= 1
        if not record.unread and not record.buffer_stays:
            self.release(record)

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
        """Reload what backward needs next as far as the bound allows.

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


# ---- Copies the bytes of one model between its device and a store, and delimits its steps ----

_PARTS: Final = 4  # of what a step moves: one of them may be in flight each way
_AT_ONCE: Final = 3  # tensors of the largest size


@final
class Transfers:
    """All copies of one model between its device and a store, of activations and of weights.

    References form no cycle: an autograd graph owns its saved tensors, a saved tensor owns its
    record and the activations that manage it, and these own the transfers. When a graph is freed,
    by backward or because it was dropped, its records are freed at once, without the garbage
    collector.

    A step lasts from its first forward until no graph holds one of its saved tensors; see `live`.

    [Note: steps with graphs] A loop may have a graph at any moment. If all that graphs hold was
    read by backwards that have ended, such as the graph of a loss that the loop keeps, the step is
    over when the next forward begins. If a backward is to come, that forward may belong to the same
    step, as in a pipeline (F F B F B B), or to the next one, in a loop that begins each forward
    before the backward of the one before (F F B F B F B, without end). So many forwards are waited
    for: more than pipelines make in a step. From then on, until there is a moment without graphs, a
    step is over when a forward begins after a backward. What the graphs hold goes on to the next
    step, which counts and records what is done with it from then on.

    [Note: scaled bound] A bound that suits a large model is more than a small one moves in a whole
    step, which would then save nothing. So a bound that was not given by the user is, from the
    second step on, a quarter of the bytes that the largest step so far moved down. Copies go on
    beside compute as long as it holds what backward reads, what is rebuilt from that, and what is
    read next: three tensors of the largest size.

    Transfers are a context manager, too: an error that leaves a block with them is noted. Whoever
    changes records writes ``with transfers, transfers.gate:``.

    Args:
        device: device that the model computes on.
        store: store for the offloaded bytes. `close` closes it.
        bound_bytes: bound on the bytes in flight in each direction; see
            `ActivationPolicy.max_inflight_bytes`.
        scales: whether the bound is lowered after the first step, as the note says.
        traced: whether to record every step.

    Attributes:
        device: as given.
        store: as given.
        gate: the lock. Code that changes the state of a record must hold it.
        account: statistics and trace of the running step.
        offloads: copies from the device to the store.
        reloads: copies from the store to the device.
        live: number of saved tensors that graphs hold.
        has_more: whether a step goes on even while no graph is alive; called with the lock held.
        tidiers: called, with the lock held, before anything is tidied up. These must not keep their
            objects alive before the transfers are to be closed, and neither must `has_more`.
        windows: what bounds the bytes in flight pass by pass; None if nothing does.
        running: number of forwards that run now, and of backwards that reload weights now.
        closed: whether the store has been closed.
        is_broken: whether an interrupt may have left the records half changed. The engine is built
            anew then, before the next forward.
    """

    # Long: the begin and the end of a step are in one place, and each method is short.

    def __init__(
        self,
        device: AbstractDevice,
        store: AbstractStore,
        bound_bytes: int,
        *,
        scales: bool = False,
        traced: bool = False,
    ) -> None:
        self.device = device
        self.store = store
        self.gate = Gate()
        self.account = Account(device, traced=traced)
        self.offloads = Offloads(store, self.account, bound_bytes)
        self.reloads = Reloads(device, store, self.account, bound_bytes)
        self.windows: object | None = None
        self._most_bytes = bound_bytes if scales else None
        self._scaled_bytes = 0
        self.live = 0
        self.running = 0
        self.has_more: Callable[[], bool] = lambda: False
        self.tidiers: list[Callable[[], None]] = []
        self._closing = False
        self.closed = self.is_broken = False

    # The function is bound here: at the end of the process, the module's names are gone.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Keep the memory of copies under way when nothing refers to the transfers any more.

        The last graph has died after its model and the handle were gone. Nothing global refers to
        the copies before: what they belong to may refer to the transfers, which would live for
        ever.
        """
        if is_finalizing() or self.gate.is_inherited:
            return
        memory = [(record.source, record.offloaded) for record in self.offloads.queue]
        memory += [(record.buffer, record.ready) for record in self.reloads.buffered]
        memory += self.reloads.abandoned
        if memory:
            # Guard copies-outlive-engine: copies under way keep their memory when the engine is
            # collected. The device memory would be handed out again while a copy reads it or writes
            # to it.
            self.device.defer(functools.partial(_outlive_copies, memory, self.store))

    def bound(self, bound_bytes: int, windows: object | None = None) -> None:
        """Bound the bytes in flight in each direction anew.

        Args:
            bound_bytes: the bound; see `ActivationPolicy.max_inflight_bytes`.
            windows: what bounds them pass by pass, if anything does.
        """
        self._most_bytes = None
        self.windows = windows
        self._bound(bound_bytes)

    def _bound(self, bound_bytes: int) -> None:
        self.offloads.bound_bytes = bound_bytes
        self.reloads.bound(bound_bytes)

    def __enter__(self) -> None:
        """Begin a block of which an error is noted; see [Note: interrupts]."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self.note_error(error)

    def note_error(self, error: BaseException) -> None:
        """Note an error that has left the engine. See [Note: interrupts].

        An error of the store or of the allocator leaves everything in order. Any other, such as
        KeyboardInterrupt or what a signal handler raised, may have come between two changes that
        belong together.
        """
        expected = isinstance(error, EbbtideError | OSError | torch.OutOfMemoryError)
        if not expected or isinstance(error, TimeoutError | InterruptedError):
            self.is_broken = True
            # Copies end before an interrupt leaves the engine. It may have come between a copy and
            # the note of it: the memory that the copy writes would be freed, handed out again, and
            # overwritten.
            self.device.finish_copies()

    def begin_run(self) -> None:
        """Note that a forward begins, or a backward that reloads weights."""
        self.running += 1
        self.account.begin()

    def end_run(self) -> None:
        """Note that such a forward or backward has ended, normally or by an exception."""
        self.running -= 1
        self.finish_step_if_over()

    def wait_for_reload(self, record: Record, event: AbstractEvent, stream: AbstractStream) -> None:
        """Make the work queued on ``stream`` from now on wait for a record's reload.

        Only the first wait for a buffer is counted in the statistics.
        """
        if record.awaited:
            stream.wait(event)
        else:
            self.account.wait(record, event, stream, is_reload=True)

    def settle(self) -> None:
        """Note which saved tensors have died, and free what finished copies no longer need."""
        if not self.gate.is_inherited:  # else the work is the parent's
            with self.gate:
                self._tidy()

    def poll(self) -> None:
        """Settle unless the lock is taken. This never blocks."""
        gate: Any = self.gate
        if gate.is_inherited or gate._is_owned():
            return
        try:
            if gate.acquire(blocking=False):
                self._tidy()
        finally:
            if gate._is_owned():
                gate.release()

    def close(self) -> None:
        """Close the store as soon as no graph needs it any more."""
        if self.gate.is_inherited:
            self.closed = True  # the store belongs to the parent process
            return
        self._closing = True
        self.settle()

    def finish_step_if_over(self, *, with_graphs: bool = False) -> bool:
        """End the step if no forward runs, and no schedule says that it goes on.

        Args:
            with_graphs: end it even if graphs hold some of its saved tensors.

        Returns:
            Whether it has ended.
        """
        if (self.live and not with_graphs) or self.running or not self.account.meter.num_saved:
            return False
        if self.has_more():
            return False
        self._finish_step()
        return True

    def _finish_step(self) -> None:
        """End the step, and scale the bound by what it moved; see [Note: scaled bound]."""
        meter = self.account.meter
        self.account.finish(self.store.host_capacity_bytes, carries=bool(self.live))
        if self._most_bytes is not None and meter.had_backward:
            moved_bytes = meter.offloaded_bytes + meter.gradient_bytes
            scaled_bytes = max(moved_bytes // _PARTS, _AT_ONCE * meter.largest_bytes)
            self._scaled_bytes = max(self._scaled_bytes, scaled_bytes)
            self._bound(min(self._most_bytes, self._scaled_bytes))

    def _tidy(self) -> None:
        """Clean up after saved tensors died or copies ended. Called with the lock held."""
        with self:
            for tidy in self.tidiers:
                tidy()
            if self.offloads.queue:
                self.offloads.retire_finished()
            if self.reloads.abandoned:
                self.reloads.free_abandoned()
            if not self.live:
                self.finish_step_if_over()
                self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._closing and not self.live and not self.running:
            self.closed = True
            self.tidiers.clear()
            self.store.close()
            self.offloads.retire_finished()
            self.reloads.free_abandoned()


def _outlive_copies(
    memory: list[tuple[torch.Tensor | None, AbstractEvent | None]],
    store: AbstractStore,  # noqa: ARG001  # the host's side, which must live until then, too
) -> None:
    """Wait for copies. The device may have been collected already, so its lanes take no work."""
    for _, copied in memory:
        if copied is not None:
            with contextlib.suppress(OSError):  # nobody wants the bytes any more
                copied.synchronize()
