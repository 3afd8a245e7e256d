"""Makes the record of a run from what its handle knows."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from typing import Protocol, final

import torch

from ebbtide.pages.layer_figures import layer_figures
from ebbtide.pages.predicted_step import predict_step
from ebbtide.pages.run_record import RunRecord
from ebbtide.planning.hardware import Hardware
from ebbtide.planning.plan import Plan
from ebbtide.planning.step_profile import StepProfile
from ebbtide.reports.inspection import Inspection
from ebbtide.tracing.finding import Finding
from ebbtide.tracing.trace import Trace
from ebbtide.transfers.stats import StepStats
from ebbtide.version import __version__


class Explained(Protocol):
    """Why memory is as high as it is; the attributes are those of `RunRecord`."""

    @property
    def verdict(self) -> str:
        """The verdict."""

    @property
    def findings(self) -> Sequence[Finding]:
        """The reasons."""

    @property
    def limit_bytes(self) -> int | None:
        """The smallest peak that any offloader could reach."""

    @property
    def limit_why(self) -> str:
        """Why that is the smallest."""


class Measured(Protocol):
    """What a step was measured to cost."""

    @property
    def peak_bytes(self) -> int:
        """The peak of memory."""

    @property
    def step_s(self) -> float:
        """Seconds from the begin of the step to the begin of the next."""


class Planned(Protocol):
    """A plan, and what it was made from."""

    @property
    def plan(self) -> Plan:
        """The plan."""

    @property
    def profile(self) -> StepProfile:
        """The step that it is for."""

    @property
    def hardware(self) -> Hardware:
        """The machine that it is for."""

    @property
    def budget_bytes(self) -> int:
        """The most memory to take."""

    @property
    def measured(self) -> Measured | None:
        """What the last step under the plan was measured to cost."""


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSources:
    """What the record of a run is made from. What is None is not known.

    Attributes:
        title: the title of the record.
        device: the device that the model computes on.
        settings: what the offload was asked for.
        stats: statistics of the last step.
        trace: its trace.
        inspection: what became of its storages.
        planned: the plan that it followed.
        explained: why its memory is as high as it is.
        notes: what else is to be known, in sentences.
    """

    title: str
    device: torch.device
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stats: StepStats | None = None
    trace: Trace | None = None
    inspection: Inspection | None = None
    planned: Planned | None = None
    explained: Explained | None = None
    notes: Sequence[str] = ()


def collect_record(sources: RunSources) -> RunRecord:
    """Return the record."""
    planned, explained = sources.planned, sources.explained
    trace = Trace() if sources.trace is None else sources.trace
    measured = None if planned is None else planned.measured
    record = RunRecord(
        title=sources.title,
        settings=sources.settings,
        versions=_versions(sources.device),
        stats=sources.stats,
        layers=layer_figures(sources.inspection, trace.events),
        events=trace.events,
        memory=trace.memory,
        budget_bytes=None if planned is None else planned.budget_bytes,
        prediction=None
        if planned is None
        else predict_step(planned.plan, planned.profile, planned.hardware),
        measured_step_s=None if measured is None else measured.step_s,
        measured_peak_bytes=None if measured is None else measured.peak_bytes,
        notes=tuple(sources.notes),
    )
    if explained is None:
        return record
    return dataclasses.replace(
        record,
        verdict=explained.verdict,
        findings=tuple(explained.findings),
        limit_bytes=explained.limit_bytes,
        limit_why=explained.limit_why,
    )


def _versions(device: torch.device) -> dict[str, str]:
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
        return f"cpu, {torch.get_num_threads()} threads"
    return str(device)
