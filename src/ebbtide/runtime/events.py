"""What happens in a step: the events of a trace, owners of memory, and who is told of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol, final

import torch

from ebbtide.devices.device import AbstractEvent, Layer, Origin

LANES = ("compute", "d2h", "h2d", "disk", "cpu_optimizer")


@final
@dataclass(frozen=True)
class TraceEvent:
    """One piece of work that a lane did, usually for one layer.

    Attributes:
        what: type of event: ``"forward"``, ``"backward"``, ``"offload"``, ``"release"``,
            ``"reload"``, ``"wait"``, ``"rebuild"``, ``"recompute"``, or ``"step"`` for what an
            optimizer steps inside backward.
        lane: lane that did the work: ``"compute"``, ``"d2h"``, ``"h2d"``, ``"disk"`` or
            ``"cpu_optimizer"``.
        begin_s: begin of the event, in seconds since the step began.
        end_s: end of the event, in seconds since the step began. A release takes no time.
        layer: number of the layer in forward order; None if the event belongs to no layer.
        microbatch: number of the forward within the step that the event belongs to, from 0.
        name: name of the layer's module, if it has one.
        size_bytes: number of bytes moved, released or waited for.
        kind: ``"weights"`` or ``"gradients"`` if the event copies, releases or waits for those;
            empty otherwise.
    """

    what: str
    lane: str
    begin_s: float
    end_s: float
    layer: int | None = None
    microbatch: int = 0
    name: str = ""
    size_bytes: int = 0
    kind: str = ""

    @property
    def duration_s(self) -> float:
        """Duration in seconds."""
        return self.end_s - self.begin_s

    @property
    def label(self) -> str:
        """Text such as ``F3`` or ``B3`` for a pass, and ``offload 3`` for any other event.

        Weights and gradients are named after the group that they move in: ``w3`` or ``g3``.
        """
        if self.what in ("forward", "backward"):
            text = f"{self.what[0].upper()}{self.layer}"
        else:
            text = self.what if self.layer is None else f"{self.what} {self.kind[:1]}{self.layer}"
        return f"{text}.m{self.microbatch}" if self.microbatch else text


# ---- What bytes in memory belong to ----


class Owner(Enum):
    """What the bytes in memory belong to; the value is its name in reports and files.

    The members are in the order in which charts stack them, from the bottom.
    """

    OTHER = "held before the step"
    MAPPED = "libraries and other mapped files"
    PARAMETERS = "parameters and buffers"
    OPTIMIZER = "optimizer state"
    GRADIENTS = "gradients"
    WEIGHTS = "offloaded weights on the device"
    INPUTS = "inputs of the forward"
    OUTPUTS = "outputs of the forward"
    KEPT = "activations that stay"
    LEAVING = "activations on their way out"
    REFERENCED = "offloaded activations that the program still holds"
    RELOADED = "reloaded activations"
    REBUILT = "rebuilt activations"
    RECOMPUTED = "saved by a recomputation"
    PASSED = "passed between layers, or freed and not returned"
    RUNNING = "the running operation"


# ---- Who is told of a step as it happens: all that the runtime knows of its listeners ----


class Subject(NamedTuple):
    """The layer, the microbatch and the bytes that an event of a trace is about."""

    layer: Layer | None
    microbatch: int
    size_bytes: int = 0
    kind: str = ""


class EventListener(Protocol):
    """Is told what the lanes do in the step that runs."""

    def copy(self, what: str, subject: Subject, *ends: AbstractEvent) -> None:
        """Copies have been queued; ``ends`` are the events of their completion."""

    def mark(self) -> AbstractEvent:
        """Return an event on the compute stream, behind the work queued so far."""

    def compute(
        self, what: str, subject: Subject, begin: AbstractEvent, end: AbstractEvent | None = None
    ) -> None:
        """The compute stream runs, or waits for, something to ``end``; None: to its present end."""

    def moment(self, what: str, subject: Subject) -> None:
        """Something without duration happens on the compute stream."""

    def begin_forward(self, subject: Subject) -> None:
        """A layer's forward begins."""

    def end_forward(self) -> None:
        """The innermost layer's forward has ended."""

    def begin_backward(self, subject: Subject | None) -> None:
        """A layer's backward begins, and the previous layer's has ended; None: no other begins."""


class MemoryListener(Protocol):
    """Is told which bytes come and go, from the begin of a step to the begin of the next."""

    def change(self, owner: Owner, size_bytes: int, address: int | None = None) -> None:
        """Bytes of saved tensors came to the device; a negative number of them left it.

        Args:
            owner: what they are.
            size_bytes: how many they are.
            address: address of the storage, if it is the one that was saved and no copy of it.
        """

    def note_reference(self, storage: torch.UntypedStorage) -> None:
        """A storage has no reader left within ebbtide; the program may hold it still."""

    def note_values(self, owner: Owner, values: Any) -> None:
        """The tensors in some values belong to an owner, from the begin of this phase on."""

    def enter_forward(self) -> None:
        """A forward begins, perhaps within another one or in the middle of a step."""

    def leave_forward(self) -> None:
        """The model's forward has ended."""

    def enter_backward(self) -> None:
        """A backward begins to read saved tensors, perhaps those of a layer."""


class PassListener(Protocol):
    """Is notified of the passes of a step, in the order in which the host queues their work.

    Attributes:
        holds_sources: whether what has been copied down stays on the device until the listener, or
            the bound on bytes in flight, lets go of it. If not, it goes as soon as the host sees
            that the copy is complete, which is chance.
    """

    @property
    def holds_sources(self) -> bool: ...

    def begin_forward_of(self, layer: Layer, inputs: Any) -> None:
        """Called when a layer's forward begins with these arguments, in nested containers."""

    def end_forward_of(self, layer: Layer) -> None:
        """Called when it has ended."""

    def end_forward(self) -> None:
        """Called when the model's forward has ended."""

    def begin_backward_of(self, layer: int) -> None:
        """Called when a layer's backward begins, perhaps on a thread of autograd."""

    def before_change(self, size_bytes: int, record: Any) -> None:
        """Called before saved tensors come to the device, or leave it: a negative number.

        Args:
            size_bytes: how many bytes; 0 for a storage that is left out, as it can be rebuilt.
            record: their record; None for several together.
        """


class StepListener(Protocol):
    """Is told of the steps of one model that are recorded."""

    def begin_step(self, origin: Origin) -> tuple[EventListener, MemoryListener | None]:
        """A step begins; return who is told what happens in it."""

    def end_step(self) -> None:
        """The last step that began has ended."""

    def stop(self) -> None:
        """No further steps are recorded for now."""
