"""What the host store takes from the system: exact sizes, page-locked, and all given back."""

from __future__ import annotations

import gc
import threading
import warnings
from random import Random
from typing import Any

import pytest
import torch

from ebbtide.devices import CpuDevice, SimulatedDevice
from ebbtide.errors import StoreFullError
from ebbtide.stores import PinnedStore
from page_locks import PageLocks, is_mapped, step
from store_bench import WAIT_S, now, offload, random_bytes, reload

MIB = 2**20


def locking(refuses: bool = False) -> tuple[CpuDevice, PageLocks]:
    device = CpuDevice()
    return device, PageLocks(device, refuses)


# Exact sizes


def begin_step(store: PinnedStore) -> None:
    """Trim: only the first offload of a step does."""
    store.drop(offload(store, random_bytes(1)))


def test_after_the_first_step_the_store_holds_what_a_step_needs() -> None:
    """Three sizes; 5000 bytes take 5120, a multiple of 512; slabs of about 64 KiB.

    The first slab is for tensors of 5120 bytes: 12 of them, 61440 bytes, 15 pages. It takes 5120
    (5 times), and then 20480 (once): 46080. The next 20480 do not fit: a slab of three of them,
    61440, takes two. 100 bytes go to the first slab: 46080 + 512 = 46592, 12 pages (49152 bytes);
    the second needs 2 x 20480 = 10 pages.
    """
    sizes = [5000] * 5 + [20480] * 3 + [100]
    device, locks = locking()
    store = PinnedStore(device, slab_bytes=64 * 1024)
    step(store, sizes)
    assert store.capacity_bytes == locks.size_bytes == 61440 + 61440
    step(store, sizes)
    assert store.capacity_bytes == locks.size_bytes == (12 + 10) * 4096


def test_large_tensors_lose_less_than_two_percent() -> None:
    """24 tensors of 3.2 MB: five in each slab of 16 MiB, four in the last; then 24, in pages.

    3_200_000 is a multiple of 512; 5 x 3_200_000 are 3906.25 pages, 4 x 3_200_000 are 3125.
    """
    sizes = [3_200_000] * 24
    store = PinnedStore(CpuDevice(), slab_bytes=16 * MIB)
    step(store, sizes)
    assert store.capacity_bytes == 5 * 3907 * 4096
    step(store, sizes)
    assert store.capacity_bytes == (4 * 3907 + 3125) * 4096 == 76_812_288
    assert sum(sizes) > 0.98 * store.capacity_bytes


def test_equal_steps_neither_grow_nor_trim_again() -> None:
    """Slabs of 64 KiB: three of 20 KiB; two of 30 KiB; 100 KiB.

    The trim takes two of them anew, 40 and 30 KiB; the others are full.
    """
    sizes = [20 * 1024] * 2 + [30 * 1024] + [100 * 1024]
    device, locks = locking()
    store = PinnedStore(device, slab_bytes=64 * 1024)
    step(store, sizes)
    assert locks.log == ["pin"] * 3
    step(store, sizes)
    assert sorted(locks.locked.values()) == [size * 1024 for size in (32, 40, 100)]
    done = list(locks.log)
    assert done == ["pin"] * 3 + ["finish"] + ["unlock"] * 2 + ["pin"] * 2
    for _ in range(20):
        step(store, sizes)
    assert locks.log == done


@pytest.mark.parametrize("seed", range(8))
def test_a_step_fits_where_it_fitted_before(seed: int) -> None:
    """Whatever is dropped in between: the second step finds the same extents."""
    random = Random(seed)
    sizes = [random.randrange(1, 40_000) for _ in range(60)]
    drops = [random.randrange(100) for _ in range(60)]
    device, locks = locking()
    store = PinnedStore(device, slab_bytes=64 * 1024)

    def run() -> list[int]:
        live, offsets = [], []
        for size, drop in zip(sizes, drops, strict=True):
            live.append(offload(store, random_bytes(size)))
            offsets.append(live[-1].extent.offset_bytes)
            if drop < 40:
                store.drop(live.pop(drop % len(live)))
        for slot in live:
            store.drop(slot)
        return offsets

    run()
    begin_step(store)
    # Where one slab took the place of all, it may need another, once.
    run()
    begin_step(store)
    done, offsets = list(locks.log), run()
    for _ in range(3):
        assert run() == offsets
    assert locks.log == done


def test_a_larger_step_grows_by_its_tail_and_is_trimmed_again() -> None:
    """64 KiB, then 64 + 24: the first slab stays, the second is cut from 64 to 24 KiB."""
    device, locks = locking()
    store = PinnedStore(device, slab_bytes=64 * 1024)
    step(store, [8 * 1024] * 8)
    first = set(locks.locked)
    step(store, [8 * 1024] * 11)
    assert store.capacity_bytes == 128 * 1024
    step(store, [8 * 1024] * 11)
    assert store.capacity_bytes == locks.size_bytes == 88 * 1024
    assert first < set(locks.locked)


def test_nothing_is_trimmed_while_a_slot_is_held() -> None:
    device, locks = locking()
    store = PinnedStore(device, slab_bytes=64 * 1024)
    kept = offload(store, random_bytes(8 * 1024, seed=3))
    step(store, [8 * 1024] * 2)
    begin_step(store)
    assert locks.log == ["pin"]
    assert torch.equal(reload(store, kept), random_bytes(8 * 1024, seed=3))
    store.drop(kept)
    begin_step(store)
    assert store.capacity_bytes == 24 * 1024


