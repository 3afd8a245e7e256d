"""Reads the stacks of all threads, and keeps nothing alive that is in them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_KEEPS_A_DICT = sys.version_info < (3, 13)


def visit_frames(look: Callable[[FrameType], None]) -> None:
    """Call a function with each frame on the stack of each thread.

    A function whose variables hold a frame of the stack it is on holds itself, and so what its
    callers' variables held, until the next garbage collection. This one ends with none.

    Args:
        look: the function. It must not keep the frame.
    """
    frames: list[FrameType | None] = list(sys._current_frames().values())
    while frames:
        frame = frames.pop()
        while frame is not None:
            look(frame)
            frame = frame.f_back


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return a copy of the variables of a frame.

    Before Python 3.13 a frame that was asked for its variables keeps a dict of them until its
    function returns: what the function has deleted since would stay in memory. So the dict is
    emptied, unless there is a debugger: Python copies the debugger's dict back.
    """
    variables = dict(frame.f_locals)
    is_of_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # others run with their dict
    is_debugged = frame.f_trace is not None or sys.gettrace() is not None
    if _KEEPS_A_DICT and is_of_function and not is_debugged:
        frame.f_locals.clear()
    return variables
