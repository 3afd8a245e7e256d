"""All plans of a short step, one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, final

from ebbtide.planning.plan import Decision
from ebbtide.planning.searching.choices import Choices
from ebbtide.planning.searching.contest import Contest, busy_s

MOST_PLANS: Final = 20_000
"""More plans than this are not enumerated."""


def count_plans(contest: Contest) -> int:
    """Return how many plans there are at most, the bounds on bytes in flight aside."""
    uses = contest.uses
    total = 1
    for index, layer in enumerate(contest.profile.layers):
        options = math.prod(
            len(_options(contest, piece)) for piece in {piece for _, piece in uses.saves[index]}
        )
        if layer.may_recompute:
            options += 1 if uses.inputs[index] is None else 2
        total *= options
        if total > MOST_PLANS:
            return total
    return total


def enumerate_plans(contest: Contest) -> None:
    """Predict every plan that could beat the best one; afterwards the best one is the optimum.

    A plan is left out if it computes for longer than the best plan's step takes, or if its kept
    storages alone are over the budget.
    """
    _Enumeration(contest).run()


def _options(contest: Contest, piece: int) -> list[Decision]:
    memory = contest.uses.memories[piece]
    options = [Decision.KEEP]
    if memory.may_leave and memory.size_bytes:
        options.append(Decision.OFFLOAD)
    if memory.rebuild_s is not None:
        options.append(Decision.REBUILD)
    return options


@final
class _Enumeration:
    """Chooses layer by layer, in the order of the forward passes."""

    def __init__(self, contest: Contest) -> None:
        self._contest = contest
        self._profile = contest.profile
        self._uses = contest.uses
        count = len(contest.profile.layers)
        self._choices = Choices([False] * count, [Decision.KEEP] * len(contest.uses.memories), 0)
        self._bounds = contest.bounds
        self._saved: set[int] = set()
        self._fixed_bytes = contest.resident_bytes

    def run(self) -> None:
        self._choose(0, self._fixed_bytes, busy_s(self._profile))

    def _choose(self, index: int, kept_bytes: int, least_s: float) -> None:
        """Try all choices of a layer and of those after it.

        Args:
            index: index of the layer.
            kept_bytes: what the layers before it keep.
            least_s: seconds of a step with the choices made so far that never waits.
        """
        best = self._contest.best
        within = best is not None and not best.score.excess_bytes
        if best is not None and within and least_s > best.score.step_s:
            return
        if kept_bytes > self._contest.budget.device_bytes:
            return
        if index == len(self._profile.layers):
            self._enter()
            return
        layer = self._profile.layers[index]
        new = [piece for _, piece in self._uses.saves[index] if piece not in self._saved]
        self._choices.recomputed[index] = False
        self._choose_pieces(index, list(dict.fromkeys(new)), kept_bytes, least_s)
        if layer.may_recompute:
            self._choices.recomputed[index] = True
            self._choose_input(index, kept_bytes, least_s + layer.second_forward_s)
            self._choices.recomputed[index] = False

    def _choose_pieces(
        self, index: int, pieces: list[int], kept_bytes: int, least_s: float
    ) -> None:
        if not pieces:
            self._choose(index + 1, kept_bytes, least_s)
            return
        piece, *others = pieces
        for decision, more_bytes in self._decisions(piece):
            self._choices.decisions[piece] = decision
            self._saved.add(piece)
            self._choose_pieces(index, others, kept_bytes + more_bytes, least_s)
            self._saved.remove(piece)
        self._choices.decisions[piece] = Decision.KEEP

    def _choose_input(self, index: int, kept_bytes: int, least_s: float) -> None:
        source = self._uses.inputs[index]
        if source is None or source in self._saved:
            self._choose(index + 1, kept_bytes, least_s)
            return
        self._saved.add(source)
        for decision, more_bytes in self._decisions(source):
            if decision is not Decision.REBUILD:
                self._choices.decisions[source] = decision
                self._choose(index + 1, kept_bytes + more_bytes, least_s)
        self._saved.remove(source)
        self._choices.decisions[source] = Decision.KEEP

    def _decisions(self, piece: int) -> Iterator[tuple[Decision, int]]:
        for decision in _options(self._contest, piece):
            kept = decision is Decision.KEEP
            yield decision, self._uses.memories[piece].size_bytes if kept else 0

    def _enter(self) -> None:
        leaves = Decision.OFFLOAD in self._choices.decisions or any(self._contest.resting)
        for bound_bytes in self._bounds if leaves else self._bounds[:1]:
            choices = self._choices.copy()
            choices.inflight_bytes = bound_bytes
            self._contest.enter(choices)
