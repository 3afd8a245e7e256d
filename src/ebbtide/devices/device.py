"""The interface of devices: memory, and streams that are ordered by events.

A *stream* runs the work queued on it in order. An *event* marks a point in a stream; other streams
and the host can wait for it. Each device implements streams in its own way: an accelerator uses
hardware streams; on a CPU the copy streams are worker threads, and the compute stream is the
calling thread itself.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar, final

import torch
from torch.profiler import record_function

Span = tuple[str, float, float]
"""When a lane was busy: its name, and the begin and the end in seconds since an origin."""


class Origin(NamedTuple):
    """One moment on both clocks: an event on the device, and `time.perf_counter` on the host."""

    event: AbstractEvent
    host_s: float


class AbstractEvent(ABC):
    """A point in a stream that is reached once and stays reached.

    Attributes:
        failure: the error that the work before the point raised, if it did; valid once the point
            is reached.
    """

    failure: BaseException | None = None

    @abstractmethod
    def since(self, origin: Origin) -> float:
        """Seconds from ``origin`` to this point; blocks the host until it is reached."""

    def settled(self) -> AbstractEvent:
        """Return the event on a stream for this point.

        Blocks the host while a worker thread has yet to queue the work that ends here.
        """
        return self

    def spans(self, origin: Origin) -> list[Span]:  # noqa: ARG002
        """The intervals in which the work that ends here ran, if the device `keeps_time`."""
        return []

    def withdraw(self) -> bool:
        """Take back a worker's job that ends here, if it has not begun; return whether it is.

        The event is reached when the worker gets to the job, which it then leaves out.
        """
        return False

    @abstractmethod
    def query(self) -> bool:
        """Whether the point has been reached, without waiting."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the point is reached; raise `failure` if there is one."""


@final
class HostMoment(AbstractEvent):
    """A point in the host's own program, which is reached as soon as it is made."""

    def __init__(self) -> None:
        self.time_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def since(self, origin: Origin) -> float:
        return self.time_s - origin.host_s


def raise_again(failure: BaseException) -> NoReturn:
    """Raise a copy of an error that an event keeps.

    A raised error refers to the frames that it passes through, and these refer to the event. If the
    event's own error were raised, this reference cycle would keep the event, and the graph whose
    backward raised, alive until the next garbage collection.
    """
    try:
        error = copy.copy(failure)
    except Exception:  # an error whose class cannot be called with its own arguments
        error = failure
    try:
        raise error
    finally:
        del error  # this frame is one of those that the error refers to


class AbstractStream(ABC):
    """A queue of device work that runs in order."""

    @abstractmethod
    def record(self) -> AbstractEvent:
        """Mark the point after everything queued so far."""

    @abstractmethod
    def wait(self, event: AbstractEvent) -> None:
        """Make everything queued from now on wait until ``event`` is reached.

        Blocks the host while a worker thread has yet to queue the work that ends at the event.
        """


class AbstractLane(ABC):
    """A worker on the host that runs callables in the order of their submission."""

    @abstractmethod
    def submit(
        self, work: Callable[[], None], then: Callable[[], None] | None = None
    ) -> AbstractEvent:
        """Queue ``work`` and return an event that is reached when the work has ended or failed.

        Args:
            work: runs in the worker.
            then: runs in the worker right after the event is reached, even if the work failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish the submitted work, then end the worker."""


