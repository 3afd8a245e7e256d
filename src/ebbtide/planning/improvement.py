"""Improves a plan by changing one layer or one storage at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ebbtide.planning.choices import Choices, inflight_choices
from ebbtide.planning.contest import Contest
from ebbtide.planning.plan import Decision

MOST_WORK: Final = 20_000
"""Number of layers that are looked at in all, over all predictions; it takes about a second."""


def improve(contest: Contest, most_work: int = MOST_WORK) -> None:
    """Change the best plan as long as one change makes it better.

    Args:
        contest: predicts the changed plans. Its best plan is changed.
        most_work: predictions end when they have looked at this many layers.
    """
    most = contest.num_predictions + most_work // len(contest.profile.layers)
    improved = True
    while improved and contest.num_predictions < most:
        improved = False
        assert contest.best is not None
        for change in list(_changes(contest)):
            if contest.num_predictions >= most:
                return
            before = contest.best
            changed = before.choices.copy()
            if _apply(change, changed) and contest.enter(changed) is contest.best:
                improved = True


_Change = tuple[int | None, bool, tuple[tuple[int, Decision], ...], int | None]
"""The layer to be recomputed or not, whether it is, the pieces' decisions, the bound in flight."""


def _apply(change: _Change, choices: Choices) -> bool:
    """Change choices; return whether that made a difference."""
    index, recomputed, decisions, bound_bytes = change
    differs = False
    if index is not None and choices.recomputed[index] != recomputed:
        choices.recomputed[index] = recomputed
        differs = True
    for piece, decision in decisions:
        if choices.decisions[piece] is not decision:
            choices.decisions[piece] = decision
            differs = True
    if bound_bytes is not None and choices.inflight_bytes != bound_bytes:
        choices.inflight_bytes = bound_bytes
        differs = True
    return differs


def _changes(contest: Contest) -> Iterator[_Change]:
    """Yield the changes to try: of the bound, of whole layers, of single storages, of pairs."""
    for bound_bytes in inflight_choices(contest.profile):
        yield None, False, (), bound_bytes
    uses = contest.uses
    for index in _inside_out(len(contest.profile.layers)):
        pieces = [piece for _, piece in uses.saves[index]]
        source = uses.inputs[index]
        for decision in (Decision.KEEP, Decision.OFFLOAD):
            yield index, False, tuple((piece, decision) for piece in pieces), None
            if contest.profile.layers[index].may_recompute:
                yield index, True, () if source is None else ((source, decision),), None
        for piece in pieces if len(pieces) > 1 else ():
            for decision in Decision:
                if decision is not Decision.REBUILD or uses.memories[piece].sources:
                    yield index, False, ((piece, decision),), None
        if len(pieces) == 1 and uses.memories[pieces[0]].sources:
            yield index, False, ((pieces[0], Decision.REBUILD),), None
    yield from _swaps(contest)


def _swaps(contest: Contest) -> Iterator[_Change]:
    """Yield exchanges of what becomes of one storage and of another one nearby."""
    assert contest.best is not None
    decisions = contest.best.choices.decisions
    memories = contest.uses.memories
    for piece in range(len(memories)):
        for other in range(piece + 1, min(piece + 4, len(memories))):
            if decisions[piece] is decisions[other]:
                continue
            swapped = ((piece, decisions[other]), (other, decisions[piece]))
            if all(
                memories[each].sources or decision is not Decision.REBUILD
                for each, decision in swapped
            ):
                yield None, False, swapped, None


def _inside_out(count: int) -> Iterator[int]:
    """Yield the numbers of layers so that the first ones are spread evenly over the step."""
    step = 1
    while step < count:
        step *= 2
    seen: set[int] = set()
    while step:
        for index in range(0, count, step):
            if index not in seen:
                seen.add(index)
                yield index
        step //= 2
