"""The record of a predicted step says the same as the prediction."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.planning import (
    Decision,
    Hardware,
    LayerPlan,
    Plan,
    StepProfile,
    StepTiming,
    rule_plans,
)
from plan_cases import MB, links, make_layer, make_link, make_profile, profiles


@given(profile=profiles(), hardware=links(), inflight_mb=st.sampled_from([0, 20, 1000]))
@settings(deadline=None, max_examples=150)
def test_the_record_adds_up_to_the_prediction(
    profile: StepProfile, hardware: Hardware, inflight_mb: int
) -> None:
    timing = StepTiming(profile, hardware)
    for _, plan in rule_plans(profile):
        plan = Plan(layers=plan.layers, max_inflight_bytes=inflight_mb * MB)
        found, record = timing.predict(plan), timing.record(plan)
        assert len(record.passes) == len(found.peak_by_position)
        events = list(record.events())
        waited_s = sum(event.duration_s for event in events if event.what == "wait")
        assert waited_s == pytest.approx(found.exposed_copy_s)
        if hardware.copy_cost_s_per_byte is None:  # it would be in the step, and in no event
            outside_s = profile.before_s + profile.loss_s + profile.after_s
            busy = ("forward", "backward", "wait", "rebuild")
            busy_s = sum(event.duration_s for event in events if event.what in busy)
            assert busy_s + outside_s == pytest.approx(found.step_s)
        for lane in ("d2h", "h2d"):
            copies = [event for event in events if event.lane == lane]
            assert all(event.begin_s <= event.end_s <= found.step_s + 1e-9 for event in copies)
            for before, after in itertools.pairwise(copies):
                assert before.end_s <= after.begin_s + 1e-9


def test_a_step_by_hand() -> None:
    """Two layers save 100 MB each; the first one's leave at 100 MB/s, and come back as fast.

    Forward takes 1 s a layer and backward 2 s. The copy down runs from 1 s, when F0 has ended, to
    2 s, when F1 has. The copy up begins with B1 at 2 s and has ended at 3 s, before B0 at 4 s.
    """
    profile = make_profile(make_layer(100), make_layer(100))
    offload = LayerPlan(decisions=(Decision.OFFLOAD,))
    keep = LayerPlan(decisions=(Decision.KEEP,))
    plan = Plan(layers=(offload, keep), max_inflight_bytes=1000 * MB)
    record = StepTiming(profile, make_link(100)).record(plan)
    seen = [(each.what, each.layer, each.begin_s, each.end_s) for each in record.passes]
    assert seen == [
        ("forward", 0, 0, 1),
        ("forward", 1, 1, 2),
        ("loss", None, 2, 2),
        ("backward", 1, 2, 4),
        ("backward", 0, 4, 6),
    ]
    copies = [(e.what, e.layer, e.begin_s, e.end_s) for e in record.events() if e.size_bytes]
    assert copies == [("offload", 0, 1, 2), ("reload", 0, 2, 3)]
