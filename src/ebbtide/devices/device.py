"""What the engine needs of a device: streams that are ordered by events, and memory.

A *stream* runs what is queued on it in order. An *event* marks a point in a stream; another stream,
or the host, can wait for it. Nothing here says how: an accelerator's streams are the hardware's, a
CPU's copy lanes are worker threads, a CPU's compute stream is the calling thread itself.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import torch


class Span(NamedTuple):
    """When a lane worked; seconds since some origin."""

    lane: str
    begin_s: float
    end_s: float


class Origin(NamedTuple):
    """A moment that both clocks know: the device's, as an event, and the host's, in seconds."""

    event: AbstractEvent
    host_s: float


class AbstractEvent(ABC):
    """A point in a stream that is reached once and stays reached.

    Attributes:
        failure: what the work before the point raised, where work can raise; read it once the
            point is reached.
    """

    failure: BaseException | None = None

    @abstractmethod
    def since(self, origin: Origin) -> float:
        """Seconds from ``origin`` to this point; blocks the host until it is reached."""

    def settled(self) -> AbstractEvent:
        """The same point, once it is on a stream: blocks the host while a worker is to queue it."""
        return self

    def spans(self, origin: Origin) -> list[Span]:  # noqa: ARG002
        """When the work that ends at this point ran, if the device `keeps_time`."""
        return []

    @abstractmethod
    def query(self) -> bool:
        """Whether the point has been reached, without waiting."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the point is reached; raise what the work before it raised."""


def raise_again(failure: BaseException) -> NoReturn:
    """Raise an error that an event keeps, as a copy of it.

    A raised error refers to the frames it passes, and those to the event: neither would die before
    the garbage collector comes, nor would the graph whose backward raised.
    """
    try:
        error = copy.copy(failure)
    except Exception:  # an error whose class cannot be called with its own arguments
        error = failure
    try:
        raise error
    finally:
        del error  # this frame is one of those


class AbstractStream(ABC):
    """A queue of device work that runs in order."""

    @abstractmethod
    def record(self) -> AbstractEvent:
        """Mark the point after everything queued so far."""

    @abstractmethod
    def wait(self, event: AbstractEvent) -> None:
        """Let nothing queued from now on start before ``event``, which is settled, is reached."""


class AbstractLane(ABC):
    """A worker on the host that runs callables in the order in which they were submitted."""

    @abstractmethod
    def submit(
        self, work: Callable[[], None], then: Callable[[], None] | None = None
    ) -> AbstractEvent:
        """Queue ``work``; the returned event is reached when it has run, or failed.

        Args:
            work: runs in the worker.
            then: runs there right after the event has been reached, whether or not work failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish what was submitted, then end the worker."""


class AbstractDevice(ABC):
    """Where a model computes, with one copy stream for each direction.

    Args:
        torch_device: the device, with its index, that tensors of the model report.

    Attributes:
        keeps_time: whether copies queued from now on are to know when they ran. Waits are timed
            always.
    """

    #: whether host memory must be page-locked for copies that do not block the host
    pins_host_memory: bool

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.keeps_time = False

    @abstractmethod
    def moment(self) -> Origin:
        """The present moment of the host, and the point that the compute stream has queued to.

        An accelerator comes to that point later: see `origin`.
        """

    def origin(self) -> Origin:
        """The present moment, once the compute stream has come to it: blocks the host."""
        return self.moment()

    @abstractmethod
    def compute_stream(self) -> AbstractStream:
        """The stream on which the calling thread queues kernels now."""

    @abstractmethod
    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Device memory for a reload.

        Shape:
            (size_bytes,), uint8.

        Streams:
            The memory belongs to the compute stream: another stream may write to it only after
            an event that the compute stream recorded after this call.
        """

    def note_use(self, memory: torch.Tensor, home: AbstractStream) -> bool:  # noqa: ARG002
        """The current compute stream is about to use memory that was allocated on ``home``.

        Where the two differ, the allocator must not hand the memory out again on ``home`` before
        the current stream has finished with it. Nothing to do where memory belongs to no stream.

        Returns:
            Whether they are the same stream.
        """
        return self.compute_stream() is home

    @abstractmethod
    def pin(self, address: int, size_bytes: int) -> Callable[[], None] | None:
        """Page-lock host memory that is mapped already, so that copies do not block the host.

        Args:
            address: where it begins, a multiple of the page size.
            size_bytes: how much.

        Returns:
            What unlocks it, to be called before the memory is unmapped; None where only torch's
            own allocator can give memory that this device's copies take.

        Raises:
            OSError: the system refuses.
        """

    @abstractmethod
    def copy_down(
        self, target: torch.Tensor, source: torch.Tensor, *after: AbstractEvent
    ) -> AbstractEvent:
        """Queue ``target <- source``, device to host, on the d2h stream.

        Args:
            target: host memory.
            source: device memory of the same size and type.
            after: events that the copy waits for.

        Streams:
            Both tensors must live, and ``source`` stay unwritten, until the returned event.
        """

    @abstractmethod
    def copy_up(
        self, target: torch.Tensor, source: torch.Tensor, *after: AbstractEvent
    ) -> AbstractEvent:
        """Queue ``target <- source``, host to device, on the h2d stream.

        Streams:
            Both tensors must live, and ``source`` stay unwritten, until the returned event.
        """

    @abstractmethod
    def lane(self, name: str, lane: str) -> AbstractLane:
        """A worker beside the streams, for what the device cannot do by itself: a disk.

        Args:
            name: of its thread.
            lane: as traces call it.
        """

    @abstractmethod
    def finish_copies(self) -> None:
        """Block the host until both copy streams are empty."""
