"""Measures the way between the device and the tier below, through the store that training uses.

For an accelerator that is page-locked host memory, for a CPU a file. Copies go through
`AbstractStore.offload` and `reload`, so that what is measured is what ebbtide will get, with the
page cache of the file and with what the store does beside copying.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from ebbtide.devices.device import AbstractDevice
from ebbtide.doctor.sampling import Sample, sample
from ebbtide.memory.host_memory import allocate_by_torch, map_exactly
from ebbtide.stores.store import AbstractStore, Slot
from ebbtide.units import format_size

# Copies are queued one behind the other up to so many bytes, by whether the device is the CPU: fast
# links need many, or what the host does for each counts, too.
_QUEUED_BYTES = {True: 16 * 2**20, False: 128 * 2**20}
_MOST_QUEUED = 32


@final
@dataclass(frozen=True)
class LinkFigures:
    """What copies by the store take.

    Attributes:
        down: offloads, by the size of one copy.
        up: reloads, by the size of one copy.
        both: both at once, in bytes of both, with the largest copies.
    """

    down: dict[int, Sample]
    up: dict[int, Sample]
    both: Sample

    @property
    def latency_s(self) -> float:
        """What a copy costs beside its bytes, by the smallest copies; the dearer way counts."""
        costs = [0.0]
        for way in (self.down, self.up):
            smallest, largest = min(way), max(way)
            one_s = smallest / way[smallest].median_per_s
            costs.append(one_s - smallest / way[largest].median_per_s)
        return max(costs)

    def figures(self) -> dict[str, Any]:
        """Return the figures for a JSON file."""
        return {
            "down": {str(size): entry.figures() for size, entry in self.down.items()},
            "up": {str(size): entry.figures() for size, entry in self.up.items()},
            "both": self.both.figures(),
            "latency_s": self.latency_s,
        }


def measure_links(
    device: AbstractDevice,
    build_store: Callable[[], AbstractStore],
    sizes_bytes: Sequence[int],
    budget_s: float,
    room_bytes: int,
) -> LinkFigures:
    """Measure offloads and reloads by size, and both at once.

    Args:
        device: the device.
        build_store: builds its store. Each size gets one of its own, because a store keeps the
            memory of smaller copies, which the largest ones need.
        sizes_bytes: sizes of the copies, rising. Those that are too large are left out.
        budget_s: about how long this may take.
        room_bytes: the most memory to use in each tier.
    """
    begin_s = time.perf_counter()
    down: dict[int, Sample] = {}
    up: dict[int, Sample] = {}
    last: _Copies | None = None
    with contextlib.ExitStack() as open_store:
        for number, size_bytes in enumerate(sizes_bytes):
            left_s = budget_s - (time.perf_counter() - begin_s)
            copies = _Copies(device, size_bytes, room_bytes // 2)
            # Both ways at once needs twice the bytes. A slow link gets no larger copies than it can
            # move in the time that is left: two rounds of each way, and two of both.
            too_slow = last is not None and 8 * copies.total_bytes > left_s * last.slowest_per_s
            if last is not None and (too_slow or 2 * copies.total_bytes > room_bytes):
                break
            if last is not None:
                last.drop()
            open_store.close()
            copies.store = open_store.enter_context(contextlib.closing(build_store()))
            share_s = left_s / (len(sizes_bytes) - number + 1) / 2
            down[size_bytes] = sample(copies.total_bytes, copies.offload, share_s)
            up[size_bytes] = sample(copies.total_bytes, copies.reload, share_s)
            copies.slowest_per_s = min(down[size_bytes].best_per_s, up[size_bytes].best_per_s)
            last = copies
        assert last is not None
        left_s = budget_s - (time.perf_counter() - begin_s)
        both = sample(2 * last.total_bytes, last.both, left_s, note=format_size(last.size_bytes))
        last.drop()
    return LinkFigures(down, up, both)


@final
class _Copies:
    """Equal copies of one size, queued one behind the other.

    Attributes:
        store: where they go; set before the first one.
    """

    store: AbstractStore

    def __init__(self, device: AbstractDevice, size_bytes: int, room_bytes: int) -> None:
        self.size_bytes = size_bytes
        queued_bytes = min(_QUEUED_BYTES[device.computes_on_host], room_bytes)
        self.total_bytes = max(1, min(_MOST_QUEUED, queued_bytes // size_bytes)) * size_bytes
        self.slowest_per_s = 0.0
        self._device = device
        self._slots: list[Slot] = []
        self._memory: torch.Tensor | None = None

    def offload(self) -> float:
        self.drop()
        begin_s = time.perf_counter()
        self._slots = list(self._queue_offloads())
        for slot in self._slots:
            slot.offloaded.synchronize()
        return time.perf_counter() - begin_s

    def reload(self) -> float:
        begin_s = time.perf_counter()
        arrivals = [self.store.reload(slot) for slot in self._slots]
        for _, ready in arrivals:
            ready.synchronize()
        return time.perf_counter() - begin_s

    def both(self) -> float:
        arrivals, slots = [], []
        begin_s = time.perf_counter()
        try:
            for slot, offloaded in zip(self._slots, self._queue_offloads(), strict=True):
                slots.append(offloaded)
                arrivals.append(self.store.reload(slot))
            for slot in slots:
                slot.offloaded.synchronize()
            for _, ready in arrivals:
                ready.synchronize()
            return time.perf_counter() - begin_s
        finally:
            for slot in slots:
                self.store.drop(slot)

    def drop(self) -> None:
        for slot in self._slots:
            self.store.drop(slot)
        self._slots = []

    def _queue_offloads(self) -> Iterator[Slot]:
        for source in self._sources():
            ready = self._device.compute_stream().record()
            yield self.store.offload(source, ready)

    def _sources(self) -> Iterator[torch.Tensor]:
        if self._memory is None:
            self._memory = self._device.allocate(self.total_bytes).fill_(1)
        return iter(torch.split(self._memory, self.size_bytes))


@final
@dataclass(frozen=True)
class Pinning:
    """How host memory is page-locked.

    Attributes:
        size_bytes: how much was tried.
        duration_s: how long it took, pages allocated included.
        refusal: why the system refused; None if it did not.
    """

    size_bytes: int
    duration_s: float
    refusal: str | None

    @property
    def seconds_per_gib(self) -> float:
        return self.duration_s / self.size_bytes * 2**30


def measure_pinning(device: AbstractDevice, size_bytes: int) -> Pinning:
    """Page-lock a block of host memory once, as the host store does, and give it back."""
    begin_s = time.perf_counter()
    memory = map_exactly(device, size_bytes)
    if memory is None:
        memory = allocate_by_torch(device, size_bytes)
    duration_s = time.perf_counter() - begin_s
    refusal = memory.refusal
    memory.give_back()
    return Pinning(size_bytes, duration_s, refusal)
