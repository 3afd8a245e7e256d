"""The session's lock, with room for work that arrives while somebody else holds it."""

from __future__ import annotations

import threading
import weakref
from types import TracebackType
from typing import Protocol, final


class DeferredWork(Protocol):
    """What a gate's owner offers."""

    def has_deferred_work(self) -> bool:
        """Whether there is any; asked with or without the lock."""

    def do_deferred_work(self) -> None:
        """Do it; called with the lock held."""


@final
class Gate:
    """A lock whose holder does, before it leaves, what others left to be done.

    A handle can die at any moment: inside the session's own code, in a backward thread, while a
    worker thread finishes a copy. None of them may block, so each leaves a note and calls `knock`;
    if the lock is taken, its holder reads the note on the way out. [Note: deferred work]

    Args:
        owner: has the deferred work. Referred to weakly: the owner owns the gate.
    """

    def __init__(self, owner: DeferredWork) -> None:
        self._lock = threading.Lock()
        self._owner = weakref.ref(owner)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()

    def knock(self) -> None:
        """Do the deferred work now if nobody holds the lock; else its holder will."""
        if self._lock.acquire(blocking=False):
            self._leave()

    def _leave(self) -> None:
        owner = self._owner()
        if owner is None:  # the garbage collector is taking owner and notes away together
            self._lock.release()
            return
        while True:
            try:
                if owner.has_deferred_work():
                    owner.do_deferred_work()
            finally:
                self._lock.release()
            # Work that arrived between the drain and the release found the lock taken.
            if not owner.has_deferred_work() or not self._lock.acquire(blocking=False):
                return
