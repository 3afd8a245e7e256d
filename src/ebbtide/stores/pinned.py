"""The host tier: page-locked memory in slabs, reused from step to step.

[Note: exact slabs] The first step takes memory in large slabs, because it cannot know what comes,
and page-locking is slow. When that step is over, the next cuts every slab down to what was reached
in it (`ExtentAllocator.peak_end_bytes`): the same step then gets the same extents, and the bytes
taken are the bytes that it needs. Only growth is followed by such a trim, so equal steps
neither grow nor trim. Steps of other sizes may leave slabs of which none fits another's tensors;
then one slab takes the place of them all, as large as the most that was ever in use at once.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import sys
from dataclasses import dataclass, field
from typing import final

import psutil
import torch

from ebbtide.devices.device import AbstractDevice, AbstractEvent
from ebbtide.errors import StoreFullError
from ebbtide.stores.extents import Extent, ExtentAllocator
from ebbtide.stores.host_memory import (
    HostMemory,
    allocate_by_torch,
    map_exactly,
    warn_of_pageable,
    whole_pages,
)
from ebbtide.stores.store import AbstractStore, Slot
from ebbtide.units import format_size

_SLAB_BYTES = 256 * 2**20
_ALIGNMENT_BYTES = 512
_FREE_SHARE = 0.95  # of the free RAM that a new slab may take: the OOM killer gives no error
_EXACT_SHARE = 0.98  # of a slab; one that is used up to here is left as it is
_WHOLE_SHARE = 0.9  # of all slabs; where less was ever in use at once, one slab does better


@final
class _Slab:
    """One block of host memory and who has which part of it.

    Args:
        memory: the block.
        trimmed: whether it has the size that a step needed, whole.
    """

    def __init__(self, memory: HostMemory, trimmed: bool) -> None:
        self.memory = memory
        self.extents = ExtentAllocator(_ALIGNMENT_BYTES)
        self.extents.grow(memory.tensor.numel())
        self._trimmed = trimmed

    @property
    def capacity_bytes(self) -> int:
        return self.extents.capacity_bytes

    @property
    def wanted_bytes(self) -> int:
        """The size for a step like the largest so far; its own if that is hardly more."""
        needed_bytes = whole_pages(self.extents.peak_end_bytes)
        nearly_all = needed_bytes >= _EXACT_SHARE * self.capacity_bytes
        return self.capacity_bytes if self._trimmed or nearly_all else needed_bytes


_Sizes = list[tuple[_Slab, int]]
"""Each slab with the size that it is to have; 0: it is to go."""


@final
class _Slabs:
    """All slabs of a store, within its budget and the host's free RAM. Waits for nothing."""

    def __init__(self, device: AbstractDevice, budget_bytes: int | None, slab_bytes: int) -> None:
        self._device = device
        self._budget_bytes = budget_bytes
        self._slab_bytes = slab_bytes
        self._slabs: list[_Slab] = []
        self._by_torch = False  # only torch's own allocator gives memory that the copies take
        self._warned = False
        self._peak_used_bytes = 0
        self._whole_bytes = 0  # of the slab that took the place of all others
        self.grown = False  # since the last look at whether a trim is due

    @property
    def capacity_bytes(self) -> int:
        return sum(slab.capacity_bytes for slab in self._slabs)

    @property
    def used_bytes(self) -> int:
        return sum(slab.extents.used_bytes for slab in self._slabs)

    def fits(self, size_bytes: int) -> bool:
        return any(slab.extents.fits(size_bytes) for slab in self._slabs)

    def allocate(self, size_bytes: int) -> tuple[_Slab, Extent] | None:
        # Always in the same order: an equal step must get the same extents.
        for slab in self._slabs:
            extent = slab.extents.allocate(size_bytes)
            if extent is not None:
                self._peak_used_bytes = max(self._peak_used_bytes, self.used_bytes)
                return slab, extent
        return None

    def could_grow(self, size_bytes: int) -> bool:
        """Whether one more tensor of this size finds room, by `grow` or in `merged` slabs."""
        least_bytes = self._least(size_bytes)
        fits = least_bytes <= self._budget_left() and least_bytes <= _free_ram()
        return fits or (not self.used_bytes and self.merged(size_bytes) is not None)

    def grow(self, size_bytes: int) -> None:
        """Add a slab for some tensors of this size.

        Raises:
            StoreFullError: there is no room for one.
        """
        memory = self._take(self._next_size(size_bytes))
        if memory is None:
            self._by_torch = True
            memory = self._take(self._next_size(size_bytes))
            assert memory is not None
        self._slabs.append(_Slab(memory, trimmed=False))
        self.grown = True

    def _next_size(self, size_bytes: int) -> int:
        """As many tensors as make a slab, fewer where the limits are near, but never none."""
        least_bytes = self._least(size_bytes)
        budget_bytes, ram_bytes = self._budget_left(), _free_ram()
        if least_bytes > budget_bytes:
            raise self._over_budget(least_bytes)
        if least_bytes > ram_bytes:
            raise self._out_of_ram(least_bytes, ram_bytes)
        most_bytes = min(self._slab_bytes, budget_bytes, ram_bytes)
        if self._by_torch:
            return max(least_bytes, 1 << (most_bytes.bit_length() - 1))
        tensor_bytes = -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return max(least_bytes, whole_pages(most_bytes // tensor_bytes * tensor_bytes))

    def _least(self, size_bytes: int) -> int:
        """The smallest slab that holds one tensor of this size."""
        if self._by_torch:
            return max(_ALIGNMENT_BYTES, 1 << (size_bytes - 1).bit_length())
        return whole_pages(size_bytes)

    def _budget_left(self) -> int:
        if self._budget_bytes is None:
            return sys.maxsize
        return self._budget_bytes - self._budget_bytes % mmap.PAGESIZE - self.capacity_bytes

    def _take(self, size_bytes: int) -> HostMemory | None:
        try:
            if self._by_torch:
                memory: HostMemory | None = allocate_by_torch(self._device, size_bytes)
            else:
                memory = map_exactly(self._device, size_bytes)
        except OSError as error:
            raise self._out_of_ram(size_bytes, _free_ram()) from error
        if memory is not None and memory.refusal is not None and not self._warned:
            self._warned = True
            warn_of_pageable(size_bytes, memory.refusal)
        return memory

    def trimmed(self) -> _Sizes:
        """The sizes that the steps so far ask for. See [Note: exact slabs]."""
        if self._by_torch:
            return [(slab, slab.capacity_bytes) for slab in self._slabs]  # torch would keep it
        sizes = [(slab, slab.wanted_bytes) for slab in self._slabs]
        scattered = self._peak_used_bytes < _WHOLE_SHARE * sum(size for _, size in sizes)
        # Only for a new peak: where one slab has not sufficed for this one, it never will.
        if scattered and self._peak_used_bytes > self._whole_bytes:
            return self.merged(0) or sizes
        return sizes

    def merged(self, size_bytes: int) -> _Sizes | None:
        """One slab for the most that was ever in use at once, and for a tensor of this size.

        Returns:
            None where that has no room.
        """
        whole_bytes = whole_pages(max(size_bytes, self._peak_used_bytes))
        more_bytes = whole_bytes - self.capacity_bytes
        if not self._slabs or self._by_torch:
            return None
        if more_bytes > self._budget_left() or more_bytes > _free_ram():
            return None
        return [(self._slabs[0], whole_bytes), *((slab, 0) for slab in self._slabs[1:])]

    def resize(self, sizes: _Sizes) -> None:
        """Give back the slabs that have another size, then take others in their places.

        Streams:
            No slab is in use, and the copies that read or write one are complete.

        Raises:
            StoreFullError: some could not be had. What was given back is gone.
        """
        changed = [slab for slab, size_bytes in sizes if slab.capacity_bytes != size_bytes]
        for slab in changed:
            slab.memory.give_back()  # all of it first: there may be no RAM for both
        self._slabs = [slab for slab, _ in sizes if slab not in changed]
        for place, (slab, size_bytes) in enumerate((s, n) for s, n in sizes if n):
            if slab in changed:
                memory = self._take(size_bytes)
                assert memory is not None
                self._slabs.insert(place, _Slab(memory, trimmed=True))
        if len(self._slabs) == 1:
            self._whole_bytes = self.capacity_bytes

    def give_back(self) -> None:
        for slab in self._slabs:
            slab.memory.give_back()
        self._slabs.clear()

    def _over_budget(self, size_bytes: int) -> StoreFullError:
        assert self._budget_bytes is not None
        return StoreFullError(
            errno.EDQUOT,
            f"host_budget allows {format_size(self._budget_bytes)} of host memory, "
            f"{format_size(self.capacity_bytes)} are taken, and the next {format_size(size_bytes)} "
            f"of offloaded activations do not fit; raise host_budget, let the "
            f'rest go to disk (store="tiered"), or offload fewer layers '
            f"(ActivationPolicy(num_layers=...))",
        )

    def _out_of_ram(self, size_bytes: int, free_bytes: int) -> StoreFullError:
        return StoreFullError(
            errno.ENOMEM,
            f"the host has {format_size(free_bytes)} of RAM to spare and the next "
            f"{format_size(size_bytes)} of offloaded activations do not fit, beside "
            f"{format_size(self.capacity_bytes)} that are there; free host memory, let "
            f'the rest go to disk (store="tiered"), or offload fewer layers '
            f"(ActivationPolicy(num_layers=...))",
        )


@final
@dataclass(eq=False)
class _HostSlot(Slot):
    slab: _Slab = field(kw_only=True)
    reloaded: AbstractEvent | None = None  # by the last copy up

    def memory(self) -> torch.Tensor:
        return self.slab.memory.tensor.narrow(0, self.extent.offset_bytes, self.size_bytes)


@final
class PinnedStore(AbstractStore):
    """Bytes in host memory, page-locked where the device is an accelerator.

    After the first step the store holds what a step needs and no more, see [Note: exact slabs].

    Args:
        device: whose copy streams move the bytes.
        budget_bytes: the most to take from the host; None: what is free.
        slab_bytes: how much to take at a time, about; one tensor may be larger.

    Attributes:
        peak_requested_bytes: the most bytes of tensors held at once since the store began.
    """

    reads_ahead = False  # host memory is as near as it gets

    def __init__(
        self,
        device: AbstractDevice,
        budget_bytes: int | None = None,
        slab_bytes: int = _SLAB_BYTES,
    ) -> None:
        self._device = device
        self._slabs = _Slabs(device, budget_bytes, slab_bytes)
        self._num_slots = 0  # given out, and not dropped again
        self._reads: list[AbstractEvent] = []  # copies up from dropped slots, not seen complete
        self._requested_bytes = 0
        self.peak_requested_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        return self._slabs.capacity_bytes

    @property
    def host_capacity_bytes(self) -> int:
        return self.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._slabs.used_bytes

    @property
    def efficiency(self) -> float:
        """What tensors needed at once, at most, over what is taken for them; 1 is exact."""
        capacity_bytes = self.capacity_bytes
        return self.peak_requested_bytes / capacity_bytes if capacity_bytes else 1.0

    def has_room(self, size_bytes: int) -> bool:
        """Whether `offload` of so many bytes would find room now."""
        self._settle()
        return self._slabs.fits(size_bytes) or self._slabs.could_grow(size_bytes)

    def offload(self, source: torch.Tensor, ready: AbstractEvent) -> Slot:
        size_bytes = source.numel()
        slab, extent = self._allocate(size_bytes)
        memory = slab.memory.tensor.narrow(0, extent.offset_bytes, size_bytes)
        # Who read these bytes before may not have finished: dropped slots are reused at once.
        self._reads = [read for read in self._reads if not read.query()]
        offloaded = self._device.copy_down(memory, source, ready, *self._reads)
        self._num_slots += 1
        self._requested_bytes += size_bytes
        self.peak_requested_bytes = max(self.peak_requested_bytes, self._requested_bytes)
        return _HostSlot(extent, size_bytes, offloaded, slab=slab)

    def reload(self, slot: Slot) -> tuple[torch.Tensor, AbstractEvent]:
        assert isinstance(slot, _HostSlot)
        buffer = self._device.allocate(slot.size_bytes)
        # The allocator may hand out memory that queued kernels still read: the copy waits for them.
        allocated = self._device.compute_stream().record()
        reloaded = self._device.copy_up(buffer, slot.memory(), allocated, slot.offloaded)
        slot.reloaded = reloaded
        return buffer, reloaded

    def drop(self, slot: Slot) -> None:
        """Forget a slot. Its bytes are free at once: the device orders who writes there next.

        The host cannot wait here for the last copy up. It runs ahead of the device, and would come
        to a stop at the first offload of every step.
        """
        assert isinstance(slot, _HostSlot)
        if slot.reloaded is not None:
            self._reads.append(slot.reloaded)
        self._free(slot)

    def read_ahead(self, slot: Slot) -> None:
        """Nothing to prepare."""

    def close(self) -> None:
        # A copy must not outlive the memory it reads or writes, nor the session that lets go of it.
        self._device.finish_copies()
        self._slabs.give_back()

    def _allocate(self, size_bytes: int) -> tuple[_Slab, Extent]:
        self._settle()
        found = self._slabs.allocate(size_bytes)
        if found is None:
            self._grow(size_bytes)
            found = self._slabs.allocate(size_bytes)
            assert found is not None
        return found

    def _grow(self, size_bytes: int) -> None:
        try:
            self._slabs.grow(size_bytes)
        except StoreFullError:
            sizes = None if self._slabs.used_bytes else self._slabs.merged(size_bytes)
            if sizes is None:
                raise
            self._resize(sizes)  # none of the slabs is large enough, and none is in use

    def _settle(self) -> None:
        """Trim if a step is over and it has grown."""
        if self._slabs.grown and not self._num_slots:
            self._slabs.grown = False
            sizes = self._slabs.trimmed()
            if any(slab.capacity_bytes != size_bytes for slab, size_bytes in sizes):
                # What cannot be had again now is had by growth, or that says why not.
                with contextlib.suppress(StoreFullError):
                    self._resize(sizes)

    def _resize(self, sizes: _Sizes) -> None:
        # Extents are reused in the order of the copy streams, and a copy down that nobody wants
        # any more may be under way still: it would write to memory that is no longer ours.
        device = self._device
        device.finish_copies()
        self._reads.clear()
        assert not self._slabs.used_bytes
        self._slabs.resize(sizes)

    def _free(self, slot: Slot) -> None:
        assert isinstance(slot, _HostSlot)
        slot.slab.extents.free(slot.extent)
        self._num_slots -= 1
        self._requested_bytes -= slot.size_bytes


def _free_ram() -> int:
    free_bytes = int(psutil.virtual_memory().available * _FREE_SHARE)
    return free_bytes - free_bytes % mmap.PAGESIZE
