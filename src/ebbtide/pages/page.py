"""Writes records of runs as one page of HTML that needs no network."""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import json
from collections.abc import Sequence
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any, Final

from ebbtide.errors import PolicyError
from ebbtide.pages.comparison_rows import comparison_rows, figures_of
from ebbtide.pages.record_json import to_entry
from ebbtide.pages.run_record import RunRecord
from ebbtide.pages.verdicts import describe_moves, verdict_of, write_seconds
from ebbtide.tracing.events import LANES
from ebbtide.tracing.palette import (
    EVENT_COLOURS,
    HATCHED_EVENTS,
    HATCHED_OWNERS,
    OTHER_EVENT_COLOUR,
    OWNER_COLOURS,
)
from ebbtide.tracing.step_memory import Owner
from ebbtide.units import format_size

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
        "events": {
            what: {"colour": colour, "hatched": what in HATCHED_EVENTS}
            for what, colour in {**EVENT_COLOURS, "other": OTHER_EVENT_COLOUR}.items()
        },
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
    return (files("ebbtide.pages") / "assets" / name).read_text(encoding="utf-8")


@functools.cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(size=format_size, seconds=write_seconds)
    return environment.from_string(_asset("report.html.jinja"))
