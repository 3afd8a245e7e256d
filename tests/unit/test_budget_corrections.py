"""What is measured at each position of a step corrects what is predicted there."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from ebbtide import Trace, TraceEvent
from ebbtide.devices import Layer, SimulatedDevice
from ebbtide.errors import BudgetError
from ebbtide.observe.passes import PassWatch
from ebbtide.planning import (
    CautiousTiming,
    Decision,
    LayerPlan,
    Plan,
    StepAhead,
    StepProfile,
    StepTiming,
    StorageId,
    keep_all,
    rule_plans,
)
from ebbtide.planning.budget_study import BudgetStudy, Corrections, Phase
from ebbtide.planning.recorded import copied_bytes, measured_profile
from ebbtide.runtime.stats import Account, Owner
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


def account() -> Account:
    return Account(SimulatedDevice(0), traced=False)


class SavedBytes:
    """A record of a storage."""

    source_address = None
    unread = 0

    def __init__(self, size_mb: int, held_by_program: object = None) -> None:
        self.size_bytes = size_mb * MB
        self.find_storage = lambda: held_by_program


def watched(*peaks_mb: int, profile: StepProfile = PROFILE) -> PassWatch:
    """A step with these peaks; of `PROFILE`, they are of F0, F1, F2, the loss, B2, B0."""
    watch = PassWatch(ScriptedMemory(0, *peaks_mb), account(), profile)
    count = sum(not each.between for each in profile.layers)
    for call in range(count):
        watch.begin_forward_of(Layer(call, ""), ((), {}))
        watch.end_forward_of(Layer(call, ""))
    watch.end_forward()
    for call in reversed(range(count)):
        watch.begin_backward_of(call)
    watch.finish()
    return watch


def test_a_corrected_profile_predicts_what_was_measured() -> None:
    plan, corrections = keep_all(PROFILE), Corrections(PROFILE)
    timing = StepTiming(PROFILE, LINK, more=corrections.more_bytes)
    watch = watched(40, 41, 42, 43, 44, 45, 46, 47)
    for _ in range(2):  # what is learned twice is not added twice
        corrections.learn(watch, plan, timing.predict(plan))
    corrected = StepTiming(corrections.apply(PROFILE, plan), LINK)
    for found in (timing.predict(plan).peak_by_position, corrected.predict(plan).peak_by_position):
        for position, peak_bytes in watch.peaks.items():
            assert max(found[each] for each in watch.covered(position)) == peak_bytes


def test_a_layer_that_needs_less_than_it_saves_is_predicted_to() -> None:
    """What it offloads is never there at one time. Measured again, more is not less than that."""
    profile, corrections = make_profile(make_layer(8, 4)), Corrections(make_profile(make_layer(8)))
    timing = StepTiming(profile, LINK, more=corrections.more_bytes)
    plan = BudgetStudy(profile, LINK, 0).plan
    for peak_mb in (9, 15):
        watch = watched(*[peak_mb] * 4, profile=profile)
        corrections.learn(watch, plan, timing.predict(plan))
        assert set(timing.predict(plan).peak_by_position) == {peak_mb * MB}


def test_what_is_under_way_when_a_pass_begins_comes_on_top_of_what_was_measured_there() -> None:
    """The memory of a pass is measured when all copies of the passes before have been awaited."""
    link, profile = make_link(1.0), make_profile(make_layer(10), make_layer(10))
    plan = Plan(layers=BudgetStudy(profile, link, 0).plan.layers, windows=(20 * MB,) * 5)
    watch = watched(0, 10, 0, 25, 0, 0, 10, 10, 0, profile=profile)
    corrections = Corrections(profile)
    corrections.learn(watch, plan, StepTiming(profile, link, awaits_copies=True).predict(plan))
    late = CautiousTiming(profile, link, more=corrections.more_bytes).predict(plan)
    assert watch.peaks[1] == 25 * MB
    assert late.peak_by_position[1] == 35 * MB  # the first layer's copy has just begun


def test_what_is_under_way_when_backward_begins_stays_after_it_has_been_read() -> None:
    """Measured, two storages of 10 MB go one by one; what is still being copied cannot go."""
    link, profile = make_link(1.0), make_profile(make_layer(10, 10))
    plan = Plan(layers=BudgetStudy(profile, link, 0).plan.layers, max_inflight_bytes=20 * MB)
    corrections = Corrections(profile)
    timing = StepTiming(profile, link, awaits_copies=True, more=corrections.more_bytes)
    watch = watched(0, 20, 0, 0, 25, 0, profile=profile)
    corrections.learn(watch, plan, timing.predict(plan))
    assert timing.predict(plan).peak_by_position[2] == watch.peaks[2] == 25 * MB
    late = CautiousTiming(profile, link, more=corrections.more_bytes).predict(plan)
    assert late.peak_by_position[2] == 45 * MB


def test_a_layer_that_runs_again_needs_what_its_forward_does_then() -> None:
    """It saves 10 MB. Beside them its forward uses 20 MB, or 30 MB if they stay; backward 5 MB.

    At first, its operations run again while what it saves is there, to prove them.
    """
    profile = make_profile(make_layer(10))
    study, corrections = BudgetStudy(profile, LINK, 0), Corrections(profile)
    watch = watched(0, 30, 0, 0, 15, 0, profile=profile)
    corrections.learn(watch, study.plan, StepTiming(profile, LINK).predict(study.plan))
    again = dict(rule_plans(profile))["recompute all"]
    timing = StepTiming(profile, LINK, more=corrections.more_bytes)
    peaks = timing.predict(again).peak_by_position
    assert (peaks[0], peaks[2]) == (40 * MB, 40 * MB)
    corrections.learn(watch, again, timing.predict(again))
    assert timing.predict(again).peak_by_position[0] == 30 * MB


def test_after_a_measured_step_copies_get_the_room_that_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second forward needs 15 MB more than was predicted; its window was for less."""
    monkeypatch.setattr("ebbtide.planning.budget_study._QUICK_S", 60.0)  # on a busy machine, too
    profile = make_profile(*[make_layer(10)] * 4)
    study = BudgetStudy(profile, make_link(10.0), 36 * MB)
    offloaded = watched(0, *[10, 0] * 4, *[10] * 6, profile=profile)
    study.learn(traced(profile, 1.0), 12.0, 20 * MB, offloaded)
    plan = study.choose(0)
    assert plan.windows[1] > 0
    closed = StepTiming(profile, make_link(10.0), awaits_copies=True).predict(plan)
    needed_mb = closed.peak_by_position[1] // MB + 15
    more = watched(0, 10, 0, needed_mb, 0, *[10, 0] * 2, *[10] * 6, profile=profile)
    study.learn(traced(profile, 1.0), 12.0, 30 * MB, more)
    assert study.plan.limit_bytes is not None
    assert study.plan.windows[1] == max(0, study.plan.limit_bytes - needed_mb * MB)


