"""A simulated device that exposes races: it runs copies in adversarial orders over ordinary memory.

The host runs kernels at once, in the order in which it queues them, so the program itself is the
compute stream. Copies are queued; each runs as late as its events allow, or earlier, as a seed
decides. Errors of the engine become visible in two ways. Some produce wrong numbers, because the
target of a copy is poisoned with NaN until the copy has run. Others are checked directly and raise
`RaceError`:

- a device-to-host copy that waits for no event recorded after its source was written;
- a host-to-device copy into memory that queued kernels may still read: memory that was allocated,
  or that a compute stream announced to use, after the newest event of that stream that the copy
  waits for;
- a copy whose source or target was freed before it ran;
- two unordered copies of the same memory, at least one of which writes it;
- a compute stream that uses memory without waiting for the copy or the other compute stream that
  fills it;
- a worker that waits for one of its own jobs.

The device also keeps a virtual time: kernels take the time given to `SimulatedDevice.compute`,
copies take their bytes divided by the bandwidth of the link, and each lane runs one copy at a time.
On a `timely` device, virtual time decides whether an event is reached; otherwise chance does.

Workers (`SimulatedDevice.lane`) are not threads: their jobs run in the calling thread, in order
within a lane and at arbitrary moments relative to other lanes.

Not modelled: kernels that themselves run late (instead, the device checks the events that copies
wait for); differences between what two host threads have observed; a job that interrupts another.
In virtual time also: the duration of jobs, a host that runs ahead of the device, latency, and a
link that slows down when both directions are busy.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide.devices.device import (
    AbstractDevice,
    AbstractEvent,
    AbstractLane,
    AbstractStream,
    Origin,
    Span,
    raise_again,
)

_POISON = 0xFF  # every float, complex and bfloat16 value made of these bytes is NaN


class RaceError(AssertionError):
    """The engine queued work that would be a race on a real device."""


@final
class _ComputeEvent(AbstractEvent):
    """A point in a compute stream, which comes after all that the stream has waited for."""

    def __init__(
        self,
        device: SimulatedDevice,
        time_s: float,
        waited: frozenset[_Copy],
        behind: dict[_ComputeStream, int],
    ) -> None:
        self._device = device
        self.clock = device.clock
        self.behind = behind
        self.time_s = time_s
        self.waited = waited
        self._reached = device.timely

    def query(self) -> bool:
        # A real host runs ahead of the device, so the device may not have reached this point yet.
        self._reached = self._reached or self._device.flip()
        return self._reached

    def synchronize(self) -> None:
        self._reached = True

    def since(self, origin: Origin) -> float:
        return self.time_s - origin.host_s


@final
@dataclass(eq=False)
class _Copy:
    """One queued copy. It refers to both ends weakly: the engine must keep them alive."""

    number: int
    lane: str
    source: _End
    target: _End
    before: list[_Copy]
    begin_s: float
    end_s: float
    done: bool = False  # the copy has run
    known: bool = False  # the host has observed that the copy has run

    def learn(self) -> None:
        """Note that the host has observed the end of this copy, and thus of all it waited for."""
        todo = [self]
        while todo:
            copy = todo.pop()
            if not copy.known:
                copy.known = True
                todo.extend(copy.before)
        self.before = []

    def overlaps(self, other: _Copy) -> bool:
        """Whether the two copies access the same memory and at least one of them writes it."""
        return (
            self.target.overlaps(other.target)
            or self.target.overlaps(other.source)
            or self.source.overlaps(other.target)
        )

    def follows(self, other: _Copy) -> bool:
        """Whether its stream and its events order this copy after ``other``."""
        todo, seen = list(self.before), {self}
        while todo:
            copy = todo.pop()
            if copy is other:
                return True
            if copy not in seen:
                seen.add(copy)
                todo.extend(copy.before)
        return False


@final
class _End:
    """One end of a copy: a range of a storage, to which it refers weakly."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._reference: StorageWeakRef | None = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._identity = storage._cdata
        self._begin = tensor.storage_offset()
        self._size = tensor.numel()

    def tensor(self) -> torch.Tensor | None:
        """The range as (size_bytes,) uint8, or None if its storage has been freed."""
        assert self._reference is not None
        storage = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=torch.uint8).set_(storage, self._begin, (self._size,), (1,))

    def forget(self) -> None:
        """Drop the weak reference, which keeps the storage's identity from being reused."""
        self._reference = None
        self._identity = 0

    def overlaps(self, other: _End) -> bool:
        return (
            self._identity == other._identity
            and self._begin < other._begin + other._size
            and other._begin < self._begin + self._size
        )


