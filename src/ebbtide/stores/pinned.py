"""The store in page-locked host memory, in slabs of exact sizes.

[Note: exact slabs] The first step takes memory in large slabs, because it cannot know what comes,
and page-locking is slow. When that step is over, the next cuts every slab down to what was reached
in it (`ExtentAllocator.peak_end_bytes`): the same step then gets the same extents, and the bytes
taken are the bytes that it needs. Only growth is followed by such a trim, so equal steps
neither grow nor trim. Steps of other sizes may leave slabs of which none fits another's tensors;
then one slab takes the place of them all, as large as the most that was ever in use at once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, final

import torch

from ebbtide.devices.device import AbstractDevice, AbstractEvent
from ebbtide.errors import StoreFullError
from ebbtide.stores.host_memory import (
    HostBudget,
    HostMemory,
    allocate_host_memory,
    block_bytes,
    free_ram_bytes,
    whole_pages,
)
from ebbtide.stores.store import (
    ALREADY_REACHED,
    AbstractStore,
    Extent,
    ExtentAllocator,
    RestingSlot,
    Slot,
    Target,
    allocate_target,
)
from ebbtide.units import format_size

_LOG = logging.getLogger(__name__)

SLAB_BYTES = 256 * 2**20
_ALIGNMENT_BYTES = 512
_EXACT_SHARE = 0.98  # of a slab; one that is used up to here is left as it is
_MOST_VIEWS = 10_000  # of one slab
_WHOLE_SHARE = 0.9  # of all slabs; where less was ever in use at once, one slab does better


@final
class Slab:
    """One block of host memory and the extents of it that are in use.

    Args:
        memory: the block.
        trimmed: whether the block was cut to the size that a step needed.
    """

    def __init__(self, memory: HostMemory, trimmed: bool) -> None:
        self.memory = memory
        self.extents = ExtentAllocator(_ALIGNMENT_BYTES)
        self.extents.grow(memory.tensor.numel())
        self._trimmed = trimmed
        self._views: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def capacity_bytes(self) -> int:
        return self.extents.capacity_bytes

    def view(self, extent: Extent, size_bytes: int) -> torch.Tensor:
        """Return the first bytes of an extent, (size_bytes,) uint8.

        Equal steps ask for the same views again, and making a view is slow, so views are kept.
        """
        name = extent[0], size_bytes
        view = self._views.get(name)
        if view is None:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            view = self._views[name] = self.memory.tensor.narrow(0, *name)
        return view

    def give_back(self) -> None:
        self._views.clear()
        self.memory.give_back()

    @property
    def wanted_bytes(self) -> int:
        """The size that the largest step so far needed, or the present size if that is about it."""
        needed_bytes = whole_pages(self.extents.peak_end_bytes)
        nearly_all = needed_bytes >= _EXACT_SHARE * self.capacity_bytes
        return self.capacity_bytes if self._trimmed or nearly_all else needed_bytes


Sizes = list[tuple[Slab, int]]
"""Each slab with the size that it is to get; 0 means that it is to be given back."""


@final
@dataclass(eq=False, slots=True)
class _HostSlot(Slot):
    slab: Slab = field(kw_only=True)
    reloaded: AbstractEvent | None = None  # by the last copy up


@final
class PinnedStore(AbstractStore):
    """Bytes in host memory, page-locked where the device is an accelerator.

    After the first step the store holds what a step needs and no more: see [Note: exact slabs] in
    `ebbtide.stores.pinned`.

    Args:
        device: the device whose copy streams move the bytes.
        budget_bytes: the most host memory to take; None means whatever is free.
        slab_bytes: about how much memory to take at a time. One tensor may be larger.

    Attributes:
        budget: counts all host memory that is taken.
    """

    # Long: activations and weights take their memory from the same budget, and when slabs change
    # depends on which of them are in use.

    def __init__(
        self,
        device: AbstractDevice,
        budget_bytes: int | None = None,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        self._device = device
        self.budget = HostBudget(budget_bytes)
        self._slab_bytes = slab_bytes
        self._slabs: list[Slab] = []
        self._used_bytes = 0
        self._peak_used_bytes = 0
        self._whole_bytes = 0  # of the slab that took the place of all others
        self._has_grown = False  # since the last look at whether a trim is due
        self._reads: list[AbstractEvent] = []  # copies up from dropped slots, not seen complete

    @property
    def capacity_bytes(self) -> int:
        return sum(slab.capacity_bytes for slab in self._slabs)

    @property
    def room_bytes(self) -> int:
        return self.capacity_bytes + max(0, self.budget.room_bytes)

    @property
    def host_capacity_bytes(self) -> int:
        return self.budget.taken_bytes

    @property
    def leftover_bytes(self) -> int:
        return self.budget.leftover_bytes

    def use_leftover(self, user: Any) -> None:
        self.budget.leftover_users.add(user)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes if self._slabs else 0

    def has_room(self, size_bytes: int) -> bool:
        """Whether `offload` of so many bytes would find room now."""
        self._settle()
        if any(slab.extents.fits(size_bytes) for slab in self._slabs):
            return True
        if block_bytes(self._device, size_bytes) <= self.budget.room_bytes:
            return True
        return not self.used_bytes and self._merged(size_bytes) is not None

    def offload(self, source: torch.Tensor, ready: AbstractEvent) -> Slot:
        size_bytes = source.numel()
        if self._has_grown:
            self._settle()
        slab, extent = self._allocate(size_bytes) or self._grow(size_bytes)
        memory = slab.view(extent, size_bytes)
        if self._reads:
            # Guard readers-until-complete: a copy up from reused host memory is forgotten only when
            # it has been seen complete. The next offload would overwrite bytes that are on their
            # way up.
            self._reads = [read for read in self._reads if not read.query()]
        # Guard copy-down-after-kernels: the copy down waits for the kernels that write its source.
        # The copy would read memory that queued kernels have not written yet.
        # Guard copy-down-after-readers: a copy down waits for the copies up that read its host
        # memory before. A dropped slot is reused at once: the next offload would overwrite bytes
        # that are on their way up.
        offloaded = self._device.copy_down(memory, source, ready, *self._reads)
        return _HostSlot(extent, size_bytes, offloaded, slab=slab)

    def reload(
        self, slot: Slot, target: Target | None = None
    ) -> tuple[torch.Tensor, AbstractEvent]:
        buffer, free, _ = target or allocate_target(self._device, slot.size_bytes)
        if not isinstance(slot, _HostSlot):
            assert isinstance(slot, RestingSlot)
            source = slot.tensor[: slot.size_bytes]
            # Guard weights-after-kernels: the copy up of weights waits for the kernels that used
            # its buffer before. The allocator, or another layer, hands over memory that queued
            # kernels still read; the copy would overwrite it under them.
            return buffer, self._device.copy_up(buffer, source, free)
        memory = slot.slab.view(slot.extent, slot.size_bytes)
        # Guard copy-up-after-kernels: the copy up waits for the kernels queued before its buffer
        # was allocated. The allocator hands out memory that queued kernels still read; the copy
        # would overwrite it under them.
        # Guard copy-up-after-copy-down: the copy up waits for the copy down of the same bytes. The
        # two copy streams are ordered by nothing else when forward and backward compute on
        # different streams: host memory would be read before it is written.
        slot.reloaded = self._device.copy_up(buffer, memory, free, slot.offloaded)
        return buffer, slot.reloaded

    def drop(self, slot: Slot) -> None:
        """Forget a slot. Its bytes are free at once: the device orders who writes there next.

        The host cannot wait here for the last copy up. It runs ahead of the device, and would come
        to a stop at the first offload of every step.
        """
        if not isinstance(slot, _HostSlot):
            assert isinstance(slot, RestingSlot)
            slot.memory.give_back()
            self.budget.take(-slot.extent.size_bytes)
            return
        if slot.reloaded is not None:
            self._reads.append(slot.reloaded)
        slot.slab.extents.free(slot.extent)
        self._used_bytes -= slot.extent.size_bytes

    def allocate_resting(self, size_bytes: int, *, reserved: bool = False) -> RestingSlot:
        whole_bytes = block_bytes(self._device, size_bytes)
        if reserved:
            self.budget.reserve(-whole_bytes)
        self.budget.make_room(whole_bytes)
        # Another process may have taken RAM that was set aside here.
        ram_bytes = free_ram_bytes() if reserved else None
        self.budget.check_room(whole_bytes, ram_bytes, weights=True)
        try:
            memory = allocate_host_memory(self._device, whole_bytes)
        except OSError as error:
            raise self.budget.no_room(whole_bytes, free_ram_bytes(), weights=True) from error
        self.budget.take(whole_bytes)
        extent = Extent(0, whole_bytes)
        return RestingSlot(extent, size_bytes, ALREADY_REACHED, "host", memory=memory)

    def reserve(self, size_bytes: int) -> None:
        whole_bytes = block_bytes(self._device, size_bytes)
        self.budget.check_room(whole_bytes, weights=True)
        self.budget.reserve(whole_bytes)

    def stop_reserving(self, size_bytes: int) -> None:
        self.budget.reserve(-block_bytes(self._device, size_bytes))

    def write(
        self, slot: RestingSlot, offset_bytes: int, source: torch.Tensor, ready: AbstractEvent
    ) -> tuple[AbstractEvent, AbstractEvent]:
        target = slot.tensor.narrow(0, offset_bytes, source.numel())
        # Guard gradient-after-kernels: the copy down of a gradient waits for the kernels that make
        # it. The copy would read memory that queued kernels have not written yet.
        copied = self._device.copy_down(target, source, ready)
        return copied, copied

    def take_over(self, other: AbstractStore, resting: Iterable[RestingSlot]) -> None:
        assert isinstance(other, PinnedStore)
        self.budget.take(sum(slot.extent.size_bytes for slot in resting))
        self.budget.reserve(other.budget.reserved_bytes)
        self.budget.leftover_users |= other.budget.leftover_users

    def close(self) -> None:
        # Guard close-after-copies: the store waits for its copies before it gives host memory back.
        # After `detach`, copies under way would use memory that is no longer ours.
        self._device.finish_copies()
        for slab in self._slabs:
            self._give_back(slab)
        self._slabs.clear()

    # ---- slabs: which there are, and how large; see [Note: exact slabs] -------------------------

    def _allocate(self, size_bytes: int) -> tuple[Slab, Extent] | None:
        # Always in the same order: an equal step must get the same extents.
        for slab in self._slabs:
            extent = slab.extents.allocate(size_bytes)
            if extent is not None:
                used_bytes = self._used_bytes = self._used_bytes + extent[1]
                if used_bytes > self._peak_used_bytes:
                    self._peak_used_bytes = used_bytes
                return slab, extent
        return None

    def _grow(self, size_bytes: int) -> tuple[Slab, Extent]:
        """Make room for so many bytes, which no slab has, and allocate them."""
        try:
            self._add_slab(size_bytes)
        except StoreFullError:
            sizes = None if self.used_bytes else self._merged(size_bytes)
            if sizes is None:
                raise
            self._resize(sizes)  # none of the slabs is large enough, and none is in use
        found = self._allocate(size_bytes)
        assert found is not None
        return found

    def _settle(self) -> None:
        """Trim the slabs if a step is over in which they have grown."""
        if self._has_grown and not self.used_bytes:
            self._has_grown = False
            sizes = self._trimmed()
            if any(slab.capacity_bytes != size_bytes for slab, size_bytes in sizes):
                # What cannot be had again now is had by growth, or that says why not.
                with contextlib.suppress(StoreFullError):
                    self._resize(sizes)

    def _add_slab(self, size_bytes: int) -> None:
        """Add a slab for some tensors of this size.

        Raises:
            StoreFullError: there is no room for one.
        """
        memory = self._take(self._next_size(size_bytes))
        self._slabs.append(Slab(memory, trimmed=False))
        self._has_grown = True
        _LOG.debug(
            "host memory: %s more, %s in all",
            format_size(memory.tensor.nbytes),
            format_size(self.capacity_bytes),
        )

    def _next_size(self, size_bytes: int) -> int:
        """Size of the next slab: room for several such tensors, or for one near the limits."""
        least_bytes = block_bytes(self._device, size_bytes)
        self.budget.make_room(least_bytes)
        self.budget.check_room(least_bytes)
        most_bytes = min(self._slab_bytes, self.budget.room_bytes)
        if self._device.pins_by_torch:
            return max(least_bytes, 1 << (most_bytes.bit_length() - 1))
        tensor_bytes = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return max(least_bytes, whole_pages(most_bytes // tensor_bytes * tensor_bytes))

    def _take(self, size_bytes: int) -> HostMemory:
        self.budget.make_room(size_bytes)
        try:
            memory = allocate_host_memory(self._device, size_bytes)
        except OSError as error:
            raise self.budget.no_room(size_bytes, self.budget.spare_ram_bytes()) from error
        self.budget.take(size_bytes)
        return memory

    def _trimmed(self) -> Sizes:
        """The sizes that the steps so far ask for. See [Note: exact slabs]."""
        if self._device.pins_by_torch:
            return [(slab, slab.capacity_bytes) for slab in self._slabs]  # torch would keep it
        sizes = [(slab, slab.wanted_bytes) for slab in self._slabs]
        scattered = self._peak_used_bytes < _WHOLE_SHARE * sum(size for _, size in sizes)
        # Only for a new peak: where one slab has not sufficed for this one, it never will.
        if scattered and self._peak_used_bytes > self._whole_bytes:
            return self._merged(0) or sizes
        return sizes

    def _merged(self, size_bytes: int) -> Sizes | None:
        """Sizes that replace all slabs by one, for the most bytes that were ever in use at once.

        Args:
            size_bytes: size of a tensor that the slab must hold, too.

        Returns:
            None where there is no room for such a slab.
        """
        whole_bytes = whole_pages(max(size_bytes, self._peak_used_bytes))
        more_bytes = whole_bytes - self.capacity_bytes
        if not self._slabs or self._device.pins_by_torch:
            return None
        if more_bytes > self.budget.room_bytes:
            return None
        return [(self._slabs[0], whole_bytes), *((slab, 0) for slab in self._slabs[1:])]

    def _resize(self, sizes: Sizes) -> None:
        """Give back the slabs that have another size, then take others in their places.

        No slab is in use.

        Raises:
            StoreFullError: some could not be had. What was given back is gone.
        """
        # Guard resize-after-copies: the store waits for its copies before it cuts its slabs to
        # size. A copy that nobody wants any more would go on in memory that was given back.
        self._device.finish_copies()
        self._reads.clear()
        assert not self.used_bytes
        self.budget.check_room(sum(size_bytes for _, size_bytes in sizes) - self.capacity_bytes)
        changed = [slab for slab, size_bytes in sizes if slab.capacity_bytes != size_bytes]
        for slab in changed:
            self._give_back(slab)  # all of it first: there may be no RAM for both
        self._slabs = [slab for slab, _ in sizes if slab not in changed]
        for place, (slab, size_bytes) in enumerate((s, n) for s, n in sizes if n):
            if slab in changed:
                self._slabs.insert(place, Slab(self._take(size_bytes), trimmed=True))
        if len(self._slabs) == 1:
            self._whole_bytes = self.capacity_bytes

    def _give_back(self, slab: Slab) -> None:
        slab.give_back()
        self.budget.take(-slab.capacity_bytes)
