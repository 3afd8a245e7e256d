"""What a budget expects of a plan, and which plans it takes to be the same."""

from __future__ import annotations

import dataclasses
from typing import Final

from ebbtide.budgeting.planned_step import StepCost
from ebbtide.errors import BudgetError
from ebbtide.planning.hardware import Hardware
from ebbtide.planning.plan import Plan
from ebbtide.planning.prediction.step_timing import Prediction
from ebbtide.units import format_size

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


def too_small(budget_bytes: int, smallest_bytes: int, price: float | None) -> BudgetError:
    cost = "" if price is None else f", with a step {price:.0%} longer than one that keeps all"
    return BudgetError(
        f"budget={format_size(budget_bytes)} is too small for this step: the smallest that a plan "
        f"was found for is {format_size(smallest_bytes)} ({smallest_bytes} bytes){cost}. Give that "
        f"budget, a smaller batch, or weights=ebbtide.WeightPolicy(), which keeps weights and "
        f"optimizer state in host memory",
        smallest_bytes=smallest_bytes,
        price=price,
    )
