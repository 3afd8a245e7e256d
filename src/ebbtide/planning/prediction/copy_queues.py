"""The link between the device and the tier below, in virtual time."""

from __future__ import annotations

import math
from collections import deque
from typing import Final, final

from ebbtide.planning.hardware import Hardware

_NO_TIME_S: Final = 1e-15  # what rounding leaves over of a time
_NO_BYTES: Final = 1e-3


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

    def left_s(self, rate: float) -> float:
        """Return how long it takes until the bytes begin to move, or else until they have."""
        return self.latency_left_s if self.latency_left_s > 0 else self.bytes_left / rate

    def run(self, run_s: float, rate: float) -> bool:
        """Run for no longer than `left_s`. Returns whether the copy has ended."""
        if self.latency_left_s > 0:
            self.latency_left_s -= run_s
            if self.latency_left_s > _NO_TIME_S:
                return False
            self.latency_left_s = 0.0
        else:
            self.bytes_left -= rate * run_s
        return self.bytes_left < _NO_BYTES


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
        down, up = self._queues
        if not up:
            self._run_alone(down, self._alone[0], limit_s)
        elif not down:
            self._run_alone(up, self._alone[1], limit_s)
        else:
            both = down[0].latency_left_s <= 0 and up[0].latency_left_s <= 0
            rates = self._together if both else self._alone
            run_s = min(down[0].left_s(rates[0]), up[0].left_s(rates[1]), limit_s - self._now_s)
            self._now_s += run_s
            for queue, rate in zip(self._queues, rates, strict=True):
                if queue[0].run(run_s, rate):
                    queue.popleft().end_s = self._now_s

    def _run_alone(self, queue: deque[Copy], rate: float, limit_s: float) -> None:
        """Run the first copy of a queue while the other queue is empty."""
        head = queue[0]
        end_s = self._now_s + head.latency_left_s + head.bytes_left / rate
        if end_s <= limit_s:
            head.end_s = self._now_s = end_s
            queue.popleft()
            return
        run_s = limit_s - self._now_s
        latency_s = min(head.latency_left_s, run_s)
        head.latency_left_s -= latency_s
        head.bytes_left = max(0.0, head.bytes_left - rate * (run_s - latency_s))
        self._now_s = limit_s
