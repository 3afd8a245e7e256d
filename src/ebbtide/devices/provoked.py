"""A device that provokes the faults of whoever uses it: late work, overwritten memory, failures.

It wraps a real device. Everything that it does is allowed: a copy may take long, memory that was
freed may have other contents at once, the target of a copy may contain anything until the copy has
ended, the system may refuse to page-lock memory, and a disk may be slow or full. Code that waits
for what it reads, and holds what others read, gives the same results to the bit.

A seed decides what is provoked and when; see `Provocation.draw`.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide.devices.device import (
    AbstractDevice,
    AbstractEvent,
    AbstractLane,
    AbstractStream,
    Origin,
)
from ebbtide.devices.simulated import POISON, SimulatedDevice

_PIECE_BYTES: Final = 2**20  # of poison, and of the copies that hold others up
_MOST_WATCHED: Final = 4096
_SLEEP_CYCLES: Final = 400_000  # 0.2 to 0.3 ms on a GPU
_JOB_S: Final = 0.002  # the most that a worker is held up before a job, and after it


@final
@dataclass(frozen=True, kw_only=True)
class Provocation:
    """What is provoked in one run.

    Attributes:
        seed: decides every choice.
        name: what is provoked, in words.
        late_copies: the chance that a copy is held up before it begins, and after it has ended.
        late_compute: the chance that kernels are held up after the engine has queued something.
        refused_pins: the chance that the system refuses to page-lock memory.
        failed_jobs: the chance that a worker's job fails because the disk is full.
        eagerness: of a `SimulatedDevice`, in the place of a CPU; None: the CPU itself.
        shuffles: whether the order of prefetches is drawn.
        is_tight: whether few bytes may be in flight.
        verifies: whether recomputed layers and recipes are verified in every step.
    """

    seed: int
    name: str
    late_copies: float = 0.0
    late_compute: float = 0.0
    refused_pins: float = 0.0
    failed_jobs: float = 0.0
    eagerness: float | None = None
    shuffles: bool = False
    is_tight: bool = False
    verifies: bool = False

    @classmethod
    def draw(cls, seed: int, *, fails: bool = True) -> Provocation:
        """Return what a seed stands for. Seven in a row provoke everything there is.

        Args:
            seed: the seed.
            fails: whether the disk may be full, of which a step is told by an `OSError`.
        """
        chance = random.Random(seed)
        some, most = chance.uniform(0.1, 0.4), chance.uniform(0.5, 0.9)
        full = ("disk full at times", some / 4) if fails else ("disk slow", 0.0)
        name, settings = (
            ("copies late", {"late_copies": most, "eagerness": some / 8, "verifies": True}),
            ("compute late", {"late_compute": some, "eagerness": most}),
            (
                "disk slow, one tensor in flight",
                {"late_copies": most, "is_tight": True},
            ),
            ("any order of prefetch", {"late_copies": some, "eagerness": some, "shuffles": True}),
            ("no page-locking", {"refused_pins": most, "eagerness": some, "verifies": True}),
            (full[0], {"failed_jobs": full[1], "late_copies": some}),
            ("all but failures", {"late_copies": some, "late_compute": some, "eagerness": some}),
        )[seed % 7]
        if name == "all but failures":
            settings |= dict.fromkeys(("shuffles", "is_tight", "verifies"), True)
        return cls(seed=seed, name=name, **settings)  # type: ignore[arg-type]

    def wrap(self, device: AbstractDevice) -> AbstractDevice:
        """Return the device that a run under this provocation computes on.

        Args:
            device: a real one. In the place of a CPU there may be a simulated one, which runs
                copies in adversarial orders and looks for races itself.
        """
        if device.computes_on_host and self.eagerness is not None:
            simulated = SimulatedDevice(self.seed, self.eagerness)
            simulated.refusals = self.refused_pins
            return simulated
        return ProvokedDevice(device, self)


@final
class ProvokedDevice(AbstractDevice):
    """A real device whose work is late, whose freed memory is overwritten, and whose jobs fail.

    Args:
        device: the real device.
        provocation: what is provoked.

    Attributes:
        is_calm: whether nothing fails any more; delays and poison remain.
    """

    def __init__(self, device: AbstractDevice, provocation: Provocation) -> None:
        self._device = device
        self._provocation = provocation
        self._choices = random.Random(provocation.seed)
        super().__init__(device.torch_device)
        self.pins_host_memory = device.pins_host_memory
        self.pins_by_torch = device.pins_by_torch
        self.computes_on_host = device.computes_on_host
        self.has_memory = device.has_memory
        self.is_calm = False
        self._freed = FreedMemoryPoison()
        if not device.computes_on_host:
            self._sleep = find_sleep(device.torch_device)
            poison = torch.full((_PIECE_BYTES,), POISON, dtype=torch.uint8, device="cpu")
            self._host_poison, self._host_scratch = poison.pin_memory(), poison.clone().pin_memory()
            self._poison = poison.to(device.torch_device)
            self._scratch = self._poison.clone()
            device.compute_stream().record().synchronize()

    @property
    def keeps_time(self) -> bool:
        """Whether copies queued from now on record when they ran."""
        return self._device.keeps_time

    @keeps_time.setter
    def keeps_time(self, keeps: bool) -> None:
        self._device.keeps_time = keeps

    def origin(self) -> Origin:
        return self._device.origin()

    def compute_stream(self) -> AbstractStream:
        return self._device.compute_stream()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        # Kernels may write to new memory, and a copy into it must wait for them.
        return self._device.allocate(size_bytes).fill_(POISON)

    def note_use(
        self,
        memory: torch.Tensor,
        home: AbstractStream,
        current: AbstractStream,
        ready: AbstractEvent | None = None,
    ) -> bool:
        return self._device.note_use(memory, home, current, ready)

    def pin(self, address: int, size_bytes: int) -> Callable[[], None]:
        if not self.is_calm and self._happens(self._provocation.refused_pins):
            raise OSError(errno.ENOMEM, "page-locking was refused on purpose")
        return self._device.pin(address, size_bytes)

    def copy_down(
        self, target: torch.Tensor, source: torch.Tensor, *after: AbstractEvent
    ) -> AbstractEvent:
        if self.computes_on_host:
            return self._device.copy_down(target, source, *after)
        self._freed.watch(source)
        places = self._poison, self._host_scratch, self._scratch
        return self._copy(self._device.copy_down, places, target, source, *after)

    def copy_up(
        self, target: torch.Tensor, source: torch.Tensor, *after: AbstractEvent
    ) -> AbstractEvent:
        if self.computes_on_host:
            return self._device.copy_up(target, source, *after)
        self._freed.watch(target)
        places = self._host_poison, self._scratch, self._host_scratch
        return self._copy(self._device.copy_up, places, target, source, *after)

    def _copy(
        self,
        copy: Callable[..., AbstractEvent],
        places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        target: torch.Tensor,
        source: torch.Tensor,
        *after: AbstractEvent,
    ) -> AbstractEvent:
        """Copy between copies that take time, into a target that was poisoned.

        Args:
            copy: copies in one direction.
            places: poison, and the target and the source of the copies that only take time.
            target: as for `copy_down` and `copy_up`,
            source: and this,
            *after: and these.
        """
        poison, *scratch = places
        for begin in range(0, target.numel(), _PIECE_BYTES):
            piece = target[begin : begin + _PIECE_BYTES]
            copy(piece, poison[: piece.numel()], *after)
        if self._happens(self._provocation.late_copies):
            for _ in range(self._choices.randint(1, 8)):
                copy(*scratch)  # which nobody needs, before one that somebody waits for
        copied = copy(target, source, *after)
        if self._happens(self._provocation.late_copies):
            copied = copy(*scratch)
        if self._happens(self._provocation.late_compute):
            self._sleep()
        self._freed.poison()
        return copied

    def _happens(self, chance: float) -> bool:
        return self._choices.random() < chance

    def lane(self, name: str, lane: str) -> AbstractLane:
        return _ProvokedLane(self._device.lane(name, lane), self, writes="write" in name)

    def defer(self, work: Callable[[], None]) -> None:
        self._device.defer(work)

    def finish_copies(self) -> None:
        self._device.finish_copies()

    def finish_other_streams(self) -> None:
        self._device.finish_other_streams()

    def provoke_job(self, work: Callable[[], None], *, writes: bool) -> Callable[[], None]:
        """Return a worker's job that is held up, or a write that finds the disk full."""
        provocation = self._provocation
        if writes and not self.is_calm and self._happens(provocation.failed_jobs):
            return _fail_with_full_disk
        before_s, after_s = (
            self._choices.uniform(0, _JOB_S) if self._happens(provocation.late_copies) else 0.0
            for _ in range(2)
        )

        def provoked() -> None:
            time.sleep(before_s)
            work()
            time.sleep(after_s)

        return provoked


