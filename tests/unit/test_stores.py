"""What every store does, whatever tier it keeps bytes in."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ebbtide.devices import CpuDevice, LaneEvent
from ebbtide.stores import DiskStore, PinnedStore
from store_bench import now, offload, random_bytes, reload, wait_for

PAGE, MIB = 2**12, 2**20


@pytest.fixture(params=["disk, mapped", "disk, read", "host"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DiskStore | PinnedStore]:
    """A reload from disk maps the file, or reads it where no mapping is to be had."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    if request.param == "disk, read":
        monkeypatch.setattr("ebbtide.stores.disk.mmap.mmap", refuse)
    store = PinnedStore(CpuDevice()) if request.param == "host" else DiskStore(tmp_path)
    yield store
    store.close()


def test_many_slots_at_once_do_not_disturb_each_other(store: DiskStore | PinnedStore) -> None:
    sources = [random_bytes(1 + 977 * number, seed=number) for number in range(60)]
    slots = [store.offload(source, now()) for source in sources]
    in_another_order = [(number * 37) % 60 for number in range(60)]
    loading = {number: store.reload(slots[number]) for number in in_another_order}
    for number, (buffer, reloaded) in loading.items():
        wait_for(reloaded)
        assert torch.equal(buffer, sources[number]), number


def test_a_copy_waits_for_its_source_and_a_reload_for_the_copy(
    store: DiskStore | PinnedStore, ready: LaneEvent
) -> None:
    source = torch.zeros(3 * PAGE, dtype=torch.uint8)
    slot = store.offload(source, ready)
    buffer, reloaded = store.reload(slot)
    assert not slot.offloaded.query()
    assert not reloaded.query()
    source.fill_(9)  # the last of the kernels that `ready` stands for
    ready.finish()
    wait_for(reloaded)
    assert slot.offloaded.query()
    assert buffer.eq(9).all()


def test_writing_into_a_reloaded_buffer_does_not_change_the_slot(
    store: DiskStore | PinnedStore,
) -> None:
    source = random_bytes(2 * PAGE + 3)
    slot = offload(store, source.clone())
    buffer = reload(store, slot)
    buffer.fill_(7)
    again = reload(store, slot)
    assert torch.equal(again, source)
    assert buffer.eq(7).all()
    again.zero_()
    assert torch.equal(reload(store, slot), source)


def test_dropped_extents_are_reused(store: DiskStore | PinnedStore) -> None:
    """20 rounds of 8 x 1 MiB take no more than the least by which a file grows."""
    source = random_bytes(MIB)
    for _ in range(20):
        slots = [offload(store, source) for _ in range(8)]
        assert store.used_bytes == 8 * MIB
        for slot in slots:
            store.drop(slot)
        assert store.used_bytes == 0
    assert store.capacity_bytes <= 64 * MIB


def test_a_copy_down_that_nobody_wants_any_more_does_no_harm(
    store: DiskStore | PinnedStore, ready: LaneEvent
) -> None:
    """Its slot is dropped while it waits. Whoever writes to that extent next writes after it."""
    kept = store.offload(random_bytes(PAGE), now())  # else a store on the host were at rest
    unwanted = store.offload(random_bytes(PAGE, seed=1), ready)
    store.drop(unwanted)
    sources = [random_bytes(PAGE, seed=seed) for seed in (2, 3)]
    slots = [store.offload(source, now()) for source in sources]
    ready.finish()
    for slot, source in zip(slots, sources, strict=True):
        wait_for(slot.offloaded)
        assert torch.equal(reload(store, slot), source)
        store.drop(slot)
    assert unwanted.offloaded.query()
    store.drop(kept)
    assert store.used_bytes == 0
