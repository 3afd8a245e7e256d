"""Follows a plan that was made before."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from typing import final

from torch import nn

from ebbtide.budgeting.placed_plan import place
from ebbtide.budgeting.planned_step import PlannedStep, describe_briefly
from ebbtide.engine import Engine
from ebbtide.errors import PolicyError
from ebbtide.interface.arguments import refuse
from ebbtide.interface.display import few
from ebbtide.policy import ActivationPolicy

_LOG = logging.getLogger(__name__)


def load_plan(given: object) -> PlannedStep:
    """Return a plan that was made before.

    Args:
        given: what `OffloadHandle.plan` gave, or the path of the file that it was saved to.

    Raises:
        OSError: the file cannot be read.
        PolicyError: it is no plan.
    """
    if isinstance(given, str | os.PathLike):
        given = PlannedStep.load(given)
    if not isinstance(given, PlannedStep):
        advice = "save one with handle.plan.save(path)"
        refuse("plan", "a path, or what handle.plan gives", given, advice)
    return given


def layers_of(plan: PlannedStep, model: nn.Module) -> list[str]:
    """Return the names of the layers that a plan was made for.

    Raises:
        PolicyError: the model has no modules of these names.
    """
    names = list(dict.fromkeys(each.name for each in plan.profile.layers if not each.between))
    missing = set(names) - {name for name, _ in model.named_modules()}
    if missing:
        raise PolicyError(
            f"the plan is for a model with the layers {few(names)}, and this one has no "
            f"{few(sorted(missing))}; plan again with budget=..."
        )
    return names


def policy_of(
    plan: PlannedStep, policy: ActivationPolicy, given: ActivationPolicy | None
) -> ActivationPolicy:
    """Return the policy that a plan is followed with: its storages are numbered from its min_bytes.

    Args:
        plan: the plan.
        policy: the policy otherwise.
        given: what the user has given.

    Raises:
        PolicyError: the user has given another min_bytes.
    """
    wanted = plan.profile.min_bytes
    if given is not None and max(1, int(given.min_bytes)) != wanted:
        raise PolicyError(
            f"the plan was made with min_bytes={wanted}, and the policy for activations has "
            f"{given.min_bytes}; leave activations out, or plan again with budget=..."
        )
    return dataclasses.replace(policy, min_bytes=wanted)


def resting_layers_of(plan: PlannedStep) -> list[str]:
    """Return the names of the layers whose weights a plan has on the host.

    Raises:
        PolicyError: the weights of a layer are in two places.
    """
    resting = []
    for name, calls in plan.profile.weight_owners().items():
        places = {plan.plan.layers[call].weights_on_host for call in calls}
        if len(places) > 1:
            raise PolicyError(
                f"the plan has the weights of {name} on the host for some of its calls, and on the "
                f"device for others; say which weights rest there: "
                f"weights=ebbtide.WeightPolicy(...)"
            )
        if places == {True}:
            resting.append(name)
    return resting


@final
class FixedPlan:
    """Has an engine follow one plan, whatever is measured.

    Args:
        engine: the engine.
        plan: the plan.

    Attributes:
        plan: as given.
    """

    def __init__(self, engine: Engine, plan: PlannedStep) -> None:
        self.plan = plan
        self._engine = engine
        engine.follow(place(plan.profile, plan.plan), plan.plan.max_inflight_bytes)
        _LOG.info("a plan made before is followed: %s", describe_briefly(plan))

    def lasting_plan(self) -> Callable[[], PlannedStep]:
        """Return a function that gives the plan, and does not keep the model alive."""
        plan = self.plan
        return lambda: plan

    def detach(self) -> None:
        """Let the policy decide again."""
        self._engine.follow(None, None)