@final
class FreedMemoryPoison:
    """Overwrites memory of a device as soon as it has been freed.

    The allocator hands out what was freed last, in the order of the stream that it belongs to, so
    whoever is given the memory next may do the same.
    """

    def __init__(self) -> None:
        self._watched: list[tuple[StorageWeakRef, int, torch.device]] = []

    def watch(self, tensor: torch.Tensor) -> None:
        """Overwrite the memory of a tensor once it has been freed."""
        if len(self._watched) < _MOST_WATCHED:
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._watched.append((reference, storage.nbytes(), tensor.device))

    def poison(self, *streams: torch.Stream) -> None:
        """Overwrite what was freed.

        Args:
            *streams: those that it may belong to; by default the current one.
        """
        watched, self._watched = self._watched, []
        for each in watched:
            reference, size_bytes, device = each
            if not reference.expired():  # type: ignore[no-untyped-call]
                self._watched.append(each)
                continue
            for stream in streams or (None,):
                with torch.get_device_module(device).stream(stream):
                    torch.full((size_bytes,), POISON, dtype=torch.uint8, device=device)


def _fail_with_full_disk() -> None:
    raise OSError(errno.ENOSPC, "the disk was full on purpose")


@final
class _ProvokedLane(AbstractLane):
    """A worker whose jobs are held up, or fail if they write to a disk."""

    def __init__(self, lane: AbstractLane, device: ProvokedDevice, *, writes: bool) -> None:
        self._lane = lane
        self._device = device
        self._writes = writes

    def submit(
        self, work: Callable[[], None], then: Callable[[], None] | None = None
    ) -> AbstractEvent:
        return self._lane.submit(self._device.provoke_job(work, writes=self._writes), then)

    def close(self) -> None:
        self._lane.close()


def find_sleep(device: torch.device) -> Callable[[], object]:
    """Return what queues a kernel that takes a fraction of a millisecond."""
    sleep = getattr(torch.get_device_module(device), "_sleep", None)
    if sleep is not None:
        return lambda: sleep(_SLEEP_CYCLES)
    busy = torch.ones(1024, 1024, device=device)
    return lambda: torch.mm(busy, busy)
