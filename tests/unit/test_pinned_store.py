"""The host store, with the CPU's copy lanes in place of an accelerator's streams."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest
import torch

from ebbtide.devices.cpu import CpuDevice, LaneEvent
from ebbtide.errors import StoreFullError
from ebbtide.stores.pinned import PinnedStore
from store_bench import WAIT_S, now, offload, random_bytes, reload, wait_for

MIB, GIB = 2**20, 2**30
ALIGNMENT = 512
SLAB_BYTES = 256 * MIB  # slabs are no smaller; they take no RAM before they are written to


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
    assert store.capacity_bytes == SLAB_BYTES


def test_many_slots_at_once_do_not_disturb_each_other(store: PinnedStore) -> None:
    sources = [random_bytes(1 + 977 * number, seed=number) for number in range(60)]
    slots = [store.offload(source, now()) for source in sources]
    in_another_order = [(number * 37) % 60 for number in range(60)]
    loading = {number: store.reload(slots[number]) for number in in_another_order}
    for number, (buffer, reloaded) in loading.items():
        wait_for(reloaded)
        assert torch.equal(buffer, sources[number]), number


def test_a_reload_asked_for_before_the_copy_down_waits_for_it(
    store: PinnedStore, ready: LaneEvent
) -> None:
    source = random_bytes(1000)
    slot = store.offload(source, ready)
    buffer, reloaded = store.reload(slot)
    assert not slot.offloaded.query()
    assert not reloaded.query()
    ready.finish()
    wait_for(reloaded)
    assert slot.offloaded.query()
    assert torch.equal(buffer, source)


def test_nothing_is_copied_before_the_source_is_ready(store: PinnedStore, ready: LaneEvent) -> None:
    source = torch.zeros(1000, dtype=torch.uint8)
    slot = store.offload(source, ready)
    source.fill_(9)  # the last of the kernels that `ready` stands for
    ready.finish()
    wait_for(slot.offloaded)
    assert reload(store, slot).eq(9).all()


def test_a_reload_is_a_copy_of_its_own(store: PinnedStore) -> None:
    source = random_bytes(1000)
    slot = offload(store, source.clone())
    reload(store, slot).zero_()
    assert torch.equal(reload(store, slot), source)


def test_a_copy_that_fails_is_told_to_whoever_waits_for_it(store: PinnedStore) -> None:
    broken = LaneEvent()
    broken.finish(OSError("on purpose"))
    slot = store.offload(random_bytes(1000), broken)
    wait_for(slot.offloaded)
    assert slot.offloaded.failure is broken.failure
    _, reloaded = store.reload(slot)
    wait_for(reloaded)
    assert reloaded.failure is broken.failure
    store.drop(slot)
    assert store.used_bytes == 0


# Reuse


def test_dropped_extents_are_reused(store: PinnedStore) -> None:
    """100 rounds of 8 x 1 MiB stay within the first slab."""
    source = random_bytes(MIB)
    for _ in range(100):
        slots = [offload(store, source) for _ in range(8)]
        assert store.used_bytes == 8 * MIB
        for slot in slots:
            store.drop(slot)
        assert store.used_bytes == 0
    assert store.capacity_bytes == SLAB_BYTES


def test_a_copy_down_that_nobody_wants_any_more_does_no_harm(
    store: PinnedStore, ready: LaneEvent
) -> None:
    """Its slot is dropped while it waits. Whoever writes to that extent next writes after it."""
    unwanted = store.offload(random_bytes(ALIGNMENT, seed=1), ready)
    store.drop(unwanted)
    sources = [random_bytes(ALIGNMENT, seed=seed) for seed in (2, 3)]
    slots = [store.offload(source, now()) for source in sources]
    ready.finish()
    for slot, source in zip(slots, sources, strict=True):
        wait_for(slot.offloaded)
        assert torch.equal(reload(store, slot), source)
        store.drop(slot)
    assert unwanted.offloaded.query()
    assert store.used_bytes == 0


def test_an_extent_is_not_reused_while_it_is_being_read() -> None:
    device = CpuDevice()
    store = PinnedStore(device)
    source = random_bytes(2 * ALIGNMENT)
    slot = offload(store, source.clone())
    go_on = threading.Event()
    device._h2d.submit(lambda: go_on.wait(WAIT_S) and None)
    buffer, reloaded = store.reload(slot)
    store.drop(slot)
    assert slot.in_use()
    other = offload(store, torch.zeros(2 * ALIGNMENT, dtype=torch.uint8))
    assert other.extent != slot.extent
    go_on.set()
    wait_for(reloaded)
    assert torch.equal(buffer, source)
    # The buffer is a copy and needs the extent no more.
    assert not slot.in_use()
    assert store.used_bytes == 2 * ALIGNMENT


def test_extents_of_several_slabs_go_back_where_they_came_from() -> None:
    """With slabs of 2 MiB or more: 3 MiB need one of 4, the next power of two."""
    store = PinnedStore(CpuDevice(), slab_bytes=2 * MIB)
    small, large = random_bytes(MIB), random_bytes(3 * MIB, seed=1)
    slots = [offload(store, source) for source in (small, large, small, small)]
    # 1 + 1 MiB in the first slab, 3 + 1 in the second.
    assert store.capacity_bytes == store.used_bytes == (2 + 4) * MIB
    for slot, source in zip(slots, (small, large, small, small), strict=True):
        assert torch.equal(reload(store, slot), source)
    for slot in slots:
        store.drop(slot)
    assert store.used_bytes == 0
    # Each slab is one run again: 4 MiB and 2 MiB fit without a new one.
    again = [offload(store, torch.zeros(size, dtype=torch.uint8)) for size in (4 * MIB, 2 * MIB)]
    assert store.capacity_bytes == (2 + 4) * MIB
    assert [slot.extent.offset_bytes for slot in again] == [0, 0]


# Free RAM


def test_too_little_free_ram_is_an_error_before_anything_is_taken(
    store: PinnedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 200 MiB free RAM 95 % may be taken: 190 MiB, and a slab has 256."""
    free_ram(monkeypatch, 200 * MIB)
    with pytest.raises(StoreFullError) as raised:
        store.offload(random_bytes(MIB), now())
    assert raised.value.errno == errno.ENOMEM
    for figure in ("190.0 MiB of RAM to spare", "next 256.0 MiB", "beside 0 B"):
        assert figure in str(raised.value)
    assert "ActivationPolicy(num_layers=...)" in str(raised.value)
    assert (store.capacity_bytes, store.used_bytes) == (0, 0)
    free_ram(monkeypatch, 300 * MIB)  # 285 MiB
    assert torch.equal(reload(store, offload(store, random_bytes(MIB))), random_bytes(MIB))


def test_what_was_saved_before_is_not_lost_when_ram_runs_out(
    store: PinnedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = offload(store, random_bytes(1000))
    free_ram(monkeypatch, 2 * GIB)  # 1.9 GiB of them
    with pytest.raises(StoreFullError, match=r"1\.90 GiB of RAM .* next 2\.00 GiB .* 256\.0 MiB"):
        store.offload(torch.empty(GIB + 1, dtype=torch.uint8), now())
    assert (store.capacity_bytes, store.used_bytes) == (SLAB_BYTES, 1024)
    assert torch.equal(reload(store, kept), random_bytes(1000))


def test_a_slab_that_is_there_needs_no_free_ram(
    store: PinnedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload(store, random_bytes(1000))
    free_ram(monkeypatch, 0)
    assert torch.equal(reload(store, offload(store, random_bytes(MIB))), random_bytes(MIB))


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
