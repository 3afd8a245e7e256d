"""Files of records: Chrome traces, which Perfetto opens, with the record beside the events."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any, Final

from ebbtide.errors import PolicyError
from ebbtide.pages.record_json import from_entry, to_entry
from ebbtide.pages.run_record import RunRecord
from ebbtide.tracing.chrome import chrome_document, write_chrome
from ebbtide.tracing.events import LANES, TraceEvent
from ebbtide.tracing.trace import Trace

_KEY: Final = "ebbtide"  # viewers of Chrome traces pass over keys that they do not know
_HOW: Final = 'handle.save_run("run.json") and handle.trace.save("trace.json") write such files'


def save_record(path: str | PathLike[str], record: RunRecord) -> None:
    """Write a file that `load_record` reads and Perfetto opens.

    Raises:
        OSError: the file cannot be written.
    """
    document = chrome_document(record.events, LANES, record.memory)
    write_chrome(path, {**document, _KEY: to_entry(record)})


def load_record(path: str | PathLike[str]) -> RunRecord:
    """Read what `save_record` has written, or a trace that `Trace.save` has.

    A trace gives a record of its events, with the name of the file as title.

    Raises:
        OSError: the file cannot be read.
        PolicyError: it is something else.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # a UnicodeDecodeError, too
        raise PolicyError(f"{path} is not JSON: {error}. {_HOW}") from None
    kind = document.get("format") if isinstance(document, dict) else None
    if isinstance(kind, str):
        raise PolicyError(f"{path} is a file of the format {kind}, not a record of a run. {_HOW}")
    try:
        if isinstance(document, dict) and _KEY in document:
            return from_entry(document[_KEY])
        return RunRecord(title=Path(path).stem, events=_read_events(document))
    except PolicyError as error:
        raise PolicyError(f"{path} cannot be read: {error}") from None


def _read_events(document: Any) -> tuple[TraceEvent, ...]:
    """Return the events of a file of `Trace.save`; their times are rounded to what it holds."""
    rows = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise PolicyError(f"it is not a trace of ebbtide. {_HOW}")
    try:
        threads = {row["tid"]: row for row in rows if row.get("name") == "thread_name"}
        lanes = {tid: _lane(row["args"]["name"]) for tid, row in threads.items()}
        events = [_read_event(row, lanes) for row in rows if row.get("ph") in ("X", "i")]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise PolicyError(f"it is a trace, but none that ebbtide has written. {_HOW}") from None
    return Trace(events).events


def _lane(thread: str) -> str:
    """Return the lane of a thread: the threads of a lane are "disk", "disk 2" and so on."""
    lane = thread.partition(" ")[0]
    if lane not in LANES:
        raise ValueError(thread)
    return lane


def _read_event(row: dict[str, Any], lanes: dict[int, str]) -> TraceEvent:
    about = row["args"]
    begin_s = row["ts"] / 1e6
    # The file names weights and gradients only in the label: "reload w3", "offload g3".
    sign = row["name"].partition(" ")[2][:1]
    return TraceEvent(
        what=row["cat"],
        lane=lanes[row["tid"]],
        begin_s=begin_s,
        end_s=begin_s + row.get("dur", 0.0) / 1e6,
        layer=about["layer"],
        microbatch=about["microbatch"],
        name=about["module"],
        size_bytes=about["size_bytes"],
        kind={"w": "weights", "g": "gradients"}.get(sign, ""),
    )
