"""Scopes, which tell the forward and the layer that a saved tensor belongs to."""

from __future__ import annotations

from typing import final

from ebbtide.activations.handles import Deaths, SmallTally, SmallTensors
from ebbtide.activations.records import UnitRecords
from ebbtide.ownership.memory_log import LOSS
from ebbtide.transfers.layer import Layer
from ebbtide.transfers.order import AccessOrder
from ebbtide.transfers.prefetch import ForwardLog
from ebbtide.transfers.recorder import Subject
from ebbtide.transfers.transfers import Transfers


@final
class Scope:
    """One call of a layer, or the part of a forward outside its layers.

    Attributes:
        layer: the layer; None outside layers.
        forward: the log of the forward that runs.
        small: counts the saved tensors of the forward that are too small for a record.
        offloads: whether storages are offloaded by default; see `ebbtide.activations.placement`.
        unit: the records of the layer's unit in a schedule; None without a schedule.
        count: number of storages first saved in this scope, which is the number of the next one.
    """

    __slots__ = ("count", "forward", "layer", "offloads", "small", "unit")

    def __init__(
        self,
        layer: Layer | None,
        forward: ForwardLog,
        small: SmallTensors,
        *,
        offloads: bool,
        unit: UnitRecords | None = None,
    ) -> None:
        self.layer = layer
        self.forward = forward
        self.small = small
        self.offloads = offloads
        self.unit = unit
        self.count = 0

    @property
    def must_stay(self) -> bool:
        """Whether a schedule keeps the tensors that are saved in this scope on the device."""
        unit = self.unit
        return unit is not None and unit.followed and not unit.leaves


@final
class Scopes:
    """The stack of forwards and layers that run now, innermost last.

    Args:
        transfers: the model's transfers, which are notified of the forwards.
        deaths: where the deaths of saved tensors are noted.

    Attributes:
        current: scope of the tensors that are saved now. It exists only during a forward.
        learned: the order in which the last backward read records; None before the first backward.
        prefetches: whether backward prefetches the records that are expected next. It does not
            while a schedule starts the reloads.
    """

    current: Scope

    def __init__(self, transfers: Transfers, deaths: Deaths) -> None:
        self.learned: AccessOrder | None = None
        self.prefetches = True
        self._transfers = transfers
        self._deaths = deaths
        self._account = transfers.account
        self._stack: list[Scope] = []
        self._step = 0  # number of the step that `_num_forwards` counts for
        self._num_forwards = 0  # forwards begun in this step

    def begin_forward(self, *, offloads: bool) -> Scope:
        """Note that a forward begins.

        Args:
            offloads: whether storages saved outside its layers are offloaded by default.

        Returns:
            The forward's scope, for `end_forward`.
        """
        transfers = self._transfers
        transfers.settle()
        with transfers.gate:
            transfers.begin_run()
            if self._step != self._account.num_steps:
                self._step, self._num_forwards = self._account.num_steps, 0
            if self._account.memory is not None:
                self._account.memory.enter_forward()
            log = ForwardLog(self.learned, self._num_forwards)
            log.prefetches = self.prefetches
            self._num_forwards += 1
        small = SmallTensors(self._deaths)
        return self._push(Scope(None, log, small, offloads=offloads))

    def end_forward(self, scope: Scope) -> None:
        """Note that a forward and all layers in it have ended, normally or by an exception."""
        while self._stack.pop() is not scope:
            pass
        if self._stack:
            self.current = self._stack[-1]
        else:
            del self.current  # the scope would keep `small` alive
            if self._account.memory is not None:
                self._account.memory.enter(LOSS)
        with self._transfers.gate:
            tally = scope.small.tally
            if tally.pointers:
                self._transfers.live += 1
                self._account.take_kept(tally.size_bytes)
            self._transfers.end_run()

    def begin_layer(
        self,
        layer: Layer,
        *,
        offloads: bool,
        unit: UnitRecords | None = None,
        forward: ForwardLog | None = None,
    ) -> Scope:
        """Note that a layer's forward begins; layers can be nested.

        Args:
            layer: the layer.
            offloads: whether its storages are offloaded by default.
            unit: the records of its unit in a schedule; None without a schedule.
            forward: the log of the layer's microbatch in a schedule; None means the log of the
                forward that runs.
        """
        around = self._stack[-1]
        log = around.forward if forward is None else forward
        if self._account.recorder is not None:
            self._account.recorder.begin_forward(Subject(layer, log.number))
        return self._push(Scope(layer, log, around.small, offloads=offloads, unit=unit))

    def end_layer(self) -> None:
        """Note that the innermost layer's forward has ended."""
        self._stack.pop()
        self.current = self._stack[-1]
        if self._account.recorder is not None:
            self._account.recorder.end_forward()

    def _push(self, scope: Scope) -> Scope:
        self._stack.append(scope)
        self.current = scope
        return scope

    def forget(self, tally: SmallTally) -> None:
        """Note that a forward's small saved tensors were freed. Called with the lock held."""
        if tally.pointers:
            self._transfers.live -= 1
            self._account.give_kept(tally.size_bytes)
