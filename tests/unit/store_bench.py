"""What the tests of both stores share."""

from __future__ import annotations

import torch

from ebbtide.devices import AbstractEvent, LaneEvent
from ebbtide.stores import AbstractStore, Slot

WAIT_S = 10.0  # far more than anything here takes; reached only when a test fails


def now() -> LaneEvent:
    event = LaneEvent()
    event.finish()
    return event


def random_bytes(size_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


def wait_for(event: AbstractEvent) -> None:
    """Like `synchronize`, but what never happens fails the test instead of hanging it."""
    assert isinstance(event, LaneEvent)
    assert event._pending.acquire(timeout=WAIT_S)
    event._pending.release()


def offload(store: AbstractStore, source: torch.Tensor) -> Slot:
    slot = store.offload(source, now())
    wait_for(slot.offloaded)
    return slot


def reload(store: AbstractStore, slot: Slot) -> torch.Tensor:
    buffer, reloaded = store.reload(slot)
    wait_for(reloaded)
    reloaded.synchronize()
    return buffer
