"""What is measured at each position of a step corrects what is predicted there."""

from __future__ import annotations

import pytest

from ebbtide import Trace, TraceEvent
from ebbtide.devices import Layer
from ebbtide.planning import (
    Plan,
    StepProfile,
    StepTiming,
    keep_all,
)
from ebbtide.planning.budget_study import BudgetStudy, Corrections, Phase, Stage
from ebbtide.planning.recorded import PassWatch, copied_bytes, measured_profile
from ebbtide.stores import AbstractMemory
from plan_cases import MB, make_layer, make_link, make_profile

LINK = make_link(1000.0, computes_on_host=True, copy_cost_s_per_mb=1e-4)
PROFILE = make_profile(make_layer(8, 4), make_layer(8, 4, between=True), make_layer(8, 4))


class ScriptedMemory(AbstractMemory):
    """A memory whose peaks are said in advance."""

    def __init__(self, *peaks_mb: int) -> None:
        self._peaks = [peak * MB for peak in peaks_mb]

    def now_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return self._peaks[0]

    @property
    def total_bytes(self) -> int:
        return 10**12

    def reset_peak(self) -> None:
        if len(self._peaks) > 1:
            self._peaks.pop(0)


def watched(*peaks_mb: int) -> PassWatch:
    """A step of `PROFILE` with these peaks: F0, F1, F2, the loss, B2, B0."""
    watch = PassWatch(ScriptedMemory(0, *peaks_mb), PROFILE)
    watch.begin_forward_of(Layer(0, ""), ((), {}))
    watch.end_forward_of(Layer(0, ""))
    watch.begin_forward_of(Layer(1, ""), ((), {}))
    watch.end_forward_of(Layer(1, ""))
    watch.end_forward()
    watch.begin_backward_of(1)
    watch.begin_backward_of(0)
    watch.finish()
    return watch


def test_a_corrected_profile_predicts_what_was_measured() -> None:
    plan, corrections = keep_all(PROFILE), Corrections()
    watch = watched(40, 41, 42, 43, 44, 45, 46, 47)
    for _ in range(2):  # what is learned twice is not added twice
        corrected = corrections.apply(PROFILE)
        corrections.learn(watch, plan, StepTiming(corrected, LINK).predict(plan))
    found = StepTiming(corrections.apply(PROFILE), LINK).predict(plan).peak_by_position
    for position, peak_bytes in watch.peaks.items():
        assert max(found[each] for each in watch.covered(position)) == peak_bytes


# ---- studies -------------------------------------------------------------------------------------


def run(study: BudgetStudy, peak_mb: int, step_s: float) -> Plan:
    """Run one step that needs this much memory and time."""
    plan = study.choose(0)
    if study.phase is Phase.SETTLED:
        return plan
    if study.stage is Stage.SECONDS:
        study.learn_seconds(Trace(), step_s, peak_mb * MB)
        study.note_peak(peak_mb * MB)
    else:
        study.learn_memory(watched(*[peak_mb] * 8), step_s)
    return plan


def measured_study(budget_mb: int, peak_mb: int, profile: StepProfile = PROFILE) -> BudgetStudy:
    """A study that has measured its frugal steps."""
    study = BudgetStudy(profile, LINK, budget_mb * MB)
    for stage in (Stage.WARM_UP, Stage.MEMORY, Stage.SECONDS):
        assert (study.phase, study.stage) == (Phase.FRUGAL, stage)
        run(study, peak_mb, 3.0)
    return study


def test_plans_leave_a_margin_and_what_steps_were_over() -> None:
    study = measured_study(100, 30)
    plan = study.choose(0)
    assert (study.phase, study.stage) == (Phase.PLANNED, Stage.WARM_UP)
    assert plan.peak_bytes is not None and plan.peak_bytes <= 97 * MB
    study.note_peak(140 * MB)
    plan = study.choose(0)
    assert plan.peak_bytes is not None and plan.peak_bytes <= 57 * MB


@pytest.mark.parametrize(("on_host", "free_mb"), [(True, 3), (False, 5)])
def test_an_accelerator_has_a_larger_margin(on_host: bool, free_mb: int) -> None:
    """Its allocator keeps what does not fit; large blocks of a process are mapped one by one."""
    hardware = make_link(1000.0, computes_on_host=on_host)
    needed_mb = StepTiming(PROFILE, hardware).predict(keep_all(PROFILE)).peak_bytes / MB
    budgets_mb = [needed_mb / (1 - free_mb / 100) + more_mb for more_mb in (-0.1, 0.1)]
    tight, roomy = (
        BudgetStudy(PROFILE, hardware, int(each * MB)).estimate() for each in budgets_mb
    )
    assert roomy.plan.layers == keep_all(PROFILE).layers != tight.plan.layers


