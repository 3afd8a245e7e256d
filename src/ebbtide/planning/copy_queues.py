"""The link between the device and the tier below, in virtual time."""

from __future__ import annotations

import math
from collections import deque
from typing import final

from ebbtide.planning.hardware import Hardware


@final
class Copy:
    """One copy on the link.

    Args:
        ready_s: when it may start.
        latency_s: seconds that it takes beside its bytes.
        size_bytes: its bytes.

    Attributes:
        end_s: when it has ended; infinity until that is known.
    """

    __slots__ = ("bytes_left", "end_s", "latency_left_s", "ready_s")

    def __init__(self, ready_s: float, latency_s: float, size_bytes: int) -> None:
        self.ready_s = ready_s
        self.latency_left_s = latency_s
        self.bytes_left = float(size_bytes)
        self.end_s = math.inf


@final
class CopyQueues:
    """Two queues of copies, one for each direction, which share the bandwidth of both ways.

    Each queue runs in order. While copies run in both directions and the link cannot give each its
    own bandwidth, both are slowed down by the same factor.

    Args:
        hardware: has the bandwidths and the latency.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._latency_s = hardware.link_latency_s
        self._alone = (hardware.d2h_bytes_per_s, hardware.h2d_bytes_per_s)
        shared = min(1.0, hardware.duplex_bytes_per_s / sum(self._alone))
        self._together = (self._alone[0] * shared, self._alone[1] * shared)
        self._queues: tuple[deque[Copy], deque[Copy]] = (deque(), deque())
        self._now_s = 0.0

    def offload(self, now_s: float, size_bytes: int) -> Copy:
        """Queue a copy down that may start now."""
        return self._enqueue(0, now_s, size_bytes)

    def reload(self, now_s: float, size_bytes: int) -> Copy:
        """Queue a copy up that may start now."""
        return self._enqueue(1, now_s, size_bytes)

    def has_ended(self, copy: Copy, now_s: float) -> bool:
        """Whether a copy has ended by now, which must not be earlier than in any call before."""
        self._run_until(now_s)
        return copy.end_s <= now_s

    def wait(self, copy: Copy, now_s: float) -> float:
        """Return when a copy has ended, or now if it has. Nothing else is queued until then."""
        self._run_until(now_s)
        while copy.end_s == math.inf:
            self._run_once(math.inf)
        return max(now_s, copy.end_s)

    def _enqueue(self, way: int, now_s: float, size_bytes: int) -> Copy:
        self._run_until(now_s)
        copy = Copy(now_s, self._latency_s, size_bytes)
        self._queues[way].append(copy)
        return copy

    def _run_until(self, time_s: float) -> None:
        down, up = self._queues
        while self._now_s < time_s and (down or up):
            self._run_once(time_s)
        self._now_s = max(self._now_s, time_s)

    def _run_once(self, limit_s: float) -> None:
        """Run to the next moment at which a copy ends or its bytes begin to move."""
        heads = [queue[0] if queue else None for queue in self._queues]
        moving = [head is not None and head.latency_left_s <= 0 for head in heads]
        rates = self._together if all(moving) else self._alone
        run_s = limit_s - self._now_s
        for head, rate in zip(heads, rates, strict=True):
            if head is not None:
                left_s = head.latency_left_s
                run_s = min(run_s, left_s if left_s > 0 else head.bytes_left / rate)
        begin_s = self._now_s
        self._now_s = begin_s + run_s
        for queue, head, rate in zip(self._queues, heads, rates, strict=True):
            if head is None:
                continue
            if head.latency_left_s > 0:
                head.latency_left_s -= run_s
                if head.latency_left_s < 1e-15:
                    head.latency_left_s = 0.0
            else:
                head.bytes_left -= rate * run_s
            if head.latency_left_s <= 0 and head.bytes_left < 1e-3:
                head.end_s = self._now_s
                queue.popleft()
