"""Corrects a profile's memory by what was measured, position by position."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, final

from ebbtide.budgeting.pass_watch import PassWatch
from ebbtide.planning.plan import Decision, LayerMode, LayerPlan, Plan
from ebbtide.planning.prediction.step_timing import Prediction
from ebbtide.planning.step_profile import LayerProfile, StepProfile


@final
class Corrections:
    """What was measured at each position beyond what a profile says, by how the layer ran.

    A layer that has not run in one way yet is taken to need no less there than the profile says.
    """

    def __init__(self) -> None:
        self._excess: dict[tuple[int, bool], int] = {}  # by position and whether recomputed
        self._kept: set[tuple[int, bool]] = set()  # measured with more than what was offloaded

    def learn(self, watch: PassWatch, plan: Plan, predicted: Prediction) -> None:
        """Note by how much a step needed more, or less, than was predicted.

        Args:
            watch: what was measured.
            plan: the plan that was followed.
            predicted: what these corrections predicted for it.
        """
        peaks = predicted.peak_by_position
        for position, peak_bytes in watch.peaks.items():
            covered = watch.covered(position)
            excess_bytes = peak_bytes - max(peaks[each] for each in covered)
            for each in covered:
                key = each, _is_recomputed(plan, each)
                self._excess[key] = self._excess.get(key, 0) + excess_bytes
                if not _is_offloaded(plan, each):
                    self._kept.add(key)

    def apply(
        self, profile: StepProfile, *, cautious: bool = False, unsure_bytes: int = 0
    ) -> StepProfile:
        """Return a profile with working memory as it was measured.

        Args:
            profile: the profile.
            cautious: what a layer was measured to need less, while all that it saves was offloaded,
                may be because that was never there at one time. This does not count on it.
            unsure_bytes: how much more a pass of a layer may need than the profile says, if the
                layer is recomputed and was not measured so.
        """
        count = len(profile.layers)
        known = self._kept if cautious else self._excess.keys()
        excess = {key: size if key in known else max(0, size) for key, size in self._excess.items()}
        # What was measured in one way is taken to be needed in the other way, too.
        as_is, again = (
            [
                excess.get((each, way), unsure + max(0, excess.get((each, not way), 0)))
                for each in range(2 * count + 1)
            ]
            for way, unsure in ((False, 0), (True, unsure_bytes))
        )
        layers = tuple(
            _corrected(layer, profile.inside_bytes(index), as_is, again, index, 2 * count - index)
            for index, layer in enumerate(profile.layers)
        )
        loss_bytes = profile.loss_working_bytes + as_is[count]
        return dataclasses.replace(profile, layers=layers, loss_working_bytes=max(0, loss_bytes))


def _corrected(
    layer: LayerProfile,
    inside_bytes: int,
    as_is: Sequence[int],
    again: Sequence[int],
    forward: int,
    backward: int,
) -> LayerProfile:
    """Return a layer with its working memory in the positions of its forward and backward."""
    unsaved_bytes = layer.unsaved_forward_bytes
    if unsaved_bytes is None:
        unsaved_bytes = inside_bytes + layer.forward_working_bytes
    figures = {
        "forward_working_bytes": layer.forward_working_bytes + as_is[forward],
        "unsaved_forward_bytes": unsaved_bytes + again[forward],
        "backward_working_bytes": layer.backward_working_bytes + as_is[backward],
        "recompute_working_bytes": layer.second_working_bytes + again[backward],
    }
    changes: dict[str, Any] = {name: max(0, size) for name, size in figures.items()}
    return dataclasses.replace(layer, **changes)


def _is_recomputed(plan: Plan, position: int) -> bool:
    layer = _layer_at(plan, position)
    return layer is not None and layer.mode is not LayerMode.AS_IS


def _is_offloaded(plan: Plan, position: int) -> bool:
    """Whether the layer at a position keeps nothing, and does not run again either."""
    layer = _layer_at(plan, position)
    if layer is None or layer.mode is not LayerMode.AS_IS:
        return False
    return Decision.KEEP not in layer.decisions


def _layer_at(plan: Plan, position: int) -> LayerPlan | None:
    """Return the layer whose forward or backward has a position; None is between the passes."""
    count = len(plan.layers)
    return None if position == count else plan.layers[min(position, 2 * count - position)]
