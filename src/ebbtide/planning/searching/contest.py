"""Compares plans by their predictions, and remembers the best one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, final

from ebbtide.planning.budgets import PlanBudget
from ebbtide.planning.plan import Decision, Plan
from ebbtide.planning.prediction.pass_windows import open_windows
from ebbtide.planning.prediction.step_timing import Prediction, Predictor
from ebbtide.planning.prediction.storage_uses import NOBODY, StorageUses
from ebbtide.planning.searching.choices import BY_PASS, Choices, inflight_choices
from ebbtide.planning.searching.resting import Resting, nowhere
from ebbtide.planning.step_profile import StepProfile


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
