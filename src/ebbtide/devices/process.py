"""Tells objects that this process was forked from the process that they belong to.

A forked child has the objects of its parent, but not its threads, and it shares the parent's files.
Windows has no fork; there nothing is ever told.
"""

from __future__ import annotations

import functools
import itertools
import os
import weakref
from collections.abc import Callable
from typing import Any

from torch import distributed
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

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


def num_processes() -> int:
    """Return how many processes train together, as far as `torch.distributed` knows."""
    known = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if known else 1


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


# ---- Tells objects of the steps of all optimizers ----
#
# [Note: hooks of all optimizers] An optimizer goes through torch's global hooks while it steps. If
# another thread registers or removes one at that moment, the step raises an error. So torch has two
# of them for as long as the process lives, from the import of this file on, and who watches comes
# and goes here. A dict's values become a tuple in one step of the interpreter.

_Told = Callable[..., None] | None
OPTIMIZER_WATCHES: dict[int, tuple[_Told, _Told]] = {}
"""What is called before and after each optimizer's step. See [Note: hooks of all optimizers]."""

_NUMBERS = itertools.count()


def watch_optimizers(before: _Told = None, after: _Told = None) -> Callable[[], object]:
    """Tell an object of each step of any optimizer, as long as the object lives.

    Args:
        before: a method of the object, called with the optimizer and the arguments of its step; or
            a function, which is told for as long as the process lives.
        after: the same, called after the step, unless that has raised an error.

    Returns:
        What ends it.
    """
    number = next(_NUMBERS)
    owner = getattr(before or after, "__self__", None)
    if owner is None:
        OPTIMIZER_WATCHES[number] = before, after
        return functools.partial(OPTIMIZER_WATCHES.pop, number, None)
    told = [None if each is None else call_weakly(each) for each in (before, after)]
    end = weakref.finalize(owner, OPTIMIZER_WATCHES.pop, number, None)
    end.atexit = False
    OPTIMIZER_WATCHES[number] = told[0], told[1]
    return end


def _tell(when: int, *step: Any) -> None:
    for told in tuple(OPTIMIZER_WATCHES.values()):
        tell = told[when]
        if tell is not None:
            tell(*step)


register_optimizer_step_pre_hook(functools.partial(_tell, 0))
register_optimizer_step_post_hook(functools.partial(_tell, 1))
