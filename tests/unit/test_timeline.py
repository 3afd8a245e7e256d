"""Traces drawn by time: as text, compared literally, and as a picture."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide import Trace, TraceEvent
from ebbtide.errors import PolicyError

MS = 1e-3
LANES = ("compute", "d2h", "h2d", "disk", "cpu_optimizer")


def event(
    what: str, lane: str, begin_ms: float, end_ms: float, layer: int | None = 0, microbatch: int = 0
) -> TraceEvent:
    return TraceEvent(what, lane, begin_ms * MS, end_ms * MS, layer, microbatch)


def offloaded_step() -> Trace:
    """Two layers; the first one's activation leaves, and is late when backward wants it."""
    return Trace(
        [
            event("forward", "compute", 0, 4, 0),
            event("forward", "compute", 4, 8, 1),
            event("offload", "d2h", 2, 6, 0),
            event("release", "compute", 6, 6, 0),
            event("backward", "compute", 8, 16, 1),
            event("reload", "h2d", 10, 20, 0),
            event("backward", "compute", 16, 32, 0),
            event("wait", "compute", 16, 20, 0),
        ]
    )


def rows(text: str) -> dict[str, str]:
    """What stands behind the names of rows, which are as wide as the longest and a space."""
    names = [line.split(" ")[0] for line in text.splitlines()]
    names = [name for name in names if name in {*LANES, "wait", "release"}]
    margin = max(map(len, names), default=0) + 1
    drawn = {line[:margin].rstrip(): line[margin:] for line in text.splitlines()}
    return {name: drawn[name] for name in names}


# Text


def test_a_step_reads_from_left_to_right() -> None:
    # 40 columns less 8 for the names are 32: one for each millisecond.
    assert offloaded_step().timeline(width=40).splitlines() == [
        "32.0 ms, compute waited 4.00 ms",
        "a column is 1.00 ms",
        "compute F0>>F1>>B1<<<<<<    B0<<<<<<<<<<",
        "wait                    0~~~",
        "release       |0",
        "d2h       0vvv",
        "h2d               0^^^^^^^^^",
        "F3 > forward  B3 < backward  3 ~ wait",
        "3 v offload  3 ^ reload  |3 release",
    ]


def test_neighbours_without_room_for_labels_have_signs() -> None:
    # 64 ms in 32 columns of 2 ms: 1 column for the first three, 2 for the fourth.
    ends = [0, 2, 4, 6, 10]
    passes = [
        event("forward", "compute", begin, end, layer)
        for layer, (begin, end) in enumerate(itertools.pairwise(ends))
    ]
    copies = [event("offload", "d2h", 10 + 2 * i, 12 + 2 * i, i) for i in range(3)]
    end = event("reload", "h2d", 56, 64, 12, microbatch=3)  # `12.m3` and a sign do not fit in 4
    drawn = rows(Trace([*passes, *copies, end]).timeline(width=40))
    assert drawn["compute"] == ">>>F3"
    assert drawn["d2h"] == "     vvv"
    assert drawn["h2d"] == " " * 28 + "^^^^"


def test_a_short_event_has_a_column_unless_a_later_one_has_it() -> None:
    # Columns of 1 ms. The middle of the second is at 1.5 ms; of what begins in it, the last counts.
    events = [
        event("forward", "compute", 0, 1.2, 0),
        event("backward", "compute", 1.2, 1.6, 1),
        event("forward", "compute", 1.6, 1.85, 2),
        event("forward", "compute", 1.85, 2.0, 3),
        event("forward", "compute", 2.6, 3.0, 4),  # not at 2.5 ms
        event("forward", "compute", 31, 32, 5),
    ]
    assert rows(Trace(events).timeline(width=40))["compute"] == "><>>" + " " * 27 + ">"


def test_the_innermost_event_is_seen() -> None:
    outer = event("backward", "compute", 0, 32, 1)
    inner = event("rebuild", "compute", 8, 16, 1)
    assert rows(Trace([outer, inner]).timeline(width=40))["compute"] == (
        "B1<<<<<<1+++++++B1<<<<<<<<<<<<<<"
    )


def test_of_events_that_take_no_time_only_releases_leave_a_mark() -> None:
    events = [
        TraceEvent(what, lane, 2.0, 2.0, 3)
        for what, lane in [("forward", "compute"), ("release", "compute"), ("offload", "disk")]
    ]
    lines = Trace(events).timeline(width=40).splitlines()
    assert lines[:2] == ["0 s", "release |3"]
    assert Trace(events[:1]).timeline().startswith("0 s")


def test_releases_at_one_moment_have_one_mark_without_a_number() -> None:
    releases = [event("release", "compute", at, at, layer) for layer, at in enumerate((5, 5, 20))]
    drawn = rows(Trace([event("forward", "compute", 0, 32), *releases]).timeline(width=40))
    assert drawn["release"] == "     |" + " " * 14 + "|2"


