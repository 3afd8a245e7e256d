"""Improves a plan by changing one layer or one storage at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ebbtide.planning.plan import Decision
from ebbtide.planning.searching.choices import Choices
from ebbtide.planning.searching.contest import Contest, Contestant

MOST_WORK: Final = 20_000
"""Number of layers that are looked at in all, over all predictions; it takes about a second."""

_RELIEFS: Final = 2  # times that a plan is changed at once to fit


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
        for change in list(changes(contest)):
            if contest.num_predictions >= most or contest.is_late:
                return
            before = contest.best
            changed = before.choices.copy()
            if apply_change(change, changed) and contest.enter(changed) is contest.best:
                improved = True


def relieve(contest: Contest, contestant: Contestant) -> bool:
    """Recompute or offload a little more, so that a plan slightly over the budget fits.

    Args:
        contest: predicts the changed plans.
        contestant: the plan.

    Returns:
        Whether one of the changed plans fits.
    """
    fits = False
    for changing in (_recompute_more, _offload_more):
        changed = contestant
        for _ in range(_RELIEFS):
            changed = contest.enter(changing(contest, changed))
            if not changed.score.excess_bytes:
                fits = True
                break
    return fits


def _relieving(contest: Contest, contestant: Contestant) -> list[int]:
    """Return the layers that keep storages at the peak and run as they are, spread evenly."""
    peaks = contestant.prediction.peak_by_position
    place, count = peaks.index(max(peaks)), len(contest.profile.layers)
    layers = min(place, 2 * count - place)
    order = _inside_out(count)
    return [i for i in order if i <= layers and not contestant.choices.recomputed[i]]


def _kept_by(contest: Contest, choices: Choices, index: int) -> list[int]:
    pieces = dict.fromkeys(piece for _, piece in contest.uses.saves[index])
    return [piece for piece in pieces if choices.decisions[piece] is Decision.KEEP]


def _recompute_more(contest: Contest, contestant: Contestant) -> Choices:
    choices, uses = contestant.choices.copy(), contest.uses
    left_bytes = contestant.score.excess_bytes
    costs: list[tuple[float, int, int]] = []
    for index in _relieving(contest, contestant):
        layer, source = contest.profile.layers[index], uses.inputs[index]
        kept = _kept_by(contest, choices, index)
        freed_bytes = sum(uses.memories[piece].size_bytes for piece in kept)
        if source is not None and choices.decisions[source] is Decision.KEEP:
            freed_bytes -= uses.memories[source].size_bytes
        if layer.may_recompute and freed_bytes > 0:
            # What is freed beyond the excess is worth nothing.
            useful_bytes = min(freed_bytes, left_bytes)
            costs.append((layer.second_forward_s / useful_bytes, index, freed_bytes))
    for _, index, freed_bytes in sorted(costs):
        if left_bytes <= 0:
            break
        choices.recomputed[index] = True
        left_bytes -= freed_bytes
    return choices


def _offload_more(contest: Contest, contestant: Contestant) -> Choices:
    choices, memories = contestant.choices.copy(), contest.uses.memories
    left_bytes = contestant.score.excess_bytes
    for index in _relieving(contest, contestant):
        for piece in _kept_by(contest, choices, index):
            if left_bytes > 0 and memories[piece].may_leave:
                choices.decisions[piece] = Decision.OFFLOAD
                left_bytes -= memories[piece].size_bytes
    return choices


Change = tuple[int | None, bool, tuple[tuple[int, Decision], ...], int | None]
"""The layer to be recomputed or not, whether it is, the pieces' decisions, the bound in flight."""


def apply_change(change: Change, choices: Choices) -> bool:
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


def changes(contest: Contest) -> Iterator[Change]:
    """Yield the changes to try: of the bound, of whole layers, of single storages, of pairs."""
    for bound_bytes in contest.bounds:
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


def _swaps(contest: Contest) -> Iterator[Change]:
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
