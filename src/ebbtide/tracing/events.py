"""The event type that all recorders of traces share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

LANES = ("compute", "d2h", "h2d", "disk", "cpu_optimizer")


@final
@dataclass(frozen=True)
class TraceEvent:
    """One piece of work that a lane did, usually for one layer.

    Attributes:
        what: type of event: ``"forward"``, ``"backward"``, ``"offload"``, ``"release"``,
            ``"reload"``, ``"wait"``, ``"rebuild"`` or ``"recompute"``.
        lane: lane that did the work: ``"compute"``, ``"d2h"``, ``"h2d"``, ``"disk"`` or
            ``"cpu_optimizer"``.
        begin_s: begin of the event, in seconds since the step began.
        end_s: end of the event, in seconds since the step began. A release takes no time.
        layer: number of the layer in forward order; None if the event belongs to no layer.
        microbatch: number of the forward within the step that the event belongs to, from 0.
        name: name of the layer's module, if it has one.
        size_bytes: number of bytes moved, released or waited for.
        kind: ``"weights"`` or ``"gradients"`` if the event copies, releases or waits for those;
            empty otherwise.
    """

    what: str
    lane: str
    begin_s: float
    end_s: float
    layer: int | None = None
    microbatch: int = 0
    name: str = ""
    size_bytes: int = 0
    kind: str = ""

    @property
    def duration_s(self) -> float:
        """Duration in seconds."""
        return self.end_s - self.begin_s

    @property
    def label(self) -> str:
        """Text such as ``F3`` or ``B3`` for a pass, and ``offload 3`` for any other event.

        Weights and gradients are named after the group that they move in: ``w3`` or ``g3``.
        """
        if self.what in ("forward", "backward"):
            text = f"{self.what[0].upper()}{self.layer}"
        else:
            text = self.what if self.layer is None else f"{self.what} {self.kind[:1]}{self.layer}"
        return f"{text}.m{self.microbatch}" if self.microbatch else text
