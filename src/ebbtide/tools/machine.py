"""Facts of this machine that need no measurement. Whatever the system does not say is None."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import psutil
import torch

from ebbtide.errors import PolicyError
from ebbtide.stores.build import parse_store
from ebbtide.stores.host_memory import cpu_limit, memory_limit

_IN_RAM = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs"}
    | {"fuse.sshfs", "fuse.glusterfs", "orangefs", "wekafs"}
)
_COMPUTING = ("0x03", "0x12")  # classes of displays and accelerators on the PCI bus
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}  # most of Intel's GPUs only display


@final
@dataclass(frozen=True)
class Directory:
    """The directory of a store's files.

    Attributes:
        path: the directory.
        filesystem: its kind, such as ``"ext4"``.
        free_bytes: what may still be written.
    """

    path: str
    filesystem: str | None = None
    free_bytes: int | None = None

    @property
    def in_ram(self) -> bool:
        """Whether its files are kept in RAM."""
        return self.filesystem in _IN_RAM

    @property
    def on_network(self) -> bool:
        """Whether its files are on another machine."""
        return self.filesystem in _NETWORK


@final
@dataclass(frozen=True)
class Accelerator:
    """The accelerator.

    Attributes:
        name: as its driver calls it.
        count: how many of its type torch sees.
        total_bytes: its memory.
        free_bytes: what other programs and this one have left of it.
    """

    name: str
    count: int
    total_bytes: int
    free_bytes: int


@final
@dataclass(frozen=True)
class MachineFacts:
    """The machine as the system describes it.

    Attributes:
        cpu: name of the processor.
        cores: cores that this process may use.
        quota_cores: cores' time that its control group may use.
        torch_threads: threads of torch's kernels.
        torch_version: with the accelerator that torch was built for.
        total_ram_bytes: RAM, or less if the control group allows less.
        free_ram_bytes: what may be allocated without being killed.
        limited_by_group: whether the control group limits the RAM.
        memlock_bytes: the limit on locked memory (``ulimit -l``); None: none, or not known.
        idle_gpus: vendors of GPUs that this torch does not see.
        store: where files of offloaded bytes go.
        accelerator: what the model would compute on; None: the CPU.
    """

    cpu: str
    cores: int
    quota_cores: float | None
    torch_threads: int
    torch_version: str
    total_ram_bytes: int
    free_ram_bytes: int
    limited_by_group: bool
    memlock_bytes: int | None
    idle_gpus: tuple[str, ...]
    store: Directory
    accelerator: Accelerator | None = None


def parse_device(name: str) -> torch.device:
    """Parse the name of a device; ``"auto"`` means the accelerator if there is one, else the CPU.

    Raises:
        PolicyError: this machine has no such device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return torch.device("cpu") if accelerator is None else accelerator
    try:
        device = torch.device(name)
    except RuntimeError:
        raise PolicyError(f"--device: {name!r} is not a torch device; try auto or cpu") from None
    if device.type == "cpu":
        return torch.device("cpu")
    is_seen = accelerator is not None and device.type == accelerator.type
    number = torch.accelerator.device_count() if is_seen else 0
    if (device.index or 0) >= number:
        seen = f"{number} such devices, numbered from 0" if number else "no such device"
        raise PolicyError(f"--device {name}: torch sees {seen} on this machine; try auto or cpu")
    return device


def find_directory(store: str) -> Path | None:
    """Return the directory that a store is given; None: it is given none.

    Raises:
        PolicyError: there is no such store, or no such directory.
    """
    _, directory = parse_store(store)
    if directory is not None and not directory.is_dir():
        raise PolicyError(f"--store {store}: there is no such directory")
    return directory


