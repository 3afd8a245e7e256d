"""The sentence that sums up a run for which nobody has made one."""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any, Final, final

from ebbtide.errors import PolicyError
from ebbtide.observe.plots import (
    HATCHED_OWNERS,
    OWNER_COLOURS,
)
from ebbtide.observe.run_record import RunRecord, to_entry
from ebbtide.runtime.events import LANES, Owner
from ebbtide.units import COLOURS, format_size


def verdict_of(record: RunRecord) -> str:
    """Return the verdict of a record, or a sentence about the figures that it has."""
    if record.verdict:
        return record.verdict
    stats = record.stats
    if record.peak_bytes is not None:
        return _peak(record)
    if stats is not None and stats.num_saved:
        gone = stats.unique_bytes - stats.kept_bytes
        share = gone / (stats.unique_bytes or 1)
        return (
            f"{share:.0%} of what autograd saved left the device: {format_size(gone)} of "
            f"{format_size(stats.unique_bytes)}."
        )
    if record.events:
        return f"The step took {write_seconds(record.step_s or 0.0)}."
    return "No step has been recorded yet."


def _peak(record: RunRecord) -> str:
    memory = record.memory
    if memory is None:
        return f"Memory peaked at {format_size(record.peak_bytes or 0)}."
    owned = memory.samples[memory.peak].owned
    most = max(owned, key=lambda owner: owned[owner], default=None)
    words = f"Memory peaked at {format_size(memory.peak_bytes)} in {memory.peak_phase}"
    if most is None:
        return f"{words}."
    return f"{words}; the largest part of it, {format_size(owned[most])}, is {most.value}."


def describe_moves(record: RunRecord) -> str:
    """Return a sentence on what became of saved bytes; empty if nothing was saved."""
    stats = record.stats
    if stats is None or not stats.num_saved:
        return ""
    parts = [
        (stats.offloaded_bytes, "was offloaded"),
        (stats.rebuilt_bytes, "was rebuilt"),
        (stats.recomputed_bytes, "was recomputed"),
        (stats.packed_bytes, "was left out by packing"),
        (stats.kept_bytes, "stayed"),
    ]
    done = ", ".join(f"{format_size(size)} {what}" for size, what in parts if size)
    waited = (
        f"compute waited {write_seconds(stats.stall_s)} for copies"
        if stats.stall_s
        else "compute did not wait for copies"
    )
    saved = f"Of {format_size(stats.unique_bytes)} that autograd saved, "
    return f"{saved}{done or 'nothing was moved'}; {waited}."


def write_seconds(seconds: float) -> str:
    """Format seconds for people, such as 0.0123 as ``"12.3 ms"``."""
    for unit, per_s in (("s", 1.0), ("ms", 1e3)):
        if seconds * per_s >= 1:
            return f"{seconds * per_s:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us" if seconds else "0 s"


# ---- The key figures of runs, and their changes from the first run to the others ----

_Number = int | float | None


@final
@dataclass(frozen=True)
class KeyFigure:
    """A figure of a run, for people.

    Attributes:
        label: what it is.
        text: its value with a unit.
        remark: what stands beside it; empty if nothing does.
    """

    label: str
    text: str
    remark: str = ""


@final
@dataclass(frozen=True)
class ComparisonRow:
    """One figure of several runs.

    Attributes:
        label: what it is.
        cells: its value in each run, and by how much it differs from the first run's.
    """

    label: str
    cells: tuple[tuple[str, str], ...]


def _of_stats(name: str) -> Callable[[RunRecord], _Number]:
    return lambda record: None if record.stats is None else getattr(record.stats, name)


# Label, value, and how it is written.
_ROWS: Final[tuple[tuple[str, Callable[[RunRecord], _Number], bool], ...]] = (
    ("Peak of memory", lambda record: record.peak_bytes, True),
    ("No offloader gets below", lambda record: record.limit_bytes, True),
    ("Budget", lambda record: record.budget_bytes, True),
    ("Step", lambda record: record.step_s, False),
    ("Compute waited", _of_stats("stall_s"), False),
    ("Offloaded", _of_stats("offloaded_bytes"), True),
    ("Kept", _of_stats("kept_bytes"), True),
    ("Rebuilt", _of_stats("rebuilt_bytes"), True),
    ("Recomputed", _of_stats("recomputed_bytes"), True),
    ("Activations, at most", _of_stats("peak_device_bytes"), True),
)


def comparison_rows(records: Sequence[RunRecord]) -> list[ComparisonRow]:
    """Return the figures that at least one of several runs has; none for a single run."""
    if len(records) < 2:
        return []
    rows = []
    for label, value_of, is_size in _ROWS:
        values = [value_of(record) for record in records]
        if any(values):
            cells = (_cell(value, values[0], is_size) for value in values)
            rows.append(ComparisonRow(label, tuple(cells)))
    return rows


