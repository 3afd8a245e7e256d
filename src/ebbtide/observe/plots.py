"""Draws a trace: as text for a terminal, and as a picture of its lanes.

Text and picture have the same rows: the lanes from top to bottom, and below compute its waits and
releases. The colours are those of Okabe and Ito, whose colours colour-blind readers can tell apart,
and tints of them.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple

from ebbtide.errors import PolicyError
from ebbtide.runtime.events import LANES, Owner, TraceEvent
from ebbtide.units import COLOURS, format_seconds

# A colour means the same in every chart: bytes that an event moves or makes have its colour, and no
# other owner has the colour of an event.
OWNER_COLOURS: Final = {
    Owner.OTHER: COLOURS["other"],
    Owner.MAPPED: "#B9B9B9",
    Owner.PARAMETERS: "#44546A",
    Owner.OPTIMIZER: COLOURS["step"],
    Owner.GRADIENTS: "#8497B0",
    Owner.WEIGHTS: "#C9D3E0",
    Owner.INPUTS: "#D4D4D4",
    Owner.OUTPUTS: "#6E6E6E",
    Owner.KEPT: COLOURS["keep"],
    Owner.LEAVING: COLOURS["offload"],
    Owner.REFERENCED: "#8A5F00",
    Owner.RELOADED: COLOURS["reload"],
    Owner.REBUILT: COLOURS["rebuild"],
    Owner.RECOMPUTED: COLOURS["recompute"],
    Owner.PASSED: "#E3A9A4",
    Owner.RUNNING: "#9B1C1C",
}
# Tints of the colour of another owner.
HATCHED_OWNERS: Final = frozenset(
    {Owner.MAPPED, Owner.OPTIMIZER, Owner.WEIGHTS, Owner.OUTPUTS, Owner.REFERENCED, Owner.PASSED}
)


# ---- What text and picture share: rows, what is seen of nested events, and times ----


class _Axis(NamedTuple):
    """The time of a trace, cut into columns of equal width.

    Attributes:
        unit: unit of its times: ``"s"``, ``"ms"`` or ``"us"``.
        per_s: number of units in a second.
        begin_s: begin of the first event, in seconds.
        end_s: end of the event that ends last, in seconds.
        columns: number of columns.
    """

    unit: str
    per_s: float
    begin_s: float
    end_s: float
    columns: int

    @classmethod
    def of(cls, events: Sequence[TraceEvent], columns: int) -> _Axis:
        """Return the axis of one event or more, in the largest unit of which all last one."""
        begin_s, end_s = min(each.begin_s for each in events), max(each.end_s for each in events)
        # The margin makes up for rounding, so that a trace of 1 ms is written in ms.
        whole_s = (end_s - begin_s) * (1 + 1e-6)
        unit, per_s = ("ms", 1e3) if whole_s >= 1e-3 else ("us", 1e6)
        if whole_s >= 1 or not whole_s:
            unit, per_s = "s", 1.0
        return cls(unit, per_s, begin_s, end_s, columns)

    @property
    def whole_s(self) -> float:
        return self.end_s - self.begin_s

    def describe(self, events: Sequence[TraceEvent]) -> list[str]:
        """Say how long the trace is, and how long compute waited in it if it did."""
        waits_s = [event.duration_s for event in events if event.what == "wait"]
        waited = [f"compute waited {format_seconds(sum(waits_s))}"] if waits_s else []
        return [format_seconds(self.whole_s), *waited]

    def position(self, time_s: float) -> float:
        """Return the position of a time in columns, from 0 to the number of columns."""
        return (time_s - self.begin_s) / (self.whole_s or 1.0) * self.columns

    def column(self, time_s: float) -> int:
        return min(int(self.position(time_s)), self.columns - 1)

    def paint(self, events: Sequence[TraceEvent], least: int) -> list[int | None]:
        """Return for each column the index of the event that runs in the middle of it.

        Of several, it is the one that began last, since the others enclose it. None: there is none.

        Args:
            events: the events of one lane.
            least: columns that an event has at least, if it is not enclosed by another's.
        """
        painted: list[int | None] = [None] * self.columns
        numbers = range(len(events))
        for number in sorted(numbers, key=lambda at: (events[at].begin_s, -events[at].end_s)):
            # The margin makes up for rounded times.
            begin, end = (
                math.ceil(self.position(time_s) - 0.5 - 1e-9)
                for time_s in (events[number].begin_s, events[number].end_s)
            )
            begin = min(begin, self.columns - least)
            end = max(end, begin + least)
            painted[begin:end] = [number] * (end - begin)
        return painted


_ROUNDING_S: Final = 1e-9  # times of neighbours may overlap by this much


def place_side_by_side(events: Iterable[TraceEvent]) -> list[int]:
    """Return for each event of a lane the first track that can hold it.

    A track can hold an event if nothing in it is still open when the event begins, or if the event
    ends within the innermost event that is still open. So events that cross, such as those of two
    disk threads, are in several tracks, and nested ones are in one.
    """
    tracks: list[list[float]] = []  # for each the ends of its open events, outermost first
    result: dict[int, int] = {}
    numbered = enumerate(events)
    for number, event in sorted(numbered, key=lambda each: (each[1].begin_s, -each[1].end_s)):
        for ends in tracks:
            while ends and ends[-1] <= event.begin_s + _ROUNDING_S:
                ends.pop()
        fits = (n for n, ends in enumerate(tracks) if not ends or event.end_s <= ends[-1])
        track = next(fits, len(tracks))
        if track == len(tracks):
            tracks.append([])
        tracks[track].append(event.end_s)
        result[number] = track
    return [result[number] for number in range(len(result))]


def _rows(events: Sequence[TraceEvent]) -> dict[str, list[TraceEvent]]:
    """Return the events of each row that has some; but for releases, those that take time.

    Waits are also among the events of their lane's row, where they leave a gap.
    """
    events = [event for event in events if event.duration_s or event.what == "release"]
    rows: dict[str, list[TraceEvent]] = {}
    for lane in LANES:
        here = [event for event in events if event.lane == lane and event.what != "release"]
        if any(event.what != "wait" for event in here):
            rows[lane] = here
        if lane == LANES[0]:  # compute, which waits and releases
            rows["wait"] = [event for event in events if event.what == "wait"]
            rows["release"] = [event for event in events if event.what == "release"]
    return {name: here for name, here in rows.items() if here}


_PASSES: Final = ("forward", "backward")


def _short_label(event: TraceEvent) -> str:
    """Return ``F3.m2`` for a pass, and ``3.m2`` for other events, whose look shows their kind."""
    if event.layer is None:
        return ""
    return event.label if event.what in _PASSES else event.label.removeprefix(f"{event.what} ")


# ---- Text ----
#
# Each column is a bin of time. It shows the event that runs in the middle of it, or a space if the
# lane is idle then; an event that is shorter has a column all the same. Of nested events the
# innermost counts. While compute waits, the row of compute is empty, and the row below it shows
# which layer it waits for.

_SIGNS: Final = {
    "forward": ">",
    "backward": "<",
    "rebuild": "+",
    "recompute": "*",
    "wait": "~",
    "offload": "v",
    "reload": "^",
    "release": "|",
}
_OTHER_SIGN: Final = "#"
_MIN_WIDTH: Final = 40


def render_timeline(events: Sequence[TraceEvent], width: int) -> str:
    """Render the timeline: a line of figures, the rows, and a legend.

    Args:
        events: the events in the order in which they began.
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
    rows = _rows(events)
    margin = max(map(len, rows), default=0) + 1
    axis = _Axis.of(events, width - margin)
    figures = axis.describe(events)
    if axis.whole_s:
        figures.append(f"a column is {format_seconds(axis.whole_s / axis.columns)}")
    lines = _wrap(figures, ", ", width)
    for name, here in rows.items():
        row = _draw_moments(here, axis) if name == "release" else _draw(name, here, axis)
        lines.append(f"{name:<{margin}}{row}".rstrip())
    return "\n".join([*lines, *_wrap(_legend(events), "  ", width)])


