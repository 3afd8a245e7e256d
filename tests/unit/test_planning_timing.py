"""Predicted steps from arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.errors import PolicyError
from ebbtide.planning import (
    CautiousTiming,
    Decision,
    LayerMode,
    LayerPlan,
    Plan,
    Prediction,
    SavedStorage,
    StepAhead,
    StepProfile,
    StepTiming,
    StorageId,
    keep_all,
    offload_first,
)
from plan_cases import MB, make_layer, make_link, make_profile, profiles

KEEP, OFFLOAD, REBUILD = Decision
AS_IS, RECOMPUTE, BOTH = LayerMode


def predict(
    profile: StepProfile,
    *layers: LayerPlan,
    mb_per_s: float = 1000,
    inflight_mb: int = 0,
    **link: Any,
) -> Prediction:
    plan = Plan(layers=layers, max_inflight_bytes=inflight_mb * MB)
    return StepTiming(profile, make_link(mb_per_s, **link)).predict(plan)


def as_is(*decisions: Decision) -> LayerPlan:
    return LayerPlan(decisions=decisions)


def peaks_mb(prediction: Prediction) -> list[float]:
    return [peak / MB for peak in prediction.peak_by_position]


# ---- keep ----------------------------------------------------------------------------------------


def test_all_is_kept() -> None:
    profile = make_profile(
        make_layer(10, forward_working_bytes=3 * MB, backward_working_bytes=7 * MB),
        make_layer(20, input_bytes=4 * MB),
        fixed_bytes=100 * MB,
        before_s=0.5,
        loss_s=0.25,
        after_s=1.0,
        loss_working_bytes=2 * MB,
    )
    got = predict(profile, as_is(KEEP), as_is(KEEP))
    assert got.step_s == pytest.approx(0.5 + 2 * (1 + 2) + 0.25 + 1)
    # F0: its storage and working memory. F1: both storages and its input. Loss. B1: the input is
    # gone, nobody saved it. B0.
    assert peaks_mb(got) == [113, 134, 132, 130, 117]
    assert got.peak_bytes == 134 * MB
    assert (got.exposed_copy_s, got.host_peak_bytes) == (0, 0)


def test_what_is_kept_stays_until_the_end_where_the_graph_is_retained() -> None:
    profile = make_profile(make_layer(10), make_layer(20), make_layer(40), retains=True)
    got = predict(profile, as_is(KEEP), as_is(OFFLOAD), as_is(KEEP))
    assert peaks_mb(got) == [10, 30, 70, 50, 70, 70, 50]


def test_the_work_around_the_layers_has_a_peak() -> None:
    profile = make_profile(make_layer(1))
    for name in ("before_working_bytes", "after_working_bytes"):
        changed = dataclasses.replace(profile, fixed_bytes=5 * MB, **{name: 50 * MB})
        assert predict(changed, as_is(KEEP)).peak_bytes == 55 * MB


def test_another_call_of_a_module_brings_its_weights_again() -> None:
    """Those of two layers are there: of the pass that runs, and of the next one."""
    sizes = {"first": 8, "second": 1, "third": 1}
    layers = [make_layer(1, name=name, weight_bytes=mb * MB) for name, mb in sizes.items()]
    rests = dataclasses.replace(as_is(KEEP), weights_on_host=True)
    profile = make_profile(*layers, make_layer(1, name="first"))
    got = predict(profile, *[rests] * 3, as_is(KEEP))
    assert peaks_mb(got)[:4] == [10, 4, 12, 13]


def test_an_optimizer_steps_all_weights_at_once_if_none_rests() -> None:
    layer = make_layer(1, weight_bytes=2 * MB)
    profile = dataclasses.replace(make_profile(layer, layer), at_once_bytes=50 * MB)
    assert predict(profile, as_is(KEEP), as_is(KEEP)).peak_bytes == 54 * MB
    rests = dataclasses.replace(as_is(KEEP), weights_on_host=True)
    assert predict(profile, as_is(KEEP), rests).peak_bytes == 6 * MB


def test_the_weights_of_the_layers_are_on_the_device() -> None:
    layer = make_layer(1, weight_bytes=2 * MB, gradient_bytes=3 * MB, optimizer_bytes=4 * MB)
    assert predict(make_profile(layer, layer), as_is(KEEP), as_is(KEEP)).peak_bytes == 20 * MB


def test_gradients_that_do_not_stay_come_with_the_first_backward_of_their_layer() -> None:
    """Weights and their state need 12 MB; a second call of "twice" has its 3 MB of gradients."""
    once = make_layer(1, name="once", weight_bytes=2 * MB, gradient_bytes=3 * MB)
    twice = dataclasses.replace(once, name="twice", optimizer_bytes=8 * MB)
    profile = make_profile(
        once, twice, make_layer(1, name="twice"), keeps_gradients=False, after_working_bytes=MB
    )
    got = predict(profile, *[as_is(KEEP)] * 3)
    assert peaks_mb(got) == [13, 14, 15, 15, 18, 17, 19]
    assert got.peak_bytes == 19 * MB
    stay = dataclasses.replace(profile, keeps_gradients=True)
    assert peaks_mb(predict(stay, *[as_is(KEEP)] * 3)) == [19, 20, 21, 21, 21, 20, 19]


# ---- offload -------------------------------------------------------------------------------------


def test_copies_hide_behind_compute() -> None:
    profile = make_profile(make_layer(10), make_layer(10), make_layer(10))
    got = predict(profile, as_is(OFFLOAD), as_is(OFFLOAD), as_is(KEEP), mb_per_s=20, inflight_mb=20)
    assert got.step_s == pytest.approx(9)
    assert got.exposed_copy_s == 0
    # F1: storage 0 is still being copied. F2: storage 1 is. At the loss, and when B2 begins, that
    # has just left; both are reloaded in B2.
    assert peaks_mb(got) == [10, 20, 20, 10, 30, 20, 10]
    assert got.host_peak_bytes == 20 * MB


def test_what_is_kept_asks_for_what_comes_next() -> None:
    """One buffer may always be brought: the last layer still has the storages that it keeps."""
    profile = make_profile(make_layer(20), make_layer(10, 30, 1, 2), loss_s=1.0)
    got = predict(profile, as_is(OFFLOAD), as_is(KEEP, KEEP, OFFLOAD, KEEP))
    # B1 brings its 1 MB back and has all of its 43 MB. The 20 MB of B0 come when the 30 MB are
    # read: the 1 MB may be there still, and the 2 MB are not.
    assert peaks_mb(got)[3:] == [61, 20]
    # If the last thing that it reads is what it brings back, it asks for nothing more.
    got = predict(profile, as_is(OFFLOAD), as_is(OFFLOAD, KEEP, KEEP, KEEP))
    assert peaks_mb(got)[3:] == [43, 20]


def test_what_others_hold_stays_if_its_layer_is_recomputed() -> None:
    """As the batch does, which the loop holds: 10 of the 30 MB that the layer saves."""
    held = SavedStorage(number=0, size_bytes=10 * MB, may_leave=False)
    own = SavedStorage(number=1, size_bytes=20 * MB)
    first = dataclasses.replace(make_layer(), storages=(held, own))
    profile = make_profile(first, make_layer(5))
    again = LayerPlan(mode=RECOMPUTE)
    assert peaks_mb(predict(profile, as_is(KEEP, KEEP), as_is(KEEP))) == [30, 35, 35, 35, 30]
    assert peaks_mb(predict(profile, again, as_is(KEEP))) == [30, 15, 15, 15, 30]


def test_compute_waits_for_the_oldest_copy_beyond_the_bound() -> None:
    profile = make_profile(*[make_layer(10)] * 4)
    plan = [as_is(OFFLOAD)] * 3 + [as_is(KEEP)]
    got = predict(profile, *plan, mb_per_s=2, inflight_mb=10)
    # Copies take 5 s. Storage 0 is on its way from 1 to 6 s, so F1 ends at 2 s and its save waits
    # until 6 s; F2 ends at 7 s and its save waits until 11 s; F3 ends at 12 s. B3 from 12 to 14 s.
    # Storage 2 is still on its way, until 16 s: B2 uses it as it is. Storage 1 is reloaded from 12
    # to 17 s, and B1 runs until 19 s. Storage 0 may not be ahead as well: from 19 to 24 s.
    assert got.step_s == pytest.approx(26)
    assert got.exposed_copy_s == pytest.approx(4 + 4 + 1 + 5)
    assert peaks_mb(got) == [10, 20, 20, 20, 20, 30, 20, 10, 10]


def test_a_larger_bound_lets_more_copies_run_ahead() -> None:
    profile = make_profile(*[make_layer(10)] * 4)
    plan = [as_is(OFFLOAD)] * 2 + [as_is(KEEP)] * 2
    one = predict(profile, *plan, mb_per_s=4, inflight_mb=10)
    two = predict(profile, *plan, mb_per_s=4, inflight_mb=20)
    # Copies take 2.5 s, down from 1 to 6 s. With a bound of 10 MB, the save of layer 1 waits until
    # 3.5 s, so forward ends at 5.5 s; the copy of storage 1 ends at 6 s. B3 begins at 5.5 s.
    assert one.step_s > two.step_s
    # With 20 MB forward ends at 4 s, with storage 1 on its way until 6 s. Reload 0 from 4 to 6.5 s.
    # B3 until 6 s, then reload 1 until 9 s. B2 until 8 s, B1 from 9 to 11 s, B0 until 13 s.
    assert two.step_s == pytest.approx(13)
    assert two.exposed_copy_s == pytest.approx(1)


def test_a_source_that_nobody_needs_any_more_stays_until_its_copy_is_complete() -> None:
    profile = make_profile(make_layer(10), make_layer(10))
    got = predict(profile, as_is(KEEP), as_is(OFFLOAD), mb_per_s=1)
    # The copy runs from 2 to 12 s; the step is over at 6 s.
    assert peaks_mb(got) == [10, 20, 20, 20, 20]
    assert got.step_s == pytest.approx(6)


def test_the_last_storage_of_a_layer_comes_back_first() -> None:
    profile = make_profile(make_layer(10, 30), make_layer())
    got = predict(profile, as_is(OFFLOAD, OFFLOAD), as_is(), mb_per_s=1000, inflight_mb=35)
    # The save of the 30 MB waits until the 10 MB are down. The 30 MB come back in B1. The other
    # 10 MB would be more than the bound; B0 waits for them.
    assert peaks_mb(got) == [40, 30, 0, 30, 40]
    assert got.exposed_copy_s == pytest.approx(0.01 + 0.01)


def test_latency_counts_for_each_copy() -> None:
    profile = make_profile(make_layer(*[1] * 10, forward_s=0.0), make_layer(forward_s=0.0))
    got = predict(profile, as_is(*[OFFLOAD] * 10), as_is(), latency_s=1.0, mb_per_s=1)
    # Copies take 2 s, and with a bound of 0 each save waits for the copy before: F0 ends at 18 s.
    # While B1 runs until 20 s, the last copy down ends, and storage 8 is reloaded. B0 reads the
    # last source before that is let go of, and waits for the other eight.
    assert got.step_s == pytest.approx(18 + 2 + 8 * 2 + 2)
    assert got.exposed_copy_s == pytest.approx(18 + 8 * 2)


# ---- recompute -----------------------------------------------------------------------------------


def test_a_recomputed_layer_keeps_its_input() -> None:
    layer = make_layer(
        10,
        20,
        input_bytes=5 * MB,
        recompute_s=0.5,
        forward_working_bytes=3 * MB,
        backward_working_bytes=1 * MB,
    )
    got = predict(make_profile(layer, layer), LayerPlan(mode=RECOMPUTE), LayerPlan(mode=RECOMPUTE))
    assert got.step_s == pytest.approx(2 * (1 + 2 + 0.5))
    # F0: input, what the forward makes, working memory. F1: the other input, too. B1: both inputs,
    # what is computed again, and the larger working memory, that of the forward.
    assert peaks_mb(got) == [38, 43, 10, 43, 38]


def test_the_input_of_a_recomputed_layer_leaves_from_its_begin() -> None:
    layer = make_layer(10, input_bytes=5 * MB)
    profile = make_profile(layer, make_layer(7))
    got = predict(profile, LayerPlan(mode=BOTH), as_is(KEEP), mb_per_s=5)
    # The copy is complete when F0 ends, so the input is gone in F1. It comes back in B1.
    assert peaks_mb(got) == [15, 7, 7, 12, 15]
    assert got.step_s == pytest.approx(7)
    assert got.host_peak_bytes == 5 * MB


# ---- share and rebuild ---------------------------------------------------------------------------


def shared() -> StepProfile:
    again = SavedStorage(number=0, size_bytes=10 * MB, same_as=StorageId(0, 0))
    return make_profile(
        make_layer(10, input_bytes=3 * MB),
        make_layer(),
        dataclasses.replace(
            make_layer(), storages=(again,), input_bytes=10 * MB, input_same_as=StorageId(0, 0)
        ),
    )


def test_shared_memory_counts_once_and_comes_back_once() -> None:
    got = predict(shared(), as_is(OFFLOAD), as_is(), as_is(KEEP), mb_per_s=20)
    # Gone in F1's end. F2 uses the memory anyway. B2 is the first to need it, B0 the last.
    assert peaks_mb(got) == [13, 10, 10, 0, 10, 10, 10]
    assert got.host_peak_bytes == 10 * MB
    assert got.step_s == pytest.approx(9 + 0.5)  # B2 waits for the reload


def test_a_source_that_backward_uses_stays_when_its_copy_is_complete() -> None:
    got = predict(shared(), as_is(OFFLOAD), as_is(), as_is(KEEP), mb_per_s=2)
    # The copy runs from 1 to 6 s. B2, from 3 to 5 s, uses the source; B1 ends at 7 s, B0 at 9 s.
    assert got.step_s == pytest.approx(9)
    assert peaks_mb(got) == [13, 10, 10, 10, 10, 10, 10]


def test_the_first_layer_that_saves_shared_memory_decides() -> None:
    kept = predict(shared(), as_is(KEEP), as_is(), as_is(OFFLOAD))
    assert kept.host_peak_bytes == 0
    # Layer 0 is recomputed and saves its input only, so now layer 2 is the first.
    moved = predict(shared(), LayerPlan(mode=RECOMPUTE), as_is(), as_is(OFFLOAD))
    assert moved.host_peak_bytes == 10 * MB
    both = predict(shared(), as_is(KEEP), as_is(), LayerPlan(mode=BOTH))
    assert both.host_peak_bytes == 0


def rebuilding() -> StepProfile:
    first = SavedStorage(number=0, size_bytes=10 * MB)
    second = SavedStorage(number=1, size_bytes=20 * MB, sources=(StorageId(0, 0),), rebuild_s=0.25)
    third = SavedStorage(number=2, size_bytes=30 * MB, sources=(StorageId(0, 1),), rebuild_s=0.5)
    layer = dataclasses.replace(make_layer(), storages=(first, second, third))
    return make_profile(layer, make_layer())


def test_storages_are_rebuilt_from_others() -> None:
    got = predict(rebuilding(), as_is(KEEP, REBUILD, REBUILD), as_is())
    assert got.step_s == pytest.approx(6 + 0.25 + 0.5)
    assert peaks_mb(got) == [60, 10, 10, 10, 60]


def test_a_source_comes_back_no_later_than_what_is_rebuilt_from_it() -> None:
    later = SavedStorage(number=0, size_bytes=5 * MB, sources=(StorageId(0, 0),), rebuild_s=0.25)
    profile = make_profile(
        make_layer(10), make_layer(), dataclasses.replace(make_layer(), storages=(later,))
    )
    got = predict(profile, as_is(OFFLOAD), as_is(), as_is(REBUILD), mb_per_s=10)
    # Down from 1 to 2 s. B2 waits for the reload, from 3 to 4 s, and then rebuilds.
    assert got.step_s == pytest.approx(9 + 1 + 0.25)
    assert got.exposed_copy_s == pytest.approx(1)


def test_what_cannot_be_rebuilt_or_leave_is_kept() -> None:
    later = SavedStorage(number=0, size_bytes=5 * MB, sources=(StorageId(0, 0),), rebuild_s=0.25)
    stuck = SavedStorage(number=1, size_bytes=7 * MB, may_leave=False)
    profile = make_profile(
        make_layer(10), dataclasses.replace(make_layer(), storages=(later, stuck))
    )
    got = predict(profile, LayerPlan(mode=RECOMPUTE), as_is(REBUILD, OFFLOAD))
    assert peaks_mb(got)[2] == 12  # the source is not saved
    assert got.host_peak_bytes == 0


# ---- weights on the host -------------------------------------------------------------------------


def test_weights_on_the_host() -> None:
    layer = make_layer(
        weight_bytes=10 * MB, gradient_bytes=5 * MB, optimizer_bytes=20 * MB, host_update_s=0.1
    )
    profile = make_profile(layer, layer, layer)
    plan = [LayerPlan(weights_on_host=True)] * 3
    got = predict(profile, *plan, mb_per_s=10, inflight_mb=5)
    # F0 waits 1 s for its weights; those of layer 1 come while it runs, and so on. Layer 2's stay
    # for B2. All gradients are down 0.5 s after the last pass, and then the host updates.
    assert got.step_s == pytest.approx(1 + 3 * 3 + 0.5 + 3 * 0.1)
    assert got.exposed_copy_s == pytest.approx(1.5)
    # Two layers' weights at once. In backward also one gradient that is made, and one on its way.
    assert peaks_mb(got) == [20, 20, 20, 20, 25, 30, 30]
    assert got.host_peak_bytes == 3 * 35 * MB


def test_gradients_at_rest_are_there_from_the_last_call_of_a_module_to_the_first() -> None:
    """The calls add to one gradient, which leaves when the backward of the first one has ended."""
    sizes = {"weight_bytes": 10 * MB, "gradient_bytes": 5 * MB}
    twice, other = make_layer(name="twice", **sizes), make_layer(name="other", **sizes)
    profile = make_profile(twice, other, make_layer(name="twice"))
    plan = Plan(layers=(LayerPlan(weights_on_host=True),) * 3, max_inflight_bytes=5 * MB)
    got = StepTiming(profile, make_link(1e6), awaits_copies=True).predict(plan)
    # Both modules' weights are there, and in backward one gradient, then two, and one again.
    assert peaks_mb(got) == [20, 20, 20, 20, 25, 30, 25]


def test_a_recomputed_layer_keeps_copies_of_small_weights_until_its_backward() -> None:
    layer = make_layer(8, copied_bytes=3 * MB)
    timing = StepTiming(make_profile(layer, layer), make_link(1e6), awaits_copies=True)
    again = LayerPlan(mode=RECOMPUTE)
    plans = (Plan(layers=(each,) * 2) for each in (as_is(KEEP), again))
    kept, recomputed = map(timing.predict, plans)
    assert peaks_mb(kept) == [8, 16, 16, 16, 8]
    assert peaks_mb(recomputed) == [8, 3 + 8, 6, 6 + 8, 3 + 8]


def stepping_ahead(host_update_s: float, ahead: StepAhead | None, **more: Any) -> Prediction:
    """Three layers at rest whose optimizer's step reads and writes 55 MB, and 50 to fill a shadow.

    All gradients are there half a second after the last pass, 10.5 s after the step began. The
    copies of a layer's new weights read and write 10 MB.
    """
    layer = make_layer(
        weight_bytes=10 * MB, gradient_bytes=5 * MB, optimizer_bytes=20 * MB,
        host_update_s=host_update_s,
    )  # fmt: skip
    plan = Plan(layers=(LayerPlan(weights_on_host=True),) * 3, max_inflight_bytes=5 * MB)
    timing = StepTiming(make_profile(layer, layer, layer, ahead=ahead), make_link(10, **more))
    return timing.predict(plan)


@pytest.mark.parametrize(("twice_share", "on_host"), [(0.0, False), (0.25, False), (0.0, True)])
def test_an_optimizer_that_steps_inside_backward(twice_share: float, on_host: bool) -> None:
    ahead = StepAhead(10**9, twice_share=twice_share)
    got = stepping_ahead(0.55, ahead, computes_on_host=on_host)
    # The worker steps two layers while backward runs. The last gradients are there when it ends.
    left_s = 0.55 + 2 * 0.1 + twice_share * 2 * 0.55
    if on_host:  # where the worker would need the cores of backward
        left_s = 3 * 0.55
    assert got.step_s == pytest.approx(10.5 + left_s)
    assert got.exposed_update_s == pytest.approx(left_s)


@pytest.mark.parametrize(
    ("room_mb", "host_mb", "num_shadows"),
    [(80, None, 3), (50, None, 2), (49, None, 1), (80, 3 * 35 + 25, 1), (80, 3 * 35, 0)],
)
def test_layers_without_shadows_step_at_the_end(
    room_mb: int, host_mb: int | None, num_shadows: int
) -> None:
    """What rests on the host goes first; the layers that land first have the shadows."""
    ahead = StepAhead(room_mb * MB, None if host_mb is None else host_mb * MB)
    got = stepping_ahead(0.55, ahead)
    num_ahead = min(2, num_shadows)
    assert got.exposed_update_s == pytest.approx((3 - num_ahead) * 0.55 + num_ahead * 0.1)
    assert (got.shadow_bytes, got.host_peak_bytes) == (num_shadows * 25 * MB, 3 * 35 * MB)


def test_the_end_of_a_step_takes_over_what_the_worker_has_not_begun() -> None:
    got = stepping_ahead(5.5, StepAhead(10**9))
    # The first gradients land 6.5 s after the begin; the worker needs 10.5 s for that layer.
    assert got.step_s == pytest.approx(6.5 + 10.5 + 2 * 5.5 + 1.0)


# ---- plans of other profiles ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([as_is(KEEP)], "has 1 layers and the profile 2"),
        ([as_is(KEEP), as_is()], "decides on 0 storages of layer 1, which saves 1"),
        ([as_is(KEEP), LayerPlan(mode=RECOMPUTE)], "may not be recomputed"),
    ],
)
def test_a_plan_of_another_profile_is_refused(layers: list[LayerPlan], message: str) -> None:
    profile = make_profile(make_layer(1), make_layer(1, may_recompute=False))
    with pytest.raises(PolicyError, match=message):
        predict(profile, *layers)


def test_k_of_n_is_what_stays_and_what_is_in_flight() -> None:
    """The arithmetic that tests/simulation/test_timing.py holds the engine to."""
    profile = make_profile(*[make_layer(10)] * 20)
    plan = dataclasses.replace(offload_first(profile, 16), max_inflight_bytes=20 * MB)
    got = StepTiming(profile, make_link(20)).predict(plan)
    assert got.peak_bytes == (4 + 2) * 10 * MB
    assert got.step_s == pytest.approx(20 * 3)
    assert got.exposed_copy_s == 0
    assert keep_all(profile) == offload_first(profile, 0)


def test_copies_that_need_the_processor_make_the_step_longer() -> None:
    """40 MB down and up, at 0.01 s for each MB and way; what waits for copies stays as it is."""
    profile = make_profile(make_layer(40), make_layer(8))
    plan = offload_first(profile, 1)
    free = StepTiming(profile, make_link(1000)).predict(plan)
    costly = StepTiming(profile, make_link(1000, copy_cost_s_per_mb=0.01)).predict(plan)
    assert costly.step_s == pytest.approx(free.step_s + 2 * 40 * 0.01)
    assert costly._replace(step_s=free.step_s) == free


# ---- a host that runs ahead ----------------------------------------------------------------------


def cautious(
    profile: StepProfile, *layers: LayerPlan, inflight_mb: int = 0, slower: float = 1.0, **link: Any
) -> Prediction:
    plan = Plan(layers=layers, max_inflight_bytes=inflight_mb * MB)
    return CautiousTiming(profile, make_link(1000, **link), slower).predict(plan)


def test_on_an_accelerator_no_copy_is_seen_complete_by_chance() -> None:
    """Copies take 10 ms and passes seconds, but the host is ahead of both."""
    profile = make_profile(*[make_layer(10)] * 3)
    plan = [as_is(OFFLOAD)] * 3
    expected, got = predict(profile, *plan), cautious(profile, *plan)
    # The save of one layer is on its way when the next layer begins. B2 uses the last one as it is,
    # with storage 1 on its way up.
    assert peaks_mb(expected) == [10, 20, 20, 10, 20, 10, 10]
    # That the last one has gone down is not seen in backward, in which the host waits for nothing.
    assert peaks_mb(got) == [10, 20, 20, 10, 20, 20, 20]
    assert got.step_s == expected.step_s
    # With room for two copies, two stay.
    assert peaks_mb(cautious(profile, *plan, inflight_mb=20)) == [10, 20, 30, 20, 30, 30, 30]


def test_on_an_accelerator_the_inputs_of_recomputed_layers_stay_as_well() -> None:
    profile = make_profile(*[make_layer(10, input_bytes=4 * MB)] * 3)
    plan = [LayerPlan(mode=BOTH)] * 3
    assert cautious(profile, *plan).peak_bytes == predict(profile, *plan).peak_bytes + 4 * MB


def test_on_a_cpu_copies_may_be_slower() -> None:
    profile = make_profile(*[make_layer(10)] * 3)
    plan = [as_is(OFFLOAD)] * 3
    assert cautious(profile, *plan, computes_on_host=True) == predict(
        profile, *plan, computes_on_host=True
    )
    got = cautious(profile, *plan, inflight_mb=1, computes_on_host=True, slower=1e4)
    assert peaks_mb(got) == [10, 20, 20, 10, 20, 20, 10]


def _one_after_the_other(profile: StepProfile) -> StepProfile:
    """The step with two forwards, each with layers of its own."""
    count = len(profile.layers)

    def moved(name: StorageId | None) -> StorageId | None:
        return None if name is None else StorageId(name.layer + count, name.number)

    second = []
    for layer in profile.layers:
        storages = tuple(
            dataclasses.replace(
                each,
                same_as=moved(each.same_as),
                sources=tuple(StorageId(s.layer + count, s.number) for s in each.sources),
            )
            for each in layer.storages
        )
        same_as = moved(layer.input_same_as)
        second.append(dataclasses.replace(layer, storages=storages, input_same_as=same_as))
    return dataclasses.replace(profile, layers=(*profile.layers, *second))


@settings(max_examples=200, deadline=None)
@given(profiles(), st.data())
def test_two_forwards_need_no_more_than_is_counted_for_both(
    profile: StepProfile, data: st.DataObject
) -> None:
    """With nothing in flight, whichever of the passes of both needs the most."""
    chosen, layers = [], []
    for each in profile.layers:
        decisions = tuple(data.draw(st.sampled_from(Decision)) for _ in each.storages)
        modes = LayerMode if each.may_recompute else (AS_IS,)
        mode = data.draw(st.sampled_from(modes))
        chosen.append(LayerPlan(mode=mode, decisions=decisions))
        more = 10 * each.forward_working_bytes
        layers.append(dataclasses.replace(each, forward_working_bytes=more))
    profile = dataclasses.replace(profile, layers=tuple(layers))
    windows = (0,) * (4 * len(chosen) + 1)
    twice = Plan(layers=(*chosen, *chosen), windows=windows)
    plan = Plan(layers=tuple(chosen), windows=windows[: 2 * len(chosen) + 1])
    both = StepTiming(profile.with_forwards(2), make_link(10.0)).predict(plan)
    apart = StepTiming(_one_after_the_other(profile), make_link(10.0)).predict(twice)
    assert apart.peak_bytes <= both.peak_bytes
    assert StepTiming(profile, make_link(10.0), num_forwards=2).predict(plan) == apart._replace(
        peak_by_position=_most(apart.peak_by_position)
    )


def _most(peaks: Sequence[int]) -> tuple[int, ...]:
    """The larger peak of each pass of two forwards that come one after the other."""
    count = len(peaks) // 4
    there, loss, back = peaks[: 2 * count], peaks[2 * count], peaks[2 * count + 1 :]
    halves = [[*map(max, each[:count], each[count:])] for each in (there, back)]
    return (*halves[0], loss, *halves[1])
