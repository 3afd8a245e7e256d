"""An accelerator, used through torch's generic interface, which covers CUDA, ROCm and XPU."""

from __future__ import annotations

import contextlib
import errno
import functools
import time
from collections.abc import Callable, Iterator
from typing import final

import torch

from ebbtide.devices.device import (
    AbstractDevice,
    AbstractEvent,
    AbstractLane,
    AbstractStream,
    Origin,
    Span,
)
from ebbtide.devices.lanes import WorkLane, defer

_PORTABLE = 1  # cudaHostRegisterPortable: the memory is page-locked for every device


@final
class _AcceleratorEvent(AbstractEvent):
    """A point in a stream.

    Args:
        event: torch's event, recorded with timing enabled.
        lane: the lane of the copy that ends here, if one does.
        begun: the event before that copy, if the device `keeps_time`.
    """

    def __init__(
        self, event: torch.Event, lane: str = "", begun: torch.Event | None = None
    ) -> None:
        self.event = event
        self._lane = lane
        self._begun = begun

    def query(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()

    def since(self, origin: Origin) -> float:
        return _seconds_between(origin, self.event)

    def spans(self, origin: Origin) -> list[Span]:
        if self._begun is None:
            return []
        begin_s = _seconds_between(origin, self._begun)
        return [(self._lane, begin_s, self.since(origin))]


def _seconds_between(origin: Origin, event: torch.Event) -> float:
    event.synchronize()
    assert isinstance(origin.event, _AcceleratorEvent)
    # `elapsed_time` needs both events complete. On another stream, the origin may be the later one.
    origin.event.synchronize()
    return float(origin.event.event.elapsed_time(event)) / 1e3


@final
class _AcceleratorStream(AbstractStream):
    def __init__(self, stream: torch.Stream, lane: str = "compute") -> None:
        self.stream = stream
        self.lane = lane

    def record(self) -> AbstractEvent:
        return _AcceleratorEvent(self.mark())

    def mark(self) -> torch.Event:
        event = torch.Event(device=self.stream.device, enable_timing=True)
        event.record(self.stream)
        return event

    def wait(self, event: AbstractEvent) -> None:
        event = event.settled()
        assert isinstance(event, _AcceleratorEvent)
        self.stream.wait_event(event.event)


@final
class AcceleratorDevice(AbstractDevice):
    """One accelerator. It has a copy stream for each direction because the link is full duplex."""

    pins_host_memory = True

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        self._d2h = _AcceleratorStream(torch.Stream(device=torch_device), "d2h")
        self._h2d = _AcceleratorStream(torch.Stream(device=torch_device), "h2d")
        # The module of another accelerator than CUDA's and ROCm's may offer two functions:
        # `host_register(address, size_bytes)`, which raises an OSError if it fails, and
        # `host_unregister(address)`, which takes it back.
        module = torch.get_device_module(torch_device)
        self.pins_by_torch = torch_device.type != "cuda" and not hasattr(module, "host_register")

    def origin(self) -> Origin:
        event = self.moment().event
        event.synchronize()
        return Origin(event, time.perf_counter())

    def compute_stream(self) -> AbstractStream:
        # Not cached: backward runs in its own threads, and users switch streams.
        return _AcceleratorStream(torch.accelerator.current_stream(self.torch_device))

    def allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.torch_device)

    def note_use(
        self,
        memory: torch.Tensor,
        home: AbstractStream,
        current: AbstractStream,
        ready: AbstractEvent | None = None,  # noqa: ARG002
    ) -> bool:
        assert isinstance(home, _AcceleratorStream) and isinstance(current, _AcceleratorStream)
        if current.stream == home.stream:
            return True
        memory.record_stream(current.stream)
        return False

    def pin(self, address: int, size_bytes: int) -> Callable[[], None]:
        if self.torch_device.type != "cuda":
            module = torch.get_device_module(self.torch_device)
            module.host_register(address, size_bytes)
            return functools.partial(module.host_unregister, address)
        # torch has no generic call for this; its ROCm builds use the same name.
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        # Without a current device, the call would create a CUDA context on the first device.
        with torch.cuda.device(self.torch_device):
            status = runtime.cudaHostRegister(address, size_bytes, _PORTABLE)
        if int(status):
            self._clear_error()
            raise OSError(errno.ENOMEM, f"cudaHostRegister: {runtime.cudaGetErrorString(status)}")

        def unlock() -> None:
            with torch.cuda.device(self.torch_device):
                runtime.cudaHostUnregister(address)

        return unlock

    def _clear_error(self) -> None:
        """Clear the error, which CUDA would otherwise report again after the next kernel."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.torch_device)

    def copy_down(
        self, target: torch.Tensor, source: torch.Tensor, *after: AbstractEvent
    ) -> AbstractEvent:
        return self._copy_on(self._d2h, target, source, after)

    def copy_up(
        self, target: torch.Tensor, source: torch.Tensor, *after: AbstractEvent
    ) -> AbstractEvent:
        return self._copy_on(self._h2d, target, source, after)

    def lane(self, name: str, lane: str) -> AbstractLane:
        return WorkLane(name, lane)

    def defer(self, work: Callable[[], None]) -> None:
        defer(work)

    def finish_copies(self) -> None:
        for stream in (self._d2h, self._h2d):
            stream.stream.synchronize()

    def finish_other_streams(self) -> None:
        torch.accelerator.synchronize(self.torch_device)

    def _copy_on(
        self,
        stream: _AcceleratorStream,
        target: torch.Tensor,
        source: torch.Tensor,
        after: tuple[AbstractEvent, ...],
    ) -> AbstractEvent:
        for event in after:
            stream.wait(event)
        begun = stream.mark() if self.keeps_time else None
        with _current(stream.stream):
            target.copy_(source, non_blocking=True)
        return _AcceleratorEvent(stream.mark(), stream.lane, begun)


@contextlib.contextmanager
def _current(stream: torch.Stream) -> Iterator[None]:
    """Make ``stream`` the current stream of the calling thread within the block.

    ``with stream:`` would store the previously current stream in the stream object itself. If two
    threads copied at once (backward's and a worker's), each would restore the stream of the other
    (pytorch#176560).
    """
    accelerator = torch.accelerator
    index, before = accelerator.current_device_index(), accelerator.current_stream(stream.device)
    accelerator.set_stream(stream)  # this also makes the stream's device the current one
    try:
        yield
    finally:
        accelerator.set_stream(before)
        accelerator.set_device_index(index)
