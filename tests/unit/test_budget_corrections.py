"""What is measured at each position of a step corrects what is predicted there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ebbtide.devices import Layer
from ebbtide.observe.trace import Trace
from ebbtide.planning import (
    LayerMode,
    LayerPlan,
    LayerProfile,
    Plan,
    StepProfile,
    StepTiming,
    keep_all,
    offload_first,
    place,
)
from ebbtide.planning.budget_study import BudgetStudy, Corrections, Phase, Stage
from ebbtide.planning.recorded import AbstractPasses, PassTrim, PassWatch, copied_bytes
from ebbtide.runtime.events import TraceEvent
from ebbtide.stores import AbstractMemory
from ebbtide.units import format_size
from plan_cases import MB, make_layer, make_link, make_profile

LINK = make_link(1000.0, computes_on_host=True, copy_cost_s_per_mb=1e-4)
PROFILE = make_profile(make_layer(8, 4), make_layer(8, 4, between=True), make_layer(8, 4))
WORKING = dataclasses.replace(
    PROFILE,
    layers=tuple(
        dataclasses.replace(each, forward_working_bytes=20 * MB, backward_working_bytes=20 * MB)
        for each in PROFILE.layers
    ),
)


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


def test_each_pass_has_the_peak_that_was_measured_in_it() -> None:
    watch = watched(1, 2, 3, 4, 5, 6, 7, 8)
    assert watch.is_whole
    # F0 (twice: before the first layer, too), the work after it, F2, the loss, B2, B0.
    assert list(watch.peaks) == [0, 1, 2, 3, 4, 6]
    assert watch.reserved_peak_bytes == 8 * MB


def test_a_backward_stands_for_the_work_before_its_layer() -> None:
    watch = watched(1, 2, 3, 4, 5, 6, 7, 8)
    assert watch.covered(0) == [0]
    assert watch.covered(4) == [4, 5]  # the backward of layer 2, and of the work before it
    assert watch.covered(6) == [6]
    assert watch.covered(3) == [3]  # nothing is between the last layer and the loss


def test_a_step_without_backward_is_not_whole() -> None:
    watch = PassWatch(ScriptedMemory(0, 1, 2, 3, 4, 5), PROFILE)
    for layer in (0, 1):
        watch.begin_forward_of(Layer(layer, ""), ((), {}))
        watch.end_forward_of(Layer(layer, ""))
    watch.end_forward()
    assert not watch.is_whole


def test_a_corrected_profile_predicts_what_was_measured() -> None:
    plan, corrections = keep_all(PROFILE), Corrections()
    watch = watched(40, 41, 42, 43, 44, 45, 46, 47)
    for _ in range(2):  # what is learned twice is not added twice
        corrected = corrections.apply(PROFILE)
        corrections.learn(watch, plan, StepTiming(corrected, LINK).predict(plan))
    found = StepTiming(corrections.apply(PROFILE), LINK).predict(plan).peak_by_position
    for position, peak_bytes in watch.peaks.items():
        assert max(found[each] for each in watch.covered(position)) == peak_bytes


def test_what_was_measured_of_a_recomputed_layer_counts_until_it_has_run_otherwise() -> None:
    again = Plan(
        layers=tuple(
            dataclasses.replace(
                each, mode=LayerMode.AS_IS if layer.between else LayerMode.RECOMPUTE
            )
            for each, layer in zip(keep_all(PROFILE).layers, PROFILE.layers, strict=True)
        )
    )
    corrections = Corrections()
    watch = watched(60, 60, 60, 60, 60, 60, 60, 60)
    corrections.learn(watch, again, StepTiming(PROFILE, LINK).predict(again))
    corrected = corrections.apply(PROFILE)
    assert corrected.layers[2].recompute_working_bytes is not None
    assert corrected.layers[2].backward_working_bytes > PROFILE.layers[2].backward_working_bytes
    assert corrected.layers[2].forward_working_bytes > PROFILE.layers[2].forward_working_bytes


def test_a_plan_that_knows_nothing_outside_layers_keeps_what_is_there() -> None:
    known = place(PROFILE, keep_all(PROFILE))
    assert not known.keeps_outside
    inside = make_profile(make_layer(8), make_layer(8))
    assert place(inside, keep_all(inside)).keeps_outside


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


def test_what_layers_needed_less_while_all_was_offloaded_counts_once_it_was_not() -> None:
    corrections = Corrections()
    offloaded, kept = offload_first(WORKING, 3), keep_all(WORKING)
    for plan in (offloaded, kept):
        corrected = corrections.apply(WORKING)
        predicted = StepTiming(corrected, LINK).predict(plan)
        corrections.learn(watched(*[1] * 8), plan, predicted)
        less = corrections.apply(WORKING)
        cautious = corrections.apply(WORKING, cautious=True)
        counts = cautious.layers[2].backward_working_bytes == less.layers[2].backward_working_bytes
        assert counts is (plan is kept)
        assert less.layers[2].backward_working_bytes < WORKING.layers[2].backward_working_bytes
    known = Corrections()
    known.learn(watched(*[90] * 8), offloaded, StepTiming(WORKING, LINK).predict(offloaded))
    assert known.apply(WORKING, cautious=True) == known.apply(WORKING)  # it needs more: that counts


def test_a_layer_that_was_not_recomputed_yet_may_need_more_then() -> None:
    recomputing = keep_all(WORKING)
    again = LayerPlan(mode=LayerMode.RECOMPUTE)
    recomputing = dataclasses.replace(recomputing, layers=(*recomputing.layers[:2], again))
    corrections = Corrections()
    for measured in (False, True):
        sure, unsure = (corrections.apply(WORKING, unsure_bytes=size) for size in (0, 5 * MB))
        for index, (one, other) in enumerate(zip(sure.layers, unsure.layers, strict=True)):
            more_bytes = 0 if measured and index == 2 else 5 * MB
            assert other.second_working_bytes == one.second_working_bytes + more_bytes
            assert other.unsaved_forward_bytes == (one.unsaved_forward_bytes or 0) + more_bytes
            assert other.forward_working_bytes == one.forward_working_bytes
            assert other.backward_working_bytes == one.backward_working_bytes
        predicted = StepTiming(WORKING, LINK).predict(recomputing)
        corrections.learn(watched(*[90] * 8), recomputing, predicted)


@pytest.mark.parametrize("on_host", [True, False])
def test_only_on_a_cpu_a_plan_leaves_room_for_that(
    monkeypatch: pytest.MonkeyPatch, on_host: bool
) -> None:
    study = measured_study(40, 10, WORKING)
    study._hardware = dataclasses.replace(LINK, computes_on_host=on_host)
    asked: list[int] = []
    apply = Corrections.apply

    def noted(self: Corrections, profile: StepProfile, **options: Any) -> StepProfile:
        asked.append(options["unsure_bytes"])
        return apply(self, profile, **options)

    monkeypatch.setattr(Corrections, "apply", noted)
    study.choose(10 * MB)
    assert asked[0] == (int(0.02 * 40 * MB) if on_host else 0)
    assert asked[1] == 0  # where nothing fits otherwise


def test_a_plan_is_found_where_only_what_was_measured_leaves_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []
    apply = Corrections.apply

    def noted(self: Corrections, profile: StepProfile, **options: Any) -> StepProfile:
        asked.append(options["cautious"])
        return apply(self, profile, **options)

    study = measured_study(40, 10, WORKING)
    monkeypatch.setattr(Corrections, "apply", noted)
    plan = study.choose(10 * MB)  # the process holds more than when that was measured
    assert asked[:2] == [True, False]
    assert (study.phase, study.stage) == (Phase.PLANNED, Stage.WARM_UP)
    assert plan.peak_bytes is not None and plan.peak_bytes <= 40 * MB


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


def until_settled(study: BudgetStudy, step_s: float, more_mb: int = 0) -> Plan:
    """Run steps that need this much more than was predicted; return the plan before it has run."""
    first = study.choose(0)
    for _ in range(16):
        plan = study.choose(0)
        run(study, (plan.peak_bytes or 0) // MB + more_mb, step_s)
        if study.phase is Phase.SETTLED:
            break
    assert study.phase is Phase.SETTLED
    return first


def test_what_is_predicted_of_a_settled_plan_has_what_its_own_steps_showed() -> None:
    study = measured_study(100, 30)
    first = until_settled(study, 2.0, 1)
    step = study.step
    assert step.at_first == (first.peak_bytes, first.step_s)
    assert step.measured is not None and step.plan.peak_bytes is not None
    assert step.plan.peak_bytes // MB == step.measured.peak_bytes // MB
    assert [line.split()[:2] for line in str(step).splitlines()[2:5]] == [
        ["at", "first"],
        ["predicted", format_size(step.plan.peak_bytes).split()[0]],
        ["measured", format_size(step.measured.peak_bytes).split()[0]],
    ]


def test_a_plan_that_is_followed_again_is_predicted_by_its_own_steps() -> None:
    """Not by those of the plan that was tried after it, which took three times as long."""

    def settle(study: BudgetStudy) -> float:
        frugal = study.choose(0).layers
        for _ in range(40):
            plan = study.choose(0)
            if study.phase is Phase.SETTLED:
                break
            first_s = 2.0 if plan.layers == frugal else 6.0
            if study.stage is Stage.SECONDS:
                trace = Trace(list(forwards_and_backwards(first_s)))
                study.learn_seconds(trace, first_s, 30 * MB)
            else:
                run(study, (plan.peak_bytes or 0) // MB, first_s)
        assert study.step.measured is not None and study.step.measured.step_s == 2.0
        return study.step.plan.step_s or 0.0

    assert settle(BudgetStudy(PROFILE, LINK, 46 * MB)) == pytest.approx(2.0, rel=0.1)


def forwards_and_backwards(step_s: float) -> Iterator[TraceEvent]:
    """A step of the two layers in `PROFILE`, each pass of which takes a quarter."""
    passes = [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)]
    for number, (what, layer) in enumerate(passes):
        begin_s, end_s = number * step_s / 4, (number + 1) * step_s / 4
        yield TraceEvent(what=what, lane="compute", begin_s=begin_s, end_s=end_s, layer=layer)


def test_a_settled_plan_that_was_measured_to_fit_is_predicted_to_fit() -> None:
    """Other plans' steps have raised what is predicted of it: their copies came late."""
    study = measured_study(100, 30)
    until_settled(study, 2.0)
    study._slower, study._slack_bytes = 4.0, 90 * MB
    study._end_search()
    assert study.step.measured is not None
    assert study.step.plan.peak_bytes == 100 * MB


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


