"""Plans one kind of step to a budget, from its first measured step until the plan settles.

Before `BudgetStudy` comes `Corrections`: what was measured of a step's memory beyond its profile.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import logging
import math
import sys
from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any, Final, NamedTuple, final

from ebbtide.devices.hardware import Hardware
from ebbtide.errors import BudgetError
from ebbtide.observe.passes import PassWatch
from ebbtide.observe.trace import Trace
from ebbtide.planning.contest import offload_or_rebuild, with_weights
from ebbtide.planning.plan import LayerMode, Plan
from ebbtide.planning.planned_step import PlannedStep, StepCost
from ebbtide.planning.prediction import (
    CautiousTiming,
    PlanBudget,
    Prediction,
    Predictor,
    StepTiming,
    StorageUses,
    open_windows,
)
from ebbtide.planning.profile import StepAhead, StepProfile
from ebbtide.planning.recorded import (
    measured_hardware,
    measured_profile,
    with_weight_bytes,
)
from ebbtide.planning.relaxation import everywhere
from ebbtide.planning.search import find_frugal, search
from ebbtide.runtime.handles import Decision
from ebbtide.units import format_size
from ebbtide.weights.model_weights import ADAM_STATES, WeightBytes

_AGAIN: Final = "again"
"""The way of a layer that is recomputed."""

_MOST_NEEDS: Final = 2**14  # of layers in their ways, that are remembered between plans


def _ways(plan: Plan, *, again: bool | None = None) -> list[Hashable]:
    """Return how the layer at each position runs, as far as the memory of its passes depends on it.

    In a pass with a window, the copies of offloaded storages may end after the pass, so offloaded
    storages count as kept. Without a window, each one leaves before the next one is saved.

    Args:
        plan: the plan.
        again: whether all layers are recomputed, or none; None: as the plan says.
    """
    ways: list[Hashable] = []
    for layer in plan.layers:
        if layer.mode is not LayerMode.AS_IS if again is None else again:
            ways.append(_AGAIN)
        elif plan.windows:
            leaves, stays = Decision.OFFLOAD, Decision.KEEP
            ways.append(tuple(stays if each is leaves else each for each in layer.decisions))
        else:
            ways.append(layer.decisions)
    return [*ways, None, *reversed(ways)]


def _beside_bytes(
    sizes: Sequence[int], before: tuple[Decision, ...], way: tuple[Decision, ...]
) -> int:
    """Return how much more of what a layer saves can be on the device in one way than in another.

    Args:
        sizes: sizes of the storages that it saves.
        before: what became of each storage in the other way.
        way: what becomes of each storage in this way. An offloaded storage is on the device until
            its copy is complete, and the next storage waits for that.
    """
    stays, leaves = 0, 0
    for size_bytes, was, done in zip(sizes, before, way, strict=True):
        if done is Decision.OFFLOAD:
            leaves = max(leaves, size_bytes if was is Decision.REBUILD else 0)
        elif was is Decision.OFFLOAD or done is Decision.KEEP is not was:
            stays += size_bytes
    return stays + leaves


@final
class Corrections:
    """The memory that steps were measured to need at each position, beyond what the profile says.

    A layer runs in one of several ways: each of its storages is kept, offloaded or rebuilt, or the
    whole layer is recomputed. What was measured holds for the way in which the layer ran. For a way
    in which it has not run yet, the smaller of two upper bounds is taken:

    - what the pass would have used in the first step if all that the layer saves had stayed, and
    - what the pass needed in a way in which the layer has run, and the storages that are on the
      device in the new way only.

    Before a layer is recomputed for the first time, its operations are proven: they run again at
    the end of its forward, while all that it saves is still there. On a CPU, a forward that saves
    nothing is taken to need as much as one that saves everything, which is more than it does.

    Args:
        profile: the step.
        awaits_copies: whether measured steps wait for their copies. If they do not, a step may have
            needed less than was predicted because copies ended early by chance.
    """

    def __init__(self, profile: StepProfile, *, awaits_copies: bool = True) -> None:
        self._awaits_copies = awaits_copies
        gradients = [0] * len(profile.layers)
        for index, last in enumerate(profile.last_calls):
            for each in range(index, last + 1):  # while any call's backward is still to come
                gradients[each] += profile.layers[index].gradient_bytes
        self._gradients = [*[0] * (len(gradients) + 1), *reversed(gradients)]
        self._inside = [profile.inside_bytes(index) for index in range(len(profile.layers))]
        saved = [[each.size_bytes for each in layer.storages] for layer in profile.layers]
        self._saved = [*saved, [], *reversed(saved)]
        self._measured: list[dict[Hashable, int]] = [{} for _ in self._gradients]
        self._staying: dict[int, int] = {}  # by position, if all that is saved stays
        # A search predicts thousands of plans, whose layers run in few ways.
        self._at = functools.lru_cache(_MOST_NEEDS)(self._find_needed_bytes)

    def learn(
        self, watch: PassWatch, plan: Plan, predicted: Prediction, owed_bytes: int = 0
    ) -> None:
        """Note how much more, or less, memory a step needed than was predicted.

        Args:
            watch: what was measured.
            plan: the plan that was followed.
            predicted: what these corrections predicted for it.
            owed_bytes: bytes that were predicted to be there in the whole step, and came later.
        """
        peaks, more, ways = predicted.peak_by_position, self.more_bytes(plan), _ways(plan)
        self._at.cache_clear()
        # Under one bound, how much has been brought back by the time of a peak is chance, too.
        is_sure = self._awaits_copies and (plan.windows or not plan.max_inflight_bytes)
        least_bytes = -sys.maxsize if is_sure else 0
        for position, peak_bytes in watch.peaks.items():
            covered = watch.covered(position)
            excess_bytes = peak_bytes + owed_bytes - max(peaks[each] for each in covered)
            for each in covered:
                needed_bytes = max(least_bytes, more[each] + excess_bytes)
                self._measured[each][ways[each]] = needed_bytes
        if not self._staying:  # in later steps, gradients of weights that came back count twice
            for position, size_bytes in watch.working.items():
                for each in watch.covered(position):  # a plan counts gradients by themselves
                    self._staying[each] = size_bytes - self._gradients[each]

    def leave_out_gradients(self, profile: StepProfile) -> int:
        """Take the gradients of the layers' weights out of what was measured.

        Args:
            profile: the step, with the weights, which all were on the device.

        Returns:
            Their size in bytes.
        """
        self._at.cache_clear()
        none_rest = [False] * len(profile.layers)
        coming = dataclasses.replace(profile, keeps_gradients=False).coming_gradients(none_rest)
        came_bytes = [*[0] * (len(coming) + 1), *itertools.accumulate(reversed(coming))]
        for known, size_bytes in zip(self._measured, came_bytes, strict=True):
            known.update({way: needed - size_bytes for way, needed in known.items()})
        self._staying = {each: size - came_bytes[each] for each, size in self._staying.items()}
        return came_bytes[-1]

    def more_bytes(self, plan: Plan, *, again: bool | None = None) -> list[int]:
        """Return what each position needs beyond what the profile says.

        Args:
            plan: the plan.
            again: whether all layers are recomputed, or none; None: as the plan says.
        """
        return [self._at(position, way) for position, way in enumerate(_ways(plan, again=again))]

    def _find_needed_bytes(self, position: int, way: Hashable) -> int:
        known = self._measured[position]
        if way in known:
            return known[way]
        places, last = {position}, len(self._measured) - 1
        if way is _AGAIN:
            if 2 * position < last:  # saving nothing, it needs no more than if all leaves at once
                proof_bytes = self._inside[position] if self._awaits_copies else 0
                return proof_bytes + min(known.values(), default=0)
            places.add(last - position)  # it runs the forward, too
        staying = [self._staying[each] for each in places if each in self._staying]
        most_bytes = max([0, *(staying or list(known.values()))])
        if self._awaits_copies and isinstance(way, tuple):  # else less may be needed by chance
            sizes = self._saved[position]
            tried = [(each, size) for each, size in known.items() if isinstance(each, tuple)]
            beside = (needed + _beside_bytes(sizes, each, way) for each, needed in tried)
            most_bytes = min([most_bytes, *beside])
        return most_bytes

    def apply(self, profile: StepProfile, plan: Plan) -> StepProfile:
        """Return a profile with the working memory that the layers were measured to need.

        Args:
            profile: the profile.
            plan: says how the layers run that are not recomputed.
        """
        as_is, again = self.more_bytes(plan, again=False), self.more_bytes(plan, again=True)
        layers, count = [], len(profile.layers)
        for index, layer in enumerate(profile.layers):
            unsaved_bytes = layer.unsaved_forward_bytes
            if unsaved_bytes is None:
                unsaved_bytes = profile.inside_bytes(index) + layer.forward_working_bytes
            there, back = index, 2 * count - index
            figures = {
                "forward_working_bytes": layer.forward_working_bytes + as_is[there],
                "unsaved_forward_bytes": unsaved_bytes + again[there],
                "backward_working_bytes": layer.backward_working_bytes + as_is[back],
                "recompute_working_bytes": layer.second_working_bytes + again[back],
            }
            known: dict[str, Any] = {name: max(0, size) for name, size in figures.items()}
            layers.append(dataclasses.replace(layer, **known))
        loss_bytes = max(0, profile.loss_working_bytes + as_is[count])
        return dataclasses.replace(profile, layers=tuple(layers), loss_working_bytes=loss_bytes)


# ---- What a budget expects of a plan, and which plans it takes to be the same ----

_MARGIN: Final = 0.05  # share of the budget that stays free on an accelerator,
_MARGIN_ON_HOST: Final = 0.03  # and where large blocks can be mapped one by one


def is_same(plan: Plan, other: Plan) -> bool:
    """Whether two plans do the same with each storage; their predictions may differ."""
    one, two = plan.with_closed_windows(), other.with_closed_windows()
    return (one.layers, one.windows, one.max_inflight_bytes) == (
        two.layers,
        two.windows,
        two.max_inflight_bytes,
    )


# ---- Plans one kind of step to a budget, and corrects the plan by what was measured ----
#
# [Note: settling] The first step offloads everything, so that no budget is broken to find out. Its
# record is the profile. Its seconds say little of others, as it loads libraries, locks pages and
# grows files; so one more step does the same. On an accelerator the first one has the memory of
# each pass measured, which makes the host wait, and the second one only its seconds, as it runs
# when nobody waits. A plan is searched for with that, and the step that follows it is measured. It
# leaves twice the margin where that is possible, because its layers have not run so: see
# `Corrections`. With what it has taught one more plan is searched for, and the better of the two
# stays. On an accelerator, a plan without a margin is better than none: all that it is predicted to
# need is what was measured, or the most that a layer can need.
#
# A step whose tensors are over the budget leads to a plan that leaves as much more of it free, and
# twice the margin, whatever came before. See [Note: what counts].

_LOG = logging.getLogger(__name__)

_FASTER: Final = 0.15
"""By which share an earlier plan must have been faster to be followed again. Steps of one plan
differ by up to a tenth on a machine that has other work."""

_LESS: Final = 0.9
"""Share of the budget that is planned for after the device, or the store, had no room."""

SURE: Final = 1.5
"""How far over the budget a prediction may be to be tried, if no other plan is left."""

_SAME_STATE: Final = 0.02
"""By which share an optimizer's state may be other than expected, as it counts its steps, too."""

