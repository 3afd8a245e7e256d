"""Plans: text, summaries."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.errors import PolicyError
from ebbtide.planning import (
    Decision,
    LayerMode,
    LayerPlan,
    Plan,
    PlannedStep,
    keep_all,
    offload_first,
    rule_plans,
)
from ebbtide.units import format_size
from plan_cases import MB, make_layer, make_link, make_profile, planned, reread

KEEP, OFFLOAD, REBUILD = Decision


def make_plan() -> Plan:
    layers = [LayerPlan(decisions=(KEEP, OFFLOAD, REBUILD))] * 12
    layers += [LayerPlan(mode=LayerMode.RECOMPUTE_OFFLOAD, weights_on_host=True)]
    layers += [LayerPlan(decisions=(OFFLOAD, OFFLOAD))]
    return Plan(
        layers=tuple(layers), max_inflight_bytes=2**28, step_s=0.1, peak_bytes=2**30, bound_s=0.08
    )


def test_text_round_trip() -> None:
    for plan in (make_plan(), Plan(layers=make_plan().layers)):
        assert reread(planned(plan, make_profile(make_layer()))).plan == plan


def test_the_gap_is_a_share_of_the_bound() -> None:
    assert make_plan().gap == pytest.approx(0.25)  # 0.1 s is 0.02 s more than 0.08 s
    assert Plan(layers=(), step_s=1.0, bound_s=1.0).gap == 0
    assert Plan(layers=(), step_s=1.0, bound_s=0.0).gap == float("inf")
    assert Plan(layers=(), step_s=1.0).gap is None
    assert Plan(layers=(), bound_s=1.0).gap is None


@pytest.mark.parametrize(
    ("key", "value"),
    [("mode", "sometimes"), ("decisions", ["lose"]), ("decisions", None)],
)
def test_what_is_not_known_is_refused(key: str, value: object) -> None:
    def change(content: Any) -> None:
        content["step"]["plan"]["layers"][0][key] = value

    with pytest.raises(PolicyError):
        reread(planned(make_plan(), make_profile(make_layer())), change)


# ---- plans made by hand --------------------------------------------------------------------------


def test_the_first_layers_are_offloaded() -> None:
    profile = make_profile(make_layer(1, 1), make_layer(1), make_layer(1))
    offloaded = offload_first(profile, 2)
    assert [layer.decisions for layer in offloaded.layers] == [
        (OFFLOAD, OFFLOAD),
        (OFFLOAD,),
        (KEEP,),
    ]
    assert offload_first(profile, 0) == keep_all(profile)


def test_layers_that_may_not_be_recomputed_run_as_they_are() -> None:
    profile = make_profile(make_layer(1), make_layer(1, may_recompute=False))
    plans = dict(rule_plans(profile))
    assert [layer.mode for layer in plans["recompute all"].layers] == [
        LayerMode.RECOMPUTE,
        LayerMode.AS_IS,
    ]
    assert plans["recompute + offload all"].layers[1].decisions == (OFFLOAD,)


@pytest.mark.parametrize(
    ("mb_per_s", "working_mb", "said"),
    [
        # Kept, 40 + 10 + 10 MB and the 20 MB that B2 needs are 30 MB more than 50.
        (1e6, 0, f"keeping peaks {format_size(30 * MB)} too high in B2"),
        # The copies take 8 s and the forward 1 s; but it needs 50 MB beside its 40 MB in B0.
        (10, 50, f"recomputing peaks {format_size(40 * MB)} too high in B0"),
        (10, 0, f"keeping peaks {format_size(30 * MB)} too high in B2"),
    ],
)
def test_the_table_names_the_constraint_that_decided(
    mb_per_s: float, working_mb: int, said: str
) -> None:
    profile = make_profile(
        make_layer(40, recompute_working_bytes=working_mb * MB),
        make_layer(10),
        make_layer(10, backward_working_bytes=20 * MB),
    )
    layers = tuple(LayerPlan(decisions=(each,)) for each in (OFFLOAD, OFFLOAD, KEEP))
    hardware = make_link(mb_per_s, computes_on_host=True)
    # What a search held the plan to decides, whatever the budget is.
    for limit_mb, budget_mb in ((None, 50), (50, 100)):
        plan = Plan(layers=layers, limit_bytes=None if limit_mb is None else limit_mb * MB)
        step = PlannedStep(
            plan=plan, profile=profile, hardware=hardware, budget_bytes=budget_mb * MB
        )
        first, _, last = str(step).splitlines()[-3:]
        assert first.endswith(f"; {said}")
        assert last.endswith("  there is room")


def test_the_table_keeps_the_range_of_layers_in_view() -> None:
    layer = make_layer(10, name="model.decoder.layers.11")
    plan = Plan(layers=(LayerPlan(decisions=(Decision.KEEP,)),) * 120)
    hardware = make_link(10)
    step = PlannedStep(
        plan=plan, profile=make_profile(*[layer] * 120), hardware=hardware, budget_bytes=0
    )
    assert str(step).splitlines()[-1].startswith("0 to 119 ...11 ")
