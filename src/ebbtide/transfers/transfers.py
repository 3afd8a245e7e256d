"""Copies the bytes of one model between its device and a store, and delimits its steps."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable
from typing import final

import torch

from ebbtide.devices.device import AbstractDevice, AbstractEvent, AbstractStream
from ebbtide.errors import EbbtideError
from ebbtide.stores.store import AbstractStore
from ebbtide.transfers.account import Account
from ebbtide.transfers.gate import Gate
from ebbtide.transfers.offloads import Offloads
from ebbtide.transfers.record import Record
from ebbtide.transfers.reloads import Reloads
from ebbtide.weak import call_weakly


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

    Args:
        device: device that the model computes on.
        store: store for the offloaded bytes. `close` closes it.
        bound_bytes: bound on the bytes in flight in each direction; see
            `ActivationPolicy.max_inflight_bytes`.
        traced: whether to record every step.

    Attributes:
        device: as given.
        store: as given.
        gate: the lock. Code that changes the state of a record must hold it.
        account: statistics and trace of the running step.
        offloads: copies from the device to the store.
        reloads: copies from the store to the device.
        live: number of saved tensors that graphs hold.
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
        traced: bool = False,
    ) -> None:
        self.device = device
        self.store = store
        self.gate = Gate(self, Transfers._tidy)
        self.account = Account(device, traced=traced)
        self.offloads = Offloads(store, self.account, bound_bytes)
        self.reloads = Reloads(device, store, self.account, bound_bytes)
        self.windows: object | None = None
        self.live = 0
        self.running = 0
        self._has_more: Callable[[], Callable[[], bool] | None] = lambda: None
        self._note_deaths: list[Callable[[], None]] = []
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
        self.windows = windows
        self.offloads.bound_bytes = bound_bytes
        self.reloads.bound(bound_bytes)

    def extend_steps(self, has_more: Callable[[], bool]) -> None:
        """Keep a step open, even while no graph is alive, as long as a method returns True.

        Args:
            has_more: bound method, called with the lock held. It is referred to weakly, so it does
                not keep its object alive.
        """
        self._has_more = weakref.WeakMethod(has_more)

    def before_tidying(self, note_deaths: Callable[[], None]) -> None:
        """Have a method called, with the lock held, before anything is tidied up.

        Args:
            note_deaths: bound method, which is referred to weakly.
        """
        self._note_deaths.append(call_weakly(note_deaths))

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
        self.gate.settle()

    def poll(self) -> None:
        """Settle unless another thread holds the lock. This never blocks."""
        self.gate.settle_if_free()

    def weak_poll(self) -> Callable[[], None]:
        """Return `poll` as a function that does not keep this object alive.

        Objects that the transfers own can hold the function without a reference cycle.
        """
        return call_weakly(self.poll)

    def close(self) -> None:
        """Close the store as soon as no graph needs it any more."""
        if self.gate.is_inherited:
            self.closed = True  # the store belongs to the parent process
            return
        self._closing = True
        self.settle()

    def finish_step_if_over(self) -> None:
        """End the step if no forward runs and no graph holds one of its saved tensors."""
        if self.live or self.running or not self.account.meter.num_saved:
            return
        has_more = self._has_more()
        if has_more is None or not has_more():
            self.account.finish(self.store.host_capacity_bytes)

    def finish_step_with_graphs(self) -> bool:
        """End the step although graphs are alive, unless a schedule says that it goes on.

        Returns:
            Whether it has ended.
        """
        has_more = self._has_more()
        if self.running or not self.account.meter.num_saved or (has_more and has_more()):
            return False
        self.account.finish(self.store.host_capacity_bytes)
        return True

    def _tidy(self) -> None:
        """Clean up after saved tensors died or copies ended. Called with the lock held."""
        try:
            for note_deaths in self._note_deaths:
                note_deaths()
            if self.offloads.queue:
                self.offloads.retire_finished()
            if self.reloads.abandoned:
                self.reloads.free_abandoned()
            if not self.live:
                self.finish_step_if_over()
                self._close_if_idle()
        except BaseException as error:
            self.note_error(error)
            raise

    def _close_if_idle(self) -> None:
        if self._closing and not self.live and not self.running:
            self.closed = True
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
