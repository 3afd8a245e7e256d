"""A study: profiles of one training step at any size, and what plans for it cost."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, final

from ebbtide.errors import BudgetError, PolicyError
from ebbtide.layers.covering import covering_layers, parts_of
from ebbtide.planning.budgets import PlanBudget
from ebbtide.planning.hardware import Hardware
from ebbtide.planning.plan import Plan
from ebbtide.planning.prediction.cautious_timing import CautiousTiming
from ebbtide.planning.prediction.step_timing import Prediction, Predictor
from ebbtide.planning.profiling.fake_profile import profile_with_fake_tensors
from ebbtide.planning.searching.choices import inflight_choices
from ebbtide.planning.searching.plan_search import find_frugal, search
from ebbtide.planning.searching.simple_plans import rule_plans
from ebbtide.planning.step_profile import StepProfile
from ebbtide.studies.profiled_layers import named_layers, stretch
from ebbtide.studies.tasks import Size, Task, TaskFamily

_SHORT_BLOCKS: Final = 3  # the first, the last, and one that stands for all others

_HIGH: Final = (
    0.95  # share of the most frugal plan's peak, from which layers are divided into parts
)

RULES: Final = (
    "keep all",
    "rebuild alone",
    "offload all",
    "offload all, rebuild",
    "recompute all",
    "recompute + offload all",
)
"""The plans that are compared with the one that is found; nothing is rebuilt in a profile."""


class Outcome(NamedTuple):
    """A plan and what it is predicted to cost."""

    plan: Plan
    prediction: Prediction


@final
class Study:
    """One training step at any size on one machine.

    Args:
        family: the training step.
        hardware: the machine.
        patterns: the layers, such as ``"blocks.*"``; none: the model's blocks and what is beside
            them.
        optimizer_states: tensors of the weights' size that the optimizer keeps.
        weights: whether weights, gradients and the optimizer's state may rest on the host, if that
            is faster or nothing else fits. Rules for all layers keep them on the device.
        parts: names of modules that are the layers instead; work between them that saves something
            is a layer, too.

    Attributes:
        family: as given.
        hardware: as given.
        weights: as given.
        names: names of the modules that are layers.
    """

    def __init__(
        self,
        family: TaskFamily,
        hardware: Hardware,
        patterns: Sequence[str] = (),
        optimizer_states: int = 2,
        *,
        weights: bool = False,
        parts: Sequence[str] = (),
    ) -> None:
        self.family = family
        self.hardware = hardware
        self.weights = weights
        self._between, self._named = bool(parts), bool(patterns)
        self._optimizer_states = optimizer_states
        self._profiles: dict[Size, StepProfile] = {}
        self._smallest: dict[Size, int] = {}
        self._middle = 0
        task = self._build(family.size)
        if parts or patterns:
            self.names = list(parts) or named_layers(task.model, patterns)
            self._profile_first(task)
            return
        self.names = covering_layers(task.model)
        profile = self._profile_first(task)
        idle = {layer.name for layer in profile.layers if not layer.storages}
        busy = [name for name in self.names if name not in idle]
        if idle and busy and len(busy) < len(self.names):
            self.names = busy
            self._profile_first(task)

    @property
    def is_divisible(self) -> bool:
        """Whether parts of layers can be layers instead.

        Not if layers were named, or if the model has so many blocks that one stands for the others.
        """
        is_short = self.family.num_blocks > _SHORT_BLOCKS and self.family.build_short is not None
        return not (self._named or is_short)

    def divided(self) -> Study:
        """Return the same study with the parts of some layers as layers.

        These are the layers that the peak of the most frugal plan comes from.
        """
        layers, timing = self.profile.layers, self._timing(self.profile)
        peaks = timing.predict(find_frugal(self.profile, self.hardware, timing)).peak_by_position
        high = {
            layer.name
            for layer, *needed in zip(layers, peaks, reversed(peaks), strict=False)
            if max(needed) >= _HIGH * max(peaks)
        }
        model = self._build(self.family.size).model
        parts = {name: parts_of(model, name) for name in self.names if name in high}
        names = [each for name in self.names for each in parts.get(name) or [name]]
        states = self._optimizer_states
        return Study(self.family, self.hardware, (), states, weights=self.weights, parts=names)

    def _build(self, size: Size) -> Task:
        if self.family.num_blocks > _SHORT_BLOCKS and self.family.build_short is not None:
            return self.family.build_short(size, _SHORT_BLOCKS)
        return self.family.build(size)

    def _profile_first(self, task: Task) -> StepProfile:
        profile = self._profile(task)
        self._profiles[self.family.size] = profile
        return profile

    def _profile(self, task: Task) -> StepProfile:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of models; they say the same at every size
            profile = profile_with_fake_tensors(
                task.model,
                task.batch,
                self.hardware,
                layers=[task.model.get_submodule(name) for name in self.names],
                loss=task.loss,
                optimizer_states=self._optimizer_states,
                between=self._between,
            )
        if self.family.num_blocks <= _SHORT_BLOCKS or self.family.build_short is None:
            return profile
        blocks = [n for n, each in enumerate(profile.layers) if each.name.startswith("blocks.")]
        if len(blocks) != _SHORT_BLOCKS:
            raise PolicyError(
                'the layers of this model must be its blocks, such as --layers "blocks.*", or be '
                "left to ebbtide"
            )
        count = self.family.num_blocks - _SHORT_BLOCKS + 1
        return stretch(profile, blocks[1], count, self.hardware)

    @property
    def profile(self) -> StepProfile:
        """The step at the size that was asked for."""
        return self.profile_at(self.family.size)

    def profile_at(self, size: Size) -> StepProfile:
        """Return the step of a size.

        Raises:
            PolicyError: the model cannot be built or trained at this size.
        """
        if size not in self._profiles:
            self._profiles[size] = self._profile(self._build(size))
        return self._profiles[size]

    def budget(self, device_bytes: int) -> PlanBudget:
        """Return a budget of device memory, with the machine's host and pinned memory."""
        hardware = self.hardware
        if hardware.computes_on_host:
            return PlanBudget(device_bytes=device_bytes)
        return PlanBudget(
            device_bytes=device_bytes,
            host_bytes=hardware.host_memory_bytes,
            pinned_bytes=hardware.pinned_limit_bytes,
        )

    def predict(self, plan: Plan, size: Size | None = None) -> Prediction:
        """Return what a step under a plan costs."""
        profile = self.profile if size is None else self.profile_at(size)
        return self._timing(profile).predict(plan)

    def _timing(self, profile: StepProfile) -> Predictor:
        """Return what predicts steps; on an accelerator, the host sees copies complete late."""
        return CautiousTiming(profile, self.hardware, 1.0)

    def find(self, device_bytes: int, size: Size | None = None) -> Outcome:
        """Find the fastest plan within a budget of device memory.

        Raises:
            BudgetError: no plan was found within the budget.
        """
        profile = self.profile if size is None else self.profile_at(size)
        timing = self._timing(profile)
        budget = self.budget(device_bytes)
        plan = search(profile, self.hardware, budget, timing, weights=self.weights)
        return Outcome(plan, timing.predict(plan))

    def smallest_bytes(self, size: Size | None = None) -> int:
        """Return the smallest budget of device memory that a plan was found for."""
        size = self.family.size if size is None else size
        if size not in self._smallest:
            profile = self.profile_at(size)
            timing = self._timing(profile)
            try:
                nothing = search(
                    profile, self.hardware, self.budget(0), timing, weights=self.weights
                )
                self._smallest[size] = timing.predict(nothing).peak_bytes
            except BudgetError as error:
                self._smallest[size] = error.smallest_bytes
        return self._smallest[size]

    def rules(self, device_bytes: int) -> Iterator[tuple[str, Outcome]]:
        """Yield the plans that treat all layers alike, with their names, as `rule` has them."""
        for name in RULES:
            yield name, self.rule(name, device_bytes)

    def rule(self, name: str, device_bytes: int, size: Size | None = None) -> Outcome:
        """Return a plan that treats all layers alike.

        It has the number of bytes in flight with which it is fastest within the budget, or, if it
        does not fit, smallest.

        Args:
            name: one of `RULES`.
            device_bytes: the budget of device memory.
            size: the size of the step; None: the one that was asked for.
        """
        profile = self.profile if size is None else self.profile_at(size)
        timing = self._timing(profile)
        budget = self.budget(device_bytes)
        plan = dict(rule_plans(profile))[name]
        outcomes = []
        for inflight_bytes in inflight_choices(profile) if "offload" in name else (0,):
            bounded = dataclasses.replace(plan, max_inflight_bytes=inflight_bytes)
            outcomes.append(Outcome(bounded, timing.predict(bounded)))
        return min(outcomes, key=lambda each: _rank(each.prediction, budget))


def _rank(prediction: Prediction, budget: PlanBudget) -> tuple[int, float]:
    return budget.excess_bytes(prediction), prediction.step_s
