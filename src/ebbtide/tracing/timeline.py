"""A trace as text: a row for each lane, time from left to right.

Columns are bins. A bin shows what fills most of it, or nothing if it is idle for more than half; of
events inside one another the innermost counts. While compute waits its own row is empty, and the
row below says for what.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from ebbtide.errors import PolicyError
from ebbtide.tracing.events import TraceEvent

# Two signs for each kind: a block without a label takes the one that its neighbour has not.
_SIGNS = {
    "forward": ">)",
    "backward": "<(",
    "rebuild": "+x",
    "wait": "~-",
    "offload": "vu",
    "reload": "^n",
}
_OTHER_SIGNS = "#%"
_MOMENT = "|"  # a release, and a tick of the axis
_SHORT = ":"
_MIN_WIDTH = 40
_MIN_TICK_COLUMNS = 9
_PASSES = ("forward", "backward")


def render_timeline(events: Sequence[TraceEvent], lanes: Sequence[str], width: int) -> str:
    """The rows of the timeline, between a line of figures and a legend.

    Args:
        events: in the order in which they began.
        lanes: from top to bottom; those without events are left out.
        width: columns that no line exceeds, 40 or more.

    Returns:
        Lines of ASCII, without a newline at the end.

    Raises:
        PolicyError: ``width`` is less than 40.
    """
    if width < _MIN_WIDTH:
        raise PolicyError(f"width must be {_MIN_WIDTH} columns or more, got {width!r}")
    if not events:
        return "an empty trace"
    rows = _rows(events, lanes)
    unit = TimeUnit.of(events)
    margin = max(len(name) for name in (*rows, unit.name)) + 1
    axis = _Axis(unit.begin_s, unit.end_s, width - margin)
    drawn = {
        name: _moments(here, axis)
        if name == "release"
        else _blocks(here, axis, waits=name == "wait")
        for name, here in rows.items()
    }
    heading = _wrap(_figures(events, axis, unit), ", ", width)
    legend = _wrap(_legend(events, "".join(drawn.values())), "  ", width)
    drawn = {unit.name: _tick_row(axis, unit), **drawn}
    lines = [f"{name:<{margin}}{row}" for name, row in drawn.items()]
    return "\n".join(line.rstrip() for line in (*heading, *lines, *legend))


@final
@dataclass(frozen=True)
class TimeUnit:
    """From when until when a trace goes, and in which unit to write its times.

    Attributes:
        name: ``"s"``, ``"ms"`` or ``"us"``.
        per_s: how many of it are a second.
        begin_s: of the first event, seconds.
        end_s: of the last event to end, seconds.
    """

    name: str
    per_s: float
    begin_s: float
    end_s: float

    @classmethod
    def of(cls, events: Iterable[TraceEvent]) -> TimeUnit:
        """The largest unit of which the events take one or more; there must be an event."""
        times = [time_s for event in events for time_s in (event.begin_s, event.end_s)]
        begin_s, end_s = min(times), max(times)
        whole_s = (end_s - begin_s) * (1 + 1e-6)  # 1 ms is 1 ms after rounding too
        if whole_s >= 1 or not whole_s:
            return cls("s", 1.0, begin_s, end_s)
        return cls(*(("ms", 1e3) if whole_s >= 1e-3 else ("us", 1e6)), begin_s, end_s)

    def write(self, duration_s: float) -> str:
        """Three digits and the unit: ``"12.5 ms"``."""
        value = duration_s * self.per_s
        digits = 0 if value <= 0 else min(6, max(0, 2 - math.floor(math.log10(value))))
        return f"{value:.{digits}f} {self.name}"


class Segment(NamedTuple):
    """A stretch of time, in seconds, in which an event is the innermost of its lane."""

    begin_s: float
    end_s: float
    number: int  # of the event


def segments(events: Sequence[TraceEvent]) -> list[Segment]:
    """What is seen of the events of a lane: at each time the one that began last.

    Of those that began together it is the one that ends first, which the others enclose.
    """
    starts = sorted(range(len(events)), key=lambda number: events[number].begin_s, reverse=True)
    times = sorted({time for event in events for time in (event.begin_s, event.end_s)})
    running: list[tuple[float, float, int]] = []
    result: list[Segment] = []
    for begin_s, end_s in itertools.pairwise(times):
        while starts and events[starts[-1]].begin_s <= begin_s:
            number = starts.pop()
            heapq.heappush(running, (-events[number].begin_s, events[number].end_s, number))
        while running and running[0][1] <= begin_s:
            heapq.heappop(running)
        if not running:
            continue
        number = running[0][2]
        if result and result[-1].number == number and result[-1].end_s == begin_s:
            begin_s = result.pop().begin_s
        result.append(Segment(begin_s, end_s, number))
    return result


def short_label(event: TraceEvent) -> str:
    """``F3.m2`` for a pass, ``3.m2`` for what says by its look what it is."""
    if event.layer is None:
        return ""
    return event.label if event.what in _PASSES else event.label.removeprefix(f"{event.what} ")


@final
@dataclass(frozen=True)
class _Axis:
    begin_s: float
    end_s: float
    columns: int

    def position(self, time_s: float) -> float:
        """In columns, from 0 to the number of columns."""
        whole_s = self.end_s - self.begin_s
        return (time_s - self.begin_s) / whole_s * self.columns if whole_s else 0.0

    def column(self, time_s: float) -> int:
        return min(int(self.position(time_s)), self.columns - 1)


def _rows(events: Sequence[TraceEvent], lanes: Sequence[str]) -> dict[str, list[TraceEvent]]:
    """What goes into each row: waits also into their lane's, where they leave a gap."""
    rows: dict[str, list[TraceEvent]] = {}
    for number, lane in enumerate(lanes):
        here = [event for event in events if event.lane == lane and event.what != "release"]
        if any(event.what != "wait" for event in here):
            rows[lane] = here
        if number == 0:  # both are moments of compute
            rows["wait"] = [event for event in events if event.what == "wait"]
            rows["release"] = [event for event in events if event.what == "release"]
    return {name: here for name, here in rows.items() if here}