def test_a_layer_that_keeps_what_it_saves_needs_more_than_one_that_offloads_it() -> None:
    """Offloaded, its tensors are there one by one; kept, all of them beside the most that it uses.

    A layer saves two tensors of 10 MB, and needs 20 MB in its backward, between letting go of them.
    """
    layer = make_layer(10, 10)
    profile, saved = make_profile(layer), account()
    memory = ScriptedMemory(0, 1, 11, 12, 12, 12, 2, 2, 2, 2, 12, 30, 12, 2)
    watch = PassWatch(memory, saved, profile)
    saved.passes = watch
    watch.begin_forward_of(Layer(0, ""), ((), {}))
    records = [SavedBytes(10) for _ in range(2)]
    for record in records:  # each is saved, and leaves
        for size in (10, -10):
            saved.take(size * MB, Owner.KEPT, record)
    watch.end_forward_of(Layer(0, ""))
    watch.end_forward()
    watch.begin_backward_of(0)
    for record in records:  # each comes back, is read, and let go of
        for size in (10, -10):
            saved.take(size * MB, Owner.RELOADED, record)
    watch.finish()
    assert (watch.working[0], watch.working[2]) == (2 * MB, 20 * MB)
    study = BudgetStudy(profile, LINK, 100 * MB)
    corrections = Corrections(profile)
    offloaded = study.plan
    corrections.learn(watch, offloaded, StepTiming(profile, LINK).predict(offloaded))
    together = dataclasses.replace(offloaded, windows=(0, 0, 0))  # there all at once in each pass
    for plan, needed_mb in ((offloaded, 30), (together, 40), (keep_all(profile), 40)):
        timing = StepTiming(profile, LINK, more=corrections.more_bytes)
        assert timing.predict(plan).peak_by_position[2] == needed_mb * MB