class AbstractDevice(ABC):
    """The device on which a model computes, with one copy stream for each direction.

    Args:
        torch_device: the device of the model's tensors, with its index.

    Attributes:
        keeps_time: whether copies queued from now on record when they ran. Waits are always timed.
    """

    #: whether host memory must be page-locked for copies that do not block the host
    pins_host_memory: bool
    #: whether only torch's own allocator can do that, which rounds sizes up to powers of two
    pins_by_torch = False
    #: whether the model computes in host memory, so that it offloads to disk
    computes_on_host = False
    #: whether the system or torch counts the bytes of the device's memory
    has_memory = True

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.keeps_time = False

    def moment(self) -> Origin:
        """The present time on the host, and an event after all work queued on the compute stream.

        An accelerator reaches the event later; `origin` waits for that.
        """
        return Origin(self.compute_stream().record(), time.perf_counter())

    def origin(self) -> Origin:
        """Block the host until the compute stream has run its queued work; return that moment."""
        return self.moment()

    @abstractmethod
    def compute_stream(self) -> AbstractStream:
        """The stream on which the calling thread queues kernels at present."""

    @abstractmethod
    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Allocate device memory for a reload.

        Shape:
            (size_bytes,), uint8.

        Streams:
            The memory belongs to the current compute stream. Another stream may write to it only
            after an event that the compute stream has recorded after this call.
        """

    def note_use(
        self,
        memory: torch.Tensor,  # noqa: ARG002
        home: AbstractStream,
        current: AbstractStream,
        ready: AbstractEvent | None = None,  # noqa: ARG002
    ) -> bool:
        """Note that the current compute stream will use memory that was allocated on ``home``.

        If the two streams differ, the allocator must not hand the memory out again on ``home``
        before the current stream has finished with it. Devices whose memory belongs to no stream
        do nothing.

        Args:
            memory: the memory to be used.
            home: the stream on which it was allocated.
            current: the current compute stream.
            ready: the event after which the memory contains its values. The current stream must
                wait for it; the simulated device checks that.

        Returns:
            Whether ``home`` is the current compute stream.
        """
        return current is home

    @abstractmethod
    def pin(self, address: int, size_bytes: int) -> Callable[[], None]:
        """Page-lock host memory that is already mapped, so that copies do not block the host.

        It is not called where `pins_by_torch`.

        Args:
            address: where the memory begins, a multiple of the page size.
            size_bytes: its size.

        Returns:
            A function that unlocks the memory, to be called before the memory is unmapped.

        Raises:
            OSError: the system refuses to page-lock the memory.
        """

    @abstractmethod
    def copy_down(
        self, target: torch.Tensor, source: torch.Tensor, *after: AbstractEvent
    ) -> AbstractEvent:
        """Queue ``target <- source``, device to host, on the d2h stream.

        Args:
            target: host memory.
            source: device memory of the same size and dtype.
            after: events that the copy waits for.

        Streams:
            Both tensors must stay alive, and ``source`` unmodified, until the returned event.
        """

    @abstractmethod
    def copy_up(
        self, target: torch.Tensor, source: torch.Tensor, *after: AbstractEvent
    ) -> AbstractEvent:
        """Queue ``target <- source``, host to device, on the h2d stream.

        Streams:
            Both tensors must stay alive, and ``source`` unmodified, until the returned event.
        """

    @abstractmethod
    def lane(self, name: str, lane: str) -> AbstractLane:
        """Make a worker for work that the device's streams cannot do, such as disk access.

        Args:
            name: the name of its thread.
            lane: the name of its lane in traces.
        """

    @abstractmethod
    def defer(self, work: Callable[[], None]) -> None:
        """Run work that may block soon, outside the calling code.

        Never blocks the caller, so finalizers can call it.
        """

    @abstractmethod
    def finish_copies(self) -> None:
        """Block the host until both copy streams are empty."""

    def finish_other_streams(self) -> None:  # noqa: B027  # most devices have none
        """Block the host until the streams are empty that the program has beside ours."""


# ---- Identifies one call of a layer, and names ranges in the user's own profiler after it ----

Result = TypeVar("Result")

is_profiling = torch._C._autograd._profiler_enabled
"""Whether a profiler runs. Code that runs for every tensor asks before it calls `in_range`."""


@final
@dataclass(frozen=True)
class Layer:
    """One call of a layer's module in a forward.

    Attributes:
        index: number of the call in the forward, from 0.
        name: qualified name of the module.
    """

    index: int
    name: str


def in_range(
    what: str, layer: Layer | None, work: Callable[..., Result], *arguments: Any
) -> Result:
    """Call ``work``, inside a range such as ``ebbtide::offload 3 blocks.3`` if a profiler runs."""
    if not is_profiling():
        return work(*arguments)
    name = "" if layer is None else f" {layer.index} {layer.name}"
    with record_function(f"ebbtide::{what}{name}"):
        return work(*arguments)
