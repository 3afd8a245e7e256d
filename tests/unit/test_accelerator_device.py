"""An accelerator's clock, on streams in software that run nothing before somebody waits for it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from ebbtide.devices import AcceleratorDevice, accelerator
from ebbtide.stores import PinnedStore
from engine_bench import EngineBench

KIB = 2**10
HOME = torch.device("cpu")
TICK_S = 1e-3  # from one event that is reached to the next


class LazyStream:
    """Stands for `torch.Stream`. Its tensors are the CPU's: only the order of events is its own."""

    def __init__(self, device: torch.device = HOME) -> None:
        self.device = device
        self.queue: deque[Callable[[], None]] = deque()

    def wait_event(self, event: TimedEvent) -> None:
        self.queue.append(event.synchronize)

    def synchronize(self) -> None:
        while self.queue:
            self.queue.popleft()()


class TimedEvent:
    """Stands for `torch.Event`. As in CUDA, times are refused until both events are complete."""

    clock = itertools.count(1)

    def __init__(self, device: torch.device = HOME, *, enable_timing: bool = False) -> None:
        assert enable_timing
        assert device == HOME
        self.ticks = 0

    def record(self, stream: LazyStream) -> None:
        self.stream = stream
        stream.queue.append(self._reach)

    def _reach(self) -> None:
        self.ticks = next(self.clock)

    def query(self) -> bool:
        return self.ticks > 0

    def synchronize(self) -> None:
        while not self.query():
            self.stream.queue.popleft()()

    def elapsed_time(self, end: TimedEvent) -> float:
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end.ticks - self.ticks) * TICK_S * 1e3


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> LazyStream:
    """The compute stream of an accelerator whose every stream is lazy."""
    stream = LazyStream()
    current = [stream]
    generic = SimpleNamespace(
        current_stream=lambda _: current[-1],
        set_stream=current.append,
        current_device_index=lambda: 0,
        set_device_index=lambda _: None,
    )
    own = {"Stream": LazyStream, "Event": TimedEvent, "accelerator": generic}
    monkeypatch.setattr(accelerator, "torch", SimpleNamespace(**{**vars(torch), **own}))
    return stream


@pytest.fixture
def device(compute: LazyStream) -> AcceleratorDevice:  # noqa: ARG001
    device = AcceleratorDevice(HOME)
    device.pins_host_memory = device.pins_by_torch = False
    return device


@pytest.mark.parametrize("compute_first", [False, True])
def test_a_copy_is_timed_from_a_moment_that_compute_has_not_come_to(
    device: AcceleratorDevice, compute: LazyStream, compute_first: bool
) -> None:
    """The two events are on different streams: whoever comes last, both must be complete."""
    device.keeps_time = True
    origin = device.moment()
    copied = device.copy_up(torch.zeros(8), torch.ones(8))
    if compute_first:
        compute.synchronize()
    # Ticks: origin, begin, end; but who asks for the begin first comes to that, then to the origin.
    begin_s, end_s = (TICK_S, 2 * TICK_S) if compute_first else (-TICK_S, TICK_S)
    assert copied.spans(origin) == [("h2d", begin_s, end_s)]
    assert copied.since(origin) == end_s


def test_memory_is_page_locked_by_a_devices_own_module(
    compute: LazyStream,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on accelerators that are neither CUDA nor ROCm. `HOME` makes it the module torch.cpu."""
    assert AcceleratorDevice(HOME).pins_by_torch  # it offers nothing
    locked: dict[int, int] = {}
    monkeypatch.setattr(torch.cpu, "host_register", locked.__setitem__, raising=False)
    monkeypatch.setattr(torch.cpu, "host_unregister", locked.pop, raising=False)
    device = AcceleratorDevice(HOME)
    assert not device.pins_by_torch
    unlock = device.pin(4096, 512)
    assert locked == {4096: 512}
    unlock()
    assert not locked


@pytest.fixture
def bench(device: AcceleratorDevice) -> Iterator[EngineBench]:
    bench = EngineBench(device, PinnedStore(device, slab_bytes=64 * KIB), 64 * KIB)
    yield bench
    bench.close()


def take_step(bench: EngineBench) -> None:
    """Two tensors of 4 KiB leave: sin saves its input, exp its result. Both come back."""
    x = torch.linspace(-1, 1, KIB, requires_grad=True)
    expected = torch.autograd.grad(x.sin().exp().sum(), x)
    loss = bench.run(lambda: x.sin().exp().sum())
    bench.device.finish_copies()
    bench.transfers.poll()  # the copies down are complete: their sources go
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected[0])


@pytest.mark.parametrize("compute_first", [False, True])
def test_statistics_can_be_read_right_after_a_step(
    bench: EngineBench, compute: LazyStream, compute_first: bool
) -> None:
    """Nothing else waits for compute, and it may not have come to where it waits for reloads."""
    take_step(bench)
    if compute_first:
        compute.synchronize()
    stats = bench.stats
    assert stats.offloaded_bytes == stats.reloaded_bytes == 2 * 4 * KIB
    # Asked first, compute waits for the end of each copy, which is one tick away. Asked last, it
    # finds both copies complete.
    late = 2 if compute_first else 0
    assert stats.late_reloads == late
    assert stats.stall_s == pytest.approx(late * TICK_S)
