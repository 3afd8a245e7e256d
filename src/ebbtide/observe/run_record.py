"""What is recorded of a run: its last step, what it was asked for, and where it ran."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Final, final

import torch

from ebbtide.documents import read_as
from ebbtide.errors import PolicyError
from ebbtide.observe.explain import Finding
from ebbtide.observe.inspection import Inspection
from ebbtide.observe.memory import StepMemory
from ebbtide.observe.trace import Trace, chrome_document, write_chrome
from ebbtide.runtime.events import LANES, Owner, TraceEvent
from ebbtide.runtime.stats import StepStats
from ebbtide.units import count
from ebbtide.version import __version__


@final
@dataclass(frozen=True)
class LayerFigures:
    """The figures of one call of a layer.

    Attributes:
        index: number of the layer in forward order; None for what belongs to no layer.
        name: name of the layer's module.
        microbatch: number of the forward within the step, from 0.
        forward_s: seconds of its forward; None where the step was not traced.
        backward_s: seconds of its backward; None where the step was not traced.
        wait_s: seconds that compute waited for its copies; None where the step was not traced.
        kept_bytes: bytes of the storages that it was the first to save and that stayed.
        offloaded_bytes: those that were copied to a lower tier.
        rebuilt_bytes: those that backward computed again.
        recomputed_bytes: those that backward had by running the layer's forward again.
    """

    index: int | None
    name: str
    microbatch: int = 0
    forward_s: float | None = None
    backward_s: float | None = None
    wait_s: float | None = None
    kept_bytes: int = 0
    offloaded_bytes: int = 0
    rebuilt_bytes: int = 0
    recomputed_bytes: int = 0


@final
@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """All that a page shows of a run. Everything but the title may be missing.

    Attributes:
        title: what tells the run from others, such as ``"FNO, budget 2 GiB"``.
        settings: what the offload was asked for, by name.
        versions: of ebbtide, torch and Python, and the device.
        stats: statistics of the last finished step.
        layers: figures of its layers, in forward order.
        events: its trace, in the order in which events began.
        memory: what memory held in it.
        verdict: a sentence that sums up why its peak is as high as it is; empty if nobody knows.
        findings: the reasons, the most important one first.
        limit_bytes: the smallest peak that any offloader could reach.
        limit_why: why that is the smallest.
        budget_bytes: the most memory that the run was to take.
        predicted_step_s: seconds that the step takes by its plan.
        predicted_peak_bytes: the peak of memory by its plan.
        measured_step_s: seconds from the begin of a step to the begin of the next.
        measured_peak_bytes: its peak, as the planner has measured it.
        notes: what else is to be known, in sentences.
    """

    title: str
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    stats: StepStats | None = None
    layers: tuple[LayerFigures, ...] = ()
    events: tuple[TraceEvent, ...] = ()
    memory: StepMemory | None = None
    verdict: str = ""
    findings: tuple[Finding, ...] = ()
    limit_bytes: int | None = None
    limit_why: str = ""
    budget_bytes: int | None = None
    predicted_step_s: float | None = None
    predicted_peak_bytes: int | None = None
    measured_step_s: float | None = None
    measured_peak_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int | None:
        """The measured peak of memory; None if nobody has measured it."""
        return self.measured_peak_bytes if self.memory is None else self.memory.peak_bytes

    @property
    def step_s(self) -> float | None:
        """Seconds that the step took; None if nobody has measured it.

        Memory is recorded to the end of the step, events only as long as layers run.
        """
        if self.memory is not None and self.memory.samples:
            return self.memory.samples[-1].end_s - self.memory.samples[0].begin_s
        if self.events:
            return max(each.end_s for each in self.events) - self.events[0].begin_s
        return self.measured_step_s


# ---- Adds up the figures of each layer of a step from its storages and its trace ----

_SECONDS: Final = {"forward": "forward_s", "backward": "backward_s", "wait": "wait_s"}
_BYTES: Final = {"keep": "kept_bytes", "offload": "offloaded_bytes", "rebuild": "rebuilt_bytes"}


def layer_figures(
    inspection: Inspection | None, events: Iterable[TraceEvent]
) -> tuple[LayerFigures, ...]:
    """Return the figures of each call of a layer, microbatch by microbatch in forward order.

    Args:
        inspection: what became of the storages of the step; None if nobody knows.
        events: the trace of the step; empty if it was not traced.
    """
    figures: dict[tuple[int | None, int], LayerFigures] = {}

    def add(layer: int | None, microbatch: int, name: str, what: str, amount: float) -> None:
        call = layer, microbatch
        before = figures.get(call, LayerFigures(layer, name, microbatch))
        sum_ = (getattr(before, what) or 0) + amount
        changed: dict[str, Any] = {"name": name or before.name, what: sum_}
        figures[call] = dataclasses.replace(before, **changed)

    for event in events:
        if event.what in _SECONDS and not event.kind:
            seconds = _SECONDS[event.what]
            add(event.layer, event.microbatch, event.name, seconds, event.duration_s)
    if inspection is not None:
        for storage in inspection.storages:
            what = _BYTES[storage.decision]
            add(storage.layer, storage.microbatch, storage.name, what, storage.size_bytes)
        for each in inspection.recomputed:
            layer, size_bytes = each.layer, each.size_bytes
            add(layer.index, each.microbatch, layer.name, "recomputed_bytes", size_bytes)
    # What belongs to no layer comes last.
    order = sorted(figures, key=lambda call: (call[1], call[0] is None, call[0] or 0))
    return tuple(figures[call] for call in order)


# ---- Where a run ran ----


def versions_with(device: torch.device) -> dict[str, str]:
    """Return the versions of what computes on a device, and the device, by name."""
    return {
        "ebbtide": __version__,
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
        "device": _describe_device(device),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _describe_device(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.is_available():
        return f"{device}, {torch.cuda.get_device_name(device)}"
    if device.type == "cpu":
        return f"cpu, {count(torch.get_num_threads(), 'thread')}"
    return str(device)


# ---- Files of records: Chrome traces, which Perfetto opens, with the rest beside the events ----

FORMAT: Final = "ebbtide-record"
VERSION: Final = 5

RUN_FORMAT: Final = "ebbtide-run"  # of ``ebbtide run --json``, which has a record of each model
RUN_VERSION: Final = 3

_KEY: Final = "ebbtide"  # viewers of Chrome traces pass over keys that they do not know
_HOW: Final = (
    'handle.save_run("run.json"), handle.trace.save("trace.json") and ebbtide run --json run.json '
    "write such files"
)


def as_document(record: RunRecord) -> dict[str, Any]:
    """Return a record as an object for JSON: a Chrome trace, and the rest under ``"ebbtide"``."""
    entry = _name_owners(dataclasses.asdict(dataclasses.replace(record, events=())))
    del entry["events"]
    about = {"format": FORMAT, "version": VERSION}
    return {**chrome_document(record.events, record.memory), _KEY: {**about, **entry}}


def _name_owners(value: Any) -> Any:
    """Return data with the names of owners instead of owners."""
    if isinstance(value, dict):
        return {_name_owners(key): _name_owners(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_name_owners(each) for each in value]
    return value.name if isinstance(value, Owner) else value


def save_record(path: str | PathLike[str], record: RunRecord) -> None:
    """Write a file that `load_records` reads and Perfetto opens.

    Raises:
        OSError: the file cannot be written.
    """
    write_chrome(path, as_document(record))


def load_records(path: str | PathLike[str]) -> list[RunRecord]:
    """Read the runs in a file of `save_record`, of `Trace.save` or of ``ebbtide run --json``.

    The last has a record of each model that has finished a step. A trace
    gives a record of its events, with the name of the file as title. Times of events are rounded to
    what a Chrome trace holds.

    Raises:
        OSError: the file cannot be read.
        PolicyError: it is something else, or has no run.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if document.get("format") == RUN_FORMAT:
            _check_version(document, RUN_VERSION)
            records = [_read_document(each) for each in document["records"]]
        elif _KEY in document:
            records = [_read_document(document)]
        else:
            records = [RunRecord(title=Path(path).stem, events=_read_events(document))]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        why = str(error) if isinstance(error, PolicyError) else f"{type(error).__name__}: {error}"
        raise PolicyError(f"{path} is no run that this ebbtide can read ({why}). {_HOW}") from None
    if not records:
        raise PolicyError(f"{path}: no model has finished a step in this run")
    return records


