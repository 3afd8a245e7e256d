"""Finds the fastest plan within a budget."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import time
from collections.abc import Iterable
from typing import Final

from ebbtide.devices.hardware import Hardware
from ebbtide.errors import BudgetError
from ebbtide.planning.contest import (
    BY_PASS,
    Change,
    Contest,
    Contestant,
    apply_change,
    busy_s,
    changes,
    choices_of,
    keep_all,
    offload_first,
    rounded,
    rule_plans,
    spare,
)
from ebbtide.planning.plan import Plan
from ebbtide.planning.prediction import PlanBudget, Predictor
from ebbtide.planning.profile import StepProfile
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

_HOT, _COLD = 1e-2, 3e-4  # by which share of the step a change may make it longer, begin and end
_PENALTY: Final = (
    3.0  # by which share a step counts as longer if the budget is exceeded by all of it
)
_MOST_CHANGED: Final = 10_000  # layers of changed plans; four times as many found no better plan


def anneal(contest: Contest) -> None:
    """Change plans at random (simulated annealing). The same contest gives the same plans.

    Args:
        contest: predicts the changed plans. Its best plan is the first.
    """
    choose = random.Random(0)
    current, first_s = contest.leader, contest.leader.prediction.step_s or 1.0
    limit_bytes = max(1, contest.budget.device_bytes)

    def badness(plan: Contestant) -> float:
        return plan.prediction.step_s / first_s + _PENALTY * plan.excess_bytes / limit_bytes

    tries = _MOST_CHANGED // len(contest.profile.layers)
    known, left = list(changes(contest)), list[Change]()
    for done in range(tries):
        if contest.is_late:
            return
        temperature = _HOT * (_COLD / _HOT) ** (done / tries)
        changed, left = current.choices.copy(), left or choose.sample(known, len(known))
        if not apply_change(left.pop(), changed):
            continue
        entered = contest.enter(changed)
        worse = badness(entered) - badness(current)
        if worse <= 0 or choose.random() < math.exp(-worse / temperature):
            current = entered


# ---- Finds the fastest plan within a budget ----
#
# [Note: search] A linear programme gives a bound that no plan can beat, and, with the bytes in
# flight held to what the engine holds them to, fractions that are rounded to a plan. The
# programme knows less of memory than the prediction does, so it is solved again with a smaller
# budget until the plan fits. On an accelerator, plans with windows instead of one bound in flight
# are tried first. In steps of hundreds of layers most of the time goes into solving it, so the
# fractions that gave the bound are rounded first. The plans that people make by hand take part as
# well, so the result is never worse than the best of those that were predicted. In steps that are
# not long, random changes then improve the plan.

_GUIDES: Final = 3  # times that the programme is solved for one bound on bytes in flight
_GUIDED_LAYERS: Final = 3000  # layers of the programmes solved, all together,
_FEWEST_GUIDES: Final = 3  # but no fewer programmes than this
_PART_IN_FLIGHT: Final = 20  # what is in flight should be no more than this part of the budget
_CLOSE: Final = 1e-3  # gap at which no better plan is looked for,
_CLOSE_IF_LONG: Final = 1e-2  # and that for long steps, whose predictions take long
_LONG: Final = 256  # layers
_SAME: Final = 1e-9  # difference of two steps that rounding of numbers may cause
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
        budget: the memory that the plan may use.
        predictor: predicts plans.
        weights: whether weights may rest on the host if that is faster, or if nothing else fits.
        limit_s: about how many seconds of processor time the search may take. What is found by then
            is taken, and if the programme takes longer, the plans made by hand. None: as long as
            it takes.

    Returns:
        The plan, with its prediction and the bound.

    Raises:
        BudgetError: no plan was found within the budget.
        PolicyError: the profile or the budget is wrong.
    """
    begin_s = time.thread_time()

    def contest_of(resting: Resting) -> Contest:
        left_s = None if limit_s is None else max(0.0, begin_s + limit_s - time.thread_time())
        return Contest(profile, hardware, predictor, budget, resting, limit_s=left_s)

    places = [nowhere(profile), everywhere(profile)] if weights else [nowhere(profile)]
    ends = [contest_of(each) for each in places]
    bounded: list[tuple[Contest, Relaxation]] = []
    bound_s = busy_s(profile)
    with contextlib.suppress(TimeoutError):  # then there are the plans made by hand
        free = _relax(ends[0], None if weights else places[0])
        if free is not None:  # otherwise a plan may fit still: a layer can need less than it saves
            bound_s = free.bound_s
            tried = resting_choices(profile, free.resting_bytes) if weights else ()
            for contest in [*ends, *map(contest_of, tried)]:
                if contest.is_late:
                    break
                found = _relax(contest, contest.resting) if weights else free
                if found is not None:
                    bounded.append((contest, found))
    best = _best_placement(bounded) or ends[-1]
    if not bounded:
        _enter_rules(best)
        _enter_simple(best)
    if not best.has_fitting:
        frugal = [_of_frugal_rules(each) for each in ends]
        best, least = min(zip(ends, frugal, strict=True), key=lambda pair: pair[1].leader.score)
        anneal(least)
        if not best.enter(least.leader.choices).is_fitting:
            raise _over(best, least.leader)
    return _finished(best, bound_s)


