"""Corrects a profile's memory by what was measured, position by position."""

from __future__ import annotations

import dataclasses
import enum
import logging
import time
from collections.abc import Sequence, Set
from typing import Any, Final, NamedTuple, final

from ebbtide.errors import BudgetError
from ebbtide.observe.trace import Trace
from ebbtide.planning.contest import keep_all, offload_first, with_weights
from ebbtide.planning.hardware import Hardware
from ebbtide.planning.plan import Decision, LayerMode, LayerPlan, Plan
from ebbtide.planning.planned_step import PlannedStep, StepCost
from ebbtide.planning.prediction import CautiousTiming, PlanBudget, Prediction, predict_awaited
from ebbtide.planning.profile import LayerProfile, StepProfile
from ebbtide.planning.recorded import (
    PassWatch,
    computing_s,
    copied_bytes,
    measured_hardware,
    measured_profile,
    waited_s,
    with_copy_cost,
)
from ebbtide.planning.relaxation import everywhere
from ebbtide.planning.search import find_frugal, search
from ebbtide.units import format_size


@final
class Corrections:
    """What was measured at each position beyond what a profile says, by how the layer ran.

    A layer that has not run in one way yet is taken to need no less there than the profile says.
    """

    def __init__(self) -> None:
        self._excess: dict[tuple[int, bool], int] = {}  # by position and whether recomputed
        self._kept: set[tuple[int, bool]] = set()  # measured with more than what was offloaded

    def learn(self, watch: PassWatch, plan: Plan, predicted: Prediction) -> None:
        """Note by how much a step needed more, or less, than was predicted.

        Args:
            watch: what was measured.
            plan: the plan that was followed.
            predicted: what these corrections predicted for it.
        """
        peaks = predicted.peak_by_position
        for position, peak_bytes in watch.peaks.items():
            covered = watch.covered(position)
            excess_bytes = peak_bytes - max(peaks[each] for each in covered)
            for each in covered:
                key = each, _is_recomputed(plan, each)
                self._excess[key] = self._excess.get(key, 0) + excess_bytes
                if not _is_offloaded(plan, each):
                    self._kept.add(key)

    def apply(
        self, profile: StepProfile, *, cautious: bool = False, unsure_bytes: int = 0
    ) -> StepProfile:
        """Return a profile with working memory as it was measured.

        Args:
            profile: the profile.
            cautious: what a layer was measured to need less, while all that it saves was offloaded,
                may be because that was never there at one time. This does not count on it.
            unsure_bytes: how much more a pass of a layer may need than the profile says, if the
                layer is recomputed and was not measured so.
        """
        count = len(profile.layers)
        known = self._kept if cautious else self._excess.keys()
        excess = {key: size if key in known else max(0, size) for key, size in self._excess.items()}
        # What was measured in one way is taken to be needed in the other way, too.
        as_is, again = (
            [
                excess.get((each, way), unsure + max(0, excess.get((each, not way), 0)))
                for each in range(2 * count + 1)
            ]
            for way, unsure in ((False, 0), (True, unsure_bytes))
        )
        layers = tuple(
            _corrected(layer, profile.inside_bytes(index), as_is, again, index, 2 * count - index)
            for index, layer in enumerate(profile.layers)
        )
        loss_bytes = profile.loss_working_bytes + as_is[count]
        return dataclasses.replace(profile, layers=layers, loss_working_bytes=max(0, loss_bytes))


def _corrected(
    layer: LayerProfile,
    inside_bytes: int,
    as_is: Sequence[int],
    again: Sequence[int],
    forward: int,
    backward: int,
) -> LayerProfile:
    """Return a layer with its working memory in the positions of its forward and backward."""
    unsaved_bytes = layer.unsaved_forward_bytes
    if unsaved_bytes is None:
        unsaved_bytes = inside_bytes + layer.forward_working_bytes
    figures = {
        "forward_working_bytes": layer.forward_working_bytes + as_is[forward],
        "unsaved_forward_bytes": unsaved_bytes + again[forward],
        "backward_working_bytes": layer.backward_working_bytes + as_is[backward],
        "recompute_working_bytes": layer.second_working_bytes + again[backward],
    }
    changes: dict[str, Any] = {name: max(0, size) for name, size in figures.items()}
    return dataclasses.replace(layer, **changes)


