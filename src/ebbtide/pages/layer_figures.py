"""Adds up the figures of each layer of a step from its storages and its trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ebbtide.pages.run_record import LayerFigures
from ebbtide.reports.inspection import Inspection
from ebbtide.tracing.events import TraceEvent

_Call = tuple[int | None, int]  # layer and microbatch

_SECONDS = {"forward": "forward_s", "backward": "backward_s", "wait": "wait_s"}
_BYTES = {"keep": "kept_bytes", "offload": "offloaded_bytes", "rebuild": "rebuilt_bytes"}


def layer_figures(
    inspection: Inspection | None, events: Iterable[TraceEvent]
) -> tuple[LayerFigures, ...]:
    """Return the figures of each call of a layer, microbatch by microbatch in forward order.

    Args:
        inspection: what became of the storages of the step; None if nobody knows.
        events: the trace of the step; empty if it was not traced.
    """
    names: dict[_Call, str] = {}
    figures: dict[_Call, dict[str, float]] = {}

    def add(call: _Call, name: str, what: str, amount: float) -> None:
        names[call] = name or names.get(call, "")
        sums = figures.setdefault(call, {})
        sums[what] = sums.get(what, 0) + amount

    for event in events:
        if event.what in _SECONDS and not event.kind:
            call = event.layer, event.microbatch
            add(call, event.name, _SECONDS[event.what], event.duration_s)
    if inspection is not None:
        for storage in inspection.storages:
            call = storage.layer, storage.microbatch
            add(call, storage.name, _BYTES[storage.decision], storage.size_bytes)
        for each in inspection.recomputed:
            call = each.layer.index, each.microbatch
            add(call, each.layer.name, "recomputed_bytes", each.size_bytes)
    # What belongs to no layer comes last.
    calls = sorted(figures, key=lambda call: (call[1], call[0] is None, call[0] or 0))
    return tuple(_figures(call, names[call], figures[call]) for call in calls)


def _figures(call: _Call, name: str, sums: dict[str, float]) -> LayerFigures:
    layer, microbatch = call
    figures = LayerFigures(layer, name, microbatch)
    whole = {what: int(sum_) if what.endswith("_bytes") else sum_ for what, sum_ in sums.items()}
    return dataclasses.replace(figures, **whole)  # type: ignore[arg-type]
