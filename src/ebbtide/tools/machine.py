"""Facts of this machine that need no measurement. Whatever the system does not say is None."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import final

import psutil
import torch

from ebbtide.errors import PolicyError
from ebbtide.stores.build import parse_store
from ebbtide.stores.host_memory import memory_limit

_IN_RAM = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_GPU_DRIVERS = "/dev/nvidiactl", "/dev/kfd"  # of NVIDIA and AMD, where they are loaded


@final
@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """The machine as the system describes it.

    Attributes:
        cpu: name of the processor.
        cores: cores that this process may use.
        torch_threads: threads of torch's kernels.
        torch_version: with the accelerator that torch was built for.
        total_ram_bytes: RAM, or less if the control group allows less.
        free_ram_bytes: what may be allocated without being killed.
        limited_by_group: whether the control group limits the RAM.
        memlock_bytes: the limit on locked memory (``ulimit -l``); None: none, or not known.
        store: the directory of files of offloaded bytes.
        store_filesystem: its kind, such as ``"ext4"``.
        store_free_bytes: what may still be written there.
        accelerator: name of what the model would compute on; None: the CPU.
        num_accelerators: how many of its type torch sees.
        accelerator_bytes: its memory.
        accelerator_free_bytes: what other programs and this one have left of it.
        has_unseen_gpu: whether the driver of a GPU is loaded, but this torch does not see one.
    """

    cpu: str
    cores: int
    torch_threads: int
    torch_version: str
    total_ram_bytes: int
    free_ram_bytes: int
    limited_by_group: bool
    memlock_bytes: int | None
    store: str
    store_filesystem: str | None
    store_free_bytes: int | None
    accelerator: str | None = None
    num_accelerators: int = 0
    accelerator_bytes: int = 0
    accelerator_free_bytes: int = 0
    has_unseen_gpu: bool = False

    @property
    def store_is_in_ram(self) -> bool:
        """Whether the store's files are kept in RAM."""
        return self.store_filesystem in _IN_RAM


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


def read_machine(torch_device: torch.device, directory: Path) -> MachineFacts:
    """Read what the system says about itself.

    Args:
        torch_device: the device of the model.
        directory: where files of offloaded bytes go.
    """
    group, ram = memory_limit(), psutil.virtual_memory()
    total_bytes, free_bytes = int(ram.total), int(ram.available)
    if group is not None:
        total_bytes, free_bytes = min(total_bytes, group[0]), min(free_bytes, group[1])
    on_device = dict[str, int]()
    name = None
    if torch_device.type != "cpu":
        module = torch.get_device_module(torch_device)
        free, total = module.mem_get_info(torch_device)
        on_device = {"accelerator_bytes": int(total), "accelerator_free_bytes": int(free)}
        on_device["num_accelerators"] = torch.accelerator.device_count()
        name = str(module.get_device_name(torch_device))
    is_linux = sys.platform == "linux"
    memlock = psutil.Process().rlimit(psutil.RLIMIT_MEMLOCK)[0] if is_linux else None
    return MachineFacts(
        cpu=cpu_name(),
        cores=len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1,
        torch_threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        total_ram_bytes=total_bytes,
        free_ram_bytes=free_bytes,
        limited_by_group=group is not None,
        memlock_bytes=None if memlock in (None, psutil.RLIM_INFINITY) else memlock,
        store=str(directory),
        store_filesystem=_filesystem(directory),
        store_free_bytes=shutil.disk_usage(directory).free if directory.is_dir() else None,
        accelerator=name,
        has_unseen_gpu=name is None and any(map(os.path.exists, _GPU_DRIVERS)),
        **on_device,
    )


def cpu_name() -> str:
    """The name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model"):
                return " ".join(value.split())
    return platform.processor() or platform.machine() or "CPU"


def _filesystem(path: Path) -> str | None:
    """Return the kind of file system of a path: that of the longest mount point above it."""
    place = path.resolve()
    mounts = psutil.disk_partitions(all=True)
    around = [each for each in mounts if Path(each.mountpoint) in (place, *place.parents)]
    # Of two mounts at one point, the later hides the earlier.
    around.sort(key=lambda each: len(Path(each.mountpoint).parts))
    return (around[-1].fstype.lower() or None) if around else None
