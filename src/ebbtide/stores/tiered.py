"""A store that uses host memory as far as it suffices, and disk for the rest.

The tensors that a step offloads first are reloaded last, so these should be on the slower tier. How
many bytes do not fit in host memory is known only after a whole step: the first step that exceeds
host memory sends its last tensors to disk; the next step sends as many bytes of its first tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import final

import torch

from ebbtide.devices.device import AbstractEvent
from ebbtide.errors import StoreFullError
from ebbtide.stores.pinned import PinnedStore
from ebbtide.stores.staged import StagedDiskStore
from ebbtide.stores.store import AbstractStore, Landing, RestingSlot, Slot, Target


@final
class TieredStore(AbstractStore):
    """Keeps bytes in host memory and on disk. Owns both stores.

    Args:
        host: limited by its budget, or by free RAM.
        disk: keeps the bytes for which `host` has no room.
    """

    def __init__(self, host: PinnedStore, disk: StagedDiskStore) -> None:
        self._host = host
        self._disk = disk
        self._num_slots = 0
        self._live_bytes = {"host": 0, "disk": 0}
        self._host_room_bytes = 0  # the most bytes of slots in host memory at once
        self._step_peak_bytes = 0
        self._step_disk_bytes = 0
        self._first_bytes = 0  # how many bytes at the beginning of a step go to disk
        self._overflowed = False

    @property
    def capacity_bytes(self) -> int:
        return self._host.capacity_bytes + self._disk.capacity_bytes

    @property
    def host_capacity_bytes(self) -> int:
        return self._host.host_capacity_bytes + self._disk.host_capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._host.used_bytes + self._disk.used_bytes

    def offload(self, source: torch.Tensor, ready: AbstractEvent) -> Slot:
        if not self._num_slots:
            self._begin_step()
        slot = self._place(source, ready)
        self._num_slots += 1
        self._live_bytes[slot.tier] += slot.size_bytes
        if slot.tier == "disk":
            self._step_disk_bytes += slot.size_bytes
        self._host_room_bytes = max(self._host_room_bytes, self._live_bytes["host"])
        self._step_peak_bytes = max(self._step_peak_bytes, sum(self._live_bytes.values()))
        return slot

    def _begin_step(self) -> None:
        """Begin a step: send as many of its first bytes to disk as exceeded host memory before."""
        if self._overflowed:
            self._first_bytes = max(0, self._step_peak_bytes - self._host_room_bytes)
        self._step_peak_bytes = self._step_disk_bytes = 0

    def _place(self, source: torch.Tensor, ready: AbstractEvent) -> Slot:
        if self._step_disk_bytes < self._first_bytes:
            with contextlib.suppress(StoreFullError):
                return self._disk.offload(source, ready)
        if self._host.has_room(source.numel()):
            with contextlib.suppress(StoreFullError):  # the memory has been taken meanwhile
                return self._host.offload(source, ready)
        self._overflowed = True
        return self._disk.offload(source, ready)

    def reload(
        self, slot: Slot, target: Target | None = None
    ) -> tuple[torch.Tensor, AbstractEvent]:
        return self._of(slot).reload(slot, target)

    def allocate_resting(self, size_bytes: int, *, reserved: bool = False) -> RestingSlot:
        with contextlib.suppress(StoreFullError):
            return self._host.allocate_resting(
                size_bytes, reserved=reserved and self._has_reserve(size_bytes)
            )
        return self._disk.allocate_resting(size_bytes)

    def allocate_resting_on_disk(self, size_bytes: int) -> RestingSlot:
        return self._disk.allocate_resting(size_bytes)

    def page_out(self) -> None:
        self._disk.page_out()

    def maps(self, tensor: torch.Tensor) -> bool:
        return self._disk.maps(tensor)

    def reserve(self, size_bytes: int) -> None:
        with contextlib.suppress(StoreFullError):  # `allocate_resting` will then use the disk
            self._host.reserve(size_bytes)

    def _has_reserve(self, size_bytes: int) -> bool:
        return self._host.budget.reserved_bytes >= size_bytes

    def write(
        self, slot: RestingSlot, offset_bytes: int, source: torch.Tensor, ready: AbstractEvent
    ) -> Landing:
        return self._of(slot).write(slot, offset_bytes, source, ready)

    def read_ahead(self, slot: Slot) -> None:
        self._of(slot).read_ahead(slot)

    def drop(self, slot: Slot) -> None:
        if isinstance(slot, RestingSlot):
            self._of(slot).drop(slot)
            return
        self._num_slots -= 1
        self._live_bytes[slot.tier] -= slot.size_bytes
        self._of(slot).drop(slot)

    def take_over(self, other: AbstractStore, resting: Iterable[RestingSlot]) -> None:
        assert isinstance(other, TieredStore)
        slots = list(resting)
        self._host.take_over(other._host, [slot for slot in slots if slot.tier == "host"])
        self._disk.take_over(other._disk, [slot for slot in slots if slot.tier == "disk"])

    def close(self) -> None:
        self._host.close()
        self._disk.close()

    def _of(self, slot: Slot) -> AbstractStore:
        return self._host if slot.tier == "host" else self._disk
