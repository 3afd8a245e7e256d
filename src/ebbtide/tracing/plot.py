"""Draw a trace as a picture: one row per lane, time from left to right, a colour for each kind."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any, NamedTuple

from ebbtide.tracing.events import TraceEvent
from ebbtide.tracing.figure_file import make_figure, save_figure
from ebbtide.tracing.palette import EVENT_COLOURS, HATCHED_EVENTS, INK, OTHER_EVENT_COLOUR
from ebbtide.tracing.timeline import TimeUnit, segments, short_label

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
        blocks = [] if moments else _blocks(here, rows, top, height, nested=compute)
        result.append(_Lane(name, top + height / 2, blocks, here if moments else []))
        top += height
    return result, max(top, _OTHER_LANE_INCHES)


def _blocks(
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
