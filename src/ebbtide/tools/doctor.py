"""What `ebbtide doctor` does: measures a machine, says what slows ebbtide there, and reports.

It measures what the device computes, what the link to the tier below moves, and what a disk takes.
Each measurement has a share of the time and a bound on the memory and disk that it uses. One that
fails is left out, and its error is kept in its place.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, final

import torch
from rich.console import RenderableType

from ebbtide.devices.accelerator import AcceleratorDevice
from ebbtide.devices.cpu import CpuDevice
from ebbtide.devices.device import AbstractDevice
from ebbtide.devices.hardware import Hardware
from ebbtide.errors import EbbtideError, PolicyError
from ebbtide.stores import measured_memory as freed_memory
from ebbtide.stores.build import build_store
from ebbtide.stores.disk_file import OpenFile, default_directory
from ebbtide.stores.host_memory import allocate_host_memory
from ebbtide.stores.store import AbstractStore, Extent, Slot
from ebbtide.tools.layout import columns, indented, labelled, render, scaled
from ebbtide.tools.machine import MachineFacts, read_machine
from ebbtide.units import count, format_seconds, format_size, three_digits

T = TypeVar("T")

_MIB: Final = 2**20
_GIB: Final = 2**30
_DTYPES: Final = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_LONG_ENOUGH_S: Final = 0.03  # of one repetition: then the start of a kernel does not count
_SMALLEST, _LARGEST = 256, 8192  # rows of the matrices
_COPY_BYTES: Final = 512 * _MIB
_LEAST_COPY_BYTES: Final = 32 * _MIB  # smaller tensors are copied within caches
_FFT_NODES, _FFT_CHANNELS = 256, 32
_SHORT_COPY_BYTES: Final = 64 * 2**10  # whose time is mostly what each copy costs beside its bytes
_LONG_COPY_BYTES: Final = 64 * _MIB  # the most; smaller where there is no room
# Copies are queued one behind the other up to so many bytes, by whether the device is the CPU: fast
# links need many, or what the host does for each counts, too.
_QUEUED_BYTES: Final = {True: 16 * _MIB, False: 128 * _MIB}
_MOST_QUEUED: Final = 32
_WAYS: Final = (("down", True, False), ("up", False, True), ("both", True, True))
_CHUNK_BYTES: Final = 8 * _MIB  # of a file
_RAM_SHARE, _DISK_SHARE = 8, 50  # of what is free, at most this part is used


# How long each kind of computation, each direction of the link, and the disk are measured.
FULL_S: Final = 1.0
QUICK_S: Final = 0.2
ROOM_BYTES: Final = 256 * _MIB  # memory of the host, and the file; a device has four times as much


def repeat(work: Callable[[], float | None], budget_s: float, *, most: int = 200) -> list[float]:
    """Return the seconds of repetitions of work, until its time is used up; one before warms up.

    Args:
        work: does one repetition, and blocks until it is done. It may return the seconds that
            count, if it also does what does not count.
        budget_s: stop once so much time has passed, but not before one repetition counts.
        most: stop after so many repetitions.
    """
    begin_s = time.perf_counter()
    durations: list[float] = []
    while len(durations) < 2 or (
        len(durations) <= most and time.perf_counter() - begin_s < budget_s
    ):
        before_s = time.perf_counter()
        own_s = work()
        passed_s = time.perf_counter() - before_s if own_s is None else own_s
        durations.append(max(passed_s, 1e-9))
    return durations[1:]


# ---- What a device computes, where nothing disturbs it: by the fastest repetition ----


def finish(device: AbstractDevice) -> None:
    """Block until the device has done what was queued on its compute stream."""
    device.compute_stream().record().synchronize()


def measure_matmul(
    device: AbstractDevice, dtype: torch.dtype, budget_s: float, room_bytes: int
) -> float:
    """Measure FLOP per second of products of square matrices, as large as time and memory allow."""
    size = _SMALLEST
    while True:
        # Random numbers: a GPU that multiplies equal ones needs less power, and runs faster.
        left = torch.rand(size, size, device=device.torch_device).to(dtype)
        right, out = torch.roll(left, 1), torch.empty_like(left)

        def multiply(left: torch.Tensor = left, right: Any = right, out: Any = out) -> None:
            torch.mm(left, right, out=out)
            finish(device)

        once_s = min(repeat(multiply, _LONG_ENOUGH_S, most=2))
        too_large = size == _LARGEST or 3 * 4 * left.nbytes > room_bytes
        # Larger matrices take eight times as long, four times here and more after.
        if once_s > _LONG_ENOUGH_S or too_large or 4 * 8 * once_s > budget_s:
            return 2.0 * size**3 / min(repeat(multiply, budget_s))
        size *= 2


def measure_copy(device: AbstractDevice, budget_s: float, room_bytes: int) -> float:
    """Measure a copy within the device's memory, in bytes read and written per second.

    Raises:
        MemoryError: so little memory is free that the copy would stay in caches.
    """
    size_bytes = min(_COPY_BYTES, room_bytes // 2)
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

    return 2.0 * size_bytes / min(repeat(copy, budget_s))


def measure_fft(device: AbstractDevice, budget_s: float, room_bytes: int) -> float:
    """Measure 2D FFTs of real float32 fields as an FNO has them; one is 2.5 n log2 n FLOP."""
    nodes = _FFT_NODES**2
    channels = max(1, min(_FFT_CHANNELS, room_bytes // (3 * nodes * 4)))
    field = torch.ones(channels, _FFT_NODES, _FFT_NODES, device=device.torch_device)

    def transform() -> None:
        torch.fft.rfft2(field)
        finish(device)

    return 2.5 * channels * nodes * math.log2(nodes) / min(repeat(transform, budget_s))


# ---- What the link to the tier below moves, and a disk without the help of the page cache ----
#
# For an accelerator the tier below is page-locked host memory, for a CPU a file. Copies go through
# `AbstractStore.offload` and `reload`, so that what is measured is what ebbtide will get, with the
# page cache of the file and with what the store does beside copying.


def measure_links(
    device: AbstractDevice,
    build_store: Callable[[], AbstractStore],
    budget_s: float,
    room_bytes: int,
) -> dict[str, float]:
    """Measure offloads, reloads and both at once.

    Args:
        device: the device.
        build_store: builds its store. Each size gets one of its own, because a store keeps the
            memory of smaller copies, which the largest ones need.
        budget_s: about how long each direction may take.
        room_bytes: the most memory to use in each tier.

    Returns:
        The rates of large copies in the median, which is what a step gets: ``"down"``, ``"up"`` and
        ``"both"``, in bytes of both, in a second; ``"latency_s"``: what a copy costs beside its
        bytes, by small copies, the dearer way; ``"copy_bytes"``: the size of large copies.
    """
    copy_bytes = max(_SHORT_COPY_BYTES, min(_LONG_COPY_BYTES, room_bytes // 4))
    links = {"copy_bytes": float(copy_bytes)}
    one_s = dict[str, float]()
    for size_bytes in (_SHORT_COPY_BYTES, copy_bytes):
        queued_bytes = min(_QUEUED_BYTES[device.computes_on_host], room_bytes // 2)
        number = max(1, min(_MOST_QUEUED, queued_bytes // size_bytes))
        sources = torch.split(device.allocate(number * size_bytes).fill_(1), size_bytes)
        stored: list[Slot] = []
        with contextlib.closing(build_store()) as store:
            for name, down, up in _WAYS:
                copies = functools.partial(
                    _time_copies, device, store, sources, stored, down=down, up=up
                )
                took_s = statistics.median(repeat(copies, budget_s))
                links[name] = (down + up) * number * size_bytes / took_s
                one_s.setdefault(name, size_bytes / links[name])
            _drop(store, stored)
    beside = (one_s[name] - _SHORT_COPY_BYTES / links[name] for name in ("down", "up"))
    return links | {"latency_s": max(0.0, *beside)}


def _time_copies(
    device: AbstractDevice,
    store: AbstractStore,
    sources: Sequence[torch.Tensor],
    stored: list[Slot],
    *,
    down: bool,
    up: bool,
) -> float:
    """Return the seconds of copies that are queued one behind the other.

    Args:
        device: the device.
        store: its store.
        sources: what is offloaded.
        stored: where copies of it are in the store; offloads alone are kept there.
        down: whether to offload.
        up: whether to reload.
    """
    if not up:
        _drop(store, stored)
    slots, arrivals = list[Slot](), []
    begin_s = time.perf_counter()
    for number, source in enumerate(sources):
        if down:
            slots.append(store.offload(source, device.compute_stream().record()))
        if up:
            arrivals.append(store.reload(stored[number]))
    for slot in slots:
        slot.offloaded.synchronize()
    for _, ready in arrivals:
        ready.synchronize()
    took_s = time.perf_counter() - begin_s
    if up:
        _drop(store, slots)
    stored += slots
    return took_s


def _drop(store: AbstractStore, slots: list[Slot]) -> None:
    for slot in slots:
        store.drop(slot)
    slots.clear()


def measure_pinning(device: AbstractDevice, size_bytes: int) -> dict[str, Any]:
    """Page-lock a block of host memory once, as the host store does, and give it back.

    Returns:
        ``"size_bytes"``: how much was tried; ``"seconds_per_gib"``: how long it took, pages
        allocated included; ``"refusal"``: why the system refused; None if it did not.
    """
    begin_s = time.perf_counter()
    memory = allocate_host_memory(device, size_bytes)
    seconds_per_gib = (time.perf_counter() - begin_s) / size_bytes * _GIB
    memory.give_back()
    refusal = memory.refusal
    return {"size_bytes": size_bytes, "seconds_per_gib": seconds_per_gib, "refusal": refusal}


def measure_disk(directory: Path, budget_s: float, room_bytes: int) -> dict[str, float]:
    """Write a file, wait until it is on the disk, and read it back without the page cache.

    The file has no name, so nothing is left behind, however the process ends.

    Args:
        directory: where.
        budget_s: about how long this may take.
        room_bytes: the largest file to write.

    Returns:
        ``"size_bytes"`` of the file, ``"write_bytes_per_s"`` and ``"read_bytes_per_s"``.

    Raises:
        PolicyError: the directory is missing or cannot be written to.
        OSError: the disk has no room, or fails.
    """
    file = OpenFile(directory)
    # A disk that compresses would store equal bytes in no time.
    chunk = memoryview(os.urandom(max(mmap.PAGESIZE, min(_CHUNK_BYTES, room_bytes // 2))))
    size_bytes = 0
    begin_s = time.perf_counter()
    while not size_bytes or (
        size_bytes + len(chunk) <= room_bytes and time.perf_counter() - begin_s < budget_s
    ):
        file.reserve(Extent(size_bytes, len(chunk)))  # as the store does
        file.write(chunk, size_bytes)
        os.fsync(file.fd)
        size_bytes += len(chunk)
    written_s = time.perf_counter()
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    target = memoryview(bytearray(len(chunk)))
    read_begin_s = time.perf_counter()
    for begin in range(0, size_bytes, len(chunk)):
        file.read(target, begin)
    return {
        "size_bytes": size_bytes,
        "write_bytes_per_s": size_bytes / (written_s - begin_s),
        "read_bytes_per_s": size_bytes / (time.perf_counter() - read_begin_s),
    }


# ---- An examination, and the `Hardware` that it makes ----


@final
@dataclass
class Examination:
    """What was found out about a machine; None where a measurement failed.

    Attributes:
        facts: what the system says.
        matmul: FLOP per second of products of matrices, by type: ``"fp64"``, ``"fp32"`` and so on.
        copy: bytes per second that copies in the device's memory read and write.
        fft: FLOP per second of 2D FFTs.
        pinning: page-locking; only for an accelerator. See `measure_pinning`.
        links: offloads and reloads. See `measure_links`.
        disk: the disk behind the store's directory. See `measure_disk`.
        problems: why a measurement failed, by its name.
    """

    facts: MachineFacts
    matmul: dict[str, float] = field(default_factory=dict)
    copy: float | None = None
    fft: float | None = None
    pinning: dict[str, Any] | None = None
    links: dict[str, float] | None = None
    disk: dict[str, float] | None = None
    problems: dict[str, str] = field(default_factory=dict)

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
        down, up, both = (self.links[name] for name in ("down", "up", "both"))
        if self.on_cpu and self.copy is not None:
            up = min(up, self.copy)
        return down, up, min(both, down + up)

    @property
    def pinned_limit_bytes(self) -> int:
        """How much memory can be page-locked."""
        if self.on_cpu or self.pinning is None:
            return 0
        if self.pinning["refusal"] is None:
            return self.facts.free_ram_bytes
        return min(self.facts.memlock_bytes or 0, self.facts.free_ram_bytes)

    def hardware(self) -> Hardware | None:
        """Return the figures that a plan needs; None if one of them could not be measured."""
        rates, facts = self.rates, self.facts
        if self.links is None or rates is None or self.copy is None or "fp32" not in self.matmul:
            return None
        down, up, both = rates
        disk = self.disk or {}
        measured: dict[str, Any] = {
            "device_memory_bytes": facts.accelerator_bytes or facts.total_ram_bytes,
            "device_memory_bytes_per_s": self.copy,
            "fft_flops": self.fft,
            "h2d_bytes_per_s": up,
            "d2h_bytes_per_s": down,
            "duplex_bytes_per_s": both,
            "link_latency_s": self.links["latency_s"],
            "host_memory_bytes": facts.total_ram_bytes,
            "pinned_limit_bytes": self.pinned_limit_bytes,
            "disk_write_bytes_per_s": disk.get("write_bytes_per_s"),
            "disk_read_bytes_per_s": disk.get("read_bytes_per_s"),
        }
        measured |= {f"matmul_{name}_flops": rate for name, rate in self.matmul.items()}
        values = {key: value for key, value in measured.items() if value is not None}
        name = facts.accelerator or f"{facts.cpu}, {facts.cores} cores"
        how = f"ebbtide doctor on {time.strftime('%Y-%m-%d')}, torch {facts.torch_version}"
        hardware = Hardware(name=name, computes_on_host=self.on_cpu, **values)
        return hardware.with_measured(values, how)


def examine(
    torch_device: torch.device,
    directory: Path | None = None,
    each_s: float = FULL_S,
    say: Callable[[str], None] = lambda _: None,
) -> Examination:
    """Examine this machine.

    Args:
        torch_device: what the model would compute on.
        directory: where files of offloaded bytes would go; None: the system's directory for
            temporary files.
        each_s: about how long each measurement may take.
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
    found = Examination(read_machine(torch_device, directory))
    host_bytes, device_bytes, disk_bytes = _room(found.facts)

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

    limits = each_s, device_bytes
    for name, dtype in _DTYPES.items():
        rate = measure(f"matmul {name}", measure_matmul, device, dtype, *limits)
        found.matmul |= {} if rate is None else {name: rate}
    found.copy = measure("copy", measure_copy, device, *limits)
    found.fft = measure("fft", measure_fft, device, *limits)
    room_bytes = min(device_bytes, host_bytes, *([disk_bytes] if on_cpu else []))

    def build() -> AbstractStore:  # that models on this device would use
        store = ("disk", directory, None) if on_cpu else ("host", None, room_bytes)
        return build_store(device, *store)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of pageable memory; see `pinning`
        if not on_cpu:
            # A power of two, because torch would round other sizes up to the next.
            pinned_bytes = 1 << host_bytes.bit_length() - 1
            found.pinning = measure("pinning", measure_pinning, device, pinned_bytes)
        found.links = measure("links", measure_links, device, build, each_s, room_bytes)
    found.disk = measure("disk", measure_disk, directory, each_s, disk_bytes)
    return found


