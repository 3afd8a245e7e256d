"""Measures what a device computes, what the link to the tier below moves, and what a disk takes."""

from __future__ import annotations

import contextlib
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
from ebbtide.stores.host_memory import allocate_host_memory
from ebbtide.stores.store import AbstractStore, Extent, Slot
from ebbtide.tools.machine import MachineFacts, Sample, read_machine, sample
from ebbtide.units import format_size

_LONG_ENOUGH_S = 0.03  # of one repetition: then the start of a kernel does not count
_SMALLEST, _LARGEST = 256, 8192  # rows of the matrices
_COPY_BYTES = {True: 128 * 2**20, False: 512 * 2**20}  # by whether the device is the CPU
_LEAST_COPY_BYTES = 32 * 2**20  # smaller tensors are copied within caches
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
        once_s = 1.0 / sample(1.0, multiply, _LONG_ENOUGH_S, most=2).best_per_s
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


def finish(device: AbstractDevice) -> None:
    """Block until the device has done what was queued on its compute stream."""
    device.compute_stream().record().synchronize()


# ---- Measures the disk behind a directory without the help of the page cache ----
#
# The file has no name, so nothing is left behind, however the process ends.

_CHUNK_BYTES = 4 * 2**20
_FIRST_BYTES = 16 * 2**20  # written first, to see how much can be written in time


@final
@dataclass(frozen=True)
class DiskFigures:
    """What one file took.

    Attributes:
        size_bytes: size of the file.
        write_bytes_per_s: its size by the seconds until all was on the disk.
        read_bytes_per_s: its size by the seconds to read it.
        cache_was_emptied: whether the system has dropped the file's pages before they were read.
    """

    size_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    cache_was_emptied: bool


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
    os.fsync(file.fd)
    write_s = time.perf_counter() - begin_s
    can_empty_cache = hasattr(os, "posix_fadvise")
    if can_empty_cache:
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    target = memoryview(bytearray(len(chunk)))
    begin_s = time.perf_counter()
    for begin in range(0, size_bytes, len(chunk)):
        file.read(target[: size_bytes - begin], begin)
    read_s = time.perf_counter() - begin_s
    return DiskFigures(size_bytes, size_bytes / write_s, size_bytes / read_s, can_empty_cache)


def _write(file: OpenFile, chunk: memoryview, begin_bytes: int, end_bytes: int) -> None:
    for begin in range(begin_bytes, end_bytes, len(chunk)):
        file.write(chunk[: end_bytes - begin], begin)


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


