"""Measure memory: of the process, as the kernel counts it, or of a device, as torch counts it."""

from __future__ import annotations

import abc
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import final

import psutil
import torch

_SAMPLE_EVERY_S = 0.005


class AbstractMemory(abc.ABC):
    """The number of bytes in use, and its peak."""

    @abc.abstractmethod
    def now_bytes(self) -> int:
        """Return the number of bytes in use now."""

    @abc.abstractmethod
    def peak_bytes(self) -> int:
        """Return the largest number of bytes in use since `reset_peak`."""

    @abc.abstractmethod
    def reset_peak(self) -> None:
        """Restart the peak at the present level."""


@final
class ProcessMemory(AbstractMemory):
    """Resident memory (RSS) of this process.

    The kernel records the peak, so no short peak is missed.

    Attributes:
        can_reset: whether the kernel can reset the peak (Linux can). If not, the peak is that since
            the process began.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.can_reset = True
        self.reset_peak()

    def now_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def peak_bytes(self) -> int:
        try:
            status = Path("/proc/self/status").read_text()
            line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        except (OSError, StopIteration):
            return _peak_without_proc()
        return int(line.split()[1]) * 1024

    def reset_peak(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # 5 resets VmHWM, see proc(5)
        except OSError:
            self.can_reset = False


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

    def now_bytes(self) -> int:
        return torch.accelerator.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        return torch.accelerator.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)


@final
class Timeline:
    """Samples memory from a thread while its `with` block runs.

    Attributes:
        samples: pairs of seconds since the block began and bytes in use, one every 5 ms.
    """

    def __init__(self, memory: AbstractMemory) -> None:
        self._memory = memory
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.samples: list[tuple[float, int]] = []

    def __enter__(self) -> Timeline:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        begin_s = time.perf_counter()
        while not self._over.wait(_SAMPLE_EVERY_S):
            self.samples.append((time.perf_counter() - begin_s, self._memory.now_bytes()))
