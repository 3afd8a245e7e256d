"""Where bytes rest in a lower tier: page-locked memory, disk, or both."""

from ebbtide.stores.build import TieredStore, build_store
from ebbtide.stores.disk import DiskStore
from ebbtide.stores.measured_memory import AbstractMemory, DeviceMemory, ProcessMemory
from ebbtide.stores.pinned import PinnedStore
from ebbtide.stores.staged import StagedDiskStore
from ebbtide.stores.store import AbstractStore, Extent, RestingSlot, Slot, Target

__all__ = [
    "AbstractMemory",
    "AbstractStore",
    "DeviceMemory",
    "DiskStore",
    "Extent",
    "PinnedStore",
    "ProcessMemory",
    "RestingSlot",
    "Slot",
    "StagedDiskStore",
    "Target",
    "TieredStore",
    "build_store",
]