@final
class _CopyEvent(AbstractEvent):
    def __init__(self, device: SimulatedDevice, copy: _Copy) -> None:
        self._device = device
        self.copy = copy

    def query(self) -> bool:
        if not self._device.timely:
            self._device.stir()
        elif self.copy.end_s <= self._device.now_s:
            self._device.run(self.copy)
        if self.copy.done:
            self.copy.learn()
        return self.copy.done

    def synchronize(self) -> None:
        if self._device.working:
            self._device.run(self.copy)
        else:  # the host waits, so kernels that it queues from now on also come after the copy
            self._device.compute_stream().wait(self)
        self.copy.learn()

    def since(self, origin: Origin) -> float:
        return self.copy.end_s - origin.host_s

    def spans(self, origin: Origin) -> list[Span]:
        begin_s = self.copy.begin_s - origin.host_s
        return [Span(self.copy.lane, begin_s, self.since(origin))]


@final
class _JobEvent(AbstractEvent):
    """The end of a worker's job. Jobs take no virtual time."""

    def __init__(self, lane: _Lane, time_s: float) -> None:
        self._lane = lane
        self._time_s = time_s
        self.done = False

    def query(self) -> bool:
        self._lane.stir()
        return self.done

    def synchronize(self) -> None:
        self._lane.run_to(self)
        if self.failure is not None:
            raise_again(self.failure)

    def since(self, origin: Origin) -> float:
        self._lane.run_to(self)
        return self._time_s - origin.host_s

    def withdraw(self) -> bool:
        return self._lane.drop(self)


_Job = tuple[Callable[[], None], _JobEvent, Callable[[], None] | None]


@final
class _Lane(AbstractLane):
    """A worker. The device's random choices decide how early its jobs run."""

    def __init__(self, device: SimulatedDevice, lane: str) -> None:
        self._device = device
        self._lane = lane
        self._jobs: list[_Job] = []
        self._count = 0
        self._busy = False

    def submit(
        self, work: Callable[[], None], then: Callable[[], None] | None = None
    ) -> AbstractEvent:
        event = self.append(work, then)
        self._device.stir()
        return event

    def append(self, work: Callable[[], None], then: Callable[[], None] | None = None) -> _JobEvent:
        """Queue a job like `submit`, but without running any job now."""
        event = _JobEvent(self, self._device.now_s)
        self._jobs.append((work, event, then))
        return event

    def close(self) -> None:
        while self._jobs:
            self.run_to(self._jobs[-1][1])

    def drop(self, event: _JobEvent) -> bool:
        """Let the job that ends at ``event`` do nothing, if it is queued; return whether it is."""
        for number, (_, end, then) in enumerate(self._jobs):
            if end is event:
                self._jobs[number] = lambda: None, end, then
                return True
        return False

    def has_jobs(self) -> bool:
        return bool(self._jobs)

    def stir(self) -> None:
        if self._device.timely:
            self.run_one()
        else:
            self._device.stir()

    def run_to(self, event: _JobEvent) -> None:
        """Run jobs until the job that ends at ``event`` is done."""
        while not event.done:
            if self._busy:
                raise RaceError("a worker waits for a job of its own: it would hang")
            self.run_one()

    def run_one(self) -> None:
        """Run the oldest job, if there is one and none is running."""
        if self._busy or not self._jobs:
            return
        work, event, then = self._jobs.pop(0)
        self._busy = True
        self._device.working += 1
        try:
            work()
        except RaceError:
            raise
        except BaseException as error:
            event.failure = error.with_traceback(None)
        finally:
            self._device.working -= 1
            self._busy = False
            event.done = True
        self._device.trace.append((self._lane, self._count))
        self._count += 1
        if then is not None:
            then()


