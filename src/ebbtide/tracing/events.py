"""One event type for every executor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

LANES = ("compute", "d2h", "h2d", "disk", "cpu_optimizer")


@final
@dataclass(frozen=True)
class TraceEvent:
    """Something that one lane did for one layer.

    Attributes:
        what: ``"forward"``, ``"backward"``, ``"offload"``, ``"release"``, ``"reload"``, ``"wait"``
            or ``"rebuild"``.
        lane: what did it: ``"compute"``, ``"d2h"``, ``"h2d"``, ``"disk"`` or ``"cpu_optimizer"``.
        begin_s: seconds since the step began.
        end_s: the same; a release takes no time.
        layer: number of the layer in forward order, None for what belongs to no layer.
        microbatch: which of the step's forwards it belongs to, from 0.
        name: of the layer's module, if it has one.
        size_bytes: moved, released or waited for.
    """

    what: str
    lane: str
    begin_s: float
    end_s: float
    layer: int | None = None
    microbatch: int = 0
    name: str = ""
    size_bytes: int = 0

    @property
    def duration_s(self) -> float:
        """Seconds from begin to end."""
        return self.end_s - self.begin_s

    @property
    def label(self) -> str:
        """``F3`` or ``B3`` for a pass, ``offload 3`` and so on for the rest."""
        if self.what in ("forward", "backward"):
            text = f"{self.what[0].upper()}{self.layer}"
        else:
            text = self.what if self.layer is None else f"{self.what} {self.layer}"
        return f"{text}.m{self.microbatch}" if self.microbatch else text
