"""Adds to a profile what the passes of recomputed layers need, from a step that recomputed them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from ebbtide.planning.hardware import Hardware
from ebbtide.planning.prediction.step_timing import StepTiming
from ebbtide.planning.searching.simple_plans import rule_plans
from ebbtide.planning.step_profile import LayerProfile, StepProfile


class RecomputedPasses(NamedTuple):
    """A step in which all layers that may be recomputed were, and kept their inputs.

    Attributes:
        peak_by_position: the most bytes on the device in the passes F0, F1, ..., the loss, ..., B1,
            B0.
        recompute_s: seconds of the second forward of each layer.
    """

    peak_by_position: tuple[int, ...]
    recompute_s: tuple[float, ...]


def with_recomputation(
    profile: StepProfile, hardware: Hardware, passes: RecomputedPasses
) -> StepProfile:
    """Return a profile whose prediction for the step that recomputed its layers is what it needed.

    Args:
        profile: the step in which everything was kept.
        hardware: the machine.
        passes: the step that recomputed.
    """
    plan = dict(rule_plans(profile))["recompute all"]
    predicted = StepTiming(profile, hardware).predict(plan).peak_by_position
    more_bytes = [
        found - expected for found, expected in zip(passes.peak_by_position, predicted, strict=True)
    ]

    def recomputed(index: int, layer: LayerProfile) -> LayerProfile:
        if not layer.may_recompute:
            return layer
        unsaved_bytes = profile.inside_bytes(index) + layer.forward_working_bytes
        second_bytes = layer.second_working_bytes + more_bytes[-1 - index]
        return dataclasses.replace(
            layer,
            recompute_s=passes.recompute_s[index],
            unsaved_forward_bytes=max(0, unsaved_bytes + more_bytes[index]),
            recompute_working_bytes=max(0, second_bytes),
        )

    layers = tuple(recomputed(index, layer) for index, layer in enumerate(profile.layers))
    return dataclasses.replace(profile, layers=layers)


def without_recomputation(profile: StepProfile) -> StepProfile:
    """Return the profile of a step whose layers cannot run again."""
    layers = tuple(dataclasses.replace(each, may_recompute=False) for each in profile.layers)
    return dataclasses.replace(profile, layers=layers)
