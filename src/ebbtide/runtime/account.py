"""The account of the step that runs: its counters, its trace, and what compute waited for."""

from __future__ import annotations

from typing import final

from ebbtide.devices.device import AbstractDevice, AbstractEvent, AbstractStream
from ebbtide.runtime.ranges import profiler_range
from ebbtide.runtime.recorder import StepRecorder, Subject
from ebbtide.runtime.records import StorageRecord
from ebbtide.runtime.stats import StepMeter, StepStats
from ebbtide.tracing.trace import Trace


@final
class Account:
    """Counts and, if asked for, records what a session does.

    Args:
        device: whose clock times it.
        traced: whether to record every step.

    Attributes:
        meter: the counters of the step that runs.
        recorder: of the step that runs, None where nothing is recorded.
        stored_bytes: at rest in each tier, or on their way there.
        device_bytes: of saved tensors on the device now, whatever holds them.
        live: saved tensors that a graph holds.
    """

    def __init__(self, device: AbstractDevice, *, traced: bool) -> None:
        self._device = device
        self._traced = traced
        device.keeps_time = traced
        self._finished: StepMeter | StepStats = StepStats()
        self._trace: StepRecorder | Trace = Trace()
        self.meter = StepMeter()
        self.recorder: StepRecorder | None = None
        self.stored_bytes = {"host": 0, "disk": 0}
        self.device_bytes = 0
        self.live = 0

    @property
    def stats(self) -> StepStats:
        """The last finished step. Reading it waits until the device has finished that step."""
        if isinstance(self._finished, StepMeter):
            self._finished = self._finished.freeze()
        return self._finished

    @property
    def trace(self) -> Trace:
        """What the last finished step did. Reading it waits until the device has finished it."""
        if isinstance(self._trace, StepRecorder):
            self._trace = self._trace.trace()
        return self._trace

    def begin(self) -> None:
        """A forward begins, perhaps the first of a step."""
        if self._traced and self.recorder is None:
            self.recorder = StepRecorder(self._device)

    def finish(self, host_capacity_bytes: int) -> None:
        """The step is over."""
        self.meter.capacity_bytes = host_capacity_bytes
        self._finished, self.meter = self.meter, StepMeter()
        if self.recorder is not None:
            self.recorder.begin_backward(None)
            self._trace, self.recorder = self.recorder, None

    def note_offload(self, record: StorageRecord) -> None:
        """A copy down was queued."""
        slot = record.slot
        assert slot is not None
        self.stored_bytes[slot.tier] += record.size_bytes
        if self.recorder is not None:
            self.recorder.copy("offload", subject(record), slot.offloaded)
        self.meter.note_offload(record.size_bytes, self.stored_bytes)

    def note_release(self, record: StorageRecord) -> None:
        """Device memory of a record's source was let go of."""
        if self.recorder is not None:
            self.recorder.moment("release", subject(record))

    def note_reload(self, record: StorageRecord) -> None:
        """A copy up was queued."""
        assert record.reloaded is not None
        if self.recorder is not None:
            self.recorder.copy("reload", subject(record), record.reloaded)
        self.meter.reloaded_bytes += record.size_bytes

    def take(self, size_bytes: int) -> None:
        """So many bytes more are held on the device."""
        self.device_bytes += size_bytes
        self.meter.peak_device_bytes = max(self.meter.peak_device_bytes, self.device_bytes)

    def give(self, size_bytes: int) -> None:
        """So many bytes are held no longer."""
        self.device_bytes -= size_bytes

    def wait(
        self,
        record: StorageRecord,
        event: AbstractEvent,
        stream: AbstractStream,
        *,
        is_reload: bool = False,
    ) -> None:
        """Order what is queued on ``stream`` from now on after ``event``."""
        before = self._device.moment()
        self.meter.waits.append((before, event, is_reload))
        with profiler_range("wait", record.layer):
            # A reload from disk is queued by a worker, once it has read the bytes.
            stream.wait(event.settled())
        if self.recorder is not None:
            self.recorder.compute("wait", subject(record), before.event)


def subject(record: StorageRecord) -> Subject:
    """What the trace says a record is about."""
    return Subject(record.layer, record.forward.number, record.size_bytes)