_QUICK_S: Final = 2.0
"""Seconds of processor time that a search may take: more found nothing better for GPTs of 20
layers."""


class Phase(enum.Enum):
    """How far the planning of a step is. See [Note: settling]."""

    FRUGAL = enum.auto()
    PLANNED = enum.auto()
    CORRECTED = enum.auto()
    SETTLED = enum.auto()


_AFTER: Final = {  # a step within the budget, and one that was over it
    Phase.FRUGAL: (Phase.PLANNED, Phase.PLANNED),
    Phase.PLANNED: (Phase.CORRECTED, Phase.CORRECTED),
    Phase.CORRECTED: (Phase.SETTLED, Phase.CORRECTED),
    Phase.SETTLED: (Phase.SETTLED, Phase.CORRECTED),
}


class _Followed(NamedTuple):
    """A plan that steps follow, or have followed.

    Attributes:
        plan: the plan, with what is predicted of it.
        at_first: what was predicted before it ran; None for the record of everything offloaded.
        measured: what the last measured step cost; None before the first one.
        needs_bytes: what its steps need at most: measured, or predicted where steps that are not
            measured have more copies under way.
    """

    plan: Plan
    at_first: StepCost | None = None
    measured: StepCost | None = None
    needs_bytes: int = 0


@final
class BudgetStudy:
    """The plan of one kind of step. See [Note: settling].

    Args:
        profile: the record of a step that offloaded everything. Parameters that it does not have
            count as in use when the step begins.
        hardware: the bandwidths, until copies have been measured.
        budget_bytes: the budget.
        begin_bytes: memory that was in use when the step began.
        host_bytes: how much the store has room for, with the weights that the profile has; None:
            for any number of bytes.
        num_forwards: how many forwards the step has before a backward. If there are several, which
            are not told apart, only the peak of a whole step is measured.

    Attributes:
        num_forwards: as given.
        places_weights: whether plans say which weights rest on the host.
        weights_can_leave: whether all weights can rest on the host if no plan fits. Then no plan
            is tried that is predicted to be slightly over the budget.
        expects_state: whether room is left for the state of an optimizer that has not stepped yet.
        others_bytes: memory that other models on the device will need and have not taken yet.
        phase: how far the planning is.
        profile: the step, without what was measured of its memory.
        budget_bytes: the budget; less than was asked for where the device did not have that.
    """

    def __init__(
        self,
        profile: StepProfile,
        hardware: Hardware,
        budget_bytes: int,
        begin_bytes: int = 0,
        host_bytes: int | None = None,
        num_forwards: int = 1,
    ) -> None:
        self.phase = Phase.FRUGAL
        self.num_forwards = num_forwards
        self.profile = profile
        self._hardware = hardware
        self.budget_bytes = self._asked_bytes = self._given_bytes = budget_bytes
        self._host_bytes = host_bytes
        awaits_copies = not hardware.computes_on_host
        self._corrections = Corrections(profile, awaits_copies=awaits_copies)
        self._begin_bytes = begin_bytes  # without the weights that the profile has
        self._there_bytes = self._buffer_bytes = 0  # of those, when the last step began
        self._end_peak_bytes = 0  # of the work after the last pass, without them, too
        self._at_once_bytes = 0  # what that needs beside if no weights rest,
        self._expected_bytes = 0  # of the state of an optimizer that has not stepped
        self._has_all_there = False  # as was measured
        self._over_bytes = 0  # how far plans were over the budget that should not have been
        self._tried: list[_Followed] = []  # that were measured, as far as they may come again
        self._searches = False  # whether the next step follows a plan that is still to be found
        self._seen: Set[int] = frozenset()  # the positions that the last watched step had
        rests = everywhere(profile)
        self.places_weights = any(rests)
        self.weights_can_leave = self._has_memory = self._had_gradients = False
        self.expects_state, self.others_bytes = False, 0
        self._recorded = with_weights(offload_or_rebuild(profile), rests)
        self._now = _Followed(self._recorded)
        self._predict_now()

    @property
    def plan(self) -> Plan:
        """The plan of the next step, with what is predicted of it."""
        return self._now.plan

    @property
    def step(self) -> PlannedStep:
        """The plan with its reasons."""
        return PlannedStep(
            plan=self.plan,
            profile=self._corrected(self.plan),
            hardware=self._hardware,
            budget_bytes=min(self.budget_bytes, self._given_bytes),
            settled=self.phase is Phase.SETTLED,
            at_first=self._now.at_first,
            measured=self._now.measured,
        )

    @property
    def is_to_be_timed(self) -> bool:
        """Whether the next step is measured for its seconds, because its memory is known.

        Such a step does not wait for its copies, so more of them are under way, and the budget must
        have room for them.
        """
        if not self._has_memory or self.phase is not Phase.FRUGAL:
            return False
        return self._predict().peak_bytes <= self.budget_bytes

    def choose(self, begin_bytes: int) -> Plan:
        """Return the plan for a step that begins now.

        Args:
            begin_bytes: memory in use, with the weights of `note_weights`.

        Raises:
            BudgetError: no plan fits into the budget.
        """
        if self.phase is not Phase.SETTLED or self._searches:
            # A process holds more than when it was last measured: the optimizer's state is new.
            self._begin_bytes = self._without_weights(begin_bytes)
        if self.phase is Phase.FRUGAL and self._has_memory and self.weights_can_leave:
            peak_bytes = self._predict_measured().peak_bytes
            if not self.is_to_be_timed:
                peak_bytes = max(peak_bytes, self._find_frugal().peak_bytes or 0)
            if peak_bytes > self.budget_bytes:
                raise self._too_small(peak_bytes, None)
        if self._searches:
            if self._now.measured is not None:
                needs_bytes = self._predict().peak_bytes
                needs_bytes = max(self._now.needs_bytes, needs_bytes)
                self._remember(self._now._replace(needs_bytes=needs_bytes))
            self._search()
        return self.plan

    def note_weights(self, there_bytes: int, buffer_bytes: int, at_once_bytes: int) -> None:
        """Note which of the weights are there as a step begins, when the plan has placed them.

        Args:
            there_bytes: what those on the device occupy, with their gradients and their state.
            buffer_bytes: what those of the others occupy that the step before has brought.
            at_once_bytes: what optimizers may compute at once if all weights are there.
        """
        self._there_bytes, self._buffer_bytes = there_bytes, buffer_bytes
        if not self._has_all_there and not self._hardware.computes_on_host:
            self._at_once_bytes = at_once_bytes

    def expect_state(self, trained_bytes: int) -> None:
        """Expect an optimizer that has not stepped. See [Note: an optimizer that has not stepped].

        Args:
            trained_bytes: what it trains on the device, without what the profile has.
        """
        self.expects_state, self._expected_bytes = True, ADAM_STATES * trained_bytes
        self._begin_bytes += self._expected_bytes
        if not self.places_weights and not self._hardware.computes_on_host:
            self._at_once_bytes = trained_bytes

    def learn_state(self, state_bytes: int, sizes: Mapping[str, WeightBytes]) -> None:
        """Learn what state the optimizer has that has stepped now.

        Args:
            state_bytes: all of it.
            sizes: what the weights occupy that the profile has; empty if it has none.
        """
        expected_bytes = sum(each.optimizer_bytes for each in self.profile.layers)
        expected_bytes += self._expected_bytes
        self.expects_state, self._expected_bytes = False, 0
        self.profile = with_weight_bytes(self.profile, sizes, self._hardware)
        is_other = abs(state_bytes - expected_bytes) > _SAME_STATE * expected_bytes
        if is_other and self.phase is Phase.SETTLED:
            self._search_again()

    def _without_weights(self, begin_bytes: int) -> int:
        """Return what a step begins with, without the weights that the profile counts.

        Args:
            begin_bytes: memory in use when the step begins.
        """
        own_bytes = self._there_bytes + self._buffer_bytes
        return max(0, begin_bytes - own_bytes) + self._expected_bytes + self.others_bytes

    def _planned_weight_bytes(self) -> int:
        """Return the size of the weights on the device with their gradients and their state."""
        pairs = zip(self.profile.layers, self.plan.layers, strict=True)
        return sum(each.parameter_bytes for each, plan in pairs if not plan.weights_on_host)

    def has_all_passes(self, watch: PassWatch) -> bool:
        """Whether a step had all passes of the step before; the first step always has.

        A layer has no backward if nothing in it is trained, or its output is not used.
        """
        seen, self._seen = self._seen, frozenset(watch.peaks)
        return seen <= self._seen

    def refuse(self, names: Set[str]) -> None:
        """Recompute no layer of these names any more: it gives other values when it runs again."""
        if not any(each.may_recompute and each.name in names for each in self.profile.layers):
            return
        layers = (
            dataclasses.replace(each, may_recompute=each.may_recompute and each.name not in names)
            for each in self.profile.layers
        )
        self.profile = dataclasses.replace(self.profile, layers=tuple(layers))

        def is_possible(plan: Plan) -> bool:
            pairs = zip(plan.layers, self.profile.layers, strict=True)
            return all(one.mode is LayerMode.AS_IS or two.may_recompute for one, two in pairs)

        self._tried = [each for each in self._tried if is_possible(each.plan)]
        if not is_possible(self.plan):
            self._search_again()

    def learn_memory(self, watch: PassWatch) -> None:
        """Learn from the memory of a step that followed the plan, pass by pass.

        Args:
            watch: what was measured.
        """
        self._has_memory, self._had_gradients = True, watch.has_gradients
        self.profile = dataclasses.replace(
            self.profile,
            keeps_gradients=self.profile.keeps_gradients or watch.has_gradients,
            retains=self.profile.retains or watch.retains,
        )
        self._begin_bytes = self._without_weights(watch.begin_bytes)
        self._predict_now()
        # Gradients that several steps add up are missing in the first of these.
        planned_bytes = self._planned_weight_bytes()
        coming = self.profile.coming_gradients([each.weights_on_host for each in self.plan.layers])
        owed_bytes = planned_bytes - sum(coming) - self._there_bytes
        owed_bytes += self._expected_bytes + self.others_bytes
        self._corrections.learn(watch, self.plan, self._predict_measured(), owed_bytes)
        if not watch.has_update:
            return
        end_peak_bytes = max(0, watch.end_peak_bytes - planned_bytes)
        if self.places_weights and not self.plan.has_weights_on_host:
            self._has_all_there = True
            resting_bytes = max(self._end_peak_bytes, self._begin_bytes)
            self._at_once_bytes = max(0, end_peak_bytes - resting_bytes)
        else:
            self._end_peak_bytes = end_peak_bytes
            if not self.places_weights:
                self._at_once_bytes = 0  # that peak has it

    def learn_from(self, other: BudgetStudy) -> None:
        """Take over what was measured of the same step with all weights on the device.

        Args:
            other: the study of that step. Its profile has no weights.
        """
        self._has_memory, self._corrections = other._has_memory, other._corrections
        end_bytes = other._begun().after_working_bytes
        if not other._had_gradients:
            end_bytes -= self._corrections.leave_out_gradients(self.profile)
        # For the weights that do not rest, an optimizer needs no more than for all of them.
        self._end_peak_bytes = self._begin_bytes + max(0, end_bytes)
        self._predict_now()

    def _predict_measured(self) -> Prediction:
        """Predict a step whose memory is measured: on an accelerator, it awaits its copies."""
        predictor: Predictor = self._timing(num_forwards=1)
        if not self._hardware.computes_on_host:
            more = self._corrections.more_bytes
            predictor = StepTiming(self._begun(), self._hardware, awaits_copies=True, more=more)
        return predictor.predict(self.plan)

    def note_ahead(self, ahead: StepAhead | None) -> None:
        """Note whether, and how, the optimizer steps inside backward by now."""
        if ahead is not None:
            ahead = ahead._replace(host_bytes=self._host_bytes)
        self.profile = dataclasses.replace(self.profile, ahead=ahead)

    def learn(
        self, trace: Trace, step_s: float, used_bytes: int, watch: PassWatch | None = None
    ) -> None:
        """Learn from a step that followed the plan.

        Args:
            trace: its seconds, with those that measuring memory took.
            step_s: seconds from its begin to the begin of the next step.
            used_bytes: the peak of what was in use.
            watch: its memory, pass by pass; None if that was not measured.
        """
        if watch is not None:
            self.learn_memory(watch)
            self._now = self._now._replace(plan=self._opened(self.plan))
        self._learn_seconds(trace, step_s)
        after = self._predict()
        if watch is not None and not self._hardware.computes_on_host:
            # Of the seconds between the passes, most went into waiting for what is measured.
            step_s = min(step_s, after.step_s)
        # Copies are awaited where memory is measured; in other steps more of them are under way.
        self._note_cost(StepCost(used_bytes, step_s), after.peak_bytes, used_bytes)

    def _opened(self, plan: Plan) -> Plan:
        """Return a plan whose copies have the room of each pass, as it is known by now."""
        if not plan.windows:
            return plan
        closed, limit_bytes = plan.with_closed_windows(), self._device_bytes(1)
        peaks = self._timing().predict(closed).peak_by_position
        opened = open_windows(closed, self.profile, StorageUses(self.profile), peaks, limit_bytes)
        return dataclasses.replace(opened, limit_bytes=limit_bytes)

    def _learn_seconds(self, trace: Trace, step_s: float) -> None:
        is_first = self.phase is Phase.FRUGAL  # there are no other seconds yet
        self.profile = measured_profile(
            self.profile, self.plan, trace, step_s, self._hardware, is_first=is_first
        )
        self._hardware = measured_hardware(self._hardware, trace)

    def note(self, peak_bytes: int, step_s: float) -> None:
        """Note what a step cost that was not measured pass by pass.

        If it was over the budget, another plan is searched for.

        Args:
            peak_bytes: its peak.
            step_s: seconds from its begin to the begin of the next step.
        """
        cost = StepCost(peak_bytes, step_s)
        if (before := self._now.measured) is not None:
            cost = StepCost(max(peak_bytes, before.peak_bytes), min(step_s, before.step_s))
        if self.phase is Phase.SETTLED or peak_bytes > self.budget_bytes:
            self._note_cost(cost, self._now.needs_bytes, peak_bytes)

    def _note_cost(self, cost: StepCost, needs_bytes: int, used_bytes: int) -> None:
        """Remember what steps of the plan cost, and go on to the next phase.

        Args:
            cost: what was measured.
            needs_bytes: what they need by now, as far as it is known.
            used_bytes: the peak of the last one.
        """
        needs_bytes = max(needs_bytes, cost.peak_bytes)
        self.budget_bytes = max(self.budget_bytes, min(needs_bytes, self._asked_bytes))
        at_first = self._now.at_first or _cost_of(self.plan)
        self._remember(_Followed(self.plan, at_first, cost, needs_bytes))
        if self.phase is not Phase.FRUGAL:
            self._over_bytes += max(0, used_bytes - self.budget_bytes)
        before, self.phase = self.phase, _AFTER[self.phase][used_bytes > self.budget_bytes]
        if self.phase is not Phase.SETTLED:
            self._searches = True
        elif before is not Phase.SETTLED:
            self._settle()

    def _remember(self, followed: _Followed) -> None:
        self._now = followed
        self._forget(followed.plan)
        self._tried.append(followed)

    def _forget(self, plan: Plan) -> None:
        self._tried = [each for each in self._tried if not is_same(each.plan, plan)]

    def learn_shortage(self) -> None:
        """Learn that the device did not have the memory that a step with the plan needed."""
        failed = self.plan
        self._forget(failed)
        least = self._least()
        self.budget_bytes = max(least.needs_bytes, int(_LESS * self.budget_bytes))
        self.phase, self._searches = Phase.FRUGAL, False
        if not is_same(least.plan, failed):
            self._begin(least.plan, least.at_first)

    def _least(self) -> _Followed:
        """Return the plan that needs least of those that were measured, or that can be found."""
        if not self._tried:
            return _Followed(self._find_frugal())
        return min(self._tried, key=lambda each: each.needs_bytes)

    def learn_full_store(self) -> None:
        """Learn that the store had less room than was expected, so that the step kept more."""
        room_bytes = self._predict().host_peak_bytes
        if self._host_bytes is not None:
            room_bytes = min(room_bytes, self._host_bytes)
        self._host_bytes = int(_LESS * room_bytes)
        self._forget(self.plan)
        if self.phase is Phase.FRUGAL:
            self._begin(self._find_frugal())
        else:
            self._search_again()

    def follow_least(self) -> None:
        """Follow the plan that needs least from now on, although it is over the budget."""
        self._now = self._least()
        self._tried = [self._now] if self._now.measured else []
        needed_bytes = self._now.needs_bytes or self.plan.peak_bytes or 0
        self.budget_bytes = self._asked_bytes = max(self.budget_bytes, int(SURE * needed_bytes))
        self._settle()

    def _search_again(self) -> None:
        self._searches, self._now = True, self._now._replace(measured=None)
        if self.phase is Phase.SETTLED:
            self.phase = Phase.CORRECTED

    def _search(self) -> None:
        """Search for a plan, and follow it.

        Raises:
            BudgetError: no plan fits into the budget.
        """
        try:
            plan = self._find_plan()
        except BudgetError as error:
            self._follow_what_fits(error)
            return
        self._searches = False
        for each in self._tried:
            if is_same(each.plan, plan) and each.needs_bytes <= self.budget_bytes:
                self._now = each
                self._settle()
                return
        self._begin(plan)

    def _follow_what_fits(self, error: BudgetError) -> None:
        """Follow a plan that was measured to fit, as no other is predicted to.

        Raises:
            BudgetError: there is none. One that is predicted to need little more has been tried.
        """
        if self._fastest() is not None:
            self._settle()
            return
        is_near = error.smallest_bytes <= SURE * self.budget_bytes
        if is_near and self.phase is Phase.PLANNED and not self.weights_can_leave:
            self._searches = False
            self._begin(self._find_frugal())
            return
        measured = (each.needs_bytes + self._margin_bytes for each in self._tried)
        free_bytes = self._margin_bytes + self._over_bytes
        smallest_bytes = min(error.smallest_bytes + free_bytes, *measured)
        raise self._too_small(smallest_bytes, error.price) from None

    def _settle(self) -> None:
        """Settle on the current plan, or on another that was measured to be faster, or to fit."""
        self.phase, self._searches = Phase.SETTLED, False
        best, now, enough_s = self._fastest(), self._now, math.inf
        fits = now.measured is not None and now.needs_bytes <= self.budget_bytes
        if now.measured is not None and fits:
            # Nothing is faster than a plan that changes nothing: if another seems so, it is chance.
            enough_s = 0.0 if self.plan.changes_nothing else (1 - _FASTER) * now.measured.step_s
        if best is not None and best.measured is not None and best.measured.step_s < enough_s:
            self._now, fits = best, True
        self._predict_now()
        if fits:
            # It was measured to fit, whatever another plan's steps have taught since.
            peak_bytes = min(self.plan.peak_bytes or 0, self._now.needs_bytes)
            plan = dataclasses.replace(self.plan, peak_bytes=peak_bytes)
            self._now = self._now._replace(plan=plan)
        if _LOG.isEnabledFor(logging.INFO):
            _LOG.info("the plan has settled: %s", self.step.summary)

    def _fastest(self) -> _Followed | None:
        """Return the fastest of the plans that were measured to fit."""
        fitting = [each for each in self._tried if each.needs_bytes <= self.budget_bytes]
        return min(fitting, key=_measured_s, default=None)

    def _too_small(self, smallest_bytes: int, price: float | None) -> BudgetError:
        weights = ""
        if self._hardware.computes_on_host:
            weights = ", or weights=ebbtide.WeightPolicy() for weights and optimizer state in files"
        cost = "" if price is None else f", with a step {price:.0%} longer than one that keeps all"
        return BudgetError(
            f"budget={format_size(self.budget_bytes)} is too small for this step: the smallest "
            f"that a plan was found for is {format_size(smallest_bytes)} ({smallest_bytes} bytes)"
            f"{cost}. Give that budget or a smaller batch{weights}",
            smallest_bytes=smallest_bytes,
            price=price,
        )

    def _begin(self, plan: Plan, at_first: StepCost | None = None) -> None:
        """Follow another plan from now on, which is to be measured.

        Args:
            plan: the plan.
            at_first: what was predicted before it ran for the first time; None means now.
        """
        self._now = _Followed(plan, at_first or _cost_of(plan))

    def _begun(self) -> StepProfile:
        """Return the profile with the memory that a step begins with, and that its end needs."""
        return dataclasses.replace(
            self.profile,
            fixed_bytes=self._begin_bytes,
            after_working_bytes=max(0, self._end_peak_bytes - self._begin_bytes),
            at_once_bytes=self._at_once_bytes,
        )

    def _corrected(self, plan: Plan) -> StepProfile:
        """Return the profile of all forwards, with the memory that layers need under a plan."""
        return self._corrections.apply(self._begun(), plan).with_forwards(self.num_forwards)

    def _timing(self, num_forwards: int | None = None) -> CautiousTiming:
        """Return the predictor of this step, which adds what layers were measured to need."""
        return CautiousTiming(
            self._begun(),
            self._hardware,
            more=self._corrections.more_bytes,
            num_forwards=num_forwards or self.num_forwards,
        )

    def _predict(self) -> Prediction:
        return self._timing().predict(self.plan)

    def _predict_now(self) -> Prediction:
        """Renew the prediction of the plan that is followed."""
        plan, prediction = self.plan, self._predict()
        step_s, bound_s = prediction.step_s, plan.bound_s
        if bound_s is not None and plan.step_s:
            bound_s *= step_s / plan.step_s
        plan = dataclasses.replace(
            plan, step_s=step_s, peak_bytes=prediction.peak_bytes, bound_s=bound_s
        )
        self._now = self._now._replace(plan=plan)
        return prediction

    def _find_frugal(self) -> Plan:
        """Return the plan that needs the least of those that are looked at."""
        profile, rests = self._corrected(self._recorded), everywhere(self.profile)
        timing, host_bytes = self._timing(), self._host_bytes
        return find_frugal(profile, self._hardware, timing, rests, host_bytes, limit_s=_QUICK_S)

    @property
    def _margin_bytes(self) -> int:
        """How much of the budget stays free, as no two steps are alike."""
        share = _MARGIN_ON_HOST if self._hardware.computes_on_host else _MARGIN
        return int(share * self.budget_bytes)

    def _find_plan(self) -> Plan:
        """Search for a plan that leaves enough of the budget free.

        Raises:
            BudgetError: no plan was found.
        """
        margins = 2 if self.phase is Phase.PLANNED or self._over_bytes else 1
        # On an accelerator, what is predicted is the most.
        fewest = 1 if self._hardware.computes_on_host else 0
        while True:
            try:
                return self._find(margins)
            except BudgetError as error:
                if margins == fewest:
                    raise
                smallest_bytes = error.smallest_bytes
            margins -= 1
            while margins > fewest and self._device_bytes(margins) < smallest_bytes:
                margins -= 1

    def _device_bytes(self, margins: int) -> int:
        """Return the memory that a plan may use.

        Args:
            margins: how many margins it leaves free, beside what steps were over the budget.
        """
        return max(0, self.budget_bytes - self._over_bytes - margins * self._margin_bytes)

    def _find(self, margins: int) -> Plan:
        """Search for a plan that leaves so many margins free.

        Raises:
            BudgetError: no plan was found.
        """
        device_bytes = self._device_bytes(margins)
        budget = PlanBudget(device_bytes=device_bytes, host_bytes=self._host_bytes)
        # The programme, which knows nothing of ways to run, is guided by the one that needs least.
        plan = search(
            self._corrected(self._recorded),
            self._hardware,
            budget,
            self._timing(),
            weights=self.places_weights,
            limit_s=_QUICK_S,
        )
        if self.num_forwards > 1 and plan.windows:  # each pass has as much room as the fullest
            least_bytes = min(plan.windows)
            windows = (least_bytes,) * len(plan.windows)
            plan = dataclasses.replace(plan, windows=windows, max_inflight_bytes=least_bytes)
        return plan


def _cost_of(plan: Plan) -> StepCost:
    return StepCost(plan.peak_bytes or 0, plan.step_s or 0.0)


def _measured_s(followed: _Followed) -> float:
    return math.inf if followed.measured is None else followed.measured.step_s