def _is_recomputed(plan: Plan, position: int) -> bool:
    layer = _layer_at(plan, position)
    return layer is not None and layer.mode is not LayerMode.AS_IS


def _is_offloaded(plan: Plan, position: int) -> bool:
    """Whether the layer at a position keeps nothing, and does not run again either."""
    layer = _layer_at(plan, position)
    if layer is None or layer.mode is not LayerMode.AS_IS:
        return False
    return Decision.KEEP not in layer.decisions


def _layer_at(plan: Plan, position: int) -> LayerPlan | None:
    """Return the layer whose forward or backward has a position; None is between the passes."""
    count = len(plan.layers)
    return None if position == count else plan.layers[min(position, 2 * count - position)]


# ---- What a budget expects of a plan, and which plans it takes to be the same ----

_MARGIN: Final = 0.05  # share of the budget that stays free, as no two steps are alike,
_MARGIN_ON_HOST: Final = 0.03  # and where large blocks can be mapped one by one

SLOWER: Final = 8.0
"""How many times slower copies may be until that was measured: files grow."""


def margin_bytes(hardware: Hardware, budget_bytes: int) -> int:
    """Return how much of a budget a plan leaves free."""
    return int((_MARGIN_ON_HOST if hardware.computes_on_host else _MARGIN) * budget_bytes)


def predicted_cost(plan: Plan) -> StepCost:
    """Return what is predicted of a plan."""
    return StepCost(plan.peak_bytes or 0, plan.step_s or 0.0)


def is_same(plan: Plan, other: Plan) -> bool:
    """Whether two plans do the same with each storage."""
    return plan is other or _cut(plan) == _cut(other)


def _cut(plan: Plan) -> Plan:
    """Return a plan without what is predicted of it."""
    return dataclasses.replace(plan, step_s=None, peak_bytes=None, bound_s=None)


def predicted_now(plan: Plan, prediction: Prediction, slack_bytes: int) -> Plan:
    """Return a plan with what was predicted for it last, before it was measured."""
    bound_s = plan.bound_s
    if bound_s is not None and plan.step_s:
        bound_s *= prediction.step_s / plan.step_s
    peak_bytes = prediction.peak_bytes + slack_bytes
    return dataclasses.replace(
        plan, step_s=prediction.step_s, peak_bytes=peak_bytes, bound_s=bound_s
    )


# ---- Plans one kind of step to a budget, and corrects the plan by what was measured ----
#
# [Note: settling] The first steps offload everything, so that no budget is broken to find out.
# The first one is recorded, which gives the profile. Each plan warms up for one step: files grow,
# memory is cold, and the first step of all makes the optimizer's state. The next step measures
# its memory, pass by pass. If offloading everything is not enough, a plan that needs less is
# searched for. If a plan's memory is as predicted and within the budget, its seconds are measured
# in the next step. Then a plan is searched for with what was learned. After a few plans, or as soon
# as one costs what was predicted, the fastest plan that was measured to fit stays.
#
# What is predicted of the plan that stays is corrected by its own steps. What was predicted before
# it ran is kept beside that.

_LOG = logging.getLogger(__name__)