def _blocks(events: Sequence[TraceEvent], axis: _Axis, *, waits: bool) -> str:
    """A row of blocks; waits are seen only in a row of their own."""
    shown = [waits or event.what != "wait" for event in events]
    owners = _owners(events, shown, axis)
    cells: list[str] = []
    for owner, run in itertools.groupby(owners):
        room = len(list(run))
        before = cells[-1] if cells else " "
        cells += " " * room if owner is None else _block(events[owner], room, before)
    for number in set(range(len(events))).difference(owners):
        column = axis.column((events[number].begin_s + events[number].end_s) / 2)
        if shown[number] and cells[column] == " ":
            cells[column] = _SHORT
    return "".join(cells)


def _block(event: TraceEvent, room: int, before: str) -> str:
    """The label if there is room, and signs that tell the block from the cell before it."""
    label, signs = short_label(event), _SIGNS.get(event.what, _OTHER_SIGNS)
    # Passes say by their letter where they begin; numbers side by side would run together.
    if label and len(label) <= room - (event.what not in _PASSES):
        return label.ljust(room, signs[0])
    return signs[before == signs[0]] * room


def _owners(events: Sequence[TraceEvent], shown: Sequence[bool], axis: _Axis) -> list[int | None]:
    """For each column the number of the event that it shows."""
    shares: list[dict[int, float]] = [defaultdict(float) for _ in range(axis.columns)]
    for segment in segments(events):
        if not shown[segment.number]:
            continue
        low, high = axis.position(segment.begin_s), axis.position(segment.end_s)
        for column in range(int(low), min(math.ceil(high), axis.columns)):
            shares[column][segment.number] += min(high, column + 1) - max(low, column)
    return [_owner(events, share) for share in shares]


