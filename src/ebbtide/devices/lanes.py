"""Threads beside the program's: those that copy, read and write in order, and those that watch.

[Note: end of the process] The threads are daemons, so that none keeps a process alive that is to
end. But the interpreter stops daemons wherever they are when it ends, and one that is inside torch
then takes the process down with it ("terminate called without an active exception", exit code 134).
So work that was queued is finished first, and threads that watch end: to free a tensor is work in
torch, too. Python ends threads of its own, runs what was registered with `atexit`, the latest
first, and only then stops daemons.
"""

from __future__ import annotations

import _thread
import atexit
import errno
import functools
import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, final

from ebbtide.devices.device import AbstractEvent, AbstractLane, Origin, Span, raise_again
from ebbtide.errors import StoreFullError

_LOG = logging.getLogger(__name__)


@final
class LaneEvent(AbstractEvent):
    """The end of one job of a worker thread, with the error that it raised, if any.

    It waits with a lock of the interpreter's: an interrupt in `threading.Event.wait`, which is
    written in Python, can come out of it as a RuntimeError about a lock that is not locked.

    Args:
        lane: the name of the worker's lane in traces.
    """

    def __init__(self, lane: str = "") -> None:
        self._lane = lane
        self._is_done = False
        self._pending = threading.Lock()
        self._pending.acquire()  # until the job has ended
        self._claim = threading.Lock()  # of whoever begins the job, or takes it back
        self._begin_s: float | None = None
        self._end_s = 0.0

    def begin(self) -> bool:
        """Begin the job, unless it has been withdrawn; return whether it begins."""
        begins = self._claim.acquire(blocking=False)
        if begins:
            self._begin_s = time.perf_counter()
        return begins

    def withdraw(self) -> bool:
        return self._claim.acquire(blocking=False)

    def finish(self, failure: BaseException | None = None) -> None:
        self.failure = failure
        self._end_s = time.perf_counter()
        self._is_done = True
        self._pending.release()

    def query(self) -> bool:
        return self._is_done

    def synchronize(self) -> None:
        self._wait()
        if self.failure is not None:
            raise_again(self.failure)

    def since(self, origin: Origin) -> float:
        self._wait()
        return self._end_s - origin.host_s

    def spans(self, origin: Origin) -> list[Span]:
        self._wait()
        if self._begin_s is None:
            return []
        return [(self._lane, self._begin_s - origin.host_s, self._end_s - origin.host_s)]

    def _wait(self) -> None:
        if not self._is_done:
            with self._pending:
                pass

    def wait_until(self, end_s: float) -> None:
        """Wait for the event, but no longer than until this time of `time.perf_counter`."""
        if not self._is_done:
            left_s = max(0.0, end_s - time.perf_counter())
            if self._pending.acquire(timeout=left_s):
                self._pending.release()


_Job = tuple[Callable[[], None], LaneEvent, Callable[[], None] | None]
_End = weakref.ref[Any] | None
"""After it no job comes: the lane was closed, or has been collected."""


_WORKERS: dict[threading.Thread, weakref.ref[WorkLane]] = {}  # those that run, and their lanes
_LONGEST_END_S = 60.0
_DEFERRED: set[LaneEvent] = set()  # work of `defer` and `watch` that has not ended
_ENDING = threading.Event()  # the process is about to end


