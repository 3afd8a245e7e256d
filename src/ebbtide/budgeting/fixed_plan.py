"""Follows a plan that was made before."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import final

from ebbtide.budgeting.placed_plan import place
from ebbtide.budgeting.planned_step import PlannedStep
from ebbtide.engine import Engine
from ebbtide.errors import PolicyError
from ebbtide.interface.arguments import refuse
from ebbtide.interface.display import few


@final
class FixedPlan:
    """Has an engine follow one plan, whatever is measured.

    Args:
        engine: the engine.
        given: what `OffloadHandle.plan` gave, or the path of the file that it was saved to.
        names: names of the model's layers.

    Attributes:
        plan: the plan.

    Raises:
        OSError: the file cannot be read.
        PolicyError: it is no plan, or one for other layers.
    """

    def __init__(self, engine: Engine, given: object, names: Sequence[str]) -> None:
        if isinstance(given, str | os.PathLike):
            given = PlannedStep.load(given)
        if not isinstance(given, PlannedStep):
            advice = "save one with handle.plan.save(path)"
            refuse("plan", "a path, or what handle.plan gives", given, advice)
        self.plan = given
        planned = dict.fromkeys(each.name for each in given.profile.layers if not each.between)
        if planned.keys() != set(names):
            raise PolicyError(
                f"the plan is for a model with the layers {few(list(planned))}, and this one has "
                f"{few(names)}; plan again with budget=..., or name the plan's layers: layers=[...]"
            )
        self._engine = engine
        engine.follow(place(given.profile, given.plan), given.plan.max_inflight_bytes)

    def detach(self) -> None:
        """Let the policy decide again."""
        self._engine.follow(None, None)
