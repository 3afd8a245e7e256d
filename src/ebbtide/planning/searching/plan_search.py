"""Finds the fastest plan within a budget.

[Note: search] A linear programme gives a bound that no plan can beat, and, with the bytes in flight
held to what the engine holds them to, fractions that are rounded to a plan. The programme knows
less of memory than the prediction does, so it is solved again with a smaller budget until the plan
fits. Single changes then improve the plan. The plans that people make by hand take part as well,
and in steps that are not long those of a dynamic programme over the layers, so the result is never
worse than the best of those that were predicted. If a step has few plans, all of them are tried.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from ebbtide.errors import BudgetError
from ebbtide.planning.budgets import PlanBudget
from ebbtide.planning.hardware import Hardware
from ebbtide.planning.plan import Plan
from ebbtide.planning.prediction.step_timing import Predictor
from ebbtide.planning.searching.annealing import anneal
from ebbtide.planning.searching.chain_programme import chain_plans
from ebbtide.planning.searching.choices import choices_of, inflight_choices, rounded
from ebbtide.planning.searching.contest import Contest, Contestant, busy_s
from ebbtide.planning.searching.enumeration import MOST_PLANS, count_plans, enumerate_plans
from ebbtide.planning.searching.improvement import MOST_WORK, improve, relieve
from ebbtide.planning.searching.relaxation import Relaxation, relax
from ebbtide.planning.searching.simple_plans import keep_all, offload_first, rule_plans
from ebbtide.planning.searching.sparing import spare
from ebbtide.planning.step_profile import StepProfile
from ebbtide.units import format_size

_GUIDES: Final = 3  # times that the programme is solved for one bound on bytes in flight
_GUIDED_LAYERS: Final = 3000  # layers of the programmes solved, all together,
_GUIDED_SHORT: Final = 300  # or, where the programmes are in whole numbers, this many,
_FEWEST_GUIDES: Final = 3  # but no fewer programmes than this
_SHARE_IN_FLIGHT: Final = 20  # what is in flight should be no more than this part of the budget
_CLOSE: Final = 1e-3  # gap at which no better plan is looked for,
_CLOSE_IF_LONG: Final = 1e-2  # and that for long steps, whose predictions take long
_LONG: Final = 256  # layers
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
) -> Plan:
    """Find the fastest plan within a budget. See [Note: search].

    Args:
        profile: the step.
        hardware: the link.
        budget: the device, host and pinned memory that the plan may use.
        predictor: predicts plans.
        weights: whether the weights of all layers may rest on the host if that is faster, or if
            nothing else fits.

    Returns:
        The plan, with its prediction and the bound.

    Raises:
        BudgetError: no plan was found within the budget.
        PolicyError: the profile or the budget is wrong.
    """
    contests = [Contest(profile, predictor, budget)]
    if weights:
        contests.append(Contest(profile, predictor, budget, weights_on_host=True))
    # With weights on the host the programme leaves out their copies, so its optimum bounds both.
    relaxation = relax(
        profile,
        hardware,
        budget,
        weights_on_host=weights,
        whole_layers=_is_quick_in_whole_numbers(profile),
    )
    if relaxation is None:
        raise _over(contests, budget)
    proofs = [_fill(contest, hardware, relaxation.bound_s) for contest in contests]
    entered = [(each.best, each) for each in contests if each.best is not None]
    best, contest = min(entered, key=lambda pair: pair[0].score)
    if best.score.excess_bytes:
        raise _over(contests, budget)
    best = spare(contest, best)
    step_s = best.prediction.step_s
    return dataclasses.replace(
        best.plan,
        step_s=step_s,
        peak_bytes=best.prediction.peak_bytes,
        bound_s=step_s if all(proofs) else min(relaxation.bound_s, step_s),
    )


def find_frugal(profile: StepProfile, predictor: Predictor, enough_bytes: int = 0) -> Plan:
    """Return a plan that needs little device memory.

    Args:
        profile: the step.
        predictor: predicts plans.
        enough_bytes: how much it may need. If that is enough to offload everything, this is the
            plan; otherwise the one that needs the least of those that are looked at.
    """
    plan = offload_first(profile, len(profile.layers))
    prediction = predictor.predict(plan)
    if prediction.peak_bytes <= enough_bytes:
        return dataclasses.replace(plan, step_s=prediction.step_s, peak_bytes=prediction.peak_bytes)
    found = _most_frugal(Contest(profile, predictor, PlanBudget(device_bytes=0)))
    step_s, peak_bytes = found.prediction.step_s, found.prediction.peak_bytes
    return dataclasses.replace(found.plan, step_s=step_s, peak_bytes=peak_bytes)


def _fill(contest: Contest, hardware: Hardware, bound_s: float) -> bool:
    """Look for plans. Returns whether the best one is proved to be the optimum."""
    contest.enter(choices_of(keep_all(contest.profile), contest.uses))
    if not _is_close(contest, bound_s):
        _enter_guided(contest, hardware, bound_s)
    if _best_s(contest) > bound_s:
        _enter_simple(contest)
    if len(contest.profile.layers) <= _SHORT and not _is_close(contest, bound_s):
        _enter_chain(contest, hardware)
    if not _fits(contest):
        contest.enter(_most_frugal(contest).choices)
    if len(contest.profile.layers) <= _LONG and not _is_close(contest, bound_s):
        improve(contest)
    if len(contest.profile.layers) <= _SHORT and not _is_close(contest, bound_s):
        anneal(contest)
        improve(contest)
    if _best_s(contest) > bound_s and count_plans(contest) <= MOST_PLANS:
        enumerate_plans(contest)
        return True
    return False


def _is_quick_in_whole_numbers(profile: StepProfile) -> bool:
    """Whether the programme is solved quickly if layers are recomputed as a whole or not at all.

    In steps of many equal layers, the solver would try one such layer after the other. There,
    fractions of layers are rounded well, because it does not matter which of them is chosen.
    """
    count = len(profile.layers)
    different = len({profile.fingerprint(index) for index in range(min(count, _SHORT))})
    return count <= _FEW or (count <= _SHORT and 2 * different > count)


def _fits(contest: Contest) -> bool:
    return contest.best is not None and not contest.best.score.excess_bytes


def _is_close(contest: Contest, bound_s: float) -> bool:
    gap = _CLOSE_IF_LONG if len(contest.profile.layers) > _LONG else _CLOSE
    return _best_s(contest) <= bound_s * (1 + gap)


def _enter_guided(contest: Contest, hardware: Hardware, bound_s: float) -> None:
    """Enter plans that are rounded from the linear programme, for each bound on bytes in flight."""
    count = len(contest.profile.layers)
    most = max(_FEWEST_GUIDES, (_GUIDED_SHORT if count <= _SHORT else _GUIDED_LAYERS) // count)
    for inflight_bytes in _ordered_bounds(contest):
        less_bytes = inflight_bytes
        for _ in range(_GUIDES):
            guide = None if most <= 0 else _guide(contest, hardware, inflight_bytes, less_bytes)
            most -= 1
            if guide is None or guide.bound_s > _best_s(contest):
                break
            entered = contest.enter(rounded(guide, contest.uses, inflight_bytes))
            excess_bytes = entered.score.excess_bytes
            if not excess_bytes:
                break
            relieve(contest, entered)
            if _is_close(contest, bound_s):
                break
            less_bytes += excess_bytes + excess_bytes // 8
        if _is_close(contest, bound_s):
            return


def _ordered_bounds(contest: Contest) -> list[int]:
    """Return the bounds on bytes in flight: the largest that takes little of the budget first."""
    share = (contest.budget.device_bytes - contest.profile.fixed_bytes) / _SHARE_IN_FLIGHT
    return sorted(inflight_choices(contest.profile), key=lambda each: (each > share, -each))


def _guide(
    contest: Contest, hardware: Hardware, inflight_bytes: int, less_bytes: int
) -> Relaxation | None:
    """Solve the programme with less device memory than there is."""
    device_bytes = contest.budget.device_bytes - less_bytes
    if device_bytes <= 0:
        return None
    smaller = dataclasses.replace(contest.budget, device_bytes=device_bytes)
    return relax(
        contest.profile,
        hardware,
        smaller,
        inflight_bytes,
        weights_on_host=contest.weights_on_host,
        whole_layers=_is_quick_in_whole_numbers(contest.profile),
    )


def _best_s(contest: Contest) -> float:
    best = contest.best
    return float("inf") if best is None or best.score.excess_bytes else best.score.step_s


def _enter_simple(contest: Contest) -> None:
    """Enter the plans that people make by hand."""
    profile = contest.profile
    plans = [plan for _, plan in rule_plans(profile)]
    count = len(profile.layers)
    stride = 1 if count <= _ALL_COUNTS else -(-count // _SOME_COUNTS)
    plans += [offload_first(profile, k) for k in range(1, count, stride)]
    for plan in dict.fromkeys(plans):
        choices = choices_of(plan, contest.uses)
        for inflight_bytes in inflight_choices(profile):
            choices = choices.copy()
            choices.inflight_bytes = inflight_bytes
            contest.enter_if_promising(choices)


def _enter_chain(contest: Contest, hardware: Hardware) -> None:
    """Enter the plans of the dynamic programme over the layers, for each bound in flight."""
    profile = contest.profile
    room_bytes = contest.budget.device_bytes - profile.fixed_bytes
    if not contest.weights_on_host:
        room_bytes -= sum(layer.parameter_bytes for layer in profile.layers)
    if room_bytes <= 0:
        return
    most = contest.num_predictions + MOST_WORK // len(profile.layers)
    for plan in chain_plans(profile, hardware, room_bytes):
        if contest.num_predictions >= most:
            return
        for inflight_bytes in inflight_choices(profile):
            choices = choices_of(plan, contest.uses)
            choices.inflight_bytes = inflight_bytes
            contest.enter_if_promising(choices)


def _most_frugal(contest: Contest) -> Contestant:
    """Return the plan that needs the least device memory of those that are looked at."""
    nothing = dataclasses.replace(contest.budget, device_bytes=0)
    frugal = Contest(
        contest.profile, contest.predictor, nothing, weights_on_host=contest.weights_on_host
    )
    for _, plan in rule_plans(contest.profile):
        frugal.enter(choices_of(plan, contest.uses))
    improve(frugal)
    assert frugal.best is not None
    return frugal.best


def _over(contests: list[Contest], budget: PlanBudget) -> BudgetError:
    """Return the error that names the smallest budget that a plan was found for."""
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
