"""Records the steps of one model: what the lanes do, and what memory holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from ebbtide.devices.device import AbstractDevice, AbstractEvent, Origin
from ebbtide.devices.process import call_weakly, watch_optimizers
from ebbtide.errors import PolicyError
from ebbtide.observe.memory import BEGIN, BETWEEN, OPTIMIZER, MemoryLog
from ebbtide.observe.owners import TensorOwners
from ebbtide.observe.trace import Trace
from ebbtide.runtime.engine import Engine
from ebbtide.runtime.events import EventListener, MemoryListener, Subject, TraceEvent
from ebbtide.runtime.transfers import Transfers
from ebbtide.stores.measured_memory import AbstractMemory, memory_of


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
        # What was done, to what, its begin and its end; a copy's end knows its times and its lane.
        self._entries: list[tuple[str, Subject, AbstractEvent | None, AbstractEvent]] = []
        self._forwards: list[tuple[Subject, AbstractEvent]] = []  # layers can be nested
        self._backward: tuple[Subject, AbstractEvent] | None = None

    def copy(self, what: str, subject: Subject, *ends: AbstractEvent) -> None:
        """Note that copies have been queued; ``ends`` are the events of their completion."""
        self._entries += [(what, subject, None, end) for end in ends]

    def mark(self) -> AbstractEvent:
        """Record an event on the compute stream, behind the work queued so far."""
        return self._device.compute_stream().record()

    def compute(
        self, what: str, subject: Subject, begin: AbstractEvent, end: AbstractEvent | None = None
    ) -> None:
        """Note what the compute stream runs, or waits for, to ``end``; None: to its present end."""
        self._entries.append((what, subject, begin, self.mark() if end is None else end))

    def moment(self, what: str, subject: Subject) -> None:
        """Note an event without duration on the compute stream."""
        now = self.mark()
        self._entries.append((what, subject, now, now))

    def begin_forward(self, subject: Subject) -> None:
        """Note that a layer's forward begins."""
        mark = self.mark()
        self._forwards.append((subject, mark))
        if self._memory is not None:
            self._memory.enter(_name_pass("F", subject), mark)

    def end_forward(self) -> None:
        """Note that the innermost layer's forward has ended."""
        if self._forwards:
            end = self.mark()
            self.compute("forward", *self._forwards.pop(), end)
            if self._memory is not None:
                around = self._forwards[-1][0] if self._forwards else None
                self._memory.enter(BEGIN if around is None else _name_pass("F", around), end)

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
        return Trace(event for entry in self._entries for event in self._resolve(*entry))

    def _resolve(
        self, what: str, subject: Subject, begin: AbstractEvent | None, end: AbstractEvent
    ) -> list[TraceEvent]:
        if begin is None:
            spans = end.spans(self._origin)
        else:
            begin_s = begin.since(self._origin)
            spans = [("compute", begin_s, max(begin_s, end.since(self._origin)))]
        layer = subject.layer
        return [
            TraceEvent(
                what=what,
                lane=lane,
                begin_s=begin_s,
                end_s=end_s,
                layer=None if layer is None else layer.index,
                microbatch=subject.microbatch,
                name="" if layer is None else layer.name,
                size_bytes=subject.size_bytes,
                kind=subject.kind,
            )
            for lane, begin_s, end_s in spans
        ]


def _name_pass(direction: str, subject: Subject) -> str:
    assert subject.layer is not None
    name = f"{direction}{subject.layer.index}"
    return f"{name}.m{subject.microbatch}" if subject.microbatch else name


