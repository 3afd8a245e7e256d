"""The limit on the host memory that one offload may allocate."""

from __future__ import annotations

import mmap
import sys
from typing import final

import psutil

from ebbtide.memory.cgroups import memory_limit

_FREE_SHARE = 0.95  # of free RAM; the rest is a margin, because the OOM killer raises no error


@final
class HostBudget:
    """Counts the host memory of slabs, weights, gradients and chunks against one limit.

    Args:
        limit_bytes: the most host memory to allocate; None: all that is free.

    Attributes:
        limit_bytes: as given.
        taken_bytes: the memory that is allocated now.
        reserved_bytes: memory set aside for gradients. They are allocated last, when activations
            could otherwise have used up the budget.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        self.reserved_bytes = 0

    @property
    def left_bytes(self) -> int:
        """How much may still be allocated, in whole pages. This does not look at free RAM."""
        if self.limit_bytes is None:
            return sys.maxsize
        whole_bytes = self.limit_bytes - self.limit_bytes % mmap.PAGESIZE
        return whole_bytes - self.taken_bytes - self.reserved_bytes

    def take(self, size_bytes: int) -> None:
        """Count memory that was allocated, or freed if the size is negative."""
        self.taken_bytes += size_bytes

    def reserve(self, size_bytes: int) -> None:
        """Set memory aside, or release a part of the reserve if the size is negative."""
        self.reserved_bytes = max(0, self.reserved_bytes + size_bytes)


def free_ram_bytes() -> int:
    """RAM that can be allocated without invoking the OOM killer, in whole pages.

    In a container or a batch job, that is no more than its control group allows.
    """
    free_bytes = int(psutil.virtual_memory().available)
    limit = memory_limit()
    if limit is not None:
        free_bytes = min(free_bytes, limit.free_bytes)
    free_bytes = int(free_bytes * _FREE_SHARE)
    return free_bytes - free_bytes % mmap.PAGESIZE