def _draw(name: str, events: Sequence[TraceEvent], axis: _Axis) -> str:
    """Draw a row of blocks. Waits are drawn in the row of their own, and leave a gap in others."""
    if name != "wait":  # a gap of less than a column would hide what is beside it
        column_s = axis.whole_s / axis.columns
        events = [each for each in events if each.what != "wait" or each.duration_s >= column_s]
    row = ""
    for number, run in itertools.groupby(axis.paint(events, least=1)):
        room = len(list(run))
        if number is None or (name != "wait" and events[number].what == "wait"):
            row += " " * room
        else:
            row += _block(events[number], room)
    return row


def _block(event: TraceEvent, room: int) -> str:
    """Draw a block: its label if there is room for it, and signs."""
    label, sign = _short_label(event), _SIGNS.get(event.what, _OTHER_SIGN)
    # The letter of a pass separates it from the block before. A label that is only a number needs a
    # sign after it, or it would run together with the next number.
    if len(label) > room - (event.what not in _PASSES):
        label = ""
    return label.ljust(room, sign)


def _draw_moments(events: Sequence[TraceEvent], axis: _Axis) -> str:
    """Draw a marker where each event begins, with the layer's number if there is room for it."""
    labels: dict[int, set[str]] = defaultdict(set)
    for event in events:
        labels[axis.column(event.begin_s)].add(_short_label(event))
    row = ""
    for at, end in itertools.pairwise([*sorted(labels), axis.columns]):
        label = labels[at].pop() if len(labels[at]) == 1 else ""
        row = f"{row:<{at}}{_SIGNS['release']}" + (label if at + 1 + len(label) <= end else "")
    return row


