"""Statistics of a step: what it saved, kept, copied and waited for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Final, final

import torch

from ebbtide.devices.device import (
    AbstractDevice,
    AbstractEvent,
    AbstractStream,
    Layer,
    Origin,
    Result,
    in_range,
    is_profiling,
)
from ebbtide.runtime.events import (
    EventListener,
    MemoryListener,
    Owner,
    PassListener,
    StepListener,
    Subject,
)
from ebbtide.runtime.record import ACTIVATION, DROPPED, GRADIENT, WEIGHT, ForwardLog, Record
from ebbtide.units import format_size, text_block


@dataclass
class StepStats:
    """The statistics of one finished step; all fields are zero before the first step ends.

    A step lasts from its first forward until autograd holds none of its saved tensors. Every
    forward that begins before then belongs to it, so two microbatches in flight are one step.

    Attributes:
        saved_bytes: bytes that would move if each saved tensor were copied by itself; a storage
            that several saved tensors share counts several times.
        unique_bytes: bytes of the saved storages, each counted once, without parameters: kept_bytes
            + offloaded_bytes + rebuilt_bytes + recomputed_bytes.
        parameter_bytes: bytes of saved tensors that are a parameter or buffer, a view of one or its
            cast copy; in a pipeline also the input of a stage, which the stage keeps in any case.
        kept_bytes: unique bytes that stayed on the device.
        offloaded_bytes: unique bytes copied to a lower tier.
        reloaded_bytes: bytes copied back to the device.
        rebuilt_bytes: unique bytes that were neither kept nor offloaded; backward computes them
            again.
        recomputed_bytes: unique bytes that were neither kept nor offloaded, because backward runs
            the forward of their layer again. The layer's inputs are not among them.
        weight_reload_bytes: bytes of offloaded weights copied to the device, for forward and for
            backward.
        gradient_bytes: bytes of the gradients of offloaded weights that were copied to the host.
        peak_device_bytes: most bytes of saved tensors on the device at once, including those whose
            copy is in flight and excluding parameters.
        peak_weight_bytes: most bytes of offloaded weights on the device at once.
        peak_host_bytes: most offloaded bytes in the host tier at once.
        peak_disk_bytes: most offloaded bytes in the disk tier at once.
        num_saved: number of saved tensors.
        num_offloaded: number of storages (or gathered views) offloaded.
        late_reloads: number of reloads, of activations or weights, that compute had to wait for.
        stall_s: seconds that compute waited for copies in either direction.
        host_capacity_bytes: host memory taken for the host tier, including offloaded weights and
            their gradients; page-locked if the model is on an accelerator. It is kept from step to
            step and freed on `detach`.
    """

    saved_bytes: int = 0
    unique_bytes: int = 0
    parameter_bytes: int = 0
    kept_bytes: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    rebuilt_bytes: int = 0
    recomputed_bytes: int = 0
    weight_reload_bytes: int = 0
    gradient_bytes: int = 0
    peak_device_bytes: int = 0
    peak_weight_bytes: int = 0
    peak_host_bytes: int = 0
    peak_disk_bytes: int = 0
    num_saved: int = 0
    num_offloaded: int = 0
    late_reloads: int = 0
    stall_s: float = 0.0
    host_capacity_bytes: int = 0

    def __str__(self) -> str:
        rows = self._rows()
        return "\n".join(f"{name:<19} {text:>12}  {words}".rstrip() for name, text, words in rows)

    def _repr_html_(self) -> str:
        return text_block(str(self))

    def _rows(self) -> list[tuple[str, str, str]]:
        """Each figure's name, its value with a unit, and what it means."""
        rows = []
        for name in vars(self):
            value = getattr(self, name)
            text = format_size(value) if name.endswith("_bytes") else f"{value:,}"
            if name == "stall_s":
                text = f"{value:.3f} s"
            rows.append((name, text, _WORDS.get(name, "")))
        return rows


_WORDS: Final = {
    "saved_bytes": "saved by autograd, each saved tensor counted",
    "unique_bytes": "of these, without repeats and parameters",
    "parameter_bytes": "saved parameters and buffers, which stay in any case",
    "kept_bytes": "stayed on the device",
    "offloaded_bytes": "were copied to a lower tier",
    "reloaded_bytes": "came back for backward",
    "rebuilt_bytes": "were computed again in backward instead",
    "recomputed_bytes": "are of layers whose forward ran again in backward",
    "weight_reload_bytes": "weights copied to the device",
    "gradient_bytes": "gradients of offloaded weights copied to the host",
    "peak_device_bytes": "most activations on the device at once",
    "peak_weight_bytes": "most offloaded weights on the device at once",
    "peak_host_bytes": "most activations in host memory at once",
    "peak_disk_bytes": "most activations on disk at once",
    "num_saved": "saved tensors",
    "num_offloaded": "copies to a lower tier",
    "late_reloads": "times that compute had to wait for a reload",
    "stall_s": "that compute waited for copies",
    "host_capacity_bytes": "host memory taken, kept for the next step",
}


