"""Finds the fastest plan within a budget."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import time
from collections.abc import Iterable
from typing import Final, NamedTuple

from ebbtide.errors import BudgetError
from ebbtide.planning.contest import (
    BY_PASS,
    MOST_WORK,
    Contest,
    Contestant,
    Score,
    apply_change,
    busy_s,
    changes,
    choices_of,
    improve,
    keep_all,
    offload_first,
    relieve,
    rounded,
    rule_plans,
    spare,
    with_weights,
)
from ebbtide.planning.hardware import Hardware
from ebbtide.planning.plan import Decision, LayerMode, LayerPlan, Plan
from ebbtide.planning.prediction import PlanBudget, Predictor
from ebbtide.planning.profile import LayerProfile, StepProfile
from ebbtide.planning.relaxation import (
    Relaxation,
    Resting,
    everywhere,
    nowhere,
    relax,
    resting_choices,
)
from ebbtide.units import format_size

# ---- Improves a plan by random changes, of which some make it worse for a while ----

_MOST_WORK: Final = 20_000
"""Number of layers that are looked at in all, over all predictions; it takes about a second."""

_HOT, _COLD = 1e-2, 3e-4  # by which share of the step a change may make it longer, begin and end
_PENALTY: Final = (
    3.0  # by which share a step counts as longer if the budget is exceeded by all of it
)


def anneal(contest: Contest, most_work: int = _MOST_WORK) -> None:
    """Change plans at random (simulated annealing). The same contest gives the same plans.

    Args:
        contest: predicts the changed plans. Its best plan is the first.
        most_work: predictions end when they have looked at this many layers.
    """
    assert contest.best is not None
    choose = random.Random(0)
    current, first_s = contest.best, contest.best.score.step_s
    limit_bytes = max(1, contest.budget.device_bytes)

    def badness(score: Score) -> float:
        return score.step_s / first_s + _PENALTY * score.excess_bytes / limit_bytes

    tries = most_work // len(contest.profile.layers) if first_s else 0
    known = list(changes(contest))
    for done in range(tries):
        if contest.is_late:
            return
        temperature = _HOT * (_COLD / _HOT) ** (done / tries)
        changed = current.choices.copy()
        if not apply_change(choose.choice(known), changed):
            continue
        entered = contest.enter(changed)
        worse = badness(entered.score) - badness(current.score)
        if worse <= 0 or choose.random() < math.exp(-worse / temperature):
            current = entered


# ---- Plans from a dynamic programme over the layers that recomputes and offloads ----
#
# It follows the published ones for chains, in the manner of Beaumont, Eyraud-Dubois and Shilova
# (Efficient combination of rematerialization and offloading for training DNNs, NeurIPS 2021).
# What is copied down in forward has the time of the later forwards. What is copied up has the
# time of their backwards: seen from the end of the step, that is the same. What does not fit
# beside a layer is waited for. They recompute segments of several layers, too; here each layer is
# recomputed alone, as the engine does it.
#
# A layer's storages are kept or offloaded together, and storages that layers share count where they
# are saved first. So the plans are starting points, which the search predicts and improves.

_STEPS: Final = 500  # bytes are counted in this share of the memory
_GROUPS: Final = 25  # groups of states that keep about the same,
_ALIKE: Final = 12  # and how many of each go on from a layer


class _State(NamedTuple):
    """What the layers so far have left behind, in bytes.

    Attributes:
        kept: what stays on the device until backward.
        down: what is still on its way down after the forward of the last layer.
        up: what has to be on its way up when the backward of the last layer ends, so that the
            layers before it wait for nothing.
    """

    kept: int
    down: int
    up: int


class _Option(NamedTuple):
    """One way to run a layer.

    Attributes:
        plan: what becomes of the layer.
        stays: bytes that stay on the device.
        leaves: bytes that are offloaded.
        again_s: seconds of its second forward.
        forward: bytes that its forward needs beside what was kept before,
        backward: and its backward.
    """

    plan: LayerPlan
    stays: int
    leaves: int
    again_s: float
    forward: int
    backward: int


_States = dict[_State, tuple[float, tuple[LayerPlan, ...]]]
"""The least seconds that lead to a state, and how: copies waited for, and second forwards."""


def chain_plans(profile: StepProfile, hardware: Hardware, room_bytes: int) -> list[Plan]:
    """Return the plans that the programme ends with; none if none fits.

    The fastest come first, and of equally fast ones those that keep the most.

    Args:
        profile: the step.
        hardware: the link.
        room_bytes: device memory for what the layers save and need.
    """
    states: _States = {_State(0, 0, 0): (0.0, ())}
    unit_bytes = max(1, room_bytes // _STEPS)
    for layer in profile.layers:
        following: _States = {}
        for state, (spent_s, chosen) in states.items():
            for option in _chain_programme_options(layer):
                found = _pass_layer(layer, option, state, hardware, room_bytes, unit_bytes)
                if found is None:
                    continue
                after, more_s = found
                if after not in following or spent_s + more_s < following[after][0]:
                    following[after] = spent_s + more_s, (*chosen, option.plan)
        states = _promising(following, hardware, room_bytes)
    fastest = sorted(states, key=lambda state: (states[state][0], -state.kept))
    return [Plan(layers=states[state][1]) for state in fastest]


def _chain_programme_options(layer: LayerProfile) -> list[_Option]:
    own = [each for each in layer.storages if each.same_as is None]
    inside = sum(each.size_bytes for each in own)
    may_leave = sum(each.size_bytes for each in own if each.may_leave)
    forward, backward = (
        inside + working for working in (layer.forward_working_bytes, layer.backward_working_bytes)
    )
    options = []
    for decision, leaves in ((Decision.KEEP, 0), (Decision.OFFLOAD, may_leave)):
        plan = LayerPlan(decisions=(decision,) * len(layer.storages))
        options.append(_Option(plan, inside - leaves, leaves, 0.0, forward, backward))
    if layer.may_recompute:
        source = layer.input_bytes if layer.input_same_as is None else 0
        again = source + inside + layer.second_working_bytes
        for mode in (LayerMode.RECOMPUTE, LayerMode.RECOMPUTE_OFFLOAD):
            leaves = source if mode is LayerMode.RECOMPUTE_OFFLOAD else 0
            plan = LayerPlan(mode=mode, decisions=(Decision.KEEP,) * len(layer.storages))
            stays, second_s = source - leaves, layer.second_forward_s
            options.append(_Option(plan, stays, leaves, second_s, source + forward, again))
    return options


def _pass_layer(
    layer: LayerProfile,
    option: _Option,
    state: _State,
    hardware: Hardware,
    room_bytes: int,
    unit_bytes: int,
) -> tuple[_State, float] | None:
    """Return the state after a layer and the seconds that it adds; None if it does not fit."""
    spare_down = room_bytes - state.kept - option.forward
    spare_up = room_bytes - state.kept - option.backward
    if spare_down < 0 or spare_up < 0:
        return None
    down_bytes_per_s, up_bytes_per_s = hardware.d2h_bytes_per_s, hardware.h2d_bytes_per_s
    wait_down_s = max(0, state.down - spare_down) / down_bytes_per_s
    wait_up_s = max(0, state.up - spare_up) / up_bytes_per_s
    down = state.down - (wait_down_s + layer.forward_s) * down_bytes_per_s
    up = state.up - (wait_up_s + layer.backward_s + option.again_s) * up_bytes_per_s
    left_down, left_up = (
        int(max(0.0, left) // unit_bytes) * unit_bytes + option.leaves for left in (down, up)
    )
    after = _State(state.kept + option.stays, left_down, left_up)
    return after, wait_down_s + wait_up_s + option.again_s


def _promising(states: _States, hardware: Hardware, room_bytes: int) -> _States:
    """Return the best states of each group that keeps about the same."""

    def expected_s(state: _State) -> float:
        return states[state][0] + state.up / hardware.h2d_bytes_per_s

    best: _States = {}
    counts: dict[int, int] = {}
    for state in sorted(states, key=lambda each: (expected_s(each), each)):
        group = state.kept * _GROUPS // room_bytes
        counts[group] = counts.get(group, 0) + 1
        if counts[group] <= _ALIKE:
            best[state] = states[state]
    return best


# ---- Finds the fastest plan within a budget ----
#
# [Note: search] A linear programme gives a bound that no plan can beat, and, with the bytes in
# flight held to what the engine holds them to, fractions that are rounded to a plan. The
# programme knows less of memory than the prediction does, so it is solved again with a smaller
# budget until the plan fits. On an accelerator, plans with windows instead of one bound in flight
# are tried first. In steps of hundreds of layers most of the time goes into solving it, so the
# fractions that gave the bound are rounded first. Single changes then improve the plan. The plans
# that people make by hand take part as well, and in steps that are not long those of a dynamic
# programme over the layers, so the result is never worse than the best of those that were
# predicted. If a step has few plans, all of them are tried.

_GUIDES: Final = 3  # times that the programme is solved for one bound on bytes in flight
_GUIDED_LAYERS: Final = 3000  # layers of the programmes solved, all together,
_GUIDED_SHORT: Final = 300  # or, where the programmes are in whole numbers, this many,
_FEWEST_GUIDES: Final = 3  # but no fewer programmes than this,
_ENOUGH_LAYERS: Final = 1500  # and this many layers of long steps once a plan has a gap of at most
_NEAR: Final = 0.02  # this
_LINK_SHARE: Final = 0.98  # of the link's bandwidth, that rounded plans are to use
_PART_IN_FLIGHT: Final = 20  # what is in flight should be no more than this part of the budget,
_PART_IF_LONGER: Final = 50  # and no more than this one for steps that are not short
_CLOSE: Final = 1e-3  # gap at which no better plan is looked for,
_CLOSE_IF_LONG: Final = 1e-2  # and that for long steps, whose predictions take long
_LONG: Final = 256  # layers
_SAME: Final = 1e-9  # difference of two steps that rounding of numbers may cause
_SHORT: Final = 64  # layers up to which annealing and programmes in whole numbers are quick,
_FEW: Final = 16  # and up to which that is so for equal layers, too
_ALL_COUNTS: Final = 64  # layers up to which every k of "the first k layers" is tried
_SOME_COUNTS: Final = 8  # how many are tried of longer steps


def search(
    profile: StepProfile,
    hardware: Hardware,
    budget: PlanBudget,
    predictor: Predictor,
    *,
    weights: bool = False,
    limit_s: float | None = None,
) -> Plan:
    """Find the fastest plan within a budget. See [Note: search].

    Args:
        profile: the step.
        hardware: the link.
        budget: the device, host and pinned memory that the plan may use.
        predictor: predicts plans.
        weights: whether weights may rest on the host if that is faster, or if nothing else fits.
        limit_s: about how long the search may take. What is found by then is taken, and if the
            programme takes longer, the plans made by hand. None: as long as it takes.

    Returns:
        The plan, with its prediction and the bound.

    Raises:
        BudgetError: no plan was found within the budget.
        PolicyError: the profile or the budget is wrong.
    """
    if weights:
        return _search_placements(profile, hardware, budget, predictor, limit_s)
    by_pass = _has_windows(profile, hardware)
    contest = Contest(profile, predictor, budget, by_pass=by_pass, limit_s=limit_s)
    try:
        relaxation = _relax(contest, hardware, contest.resting)
    except TimeoutError:
        return _search_by_hand(contest, hardware)
    if relaxation is None:
        raise _over([contest])
    _enter_rules(contest, hardware)
    _enter_plans(contest, hardware, relaxation)
    if not contest.has_fitting:
        contest.enter(_most_frugal(contest).choices)
    if not contest.has_fitting:
        raise _over([contest])
    _improve(contest, relaxation.bound_s)
    return _finished(contest, relaxation.bound_s)


def _search_by_hand(contest: Contest, hardware: Hardware) -> Plan:
    """Return the best plan that people make by hand, for steps too long for the programme.

    Raises:
        BudgetError: none of them is within the budget.
    """
    _enter_rules(contest, hardware)
    _enter_simple(contest, hardware)
    if not contest.has_fitting:
        contest.enter(_most_frugal(contest).choices)
    if not contest.has_fitting:
        raise _over([contest])
    return _finished(contest, busy_s(contest.profile))


def _search_placements(
    profile: StepProfile,
    hardware: Hardware,
    budget: PlanBudget,
    predictor: Predictor,
    limit_s: float | None,
) -> Plan:
    """Find the fastest plan, wherever weights rest.

    Raises:
        BudgetError: no plan was found within the budget.
    """
    by_pass, begin_s = _has_windows(profile, hardware), time.monotonic()
    # The programme is solved once for each placement: in whole numbers that would take seconds.
    whole = len(profile.layers) <= _FEW

    def contest_of(resting: Resting, *, by_pass: bool = False) -> Contest:
        left_s = None if limit_s is None else max(0.0, begin_s + limit_s - time.monotonic())
        return Contest(profile, predictor, budget, resting, by_pass=by_pass, limit_s=left_s)

    ends = [contest_of(each(profile), by_pass=by_pass) for each in (nowhere, everywhere)]
    try:
        relaxation = _relax(ends[0], hardware, None, whole_layers=whole)
    except TimeoutError:
        return _search_by_hand(ends[1], hardware)
    if relaxation is None:
        raise _over(ends)
    tried = resting_choices(profile, relaxation.resting_bytes)
    bounded: list[tuple[Contest, Relaxation]] = []
    for contest in [*ends, *(contest_of(each) for each in tried)]:
        if contest.is_late:
            break
        try:
            found = _relax(contest, hardware, contest.resting, whole_layers=whole)
        except TimeoutError:
            break
        if found is not None:
            _enter_rules(contest, hardware)
            bounded.append((contest, found))
    best, best_s, bound_s = ends[0], float("inf"), 0.0
    for contest, found in sorted(bounded, key=lambda each: each[1].bound_s):
        # A plan is about as far from its bound as the best one is. Half of that is no hope.
        if best.has_fitting and found.bound_s >= (bound_s + best_s) / 2:
            break
        if not contest.is_late:
            _enter_plans(contest, hardware, found)
        if contest.fitting_s < best_s:
            best, best_s, bound_s = contest, contest.fitting_s, found.bound_s
    if not best.has_fitting:
        best = ends[1]
        _enter_rules(best, hardware)  # which it has not got to if it is late
        best.enter(_most_frugal(best).choices)
    if not best.has_fitting:
        raise _over(ends)
    _improve(best, bound_s)
    return _finished(best, relaxation.bound_s)


def _finished(contest: Contest, bound_s: float) -> Plan:
    """Return the best plan of a contest, with its prediction.

    Args:
        contest: it has a plan within the budget.
        bound_s: the bound.
    """
    assert contest.best is not None
    best = spare(contest, contest.best)
    step_s = best.prediction.step_s
    return dataclasses.replace(
        best.plan,
        step_s=step_s,
        peak_bytes=best.prediction.peak_bytes,
        bound_s=min(bound_s, step_s),
        limit_bytes=contest.budget.device_bytes,
    )


def _relax(
    contest: Contest, hardware: Hardware, resting: Resting | None, *, whole_layers: bool = True
) -> Relaxation | None:
    """Solve the programme for a bound, from which a plan is rounded too if the step is long.

    In whole numbers it may take half of the time that is left; in fractions it takes little.

    Raises:
        TimeoutError: it took longer than there is time.
    """

    def solve(*, whole: bool, limit_s: float | None) -> Relaxation | None:
        return relax(
            contest.profile,
            hardware,
            contest.budget,
            resting=resting,
            whole_layers=whole,
            guides=_is_long(contest.profile),
            limit_s=limit_s,
        )

    if whole_layers and _is_quick_in_whole_numbers(contest.profile):
        left_s = contest.left_s
        with contextlib.suppress(TimeoutError):
            return solve(whole=True, limit_s=None if left_s is None else left_s / 2)
    return solve(whole=False, limit_s=contest.left_s)


def find_frugal(
    profile: StepProfile,
    hardware: Hardware,
    predictor: Predictor,
    enough_bytes: int = 0,
    resting: Resting = (),
    host_bytes: int | None = None,
) -> Plan:
    """Return a plan that needs little device memory.

    Args:
        profile: the step.
        hardware: the machine.
        predictor: predicts plans.
        enough_bytes: how much it may need. If that is enough to offload everything, this is the
            plan; otherwise the one that needs the least of those that are looked at.
        resting: whose weights rest on the host; empty: nobody's.
        host_bytes: how much may be in the tier below; None: any number of bytes.
    """
    plan = with_weights(offload_first(profile, len(profile.layers)), resting or nowhere(profile))
    prediction = predictor.predict(plan)
    fits_below = host_bytes is None or prediction.host_peak_bytes <= host_bytes
    if prediction.peak_bytes <= enough_bytes and fits_below:
        return dataclasses.replace(plan, step_s=prediction.step_s, peak_bytes=prediction.peak_bytes)
    by_pass = _has_windows(profile, hardware)
    nothing = PlanBudget(device_bytes=0, host_bytes=host_bytes)
    found = _most_frugal(Contest(profile, predictor, nothing, resting, by_pass=by_pass))
    step_s, peak_bytes = found.prediction.step_s, found.prediction.peak_bytes
    return dataclasses.replace(found.plan, step_s=step_s, peak_bytes=peak_bytes)


def _enter_plans(contest: Contest, hardware: Hardware, relaxation: Relaxation) -> None:
    """Enter plans that are rounded, made by hand, or found layer by layer."""
    bound_s = relaxation.bound_s
    if _is_long(contest.profile) and not _is_close(contest, bound_s):
        # To solve the programme once more takes as long as many predictions.
        bound_bytes = _ordered_bounds(contest)[0]
        entered = contest.enter(rounded(relaxation, contest.uses, bound_bytes))
        if entered.score.excess_bytes:
            relieve(contest, entered)
    if not _is_close(contest, bound_s) and not contest.is_late:
        _enter_guided(contest, hardware, bound_s)
    if contest.fitting_s > bound_s * (1 + _SAME):
        _enter_simple(contest, hardware)
    if len(contest.profile.layers) <= _SHORT and not _is_close(contest, bound_s):
        _enter_chain(contest, hardware)


def _improve(contest: Contest, bound_s: float) -> None:
    """Change the best plan for the better."""
    if not _is_long(contest.profile) and not _is_close(contest, bound_s):
        improve(contest)
    if len(contest.profile.layers) <= _SHORT and not _is_close(contest, bound_s):
        anneal(contest)
        improve(contest)


def _has_windows(profile: StepProfile, hardware: Hardware) -> bool:
    """Whether plans have windows. See [Note: windows] in `pass_windows`.

    On a CPU compute hardly waits for copies, and what is in flight is a small part of what the
    process occupies. In steps of many layers, hardly anything is in flight beside the rest.
    """
    return not hardware.computes_on_host and len(profile.layers) <= _SHORT


def _is_long(profile: StepProfile) -> bool:
    return len(profile.layers) > _LONG


def _is_quick_in_whole_numbers(profile: StepProfile) -> bool:
    """Whether the programme is solved quickly if layers are recomputed as a whole or not at all.

    In steps of many equal layers, the solver would try one such layer after the other. There,
    fractions of layers are rounded well, because it does not matter which of them is chosen.
    """
    count = len(profile.layers)
    different = len({profile.fingerprint(index) for index in range(min(count, _SHORT))})
    return count <= _FEW or (count <= _SHORT and 2 * different > count)


def _is_close(contest: Contest, bound_s: float) -> bool:
    gap = _CLOSE_IF_LONG if _is_long(contest.profile) else _CLOSE
    return contest.fitting_s <= bound_s * (1 + gap)


def _enter_guided(contest: Contest, hardware: Hardware, bound_s: float) -> None:
    """Enter plans that are rounded from the linear programme, for each bound on bytes in flight."""
    count = len(contest.profile.layers)
    enough = max(1, _ENOUGH_LAYERS // count)
    most = max(_FEWEST_GUIDES, (_GUIDED_SHORT if count <= _SHORT else _GUIDED_LAYERS) // count)
    solved = 0
    for inflight_bytes in _ordered_bounds(contest):
        less_bytes = max(0, inflight_bytes)
        for _ in range(_GUIDES):
            is_near = count > _SHORT and contest.fitting_s <= bound_s * (1 + _NEAR)
            if solved >= (enough if is_near else most) or contest.is_late:
                return
            try:
                guide = _guide(contest, hardware, inflight_bytes, less_bytes)
            except TimeoutError:
                return
            solved += 1
            if guide is None or guide.bound_s > contest.fitting_s:
                break
            entered = contest.enter(rounded(guide, contest.uses, inflight_bytes))
            excess_bytes = entered.score.excess_bytes
            if not excess_bytes:
                break
            fits = relieve(contest, entered)
            if _is_close(contest, bound_s) or (fits and _is_long(contest.profile)):
                break
            less_bytes += excess_bytes + excess_bytes // 8
        if _is_close(contest, bound_s):
            return


def _ordered_bounds(contest: Contest) -> list[int]:
    """Return the bounds on bytes in flight: the largest that takes little of the budget first."""
    part = _PART_IN_FLIGHT if len(contest.profile.layers) <= _SHORT else _PART_IF_LONGER
    little_bytes = (contest.budget.device_bytes - contest.profile.fixed_bytes) / part
    bounds = sorted(contest.bounds, key=lambda each: (each > little_bytes, -each))
    return sorted(bounds, key=lambda each: each != BY_PASS)


def _guide(
    contest: Contest, hardware: Hardware, inflight_bytes: int, less_bytes: int
) -> Relaxation | None:
    """Solve the programme with less device memory than there is, and a slower link.

    A plan copies storages as a whole, so it cannot use all of the link's time without waits.
    """
    device_bytes = contest.budget.device_bytes - max(0, less_bytes)
    if device_bytes <= 0:
        return None
    smaller = dataclasses.replace(contest.budget, device_bytes=device_bytes)
    share = _LINK_SHARE if len(contest.profile.layers) > _SHORT else 1.0
    slower = dataclasses.replace(
        hardware,
        d2h_bytes_per_s=share * hardware.d2h_bytes_per_s,
        h2d_bytes_per_s=share * hardware.h2d_bytes_per_s,
        duplex_bytes_per_s=share * hardware.duplex_bytes_per_s,
    )
    return relax(
        contest.profile,
        slower,
        smaller,
        None if inflight_bytes == BY_PASS else inflight_bytes,
        resting=contest.resting,
        whole_layers=_is_quick_in_whole_numbers(contest.profile),
        guides=True,
        limit_s=None if contest.left_s is None else max(contest.left_s, 0.1),
    )


def _enter_simple(contest: Contest, hardware: Hardware) -> None:
    """Enter the plans that offload the first k layers."""
    count = len(contest.profile.layers)
    stride = 1 if count <= _ALL_COUNTS else -(-count // _SOME_COUNTS)
    firsts = (offload_first(contest.profile, k) for k in range(1, count, stride))
    _enter_by_hand(contest, hardware, firsts)


def _enter_rules(contest: Contest, hardware: Hardware) -> None:
    """Enter the plans that treat all layers alike. They are few, and a late search has one."""
    contest.enter(choices_of(keep_all(contest.profile), contest.uses))
    _enter_by_hand(contest, hardware, [plan for _, plan in rule_plans(contest.profile)])


def _enter_by_hand(contest: Contest, hardware: Hardware, plans: Iterable[Plan]) -> None:
    """Enter plans that people make by hand, until it is late."""
    copy_s_per_byte = 1 / hardware.d2h_bytes_per_s + 1 / hardware.h2d_bytes_per_s
    for plan in plans:
        if contest.is_late and contest.has_fitting:
            return
        choices, bounds = choices_of(plan, contest.uses), contest.bounds
        contest.enter_if_promising(choices, bounds, copy_s_per_byte)


def _enter_chain(contest: Contest, hardware: Hardware) -> None:
    """Enter the plans of the dynamic programme over the layers, for each bound in flight."""
    profile = contest.profile
    room_bytes = contest.budget.device_bytes - contest.resident_bytes
    if room_bytes <= 0:
        return
    most = contest.num_predictions + MOST_WORK // len(profile.layers)
    for plan in chain_plans(profile, hardware, room_bytes):
        if contest.num_predictions >= most or contest.is_late:
            return
        contest.enter_if_promising(choices_of(plan, contest.uses), contest.bounds)


def _most_frugal(contest: Contest) -> Contestant:
    """Return the plan that needs the least device memory of those that are looked at."""
    nothing = dataclasses.replace(contest.budget, device_bytes=0)
    by_pass = BY_PASS in contest.bounds
    frugal = Contest(
        contest.profile,
        contest.predictor,
        nothing,
        contest.resting,
        by_pass=by_pass,
        limit_s=contest.left_s,
    )
    for _, plan in rule_plans(contest.profile):
        frugal.enter(choices_of(plan, contest.uses))
    improve(frugal)
    assert frugal.best is not None
    return frugal.best


def _over(contests: list[Contest]) -> BudgetError:
    """Return the error that names the smallest budget that a plan was found for."""
    budget = contests[0].budget
    best = min((_most_frugal(contest) for contest in contests), key=lambda each: each.score)
    needed_bytes = best.prediction.peak_bytes
    plain_s = busy_s(contests[0].profile)
    price = best.prediction.step_s / plain_s - 1 if plain_s else 0.0
    message = (
        f"no plan fits into {format_size(budget.device_bytes)} of device memory; the smallest "
        f"budget that a plan was found for is {format_size(needed_bytes)} ({needed_bytes} bytes), "
        f"with a step of {best.prediction.step_s * 1e3:.2f} ms, {price:.0%} longer than one that "
        f"keeps everything"
    )
    if best.score.excess_bytes > needed_bytes:
        over_bytes = best.score.excess_bytes - needed_bytes
        message += f"; that needs {format_size(over_bytes)} more than may rest in the tier below"
    return BudgetError(message, smallest_bytes=needed_bytes, price=price)