def _legend(events: Sequence[TraceEvent]) -> list[str]:
    """Return entries that explain the signs."""
    kinds = {event.what for event in events}
    parts = []
    for what in (*_SIGNS, *sorted(kinds - _SIGNS.keys())):
        sign, letter = _SIGNS.get(what, _OTHER_SIGN), what[0].upper() if what in _PASSES else ""
        if what in kinds:
            parts.append(f"{sign}3 {what}" if what == "release" else f"{letter}3 {sign} {what}")
    return parts


def _wrap(parts: Sequence[str], separator: str, width: int) -> list[str]:
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(separator) + len(part) <= width:
            lines[-1] += separator + part
        else:
            lines.append(part)
    return lines


# ---- Pictures: figures of matplotlib, made without a window and without pyplot ----

SUFFIXES: Final = (".png", ".svg", ".pdf")
_WIDTH_INCHES: Final = 12.0
_PIXELS_PER_INCH: Final = 200
_PICTURE_COLUMNS: Final = int(_WIDTH_INCHES * _PIXELS_PER_INCH)
_INK: Final = "#222222"


def save_figure(figure: Any, path: str | PathLike[str]) -> None:
    """Write a figure in the format that the suffix of the path names.

    Raises:
        PolicyError: the suffix is not one of `SUFFIXES`.
        OSError: the file cannot be written.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise PolicyError(f"path must end in {', '.join(SUFFIXES)}, got {str(path)!r}")
    figure.savefig(path, format=suffix[1:])


# ---- A picture of the lanes: time from left to right, a colour for each kind of event ----

# Kinds whose colour is so dark that labels are white.
_DARK: Final = ("backward", "reload", "step", "wait")
_ROW_INCHES: Final = 0.42
_AROUND_INCHES: Final = 1.25  # height of title, axis and legend
_BAR: Final = 0.8  # of the height of a row
_LABEL_POINTS: Final = 7.5
_CHARACTER: Final = 0.0062  # width of a digit, as a share of that of the lanes
_EDGED: Final = 0.004  # likewise; a narrower block gets no white edge, which would hide it


def draw_lanes_figure(events: Sequence[TraceEvent]) -> Any:
    """Return a figure of the lanes, 12 inches wide and as high as the lanes need.

    Args:
        events: the events in the order in which they began.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        message = 'a plot needs matplotlib: pip install "ebbtide[plots]"'
        raise ImportError(message) from error

    rows = _rows(events)
    size = (_WIDTH_INCHES, max(1, len(rows)) * _ROW_INCHES + _AROUND_INCHES)
    figure = Figure(figsize=size, dpi=_PIXELS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(axis="y", length=0, labelsize=10)
    axes.tick_params(axis="x", labelsize=9)
    axes.grid(axis="x", color="#E3E3E3", linewidth=0.7)
    axes.set_axisbelow(True)
    if not events:
        axes.set_title("An empty trace", loc="left", fontsize=11)
        return figure
    axis = _Axis.of(events, _PICTURE_COLUMNS)
    margin_s = axis.whole_s * 0.003 or 0.5
    axes.set_xlim(axis.begin_s - margin_s, axis.end_s + margin_s)
    axes.set_xlabel(f"time since the step began ({axis.unit})", fontsize=10)
    axes.xaxis.set_major_formatter(lambda time_s, _: f"{time_s * axis.per_s:.10g}")
    axes.set_title(f"Timeline: {', '.join(axis.describe(events))}", loc="left", fontsize=11)
    _draw_kinds(figure, {event.what for here in rows.values() for event in here})
    column_s = axis.whole_s / axis.columns
    for place, (name, here) in enumerate(rows.items()):
        if name == "release":
            _draw_releases(axes, place, here, axis)
            continue
        tracks = place_side_by_side(here)
        height = _BAR / (max(tracks) + 1)
        for track in set(tracks):
            inside = [event for event, at in zip(here, tracks, strict=True) if at == track]
            blocks, column = [], 0
            for number, run in itertools.groupby(axis.paint(inside, least=1)):
                begin, column = column, column + len(list(run))
                if number is not None and (name == "wait" or inside[number].what != "wait"):
                    begin_s = axis.begin_s + begin * column_s
                    blocks.append((inside[number], begin_s, (column - begin) * column_s))
            top = place - _BAR / 2 + track * height
            _draw_blocks(axes, (top, height), blocks, axis.whole_s)
    return figure


def _draw_kinds(figure: Any, kinds: set[str]) -> None:
    """Draw the legend."""
    from matplotlib.patches import Patch

    kinds.discard("release")
    order = [*(what for what in COLOURS if what in kinds), *sorted(kinds - COLOURS.keys())]
    handles = [Patch(facecolor=_colour(what), linewidth=0, label=what) for what in order]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=max(1, len(handles)),
        fontsize=9, frameon=False, handlelength=1.4,
    )  # fmt: skip


