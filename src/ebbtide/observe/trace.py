"""A trace in a notebook: its lanes over time as a drawing, and the sums as a table."""

from __future__ import annotations

import html
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Final, NamedTuple, final

from ebbtide.errors import PolicyError
from ebbtide.observe.plots import render_timeline, write_memory_plot, write_plot
from ebbtide.runtime.events import LANES, Owner, StepMemory, TraceEvent
from ebbtide.units import COLOURS, Share, brief, card, count, folded, legend, note, text_block

_LEFT: Final = 70  # units of the names of the lanes,
_RIGHT: Final = 800  # and of all
_ROW: Final = 20
_MOST_BLOCKS: Final = 400  # a trace with more events is drawn in as many columns
_TICKS: Final = 4


class _Block(NamedTuple):
    """A rectangle of a lane, in seconds since the begin of the step."""

    what: str
    begin_s: float
    end_s: float
    label: str


def trace_card(events: Sequence[TraceEvent], lanes: Sequence[str], sums: str) -> str:
    """Return a trace as HTML.

    Args:
        events: its events.
        lanes: the names of the lanes, from top to bottom.
        sums: the table of sums, as text.
    """
    if not events:
        return card("Trace", note(sums))
    end_s = max(event.end_s for event in events)
    waited_s = sum(event.duration_s for event in events if event.what == "wait")
    words = f"{len(events):,} events, {_time(end_s)}; compute waited {_time(waited_s)} for copies"
    kinds = [kind for kind in COLOURS if any(event.what == kind for event in events)]
    return card(
        "Trace of a step",
        note(words),
        f'<div class="ebbtide-wide">{_drawing(events, lanes, end_s)}</div>',
        legend(Share(kind, kind, 1) for kind in kinds),
        folded("Sums by lane", text_block(sums)),
    )


def _drawing(events: Sequence[TraceEvent], lanes: Sequence[str], end_s: float) -> str:
    shown = [lane for lane in lanes if any(event.lane == lane for event in events)]
    height = _ROW * (len(shown) + 1)
    lines = [f'<svg viewBox="0 0 {_RIGHT} {height}" role="img" aria-label="lanes over time">']
    scale = (_RIGHT - _LEFT - 2) / (end_s or 1.0)
    for row, lane in enumerate(shown):
        top = row * _ROW
        lines.append(f'<text x="0" y="{top + 14}">{html.escape(lane)}</text>')
        for block in _blocks([event for event in events if event.lane == lane], end_s):
            left = _LEFT + block.begin_s * scale
            width = max(0.6, (block.end_s - block.begin_s) * scale)
            lines.append(
                f'<rect x="{left:.1f}" y="{top + 3}" width="{width:.1f}" height="{_ROW - 6}" '
                f'fill="{COLOURS.get(block.what, COLOURS["other"])}">'
                f"<title>{html.escape(block.label)}</title></rect>"
            )
    for tick in range(_TICKS + 1):
        left = _LEFT + (_RIGHT - _LEFT - 2) * tick / _TICKS
        anchor = "start" if not tick else "end" if tick == _TICKS else "middle"
        lines.append(
            f'<text x="{left:.1f}" y="{height - 5}" text-anchor="{anchor}">'
            f"{_time(end_s * tick / _TICKS)}</text>"
        )
    return "\n".join([*lines, "</svg>"])


def _blocks(events: Sequence[TraceEvent], end_s: float) -> Iterator[_Block]:
    """Yield what a lane shows: its events, or what fills most of each column if they are many."""
    if len(events) <= _MOST_BLOCKS:
        for event in events:
            label = f"{event.label} {event.name}".rstrip()
            yield _Block(
                event.what, event.begin_s, event.end_s, f"{label}, {_time(event.duration_s)}"
            )
        return
    column_s = end_s / _MOST_BLOCKS
    filled: list[dict[str, float]] = [{} for _ in range(_MOST_BLOCKS)]
    for event in events:
        first, last = (
            min(_MOST_BLOCKS - 1, int(s / column_s)) for s in (event.begin_s, event.end_s)
        )
        for column in range(first, last + 1):
            begin_s, after_s = column * column_s, (column + 1) * column_s
            part_s = min(event.end_s, after_s) - max(event.begin_s, begin_s)
            filled[column][event.what] = filled[column].get(event.what, 0.0) + part_s
    begin = 0
    kinds = [max(each, key=lambda kind: each[kind]) if each else "" for each in filled]
    for column in range(1, _MOST_BLOCKS + 1):
        if column == _MOST_BLOCKS or kinds[column] != kinds[begin]:
            if kinds[begin]:
                yield _Block(kinds[begin], begin * column_s, column * column_s, kinds[begin])
            begin = column


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


# ---- Write traces as Chrome trace-event JSON, which Perfetto and chrome://tracing open ----

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


# ---- The trace of one step ----


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
        write_chrome(path, chrome_document(self.events, LANES, self.memory))

    def timeline(self, width: int = 80) -> str:
        """Draw the lanes over time in plain text.

        A column shows what fills most of its time: passes as ``F3>>>`` and ``B3<<<``, copies and
        waits with the layer's number, and signs alone where there is no room for a label. The last
        lines explain the signs.

        Args:
            width: largest number of columns in a line, 40 or more.

        Returns:
            Lines of ASCII, without a newline at the end. The time axis is in s, ms or us.

        Raises:
            PolicyError: ``width`` is less than 40.
        """
        return render_timeline(self.events, LANES, width)

    def plot(self, path: str | PathLike[str], *, show: str = "lanes") -> None:
        """Draw the lanes, or memory, over time as a picture, 12 inches wide.

        Args:
            path: path of the file, such as ``"step.png"``; ``.svg`` and ``.pdf`` work too.
            show: ``"lanes"`` for what each lane did when, ``"memory"`` for what memory held.

        Raises:
            PolicyError: the path has another suffix, ``show`` is neither, or the trace has no
                memory.
            ImportError: matplotlib is not installed; ``pip install "ebbtide[plots]"`` installs it.
            OSError: the file cannot be written.
        """
        if show not in ("lanes", "memory"):
            raise PolicyError(f'show must be "lanes" or "memory", got {show!r}')
        if show == "lanes":
            write_plot(path, self.events, LANES)
        elif self.memory is None:
            raise PolicyError(
                "the trace has no memory to draw, because it was not recorded; offload the model "
                'with trace=True and run a step, or draw the lanes: show="lanes"'
            )
        else:
            write_memory_plot(path, self.memory)

    def __repr__(self) -> str:
        return brief("Trace", [count(len(self.events), "event"), f"{self.duration_s:.4f} s"])

    def _repr_html_(self) -> str:
        return trace_card(self.events, LANES, str(self))

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
