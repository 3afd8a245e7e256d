"""An accelerator through torch's generic interface: CUDA, ROCm and XPU alike."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from typing import final

import torch

from ebbtide.devices.base import AbstractDevice, AbstractEvent, AbstractStream

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device


@final
class _AcceleratorEvent(AbstractEvent):
    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def query(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()


@final
class _AcceleratorStream(AbstractStream):
    def __init__(self, stream: torch.Stream) -> None:
        self.stream = stream

    def record(self) -> AbstractEvent:
        return _AcceleratorEvent(self.stream.record_event())

    def wait(self, event: AbstractEvent) -> None:
        assert isinstance(event, _AcceleratorEvent)
        self.stream.wait_event(event.event)


@final
class AcceleratorDevice(AbstractDevice):
    """One accelerator, with one copy stream for each direction: the link is full duplex."""

    pins_host_memory = True

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        self._d2h = _AcceleratorStream(torch.Stream(device=torch_device))
        self._h2d = _AcceleratorStream(torch.Stream(device=torch_device))

    def compute_stream(self) -> AbstractStream:
        # Looked up live: backward runs in threads of its own, and users switch streams.
        return _AcceleratorStream(torch.accelerator.current_stream(self.torch_device))

    def allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.torch_device)

    def pin(self, address: int, size_bytes: int) -> Callable[[], None] | None:
        if self.torch_device.type != "cuda":
            return None
        # torch has no generic call for this; ROCm's builds spell it the same.
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(address, size_bytes, _PORTABLE)
        if int(status):
            self._clear_error()
            raise OSError(errno.ENOMEM, f"cudaHostRegister: {runtime.cudaGetErrorString(status)}")

        def unlock() -> None:
            runtime.cudaHostUnregister(address)

        return unlock

    def _clear_error(self) -> None:
        """Take back the error that CUDA would report once more, after the next kernel."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.torch_device)

    def copy_down(
        self, target: torch.Tensor, source: torch.Tensor, *after: AbstractEvent
    ) -> AbstractEvent:
        return _copy_on(self._d2h, target, source, after)

    def copy_up(
        self, target: torch.Tensor, source: torch.Tensor, *after: AbstractEvent
    ) -> AbstractEvent:
        return _copy_on(self._h2d, target, source, after)

    def finish_copies(self) -> None:
        for stream in (self._d2h, self._h2d):
            stream.stream.synchronize()


def _copy_on(
    stream: _AcceleratorStream,
    target: torch.Tensor,
    source: torch.Tensor,
    after: tuple[AbstractEvent, ...],
) -> AbstractEvent:
    for event in after:
        stream.wait(event)
    with stream.stream:
        target.copy_(source, non_blocking=True)
    return stream.record()
