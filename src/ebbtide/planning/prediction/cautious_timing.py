"""Predicts steps whose copies may be slower than they were measured, or seen later.

[Note: a host that runs ahead] On an accelerator, the host queues work and allocates memory long
before the device gets there. It sees hardly any copy complete, so what is on its way down occupies
memory up to the plan's bound on bytes in flight: there, compute is made to wait for the oldest
copy, and the host lets go of its source. What is on its way at the end of the forward can stay
throughout the backward, in which the host waits for nothing. So the peak is that of a link on which
no copy down is seen complete by chance, while copies up take no time. How much less a step needs is
chance, and changes with the load of the host. To compare memory with a prediction, a step is
measured with all copies awaited at each begin of a pass, and predicted for copies that take no
time.
"""

from __future__ import annotations

import dataclasses
from typing import Final, final

from ebbtide.planning.hardware import Hardware
from ebbtide.planning.plan import Decision, LayerMode, Plan
from ebbtide.planning.prediction.step_timing import Prediction, StepTiming
from ebbtide.planning.step_profile import StepProfile

_LATE: Final = 1e9  # how many times slower a link is on which no copy is seen complete by chance


@final
class CautiousTiming:
    """Predicts the time of a step by arithmetic, and its peak for slow or late copies as well.

    On a CPU, copies share the cores with compute, and a file that grows is slow. What waits for its
    copy occupies memory, so the peak is that of the slower of two links. On an accelerator, see
    [Note: a host that runs ahead].

    Args:
        profile: the step.
        hardware: the link, as it was measured.
        slower: how many times slower copies may be on a CPU.
    """

    def __init__(self, profile: StepProfile, hardware: Hardware, slower: float) -> None:
        self._timing = StepTiming(profile, hardware)
        self._slow = None
        self._runs_ahead = not hardware.computes_on_host
        if self._runs_ahead:
            self._slow = StepTiming(profile, _slowed(hardware, down=_LATE, up=1 / _LATE))
        elif slower > 1:
            self._slow = StepTiming(profile, _slowed(hardware, down=slower, up=slower))

    def predict(self, plan: Plan) -> Prediction:
        """Return what a step under a plan costs.

        Raises:
            PolicyError: the plan is not one for this profile.
        """
        expected = self._timing.predict(plan)
        moves = plan.max_inflight_bytes or (self._runs_ahead and _copies(plan))
        if self._slow is None or not moves:
            return expected
        slow = self._slow.predict(plan)
        peaks = tuple(map(max, expected.peak_by_position, slow.peak_by_position))
        peak_bytes = max(expected.peak_bytes, slow.peak_bytes)
        return expected._replace(peak_bytes=peak_bytes, peak_by_position=peaks)


def predict_awaited(profile: StepProfile, hardware: Hardware, plan: Plan) -> Prediction:
    """Predict a step in which copies are complete as soon as they are queued.

    Raises:
        PolicyError: the plan is not one for this profile.
    """
    at_once = _slowed(hardware, down=1 / _LATE, up=1 / _LATE)
    return StepTiming(profile, at_once).predict(plan)


def _copies(plan: Plan) -> bool:
    """Whether anything is copied down. Even if no bytes may be in flight, the last copy is."""
    return any(
        layer.weights_on_host
        or layer.mode is LayerMode.RECOMPUTE_OFFLOAD
        or (layer.mode is LayerMode.AS_IS and Decision.OFFLOAD in layer.decisions)
        for layer in plan.layers
    )


def _slowed(hardware: Hardware, *, down: float, up: float) -> Hardware:
    """Return hardware whose copies take this many times as long."""
    d2h, h2d = hardware.d2h_bytes_per_s, hardware.h2d_bytes_per_s
    shared = min(1.0, hardware.duplex_bytes_per_s / (d2h + h2d))
    return dataclasses.replace(
        hardware,
        d2h_bytes_per_s=d2h / down,
        h2d_bytes_per_s=h2d / up,
        duplex_bytes_per_s=shared * (d2h / down + h2d / up),
    )
