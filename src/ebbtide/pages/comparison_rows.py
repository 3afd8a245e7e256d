"""The key figures of runs, and their changes from the first run to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

from ebbtide.pages.run_record import RunRecord
from ebbtide.pages.verdicts import write_seconds
from ebbtide.units import format_size

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
