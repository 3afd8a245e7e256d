"""Facts of this machine that need no measurement. Whatever the system does not say is None."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import psutil
import torch

from ebbtide.stores.host_memory import MemoryLimit, cpu_limit, memory_limit, pci_directory

_IN_RAM = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs"}
    | {"fuse.sshfs", "fuse.glusterfs", "orangefs", "wekafs"}
)
_DISPLAY = "0x03"  # class of display controllers and accelerators' first byte on the PCI bus
_ACCELERATOR = "0x12"
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}


@final
@dataclass(frozen=True)
class Directory:
    """The directory of a store's files.

    Attributes:
        path: the directory.
        filesystem: its kind, such as ``"ext4"``.
        total_bytes: size of the file system.
        free_bytes: what may still be written.
    """

    path: Path
    filesystem: str | None = None
    total_bytes: int | None = None
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
    """The accelerator, and its place in the machine.

    Attributes:
        name: as its driver calls it.
        count: how many of its type torch sees.
        total_bytes: its memory.
        free_bytes: what other programs and this one have left of it.
        lanes: PCIe lanes in use, and lanes that it has.
        numa_node: the NUMA node that it is attached to.
        near_cores: the cores of that node that this process may use.
    """

    name: str
    count: int
    total_bytes: int
    free_bytes: int
    lanes: tuple[int, int] | None = None
    numa_node: int | None = None
    near_cores: int | None = None


@final
@dataclass(frozen=True)
class MachineFacts:
    """The machine as the system describes it.

    Attributes:
        system: the operating system.
        cpu: name of the processor.
        cores: cores that this process may use.
        quota_cores: cores' time that its control group may use.
        torch_threads: threads of torch's kernels.
        torch_version: with the accelerator that torch was built for.
        total_ram_bytes: RAM, or less if the control group allows less.
        free_ram_bytes: what may be allocated without being killed.
        group: the limit of the control group on memory.
        swap_bytes: swap in use, and swap that there is.
        memlock_bytes: the limit on locked memory (``ulimit -l``); None: none, or not known.
        huge_pages: the kernel's setting of transparent huge pages.
        torch_huge_pages: whether torch asks for huge pages.
        numa_nodes: NUMA nodes.
        idle_gpus: vendors of GPUs that this torch does not see.
        store: where files of offloaded bytes go.
        accelerator: what the model would compute on; None: the CPU.
    """

    system: str
    cpu: str
    cores: int
    quota_cores: float | None
    torch_threads: int
    torch_version: str
    total_ram_bytes: int
    free_ram_bytes: int
    group: MemoryLimit | None
    swap_bytes: tuple[int, int]
    memlock_bytes: int | None
    huge_pages: str | None
    torch_huge_pages: bool
    numa_nodes: int | None
    idle_gpus: tuple[str, ...]
    store: Directory
    accelerator: Accelerator | None = None

    def figures(self) -> dict[str, Any]:
        """Return the facts for a JSON file."""
        entries = dict(vars(self))
        entries["store"] = {**vars(self.store), "path": str(self.store.path)}
        entries["group"] = None if self.group is None else self.group._asdict()
        entries["accelerator"] = None if self.accelerator is None else dict(vars(self.accelerator))
        return entries


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
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    return MachineFacts(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu_name(root),
        cores=usable_cores(),
        quota_cores=cpu_limit(root),
        torch_threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        total_ram_bytes=total_bytes,
        free_ram_bytes=free_bytes,
        group=group,
        swap_bytes=_swap(),
        memlock_bytes=_memlock(),
        huge_pages=_chosen(_read(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        torch_huge_pages=_torch_asks_for_huge_pages(os.environ),
        numa_nodes=len(nodes) or None,
        idle_gpus=_gpus(root) if on_cpu else (),
        store=read_directory(directory),
        accelerator=None if on_cpu else _accelerator(torch_device, root),
    )


def read_directory(path: Path) -> Directory:
    """Return what the system says about a directory."""
    try:
        usage = shutil.disk_usage(path)
        sizes: tuple[int | None, int | None] = usage.total, usage.free
    except OSError:
        sizes = None, None
    return Directory(path, _filesystem(path), *sizes)


def another_disk(avoided: Path) -> Path | None:
    """Return a directory on a disk of this machine with the most room; None if there is none.

    Args:
        avoided: a directory whose file system is not wanted.
    """
    found: dict[int, tuple[int, Path]] = {os.stat(avoided).st_dev: (0, avoided)}
    candidates = ["/var/tmp", "~", ".", "/scratch", "/data"]
    for path in (Path(os.path.expanduser(name)).absolute() for name in candidates):
        directory = read_directory(path)
        unfit = directory.in_ram or directory.on_network or directory.filesystem is None
        if not unfit and directory.free_bytes and os.access(path, os.W_OK):
            found.setdefault(os.stat(path).st_dev, (directory.free_bytes, path))
    free_bytes, path = max(found.values(), key=lambda entry: entry[0])
    return path if free_bytes else None


@final
class OtherPrograms:
    """Counts the processor time that other programs take, from its construction on."""

    def __init__(self) -> None:
        self._begin_s = time.perf_counter()
        self._before_s = self._others_s()

    def cores(self) -> float | None:
        """The cores that they kept busy on average; None if the system does not say."""
        after_s = self._others_s()
        if self._before_s is None or after_s is None:
            return None
        return max(0.0, after_s - self._before_s) / (time.perf_counter() - self._begin_s)

    def _others_s(self) -> float | None:
        try:
            machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
        except (OSError, RuntimeError, psutil.Error):
            return None
        busy = ("user", "nice", "system", "irq", "softirq", "steal")
        all_s = sum(getattr(machine, name, 0.0) for name in busy)
        return float(all_s - own.user - own.system)


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
    best: tuple[int, str] | None = None
    for number, mount in enumerate(mounts):
        point = Path(mount.mountpoint)
        # Of two mounts at one point, the later hides the earlier.
        if place == point or point in place.parents:
            length = len(point.parts) * len(mounts) + number
            best = max(best or (-1, ""), (length, mount.fstype.lower()))
    return best[1] or None if best is not None else None


def _swap() -> tuple[int, int]:
    try:
        swap = psutil.swap_memory()
    except (OSError, RuntimeError):
        return 0, 0
    return int(swap.used), int(swap.total)


def _memlock() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    if not hasattr(resource, "RLIMIT_MEMLOCK"):
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else int(limit)


def _torch_asks_for_huge_pages(environment: Mapping[str, str]) -> bool:
    return environment.get("THP_MEM_ALLOC_ENABLE") == "1"


def _chosen(text: str) -> str | None:
    """Return the word in brackets, such as ``"madvise"`` of ``"always [madvise] never"``."""
    _, bracket, rest = text.partition("[")
    return rest.partition("]")[0] if bracket else None


def _gpus(root: Path) -> tuple[str, ...]:
    """Return the vendors of GPUs on the PCI bus that compute. Most Intel GPUs only display."""
    vendors = set()
    for device in (root / "sys/bus/pci/devices").glob("*"):
        kind = _read(device / "class").strip()
        vendor = _VENDORS.get(_read(device / "vendor").strip())
        if vendor in ("NVIDIA", "AMD") and kind.startswith((_DISPLAY, _ACCELERATOR)):
            vendors.add(vendor)
    return tuple(sorted(vendors))


def _accelerator(torch_device: torch.device, root: Path) -> Accelerator:
    module = torch.get_device_module(torch_device)
    try:
        free_bytes, total_bytes = module.mem_get_info(torch_device)
    except (AttributeError, RuntimeError):  # some drivers do not say what is free
        free_bytes = total_bytes = module.get_device_properties(torch_device).total_memory
    pci = pci_directory(torch_device)
    node = None
    if pci is not None:
        text = _read(pci / "numa_node").strip()
        node = int(text) if text.isdigit() else None
    return Accelerator(
        name=str(module.get_device_name(torch_device)),
        count=torch.accelerator.device_count(),
        total_bytes=int(total_bytes),
        free_bytes=int(free_bytes),
        lanes=read_lanes(torch_device),
        numa_node=node,
        near_cores=None if node is None else _cores_of(node, root),
    )


def read_lanes(torch_device: torch.device) -> tuple[int, int] | None:
    """Return the PCIe lanes that a device uses, and those that it has; None if unknown.

    A device that is idle may have given up lanes to save power, so ask right after copies.
    """
    pci = pci_directory(torch_device)
    if pci is None:
        return None
    words = [_read(pci / f"{which}_link_width").strip() for which in ("current", "max")]
    if not all(word.isdigit() for word in words):
        return None
    now, most = map(int, words)
    return (now, most) if now and most else None


def _cores_of(node: int, root: Path) -> int | None:
    text = _read(root / f"sys/devices/system/node/node{node}/cpulist").strip()
    if not text or not hasattr(os, "sched_getaffinity"):
        return None
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return len(cores & os.sched_getaffinity(0))


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
        durations_s: how long each took.
        note: what the work was, such as ``"n = 2048"``.
    """

    amount: float
    durations_s: tuple[float, ...]
    note: str = ""

    @property
    def best_per_s(self) -> float:
        """The rate of the fastest repetition: what the machine can do when nothing disturbs it."""
        return self.amount / min(self.durations_s)

    @property
    def median_per_s(self) -> float:
        """The rate of the median repetition: what a step gets."""
        return self.amount / statistics.median(self.durations_s)

    def figures(self) -> dict[str, Any]:
        """Return the sample for a JSON file."""
        return {
            "amount": self.amount,
            "note": self.note,
            "repetitions": len(self.durations_s),
            "best_per_s": self.best_per_s,
            "median_per_s": self.median_per_s,
        }


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
    return Sample(amount, tuple(durations[1:]), note)
