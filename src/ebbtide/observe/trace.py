"""The trace of one step: prints, draws itself, and is saved for Perfetto."""

from __future__ import annotations

import base64
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any, Final, final

from ebbtide.observe.memory import StepMemory
from ebbtide.observe.plots import (
    draw_lanes_figure,
    place_side_by_side,
    render_timeline,
    save_figure,
)
from ebbtide.runtime.events import LANES, Owner, TraceEvent
from ebbtide.units import brief, count, text_block

# ---- Write traces as Chrome trace-event JSON, which Perfetto and chrome://tracing open ----

MEMORY_COUNTER: Final = "memory"
_ROWS: Final = 100  # thread numbers reserved for each lane


def write_chrome(path: str | PathLike[str], document: Mapping[str, Any]) -> None:
    """Write what `chrome_document` returns, perhaps with other keys, to a file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file, allow_nan=False)


def chrome_document(
    events: Iterable[TraceEvent], memory: StepMemory | None = None
) -> dict[str, Any]:
    """Return the content of a file in which each lane is a thread.

    Memory is a counter, with a series for each owner.
    """
    counters = [] if memory is None else memory_counters(memory)
    return {"displayTimeUnit": "ms", "traceEvents": chrome_events(events) + counters}


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


def chrome_events(events: Iterable[TraceEvent]) -> list[dict[str, Any]]:
    """Return the events as dictionaries, with times in microseconds.

    A viewer can draw two overlapping slices in one row only if one encloses the other. A lane whose
    events overlap otherwise (those of two disk threads, for example) is spread over several rows.
    """
    events = tuple(events)
    tracks = {
        lane: iter(place_side_by_side(event for event in events if event.lane == lane))
        for lane in LANES
    }
    names: dict[int, str] = {}
    rows = []
    for event in events:
        track = next(tracks[event.lane])
        thread = LANES.index(event.lane) * _ROWS + track
        names[thread] = f"{event.lane} {track + 1}" if track else event.lane
        rows.append(_chrome_event(event, thread))
    labels: list[dict[str, Any]] = [_label("process_name", 0, name="ebbtide")]
    for thread, name in sorted(names.items()):
        labels.append(_label("thread_name", thread, name=name))
        labels.append(_label("thread_sort_index", thread, sort_index=thread))
    return labels + rows


def _label(what: str, thread: int, **args: str | int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 0, "tid": thread, "args": args}


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
            "lane": event.lane,
            "layer": event.layer,
            "microbatch": event.microbatch,
            "size_bytes": event.size_bytes,
            "kind": event.kind,
        },
    }


# ---- The trace of one step ----

_NOTEBOOK_COLUMNS: Final = 100
_NOTEBOOK_PIXELS_PER_INCH: Final = 100


@final
class Trace:
    """The events of one step, in the order in which they began.

    Printing a trace shows how busy each lane was. `timeline` and `plot` show when each lane did
    what, and `save` writes a file for Perfetto.

    Attributes:
        events: the events.
        memory: what memory held in each phase of the step; None where it was not recorded.
    """

    def __init__(self, events: Iterable[TraceEvent] = (), memory: StepMemory | None = None) -> None:
        self.events = tuple(sorted(events, key=lambda event: (event.begin_s, event.end_s)))
        self.memory = memory

    @property
    def duration_s(self) -> float:
        """Seconds from the begin of the first event to the latest end; 0 for an empty trace."""
        if not self.events:
            return 0.0
        return max(event.end_s for event in self.events) - self.events[0].begin_s

    def save(self, path: str | PathLike[str]) -> None:
        """Write the trace as Chrome trace-event JSON, which https://ui.perfetto.dev opens.

        Where memory was recorded, the file has it as a counter with a series for each owner.

        Args:
            path: path of the file, such as ``"trace.json"``.

        Raises:
            OSError: the file cannot be written.

        Source: Trace Event Format, Google.
        """
        write_chrome(path, chrome_document(self.events, self.memory))

    def timeline(self, width: int = 80) -> str:
        """Draw the lanes over time in plain text.

        A column shows what runs in the middle of its time: passes as ``F3>>>`` and ``B3<<<``,
        copies and waits with the layer's number, and signs alone where there is no room for a
        label. The first line says how long a column is, and the last ones explain the signs.

        Args:
            width: largest number of columns in a line, 40 or more.

        Returns:
            Lines of ASCII, without a newline at the end.

        Raises:
            PolicyError: ``width`` is less than 40.
        """
        return render_timeline(self.events, width)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw what each lane did when as a picture, 12 inches wide.

        What memory held meanwhile is on the page that `OffloadHandle.report` writes.

        Args:
            path: path of the file, such as ``"step.png"``; ``.svg`` and ``.pdf`` work too.

        Raises:
            PolicyError: the path has another suffix.
            ImportError: matplotlib is not installed; ``pip install "ebbtide[plots]"`` installs it.
            OSError: the file cannot be written.
        """
        save_figure(draw_lanes_figure(self.events), path)

    def __repr__(self) -> str:
        return brief("Trace", [count(len(self.events), "event"), f"{self.duration_s:.4f} s"])

    def _repr_html_(self) -> str:
        return (self._picture() if self.events else "") + text_block(str(self))

    def _picture(self) -> str:
        """Return the lanes for a notebook: as a picture, or as text if matplotlib is missing."""
        try:
            figure = draw_lanes_figure(self.events)
        except ImportError:
            return text_block(self.timeline(_NOTEBOOK_COLUMNS))
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=_NOTEBOOK_PIXELS_PER_INCH)
        data = base64.b64encode(file.getvalue()).decode()
        source = f"data:image/png;base64,{data}"
        return f'<img src="{source}" alt="lanes over time" style="max-width: 100%" />'

    def __str__(self) -> str:
        if not self.events:
            return "an empty trace"
        groups: dict[tuple[str, str], list[TraceEvent]] = defaultdict(list)
        for event in self.events:
            copies = event.what in ("offload", "reload")
            groups[event.lane, (copies and event.kind) or event.what].append(event)
        lines = [f"{'lane':<14} {'what':<9} {'events':>7} {'MiB':>10} {'busy s':>9} {'share':>6}"]
        whole_s = self.duration_s or 1.0
        for lane, what in sorted(groups, key=lambda key: (LANES.index(key[0]), key[1])):
            events = groups[lane, what]
            size_mib = sum(event.size_bytes for event in events) / 2**20
            busy_s = sum(event.duration_s for event in events)
            lines.append(
                f"{lane:<14} {what:<9} {len(events):>7,} {size_mib:>10,.1f} {busy_s:>9.4f} "
                f"{busy_s / whole_s:>6.0%}"
            )
        return "\n".join(lines)
