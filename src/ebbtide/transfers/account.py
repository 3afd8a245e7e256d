"""The account of the running step: its counters, its trace, and what compute waited for."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import final

import torch

from ebbtide.devices.device import AbstractDevice, AbstractEvent, AbstractStream, Origin
from ebbtide.ownership.memory_log import BETWEEN, MemoryLog
from ebbtide.ownership.memory_watch import MemoryWatch
from ebbtide.tracing.step_memory import Owner
from ebbtide.tracing.trace import Trace
from ebbtide.transfers.layer import Layer, in_range, is_profiling
from ebbtide.transfers.record import ACTIVATION, GRADIENT, WEIGHT, Record
from ebbtide.transfers.recorder import StepRecorder, Subject, watch_nodes
from ebbtide.transfers.stats import StepMeter, StepStats


@final
class Account:
    """Counts and, with `trace=True`, records what is done with the records of one model.

    Args:
        device: the device whose clock is used.
        traced: whether to record a trace of every step.

    Attributes:
        meter: the counters of the running step.
        last_meter: the counters of the last finished step; None before the first one ends.
        recorder: records the running step; None where no trace is wanted.
        watch: records the memory of traced steps; None where only their events are recorded.
        memory: the record of memory that is written now; None where no trace is wanted.
        num_steps: number of finished steps.
        origin: the moment at which the running step began; None before its first forward.
        last_origin: the moment at which the last finished step began.
        stored_bytes: for each tier, bytes of activations that are there or on their way there.
        device_bytes: bytes of saved tensors that are on the device now.
        kept_bytes: bytes of saved tensors that stay on the device and that graphs hold now.
        weight_bytes: bytes of offloaded weights that are on the device now.
    """

    # Long: each figure of a step is counted in one place, and each method is short.

    def __init__(self, device: AbstractDevice, *, traced: bool) -> None:
        self._device = device
        self._traced = traced
        device.keeps_time = traced
        self._finished: StepMeter | StepStats = StepStats()
        self._trace: StepRecorder | Trace = Trace()
        self.meter = StepMeter()
        self.recorder: StepRecorder | None = None
        self.watch: MemoryWatch | None = None
        self.memory: MemoryLog | None = None
        self._memory_before: tuple[MemoryLog, Origin] | None = None  # of the last finished step
        self._num_phases = 0  # of that record, when it was last read
        self.last_meter: StepMeter | None = None
        self.num_steps = 0
        self.origin: Origin | None = None
        self.last_origin: Origin | None = None
        self.stored_bytes = {"host": 0, "disk": 0}
        self.device_bytes = 0
        self.kept_bytes = 0
        self.weight_bytes = 0

    @property
    def stats(self) -> StepStats:
        """The last finished step. Reading it waits until the device has finished that step."""
        if isinstance(self._finished, StepMeter):
            self._finished = self._finished.freeze()
        return self._finished

    @property
    def last_counts(self) -> StepStats | StepMeter:
        """The counts of the last finished step, without its waits. Reading it does not wait."""
        return self._finished

    @property
    def trace(self) -> Trace:
        """What the last finished step did. Reading it waits until the device has finished it."""
        if isinstance(self._trace, StepRecorder):
            self._trace = self._trace.trace()
            self._num_phases = 0
        if self._memory_before is not None and self.watch is not None:
            log, origin = self._memory_before
            if log.num_phases != self._num_phases:  # an optimizer has stepped since
                self._num_phases = log.num_phases
                self._trace = Trace(self._trace.events, self.watch.freeze(log, origin))
        return self._trace

    def record(self, *, traced: bool) -> None:
        """Record a trace of each step, or of none, from the next step on."""
        self._traced = self._device.keeps_time = traced
        if not traced:
            self.memory = self._memory_before = None
            if self.watch is not None:
                self.watch.log = None

    def begin(self) -> None:
        """Note that a forward begins, perhaps the first of a step."""
        if self.origin is None:
            # A trace compares the clocks of host and device, so they must meet: the host waits.
            self.origin = self._device.origin() if self._traced else self._device.moment()
            if self._traced:
                self._begin_recording(self.origin)

    def _begin_recording(self, origin: Origin) -> None:
        if self.watch is not None:
            if isinstance(self._trace, StepRecorder):
                _ = self.trace  # its record of memory ends now
            self.memory = self.watch.begin_step(lambda: self._device.compute_stream().record())
        self.recorder = StepRecorder(self._device, origin, self.memory)

    def watch_backward(self, subject: Subject, outputs: Iterable[torch.Tensor]) -> None:
        """Have the begin of a layer's backward recorded, in the step that runs by then.

        Args:
            subject: the layer.
            outputs: the outputs of its forward. Backward begins with their operations.
        """
        known = weakref.ref(self)  # a graph may outlive the model

        def begin(_: object) -> None:
            account = known()
            if account is not None and account.recorder is not None:
                account.recorder.begin_backward(subject)

        watch_nodes(outputs, begin)

    def finish(self, host_capacity_bytes: int) -> None:
        """Close the account of the step."""
        self.meter.host_capacity_bytes = host_capacity_bytes
        self._finished = self.last_meter = self.meter
        self.meter = StepMeter()
        self.num_steps += 1
        self.last_origin, self.origin = self.origin, None
        if self.recorder is not None:
            self.recorder.begin_backward(None)
            self._trace, self.recorder = self.recorder, None
            if self.memory is not None:
                assert self.last_origin is not None
                self.memory.enter(BETWEEN)
                self._memory_before = self.memory, self.last_origin

    def note_offload(self, record: Record) -> None:
        """Count a copy down that was queued."""
        assert record.offloaded is not None
        meter, size_bytes = self.meter, record.size_bytes
        if record.kind is GRADIENT:
            meter.gradient_bytes += size_bytes
        else:
            assert record.slot is not None
            tier = record.slot.tier
            stored_bytes = self.stored_bytes[tier] = self.stored_bytes[tier] + size_bytes
            meter.num_offloaded += 1
            meter.offloaded_bytes += size_bytes
            if tier == "disk":
                meter.peak_disk_bytes = max(meter.peak_disk_bytes, stored_bytes)
            elif stored_bytes > meter.peak_host_bytes:
                meter.peak_host_bytes = stored_bytes
        if self.recorder is not None:
            self.recorder.copy("offload", subject(record), record.offloaded)
            record.copies += (("offload", record.offloaded),)

    def note_release(self, record: Record) -> None:
        """Record in the trace that the device memory of a record's source was released."""
        assert self.recorder is not None
        self.recorder.moment("release", subject(record))
        storage = None if self.memory is None else record.find_storage()
        if storage is not None and self.memory is not None:
            self.memory.note_reference(storage)

    def note_reload(self, record: Record) -> None:
        """Count a copy up that was queued."""
        assert record.ready is not None
        if record.kind is WEIGHT:
            self.meter.weight_reload_bytes += record.size_bytes
        else:
            self.meter.reloaded_bytes += record.size_bytes
        if self.recorder is not None:
            self.recorder.copy("reload", subject(record), record.ready)
            record.copies += (("reload", record.ready),)

    def take(
        self, size_bytes: int, owner: Owner, layer: Layer | None, source: Record | None = None
    ) -> None:
        """Count bytes of saved tensors that come to the device.

        Args:
            size_bytes: how many.
            owner: what they are.
            layer: the layer that they belong to; None outside layers.
            source: the record whose saved storage the bytes are; None for a copy of it.
        """
        device_bytes = self.device_bytes = self.device_bytes + size_bytes
        if device_bytes > self.meter.peak_device_bytes:
            self.meter.peak_device_bytes = device_bytes
        if self.memory is not None:
            address = None if source is None else source.source_address
            self.memory.change(owner, layer, size_bytes, address)

    def give(
        self, size_bytes: int, owner: Owner, layer: Layer | None, source: Record | None = None
    ) -> None:
        """Count bytes of saved tensors that leave the device, as `take` counted them."""
        self.device_bytes -= size_bytes
        if self.memory is not None:
            address = None if source is None else source.source_address
            self.memory.change(owner, layer, -size_bytes, address)

    def take_kept(
        self, size_bytes: int, layer: Layer | None = None, source: Record | None = None
    ) -> None:
        """Count bytes of saved tensors that stay on the device."""
        self.kept_bytes += size_bytes
        self.meter.kept_bytes += size_bytes
        self.take(size_bytes, Owner.KEPT, layer, source)

    def give_kept(
        self, size_bytes: int, layer: Layer | None = None, source: Record | None = None
    ) -> None:
        """Count bytes of kept tensors that no graph holds any more."""
        self.kept_bytes -= size_bytes
        self.give(size_bytes, Owner.KEPT, layer, source)

    def take_weights(self, size_bytes: int, layer: Layer | None = None) -> None:
        """Count bytes of weights that come to the device; a negative number of them leave it."""
        self.weight_bytes += size_bytes
        self.meter.peak_weight_bytes = max(self.meter.peak_weight_bytes, self.weight_bytes)
        if self.memory is not None:
            self.memory.change(Owner.WEIGHTS, layer, size_bytes)

    def wait(
        self, record: Record, event: AbstractEvent, stream: AbstractStream, *, is_reload: bool
    ) -> None:
        """Let what is queued on ``stream`` from now on run after ``event``, and count the wait."""
        recorder = self.recorder
        if recorder is None and event.query() and not is_profiling():
            stream.wait(event)  # what is complete stalls nobody
            return
        before = self._device.moment()
        self.meter.waits.append((before, event, is_reload))
        in_range("wait", record.layer, stream.wait, event)
        if recorder is not None:
            recorder.compute("wait", subject(record), before.event)


def subject(record: Record) -> Subject:
    """What a trace says about a record."""
    kind = "" if record.kind is ACTIVATION else record.kind
    return Subject(record.layer, record.microbatch, record.size_bytes, kind)
