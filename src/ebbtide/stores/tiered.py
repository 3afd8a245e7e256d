"""Host memory as far as it goes, disk for the rest.

What a step offloads first is wanted back last, so that is what should be on the slow tier. Which
bytes come first and how many are too many is known only from the step before: the first step that
does not fit sends what comes last to disk, and the next one as many bytes that come first.
"""

from __future__ import annotations

import contextlib
from typing import final

import torch

from ebbtide.devices.device import AbstractEvent
from ebbtide.errors import StoreFullError
from ebbtide.stores.pinned import PinnedStore
from ebbtide.stores.staged import StagedDiskStore
from ebbtide.stores.store import AbstractStore, Slot


@final
class TieredStore(AbstractStore):
    """Bytes in host memory and on disk. Owns both stores.

    Args:
        host: bounded by its budget, or by free RAM.
        disk: takes what `host` cannot.
    """

    def __init__(self, host: PinnedStore, disk: StagedDiskStore) -> None:
        self._host = host
        self._disk = disk
        self._num_slots = 0
        self._live_bytes = {"host": 0, "disk": 0}
        self._host_room_bytes = 0  # the most that the host held at once
        self._step_peak_bytes = 0
        self._step_disk_bytes = 0
        self._first_bytes = 0  # of a step: they go to disk
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
        """The last step is over: what was too much then goes to disk first now."""
        if self._overflowed:
            self._first_bytes = max(0, self._step_peak_bytes - self._host_room_bytes)
        self._step_peak_bytes = self._step_disk_bytes = 0

    def _place(self, source: torch.Tensor, ready: AbstractEvent) -> Slot:
        if self._step_disk_bytes < self._first_bytes:
            with contextlib.suppress(StoreFullError):
                return self._disk.offload(source, ready)
        if self._host.has_room(source.numel()):
            with contextlib.suppress(StoreFullError):  # what was free is taken by somebody else
                return self._host.offload(source, ready)
        self._overflowed = True
        return self._disk.offload(source, ready)

    def reload(self, slot: Slot) -> tuple[torch.Tensor, AbstractEvent]:
        return self._of(slot).reload(slot)

    def read_ahead(self, slot: Slot) -> None:
        self._of(slot).read_ahead(slot)

    def drop(self, slot: Slot) -> None:
        self._num_slots -= 1
        self._live_bytes[slot.tier] -= slot.size_bytes
        self._of(slot).drop(slot)

    def close(self) -> None:
        self._host.close()
        self._disk.close()

    def _of(self, slot: Slot) -> AbstractStore:
        return self._host if slot.tier == "host" else self._disk
