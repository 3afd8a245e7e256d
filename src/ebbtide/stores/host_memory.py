"""Page-locked blocks of host memory of an exact size.

torch's own allocator rounds page-locked memory up to a power of two, which can double the size that
was asked for. Here a block is an anonymous mapping of whole pages. Several threads touch the pages
first, so they are on the NUMA node of the process, and then the block is page-locked in one call.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import multiprocessing
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

import psutil
import torch
import torch.distributed as dist

from ebbtide.devices.device import AbstractDevice
from ebbtide.errors import PolicyError, StoreFullError, warn_user
from ebbtide.units import format_size, parse_budget_bytes

_MADV_DONTNEED = 4
_MADV_POPULATE_READ = 22  # Linux 5.14 and later
_MADV_POPULATE_WRITE = 23  # as well
_TOUCH_BYTES = 32 * 2**20  # the least share of a block that is worth another thread
_TOUCH_THREADS = 8  # more than these do not zero pages faster


def refuse_other_systems() -> None:
    """Check that this is Linux, whose calls the stores use.

    Raises:
        PolicyError: it is not.
    """
    if sys.platform != "linux":
        raise PolicyError(
            f"ebbtide offloads on Linux only, and this system is {sys.platform}, which cannot lock "
            f"memory, reserve disk and give pages back as the stores need it; use a Linux machine, "
            f"a container, or WSL 2 on Windows. `ebbtide plan` works here, too"
        )


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


def block_bytes(device: AbstractDevice, size_bytes: int) -> int:
    """Return the size of the smallest block that `allocate_host_memory` takes for so many bytes."""
    whole_bytes = whole_pages(max(size_bytes, 1))
    return 1 << (whole_bytes - 1).bit_length() if device.pins_by_torch else whole_bytes


def allocate_host_memory(device: AbstractDevice, size_bytes: int) -> HostMemory:
    """Allocate a block, page-locked if the device needs that and the system permits it.

    Args:
        device: the device whose copies use the block.
        size_bytes: its least size; `block_bytes` tells its real one.

    Raises:
        OSError: the system has no memory to map.
    """
    size_bytes = block_bytes(device, size_bytes)
    allocate = _allocate_by_torch if device.pins_by_torch else _map_exactly
    memory = allocate(device, size_bytes)
    if memory.refusal is not None:
        _warn_of_pageable(device, size_bytes, memory.refusal)
    return memory


def _map_exactly(device: AbstractDevice, size_bytes: int) -> HostMemory:
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    if not device.pins_host_memory:
        return HostMemory(tensor, device)
    address = tensor.data_ptr()
    _share_with_children(mapping, False)
    _touch(address, size_bytes)
    try:
        return HostMemory(tensor, device, device.pin(address, size_bytes))
    except OSError as refusal:
        _share_with_children(mapping, True)
        return HostMemory(tensor, device, refusal=str(refusal))


def _allocate_by_torch(device: AbstractDevice, size_bytes: int) -> HostMemory:
    try:
        tensor = torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        return HostMemory(tensor, device)
    except RuntimeError as refusal:
        tensor = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        _touch(tensor.data_ptr(), size_bytes)  # or the RAM would still look free to other ranks
        return HostMemory(tensor, device, refusal=str(refusal))


_warned_of: weakref.WeakSet[AbstractDevice] = weakref.WeakSet()


def _warn_of_pageable(device: AbstractDevice, size_bytes: int, refusal: str) -> None:
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
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_DOFORK if shared else mmap.MADV_DONTFORK)


# ---- first touch --------------------------------------------------------------------------------


def _touch(address: int, size_bytes: int) -> None:
    """Allocate the block's pages in parallel; page-locking would allocate them one by one."""
    page = mmap.PAGESIZE
    num_cores = len(os.sched_getaffinity(0))
    num_threads = max(1, min(_TOUCH_THREADS, num_cores, size_bytes // _TOUCH_BYTES))
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


# ---- calls of the system -------------------------------------------------------------------------


def _find_madvise() -> Callable[..., int] | None:
    # `mmap.madvise` holds the interpreter lock during the call; a call through ctypes does not.
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError, TypeError):  # another system
        return None
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function


def advise(address: int, size_bytes: int, advice: int) -> bool:
    """Call `madvise` on mapped pages. Returns whether the system has it and it succeeded."""
    return _MADVISE is not None and _MADVISE(address, size_bytes, advice) == 0


def page_in(address: int, size_bytes: int) -> None:
    """Read the pages of a mapped file. If the kernel cannot, they are read on first use."""
    advise(address, size_bytes, _MADV_POPULATE_READ)


def page_out(address: int, size_bytes: int) -> None:
    """Remove a mapped file's pages from the memory of this process; the file keeps their data."""
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


_MAP_FIXED = 0x10
_MADVISE = _find_madvise()


# ---- The limits of the control group (cgroup) of this process: a container's, or a batch job's
#
# The kernel kills processes of a group that passes its limit on memory, however much RAM the
# machine has free. Both versions of control groups are read. A group is limited by those above
# it, too.
#
# Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.

_MOUNT: Final = "sys/fs/cgroup"  # where all distributions and container runtimes mount them
_NO_LIMIT_BYTES: Final = 2**60  # version 1 has no word for "no limit", only a very large number
_MEMORY: Final = {  # by version: files with the limits, with the use, and keys of memory.stat
    1: (
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
    2: (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")),
}


def memory_limit(root: Path = Path("/")) -> tuple[int, int] | None:
    """Return the limit on the memory of this process that is nearest; None if there is none.

    Args:
        root: where ``proc`` and ``sys`` are.

    Returns:
        The most bytes that the group may use, and how many of them may still be allocated. Its page
        cache counts as free, because the kernel can drop it.
    """
    found = [
        limit
        for version, directory in _directories(root)
        if (limit := _read_memory(version, directory)) is not None
    ]
    return min(found, key=lambda limit: limit[1], default=None)


def _read_memory(version: int, directory: Path) -> tuple[int, int] | None:
    limits, usage, cached = _MEMORY[version]
    words = [_read(directory / name).strip() for name in limits]
    sizes = [int(word) for word in words if word.isdigit()]
    if not sizes or min(sizes) >= _NO_LIMIT_BYTES:
        return None
    used = _read(directory / usage).strip()
    if not used.isdigit():
        return None
    lines = (line.split() for line in _read(directory / "memory.stat").splitlines())
    stat = {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}
    cached_bytes = sum(stat.get(key, 0) for key in cached)
    used_bytes = max(0, int(used) - cached_bytes)
    return min(sizes), max(0, min(sizes) - used_bytes)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


@functools.lru_cache(maxsize=8)
def _directories(root: Path) -> tuple[tuple[int, Path], ...]:
    """Return the version and the directory of this process's group and of those above it.

    They are found once, because groups change rarely and free memory is asked for often.
    """
    found: list[tuple[int, Path]] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            version, mount = 2, root / _MOUNT
        elif "memory" in controllers.split(","):
            version, mount = 1, root / _MOUNT / "memory"
        else:
            continue
        # A container may see its own group, or one above it, as the root of what is mounted.
        names = group.strip("/").split("/")
        below = (mount.joinpath(*names[number:]) for number in range(len(names)))
        directory = next((each for each in below if each.is_dir()), mount)
        found.append((version, directory))
        while directory != mount:
            directory = directory.parent
            found.append((version, directory))
    return tuple(found)


# ---- The user's ``host_budget``: of one process, or of a host whose ranks divide it ----
#
# [Note: equal parts] A budget of a host is divided by the number of its ranks once, when the
# offload begins. Each rank then knows its limit, so the limit holds whatever the other ranks do,
# equal steps stay equal, and a rank that dies leaves nothing to tidy up. Without a budget, the RAM
# that is free then is divided likewise: two ranks that looked at the same moment how much is free
# would both take it, and the kernel would kill one of them. One pool for all ranks
# would give the memory to whoever asks first: of four equal ranks with a tiered store, one or two
# would find host memory and the others only the disk, and every step would take as long as the
# slowest rank. Ranks with different needs, such as pipeline stages, can each be given a budget of
# their own.

_OF_HOST: Final = re.compile(r"(.*)/\s*node\s*", re.IGNORECASE)
_RANKS_OF_HOST: Final = (
    "LOCAL_WORLD_SIZE",  # torchrun, accelerate launch
    "OMPI_COMM_WORLD_LOCAL_SIZE",  # Open MPI
    "MPI_LOCALNRANKS",  # Intel MPI, MPICH
    "MV2_COMM_WORLD_LOCAL_SIZE",  # MVAPICH
)


def parse_host_budget(host_budget: int | str, *, name: str = "host_budget") -> int:
    """Return a budget such as ``"24GiB"``, for this process, or ``"96GiB/node"``, for its host.

    Args:
        host_budget: the budget. That of a host is divided equally; see [Note: equal parts].
        name: name of the argument in error messages.

    Raises:
        PolicyError: the budget cannot be read, or the number of ranks is not known.
    """
    of_host = _OF_HOST.fullmatch(host_budget) if isinstance(host_budget, str) else None
    if of_host is not None:
        return parse_budget_bytes(of_host[1], None, name=name) // num_host_ranks()
    return parse_budget_bytes(host_budget, None, name=name)


def num_host_ranks() -> int:
    """Return how many ranks share this host.

    If only the number of all ranks is known, it is that number: on several hosts it is too large,
    and so each part too small, but the budget is never exceeded.

    Raises:
        PolicyError: this process was started by another Python process, which may have started
            more, and nothing says how many.
    """
    for variable in (*_RANKS_OF_HOST, "WORLD_SIZE"):
        value = os.environ.get(variable, "")
        if variable == "WORLD_SIZE" and dist.is_available() and dist.is_initialized():
            value = str(dist.get_world_size())
        if value.isdigit() and int(value):
            return int(value)
    if multiprocessing.parent_process() is not None:
        raise PolicyError(
            'a host_budget per node ("96GiB/node") is divided among the ranks of the host, and '
            "nothing tells this process how many there are; call init_process_group before "
            'offload, set LOCAL_WORLD_SIZE, or give each rank its part, such as "24GiB"'
        )
    return 1


# ---- The limit on the host memory that one offload may allocate ----

_FREE_SHARE = 0.95  # of free RAM; the rest is a margin, because the OOM killer raises no error


@final
class HostBudget:
    """Counts the host memory of slabs, weights, gradients and chunks against one limit.

    Args:
        limit_bytes: the most host memory to allocate; None: this rank's part of what is free.

    Attributes:
        limit_bytes: as given.
        taken_bytes: the memory that is allocated now.
        reserved_bytes: memory set aside for gradients. They are allocated last, when activations
            could otherwise have used up the budget.
        leftover_users: use what is left; see `AbstractStore.use_leftover`. They free it as soon as
            it is needed (`make_room`), so it does not count as taken.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.leftover_users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.taken_bytes = 0
        self.reserved_bytes = 0
        self._num_ranks = 1 if limit_bytes is not None else _num_known_ranks()
        self._part_bytes = sys.maxsize  # of free RAM; see [Note: equal parts]
        if self._num_ranks > 1:
            self._part_bytes = free_ram_bytes() // self._num_ranks

    @property
    def left_bytes(self) -> int:
        """How much may still be allocated, in whole pages. This does not look at free RAM."""
        if self.limit_bytes is None:
            return sys.maxsize
        whole_bytes = self.limit_bytes - self.limit_bytes % mmap.PAGESIZE
        return whole_bytes - self.taken_bytes - self.reserved_bytes

    def spare_ram_bytes(self) -> int:
        """Free RAM beside the reserve and the margin that stays free, in whole pages.

        Without a limit, a rank takes no more than its part of what was free when it began.

        The margin grows with what is taken. If it were a share of the free RAM alone, a store that
        grows step by step would use up the margin, too.
        """
        margin_bytes = int(self.taken_bytes * (1 - _FREE_SHARE))
        free_bytes = min(free_ram_bytes() - margin_bytes, self._part_bytes - self.taken_bytes)
        spare_bytes = max(0, free_bytes - self.reserved_bytes)
        return spare_bytes - spare_bytes % mmap.PAGESIZE

    @property
    def room_bytes(self) -> int:
        """How much may be allocated now, within the limit and the RAM to spare."""
        return min(self.left_bytes, self.spare_ram_bytes())

    @property
    def leftover_bytes(self) -> int:
        """How much more the users of what is left may use, within the limit and the free RAM."""
        used_bytes: int = sum(user.leftover_bytes for user in self.leftover_users)
        return max(0, min(self.left_bytes - used_bytes, self.spare_ram_bytes()))

    def make_room(self, size_bytes: int) -> None:
        """Have memory freed that is only used while nothing else needs it, if so much is needed."""
        if self.leftover_users and size_bytes > self.leftover_bytes:
            for user in self.leftover_users:
                user.give_way()

    def take(self, size_bytes: int) -> None:
        """Count memory that was allocated, or freed if the size is negative."""
        self.taken_bytes += size_bytes

    def reserve(self, size_bytes: int) -> None:
        """Set memory aside, or release a part of the reserve if the size is negative."""
        self.reserved_bytes = max(0, self.reserved_bytes + size_bytes)

    def check_room(
        self, size_bytes: int, ram_bytes: int | None = None, *, weights: bool = False
    ) -> None:
        """Check that so much may be allocated.

        Args:
            size_bytes: how much.
            ram_bytes: the RAM that it may be taken from; None: all that is to spare.
            weights: whether it is for weights or gradients, and not for activations.

        Raises:
            StoreFullError: the limit, or the RAM, does not allow it.
        """
        ram_bytes = self.spare_ram_bytes() if ram_bytes is None else ram_bytes
        if size_bytes > min(self.left_bytes, ram_bytes):
            raise self.no_room(size_bytes, ram_bytes, weights=weights)

    def no_room(self, size_bytes: int, ram_bytes: int, *, weights: bool = False) -> StoreFullError:
        """The error for what exceeds the limit or the RAM; the arguments are of `check_room`."""
        what, policy = "offloaded activations", "ActivationPolicy"
        if weights:
            what, policy = "weights that rest on the host, or their gradients,", "WeightPolicy"
        taken = format_size(self.taken_bytes + self.reserved_bytes)
        if self.limit_bytes is not None and size_bytes > self.left_bytes:
            code, remedy = errno.EDQUOT, "raise host_budget"
            has = f"host_budget allows {format_size(self.limit_bytes)} of host memory"
        else:
            code, remedy = errno.ENOMEM, "free host memory"
            has = f"the host has {format_size(ram_bytes)} of RAM to spare"
            if self._num_ranks > 1:
                has += (
                    f" for this rank (without a host_budget, each of {self._num_ranks} ranks has "
                    f"an equal part of what was free)"
                )
        return StoreFullError(
            code,
            f"{has}, {taken} are taken, and the next {format_size(size_bytes)} of {what} do not "
            f'fit; {remedy}, let the rest go to disk (store="tiered"), or offload fewer layers '
            f"({policy}(num_layers=...))",
        )


def _num_known_ranks() -> int:
    try:
        return num_host_ranks()
    except PolicyError:  # started by a program that says nothing of others
        return 1


def free_ram_bytes() -> int:
    """RAM that can be allocated without invoking the OOM killer, in whole pages.

    In a container or a batch job, that is no more than its control group allows.
    """
    free_bytes = int(psutil.virtual_memory().available)
    limit = memory_limit()
    if limit is not None:
        free_bytes = min(free_bytes, limit[1])
    free_bytes = int(free_bytes * _FREE_SHARE)
    return free_bytes - free_bytes % mmap.PAGESIZE