@final
class _ComputeStream(AbstractStream):
    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._waited: set[_Copy] = set()
        # For each compute stream, the clock of the newest event that this one has waited for.
        self._behind: dict[_ComputeStream, int] = {}
        self.now_s = 0.0

    def record(self) -> AbstractEvent:
        self._waited = {copy for copy in self._waited if not copy.known}
        self._behind[self] = self._device.clock
        return _ComputeEvent(self._device, self.now_s, frozenset(self._waited), dict(self._behind))

    def is_behind(self, event: AbstractEvent) -> bool:
        """Whether work queued on this stream from now on is ordered after an event."""
        if isinstance(event, _ComputeEvent):
            return all(
                stream is self or self._behind.get(stream, -1) >= clock
                for stream, clock in event.behind.items()
            )
        if isinstance(event, _CopyEvent):
            return event.copy.known or event.copy in self._waited
        return True  # a worker's event: the device does not know who has waited for it

    def wait(self, event: AbstractEvent) -> None:
        # Kernels that the host queues from now on run at once, so the copy must run now. Only this
        # stream is ordered after the copy; the host and the other stream have not waited for it.
        event = event.settled()
        if isinstance(event, _ComputeEvent):
            self._waited |= event.waited
            for stream, clock in event.behind.items():
                self._behind[stream] = max(self._behind.get(stream, 0), clock)
            self.now_s = max(self.now_s, event.time_s)
            return
        assert isinstance(event, _CopyEvent)
        self._device.run(event.copy)
        self._waited.add(event.copy)
        self.now_s = max(self.now_s, event.copy.end_s)
        self._device.stir()


@final
@dataclass
class _Allocation:
    storage: StorageWeakRef
    clock: int
    size_bytes: int
    uses: dict[_ComputeStream, int] = field(default_factory=dict)  # clock of each one's last use

    def expired(self) -> bool:
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]