def _room(facts: MachineFacts) -> tuple[int, int, int]:
    """Return how much memory of the host and of the device, and how much disk, may be used."""
    host_bytes = device_bytes = min(ROOM_BYTES, facts.free_ram_bytes // _RAM_SHARE)
    if facts.accelerator is not None:
        # A device's matrices must be large for it to show what it can do.
        device_bytes = min(4 * ROOM_BYTES, facts.accelerator_free_bytes // _RAM_SHARE)
    disk_bytes = min(ROOM_BYTES, (facts.store_free_bytes or 0) // _DISK_SHARE)
    return max(_MIB, host_bytes), max(_MIB, device_bytes), max(_MIB, disk_bytes)


# ---- Advice, each piece with the evidence that it rests on ----


def advise(found: Examination) -> Iterator[str]:
    """Yield advice in plain sentences, what prevents offloading first."""
    facts, pinning = found.facts, found.pinning
    used_for = "" if found.on_cpu else ', which only store="disk" and "tiered" use'
    failure = found.problems.get("links" if found.on_cpu else "disk")
    free_bytes = facts.store_free_bytes
    if failure is not None:
        yield (
            f"Nothing can be offloaded to {facts.store}{used_for}: {failure.partition(';')[0]}. "
            f'Name a directory that can be written to, with store="disk:/some/dir" or TMPDIR.'
        )
    elif facts.store_is_in_ram:
        yield (
            f"{facts.store} is a {facts.store_filesystem}: its files are kept in RAM, so "
            f"offloading there frees no RAM{used_for}. Use "
            f'store="disk:/a/directory/on/a/disk".'
        )
    elif found.on_cpu and free_bytes is not None and free_bytes < facts.total_ram_bytes:
        yield (
            f"{facts.store} has {format_size(free_bytes)} free, less than the RAM of "
            f"{format_size(facts.total_ram_bytes)}. A step that offloads more than that stops "
            f"with StoreFullError."
        )
    if facts.has_unseen_gpu:
        yield (
            f"This machine has the driver of a GPU that torch {facts.torch_version} does not see. "
            f"Install the build of torch for it (pytorch.org/get-started)."
        )
    if pinning is not None and pinning["refusal"] is not None:
        limit = ""
        if (facts.memlock_bytes or math.inf) < pinning["size_bytes"]:
            size = format_size(facts.memlock_bytes or 0)
            limit = f" The limit on locked memory is {size}; raise it (ulimit -l)."
        yield (
            f"The system refused to page-lock {format_size(pinning['size_bytes'])} "
            f"({pinning['refusal']}). Copies from pageable memory are slower and do not overlap "
            f"with compute.{limit}"
        )
    if found.on_cpu and sys.platform == "linux" and not freed_memory.FreedMemory().is_returned:
        yield freed_memory.describe()


# ---- The report of an examination ----

_LABEL_WIDTH: Final = 15
_TABLE_WIDTHS: Final = (31, 14, 14)  # of what is measured, and of its rates


def build_report(found: Examination, advice: Sequence[str]) -> str:
    """Return the report.

    Args:
        found: the examination.
        advice: what `advise` says about it.
    """
    parts: list[RenderableType] = ["This machine", labelled(_machine(found), _LABEL_WIDTH)]
    computed = {f"matmul {_type_name(name)}": rate for name, rate in found.matmul.items()}
    rows: list[Sequence[str]] = [
        (label, scaled(rate, "FLOP/s"))
        for label, rate in (computed | {"FFT in 2D, float32": found.fft}).items()
        if rate is not None
    ]
    if found.copy is not None:
        rows.append(("copy, read + written", scaled(found.copy, "B/s")))
    parts += _table("Compute", "at best", "", rows)
    if found.links is not None and found.rates is not None:
        down, up, both = (scaled(rate, "B/s") for rate in found.rates)
        rows = [
            (f"copies of {format_size(int(found.links['copy_bytes']))}", down, up),
            ("both at once, in sum", both),
            ("each copy besides", format_seconds(found.links["latency_s"])),
        ]
        where = "files in the page cache" if found.on_cpu else "host memory"
        parts += _table(f"Link to {where}", "offload", "reload", rows)
    if found.disk is not None:
        ways = (scaled(found.disk[f"{way}_bytes_per_s"], "B/s") for way in ("write", "read"))
        rows = [(f"{format_size(int(found.disk['size_bytes']))}, not cached", *ways)]
        parts += _table("Disk", "write", "read", rows)
    if found.problems:
        problems = (f"{name}: {why}" for name, why in found.problems.items())
        parts += ["", "Not measured", *map(indented, problems)]
    parts += [
        "",
        "Advice",
        *map(indented, advice or ["Nothing was found that slows ebbtide here."]),
    ]
    parts += ["", "What ebbtide can do here", *map(indented, summarize(found))]
    return render(*parts)


def _type_name(name: str) -> str:
    return str(_DTYPES[name]).removeprefix("torch.")


def summarize(found: Examination) -> Iterator[str]:
    """Yield what the figures mean for a model, in sentences."""
    if found.rates is None:
        yield "Nothing can be offloaded as the machine is; see the advice."
        return
    down, up, both = found.rates
    yield (
        f"1 GiB of activations leaves in {format_seconds(_GIB / down)} and comes back in "
        f"{format_seconds(_GIB / up)}; 1 GiB each way at once takes "
        f"{format_seconds(2 * _GIB / both)}."
    )
    if found.on_cpu and found.disk is not None and not found.facts.store_is_in_ram:
        yield (
            f"That is so while the page cache has room. Beyond it the disk decides: 1 GiB then "
            f"leaves in {format_seconds(_GIB / found.disk['write_bytes_per_s'])} and comes back in "
            f"{format_seconds(_GIB / found.disk['read_bytes_per_s'])}."
        )
    meanwhile = [
        f"{three_digits(rate / down)} FLOP of {_type_name(name)}"
        for name, rate in found.matmul.items()
        if name in ("fp32", "bf16")
    ]
    if meanwhile:
        yield (
            f"While one byte leaves, the device computes {' or '.join(meanwhile)} matrix "
            f"products. A layer that computes less for each byte that it saves waits for the link, "
            f"and one that computes for 100 ms hides {format_size(int(down / 10))}."
        )
    yield "`ebbtide doctor --json` prints these figures for a plan to read."


def _machine(found: Examination) -> Iterator[tuple[str, str]]:
    facts, pinning = found.facts, found.pinning
    yield "processor", f"{facts.cpu}, {count(facts.cores, 'core')}"
    yield "torch", f"{facts.torch_version}, {count(facts.torch_threads, 'thread')}"
    if facts.accelerator is None:
        yield "device", "the CPU"
    else:
        yield "device", f"{facts.accelerator}, 1 of {facts.num_accelerators}"
        free = format_size(facts.accelerator_free_bytes)
        yield "device memory", f"{format_size(facts.accelerator_bytes)}, {free} free"
    total, free = format_size(facts.total_ram_bytes), format_size(facts.free_ram_bytes)
    by_group = " (limited by the control group)" if facts.limited_by_group else ""
    yield "RAM", f"{total}, {free} free{by_group}"
    memlock = facts.memlock_bytes
    locked = "no limit" if memlock is None else f"limit {format_size(memlock)}"
    if pinning is not None:
        took = f"locked, {format_seconds(pinning['seconds_per_gib'])} for each GiB"
        done = took if pinning["refusal"] is None else "refused"
        locked += f"; {format_size(pinning['size_bytes'])} were {done}"
    yield "locked memory", locked
    free = "" if facts.store_free_bytes is None else f", {format_size(facts.store_free_bytes)} free"
    in_ram = ", in RAM" if facts.store_is_in_ram else ""
    yield "store's files", f"{facts.store} ({facts.store_filesystem or 'unknown'}{in_ram}){free}"


def _table(
    title: str, first: str, second: str, rows: Sequence[Sequence[str]]
) -> Iterator[RenderableType]:
    yield ""
    indented_rows = (("  " + label, *cells) for label, *cells in rows)
    yield columns((title, first, second, ""), indented_rows, widths=_TABLE_WIDTHS, indent=0)
