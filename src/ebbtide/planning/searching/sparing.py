"""Takes back what a plan offloads or recomputes without need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ebbtide.planning.plan import Decision
from ebbtide.planning.searching.choices import Choices
from ebbtide.planning.searching.contest import Contest, Contestant

_MOST_WORK: Final = 20_000  # layers that are looked at in all, over all predictions


def spare(contest: Contest, best: Contestant) -> Contestant:
    """Keep what a plan moves although it fits and takes no longer without.

    A prediction counts no work of the host for a copy, nor bandwidth of the memory. So of two plans
    that are predicted to take the same time, the one that moves less is the better one.

    Args:
        contest: predicts the plans.
        best: a plan within the budget.

    Returns:
        The plan that moves least of those that were looked at.
    """
    most = contest.num_predictions + _MOST_WORK // len(contest.profile.layers)
    for changed in _fewer_layers(contest, best):
        if contest.num_predictions >= most:
            return best
        best = _better(contest, best, changed)
    for piece in range(len(contest.uses.memories)):
        if best.choices.decisions[piece] is Decision.OFFLOAD:
            if contest.num_predictions >= most:
                return best
            changed = best.choices.copy()
            changed.decisions[piece] = Decision.KEEP
            best = _better(contest, best, changed)
    return best


def _better(contest: Contest, best: Contestant, changed: Choices) -> Contestant:
    other = contest.enter(changed)
    fits = not other.score.excess_bytes and other.score.step_s <= best.score.step_s
    return other if fits else best


def _fewer_layers(contest: Contest, best: Contestant) -> Iterator[Choices]:
    """Yield the choices with fewer and fewer layers that move anything, the last ones first.

    What the last layers save is needed again first.
    """
    changed = best.choices.copy()
    for index in reversed(range(len(contest.profile.layers))):
        pieces = [piece for _, piece in contest.uses.saves[index]]
        moved = [piece for piece in pieces if changed.decisions[piece] is Decision.OFFLOAD]
        if not moved and not changed.recomputed[index]:
            continue
        changed = changed.copy()
        changed.recomputed[index] = False
        for piece in moved:
            changed.decisions[piece] = Decision.KEEP
        yield changed
