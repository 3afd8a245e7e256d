"""The search against all plans, the bound, and the plans that people make by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ebbtide.errors import BudgetError
from ebbtide.planning import (
    Hardware,
    Plan,
    PlanBudget,
    Prediction,
    StepAhead,
    StepProfile,
    StepTiming,
    StorageId,
    StorageUses,
    find_frugal,
    keep_all,
    offload_first,
    open_windows,
    rule_plans,
    search,
)
from ebbtide.planning.relaxation import relax, resting_choices
from plan_cases import (
    MB,
    all_plans,
    chain_step_s,
    count_all_plans,
    inflight_choices,
    least_recomputation_s,
    links,
    make_layer,
    make_link,
    make_profile,
    profiles,
    small_chains,
    uneven_chain,
)

MANY = settings(
    deadline=None, max_examples=60, suppress_health_check=list(HealthCheck), derandomize=True
)
FEW = settings(MANY, max_examples=3)


def predictions(profile: StepProfile, timing: StepTiming) -> list[tuple[Plan, Prediction]]:
    return [(plan, timing.predict(plan)) for plan in all_plans(profile)]


def opened(
    every: list[tuple[Plan, Prediction]],
    profile: StepProfile,
    timing: StepTiming,
    device_bytes: int,
) -> list[Prediction]:
    """All predictions, with windows as wide as the budget allows."""
    uses, found = StorageUses(profile), []
    for plan, closed in every:
        if plan.windows:
            peaks = closed.peak_by_position
            plan = open_windows(plan, profile, uses, peaks, device_bytes)
            found.append(timing.predict(plan))
        else:
            found.append(closed)
    return found


def check_against_all(
    profile: StepProfile, hardware: Hardware, share: float, host_share: float | None = None
) -> None:
    """Compare the search with all plans, at a budget between the smallest and the largest peak."""
    timing = StepTiming(profile, hardware)
    closed = predictions(profile, timing)
    least, most = (pick(each.peak_bytes for _, each in closed) for pick in (min, max))
    host_bytes = None
    if host_share is not None:
        host_bytes = int(host_share * max(each.host_peak_bytes for _, each in closed))
    budget = PlanBudget(device_bytes=int(least + share * (most - least)), host_bytes=host_bytes)
    every = opened(closed, profile, timing, budget.device_bytes)
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


@pytest.mark.slow
@given(profile=profiles(), hardware=links(), share=shares)
@MANY
def test_search_equals_all_plans(profile: StepProfile, hardware: Hardware, share: float) -> None:
    assume(count_all_plans(profile) <= 10_000)
    check_against_all(profile, hardware, share)


@pytest.mark.slow
@given(
    profile=profiles(4), hardware=links(), share=shares, host_share=st.sampled_from([0.0, 0.3, 0.7])
)
@MANY
def test_search_equals_all_plans_within_a_host_budget(
    profile: StepProfile, hardware: Hardware, share: float, host_share: float
) -> None:
    assume(count_all_plans(profile) <= 5_000)
    check_against_all(profile, hardware, share, host_share)


@pytest.mark.slow
@pytest.mark.parametrize("count", [6, 7])
@given(data=st.data(), hardware=links(), share=shares)
@FEW
def test_search_equals_all_plans_of_longer_chains(
    count: int, data: st.DataObject, hardware: Hardware, share: float
) -> None:
    check_against_all(data.draw(small_chains(count)), hardware, share)


# ---- plans made by hand --------------------------------------------------------------------------


def random_chain(seed: int, count: int, per_layer: int) -> StepProfile:
    choose = random.Random(seed)
    layers = []
    for index in range(count):
        sizes = [choose.randint(1, 100) for _ in range(per_layer)]
        layer = make_layer(
            *sizes,
            forward_s=choose.uniform(1e-3, 1e-2),
            backward_s=choose.uniform(2e-3, 2e-2),
            forward_working_bytes=choose.randint(0, 20) * MB,
            backward_working_bytes=choose.randint(0, 20) * MB,
            input_bytes=sizes[0] * MB,
            input_same_as=StorageId(index, 0) if per_layer else None,
        )
        if per_layer > 1 and choose.random() < 0.5:
            rebuilt = dataclasses.replace(
                layer.storages[-1], sources=(StorageId(index, 0),), rebuild_s=5e-4
            )
            layer = dataclasses.replace(layer, storages=(*layer.storages[:-1], rebuilt))
        layers.append(layer)
    return make_profile(*layers, fixed_bytes=50 * MB)


def best_by_hand(profile: StepProfile, timing: StepTiming, budget: PlanBudget) -> float:
    """The fastest step within the budget of all plans that people make by hand."""
    plans = [plan for _, plan in rule_plans(profile)]
    plans += [offload_first(profile, k) for k in range(len(profile.layers) + 1)]
    fitting = [float("inf")]
    for plan in plans:
        for inflight_bytes in inflight_choices(profile):
            got = timing.predict(dataclasses.replace(plan, max_inflight_bytes=inflight_bytes))
            if not budget.excess_bytes(got):
                fitting.append(got.step_s)
    return min(fitting)


@pytest.mark.parametrize(
    ("gb_per_s", "count", "per_layer"),
    [(2, 30, 2), (8, 10, 3), (25, 30, 2), (64, 10, 3), (256, 30, 2), (900, 10, 3)],
)
def test_no_plan_made_by_hand_is_better(gb_per_s: int, count: int, per_layer: int) -> None:
    profile = random_chain(gb_per_s + count, count, per_layer)
    hardware = make_link(gb_per_s * 1000, both_mb_per_s=gb_per_s * 1500, latency_s=1e-5)
    timing = StepTiming(profile, hardware)
    peak_bytes = timing.predict(keep_all(profile)).peak_bytes
    for share in (0.3, 0.6):
        budget = PlanBudget(device_bytes=int(share * peak_bytes))
        plan = search(profile, hardware, budget, timing)
        assert plan.step_s is not None
        assert plan.bound_s is not None
        assert plan.step_s <= best_by_hand(profile, timing, budget)
        assert plan.bound_s <= plan.step_s
        assert not budget.excess_bytes(timing.predict(plan))


def test_what_fits_is_left_alone() -> None:
    profile = random_chain(0, 10, 3)
    hardware = make_link(1000)
    timing = StepTiming(profile, hardware)
    kept = timing.predict(keep_all(profile))
    plan = search(profile, hardware, PlanBudget(device_bytes=kept.peak_bytes), timing)
    assert plan.layers == keep_all(profile).layers
    assert (plan.step_s, plan.gap) == (kept.step_s, 0)


@pytest.mark.parametrize("count", [12, 25, 40])
@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_recomputation_alone_is_near_the_dynamic_programme(count: int, share: float) -> None:
    profile = uneven_chain(count, count)
    hardware = make_link(1e-6)  # a byte in a second: nothing is worth offloading
    timing = StepTiming(profile, hardware)
    budget_bytes = int(share * timing.predict(keep_all(profile)).peak_bytes)
    plan = search(profile, hardware, PlanBudget(device_bytes=budget_bytes), timing)
    least_s = least_recomputation_s(profile, budget_bytes)
    assert least_s is not None
    assert plan.step_s is not None
    assert plan.bound_s is not None
    assert plan.bound_s <= least_s * (1 + 1e-9)
    assert least_s * (1 - 1e-9) <= plan.step_s <= 1.02 * least_s


@pytest.mark.slow
@pytest.mark.parametrize("mb_per_s", [1, 4, 16])
@pytest.mark.parametrize("seed", range(5))
def test_hardly_slower_than_a_dynamic_programme_that_recomputes_and_offloads(
    seed: int, mb_per_s: int
) -> None:
    """Too long to compare with all plans. In 38 of these 45 cases the search is no slower."""
    profile = uneven_chain(seed, 10 + seed)
    hardware = make_link(mb_per_s)
    timing = StepTiming(profile, hardware)
    most_bytes = timing.predict(keep_all(profile)).peak_bytes
    for share in (0.3, 0.5, 0.7):
        budget_bytes = int(share * most_bytes)
        least_s = chain_step_s(profile, hardware, budget_bytes)
        if least_s is not None:
            plan = search(profile, hardware, PlanBudget(device_bytes=budget_bytes), timing)
            assert plan.step_s is not None
            assert plan.step_s <= 1.04 * least_s


# ---- long steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gb_per_s", "share", "equal"),
    [
        pytest.param(2, 0.4, True, marks=pytest.mark.slow),
        pytest.param(2, 0.8, False, marks=pytest.mark.slow),
        pytest.param(5, 0.15, False, marks=pytest.mark.slow),
        (5, 0.15, True),
        pytest.param(25, 0.4, False, marks=pytest.mark.slow),
    ],
)
def test_a_thousand_layers(gb_per_s: int, share: float, equal: bool) -> None:
    profile = random_chain(1, 1000, 3)
    if equal:
        profile = dataclasses.replace(
            profile,
            layers=(make_layer(20, 30, 50, forward_s=5e-3, backward_s=1e-2, input_bytes=10 * MB),)
            * 1000,
        )
    hardware = make_link(gb_per_s * 1000, both_mb_per_s=gb_per_s * 1500)
    timing = StepTiming(profile, hardware)
    budget = PlanBudget(device_bytes=int(share * timing.predict(keep_all(profile)).peak_bytes))
    plan = search(profile, hardware, budget, timing)
    assert not budget.excess_bytes(timing.predict(plan))
    assert plan.gap is not None
    assert plan.gap <= 0.02


# ---- what does not fit ---------------------------------------------------------------------------


def test_an_error_names_the_smallest_budget_and_its_price() -> None:
    profile = random_chain(3, 6, 2)
    hardware = make_link(10_000)
    timing = StepTiming(profile, hardware)
    with pytest.raises(BudgetError) as caught:
        search(profile, hardware, PlanBudget(device_bytes=MB), timing)
    smallest_bytes = caught.value.smallest_bytes
    assert f"({smallest_bytes} bytes)" in str(caught.value)
    plan = search(profile, hardware, PlanBudget(device_bytes=smallest_bytes), timing)
    assert plan.peak_bytes == smallest_bytes


def test_a_budget_of_the_tier_below_is_kept() -> None:
    profile = random_chain(4, 8, 2)
    hardware = make_link(10_000)
    timing = StepTiming(profile, hardware)
    half_bytes = timing.predict(keep_all(profile)).peak_bytes // 2
    free = timing.predict(search(profile, hardware, PlanBudget(device_bytes=half_bytes), timing))
    assert free.host_peak_bytes > 0
    limit_bytes = free.host_peak_bytes // 2
    budget = PlanBudget(device_bytes=half_bytes, host_bytes=limit_bytes)
    got = timing.predict(search(profile, hardware, budget, timing))
    assert got.host_peak_bytes <= limit_bytes
    assert got.peak_bytes <= half_bytes


# ---- weights -------------------------------------------------------------------------------------


def weighty(names: Sequence[str]) -> StepProfile:
    """A step whose layers have 200 MB of parameters each, and 10 MB of activations."""
    layer = make_layer(
        10,
        weight_bytes=50 * MB,
        gradient_bytes=50 * MB,
        optimizer_bytes=100 * MB,
        input_bytes=MB,
        host_update_s=2.0,
    )
    return make_profile(*(dataclasses.replace(layer, name=name) for name in names))


def on_host(plan: Plan) -> list[int]:
    return [index for index, layer in enumerate(plan.layers) if layer.weights_on_host]


def test_weights_rest_on_the_host_where_nothing_else_fits() -> None:
    profile = weighty("abcdefgh")
    hardware = make_link(100)
    timing = StepTiming(profile, hardware)
    budget = PlanBudget(device_bytes=750 * MB)
    with pytest.raises(BudgetError):
        search(profile, hardware, budget, timing)
    plan = search(profile, hardware, budget, timing, weights=True)
    # With five of eight there, 600 MB stay on the device, and the weights and gradients of two more
    # layers have no room; the bound counts those of one, and parts of layers. With six there, 400
    # MB stay.
    assert on_host(plan) == [1, 2, 3, 5, 6, 7]
    assert plan.step_s == pytest.approx(8 * 3 + 6 * 2, rel=0.1)
    assert plan.bound_s is not None
    assert 8 * 3 + 4 * 2 < plan.bound_s < 8 * 3 + 5 * 2
    roomy = PlanBudget(device_bytes=8 * 210 * MB)
    assert not on_host(search(profile, hardware, roomy, timing, weights=True))
    tight = PlanBudget(device_bytes=230 * MB)
    assert on_host(search(profile, hardware, tight, timing, weights=True)) == [*range(8)]


def test_an_update_inside_backward_makes_weights_on_the_host_cheap() -> None:
    """Half of the layers have no room. Their updates are hidden, if shadows have host memory."""
    profile, hardware = weighty("abcdefgh"), make_link(10_000)
    profile = dataclasses.replace(
        profile, layers=tuple(dataclasses.replace(e, host_update_s=1.0) for e in profile.layers)
    )
    budget = PlanBudget(device_bytes=1000 * MB, host_bytes=2400 * MB)
    found = {}
    for shadow_mb in (0, 10_000):
        ahead = StepAhead(shadow_mb * MB, budget.host_bytes)
        known = dataclasses.replace(profile, ahead=ahead if shadow_mb else None)
        timing = StepTiming(known, hardware)
        plan = search(known, hardware, budget, timing, weights=True)
        found[shadow_mb] = timing.predict(plan)
        assert plan.bound_s is not None and plan.bound_s <= found[shadow_mb].step_s
    plain, ahead_too = found[0], found[10_000]
    assert plain.step_s >= 8 * 3 + 4 * 1.0
    # All four are hidden; copies from their shadows read and write 100 of the 350 MB of an update.
    assert ahead_too.step_s == pytest.approx(8 * 3 + 4 * 1.0 * 100 / 350, rel=1e-3)
    assert ahead_too.shadow_bytes + ahead_too.host_peak_bytes <= 2400 * MB


def test_the_weights_of_a_module_rest_in_one_place() -> None:
    profile = weighty("aabbbcdd")
    hardware = make_link(100)
    timing = StepTiming(profile, hardware)
    plan = search(profile, hardware, PlanBudget(device_bytes=800 * MB), timing, weights=True)
    assert 0 < len(on_host(plan)) < 8
    for resting in (*resting_choices(profile, 0), [each.weights_on_host for each in plan.layers]):
        assert resting[0] == resting[1]
        assert resting[2] == resting[3] == resting[4]
        assert resting[6] == resting[7]


def test_blocks_rest_before_a_large_head_that_computes_less_for_each_byte() -> None:
    """Two of eight blocks make room; the head alone would, too, and takes five times the copies."""
    profile, hardware = weighty("abcdefgh"), make_link(100)
    block = profile.layers[0]
    head = dataclasses.replace(
        block,
        name="head",
        weight_bytes=5 * block.weight_bytes,
        gradient_bytes=5 * block.gradient_bytes,
        optimizer_bytes=5 * block.optimizer_bytes,
        host_update_s=5 * block.host_update_s,
    )
    layers = (*profile.layers, head)
    profile = dataclasses.replace(profile, layers=layers)
    timing = StepTiming(profile, hardware)
    budget = PlanBudget(device_bytes=timing.predict(keep_all(profile)).peak_bytes - 100 * MB)
    plan = search(profile, hardware, budget, timing, weights=True)
    assert 0 < len(on_host(plan)) < 4
    assert 8 not in on_host(plan)


def with_weights(profile: StepProfile, update_s: float, sizes: Sequence[int]) -> StepProfile:
    """A step whose layers have weights, with states of these sizes in 9 MB."""
    layers = (
        dataclasses.replace(
            layer,
            name=str(index),
            weight_bytes=7 * MB,
            gradient_bytes=5 * MB,
            optimizer_bytes=9 * size * MB,
            host_update_s=update_s / size,
        )
        for index, (layer, size) in enumerate(zip(profile.layers, sizes, strict=True))
    )
    return dataclasses.replace(profile, layers=tuple(layers))


@pytest.mark.slow
@given(profile=profiles(5), hardware=links(), share=shares)
@settings(MANY, max_examples=15)
def test_weights_of_some_layers_are_no_worse_than_those_of_all_or_none(
    profile: StepProfile, hardware: Hardware, share: float
) -> None:
    profile = with_weights(profile, 1.0, [1] * len(profile.layers))
    timing = StepTiming(profile, hardware)
    least = find_frugal(profile, hardware, timing).peak_bytes
    most = timing.predict(keep_all(profile)).peak_bytes
    assert least is not None
    budget = PlanBudget(device_bytes=int(least + share * (most - least)))
    alone = search(profile, hardware, budget, timing)
    assert alone.step_s is not None
    found = search(profile, hardware, budget, timing, weights=True)
    assert found.step_s is not None
    assert found.step_s <= alone.step_s * (1 + 1e-9)
    assert timing.predict(found).peak_bytes <= budget.device_bytes


@pytest.mark.slow
@given(
    profile=profiles(3),
    hardware=links(),
    share=shares,
    update_s=st.sampled_from([0.0, 0.5, 5.0]),
    ahead=st.sampled_from([None, StepAhead(10**9), StepAhead(40 * MB, 30 * MB)]),
    keeps_gradients=st.booleans(),
)
@settings(MANY, max_examples=25)
def test_the_bound_holds_wherever_weights_rest(
    profile: StepProfile,
    hardware: Hardware,
    share: float,
    update_s: float,
    ahead: StepAhead | None,
    keeps_gradients: bool,
) -> None:
    assume(count_all_plans(profile) <= 300)
    profile = with_weights(profile, update_s, range(1, len(profile.layers) + 1))
    profile = dataclasses.replace(profile, ahead=ahead, keeps_gradients=keeps_gradients)
    timing = StepTiming(profile, hardware)
    got = []
    for plan in all_plans(profile):
        if plan.windows:
            continue  # no plan has both
        for places in itertools.product([False, True], repeat=len(plan.layers)):
            layers = zip(plan.layers, places, strict=True)
            placed = (dataclasses.replace(each, weights_on_host=on) for each, on in layers)
            got.append(timing.predict(dataclasses.replace(plan, layers=tuple(placed))))
    least, most = (pick(each.peak_bytes for each in got) for pick in (min, max))
    budget = PlanBudget(device_bytes=int(least + share * (most - least)))
    relaxation = relax(profile, hardware, budget, resting=None)
    assert relaxation is not None
    best_s = min(each.step_s for each in got if not budget.excess_bytes(each))
    assert relaxation.bound_s <= best_s * (1 + 1e-9)
    with contextlib.suppress(BudgetError):  # some placements are not tried
        plan = search(profile, hardware, budget, timing, weights=True)
        assert plan.bound_s is not None
        assert plan.step_s is not None
        assert plan.bound_s <= best_s * (1 + 1e-9)
        assert plan.step_s >= best_s * (1 - 1e-9)


# ---- the same every time, and light --------------------------------------------------------------


def test_the_same_search_gives_the_same_plan() -> None:
    profile = random_chain(5, 10, 3)
    hardware = make_link(5000)
    timing = StepTiming(profile, hardware)
    budget = PlanBudget(device_bytes=timing.predict(keep_all(profile)).peak_bytes // 3)
    plans = [search(profile, hardware, budget, timing) for _ in range(2)]
    assert plans[0] == plans[1]


def test_no_plan_is_predicted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random changes of a step with few layers come back to the same plans."""
    profile, predicted = random_chain(5, 3, 2), list[Plan]()
    timing, predict = StepTiming(profile, make_link(5000)), StepTiming.predict
    most_bytes = timing.predict(keep_all(profile)).peak_bytes

    def note(timing: StepTiming, plan: Plan) -> Prediction:
        predicted.append(plan)
        return predict(timing, plan)

    monkeypatch.setattr(StepTiming, "predict", note)
    search(profile, make_link(5000), PlanBudget(device_bytes=most_bytes * 2 // 3), timing)
    assert len(predicted) > 20
    assert len(set(predicted)) == len(predicted)
