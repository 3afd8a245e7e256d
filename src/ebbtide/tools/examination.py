"""Measures what a device computes: matrix products, copies in its memory, FFTs, fresh pages."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import math
import mmap
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, final

import torch

from ebbtide.devices.accelerator import AcceleratorDevice
from ebbtide.devices.cpu import CpuDevice
from ebbtide.devices.device import AbstractDevice
from ebbtide.errors import EbbtideError, PolicyError
from ebbtide.planning.hardware import Hardware, Kind, Source
from ebbtide.stores.build import build_store
from ebbtide.stores.disk_file import OpenFile, default_directory
from ebbtide.stores.host_memory import allocate_by_torch, map_exactly
from ebbtide.stores.store import AbstractStore, Extent, Slot
from ebbtide.tools.machine import (
    MachineFacts,
    OtherPrograms,
    Sample,
    read_lanes,
    read_machine,
    sample,
)
from ebbtide.units import format_size

_LONG_ENOUGH_S = 0.03  # of one repetition: then the start of a kernel does not count
_SMALLEST, _LARGEST = 256, 8192  # rows of the matrices
_COPY_BYTES = {True: 128 * 2**20, False: 512 * 2**20}  # by whether the device is the CPU
_LEAST_COPY_BYTES = 32 * 2**20  # smaller tensors are copied within caches
_TOUCH_BYTES = 64 * 2**20  # more than malloc ever serves from memory that it has
_FFT_NODES = 256
_CHANNELS = 32


def measure_matmul(
    device: AbstractDevice, dtype: torch.dtype, budget_s: float, room_bytes: int
) -> Sample:
    """Measure products of square matrices, as large as time and memory allow."""
    begin_s = time.perf_counter()
    size = _SMALLEST
    while True:
        # Random numbers: a GPU that multiplies equal ones needs less power, and runs faster.
        left = torch.rand(size, size, device=device.torch_device).to(dtype)
        right = torch.roll(left, 1)
        out = torch.empty_like(left)
        multiply = functools.partial(_multiply, device, left, right, out)
        once_s = min(_time(multiply) for _ in range(3))
        too_large = size == _LARGEST or 3 * 4 * left.nbytes > room_bytes
        # Larger matrices take eight times as long, four times here and more after. What counts is
        # how fast they are: other programs may have held up the loop until now.
        if once_s > _LONG_ENOUGH_S or too_large or 4 * 8 * once_s > budget_s:
            left_s = budget_s - (time.perf_counter() - begin_s)
            return sample(2.0 * size**3, multiply, left_s, note=f"n = {size}")
        size *= 2


def _multiply(
    device: AbstractDevice, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor
) -> None:
    torch.mm(left, right, out=out)
    finish(device)


def measure_tf32(device: AbstractDevice, budget_s: float, room_bytes: int) -> Sample:
    """Measure products of float32 in TF32. The program's setting is put back."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return measure_matmul(device, torch.float32, budget_s, room_bytes)
    finally:
        torch.set_float32_matmul_precision(before)