def _best_placement(bounded: list[tuple[Contest, Relaxation]]) -> Contest | None:
    """Return the contest with the fastest plan; None if no plan fits.

    Args:
        bounded: the contests, one for each placement of the weights, with their bounds.
    """
    for contest, _ in bounded:
        _enter_rules(contest)
    best_s, bound_s = float("inf"), 0.0
    fitting: list[tuple[Contest, float]] = []
    for contest, found in sorted(bounded, key=lambda each: each[1].bound_s):
        # A plan is about as far from its bound as the best one is. Half of that is no hope.
        if found.bound_s >= (bound_s + best_s) / 2:
            break
        if not contest.is_late:
            _enter_plans(contest, found)
        if contest.has_fitting:
            fitting.append((contest, found.bound_s))
        if contest.fitting_s < best_s:
            best_s, bound_s = contest.fitting_s, found.bound_s
    if not fitting:
        return None
    # The fastest may have been found with luck; the one with the least bound may still get there.
    fastest = min(fitting, key=lambda each: each[0].fitting_s)
    for contest, near_s in dict.fromkeys([fastest, fitting[0]]):
        if not _is_long(contest.profile) and not _is_close(contest, near_s):
            anneal(contest)
    return min((contest for contest, _ in fitting), key=lambda each: each.fitting_s)


def _finished(contest: Contest, bound_s: float) -> Plan:
    """Return the best plan of a contest, with its prediction.

    Args:
        contest: it has a plan within the budget.
        bound_s: the bound.
    """
    best = spare(contest, contest.leader)
    step_s = best.prediction.step_s
    return dataclasses.replace(
        best.plan,
        step_s=step_s,
        peak_bytes=best.prediction.peak_bytes,
        bound_s=min(bound_s, step_s),
        limit_bytes=contest.budget.device_bytes,
    )


def _relax(contest: Contest, resting: Resting | None) -> Relaxation | None:
    """Solve the programme for a bound, and for a plan that is rounded from it.

    Raises:
        TimeoutError: it takes longer than there is time.
    """
    return relax(
        contest.profile,
        contest.hardware,
        contest.budget,
        resting=resting,
        limit_s=contest.left_s,
    )


def find_frugal(
    profile: StepProfile,
    hardware: Hardware,
    predictor: Predictor,
    resting: Resting = (),
    host_bytes: int | None = None,
    limit_s: float | None = None,
) -> Plan:
    """Return the plan that needs the least device memory of those that are looked at.

    Args:
        profile: the step.
        hardware: the machine.
        predictor: predicts plans.
        resting: whose weights rest on the host; empty: nobody's.
        host_bytes: how much may be in the tier below; None: any number of bytes.
        limit_s: about how many seconds of processor time that may take; None: as long as it takes.
    """
    nothing = PlanBudget(device_bytes=0, host_bytes=host_bytes)
    contest = Contest(profile, hardware, predictor, nothing, resting, limit_s=limit_s)
    contest = _of_frugal_rules(contest)
    anneal(contest)
    plan, prediction = contest.leader.plan, contest.leader.prediction
    return dataclasses.replace(plan, step_s=prediction.step_s, peak_bytes=prediction.peak_bytes)


def _enter_plans(contest: Contest, relaxation: Relaxation) -> None:
    """Enter plans that are rounded, made by hand, or found layer by layer."""
    bound_s = relaxation.bound_s
    if not _is_close(contest, bound_s):
        contest.enter(rounded(relaxation, contest.uses, _ordered_bounds(contest)[0]))
    if not _is_close(contest, bound_s) and not contest.is_late:
        _enter_guided(contest, bound_s)
    if contest.fitting_s > bound_s * (1 + _SAME):
        _enter_simple(contest)


def _is_long(profile: StepProfile) -> bool:
    return len(profile.layers) > _LONG


def _is_close(contest: Contest, bound_s: float) -> bool:
    gap = _CLOSE_IF_LONG if _is_long(contest.profile) else _CLOSE
    return contest.fitting_s <= bound_s * (1 + gap)


