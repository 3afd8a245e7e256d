"""Records the events of a running step; the host waits for their times only when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, final

import torch

from ebbtide.devices.device import AbstractDevice, AbstractEvent, Origin, Span
from ebbtide.ownership.memory_log import BEGIN, MemoryLog
from ebbtide.tracing.events import TraceEvent
from ebbtide.tracing.trace import Trace
from ebbtide.transfers.layer import Layer


class Subject(NamedTuple):
    """The layer, the microbatch and the bytes that an event of a trace is about."""

    layer: Layer | None
    microbatch: int
    size_bytes: int = 0
    kind: str = ""


class _Entry(NamedTuple):
    what: str
    subject: Subject
    begin: AbstractEvent | None  # None for a copy: `end` knows its times and its lane
    end: AbstractEvent


@final
class StepRecorder:
    """Records the events of the step that is running.

    Args:
        device: device whose streams run the work.
        origin: the start of the step, from which times are counted.
        memory: is told of the passes; None if memory is not recorded.
    """

    def __init__(
        self, device: AbstractDevice, origin: Origin, memory: MemoryLog | None = None
    ) -> None:
        self._device = device
        self._memory = memory
        self._origin = origin
        self._entries: list[_Entry] = []
        self._forwards: list[tuple[Subject, AbstractEvent]] = []  # layers can be nested
        self._backward: tuple[Subject, AbstractEvent] | None = None

    def copy(self, what: str, subject: Subject, *ends: AbstractEvent) -> None:
        """Note that copies have been queued; ``ends`` are the events of their completion."""
        self._entries += [_Entry(what, subject, None, end) for end in ends]

    def mark(self) -> AbstractEvent:
        """Record an event on the compute stream, behind the work queued so far."""
        return self._device.compute_stream().record()

    def compute(self, what: str, subject: Subject, begin: AbstractEvent) -> None:
        """Note what the compute stream runs, or waits for, from ``begin`` to its present end."""
        self._entries.append(_Entry(what, subject, begin, self.mark()))

    def moment(self, what: str, subject: Subject) -> None:
        """Note an event without duration on the compute stream."""
        now = self.mark()
        self._entries.append(_Entry(what, subject, now, now))

    def begin_forward(self, subject: Subject) -> None:
        """Note that a layer's forward begins."""
        mark = self.mark()
        self._forwards.append((subject, mark))
        if self._memory is not None:
            self._memory.enter(_name_pass("F", subject), mark)

    def end_forward(self) -> None:
        """Note that the innermost layer's forward has ended."""
        if self._forwards:
            self.compute("forward", *self._forwards.pop())
            if self._memory is not None:
                around = self._forwards[-1][0] if self._forwards else None
                name = BEGIN if around is None else _name_pass("F", around)
                self._memory.enter(name, self._entries[-1].end)

    def begin_backward(self, subject: Subject | None) -> None:
        """Note that a layer's backward begins, and that the previous layer's has ended.

        Args:
            subject: the layer; None if no layer's backward follows.
        """
        if self._backward is not None:
            self.compute("backward", *self._backward)
        self._backward = None if subject is None else (subject, self.mark())
        if self._backward is not None and self._memory is not None:
            self._memory.enter(_name_pass("B", self._backward[0]), self._backward[1])

    def trace(self) -> Trace:
        """Return the events with their times. The host waits until the device has run them all."""
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
                kind=entry.subject.kind,
            )
            for span in spans
        ]


def _name_pass(direction: str, subject: Subject) -> str:
    assert subject.layer is not None
    name = f"{direction}{subject.layer.index}"
    return f"{name}.m{subject.microbatch}" if subject.microbatch else name


def watch_nodes(outputs: Iterable[torch.Tensor], begin: Callable[[object], None]) -> None:
    """Call ``begin`` when backward reaches the operations that computed these outputs."""
    for node in {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}:
        node.register_prehook(begin)
