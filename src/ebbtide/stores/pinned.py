"""The host tier: page-locked memory in slabs, reused from step to step."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import final

import psutil
import torch

from ebbtide.devices.base import AbstractDevice, AbstractEvent
from ebbtide.errors import StoreFullError
from ebbtide.stores.base import AbstractStore, Slot
from ebbtide.stores.extents import Extent, ExtentAllocator
from ebbtide.units import format_size

_SLAB_BYTES = 256 * 2**20
_ALIGNMENT_BYTES = 512
_FREE_SHARE = 0.95  # of the free RAM that a new slab may take: the OOM killer gives no error


@final
class _Slab:
    def __init__(self, size_bytes: int, pinned: bool) -> None:
        self.memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.extents = ExtentAllocator(_ALIGNMENT_BYTES)
        self.extents.grow(size_bytes)


@final
@dataclass(eq=False)
class _HostSlot(Slot):
    slab: _Slab = field(kw_only=True)

    def memory(self) -> torch.Tensor:
        return self.slab.memory.narrow(0, self.extent.offset_bytes, self.size_bytes)


@final
class PinnedStore(AbstractStore):
    """Bytes in host memory, page-locked where the device is an accelerator.

    Args:
        device: whose copy streams move the bytes.
        slab_bytes: how much to take at a time, at least; a power of two.
    """

    def __init__(self, device: AbstractDevice, slab_bytes: int = _SLAB_BYTES) -> None:
        super().__init__()
        self._device = device
        self._slab_bytes = slab_bytes
        self._slabs: list[_Slab] = []

    @property
    def capacity_bytes(self) -> int:
        return sum(slab.extents.capacity_bytes for slab in self._slabs)

    @property
    def used_bytes(self) -> int:
        self.collect()
        return sum(slab.extents.used_bytes for slab in self._slabs)

    def offload(self, source: torch.Tensor, ready: AbstractEvent) -> Slot:
        size_bytes = source.numel()
        slab, extent = self._allocate(size_bytes)
        memory = slab.memory.narrow(0, extent.offset_bytes, size_bytes)
        offloaded = self._device.copy_down(memory, source, ready)
        return _HostSlot(extent, size_bytes, offloaded, slab=slab)

    def reload(self, slot: Slot) -> tuple[torch.Tensor, AbstractEvent]:
        assert isinstance(slot, _HostSlot)
        buffer = self._device.allocate(slot.size_bytes)
        # The allocator may hand out memory that queued kernels still read: the copy waits for them.
        allocated = self._device.compute_stream().record()
        reloaded = self._device.copy_up(buffer, slot.memory(), allocated, slot.offloaded)
        slot.readers.append(reloaded.query)
        return buffer, reloaded

    def read_ahead(self, slot: Slot) -> None:
        """Nothing to prepare: host memory is as near as it gets."""

    def close(self) -> None:
        # A copy must not outlive the memory it reads or writes, nor the session that lets go of it.
        self._device.finish_copies()
        self._slabs.clear()

    def _allocate(self, size_bytes: int) -> tuple[_Slab, Extent]:
        self.collect()
        for slab in self._slabs:
            extent = slab.extents.allocate(size_bytes)
            if extent is not None:
                return slab, extent
        slab = _Slab(self._slab_size(size_bytes), pinned=self._device.pins_host_memory)
        self._slabs.append(slab)
        extent = slab.extents.allocate(size_bytes)
        assert extent is not None
        return slab, extent

    def _slab_size(self, size_bytes: int) -> int:
        """A power of two, because torch's pinned allocator would round up to one anyway."""
        slab_bytes = max(self._slab_bytes, 1 << (size_bytes - 1).bit_length())
        free_bytes = int(psutil.virtual_memory().available * _FREE_SHARE)
        if slab_bytes > free_bytes:
            raise StoreFullError(
                errno.ENOMEM,
                f"the host has {format_size(free_bytes)} of RAM to spare and the next "
                f"{format_size(slab_bytes)} of offloaded activations do not fit, beside "
                f"{format_size(self.capacity_bytes)} that are there; offload fewer layers "
                f"(ActivationPolicy(num_layers=...)) or free host memory",
            )
        return slab_bytes

    def _free(self, slot: Slot) -> None:
        assert isinstance(slot, _HostSlot)
        slot.slab.extents.free(slot.extent)
