"""Returns memory that a process has freed to the system, so that its resident memory (RSS) falls.

[Note: freed but resident] A model on a CPU allocates its tensors with the C library's `malloc`.
When a tensor is freed, glibc keeps its memory for later allocations, up to 32 MiB a block, and the
system still counts it as resident. Offloading then frees memory that nobody else gets.

`malloc_trim` returns all pages in free blocks, wherever they lie. It changes no setting, so nothing
must be restored. A lower threshold for blocks of their own (`mallopt(M_MMAP_THRESHOLD)`) was
measured beside it: it makes every large tensor of the model pay for new pages, cannot be undone,
and has no effect in a process that has trained before, whose free blocks stay where they are.

`python -m benchmarks.rss` compares the ways.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import functools
import logging
import os
import weakref
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Final, final

import psutil
import torch

from ebbtide.stores.host_memory import memory_limit
from ebbtide.units import format_size

_LOG = logging.getLogger(__name__)

LEAST_BYTES = 16 * 2**20
SHARE = 16

# The user's own settings of when glibc returns memory, each as a variable and as a tunable.
_SETTINGS = {
    "MALLOC_TRIM_THRESHOLD_": "glibc.malloc.trim_threshold",
    "MALLOC_MMAP_THRESHOLD_": "glibc.malloc.mmap_threshold",
    "MALLOC_MMAP_MAX_": "glibc.malloc.mmap_max",
    "MALLOC_TOP_PAD_": "glibc.malloc.top_pad",
}


@final
class FreedMemory:
    """Says after how many moved bytes freed memory is to be returned.

    Returning memory costs time twice, now and when the memory is needed again. So it is done after
    every 16 MiB that were moved, or after 1/16 of the bytes in the store if that is more: the peak
    then exceeds that of an allocator that keeps nothing by about as much.

    Attributes:
        is_returned: whether this process returns freed memory at all.
    """

    def __init__(self) -> None:
        self.is_returned = _refusal() is None
        self._moved_bytes = 0
        _log_once()

    def is_due(self, size_bytes: int, stored_bytes: int) -> bool:
        """Count moved bytes.

        Args:
            size_bytes: how many bytes have been moved now.
            stored_bytes: how many bytes are in the store.

        Returns:
            Whether to call `return_freed_memory` when they have arrived.
        """
        self._moved_bytes += size_bytes
        if self._moved_bytes < max(LEAST_BYTES, stored_bytes // SHARE) or not self.is_returned:
            return False
        self._moved_bytes = 0
        return True


def return_freed_memory() -> None:
    """Return the free pages of the C library's allocator to the system.

    Any thread may call this. Other threads that allocate large blocks wait meanwhile. If the user
    has set when glibc returns memory, or the C library is another one, this does nothing.
    """
    trim = _malloc_trim()
    if trim is not None and _refusal() is None:
        trim(0)


def describe() -> str:
    """Say in one sentence what is done about freed memory in this process."""
    refusal = _refusal()
    if refusal is not None:
        return f"Freed memory is not returned to the system by ebbtide: {refusal}."
    return (
        f"Freed memory is returned to the system by glibc's malloc_trim, after every "
        f"{format_size(LEAST_BYTES)} that are offloaded or reloaded, or 1/{SHARE} of the bytes in "
        f"the store if that is more; otherwise the resident memory (RSS) would not fall."
    )


@functools.cache
def _log_once() -> None:
    _LOG.info(describe())


@functools.cache
def _refusal() -> str | None:
    """Return why freed memory is not returned here; None if it is."""
    if _malloc_trim() is None:
        return "this C library is not glibc, and its own allocator decides when to return it"
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    for variable, tunable in _SETTINGS.items():
        if variable in os.environ or f"{tunable}=" in tunables:
            return f"{variable} or {tunable} sets when the C library returns it"
    return None


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library; Windows has no CDLL(None)
        return None
    function.argtypes = (ctypes.c_size_t,)
    return function


# ---- Returns large blocks as soon as they are freed, while a budget is followed
#
# [Note: blocks of their own] What an operator frees while it runs may be reused by it or not, as
# it fits; a convolution's backward took between 70 and 120 MiB for the same tensors. So while a
# model on a CPU has a budget, blocks of 1 MiB or more are mapped one by one. They return to the
# system when they are freed, and resident memory is what is in use. That takes time for new pages,
# about a third of a small model's step. It cannot be undone quite, because glibc stops to adapt its
# thresholds; what is set afterwards is what it adapts them to where tensors are large.

_MMAP_THRESHOLD: Final = -3  # of mallopt(3): larger blocks are mapped, and returned when freed
_TRIM_THRESHOLD: Final = -1  # how much of the heap's end may be free
_LEAST_MAPPED_BYTES: Final = 2**20
_MOST_REUSED_BYTES: Final = 32 * 2**20  # the most that glibc takes from the heap by itself


_mapped_for: Final[weakref.WeakSet[AbstractMemory]] = weakref.WeakSet()


def are_large_blocks_mapped() -> bool:
    """Whether large blocks are mapped one by one in this process. See [Note: blocks of their own].

    They are as long as anyone wants it.
    """
    return bool(_mapped_for) and _refusal() is None


def _map_large_blocks(memory: AbstractMemory, mapped: bool) -> None:
    """Note whether one memory wants them mapped."""
    before = are_large_blocks_mapped()
    (_mapped_for.add if mapped else _mapped_for.discard)(memory)
    if are_large_blocks_mapped() is before:
        return
    library = ctypes.CDLL(None)
    library.mallopt(_MMAP_THRESHOLD, _LEAST_MAPPED_BYTES if mapped else _MOST_REUSED_BYTES)
    library.mallopt(_TRIM_THRESHOLD, 2 * _MOST_REUSED_BYTES)


# ---- Measures memory: of the process, as the kernel counts it, or of a device, as torch counts it


class AbstractMemory(abc.ABC):
    """The number of bytes in use, and its peak.

    Attributes:
        name: what is measured, in words.
        keeps_freed: whether memory that was freed may still count, until `return_freed`.
    """

    name = "memory"
    keeps_freed = False

    @abc.abstractmethod
    def now_bytes(self) -> int:
        """Return the number of bytes in use now."""

    @abc.abstractmethod
    def peak_bytes(self) -> int:
        """Return the largest number of bytes in use since `reset_peak`."""

    def reserved_peak_bytes(self) -> int:
        """Return the largest number of bytes since `reset_peak` that nobody else could use.

        That is more than is in use where an allocator keeps what was freed.
        """
        return self.peak_bytes()

    def mapped_bytes(self) -> int:
        """Return how many of the bytes in use are pages of mapped files, such as libraries."""
        return 0

    @property
    @abc.abstractmethod
    def total_bytes(self) -> int:
        """All the memory that there is, or that this process may use."""

    @property
    def available_bytes(self) -> int:
        """The part of it that other processes do not use."""
        return self.total_bytes

    @abc.abstractmethod
    def reset_peak(self) -> None:
        """Restart the peak at the present level."""

    def return_freed(self) -> None:  # noqa: B027  # most memories have nothing to return
        """Return what was freed to where it came from, if that costs little."""

    def keep_tight(self, tight: bool) -> None:  # noqa: B027  # some cannot be told
        """Have the allocator keep little of what is freed, or as much as it does by itself.

        Args:
            tight: whether little, as under a budget.
        """

    def return_cached(self) -> None:
        """Return what was freed to where it came from, even if that waits for the device."""
        self.return_freed()

    def num_failures(self) -> int:
        """Return how often there was not enough memory for a tensor since the process began."""
        return 0


_Peaks = tuple[int, int]
"""The largest number of bytes in use, and the largest one that nobody else could use."""


@final
class _SharedPeak:
    """A peak that the system counts once, for all objects that measure the same memory.

    When one object resets the counter, each other one first notes how high it was. So two models
    with budgets, which both measure the process, do not hide each other's peaks.

    Args:
        of: what is counted.
        read: returns the peaks since the counter was reset.
    """

    _known: Final[dict[Hashable, weakref.WeakSet[_SharedPeak]]] = {}

    def __init__(self, of: Hashable, read: Callable[[], _Peaks]) -> None:
        self._read = read
        self._before = 0, 0  # what the counter had reached when another object reset it
        self._all = self._known.setdefault(of, weakref.WeakSet())
        self._all.add(self)

    def read(self) -> _Peaks:
        return self._with(self._read())

    def _with(self, counted: _Peaks) -> _Peaks:
        return max(self._before[0], counted[0]), max(self._before[1], counted[1])

    def prepare_reset(self) -> None:
        """Note the peak for the other objects. The caller resets the counter then."""
        counted = self._read()
        for other in list(self._all):
            other._before = other._with(counted)
        self._before = 0, 0


@final
class ProcessMemory(AbstractMemory):
    """Resident memory (RSS) of this process.

    The kernel records the peak, so no short peak is missed. Where it cannot reset it, the peak is
    that since the process began.
    """

    name = "resident memory (RSS) of the process"
    keeps_freed = True

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._peak = _SharedPeak("process", _read_resident_peaks)
        self.reset_peak()

    def now_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def mapped_bytes(self) -> int:
        return _read_status("RssFile:") or 0

    def peak_bytes(self) -> int:
        return self._peak.read()[0]

    def reset_peak(self) -> None:
        self._peak.prepare_reset()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # 5 resets VmHWM, see proc(5)

    def return_freed(self) -> None:
        return_freed_memory()

    def keep_tight(self, tight: bool) -> None:
        _map_large_blocks(self, tight)

    @property
    def total_bytes(self) -> int:
        total_bytes, limit = psutil.virtual_memory().total, memory_limit()
        return int(total_bytes if limit is None else min(total_bytes, limit[0]))


def memory_of(device: torch.device) -> AbstractMemory:
    """Return the memory that a model on a device computes in."""
    return ProcessMemory() if device.type == "cpu" else DeviceMemory(device)


def resident_peak_bytes() -> int:
    """Return the peak of this process's resident memory (RSS) since the kernel's count began."""
    peak_bytes = _read_status("VmHWM:")
    if peak_bytes is None:
        import resource  # which Windows has not

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return peak_bytes


def _read_status(field: str) -> int | None:
    """Return a field of what the kernel says of this process, in bytes; None if it does not."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), None)


