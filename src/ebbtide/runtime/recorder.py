"""Collects what a step does while it runs; nothing waits for a time until somebody asks."""

from __future__ import annotations

from typing import NamedTuple, final

from ebbtide.devices.device import AbstractDevice, AbstractEvent, Span
from ebbtide.runtime.ranges import Layer
from ebbtide.tracing.events import TraceEvent
from ebbtide.tracing.trace import Trace


class Subject(NamedTuple):
    """What a trace event is about: a layer of one of the step's forwards, and some bytes."""

    layer: Layer | None
    microbatch: int
    size_bytes: int = 0


class _Entry(NamedTuple):
    what: str
    subject: Subject
    begin: AbstractEvent | None  # None: `end` knows when its work ran, and in which lane
    end: AbstractEvent


@final
class StepRecorder:
    """The events of the step that is running.

    Args:
        device: whose streams and clock they are on. Making a recorder waits for the device.
    """

    def __init__(self, device: AbstractDevice) -> None:
        self._device = device
        self._origin = device.origin()
        self._entries: list[_Entry] = []
        self._forwards: list[tuple[Subject, AbstractEvent]] = []  # layers can be nested
        self._backward: tuple[Subject, AbstractEvent] | None = None

    def copy(self, what: str, subject: Subject, *ends: AbstractEvent) -> None:
        """Copies have been queued that are complete at ``ends``."""
        self._entries += [_Entry(what, subject, None, end) for end in ends]

    def mark(self) -> AbstractEvent:
        """The point that the compute stream has come to now."""
        return self._device.compute_stream().record()

    def compute(self, what: str, subject: Subject, begin: AbstractEvent) -> None:
        """The compute stream did, or waited for, something from ``begin`` until now."""
        self._entries.append(_Entry(what, subject, begin, self.mark()))

    def moment(self, what: str, subject: Subject) -> None:
        """Something that takes no time happened on the compute stream."""
        now = self.mark()
        self._entries.append(_Entry(what, subject, now, now))

    def begin_forward(self, subject: Subject) -> None:
        """A layer's forward begins."""
        self._forwards.append((subject, self.mark()))

    def end_forward(self) -> None:
        """The innermost layer's forward has ended."""
        if self._forwards:
            self.compute("forward", *self._forwards.pop())

    def begin_backward(self, subject: Subject | None) -> None:
        """Backward comes to a layer, which ends the one before; None: to the end of the step."""
        if self._backward is not None:
            self.compute("backward", *self._backward)
        self._backward = None if subject is None else (subject, self.mark())

    def trace(self) -> Trace:
        """What was recorded, with times: waits until the device has come so far."""
        return Trace(event for entry in self._entries for event in self._resolve(entry))

    def _resolve(self, entry: _Entry) -> list[TraceEvent]:
        if entry.begin is None:
            spans = entry.end.spans(self._origin)
        else:
            begin_s = entry.begin.since(self._origin)
            spans = [Span("compute", begin_s, max(begin_s, entry.end.since(self._origin)))]
        layer = entry.subject.layer
        return [
            TraceEvent(
                what=entry.what,
                lane=span.lane,
                begin_s=span.begin_s,
                end_s=span.end_s,
                layer=None if layer is None else layer.index,
                microbatch=entry.subject.microbatch,
                name="" if layer is None else layer.name,
                size_bytes=entry.subject.size_bytes,
            )
            for span in spans
        ]