@final
@dataclass(eq=False)
class RecomputedLayer:
    """One call of a layer whose operations run again in backward.

    Attributes:
        layer: the layer.
        size_bytes: bytes of the storages saved inside it that are computed again, each counted
            once.
        num_saved: number of tensors saved inside it that are computed again.
    """

    layer: Layer
    log: ForwardLog = field(repr=False)
    size_bytes: int
    num_saved: int
    held_bytes: int = field(default=0, init=False, repr=False)

    @property
    def microbatch(self) -> int:
        """Number of the forward within the step, from 0."""
        return self.log.number

    def __str__(self) -> str:
        place = f"{self.layer.index} {self.layer.name}"
        if self.microbatch:
            place = f"{place}.m{self.microbatch}"
        size = format_size(self.size_bytes)
        return f"{place[:24]:<24} {'':>3} {size:>10}  {'':<15} {self.num_saved:>5}"


def fates(stats: StepStats) -> dict[str, str]:
    """Say what became of the bytes that a step saved, each storage once, by kinds."""
    parts = {
        "keep": (stats.kept_bytes, "kept"),
        "offload": (stats.offloaded_bytes, "offloaded"),
        "rebuild": (stats.rebuilt_bytes, "rebuilt"),
        "recompute": (stats.recomputed_bytes, "recomputed"),
    }
    return {kind: f"{format_size(size)} {words}" for kind, (size, words) in parts.items() if size}


def describe_fates(stats: StepStats) -> str:
    """Say what became of the bytes that a step saved, and how many of weights moved."""
    labels = list(fates(stats).values())
    if stats.weight_reload_bytes:
        labels.append(f"{format_size(stats.weight_reload_bytes)} of weights reloaded")
    return ", ".join(labels)


_SOURCES: Final = frozenset({Owner.KEPT, Owner.LEAVING})  # of the memory that was saved itself

_NO_STEP: Final = StepStats()  # one object, as a step that has been seen is known by its statistics


@final
class StepMeter(StepStats):
    """What belongs to one step while it runs: the counters, and what they are made of.

    Attributes:
        waits: for each wait of compute for a copy: its start, the event of the copy's completion,
            and whether the copy is a reload.
        had_backward: whether a backward has read an activation of the step, or begun in a layer
            while a trace is recorded.
        largest_bytes: size of the largest copy down.
        num_forwards: number of forwards that have begun.
        num_runs: number of runs of a schedule that have begun.
        num_verifying: number of calls that would be recomputed and are not, because it is verified.
        recomputed: the calls of recomputed layers, in their order.
        saved: the records of the storages that were saved, in the order of their first save.
        carried: those of earlier steps than the last one that graphs held when the step began.
    """

    def __init__(self) -> None:
        super().__init__()
        self.had_backward = False
        self.largest_bytes = 0
        self.num_forwards = self.num_runs = self.num_verifying = 0
        self.recomputed: list[RecomputedLayer] = []
        self.saved: list[Any] = []
        self.carried: list[Any] = []
        self.waits: list[tuple[Origin, AbstractEvent, bool]] = []

    @functools.cached_property
    def stats(self) -> StepStats:
        """The statistics. Reading them waits until the device has finished the step."""
        late_s = [(event.since(before), is_reload) for before, event, is_reload in self.waits]
        self.late_reloads = sum(is_reload for seconds, is_reload in late_s if seconds > 0)
        self.stall_s = sum(seconds for seconds, _ in late_s if seconds > 0)
        return StepStats(**{each.name: getattr(self, each.name) for each in fields(StepStats)})


def watch_nodes(outputs: Iterable[torch.Tensor], begin: Callable[[object], None]) -> None:
    """Call ``begin`` when backward reaches the operations that computed these outputs."""
    for node in {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}:
        node.register_prehook(begin)


# ---- The account of the running step: its counters, its trace, and what compute waited for ----


