"""The lock of one model's records."""

from __future__ import annotations

import _thread
import weakref
from collections.abc import Callable
from typing import Any, final

from ebbtide.errors import ForkedProcessError
from ebbtide.forks import watch_forks


class Gate(_thread.RLock):  # type: ignore[misc, name-defined, unused-ignore]
    """A lock that no interrupt leaves locked.

    [Note: interrupts] Python raises KeyboardInterrupt, and what a signal handler raises, between
    any two instructions of the main thread. A lock that is taken in an `__enter__` written in
    Python can stay locked for ever, because the interrupt can come between the taking and the
    `try`. So this class inherits `__enter__` and `__exit__` from the interpreter's own lock, which
    is written in C. Nothing relies on it being reentrant.

    Args:
        owner: the object that holds the gate. The gate refers to it weakly, to avoid a cycle.
        tidy: called with the owner, and with the lock held, when the gate settles.

    Attributes:
        is_inherited: whether this process was forked from the one that made the gate. The gate is
            closed then: `with gate` raises `ForkedProcessError`.
    """

    is_inherited = False

    def __new__(cls, *_: Any) -> Gate:
        return super().__new__(cls)

    def __init__(self, owner: object, tidy: Callable[[Any], None]) -> None:
        super().__init__()
        self._owner = weakref.ref(owner)
        self._tidy = tidy
        watch_forks(self)

    def note_fork(self) -> None:
        """Close the gate in a forked child.

        The child has the records, but not the threads that copy them, and their bytes are in a file
        to which the parent goes on writing. Another thread of the parent may have held the lock.
        """
        self.__class__ = _ClosedGate

    def settle_if_free(self) -> None:
        """Tidy up, unless the lock is taken. This never blocks."""
        if self._is_owned():  # type: ignore[attr-defined, unused-ignore]
            return
        try:
            if self.acquire(blocking=False):
                self._settle()
        finally:
            if self._is_owned():  # type: ignore[attr-defined, unused-ignore]
                self.release()

    def settle(self) -> None:
        """Wait for the lock and tidy up."""
        with self:
            self._settle()

    def _settle(self) -> None:
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

    def settle_if_free(self) -> None:
        """Do nothing: the work is the parent's."""

    def settle(self) -> None:
        """Do nothing: the work is the parent's."""
