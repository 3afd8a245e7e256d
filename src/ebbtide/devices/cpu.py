"""The CPU as a device: kernels run in the calling thread, copies run in worker threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch

from ebbtide.devices.device import (
    AbstractDevice,
    AbstractEvent,
    AbstractLane,
    AbstractStream,
    HostMoment,
)
from ebbtide.devices.lanes import WorkLane, defer


@final
class _HostStream(AbstractStream):
    """The compute stream: the calling thread, where all queued work has already run."""

    def record(self) -> AbstractEvent:
        return HostMoment()

    def wait(self, event: AbstractEvent) -> None:
        event.synchronize()


@final
class CpuDevice(AbstractDevice):
    """The CPU. Device memory is RAM, and each copy stream is a worker thread."""

    pins_host_memory = False
    computes_on_host = True

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._compute = _HostStream()
        self._d2h = WorkLane("ebbtide-d2h", "d2h")
        self._h2d = WorkLane("ebbtide-h2d", "h2d")

    def compute_stream(self) -> AbstractStream:
        return self._compute

    def allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def pin(self, address: int, size_bytes: int) -> Callable[[], None]:  # noqa: ARG002
        return lambda: None  # worker threads can copy from any memory

    def copy_down(
        self, target: torch.Tensor, source: torch.Tensor, *after: AbstractEvent
    ) -> AbstractEvent:
        return _copy_in(self._d2h, target, source, after)

    def copy_up(
        self, target: torch.Tensor, source: torch.Tensor, *after: AbstractEvent
    ) -> AbstractEvent:
        return _copy_in(self._h2d, target, source, after)

    def lane(self, name: str, lane: str) -> AbstractLane:
        return WorkLane(name, lane)

    def defer(self, work: Callable[[], None]) -> None:
        defer(work)

    def finish_copies(self) -> None:
        for lane in (self._d2h, self._h2d):
            lane.submit(lambda: None).synchronize()


def _copy_in(
    lane: WorkLane, target: torch.Tensor, source: torch.Tensor, after: tuple[AbstractEvent, ...]
) -> AbstractEvent:
    def copy() -> None:
        for event in after:
            event.synchronize()
        target.copy_(source)

    return lane.submit(copy)
