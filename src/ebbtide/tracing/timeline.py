"""Draw a trace as text: one row per lane, time from left to right.

Each column is a bin of time. It shows the kind of event that fills most of it, or a space if the
lane is idle for more than half of it. Of nested events the innermost counts. While compute waits,
the row of compute is empty, and the row below it shows which layer it waits for.
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

# Two signs for each kind, so that a block without a label can differ from its left neighbour.
_SIGNS = {
    "forward": ">)",
    "backward": "<(",
    "rebuild": "+x",
    "recompute": "*o",
    "wait": "~-",
    "offload": "vu",
    "reload": "^n",
}
_OTHER_SIGNS = "#%"
_MOMENT = "|"  # marks a release or a tick of the axis
_SHORT = ":"
_MIN_WIDTH = 40
_MIN_TICK_COLUMNS = 9
_PASSES = ("forward", "backward")


def render_timeline(events: Sequence[TraceEvent], lanes: Sequence[str], width: int) -> str:
    """Render the timeline: a line of figures, the rows, and a legend.

    Args:
        events: the events in the order in which they began.
        lanes: names of the lanes from top to bottom; lanes without events are left out.
        width: largest number of columns in a line, 40 or more.

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
    """The time range of a trace and the unit in which to write its times.

    Attributes:
        name: name of the unit: ``"s"``, ``"ms"`` or ``"us"``.
        per_s: number of units in a second.
        begin_s: begin of the first event, in seconds.
        end_s: end of the event that ends last, in seconds.
    """

    name: str
    per_s: float
    begin_s: float
    end_s: float

    @classmethod
    def of(cls, events: Iterable[TraceEvent]) -> TimeUnit:
        """Return the largest unit of which the events last one or more.

        There must be at least one event.
        """
        times = [time_s for event in events for time_s in (event.begin_s, event.end_s)]
        return cls.over(min(times), max(times))

    @classmethod
    def over(cls, begin_s: float, end_s: float) -> TimeUnit:
        """Return the largest unit of which the time between the two is one or more."""
        # The margin makes up for rounding, so that a trace of 1 ms is written in ms.
        whole_s = (end_s - begin_s) * (1 + 1e-6)
        if whole_s >= 1 or not whole_s:
            return cls("s", 1.0, begin_s, end_s)
        return cls(*(("ms", 1e3) if whole_s >= 1e-3 else ("us", 1e6)), begin_s, end_s)

    def write(self, duration_s: float) -> str:
        """Write a duration with three digits and the unit, such as ``"12.5 ms"``."""
        value = duration_s * self.per_s
        digits = 0 if value <= 0 else min(6, max(0, 2 - math.floor(math.log10(value))))
        return f"{value:.{digits}f} {self.name}"


class Segment(NamedTuple):
    """A stretch of time, in seconds, in which one event is the innermost of its lane."""

    begin_s: float
    end_s: float
    number: int  # index of the event


def segments(events: Sequence[TraceEvent]) -> list[Segment]:
    """Return the visible stretches of a lane's events: at each time, the event that began last.

    Among events that began together, the one that ends first is visible, since the others enclose
    it.
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
    """Return ``F3.m2`` for a pass, and ``3.m2`` for other events, whose look shows their kind."""
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
        """Return the position of a time in columns, from 0 to the number of columns."""
        whole_s = self.end_s - self.begin_s
        return (time_s - self.begin_s) / whole_s * self.columns if whole_s else 0.0

    def column(self, time_s: float) -> int:
        return min(int(self.position(time_s)), self.columns - 1)


def _rows(events: Sequence[TraceEvent], lanes: Sequence[str]) -> dict[str, list[TraceEvent]]:
    """Return the events of each row.

    Waits are also among the events of their lane's row, where they leave a gap.
    """
    rows: dict[str, list[TraceEvent]] = {}
    for number, lane in enumerate(lanes):
        here = [event for event in events if event.lane == lane and event.what != "release"]
        if any(event.what != "wait" for event in here):
            rows[lane] = here
        if number == 0:  # waits and releases happen on the compute lane, so their rows follow it
            rows["wait"] = [event for event in events if event.what == "wait"]
            rows["release"] = [event for event in events if event.what == "release"]
    return {name: here for name, here in rows.items() if here}


def _blocks(events: Sequence[TraceEvent], axis: _Axis, *, waits: bool) -> str:
    """Draw a row of blocks. Waits are drawn only if ``waits``, in the row of their own."""
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
    """Draw a block: its label if there is room, and signs that differ from the cell before it."""
    label, signs = short_label(event), _SIGNS.get(event.what, _OTHER_SIGNS)
    # The letter of a pass separates it from the block before. A label that is only a number needs a
    # sign after it, or it would run together with the next number.
    if label and len(label) <= room - (event.what not in _PASSES):
        return label.ljust(room, signs[0])
    return signs[before == signs[0]] * room


def _owners(events: Sequence[TraceEvent], shown: Sequence[bool], axis: _Axis) -> list[int | None]:
    """Return for each column the index of the event that it shows; None if it shows none."""
    shares: list[dict[int, float]] = [defaultdict(float) for _ in range(axis.columns)]
    for segment in segments(events):
        if not shown[segment.number]:
            continue
        low, high = axis.position(segment.begin_s), axis.position(segment.end_s)
        for column in range(int(low), min(math.ceil(high), axis.columns)):
            shares[column][segment.number] += min(high, column + 1) - max(low, column)
    return [_owner(events, share) for share in shares]


def _owner(events: Sequence[TraceEvent], share: dict[int, float]) -> int | None:
    """Return the event that a bin shows; None if the bin is idle for more than half of its time.

    It is the event that fills most of the bin among those of the kind that fills most of it.
    """
    kinds: dict[str, float] = defaultdict(float)
    for number, part in share.items():
        kinds[events[number].what] += part
    if sum(kinds.values()) < 0.5 - 1e-9:  # the margin makes up for rounded times
        return None
    kind = max(kinds, key=kinds.__getitem__)
    return max((n for n in share if events[n].what == kind), key=share.__getitem__)


def _moments(events: Sequence[TraceEvent], axis: _Axis) -> str:
    """Draw a marker where each event begins, with the layer's number if there is room for it."""
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
    """Draw the axis: ticks at a few round times, as far apart as their labels need."""
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
    """Yield the steps 1, 2, 5, 10, 20 ... from about ``smallest`` on.

    Each comes with the number of digits that its multiples need after the decimal point.
    """
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
    """Return entries that explain the signs which occur in the rows."""
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
