"""Repeats a measurement until its time is used up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(frozen=True)
class Sample:
    """Equal repetitions of one piece of work.

    Attributes:
        amount: bytes or FLOP of one repetition.
        durations_s: how long each took.
        note: what the work was, such as ``"n = 2048"``.
    """

    amount: float
    durations_s: tuple[float, ...]
    note: str = ""

    @property
    def best_per_s(self) -> float:
        """The rate of the fastest repetition: what the machine can do when nothing disturbs it."""
        return self.amount / min(self.durations_s)

    @property
    def median_per_s(self) -> float:
        """The rate of the median repetition: what a step gets."""
        return self.amount / statistics.median(self.durations_s)

    def figures(self) -> dict[str, Any]:
        """Return the sample for a JSON file."""
        return {
            "amount": self.amount,
            "note": self.note,
            "repetitions": len(self.durations_s),
            "best_per_s": self.best_per_s,
            "median_per_s": self.median_per_s,
        }


def sample(
    amount: float,
    work: Callable[[], float | None],
    budget_s: float,
    *,
    most: int = 200,
    note: str = "",
) -> Sample:
    """Repeat work until its time is used up, at least twice; the first repetition warms up.

    Args:
        amount: bytes or FLOP of one repetition.
        work: does one repetition, and blocks until it is done. It may return the seconds that
            count, if it also does what does not count.
        budget_s: stop once so much time has passed.
        most: stop after so many repetitions.
        note: what the work is.
    """
    begin_s = time.perf_counter()
    durations: list[float] = []
    while len(durations) < 2 or (
        len(durations) <= most and time.perf_counter() - begin_s < budget_s
    ):
        before_s = time.perf_counter()
        own_s = work()
        passed_s = time.perf_counter() - before_s if own_s is None else own_s
        durations.append(max(passed_s, 1e-9))
    return Sample(amount, tuple(durations[1:]), note)
