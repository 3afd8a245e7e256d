"""Tests wait for what other threads are about to do; on a busy machine that can take a while."""

from __future__ import annotations

import time
from collections.abc import Callable

from ebbtide import OffloadHandle

PATIENCE_S = 60


def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: it did not hold for a minute; ``otherwise`` says what did not happen.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, otherwise
        time.sleep(0.001)


def await_copies(handle: OffloadHandle) -> None:
    """Wait until everything that has been offloaded is in its store."""
    wait_until(lambda: not handle.inspect().in_flight.offload_bytes, "copies did not end")