def measure_copy(device: AbstractDevice, budget_s: float, room_bytes: int) -> Sample:
    """Measure a copy within the device's memory, in bytes read and written.

    Raises:
        MemoryError: so little memory is free that the copy would stay in caches.
    """
    size_bytes = min(_COPY_BYTES[device.computes_on_host], room_bytes // 2)
    if size_bytes < _LEAST_COPY_BYTES:
        raise MemoryError(
            f"copies of {format_size(size_bytes)} stay in caches, and too little memory is free "
            f"for larger ones; end other programs and measure again"
        )
    source = device.allocate(size_bytes).fill_(1)
    target = torch.ones_like(source)

    def copy() -> None:
        target.copy_(source)
        finish(device)

    return sample(2.0 * size_bytes, copy, budget_s, note=format_size(size_bytes))


def measure_fft(device: AbstractDevice, budget_s: float, room_bytes: int) -> Sample:
    """Measure 2D FFTs of real float32 fields as an FNO has them, in FLOP of 2.5 n log2 n."""
    channels = _CHANNELS
    while channels > 1 and 3 * channels * _FFT_NODES**2 * 4 > room_bytes:
        channels //= 2
    field = torch.ones(channels, _FFT_NODES, _FFT_NODES, device=device.torch_device)

    def transform() -> None:
        torch.fft.rfft2(field)
        finish(device)

    nodes = _FFT_NODES**2
    amount = 2.5 * channels * nodes * math.log2(nodes)
    note = f"{channels} x {_FFT_NODES} x {_FFT_NODES}"
    return sample(amount, transform, budget_s, note=note)


def measure_fresh_memory(budget_s: float, room_bytes: int) -> tuple[Sample, Sample]:
    """Measure how fast memory of the host is written the first time, and then again.

    The difference is the cost of page faults, which every large tensor on a CPU pays.
    """
    size_bytes = min(_TOUCH_BYTES, room_bytes)
    again_s: list[float] = []

    def touch() -> float:
        memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        first_s = _time(lambda: memory.fill_(1))
        again_s.append(_time(lambda: memory.fill_(2)))
        return first_s

    first = sample(size_bytes, touch, budget_s, most=10, note=format_size(size_bytes))
    return first, Sample(size_bytes, tuple(again_s[1:]), format_size(size_bytes))


def finish(device: AbstractDevice) -> None:
    """Block until the device has done what was queued on its compute stream."""
    device.compute_stream().record().synchronize()


def _time(work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    return max(time.perf_counter() - begin_s, 1e-9)


# ---- Measures the disk behind a directory without the help of the page cache ----
#
# The file has no name, so nothing is left behind, however the process ends.

_CHUNK_BYTES = 4 * 2**20
_FIRST_BYTES = 16 * 2**20  # written first, to see how much can be written in time
_RESIDENT = 0.1  # a file of which more is in the page cache is not read from the disk


@final
@dataclass(frozen=True)
class DiskFigures:
    """What one file took.

    Attributes:
        size_bytes: size of the file.
        write_s: seconds until all was on the disk.
        cached_write_s: seconds until all was in the page cache.
        read_s: seconds to read it.
        cached_share: the part of the file that was still in the page cache before it was read;
            None: the system does not say.
    """

    size_bytes: int
    write_s: float
    cached_write_s: float
    read_s: float
    cached_share: float | None

    @property
    def write_bytes_per_s(self) -> float:
        return self.size_bytes / self.write_s

    @property
    def read_bytes_per_s(self) -> float:
        return self.size_bytes / self.read_s

    @property
    def read_from_disk(self) -> bool:
        """Whether the page cache is known to have been empty."""
        return self.cached_share is not None and self.cached_share <= _RESIDENT

    def figures(self) -> dict[str, Any]:
        """Return the figures for a JSON file."""
        return {
            "size_bytes": self.size_bytes,
            "write_bytes_per_s": self.write_bytes_per_s,
            "cached_write_bytes_per_s": self.size_bytes / self.cached_write_s,
            "read_bytes_per_s": self.read_bytes_per_s,
            "cached_share_before_read": self.cached_share,
        }


def measure_disk(directory: Path, budget_s: float, room_bytes: int) -> DiskFigures:
    """Write a file, wait until it is on the disk, and read it back.

    Args:
        directory: where.
        budget_s: about how long this may take.
        room_bytes: the largest file to write.

    Raises:
        PolicyError: the directory is missing or cannot be written to.
        OSError: the disk has no room, or fails.
    """
    file = OpenFile(directory)
    # A disk that compresses would store equal bytes in no time.
    chunk = memoryview(os.urandom(min(_CHUNK_BYTES, max(room_bytes, mmap.PAGESIZE))))
    first_bytes = min(_FIRST_BYTES, room_bytes // 2)
    begin_s = time.perf_counter()
    _write(file, chunk, 0, first_bytes)
    os.fsync(file.fd)
    rate_bytes_per_s = first_bytes / (time.perf_counter() - begin_s)
    left_bytes = (budget_s - (time.perf_counter() - begin_s)) * rate_bytes_per_s / 2
    size_bytes = int(max(2 * first_bytes, min(room_bytes, left_bytes)))
    size_bytes -= size_bytes % mmap.PAGESIZE
    file.reserve(Extent(first_bytes, size_bytes - first_bytes))  # as the store does
    begin_s = time.perf_counter()
    _write(file, chunk, 0, size_bytes)
    cached_write_s = time.perf_counter() - begin_s
    os.fsync(file.fd)
    write_s = time.perf_counter() - begin_s
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    cached_share = _cached_share(file, size_bytes)
    target = memoryview(bytearray(len(chunk)))
    begin_s = time.perf_counter()
    for begin in range(0, size_bytes, len(chunk)):
        file.read(target[: size_bytes - begin], begin)
    read_s = time.perf_counter() - begin_s
    return DiskFigures(size_bytes, write_s, cached_write_s, read_s, cached_share)


def _write(file: OpenFile, chunk: memoryview, begin_bytes: int, end_bytes: int) -> None:
    for begin in range(begin_bytes, end_bytes, len(chunk)):
        file.write(chunk[: end_bytes - begin], begin)


def _cached_share(file: OpenFile, size_bytes: int) -> float | None:
    """Return how much of a file is in the page cache; None if the system does not say."""
    try:
        function = ctypes.CDLL(None).mincore
    except (OSError, AttributeError, TypeError):  # Windows
        return None
    with mmap.mmap(file.fd, size_bytes, access=mmap.ACCESS_COPY) as mapping:
        pages = -(-size_bytes // mmap.PAGESIZE)
        resident = (ctypes.c_ubyte * pages)()
        first = ctypes.c_ubyte.from_buffer(mapping)
        failed = function(
            ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size_bytes), resident
        )
        del first  # the mapping cannot be closed while this refers to it
    return None if failed else sum(page & 1 for page in resident) / pages


# ---- Measures the way between the device and the tier below, through the store that training uses
#
# For an accelerator that is page-locked host memory, for a CPU a file. Copies go through
# `AbstractStore.offload` and `reload`, so that what is measured is what ebbtide will get, with the
# page cache of the file and with what the store does beside copying.

# Copies are queued one behind the other up to so many bytes, by whether the device is the CPU: fast
# links need many, or what the host does for each counts, too.
_QUEUED_BYTES = {True: 16 * 2**20, False: 128 * 2**20}
_MOST_QUEUED = 32


@final
@dataclass(frozen=True)
class LinkFigures:
    """What copies by the store take.

    Attributes:
        down: offloads, by the size of one copy.
        up: reloads, by the size of one copy.
        both: both at once, in bytes of both, with the largest copies.
    """

    down: dict[int, Sample]
    up: dict[int, Sample]
    both: Sample

    @property
    def latency_s(self) -> float:
        """What a copy costs beside its bytes, by the smallest copies; the dearer way counts."""
        costs = [0.0]
        for way in (self.down, self.up):
            smallest, largest = min(way), max(way)
            one_s = smallest / way[smallest].median_per_s
            costs.append(one_s - smallest / way[largest].median_per_s)
        return max(costs)

    def figures(self) -> dict[str, Any]:
        """Return the figures for a JSON file."""
        return {
            "down": {str(size): entry.figures() for size, entry in self.down.items()},
            "up": {str(size): entry.figures() for size, entry in self.up.items()},
            "both": self.both.figures(),
            "latency_s": self.latency_s,
        }


def measure_links(
    device: AbstractDevice,
    build_store: Callable[[], AbstractStore],
    sizes_bytes: Sequence[int],
    budget_s: float,
    room_bytes: int,
) -> LinkFigures:
    """Measure offloads and reloads by size, and both at once.

    Args:
        device: the device.
        build_store: builds its store. Each size gets one of its own, because a store keeps the
            memory of smaller copies, which the largest ones need.
        sizes_bytes: sizes of the copies, rising. Those that are too large are left out.
        budget_s: about how long this may take.
        room_bytes: the most memory to use in each tier.
    """
    begin_s = time.perf_counter()
    down: dict[int, Sample] = {}
    up: dict[int, Sample] = {}
    last: _Copies | None = None
    with contextlib.ExitStack() as open_store:
        for number, size_bytes in enumerate(sizes_bytes):
            left_s = budget_s - (time.perf_counter() - begin_s)
            copies = _Copies(device, size_bytes, room_bytes // 2)
            # Both ways at once needs twice the bytes. A slow link gets no larger copies than it can
            # move in the time that is left: two rounds of each way, and two of both.
            too_slow = last is not None and 8 * copies.total_bytes > left_s * last.slowest_per_s
            if last is not None and (too_slow or 2 * copies.total_bytes > room_bytes):
                break
            if last is not None:
                last.drop()
            open_store.close()
            copies.store = open_store.enter_context(contextlib.closing(build_store()))
            share_s = left_s / (len(sizes_bytes) - number + 1) / 2
            down[size_bytes] = sample(copies.total_bytes, copies.offload, share_s)
            up[size_bytes] = sample(copies.total_bytes, copies.reload, share_s)
            copies.slowest_per_s = min(down[size_bytes].best_per_s, up[size_bytes].best_per_s)
            last = copies
        assert last is not None
        left_s = budget_s - (time.perf_counter() - begin_s)
        both = sample(2 * last.total_bytes, last.both, left_s, note=format_size(last.size_bytes))
        last.drop()
    return LinkFigures(down, up, both)


@final
class _Copies:
    """Equal copies of one size, queued one behind the other.

    Attributes:
        store: where they go; set before the first one.
    """

    store: AbstractStore

    def __init__(self, device: AbstractDevice, size_bytes: int, room_bytes: int) -> None:
        self.size_bytes = size_bytes
        queued_bytes = min(_QUEUED_BYTES[device.computes_on_host], room_bytes)
        self.total_bytes = max(1, min(_MOST_QUEUED, queued_bytes // size_bytes)) * size_bytes
        self.slowest_per_s = 0.0
        self._device = device
        self._slots: list[Slot] = []
        self._memory: torch.Tensor | None = None

    def offload(self) -> float:
        self.drop()
        begin_s = time.perf_counter()
        self._slots = list(self._queue_offloads())
        for slot in self._slots:
            slot.offloaded.synchronize()
        return time.perf_counter() - begin_s

    def reload(self) -> float:
        begin_s = time.perf_counter()
        arrivals = [self.store.reload(slot) for slot in self._slots]
        for _, ready in arrivals:
            ready.synchronize()
        return time.perf_counter() - begin_s

    def both(self) -> float:
        arrivals, slots = [], []
        begin_s = time.perf_counter()
        try:
            for slot, offloaded in zip(self._slots, self._queue_offloads(), strict=True):
                slots.append(offloaded)
                arrivals.append(self.store.reload(slot))
            for slot in slots:
                slot.offloaded.synchronize()
            for _, ready in arrivals:
                ready.synchronize()
            return time.perf_counter() - begin_s
        finally:
            for slot in slots:
                self.store.drop(slot)

    def drop(self) -> None:
        for slot in self._slots:
            self.store.drop(slot)
        self._slots = []

    def _queue_offloads(self) -> Iterator[Slot]:
        for source in self._sources():
            ready = self._device.compute_stream().record()
            yield self.store.offload(source, ready)

    def _sources(self) -> Iterator[torch.Tensor]:
        if self._memory is None:
            self._memory = self._device.allocate(self.total_bytes).fill_(1)
        return iter(torch.split(self._memory, self.size_bytes))


@final
@dataclass(frozen=True)
class Pinning:
    """How host memory is page-locked.

    Attributes:
        size_bytes: how much was tried.
        duration_s: how long it took, pages allocated included.
        refusal: why the system refused; None if it did not.
    """

    size_bytes: int
    duration_s: float
    refusal: str | None

    @property
    def seconds_per_gib(self) -> float:
        return self.duration_s / self.size_bytes * 2**30


def measure_pinning(device: AbstractDevice, size_bytes: int) -> Pinning:
    """Page-lock a block of host memory once, as the host store does, and give it back."""
    begin_s = time.perf_counter()
    memory = map_exactly(device, size_bytes)
    if memory is None:
        memory = allocate_by_torch(device, size_bytes)
    duration_s = time.perf_counter() - begin_s
    refusal = memory.refusal
    memory.give_back()
    return Pinning(size_bytes, duration_s, refusal)


# ---- Examines a machine: reads its facts, measures it, and makes a `Hardware` of the results ----
#
# Each measurement has a share of the time and a bound on the memory and disk that it uses. A
# measurement that fails is left out, and its error is kept in its place.

T = TypeVar("T")

MIB: Final = 2**20
DTYPES: Final = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_RAM_SHARE, _DISK_SHARE = 8, 50  # of what is free, at most this part is used


class Effort(NamedTuple):
    """How long each measurement may take, in seconds, and what it may use at most."""

    dtypes: tuple[str, ...]
    matmul_s: float
    copy_s: float
    fft_s: float
    fresh_s: float
    links_s: float
    sizes_bytes: tuple[int, ...]
    disk_s: float
    room_bytes: int
    disk_bytes: int


FULL: Final = Effort(
    dtypes=tuple(DTYPES),
    matmul_s=0.8,
    copy_s=0.6,
    fft_s=0.6,
    fresh_s=0.4,
    links_s=4.0,
    sizes_bytes=(64 * 2**10, MIB, 16 * MIB, 64 * MIB),
    disk_s=4.0,
    room_bytes=256 * MIB,
    disk_bytes=512 * MIB,
)
QUICK: Final = Effort(
    dtypes=("fp32", "bf16"),
    matmul_s=0.25,
    copy_s=0.12,
    fft_s=0.12,
    fresh_s=0.08,
    links_s=0.6,
    sizes_bytes=(64 * 2**10, 16 * MIB),
    disk_s=0.5,
    room_bytes=128 * MIB,
    disk_bytes=64 * MIB,
)


@final
@dataclass
class Examination:
    """What was found out about a machine; None where a measurement failed.

    Attributes:
        facts: what the system says.
        matmul: products of matrices, by type: ``"fp64"``, ``"fp32"``, ``"tf32"`` and so on.
        copy: copies in the device's memory, in bytes read and written.
        fft: 2D FFTs, in FLOP.
        fresh: memory of the host that is written the first time, and again; only for a CPU.
        pinning: page-locking; only for an accelerator.
        links: offloads and reloads.
        disk: the disk behind the store's directory.
        problems: why a measurement failed, by its name.
        others_cores: cores that other programs kept busy meanwhile; None: not known.
        duration_s: how long it all took.
    """

    facts: MachineFacts
    matmul: dict[str, Sample] = field(default_factory=dict)
    copy: Sample | None = None
    fft: Sample | None = None
    fresh: tuple[Sample, Sample] | None = None
    pinning: Pinning | None = None
    links: LinkFigures | None = None
    disk: DiskFigures | None = None
    problems: dict[str, str] = field(default_factory=dict)
    others_cores: float | None = None
    duration_s: float = 0.0

    @property
    def on_cpu(self) -> bool:
        """Whether models compute on the CPU."""
        return self.facts.accelerator is None

    @property
    def down_bytes_per_s(self) -> float | None:
        """Bandwidth of large offloads."""
        return None if self.links is None else _of_largest(self.links.down)

    @property
    def up_bytes_per_s(self) -> float | None:
        """Bandwidth of large reloads.

        On a CPU, a reload maps pages of the file that are in the page cache, and moves nothing.
        Whoever reads the bytes gets them as fast as the memory gives them, so that is the bound.
        """
        if self.links is None:
            return None
        rate = _of_largest(self.links.up)
        return rate if self.copy is None or not self.on_cpu else min(rate, self.copy.best_per_s)

    @property
    def both_bytes_per_s(self) -> float | None:
        """Bandwidth of both ways at once: the sum, and never more than both have alone."""
        down, up = self.down_bytes_per_s, self.up_bytes_per_s
        if self.links is None or down is None or up is None:
            return None
        return min(self.links.both.median_per_s, down + up)

    @property
    def pinned_limit_bytes(self) -> int:
        """How much memory can be page-locked."""
        if self.on_cpu or self.pinning is None:
            return 0
        if self.pinning.refusal is not None:
            memlock = self.facts.memlock_bytes
            return 0 if memlock is None else min(memlock, self.facts.free_ram_bytes)
        return self.facts.free_ram_bytes

    def hardware(self) -> Hardware | None:
        """Return the figures that a plan needs; None if one of them could not be measured."""
        down, up, both = self.down_bytes_per_s, self.up_bytes_per_s, self.both_bytes_per_s
        parts = (self.links, self.copy, self.matmul.get("fp32"))
        if down is None or up is None or both is None or None in parts:
            return None
        assert self.links is not None
        assert self.copy is not None
        facts, accelerator = self.facts, self.facts.accelerator
        values: dict[str, Any] = {
            "device_memory_bytes": accelerator.total_bytes
            if accelerator
            else facts.total_ram_bytes,
            "device_memory_bytes_per_s": self.copy.best_per_s,
            "fft_flops": None if self.fft is None else self.fft.best_per_s,
            "h2d_bytes_per_s": up,
            "d2h_bytes_per_s": down,
            "duplex_bytes_per_s": both,
            "link_latency_s": self.links.latency_s,
            "host_memory_bytes": facts.total_ram_bytes,
            "pinned_limit_bytes": self.pinned_limit_bytes,
        }
        for name, entry in self.matmul.items():
            values[f"matmul_{name}_flops"] = entry.best_per_s
        if self.disk is not None:
            values["disk_write_bytes_per_s"] = self.disk.write_bytes_per_s
            values["disk_read_bytes_per_s"] = self.disk.read_bytes_per_s
        text = f"ebbtide doctor on {time.strftime('%Y-%m-%d')}, torch {facts.torch_version}"
        name = accelerator.name if accelerator else f"{facts.cpu}, {facts.cores} cores"
        values = {key: value for key, value in values.items() if value is not None}
        sources = tuple(Source(key, Kind.MEASURED, text) for key in values)
        return Hardware(name=name, computes_on_host=self.on_cpu, sources=sources, **values)

    def figures(self) -> dict[str, Any]:
        """Return all raw figures for a JSON file."""
        pinning = None
        if self.pinning is not None:
            pinning = {**vars(self.pinning), "seconds_per_gib": self.pinning.seconds_per_gib}
        return {
            "duration_s": self.duration_s,
            "others_cores": self.others_cores,
            "facts": self.facts.figures(),
            "matmul": {name: entry.figures() for name, entry in self.matmul.items()},
            "copy": _figures(self.copy),
            "fft": _figures(self.fft),
            "fresh_memory": None if self.fresh is None else self.fresh[0].figures(),
            "touched_memory": None if self.fresh is None else self.fresh[1].figures(),
            "pinning": pinning,
            "links": _figures(self.links),
            "disk": _figures(self.disk),
            "problems": self.problems,
        }


def examine(
    torch_device: torch.device,
    directory: Path | None = None,
    effort: Effort = FULL,
    say: Callable[[str], None] = lambda _: None,
) -> Examination:
    """Examine this machine.

    Args:
        torch_device: what the model would compute on.
        directory: where files of offloaded bytes would go; None: the system's directory for
            temporary files.
        effort: how long it may take.
        say: told what is measured next.
    """
    if directory is None:
        try:
            directory = default_directory()
        except PolicyError:  # no directory can be written to; the measurements will say so
            directory = Path.cwd()
    on_cpu = torch_device.type == "cpu"
    device: AbstractDevice = CpuDevice() if on_cpu else AcceleratorDevice(torch_device)
    return Examiner(device, directory, effort, say).run()


@final
class Examiner:
    """Runs the measurements one after the other.

    Args:
        device: the device.
        directory: where files of offloaded bytes would go.
        effort: how long it may take.
        say: told what is measured next.
    """

    def __init__(
        self,
        device: AbstractDevice,
        directory: Path,
        effort: Effort,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._device = device
        self._directory = directory
        self._effort = effort
        self._say = say
        self._found = Examination(read_machine(device.torch_device, directory))

    def run(self) -> Examination:
        """Measure everything."""
        begin_s, others = time.perf_counter(), OtherPrograms()
        found, effort = self._found, self._effort
        self._measure_compute()
        if not self._device.computes_on_host:
            found.pinning = self._try("pinning", self._measure_pinning)
        found.links = self._try("links", self._measure_links)
        if found.facts.accelerator is not None:
            lanes = read_lanes(self._device.torch_device)
            accelerator = dataclasses.replace(found.facts.accelerator, lanes=lanes)
            found.facts = dataclasses.replace(found.facts, accelerator=accelerator)
        found.disk = self._try(
            "disk",
            lambda: measure_disk(self._directory, effort.disk_s, self._disk_room_bytes),
        )
        found.others_cores = others.cores()
        found.duration_s = time.perf_counter() - begin_s
        return found

    def _measure_compute(self) -> None:
        device, effort, found = self._device, self._effort, self._found
        room_bytes = self._device_room_bytes
        for name in effort.dtypes:
            dtype = DTYPES[name]
            multiply = functools.partial(measure_matmul, device, dtype, effort.matmul_s, room_bytes)
            entry = self._try(f"matmul {name}", multiply)
            if entry is not None:
                found.matmul[name] = entry
        if _has_tf32(device.torch_device):
            entry = self._try(
                "matmul tf32", lambda: measure_tf32(device, effort.matmul_s, room_bytes)
            )
            if entry is not None:
                found.matmul["tf32"] = entry
        found.copy = self._try("copy", lambda: measure_copy(device, effort.copy_s, room_bytes))
        found.fft = self._try("fft", lambda: measure_fft(device, effort.fft_s, room_bytes))
        if device.computes_on_host:
            found.fresh = self._try(
                "fresh memory", lambda: measure_fresh_memory(effort.fresh_s, room_bytes)
            )

    def _measure_pinning(self) -> Pinning:
        # A power of two, because torch would round other sizes up to the next.
        return measure_pinning(self._device, 1 << self._host_room_bytes.bit_length() - 1)

    def _measure_links(self) -> LinkFigures:
        room_bytes = min(self._device_room_bytes, self._host_room_bytes)
        if self._device.computes_on_host:
            room_bytes = min(room_bytes, self._disk_room_bytes)
            store: tuple[str, Path | None, int | None] = "disk", self._directory, None
        else:
            store = "host", None, room_bytes
        effort = self._effort
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of pageable memory; see `pinning`
            return measure_links(
                self._device,
                lambda: build_store(self._device, *store),
                effort.sizes_bytes,
                effort.links_s,
                room_bytes,
            )

    @property
    def _host_room_bytes(self) -> int:
        return max(
            MIB, min(self._effort.room_bytes, self._found.facts.free_ram_bytes // _RAM_SHARE)
        )

    @property
    def _device_room_bytes(self) -> int:
        accelerator = self._found.facts.accelerator
        if accelerator is None:
            return self._host_room_bytes
        # A device's matrices must be large for it to show what it can do.
        return max(MIB, min(4 * self._effort.room_bytes, accelerator.free_bytes // _RAM_SHARE))

    @property
    def _disk_room_bytes(self) -> int:
        free_bytes = self._found.facts.store.free_bytes or 0
        if self._found.facts.store.in_ram:
            free_bytes = min(free_bytes, self._found.facts.free_ram_bytes)
        return max(MIB, min(self._effort.disk_bytes, free_bytes // _DISK_SHARE))

    def _try(self, name: str, measure: Callable[[], T]) -> T | None:
        """Measure; if that fails, note why. A doctor does not stop at the first illness."""
        self._say(name)
        try:
            return measure()
        except Exception as error:
            text = (str(error).strip().splitlines() or [""])[0]
            kind = "" if isinstance(error, EbbtideError) else f"{type(error).__name__}: "
            self._found.problems[name] = kind + text
            return None


def _of_largest(way: dict[int, Sample]) -> float:
    return way[max(way)].median_per_s


def _figures(part: Sample | LinkFigures | DiskFigures | None) -> dict[str, Any] | None:
    return None if part is None else part.figures()


def _has_tf32(torch_device: torch.device) -> bool:
    """Whether the device computes float32 in TF32: NVIDIA's since Ampere."""
    if torch_device.type != "cuda" or torch.version.cuda is None:
        return False
    return bool(torch.cuda.get_device_capability(torch_device) >= (8, 0))
