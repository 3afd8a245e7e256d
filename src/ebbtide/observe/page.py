"""A page of HTML on one or several runs, which needs no network.

The data of the page are the documents of its runs, as `save_record` writes them.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any, Final

from ebbtide.errors import PolicyError
from ebbtide.observe.plots import HATCHED_OWNERS, OWNER_COLOURS
from ebbtide.observe.run_record import RunRecord, as_document
from ebbtide.runtime.events import LANES, Owner
from ebbtide.units import COLOURS, format_seconds, format_size

# ---- Runs in figures ----

_Number = int | float | None


def _of_stats(name: str) -> Callable[[RunRecord], _Number]:
    return lambda record: None if record.stats is None else getattr(record.stats, name)


# Label, value, and how it is written.
_FIGURES: Final[tuple[tuple[str, Callable[[RunRecord], _Number], Callable[[Any], str]], ...]] = (
    ("Peak of memory", lambda record: record.peak_bytes, format_size),
    ("No offloader gets below", lambda record: record.limit_bytes, format_size),
    ("Budget", lambda record: record.budget_bytes, format_size),
    ("Step", lambda record: record.step_s, format_seconds),
    ("Compute waited", _of_stats("stall_s"), format_seconds),
    ("Saved by autograd", _of_stats("unique_bytes"), format_size),
    ("Offloaded", _of_stats("offloaded_bytes"), format_size),
    ("Kept", _of_stats("kept_bytes"), format_size),
    ("Rebuilt", _of_stats("rebuilt_bytes"), format_size),
    ("Recomputed", _of_stats("recomputed_bytes"), format_size),
    ("Activations, at most", _of_stats("peak_device_bytes"), format_size),
)


def figures_of(records: Sequence[RunRecord]) -> dict[str, list[tuple[str, str]]]:
    """Return the key figures of runs, without those that no run has.

    A figure has for each run its value, and by how much that differs from the first run's.
    """
    figures: dict[str, list[tuple[str, str]]] = {}
    for label, value_of, write in _FIGURES:
        values = [value_of(record) for record in records]
        # No bytes of a kind need no line. That compute did not wait is worth one.
        if any(values) or (write is format_seconds and set(values) != {None}):
            figures[label] = [
                ("\u2013" if value is None else write(value), _change(value, values[0]))
                for value in values
            ]
    return figures


def _change(value: _Number, first: _Number) -> str:
    if value is None or not first or value == first:
        return ""
    return f"{value / first - 1:+.0%}".replace("-", "\u2212")


# ---- The page ----

_SCRIPTS: Final = (  # in the order in which one needs the other
    *("formats.js", "chart.js", "memory_chart.js", "lane_chart.js", "layer_table.js"),
    "report.js",
)
_DIGITS: Final = 9  # of times on the page, so that they are exact to 0.1 us in a step of 100 s


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
    licence = f"/*\n{_asset('uplot.license')}*/"
    return str(
        _template().render(
            runs=titled,
            figures=figures_of(titled),
            style=_asset("uplot.min.css") + _asset("report.css"),
            library=licence + _asset("uplot.min.js"),
            script="\n".join(_asset(name) for name in _SCRIPTS),
            data=_pack(page_data(titled)),
        )
    )


def page_data(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Return what the script of the page draws: the records, and how charts look."""
    return {
        "runs": [as_document(record) for record in records],
        "lanes": LANES,
        "owners": {
            owner.name: {
                "label": owner.value,
                "colour": OWNER_COLOURS[owner],
                "hatched": owner in HATCHED_OWNERS,
            }
            for owner in Owner
        },
        "events": {what: {"colour": colour} for what, colour in COLOURS.items()},
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


def _pack(data: dict[str, Any]) -> str:
    """Return data as text that a page can hold, compressed to about a fifth.

    The same data gives the same text: no time is written into it.
    """

    def shorten(number: str) -> float:
        return round(float(f"{float(number):.{_DIGITS}g}"), _DIGITS)

    rounded = json.loads(json.dumps(data, allow_nan=False), parse_float=shorten)
    text = json.dumps(rounded, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _asset(name: str) -> str:
    return (files("ebbtide.observe") / "assets" / name).read_text(encoding="utf-8")


@functools.cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(size=format_size, seconds=format_seconds)
    return environment.from_string(_asset("report.html.jinja"))
