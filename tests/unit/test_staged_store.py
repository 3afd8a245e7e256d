"""Disk below an accelerator, with the CPU's copy lanes in place of an accelerator's streams."""

from __future__ import annotations

import errno
import functools
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ebbtide
from ebbtide.devices import AbstractEvent, CpuDevice, LaneEvent, SimulatedDevice
from ebbtide.errors import PolicyError, StoreFullError
from ebbtide.policy import ActivationPolicy
from ebbtide.stores import (
    AbstractStore,
    PinnedStore,
    Slot,
    StagedDiskStore,
    TieredStore,
    build_store,
)
from engine_bench import EngineBench
from open_files import num_open
from page_locks import PageLocks
from store_bench import now, random_bytes

KIB, MIB = 2**10, 2**20
PAGE = mmap.PAGESIZE
CHUNKS = 8  # each way
CHUNK = 64 * KIB
STAGING = 2 * CHUNKS * CHUNK


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StagedDiskStore]:
    store = StagedDiskStore(CpuDevice(), tmp_path, STAGING)
    yield store
    store.close()


def down(store: AbstractStore, source: torch.Tensor) -> Slot:
    slot = store.offload(source, now())
    slot.offloaded.synchronize()
    return slot


def up(store: AbstractStore, slot: Slot) -> torch.Tensor:
    buffer, reloaded = store.reload(slot)
    reloaded.settled().synchronize()
    return buffer


def push_out(store: AbstractStore) -> None:
    """Let other bytes take every chunk."""
    slots = [down(store, torch.zeros(CHUNK, dtype=torch.uint8)) for _ in range(CHUNKS)]
    for slot in slots:
        store.drop(slot)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of reads from disk from now on."""
    sizes: list[int] = []
    read = os.preadv

    def counted(fd: int, views: list[memoryview], offset: int) -> int:
        sizes.append(sum(map(len, views)))
        return read(fd, views, offset)

    monkeypatch.setattr("ebbtide.stores.disk_file.os.preadv", counted)
    return sizes


def fail_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("ebbtide.stores.disk_file.os.pwrite", refuse)


def finish_writes(store: StagedDiskStore) -> None:
    store._writer.submit(lambda: None).synchronize()


# Round trips


@pytest.mark.parametrize(
    "size_bytes", [1, PAGE + 1, CHUNK, CHUNK + 1, CHUNKS * CHUNK, 3 * CHUNKS * CHUNK + 7]
)
def test_bytes_come_back_as_they_were(store: StagedDiskStore, size_bytes: int) -> None:
    source = random_bytes(size_bytes)
    slot = down(store, source.clone())
    assert torch.equal(up(store, slot), source)
    push_out(store)
    assert torch.equal(up(store, slot), source)
    assert store.used_bytes == -(-size_bytes // PAGE) * PAGE
    store.drop(slot)
    assert store.used_bytes == 0


def test_many_slots_come_back_in_any_order(store: StagedDiskStore) -> None:
    sources = [random_bytes(1 + 9770 * number, seed=number) for number in range(40)]
    slots = [store.offload(source, now()) for source in sources]
    loading = {n: store.reload(slots[n]) for n in ((number * 7) % 40 for number in range(40))}
    for number, (buffer, reloaded) in loading.items():
        reloaded.synchronize()
        assert torch.equal(buffer, sources[number]), number


def test_what_left_last_comes_back_without_the_disk(
    store: StagedDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 pieces for 8 chunks: the first 4 are read from disk, the last 8 are in their chunks."""
    reads = count_reads(monkeypatch)
    source = random_bytes(12 * CHUNK)
    slot = down(store, source)
    assert torch.equal(up(store, slot), source)
    assert reads == 4 * [CHUNK]


def test_the_source_is_free_before_the_disk_has_it(store: StagedDiskStore) -> None:
    gate = threading.Event()
    store._writer.submit(functools.partial(gate.wait, 10))
    source = random_bytes(3 * CHUNK)
    slot = store.offload(source, now())
    slot.offloaded.synchronize()
    expected = source.clone()
    source.zero_()
    gate.set()
    push_out(store)
    assert torch.equal(up(store, slot), expected)


