"""The disk store: bytes go down and come back, on good days and on bad ones."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from ebbtide.devices import LaneEvent
from ebbtide.errors import PolicyError, StoreFullError
from ebbtide.stores import DiskStore, Slot
from ebbtide.stores.disk_file import OpenFile
from open_files import num_open, taken_bytes
from store_bench import WAIT_S, now, offload, random_bytes, reload, wait_for

KIB, MIB = 2**10, 2**20
PAGE = mmap.ALLOCATIONGRANULARITY
GROWTH_BYTES = 64 * MIB  # what the file grows by at least


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore(tmp_path)
    yield store
    store.close()


@pytest.fixture
def without_collector() -> Iterator[None]:
    """What goes, goes when its last reference does."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def out_of_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("ebbtide.stores.disk.mmap.mmap", refuse)


@pytest.fixture(params=["mapped", "read"])
def way_back(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways a reload can go: a mapping, or fresh memory where no mapping is to be had."""
    if request.param == "read":
        out_of_mappings(monkeypatch)
    return request.param


# Round trips


@pytest.mark.usefixtures("way_back")
@pytest.mark.parametrize("size_bytes", [1, 7, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 5, 70 * MIB])
def test_bytes_come_back_as_they_were(store: DiskStore, size_bytes: int) -> None:
    source = random_bytes(size_bytes)
    slot = offload(store, source.clone())
    buffer = reload(store, slot)
    assert buffer.dtype is torch.uint8
    assert torch.equal(buffer, source)
    pages = -(-size_bytes // PAGE)
    assert store.used_bytes == pages * PAGE
    assert store.capacity_bytes == max(pages * PAGE, GROWTH_BYTES)


def test_each_finished_write_is_announced_after_its_event(store: DiskStore) -> None:
    reached: list[list[bool]] = []
    slots: list[Slot] = []
    store.on_progress = lambda: reached.append([slot.offloaded.query() for slot in slots])
    readies = [LaneEvent(), LaneEvent()]
    slots += [store.offload(random_bytes(10), ready) for ready in readies]
    readies[0].finish()
    readies[1].finish()
    store.close()  # the lane has run dry
    assert [announced[number] for number, announced in enumerate(reached)] == [True, True]


# Reuse


def test_an_extent_is_not_reused_while_its_mapping_lives(store: DiskStore) -> None:
    source = random_bytes(4 * PAGE)
    slot = offload(store, source.clone())
    buffer = reload(store, slot)
    view = buffer[PAGE : 2 * PAGE]
    store.drop(slot)
    del buffer  # the view shares its storage, so the mapping stays
    others = [offload(store, torch.full((4 * PAGE,), value, dtype=torch.uint8)) for value in (1, 2)]
    assert slot.extent not in [other.extent for other in others]
    assert torch.equal(view, source[PAGE : 2 * PAGE])
    assert store.used_bytes == (4 + 4 + 4) * PAGE
    del view
    assert store.used_bytes == (4 + 4) * PAGE
    assert offload(store, random_bytes(4 * PAGE)).extent == slot.extent


def test_an_extent_is_not_reused_while_it_is_read_into_fresh_memory(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_of_mappings(monkeypatch)
    source = random_bytes(2 * PAGE)
    slot = offload(store, source.clone())
    go_on = threading.Event()
    store._reader.submit(lambda: go_on.wait(WAIT_S) and None)
    buffer, reloaded = store.reload(slot)
    store.drop(slot)
    other = offload(store, torch.zeros(2 * PAGE, dtype=torch.uint8))
    assert other.extent != slot.extent
    go_on.set()
    wait_for(reloaded)
    assert torch.equal(buffer, source)
    # Unlike a mapping, the buffer does not need the extent any more.
    assert store.used_bytes == 2 * PAGE


def test_a_slot_with_two_reloads_is_in_use_until_both_are_gone(store: DiskStore) -> None:
    slot = offload(store, random_bytes(PAGE))
    one, other = reload(store, slot), reload(store, slot)
    assert slot.in_use()
    del one
    assert slot.in_use()
    del other
    assert not slot.in_use()


# Transfers that come in pieces, or fail


def in_pieces(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Lets every system call move at most 1000 bytes; returns how many there were."""
    write, read = os.pwrite, os.preadv
    calls = {"pwrite": 0, "preadv": 0}

    def short_write(fd: int, view: memoryview, offset: int) -> int:
        calls["pwrite"] += 1
        return write(fd, view[:1000], offset)

    def short_read(fd: int, views: list[memoryview], offset: int) -> int:
        calls["preadv"] += 1
        return read(fd, [views[0][:1000]], offset)

    monkeypatch.setattr(os, "pwrite", short_write)
    monkeypatch.setattr(os, "preadv", short_read)
    return calls


@pytest.mark.parametrize(("size_bytes", "calls"), [(999, 1), (1000, 1), (1001, 2), (12_345, 13)])
def test_short_writes_and_reads_are_continued(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, size_bytes: int, calls: int
) -> None:
    counted = in_pieces(monkeypatch)
    out_of_mappings(monkeypatch)
    source = random_bytes(size_bytes)
    beside = offload(store, random_bytes(PAGE, seed=1))
    counted["pwrite"] = 0
    slot = offload(store, source.clone())
    assert torch.equal(reload(store, slot), source)
    assert counted == {"pwrite": calls, "preadv": calls}  # ceil(size_bytes / 1000)
    assert torch.equal(reload(store, beside), random_bytes(PAGE, seed=1))


def test_a_file_that_ends_early_fails_the_reload(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_of_mappings(monkeypatch)
    slot = offload(store, random_bytes(PAGE))
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    _, reloaded = store.reload(slot)
    wait_for(reloaded)
    with pytest.raises(OSError, match="ended early") as raised:
        reloaded.synchronize()
    assert raised.value.errno == errno.EIO


@pytest.mark.usefixtures("way_back")
def test_a_failed_write_is_told_to_whoever_waits_for_it(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails its own slot and that slot's reloads; the slots around it are as they were."""
    before = offload(store, random_bytes(PAGE, seed=1))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        slot = offload(store, random_bytes(PAGE, seed=2))
    after = offload(store, random_bytes(PAGE, seed=3))
    assert slot.offloaded.query()
    assert isinstance(slot.offloaded.failure, OSError)
    assert slot.offloaded.failure.errno == errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        slot.offloaded.synchronize()
    buffer, reloaded = store.reload(slot)
    wait_for(reloaded)
    assert str(reloaded.failure) == str(slot.offloaded.failure)
    for good, seed in ((before, 1), (after, 3)):
        assert good.offloaded.failure is None
        assert torch.equal(reload(store, good), random_bytes(PAGE, seed=seed))
    del buffer
    store.drop(slot)
    assert store.used_bytes == 2 * PAGE


# A full disk


def disk_of(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    """A disk that takes so many bytes, and, as ext4 does, fills up before it says that it is full.

    Source: on an ext4 image with 40 MiB free, posix_fallocate of 64 MiB fails with ENOSPC and
        leaves 0 MiB free (Linux 6.18); tmpfs gives back what it took.
    """
    allocate = os.posix_fallocate

    def limited(fd: int, offset: int, length: int) -> None:
        if offset < size_bytes:
            allocate(fd, offset, min(length, size_bytes - offset))
        if offset + length > size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", limited)


def test_a_full_disk_is_an_error_before_anything_is_started(
    store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    threads = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_room)
        with pytest.raises(StoreFullError) as raised:
            store.offload(random_bytes(PAGE), now())
    assert raised.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(raised.value)
    assert (store.capacity_bytes, store.used_bytes) == (0, 0)
    assert set(threading.enumerate()) == threads
    # Room again, and the store goes on as if nothing had been.
    source = random_bytes(PAGE)
    assert torch.equal(reload(store, offload(store, source)), source)


def test_the_error_of_a_full_disk_names_what_is_asked_for_and_what_is_there(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """66 MiB asked for at once are more than a growth; 64 MiB are there, 63 of them at one end."""
    disk_of(monkeypatch, 100 * MIB)
    kept = offload(store, random_bytes(MIB))
    with pytest.raises(StoreFullError, match=r"no room for 67\.0 MiB more .* where 64\.0 MiB"):
        store.offload(random_bytes(130 * MIB), now())  # 130 - 63 = 67
    assert store.capacity_bytes == GROWTH_BYTES
    assert store.used_bytes == MIB
    assert torch.equal(reload(store, kept), random_bytes(MIB))


def test_a_failed_growth_leaves_the_disk_as_it_was(
    store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others write to that disk too: what did not suffice must not stay taken."""
    kept = offload(store, random_bytes(MIB))
    before_bytes = taken_bytes(tmp_path)
    assert before_bytes >= GROWTH_BYTES
    disk_of(monkeypatch, GROWTH_BYTES + 10 * MIB)
    with pytest.raises(StoreFullError):
        store.offload(random_bytes(80 * MIB), now())
    assert taken_bytes(tmp_path) == before_bytes
    assert torch.equal(reload(store, kept), random_bytes(MIB))


@pytest.fixture
def disk_of_80_mib(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "small disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=80m", "none", str(directory)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def test_a_disk_that_is_really_full(disk_of_80_mib: Path) -> None:
    """80 MiB: 60 fit in a first growth of 64, further 60 (56 more on disk) do not fit in 16."""
    store = DiskStore(disk_of_80_mib)
    source = random_bytes(60 * MIB)
    kept = offload(store, source.clone())
    with pytest.raises(StoreFullError):
        store.offload(source, now())
    assert store.used_bytes == 60 * MIB
    assert torch.equal(reload(store, kept), source)
    store.drop(kept)
    assert torch.equal(reload(store, offload(store, source)), source)
    store.close()
    del store
    assert psutil.disk_usage(str(disk_of_80_mib)).used == 0


# Directories


def test_a_missing_directory_is_refused_by_name(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(PolicyError, match=re.escape(str(missing))):
        DiskStore(missing)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the file has a name for a moment")
def test_a_process_killed_while_it_creates_the_file_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the name of a file can be removed, a rank can be killed."""

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(os, "unlink", die)
        OpenFile(tmp_path)
        die()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_left_in_the_directory_at_any_time(store: DiskStore, tmp_path: Path) -> None:
    assert list(tmp_path.iterdir()) == []
    slot = offload(store, random_bytes(PAGE))
    assert list(tmp_path.iterdir()) == []
    buffer = reload(store, slot)
    store.close()
    assert list(tmp_path.iterdir()) == []
    assert buffer.numel() == PAGE


# Ends


class Threads:
    """The threads that were started since this object was."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())

    def new(self) -> set[threading.Thread]:
        return set(threading.enumerate()) - self._before

    def end(self) -> bool:
        for thread in self.new():
            thread.join(WAIT_S)
        return not self.new()


def test_close_ends_the_threads_and_closes_the_file(tmp_path: Path) -> None:
    threads = Threads()
    store = DiskStore(tmp_path)
    reload(store, offload(store, random_bytes(PAGE)))
    assert num_open(tmp_path) == 1
    assert {thread.name for thread in threads.new()} == {"ebbtide-disk-write", "ebbtide-disk-read"}
    store.close()
    assert not threads.new()
    assert num_open(tmp_path) == 0
    store.close()


def test_close_waits_for_writes_under_way(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    ready = LaneEvent()
    slot = store.offload(random_bytes(PAGE), ready)
    threading.Timer(0.05, ready.finish).start()
    store.close()
    assert slot.offloaded.query()
    assert slot.offloaded.failure is None


def test_reloaded_buffers_outlive_the_store(tmp_path: Path) -> None:
    source = random_bytes(3 * PAGE)
    store = DiskStore(tmp_path)
    buffer = reload(store, offload(store, source.clone()))
    store.close()
    del store
    assert torch.equal(buffer, source)
    buffer.add_(1)
    assert torch.equal(buffer, source + 1)
    del buffer
    assert num_open(tmp_path) == 0


@pytest.mark.usefixtures("without_collector")
def test_a_store_that_is_only_dropped_ends_too(tmp_path: Path) -> None:
    threads = Threads()
    store = DiskStore(tmp_path)
    store.on_progress = lambda: None
    slot = offload(store, random_bytes(PAGE))
    reload(store, slot)
    alive = weakref.ref(store)
    del store
    assert alive() is None
    assert threads.end()
    assert num_open(tmp_path) == 0


@pytest.mark.usefixtures("without_collector")
def test_a_dropped_store_never_writes_into_somebody_elses_file(tmp_path: Path) -> None:
    """A write may still be queued when its store goes: its descriptor must stay open until then.

    A closed descriptor's number is given to the next file that the process opens.
    """
    store = DiskStore(tmp_path)
    ready = LaneEvent()
    written = store.offload(random_bytes(PAGE), ready).offloaded
    del store
    paths = [tmp_path / str(number) for number in range(20)]  # one of them gets a freed number
    files = [path.open("wb") for path in paths]
    ready.finish()
    wait_for(written)
    sizes_bytes = [path.stat().st_size for path in paths]
    for file in files:
        file.close()
    assert sizes_bytes == [0] * 20


def test_a_store_closed_by_its_own_writer_finishes_what_is_queued(tmp_path: Path) -> None:
    """The session closes its store from wherever its last graph dies or its last copy ends."""
    store = DiskStore(tmp_path)
    store.on_progress = store.close
    readies = [LaneEvent(), LaneEvent()]
    slots = [store.offload(random_bytes(PAGE), ready) for ready in readies]
    for ready in readies:
        ready.finish()
    for slot in slots:
        wait_for(slot.offloaded)
    assert [slot.offloaded.failure for slot in slots] == [None, None]
    store.on_progress = None
    store.close()


def test_a_write_into_a_resting_slot_is_there_when_it_returns(store: DiskStore) -> None:
    slot, source = store.allocate_resting(4096), random_bytes(1000)
    copied, readable = store.write(slot, 96, source, now())
    assert copied.query()
    assert readable.query()
    assert torch.equal(slot.tensor[96:1096], source)
    assert not slot.tensor[:96].any()
    store.drop(slot)


def test_a_copy_for_which_there_is_no_thread_takes_no_room(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    source = random_bytes(MIB)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(StoreFullError):
            store.offload(source, now())
    assert store.used_bytes == 0
    assert torch.equal(reload(store, offload(store, source)), source)
