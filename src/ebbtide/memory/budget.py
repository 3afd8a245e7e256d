"""The limit on the host memory that one offload may allocate."""

from __future__ import annotations

import errno
import mmap
import sys
from typing import final

import psutil

from ebbtide.errors import StoreFullError
from ebbtide.memory.cgroups import memory_limit
from ebbtide.memory.host_limit import HostLimit
from ebbtide.units import format_size

_OTHERWISE = (
    'go to disk (store="tiered"), or offload fewer layers (ActivationPolicy(num_layers=...))'
)
_FREE_SHARE = 0.95  # of free RAM; the rest is a margin, because the OOM killer raises no error


@final
class HostBudget:
    """Counts the host memory of slabs, weights, gradients and chunks against one limit.

    Args:
        limit_bytes: the most host memory to allocate; None: all that is free.
        origin: the budget that the limit is a part of, in words; see `HostLimit`.

    Attributes:
        limit_bytes: as given.
        taken_bytes: the memory that is allocated now.
        reserved_bytes: memory set aside for gradients. They are allocated last, when activations
            could otherwise have used up the budget.
    """

    def __init__(self, limit_bytes: int | None = None, origin: str = "") -> None:
        self.limit_bytes = limit_bytes
        self._origin = origin
        self.taken_bytes = 0
        self.reserved_bytes = 0

    @property
    def left_bytes(self) -> int:
        """How much may still be allocated, in whole pages. This does not look at free RAM."""
        if self.limit_bytes is None:
            return sys.maxsize
        whole_bytes = self.limit_bytes - self.limit_bytes % mmap.PAGESIZE
        return whole_bytes - self.taken_bytes - self.reserved_bytes

    @property
    def limit(self) -> HostLimit:
        """The limit, which there is, as error messages name it."""
        assert self.limit_bytes is not None
        return HostLimit(self.limit_bytes, self._origin)

    def spare_ram_bytes(self) -> int:
        """Free RAM beside the reserve and the margin that stays free, in whole pages.

        The margin grows with what is taken. If it were a share of the free RAM alone, a store that
        grows step by step would use up the margin, too.
        """
        margin_bytes = int(self.taken_bytes * (1 - _FREE_SHARE))
        spare_bytes = max(0, free_ram_bytes() - margin_bytes - self.reserved_bytes)
        return spare_bytes - spare_bytes % mmap.PAGESIZE

    def take(self, size_bytes: int) -> None:
        """Count memory that was allocated, or freed if the size is negative."""
        self.taken_bytes += size_bytes

    def reserve(self, size_bytes: int) -> None:
        """Set memory aside, or release a part of the reserve if the size is negative."""
        self.reserved_bytes = max(0, self.reserved_bytes + size_bytes)

    def over_limit(self, size_bytes: int) -> StoreFullError:
        """The error for activations that exceed the limit."""
        return StoreFullError(
            errno.EDQUOT,
            f"host_budget allows {self.limit} of host memory, "
            f"{format_size(self.taken_bytes + self.reserved_bytes)} are taken, and the next "
            f"{format_size(size_bytes)} of offloaded activations do not fit; raise host_budget, "
            f"let the rest {_OTHERWISE}",
        )

    def out_of_ram(self, size_bytes: int, spare_bytes: int) -> StoreFullError:
        """The error for activations that exceed the free RAM."""
        return StoreFullError(
            errno.ENOMEM,
            f"the host has {format_size(spare_bytes)} of RAM to spare and the next "
            f"{format_size(size_bytes)} of offloaded activations do not fit, beside "
            f"{format_size(self.taken_bytes)} that are taken; free host memory, let the rest "
            f"{_OTHERWISE}",
        )


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