def test_a_dropped_slot_is_not_written(
    store: StagedDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    store._writer.submit(functools.partial(gate.wait, 10))
    fail_writes(monkeypatch)
    store.drop(store.offload(random_bytes(CHUNK), now()))
    gate.set()
    finish_writes(store)
    down(store, random_bytes(1))  # would raise what a write before it had met


# Bad days


def test_short_writes_and_reads_go_on(
    store: StagedDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(
        "ebbtide.stores.disk_file.os.pwrite", lambda fd, view, at: write(fd, view[:5000], at)
    )
    monkeypatch.setattr(
        "ebbtide.stores.disk_file.os.preadv", lambda fd, views, at: read(fd, [views[0][:777]], at)
    )
    source = random_bytes(2 * CHUNK + 5)
    slot = down(store, source)
    push_out(store)
    assert torch.equal(up(store, slot), source)


def test_a_failed_write_loses_nothing_and_is_told_once(
    store: StagedDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random_bytes(CHUNK)
    with monkeypatch.context() as broken:
        fail_writes(broken)
        slot = down(store, source)
        finish_writes(store)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        store.offload(random_bytes(1), now())
    for _ in range(3):
        push_out(store)
    assert torch.equal(up(store, slot), source)


def test_a_disk_that_takes_nothing_raises_instead_of_waiting(
    store: StagedDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = down(store, random_bytes(CHUNK, seed=1))
    with monkeypatch.context() as broken:
        fail_writes(broken)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            store.offload(random_bytes((CHUNKS + 1) * CHUNK), now())
    used_bytes = store.used_bytes
    while store._failures:
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            store.offload(random_bytes(1), now())
    assert store.used_bytes == used_bytes == CHUNK
    source = random_bytes(20 * CHUNK)
    assert torch.equal(up(store, down(store, source)), source)
    assert torch.equal(up(store, kept), random_bytes(CHUNK, seed=1))


def test_a_reload_from_disk_ends_with_its_last_copy(store: StagedDiskStore) -> None:
    slot = down(store, random_bytes(2 * CHUNK))
    push_out(store)
    origin = CpuDevice().origin()
    _, reloaded = store.reload(slot)
    assert reloaded.since(origin) == reloaded.settled().since(origin) > 0


def test_a_failed_read_fails_whoever_waits_for_it(
    store: StagedDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = down(store, random_bytes(2 * CHUNK))
    push_out(store)
    origin = CpuDevice().origin()
    with monkeypatch.context() as broken:
        broken.setattr("ebbtide.stores.disk_file.os.preadv", lambda *_: 0)
        _, reloaded = store.reload(slot)
        with pytest.raises(OSError, match="ended early"):
            reloaded.settled()
    assert reloaded.query()
    assert reloaded.since(origin) >= 0, "it took until the read failed"
    assert isinstance(reloaded.failure, OSError)
    assert torch.equal(up(store, slot), random_bytes(2 * CHUNK))


def test_a_full_disk_says_so_before_anything_is_copied(
    store: StagedDiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr("ebbtide.stores.disk_file.os.posix_fallocate", refuse)
        with pytest.raises(StoreFullError):
            store.offload(random_bytes(CHUNK), now())
    assert torch.equal(up(store, down(store, random_bytes(CHUNK))), random_bytes(CHUNK))


def test_an_offload_waits_for_kernels(store: StagedDiskStore, ready: LaneEvent) -> None:
    source = torch.zeros(2 * CHUNK, dtype=torch.uint8)
    slot = store.offload(source, ready)
    source.fill_(9)  # the last of the kernels that `ready` stands for
    ready.finish()
    push_out(store)
    assert up(store, slot).eq(9).all()


# Ends


def test_close_gives_everything_back(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    device = CpuDevice()
    locks = PageLocks(device)
    store = StagedDiskStore(device, tmp_path, STAGING)
    slot = down(store, random_bytes(20 * CHUNK))
    up(store, slot)
    assert store.host_capacity_bytes == locks.size_bytes == STAGING
    assert num_open(tmp_path) == 1
    store.drop(slot)
    store.close()
    assert locks.size_bytes == store.host_capacity_bytes == 0
    assert num_open(tmp_path) == 0
    del device, store
    fresh = [thread.name for thread in set(threading.enumerate()) - threads]
    assert not [name for name in fresh if name.startswith("ebbtide-disk")]
    assert len(fresh) <= 2  # the device's own lanes end in their time


# Tiers


def tiered(tmp_path: Path, budget_bytes: int) -> TieredStore:
    device = CpuDevice()
    disk = StagedDiskStore(device, tmp_path, STAGING)
    return TieredStore(PinnedStore(device, budget_bytes), disk)


def tiers_of_a_step(store: AbstractStore, sizes: list[int]) -> str:
    """Runs a step and says where each tensor was: `h` or `d`."""
    slots = [down(store, random_bytes(size, seed=n)) for n, size in enumerate(sizes)]
    tiers = "".join(slot.tier[0] for slot in slots)
    for number in reversed(range(len(sizes))):
        expected = random_bytes(sizes[number], seed=number)
        assert torch.equal(up(store, slots[number]), expected), number
        store.drop(slots[number])
    assert store.used_bytes == 0
    return tiers


def test_what_does_not_fit_goes_to_disk_last_and_then_first(tmp_path: Path) -> None:
    """Ten tensors, room for six on the host: four too many."""
    store = tiered(tmp_path, 6 * CHUNK)
    assert tiers_of_a_step(store, 10 * [CHUNK]) == "hhhhhhdddd"
    assert tiers_of_a_step(store, 10 * [CHUNK]) == "ddddhhhhhh"
    assert tiers_of_a_step(store, 10 * [CHUNK]) == "ddddhhhhhh"
    assert store.host_capacity_bytes == 6 * CHUNK + STAGING
    # The next step is known only when it is over: it is taken to be like the last.
    assert tiers_of_a_step(store, 6 * [CHUNK]) == "ddddhh"
    assert tiers_of_a_step(store, 7 * [CHUNK]) == "hhhhhhd"
    assert tiers_of_a_step(store, 7 * [CHUNK]) == "dhhhhhh"
    store.close()


def test_a_tensor_larger_than_the_budget_goes_to_disk(tmp_path: Path) -> None:
    store = tiered(tmp_path, 6 * CHUNK)
    assert tiers_of_a_step(store, [CHUNK, 7 * CHUNK, CHUNK]) == "hdh"
    store.close()


def test_a_full_disk_leaves_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that knows that four go to disk finds it full: the host takes what it can."""
    store = tiered(tmp_path, 6 * CHUNK)
    monkeypatch.setattr(store._disk._file, "_growth_bytes", CHUNK)
    tiers_of_a_step(store, 10 * [CHUNK])

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ebbtide.stores.disk_file.os.posix_fallocate", refuse)
    slots = [down(store, random_bytes(CHUNK)) for _ in range(10)]  # four extents are there
    with pytest.raises(StoreFullError):
        store.offload(random_bytes(CHUNK), now())
    for slot in slots:
        store.drop(slot)
    assert store.used_bytes == 0
    store.close()


def test_statistics_count_both_tiers(tmp_path: Path) -> None:
    """Four layers save their input, 64 KiB each; the host has room for three."""
    device = CpuDevice()
    disk = StagedDiskStore(device, tmp_path, STAGING)
    store = TieredStore(PinnedStore(device, 3 * CHUNK), disk)
    policy = ActivationPolicy(min_bytes=CHUNK, rebuild=False)
    bench = EngineBench(device, store, CHUNK, policy)
    for _ in range(2):
        x = torch.rand(CHUNK // 4, requires_grad=True)
        y = bench.run(lambda x: x.sin().sin().sin().sin(), x)
        y.sum().backward()
        expected = torch.autograd.grad(x.sin().sin().sin().sin().sum(), x)[0]
        assert torch.equal(x.grad, expected)
        del y
        assert bench.stats.peak_host_bytes == 3 * CHUNK
        assert bench.stats.peak_disk_bytes == CHUNK
        assert bench.stats.offloaded_bytes == 4 * CHUNK
        assert bench.stats.reloaded_bytes >= 3 * CHUNK  # the last may have had no time to leave
    bench.close()


# What a user asks for


def kinds(store: AbstractStore) -> tuple[type[AbstractStore], int | None, int | None]:
    """The store's type, the host's budget, the staging memory."""
    host = store if isinstance(store, PinnedStore) else getattr(store, "_host", None)
    disk = store if isinstance(store, StagedDiskStore) else getattr(store, "_disk", None)
    staging = None if disk is None else 2 * CHUNKS * disk._chunk_bytes
    return type(store), None if host is None else host.budget.limit_bytes, staging


@pytest.mark.parametrize(
    ("kind", "budget_bytes", "expected"),
    [
        ("auto", None, (PinnedStore, None, None)),
        ("host", 5 * MIB, (PinnedStore, 5 * MIB, None)),
        ("disk", None, (StagedDiskStore, None, 128 * MIB)),
        ("disk", 70 * MIB, (StagedDiskStore, None, 64 * MIB)),
        ("tiered", None, (TieredStore, None, 128 * MIB)),
        ("tiered", 1024 * MIB, (TieredStore, 896 * MIB, 128 * MIB)),
        ("tiered", 100 * MIB, (TieredStore, 75 * MIB, 16 * MIB)),  # a quarter, as a power of two
    ],
)
def test_the_budget_holds_for_both(
    tmp_path: Path,
    kind: str,
    budget_bytes: int | None,
    expected: tuple[type[AbstractStore], int | None, int | None],
) -> None:
    store = build_store(SimulatedDevice(0), kind, tmp_path, budget_bytes)
    assert kinds(store) == expected
    store.close()


def test_a_budget_without_room_for_chunks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"host_budget is 200\.0 KiB.* allow 256\.0 KiB at"):
        build_store(SimulatedDevice(0), "tiered", tmp_path, 200 * KIB)


def test_tiers_are_for_accelerators() -> None:
    with pytest.raises(PolicyError):
        ebbtide.offload(torch.nn.Linear(2, 2), store="tiered")
    with pytest.raises(PolicyError):
        ebbtide.offload(torch.nn.Linear(2, 2), store="host:/some/dir")


def test_events_know_their_streams() -> None:
    event: AbstractEvent = now()
    assert event.settled() is event