def _enter_guided(contest: Contest, bound_s: float) -> None:
    """Enter plans that are rounded from the linear programme, for each bound on bytes in flight."""
    most = max(_FEWEST_GUIDES, _GUIDED_LAYERS // len(contest.profile.layers))
    solved = 0
    for inflight_bytes in _ordered_bounds(contest):
        over_bytes = over_below_bytes = 0
        for _ in range(_GUIDES):
            if solved >= most or contest.is_late:
                return
            try:
                guide = _guide(contest, inflight_bytes, over_bytes, over_below_bytes)
            except TimeoutError:
                return
            solved += 1
            if guide is None or guide.bound_s > contest.fitting_s:
                break
            entered = contest.enter(rounded(guide, contest.uses, inflight_bytes))
            excess_bytes = entered.excess_bytes
            if not excess_bytes:
                break
            more_bytes = max(0, entered.prediction.peak_bytes - contest.budget.device_bytes)
            over_bytes += more_bytes + more_bytes // 8
            over_below_bytes += excess_bytes - more_bytes
        if _is_close(contest, bound_s):
            return


def _ordered_bounds(contest: Contest) -> list[int]:
    """Return the bounds on bytes in flight: the largest that takes little of the budget first."""
    room_bytes = contest.budget.device_bytes - contest.profile.fixed_bytes
    little_bytes = room_bytes / _PART_IN_FLIGHT
    bounds = sorted(contest.bounds, key=lambda each: (each > little_bytes, -each))
    return sorted(bounds, key=lambda each: each != BY_PASS)


def _guide(
    contest: Contest, inflight_bytes: int, over_bytes: int, over_below_bytes: int
) -> Relaxation | None:
    """Solve the programme with less memory than there is.

    Args:
        contest: has the budget.
        inflight_bytes: bound on the bytes in flight, or `BY_PASS`.
        over_bytes: device memory that plans of such programmes were over the budget.
        over_below_bytes: the same in the tier below.
    """
    device_bytes = contest.budget.device_bytes - max(0, inflight_bytes) - over_bytes
    if device_bytes <= 0:
        return None
    host_bytes = contest.budget.host_bytes
    if host_bytes is not None:
        host_bytes = max(0, host_bytes - over_below_bytes)
    return relax(
        contest.profile,
        contest.hardware,
        PlanBudget(device_bytes=device_bytes, host_bytes=host_bytes),
        None if inflight_bytes == BY_PASS else inflight_bytes,
        resting=contest.resting,
        limit_s=None if contest.left_s is None else max(contest.left_s, 0.1),
    )


def _enter_simple(contest: Contest) -> None:
    """Enter the plans that offload the first k layers."""
    count = len(contest.profile.layers)
    stride = 1 if count <= _ALL_COUNTS else -(-count // _SOME_COUNTS)
    _enter_by_hand(contest, (offload_first(contest.profile, k) for k in range(1, count, stride)))


def _enter_rules(contest: Contest) -> None:
    """Enter the plans that treat all layers alike. They are few, and a late search has one."""
    contest.enter(choices_of(keep_all(contest.profile), contest.uses))
    _enter_by_hand(contest, (plan for _, plan in rule_plans(contest.profile)))


def _enter_by_hand(contest: Contest, plans: Iterable[Plan]) -> None:
    """Enter plans that people make by hand, with as many bytes in flight as they have room for.

    More bytes in flight make a step faster, and its peak higher.
    """
    for plan in plans:
        for bound_bytes in reversed(contest.bounds):
            if contest.is_late and contest.has_fitting:
                return
            choices = choices_of(plan, contest.uses)
            choices.inflight_bytes = bound_bytes
            entered = contest.enter(choices)
            is_decided = entered.is_fitting or entered.prediction.step_s >= contest.fitting_s
            if is_decided and bound_bytes != BY_PASS:
                break


def _of_frugal_rules(contest: Contest) -> Contest:
    """Return a contest for the least device memory, with the plans that treat all layers alike."""
    frugal = Contest(
        contest.profile,
        contest.hardware,
        contest.predictor,
        dataclasses.replace(contest.budget, device_bytes=0),
        contest.resting,
        limit_s=contest.left_s,
    )
    for _, plan in rule_plans(contest.profile):
        frugal.enter(choices_of(plan, contest.uses))
    return frugal


def _over(contest: Contest, best: Contestant) -> BudgetError:
    """Return the error that names the smallest budget that a plan was found for.

    Args:
        contest: has the budget.
        best: the plan for that one.
    """
    needed_bytes, step_s = best.prediction.peak_bytes, best.prediction.step_s
    plain_s = busy_s(contest.profile)
    price = step_s / plain_s - 1 if plain_s else 0.0
    message = (
        f"no plan fits into {format_size(contest.budget.device_bytes)} of device memory; the "
        f"smallest budget that a plan was found for is {format_size(needed_bytes)} ({needed_bytes} "
        f"bytes), with a step of {step_s * 1e3:.2f} ms, {price:.0%} longer than one that keeps "
        f"everything"
    )
    if best.excess_bytes > needed_bytes:
        over_bytes = best.excess_bytes - needed_bytes
        message += f"; that needs {format_size(over_bytes)} more than may rest in the tier below"
    return BudgetError(message, smallest_bytes=needed_bytes, price=price)