def _owner(events: Sequence[TraceEvent], share: dict[int, float]) -> int | None:
    """Of the kind that fills most of a bin, the event that fills most; None in an idle one."""
    kinds: dict[str, float] = defaultdict(float)
    for number, part in share.items():
        kinds[events[number].what] += part
    if sum(kinds.values()) < 0.5 - 1e-9:  # times are rounded
        return None
    kind = max(kinds, key=kinds.__getitem__)
    return max((n for n in share if events[n].what == kind), key=share.__getitem__)


def _moments(events: Sequence[TraceEvent], axis: _Axis) -> str:
    """A marker where each begins, with the layer's number if there is room before the next."""
    labels: dict[int, set[str]] = defaultdict(set)
    for event in events:
        labels[axis.column(event.begin_s)].add(short_label(event))
    marks = [(at, texts.pop() if len(texts) == 1 else "") for at, texts in sorted(labels.items())]
    return _marked(marks, axis.columns)


def _marked(marks: Sequence[tuple[int, str]], columns: int) -> str:
    row = ""
    nexts = [at for at, _ in marks[1:]] + [columns]
    for (at, label), end in zip(marks, nexts, strict=True):
        fits = at + 1 + len(label) <= end
        row = row.ljust(at) + _MOMENT + (label if fits else "")
    return row


def _tick_row(axis: _Axis, unit: TimeUnit) -> str:
    """A few round times, as far apart as their labels need."""
    begin, end = axis.begin_s * unit.per_s, axis.end_s * unit.per_s
    if begin == end:
        return f"{_MOMENT}{begin:g}"
    for step, digits in _steps((end - begin) / axis.columns):
        apart = step / (end - begin) * axis.columns
        longest = max(len(f"{value:.{digits}f}") for value in (begin, end))
        if apart >= max(_MIN_TICK_COLUMNS, longest + 2):
            break
    first, last = math.ceil(begin / step - 1e-9), math.floor(end / step + 1e-9)
    times = [number * step for number in range(first, last + 1)]
    return _marked(
        [(axis.column(time / unit.per_s), f"{time:.{digits}f}") for time in times], axis.columns
    )


def _steps(smallest: float) -> Iterator[tuple[float, int]]:
    """1, 2, 5, 10, 20 ... from ``smallest`` on, with the digits they need after the point."""
    for exponent in itertools.count(math.floor(math.log10(smallest))):
        for factor in (1, 2, 5):
            yield factor * 10.0**exponent, max(0, -exponent)


def _figures(events: Sequence[TraceEvent], axis: _Axis, unit: TimeUnit) -> list[str]:
    whole_s = axis.end_s - axis.begin_s
    column = unit.write(whole_s / axis.columns)
    figures = [unit.write(whole_s)]
    waits_s = [event.duration_s for event in events if event.what == "wait"]
    if waits_s:
        figures.append(f"compute waited {unit.write(sum(waits_s))}")
    return [*figures, f"a column is {column}"] if whole_s else figures


def _legend(events: Sequence[TraceEvent], rows: str) -> list[str]:
    """What the marks in the rows mean."""
    kinds = {event.what for event in events}
    parts = []
    for what in (*_SIGNS, *sorted(kinds - {*_SIGNS, "release"})):
        signs = _SIGNS.get(what, _OTHER_SIGNS)
        letter = what[0].upper() if what in _PASSES else ""
        if what in kinds and any(sign in rows for sign in signs + letter):
            parts.append(f"{letter}3 {signs} {what}")
    if "release" in kinds:
        parts.append(f"{_MOMENT}3 release")
    return [*parts, *([f"{_SHORT} under half a column"] if _SHORT in rows else [])]


def _wrap(parts: Sequence[str], separator: str, width: int) -> list[str]:
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(separator) + len(part) <= width:
            lines[-1] += separator + part
        else:
            lines.append(part)
    return lines
