"""What every store does: take bytes down, give them back, forget them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ebbtide.devices.device import AbstractEvent
from ebbtide.stores.extents import Extent


@dataclass(eq=False)
class Slot:
    """Bytes at rest in a store, and the events that guard them.

    Attributes:
        extent: where they are.
        size_bytes: how many of them are the tensor's.
        offloaded: reached when the copy down is complete; until then the source must live.
        tier: where they are, `host` or `disk`.
    """

    extent: Extent
    size_bytes: int
    offloaded: AbstractEvent
    tier: str = "host"


class AbstractStore(ABC):
    """Keeps bytes in a lower tier. Its session calls it from one thread at a time.

    Attributes:
        reads_ahead: whether `read_ahead` does anything.
    """

    reads_ahead: bool = True

    @property
    @abstractmethod
    def capacity_bytes(self) -> int:
        """Bytes taken from the tier, whether in use or kept for the next step."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes in use now, those that wait for their last reader among them."""

    @property
    def host_capacity_bytes(self) -> int:
        """Host memory among `capacity_bytes`."""
        return 0

    @abstractmethod
    def offload(self, source: torch.Tensor, ready: AbstractEvent) -> Slot:
        """Start to copy ``source`` down.

        Args:
            source: device memory that must live, unwritten, until ``slot.offloaded``.
            ready: the event after which ``source`` holds its bytes.

        Shape:
            source: (size_bytes,), uint8.

        Raises:
            StoreFullError: the tier has no room; nothing has been started.
        """

    @abstractmethod
    def reload(self, slot: Slot) -> tuple[torch.Tensor, AbstractEvent]:
        """Start to copy a slot's bytes back up.

        Returns:
            A device buffer and the event after which it holds the bytes. The caller keeps the
            buffer alive until that event, also when nobody wants the bytes any more.

        Shape:
            buffer: (size_bytes,), uint8.
        """

    @abstractmethod
    def read_ahead(self, slot: Slot) -> None:
        """Prepare for a reload that is expected, without taking device memory for it."""

    @abstractmethod
    def drop(self, slot: Slot) -> None:
        """Forget a slot. Its bytes are reused once nothing reads them any more."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back to the tier, once the copies under way are complete."""
