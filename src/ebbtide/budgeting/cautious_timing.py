"""Predicts steps whose copies may be slower than they were measured."""

from __future__ import annotations

import dataclasses
from typing import final

from ebbtide.planning.hardware import Hardware
from ebbtide.planning.plan import Plan
from ebbtide.planning.prediction.step_timing import Prediction, StepTiming
from ebbtide.planning.step_profile import StepProfile


@final
class CautiousTiming:
    """Predicts the time of a step by arithmetic, and its peak for slow copies as well.

    On a CPU, copies share the cores with compute, and a file that grows is slow. What waits for its
    copy occupies memory, so the peak is that of the slower of two links. On an accelerator the link
    is as fast as it was measured.

    Args:
        profile: the step.
        hardware: the link, as it was measured.
        slower: how many times slower copies may be on a CPU.
    """

    def __init__(self, profile: StepProfile, hardware: Hardware, slower: float) -> None:
        self._timing = StepTiming(profile, hardware)
        self._slow = None
        if hardware.computes_on_host and slower > 1:
            rates = {
                name: getattr(hardware, name) / slower
                for name in ("d2h_bytes_per_s", "h2d_bytes_per_s", "duplex_bytes_per_s")
            }
            self._slow = StepTiming(profile, dataclasses.replace(hardware, **rates))

    def predict(self, plan: Plan) -> Prediction:
        """Return what a step under a plan costs.

        Raises:
            PolicyError: the plan is not one for this profile.
        """
        expected = self._timing.predict(plan)
        if self._slow is None or not plan.max_inflight_bytes:
            return expected
        slow = self._slow.predict(plan)
        peaks = tuple(map(max, expected.peak_by_position, slow.peak_by_position))
        peak_bytes = max(expected.peak_bytes, slow.peak_bytes)
        return expected._replace(peak_bytes=peak_bytes, peak_by_position=peaks)
