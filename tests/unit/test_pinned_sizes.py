"""What the host store takes from the system: exact sizes, page-locked, and all given back."""

from __future__ import annotations

import errno
import gc
import mmap
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
    assert store.peak_requested_bytes == sum(sizes) == 25000 + 61440 + 100
    assert store.capacity_bytes == locks.size_bytes == 61440 + 61440
    assert store.efficiency == pytest.approx(86540 / 122880)
    step(store, sizes)
    assert store.capacity_bytes == locks.size_bytes == (12 + 10) * 4096
    assert store.efficiency == pytest.approx(86540 / 90112)
    assert store.peak_requested_bytes == 86540


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
    assert store.efficiency > 0.98


def test_an_empty_store_is_exact() -> None:
    assert PinnedStore(CpuDevice()).efficiency == 1.0


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


def test_a_smaller_step_changes_nothing() -> None:
    device, locks = locking()
    store = PinnedStore(device, slab_bytes=64 * 1024)
    step(store, [8 * 1024] * 11)
    step(store, [8 * 1024])
    done = list(locks.log)
    for count in (1, 11, 3, 11):
        step(store, [8 * 1024] * count)
    assert locks.log == done
    assert store.capacity_bytes == 88 * 1024


@pytest.mark.parametrize("seed", range(8))
def test_steps_of_many_sizes_stay_near_the_largest(seed: int) -> None:
    """Slabs made for one step rarely fit the next; one for all takes their place."""
    random = Random(seed)
    device, locks = locking()
    store = PinnedStore(device, slab_bytes=64 * 1024)
    largest = 0
    for _ in range(60):
        sizes = [random.randrange(1, 200) * 512] * random.randrange(1, 6)
        largest = max(largest, sum(sizes))
        step(store, sizes)
        begin_step(store)
        assert store.capacity_bytes <= (largest + 4096) / 0.9
    assert locks.log.count("pin") < 60
    for turn in range(6):
        for count in (5, 3, 1, 4):
            step(store, [largest // count // 512 * 512] * count)
        if not turn:
            done = list(locks.log)
    assert locks.log == done


def test_two_steps_in_turn_do_not_take_each_others_slabs() -> None:
    """Six of 32 KiB, then two of 96: neither fits the other's slabs, and both need 192 KiB."""
    device, locks = locking()
    store = PinnedStore(device, slab_bytes=64 * 1024)
    steps = ([32 * 1024] * 6, [96 * 1024] * 2)
    for turn in range(2):
        step(store, steps[turn])
    begin_step(store)
    assert store.capacity_bytes == 192 * 1024
    done = list(locks.log)
    for turn in range(20):
        step(store, steps[turn % 2])
    assert locks.log == done


def test_growth_for_one_step_cuts_nothing_off_that_another_needs() -> None:
    """In KiB: one step is a tensor of 128. The other reaches 120, 60 of them free again in a hole.

    So 64 need a slab of their own, and the first must not be cut to 120.
    """
    device, locks = locking()
    store = PinnedStore(device, slab_bytes=256 * 1024)

    def one_with_a_hole() -> None:
        hole, *slots = [offload(store, random_bytes(size * 1024)) for size in (60, 8, 52)]
        store.drop(hole)
        for slot in (*slots, offload(store, random_bytes(64 * 1024))):
            store.drop(slot)

    step(store, [128 * 1024])
    one_with_a_hole()
    begin_step(store)
    assert sorted(locks.locked.values()) == [64 * 1024, 128 * 1024]
    done = list(locks.log)
    for _ in range(5):
        step(store, [128 * 1024])
        one_with_a_hole()
    assert locks.log == done


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
    assert device.trace == [("d2h", 0)]
    store.drop(slot)
    store.close()
    assert locks.log[4:] == ["finish", "unlock"]


def test_a_trim_that_gets_nothing_back_leaves_it_to_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    store = PinnedStore(CpuDevice(), slab_bytes=64 * 1024)
    step(store, [8 * 1024])
    take, failures = mmap.mmap, [OSError(errno.ENOMEM, "overcommitted")]

    def refuse_once(*arguments: Any, **keywords: Any) -> mmap.mmap:
        if failures:
            raise failures.pop()
        return take(*arguments, **keywords)

    monkeypatch.setattr(mmap, "mmap", refuse_once)
    step(store, [8 * 1024])
    assert not failures
    assert store.capacity_bytes == 64 * 1024


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


@pytest.mark.parametrize("seed", range(5))
def test_a_device_that_refuses_now_and_then(seed: int) -> None:
    device = SimulatedDevice(seed)
    device.pins_host_memory = True
    device.refusals = 0.8
    store = PinnedStore(device, slab_bytes=8 * 1024)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for count in (2, 5, 5, 9):
            sources = [random_bytes(3000, seed=number) for number in range(count)]
            slots = [store.offload(s, device.compute_stream().record()) for s in sources]
            for slot, source in zip(slots, sources, strict=True):
                buffer, reloaded = store.reload(slot)
                reloaded.synchronize()
                assert torch.equal(buffer, source)
                store.drop(slot)
    assert len(caught) == 1
    store.close()
    assert device.pinned_bytes == 0


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
    device.pins_host_memory = True
    device.pin = lambda *_: None
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


def test_weights_in_torchs_memory_stay_within_the_budget(torchs_memory: list[int]) -> None:
    """100 KiB take 128 of torch's: they fit into a budget of 128 KiB, and into none below."""
    device = CpuDevice()
    device.pins_host_memory = True
    device.pin = lambda *_: None
    store = PinnedStore(device, budget_bytes=120 * 1024)
    with pytest.raises(StoreFullError, match=r"128\.0 KiB .*host_budget of 120\.0 KiB"):
        store.allocate_resting(100 * 1024)
    assert store.host_capacity_bytes == 0
    assert not torchs_memory  # not even for a moment, because torch keeps what it has page-locked
    store = PinnedStore(device, budget_bytes=128 * 1024)
    store.reserve(100 * 1024)
    slot = store.allocate_resting(100 * 1024, reserved=True)
    assert store.host_capacity_bytes == 128 * 1024
    store.drop(slot)
    assert store.host_capacity_bytes == 0
    assert torchs_memory == [128 * 1024]


def test_torchs_refusal_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice()
    device.pins_host_memory = True
    device.pin = lambda *_: None
    empty = torch.empty

    def refuse(size: int, *, pin_memory: bool = False, **other: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("refused on purpose")
        return empty(size, **other)

    monkeypatch.setattr(torch, "empty", refuse)
    store = PinnedStore(device, slab_bytes=64 * 1024)
    with pytest.warns(RuntimeWarning, match="refused on purpose") as caught:
        step(store, [20 * 1024] * 10)
    assert len(caught) == 1


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
