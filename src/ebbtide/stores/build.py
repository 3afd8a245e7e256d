"""Builds the store for a device and a user's setting. One of them has both host memory and disk.

The tensors that a step offloads first are reloaded last, so these should be on the slower tier. How
many bytes do not fit in host memory is known only after a whole step: the first step that exceeds
host memory sends its last tensors to disk; the next step sends as many bytes of its first tensors.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, final

import torch

from ebbtide.devices.device import AbstractDevice, AbstractEvent
from ebbtide.errors import PolicyError, StoreFullError
from ebbtide.policy import refuse
from ebbtide.stores.disk import DiskStore
from ebbtide.stores.host_memory import refuse_other_systems
from ebbtide.stores.pinned import PinnedStore
from ebbtide.stores.staged import LEAST_STAGING_BYTES, STAGING_BYTES, StagedDiskStore
from ebbtide.stores.store import AbstractStore, RestingSlot, Slot, Target
from ebbtide.units import format_size


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
    def room_bytes(self) -> int:
        return self._host.room_bytes + self._disk.room_bytes

    @property
    def host_capacity_bytes(self) -> int:
        return self._host.host_capacity_bytes + self._disk.host_capacity_bytes

    @property
    def leftover_bytes(self) -> int:
        return self._host.leftover_bytes

    def use_leftover(self, user: Any) -> None:
        self._host.use_leftover(user)

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

    def stop_reserving(self, size_bytes: int) -> None:
        if self._has_reserve(size_bytes):
            self._host.stop_reserving(size_bytes)

    def _has_reserve(self, size_bytes: int) -> bool:
        return self._host.budget.reserved_bytes >= size_bytes

    def write(
        self, slot: RestingSlot, offset_bytes: int, source: torch.Tensor, ready: AbstractEvent
    ) -> tuple[AbstractEvent, AbstractEvent]:
        return self._of(slot).write(slot, offset_bytes, source, ready)

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


# ---- Builds the store for a device and the user's ``store`` argument ----

_LOG = logging.getLogger(__name__)

_STORES = 'one of "auto", "host", "disk", "disk:/some/dir", "tiered", "tiered:/some/dir"'
_STAGING_SHARE = 4  # a tiered store's chunks take at most 1/4 of host_budget


def build_store(
    device: AbstractDevice,
    kind: str,
    directory: Path | None,
    budget_bytes: int | None,
) -> AbstractStore:
    """Build the store for a device.

    Args:
        device: the device of the model.
        kind: ``"auto"``, ``"host"``, ``"disk"`` or ``"tiered"``.
        directory: where to create files; None: the system's directory for temporary files.
        budget_bytes: the most host memory to allocate, staging chunks for the disk included.

    Raises:
        PolicyError: the store does not suit the device, the budget is too small, the directory is
            not writable, or the system is not Linux.
    """
    refuse_other_systems()
    if device.computes_on_host:
        _check_for_cpu(kind, budget_bytes)
        store: AbstractStore = DiskStore(directory, device.lane)
    else:
        store = _build_for_accelerator(device, kind, directory, budget_bytes)
    _LOG.info(
        "store for a model on %s: %s, host_budget=%s, directory of its files: %s",
        device.torch_device,
        type(store).__name__,
        None if budget_bytes is None else format_size(budget_bytes),
        directory or "the system's for temporary files",
    )
    return store


def _build_for_accelerator(
    device: AbstractDevice, kind: str, directory: Path | None, budget_bytes: int | None
) -> AbstractStore:
    if kind in ("auto", "host"):
        return PinnedStore(device, budget_bytes)
    share = 1 if kind == "disk" else _STAGING_SHARE
    least_bytes = LEAST_STAGING_BYTES * share
    if budget_bytes is not None and budget_bytes < least_bytes:
        raise PolicyError(
            f"host_budget is {format_size(budget_bytes)}, and what goes to disk goes through host "
            f"memory; allow {format_size(least_bytes)} at least"
        )
    staging_bytes = STAGING_BYTES
    if budget_bytes is not None:
        staging_bytes = min(staging_bytes, budget_bytes // share)
    disk = StagedDiskStore(device, directory, staging_bytes)
    if kind == "disk":
        return disk
    rest_bytes = None if budget_bytes is None else budget_bytes - staging_bytes
    return TieredStore(PinnedStore(device, rest_bytes), disk)


def parse_store(store: str) -> tuple[str, Path | None]:
    """Return the kind of a store and its directory, whose ``~`` is replaced.

    Raises:
        PolicyError: the text cannot be read.
    """
    if not isinstance(store, str):
        advice = f'write store="disk:{store}"' if isinstance(store, os.PathLike) else _STORES
        refuse("store", "text", store, advice)
    kind, colon, directory = store.partition(":")
    if colon and not directory.strip():
        raise PolicyError(f'store={store!r} names no directory; write "{kind}" or "{kind}:/dir"')
    if kind not in ("auto", "host", "disk", "tiered") or (colon and kind not in ("disk", "tiered")):
        raise PolicyError(f"store={store!r} is not {_STORES}")
    try:
        return kind, Path(directory).expanduser() if colon else None
    except RuntimeError:
        raise PolicyError(f"store={store!r}: there is no such home directory") from None


def _check_for_cpu(kind: str, host_budget_bytes: int | None) -> None:
    if kind in ("host", "tiered"):
        raise PolicyError(
            f'store="{kind}" would copy RAM to RAM: the model computes on the CPU, so host memory '
            f'is where its activations are already. Use store="disk" or "auto"'
        )
    if host_budget_bytes is not None:
        raise PolicyError(
            "host_budget bounds the host memory that holds activations of an accelerator; this "
            "model is on the CPU and its activations go to disk. Leave host_budget out"
        )
