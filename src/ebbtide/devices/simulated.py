"""A simulated device that exposes races: it runs copies in adversarial orders over ordinary memory.

The host runs kernels at once, in the order in which it queues them, so the program itself is the
compute stream. Copies are queued; each runs as late as its events allow, or earlier, as a seed
decides. Errors of the engine become visible in two ways. Some produce wrong numbers, because the
target of a copy is poisoned with NaN until the copy has run. Others are checked directly and raise
`RaceError`:

- a device-to-host copy that waits for no event recorded after its source was written;
- a host-to-device copy into memory that queued kernels may still read: memory that a compute stream
  allocated, or announced to use, after its newest event that the copy waits for;
- a copy whose source or target was freed before it ran;
- two unordered copies of the same memory, at least one of which writes it;
- a compute stream that uses memory without waiting for the copy or the other compute stream that
  fills it;
- a worker that waits for one of its own jobs.

What is ordered after what is known by vector clocks: each stream, and the host, has for every other
stream the number of the newest work there that it has waited for.

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
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, final

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

POISON: Final = 0xFF  # every float, complex and bfloat16 value made of these bytes is NaN


class RaceError(AssertionError):
    """The engine queued work that would be a race on a real device."""


_Clock = dict[Any, int]
"""For each stream, which can be a copy's lane, the number of its newest work that comes before."""


def _join(*clocks: Mapping[Any, int]) -> _Clock:
    """Return the clock of what comes after all that these clocks have before them."""
    joined: _Clock = {}
    for clock in clocks:
        for stream, number in clock.items():
            joined[stream] = max(joined.get(stream, -1), number)
    return joined


class _Point(AbstractEvent):
    """A point in a stream, with all that comes before it, and its virtual time."""

    def __init__(self, device: SimulatedDevice, clock: _Clock, time_s: float) -> None:
        self._device = device
        self.clock = clock
        self.time_s = time_s

    def since(self, origin: Origin) -> float:
        return self.time_s - origin.host_s


@final
class _ComputeEvent(_Point):
    """A point in a compute stream."""

    _reached = False

    def query(self) -> bool:
        # A real host runs ahead of the device, so the device may not have reached this point yet.
        self._reached = self._reached or self._device.timely or self._device.flip()
        return self._reached

    def synchronize(self) -> None:
        self._reached = True


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
class _CopyEvent(_Point):
    """A queued copy, and the point at which it ends.

    It refers to both ends weakly: the engine must keep them alive.
    """

    def __init__(
        self,
        device: SimulatedDevice,
        lane: str,
        source: _End,
        target: _End,
        clock: _Clock,
        times_s: tuple[float, float],
    ) -> None:
        super().__init__(device, clock, times_s[1])
        self.lane, self.source, self.target = lane, source, target
        self.number, self.begin_s = clock[lane], times_s[0]
        self.done = False

    def query(self) -> bool:
        if not self._device.timely:
            self._device.stir()
        elif self.time_s <= self._device.now_s:
            self._device.run(self)
        if self.done:
            self._device.learn(self.clock)
        return self.done

    def synchronize(self) -> None:
        if self._device.working:
            self._device.run(self)
        else:  # the host waits, so kernels that it queues from now on also come after the copy
            self._device.compute_stream().wait(self)
        self._device.learn(self.clock)

    def spans(self, origin: Origin) -> list[Span]:
        return [(self.lane, self.begin_s - origin.host_s, self.since(origin))]

    def conflicts(self, other: _CopyEvent) -> bool:
        """Whether it and an earlier copy touch the same memory in no order, and one writes it."""
        overlap = (
            self.target.overlaps(other.target)
            or self.target.overlaps(other.source)
            or self.source.overlaps(other.target)
        )
        return overlap and self.clock.get(other.lane, -1) < other.number


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
        self.jobs: list[_Job] = []
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
        self.jobs.append((work, event, then))
        return event

    def close(self) -> None:
        while self.jobs:
            self.run_to(self.jobs[-1][1])

    def drop(self, event: _JobEvent) -> bool:
        """Let the job that ends at ``event`` do nothing, if it is queued; return whether it is."""
        for number, (_, end, then) in enumerate(self.jobs):
            if end is event:
                self.jobs[number] = lambda: None, end, then
                return True
        return False

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
        if self._busy or not self.jobs:
            return
        work, event, then = self.jobs.pop(0)
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
        self._device.trace.append(self._lane)
        if then is not None:
            then()


