"""A lock whose holder also does the work that other threads defer while the lock is taken."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, final


@final
class Gate:
    """A lock whose holder does all deferred work before it releases the lock.

    [Note: deferred work] A saved tensor can die at any moment: inside the engine's own code, in a
    backward thread, or while a worker thread finishes a copy. Its finalizer must not block, so it
    puts its work into the gate's queue. If the lock is taken, the holder does the work before it
    releases the lock.

    Args:
        owner: the object that holds the gate. The gate refers to it weakly, to avoid a cycle.
        tidy: called with the owner, and with the lock held, after deferred work was done.
    """

    def __init__(self, owner: object, tidy: Callable[[Any], None]) -> None:
        self._lock = threading.Lock()
        self._work: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._owner = weakref.ref(owner)
        self._tidy = tidy

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._work:
                self._do_work()
        finally:
            self._lock.release()
        if self._work:  # it arrived after the check above, while the lock was still taken
            self._work_if_free()

    def leave(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do work that needs the lock, now if the lock is free, else later by the lock's holder.

        This never blocks. See [Note: deferred work].

        Args:
            work: called with the lock held; it must not block.
            arguments: arguments of ``work``.
        """
        self._work.append((work, arguments))
        self._work_if_free()

    def _work_if_free(self) -> None:
        """Do the deferred work unless the lock is taken; then its holder does the work."""
        while self._work and self._lock.acquire(blocking=False):
            try:
                self._do_work()
            finally:
                self._lock.release()

    def _do_work(self) -> None:
        while self._work:
            work, arguments = self._work.popleft()
            work(*arguments)
        owner = self._owner()
        if owner is not None:  # None while the garbage collector frees owner and gate
            self._tidy(owner)