@final
class SimulatedDevice(AbstractDevice):
    """A device made of ordinary memory, whose copies run in an order that a seed chooses.

    Args:
        seed: decides every choice; the same calls with the same seed give the same `trace`.
        eagerness: how often a copy runs earlier than it must, from 0 (never) to 1.
        bandwidth_bytes_per_s: the bandwidth of the link in each direction, in virtual time.
        timely: whether virtual time, instead of chance, decides when events are reached.

    Attributes:
        clock: a counter of queued work, which stamps events and allocations.
        current: the index, 0 or 1, of the compute stream on which the host queues kernels.
        slow_copies: the probability that a copy takes ten times as long.
        refusals: the probability that `pin` fails.
        pinned_bytes: the memory that is page-locked now.
        trace: the lane and number of each copy or job that has run, in order.
    """

    # Long: the checks of all its parts look at the same copies and memory.

    pins_host_memory = False

    def __init__(
        self,
        seed: int,
        eagerness: float = 0.2,
        bandwidth_bytes_per_s: float = 25e9,
        *,
        timely: bool = False,
    ) -> None:
        super().__init__(torch.device("cpu"))
        self.has_memory = False
        self.timely = timely
        self.slow_copies = 0.0
        self._bandwidth = bandwidth_bytes_per_s
        self._free_s = {"d2h": 0.0, "h2d": 0.0}
        self.clock = 0
        self.refusals = 0.0
        self.pinned_bytes = 0
        self.trace: list[tuple[str, int]] = []
        self._choices = random.Random(seed)
        self._eagerness = eagerness
        self._compute = [_ComputeStream(self), _ComputeStream(self)]
        self.current = 0
        self._queues: dict[str, list[_Copy]] = {"d2h": [], "h2d": []}
        self._count = 0
        self._unknown: list[_Copy] = []  # copies that the host has not observed to have run
        self._allocations: list[_Allocation] = []
        self._lanes: list[_Lane] = []
        self._deferred: _Lane | None = None
        self._last_down = (0, -1)  # storage and newest event of the last device-to-host copy
        self.working = 0  # nesting depth of running jobs, because one can wait for another

    def compute_stream(self) -> AbstractStream:
        return self._compute[self.current]

    @property
    def now_s(self) -> float:
        """The virtual time of the current compute stream, in seconds."""
        return self._compute[self.current].now_s

    def compute(self, duration_s: float) -> None:
        """Advance the virtual time by the duration of a kernel."""
        self.clock += 1
        self._compute[self.current].now_s += duration_s

    def moment(self) -> Origin:
        return Origin(self.compute_stream().record(), self.now_s)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        self.clock += 1
        self._allocations = [known for known in self._allocations if not known.expired()]
        memory = torch.full((size_bytes,), _POISON, dtype=torch.uint8, device="cpu")
        reference = StorageWeakRef(memory.untyped_storage())  # type: ignore[no-untyped-call]
        self._allocations.append(_Allocation(reference, self.clock, size_bytes))
        return memory

    def note_use(
        self,
        memory: torch.Tensor,
        home: AbstractStream,
        current: AbstractStream,
        ready: AbstractEvent | None = None,
    ) -> bool:
        if ready is not None and not self._compute[self.current].is_behind(ready):
            self.object_to("kernels use memory without waiting for what fills it")
        self.clock += 1
        allocation = self._allocation_of(memory)
        if allocation is not None:
            allocation.uses[self._compute[self.current]] = self.clock
        return super().note_use(memory, home, current)

    def object_to(self, message: str) -> None:
        """Called when something is queued in no order with what it must come after.

        Another judge can replace the method and let the program go on.

        Raises:
            RaceError: always.
        """
        raise RaceError(message)

    def pin(self, address: int, size_bytes: int) -> Callable[[], None]:  # noqa: ARG002
        if self._choices.random() < self.refusals:
            raise OSError(errno.ENOMEM, "the simulated system refuses to page-lock memory")
        self.pinned_bytes += size_bytes

        def unlock() -> None:
            self.pinned_bytes -= size_bytes

        return unlock

    def allocated_bytes(self) -> int:
        """The memory from `allocate` that is still alive."""
        self._allocations = [
            allocation for allocation in self._allocations if not allocation.expired()
        ]
        return sum(allocation.size_bytes for allocation in self._allocations)

    def copy_down(
        self, target: torch.Tensor, source: torch.Tensor, *after: AbstractEvent
    ) -> AbstractEvent:
        origin = (source.untyped_storage()._cdata, self._newest(after))
        # A tensor that is copied in pieces waits for the same event in every piece.
        if origin[1] < self.clock and origin != self._last_down:
            self.object_to("a copy down does not wait for the kernels that wrote its source")
        self._last_down = origin
        self._poison(target)
        return self._queue("d2h", target, source, after)

    def copy_up(
        self, target: torch.Tensor, source: torch.Tensor, *after: AbstractEvent
    ) -> AbstractEvent:
        allocation = self._allocation_of(target)
        if allocation is not None:
            if self._newest(after) < allocation.clock:
                self.object_to("a copy up does not wait for kernels that may read its target")
            behind = [event.behind for event in after if isinstance(event, _ComputeEvent)]
            for stream, clock in allocation.uses.items():
                if all(known.get(stream, -1) < clock for known in behind):
                    self.object_to("a copy up does not wait for a stream that uses its target")
        self._poison(target)
        return self._queue("h2d", target, source, after)

    def lane(self, name: str, lane: str) -> AbstractLane:  # noqa: ARG002
        self._lanes.append(_Lane(self, lane))
        return self._lanes[-1]

    def defer(self, work: Callable[[], None]) -> None:
        if self._deferred is None:
            self._deferred = _Lane(self, "deferred")
            self._lanes.append(self._deferred)
        self._deferred.append(work)

    def has_jobs(self) -> bool:
        """Whether a worker has jobs to run."""
        return any(lane.has_jobs() for lane in self._lanes)

    def finish_jobs(self) -> None:
        """Run the jobs of all workers."""
        for lane in self._lanes:
            lane.close()

    def finish_copies(self) -> None:
        for queue in self._queues.values():
            while queue:
                self.run(queue[0])
        for copy in self._unknown:
            copy.known = True

    def flip(self) -> bool:
        """A random choice with even odds."""
        return self._choices.random() < 0.5

    def stir(self) -> None:
        """Run some copies and jobs that could run now, if chance says so."""
        if self.timely:
            return
        while self._choices.random() < self._eagerness:
            lane = self._choices.randrange(2 + len(self._lanes))
            if lane >= 2:
                self._lanes[lane - 2].run_one()
            elif queue := self._queues["d2h" if lane == 0 else "h2d"]:
                self.run(queue[0])

    def run(self, copy: _Copy) -> None:
        """Run a copy, after all copies that it waits for."""
        if copy.done:
            return
        for earlier in copy.before:
            self.run(earlier)
        copy.before = [earlier for earlier in copy.before if not earlier.known]
        source, target = copy.source.tensor(), copy.target.tensor()
        if source is None:
            raise RaceError(f"the source of {copy.lane} copy {copy.number} was freed before it ran")
        if target is None:
            raise RaceError(f"the target of {copy.lane} copy {copy.number} was freed before it ran")
        target.copy_(source)
        copy.done = True
        copy.source.forget()
        self._queues[copy.lane].remove(copy)
        self.trace.append((copy.lane, copy.number))

    def _poison(self, target: torch.Tensor) -> None:
        """Overwrite a copy's target with NaN, unless earlier copies have yet to read it."""
        end = _End(target)
        if not any(end.overlaps(copy.source) for copy in self._queues["h2d"]):
            target.fill_(_POISON)

    def _queue(
        self,
        lane: str,
        target: torch.Tensor,
        source: torch.Tensor,
        after: tuple[AbstractEvent, ...],
    ) -> AbstractEvent:
        if not self.working:  # workers queue no kernels
            self.clock += 1
        queue = self._queues[lane]
        self._unknown = [copy for copy in self._unknown if not copy.known]
        before = [copy for copy in self._unknown if copy.lane == lane][-1:]  # the lane's newest
        for event in after:
            if isinstance(event, _CopyEvent):
                before.append(event.copy)
            elif isinstance(event, _ComputeEvent):
                before.extend(event.waited)
        begin_s, end_s = self._schedule(lane, source.numel(), after)
        copy = _Copy(self._count, lane, _End(source), _End(target), before, begin_s, end_s)
        self._count += 1
        for pending in self._unknown:
            if copy.overlaps(pending) and not copy.follows(pending):
                self.object_to(
                    f"{lane} copy {copy.number} and {pending.lane} copy {pending.number} touch the "
                    f"same memory in no order"
                )
        queue.append(copy)
        self._unknown.append(copy)
        self.stir()
        return _CopyEvent(self, copy)

    def _schedule(
        self, lane: str, size_bytes: int, after: tuple[AbstractEvent, ...]
    ) -> tuple[float, float]:
        """The virtual times at which a copy begins and ends, in seconds."""
        begin_s = max(self._free_s[lane], self.now_s)
        for event in after:
            if isinstance(event, _CopyEvent):
                begin_s = max(begin_s, event.copy.end_s)
            elif isinstance(event, _ComputeEvent):
                begin_s = max(begin_s, event.time_s)
        duration_s = size_bytes / self._bandwidth
        if self._choices.random() < self.slow_copies:
            duration_s *= 10
        self._free_s[lane] = begin_s + duration_s
        return begin_s, begin_s + duration_s

    def _newest(self, events: tuple[AbstractEvent, ...]) -> int:
        return max((e.clock for e in events if isinstance(e, _ComputeEvent)), default=-1)

    def _allocation_of(self, tensor: torch.Tensor) -> _Allocation | None:
        address = tensor.untyped_storage()._cdata
        for allocation in reversed(self._allocations):
            if allocation.storage.cdata == address and not allocation.expired():
                return allocation
        return None