_MOST_PLANS: Final = 6  # plans that are tried before one stays that needs other memory,
_MOST_LATE: Final = 2  # or other time than was predicted
_UNSURE: Final = 0.02  # share of the budget by which layers can be off that never ran again there
_CLOSE: Final = 0.04  # error of a predicted peak, as a share of it, that needs no other plan,
_CLOSE_S: Final = 0.15  # and of a predicted time
_STEP: Final = 4.0  # by which `SLOWER` changes where more or less memory waited for its copies
_MOST_FRUGAL: Final = 3  # plans that are tried because they need little
_LESS: Final = 0.9  # share of the budget that is left after the device ran out of memory
_ANY_BYTES: Final = 2**62
_TIMED: Final = 3  # steps that measure the seconds of a plan before another one is preferred
_FASTER: Final = 0.02  # by how much a plan must be faster to be followed instead of the last one
_SEARCH_STEPS: Final = 2.0  # that a search may take, as it is repeated up to five times,
_QUICK_S: Final = 2.0  # or this long: more time found nothing better for GPTs of 20 layers
_SURE: Final = 1.5  # how far over the budget a first step, or a prediction, leaves nothing to try
_APART: Final = 0.1  # how different steps must be to tell what copies cost
_MOST_COST_S: Final = 1e-8  # that a copied byte can cost; more is something else


class Phase(enum.Enum):
    """How far the planning of a step is."""

    FRUGAL = enum.auto()
    PLANNED = enum.auto()
    SETTLED = enum.auto()


class Stage(enum.Enum):
    """What the next step with a plan is for."""

    WARM_UP = enum.auto()
    MEMORY = enum.auto()
    SECONDS = enum.auto()


class _Frugal(NamedTuple):
    """A plan that was followed because it needs little, and its peak."""

    peak_bytes: int
    plan: Plan
    at_first: StepCost


class _Tried(NamedTuple):
    """A plan whose memory and seconds were measured.

    Attributes:
        plan: the plan.
        at_first: what was predicted before it ran.
        measured: what was measured.
        learned: the step and the machine, with the seconds that the plan's own steps took.
    """

    plan: Plan
    at_first: StepCost
    measured: StepCost
    learned: tuple[StepProfile, Hardware]


class _Sample(NamedTuple):
    """What a step computed, and how many bytes it copied."""

    copied_bytes: int
    computing_s: float


