"""Runs a plan through the model of a step, for a page that shows prediction over measurement."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from ebbtide.pages.run_record import PredictedPhase, PredictedStep
from ebbtide.planning.hardware import Hardware
from ebbtide.planning.plan import Plan
from ebbtide.planning.prediction.step_record import StepRecord
from ebbtide.planning.prediction.step_timing import StepTiming
from ebbtide.planning.step_profile import LayerProfile, StepProfile
from ebbtide.tracing.events import TraceEvent

_BETWEEN = {"forward": "forward outside layers", "backward": "backward outside layers"}


def predict_step(plan: Plan, profile: StepProfile, hardware: Hardware) -> PredictedStep:
    """Return what a step under a plan is predicted to do.

    The profile is the one that was measured last, so these figures may differ from those that the
    plan was chosen by, which are in the plan.

    Raises:
        PolicyError: the plan is not one for this profile.
    """
    timing = StepTiming(profile, hardware)
    prediction, record = timing.predict(plan), timing.record(plan)
    numbers = _number_calls(profile.layers)
    return PredictedStep(
        step_s=prediction.step_s,
        peak_bytes=prediction.peak_bytes,
        phases=tuple(_phases(record, prediction.peak_by_position, numbers)),
        events=tuple(_events(record, profile.layers, numbers)),
    )


def _number_calls(layers: Sequence[LayerProfile]) -> list[int | None]:
    """Return the number that a trace gives each layer; None for what runs between layers."""
    numbers: list[int | None] = []
    calls = 0
    for layer in layers:
        numbers.append(None if layer.between else calls)
        calls += not layer.between
    return numbers


def _phases(
    record: StepRecord, peaks: Sequence[int], numbers: Sequence[int | None]
) -> Iterator[PredictedPhase]:
    for each, peak_bytes in zip(record.passes, peaks, strict=True):
        phase = each.what
        if each.layer is not None:
            number = numbers[each.layer]
            phase = _BETWEEN[each.what] if number is None else f"{each.what[0].upper()}{number}"
        yield PredictedPhase(phase, each.begin_s, each.end_s, peak_bytes)


def _events(
    record: StepRecord, layers: Sequence[LayerProfile], numbers: Sequence[int | None]
) -> Iterator[TraceEvent]:
    for event in sorted(record.events(), key=lambda event: (event.begin_s, event.end_s)):
        if event.layer is None:
            yield event
            continue
        number = numbers[event.layer]
        if number is None and event.what in _BETWEEN:
            continue  # traces have no passes of what runs between layers
        yield dataclasses.replace(event, layer=number, name=layers[event.layer].name)