def test_copies_are_learned_to_cost_what_they_make_steps_longer() -> None:
    study = measured_study(100, 30)
    assert study.step.hardware.copy_cost_s_per_byte == LINK.copy_cost_s_per_byte
    frugal_bytes = copied_bytes(PROFILE, study.plan)
    plan = study.choose(0)
    less_bytes = frugal_bytes - copied_bytes(PROFILE, plan)
    assert less_bytes > 0
    event = TraceEvent(what="offload", lane="d2h", begin_s=0.0, end_s=1e-3)
    study.stage = Stage.SECONDS
    study.learn_seconds(Trace([event]), 2.99, 30 * MB)
    cost = study.step.hardware.copy_cost_s_per_byte
    assert cost == pytest.approx(0.01 / less_bytes)


def test_copied_bytes_count_both_directions_and_shared_memory_once() -> None:
    """8 and 4 MB of each of three layers, down and up."""
    plan = offload_first(PROFILE, 3)
    assert copied_bytes(PROFILE, plan) == 2 * 3 * 12 * MB
    assert copied_bytes(PROFILE, keep_all(PROFILE)) == 0


def test_less_caution_after_steps_that_needed_less() -> None:
    study = measured_study(100, 30)
    before = study._slower
    run(study, 10, 3.0)
    run(study, 10, 3.0)
    assert study._slower < before
    study.choose(0)
    study.stage = Stage.MEMORY
    study.learn_memory(watched(*[101] * 8), 3.0)
    assert study._slower == before


