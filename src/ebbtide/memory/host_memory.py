"""Page-locked blocks of host memory of an exact size.

torch's own allocator rounds page-locked memory up to a power of two, which can double the size that
was asked for. Here a block is an anonymous mapping of whole pages on the NUMA node of the device.
Several threads touch the pages first, and then the block is page-locked in one call.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import platform
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch

from ebbtide.devices.device import AbstractDevice
from ebbtide.interface.warning import warn_user
from ebbtide.units import format_size

_MADV_DONTNEED = 4
_MADV_POPULATE_WRITE = 23  # Linux 5.14 and later
_MPOL_PREFERRED = 1
_MBIND = {"x86_64": 237, "aarch64": 235, "ppc64le": 259}  # system call numbers of mbind
_TOUCH_BYTES = 32 * 2**20  # the least share of a block that is worth another thread
_TOUCH_THREADS = 8  # more than these do not zero pages faster
_SYSFS = Path("/sys")


def whole_pages(size_bytes: int) -> int:
    """The size rounded up to the next page."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


@final
class HostMemory:
    """One block of host memory.

    Args:
        tensor: the bytes; this tensor and its views keep the block mapped.
        device: the device whose copies use the block; required together with `unlock`.
        unlock: undoes the page-lock; None if nothing must be undone.
        refusal: why the block is pageable although the device wanted it page-locked. This is text
            because the error itself would keep the frames of a whole forward pass alive.

    Shape:
        tensor: (size_bytes,), uint8.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        device: AbstractDevice | None = None,
        unlock: Callable[[], None] | None = None,
        refusal: str | None = None,
    ) -> None:
        self.tensor = tensor
        self.refusal = refusal
        self._end: weakref.finalize[..., HostMemory] | None = None
        if unlock is not None and device is not None:
            # The finalizer refers to the tensor, so the memory stays mapped until it is unlocked.
            # Memory that is unmapped first stays locked for ever, and the device would continue to
            # use pages that are no longer ours.
            self._end = weakref.finalize(self, _abandon, device, unlock, tensor, os.getpid())
            self._end.atexit = False  # the system unlocks the memory of a process that ends

    def give_back(self) -> None:
        """Unlock the block. It is unmapped once nothing else refers to the tensor.

        Streams:
            The caller must have waited for all copies that read or write the block.
        """
        alive = self._end.detach() if self._end is not None else None
        if alive is not None:
            _, _, (_, unlock, tensor, pid), _ = alive
            _unlock(unlock, tensor, pid)
        self.tensor = self.tensor.new_empty(0)


def map_exactly(device: AbstractDevice, size_bytes: int) -> HostMemory | None:
    """Map a block, and page-lock it if the device needs that and the system permits it.

    Args:
        device: the device whose copies use the block.
        size_bytes: a multiple of the page size.

    Returns:
        The block; None if the device can only use page-locked memory from `allocate_by_torch`.

    Raises:
        OSError: the system has no memory to map.
    """
    if sys.platform == "win32":
        mapping = mmap.mmap(-1, size_bytes)  # backed by the paging file, never by a file
    else:
        mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    if not device.pins_host_memory:
        return HostMemory(tensor, device)
    address = tensor.data_ptr()
    _share_with_children(mapping, False)
    _place_near(device, address, size_bytes)
    _touch(address, size_bytes)
    try:
        unlock = device.pin(address, size_bytes)
    except OSError as refusal:
        _share_with_children(mapping, True)
        return HostMemory(tensor, device, refusal=str(refusal))
    if unlock is None:
        return None
    return HostMemory(tensor, device, unlock)


def allocate_by_torch(device: AbstractDevice, size_bytes: int) -> HostMemory:
    """Allocate a block with torch, page-locked if possible, otherwise pageable.

    Args:
        device: the device whose copies use the block.
        size_bytes: a power of two, because torch would round other sizes up to the next.
    """
    try:
        tensor = torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        return HostMemory(tensor, device)
    except RuntimeError as refusal:
        tensor = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        _touch(tensor.data_ptr(), size_bytes)  # or the RAM would still look free to other ranks
        return HostMemory(tensor, device, refusal=str(refusal))


_warned_of: weakref.WeakSet[AbstractDevice] = weakref.WeakSet()


def warn_of_pageable(device: AbstractDevice, size_bytes: int, refusal: str) -> None:
    """Warn that a block is pageable, with the consequences and what to do about it.

    Each model has a device object of its own, and is warned of its first such block only.
    """
    if device in _warned_of:
        return
    _warned_of.add(device)
    warn_user(
        "pageable-memory",
        f"the system refused to page-lock {format_size(size_bytes)} of host memory ({refusal}); "
        f"ebbtide continues with pageable memory: the results are the same, but copies no longer "
        f"overlap with compute. Raise the limit on locked memory (ulimit -l), free RAM, or set a "
        f"smaller host_budget",
    )


# ---- ends ---------------------------------------------------------------------------------------

_inherited: list[torch.Tensor] = []


def _abandon(
    device: AbstractDevice, unlock: Callable[[], None], tensor: torch.Tensor, pid: int
) -> None:
    """Unlock a block that was collected without `give_back`. This runs in a finalizer."""

    def unlock_when_idle() -> None:
        # Nobody has waited for the copies, the program's own included, and one could still use the
        # memory after the unlock.
        device.finish_copies()
        device.finish_other_streams()
        _unlock(unlock, tensor, pid)

    if os.getpid() == pid:
        device.defer(unlock_when_idle)
    else:
        _unlock(unlock, tensor, pid)


def _unlock(unlock: Callable[[], None], tensor: torch.Tensor, pid: int) -> None:
    if os.getpid() == pid:
        unlock()
    else:
        # A forked child does not have this mapping. Unmapping it there would destroy whatever the
        # child has mapped at the same address since, so the tensor is kept for ever.
        _inherited.append(tensor)


def _share_with_children(mapping: mmap.mmap, shared: bool) -> None:
    """Set whether forked children inherit the block.

    Inheriting a page-locked block does harm. With older kernels, the parent gets a new page when it
    writes after the fork, while the device continues to use the old page. Newer kernels copy the
    whole block for every child, such as a worker of a data loader.
    """
    name = "MADV_DOFORK" if shared else "MADV_DONTFORK"
    if hasattr(mmap, name):
        with contextlib.suppress(OSError):
            mapping.madvise(getattr(mmap, name))


def allocate_host_memory(
    device: AbstractDevice, size_bytes: int, check: Callable[[int], None]
) -> HostMemory:
    """Allocate host memory, page-locked if the device needs that and the system permits it.

    Args:
        device: the device whose copies use the memory.
        size_bytes: the least size.
        check: called with the real size before it is allocated; raises if there is no room.
    """
    size_bytes = whole_pages(max(size_bytes, 1))
    check(size_bytes)
    memory = map_exactly(device, size_bytes)
    if memory is None:
        size_bytes = 2 ** math.ceil(math.log2(size_bytes))
        check(size_bytes)  # afterwards is too late: torch keeps what it has page-locked
        memory = allocate_by_torch(device, size_bytes)
    if memory.refusal is not None:
        warn_of_pageable(device, size_bytes, memory.refusal)
    return memory


# ---- first touch --------------------------------------------------------------------------------


def _touch(address: int, size_bytes: int) -> None:
    """Allocate the block's pages in parallel; page-locking would allocate them one by one."""
    page = mmap.PAGESIZE
    num_threads = max(1, min(_TOUCH_THREADS, _num_cores(), size_bytes // _TOUCH_BYTES))
    share_bytes = -(-size_bytes // num_threads // page) * page
    threads = [
        threading.Thread(
            target=_populate, args=(address + begin, min(share_bytes, size_bytes - begin))
        )
        for begin in range(0, size_bytes, share_bytes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _populate(address: int, size_bytes: int) -> None:
    if _MADVISE is not None:
        if not _MADVISE(address, size_bytes, _MADV_POPULATE_WRITE):
            return
        # The kernel supports the call but it failed: page-locking will report the reason.
        if ctypes.get_errno() != errno.EINVAL:
            return
    ctypes.memset(address, 0, size_bytes)  # ctypes releases the interpreter lock meanwhile


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ---- placement ----------------------------------------------------------------------------------


def _place_near(device: AbstractDevice, address: int, size_bytes: int) -> None:
    """Ask for pages on the NUMA node of the device. If that is unknown, do nothing."""
    number = _MBIND.get(platform.machine())
    node = _numa_node(device.torch_device)
    if node is None or number is None or _SYSCALL is None:
        return
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    # The count of bits is one too many because the kernel subtracts one. If the kernel refuses, the
    # block is merely slower, so the result is ignored.
    _SYSCALL(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(size_bytes),
        ctypes.c_long(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(bits * len(mask) + 1),
        ctypes.c_ulong(0),
    )


def _numa_node(torch_device: torch.device) -> int | None:
    """The NUMA node of a CUDA device; None if the system has only one or does not say."""
    nodes = (_SYSFS / "devices/system/node").glob("node[0-9]*")
    directory = pci_directory(torch_device)
    if directory is None or len(list(nodes)) < 2:
        return None
    try:
        node = int((directory / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def pci_directory(torch_device: torch.device) -> Path | None:
    """The directory in which Linux describes a CUDA device's place on the PCI bus, if it does."""
    if torch_device.type != "cuda" or sys.platform != "linux":
        return None
    properties = torch.cuda.get_device_properties(torch_device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if not all(hasattr(properties, name) for name in names):
        return None
    domain, bus, slot = (getattr(properties, name) for name in names)
    return _SYSFS / "bus/pci/devices" / f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def _find_function(name: str, *argument_types: Any) -> Callable[..., int] | None:
    # `mmap.madvise` holds the interpreter lock during the call; a call through ctypes does not.
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError, TypeError):
        return None
    if argument_types:
        function.argtypes = argument_types
    return function  # type: ignore[no-any-return]


def advise(address: int, size_bytes: int, advice: int) -> bool:
    """Call `madvise` on mapped pages. Returns whether the system has it and it succeeded."""
    return _MADVISE is not None and _MADVISE(address, size_bytes, advice) == 0


def page_out(address: int, size_bytes: int) -> None:
    """Remove the pages of a mapped file from the memory of this process; the file keeps their data.

    macOS has no call for this: there pages leave only when memory is short.
    """
    if _VIRTUAL_UNLOCK is not None:
        # To unlock pages that are not locked is an error, and takes them out of the working set.
        _VIRTUAL_UNLOCK(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes))
    else:
        advise(address, size_bytes, _MADV_DONTNEED)


def make_private(address: int, size_bytes: int, fd: int) -> None:
    """Replace a shared mapping of a file, as a whole, by a private one at the same address.

    A write to it then changes only the memory of this process. If the system has no memory to
    promise for such writes, the mapping can only be read.
    """
    function = getattr(ctypes.CDLL(None), "mmap")  # noqa: B009 - mypy would check the attribute
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]
    for protection in (mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ):
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        if function(address, size_bytes, protection, flags, fd, 0) == address:
            return


_MAP_FIXED = 0x10  # on Linux and macOS
_MADVISE = (
    _find_function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if sys.platform == "linux"
    else None
)
_SYSCALL = _find_function("syscall")
_VIRTUAL_UNLOCK: Callable[..., int] | None = (
    getattr(ctypes, "windll").kernel32.VirtualUnlock  # noqa: B009 - mypy would check the attribute
    if sys.platform == "win32"
    else None
)