def test_a_plan_settles_when_it_needs_what_was_predicted() -> None:
    study = measured_study(100, 30)
    for _ in range(16):
        plan = study.choose(0)
        assert plan.peak_bytes is not None
        run(study, plan.peak_bytes // MB, plan.step_s or 0.0)
        if study.phase is Phase.SETTLED:
            break
    assert study.phase is Phase.SETTLED
    assert study.step.measured is not None
    study.note_peak(10**12)
    assert study.phase is Phase.PLANNED


def test_a_plan_is_searched_for_with_the_memory_in_use_now() -> None:
    plans = [measured_study(100, 30).choose(begin_mb * MB) for begin_mb in (0, 60)]
    copied = [copied_bytes(PROFILE, plan) for plan in plans]
    assert copied[0] < copied[1]
    assert plans[1].peak_bytes is not None and plans[1].peak_bytes <= 97 * MB


def test_the_fastest_plan_that_was_measured_to_fit_stays() -> None:
    """Here the most frugal plan is the fastest, whatever was predicted."""
    study = measured_study(40, 30)
    frugal = study.plan
    for _ in range(30):
        peak_bytes = study.choose(0).peak_bytes or 0
        run(study, peak_bytes // MB, 5.0)
        if study.phase is Phase.SETTLED:
            break
    assert study.phase is Phase.SETTLED
    assert study.plan.layers == frugal.layers
    assert study.step.measured is not None and study.step.measured.step_s == 3.0


@pytest.mark.parametrize(("share", "stays"), [(0.99, True), (0.96, False)])
def test_a_plan_that_needs_less_is_followed_if_it_is_no_slower(share: float, stays: bool) -> None:
    study = measured_study(40, 30)
    frugal = study.plan
    for _ in range(30):
        peak_bytes = study.choose(0).peak_bytes or 0
        run(study, peak_bytes // MB, 3.0 / share)
        if study.phase is Phase.SETTLED:
            break
    assert study.phase is Phase.SETTLED
    assert (study.plan.layers != frugal.layers) is stays


def test_a_plan_that_keeps_everything_stays_whatever_was_measured() -> None:
    """No plan is faster than one that changes nothing; if one seems to be, the machine was busy."""
    study = measured_study(100, 30)
    for _ in range(30):
        peak_bytes = study.choose(0).peak_bytes or 0
        run(study, peak_bytes // MB, 5.0)
        if study.phase is Phase.SETTLED:
            break
    assert study.phase is Phase.SETTLED
    assert study.plan.layers == keep_all(PROFILE).layers


def test_a_fast_plan_that_was_over_does_not_stay() -> None:
    study = measured_study(100, 30)
    for _ in range(12):
        if study.choose(0) and (study.phase, study.stage) == (Phase.PLANNED, Stage.SECONDS):
            break
        peak_bytes = study.choose(0).peak_bytes or 0
        run(study, peak_bytes // MB, 1.0)
    study.choose(0)
    study.learn_seconds(Trace(), 1.0, 101 * MB)
    study.note_peak(101 * MB)
    assert study.phase is Phase.PLANNED
    plan = study.choose(0)
    assert plan.peak_bytes is not None and plan.peak_bytes <= 94 * MB


# ---- on an accelerator, whose host may be late ---------------------------------------------------

ACCELERATOR = make_link(1000.0)


def traced(profile: StepProfile, slower: float) -> Trace:
    """A step whose passes seem to take longer, as they begin when the host gets to them."""
    events, now_s = [], 0.0
    passes = [("forward", index, each.forward_s) for index, each in enumerate(profile.layers)]
    backward = [("backward", index, each.backward_s) for index, each in enumerate(profile.layers)]
    for what, index, took_s in [*passes, *reversed(backward)]:
        events.append(TraceEvent(what, "compute", now_s, now_s + slower * took_s, index))
        now_s += slower * took_s
    return Trace(events)


def test_seconds_that_the_host_adds_are_not_the_layers() -> None:
    profile = make_profile(make_layer(8, 4), make_layer(8, 4))
    plan = keep_all(profile)
    slow = measured_profile(profile, plan, traced(profile, 3.0), 18.0, 0.0, lowest=True)
    assert slow.layers == profile.layers
    quick = measured_profile(profile, plan, traced(profile, 0.5), 3.0, 0.0, lowest=True)
    assert [each.forward_s for each in quick.layers] == [0.5, 0.5]
    assert [each.backward_s for each in quick.layers] == [1.0, 1.0]


def test_a_step_that_tracing_makes_longer_is_not_late() -> None:
    profile = make_profile(*[make_layer(8, 4)] * 4)
    study = BudgetStudy(profile, ACCELERATOR, 60 * MB)
    for _ in range(12):
        plan = study.choose(0)
        assert plan.peak_bytes is not None
        peak_mb = plan.peak_bytes // MB
        if study.stage is Stage.SECONDS:
            step_s = 2 * (plan.step_s or 0.0)
            study.learn_seconds(traced(study.profile, 2.0), step_s, peak_mb * MB)
            study.note_peak(peak_mb * MB)
        else:
            run(study, peak_mb, 12.0)
        if study.phase is Phase.SETTLED:
            break
    assert study.phase is Phase.SETTLED
    measured = study.step.measured
    assert measured is not None
    assert measured.step_s == pytest.approx(study.plan.step_s, rel=0.05)