def test_a_trim_waits_for_the_readers_of_the_step_before() -> None:
    """Six of 32 KiB, then two of 96, merged into 192 KiB, though the last reader is late."""
    device, _ = locking()
    store = PinnedStore(device, slab_bytes=64 * 1024)
    step(store, [32 * 1024] * 6)
    slots = [offload(store, random_bytes(96 * 1024, seed=seed)) for seed in (1, 2)]
    assert store.capacity_bytes == 2 * 192 * 1024
    go_on = threading.Event()
    device._h2d.submit(lambda: go_on.wait(WAIT_S) and None)
    buffers = [store.reload(slot)[0] for slot in slots]
    for slot in slots:
        store.drop(slot)
    threading.Timer(0.05, go_on.set).start()
    begin_step(store)
    assert store.capacity_bytes == 192 * 1024
    for buffer, seed in zip(buffers, (1, 2), strict=True):
        assert torch.equal(buffer, random_bytes(96 * 1024, seed=seed))


def test_memory_is_given_back_after_the_copies_that_nobody_wants() -> None:
    """They run when the simulated device is made to finish them, else it raises `RaceError`."""
    device = SimulatedDevice(0, eagerness=0.0)
    locks = PageLocks(device)
    store = PinnedStore(device, slab_bytes=64 * 1024)
    source = random_bytes(1000)
    store.drop(store.offload(source, device.compute_stream().record()))
    slot = store.offload(source, device.compute_stream().record())
    assert locks.log == ["pin", "finish", "unlock", "pin"]
    assert store.capacity_bytes == 4096
    assert device.trace == ["d2h"]
    store.drop(slot)
    store.close()
    assert locks.log[4:] == ["finish", "unlock"]


# Page-locks


def test_a_refusal_is_one_warning_and_the_same_bytes() -> None:
    device, locks = locking(refuses=True)
    store = PinnedStore(device, slab_bytes=64 * 1024)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(store, [20 * 1024] * 10)
    (warning,) = caught
    assert warning.category is RuntimeWarning
    for part in (
        "60.0 KiB",
        "refused on purpose",
        "no longer overlap",
        "ulimit -l",
        "free RAM",
        "host_budget",
    ):
        assert part in str(warning.message)
    assert store.capacity_bytes == 200 * 1024
    assert not locks.locked
    # What is refused now may be granted later.
    locks.refuses = False
    step(store, [20 * 1024] * 13)
    assert locks.size_bytes == 60 * 1024
    store.close()
    assert not locks.locked


@pytest.fixture
def torchs_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device for which only torch can page-lock; the sizes that torch is asked for."""
    empty, asked = torch.empty, []

    def pretend(size: int, *, pin_memory: bool = False, **other: Any) -> torch.Tensor:
        if pin_memory:
            asked.append(size)
        return empty(size, **other)

    monkeypatch.setattr(torch, "empty", pretend)
    return asked


def test_torchs_own_allocator_is_asked_for_powers_of_two(torchs_memory: list[int]) -> None:
    """Slabs of 64 KiB; 100 KiB need one of 128. They are not trimmed: torch would keep them."""
    device = CpuDevice()
    device.pins_host_memory = device.pins_by_torch = True
    store = PinnedStore(device, budget_bytes=300 * 1024, slab_bytes=70 * 1024)
    for _ in range(3):
        step(store, [20 * 1024] * 4 + [100 * 1024])
    assert torchs_memory == [64 * 1024, 64 * 1024, 128 * 1024]
    assert store.capacity_bytes == 256 * 1024
    kept = offload(store, random_bytes(100 * 1024))
    # Of the budget 44 KiB are left: a slab of 32.
    assert store.has_room(32 * 1024)
    assert not store.has_room(65 * 1024)
    with pytest.raises(StoreFullError, match=r"next 128\.0 KiB"):
        store.offload(random_bytes(65 * 1024), now())
    store.drop(kept)
    store.close()
    assert store.capacity_bytes == 0


def test_room_set_aside_is_that_of_torchs_blocks(torchs_memory: list[int]) -> None:
    """9 KiB take 16 KiB: a smaller budget says so before anything counts on them."""
    device = CpuDevice()
    device.pins_host_memory = device.pins_by_torch = True
    with pytest.raises(StoreFullError):
        PinnedStore(device, budget_bytes=12 * 1024).reserve(9 * 1024)
    store = PinnedStore(device, budget_bytes=16 * 1024)
    store.reserve(9 * 1024)
    assert not store.has_room(1)
    slot = store.allocate_resting(9 * 1024, reserved=True)
    assert torchs_memory == [16 * 1024]
    assert store.host_capacity_bytes == 16 * 1024
    store.drop(slot)
    assert store.has_room(1)


# Ends


def test_close_unlocks_and_unmaps_all() -> None:
    device, locks = locking()
    store = PinnedStore(device, slab_bytes=64 * 1024)
    slots = [offload(store, random_bytes(40 * 1024)) for _ in range(3)]
    addresses = list(locks.locked)
    assert len(addresses) == 3
    store.close()
    assert locks.log == ["pin"] * 3 + ["finish"] + ["unlock"] * 3
    assert not any(is_mapped(address, 40 * 1024) for address in addresses)
    store.close()
    for slot in slots:
        store.drop(slot)
    assert locks.log.count("unlock") == 3


def test_a_store_that_is_only_collected_unlocks_all() -> None:
    """`PageLocks` fails if that is after the unmapping, or twice."""
    device, locks = locking()
    store = PinnedStore(device, slab_bytes=64 * 1024)
    step(store, [40 * 1024] * 3)
    del store
    gc.collect()
    locks.wait_until_unlocked()
    assert locks.log.count("unlock") == locks.log.count("pin")
