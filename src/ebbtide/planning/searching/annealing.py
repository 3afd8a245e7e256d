"""Improves a plan by random changes, of which some make it worse for a while."""

from __future__ import annotations

import math
import random
from typing import Final

from ebbtide.planning.searching.contest import Contest, Score
from ebbtide.planning.searching.improvement import apply_change, changes

MOST_WORK: Final = 20_000
"""Number of layers that are looked at in all, over all predictions; it takes about a second."""

_HOT, _COLD = 1e-2, 3e-4  # by which share of the step a change may make it longer, begin and end
_PENALTY: Final = (
    3.0  # by which share a step counts as longer if the budget is exceeded by all of it
)


def anneal(contest: Contest, most_work: int = MOST_WORK) -> None:
    """Change plans at random (simulated annealing). The same contest gives the same plans.

    Args:
        contest: predicts the changed plans. Its best plan is the first.
        most_work: predictions end when they have looked at this many layers.
    """
    assert contest.best is not None
    choose = random.Random(0)
    current, first_s = contest.best, contest.best.score.step_s
    limit_bytes = max(1, contest.budget.device_bytes)

    def badness(score: Score) -> float:
        return score.step_s / first_s + _PENALTY * score.excess_bytes / limit_bytes

    tries = most_work // len(contest.profile.layers) if first_s else 0
    known = list(changes(contest))
    for done in range(tries):
        if contest.is_late:
            return
        temperature = _HOT * (_COLD / _HOT) ** (done / tries)
        changed = current.choices.copy()
        if not apply_change(choose.choice(known), changed):
            continue
        entered = contest.enter(changed)
        worse = badness(entered.score) - badness(current.score)
        if worse <= 0 or choose.random() < math.exp(-worse / temperature):
            current = entered
