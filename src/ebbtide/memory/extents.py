"""A best-fit allocator of exact-size extents in a growing range of bytes."""

from __future__ import annotations

import bisect
from typing import NamedTuple, final


@final
class Extent(NamedTuple):
    """A run of bytes: ``[offset_bytes, offset_bytes + size_bytes)``."""

    offset_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


@final
class ExtentAllocator:
    """Allocates aligned extents of ``[0, capacity)`` and merges adjacent free ones.

    Args:
        alignment_bytes: every extent begins and ends on a multiple of this.

    Attributes:
        peak_end_bytes: the furthest end of any extent so far. With only that capacity, the same
            calls succeed and return the same extents.
    """

    def __init__(self, alignment_bytes: int) -> None:
        self._alignment = alignment_bytes
        self._free: list[tuple[int, int]] = []  # offset and size; sorted, no two of them touch
        self.capacity_bytes = 0
        self.used_bytes = 0
        self.peak_end_bytes = 0

    def round_up(self, size_bytes: int) -> int:
        return -(-(size_bytes or 1) // self._alignment) * self._alignment

    def grow(self, size_bytes: int) -> None:
        """Add ``size_bytes`` (rounded up) at the end of the range."""
        size = self.round_up(size_bytes)
        self._insert(self.capacity_bytes, size)
        self.capacity_bytes += size

    def allocate(self, size_bytes: int) -> Extent | None:
        """Allocate from the smallest free run that has room; None: the range must grow.

        The run at the end of the range is used only if no other run has room. Its length then does
        not influence the choice, so the part beyond `peak_end_bytes` can be cut off.
        """
        size = -(-(size_bytes or 1) // self._alignment) * self._alignment  # as `round_up`
        at = self._find(size)
        if at is None:
            return None
        offset, run_bytes = self._free[at]
        if run_bytes == size:
            del self._free[at]
        else:
            self._free[at] = offset + size, run_bytes - size
        self.used_bytes += size
        if offset + size > self.peak_end_bytes:
            self.peak_end_bytes = offset + size
        return Extent(offset, size)

    def fits(self, size_bytes: int) -> bool:
        """Whether `allocate` would succeed."""
        return self._find(self.round_up(size_bytes)) is not None

    def missing_bytes(self, size_bytes: int) -> int:
        """How far the range must grow for ``size_bytes``, given the free run at its end."""
        size = self.round_up(size_bytes)
        if self._free:
            offset, run_bytes = self._free[-1]
            if offset + run_bytes == self.capacity_bytes:
                size -= run_bytes
        return size

    def free(self, extent: Extent) -> None:
        offset, size = extent
        self.used_bytes -= size
        self._insert(offset, size)

    def _find(self, size: int) -> int | None:
        free = self._free
        last = len(free) - 1  # only the last run can reach the end
        if last > 0:
            best, best_bytes = None, self.capacity_bytes + 1
            for at, (offset, run_bytes) in enumerate(free):
                if size <= run_bytes < best_bytes and offset + run_bytes != self.capacity_bytes:
                    best, best_bytes = at, run_bytes
            if best is not None:
                return best
        return last if free and free[last][1] >= size else None

    def _insert(self, offset: int, size: int) -> None:
        free = self._free
        at = bisect.bisect_left(free, (offset, size))
        if at < len(free) and free[at][0] == offset + size:
            size += free[at][1]
            del free[at]
        if at > 0:
            before, before_bytes = free[at - 1]
            if before + before_bytes == offset:
                free[at - 1] = before, before_bytes + size
                return
        free.insert(at, (offset, size))
