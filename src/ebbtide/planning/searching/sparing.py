"""Takes back what a plan offloads or recomputes without need."""

from __future__ import annotations

from collections.abc import Sequence
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
    best = _spare_last_layers(contest, best, most - contest.num_predictions)
    moved = [i for i, each in enumerate(best.choices.decisions) if each is Decision.OFFLOAD]
    if len(moved) > most - contest.num_predictions:
        return best  # a few pieces of many make no difference
    for piece in moved:
        changed = best.choices.copy()
        changed.decisions[piece] = Decision.KEEP
        best = _better(contest, best, changed)
    return best


def _spare_last_layers(contest: Contest, best: Contestant, most: int) -> Contestant:
    """Have fewer layers move anything, the first ones only.

    What the last layers save is needed again first.

    Args:
        contest: predicts the plans.
        best: a plan within the budget.
        most: predictions, if there are more layers than that.
    """
    moving = _moving_layers(contest, best)
    if len(moving) <= most:
        for count in range(1, len(moving) + 1):
            best = _better(contest, best, _without(contest, best.choices, moving[:count]))
        return best
    fewest, too_many = 0, len(moving) + 1  # layers that need not move anything, and that must
    while too_many - fewest > 1:
        count = (fewest + too_many) // 2
        spared = _better(contest, best, _without(contest, best.choices, moving[:count]))
        fewest, too_many = (fewest, count) if spared is best else (count, too_many)
        best = spared
    return best


def _better(contest: Contest, best: Contestant, changed: Choices) -> Contestant:
    if contest.is_late:
        return best
    other = contest.enter(changed)
    fits = not other.score.excess_bytes and other.score.step_s <= best.score.step_s
    return other if fits else best


def _moving_layers(contest: Contest, best: Contestant) -> list[int]:
    """Return the layers that are recomputed or offload anything, the last one first."""
    choices = best.choices
    return [
        index
        for index in reversed(range(len(contest.profile.layers)))
        if choices.recomputed[index] or _offloaded(contest, choices, index)
    ]


def _offloaded(contest: Contest, choices: Choices, index: int) -> list[int]:
    pieces = [piece for _, piece in contest.uses.saves[index]]
    return [piece for piece in pieces if choices.decisions[piece] is Decision.OFFLOAD]


def _without(contest: Contest, choices: Choices, layers: Sequence[int]) -> Choices:
    """Return choices in which some layers run as they are and keep what they had offloaded."""
    changed = choices.copy()
    for index in layers:
        changed.recomputed[index] = False
        for piece in _offloaded(contest, changed, index):
            changed.decisions[piece] = Decision.KEEP
    return changed