@final
class Recording:
    """Records one step after another; a `ebbtide.runtime.events.StepListener`.

    Args:
        device: device whose streams run the work.
        owners: counts what is not a saved tensor; None: only events are recorded.
        make_memory: returns the memory to measure. None: only saved tensors are counted.
        settle: notes which saved tensors have died, without waiting.

    Attributes:
        owners: as given.
    """

    def __init__(
        self,
        device: AbstractDevice,
        owners: TensorOwners | None = None,
        make_memory: Callable[[], AbstractMemory] | None = None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._device = device
        self.owners = owners
        self._make_memory = make_memory
        self._settle = settle
        self._memory: AbstractMemory | None = None
        self._running: tuple[StepRecorder, Origin] | None = None
        self._log: MemoryLog | None = None  # of the step that runs, or ran last
        self._trace: StepRecorder | Trace = Trace()  # of the last finished step,
        self._finished: tuple[MemoryLog, Origin] | None = None  # and the record of its memory
        self._num_phases = 0  # of that record, when it was last read

    def begin_step(self, origin: Origin) -> tuple[EventListener, MemoryListener | None]:
        log = None
        if self.owners is not None:
            if isinstance(self._trace, StepRecorder):
                _ = self.trace  # its record of memory ends now
            log = self._begin_log(self.owners)
        recorder = StepRecorder(self._device, origin, log)
        self._running = recorder, origin
        return recorder, log

    def _begin_log(self, owners: TensorOwners) -> MemoryLog:
        """Begin the record of a step's memory, and end that of the step before."""
        before = {}
        if self._log is None:
            self._memory = None if self._make_memory is None else self._make_memory()
            watch_optimizers(self._begin_optimizer_step, self._end_optimizer_step)
        else:
            self._log.close()
            before = self._log.saved_after()
        owners.begin_step()
        clock = self._device.compute_stream
        self._log = MemoryLog(self._memory, owners, before, lambda: clock().record())
        return self._log

    def end_step(self) -> None:
        assert self._running is not None
        (recorder, origin), self._running = self._running, None
        recorder.begin_backward(None)
        self._trace = recorder
        if self._log is not None:
            self._log.enter(BETWEEN)
            self._finished = self._log, origin

    def stop(self) -> None:
        self._log = self._finished = None

    @property
    def trace(self) -> Trace:
        """What the last finished step did. Reading it waits until the device has finished it."""
        if isinstance(self._trace, StepRecorder):
            self._trace = self._trace.trace()
            self._num_phases = 0
        if self._finished is not None:
            log, origin = self._finished
            if log.num_phases != self._num_phases:  # an optimizer has stepped since
                self._num_phases = log.num_phases
                counted = "saved tensors" if self._memory is None else self._memory.name
                self._trace = Trace(self._trace.events, log.freeze(origin, counted))
        return self._trace

    def _begin_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        owners, log = self.owners, self._log
        if owners is not None and log is not None and owners.note_optimizer(optimizer):
            self._settle()
            log.enter(OPTIMIZER)

    def _end_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        owners, log = self.owners, self._log
        if owners is not None and log is not None and owners.note_optimizer(optimizer):
            owners.count_optimizers()
            owners.recount_gradients()
            log.enter(BETWEEN)


def record_model(
    transfers: Transfers, modules: Sequence[nn.Module], at_rest: Callable[[], Collection[int]]
) -> Recording:
    """Return what records the steps of a model, and their memory.

    Args:
        transfers: the model's transfers.
        modules: modules whose parameters, gradients and optimizer state are counted.
        at_rest: returns the parameters whose values rest elsewhere, by `id`.
    """
    device = transfers.device
    owners = TensorOwners(modules, device.torch_device, at_rest)
    read = functools.partial(memory_of, device.torch_device) if device.has_memory else None
    return Recording(device, owners, read, call_weakly(transfers.poll))


def trace_of(engine: Engine) -> Trace:
    """Return the trace of the last finished step.

    Raises:
        PolicyError: the engine was made without ``traced=True``.
    """
    if not engine.is_traced:
        raise PolicyError(
            "no step was recorded, because recording costs time; turn it on with "
            "ebbtide.offload(model, trace=True)"
        )
    engine.settle()
    listener = engine.transfers.account.listener
    return listener.trace if isinstance(listener, Recording) else Trace()