def measure_links(
    device: AbstractDevice,
    build_store: Callable[[], AbstractStore],
    sizes_bytes: Sequence[int],
    budget_s: float,
    room_bytes: int,
) -> LinkFigures:
    """Measure offloads, reloads and both at once, by size; of both, the largest copies count.

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
    slowest_per_s = 0.0
    for number, size_bytes in enumerate(sizes_bytes):
        left_s = budget_s - (time.perf_counter() - begin_s)
        queued_bytes = min(_QUEUED_BYTES[device.computes_on_host], room_bytes // 2)
        total_bytes = max(1, min(_MOST_QUEUED, queued_bytes // size_bytes)) * size_bytes
        # Both ways at once needs twice the bytes. A slow link gets no larger copies than it can
        # move in the time that is left: two rounds of each way, and two of both.
        too_slow = 8 * total_bytes > left_s * slowest_per_s
        if number and (too_slow or 2 * total_bytes > room_bytes):
            break
        share_s = left_s / (len(sizes_bytes) - number) / 3
        with contextlib.closing(build_store()) as store:
            copies = _Copies(device, store, size_bytes, total_bytes)
            down[size_bytes] = sample(total_bytes, copies.offload, share_s)
            up[size_bytes] = sample(total_bytes, copies.reload, share_s)
            note = format_size(size_bytes)
            both = sample(2 * total_bytes, copies.both, share_s, note=note)
            copies.drop()
        slowest_per_s = min(down[size_bytes].best_per_s, up[size_bytes].best_per_s)
    return LinkFigures(down, up, both)


@final
class _Copies:
    """Equal copies of one size, queued one behind the other."""

    def __init__(
        self, device: AbstractDevice, store: AbstractStore, size_bytes: int, total_bytes: int
    ) -> None:
        self.memory = device.allocate(total_bytes).fill_(1)
        self.sources = torch.split(self.memory, size_bytes)
        self._device = device
        self._store = store
        self._slots: list[Slot] = []

    def offload(self) -> float:
        self.drop()
        begin_s = time.perf_counter()
        self._slots = list(self._queue_offloads())
        for slot in self._slots:
            slot.offloaded.synchronize()
        return time.perf_counter() - begin_s

    def reload(self) -> float:
        begin_s = time.perf_counter()
        arrivals = [self._store.reload(slot) for slot in self._slots]
        for _, ready in arrivals:
            ready.synchronize()
        return time.perf_counter() - begin_s

    def both(self) -> float:
        arrivals, slots = [], []
        begin_s = time.perf_counter()
        try:
            for slot, offloaded in zip(self._slots, self._queue_offloads(), strict=True):
                slots.append(offloaded)
                arrivals.append(self._store.reload(slot))
            for slot in slots:
                slot.offloaded.synchronize()
            for _, ready in arrivals:
                ready.synchronize()
            return time.perf_counter() - begin_s
        finally:
            for slot in slots:
                self._store.drop(slot)

    def drop(self) -> None:
        for slot in self._slots:
            self._store.drop(slot)
        self._slots = []

    def _queue_offloads(self) -> Iterator[Slot]:
        for source in self.sources:
            yield self._store.offload(source, self._device.compute_stream().record())


@final
@dataclass(frozen=True)
class Pinning:
    """How host memory is page-locked.

    Attributes:
        size_bytes: how much was tried.
        seconds_per_gib: how long it took, pages allocated included.
        refusal: why the system refused; None if it did not.
    """

    size_bytes: int
    seconds_per_gib: float
    refusal: str | None


def measure_pinning(device: AbstractDevice, size_bytes: int) -> Pinning:
    """Page-lock a block of host memory once, as the host store does, and give it back."""
    begin_s = time.perf_counter()
    memory = allocate_host_memory(device, size_bytes)
    duration_s = time.perf_counter() - begin_s
    memory.give_back()
    return Pinning(size_bytes, duration_s / size_bytes * 2**30, memory.refusal)


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
    """How long measurements may take, in seconds, and what they may use at most.

    Attributes:
        dtypes: the types of the matrix products.
        compute_s: for each kind of computation.
        links_s: for all copies.
        sizes_bytes: sizes of the copies.
        disk_s: for the disk.
        room_bytes: memory of the host; a device has four times as much.
        disk_bytes: the file.
    """

    dtypes: tuple[str, ...]
    compute_s: float
    links_s: float
    sizes_bytes: tuple[int, ...]
    disk_s: float
    room_bytes: int
    disk_bytes: int


FULL: Final = Effort(
    dtypes=tuple(DTYPES),
    compute_s=0.7,
    links_s=4.0,
    sizes_bytes=(64 * 2**10, MIB, 16 * MIB, 64 * MIB),
    disk_s=4.0,
    room_bytes=256 * MIB,
    disk_bytes=512 * MIB,
)
QUICK: Final = Effort(
    dtypes=("fp32", "bf16"),
    compute_s=0.2,
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
        pinning: page-locking; only for an accelerator.
        links: offloads and reloads.
        disk: the disk behind the store's directory.
        problems: why a measurement failed, by its name.
        duration_s: how long it all took.
    """

    facts: MachineFacts
    matmul: dict[str, Sample] = field(default_factory=dict)
    copy: Sample | None = None
    fft: Sample | None = None
    pinning: Pinning | None = None
    links: LinkFigures | None = None
    disk: DiskFigures | None = None
    problems: dict[str, str] = field(default_factory=dict)
    duration_s: float = 0.0

    @property
    def on_cpu(self) -> bool:
        """Whether models compute on the CPU."""
        return self.facts.accelerator is None

    @property
    def rates(self) -> tuple[float, float, float] | None:
        """Bandwidths of large copies: down, up, and both ways at once, in sum.

        On a CPU, a reload maps pages of the file that are in the page cache, and moves nothing.
        Whoever reads the bytes gets them as fast as the memory gives them, so that is the bound.
        """
        if self.links is None:
            return None
        largest = max(self.links.down)
        down, up = (way[largest].median_per_s for way in (self.links.down, self.links.up))
        if self.on_cpu and self.copy is not None:
            up = min(up, self.copy.best_per_s)
        return down, up, min(self.links.both.median_per_s, down + up)

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
        rates = self.rates
        if self.links is None or rates is None or self.copy is None or "fp32" not in self.matmul:
            return None
        down, up, both = rates
        facts, accelerator = self.facts, self.facts.accelerator
        ram_bytes = facts.total_ram_bytes
        measured: dict[str, Any] = {
            "device_memory_bytes": accelerator.total_bytes if accelerator else ram_bytes,
            "device_memory_bytes_per_s": self.copy.best_per_s,
            "fft_flops": self.fft and self.fft.best_per_s,
            "h2d_bytes_per_s": up,
            "d2h_bytes_per_s": down,
            "duplex_bytes_per_s": both,
            "link_latency_s": self.links.latency_s,
            "host_memory_bytes": ram_bytes,
            "pinned_limit_bytes": self.pinned_limit_bytes,
            "disk_write_bytes_per_s": self.disk and self.disk.write_bytes_per_s,
            "disk_read_bytes_per_s": self.disk and self.disk.read_bytes_per_s,
        }
        measured |= {f"matmul_{name}_flops": each.best_per_s for name, each in self.matmul.items()}
        values = {key: value for key, value in measured.items() if value is not None}
        text = f"ebbtide doctor on {time.strftime('%Y-%m-%d')}, torch {facts.torch_version}"
        name = accelerator.name if accelerator else f"{facts.cpu}, {facts.cores} cores"
        sources = tuple(Source(key, Kind.MEASURED, text) for key in values)
        return Hardware(name=name, computes_on_host=self.on_cpu, sources=sources, **values)


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
    is_cpu = torch_device.type == "cpu"
    device: AbstractDevice = CpuDevice() if is_cpu else AcceleratorDevice(torch_device)
    on_cpu = device.computes_on_host
    begin_s = time.perf_counter()
    found = Examination(read_machine(torch_device, directory))
    host_bytes, device_bytes, disk_bytes = _room(found.facts, effort)

    def measure(name: str, work: Callable[..., T], *arguments: Any) -> T | None:
        """Measure; if that fails, note why. A doctor does not stop at the first illness."""
        say(f"measuring: {name}")
        try:
            return work(*arguments)
        except Exception as error:
            text = (str(error).strip().splitlines() or [""])[0]
            kind = "" if isinstance(error, EbbtideError) else f"{type(error).__name__}: "
            found.problems[name] = kind + text
            return None

    limits = effort.compute_s, device_bytes
    products = {
        name: measure(f"matmul {name}", measure_matmul, device, DTYPES[name], *limits)
        for name in effort.dtypes
    }
    if _has_tf32(torch_device):
        products["tf32"] = measure("matmul tf32", measure_tf32, device, *limits)
    found.matmul = {name: each for name, each in products.items() if each is not None}
    found.copy = measure("copy", measure_copy, device, *limits)
    found.fft = measure("fft", measure_fft, device, *limits)
    # The store that models on this device would use.
    store = ("disk", directory, None) if on_cpu else ("host", None, min(device_bytes, host_bytes))
    room_bytes = min(device_bytes, host_bytes, *([disk_bytes] if on_cpu else []))
    build = functools.partial(build_store, device, *store)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of pageable memory; see `pinning`
        if not on_cpu:
            # A power of two, because torch would round other sizes up to the next.
            pinned_bytes = 1 << host_bytes.bit_length() - 1
            found.pinning = measure("pinning", measure_pinning, device, pinned_bytes)
        found.links = measure(
            "links", measure_links, device, build, effort.sizes_bytes, effort.links_s, room_bytes
        )
    found.disk = measure("disk", measure_disk, directory, effort.disk_s, disk_bytes)
    found.duration_s = time.perf_counter() - begin_s
    return found


def _room(facts: MachineFacts, effort: Effort) -> tuple[int, int, int]:
    """Return how much memory of the host and of the device, and how much disk, may be used."""
    host_bytes = device_bytes = min(effort.room_bytes, facts.free_ram_bytes // _RAM_SHARE)
    if facts.accelerator is not None:
        # A device's matrices must be large for it to show what it can do.
        free_bytes = facts.accelerator.free_bytes
        device_bytes = min(4 * effort.room_bytes, free_bytes // _RAM_SHARE)
    free_bytes = facts.store.free_bytes or 0
    if facts.store.in_ram:
        free_bytes = min(free_bytes, facts.free_ram_bytes)
    disk_bytes = min(effort.disk_bytes, free_bytes // _DISK_SHARE)
    return max(MIB, host_bytes), max(MIB, device_bytes), max(MIB, disk_bytes)


def _has_tf32(torch_device: torch.device) -> bool:
    """Whether the device computes float32 in TF32: NVIDIA's since Ampere."""
    if torch_device.type != "cuda" or torch.version.cuda is None:
        return False
    return bool(torch.cuda.get_device_capability(torch_device) >= (8, 0))
