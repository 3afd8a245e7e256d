"""The colours of charts, which are the same in pictures and on pages.

They are the palette of Okabe and Ito, whose colours colour-blind readers can tell apart, and tints
of it. Colours of one chart also differ in lightness, and some areas are hatched.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from ebbtide.errors import PolicyError
from ebbtide.runtime.events import Owner, StepMemory, TraceEvent
from ebbtide.units import format_size

INK: Final = "#222222"
OTHER_EVENT_COLOUR: Final = "#999999"
EVENT_COLOURS: Final = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "rebuild": "#CC79A7",
    "recompute": "#F0E442",
    "wait": "#D55E00",
    "offload": "#E69F00",
    "reload": "#009E73",
}
HATCHED_EVENTS: Final = frozenset({"wait"})

OWNER_COLOURS: Final = {
    Owner.OTHER: "#999999",
    Owner.PARAMETERS: "#0072B2",
    Owner.OPTIMIZER: "#003F63",
    Owner.GRADIENTS: "#56B4E9",
    Owner.WEIGHTS: "#A9D8F3",
    Owner.INPUTS: "#C4C4C4",
    Owner.OUTPUTS: "#6E6E6E",
    Owner.KEPT: "#009E73",
    Owner.LEAVING: "#E69F00",
    Owner.REFERENCED: "#8A5F00",
    Owner.RELOADED: "#F0E442",
    Owner.REBUILT: "#CC79A7",
    Owner.RECOMPUTED: "#7D3C5D",
    Owner.PASSED: "#F0B48C",
    Owner.RUNNING: "#D55E00",
}
# Tints of the colour of another owner.
HATCHED_OWNERS: Final = frozenset(
    {
        Owner.OPTIMIZER,
        Owner.WEIGHTS,
        Owner.OUTPUTS,
        Owner.REFERENCED,
        Owner.RECOMPUTED,
        Owner.PASSED,
    }
)


# ---- Figures of matplotlib that are written to a file, without a window and without pyplot ----

SUFFIXES: Final = (".png", ".svg", ".pdf")
WIDTH_INCHES: Final = 12.0
_PIXELS_PER_INCH: Final = 200


def make_figure(path: str | PathLike[str], height_inches: float) -> Any:
    """Return a figure that can be saved to the path.

    Raises:
        PolicyError: the suffix is not one of `SUFFIXES`.
        ImportError: matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise PolicyError(f"path must end in {', '.join(SUFFIXES)}, got {str(path)!r}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        message = 'a plot needs matplotlib: pip install "ebbtide[plots]"'
        raise ImportError(message) from error

    size = (WIDTH_INCHES, height_inches)
    figure = Figure(figsize=size, dpi=_PIXELS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: str | PathLike[str]) -> None:
    """Write the figure in the format that the suffix of the path names."""
    figure.savefig(path, format=Path(path).suffix.lower()[1:])


# ---- Draw a trace as text: one row per lane, time from left to right ----
#
# Each column is a bin of time. It shows the kind of event that fills most of it, or a space if the
# lane is idle for more than half of it. Of nested events the innermost counts. While compute waits,
# the row of compute is empty, and the row below it shows which layer it waits for.

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


# ---- Draw a trace as a picture: one row per lane, time from left to right, a colour for each kind

_DARK = ("backward", "reload", "wait")  # kinds whose colour is so dark that labels are white
_LANE_INCHES = {"compute": 0.62, "release": 0.3}
_OTHER_LANE_INCHES = 0.42
_ROW_INCHES = 0.2  # height of a row where events of one lane overlap
_AROUND_INCHES = 1.25  # height of title, axis and legend
_LABEL_POINTS = (8.0, 7.0, 6.0)
_CHARACTER = 0.62  # width of a digit divided by the font size
_EDGED_POINTS = 3.0  # a narrower block gets no white edge, which would hide it


class _Block(NamedTuple):
    """The rectangle of an event: times in seconds; distance from the top and height in inches."""

    event: TraceEvent
    begin_s: float
    end_s: float
    top: float
    height: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s


class _Lane(NamedTuple):
    name: str
    middle: float  # inches from the top
    blocks: list[_Block]
    releases: list[TraceEvent]


def write_plot(
    path: str | PathLike[str], events: Sequence[TraceEvent], lanes: Sequence[str]
) -> None:
    """Write the picture, 12 inches wide and as high as its lanes need.

    Args:
        path: path of the file; its suffix selects the format.
        events: the events in the order in which they began.
        lanes: names of the lanes from top to bottom; lanes without events are left out.

    Raises:
        PolicyError: the suffix is none that pictures have.
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    rows, height = _lay_out(events, lanes)
    figure = make_figure(path, height + _AROUND_INCHES)
    _draw(figure, figure.subplots(), events, rows, height)
    save_figure(figure, path)


def draw_lanes(figure: Any, axes: Any, events: Sequence[TraceEvent], lanes: Sequence[str]) -> None:
    """Draw the lanes into a figure that has other pictures, too.

    Args:
        figure: a figure of matplotlib; what is outside of ``axes`` must have been drawn.
        axes: where to draw the lanes.
        events: the events in the order in which they began.
        lanes: names of the lanes from top to bottom; lanes without events are left out.
    """
    _draw(figure, axes, events, *_lay_out(events, lanes))


def _lay_out(events: Sequence[TraceEvent], lanes: Sequence[str]) -> tuple[list[_Lane], float]:
    """Return the lanes that have events, from top to bottom, and their total height in inches."""
    result: list[_Lane] = []
    top = 0.0
    for name in (lanes[0], "release", *lanes[1:]):
        moments = name == "release"
        here = [
            event
            for event in events
            if moments == (event.what == "release") and (moments or event.lane == name)
        ]
        if not here:
            continue
        compute = name == lanes[0]
        rows = [0] * len(here) if compute or moments else _side_by_side(here)
        height = max(_LANE_INCHES.get(name, _OTHER_LANE_INCHES), _ROW_INCHES * (max(rows) + 1))
        blocks = [] if moments else _plot_blocks(here, rows, top, height, nested=compute)
        result.append(_Lane(name, top + height / 2, blocks, here if moments else []))
        top += height
    return result, max(top, _OTHER_LANE_INCHES)


def _plot_blocks(
    events: Sequence[TraceEvent], rows: Sequence[int], top: float, height: float, *, nested: bool
) -> list[_Block]:
    """Return the rectangles of a lane.

    Nested events share the lane's full height, and the innermost one is visible. Other events are
    drawn each in its own row.
    """
    top, height = top + 0.06, height - 0.12
    seen = segments(events) if nested else []  # empty if no event took any time
    if seen:
        return [_Block(events[n], begin_s, end_s, top, height) for begin_s, end_s, n in seen]
    each = height / (max(rows) + 1)
    return [
        _Block(event, event.begin_s, event.end_s, top + row * each, each)
        for event, row in zip(events, rows, strict=True)
    ]


def _side_by_side(events: Sequence[TraceEvent]) -> list[int]:
    """Return for each event the first row in which no other overlaps it.

    Several rows are needed where a lane works in parallel, such as two disk threads.
    """
    ends: list[float] = []
    rows: list[int] = []
    for event in events:
        free = (row for row, end_s in enumerate(ends) if end_s <= event.begin_s)
        row = next(free, len(ends))
        ends[row : row + 1] = [event.end_s]
        rows.append(row)
    return rows


def _draw(
    figure: Any, axes: Any, events: Sequence[TraceEvent], lanes: list[_Lane], height: float
) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_ylim(height, 0)
    axes.set_yticks([lane.middle for lane in lanes], [lane.name for lane in lanes])
    axes.tick_params(axis="y", length=0, labelsize=10)
    axes.tick_params(axis="x", labelsize=9)
    axes.grid(axis="x", color="#E3E3E3", linewidth=0.7)
    axes.set_axisbelow(True)
    if not events:
        axes.set_title("An empty trace", loc="left", fontsize=11)
        axes.set_xticks([])
        return
    unit = TimeUnit.of(events)
    axes.set_xlim(*_limits(unit))
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)
    axes.set_xlabel(f"time since the step began ({unit.name})", fontsize=10)
    axes.set_title(_title(events, unit), loc="left", fontsize=11)
    _draw_legend(figure, lanes)
    figure.draw_without_rendering()  # lays out the figure; only then is the width of a block known
    points = axes.get_window_extent().width / figure.dpi * 72
    left, right = axes.get_xlim()
    for lane in lanes:
        _draw_blocks(axes, lane.blocks, unit, points / (right - left))
        _draw_releases(axes, lane, unit, points / (right - left))


def _limits(unit: TimeUnit) -> tuple[float, float]:
    begin, end = unit.begin_s * unit.per_s, unit.end_s * unit.per_s
    margin = (end - begin) * 0.003 or 0.5
    return begin - margin, end + margin


def _title(events: Sequence[TraceEvent], unit: TimeUnit) -> str:
    title = f"Timeline: {unit.write(unit.end_s - unit.begin_s)}"
    waits_s = [event.duration_s for event in events if event.what == "wait"]
    if waits_s:
        title += f", of which compute waited {unit.write(sum(waits_s))}"
    return title


def _draw_legend(figure: Any, lanes: Sequence[_Lane]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    occurring = {block.event.what for lane in lanes for block in lane.blocks}
    entries: list[Any] = [
        Patch(**_style(what), linewidth=0, label=what)
        for what in (*EVENT_COLOURS, *sorted(occurring - EVENT_COLOURS.keys()))
        if what in occurring
    ]
    if any(lane.releases for lane in lanes):
        release = Line2D([], [], marker="v", color=INK, linestyle="none", markersize=5)
        release.set_label("release")
        entries.append(release)
    figure.legend(
        handles=entries,
        loc="outside lower center",
        ncols=max(1, len(entries)),
        fontsize=9,
        frameon=False,
        handlelength=1.4,
    )


def _style(what: str) -> dict[str, Any]:
    style = {"facecolor": EVENT_COLOURS.get(what, OTHER_EVENT_COLOUR), "edgecolor": "white"}
    return style | ({"hatch": "////"} if what in HATCHED_EVENTS else {})


def _draw_blocks(
    axes: Any, blocks: Sequence[_Block], unit: TimeUnit, points_per_unit: float
) -> None:
    from matplotlib.patches import Rectangle

    widest: dict[int, _Block] = {}
    for block in blocks:
        begin, length = block.begin_s * unit.per_s, block.duration_s * unit.per_s
        style = _style(block.event.what) | {"linewidth": 0.6}
        if length * points_per_unit < _EDGED_POINTS:
            style |= {"edgecolor": style["facecolor"], "hatch": None, "zorder": 2}
        axes.add_patch(Rectangle((begin, block.top), length, block.height, **style))
        most = widest.setdefault(id(block.event), block)
        if block.duration_s > most.duration_s:
            widest[id(block.event)] = block
    _draw_labels(axes, list(widest.values()), unit, points_per_unit)


def _draw_labels(
    axes: Any, blocks: Sequence[_Block], unit: TimeUnit, points_per_unit: float
) -> None:
    """Label each block that has room, in its middle; all labels of a kind have the same size."""
    fits = [
        (block, _fit(block, block.duration_s * unit.per_s * points_per_unit)) for block in blocks
    ]
    sizes: dict[str, float] = {}
    for block, (text, size) in fits:
        if text:
            sizes[block.event.what] = min(size, sizes.get(block.event.what, size))
    for block, (text, _) in fits:
        if not text:
            continue
        what = block.event.what
        at = (block.begin_s + block.end_s) / 2 * unit.per_s, block.top + block.height / 2
        style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": sizes[what]}
        if what == "wait":  # a plain background keeps the hatching from crossing the label
            style["bbox"] = {"facecolor": EVENT_COLOURS[what], "linewidth": 0, "pad": 1}
        colour = "white" if what in _DARK else INK
        axes.text(*at, text, **style, color=colour, linespacing=1.0)


def _fit(block: _Block, points: float) -> tuple[str, float]:
    """Return a label that fits a block ``points`` wide, and its font size in points.

    The label is broken into two lines or made smaller if it has to be. It is empty if none fits.
    """
    text = short_label(block.event)
    for lines in (text, text.replace(".", "\n")):
        longest = max(len(line) for line in lines.split("\n"))
        for size in _LABEL_POINTS:
            high = 1.3 * size * len(lines.split("\n"))
            if _CHARACTER * size * longest + 2 <= points and high <= block.height * 72:
                return lines, size
    return "", 0.0


def _draw_releases(axes: Any, lane: _Lane, unit: TimeUnit, points_per_unit: float) -> None:
    """Draw a triangle at each release, with a label to its right if there is room for it."""
    if not lane.releases:
        return
    labels: dict[float, dict[str, None]] = {}  # releases at the same moment share one label
    for event in lane.releases:
        labels.setdefault(event.begin_s * unit.per_s, {})[short_label(event)] = None
    times = list(labels)
    axes.plot(times, [lane.middle] * len(times), "v", color=INK, markersize=5, markeredgewidth=0)
    nexts = [*times[1:], axes.get_xlim()[1]]
    for time, end in zip(times, nexts, strict=True):
        text = ", ".join(labels[time])
        size = _LABEL_POINTS[1]
        if (end - time) * points_per_unit >= _CHARACTER * size * len(text) + 8:
            at: dict[str, Any] = {
                "xytext": (4, 0),
                "textcoords": "offset points",
                "va": "center_baseline",
            }
            axes.annotate(text, (time, lane.middle), **at, fontsize=size, color=INK)


# ---- Draw what memory held in a step as a picture: areas stacked by owner, and the peak ----

_HEIGHT_INCHES: Final = 4.6
_UNITS: Final = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
_HEADROOM: Final = 1.16  # of the axis above the peak, for the label


def write_memory_plot(path: str | PathLike[str], memory: StepMemory) -> None:
    """Write the picture.

    Args:
        path: path of the file; its suffix selects the format.
        memory: what is drawn.

    Raises:
        PolicyError: the suffix is none that pictures have.
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    figure = make_figure(path, _HEIGHT_INCHES)
    _memory_plot_draw(figure, figure.subplots(), memory)
    save_figure(figure, path)


def _memory_plot_draw(figure: Any, axes: Any, memory: StepMemory) -> None:
    samples = memory.samples
    time = TimeUnit.over(samples[0].begin_s, samples[-1].end_s)
    unit, unit_bytes = next(each for each in _UNITS if memory.peak_bytes >= each[1] or each[1] == 1)
    edges = [sample.begin_s * time.per_s for sample in samples]
    edges.append(samples[-1].end_s * time.per_s)
    below = [0.0] * len(samples)
    for owner in Owner:
        sizes = [sample.owned.get(owner, 0) / unit_bytes for sample in samples]
        if not any(sizes):
            continue
        above = [low + size for low, size in zip(below, sizes, strict=True)]
        # The last value is given twice, because there is one more edge than there are phases.
        axes.fill_between(
            edges, [*below, below[-1]], [*above, above[-1]], step="post", linewidth=0,
            facecolor=OWNER_COLOURS[owner], edgecolor="white", label=owner.value,
            hatch="////" if owner in HATCHED_OWNERS else None,
        )  # fmt: skip
        below = above
    _mark_peak(axes, memory, time.per_s, unit_bytes)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, memory.peak_bytes / unit_bytes * _HEADROOM or 1)
    axes.ticklabel_format(style="plain", useOffset=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(f"time since the step began ({time.name})", fontsize=10)
    axes.set_ylabel(unit, fontsize=10)
    axes.set_title(f"Memory by owner: {memory.counted}", loc="left", fontsize=11)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(  # in the order in which the areas are stacked
        handles[::-1], labels[::-1], loc="outside right upper", fontsize=9, frameon=False
    )


def _mark_peak(axes: Any, memory: StepMemory, per_s: float, unit_bytes: int) -> None:
    sample = memory.samples[memory.peak]
    middle = (sample.begin_s + sample.end_s) / 2 * per_s
    right_half = middle > (memory.samples[0].begin_s + memory.samples[-1].end_s) / 2 * per_s
    axes.annotate(
        f"peak {format_size(memory.peak_bytes)} in {memory.peak_phase}",
        (middle, memory.peak_bytes / unit_bytes),
        xytext=(-10 if right_half else 10, 14),
        textcoords="offset points",
        ha="right" if right_half else "left",
        fontsize=10,
        color=INK,
        arrowprops={"arrowstyle": "-|>", "color": INK, "shrinkB": 0},
    )