@pytest.mark.parametrize("width", [39, 0, -1])
def test_too_few_columns_are_refused(width: int) -> None:
    with pytest.raises(PolicyError):
        offloaded_step().timeline(width)


# Whatever the trace

WHATS = ("forward", "backward", "rebuild", "wait", "release", "offload", "reload", "step")


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    begin_s = draw(st.integers(0, 10**6)) * 1e-6 * draw(st.sampled_from([1e-3, 1, 1e3]))
    scale_s = draw(st.sampled_from([1e-6, 1e-3, 1.0]))
    result = []
    for _ in range(draw(st.integers(1, 30))):
        begin, duration = draw(st.integers(0, 10**4)), draw(st.integers(0, 10**4))
        first_s, last_s = (begin_s + scale_s * n / 7 for n in (begin, begin + duration))
        what, lane = draw(st.sampled_from(WHATS)), draw(st.sampled_from(LANES))
        layer = draw(st.none() | st.integers(0, 200))
        microbatch = draw(st.integers(0, 12))
        result.append(
            TraceEvent(
                what, lane, first_s, first_s if what == "release" else last_s, layer, microbatch
            )
        )
    return Trace(result)


@given(trace=traces(), width=st.integers(40, 140))
def test_no_line_is_wider_than_asked_for(trace: Trace, width: int) -> None:
    text = trace.timeline(width)
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii()


@given(trace=traces(), width=st.integers(40, 140))
def test_every_lane_with_an_event_shows_a_mark(trace: Trace, width: int) -> None:
    drawn = rows(trace.timeline(width))
    own = {"wait", "release"}
    seen = [e for e in trace.events if e.duration_s or e.what == "release"]
    expected = {e.what if e.what in own else e.lane for e in seen}
    assert drawn.keys() == expected
    order = ["compute", "wait", "release", *LANES[1:]]
    assert list(drawn) == [name for name in order if name in expected]
    gaps = {e.lane for e in seen if e.what == "wait"}  # one can cover a short event beside it
    assert all(row.strip() for name, row in drawn.items() if name not in gaps)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=40))
def test_blocks_stand_in_the_order_of_their_events(gaps: list[tuple[int, int]]) -> None:
    at, events = 0, []
    for layer, (gap, duration) in enumerate(gaps):
        events.append(event("forward", "compute", at + gap, at + gap + duration, layer))
        at += gap + duration
    row = rows(Trace(events).timeline(width=120))["compute"]
    labels = [int(text) for text in re.findall(r"F(\d+)", row)]
    assert labels == sorted(set(labels))
    columns = 120 - len("compute ")
    whole = at - gaps[0][0] or 1
    roomy = [n for n, (_, duration) in enumerate(gaps) if duration * columns >= 5 * whole]
    assert set(roomy) <= set(labels)  # five columns hold `F12`, wherever the bins begin


# Pictures

SIGNATURES = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", SIGNATURES)
def test_a_picture_is_written_in_the_format_of_its_suffix(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"step{suffix}"
    offloaded_step().plot(path)
    data = path.read_bytes()
    assert data.startswith(SIGNATURES[suffix])
    assert len(data) > 4096


@pytest.mark.parametrize(
    "trace",
    [
        Trace(),
        Trace([event("forward", "compute", 0, 1)]),
        Trace([event("wait", "compute", 5, 5), event("offload", "disk", 5, 5)]),
        Trace([event("release", "compute", 5, 5)]),
        Trace([event("reload", "disk", i, i + 3, None) for i in range(9)]),  # threads cross
        Trace([event("step", "cpu_optimizer", i, i + 1, i, i) for i in range(400)]),
    ],
    ids=["empty", "one", "no time", "a moment", "crossing", "many"],
)
def test_any_trace_can_be_drawn(tmp_path: Path, trace: Trace) -> None:
    pytest.importorskip("matplotlib")
    trace.plot(tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 0


def texts_of(trace: Trace, path: Path) -> list[str]:
    """The texts of a picture; a label of two lines is two of them."""
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        trace.plot(path)
    return re.findall(r">([^<>\n]+)</(?:text|tspan)>", path.read_text())


def test_a_picture_names_lanes_and_passes(tmp_path: Path) -> None:
    texts = texts_of(offloaded_step(), tmp_path / "step.svg")
    assert {"compute", "release", "d2h", "h2d", "F0", "F1", "B1", "B0"} <= set(texts)
    assert {"forward", "backward", "offload", "reload", "wait"} <= set(texts)
    assert "Timeline: 32.0 ms, compute waited 4.00 ms" in texts
    assert "time since the step began (ms)" in texts


@pytest.mark.parametrize("name", ["step.jpeg", "step", "step.json"])
def test_an_unknown_suffix_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(PolicyError, match=r"\.png, \.svg, \.pdf"):
        offloaded_step().plot(tmp_path / name)
