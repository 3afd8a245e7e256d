"""Blocks of host memory of an exact size that a device can copy from without blocking the host.

torch's own allocator rounds page-locked memory up to a power of two, up to twice what is asked for.
Here a block is an anonymous mapping of whole pages, touched by several threads, near the device,
and then page-locked in one piece.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch

from ebbtide.devices.device import AbstractDevice
from ebbtide.units import format_size

_MADV_POPULATE_WRITE = 23  # Linux 5.14 and later
_MPOL_PREFERRED = 1
_MBIND = {"x86_64": 237, "aarch64": 235, "ppc64le": 259}  # numbers of the system call
_TOUCH_BYTES = 32 * 2**20  # what is worth a thread of its own
_TOUCH_THREADS = 8  # more than these do not zero pages faster
_SYSFS = Path("/sys")


def whole_pages(size_bytes: int) -> int:
    """The size rounded up to the next page."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


@final
class HostMemory:
    """One block.

    Args:
        tensor: the bytes; it, and whatever is a view of it, keeps the block mapped.
        device: whose copies read and write the bytes.
        unlock: undoes the page-lock, if there is one that does not end with `tensor`.
        refusal: why the block is pageable where the device wanted it page-locked. As text: the
            error would hold on to what ran when it was raised, a whole forward perhaps.

    Shape:
        tensor: (size_bytes,), uint8.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        device: AbstractDevice,
        unlock: Callable[[], None] | None = None,
        refusal: str | None = None,
    ) -> None:
        self.tensor = tensor
        self.refusal = refusal
        self._end: weakref.finalize[..., HostMemory] | None = None
        if unlock is not None:
            # Holds the tensor: memory that is unmapped while it is locked stays locked for ever,
            # and the device goes on to use pages that are no longer ours.
            self._end = weakref.finalize(self, _abandon, device, unlock, tensor, os.getpid())
            self._end.atexit = False  # the system unlocks what a process leaves behind

    def give_back(self) -> None:
        """Unlock the block, and unmap it once nobody else refers to the tensor.

        Streams:
            The copies that read or write the block must be complete.
        """
        alive = self._end.detach() if self._end is not None else None
        if alive is not None:
            _, _, (_, unlock, tensor, pid), _ = alive
            _unlock(unlock, tensor, pid)
        self.tensor = self.tensor.new_empty(0)


def map_exactly(device: AbstractDevice, size_bytes: int) -> HostMemory | None:
    """A block of ``size_bytes``, page-locked if the device wants that and the system grants it.

    Args:
        device: whose copies read and write the block.
        size_bytes: a multiple of the page size.

    Returns:
        The block; None where only `allocate_by_torch` gives memory that the device's copies take.

    Raises:
        OSError: there is no memory to map.
    """
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
    """A block from torch's page-locked memory, else from its pageable memory.

    Args:
        device: whose copies read and write the block.
        size_bytes: a power of two; torch would round up to the next.
    """
    try:
        return HostMemory(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True), device)
    except RuntimeError as refusal:
        tensor = torch.empty(size_bytes, dtype=torch.uint8)
        return HostMemory(tensor, device, refusal=str(refusal))


def warn_of_pageable(size_bytes: int, refusal: str) -> None:
    """Say that a block is pageable, and what follows from it."""
    warnings.warn(
        f"the system refused to page-lock {format_size(size_bytes)} of host memory ({refusal}); "
        f"ebbtide goes on with pageable memory: the numbers are the same, but copies no longer "
        f"overlap with compute. Raise the limit on locked memory (ulimit -l), free RAM, or set a "
        f"smaller host_budget",
        RuntimeWarning,
        stacklevel=2,
    )


# ---- ends ---------------------------------------------------------------------------------------

_inherited: list[torch.Tensor] = []


def _abandon(
    device: AbstractDevice, unlock: Callable[[], None], tensor: torch.Tensor, pid: int
) -> None:
    """The block was collected, and nobody had given it back."""
    if os.getpid() == pid:
        # Nobody waited for the copies; one under way would go on in memory that is no longer ours.
        device.finish_copies()
    _unlock(unlock, tensor, pid)


def _unlock(unlock: Callable[[], None], tensor: torch.Tensor, pid: int) -> None:
    if os.getpid() == pid:
        unlock()
    else:
        # A forked child has no such mapping: to unmap it would tear a hole into whatever the
        # child has mapped there since.
        _inherited.append(tensor)


def _share_with_children(mapping: mmap.mmap, shared: bool) -> None:
    """Whether forked children see the block.

    With a share in it they would do harm: older kernels give the parent a new page when it writes,
    and the device goes on with the old one; newer kernels copy the whole block for every child, a
    worker of a data loader among them.
    """
    name = "MADV_DOFORK" if shared else "MADV_DONTFORK"
    if hasattr(mmap, name):
        with contextlib.suppress(OSError):
            mapping.madvise(getattr(mmap, name))


# ---- first touch --------------------------------------------------------------------------------


def _touch(address: int, size_bytes: int) -> None:
    """Let the system find the pages now, in parallel: page-locking would do it one by one."""
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
        if ctypes.get_errno() != errno.EINVAL:  # the kernel knows how, and cannot: pinning says why
            return
    ctypes.memset(address, 0, size_bytes)  # without the interpreter lock


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ---- placement ----------------------------------------------------------------------------------


def _place_near(device: AbstractDevice, address: int, size_bytes: int) -> None:
    """Ask for pages on the device's side of the machine. Where that is unknown, do nothing."""
    number = _MBIND.get(platform.machine())
    node = _numa_node(device.torch_device)
    if node is None or number is None or _SYSCALL is None:
        return
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    # One more than there are bits: the kernel takes one off. A refusal costs speed, nothing else.
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
    """The node of a CUDA device, where the system has several and tells."""
    nodes = (_SYSFS / "devices/system/node").glob("node[0-9]*")
    if torch_device.type != "cuda" or sys.platform != "linux" or len(list(nodes)) < 2:
        return None
    properties = torch.cuda.get_device_properties(torch_device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    if not all(hasattr(properties, name) for name in names):
        return None
    domain, bus, slot = (getattr(properties, name) for name in names)
    file = _SYSFS / "bus/pci/devices" / f"{domain:04x}:{bus:02x}:{slot:02x}.0" / "numa_node"
    try:
        node = int(file.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _find_function(name: str, *argument_types: Any) -> Callable[..., int] | None:
    # Through ctypes because mmap's own madvise holds the interpreter lock.
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError, TypeError):
        return None
    if argument_types:
        function.argtypes = argument_types
    return function  # type: ignore[no-any-return]


def advise(address: int, size_bytes: int, advice: int) -> None:
    """Tell the kernel what will happen to mapped pages, if it can be told."""
    if _MADVISE is not None:
        _MADVISE(address, size_bytes, advice)


_MADVISE = (
    _find_function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if sys.platform == "linux"
    else None
)
_SYSCALL = _find_function("syscall")
