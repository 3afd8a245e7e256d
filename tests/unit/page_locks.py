"""For tests of host memory: training steps, a device that page-locks, what the system says."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import torch

from ebbtide.devices import AbstractDevice
from ebbtide.stores import PinnedStore
from store_bench import offload, random_bytes, reload
from waiting import wait_until


class PageLocks:
    """What a device has page-locked. It goes on as it was, but wants page-locked memory.

    Args:
        device: any.
        refuses: whether the system refuses the next block.

    Attributes:
        locked: address and size in bytes of each block.
        log: `pin`, `unlock` and `finish` (of copies), in order.
    """

    def __init__(self, device: AbstractDevice, refuses: bool = False) -> None:
        self.refuses = refuses
        self.locked: dict[int, int] = {}
        self.log: list[str] = []
        self._finish = device.finish_copies
        device.pins_host_memory = True
        device.pin = self._pin
        device.finish_copies = self._finish_copies

    @property
    def size_bytes(self) -> int:
        return sum(self.locked.values())

    def wait_until_unlocked(self) -> None:
        """Wait for blocks that were collected: that is done in a thread of its own."""
        wait_until(lambda: not self.locked, "blocks stayed locked")

    def _pin(self, address: int, size_bytes: int) -> Callable[[], None]:
        self.log.append("pin")
        if self.refuses:
            raise OSError(errno.ENOMEM, "refused on purpose")
        assert address not in self.locked
        assert is_mapped(address, size_bytes)
        self.locked[address] = size_bytes

        def unlock() -> None:
            assert is_mapped(address, size_bytes), "it was unmapped while it was locked"
            del self.locked[address]  # a KeyError when it is unlocked twice
            self.log.append("unlock")

        return unlock

    def _finish_copies(self) -> None:
        self.log.append("finish")
        self._finish()


def wait_until_unmapped(address: int) -> None:
    """Wait until the thread that has unlocked a block has let go of it, too."""
    wait_until(lambda: not is_mapped(address), "the block is still mapped")


def is_mapped(address: int, size_bytes: int = 1) -> bool:
    """Whether all of a range is mapped; mappings that touch may be shown as one."""
    at = address
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= at < end:
            at = end
    return at >= address + size_bytes


def resident_bytes(address: int) -> int:
    """Of the mapping at an address."""
    return int(_smaps(address)["Rss"].split()[0]) * 1024


def kernel_flags(address: int) -> set[str]:
    """The flags of the mapping at an address, as /proc/self/smaps spells them."""
    return set(_smaps(address)["VmFlags"].split())


def _smaps(address: int) -> dict[str, str]:
    facts: dict[str, str] = {}
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in name.split()[0]:
            begin, end = (int(part, 16) for part in name.split()[0].split("-"))
            if found:
                break
            found = begin <= address < end
        elif found:
            facts[name] = value
    return facts


def step(store: PinnedStore, sizes: list[int]) -> None:
    """What a training step does: everything down, then up and away in reverse order."""
    slots = [offload(store, random_bytes(size, seed=size % 97)) for size in sizes]
    for slot, size in zip(reversed(slots), reversed(sizes), strict=True):
        assert torch.equal(reload(store, slot), random_bytes(size, seed=size % 97))
        store.drop(slot)