def read_machine(
    torch_device: torch.device, directory: Path, root: Path = Path("/")
) -> MachineFacts:
    """Read what the system says about itself.

    Args:
        torch_device: the device of the model.
        directory: where files of offloaded bytes go.
        root: where ``proc`` and ``sys`` are.
    """
    on_cpu = torch_device.type == "cpu"
    group = memory_limit(root)
    ram = psutil.virtual_memory()
    total_bytes, free_bytes = int(ram.total), int(ram.available)
    if group is not None:
        total_bytes = min(total_bytes, group.limit_bytes)
        free_bytes = min(free_bytes, group.free_bytes)
    return MachineFacts(
        cpu=cpu_name(root),
        cores=usable_cores(),
        quota_cores=cpu_limit(root),
        torch_threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        total_ram_bytes=total_bytes,
        free_ram_bytes=free_bytes,
        limited_by_group=group is not None,
        memlock_bytes=_memlock(),
        idle_gpus=_gpus(root) if on_cpu else (),
        store=read_directory(directory),
        accelerator=None if on_cpu else _accelerator(torch_device),
    )


def read_directory(path: Path) -> Directory:
    """Return what the system says about a directory."""
    try:
        free_bytes: int | None = shutil.disk_usage(path).free
    except OSError:
        free_bytes = None
    return Directory(str(path), _filesystem(path), free_bytes)


def usable_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name(root: Path = Path("/")) -> str:
    """The name of the processor."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return " ".join(value.split())
    return platform.processor() or platform.machine() or "CPU"


def _filesystem(path: Path) -> str | None:
    """Return the kind of file system of a path: that of the longest mount point above it."""
    try:
        mounts = psutil.disk_partitions(all=True)
        place = path.resolve()
    except (OSError, RuntimeError):
        return None
    around = [each for each in mounts if Path(each.mountpoint) in (place, *place.parents)]
    # Of two mounts at one point, the later hides the earlier.
    around.sort(key=lambda each: len(Path(each.mountpoint).parts))
    return (around[-1].fstype.lower() or None) if around else None


def _memlock() -> int | None:
    if sys.platform != "linux":
        return None
    limit, _ = psutil.Process().rlimit(psutil.RLIMIT_MEMLOCK)
    return None if limit == psutil.RLIM_INFINITY else int(limit)


def _gpus(root: Path) -> tuple[str, ...]:
    """Return the vendors of GPUs on the PCI bus that compute."""
    vendors = set()
    for device in (root / "sys/bus/pci/devices").glob("*"):
        vendor = _VENDORS.get(_read(device / "vendor").strip())
        if vendor is not None and _read(device / "class").startswith(_COMPUTING):
            vendors.add(vendor)
    return tuple(sorted(vendors))


def _accelerator(torch_device: torch.device) -> Accelerator:
    module = torch.get_device_module(torch_device)
    try:
        free_bytes, total_bytes = module.mem_get_info(torch_device)
    except (AttributeError, RuntimeError):  # some drivers do not say what is free
        free_bytes = total_bytes = module.get_device_properties(torch_device).total_memory
    name, count = str(module.get_device_name(torch_device)), torch.accelerator.device_count()
    return Accelerator(name, count, int(total_bytes), int(free_bytes))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


# ---- Repeats a measurement until its time is used up ----


@final
@dataclass(frozen=True)
class Sample:
    """Equal repetitions of one piece of work.

    Attributes:
        amount: bytes or FLOP of one repetition.
        note: what the work was, such as ``"n = 2048"``.
        repetitions: how many there were.
        best_per_s: the rate of the fastest repetition: what the machine can do when nothing
            disturbs it.
        median_per_s: the rate of the median repetition: what a step gets.
    """

    amount: float
    note: str
    repetitions: int
    best_per_s: float
    median_per_s: float

    @classmethod
    def of(cls, amount: float, durations_s: Sequence[float], note: str = "") -> Sample:
        """Return the sample of repetitions that took so long."""
        best_s, median_s = min(durations_s), statistics.median(durations_s)
        return cls(amount, note, len(durations_s), amount / best_s, amount / median_s)


def sample(
    amount: float,
    work: Callable[[], float | None],
    budget_s: float,
    *,
    most: int = 200,
    note: str = "",
) -> Sample:
    """Repeat work until its time is used up, at least twice; the first repetition warms up.

    Args:
        amount: bytes or FLOP of one repetition.
        work: does one repetition, and blocks until it is done. It may return the seconds that
            count, if it also does what does not count.
        budget_s: stop once so much time has passed.
        most: stop after so many repetitions.
        note: what the work is.
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
    return Sample.of(amount, durations[1:], note)
