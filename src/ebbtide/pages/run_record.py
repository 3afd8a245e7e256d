"""What is recorded of a run: its last step, what it was asked for, and where it ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from ebbtide.tracing.events import TraceEvent
from ebbtide.tracing.finding import Finding
from ebbtide.tracing.step_memory import StepMemory
from ebbtide.transfers.stats import StepStats


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
@dataclass(frozen=True)
class PredictedPhase:
    """The predicted peak of memory in one phase of a step.

    Attributes:
        phase: named as in `MemorySample.phase`.
        begin_s: its predicted begin, in seconds since the step began.
        end_s: its predicted end.
        peak_bytes: the peak of memory in it.
    """

    phase: str
    begin_s: float
    end_s: float
    peak_bytes: int


@final
@dataclass(frozen=True)
class PredictedStep:
    """What was predicted of a step.

    Attributes:
        step_s: seconds that it takes.
        peak_bytes: the peak of memory.
        phases: memory by phase, in order.
        events: what each lane does.
    """

    step_s: float
    peak_bytes: int
    phases: tuple[PredictedPhase, ...] = ()
    events: tuple[TraceEvent, ...] = ()


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
        verdict: a sentence that sums up why its peak is as high as it is.
        findings: the reasons, the most important one first.
        limit_bytes: the smallest peak that any offloader could reach.
        limit_why: why that is the smallest.
        budget_bytes: the most memory that the run was to take.
        prediction: what the planner has predicted.
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
    prediction: PredictedStep | None = None
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
