"""Profiles of steps: checks, comparisons, text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from ebbtide.errors import PolicyError
from ebbtide.planning import StepProfile, keep_all
from plan_cases import make_layer, make_profile, planned, profiles, reread

ONE_LAYER = make_profile(make_layer(1))


@given(profile=profiles())
@settings(deadline=None, max_examples=50)
def test_text_round_trip(profile: StepProfile) -> None:
    assert reread(planned(keep_all(profile), profile)).profile == profile


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: StepProfile(layers=()), "at least one LayerProfile"),
        (lambda: make_profile(make_layer(forward_s=-1.0)), "forward_s of layer 0 must be"),
        (lambda: make_profile(make_layer(forward_s=float("nan"))), "forward_s of layer 0"),
        (lambda: make_profile(make_layer(forward_s=True)), "forward_s of layer 0"),
        (lambda: make_profile(make_layer(), fixed_bytes=1.5), "fixed_bytes of the step"),
        (lambda: make_profile(make_layer(), loss_s=None), "loss_s of the step"),
        (lambda: make_profile(make_layer(-1)), "size_bytes of storage 0 of layer 0"),
    ],
)
def test_what_is_wrong_is_named(build: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        build()


def profile_in(content: Any) -> Any:
    return content["step"]["profile"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(format="other"), '"format" is not'),
        (lambda content: content.update(version=1), "has version 1"),
        (lambda content: content.update(version=True), "has version True"),
        (lambda content: content["step"].pop("budget_bytes"), "lacks budget_bytes"),
        (lambda content: content["step"].update(budget_bytes=1.5), "of the type int"),
        (lambda content: content.update(step=[]), "must be an object"),
        (lambda content: profile_in(content).pop("layers"), "lacks layers"),
        (lambda content: profile_in(content).update(layers=3), "layers must be a list"),
        (lambda content: profile_in(content).update(layers=[3]), "layers must be an object"),
        (lambda content: profile_in(content).update(more=1), "unknown keys: more"),
        (
            lambda content: profile_in(content)["layers"][0].update(more=1),
            "unknown keys: more",
        ),
        (
            lambda content: profile_in(content)["layers"][0].update(between=1),
            "of the type bool",
        ),
        (
            lambda content: profile_in(content)["layers"][0].update(input_same_as=[0]),
            r"\[layer, number\]",
        ),
        (
            lambda content: profile_in(content).update(fixed_bytes=-1),
            "fixed_bytes of the step",
        ),
    ],
)
def test_text_that_is_no_profile_is_refused(change: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        reread(planned(keep_all(ONE_LAYER), ONE_LAYER), change)
