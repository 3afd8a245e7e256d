"""A thousand steps in one process leave nothing behind: no object, thread, file or memory."""

import ctypes
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import psutil
import pytest

from ebbtide import ActivationPolicy
from ebbtide.devices import AbstractDevice, CpuDevice
from ebbtide.stores import AbstractStore, DiskStore, PinnedStore, StagedDiskStore, TieredStore
from engine_bench import EngineBench
from harness import KIB, Simulation, drain_autograd, poll_weakly, without_collector
from programs import Program

pytestmark = pytest.mark.slow

STEPS = 1000
SETTLED = 300  # steps after which memory must have stopped growing
SESSION_STEPS = 50  # then another session takes over
GROWTH_BYTES = 8 * 2**20
"""Of RSS, over the last 700 steps. One forgotten tensor of 4 KiB per microbatch would be as much:
700 steps x 2.9 forwards x 4 KiB = 7.9 MiB, and a forward offloads several, some of 6 KiB. The same
steps without a leak stay within 1 MiB, and the allocator's own scatter."""
ENGINE_TYPES = {
    "ForwardLog",
    "RecordedTensor",
    "Slot",
    "SmallTensors",
    "StorageRecord",
    "Transfers",
}


class Bench(Protocol):
    """An engine to run programs in."""

    transfers: Any

    def forward(self, function: Callable[[], Any]) -> Any: ...

    def switch(self, offloading: bool) -> None: ...

    def synchronize(self) -> None:
        """Wait for the device, as training code does that reads a loss."""

    def finish(self) -> None:
        """Check that the engine holds nothing, and close it."""


class SimulatedBench(Simulation):
    def synchronize(self) -> None:
        self.device.finish_copies()

    def finish(self) -> None:
        self.check_at_rest()
        self.transfers.close()


class ThreadBench(EngineBench):
    """The real CPU device; tensors leave and come back in worker threads."""

    def __init__(self, seed: int, device: AbstractDevice, store: AbstractStore) -> None:
        policy = ActivationPolicy(min_bytes=512, rebuild=False)
        super().__init__(device, store, (8 * KIB) << seed % 4, policy)

    def forward(self, function: Callable[[], Any]) -> Any:
        return self.run(function)

    def synchronize(self) -> None:
        """The CPU's kernels have run."""

    def finish(self) -> None:
        _wait_until(self._at_rest, "copies did not end, or bytes were left in the store")
        self.close()

    def _at_rest(self) -> bool:
        return self.in_flight.is_idle and self.store.used_bytes == 0


class DiskBench(ThreadBench):
    def __init__(self, seed: int) -> None:
        store = DiskStore()
        super().__init__(seed, CpuDevice(), store)
        store.on_progress = poll_weakly(self.transfers)


class TieredBench(ThreadBench):
    """As on an accelerator, with threads for its streams."""

    def __init__(self, seed: int) -> None:
        device = CpuDevice()
        disk = StagedDiskStore(device, staging_bytes=64 * KIB)
        super().__init__(
            seed, device, TieredStore(PinnedStore(device, budget_bytes=64 * KIB), disk)
        )


@pytest.mark.timeout(1800)  # half a minute on a core of its own
@pytest.mark.filterwarnings("ignore:the system refused to page-lock")
@pytest.mark.parametrize("bench_type", [SimulatedBench, DiskBench, TieredBench])
def test_a_thousand_steps_leave_nothing(bench_type: Callable[[int], Bench]) -> None:
    _run_sessions(bench_type, 0, SESSION_STEPS)  # what torch and Python start once and keep
    threads, files = _num_threads(), _num_files()
    _run_sessions(bench_type, SESSION_STEPS, SETTLED)
    settled_bytes = _resident_bytes()
    _run_sessions(bench_type, SETTLED, STEPS)
    grown_bytes = _resident_bytes() - settled_bytes
    _wait_until(lambda: _num_threads() <= threads, f"threads: {threading.enumerate()}")
    assert not [t.name for t in threading.enumerate() if t.name.startswith("ebbtide-")]
    assert _num_files() <= files
    assert grown_bytes < GROWTH_BYTES, f"grown by {grown_bytes / 2**20:.1f} MiB"


def _run_sessions(bench_type: Callable[[int], Bench], first: int, last: int) -> None:
    for begin in range(first, last, SESSION_STEPS):
        objects = _engine_objects()
        with without_collector():
            _run_steps(bench_type(begin // SESSION_STEPS), seed=1000 * begin)
            left = _engine_objects() - objects
        assert not left, f"left over: {left}"
        gc.collect()  # simulated devices refer to themselves


def _run_steps(bench: Bench, seed: int) -> None:
    steps = 0
    while steps < SESSION_STEPS:
        outcome = Program(seed, bench.switch).run(bench.forward)
        if outcome.errors:
            drain_autograd()
        bench.synchronize()
        steps += outcome.num_steps
        seed += 1
    bench.finish()


def _engine_objects() -> Counter[str]:
    types = map(type, gc.get_objects())  # isinstance would wake lazy modules
    known = {kind for kind in set(types) if ENGINE_TYPES & {each.__name__ for each in kind.__mro__}}
    return Counter(kind.__name__ for kind in map(type, gc.get_objects()) if kind in known)


def _num_threads() -> int:
    return psutil.Process().num_threads()


def _num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _resident_bytes() -> int:
    """After the allocator has given back what is free, so that fragments do not count."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def _wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s, otherwise
        time.sleep(0.001)