def _cell(value: _Number, first: _Number, is_size: bool) -> tuple[str, str]:
    if value is None:
        return "\u2013", ""
    if not first or value == first:
        return _write(value, is_size), ""
    return _write(value, is_size), f"{value / first - 1:+.0%}".replace("-", "\u2212")


def figures_of(record: RunRecord) -> list[KeyFigure]:
    """Return the figures that stand at the top of a run."""
    figures = []
    if record.peak_bytes is not None:
        remark = "" if record.budget_bytes is None else _beside_budget(record)
        figures.append(KeyFigure("Peak of memory", format_size(record.peak_bytes), remark))
    elif record.stats is not None:
        size = format_size(record.stats.peak_device_bytes)
        figures.append(KeyFigure("Activations, at most", size, "what autograd saved"))
    if record.limit_bytes is not None:
        above = ""
        if record.peak_bytes is not None and record.limit_bytes:
            above = f"the peak is {format_size(record.peak_bytes - record.limit_bytes)} above it"
        size = format_size(record.limit_bytes)
        figures.append(KeyFigure("No offloader gets below", size, above))
    stats = record.stats
    if record.step_s is not None:
        waited = "" if stats is None else "no wait for copies"
        if stats is not None and stats.stall_s:
            waited = f"{write_seconds(stats.stall_s)} of it waiting for copies"
        figures.append(KeyFigure("Step", write_seconds(record.step_s), waited))
    if stats is not None:
        spared = stats.rebuilt_bytes + stats.recomputed_bytes
        remark = f"and {format_size(spared)} computed again" if spared else ""
        figures.append(KeyFigure("Offloaded", format_size(stats.offloaded_bytes), remark))
    return figures


def _beside_budget(record: RunRecord) -> str:
    assert record.budget_bytes is not None and record.peak_bytes is not None
    over_bytes = record.peak_bytes - record.budget_bytes
    budget = f"budget {format_size(record.budget_bytes)}"
    return f"{budget}: over by {format_size(over_bytes)}" if over_bytes > 0 else budget


def _write(value: int | float, is_size: bool) -> str:
    return format_size(int(value)) if is_size else write_seconds(value)


# ---- Writes records of runs as one page of HTML that needs no network ----

_SCRIPTS: Final = (  # in the order in which one needs the other
    "formats.js",
    "time_window.js",
    "chart.js",
    "memory_chart.js",
    "lane_chart.js",
    "layer_table.js",
    "report.js",
)
_DIGITS: Final = 7  # times on the page are rounded to a tenth of a microsecond


def write_page(path: str | PathLike[str], records: Sequence[RunRecord]) -> None:
    """Write a page that shows the records, the first one as what others are compared with.

    Raises:
        PolicyError: there is no record.
        OSError: the file cannot be written.
    """
    Path(path).write_text(render_page(records), encoding="utf-8")


def render_page(records: Sequence[RunRecord]) -> str:
    """Return the page as text.

    Raises:
        PolicyError: there is no record.
    """
    if not records:
        raise PolicyError("a report needs at least one run")
    titled = _told_apart(records)
    return str(
        _template().render(
            runs=[
                {
                    "record": record,
                    "verdict": verdict_of(record),
                    "moved": describe_moves(record),
                    "figures": figures_of(record),
                }
                for record in titled
            ],
            rows=comparison_rows(titled),
            style=_asset("report.css"),
            script="\n".join(_asset(name) for name in _SCRIPTS),
            data=_pack(page_data(titled)),
        )
    )


def page_data(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Return what the script of the page draws: the records, and how charts look."""
    return {
        "runs": [_rounded(to_entry(record)) for record in records],
        "lanes": LANES,
        "owners": {
            owner.name: {
                "label": owner.value,
                "colour": OWNER_COLOURS[owner],
                "hatched": owner in HATCHED_OWNERS,
            }
            for owner in Owner
        },
        "events": {what: {"colour": colour, "hatched": False} for what, colour in COLOURS.items()},
    }


def _told_apart(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the records with a number in titles that several have."""
    titles = [record.title for record in records]
    return [
        dataclasses.replace(record, title=f"{record.title} ({number})")
        if titles.count(record.title) > 1
        else record
        for number, record in enumerate(records, start=1)
    ]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def _pack(data: dict[str, Any]) -> str:
    """Return data as text that a page can hold, compressed to about a fifth.

    The same data gives the same text: no time is written into it.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _asset(name: str) -> str:
    return (files("ebbtide.observe") / "assets" / name).read_text(encoding="utf-8")


@functools.cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(size=format_size, seconds=write_seconds)
    return environment.from_string(_asset("report.html.jinja"))
