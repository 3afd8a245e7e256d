"""Exact-size extents in a growing range of bytes, reused first where they fit best."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, order=True)
class Extent:
    """A run of bytes: ``[offset_bytes, offset_bytes + size_bytes)``."""

    offset_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


@final
class ExtentAllocator:
    """Hands out aligned extents of ``[0, capacity)`` and merges what comes back.

    Args:
        alignment_bytes: every extent begins and ends on a multiple of this.

    Attributes:
        peak_end_bytes: where the extent ended that reached furthest. The same calls succeed, with
            the same extents, where the range has only that capacity.
    """

    def __init__(self, alignment_bytes: int) -> None:
        self._alignment = alignment_bytes
        self._free: list[Extent] = []  # sorted by offset, no two of them touch
        self.capacity_bytes = 0
        self.used_bytes = 0
        self.peak_end_bytes = 0

    def round_up(self, size_bytes: int) -> int:
        return -(-max(size_bytes, 1) // self._alignment) * self._alignment

    def grow(self, size_bytes: int) -> None:
        """Add ``size_bytes`` (rounded up) at the end of the range."""
        size = self.round_up(size_bytes)
        self._insert(Extent(self.capacity_bytes, size))
        self.capacity_bytes += size

    def allocate(self, size_bytes: int) -> Extent | None:
        """A part of the smallest free run that holds ``size_bytes``; None: the range must grow.

        The run at the end is for what fits nowhere else: how long it is then decides nothing but
        whether it suffices, and what was never reached there can be cut off.
        """
        size = self.round_up(size_bytes)
        run = self._find(size)
        if run is None:
            return None
        at = bisect.bisect_left(self._free, run)
        if run.size_bytes == size:
            del self._free[at]
        else:
            self._free[at] = Extent(run.offset_bytes + size, run.size_bytes - size)
        self.used_bytes += size
        self.peak_end_bytes = max(self.peak_end_bytes, run.offset_bytes + size)
        return Extent(run.offset_bytes, size)

    def fits(self, size_bytes: int) -> bool:
        """Whether `allocate` would succeed."""
        return self._find(self.round_up(size_bytes)) is not None

    def missing_bytes(self, size_bytes: int) -> int:
        """How far the range must grow for ``size_bytes``: a free run at its end counts."""
        size = self.round_up(size_bytes)
        last = self._free[-1] if self._free else None
        if last is not None and last.end_bytes == self.capacity_bytes:
            size -= last.size_bytes
        return size

    def free(self, extent: Extent) -> None:
        self.used_bytes -= extent.size_bytes
        self._insert(extent)

    def _find(self, size: int) -> Extent | None:
        best = None
        for run in self._free:
            fits = run.size_bytes >= size and run.end_bytes != self.capacity_bytes
            if fits and (best is None or run.size_bytes < best.size_bytes):
                best = run
        if best is None and self._free and self._free[-1].size_bytes >= size:
            return self._free[-1]  # only the last run can reach the end
        return best

    def _insert(self, run: Extent) -> None:
        at = bisect.bisect_left(self._free, run)
        offset, end = run.offset_bytes, run.end_bytes
        if at < len(self._free) and self._free[at].offset_bytes == end:
            end = self._free[at].end_bytes
            del self._free[at]
        if at > 0 and self._free[at - 1].end_bytes == offset:
            at -= 1
            offset = self._free[at].offset_bytes
            del self._free[at]
        self._free.insert(at, Extent(offset, end - offset))
