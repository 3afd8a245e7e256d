"""Write traces as Chrome trace-event JSON, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Final

from ebbtide.tracing.events import TraceEvent
from ebbtide.tracing.step_memory import Owner, StepMemory

MEMORY_COUNTER: Final = "memory"
_ROWS = 100  # thread numbers reserved for each lane


def write_chrome(path: str | PathLike[str], document: Mapping[str, Any]) -> None:
    """Write what `chrome_document` returns, perhaps with other keys, to a file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file, allow_nan=False)


def chrome_document(
    events: Iterable[TraceEvent], lanes: Sequence[str], memory: StepMemory | None = None
) -> dict[str, Any]:
    """Return the content of a file in which each lane is a thread, in the order of ``lanes``.

    Memory is a counter, with a series for each owner.
    """
    counters = [] if memory is None else memory_counters(memory)
    return {"displayTimeUnit": "ms", "traceEvents": chrome_events(events, lanes) + counters}


def memory_counters(memory: StepMemory) -> list[dict[str, Any]]:
    """Return one value of the counter ``memory`` for the begin of each phase, in bytes.

    Every value has all series that occur, because a viewer would take a missing one as unchanged.
    """
    owners = [each for each in Owner if any(each in sample.owned for sample in memory.samples)]
    return [
        {
            "name": MEMORY_COUNTER,
            "ph": "C",
            "pid": 0,
            "ts": sample.begin_s * 1e6,
            "args": {owner.value: sample.owned.get(owner, 0) for owner in owners},
        }
        for sample in memory.samples
    ]


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