@final
class Account:
    """Counts and, with `trace=True`, records what is done with the records of one model.

    Args:
        device: the device whose clock is used.
        traced: whether to record a trace of every step.

    Attributes:
        meter: the counters of the running step.
        last_meter: the counters of the last finished step; None before the first one ends.
        listener: is told of the steps that are traced; None if nobody is.
        recorder: is told what the lanes do in the running step; None where no trace is wanted.
        memory: is told which bytes come and go; None where no trace is wanted.
        passes: is notified of the passes of the running step; None if nobody is.
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
        self.meter = StepMeter()
        self.listener: StepListener | None = None
        self.recorder: EventListener | None = None
        self.memory: MemoryListener | None = None
        self.last_meter: StepMeter | None = None
        self.passes: PassListener | None = None
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
        return _NO_STEP if self.last_meter is None else self.last_meter.stats

    @property
    def last_counts(self) -> StepStats:
        """The counts of the last finished step, without its waits. Reading it does not wait."""
        return self.last_meter or _NO_STEP

    @property
    def num_verifying(self) -> int:
        """Number of calls verified in the running step, or in the last one if none runs."""
        meter = self.last_meter if self.origin is None else self.meter
        return 0 if meter is None else meter.num_verifying

    def record(self, *, traced: bool) -> None:
        """Record a trace of each step, or of none, from the next step on."""
        self._traced = self._device.keeps_time = traced
        if not traced:
            self.memory = None
            if self.listener is not None:
                self.listener.stop()

    def begin(self) -> None:
        """Note that a forward begins, perhaps the first of a step."""
        if self.origin is None:
            # A trace compares the clocks of host and device, so they must meet: the host waits.
            self.origin = self._device.origin() if self._traced else self._device.moment()
            if self._traced and self.listener is not None:
                self.recorder, self.memory = self.listener.begin_step(self.origin)

    def finish(self, host_capacity_bytes: int, *, carries: bool) -> None:
        """Close the account of the step.

        Args:
            host_capacity_bytes: see `StepStats`.
            carries: whether graphs hold records of this step, or of steps before.
        """
        before, last = self.last_meter, self.meter
        last.host_capacity_bytes = host_capacity_bytes
        last.unique_bytes = last.kept_bytes + last.offloaded_bytes
        last.unique_bytes += last.rebuilt_bytes + last.recomputed_bytes
        self.last_meter, self.meter = last, StepMeter()
        if carries:
            older = (*last.carried, *(() if before is None else before.saved))
            self.meter.carried = [record for record in older if record.state is not DROPPED]
        self.num_steps += 1
        self.last_origin, self.origin = self.origin, None
        if self.recorder is not None and self.listener is not None:
            self.recorder = None
            self.listener.end_step()

    def note_offload(self, record: Record) -> None:
        """Count a copy down that was queued."""
        assert record.offloaded is not None
        meter, size_bytes = self.meter, record.size_bytes
        if size_bytes > meter.largest_bytes:
            meter.largest_bytes = size_bytes
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

    def take(self, size_bytes: int, owner: Owner, record: Record | None = None) -> None:
        """Count bytes of saved tensors that come to the device; a negative number of them leave it.

        Args:
            size_bytes: how many.
            owner: what they are.
            record: the record whose bytes they are; None for several together.
        """
        if self.passes is not None:
            self.passes.before_change(size_bytes, record)
        device_bytes = self.device_bytes = self.device_bytes + size_bytes
        if device_bytes > self.meter.peak_device_bytes:
            self.meter.peak_device_bytes = device_bytes
        if self.memory is not None:
            is_source = record is not None and owner in _SOURCES
            address = record.source_address if record is not None and is_source else None
            self.memory.change(owner, size_bytes, address)

    def take_kept(self, size_bytes: int, record: Record | None = None) -> None:
        """Count bytes that stay on the device; a negative number of them are held no more."""
        self.kept_bytes += size_bytes
        if size_bytes > 0:
            self.meter.kept_bytes += size_bytes
        self.take(size_bytes, Owner.KEPT, record)

    def take_weights(self, size_bytes: int) -> None:
        """Count bytes of weights that come to the device; a negative number of them leave it."""
        self.weight_bytes += size_bytes
        self.meter.peak_weight_bytes = max(self.meter.peak_weight_bytes, self.weight_bytes)
        if self.memory is not None:
            self.memory.change(Owner.WEIGHTS, size_bytes)

    def wait(
        self, record: Record, event: AbstractEvent, stream: AbstractStream, *, is_reload: bool
    ) -> None:
        """Let what is queued on ``stream`` from now on run after ``event``, and count the wait."""
        recorder = self.recorder
        if event.query() and not is_profiling():
            stream.wait(event)  # what is complete stalls nobody
            return
        before = self._device.moment()
        self.meter.waits.append((before, event, is_reload))
        in_range("wait", record.layer, stream.wait, event)
        if recorder is not None:
            recorder.compute("wait", subject(record), before.event, event)

    def run(self, what: str, about: Subject, work: Callable[[], Result]) -> Result:
        """Run work of the compute stream, such as a ``"rebuild"``, in a trace and a profile."""
        recorder = self.recorder
        begun = None if recorder is None else recorder.mark()
        result = in_range(what, about.layer, work)
        if recorder is not None and begun is not None:
            recorder.compute(what, about, begun)
        return result


def subject(record: Record) -> Subject:
    """What a trace says about a record."""
    kind = "" if record.kind is ACTIVATION else record.kind
    return Subject(record.layer, record.microbatch, record.size_bytes, kind)