@final
class WorkLane(AbstractLane):
    """A worker thread that runs callables in the order of their submission.

    The thread starts with the first submission and ends when the lane is closed or collected. It
    has no reference to the lane.

    An interrupt can come between any two lines of `submit`, and into the start of a thread. So no
    lock is taken, and of two threads that were started the first to come into the list is the
    worker. That the lane has been collected is told to it by the interpreter, without Python code.

    Args:
        name: the name of the thread.
        lane: the name of the lane in traces.
    """

    def __init__(self, name: str, lane: str = "") -> None:
        self._name = name
        self._lane = lane
        self._queue: queue.SimpleQueue[_Job | _End] = queue.SimpleQueue()
        self._workers: list[threading.Thread] = []

    def submit(self, work: Callable[[], None], then: Callable[[], None] | None = None) -> LaneEvent:
        """Queue ``work`` and return an event that is reached when the work has ended or failed.

        Args:
            work: runs in the lane's thread.
            then: runs in that thread right after the event is reached, even if the work failed.

        Raises:
            StoreFullError: the system has no thread for the lane. Nothing was queued.
        """
        event = LaneEvent(self._lane)
        if not self._workers:
            self._start()
        self._queue.put((work, event, then))
        return event

    def _start(self) -> None:
        arguments = self._queue, self._workers, weakref.ref(self, self._queue.put)
        thread = threading.Thread(target=_run_lane, args=arguments, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise StoreFullError(
                errno.EAGAIN,
                f"the system has no thread to spare for copies ({error}). End other threads or "
                f"processes, or raise their limit: `ulimit -u`, or the pids limit of the container",
            ) from error
        while not self._workers:
            time.sleep(0)

    def drain(self, end_s: float) -> None:
        """Wait until all submitted work has ended, but no longer than `LaneEvent.wait_until`."""
        # After a fork the child has no such thread, and waits for nothing.
        if self._workers and self._workers[0].is_alive():
            self.submit(_do_nothing).wait_until(end_s)

    def close(self) -> None:
        """Finish the submitted work and end the thread."""
        self._queue.put(None)
        if self._workers and self._workers[0] is not threading.current_thread():
            self._workers[0].join()


def _run_lane(
    jobs: queue.SimpleQueue[_Job | _End],
    workers: list[threading.Thread],
    lane: weakref.ref[WorkLane],
) -> None:
    """Run the jobs of a lane in this thread.

    Args:
        jobs: the queue that the lane and its end write to.
        workers: the lane's list of threads; see `WorkLane`.
        lane: writes to the queue when the lane is collected, if this reference is still there then.
    """
    own = threading.current_thread()
    _WORKERS[own] = lane
    try:
        workers.append(own)
        if workers[0] is own:
            _run_jobs(jobs)
    finally:
        _WORKERS.pop(own, None)


def _run_jobs(jobs: queue.SimpleQueue[_Job | _End]) -> None:
    while isinstance(job := jobs.get(), tuple):
        work, event, then = job
        failure: BaseException | None = None
        try:
            if event.begin():
                work()
        except BaseException as error:  # whoever waits for the event gets the error, of any kind
            # The traceback is removed because its frames would keep the work's tensors alive.
            failure = error.with_traceback(None)
        # Waiting for the next job must not keep the memory alive to which this one refers.
        del job, work
        event.finish(failure)
        if then is not None:
            try:
                then()
            except Exception:
                _LOG.exception("what follows work in a lane failed; the lane goes on")
        del event, then, failure


def defer(work: Callable[[], None]) -> None:
    """Run work that may block in a new thread. Never blocks the caller, so finalizers can call it.

    It does not use `threading.Thread`, which takes locks that the code interrupted by a finalizer
    may hold.
    """
    # During interpreter shutdown no thread may start; the operating system then frees everything.
    if sys.is_finalizing():
        return
    ended = LaneEvent()
    _DEFERRED.add(ended)
    try:
        _thread.start_new_thread(_run_deferred, ([work], ended))
    except RuntimeError:
        _DEFERRED.discard(ended)


def _run_deferred(given: list[Callable[[], None]], ended: LaneEvent) -> None:
    """Run work in a thread, and let go of it before its end is told.

    What the work refers to may own tensors. A thread that freed them while the interpreter ends
    would take the process down; see [Note: end of the process].

    Args:
        given: the work, which is taken from the list.
        ended: reached when the work has ended and is gone.
    """
    try:
        given.pop()()
    except Exception:
        _LOG.exception("deferred work failed")
    finally:
        _DEFERRED.discard(ended)
        ended.finish()


def watch(look: Callable[[], bool], every_s: float, name: str) -> None:
    """Call a function again and again in a new thread, until it returns False.

    It also ends with the process, which waits for a call that runs then.

    Args:
        look: the function.
        every_s: seconds before each call.
        name: the name of the thread.
    """

    def run(ending: threading.Event) -> None:
        while not ending.wait(every_s) and look():
            pass

    ended = LaneEvent()
    _DEFERRED.add(ended)
    try:
        arguments = [functools.partial(run, _ENDING)], ended
        threading.Thread(target=_run_deferred, args=arguments, name=name, daemon=True).start()
    except BaseException:
        _DEFERRED.discard(ended)
        raise


def _do_nothing() -> None:
    """What `drain` queues behind all other work."""


def _forget_threads() -> None:
    """Forget the parent's threads in a forked child, which has none of them."""
    global _ENDING
    _ENDING = threading.Event()  # a thread of the parent may hold the lock of the other one
    _DEFERRED.clear()
    _WORKERS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


@atexit.register
def _drain_all() -> None:
    """Wait until no thread of this module works. See [Note: end of the process].

    A thread may wait for something that does not come any more, so there is a limit.
    """
    end_s = time.perf_counter() + _LONGEST_END_S
    _ENDING.set()
    while _DEFERRED and time.perf_counter() < end_s:  # what was deferred can defer more
        for ended in list(_DEFERRED):
            ended.wait_until(end_s)
    for thread, known in list(_WORKERS.items()):
        lane = known()
        if lane is not None:
            lane.drain(end_s)
        else:  # the worker of a lane that is gone finishes its work, and ends
            thread.join(max(0.0, end_s - time.perf_counter()))