def _read_resident_peaks() -> _Peaks:
    peak_bytes = resident_peak_bytes()
    return peak_bytes, peak_bytes


# [Note: cached blocks] An accelerator's allocator keeps the blocks that were freed, in sizes that
# nothing may ask for again. As long as a budget is in force, segments are expandable, unless the
# user has set that: freed memory is used again in other sizes, and returns where the device has no
# more. On an H100, what was reserved beyond what was in use fell from 8 to 53% to 2 to 33% (settled
# plans of seven models).

_tight: Final[weakref.WeakSet[AbstractMemory]] = weakref.WeakSet()  # of devices


def _set_expandable() -> None:
    """Tell torch's allocator whether segments are expandable."""
    own = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments" not in own:
        settings = [own] if own else []
        settings.append(f"expandable_segments:{bool(_tight)}")
        torch._C._accelerator_setAllocatorSettings(",".join(settings))


@final
class DeviceMemory(AbstractMemory):
    """Memory that torch has allocated on an accelerator.

    Torch counts when the host queues work, not when the device does it.
    """

    def __init__(self, device: torch.device) -> None:
        if device.index is None:  # it is the same memory as that of the device with its number
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self._device = device
        self.name = f"memory that torch has allocated on {device}"
        self._peak = _SharedPeak(str(device), functools.partial(_read_device_peaks, device))

    def now_bytes(self) -> int:
        return _stats_of(self._device)[_USED]["all"]["current"]

    def peak_bytes(self) -> int:
        return self._peak.read()[0]

    def reserved_peak_bytes(self) -> int:
        return self._peak.read()[1]

    @property
    def total_bytes(self) -> int:
        return int(torch.get_device_module(self._device).mem_get_info(self._device)[1])

    @property
    def available_bytes(self) -> int:
        free_bytes = torch.get_device_module(self._device).mem_get_info(self._device)[0]
        return int(free_bytes) + torch.accelerator.memory_reserved(self._device)

    def reset_peak(self) -> None:
        self._peak.prepare_reset()
        torch.accelerator.reset_peak_memory_stats(self._device)

    def return_cached(self) -> None:
        torch.accelerator.empty_cache()

    def keep_tight(self, tight: bool) -> None:
        if (self in _tight) is not tight:
            (_tight.add if tight else _tight.discard)(self)
            _set_expandable()

    def num_failures(self) -> int:
        return int(torch.accelerator.memory_stats(self._device).get("num_ooms", 0))


def _stats_of(device: torch.device) -> dict[str, dict[str, dict[str, int]]]:
    """Return what torch's allocator counts of a device, by kind, pool, and what of it."""
    if torch._C._accelerator_isAllocatorInitialized():
        # What `torch.accelerator.memory_stats` returns flattened and sorted, which takes long.
        return torch._C._accelerator_getDeviceStats(device.index)
    return {kind: {"all": {"current": 0, "peak": 0}} for kind in (_USED, _RESERVED)}


_USED: Final = "allocated_bytes"
_RESERVED: Final = "reserved_bytes"


def _read_device_peaks(device: torch.device) -> _Peaks:
    stats = _stats_of(device)
    return stats[_USED]["all"]["peak"], stats[_RESERVED]["all"]["peak"]