def _check_version(entry: Mapping[str, Any], version: int) -> None:
    if entry["version"] != version:
        raise PolicyError(
            f"it has version {entry['version']}, and this ebbtide reads version {version}; install "
            f"the ebbtide that wrote it, or record the run again"
        )


def _read_document(document: Mapping[str, Any]) -> RunRecord:
    entry = dict(document[_KEY])
    _check_version(entry, VERSION)
    del entry["format"], entry["version"]
    record = read_as(RunRecord, {**entry, "events": []})
    _ = record.peak_bytes  # an IndexError if there is no such sample
    return dataclasses.replace(record, events=_read_events(document))


def _read_events(document: Mapping[str, Any]) -> tuple[TraceEvent, ...]:
    """Return the events of a Chrome trace."""
    rows = document["traceEvents"]
    return Trace(_read_event(row) for row in rows if row.get("ph") in ("X", "i")).events


def _read_event(row: Mapping[str, Any]) -> TraceEvent:
    about = dict(row["args"])
    if about["lane"] not in LANES:
        raise ValueError(about["lane"])
    begin_s = row["ts"] / 1e6
    end_s = begin_s + row.get("dur", 0.0) / 1e6
    name = about.pop("module")
    return TraceEvent(what=row["cat"], begin_s=begin_s, end_s=end_s, name=name, **about)
