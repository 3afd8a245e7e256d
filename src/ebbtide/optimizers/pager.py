"""Keeps mapped files from filling RAM while code that ebbtide does not control goes over them."""

from __future__ import annotations

import mmap
import sys
import threading
import time
from types import FrameType
from typing import final

import psutil

from ebbtide.stores.store import AbstractStore

_PAGER_S = 0.001  # interval at which the pager checks the mapped pages during an optimizer step
_CHECKS_A_LOOK = 20  # checks of the pages between two looks at whether the step still runs


@final
class Pager:
    """A thread that pages files out whenever a step has brought too many pages into RAM.

    It ends with the step, even if that raises: it looks whether the caller's frame still runs.

    Args:
        store: the store of the files.
        most_bytes: how much may stay in RAM.

    Attributes:
        stopped: set to end the thread.
    """

    def __init__(self, store: AbstractStore, most_bytes: int) -> None:
        self.stopped = False
        self._store = store
        self._most_bytes = most_bytes
        arguments = _calling_frame(), threading.get_ident()
        threading.Thread(target=self._run, args=arguments, daemon=True).start()

    def _run(self, step: FrameType, thread: int) -> None:
        begin_bytes = _mapped_bytes()  # pages of libraries and of the last layers
        number = 0
        while not self.stopped:
            time.sleep(_PAGER_S)
            number += 1
            if number % _CHECKS_A_LOOK == 0 and not _is_running(step, thread):
                return
            if _mapped_bytes() > begin_bytes + self._most_bytes:
                self._store.page_out()


def _calling_frame() -> FrameType:
    """The frame of the code outside this package that called it."""
    frame = sys._getframe()
    package = __name__.partition(".")[0]
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == package:
        frame = frame.f_back
    return frame


def _is_running(sought: FrameType, thread: int) -> bool:
    """Whether a frame is on the stack of a thread."""
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
