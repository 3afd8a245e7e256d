"""The interface of stores, which keep bytes in host memory or on disk and copy them back.

Before it comes the allocator that stores share: best fit, extents of exact sizes.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch

from ebbtide.devices.device import AbstractDevice, AbstractEvent, AbstractStream, HostMoment
from ebbtide.stores.host_memory import HostMemory, free_ram_bytes


@final
class Extent(NamedTuple):
    """A run of bytes: ``[offset_bytes, offset_bytes + size_bytes)``."""

    offset_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


@final
class ExtentAllocator:
    """Allocates aligned extents of ``[0, capacity)`` and merges adjacent free ones.

    Args:
        alignment_bytes: every extent begins and ends on a multiple of this.

    Attributes:
        peak_end_bytes: the furthest end of any extent so far. With only that capacity, the same
            calls succeed and return the same extents.
    """

    def __init__(self, alignment_bytes: int) -> None:
        self._alignment = alignment_bytes
        self._free: list[tuple[int, int]] = []  # offset and size; sorted, no two of them touch
        self.capacity_bytes = 0
        self.used_bytes = 0
        self.peak_end_bytes = 0

    def round_up(self, size_bytes: int) -> int:
        return -(-(size_bytes or 1) // self._alignment) * self._alignment

    def grow(self, size_bytes: int) -> None:
        """Add ``size_bytes`` (rounded up) at the end of the range."""
        size = self.round_up(size_bytes)
        self._insert(self.capacity_bytes, size)
        self.capacity_bytes += size

    def allocate(self, size_bytes: int) -> Extent | None:
        """Allocate from the smallest free run that has room; None: the range must grow.

        The run at the end of the range is used only if no other run has room. Its length then does
        not influence the choice, so the part beyond `peak_end_bytes` can be cut off.
        """
        size = -(-(size_bytes or 1) // self._alignment) * self._alignment  # as `round_up`
        at = self._find(size)
        if at is None:
            return None
        offset, run_bytes = self._free[at]
        if run_bytes == size:
            del self._free[at]
        else:
            self._free[at] = offset + size, run_bytes - size
        self.used_bytes += size
        if offset + size > self.peak_end_bytes:
            self.peak_end_bytes = offset + size
        return Extent(offset, size)

    def fits(self, size_bytes: int) -> bool:
        """Whether `allocate` would succeed."""
        return self._find(self.round_up(size_bytes)) is not None

    def missing_bytes(self, size_bytes: int) -> int:
        """How far the range must grow for ``size_bytes``, given the free run at its end."""
        size = self.round_up(size_bytes)
        if self._free:
            offset, run_bytes = self._free[-1]
            if offset + run_bytes == self.capacity_bytes:
                size -= run_bytes
        return size

    def free(self, extent: Extent) -> None:
        offset, size = extent
        self.used_bytes -= size
        self._insert(offset, size)

    def _find(self, size: int) -> int | None:
        free = self._free
        last = len(free) - 1  # only the last run can reach the end
        if last > 0:
            best, best_bytes = None, self.capacity_bytes + 1
            for at, (offset, run_bytes) in enumerate(free):
                if size <= run_bytes < best_bytes and offset + run_bytes != self.capacity_bytes:
                    best, best_bytes = at, run_bytes
            if best is not None:
                return best
        return last if free and free[last][1] >= size else None

    def _insert(self, offset: int, size: int) -> None:
        free = self._free
        at = bisect.bisect_left(free, (offset, size))
        if at < len(free) and free[at][0] == offset + size:
            size += free[at][1]
            del free[at]
        if at > 0:
            before, before_bytes = free[at - 1]
            if before + before_bytes == offset:
                free[at - 1] = before, before_bytes + size
                return
        free.insert(at, (offset, size))


# ---- The interface of stores, which keep bytes in host memory or on disk and copy them back ----


@dataclass(eq=False, slots=True)
class Slot:
    """The bytes of one tensor in a store.

    Attributes:
        extent: the range that they occupy.
        size_bytes: the size of the tensor; the extent may be larger.
        offloaded: reached when the offload is complete; until then its source must stay alive.
        tier: `host` or `disk`.
    """

    extent: Extent
    size_bytes: int
    offloaded: AbstractEvent
    tier: str = "host"


@dataclass(eq=False, slots=True)
class RestingSlot(Slot):
    """Bytes that stay in a store permanently, and that the host reads and writes in place.

    Weights, their gradients and optimizer state are in resting slots; activations are not.

    Attributes:
        memory: the bytes, in RAM or in a mapped file; at least `size_bytes`.
    """

    memory: HostMemory = field(kw_only=True)

    @property
    def is_mapped(self) -> bool:
        """Whether the memory is a mapped file."""
        return False

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes of `memory`: (size_bytes or more,), uint8."""
        return self.memory.tensor


ALREADY_REACHED = HostMoment()
"""The `offloaded` event of every resting slot: there is no offload to wait for."""


class Target(NamedTuple):
    """Device memory that a reload writes to, once the kernels that still use it have run.

    Attributes:
        memory: (size_bytes,), uint8.
        free: after this event no kernel uses the memory.
        home: the compute stream on which the memory was allocated.
    """

    memory: torch.Tensor
    free: AbstractEvent
    home: AbstractStream