@final
class BudgetStudy:
    """The plan of one kind of step. See [Note: settling].

    Args:
        profile: the record of a step that offloaded everything. Parameters that it does not have
            count as in use when the step begins.
        hardware: the bandwidths, until copies have been measured.
        budget_bytes: the budget.
        begin_bytes: memory that was in use when the step began.
        plan: the plan that the step followed; None: everything was offloaded, and the weights that
            the profile has rested on the host.
        host_bytes: how much the store has room for, with the weights that the profile has; None:
            for any number of bytes.

    Attributes:
        places_weights: whether plans say which weights rest on the host.
        weights_can_leave: whether all weights can rest if no plan fits, so that none that is only
            near the budget is tried.
        phase: how far the planning is.
        stage: what the next step is for, if the plan has not settled.
        plan: the plan of the next step.
        budget_bytes: the budget; less than was asked for where the device did not have that.
        saved_bytes: unique bytes that the recorded step saved.
        exceeded_bytes: the peak of a step that was over the budget, after which no better plan was
            found; 0 if there was none.
    """

    # Long: it is the state of one plan, and each of its methods is short.

    def __init__(
        self,
        profile: StepProfile,
        hardware: Hardware,
        budget_bytes: int,
        begin_bytes: int = 0,
        plan: Plan | None = None,
        host_bytes: int | None = None,
    ) -> None:
        self._host_bytes = host_bytes
        self.phase = Phase.FRUGAL
        self.stage = Stage.WARM_UP
        self._profile = profile
        self._hardware = hardware
        self.budget_bytes = self._asked_bytes = budget_bytes
        self._corrections = Corrections()
        self._begin_bytes = begin_bytes  # without the weights that the profile has
        self._slack_bytes = 0  # what an allocator holds beside what is in use
        self._over_bytes = 0  # how far plans were over the budget that should not have been
        self._frugal: list[_Frugal] = []  # the plans that were measured first
        self._failed: list[Plan] = []  # the plans that ran out of memory before any was measured
        self._slower = SLOWER
        self._num_plans = 0
        self._at_first: StepCost | None = None  # what was predicted of the plan before it ran
        self._measured: StepCost | None = None
        self._is_watched = False  # whether the memory of the plan was measured
        self._tried: list[_Tried] = []
        self._samples: list[_Sample] = []
        self._searches = False
        self._seen: Set[int] = frozenset()  # the positions that the last watched step had
        self._num_timed = 0  # steps that have measured the seconds of the plan
        self.exceeded_bytes = self.saved_bytes = 0
        rests = everywhere(profile)
        self.places_weights = any(rests)
        self.weights_can_leave = False
        self.plan = plan or with_weights(offload_first(profile, len(profile.layers)), rests)
        self.plan = predicted_now(self.plan, self._predict(begin_bytes), 0)

    @property
    def profile(self) -> StepProfile:
        """The step, without what was measured of its memory."""
        return self._profile

    @property
    def step(self) -> PlannedStep:
        """The plan with its reasons."""
        return PlannedStep(
            plan=self.plan,
            profile=self._corrected(self._begin_bytes),
            hardware=self._hardware,
            budget_bytes=self.budget_bytes,
            settled=self.phase is Phase.SETTLED,
            at_first=self._at_first,
            measured=self._measured,
        )

    @property
    def _frugal_fits(self) -> bool:
        return not self._frugal or self._frugal[0].peak_bytes <= self.budget_bytes

    def choose(self, begin_bytes: int) -> Plan:
        """Return the plan for a step that begins now.

        Args:
            begin_bytes: memory in use.

        Raises:
            BudgetError: no plan fits into the budget.
        """
        if self._searches:
            # A process holds more than when it was last measured.
            self._begin_bytes = self._without_weights(begin_bytes)
            self._search()
        return self.plan

    def _without_weights(self, begin_bytes: int) -> int:
        """Return what was in use without the weights that the plan has on the device."""
        pairs = zip(self._profile.layers, self.plan.layers, strict=True)
        there = sum(each.parameter_bytes for each, plan in pairs if not plan.weights_on_host)
        return max(0, begin_bytes - there)

    def has_all_passes(self, watch: PassWatch) -> bool:
        """Whether a step had all passes of the profile, or the same ones as the step before.

        A layer has no backward if nothing in it is trained, or its output is not used.
        """
        seen, self._seen = self._seen, frozenset(watch.peaks)
        return watch.is_whole or seen == self._seen

    def learn_record(
        self, watch: PassWatch, trace: Trace, step_s: float, *, was_full: bool = False
    ) -> None:
        """Learn from the step that was recorded: its memory, and roughly its seconds.

        Args:
            watch: its memory.
            trace: its seconds, with those that measuring memory took.
            step_s: seconds from its begin to the begin of the next step.
            was_full: whether the store had not enough room, so that it kept more than its plan.
        """
        self._profile = measured_profile(self._profile, self.plan, trace, step_s, 0.0)
        self._hardware = measured_hardware(self._hardware, trace)
        watch.bind(self._profile)
        if was_full:
            self._begin(self._find_frugal(0))
        elif self.has_all_passes(watch):
            self.learn_memory(watch, step_s)

    def refuse(self, names: Set[str]) -> None:
        """Recompute no layer of these names any more: it would not do the same again."""
        if not any(each.may_recompute and each.name in names for each in self._profile.layers):
            return
        self._profile = _without_recomputing(self._profile, names)

        def is_possible(plan: Plan) -> bool:
            pairs = zip(plan.layers, self._profile.layers, strict=True)
            return all(one.mode is LayerMode.AS_IS or two.may_recompute for one, two in pairs)

        self._frugal = [each for each in self._frugal if is_possible(each.plan)]
        self._tried = [
            each._replace(learned=(_without_recomputing(each.learned[0], names), each.learned[1]))
            for each in self._tried
            if is_possible(each.plan)
        ]
        if not is_possible(self.plan):
            self._searches = True
            if self.phase is Phase.SETTLED:
                self.phase, self._num_plans = Phase.PLANNED, 0

    def estimate(self) -> PlannedStep:
        """Return the plan that would be followed if no more were to be learned.

        Raises:
            BudgetError: no plan fits into the budget.
        """
        free_bytes = margin_bytes(self._hardware, self.budget_bytes)
        try:
            plan = self._find(free_bytes)
        except BudgetError as error:
            smallest_bytes = error.smallest_bytes + free_bytes
            raise self._too_small(smallest_bytes, error.price) from None
        profile = self._corrected(self._begin_bytes)
        return PlannedStep(
            plan=plan, profile=profile, hardware=self._hardware, budget_bytes=self.budget_bytes
        )

    def learn_memory(self, watch: PassWatch, step_s: float) -> None:
        """Learn from a step that followed the plan and was watched.

        Args:
            watch: its memory.
            step_s: seconds from its begin to the begin of the next step.
        """
        peak_bytes = watch.reserved_peak_bytes
        warm_up, frugal = self.stage is Stage.WARM_UP, self.phase is Phase.FRUGAL
        if warm_up and not frugal and peak_bytes <= self.budget_bytes:
            self.stage = Stage.MEMORY
            return
        begin_bytes = self._without_weights(watch.begin_bytes)
        before = self._predict(begin_bytes)
        watched = self._predict_watched(begin_bytes, before)
        self._corrections.learn(watch, self.plan, watched)
        self._slack_bytes = max(0, peak_bytes - max(watch.peaks.values()))
        self._begin_bytes, self._is_watched = begin_bytes, True
        self._measured = StepCost(peak_bytes, step_s)
        self.plan = predicted_now(self.plan, before, self._slack_bytes)
        self._note_had(peak_bytes)
        if frugal:
            others = (each for each in self._frugal if not is_same(each.plan, self.plan))
            measured = _Frugal(peak_bytes, self.plan, self._at_first or predicted_cost(self.plan))
            self._frugal = sorted([*others, measured], key=lambda each: each.peak_bytes)
            self.stage = Stage.MEMORY if warm_up else Stage.SECONDS
            enough_bytes = _SURE * self.budget_bytes if warm_up else self.budget_bytes
            self._searches = peak_bytes > enough_bytes
        else:
            self._judge(watched.peak_bytes + self._slack_bytes, peak_bytes)

    def learn_seconds(self, trace: Trace, step_s: float, peak_bytes: int) -> None:
        """Learn from a step that followed the plan and was traced.

        Args:
            trace: its seconds.
            step_s: seconds from its begin to the begin of the next step.
            peak_bytes: its peak.
        """
        predicted_s = self._predict(self._begin_bytes).step_s
        self._learn_copy_cost(trace, step_s)
        per_byte_s = self._hardware.copy_cost_s_per_byte or 0.0
        cost_s = copied_bytes(self._profile, self.plan) * per_byte_s
        lowest = not self._hardware.computes_on_host
        self._profile = measured_profile(
            self._profile, self.plan, trace, step_s, cost_s, lowest=lowest
        )
        if lowest and not any(each.weights_on_host for each in self.plan.layers):
            # The host, which has more to do in a traced step, does not count.
            learned = self._predict(self._begin_bytes)
            step_s = min(step_s, learned.step_s - learned.exposed_copy_s + waited_s(trace))
        self._hardware = measured_hardware(self._hardware, trace)
        self._num_timed += 1
        if self._measured is not None:
            peak_bytes = max(peak_bytes, self._measured.peak_bytes)
        for each in self._tried:
            if is_same(each.plan, self.plan):
                step_s = min(step_s, each.measured.step_s)
        self._tried = [each for each in self._tried if not is_same(each.plan, self.plan)]
        self._measured = StepCost(peak_bytes, step_s)
        at_first = self._at_first or predicted_cost(self.plan)
        figures = self._profile, self._hardware
        self._tried.append(_Tried(self.plan, at_first, self._measured, figures))
        late = predicted_s and abs(step_s / predicted_s - 1) > _CLOSE_S
        if self.phase is Phase.FRUGAL or (late and self._num_plans < _MOST_LATE):
            self._searches = True
        else:
            self._settle()

    def _learn_copy_cost(self, trace: Trace, step_s: float) -> None:
        """Learn what copies cost the processor from steps that copied more and less."""
        copied = copied_bytes(self._profile, self.plan)
        self._samples.append(_Sample(copied, computing_s(trace, step_s)))
        least, most = min(self._samples), max(self._samples)
        if self._hardware.copy_cost_s_per_byte is None or not trace.events:
            return
        if most.copied_bytes - least.copied_bytes > _APART * most.copied_bytes:
            rise_s = most.computing_s - least.computing_s
            cost = rise_s / (most.copied_bytes - least.copied_bytes)
            self._hardware = with_copy_cost(self._hardware, min(max(cost, 0.0), _MOST_COST_S))

    def note_peak(self, peak_bytes: int) -> None:
        """Note the peak of a step that nobody measured in detail. It is planned again if over."""
        self._note_had(peak_bytes)
        if peak_bytes > self.budget_bytes:
            if self._measured is not None:
                self._measured = self._measured._replace(peak_bytes=peak_bytes)
            self._tried = [each for each in self._tried if each.plan.layers != self.plan.layers]
            self._over_bytes += peak_bytes - self.budget_bytes
            self.phase, self._searches = Phase.PLANNED, True
            self._num_plans = 0

    def learn_shortage(self) -> None:
        """Learn that the device did not have the memory that a step with the plan needed."""
        failed = self.plan
        self._tried = [each for each in self._tried if not is_same(each.plan, failed)]
        self._frugal = [each for each in self._frugal if not is_same(each.plan, failed)]
        least_bytes = self._frugal[0].peak_bytes if self._frugal else 0
        self.budget_bytes = max(least_bytes, int(_LESS * self.budget_bytes))
        self.phase, self.stage, self._searches = Phase.FRUGAL, Stage.WARM_UP, False
        self._num_plans = 0
        if self._frugal:
            self._begin(self._frugal[0].plan, self._frugal[0].at_first)
            return
        self._failed.append(failed)
        self._try_another_frugal()

    def learn_full_store(self) -> None:
        """Learn that the store had less room than was expected, so that the step kept more."""
        room_bytes = self._predict(self._begin_bytes).host_peak_bytes
        if self._host_bytes is not None:
            room_bytes = min(room_bytes, self._host_bytes)
        self._host_bytes = int(_LESS * room_bytes)
        self._tried = [each for each in self._tried if not is_same(each.plan, self.plan)]
        self._frugal = [each for each in self._frugal if not is_same(each.plan, self.plan)]
        self._searches, self._num_plans = True, 0
        if self.phase is Phase.SETTLED:
            self.phase = Phase.PLANNED

    def follow_least(self) -> Plan:
        """Follow the plan that needs least from now on, although it is over the budget."""
        if self._frugal:
            needed_bytes = self._frugal[0].peak_bytes
            self._begin(self._frugal[0].plan, self._frugal[0].at_first)
        else:
            self._begin(self._find_frugal(0))
            needed_bytes = self.plan.peak_bytes or 0
        self.exceeded_bytes = needed_bytes
        self.budget_bytes = self._asked_bytes = max(self.budget_bytes, int(_SURE * needed_bytes))
        self._end_search()
        return self.plan

    def _note_had(self, peak_bytes: int) -> None:
        """Note how much memory the device has had for a step."""
        self.budget_bytes = max(self.budget_bytes, min(peak_bytes, self._asked_bytes))

    def _judge(self, predicted_bytes: int, peak_bytes: int) -> None:
        """Judge the memory that a plan was measured to need."""
        wrong = abs(peak_bytes / predicted_bytes - 1) > _CLOSE
        if not self._hardware.computes_on_host:
            corrected = self._predict(self._begin_bytes)
            peak_bytes = max(peak_bytes, corrected.peak_bytes + self._slack_bytes)
        over = peak_bytes > self.budget_bytes
        if over:
            self._over_bytes += peak_bytes - self.budget_bytes
            self._slower = min(SLOWER, self._slower * _STEP)
        elif wrong and peak_bytes < predicted_bytes:
            self._slower = max(1.0, self._slower / _STEP)
        self._searches = over or (wrong and self._num_plans < _MOST_PLANS)
        self.stage = Stage.WARM_UP if self._searches else Stage.SECONDS

    def _settle(self) -> None:
        """Stay with the fastest plan that was measured to fit."""
        best, measured = self._fastest(), self._measured
        if best is not None and measured is not None:
            over = measured.peak_bytes > self.budget_bytes
            # Nothing is faster than a plan that changes nothing: then what was measured is chance.
            changes = self.plan.layers != keep_all(self._profile).layers
            faster = changes and best.measured.step_s < (1 - _FASTER) * measured.step_s
            if over or faster:
                if self._num_timed < _TIMED and not over:
                    self.stage, self._searches = Stage.SECONDS, False  # perhaps it was chance
                    return
                self._follow(best)
        self._end_search()

    def _end_search(self) -> None:
        self.phase, self._searches = Phase.SETTLED, False
        prediction = self._predict(self._begin_bytes)
        slack_bytes = self._slack_bytes
        if self._measured is not None and self._measured.peak_bytes <= self.budget_bytes:
            # It was measured to fit, whatever another plan's steps have taught since.
            slack_bytes = min(slack_bytes, self.budget_bytes - prediction.peak_bytes)
        self.plan = predicted_now(self.plan, prediction, slack_bytes)
        if _LOG.isEnabledFor(logging.INFO):
            _LOG.info("the plan has settled: %s", self.step.summary)

    def _fastest(self) -> _Tried | None:
        """Return the fastest of the plans that were measured to fit."""
        fitting = [each for each in self._tried if each.measured.peak_bytes <= self.budget_bytes]
        return min(fitting, key=lambda each: each.measured.step_s, default=None)

    def _follow(self, tried: _Tried) -> None:
        """Follow a plan again."""
        self._begin(tried.plan, tried.at_first)
        self._measured, self._is_watched = tried.measured, True
        self._profile, self._hardware = tried.learned

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
        """Follow another plan from now on.

        Args:
            plan: the plan.
            at_first: what was predicted before it ran for the first time; None means now.
        """
        self.plan, self._at_first = plan, at_first or predicted_cost(plan)
        self._is_watched, self._num_timed = False, 0

    def _corrected(self, begin_bytes: int, *, cautious: bool = False) -> StepProfile:
        fixed_bytes = begin_bytes + self._slack_bytes
        profile = dataclasses.replace(self._profile, fixed_bytes=fixed_bytes)
        on_host = self._hardware.computes_on_host
        unsure_bytes = int(_UNSURE * self.budget_bytes) if cautious and on_host else 0
        return self._corrections.apply(profile, cautious=cautious, unsure_bytes=unsure_bytes)

    def _predict(self, begin_bytes: int) -> Prediction:
        profile = dataclasses.replace(self._corrected(begin_bytes), fixed_bytes=begin_bytes)
        return CautiousTiming(profile, self._hardware, self._slower).predict(self.plan)

    def _predict_watched(self, begin_bytes: int, usual: Prediction) -> Prediction:
        """Return what is predicted for a step whose memory is measured."""
        if self._hardware.computes_on_host:
            return usual
        profile = dataclasses.replace(self._corrected(begin_bytes), fixed_bytes=begin_bytes)
        return predict_awaited(profile, self._hardware, self.plan)

    def _find_frugal(self, enough_bytes: int) -> Plan:
        profile = self._corrected(self._begin_bytes)
        timing = CautiousTiming(profile, self._hardware, self._slower)
        rests, host_bytes = everywhere(profile), self._host_bytes
        return find_frugal(profile, self._hardware, timing, enough_bytes, rests, host_bytes)

    def _try_another_frugal(self) -> bool:
        """Try another plan that may need less than those that were measured, if there is one."""
        for enough_bytes in (0, _ANY_BYTES):  # the most frugal one; the one that offloads all
            plan = self._find_frugal(enough_bytes)
            tried = [*self._failed, *(each.plan for each in self._frugal)]
            if len(tried) < _MOST_FRUGAL and not any(is_same(plan, each) for each in tried):
                self._begin(plan)
                self.phase, self.stage, self._searches = Phase.FRUGAL, Stage.WARM_UP, False
                return True
        return False

    def _search(self) -> None:
        free_bytes = margin_bytes(self._hardware, self.budget_bytes) + self._over_bytes
        try:
            plan = self._find(free_bytes)
        except BudgetError as error:
            if self._frugal_fits:
                self._follow_what_fits()
                return
            is_near = error.smallest_bytes <= _SURE * self.budget_bytes
            if is_near and not self.weights_can_leave and self._try_another_frugal():
                return
            measured_bytes = self._frugal[0].peak_bytes if self._frugal else error.smallest_bytes
            smallest_bytes = min(error.smallest_bytes, measured_bytes) + free_bytes
            raise self._too_small(smallest_bytes, error.price) from None
        self._searches = False
        if any(is_same(plan, each.plan) for each in self._tried):
            self._settle()
            return
        self._num_plans += 1
        self.phase = Phase.PLANNED
        if self._is_watched and is_same(plan, self.plan):
            self.stage = Stage.SECONDS  # its memory is known
            return
        self._begin(plan)
        self.stage = Stage.WARM_UP

    @property
    def _limit_s(self) -> float:
        """How long a search may take, so that all together take about ten steps."""
        step_s = 0.0 if self._measured is None else self._measured.step_s
        return max(_QUICK_S, _SEARCH_STEPS * step_s)

    def _find(self, free_bytes: int) -> Plan:
        """Search for a plan that leaves this much of the budget free.

        Raises:
            BudgetError: no plan was found.
        """
        device_bytes = max(0, self.budget_bytes - free_bytes)
        budget = PlanBudget(device_bytes=device_bytes, host_bytes=self._host_bytes)
        end_s = time.monotonic() + self._limit_s

        def find(*, cautious: bool) -> Plan:
            profile = self._corrected(self._begin_bytes, cautious=cautious)
            timing = CautiousTiming(profile, self._hardware, self._slower)
            return search(
                profile,
                self._hardware,
                budget,
                timing,
                weights=self.places_weights,
                limit_s=max(_QUICK_S / 4, end_s - time.monotonic()),
            )

        try:
            return find(cautious=True)
        except BudgetError:
            return find(cautious=False)

    def _follow_what_fits(self) -> None:
        """Follow a plan that was measured to fit for good: no other is predicted to."""
        if self._measured is not None and self._measured.peak_bytes > self.budget_bytes:
            self.exceeded_bytes = self._measured.peak_bytes
        best = self._fastest()
        if best is not None:
            self._follow(best)
        elif self._frugal:
            self._begin(self._frugal[0].plan, self._frugal[0].at_first)
            self._measured = None  # it was, of another plan
        self._end_search()


def _without_recomputing(profile: StepProfile, names: Set[str]) -> StepProfile:
    layers = (
        dataclasses.replace(each, may_recompute=each.may_recompute and each.name not in names)
        for each in profile.layers
    )
    return dataclasses.replace(profile, layers=tuple(layers))
