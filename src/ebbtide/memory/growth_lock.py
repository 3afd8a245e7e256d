"""A lock that lets one process of a host at a time allocate host memory.

[Note: growth in turn] A store checks how much RAM is free before it allocates. If two ranks checked
at the same moment, both would find the same RAM and both would take it, and the kernel would kill
one of them. So a store holds this lock from the check until the pages are allocated, and the next
process that checks finds less.

The lock is an advisory `flock` on `/dev/zero`. Every Linux host and container has this file, and it
is never on a network file system, where the lock would reach other hosts. Nothing is created that a
killed process could leave behind: the kernel releases the lock of a process that ends, however it
ends. There is no table of who has taken what either, because the free RAM already says it.

A process that allocates one block after the other would take the lock again before another one
notices that it was free. So whoever waits holds the *door*, a second lock, and comes next.

A process that is stopped while it holds the lock (SIGSTOP, a debugger) keeps it. The others wait
for a limited time, warn, and allocate without the lock until it is free again.
"""

from __future__ import annotations

import contextlib
import io
import time
import weakref
from collections.abc import Iterator
from typing import Final, final

from ebbtide.forks import watch_forks
from ebbtide.interface.warning import warn_user

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_LOCK_FILE: Final = "/dev/zero"
_DOOR_FILE: Final = "/dev/null"
_PATIENCE_S = 60.0  # page-locking takes up to 0.35 s/GiB, and several ranks may be ahead
_LITTLE_PATIENCE_S = 0.1  # with a process that has been given up
_POLL_S = 0.002


@final
class GrowthLock:
    """The lock of [Note: growth in turn]. Threads of one process take turns, too."""

    def __init__(self) -> None:
        self._files: weakref.WeakSet[io.FileIO] = weakref.WeakSet()
        self._has_given_up = False
        watch_forks(self)

    def note_fork(self) -> None:
        """Close what another thread of the parent had open; the child would keep the lock."""
        for file in list(self._files):
            file.close()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the lock. A thread that holds it must not ask for it again.

        Where the system has no such lock, or its holder is stopped, the body runs without it.
        """
        patience_s = _LITTLE_PATIENCE_S if self._has_given_up else _PATIENCE_S
        deadline_s = time.monotonic() + patience_s
        with contextlib.ExitStack() as held:
            with self._claim(_DOOR_FILE, deadline_s):
                has_lock = held.enter_context(self._claim(_LOCK_FILE, deadline_s))
            if has_lock:
                self._has_given_up = False
            yield

    @contextlib.contextmanager
    def _claim(self, path: str, deadline_s: float) -> Iterator[bool]:
        """Lock a file; the body is told whether that has succeeded."""
        file = _open(path)
        if file is None:
            yield False
            return
        with file:
            self._files.add(file)
            is_locked = self._wait(file, deadline_s)
            try:
                yield is_locked
            finally:
                if is_locked and not file.closed:  # in a process that was forked inside, it is
                    # Closing alone would not release it while a forked process has a copy.
                    fcntl.flock(file, fcntl.LOCK_UN)

    def _wait(self, file: io.FileIO, deadline_s: float) -> bool:
        """Wait for the lock on a file; return whether it is held now."""
        while True:
            try:
                # No blocking call: it could not be given up.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            except OSError:  # a sandbox without such locks
                return False
            else:
                return True
            if time.monotonic() > deadline_s:
                self._warn()
                return False
            time.sleep(_POLL_S)

    def _warn(self) -> None:
        if self._has_given_up:
            return
        self._has_given_up = True
        warn_user(
            "growth-lock",
            f"another process on this host has been allocating host memory for {_PATIENCE_S:.0f} s "
            f"(it may be stopped); ebbtide goes on without waiting for it. Until it ends or "
            f"continues, two ranks can take the same free RAM; a host_budget for each rank "
            f"prevents that",
        )


def _open(path: str) -> io.FileIO | None:
    """Open a file; None if the system has no such file, no locks, or no descriptor left."""
    if fcntl is None:
        return None
    try:
        return io.FileIO(path)
    except OSError:
        return None


GROWTH_LOCK: Final = GrowthLock()
"""The lock of this process. It is one for all models, because they share the RAM of the host."""
