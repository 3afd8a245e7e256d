"""A trace in a notebook: its lanes over time as a drawing, and the sums as a table."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ebbtide.interface.notebook import (
    COLOURS,
    Share,
    card,
    folded,
    legend,
    note,
    text_block,
)
from ebbtide.tracing.events import TraceEvent

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
