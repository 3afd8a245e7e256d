"""Slabs of host memory in exact sizes.

[Note: exact slabs] The first step takes memory in large slabs, because it cannot know what comes,
and page-locking is slow. When that step is over, the next cuts every slab down to what was reached
in it (`ExtentAllocator.peak_end_bytes`): the same step then gets the same extents, and the bytes
taken are the bytes that it needs. Only growth is followed by such a trim, so equal steps
neither grow nor trim. Steps of other sizes may leave slabs of which none fits another's tensors;
then one slab takes the place of them all, as large as the most that was ever in use at once.
"""

from __future__ import annotations

import logging
from typing import final

import torch

from ebbtide.devices.device import AbstractDevice
from ebbtide.memory.budget import HostBudget
from ebbtide.memory.extents import Extent, ExtentAllocator
from ebbtide.memory.growth_lock import GROWTH_LOCK
from ebbtide.memory.host_memory import (
    HostMemory,
    allocate_by_torch,
    map_exactly,
    warn_of_pageable,
    whole_pages,
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
class Slabs:
    """All slabs of a store, within its budget and the host's free RAM. Never waits."""

    def __init__(self, device: AbstractDevice, budget: HostBudget, slab_bytes: int) -> None:
        self._device = device
        self._budget = budget
        self._slab_bytes = slab_bytes
        self._slabs: list[Slab] = []
        self._by_torch = False  # only torch's own allocator gives memory that the copies take
        self._used_bytes = 0
        self._peak_used_bytes = 0
        self._whole_bytes = 0  # of the slab that took the place of all others
        self.grown = False  # since the last look at whether a trim is due

    @property
    def capacity_bytes(self) -> int:
        return sum(slab.capacity_bytes for slab in self._slabs)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes if self._slabs else 0

    def fits(self, size_bytes: int) -> bool:
        return any(slab.extents.fits(size_bytes) for slab in self._slabs)

    def allocate(self, size_bytes: int) -> tuple[Slab, Extent] | None:
        # Always in the same order: an equal step must get the same extents.
        for slab in self._slabs:
            extent = slab.extents.allocate(size_bytes)
            if extent is not None:
                used_bytes = self._used_bytes = self._used_bytes + extent[1]
                if used_bytes > self._peak_used_bytes:
                    self._peak_used_bytes = used_bytes
                return slab, extent
        return None

    def free(self, slab: Slab, extent: Extent) -> None:
        slab.extents.free(extent)
        self._used_bytes -= extent.size_bytes

    def could_grow(self, size_bytes: int) -> bool:
        """Whether one more tensor of this size finds room, by `grow` or in `merged` slabs."""
        least_bytes = self._least(size_bytes)
        fits = least_bytes <= min(self._budget.left_bytes, self._budget.spare_ram_bytes())
        return fits or (not self.used_bytes and self.merged(size_bytes) is not None)

    def grow(self, size_bytes: int) -> None:
        """Add a slab for some tensors of this size.

        Raises:
            StoreFullError: there is no room for one.
        """
        # See [Note: growth in turn].
        with GROWTH_LOCK.hold():
            memory = self._take(self._next_size(size_bytes))
            if memory is None:
                self._by_torch = True
                memory = self._take(self._next_size(size_bytes))
                assert memory is not None
        self._slabs.append(Slab(memory, trimmed=False))
        self.grown = True
        _LOG.debug(
            "host memory: %s more, %s in all",
            format_size(memory.tensor.nbytes),
            format_size(self.capacity_bytes),
        )

    def _next_size(self, size_bytes: int) -> int:
        """Size of the next slab: room for several such tensors, or for one near the limits."""
        least_bytes = self._least(size_bytes)
        budget_bytes, ram_bytes = self._budget.left_bytes, self._budget.spare_ram_bytes()
        if least_bytes > budget_bytes:
            raise self._budget.over_limit(least_bytes)
        if least_bytes > ram_bytes:
            raise self._budget.out_of_ram(least_bytes, ram_bytes)
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

    def _take(self, size_bytes: int) -> HostMemory | None:
        try:
            if self._by_torch:
                memory: HostMemory | None = allocate_by_torch(self._device, size_bytes)
            else:
                memory = map_exactly(self._device, size_bytes)
        except OSError as error:
            raise self._budget.out_of_ram(size_bytes, self._budget.spare_ram_bytes()) from error
        if memory is not None and memory.refusal is not None:
            warn_of_pageable(self._device, size_bytes, memory.refusal)
        if memory is not None:
            self._budget.take(size_bytes)
        return memory

    def trimmed(self) -> Sizes:
        """The sizes that the steps so far ask for. See [Note: exact slabs]."""
        if self._by_torch:
            return [(slab, slab.capacity_bytes) for slab in self._slabs]  # torch would keep it
        sizes = [(slab, slab.wanted_bytes) for slab in self._slabs]
        scattered = self._peak_used_bytes < _WHOLE_SHARE * sum(size for _, size in sizes)
        # Only for a new peak: where one slab has not sufficed for this one, it never will.
        if scattered and self._peak_used_bytes > self._whole_bytes:
            return self.merged(0) or sizes
        return sizes

    def merged(self, size_bytes: int) -> Sizes | None:
        """Sizes that replace all slabs by one, for the most bytes that were ever in use at once.

        Args:
            size_bytes: size of a tensor that the slab must hold, too.

        Returns:
            None where there is no room for such a slab.
        """
        whole_bytes = whole_pages(max(size_bytes, self._peak_used_bytes))
        more_bytes = whole_bytes - self.capacity_bytes
        if not self._slabs or self._by_torch:
            return None
        if more_bytes > min(self._budget.left_bytes, self._budget.spare_ram_bytes()):
            return None
        return [(self._slabs[0], whole_bytes), *((slab, 0) for slab in self._slabs[1:])]

    def resize(self, sizes: Sizes) -> None:
        """Give back the slabs that have another size, then take others in their places.

        Streams:
            No slab is in use, and the copies that read or write one are complete.

        Raises:
            StoreFullError: some could not be had. What was given back is gone.
        """
        # See [Note: growth in turn]. No other process gets in between what is given back and taken.
        with GROWTH_LOCK.hold():
            more_bytes = sum(size_bytes for _, size_bytes in sizes) - self.capacity_bytes
            spare_bytes = self._budget.spare_ram_bytes()
            if more_bytes > spare_bytes:
                raise self._budget.out_of_ram(more_bytes, spare_bytes)
            self._resize(sizes)

    def _resize(self, sizes: Sizes) -> None:
        changed = [slab for slab, size_bytes in sizes if slab.capacity_bytes != size_bytes]
        for slab in changed:
            self._give_back(slab)  # all of it first: there may be no RAM for both
        self._slabs = [slab for slab, _ in sizes if slab not in changed]
        for place, (slab, size_bytes) in enumerate((s, n) for s, n in sizes if n):
            if slab in changed:
                memory = self._take(size_bytes)
                assert memory is not None
                self._slabs.insert(place, Slab(memory, trimmed=True))
        if len(self._slabs) == 1:
            self._whole_bytes = self.capacity_bytes

    def give_back(self) -> None:
        for slab in self._slabs:
            self._give_back(slab)
        self._slabs.clear()

    def _give_back(self, slab: Slab) -> None:
        slab.give_back()
        self._budget.take(-slab.capacity_bytes)
