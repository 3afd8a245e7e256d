"""Tells objects that this process was forked from the process that they belong to.

A forked child has the objects of its parent, but not its threads, and it shares the parent's files.
Windows has no fork; there nothing is ever told.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """An object that must change in a forked child."""

    def note_fork(self) -> None:
        """Called once in a forked child, before any other code runs there. It must not block."""


_WATCHED: weakref.WeakSet[Forkable] = weakref.WeakSet()


def watch_forks(owner: Forkable) -> None:
    """Call ``owner.note_fork`` in every process that is forked while ``owner`` is alive."""
    _WATCHED.add(owner)


def _note_fork() -> None:
    for owner in list(_WATCHED):
        owner.note_fork()


# The system has no way to undo this, so it is done once here and not for every object.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
