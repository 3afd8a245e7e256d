"""Records: each says where one piece of memory is, on the device, in a lower tier, or in flight.

There is a record for everything that is copied: a storage that autograd saved, the weights of a
layer, a gradient. A storage that is kept or rebuilt has one too, so that the records tell all of
the memory. The table below defines the states completely; in debug runs `Record.check` checks every
record against it. Its second column names the device memory that the record itself keeps alive.

| state       | on the device                  | in the store | why                                |
|-------------|--------------------------------|--------------|------------------------------------|
| KEPT        | the saved tensors' own memory  | nothing      | it was decided to keep it          |
| PENDING     | the source                     | nothing yet  | a schedule will start its copy     |
| RETAINED    | the source                     | copy started | a schedule will release the source |
| OFFLOADING  | the source until the copy ends | copy started | it is being offloaded              |
| STUCK       | the source                     | not readable | its copy to the store failed       |
| STORED      | nothing                        | the bytes    | its copy to the store is complete  |
| RELOADED    | a buffer, maybe being filled   | the bytes    | backward reads it, or soon will    |
| REBUILDABLE | nothing                        | nothing      | a recipe can compute it again      |
| REBUILT     | a buffer                       | nothing      | the recipe was run                 |
| DROPPED     | nothing, once its copy ended   | nothing      | nothing can read it any more       |
"""

from __future__ import annotations

from enum import IntEnum, auto

import torch

from ebbtide.devices.device import AbstractEvent, AbstractStream
from ebbtide.stores.store import Slot
from ebbtide.transfers.layer import Layer


class State(IntEnum):
    """Where the bytes of a record are."""

    KEPT = auto()
    PENDING = auto()
    RETAINED = auto()
    OFFLOADING = auto()
    STUCK = auto()
    STORED = auto()
    RELOADED = auto()
    REBUILDABLE = auto()
    REBUILT = auto()
    DROPPED = auto()


# A global of this module is looked up faster than a member of the enum.
(
    KEPT,
    PENDING,
    RETAINED,
    OFFLOADING,
    STUCK,
    STORED,
    RELOADED,
    REBUILDABLE,
    REBUILT,
    DROPPED,
) = State

ACTIVATION, WEIGHT, GRADIENT = "activations", "weights", "gradients"
"""The kinds of bytes that a record can hold, as traces and reports name them."""

CONTENTS: dict[State, set[str]] = {
    KEPT: set(),
    PENDING: {"source"},
    RETAINED: {"source", "slot"},
    OFFLOADING: {"source", "slot"},
    STUCK: {"source", "slot"},
    STORED: {"slot"},
    RELOADED: {"slot", "buffer"},
    REBUILDABLE: set(),
    REBUILT: {"buffer"},
    DROPPED: set(),
}
"""The parts that a record has in each state. A dropped record may also have its source, until its
copy has ended."""

TRANSITIONS = {
    KEPT: {DROPPED},
    PENDING: {RETAINED, OFFLOADING, DROPPED},
    RETAINED: {OFFLOADING, STORED, STUCK, DROPPED},
    OFFLOADING: {STORED, STUCK, DROPPED},
    STUCK: {DROPPED},
    STORED: {RELOADED, DROPPED},
    RELOADED: {STORED, DROPPED},
    REBUILDABLE: {REBUILT, DROPPED},
    REBUILT: {REBUILDABLE, DROPPED},
    DROPPED: set[State](),
}
"""The states that may follow each state."""


