"""A record of a predicted step: its passes, its copies, and what memory is used for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, final

from ebbtide.planning.prediction.copy_queues import Copy
from ebbtide.tracing.events import TraceEvent

DOWN: Final = "d2h"
UP: Final = "h2d"


class MemoryParts(NamedTuple):
    """What device memory is used for during a pass, in bytes. The parts add up to all of it.

    Attributes:
        parameters_bytes: weights, gradients and optimizer state of layers, as far as they are on
            the device; gradients under way to the host included.
        fixed_bytes: what is there throughout the step and belongs to no layer.
        saved_bytes: what layers saved and is there.
        leaving_bytes: that part of what layers saved which is there because its copy down has not
            been completed.
        returning_bytes: that part which was reloaded, or is being reloaded.
        working_bytes: what the pass needs beside that, at its peak.
    """

    parameters_bytes: int
    fixed_bytes: int
    saved_bytes: int
    leaving_bytes: int
    returning_bytes: int
    working_bytes: int


class PassRecord(NamedTuple):
    """One pass of the step.

    Attributes:
        what: ``"forward"``, ``"loss"`` or ``"backward"``.
        layer: index of the layer; None for the loss.
        begin_s: when it begins, after its waits.
        end_s: when it ends.
        recompute_s: how long, at its begin, the layer's forward runs again.
        memory: what memory is used for.
    """

    what: str
    layer: int | None
    begin_s: float
    end_s: float
    recompute_s: float
    memory: MemoryParts


class _CopyRecord(NamedTuple):
    lane: str
    layer: int
    size_bytes: int
    copy: Copy


@final
class StepRecord:
    """What happens in a predicted step, in order.

    Attributes:
        passes: the passes, the loss between them.
    """

    def __init__(self) -> None:
        self.passes: list[PassRecord] = []
        self._copies: list[_CopyRecord] = []
        self._waits: list[tuple[float, float]] = []
        self._rebuilds: list[tuple[float, float, int]] = []

    def note_copy(self, lane: str, layer: int, size_bytes: int, copy: Copy) -> None:
        """Note that a copy was queued in a lane."""
        self._copies.append(_CopyRecord(lane, layer, size_bytes, copy))

    def note_wait(self, begin_s: float, end_s: float) -> None:
        """Note that compute waited for a copy."""
        if end_s > begin_s:
            self._waits.append((begin_s, end_s))

    def note_rebuild(self, begin_s: float, end_s: float, layer: int) -> None:
        """Note that something was rebuilt for the backward of a layer."""
        if end_s > begin_s:
            self._rebuilds.append((begin_s, end_s, layer))

    def events(self) -> Iterator[TraceEvent]:
        """Yield the events of the step, as a trace has them. The loss is none."""
        for each in self.passes:
            if each.layer is None:
                continue
            yield TraceEvent(each.what, "compute", each.begin_s, each.end_s, each.layer)
            if each.recompute_s:
                end_s = each.begin_s + each.recompute_s
                yield TraceEvent("recompute", "compute", each.begin_s, end_s, each.layer)
        for begin_s, end_s in self._waits:
            yield TraceEvent("wait", "compute", begin_s, end_s)
        for begin_s, end_s, layer in self._rebuilds:
            yield TraceEvent("rebuild", "compute", begin_s, end_s, layer)
        free_s = {DOWN: 0.0, UP: 0.0}  # copies of a lane run one after the other
        last_s = self.passes[-1].end_s
        for lane, layer, size_bytes, copy in self._copies:
            begin_s = max(free_s[lane], copy.ready_s)
            if begin_s >= last_s:
                continue  # nothing waits for it, and its end is not known
            free_s[lane] = end_s = min(copy.end_s, last_s)
            what = "offload" if lane == DOWN else "reload"
            yield TraceEvent(what, lane, begin_s, end_s, layer, size_bytes=size_bytes)
