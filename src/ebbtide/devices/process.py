"""Tells objects that this process was forked from the process that they belong to.

A forked child has the objects of its parent, but not its threads, and it shares the parent's files.
Windows has no fork; there nothing is ever told.
"""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

_WATCHED: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_forks(owner: Any) -> None:
    """Call ``owner.note_fork`` in every process that is forked while ``owner`` is alive.

    It is called once, before any other code runs in the child, and must not block.
    """
    _WATCHED.add(owner)


def _note_fork() -> None:
    for owner in list(_WATCHED):
        owner.note_fork()


# The system has no way to undo this, so it is done once here and not for every object.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


# ---- Reads the stacks of all threads, and keeps nothing alive that is in them ----

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


# ---- Callbacks that do not keep their object alive ----


def call_weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method, or returns None once its object is gone.

    The function refers to the object weakly, so a global registry may hold the function for ever.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call
