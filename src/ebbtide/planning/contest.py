"""The choices that a plan consists of, as the search changes them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, final

from ebbtide.planning.plan import Decision, LayerMode, LayerPlan, Plan
from ebbtide.planning.prediction import NOBODY, PlanBudget, Prediction, Predictor, StorageUses
from ebbtide.planning.profile import StepProfile
from ebbtide.planning.relaxation import Relaxation, Resting, nowhere
from ebbtide.planning.windows import open_windows

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
            decisions = tuple(self.decisions[piece] for _, piece in uses.saves[index])
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
        for number, piece in uses.saves[index]:
            if decisions[piece] is None:
                decisions[piece] = layer.decisions[number]
    known = [Decision.KEEP if decision is None else decision for decision in decisions]
    return Choices(recomputed, known, BY_PASS if plan.windows else plan.max_inflight_bytes)


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
        source = uses.inputs[index]
        alone = [piece for _, piece in uses.saves[index] if piece not in relaxation.offloaded]
        for piece in alone:
            if relaxation.rebuilt.get(piece, 0.0) >= 0.5:
                decisions[piece] = Decision.REBUILD
        owed_bytes += relaxation.offloaded_bytes[index]
        if again:
            continue
        for piece in sorted(alone, key=lambda piece: -uses.memories[piece].size_bytes):
            memory = uses.memories[piece]
            free = decisions[piece] is Decision.KEEP and memory.may_leave and piece != source
            if free and owed_bytes >= memory.size_bytes / 2:
                decisions[piece] = Decision.OFFLOAD
                owed_bytes -= memory.size_bytes
    _spread_pieces(relaxation, uses, decisions)
    return Choices(recomputed, decisions, inflight_bytes)


def _spread_pieces(relaxation: Relaxation, uses: StorageUses, decisions: list[Decision]) -> None:
    """Round what is decided piece by piece: inputs, and what layers share."""
    inputs = [(index, source) for index, source in enumerate(uses.inputs) if source is not None]
    alone = [(index, source) for index, source in inputs if source not in relaxation.offloaded]
    leaves = _spread([relaxation.input_offloaded[index] for index, _ in alone])
    for (_, source), leaving in zip(alone, leaves, strict=True):
        if leaving:
            decisions[source] = Decision.OFFLOAD
        elif relaxation.rebuilt.get(source, 0.0) >= 0.5:
            decisions[source] = Decision.REBUILD
    pieces = sorted(relaxation.offloaded)
    leaves = _spread([relaxation.offloaded[piece] for piece in pieces])
    for piece, leaving in zip(pieces, leaves, strict=True):
        if relaxation.rebuilt.get(piece, 0.0) >= 0.5:
            decisions[piece] = Decision.REBUILD
        elif leaving:
            decisions[piece] = Decision.OFFLOAD


def _spread(fractions: list[float] | tuple[float, ...]) -> Iterator[bool]:
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
    return _uniform(profile, LayerMode.AS_IS, Decision.KEEP)


def offload_first(profile: StepProfile, count: int) -> Plan:
    """Return the plan that offloads what the first ``count`` layers save, and keeps the rest."""
    layers = [
        _layer(
            profile, index, LayerMode.AS_IS, Decision.OFFLOAD if index < count else Decision.KEEP
        )
        for index in range(len(profile.layers))
    ]
    return Plan(layers=tuple(layers))


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
    yield "rebuild alone", _rebuilt(profile, Decision.KEEP)
    yield "offload all", _uniform(profile, LayerMode.AS_IS, Decision.OFFLOAD)
    yield "offload all, rebuild", offload_or_rebuild(profile)
    yield "recompute all", _uniform(profile, LayerMode.RECOMPUTE, Decision.KEEP)
    both = _uniform(profile, LayerMode.RECOMPUTE_OFFLOAD, Decision.OFFLOAD)
    yield "recompute + offload all", both


def _uniform(profile: StepProfile, mode: LayerMode, decision: Decision) -> Plan:
    layers = [_layer(profile, index, mode, decision) for index in range(len(profile.layers))]
    return Plan(layers=tuple(layers))


def _layer(profile: StepProfile, index: int, mode: LayerMode, decision: Decision) -> LayerPlan:
    layer = profile.layers[index]
    if not layer.may_recompute:
        mode = LayerMode.AS_IS
    return LayerPlan(mode=mode, decisions=(decision,) * len(layer.storages))


def offload_or_rebuild(profile: StepProfile) -> Plan:
    """Return the plan that rebuilds what can be rebuilt, and offloads the rest."""
    return _rebuilt(profile, Decision.OFFLOAD)


def _rebuilt(profile: StepProfile, others: Decision) -> Plan:
    layers = []
    for layer in profile.layers:
        decisions = tuple(
            others if storage.rebuild_s is None else Decision.REBUILD for storage in layer.storages
        )
        layers.append(LayerPlan(decisions=decisions))
    return Plan(layers=tuple(layers))


# ---- Compares plans by their predictions, and remembers the best one ----


class Score(NamedTuple):
    """What makes one plan better than another: smaller is better.

    Attributes:
        excess_bytes: by how much it is over the budget.
        step_s: its predicted step.
        peak_bytes: its predicted peak of device memory.
    """

    excess_bytes: int
    step_s: float
    peak_bytes: int


class Contestant(NamedTuple):
    """A plan that was predicted."""

    choices: Choices
    plan: Plan
    prediction: Prediction
    score: Score


@final
class Contest:
    """Predicts plans and remembers the best one within the budget, or nearest to it.

    Args:
        profile: the step.
        predictor: predicts plans.
        budget: what plans may use.
        resting: whose weights rest on the host; empty: nobody's.
        by_pass: whether each pass may have a window of its own. See [Note: windows].
        limit_s: seconds after which no more plans should be predicted; None: there is no hurry.

    Attributes:
        profile: as given.
        predictor: as given.
        budget: as given.
        resting: the same, for each layer.
        bounds: the bounds on bytes in flight to choose from.
        uses: the memory that layers save.
        best: the best plan so far; None before the first.
        num_predictions: how many plans were predicted.
    """

    def __init__(
        self,
        profile: StepProfile,
        predictor: Predictor,
        budget: PlanBudget,
        resting: Resting = (),
        *,
        by_pass: bool = False,
        limit_s: float | None = None,
    ) -> None:
        self.profile = profile
        self.budget = budget
        self.uses = StorageUses(profile)
        self.resting = resting or nowhere(profile)
        self.bounds = inflight_choices(profile)
        if by_pass and not any(self.resting):
            self.bounds = (*self.bounds, BY_PASS)
        self._ends_s = None if limit_s is None else time.monotonic() + limit_s
        self.best: Contestant | None = None
        self.num_predictions = 0
        self.predictor = predictor
        self._least_s = busy_s(profile)
        self._largest_bytes = max((each.size_bytes for each in self.uses.memories), default=0)

    def enter(self, choices: Choices) -> Contestant:
        """Predict a plan; it becomes the best one if it beats that."""
        plan = choices.plan(self.uses, self.resting)
        prediction = self.predictor.predict(plan)
        self.num_predictions += 1
        if plan.windows:
            peaks, room_bytes = prediction.peak_by_position, self.budget.device_bytes
            plan = open_windows(plan, self.profile, self.uses, peaks, room_bytes)
            if any(plan.windows):
                prediction = self.predictor.predict(plan)
                self.num_predictions += 1
        excess_bytes = self.budget.excess_bytes(prediction)
        score = Score(excess_bytes, prediction.step_s, prediction.peak_bytes)
        contestant = Contestant(choices, plan, prediction, score)
        if self.best is None or score < self.best.score:
            self.best = contestant
        return contestant

    def enter_if_promising(
        self, choices: Choices, bounds: Sequence[int], copy_s_per_byte: float = 0.0
    ) -> None:
        """Predict a plan unless arithmetic shows that it cannot win.

        Args:
            choices: the plan.
            bounds: the bounds on bytes in flight to predict it with, one after the other.
            copy_s_per_byte: the least seconds that a copy down and back takes.
        """
        layers = zip(self.profile.layers, choices.recomputed, strict=True)
        least_s = self._least_s + sum(layer.second_forward_s for layer, again in layers if again)
        if least_s >= self.fitting_s:
            return
        kept_bytes, offloaded_bytes = self._stays_and_leaves(choices)
        # What is in flight, one copy that is larger than that, and the last one, may never leave.
        for inflight_bytes in bounds:
            staying_bytes = inflight_bytes + 2 * self._largest_bytes
            if inflight_bytes == BY_PASS:
                staying_bytes = self.budget.device_bytes
            leaving_bytes = offloaded_bytes - staying_bytes
            if max(least_s, leaving_bytes * copy_s_per_byte) >= self.fitting_s:
                continue
            if self.has_fitting and kept_bytes > self.budget.device_bytes:
                return
            changed = choices.copy()
            changed.inflight_bytes = inflight_bytes
            self.enter(changed)

    @property
    def left_s(self) -> float | None:
        """Seconds that are left for predictions; None: there is no hurry."""
        return None if self._ends_s is None else max(0.0, self._ends_s - time.monotonic())

    @property
    def is_late(self) -> bool:
        """Whether no more plans should be predicted."""
        return self.left_s == 0.0

    @property
    def resident_bytes(self) -> int:
        """What is on the device throughout: weights that do not rest on the host, and all else."""
        layers = zip(self.profile.layers, self.resting, strict=True)
        own_bytes = sum(layer.parameter_bytes for layer, rests in layers if not rests)
        return self.profile.fixed_bytes + own_bytes

    @property
    def has_fitting(self) -> bool:
        """Whether a plan within the budget was found."""
        return self.best is not None and not self.best.score.excess_bytes

    @property
    def fitting_s(self) -> float:
        """The step of the best plan within the budget; infinity if none was found."""
        if self.best is None or not self.has_fitting:
            return float("inf")
        return self.best.score.step_s

    def _stays_and_leaves(self, choices: Choices) -> tuple[int, int]:
        """Return how many bytes are in memory throughout, and how many are offloaded."""
        used = self.uses.under(choices.plan(self.uses, self.resting))
        kept_bytes, offloaded_bytes = self.profile.fixed_bytes, 0
        for memory, decision, first in zip(
            self.uses.memories, used.decisions, used.first, strict=True
        ):
            if first != NOBODY and decision is Decision.KEEP:
                kept_bytes += memory.size_bytes
            if first != NOBODY and decision is Decision.OFFLOAD:
                offloaded_bytes += memory.size_bytes
        return kept_bytes, offloaded_bytes


def busy_s(profile: StepProfile) -> float:
    """Return the seconds of a step that recomputes nothing and never waits."""
    outside_s = profile.before_s + profile.loss_s + profile.after_s
    return outside_s + sum(layer.forward_s + layer.backward_s for layer in profile.layers)


# ---- Improves a plan by changing one layer or one storage at a time ----

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


# ---- Takes back what a plan offloads or recomputes without need ----

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
