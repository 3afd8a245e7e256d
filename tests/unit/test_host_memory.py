"""Blocks of host memory: exact, touched before they are locked, unlocked before they are gone."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import sys
from collections.abc import Callable

import pytest
import torch

from ebbtide.devices import CpuDevice
from ebbtide.stores import host_memory
from page_locks import PageLocks, is_mapped, kernel_flags, wait_until_unmapped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MIB = 2**20
PAGE = mmap.PAGESIZE


def locking(refuses: bool = False) -> tuple[CpuDevice, PageLocks]:
    device = CpuDevice()
    return device, PageLocks(device, refuses)


def by_torch() -> CpuDevice:
    device = CpuDevice()
    device.pins_host_memory = device.pins_by_torch = True
    return device


def mapped(device: CpuDevice, size_bytes: int) -> host_memory.HostMemory:
    return host_memory.allocate_host_memory(device, size_bytes)


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: mapped(CpuDevice(), 2048).tensor,
        lambda: mapped(by_torch(), 2048).tensor,
        lambda: CpuDevice().allocate(2048),
    ],
)
def test_host_memory_is_the_hosts_under_another_default_device(
    allocate: Callable[[], torch.Tensor],
) -> None:
    with torch.device("meta"):  # as `torch.set_default_device("cuda")` of the whole program
        assert allocate().device == torch.device("cpu")


# Exact, and touched first


def test_a_block_is_as_large_as_asked_for_and_locked_whole() -> None:
    device, locks = locking()
    memory = mapped(device, 3 * MIB + PAGE)
    assert memory.tensor.shape == (3 * MIB + PAGE,)
    assert memory.tensor.dtype is torch.uint8
    assert locks.locked == {memory.tensor.data_ptr(): 3 * MIB + PAGE}
    assert memory.tensor.data_ptr() % PAGE == 0
    assert memory.refusal is None


@pytest.mark.parametrize("size_bytes", [PAGE, 31 * MIB + PAGE, 96 * MIB + PAGE])
@pytest.mark.parametrize("madvise", ["the kernel's", "an old kernel's", "none"])
def test_every_page_is_touched_before_the_lock(
    monkeypatch: pytest.MonkeyPatch, size_bytes: int, madvise: str
) -> None:
    """Of sizes that one thread touches, and several: no page is left over at the end of a share."""

    def refuse(*_: int) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    if madvise != "the kernel's":
        monkeypatch.setattr(host_memory, "_MADVISE", refuse if madvise != "none" else None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    device, locks = locking()
    resident: list[int] = []
    pin = device.pin

    def look(address: int, size_bytes: int) -> object:
        resident.append(_incore(address, size_bytes))
        return pin(address, size_bytes)

    monkeypatch.setattr(device, "pin", look)
    memory = mapped(device, size_bytes)
    assert resident == [size_bytes // PAGE]
    assert memory.tensor.count_nonzero() == 0
    assert locks.size_bytes == size_bytes


def _incore(address: int, size_bytes: int) -> int:
    """Pages that are there, of a range whose neighbours may share its mapping."""
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(address // PAGE * 8)
        entries = file.read(size_bytes // PAGE * 8)
    return sum(bool(entry & 0x80) for entry in entries[7::8])


# Ends


def test_a_block_is_unlocked_once_and_then_unmapped() -> None:
    device, locks = locking()
    memory = mapped(device, MIB)
    address = memory.tensor.data_ptr()
    memory.give_back()
    assert locks.log == ["pin", "unlock"]
    assert not is_mapped(address)
    memory.give_back()
    del memory
    gc.collect()
    assert locks.log == ["pin", "unlock"]


def test_a_block_stays_mapped_while_a_tensor_refers_to_it() -> None:
    device, locks = locking()
    memory = mapped(device, MIB)
    view = memory.tensor.narrow(0, 5, 3)
    address = memory.tensor.data_ptr()
    memory.give_back()
    assert not locks.locked
    assert is_mapped(address)
    assert view.fill_(7).tolist() == [7, 7, 7]
    del view
    assert not is_mapped(address)


def test_a_block_that_is_only_collected_is_unlocked_after_its_copies() -> None:
    """`PageLocks` fails an unlock of what is not mapped any more."""
    device, locks = locking()
    memory = mapped(device, MIB)
    address = memory.tensor.data_ptr()
    del memory
    gc.collect()
    locks.wait_until_unlocked()
    assert locks.log == ["pin", "finish", "unlock"]
    wait_until_unmapped(address)


def test_a_collected_block_with_a_view_is_unlocked_and_the_view_lives() -> None:
    device, locks = locking()
    view = mapped(device, MIB).tensor[:2]
    gc.collect()
    locks.wait_until_unlocked()
    assert view.fill_(7).tolist() == [7, 7]


# Forked children


def test_a_locked_block_is_not_for_children() -> None:
    """A share in it would make the kernel copy all of it for each worker of a data loader."""
    device, locks = locking()
    memory = mapped(device, 8 * MIB)
    assert "dc" in kernel_flags(memory.tensor.data_ptr())  # do not copy on fork
    locks.refuses = True
    pageable = mapped(device, 16 * MIB)
    assert "dc" not in kernel_flags(pageable.tensor.data_ptr())


def test_a_child_neither_unlocks_nor_unmaps(monkeypatch: pytest.MonkeyPatch) -> None:
    device, locks = locking()
    blocks = [mapped(device, MIB), mapped(device, 2 * MIB)]
    addresses = [memory.tensor.data_ptr() for memory in blocks]
    gc.collect()  # what earlier tests left is not this test's
    parent = os.getpid()
    inherited: list[torch.Tensor] = []
    monkeypatch.setattr(host_memory, "_inherited", inherited)
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    blocks.pop().give_back()
    del blocks
    gc.collect()
    assert locks.log == ["pin", "pin"]
    assert {tensor.data_ptr() for tensor in inherited} >= set(addresses)


# Refusals, and torch's own allocator


def test_torchs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, asked = torch.empty, []

    def pretend(size: int, *, pin_memory: bool = False, **other: object) -> torch.Tensor:
        asked.append((size, pin_memory))
        return empty(size, **other)

    monkeypatch.setattr(torch, "empty", pretend)
    memory = mapped(by_torch(), 5000)
    assert asked == [(8192, True)]
    assert memory.refusal is None
    assert memory.tensor.shape == (8192,)
    memory.give_back()


@pytest.mark.parametrize(("more_bytes", "gives_way"), [(0, False), (1, True)])
def test_what_is_left_is_given_back_only_if_something_does_not_fit_beside_it(
    more_bytes: int, gives_way: bool
) -> None:
    class User:
        leftover_bytes = 3 * PAGE
        gave_way = False

        def give_way(self) -> None:
            self.gave_way = True

    budget, user = host_memory.HostBudget(8 * PAGE), User()
    budget.leftover_users.add(user)
    budget.make_room(5 * PAGE + more_bytes)
    assert user.gave_way is gives_way