@final
class _ComputeStream(AbstractStream):
    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._clock: _Clock = {}
        self.now_s = 0.0

    def record(self) -> AbstractEvent:
        self._clock[self] = self._device.clock
        return _ComputeEvent(self._device, dict(self._clock), self.now_s)

    def is_behind(self, event: AbstractEvent) -> bool:
        """Whether work queued on this stream from now on is ordered after an event."""
        if not isinstance(event, _Point):
            return True  # a worker's event: the device does not know who has waited for it
        known = _join(self._clock, self._device.known)
        return all(
            stream is self or known.get(stream, -1) >= number
            for stream, number in event.clock.items()
        )

    def wait(self, event: AbstractEvent) -> None:
        # Kernels that the host queues from now on run at once, so a copy must run now. Only this
        # stream is ordered after the copy; the host and the other stream have not waited for it.
        event = event.settled()
        assert isinstance(event, _Point)
        if isinstance(event, _CopyEvent):
            self._device.run(event)
        self._clock = _join(self._clock, event.clock)
        self.now_s = max(self.now_s, event.time_s)
        self._device.stir()


@final
class SimulatedDevice(AbstractDevice):
    """A device made of ordinary memory, whose copies run in an order that a seed chooses.

    Args:
        seed: decides every choice; the same calls with the same seed give the same `trace`.
        eagerness: how often a copy runs earlier than it must, from 0 (never) to less than 1.
        bandwidth_bytes_per_s: the bandwidth of the link in each direction, in virtual time.
        timely: whether virtual time, instead of chance, decides when events are reached.

    Attributes:
        clock: a counter of queued work, which numbers that of the compute streams.
        known: what the host has observed to have happened.
        current: the index, 0 or 1, of the compute stream on which the host queues kernels.
        slow_copies: the probability that a copy takes ten times as long.
        refusals: the probability that `pin` fails.
        pinned_bytes: the memory that is page-locked now.
        trace: the lane of each copy or job that has run, in order. Each lane runs its own in the
            order in which they were queued.
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
        self.known: _Clock = {}
        self.refusals = 0.0
        self.pinned_bytes = 0
        self.trace: list[str] = []
        self._choices = random.Random(seed)
        self._eagerness = eagerness
        self._compute = [_ComputeStream(self), _ComputeStream(self)]
        self.current = 0
        self._queues: dict[str, list[_CopyEvent]] = {"d2h": [], "h2d": []}
        self._ends: dict[str, _Clock] = {"d2h": {}, "h2d": {}}  # of the last copies queued there
        self._count = 0
        self._unknown: list[_CopyEvent] = []  # copies that the host has not observed to have run
        # Storages from `allocate`, with their sizes, and the last use by each compute stream.
        self._allocations: list[tuple[StorageWeakRef, int, _Clock]] = []
        self._lanes: list[_Lane] = []
        self._deferred: _Lane | None = None
        self._last_down = (0, -1)  # storage and newest kernels of the last device-to-host copy
        self.working = 0  # nesting depth of running jobs, because one can wait for another

    def compute_stream(self) -> _ComputeStream:
        return self._compute[self.current]

    @property
    def now_s(self) -> float:
        """The virtual time of the current compute stream, in seconds."""
        return self.compute_stream().now_s

    def compute(self, duration_s: float) -> None:
        """Advance the virtual time by the duration of a kernel."""
        self.clock += 1
        self.compute_stream().now_s += duration_s

    def moment(self) -> Origin:
        return Origin(self.compute_stream().record(), self.now_s)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        self.clock += 1
        self._allocations = [each for each in self._allocations if not _is_gone(each[0])]
        memory = torch.full((size_bytes,), POISON, dtype=torch.uint8, device="cpu")
        reference = StorageWeakRef(memory.untyped_storage())  # type: ignore[no-untyped-call]
        uses = {self.compute_stream(): self.clock}
        self._allocations.append((reference, size_bytes, uses))
        return memory

    def note_use(
        self,
        memory: torch.Tensor,
        home: AbstractStream,
        current: AbstractStream,
        ready: AbstractEvent | None = None,
    ) -> bool:
        if ready is not None and not self.compute_stream().is_behind(ready):
            self.object_to("kernels use memory without waiting for what fills it")
        self.clock += 1
        uses = self._uses_of(memory)
        if uses is not None:
            uses[self.compute_stream()] = self.clock
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
        return sum(size_bytes for known, size_bytes, _ in self._allocations if not _is_gone(known))

    def copy_down(
        self, target: torch.Tensor, source: torch.Tensor, *after: AbstractEvent
    ) -> AbstractEvent:
        newest = max(_clock_of(after).get(stream, -1) for stream in self._compute)
        origin = source.untyped_storage()._cdata, newest
        # A tensor that is copied in pieces waits for the same event in every piece.
        if newest < self.clock and origin != self._last_down:
            self.object_to("a copy down does not wait for the kernels that wrote its source")
        self._last_down = origin
        self._poison(target)
        return self._queue("d2h", target, source, after)

    def copy_up(
        self, target: torch.Tensor, source: torch.Tensor, *after: AbstractEvent
    ) -> AbstractEvent:
        uses, waited = self._uses_of(target) or {}, _clock_of(after)
        if any(waited.get(stream, -1) < number for stream, number in uses.items()):
            self.object_to("a copy up does not wait for kernels that may use its target")
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
        return any(lane.jobs for lane in self._lanes)

    def finish_jobs(self) -> None:
        """Run the jobs of all workers."""
        for lane in self._lanes:
            lane.close()

    def finish_copies(self) -> None:
        for queue in self._queues.values():
            while queue:
                self.run(queue[0])
        self.learn(*self._ends.values())

    def learn(self, *clocks: _Clock) -> None:
        """Note that the host has observed all that these clocks have before them."""
        self.known = _join(self.known, *clocks)

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

    def run(self, copy: _CopyEvent) -> None:
        """Run a copy, after all copies that it waits for."""
        if copy.done:
            return
        for lane, queue in self._queues.items():
            while queue and queue[0] is not copy and queue[0].number <= copy.clock.get(lane, -1):
                self.run(queue[0])
        source, target = copy.source.tensor(), copy.target.tensor()
        if source is None:
            raise RaceError(f"the source of {copy.lane} copy {copy.number} was freed before it ran")
        if target is None:
            raise RaceError(f"the target of {copy.lane} copy {copy.number} was freed before it ran")
        target.copy_(source)
        copy.done = True
        copy.source.forget()
        self._queues[copy.lane].remove(copy)
        self.trace.append(copy.lane)

    def _poison(self, target: torch.Tensor) -> None:
        """Overwrite a copy's target with NaN, unless earlier copies have yet to read it."""
        end = _End(target)
        if not any(end.overlaps(copy.source) for copy in self._queues["h2d"]):
            target.fill_(POISON)

    def _queue(
        self,
        lane: str,
        target: torch.Tensor,
        source: torch.Tensor,
        after: tuple[AbstractEvent, ...],
    ) -> AbstractEvent:
        if not self.working:  # workers queue no kernels
            self.clock += 1
        self._unknown = [
            each for each in self._unknown if self.known.get(each.lane, -1) < each.number
        ]
        clock = _join(self._ends[lane], _clock_of(after), {lane: self._count})
        times_s = self._schedule(lane, source.numel(), after)
        copy = _CopyEvent(self, lane, _End(source), _End(target), clock, times_s)
        self._count += 1
        self._ends[lane] = clock
        for pending in self._unknown:
            if copy.conflicts(pending):
                self.object_to(
                    f"{lane} copy {copy.number} and {pending.lane} copy {pending.number} touch the "
                    f"same memory in no order"
                )
        self._queues[lane].append(copy)
        self._unknown.append(copy)
        self.stir()
        return copy

    def _schedule(
        self, lane: str, size_bytes: int, after: tuple[AbstractEvent, ...]
    ) -> tuple[float, float]:
        """The virtual times at which a copy begins and ends, in seconds."""
        times_s = [event.time_s for event in after if isinstance(event, _Point)]
        begin_s = max(self._free_s[lane], self.now_s, *times_s)
        duration_s = size_bytes / self._bandwidth
        if self._choices.random() < self.slow_copies:
            duration_s *= 10
        self._free_s[lane] = begin_s + duration_s
        return begin_s, begin_s + duration_s

    def _uses_of(self, tensor: torch.Tensor) -> _Clock | None:
        """Return the last uses of what a tensor was allocated from; None for other memory."""
        address = tensor.untyped_storage()._cdata
        for known, _, uses in reversed(self._allocations):
            if known.cdata == address and not _is_gone(known):
                return uses
        return None


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


def _clock_of(events: Iterable[AbstractEvent]) -> _Clock:
    """Return the clock of what waits for some events. A worker's event has none."""
    return _join(*(event.clock for event in events if isinstance(event, _Point)))
