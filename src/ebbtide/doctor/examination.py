"""Examines a machine: reads its facts, measures it, and makes a `Hardware` of the results.

Each measurement has a share of the time and a bound on the memory and disk that it uses. A
measurement that fails is left out, and its error is kept in its place.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, final

import torch

from ebbtide.devices.accelerator import AcceleratorDevice
from ebbtide.devices.cpu import CpuDevice
from ebbtide.devices.device import AbstractDevice
from ebbtide.doctor.compute_speed import (
    measure_copy,
    measure_fft,
    measure_fresh_memory,
    measure_matmul,
    measure_tf32,
)
from ebbtide.doctor.disk_speed import DiskFigures, measure_disk
from ebbtide.doctor.link_speed import LinkFigures, Pinning, measure_links, measure_pinning
from ebbtide.doctor.machine_facts import MachineFacts, OtherPrograms, read_lanes, read_machine
from ebbtide.doctor.sampling import Sample
from ebbtide.errors import EbbtideError, PolicyError
from ebbtide.memory.disk_file import default_directory
from ebbtide.planning.hardware import Hardware, Kind, Source
from ebbtide.stores.build import build_store

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
