"""Keeps mapped files from filling RAM while code that ebbtide does not control goes over them."""

from __future__ import annotations

import mmap
import sys
import threading
from types import FrameType
from typing import final

import psutil

from ebbtide.devices.lanes import watch
from ebbtide.stores.store import AbstractStore

_PAGER_S = 0.001  # interval at which the pager checks the mapped pages during an optimizer step
_CHECKS_A_LOOK = 20  # checks of the pages between two looks at whether the step still runs


@final
class Pager:
    """A thread that pages files out whenever a step has brought too many pages into RAM.

    It ends with the step, even if that raises: it looks whether the caller's frame still runs. The
    frame refers to the optimizer, so it is let go of as soon as the step is over: the thread may
    not run for a while on a busy machine, and the state of an optimizer that is dropped gives its
    room back at once.

    Args:
        store: the store of the files.
        most_bytes: how much may stay in RAM.
    """

    def __init__(self, store: AbstractStore, most_bytes: int) -> None:
        self._store: AbstractStore | None = store
        self._most_bytes = most_bytes
        self._begin_bytes = _mapped_bytes()  # pages of libraries and of the last layers
        self._step: FrameType | None = _calling_frame()
        self._stepping_thread = threading.get_ident()
        self._num_looks = 0
        watch(self._look, _PAGER_S, "ebbtide-pager")

    def stop(self) -> None:
        """End the thread, and let go of the step. This does not wait for the thread."""
        self._step = self._store = None

    def _look(self) -> bool:
        """Page out if there is too much. Returns whether the step still runs."""
        self._num_looks += 1
        is_due = self._num_looks % _CHECKS_A_LOOK == 0
        if is_due and not _is_running(self._step, self._stepping_thread):
            self.stop()
        store = self._store
        if store is not None and _mapped_bytes() > self._begin_bytes + self._most_bytes:
            store.page_out()
        return store is not None


def _calling_frame() -> FrameType:
    """The frame of the code outside this package that called it."""
    frame = sys._getframe()
    package = __name__.partition(".")[0]
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == package:
        frame = frame.f_back
    return frame


def _is_running(sought: FrameType | None, thread: int) -> bool:
    """Whether a frame is on the stack of a thread. None is on no stack."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame is not sought:
        frame = frame.f_back
    return frame is not None


def _mapped_bytes() -> int:
    """Bytes of this process's memory that are pages of mapped files; 0 where unknown.

    Windows counts all memory of the process together, which grows by as much in a step.
    """
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().rss)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[2]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return 0