def test_a_layer_needs_no_more_in_another_way_than_what_stays_beside_what_it_needed() -> None:
    """Its forward saves three tensors of 10 MB and uses 20 MB when they have all gone.

    The first one was rebuilt. Offloaded, it is there until its copy is complete.
    """
    layer = make_layer(10, 10, 10)
    recipe = {"sources": (StorageId(0, 0),), "rebuild_s": 0.0}
    rebuilt = dataclasses.replace(layer.storages[1], **recipe)
    layer = dataclasses.replace(layer, storages=(layer.storages[0], rebuilt, layer.storages[2]))
    profile, saved = make_profile(layer), account()
    watch = PassWatch(ScriptedMemory(0, 0, *[10] * 7, 20), saved, profile)
    saved.passes = watch
    watch.begin_forward_of(Layer(0, ""), ((), {}))
    for _ in layer.storages:
        record = SavedBytes(10)
        for size in (10, -10):
            saved.take(size * MB, Owner.KEPT, record)
    saved.take(0, Owner.KEPT, SavedBytes(0))
    watch.end_forward_of(Layer(0, ""))
    watch.end_forward()
    watch.begin_backward_of(0)
    watch.finish()
    assert (watch.peaks[0], watch.working[0]) == (20 * MB, 20 * MB)
    keep, leave, rebuild = Decision.KEEP, Decision.OFFLOAD, Decision.REBUILD

    def learned(*decisions: Decision) -> StepTiming:
        """What predicts steps after one in which the layer's storages had these fates."""
        corrections, plan = Corrections(profile), Plan(layers=(LayerPlan(decisions=decisions),))
        timing = StepTiming(profile, LINK, more=corrections.more_bytes)
        corrections.learn(watch, plan, timing.predict(plan))
        return timing

    timing = learned(leave, rebuild, leave)
    for decisions, needed_mb in (
        ((leave, rebuild, leave), 20),
        ((leave, leave, leave), 30),
        ((leave, keep, leave), 30),
        ((keep, rebuild, leave), 30),
        ((keep, keep, leave), 40),
        ((keep, leave, keep), 50),
        ((keep, keep, keep), 50),
    ):
        plan = Plan(layers=(LayerPlan(decisions=decisions),))
        assert timing.predict(plan).peak_by_position[0] == needed_mb * MB
    plan = Plan(layers=(LayerPlan(decisions=(leave, leave, leave)),), windows=(0, 0, 0))
    assert timing.predict(plan).peak_by_position[0] == 50 * MB  # there all the time in its pass
    rebuilt_too = Plan(layers=(LayerPlan(decisions=(leave, rebuild, leave)),))
    assert learned(leave, leave, leave).predict(rebuilt_too).peak_by_position[0] == 30 * MB
    left_too = Plan(layers=(LayerPlan(decisions=(leave, leave, leave)),))
    assert learned(keep, leave, leave).predict(left_too).peak_by_position[0] == 20 * MB


def used_beside(watch: PassWatch, what: str, changes: list[tuple[int, SavedBytes]]) -> int:
    """MB that one pass is taken to use beside what it saves, after these changes of saved bytes."""
    account = watch._account
    account.passes = watch
    if what == "forward":
        watch.begin_forward_of(Layer(0, ""), ((), {}))
    else:
        watch.begin_backward_of(0)
    for size_mb, record in changes:
        account.take(size_mb * MB, Owner.LEAVING, record)
    watch.end_forward()
    return watch.working[0 if what == "forward" else 2] // MB


@pytest.mark.parametrize(("holds", "more_mb"), [(True, 1), (False, 11)])
def test_what_the_program_holds_after_it_has_left_counts_once(holds: bool, more_mb: int) -> None:
    """A layer saves 10 MB, its input perhaps. It uses 11 MB before they have left, and after."""
    memory = ScriptedMemory(0, 1, 11, 11, 11, 11)
    watch = PassWatch(memory, account(), make_profile(make_layer(10)))
    record = SavedBytes(10, "its input" if holds else None)
    changes = [(10, record), (-10, record), (0, SavedBytes(0))]
    assert used_beside(watch, "forward", changes) == more_mb


