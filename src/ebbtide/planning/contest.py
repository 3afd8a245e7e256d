"""What the search is made of: choices, their changes, plans made by hand, and the best so far."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, final

from ebbtide.devices.hardware import Hardware
from ebbtide.planning.plan import LayerMode, LayerPlan, Plan
from ebbtide.planning.prediction import (
    PlanBudget,
    Prediction,
    Predictor,
    StorageUses,
    open_windows,
)
from ebbtide.planning.profile import StepProfile
from ebbtide.planning.relaxation import Relaxation, Resting, nowhere
from ebbtide.runtime.handles import Decision

BY_PASS: Final = -1
"""In the place of a bound on bytes in flight: each pass has what it has room for."""

_LARGER: Final = (0, 1, 2, 4)  # bounds on bytes in flight, in what the largest layer can offload


@final
class Choices:
    """Which layers are recomputed, and what becomes of each piece of memory.

    Args:
        recomputed: whether each layer is recomputed.
        decisions: what becomes of each piece, by its number in `StorageUses`. As the input of a
            recomputed layer, a piece that is rebuilt is kept.
        inflight_bytes: bound on the bytes in flight, or `BY_PASS`.
    """

    __slots__ = ("decisions", "inflight_bytes", "recomputed")

    def __init__(
        self, recomputed: list[bool], decisions: list[Decision], inflight_bytes: int
    ) -> None:
        self.recomputed = recomputed
        self.decisions = decisions
        self.inflight_bytes = inflight_bytes

    def copy(self) -> Choices:
        """Return choices that can be changed alone."""
        return Choices(list(self.recomputed), list(self.decisions), self.inflight_bytes)

    def plan(self, uses: StorageUses, resting: Resting) -> Plan:
        """Return the plan that makes these choices. Its windows, if it has any, are closed.

        Args:
            uses: the memory that layers save.
            resting: whose weights rest on the host.
        """
        layers = []
        for index, recomputed in enumerate(self.recomputed):
            source = uses.inputs[index]
            leaves = source is not None and self.decisions[source] is Decision.OFFLOAD
            mode = LayerMode.AS_IS
            if recomputed:
                mode = LayerMode.RECOMPUTE_OFFLOAD if leaves else LayerMode.RECOMPUTE
            decisions = tuple(self.decisions[piece] for piece in uses.saves[index])
            layers.append(LayerPlan(mode=mode, decisions=decisions, weights_on_host=resting[index]))
        if self.inflight_bytes == BY_PASS:
            return Plan(layers=tuple(layers), windows=(0,) * (2 * len(layers) + 1))
        return Plan(layers=tuple(layers), max_inflight_bytes=self.inflight_bytes)


def choices_of(plan: Plan, uses: StorageUses) -> Choices:
    """Return the choices of a plan; where layers share memory, those of its first layer."""
    decisions: list[Decision | None] = [None] * len(uses.memories)
    recomputed = []
    for index, layer in enumerate(plan.layers):
        again, source = layer.mode is not LayerMode.AS_IS, uses.inputs[index]
        recomputed.append(again)
        if again:
            leaves = layer.mode is LayerMode.RECOMPUTE_OFFLOAD
            if source is not None and decisions[source] is None:
                decisions[source] = Decision.OFFLOAD if leaves else Decision.KEEP
            continue
        for piece, decision in zip(uses.saves[index], layer.decisions, strict=True):
            if decisions[piece] is None:
                decisions[piece] = decision
    known = [each or Decision.KEEP for each in decisions]
    return Choices(recomputed, known, BY_PASS if plan.windows else plan.max_inflight_bytes)


_MOST_WINDOWS: Final = 64
"""Layers of steps whose plans may have windows: in longer ones, hardly anything is in flight beside
the rest."""


def _may_have_windows(profile: StepProfile, hardware: Hardware) -> bool:
    """Whether plans may have windows. See [Note: windows] in `ebbtide.planning.prediction`.

    On a CPU compute hardly waits for copies, and what is in flight is a small part of what the
    process occupies.
    """
    return not hardware.computes_on_host and len(profile.layers) <= _MOST_WINDOWS


def inflight_choices(profile: StepProfile) -> tuple[int, ...]:
    """Return the bounds on bytes in flight that the search chooses from.

    The smallest, 0, lets copies move alone. The others are multiples of what the largest layer can
    offload.
    """
    largest_bytes = max(
        layer.input_bytes
        + sum(storage.size_bytes for storage in layer.storages if storage.may_leave)
        for layer in profile.layers
    )
    return tuple(dict.fromkeys(times * largest_bytes for times in _LARGER))


def rounded(relaxation: Relaxation, uses: StorageUses, inflight_bytes: int) -> Choices:
    """Return choices near the fractions of a relaxation.

    What rounding adds to one layer or takes from it is made good in the next ones, so that equal
    layers with a fraction of 0.4 become two of five, evenly spread.
    """
    recomputed = list(_spread(relaxation.recomputed))
    decisions = [Decision.KEEP] * len(uses.memories)
    owed_bytes = 0.0
    for index, again in enumerate(recomputed):
        alone = [piece for piece in uses.saves[index] if piece not in relaxation.offloaded]
        owed_bytes += relaxation.offloaded_bytes[index]
        for piece in sorted(alone, key=lambda piece: -uses.memories[piece].size_bytes):
            memory = uses.memories[piece]
            if relaxation.rebuilt.get(piece, 0.0) >= 0.5:
                decisions[piece] = Decision.REBUILD
            elif memory.may_leave and not again and owed_bytes >= memory.size_bytes / 2:
                decisions[piece] = Decision.OFFLOAD
                owed_bytes -= memory.size_bytes
    pieces = sorted(relaxation.offloaded)
    leaves = _spread([relaxation.offloaded[piece] for piece in pieces])
    for piece, leaving in zip(pieces, leaves, strict=True):
        if relaxation.rebuilt.get(piece, 0.0) >= 0.5:
            decisions[piece] = Decision.REBUILD
        elif leaving:
            decisions[piece] = Decision.OFFLOAD
    return Choices(recomputed, decisions, inflight_bytes)


def _spread(fractions: Sequence[float]) -> Iterator[bool]:
    """Yield a choice for each fraction; their running sums stay together."""
    owed = 0.0
    for fraction in fractions:
        owed += fraction
        chosen = owed >= 0.5 and fraction > 1e-6
        owed -= chosen
        yield chosen


# ---- The plans that people make by hand: one rule for all layers, or for the first k of them ----


def keep_all(profile: StepProfile) -> Plan:
    """Return the plan that changes nothing."""
    return _by_rule(profile, Decision.KEEP)


def offload_first(profile: StepProfile, count: int) -> Plan:
    """Return the plan that offloads what the first ``count`` layers save, and keeps the rest."""
    offloaded, kept = _by_rule(profile, Decision.OFFLOAD), keep_all(profile)
    return Plan(layers=offloaded.layers[:count] + kept.layers[count:])


def with_weights(plan: Plan, resting: Resting) -> Plan:
    """Return a plan that has the weights of these layers on the host."""
    pairs = zip(plan.layers, resting, strict=True)
    layers = (dataclasses.replace(layer, weights_on_host=rests) for layer, rests in pairs)
    return dataclasses.replace(plan, layers=tuple(layers))


def rule_plans(profile: StepProfile) -> Iterator[tuple[str, Plan]]:
    """Yield the plans that treat all layers alike, with their names.

    A layer that may not be recomputed runs as it is, and its storages are offloaded where the
    inputs of the others are. A storage that cannot be rebuilt is kept.
    """
    yield "keep all", keep_all(profile)
    yield "rebuild alone", _by_rule(profile, Decision.KEEP, rebuilds=True)
    yield "offload all", _by_rule(profile, Decision.OFFLOAD)
    yield "offload all, rebuild", offload_or_rebuild(profile)
    yield "recompute all", _by_rule(profile, Decision.KEEP, LayerMode.RECOMPUTE)
    both = _by_rule(profile, Decision.OFFLOAD, LayerMode.RECOMPUTE_OFFLOAD)
    yield "recompute + offload all", both


def offload_or_rebuild(profile: StepProfile) -> Plan:
    """Return the plan that rebuilds what can be rebuilt, and offloads the rest."""
    return _by_rule(profile, Decision.OFFLOAD, rebuilds=True)


def _by_rule(
    profile: StepProfile,
    decision: Decision,
    mode: LayerMode = LayerMode.AS_IS,
    *,
    rebuilds: bool = False,
) -> Plan:
    layers = (
        LayerPlan(
            mode=mode if layer.may_recompute else LayerMode.AS_IS,
            decisions=tuple(
                Decision.REBUILD if rebuilds and each.rebuild_s is not None else decision
                for each in layer.storages
            ),
        )
        for layer in profile.layers
    )
    return Plan(layers=tuple(layers))


# ---- Compares plans by their predictions, and remembers the best one ----


class Contestant(NamedTuple):
    """A plan that was predicted.

    Attributes:
        choices: its choices.
        plan: the plan.
        prediction: what it costs.
        excess_bytes: by how much it is over the budget.
    """

    choices: Choices
    plan: Plan
    prediction: Prediction
    excess_bytes: int

    @property
    def is_fitting(self) -> bool:
        """Whether it is within the budget."""
        return not self.excess_bytes

    @property
    def score(self) -> tuple[int, float, int]:
        """What makes it better than others: smaller is better."""
        return self.excess_bytes, self.prediction.step_s, self.prediction.peak_bytes


@final
class Contest:
    """Predicts plans and remembers the best one within the budget, or nearest to it.

    Args:
        profile: the step.
        hardware: the machine.
        predictor: predicts plans.
        budget: what plans may use.
        resting: whose weights rest on the host; empty: nobody's.
        limit_s: seconds of this thread's processor time after which no more plans should be
            predicted, so that a busy machine finds the same plans; None: there is no hurry.

    Attributes:
        profile: as given.
        hardware: as given.
        predictor: as given.
        budget: as given.
        resting: the same, for each layer.
        bounds: the bounds on bytes in flight to choose from.
        uses: the memory that layers save.
        best: the best plan so far; None before the first.
    """

    def __init__(
        self,
        profile: StepProfile,
        hardware: Hardware,
        predictor: Predictor,
        budget: PlanBudget,
        resting: Resting = (),
        *,
        limit_s: float | None = None,
    ) -> None:
        self.profile, self.hardware = profile, hardware
        self.budget = budget
        self.uses = StorageUses(profile)
        self.resting = resting or nowhere(profile)
        self.bounds = inflight_choices(profile)
        if _may_have_windows(profile, hardware) and not any(self.resting):
            self.bounds = (*self.bounds, BY_PASS)
        self._ends_s = None if limit_s is None else time.thread_time() + limit_s
        self.best: Contestant | None = None
        self.predictor = predictor
        self._known: dict[tuple[object, ...], Contestant] = {}

    def enter(self, choices: Choices) -> Contestant:
        """Predict a plan; it becomes the best one if it beats that.

        Random changes of a step with few layers come back to the same plans again and again, so
        that each is predicted once.
        """
        key = (tuple(choices.decisions), tuple(choices.recomputed), choices.inflight_bytes)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._predict(choices)
            if self.best is None or known.score < self.best.score:
                self.best = known
        return known

    def _predict(self, choices: Choices) -> Contestant:
        plan = choices.plan(self.uses, self.resting)
        prediction = self.predictor.predict(plan)
        if plan.windows:
            peaks, room_bytes = prediction.peak_by_position, self.budget.device_bytes
            plan = open_windows(plan, self.profile, self.uses, peaks, room_bytes)
            if any(plan.windows):
                prediction = self.predictor.predict(plan)
        return Contestant(choices, plan, prediction, self.budget.excess_bytes(prediction))

    @property
    def leader(self) -> Contestant:
        """The best plan so far. There must be one."""
        assert self.best is not None
        return self.best

    @property
    def left_s(self) -> float | None:
        """Seconds that are left for predictions; None: there is no hurry."""
        return None if self._ends_s is None else max(0.0, self._ends_s - time.thread_time())

    @property
    def is_late(self) -> bool:
        """Whether no more plans should be predicted."""
        return self.left_s == 0.0

    @property
    def has_fitting(self) -> bool:
        """Whether a plan within the budget was found."""
        return self.best is not None and self.best.is_fitting

    @property
    def fitting_s(self) -> float:
        """The step of the best plan within the budget; infinity if none was found."""
        if self.best is None or not self.has_fitting:
            return float("inf")
        return self.best.prediction.step_s


def busy_s(profile: StepProfile) -> float:
    """Return the seconds of a step that recomputes nothing and never waits."""
    outside_s = profile.before_s + profile.loss_s + profile.after_s
    return outside_s + sum(layer.forward_s + layer.backward_s for layer in profile.layers)


# ---- Changes of one layer or one storage ----

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
    """Yield the changes to try: of the bound, of whole layers, of single storages."""
    for bound_bytes in contest.bounds:
        yield None, False, (), bound_bytes
    uses = contest.uses
    for index, (pieces, source) in enumerate(zip(uses.saves, uses.inputs, strict=True)):
        for decision in (Decision.KEEP, Decision.OFFLOAD):
            yield index, False, tuple((piece, decision) for piece in pieces), None
            if any(uses.memories[piece].sources for piece in pieces):
                rebuilt = (
                    (piece, Decision.REBUILD if uses.memories[piece].sources else decision)
                    for piece in pieces
                )
                yield index, False, tuple(rebuilt), None
            if contest.profile.layers[index].may_recompute:
                yield index, True, () if source is None else ((source, decision),), None
        for piece in pieces if len(pieces) > 1 else ():
            for decision in Decision:
                if decision is not Decision.REBUILD or uses.memories[piece].sources:
                    yield index, False, ((piece, decision),), None


# ---- Takes back what a plan offloads without need ----


_MOST_SPARED: Final = 20_000  # layers of all plans that are looked at, which takes about a second


def spare(contest: Contest, best: Contestant) -> Contestant:
    """Keep what a plan moves although it fits and takes no longer without.

    A prediction counts no work of the host for a copy, nor bandwidth of the memory. So of two plans
    that are predicted to take the same time, the one that moves less is the better one. What cannot
    stay as a whole is halved. What the last layers save is needed again first, so it is the first.

    Args:
        contest: predicts the plans.
        best: a plan within the budget.

    Returns:
        The plan that moves least of those that were looked at.
    """
    pieces = [
        number for number, each in enumerate(best.choices.decisions) if each is Decision.OFFLOAD
    ]
    groups = deque([pieces[::-1]])
    for _ in range(_MOST_SPARED // len(contest.profile.layers)):
        if not groups or contest.is_late:
            break
        group, changed = groups.popleft(), best.choices.copy()
        for piece in group:
            changed.decisions[piece] = Decision.KEEP
        other = contest.enter(changed)
        if other.is_fitting and other.prediction.step_s <= best.prediction.step_s:
            best = other
        elif len(group) > 1:
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
    return best
