"""The host tier: page-locked memory in slabs, reused from step to step."""

from __future__ import annotations

import contextlib
import errno
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import final

import torch

from ebbtide.devices.device import AbstractDevice, AbstractEvent
from ebbtide.errors import StoreFullError
from ebbtide.memory.budget import HostBudget, free_ram_bytes
from ebbtide.memory.extents import Extent
from ebbtide.memory.growth_lock import GROWTH_LOCK
from ebbtide.memory.host_memory import (
    allocate_host_memory,
    whole_pages,
)
from ebbtide.stores.slabs import SLAB_BYTES, Sizes, Slab, Slabs
from ebbtide.stores.store import (
    ALREADY_REACHED,
    AbstractStore,
    Landing,
    RestingSlot,
    Slot,
    Target,
    allocate_target,
)
from ebbtide.units import format_size


@final
@dataclass(eq=False, slots=True)
class _HostSlot(Slot):
    slab: Slab = field(kw_only=True)
    reloaded: AbstractEvent | None = None  # by the last copy up


@final
class PinnedStore(AbstractStore):
    """Bytes in host memory, page-locked where the device is an accelerator.

    After the first step the store holds what a step needs and no more: see [Note: exact slabs] in
    `ebbtide.stores.slabs`.

    Args:
        device: the device whose copy streams move the bytes.
        budget_bytes: the most host memory to take; None means whatever is free.
        slab_bytes: about how much memory to take at a time. One tensor may be larger.
        budget_origin: the budget that ``budget_bytes`` is a part of, in words.

    Attributes:
        budget: counts all host memory that is taken.
        peak_requested_bytes: the most bytes of tensors held at once since the store began.
    """

    # Long: activations and weights take their memory from the same budget.

    reads_ahead = False  # host memory is as near as it gets

    def __init__(
        self,
        device: AbstractDevice,
        budget_bytes: int | None = None,
        slab_bytes: int = SLAB_BYTES,
        *,
        budget_origin: str = "",
    ) -> None:
        self._device = device
        self.budget = HostBudget(budget_bytes, budget_origin)
        self._slabs = Slabs(device, self.budget, slab_bytes)
        self._reads: list[AbstractEvent] = []  # copies up from dropped slots, not seen complete
        self._requested_bytes = 0
        self.peak_requested_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        return self._slabs.capacity_bytes

    @property
    def host_capacity_bytes(self) -> int:
        return self.budget.taken_bytes

    @property
    def used_bytes(self) -> int:
        return self._slabs.used_bytes

    @property
    def efficiency(self) -> float:
        """The most bytes of tensors held at once, divided by the bytes taken; 1 is exact."""
        capacity_bytes = self.capacity_bytes
        return self.peak_requested_bytes / capacity_bytes if capacity_bytes else 1.0

    def has_room(self, size_bytes: int) -> bool:
        """Whether `offload` of so many bytes would find room now."""
        self._settle()
        return self._slabs.fits(size_bytes) or self._slabs.could_grow(size_bytes)

    def offload(self, source: torch.Tensor, ready: AbstractEvent) -> Slot:
        size_bytes = source.numel()
        if self._slabs.grown:
            self._settle()
        slab, extent = self._slabs.allocate(size_bytes) or self._grow(size_bytes)
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
        self._requested_bytes += size_bytes
        if self._requested_bytes > self.peak_requested_bytes:
            self.peak_requested_bytes = self._requested_bytes
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
        self._slabs.free(slot.slab, slot.extent)
        self._requested_bytes -= slot.size_bytes

    def allocate_resting(self, size_bytes: int, *, reserved: bool = False) -> RestingSlot:
        whole_bytes = whole_pages(max(size_bytes, 1))
        if reserved:
            self.budget.reserve(-whole_bytes)
        # See [Note: growth in turn]. Another process may have taken RAM that was set aside here.
        with GROWTH_LOCK.hold():
            ram_bytes = free_ram_bytes() if reserved else self.budget.spare_ram_bytes()
            check = functools.partial(self._check_room, ram_bytes=ram_bytes)
            try:
                memory = allocate_host_memory(self._device, size_bytes, check)
            except StoreFullError:
                raise
            except OSError as error:
                raise self._no_room(whole_bytes, free_ram_bytes()) from error
        extent = Extent(0, memory.tensor.numel())
        self.budget.take(extent.size_bytes)
        return RestingSlot(extent, size_bytes, ALREADY_REACHED, "host", memory=memory)

    def reserve(self, size_bytes: int) -> None:
        whole_bytes = whole_pages(max(size_bytes, 1))
        self._check_room(whole_bytes, self.budget.spare_ram_bytes())
        self.budget.reserve(whole_bytes)

    def write(
        self, slot: RestingSlot, offset_bytes: int, source: torch.Tensor, ready: AbstractEvent
    ) -> Landing:
        target = slot.tensor.narrow(0, offset_bytes, source.numel())
        # Guard gradient-after-kernels: the copy down of a gradient waits for the kernels that make
        # it. The copy would read memory that queued kernels have not written yet.
        copied = self._device.copy_down(target, source, ready)
        return Landing(copied, copied)

    def _check_room(self, size_bytes: int, ram_bytes: int) -> None:
        left_bytes = min(self.budget.left_bytes, ram_bytes)
        if size_bytes > left_bytes:
            raise self._no_room(size_bytes, left_bytes)

    def _no_room(self, size_bytes: int, left_bytes: int) -> StoreFullError:
        budget = self.budget
        of = "free RAM"
        if budget.limit_bytes is not None and left_bytes == budget.left_bytes:
            of = f"a host_budget of {budget.limit}"
        return StoreFullError(
            errno.ENOMEM,
            f"weights that rest on the host, or their gradients, need {format_size(size_bytes)} "
            f"more, and {format_size(max(0, left_bytes))} of {of} are left; raise host_budget, "
            f'let what does not fit rest on disk (store="tiered"), or offload the weights of fewer '
            f"layers (WeightPolicy(num_layers=...))",
        )

    def read_ahead(self, slot: Slot) -> None:
        """Nothing to prepare."""

    def take_over(self, other: AbstractStore, resting: Iterable[RestingSlot]) -> None:
        assert isinstance(other, PinnedStore)
        self.budget.take(sum(slot.extent.size_bytes for slot in resting))
        self.budget.reserve(other.budget.reserved_bytes)

    def close(self) -> None:
        # Guard close-after-copies: the store waits for its copies before it gives host memory back.
        # After `detach`, copies under way would use memory that is no longer ours.
        self._device.finish_copies()
        self._slabs.give_back()

    def _grow(self, size_bytes: int) -> tuple[Slab, Extent]:
        """Make room for so many bytes, which no slab has, and allocate them."""
        try:
            self._slabs.grow(size_bytes)
        except StoreFullError:
            sizes = None if self._slabs.used_bytes else self._slabs.merged(size_bytes)
            if sizes is None:
                raise
            self._resize(sizes)  # none of the slabs is large enough, and none is in use
        found = self._slabs.allocate(size_bytes)
        assert found is not None
        return found

    def _settle(self) -> None:
        """Trim the slabs if a step is over in which they have grown."""
        if self._slabs.grown and not self._slabs.used_bytes:
            self._slabs.grown = False
            sizes = self._slabs.trimmed()
            if any(slab.capacity_bytes != size_bytes for slab, size_bytes in sizes):
                # What cannot be had again now is had by growth, or that says why not.
                with contextlib.suppress(StoreFullError):
                    self._resize(sizes)

    def _resize(self, sizes: Sizes) -> None:
        # Guard resize-after-copies: the store waits for its copies before it cuts its slabs to
        # size. A copy that nobody wants any more would go on in memory that was given back.
        self._device.finish_copies()
        self._reads.clear()
        assert not self._slabs.used_bytes
        self._slabs.resize(sizes)