class AbstractStore(ABC):
    """Keeps bytes in host memory or on disk. Callers make sure that only one thread calls it.

    Attributes:
        on_progress: called after each finished write, by stores whose writes a worker thread does.
    """

    on_progress: Callable[[], None] | None = None

    @property
    @abstractmethod
    def capacity_bytes(self) -> int:
        """Bytes that the store has allocated, whether in use or kept for the next step."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes in use now, including dropped slots that are still being read."""

    @property
    @abstractmethod
    def room_bytes(self) -> int:
        """The most bytes that the store can have at once, with the memory that is free now."""

    @property
    def host_capacity_bytes(self) -> int:
        """Host memory that the store has allocated, staging memory included."""
        return 0

    @property
    def leftover_bytes(self) -> int:
        """Host memory that others may use until the store needs it; see `use_leftover`."""
        return free_ram_bytes()

    def use_leftover(self, user: Any) -> None:  # noqa: B027
        """Count what a user has of `leftover_bytes`, and tell it when the store needs that.

        Args:
            user: has an attribute ``leftover_bytes``, how much it uses now, and a method
                ``give_way()``, which frees all of it, so that it uses none from then on.
        """

    @abstractmethod
    def offload(self, source: torch.Tensor, ready: AbstractEvent) -> Slot:
        """Start to copy ``source`` to the store.

        Args:
            source: device memory that must stay alive and unmodified until ``slot.offloaded``.
            ready: the event after which ``source`` contains its values.

        Shape:
            source: (size_bytes,), uint8.

        Raises:
            StoreFullError: the store has no room; no copy has been started.
        """

    @abstractmethod
    def reload(
        self, slot: Slot, target: Target | None = None
    ) -> tuple[torch.Tensor, AbstractEvent]:
        """Start to copy a slot's bytes to the device.

        Args:
            slot: the slot to read.
            target: device memory to copy into; None: allocate a buffer.

        Returns:
            A device buffer and the event after which it contains the bytes. The caller must keep
            the buffer alive until that event, even if the bytes are no longer needed.

        Shape:
            buffer: (size_bytes,), uint8.
        """

    @abstractmethod
    def allocate_resting(self, size_bytes: int, *, reserved: bool = False) -> RestingSlot:
        """Allocate a resting slot, for weights, gradients or optimizer state.

        Args:
            size_bytes: its size.
            reserved: whether to use room that `reserve` has set aside.

        Returns:
            A slot for `reload`, `write` and `drop`, filled with zeros.

        Raises:
            StoreFullError: the store has no room.
        """

    def allocate_resting_on_disk(self, size_bytes: int) -> RestingSlot:
        """Allocate a resting slot, in a mapped file if the store writes to disk.

        Raises:
            StoreFullError: the disk has no room.
        """
        return self.allocate_resting(size_bytes)

    def page_out(self) -> None:  # noqa: B027
        """Unmap the pages of all mapped files from RAM; an access reads its pages back.

        Any thread may call this, even while other threads read and write the files.
        """

    def maps(self, tensor: torch.Tensor) -> bool:  # noqa: ARG002
        """Whether the memory of a tensor is a mapped file of this store."""
        return False

    def reserve(self, size_bytes: int) -> None:  # noqa: B027
        """Set room aside for a later `allocate_resting`, if the store's room is limited.

        Raises:
            StoreFullError: the store has no room.
        """

    def stop_reserving(self, size_bytes: int) -> None:  # noqa: B027
        """Set room aside no more, because nothing was allocated there after all."""

    def write(
        self, slot: RestingSlot, offset_bytes: int, source: torch.Tensor, ready: AbstractEvent
    ) -> tuple[AbstractEvent, AbstractEvent]:
        """Start to copy ``source`` into a resting slot.

        Args:
            slot: the slot to write to.
            offset_bytes: where in the slot the bytes go.
            source: device memory that must stay alive and unmodified until the first event.
            ready: the event after which ``source`` contains its values.

        Returns:
            The event that is reached when ``source`` has been read, and the one that is reached
            when the host can read the bytes in the slot, whose `synchronize` raises the error if
            the write failed. A store whose device is the host has reached both when it returns.

        Shape:
            source: (size_bytes,), uint8.
        """
        ready.synchronize()
        slot.tensor.narrow(0, offset_bytes, source.numel()).copy_(source)
        return ALREADY_REACHED, ALREADY_REACHED

    def note_freed(self, size_bytes: int) -> None:  # noqa: B027  # only some return memory
        """Note that bytes that stayed on the device were freed there.

        Memory that was freed is returned to the system after so many of them.
        """

    @abstractmethod
    def drop(self, slot: Slot) -> None:
        """Release a slot. Its memory is reused once nothing reads it any more."""

    @abstractmethod
    def take_over(self, other: AbstractStore, resting: Iterable[RestingSlot]) -> None:
        """Take over the resting slots of another store, which is to be closed.

        Args:
            other: a store that was built with the same arguments.
            resting: its resting slots, of which no copy is under way.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for the copies under way, then free all memory and files."""


def allocate_target(device: AbstractDevice, size_bytes: int) -> Target:
    """Allocate device memory for a reload, on the current compute stream."""
    memory = device.allocate(size_bytes)
    home = device.compute_stream()
    return Target(memory, home.record(), home)
