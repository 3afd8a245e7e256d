"""Plans one kind of step to a budget, and corrects the plan by what was measured.

[Note: settling] The first two steps run the most frugal plan, so that no budget is broken to find
out. The first warms up; the second, which the optimizer's state is there for, gives seconds and
bytes. Then a plan is searched for, followed and measured. It is searched for again while it needs
more than the budget or something else than was predicted, but only a few times, and then it stays.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Final, final

from ebbtide.budgeting.cautious_timing import CautiousTiming
from ebbtide.budgeting.corrections import Corrections
from ebbtide.budgeting.measured_times import measured_hardware, measured_profile
from ebbtide.budgeting.pass_watch import PassWatch
from ebbtide.budgeting.planned_step import Measurement, PlannedStep
from ebbtide.errors import BudgetError
from ebbtide.interface.warning import warn_user
from ebbtide.planning.budgets import PlanBudget
from ebbtide.planning.hardware import Hardware
from ebbtide.planning.plan import LayerMode, Plan
from ebbtide.planning.prediction.step_timing import Prediction
from ebbtide.planning.searching.plan_search import find_most_frugal, search
from ebbtide.planning.step_profile import StepProfile
from ebbtide.tracing.trace import Trace
from ebbtide.units import format_size

_WARM_UP: Final = 2  # steps with one plan before it is judged
_MOST_PLANS: Final = 6  # plans that are tried before one stays that needs other memory,
_MOST_LATE: Final = 2  # or other time than was predicted
_MARGIN: Final = 0.05  # share of the budget that plans leave free, as no two steps are alike
_CLOSE: Final = 0.04  # error of a predicted peak, as a share of it, that needs no other plan,
_CLOSE_S: Final = 0.15  # and of a predicted time
_SLOWER: Final = 8.0  # how many times slower copies may be until that was measured: files grow
_STEP: Final = 4.0  # by which that changes where more or less memory waited for its copies
_SURE: Final = 1.5  # how far over the budget the first prediction must be to try nothing at all


class Phase(enum.Enum):
    """How far the planning of a step is."""

    FRUGAL = enum.auto()
    PLANNED = enum.auto()
    SETTLED = enum.auto()


@final
class BudgetStudy:
    """The plan of one kind of step. See [Note: settling].

    Args:
        profile: the step, without its parameters: they count as in use when the step begins.
        hardware: the bandwidths, until copies have been measured.
        budget_bytes: the budget.

    Attributes:
        phase: how far the planning is.
        plan: the plan of the next step.
    """

    def __init__(self, profile: StepProfile, hardware: Hardware, budget_bytes: int) -> None:
        self.phase = Phase.FRUGAL
        self._profile = profile
        self._hardware = hardware
        self._budget_bytes = budget_bytes
        self._corrections = Corrections()
        self._begin_bytes = 0
        self._slack_bytes = 0  # what an allocator holds beside what is in use
        self._over_bytes = 0  # how far plans were over the budget that should not have been
        self._frugal = Plan(layers=())
        self._frugal_peak_bytes = 0
        self._slower = _SLOWER
        self._num_measured = 0
        self._num_plans = 0
        self._measured: Measurement | None = None
        self._searches = False
        self.plan = Plan(layers=())

    @property
    def profile(self) -> StepProfile:
        """The step, without what was measured of its memory."""
        return self._profile

    @property
    def wants_measuring(self) -> bool:
        """Whether the next step is to be measured."""
        return self.phase is not Phase.SETTLED

    @property
    def step(self) -> PlannedStep:
        """The plan with its reasons."""
        return PlannedStep(
            plan=self.plan,
            profile=self._corrected(self._begin_bytes),
            hardware=self._hardware,
            budget_bytes=self._budget_bytes,
            settled=self.phase is Phase.SETTLED,
            measured=self._measured,
        )

    @property
    def guarded_bytes(self) -> int:
        """How much may be in use when a pass begins, so that none is over the prediction in it."""
        profile = self._corrected(self._begin_bytes)
        working = [profile.loss_working_bytes]
        for layer, chosen in zip(profile.layers, self.plan.layers, strict=True):
            again = chosen.mode is not LayerMode.AS_IS
            forward = layer.unsaved_forward_bytes if again else layer.forward_working_bytes
            backward = layer.second_working_bytes if again else layer.backward_working_bytes
            saved = sum(each.size_bytes for each in layer.storages)
            working += [saved + (forward or 0), saved + backward]
        return (self.plan.peak_bytes or self._budget_bytes) - max(working)

    @property
    def _frugal_fits(self) -> bool:
        return self._frugal_peak_bytes <= self._budget_bytes

    def choose(self, begin_bytes: int) -> Plan:
        """Return the plan for a step that begins now.

        Args:
            begin_bytes: memory in use.

        Raises:
            BudgetError: no plan fits into the budget.
        """
        if not self.plan.layers:
            self._begin_bytes = begin_bytes
            self._choose_frugal()
        elif self._searches:
            self._search()
        return self.plan

    def learn(self, watch: PassWatch, trace: Trace, step_s: float) -> None:
        """Learn from a step that followed the plan.

        Args:
            watch: its memory.
            trace: its seconds.
            step_s: seconds from its begin to the begin of the next step.
        """
        self._num_measured += 1
        fits = watch.reserved_peak_bytes <= self._budget_bytes
        if self.phase is Phase.PLANNED and fits and self._num_measured < _WARM_UP:
            return  # a plan's first step writes files that grow, and reads cold memory
        before = self._predict(watch.begin_bytes)
        peak_bytes = watch.reserved_peak_bytes
        self._corrections.learn(watch, self.plan, before)
        self._slack_bytes = max(0, peak_bytes - max(watch.peaks.values()))
        self._begin_bytes = watch.begin_bytes
        late = before.step_s and abs(step_s / before.step_s - 1) > _CLOSE_S
        if self.phase is Phase.FRUGAL or late:
            self._profile = measured_profile(self._profile, self.plan, trace, step_s)
            self._hardware = measured_hardware(self._hardware, trace)
        self._measured = Measurement(peak_bytes, step_s)
        if self.phase is Phase.FRUGAL:
            self._searches = self._num_measured >= _WARM_UP
            self._frugal_peak_bytes = peak_bytes
            self._frugal = self.plan = _predicted_now(self.plan, before, self._slack_bytes)
        else:
            self.plan = _predicted_now(self.plan, before, self._slack_bytes)
            self._judge(before.peak_bytes + self._slack_bytes, peak_bytes, late=bool(late))

    def note_peak(self, peak_bytes: int) -> None:
        """Note the peak of a step that nobody measured in detail. It is planned again if over."""
        if peak_bytes > self._budget_bytes:
            if self._measured is not None:
                self._measured = self._measured._replace(peak_bytes=peak_bytes)
            self._over_bytes += peak_bytes - self._budget_bytes
            self.phase, self._searches = Phase.PLANNED, True
            self._num_plans = 0

    def _judge(self, predicted_bytes: int, peak_bytes: int, *, late: bool) -> None:
        over = peak_bytes > self._budget_bytes
        if over:
            self._over_bytes += peak_bytes - self._budget_bytes
        wrong = abs(peak_bytes / predicted_bytes - 1) > _CLOSE
        if over:
            self._slower = min(_SLOWER, self._slower * _STEP)
        elif wrong and peak_bytes < predicted_bytes:
            self._slower = max(1.0, self._slower / _STEP)
        most = _MOST_PLANS if wrong else _MOST_LATE
        self._searches = over or ((wrong or late) and self._num_plans < most)
        self._num_measured = 0
        if not self._searches:
            self.phase = Phase.SETTLED

    def _corrected(self, begin_bytes: int) -> StepProfile:
        fixed_bytes = begin_bytes + self._slack_bytes
        profile = dataclasses.replace(self._profile, fixed_bytes=fixed_bytes)
        return self._corrections.apply(profile)

    def _predict(self, begin_bytes: int) -> Prediction:
        profile = dataclasses.replace(self._corrected(begin_bytes), fixed_bytes=begin_bytes)
        return CautiousTiming(profile, self._hardware, self._slower).predict(self.plan)

    def _choose_frugal(self) -> None:
        profile = self._corrected(self._begin_bytes)
        self.plan = find_most_frugal(profile, CautiousTiming(profile, self._hardware, self._slower))
        peak_bytes = self.plan.peak_bytes or 0
        if peak_bytes > _SURE * self._budget_bytes:
            self.plan = Plan(layers=())
            raise _too_small(self._budget_bytes, peak_bytes, None)

    def _search(self) -> None:
        profile = self._corrected(self._begin_bytes)
        timing = CautiousTiming(profile, self._hardware, self._slower)
        free_bytes = int(_MARGIN * self._budget_bytes) + self._over_bytes
        budget = PlanBudget(device_bytes=max(0, self._budget_bytes - free_bytes))
        try:
            self.plan = search(profile, self._hardware, budget, timing)
        except BudgetError as error:
            if self._frugal_fits:
                self._follow_frugal()
                return
            smallest_bytes = max(error.smallest_bytes, self._frugal_peak_bytes) + free_bytes
            raise _too_small(self._budget_bytes, smallest_bytes, error.price) from None
        self.phase, self._searches = Phase.PLANNED, False
        self._num_plans += 1
        self._num_measured = 0

    def _follow_frugal(self) -> None:
        """Follow the most frugal plan for good: it was measured to fit, and no other does."""
        if self._measured is not None and self._measured.peak_bytes > self._budget_bytes:
            warn_user(
                f"a step needed {format_size(self._measured.peak_bytes)} under a budget of "
                f"{format_size(self._budget_bytes)}. The most frugal plan is followed from now on; "
                f"give a larger budget or a smaller batch",
                UserWarning,
            )
        self.plan = self._frugal
        self.phase, self._searches = Phase.SETTLED, False


def _predicted_now(plan: Plan, prediction: Prediction, slack_bytes: int) -> Plan:
    """Return a plan with what was predicted for it last, before it was measured."""
    bound_s = plan.bound_s
    if bound_s is not None and plan.step_s:
        bound_s *= prediction.step_s / plan.step_s
    peak_bytes = prediction.peak_bytes + slack_bytes
    return dataclasses.replace(
        plan, step_s=prediction.step_s, peak_bytes=peak_bytes, bound_s=bound_s
    )


def _too_small(budget_bytes: int, smallest_bytes: int, price: float | None) -> BudgetError:
    cost = "" if price is None else f", with a step {price:.0%} longer than one that keeps all"
    return BudgetError(
        f"budget={format_size(budget_bytes)} is too small for this step: the smallest that a plan "
        f"was found for is {format_size(smallest_bytes)} ({smallest_bytes} bytes){cost}. Give that "
        f"budget, a smaller batch, or weights=ebbtide.WeightPolicy(), which keeps weights and "
        f"optimizer state in host memory",
        smallest_bytes=smallest_bytes,
        price=price,
    )