# ---- freed memory --------------------------------------------------------------------------------


class CountingMemory(ScriptedMemory):
    """A memory that counts how often what was freed is returned."""

    num_returned = 0

    def return_freed(self) -> None:
        self.num_returned += 1


@pytest.mark.parametrize("follow", [PassTrim, lambda memory: PassWatch(memory, PROFILE)])
def test_freed_memory_is_returned_before_each_pass_whether_it_is_measured_or_not(
    follow: Callable[[AbstractMemory], AbstractPasses],
) -> None:
    memory = CountingMemory(50)
    passes = follow(memory)
    before = memory.num_returned
    for number, enter in enumerate(
        (
            lambda: passes.begin_forward_of(Layer(0, ""), ((), {})),
            lambda: passes.end_forward_of(Layer(0, "")),
            passes.end_forward,
            lambda: passes.begin_backward_of(0),
        )
    ):
        enter()
        assert memory.num_returned == before + number + 1


@pytest.mark.parametrize("mode", [LayerMode.RECOMPUTE, LayerMode.RECOMPUTE_OFFLOAD])
def test_inputs_of_recomputed_layers_stay_or_leave(mode: LayerMode) -> None:
    layer = LayerProfile(name="layer", forward_s=1.0, backward_s=1.0, input_bytes=4)
    placed = place(make_profile(layer), Plan(layers=(LayerPlan(mode=mode),)))
    assert placed.recomputed == {0}
    assert placed.kept_inputs == ({0} if mode is LayerMode.RECOMPUTE else set())