def _colour(what: str) -> str:
    return COLOURS.get(what, COLOURS["other"])


def _draw_blocks(
    axes: Any,
    band: tuple[float, float],
    blocks: Sequence[tuple[TraceEvent, float, float]],
    whole_s: float,
) -> None:
    """Draw the blocks of a track, and in the middle of an event's longest one its label.

    Args:
        axes: where to draw.
        band: top and height of the track.
        blocks: events, and begin and duration of what is visible of them.
        whole_s: duration of the trace.
    """
    faces = [_colour(event.what) for event, _, _ in blocks]
    edges = [
        "white" if duration_s >= _EDGED * whole_s else face
        for (_, _, duration_s), face in zip(blocks, faces, strict=True)
    ]
    spans = [(begin_s, duration_s) for _, begin_s, duration_s in blocks]
    axes.broken_barh(spans, band, facecolors=faces, edgecolors=edges, linewidth=0.6)
    longest = {id(block[0]): block for block in sorted(blocks, key=lambda block: block[2])}
    for event, begin_s, duration_s in longest.values():
        if len(label := _short_label(event)) * _CHARACTER * whole_s <= duration_s:
            at = begin_s + duration_s / 2, band[0] + band[1] / 2
            _write(axes, at, label, ha="center", color="white" if event.what in _DARK else _INK)


def _write(axes: Any, at: tuple[float, float], text: str, **style: Any) -> None:
    axes.text(*at, text, va="center_baseline", fontsize=_LABEL_POINTS, **style)


def _draw_releases(axes: Any, place: int, events: Sequence[TraceEvent], axis: _Axis) -> None:
    """Draw a triangle at each release, with a label to its right if there is room for it."""
    labels: dict[float, dict[str, None]] = defaultdict(dict)  # one label for one moment
    for event in events:
        labels[event.begin_s][_short_label(event)] = None
    times_s = list(labels)
    axes.plot(times_s, [place] * len(times_s), "v", color=_INK, markersize=5, markeredgewidth=0)
    for begin_s, next_s in zip(times_s, [*times_s[1:], axis.end_s], strict=True):
        text = ", ".join(labels[begin_s])
        if (len(text) + 2) * _CHARACTER * axis.whole_s <= next_s - begin_s:
            _write(axes, (begin_s + _CHARACTER * axis.whole_s, place), text, color=_INK)
