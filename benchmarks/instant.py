"""A device whose copies take no time because they move nothing.

Only the work of the host remains, so that it can be measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

import torch

from ebbtide.devices.device import (
    AbstractDevice,
    AbstractEvent,
    AbstractLane,
    AbstractStream,
    Origin,
)
from ebbtide.devices.lanes import WorkLane


@final
class _Reached(AbstractEvent):
    __slots__ = ("_time_s",)

    def __init__(self) -> None:
        self._time_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def since(self, origin: Origin) -> float:
        return self._time_s - origin.host_s


@final
class _Stream(AbstractStream):
    def record(self) -> AbstractEvent:
        return _Reached()

    def wait(self, event: AbstractEvent) -> None:
        pass


@final
class InstantDevice(AbstractDevice):
    """A CPU device that copies nothing, so training on it gives wrong results."""

    pins_host_memory = False

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._stream = _Stream()

    def moment(self) -> Origin:
        return Origin(_Reached(), time.perf_counter())

    def compute_stream(self) -> AbstractStream:
        return self._stream

    def allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def pin(self, address: int, size_bytes: int) -> Callable[[], None]:  # noqa: ARG002
        return lambda: None

    def copy_down(
        self,
        target: torch.Tensor,  # noqa: ARG002
        source: torch.Tensor,  # noqa: ARG002
        *after: AbstractEvent,  # noqa: ARG002
    ) -> AbstractEvent:
        return _Reached()

    def copy_up(
        self,
        target: torch.Tensor,  # noqa: ARG002
        source: torch.Tensor,  # noqa: ARG002
        *after: AbstractEvent,  # noqa: ARG002
    ) -> AbstractEvent:
        return _Reached()

    def lane(self, name: str, lane: str) -> AbstractLane:
        return WorkLane(name, lane)

    def defer(self, work: Callable[[], None]) -> None:
        work()

    def finish_copies(self) -> None:
        pass
