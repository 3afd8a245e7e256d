"""Scopes, which tell the forward and the layer that a saved tensor belongs to."""

from __future__ import annotations

import threading
from typing import final

import torch

from ebbtide.activations.handles import Deaths, SmallTally, SmallTensors
from ebbtide.activations.records import UnitRecords, Unwritten
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
        unwritten: the records of the forward whose copies have not begun; see
            [Note: tensors saved before they are written] in `ebbtide.activations.activations`.
        offloads: whether storages are offloaded by default; see `ebbtide.activations.placement`.
        unit: the records of the layer's unit in a schedule; None without a schedule.
        count: number of storages first saved in this scope, which is the number of the next one.
    """

    __slots__ = ("count", "forward", "layer", "offloads", "small", "unit", "unwritten")

    def __init__(
        self,
        layer: Layer | None,
        forward: ForwardLog,
        small: SmallTensors,
        unwritten: Unwritten,
        *,
        offloads: bool,
        unit: UnitRecords | None = None,
    ) -> None:
        self.layer = layer
        self.forward = forward
        self.small = small
        self.unwritten = unwritten
        self.offloads = offloads
        self.unit = unit
        self.count = 0

    @property
    def must_stay(self) -> bool:
        """Whether a schedule keeps the tensors that are saved in this scope on the device."""
        unit = self.unit
        return unit is not None and unit.followed and not unit.leaves


@final
class _Running(threading.local):
    """What runs on one thread.

    Attributes:
        scopes: the forwards and layers, innermost last.
        forwards: the forwards among them.
    """

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.forwards: list[Scope] = []


@final
class Scopes:
    """The forwards and layers that run now. Each thread has its own.

    Args:
        transfers: the model's transfers, which are notified of the forwards.
        deaths: where the deaths of saved tensors are noted.

    Attributes:
        running: the forwards and layers of the calling thread.
        learned: the order in which the last backward read records; None before the first backward.
        prefetches: whether backward prefetches the records that are expected next. It does not
            while a schedule starts the reloads.
    """

    def __init__(self, transfers: Transfers, deaths: Deaths) -> None:
        self.learned: AccessOrder | None = None
        self.prefetches = True
        self._transfers = transfers
        self._deaths = deaths
        self._account = transfers.account
        self.running = _Running()
        self._threads: list[list[Scope]] = []  # the scopes of each thread that runs a forward
        self._step = 0  # number of the step that `_num_forwards` counts for
        self._num_forwards = 0

    @property
    def num_forwards(self) -> int:
        """Number of forwards that have begun in this step."""
        return self._num_forwards if self._step == self._account.num_steps else 0

    @property
    def current(self) -> Scope | None:
        """The scope of what the calling thread saves now; None if it runs no forward of the model.

        A backward inside a forward, as for a gradient penalty, may save tensors on one of
        autograd's own threads. They belong to a forward that waits for that backward.
        """
        scopes = self.running.scopes
        if scopes:
            return scopes[-1]
        if torch._C._current_graph_task_id() == -1:
            return None
        for other in reversed(self._threads.copy()):
            inner = other[-1:]  # the other thread may end its forward meanwhile
            if inner:
                return inner[0]
        return None

    @property
    def here(self) -> Scope:
        """The scope of what is saved now. It must exist."""
        scope = self.current
        assert scope is not None, "no forward of the model runs"
        return scope

    def is_of(self, log: ForwardLog, scope: Scope) -> bool:
        """Whether a log is of the forward that a scope of the calling thread belongs to.

        Where a schedule is followed, a layer has the log of its microbatch.
        """
        forwards = self.running.forwards
        return log is scope.forward or (bool(forwards) and log is forwards[-1].forward)

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
        scope = Scope(None, log, small, [], offloads=offloads)
        running = self.running
        if not running.scopes:
            self._threads.append(running.scopes)
        running.scopes.append(scope)
        running.forwards.append(scope)  # last: from then on an interrupted forward is ended
        return scope

    def end_forward(self, scope: Scope) -> None:
        """Note that a forward and all layers in it have ended, normally or by an exception."""
        running = self.running
        while running.scopes.pop() is not scope:
            pass
        while running.forwards.pop() is not scope:
            pass
        if not running.scopes:
            self._threads = [each for each in self._threads if each is not running.scopes]
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
        around = self.here
        log = around.forward if forward is None else forward
        if self._account.recorder is not None:
            self._account.recorder.begin_forward(Subject(layer, log.number))
        scope = Scope(layer, log, around.small, around.unwritten, offloads=offloads, unit=unit)
        self.running.scopes.append(scope)
        return scope

    def end_layer(self) -> Scope:
        """Note that the innermost layer's forward has ended. Returns its scope."""
        scope = self.running.scopes.pop()
        if self._account.recorder is not None:
            self._account.recorder.end_forward()
        return scope

    def forget(self, tally: SmallTally) -> None:
        """Note that a forward's small saved tensors were freed. Called with the lock held."""
        if tally.pointers:
            self._transfers.live -= 1
            self._account.give_kept(tally.size_bytes)
