"""The host store, with the CPU's copy lanes in place of an accelerator's streams."""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace

import psutil
import pytest
import torch

from ebbtide.devices import CpuDevice, LaneEvent, SimulatedDevice
from ebbtide.errors import StoreFullError
from ebbtide.stores import PinnedStore, Slot
from page_locks import step
from store_bench import WAIT_S, now, offload, random_bytes, reload, wait_for

MIB, GIB = 2**20, 2**30
ALIGNMENT = 512
PAGE = mmap.PAGESIZE
SLAB_BYTES = 256 * MIB  # on a CPU they take no RAM before they are written to


@pytest.fixture
def store() -> Iterator[PinnedStore]:
    store = PinnedStore(CpuDevice())
    yield store
    store.close()


def free_ram(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    memory = SimpleNamespace(available=size_bytes)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


# Round trips


@pytest.mark.parametrize("size_bytes", [1, 7, 511, 512, 513, 4097, 70 * MIB])
def test_bytes_come_back_as_they_were(store: PinnedStore, size_bytes: int) -> None:
    source = random_bytes(size_bytes)
    buffer = reload(store, offload(store, source.clone()))
    assert buffer.dtype is torch.uint8
    assert torch.equal(buffer, source)
    assert store.used_bytes == -(-size_bytes // ALIGNMENT) * ALIGNMENT
    # As many whole tensors as 256 MiB hold, in whole pages.
    tensor_bytes = -(-size_bytes // ALIGNMENT) * ALIGNMENT
    slab_bytes = SLAB_BYTES // tensor_bytes * tensor_bytes
    assert store.capacity_bytes == -(-slab_bytes // PAGE) * PAGE


def test_a_copy_that_fails_is_told_to_whoever_waits_for_it(store: PinnedStore) -> None:
    broken = LaneEvent()
    broken.finish(OSError("on purpose"))
    slot = store.offload(random_bytes(1000), broken)
    wait_for(slot.offloaded)
    assert str(slot.offloaded.failure) == str(broken.failure)
    _, reloaded = store.reload(slot)
    wait_for(reloaded)
    assert str(reloaded.failure) == str(broken.failure)
    store.drop(slot)
    assert store.used_bytes == 0


# Reuse


def test_an_extent_is_overwritten_only_after_it_has_been_read() -> None:
    device = CpuDevice()
    store = PinnedStore(device)
    offload(store, random_bytes(1))  # else the store were at rest
    source = random_bytes(2 * ALIGNMENT)
    slot = offload(store, source.clone())
    go_on = threading.Event()
    device._h2d.submit(lambda: go_on.wait(WAIT_S) and None)
    buffer, reloaded = store.reload(slot)
    store.drop(slot)
    other = store.offload(torch.zeros(2 * ALIGNMENT, dtype=torch.uint8), now())
    assert other.extent == slot.extent
    assert not other.offloaded.query()
    go_on.set()
    wait_for(reloaded)
    wait_for(other.offloaded)
    assert torch.equal(buffer, source)
    assert torch.equal(reload(store, other), torch.zeros(2 * ALIGNMENT, dtype=torch.uint8))


def test_extents_of_several_slabs_go_back_where_they_came_from() -> None:
    """Slabs of about 2 MiB: two tensors of 1 MiB, or one of 3."""
    store = PinnedStore(CpuDevice(), slab_bytes=2 * MIB)
    small, large = random_bytes(MIB), random_bytes(3 * MIB, seed=1)
    sources = (small, large, small)
    slots = [offload(store, source) for source in sources]
    assert store.capacity_bytes == store.used_bytes == (2 + 3) * MIB
    for slot, source in zip(slots, sources, strict=True):
        assert torch.equal(reload(store, slot), source)
    for slot in slots:
        store.drop(slot)
    assert store.used_bytes == 0
    # Each slab is one run again: 3 MiB and 2 MiB fit without a new one.
    again = [offload(store, torch.zeros(size, dtype=torch.uint8)) for size in (3 * MIB, 2 * MIB)]
    assert store.capacity_bytes == (2 + 3) * MIB
    assert [slot.extent.offset_bytes for slot in again] == [0, 0]


def test_the_next_step_reuses_what_the_last_still_reads_behind_its_readers() -> None:
    """Neither does the host wait, nor the store grow, when copies of the last step are queued."""
    device = CpuDevice()
    store = PinnedStore(device, slab_bytes=MIB)
    slots = [offload(store, random_bytes(MIB, seed=seed)) for seed in (0, 1)]
    store.drop(slots[0])
    go_on = threading.Event()
    device._h2d.submit(lambda: go_on.wait(WAIT_S) and None)
    buffer, _ = store.reload(slots[1])
    store.drop(slots[1])
    sources = [random_bytes(MIB, seed=seed) for seed in (2, 3)]
    again = [store.offload(source, now()) for source in sources]
    assert store.capacity_bytes == 2 * MIB
    assert not again[0].offloaded.query()
    go_on.set()
    for slot in again:
        wait_for(slot.offloaded)
    assert torch.equal(buffer, random_bytes(MIB, seed=1))
    for slot, seed in zip(again, (2, 3), strict=True):
        assert torch.equal(reload(store, slot), random_bytes(MIB, seed=seed))


# Free RAM


def test_too_little_free_ram_is_an_error_before_anything_is_taken(
    store: PinnedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 MiB free RAM 95 % may be taken: 19 MiB."""
    free_ram(monkeypatch, 20 * MIB)
    assert not store.has_room(20 * MIB)
    with pytest.raises(StoreFullError) as raised:
        store.offload(random_bytes(20 * MIB), now())
    assert raised.value.errno == errno.ENOMEM
    for figure in ("19.0 MiB of RAM to spare", "next 20.0 MiB", "0 B are taken"):
        assert figure in str(raised.value)
    assert (store.capacity_bytes, store.used_bytes) == (0, 0)
    # With room for less than a slab it is a smaller one: 19 of 1 MiB.
    assert store.has_room(MIB)
    assert torch.equal(reload(store, offload(store, random_bytes(MIB))), random_bytes(MIB))
    assert store.capacity_bytes == 19 * MIB


def test_what_was_saved_before_is_not_lost_when_ram_runs_out(
    store: PinnedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1 GiB free RAM and 256 MiB taken, 95 % may be taken in all: 960 MiB more."""
    kept = offload(store, random_bytes(1000))
    free_ram(monkeypatch, GIB)
    with pytest.raises(
        StoreFullError, match=r"960\.0 MiB of RAM .* 256\.0 MiB are taken.* next 1\.00 GiB"
    ):
        store.offload(torch.empty(GIB + 1, dtype=torch.uint8), now())
    # 262144 tensors of 1024 bytes are 256 MiB to the byte.
    assert (store.capacity_bytes, store.used_bytes) == (SLAB_BYTES, 1024)
    assert torch.equal(reload(store, kept), random_bytes(1000))


def test_what_is_set_aside_for_gradients_is_no_spare_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 MiB, 19 may be taken and 10 are set aside: activations get 9, whatever comes first."""
    store = PinnedStore(CpuDevice())
    free_ram(monkeypatch, 20 * MIB)
    store.reserve(10 * MIB)
    assert not store.has_room(10 * MIB)
    with pytest.raises(StoreFullError, match=r"9\.0 MiB of RAM to spare"):
        store.offload(random_bytes(10 * MIB), now())
    with pytest.raises(StoreFullError):
        store.reserve(10 * MIB)
    store.drop(store.allocate_resting(10 * MIB, reserved=True))
    store.close()


# Budget


def test_the_budget_is_the_most_that_is_taken() -> None:
    """Of 10 MiB and a page: three tensors of 3 MiB are one slab; one of 1 MiB and a page fits."""
    store = PinnedStore(CpuDevice(), budget_bytes=10 * MIB + PAGE + 1)
    slots = [offload(store, random_bytes(3 * MIB, seed=seed)) for seed in range(3)]
    assert store.capacity_bytes == 9 * MIB
    assert not store.has_room(MIB + PAGE + 1)
    with pytest.raises(StoreFullError) as raised:
        store.offload(random_bytes(MIB + PAGE + 1), now())
    assert raised.value.errno == errno.EDQUOT
    for part in ("host_budget allows 10.0 MiB", "9.0 MiB are taken", "next 1.0 MiB", "raise host_"):
        assert part in str(raised.value)
    assert store.has_room(MIB + PAGE)
    slots.append(offload(store, random_bytes(MIB + PAGE, seed=3)))
    assert store.capacity_bytes == 10 * MIB + PAGE
    assert not store.has_room(1)
    for seed, slot in enumerate(slots):
        expected = random_bytes(slot.size_bytes, seed=seed)
        assert torch.equal(reload(store, slot), expected)


def test_a_budget_in_free_slabs_that_are_too_small_is_had_anyway() -> None:
    """Slabs of 2 + 2 MiB are all of the budget, nothing is in use, and 3 MiB come."""
    store = PinnedStore(CpuDevice(), budget_bytes=4 * MIB, slab_bytes=2 * MIB)
    step(store, [2 * MIB, 2 * MIB])
    kept = offload(store, random_bytes(1))
    assert not store.has_room(3 * MIB)
    store.drop(kept)
    assert store.has_room(3 * MIB)
    step(store, [3 * MIB])
    # One slab for the most that was in use at once, so that the first step fits again too.
    assert store.capacity_bytes == 4 * MIB
    step(store, [2 * MIB, 2 * MIB])
    assert store.capacity_bytes == 4 * MIB


@pytest.mark.parametrize("seed", range(5))
def test_has_room_foretells_what_offload_does(seed: int) -> None:
    random = Random(seed)
    store = PinnedStore(SimulatedDevice(seed), budget_bytes=40 * PAGE, slab_bytes=8 * PAGE)
    source = torch.zeros(12 * PAGE, dtype=torch.uint8)
    live: list[Slot] = []
    refused = 0
    for _ in range(400):
        size_bytes = random.randrange(1, 12 * PAGE)
        has_room = store.has_room(size_bytes)
        ready = store._device.compute_stream().record()
        try:
            live.append(store.offload(source[:size_bytes], ready))
        except StoreFullError:
            assert not has_room
            refused += 1
            while live and random.random() < 0.9:
                store.drop(live.pop(random.randrange(len(live))))
        else:
            assert has_room
        assert store.capacity_bytes <= 40 * PAGE
    assert refused


# Ends


def test_close_gives_the_memory_back_once_the_copies_are_complete() -> None:
    store = PinnedStore(CpuDevice())
    source = random_bytes(1000)
    ready = LaneEvent()
    slot = store.offload(source, ready)
    buffer, reloaded = store.reload(slot)
    threading.Timer(0.05, ready.finish).start()
    store.close()
    assert slot.offloaded.query()
    assert reloaded.query()
    assert torch.equal(buffer, source)
    assert (store.capacity_bytes, store.used_bytes) == (0, 0)
    store.close()


def test_a_slot_dropped_after_close_is_no_error() -> None:
    """The last graph can outlive the handle, and with it the slots that it holds."""
    store = PinnedStore(CpuDevice())
    slot = offload(store, random_bytes(1000))
    store.close()
    store.drop(slot)
    assert (store.capacity_bytes, store.used_bytes) == (0, 0)
