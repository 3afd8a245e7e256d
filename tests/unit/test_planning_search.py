"""The search against all plans, the bound, and the plans that people make by hand."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ebbtide.errors import BudgetError
from ebbtide.planning.budgets import PlanBudget
from ebbtide.planning.hardware import Hardware
from ebbtide.planning.plan_search import search
from ebbtide.planning.relaxation import relax
from ebbtide.planning.step_profile import StepProfile
from ebbtide.planning.step_timing import Prediction, StepTiming
from plan_cases import (
    all_plans,
    count_all_plans,
    links,
    profiles,
    small_chains,
)

MANY = settings(
    deadline=None, max_examples=60, suppress_health_check=list(HealthCheck), derandomize=True
)
FEW = settings(MANY, max_examples=6)


def predictions(profile: StepProfile, hardware: Hardware) -> list[Prediction]:
    timing = StepTiming(profile, hardware)
    return [timing.predict(plan) for plan in all_plans(profile)]


def check_against_all(
    profile: StepProfile, hardware: Hardware, share: float, host_share: float | None = None
) -> None:
    """Compare the search with all plans, at a budget between the smallest and the largest peak."""
    every = predictions(profile, hardware)
    least, most = (pick(each.peak_bytes for each in every) for pick in (min, max))
    host_bytes = None
    if host_share is not None:
        host_bytes = int(host_share * max(each.host_peak_bytes for each in every))
    budget = PlanBudget(device_bytes=int(least + share * (most - least)), host_bytes=host_bytes)
    fitting = [each.step_s for each in every if not budget.excess_bytes(each)]
    relaxation = relax(profile, hardware, budget)
    if not fitting:
        with pytest.raises(BudgetError):
            search(profile, hardware, budget, StepTiming(profile, hardware))
        return
    assert relaxation is not None
    assert relaxation.bound_s <= min(fitting) * (1 + 1e-9)
    plan = search(profile, hardware, budget, StepTiming(profile, hardware))
    assert plan.step_s == pytest.approx(min(fitting), rel=1e-9)
    assert plan.bound_s is not None
    assert plan.bound_s <= min(fitting) * (1 + 1e-9)
    again = StepTiming(profile, hardware).predict(plan)
    assert not budget.excess_bytes(again)
    assert (again.step_s, again.peak_bytes) == (plan.step_s, plan.peak_bytes)


shares = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.8, 1.0])


@given(profile=profiles(), hardware=links(), share=shares)
@MANY
def test_search_equals_all_plans(profile: StepProfile, hardware: Hardware, share: float) -> None:
    assume(count_all_plans(profile) <= 10_000)
    check_against_all(profile, hardware, share)


@given(
    profile=profiles(4), hardware=links(), share=shares, host_share=st.sampled_from([0.0, 0.3, 0.7])
)
@MANY
def test_search_equals_all_plans_within_a_host_budget(
    profile: StepProfile, hardware: Hardware, share: float, host_share: float
) -> None:
    assume(count_all_plans(profile) <= 5_000)
    check_against_all(profile, hardware, share, host_share)


@pytest.mark.parametrize("count", [6, 7])
@given(data=st.data(), hardware=links(), share=shares)
@FEW
def test_search_equals_all_plans_of_longer_chains(
    count: int, data: st.DataObject, hardware: Hardware, share: float
) -> None:
    check_against_all(data.draw(small_chains(count)), hardware, share)