def test_what_a_backward_lets_go_of_to_make_room_comes_again() -> None:
    """It is read in the end, and so is there all the time if it stays."""
    memory = ScriptedMemory(0, 0, 10, 0, 10, 5, 5)
    watch = PassWatch(memory, account(), make_profile(make_layer(10)))
    record = SavedBytes(10)
    record.unread = 1
    changes = [(10, record), (-10, record)]
    assert used_beside(watch, "backward", changes) == 10  # 0 MB were used while it was there


@pytest.mark.parametrize("changes", [False, True])
def test_a_layer_that_changes_its_input_saves_a_copy_of_it_to_be_recomputed(changes: bool) -> None:
    record = SimpleNamespace(layer=None, number=3)
    watch = PassWatch(ScriptedMemory(0), account(), find=lambda *_: record)  # type: ignore[arg-type]
    x = torch.zeros(4)
    watch.begin_forward_of(Layer(0, "block"), ((x,), {}))
    if changes:
        x.add_(1)
    watch.end_forward_of(Layer(0, "block"))
    (call,) = watch.calls
    assert (call.input_bytes, call.source) == (16, None if changes else (None, 3))


# ---- studies -------------------------------------------------------------------------------------


def run(study: BudgetStudy, peak_mb: int, step_s: float) -> Plan:
    """Run one step that needs this much memory and time."""
    plan = study.choose(0)
    if study.phase is Phase.SETTLED:
        study.note(peak_mb * MB, step_s)
    else:
        watch = watched(*[peak_mb] * 8)
        study.learn(traced(study.profile, 1.0), step_s, watch.peak_bytes, watch)
    return plan


def traced(profile: StepProfile, slower: float) -> Trace:
    """A step whose passes seem to take longer, as they begin when the host gets to them."""
    events, now_s = [], 0.0
    calls = [each for each in profile.layers if not each.between]
    passes = [("forward", index, each.forward_s) for index, each in enumerate(calls)]
    backward = [("backward", index, each.backward_s) for index, each in enumerate(calls)]
    for what, index, took_s in [*passes, *reversed(backward)]:
        events.append(TraceEvent(what, "compute", now_s, now_s + slower * took_s, index))
        now_s += slower * took_s
    return Trace(events)


def measured_study(budget_mb: int, peak_mb: int, profile: StepProfile = PROFILE) -> BudgetStudy:
    """A study that has measured its frugal step."""
    study = BudgetStudy(profile, LINK, budget_mb * MB)
    assert study.phase is Phase.FRUGAL
    run(study, peak_mb, 3.0)
    return study


def test_plans_leave_a_margin_and_what_steps_were_over() -> None:
    study = measured_study(100, 30)
    plan = study.choose(0)
    assert study.phase is Phase.PLANNED
    assert plan.peak_bytes is not None and plan.peak_bytes <= 94 * MB  # twice, at first
    study.note(140 * MB, 1.0)
    plan = study.choose(0)
    assert plan.peak_bytes is not None and plan.peak_bytes <= 57 * MB


@pytest.mark.parametrize(("on_host", "free_mb"), [(True, 3), (False, 5)])
def test_an_accelerator_has_a_larger_margin(on_host: bool, free_mb: int) -> None:
    """Its allocator keeps what does not fit; large blocks of a process are mapped one by one.

    The first plan leaves twice the margin.
    """
    hardware = make_link(1000.0, computes_on_host=on_host)
    needed_mb = StepTiming(PROFILE, hardware).predict(keep_all(PROFILE)).peak_bytes / MB
    plans = []
    for more_mb in (-0.1, 0.1):
        study = BudgetStudy(PROFILE, hardware, int((needed_mb / (1 - free_mb / 50) + more_mb) * MB))
        study.learn(traced(PROFILE, 1.0), 9.0, MB)
        plans.append(study.choose(0).layers)
    assert plans[0] != keep_all(PROFILE).layers == plans[1]


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
    study.note(10**12, 1.0)
    assert study.phase is Phase.CORRECTED


def test_a_plan_is_searched_for_with_the_memory_in_use_now() -> None:
    plans = [measured_study(100, 30).choose(begin_mb * MB) for begin_mb in (0, 60)]
    copied = [copied_bytes(PROFILE, plan) for plan in plans]
    assert copied[0] < copied[1]
    assert plans[1].peak_bytes is not None and plans[1].peak_bytes <= 97 * MB


