"""The lock of one model's records, and the work that finalizers leave to whoever holds it next."""

from __future__ import annotations

import _thread
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, final

from ebbtide.errors import ForkedProcessError
from ebbtide.forks import watch_forks


class Gate(_thread.RLock):  # type: ignore[misc, name-defined, unused-ignore]
    """A lock that no interrupt leaves locked, with a queue of work that needs the lock.

    [Note: interrupts] Python raises KeyboardInterrupt, and what a signal handler raises, between
    any two instructions of the main thread. A lock that is taken in an `__enter__` written in
    Python can stay locked for ever, because the interrupt can come between the taking and the
    `try`. So this class inherits `__enter__` and `__exit__` from the interpreter's own lock, which
    is written in C. Nothing relies on it being reentrant.

    [Note: deferred work] A saved tensor can die at any moment: inside the engine's own code, in a
    backward thread, or while a worker thread finishes a copy. Its finalizer must not block, so it
    leaves its work here. Whoever settles next does it: see `Transfers.settle`.

    Args:
        owner: the object that holds the gate. The gate refers to it weakly, to avoid a cycle.
        tidy: called with the owner, and with the lock held, after deferred work was done.

    Attributes:
        is_inherited: whether this process was forked from the one that made the gate. The gate is
            closed then: `with gate` raises `ForkedProcessError`, and `leave` does nothing.
    """

    is_inherited = False

    def __new__(cls, *_: Any) -> Gate:
        return super().__new__(cls)

    def __init__(self, owner: object, tidy: Callable[[Any], None]) -> None:
        super().__init__()
        self._work: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._owner = weakref.ref(owner)
        self._tidy = tidy
        watch_forks(self)

    def note_fork(self) -> None:
        """Close the gate in a forked child.

        The child has the records, but not the threads that copy them, and their bytes are in a file
        to which the parent goes on writing. Another thread of the parent may have held the lock.
        """
        self.__class__ = _ClosedGate

    def leave(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do work that needs the lock, now if the lock is free, else when somebody settles.

        This never blocks. See [Note: deferred work].

        Args:
            work: called with the lock held; it must not block.
            arguments: arguments of ``work``.
        """
        self._work.append((work, arguments))
        self.settle_if_free()

    def settle_if_free(self) -> None:
        """Do the deferred work and tidy up, unless the lock is taken."""
        if self._is_owned():  # type: ignore[attr-defined, unused-ignore]
            return
        try:
            while self.acquire(blocking=False):
                self._settle()
                self.release()
                if not self._work:  # else it arrived while the lock was still taken
                    return
        finally:
            # An interrupt came while the lock was taken.
            if self._is_owned():  # type: ignore[attr-defined, unused-ignore]
                self.release()

    def settle(self) -> None:
        """Wait for the lock, do the deferred work and tidy up."""
        with self:
            self._settle()
        if self._work:
            self.settle_if_free()

    def _settle(self) -> None:
        while self._work:
            work, arguments = self._work.popleft()
            work(*arguments)
        owner = self._owner()
        if owner is not None:  # None while the garbage collector frees owner and gate
            self._tidy(owner)


@final
class _ClosedGate(Gate):  # type: ignore[misc, unused-ignore]
    """What a gate becomes in a forked child. It cannot be taken, and nobody waits for it."""

    is_inherited = True

    def __enter__(self, *_: object) -> bool:
        raise ForkedProcessError(
            "this forward began in another process, from which this one was forked, and its "
            "saved tensors are in a file and in threads that only that process has; run a "
            "forward and its backward in the same process"
        )

    def leave(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do nothing: the work is the parent's."""

    def settle_if_free(self) -> None:
        """Do nothing: the work is the parent's."""

    def settle(self) -> None:
        """Do nothing: the work is the parent's."""
