"""Measures memory: of the process, as the kernel counts it, or of a device, as torch counts it."""

from __future__ import annotations

import abc
import functools
import sys
import weakref
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Final, NamedTuple, final

import psutil
import torch

from ebbtide.memory.cgroups import memory_limit
from ebbtide.memory.freed_memory import return_freed_memory
from ebbtide.memory.huge_pages import large_blocks


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

    @property
    @abc.abstractmethod
    def total_bytes(self) -> int:
        """All the memory that there is, or that this process may use."""

    @abc.abstractmethod
    def reset_peak(self) -> None:
        """Restart the peak at the present level."""

    def return_freed(self) -> None:  # noqa: B027  # most memories have nothing to return
        """Return what was freed to where it came from, if that costs little."""

    def reuse_freed(self, reuse: bool) -> None:  # noqa: B027  # most memories decide themselves
        """Say whether what is freed from now on may stay, to be reused, where that takes memory.

        Args:
            reuse: whether it may. If not, as little as possible is in use, and steps are longer.
        """

    def return_cached(self) -> None:
        """Return what was freed to where it came from, even if that waits for the device."""
        self.return_freed()

    def num_failures(self) -> int:
        """Return how often there was not enough memory for a tensor since the process began."""
        return 0


class _Peaks(NamedTuple):
    """The largest numbers of bytes in use, and that nobody else could use."""

    used_bytes: int
    reserved_bytes: int


_NO_PEAKS: Final = _Peaks(0, 0)


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
        self._before = _NO_PEAKS  # what the counter had reached when another object reset it
        self._all = self._known.setdefault(of, weakref.WeakSet())
        self._all.add(self)

    def read(self) -> _Peaks:
        return _Peaks(*map(max, self._before, self._read()))

    def prepare_reset(self) -> None:
        """Note the peak for the other objects. The caller resets the counter then."""
        for other in list(self._all):
            other._before = other.read()
        self._before = _NO_PEAKS


@final
class ProcessMemory(AbstractMemory):
    """Resident memory (RSS) of this process.

    The kernel records the peak, so no short peak is missed.

    Attributes:
        can_reset: whether the kernel can reset the peak (Linux can). If not, the peak is that since
            the process began.
    """

    name = "resident memory (RSS) of the process"
    keeps_freed = True

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.can_reset = True
        self._peak = _SharedPeak("process", _read_resident_peaks)
        self.reset_peak()

    def now_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def peak_bytes(self) -> int:
        return self._peak.read().used_bytes

    def reset_peak(self) -> None:
        self._peak.prepare_reset()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # 5 resets VmHWM, see proc(5)
        except OSError:
            self.can_reset = False

    def return_freed(self) -> None:
        return_freed_memory()

    def reuse_freed(self, reuse: bool) -> None:
        large_blocks.map(not reuse)

    @property
    def total_bytes(self) -> int:
        total_bytes, limit = psutil.virtual_memory().total, memory_limit()
        return int(total_bytes if limit is None else min(total_bytes, limit.limit_bytes))


def memory_of(device: torch.device) -> AbstractMemory:
    """Return the memory that a model on a device computes in."""
    return ProcessMemory() if device.type == "cpu" else DeviceMemory(device)


def resident_peak_bytes() -> int:
    """Return the peak of this process's resident memory (RSS) since the kernel's count began."""
    try:
        status = Path("/proc/self/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return _peak_without_proc()
    return int(line.split()[1]) * 1024


def _read_resident_peaks() -> _Peaks:
    peak_bytes = resident_peak_bytes()
    return _Peaks(peak_bytes, peak_bytes)


def _peak_without_proc() -> int:
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


@final
class DeviceMemory(AbstractMemory):
    """Memory that torch has allocated on an accelerator.

    Torch counts when the host queues work, not when the device does it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = f"memory that torch has allocated on {device}"
        self._peak = _SharedPeak(str(device), functools.partial(_read_device_peaks, device))

    def now_bytes(self) -> int:
        return torch.accelerator.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        return self._peak.read().used_bytes

    def reserved_peak_bytes(self) -> int:
        return self._peak.read().reserved_bytes

    @property
    def total_bytes(self) -> int:
        return int(torch.get_device_module(self._device).mem_get_info(self._device)[1])

    def reset_peak(self) -> None:
        self._peak.prepare_reset()
        torch.accelerator.reset_peak_memory_stats(self._device)

    def return_cached(self) -> None:
        torch.accelerator.empty_cache()

    def num_failures(self) -> int:
        return int(torch.accelerator.memory_stats(self._device).get("num_ooms", 0))


def _read_device_peaks(device: torch.device) -> _Peaks:
    return _Peaks(
        torch.accelerator.max_memory_allocated(device),
        torch.accelerator.max_memory_reserved(device),
    )
