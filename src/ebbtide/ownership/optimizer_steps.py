"""Tells when an optimizer steps: torch calls two hooks around the step of every optimizer."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class OptimizerListener(Protocol):
    """Is told of the steps of all optimizers in the process."""

    def begin_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before the step."""

    def end_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called after it."""


_listeners: weakref.WeakSet[OptimizerListener] = weakref.WeakSet()
_registered: list[Any] = []


def listen_to_optimizers(listener: OptimizerListener) -> None:
    """Tell an object of each optimizer's steps for as long as it lives."""
    _listeners.add(listener)
    if not _registered:
        _registered.append(register_optimizer_step_pre_hook(_begin))
        _registered.append(register_optimizer_step_post_hook(_end))


def _begin(optimizer: Optimizer, *_: Any) -> None:
    for listener in list(_listeners):
        listener.begin_optimizer_step(optimizer)


def _end(optimizer: Optimizer, *_: Any) -> None:
    for listener in list(_listeners):
        listener.end_optimizer_step(optimizer)
