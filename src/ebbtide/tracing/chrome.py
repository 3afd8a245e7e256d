"""Write traces as Chrome trace-event JSON, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any

from ebbtide.tracing.events import TraceEvent

_ROWS = 100  # thread numbers reserved for each lane


def write_chrome(
    path: str | PathLike[str], events: Iterable[TraceEvent], lanes: Sequence[str]
) -> None:
    """Write a file in which each lane is a thread; threads are in the order of ``lanes``."""
    document = {"displayTimeUnit": "ms", "traceEvents": chrome_events(events, lanes)}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file)


def chrome_events(events: Iterable[TraceEvent], lanes: Sequence[str]) -> list[dict[str, Any]]:
    """Return the events as dictionaries, with times in microseconds.

    A viewer can draw two overlapping slices in one row only if one encloses the other. A lane whose
    events overlap otherwise (those of two disk threads, for example) is spread over several rows.
    """
    named: dict[int, str] = {}
    rows: dict[str, list[list[float]]] = {lane: [] for lane in lanes}
    result: list[dict[str, Any]] = []
    for event in events:
        row = _place(rows[event.lane], event.begin_s, event.end_s)
        thread = lanes.index(event.lane) * _ROWS + row
        named[thread] = event.lane if row == 0 else f"{event.lane} {row + 1}"
        result.append(_chrome_event(event, thread))
    process = {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "ebbtide"}}
    labels: list[dict[str, Any]] = [process]
    for thread, name in sorted(named.items()):
        about = {"pid": 0, "tid": thread, "ph": "M"}
        labels.append({"name": "thread_name", "args": {"name": name}, **about})
        labels.append({"name": "thread_sort_index", "args": {"sort_index": thread}, **about})
    return labels + result


def _chrome_event(event: TraceEvent, thread: int) -> dict[str, Any]:
    instant = event.what == "release"
    return {
        "name": event.label,
        "cat": event.what,
        "pid": 0,
        "tid": thread,
        "ts": event.begin_s * 1e6,
        **({"ph": "i", "s": "t"} if instant else {"ph": "X", "dur": event.duration_s * 1e6}),
        "args": {
            "module": event.name,
            "layer": event.layer,
            "microbatch": event.microbatch,
            "size_bytes": event.size_bytes,
        },
    }


def _place(rows: list[list[float]], begin_s: float, end_s: float) -> int:
    """Add an event to the first row that can hold it and return the number of that row.

    A row can hold the event if nothing in it is still open when the event begins, or if the event
    ends within the innermost event that is still open.

    Args:
        rows: for each row the ends of its open events, in seconds, outermost first; updated.
        begin_s: begin of the event, in seconds.
        end_s: end of the event, in seconds.
    """
    for number, ends in enumerate(rows):
        while ends and ends[-1] <= begin_s:
            ends.pop()
        if not ends or end_s <= ends[-1]:
            ends.append(end_s)
            return number
    rows.append([end_s])
    return len(rows) - 1