class Record:
    """Where one piece of memory is; the table at the top of this file defines the states.

    Args:
        layer: the layer that it belongs to; None outside layers.
        microbatch: number of the forward, within its step, that it belongs to.
        size_bytes: number of bytes in each copy of it.
        state: its first state.

    Attributes:
        kind: `ACTIVATION`, `WEIGHT` or `GRADIENT`.
        layer: as given.
        microbatch: as given.
        size_bytes: as given.
        state: the present state; `move_to` changes it.
        home: the compute stream that owns the memory of `source`, later of `buffer`.
        source: the device bytes until the copy to the store is complete, (size_bytes,) uint8.
        slot: the bytes' place in the store.
        offloaded: event of the completion of the copy to the store.
        buffer: the device bytes after a reload or a rebuild, (size_bytes,) uint8.
        ready: event after which `buffer` holds the bytes.
        awaited: whether the compute stream waits for `ready`, so that `buffer` can be freed in that
            stream's order.
        handles: number of live saved tensors that share the bytes.
        generation: number of the present buffer, by which a handle knows which one it has read.
        unread: number of handles that have not read the present buffer.
        buffer_stays: whether the buffer stays until the graph is freed, because a schedule reloaded
            it, or because a graph that a backward made (``create_graph=True``) holds it anyway.
        expected: whether the store has been told that a reload will come.
        copies: pairs of ``"offload"`` or ``"reload"`` and the event of that copy's completion;
            empty unless steps are traced.
    """

    __slots__ = (
        "awaited",
        "buffer",
        "buffer_stays",
        "copies",
        "expected",
        "generation",
        "handles",
        "home",
        "layer",
        "microbatch",
        "offloaded",
        "ready",
        "size_bytes",
        "slot",
        "source",
        "state",
        "unread",
    )

    kind = ACTIVATION
    home: AbstractStream

    @property
    def source_address(self) -> int | None:
        """Address of the storage that the program knows as the source; None for a copy of it."""
        return None

    def find_storage(self) -> torch.UntypedStorage | None:
        """Return the storage that the program knows as the source, if it still exists."""
        return None

    def __init__(self, layer: Layer | None, microbatch: int, size_bytes: int, state: State) -> None:
        self.layer = layer
        self.microbatch = microbatch
        self.size_bytes = size_bytes
        self.state = state
        self.source: torch.Tensor | None = None
        self.slot: Slot | None = None
        self.offloaded: AbstractEvent | None = None
        self.buffer: torch.Tensor | None = None
        self.ready: AbstractEvent | None = None
        self.awaited = self.expected = self.buffer_stays = False
        self.handles = self.generation = self.unread = 0
        self.copies: tuple[tuple[str, AbstractEvent], ...] = ()

    def move_to(self, state: State) -> None:
        """Change the state.

        Raises:
            AssertionError: ``state`` cannot follow the present state; this is a bug in ebbtide.
        """
        assert state in TRANSITIONS[self.state], f"{self.state.name} -> {state.name}"
        self.state = state

    def check(self) -> None:
        """Check the record against the table of states. This costs time, so only debug runs do it.

        Raises:
            AssertionError: the record has a part that its state forbids, or lacks one.
        """
        parts = {part for part in ("source", "slot", "buffer") if getattr(self, part) is not None}
        if self.state is DROPPED:
            parts.discard("source")
        assert parts == CONTENTS[self.state], f"a {self.state.name} record has {parts}"
        assert (self.ready is not None) == (self.buffer is not None), "a buffer without its event"
        assert not self.expected or self.state is STORED, "expected, but not in the store"
        assert not self.buffer_stays or self.state is RELOADED, "must stay, but was not reloaded"

    def is_copied(self) -> bool:
        """Whether the copy to the store is complete. It must have been queued."""
        assert self.offloaded is not None
        return self.offloaded.query()

    def release_source(self) -> None:
        """Free the source, whose bytes are in the store or can no longer be read by anything."""
        self.source = self.offloaded = None
        if self.state is not DROPPED:
            self.move_to(STORED)
            self.note_stored()

    def take_buffer(
        self, buffer: torch.Tensor, ready: AbstractEvent, home: AbstractStream, state: State
    ) -> None:
        """Take the device buffer that a reload or a rebuild fills."""
        self.move_to(state)
        self.buffer, self.ready, self.home, self.awaited = buffer, ready, home, False
        self.generation += 1
        self.unread = self.handles

    def release_buffer(self, state: State) -> None:
        """Free the buffer. The bytes can be reloaded or rebuilt again."""
        self.move_to(state)
        self.buffer = self.ready = None
        self.buffer_stays = False
        self.unread = 0
        if state is STORED:
            self.note_stored()

    def note_stored(self) -> None:
        """Called when the bytes are only in the store, so that they may have to be reloaded."""

    def is_read(self) -> bool:
        """Whether every handle has read the buffer, and no schedule keeps it."""
        return not self.unread and self.buffer is not None and not self.buffer_stays

    def can_go(self) -> bool:
        """Whether the buffer may be freed to make room: one handle at least has read it.

        The handles that have not read the buffer have the bytes reloaded again.
        """
        return self.unread < self.handles and self.state is RELOADED and not self.buffer_stays

    def precedes(self, other: Record) -> bool:  # noqa: ARG002
        """Whether backward is expected to read this record before another one."""
        return False
