"""Counts what recomputed layers do not save, and what their recomputation holds in backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol, final

from ebbtide.activations.activations import Activations
from ebbtide.activations.handles import Hold
from ebbtide.devices.device import AbstractEvent
from ebbtide.memory.freed_memory import FreedMemory, return_freed_memory
from ebbtide.recomputation.verification import Verifications
from ebbtide.tracing.step_memory import Owner
from ebbtide.transfers.account import Account
from ebbtide.transfers.layer import Layer
from ebbtide.transfers.prefetch import ForwardLog
from ebbtide.transfers.recorder import Subject
from ebbtide.transfers.transfers import Transfers
from ebbtide.units import format_size

_CHANGED: Final = "finds weights, buffers or inputs that were changed before backward"


class AbstractCall(Protocol):
    """A call of a recomputed layer whose forward may run again."""

    def finds_changes(self) -> bool:
        """Whether a parameter or a large buffer is not as the first forward has used it."""


@final
@dataclass(frozen=True)
class RecomputedLayer:
    """One call of a layer whose forward runs again in backward.

    Attributes:
        layer: the layer.
        microbatch: number of the forward within the step, from 0.
        size_bytes: bytes of the storages saved inside it, each counted once, without its inputs and
            parameters.
        borrowed_bytes: bytes of its inputs that left the device and are used inside it.
        num_saved: number of tensors saved inside it.
    """

    layer: Layer
    microbatch: int
    size_bytes: int
    borrowed_bytes: int
    num_saved: int


@final
class RecomputedHold(Hold):
    """The hold of one call of a recomputed layer, which dies with the last tensor saved inside it.

    Attributes:
        call: what was called.
        forward: the log of its forward.
        held_bytes: device bytes that its last recomputation holds. They count as held until the
            call dies, although each storage is freed when backward has read it.
        transfers: the model's transfers.
        begun: event before the recomputation that runs; set only if steps are traced.
    """

    __slots__ = ("begun", "call", "forward", "held_bytes", "transfers")
    call: RecomputedLayer
    forward: ForwardLog
    held_bytes: int
    transfers: Transfers
    begun: AbstractEvent | None

    def note_death(self) -> None:
        self.transfers.live -= 1
        layer = self.call.layer
        self.transfers.account.give(self.held_bytes, Owner.RECOMPUTED, layer)


@final
class Recomputations:
    """The recomputed layers of one model.

    Args:
        activations: the model's activations.
        verifications: which layers give the same bits again.

    Attributes:
        verifications: as given.
        freed: says when freed memory is returned to the system; None on an accelerator.
    """

    def __init__(self, activations: Activations, verifications: Verifications) -> None:
        self._activations = activations
        self.verifications = verifications
        self._account: Account = activations.transfers.account
        self._gate = activations.transfers.gate
        on_host = activations.transfers.device.computes_on_host
        self.freed = FreedMemory() if on_host else None  # see [Note: freed but resident]
        self._step = 0  # number of the step that `_calls` is of
        self._calls: list[RecomputedLayer] = []
        self._calls_before: list[RecomputedLayer] = []  # of the last finished step
        self._verifying = self._verifying_before = 0  # calls that are verified, likewise

    @property
    def num_verifying(self) -> int:
        """Number of calls verified in the running step, or in the last one if none runs."""
        self._note_step()
        return self._verifying_before if self._account.origin is None else self._verifying

    def note_verifying(self) -> None:
        """Count a call that would be recomputed and is not, because it is verified."""
        self._note_step()
        self._verifying += 1

    def refuse_changed(self, layer: Layer) -> None:
        """Recompute no layer again in which the program changes what torch may not need.

        Args:
            layer: the layer that cannot run again, because something in it was changed. Others
                whose forward has run, and whose weights or buffers were changed, are refused with
                it, so that they do not end a step each.
        """
        self.verifications.refuse(layer, _CHANGED)
        for hold in list(self._activations.deaths.awaited):
            call: Any = hold() if isinstance(hold, RecomputedHold) else None
            if call is not None and call.finds_changes():
                self.verifications.refuse(hold.call.layer, _CHANGED)  # type: ignore[attr-defined]

    def add(
        self, owner: AbstractCall, call: RecomputedLayer, forward: ForwardLog
    ) -> RecomputedHold:
        """Count a call whose first forward has ended.

        Args:
            owner: what dies when nothing saved inside the call is needed any more.
            call: what was called.
            forward: the log of its forward.
        """
        deaths, transfers = self._activations.deaths, self._activations.transfers
        with self._gate:
            self._note_step()
            self._calls.append(call)
            hold = RecomputedHold(owner, deaths.queue.append)
            hold.call, hold.forward, hold.transfers = call, forward, transfers
            hold.held_bytes, hold.begun = 0, None
            transfers.live += 1
            deaths.awaited.add(hold)
            self._account.meter.recomputed_bytes += call.size_bytes
        self._note_freed(call.size_bytes)
        return hold

    def _note_freed(self, size_bytes: int) -> None:
        """Note that what a layer would have saved is freed, or is about to be."""
        stored_bytes = self._account.stored_bytes["disk"]
        if self.freed is not None and self.freed.is_due(size_bytes, stored_bytes):
            return_freed_memory()

    def begin(self, hold: RecomputedHold) -> None:
        """Note that a layer's forward begins again."""
        self._activations.note_backward(hold.forward)
        self._note_freed(hold.call.size_bytes)  # of the layer whose backward has ended
        with self._gate:
            layer = hold.call.layer
            self._account.give(hold.held_bytes, Owner.RECOMPUTED, layer)
            hold.held_bytes = hold.call.size_bytes + hold.call.borrowed_bytes
            self._account.take(hold.held_bytes, Owner.RECOMPUTED, layer)
        recorder = self._account.recorder
        hold.begun = None if recorder is None else recorder.mark()

    def end(self, hold: RecomputedHold) -> None:
        """Note that all that backward needs of the layer has been computed."""
        begun, hold.begun = hold.begun, None
        recorder = self._account.recorder
        if recorder is not None and begun is not None:
            call = hold.call
            recorder.compute(
                "recompute", Subject(call.layer, call.microbatch, call.size_bytes), begun
            )

    def calls(self) -> list[RecomputedLayer]:
        """Return the recomputed layers of the last finished step, in the order of their calls."""
        self._note_step()
        return self._calls_before

    def _note_step(self) -> None:
        if self._step != self._account.num_steps:
            self._step = self._account.num_steps
            self._calls, self._calls_before = [], self._calls
            self._verifying, self._verifying_before = 0, self._verifying


def recomputed_lines(calls: Iterable[RecomputedLayer]) -> Iterator[str]:
    """Yield the lines of a table of recomputed layers."""
    yield f"{'recomputed layer':<24} {'':>3} {'size':>10}  {'':<15} {'saves':>5}"
    for each in calls:
        place = f"{each.layer.index} {each.layer.name}"
        if each.microbatch:
            place = f"{place}.m{each.microbatch}"
        size = format_size(each.size_bytes)
        yield f"{place[:24]:<24} {'':>3} {size:>10}  {'':<15} {each.num_saved:>5}"
