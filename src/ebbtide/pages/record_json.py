"""Records of runs as JSON: exact, and compact enough for steps of thousands of layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ebbtide.errors import PolicyError
from ebbtide.pages.run_record import LayerFigures, PredictedPhase, PredictedStep, RunRecord
from ebbtide.tracing.events import TraceEvent
from ebbtide.tracing.finding import Finding
from ebbtide.tracing.step_memory import MemorySample, OwnedBytes, Owner, StepMemory
from ebbtide.transfers.stats import StepStats

FORMAT: Final = "ebbtide-record"
VERSION: Final = 1

_PLAIN: Final = (
    *("title", "verdict", "limit_bytes", "limit_why", "budget_bytes"),
    *("measured_step_s", "measured_peak_bytes"),
)


def to_entry(record: RunRecord) -> dict[str, Any]:
    """Return a record as an object for JSON, from which `from_entry` makes an equal record."""
    prediction = record.prediction
    return {
        "format": FORMAT,
        "version": VERSION,
        **{name: getattr(record, name) for name in _PLAIN},
        "settings": dict(record.settings),
        "versions": dict(record.versions),
        "stats": None if record.stats is None else dataclasses.asdict(record.stats),
        "layers": _table(record.layers, LayerFigures),
        "events": _table(record.events, TraceEvent),
        "memory": None if record.memory is None else _memory_entry(record.memory),
        "findings": [dataclasses.asdict(finding) for finding in record.findings],
        "prediction": None
        if prediction is None
        else {
            "step_s": prediction.step_s,
            "peak_bytes": prediction.peak_bytes,
            "phases": _table(prediction.phases, PredictedPhase),
            "events": _table(prediction.events, TraceEvent),
        },
        "notes": list(record.notes),
    }


def from_entry(entry: Any) -> RunRecord:
    """Return the record that `to_entry` has made an object of.

    Raises:
        PolicyError: it is something else, or of a newer version.
    """
    if not isinstance(entry, dict) or entry.get("format") != FORMAT:
        raise PolicyError('its part "ebbtide" is not a record of a run')
    if entry.get("version") != VERSION:
        raise PolicyError(
            f"its record has version {entry.get('version')}, and this ebbtide reads version "
            f"{VERSION}; install the ebbtide that wrote it, or record the run again"
        )
    try:
        return _read(entry)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        message = f"its record is damaged ({type(error).__name__}: {error}); record the run again"
        raise PolicyError(message) from None


def _read(entry: Mapping[str, Any]) -> RunRecord:
    memory, predicted, stats = entry["memory"], entry["prediction"], entry["stats"]
    return RunRecord(
        **{name: entry[name] for name in _PLAIN},
        settings=dict(entry["settings"]),
        versions=dict(entry["versions"]),
        stats=None if stats is None else StepStats(**stats),
        layers=_rows(entry["layers"], LayerFigures),
        events=_rows(entry["events"], TraceEvent),
        memory=None if memory is None else _read_memory(memory),
        findings=tuple(Finding(**finding) for finding in entry["findings"]),
        prediction=None
        if predicted is None
        else PredictedStep(
            predicted["step_s"],
            predicted["peak_bytes"],
            _rows(predicted["phases"], PredictedPhase),
            _rows(predicted["events"], TraceEvent),
        ),
        notes=tuple(entry["notes"]),
    )


def _table(items: Iterable[Any], kind: type[Any]) -> dict[str, Any]:
    """Return dataclasses of one kind as rows, with the names of their columns.

    Texts, of which there are few different ones, are replaced by their number in a list.
    """
    fields = dataclasses.fields(kind)
    # Annotations are text, because the files of these classes import them from __future__.
    of_text = [each.name for each in fields if each.type == "str"]
    texts: dict[str, int] = {}
    rows = [
        [
            texts.setdefault(value, len(texts)) if name in of_text else value
            for name, value in ((each.name, getattr(item, each.name)) for each in fields)
        ]
        for item in items
    ]
    columns = [each.name for each in fields]
    return {"columns": columns, "of_text": of_text, "texts": list(texts), "rows": rows}


def _rows(table: Mapping[str, Any], kind: type[Any]) -> tuple[Any, ...]:
    texts, of_text = table["texts"], set(table["of_text"])
    columns: Sequence[str] = table["columns"]
    return tuple(
        kind(
            **{
                name: texts[value] if name in of_text else value
                for name, value in zip(columns, row, strict=True)
            }
        )
        for row in table["rows"]
    )


def _memory_entry(memory: StepMemory) -> dict[str, Any]:
    owners = [each for each in Owner if any(each in sample.owned for sample in memory.samples)]
    return {
        "counted": memory.counted,
        "owners": [owner.name for owner in owners],
        # Phase, begin, end, peak, and the bytes of each owner; None if a sample lacks the owner.
        "samples": [
            [
                *(sample.phase, sample.begin_s, sample.end_s, sample.peak_bytes),
                *(sample.owned.get(owner) for owner in owners),
            ]
            for sample in memory.samples
        ],
        "peak": memory.peak,
        "peak_owned": [
            [each.owner.name, each.size_bytes, each.layer, each.name] for each in memory.peak_owned
        ],
        "reserved_peak_bytes": memory.reserved_peak_bytes,
        "counts_freed": memory.counts_freed,
    }


def _read_memory(entry: Mapping[str, Any]) -> StepMemory:
    owners = [Owner[name] for name in entry["owners"]]
    samples = []
    for phase, begin_s, end_s, peak_bytes, *sizes in entry["samples"]:
        pairs = zip(owners, sizes, strict=True)
        owned = {owner: size for owner, size in pairs if size is not None}
        samples.append(MemorySample(phase, begin_s, end_s, owned, peak_bytes))
    memory = StepMemory(
        counted=entry["counted"],
        samples=tuple(samples),
        peak=entry["peak"],
        peak_owned=tuple(
            OwnedBytes(Owner[owner], size_bytes, layer, name)
            for owner, size_bytes, layer, name in entry["peak_owned"]
        ),
        reserved_peak_bytes=entry["reserved_peak_bytes"],
        counts_freed=entry["counts_freed"],
    )
    _ = memory.peak_bytes  # an IndexError if there is no such sample
    return memory