def test_a_plan_that_fitted_before_the_optimizer_had_states_does_not_stay() -> None:
    study = measured_study(40, 30)
    with pytest.raises(BudgetError) as raised:
        study.choose(40 * MB)  # too far over to be tried
    assert raised.value.smallest_bytes >= 70 * MB


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


@pytest.mark.parametrize(("share", "stays"), [(0.9, True), (0.8, False)])
def test_a_plan_stays_unless_an_earlier_one_was_clearly_faster(share: float, stays: bool) -> None:
    """Each plan is measured in one step, and steps of one plan differ by up to a tenth."""
    study = measured_study(60, 30)
    frugal = study.plan
    for _ in range(4):
        peak_bytes = study.choose(0).peak_bytes or 0
        run(study, peak_bytes // MB, 3.0 / share)
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
    fast = run(study, 101, 1.0)
    assert study.phase is Phase.CORRECTED
    plan = study.choose(0)
    assert plan.layers != fast.layers
    assert plan.peak_bytes is not None and plan.peak_bytes <= 94 * MB


@pytest.mark.parametrize(
    ("peaks_mb", "phases"),
    [
        ((30, None, None), (Phase.PLANNED, Phase.CORRECTED, Phase.SETTLED)),
        ((30, 30, None), (Phase.PLANNED, Phase.CORRECTED, Phase.SETTLED)),
        ((30, 50, None), (Phase.PLANNED, Phase.CORRECTED, Phase.SETTLED)),
        ((30, None, None, 50), (Phase.PLANNED, Phase.CORRECTED, Phase.SETTLED, Phase.CORRECTED)),
    ],
    ids=["as predicted", "less", "over", "over later"],
)
def test_a_plan_is_corrected_once_unless_a_step_was_over(
    peaks_mb: tuple[int | None, ...], phases: tuple[Phase, ...]
) -> None:
    """None is what was predicted."""
    study = BudgetStudy(PROFILE, LINK, 46 * MB)
    found = []
    for peak_mb in peaks_mb:
        plan = study.choose(0)
        assert plan.peak_bytes is not None
        run(study, peak_mb or plan.peak_bytes // MB, plan.step_s or 3.0)
        found.append(study.phase)
    assert tuple(found) == phases


# ---- on an accelerator, whose host may be late ---------------------------------------------------

ACCELERATOR = make_link(1000.0)


def test_seconds_that_the_host_adds_are_not_the_layers() -> None:
    profile = make_profile(make_layer(8, 4), make_layer(8, 4))
    plan = keep_all(profile)
    slow = measured_profile(profile, plan, traced(profile, 3.0), 18.0, ACCELERATOR, is_first=False)
    assert slow.layers == profile.layers
    quick = measured_profile(profile, plan, traced(profile, 0.5), 3.0, ACCELERATOR, is_first=False)
    assert [each.forward_s for each in quick.layers] == [0.5, 0.5]
    assert [each.backward_s for each in quick.layers] == [1.0, 1.0]


def test_layers_that_are_alike_take_equally_long() -> None:
    """One that offloads more keeps the host busy for longer, and one that runs again does not."""
    slow = {"forward_s": 3.0, "backward_s": 4.0}
    profile = make_profile(
        make_layer(8, 4, name="blocks.0", **slow),
        make_layer(8, 4, name="blocks.1", recompute_s=0.5),
        make_layer(8, 5, name="blocks.2", **slow),
        make_layer(8, 4, name="head.0", **slow),
    )
    plan, events = keep_all(profile), traced(profile, 1.0)
    found = measured_profile(profile, plan, events, 20.0, ACCELERATOR, is_first=True).layers
    assert [each.forward_s for each in found] == [0.5, 0.5, 3.0, 3.0]
    assert [each.backward_s for each in found] == [2.0, 2.0, 4.0, 4.0]
    assert [each.recompute_s for each in found] == [0.5, 0.5, None, None]


def test_updates_take_as_long_as_the_worker_was_measured_to_take() -> None:
    """It reads and writes 56 MB for an update, 48 MB to fill shadows, and then 16 MB to commit."""
    sizes = {"weight_bytes": 8 * MB, "gradient_bytes": 8 * MB, "optimizer_bytes": 16 * MB}
    layer = make_layer(8, 4, host_update_s=9.0, **sizes)
    profile = make_profile(layer, layer, ahead=StepAhead(10**9))
    layers = (dataclasses.replace(each, weights_on_host=True) for each in keep_all(profile).layers)
    plan = Plan(layers=tuple(layers))
    step = TraceEvent("step", "cpu_optimizer", 4.0, 5.04, size_bytes=8 * MB)
    events = Trace([*traced(profile, 1.0).events, step])
    found = measured_profile(profile, plan, events, 20.0, ACCELERATOR, is_first=True)
    assert [each.host_update_s for each in found.layers] == pytest.approx([0.56, 0.56])
    # Six seconds of passes; then the last layer's update, and the copies of the other one's.
    assert found.after_s == pytest.approx(20 - 6 - 0.56 - 0.16)


@pytest.mark.parametrize(("budget_mb", "is_timed"), [(40, True), (30, False)])
def test_a_step_is_timed_where_nobody_need_wait(budget_mb: int, is_timed: bool) -> None:
    """Measured, it needs 28 MB, as copies are awaited; otherwise, 8 MB more may be under way."""
    profile = make_profile(*[make_layer(8, 4)] * 4)
    study = BudgetStudy(profile, ACCELERATOR, budget_mb * MB)
    assert not study.is_to_be_timed
    study.learn_memory(watched(*[28] * 9, profile=profile))
    assert study.is_to_be_timed is is_timed


def test_a_plan_that_leaves_no_margin_is_better_than_none() -> None:
    """The least that is predicted is 18 MB. They fit into 18.5 MB; 5% of that are 0.9 MB."""
    profile = make_profile(*[make_layer(8, 8, 8)] * 4)
    study = BudgetStudy(profile, ACCELERATOR, 18_500_000)
    study.weights_can_leave = True  # otherwise a plan that is only near the budget is tried
    study.learn(traced(profile, 1.0), 9.0, 25 * MB, watched(*[10] * 9, profile=profile))
    assert study.choose(0).peak_bytes == 18 * MB


def test_a_step_that_measuring_makes_longer_is_not_late() -> None:
    profile = make_profile(*[make_layer(8, 4)] * 4)
    study = BudgetStudy(profile, ACCELERATOR, 60 * MB)
    for _ in range(4):
        plan = study.choose(0)
        assert plan.peak_bytes is not None
        if study.phase is Phase.SETTLED:
            break
        peaks = watched(*[plan.peak_bytes // MB] * 9, profile=profile)
        step_s = 2 * (plan.step_s or 6.0)
        study.learn(traced(study.profile, 2.0), step_s, peaks.peak_bytes, peaks)
    assert study.phase is Phase.SETTLED
    measured = study.step.measured
    assert measured is not None
    assert measured.step_s == pytest.approx(study.plan.step_s, rel=0.05)


def test_weights_that_a_step_leaves_on_the_device_are_not_needed_twice_in_the_next_one() -> None:
    """Between steps, the buffers of two layers hold weights that rest on the host."""
    sizes = {"weight_bytes": MB, "gradient_bytes": MB}
    profile = make_profile(*[make_layer(8, name=str(each), **sizes) for each in range(4)])
    peaks = []
    for buffer_mb in (0, 2):
        study = BudgetStudy(profile, ACCELERATOR, 100 * MB)
        study.note_weights(0, buffer_mb * MB, 0)
        measured = watched(*[12] * 14, profile=profile)
        measured.begin_bytes = (1 + buffer_mb) * MB
        study.learn_memory(measured)
        assert max(measured.peaks.values()) == 12 * MB
        peaks.append((study._begin_bytes, study.step.profile.layers[0].forward_working_bytes))
    assert peaks[0] == peaks[1]
    assert peaks[0][0] == MB


def test_weights_that_have_just_come_need_more_in_the_next_step() -> None:
    """The optimizer's state is new on the device, and comes when this step ends."""
    sizes = {"weight_bytes": MB, "gradient_bytes": MB, "optimizer_bytes": 2 * MB}
    layers = [make_layer(8, name=str(each), **sizes) for each in range(4)]
    profile = make_profile(*layers, keeps_gradients=False)
    study = BudgetStudy(profile, ACCELERATOR, 100 * MB)
    study.learn(traced(profile, 1.0), 9.0, 30 * MB, watched(*[9] * 14, profile=profile))
    plan = study.choose(0)
    assert not plan.has_weights_on_host and plan.peak_bytes is not None
    timing = StepTiming(profile, ACCELERATOR, more=study._corrections.more_bytes)
    peaks = timing.predict(plan).peak_by_position
    # Each pass needs what was predicted, but for the state of all layers.
    forward = [each for peak in peaks[:4] for each in (peak, 0)]
    passes = [peaks[0], *forward, *peaks[4:], 0]
    study.note_weights(4 * MB, 0, 0)
    measured = watched(*[max(0, each // MB - 8) for each in passes], profile=profile)
    measured.begin_bytes = 4 * MB
    study.learn(traced(profile, 1.0), 9.0, 20 * MB, measured)
    assert study.choose(0).peak_bytes == plan.peak_bytes


def test_what_an_optimizer_computes_at_once_counts_where_no_weights_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is taken to be as much as the weights until a step has had all of them on the device."""
    ends_mb = iter((9, 16 + 9 + 5))
    monkeypatch.setattr(PassWatch, "end_peak_bytes", property(lambda _: next(ends_mb) * MB))
    sizes = {"weight_bytes": MB, "gradient_bytes": MB, "optimizer_bytes": 2 * MB}
    profile = make_profile(*[make_layer(8, name=str(each), **sizes) for each in range(4)])
    study = BudgetStudy(profile, ACCELERATOR, 100 * MB)
    for at_once_mb in (40, 5):
        study.note_weights(0, 0, 40 * MB)
        measured = watched(*[9] * 14, profile=profile)
        study.learn(traced(profile, 1.0), 9.0, 9 * MB, measured)
        assert study.plan.has_weights_on_host is (at_once_mb == 40)
        plan = study.choose(0)
        assert not plan.has_weights_on_host
        assert plan.peak_bytes == (16 + 9 + at_once_mb) * MB
    study.note_weights(16 * MB, 0, 40 * MB)
    assert study.step.profile.at_once_bytes == 5 * MB


def test_a_processor_steps_its_weights_one_after_the_other() -> None:
    profile = make_profile(make_layer(8, weight_bytes=MB, gradient_bytes=MB))
    study = BudgetStudy(profile, LINK, 100 * MB)
    study.note_weights(0, 0, 40 * MB)
    assert study.step.profile.at_once_bytes == 0


def test_what_is_in_use_throughout_is_not_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backward was seen to end in the step with weights at rest."""
    ends_mb = iter((0, 4 + 12 + 5))
    monkeypatch.setattr(PassWatch, "end_peak_bytes", property(lambda _: next(ends_mb) * MB))
    sizes = {"weight_bytes": MB, "gradient_bytes": MB, "optimizer_bytes": 2 * MB}
    profile = make_profile(make_layer(8, **sizes))
    study = BudgetStudy(profile, ACCELERATOR, 100 * MB)
    for there_mb in (0, 4):
        study.note_weights(there_mb * MB, 0, 40 * MB)
        measured = watched(*[9] * 5, profile=profile)
        measured.begin_bytes = (12 + there_mb) * MB
        study.learn(traced(profile, 1.0), 9.0, 9 * MB, measured)
        study.choose((12 + there_mb) * MB)
    assert study.step.profile.at_once_bytes == 5 * MB


@pytest.mark.parametrize("had_gradients", [False, True])
def test_a_step_with_weights_at_rest_is_known_from_one_without(
    had_gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass needs 9 MB beside what was there: with all gradients, or with those that have come.

    The loop holds 1 MB throughout. At the end of the step, the optimizer computes 3 MB.
    """
    bare = make_profile(*[make_layer(8, name=str(each)) for each in range(3)])
    before_mb = 1 + 6 + (3 if had_gradients else 0)
    came_mb = [0, 0, 0] if had_gradients else [1, 2, 3]
    peaks_mb = [before_mb + 9 + each for each in (*[0] * 8, *came_mb)]
    measured = watched(*peaks_mb, profile=bare)
    measured.begin_bytes, measured.has_gradients = before_mb * MB, had_gradients
    end_mb = before_mb + came_mb[-1] + 3
    monkeypatch.setattr(PassWatch, "end_peak_bytes", property(lambda _: end_mb * MB))
    there = BudgetStudy(bare, ACCELERATOR, 100 * MB)
    there.learn_memory(measured)
    there.choose(before_mb * MB)

    sizes = {"weight_bytes": 2 * MB, "gradient_bytes": MB}
    profile = make_profile(*(dataclasses.replace(each, **sizes) for each in bare.layers))
    study = BudgetStudy(profile, ACCELERATOR, 100 * MB, MB)
    study.learn_from(there)
    plan = study.choose(MB)
    assert plan.has_weights_on_host
    # Eight of the nine are what a layer saves, which no layer does in the loss.
    assert [each / MB for each in study._corrections.more_bytes(plan)] == [1, 1, 1, 9, 1, 1, 1]
    # Recomputed, they need no more than if all that they save stays.
    again = study._corrections.more_bytes(plan, again=True)
    assert again[4:] == [(before_mb + 9) * MB] * 3
    assert study.step.profile.after_working_bytes == 3 * MB


def test_gradients_that_calls_share_are_in_use_in_all_passes_between_them() -> None:
    sizes = {"weight_bytes": 2 * MB, "gradient_bytes": MB}
    twice, other = make_layer(8, name="twice", **sizes), make_layer(8, name="other", **sizes)
    profile = make_profile(twice, other, make_layer(8, name="twice"))
    study = BudgetStudy(profile, ACCELERATOR, 100 * MB)
    study.learn_memory(watched(*[20] * 8, *[30] * 3, profile=profile))
    again = study._corrections.more_bytes(study.plan, again=True)
    assert again[4:] == [29 * MB, 28 * MB, 29 * MB]


@pytest.mark.parametrize(("budget_mb", "fits"), [(33, True), (30, False)])
def test_weights_leave_after_the_first_step_if_no_plan_fits(budget_mb: int, fits: bool) -> None:
    """Measured, it needs 28 MB, as copies are awaited; the most frugal plan needs 32 otherwise."""
    profile = make_profile(*[make_layer(8, 4)] * 4)
    study = BudgetStudy(profile, ACCELERATOR, budget_mb * MB)
    study.weights_can_leave = True
    study.learn_memory(watched(*[28] * 9, profile=profile))
    with contextlib.nullcontext() if fits else pytest.raises(BudgetError):
        study.choose(0)


def test_the_state_of_an_optimizer_that_has_not_stepped_is_expected() -> None:
    """The loop adds up gradients. An Adam makes 2 x 3 MB, and computes 3 MB more in its step."""
    profile = make_profile(*[make_layer(8)] * 3)
    study = BudgetStudy(profile, ACCELERATOR, 100 * MB, MB)
    study.expect_state(3 * MB)
    measured = watched(*[12] * 11, profile=profile)
    measured.begin_bytes, measured.has_update = MB, False
    study.learn_memory(measured)
    study.choose(MB)
    found = study.step.profile
    assert (found.fixed_bytes, found.at_once_bytes) == (7 * MB, 3 * MB)
    assert found.after_working_bytes == 0
    # What was measured had no state yet, so that passes with it need so much more.
    assert max(study._predict_measured().peak_by_position) == (12 + 6) * MB
    # When it has stepped, all is known.
    study.learn_state(6 * MB, {})
    assert not study.expects_state
    study.choose(7 * MB)
    assert study.step.profile.fixed_bytes == 7 * MB


@pytest.mark.parametrize(("state_mb", "is_planned_again"), [(6, False), (3, True), (9, True)])
def test_a_plan_for_another_state_than_the_optimizer_has_is_made_again(
    state_mb: int, is_planned_again: bool
) -> None:
    profile = make_profile(*[make_layer(8, 4)] * 4)
    study = BudgetStudy(profile, ACCELERATOR, 60 * MB)
    study.expect_state(3 * MB)
    for _ in range(4):
        plan = study.choose(0)
        peaks = watched(*[(plan.peak_bytes or 0) // MB - 6] * 9, profile=profile)
        peaks.has_update = False
        study.learn(traced(study.profile, 2.0), plan.step_s or 9.0, peaks.peak_bytes, peaks)
    assert study.phase is Phase.SETTLED
    study.learn_state(state_mb * MB, {})
    assert (study.phase is not Phase.SETTLED) is is_planned_again
