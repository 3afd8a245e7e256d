"""Keeps a record of each storage that autograd saves, and brings its bytes back for backward.

First come the scopes, which tell the forward and the layer that a saved tensor belongs to; then
`Activations`, which makes, shares, reads and drops the records; last the windows, by which a plan
bounds the bytes in flight pass by pass.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch

from ebbtide.devices.device import AbstractEvent, AbstractStream, Layer
from ebbtide.devices.process import call_weakly
from ebbtide.runtime.events import Owner, Subject
from ebbtide.runtime.handles import (
    KEEP,
    OFFLOAD,
    REBUILD,
    Call,
    Deaths,
    Decision,
    Form,
    SmallTensors,
    StorageRecord,
    UnitRecords,
    Unwritten,
    bytes_of,
    empty_tensors,
    gather,
)
from ebbtide.runtime.record import DROPPED, REBUILT, AccessOrder, ForwardLog
from ebbtide.runtime.stats import RecomputedLayer, subject
from ebbtide.runtime.torch_internals import (
    call_after_backward,
    current_graph_task,
    outside_modes,
    sequence_number,
)
from ebbtide.runtime.transfers import Transfers
from ebbtide.schedule import Verb


@final
@dataclass(slots=True, eq=False, repr=False)
class Scope:
    """One call of a layer, or the part of a forward outside its layers.

    Attributes:
        layer: the layer; None outside layers.
        forward: the log of the forward that runs.
        small: counts the saved tensors of the forward that are too small for a record.
        unwritten: the records of the forward whose copies have not begun; see
            [Note: tensors saved before they are written] in `ebbtide.runtime.activations`.
        offloads: whether storages are offloaded by default; see `ebbtide.runtime.rebuild`.
        unit: the records of the layer's unit in a schedule; None without a schedule.
        count: number of storages saved in this scope, which is the number of the next one.
        recorder: notes the operations of a recomputed layer while its forward runs.
        completed: of a forward, whether it has run to its end.
        first: of a forward, the number of its first layer.
        called: of a forward, the names of the layers that it has called.
    """

    layer: Layer | None
    forward: ForwardLog
    small: SmallTensors
    unwritten: Unwritten
    offloads: bool
    unit: UnitRecords | None = None
    count: int = 0
    recorder: Any = None
    completed: bool = False
    first: int = 0
    called: list[str] = field(default_factory=list)

    @property
    def place(self) -> int:
        """Index of the layer; outside layers, a negative number for each part between layers."""
        return ~(self.first + len(self.called)) if self.layer is None else self.layer.index

    def number_storage(self, known: StorageRecord | None) -> int:
        """Return the number of a storage among those that this scope saves.

        A storage has a number in each scope that saves it, so that it has the same one whatever
        another scope does with it.

        Args:
            known: a record of the storage; None if it has none yet.
        """
        if known is not None:
            if known.layer is self.layer and self.layer is not None:
                return known.number
            place = self.place
            if known.numbers is None:
                known.numbers = {}
            number = known.numbers.setdefault(place, self.count)
            if number != self.count:
                return number
        self.count += 1
        return self.count - 1

    @property
    def must_stay(self) -> bool:
        """Whether a schedule keeps the tensors that are saved in this scope on the device."""
        unit = self.unit
        return unit is not None and unit.followed and not unit.leaves


@final
class _Running(threading.local):
    """The forwards and layers that run on one thread, innermost last. A forward has no layer."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []

    @property
    def forwards(self) -> list[Scope]:
        """The forwards among them."""
        return [scope for scope in self.scopes if scope.layer is None]


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
        self._plan: object = None
        self._transfers = transfers
        self._deaths = deaths
        self._account = transfers.account
        self.running = _Running()
        self._threads: list[list[Scope]] = []  # the scopes of each thread that runs a forward

    def follow(self, plan: object) -> None:
        """Forget the order of the reads: a backward under another plan reads other records."""
        if plan != self._plan:
            self._plan, self.learned = plan, None

    def learn(self, log: ForwardLog) -> None:
        """Note the order in which the backward of a forward has read its records."""
        if log.plan is self._plan:
            self.learned = log.learned(len(log.records)) or self.learned

    @property
    def current(self) -> Scope | None:
        """The scope of what the calling thread saves now; None if it runs no forward of the model.

        A backward inside a forward, as for a gradient penalty, may save tensors on one of
        autograd's own threads. They belong to a forward that waits for that backward.
        """
        scopes = self.running.scopes
        if scopes:
            return scopes[-1]
        if current_graph_task() == -1:
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

    @property
    def forward(self) -> Scope | None:
        """The innermost forward of the calling thread; None if none runs."""
        for scope in reversed(self.running.scopes):
            if scope.layer is None:
                return scope
        return None

    def is_of(self, log: ForwardLog, scope: Scope) -> bool:
        """Whether a log is of the forward that a scope of the calling thread belongs to.

        Where a schedule is followed, a layer has the log of its microbatch.
        """
        forward = self.forward
        return log is scope.forward or (forward is not None and log is forward.forward)

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
            if self._account.memory is not None:
                self._account.memory.enter_forward()
            meter = self._account.meter
            log = ForwardLog(self.learned, meter.num_forwards, self._plan)
            log.prefetches = self.prefetches
            meter.num_forwards += 1
        small = SmallTensors(self._deaths)
        scope = Scope(None, log, small, [], offloads=offloads)
        running = self.running
        if not running.scopes:
            self._threads.append(running.scopes)
        running.scopes.append(scope)  # last: from then on an interrupted forward is ended
        return scope

    def end_forward(self, scope: Scope) -> None:
        """Note that a forward and all layers in it have ended, normally or by an exception."""
        running = self.running
        while (inner := running.scopes.pop()) is not scope:
            if inner.recorder is not None:  # torch calls no hooks after an interrupt
                inner.recorder.end(interrupted=True)
        if not running.scopes:
            self._threads = [each for each in self._threads if each is not running.scopes]
            if self._account.memory is not None:
                self._account.memory.leave_forward()
        with self._transfers.gate:
            sizes = scope.small.sizes
            if sizes:
                self._transfers.live += 1
                self._account.take_kept(sum(sizes.values()))
            self._transfers.end_run()

    def begin_layer(
        self,
        layer: Layer,
        *,
        offloads: bool,
        unit: UnitRecords | None = None,
    ) -> Scope:
        """Note that a layer's forward begins; layers can be nested.

        Args:
            layer: the layer.
            offloads: whether its storages are offloaded by default.
            unit: the records of its unit in a schedule; None without a schedule.
        """
        around = self.here
        log = around.forward if unit is None else unit.log
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


# ---- The records of what autograd saves of one model, and how their bytes come back for backward


_MOST_ENDED = 100  # backwards remembered without a look at which still matter
_MOST_LISTED = 100_000  # records of a step that `saved` gives
_MOST_FORWARDS = 64  # of a step in which there is no moment without a graph


@final
class Activations:
    """Keeps a record of each saved storage from its first save until no graph holds it any more.

    [Note: tensors saved before they are written] Some operators write into a tensor that they are
    given, and save it before they do: `rrelu` its noise, `batch_norm` its running statistics.
    Nothing tells such a tensor from an input, except that no operation of the graph has made it. So
    the copy of a tensor without `grad_fn` begins later: when autograd saves something for another
    operator, which it tells by the sequence number of the operators' nodes, or when the layer or
    the forward ends. The copies of all other tensors begin at once.

    Args:
        transfers: moves the bytes.

    Attributes:
        transfers: as given.
        scopes: the running forwards and layers, to which saved storages belong.
        empty: empty tensors on the device.
        deaths: tells which saved tensors have died.
        wanted_again: layer and number, as in `Plan`, of storages that a backward with
            ``create_graph=True`` has read. The graph that it makes holds them.

    Streams:
        `offload` and `bring_back` queue work on the calling thread's compute stream and on the
        copy streams; neither blocks the host where the streams are the hardware's.
    """

    # Long: its parts change the same records under one lock.

    def __init__(self, transfers: Transfers) -> None:
        self.transfers = transfers
        self.deaths = Deaths()
        self._died = self.deaths.queue
        self.scopes = Scopes(transfers, self.deaths)
        self._gate = transfers.gate
        self._device = transfers.device
        self.empty = empty_tensors(self._device.torch_device)
        self._account = transfers.account
        self._offloads = transfers.offloads
        self._reloads = transfers.reloads
        # By the address of their storage, and by what they have of it; see `StorageRecord.form`.
        self._records: dict[int, dict[Form, StorageRecord]] = {}
        self._overlaps = False  # whether a backward was to come when the last step was ended
        self._backwards: dict[int, bool] = {}  # autograd's running graph tasks; see `_note_task`
        self._ended: set[int] = set()  # graph tasks that have ended, without making a graph
        self.wanted_again: set[tuple[int | None, int]] = set()
        transfers.tidiers.append(call_weakly(self.note_deaths))

    # ---- forward ------------------------------------------------------------------------------

    def find(self, address: int, version: int) -> StorageRecord | None:
        """Return a live record of a storage at this version, whatever its form, or None."""
        if self._died:
            with self._gate:
                self.note_deaths()
        forms = self._records.get(address)
        record = None if forms is None else next(iter(forms.values()))
        # Guard same-version: a record is shared only at the same version. A tensor saved again
        # after a legal in-place change would get its old bytes in backward.
        return record if record is not None and record.version == version else None

    def find_form(self, first: StorageRecord, form: Form) -> StorageRecord | None:
        """Return a record that has these bytes of a storage, or all, and can be shared here.

        Where a schedule keeps the current layer on the device, a record that has left the device
        cannot be shared.

        Args:
            first: the record that `find` returned. Its decision was to offload the storage.
            form: which bytes of the storage are wanted.
        """
        forms = self._records[first.address]
        found = forms.get(None) or forms.get(form)
        if found is not None and self.scopes.here.must_stay and not found.is_on_device:
            return None
        return found

    def share(self, record: StorageRecord) -> None:
        """Count one more handle on a record."""
        with self._gate:
            self._share(record)

    def _share(self, record: StorageRecord) -> None:
        if record.ordinal >= 0:
            record.forward.note_save(record.ordinal)
        if record.buffer is not None:
            record.unread += 1
        # There is no scope if another model shares it at their border.
        self._count_handle(record, self.scopes.current)

    def add(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        scope: Scope,
        number: int,
        decision: Decision,
        *,
        call: Call | None = None,
        form: Form = None,
    ) -> StorageRecord:
        """Record a storage: keep it, leave it out, or offload it now or when a schedule says so.

        Args:
            tensor: the saved tensor.
            storage: its storage. If it is kept, its saved tensors keep it alive.
            scope: where it is saved.
            number: number of the storage in its layer's call.
            decision: what becomes of it.
            call: computes it again, if the decision is to rebuild it.
            form: which of its bytes are offloaded; see `StorageRecord`.

        Returns:
            The storage's record, with one handle.

        Raises:
            StoreFullError: the store has no room. The saved tensor was not taken.
        """
        with self._gate:
            log, size_bytes = scope.forward, storage.nbytes()
            record = StorageRecord(
                scope.layer,
                log.number,
                size_bytes,
                decision.state,
                storage._cdata,
                tensor._version,
                number,
                decision,
                log,
            )
            if scope.layer is None:
                record.numbers = {scope.place: number}
            if decision is KEEP:
                self._offloads.retire_finished()
                self._account.take_kept(size_bytes, record)
                self._register(record, scope)
                return record
            if call is not None:
                self._leave_out(record, storage, call)
            else:
                record.form = form
                self._offload(record, tensor, storage, scope)
                record.ordinal = log.add(record)
            # Guard saved-identity: the record of a storage that is offloaded or rebuilt pins the
            # identity of the storage. The address of a freed storage comes back at once, for
            # another tensor: it would find the record of the first and get its bytes.
            record.pin_identity(storage)
            self._register(record, scope)
            return record

    def _leave_out(self, record: StorageRecord, storage: torch.UntypedStorage, call: Call) -> None:
        """Neither keep nor move a storage, because `call` computes it again."""
        record.call = call
        inputs = (getattr(saved, "record", None) for saved in call.inputs)
        record.rebuilt_from = tuple(each for each in inputs if isinstance(each, StorageRecord))
        for each in record.rebuilt_from:
            if each.decision is not KEEP:
                self._share(each)  # to rebuild the storage reads them once more
        self._account.meter.rebuilt_bytes += record.size_bytes
        if self._account.passes is not None:
            self._account.passes.before_change(0, record)
        if self._account.memory is not None:
            self._account.memory.note_reference(storage)

    def _offload(
        self,
        record: StorageRecord,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        scope: Scope,
    ) -> None:
        record.source = bytes_of(storage, self.empty(torch.uint8))
        record.home = self._device.compute_stream()
        # Guard written-before-copy: what no operation of the graph has made is copied only when
        # the operator that saves it has returned. See [Note: tensors saved before they are
        # written]: the copy would have the bytes from before the operator wrote them.
        if tensor.grad_fn is None:
            record.unwritten = True
            begin = functools.partial(self._begin_copy, record, tensor, scope.unit)
            scope.unwritten.append((sequence_number(), record, begin))
        elif record.form is not None or scope.unit is not None:
            self._begin_copy(record, tensor, scope.unit)
        else:  # most copies: all that there is to do is this
            self._offloads.offload(record, retain=False)

    def begin_copies(self, unwritten: Unwritten) -> None:
        """Begin the copies that waited for the operator that saved last. It must have returned.

        After an interrupt, none begins: the store may be half changed.

        Raises:
            StoreFullError: the store has no room. What has no copy stays on the device.
        """
        while unwritten and not self.transfers.is_broken:
            # A transform of `torch.func` that runs where a layer ends would refuse the copy.
            with self._gate, outside_modes():
                _, record, begin = unwritten.pop()
                if record.state is not DROPPED:
                    begin()
                    record.unwritten = False
                    if record.unit is not None and Verb.OFFLOAD in record.unit.done:
                        self._offloads.start_pending(record)

    def _begin_copy(
        self, record: StorageRecord, tensor: torch.Tensor, unit: UnitRecords | None
    ) -> None:
        """Begin the copy of a record whose source is the whole storage, or leave it to a schedule.

        Args:
            record: the record.
            tensor: the saved tensor.
            unit: the unit of a schedule that saved the tensor; None without a schedule.
        """
        retains = waits = False
        if unit is not None and unit.followed:
            retains, waits = True, not unit.immediate
        if record.view_size is not None:
            assert record.source is not None
            current = self._device.compute_stream()
            if not self._device.note_use(record.source, record.home, current) and record.unwritten:
                current.wait(record.home.record())  # it runs behind the operator that saved
                record.home = current
            record.source = gather(tensor, record.view_size)
            record.size_bytes = record.source.numel()
        if waits:
            self._offloads.retain(record)
        else:
            self._offloads.offload(record, retain=retains)

    def _register(self, record: StorageRecord, scope: Scope) -> None:
        """Make a new record known, and count its first handle."""
        forms = self._records.get(record.address)
        if forms is not None:
            first = next(iter(forms.values()))
            same = first.version == record.version and first.forward is record.forward
            if not same or not first.decision is record.decision is OFFLOAD:
                forms = None
        if forms is None:
            forms = self._records[record.address] = {}
        forms[record.form] = record
        saved = self._account.meter.saved
        if len(saved) < _MOST_LISTED:
            saved.append(record)
        self._count_handle(record, scope)

    def _count_handle(self, record: StorageRecord, scope: Scope | None) -> None:
        if scope is not None and scope.unit is not None:
            self._claim(record, scope.unit)
        record.saves += 1
        record.handles += 1
        self.transfers.live += 1

    def _claim(self, record: StorageRecord, unit: UnitRecords) -> None:
        """Let a unit of the schedule claim a record, or the records that it is rebuilt from."""
        if record.call is not None:
            for source in record.rebuilt_from:
                self._claim(source, unit)
        elif unit.claim(record) and not record.unwritten:
            self._offloads.start_pending(record)  # the unit that saved it first is in no hurry

    # ---- backward -----------------------------------------------------------------------------

    def bring_back(self, record: StorageRecord) -> torch.Tensor:
        """Return the bytes of a record, ready for the kernels that the calling thread queues next.

        Args:
            record: the decision for its storage was to offload it.

        Shape:
            (size_bytes,), uint8.
        """
        log = record.forward
        if record.unwritten:
            self._begin_copies_of_forward()
        task = log.task = current_graph_task()
        creates_graph = self._backwards.get(task)
        if creates_graph is None:  # it has just begun
            creates_graph = self._note_task(log)
        with self._gate:
            if self._died:
                self.note_deaths()
            log.note_unpack(record.ordinal)
            flat, event = record.source, None
            if flat is None:
                if record.buffer is None:
                    self._reloads.make_room(record.size_bytes)
                    self._reloads.begin(record)
                assert record.buffer is not None
                flat, event = record.buffer, record.ready
            if creates_graph:
                self._note_wanted_again(record)
            home = record.home
            if self._offloads.queue:
                self._offloads.retire_finished()
            if log.prefetches:
                self._reloads.prefetch(log)
            if record.buffer is flat:  # a prefetch may have let go of it
                record.awaited = True
                self._reloads.note_read(record)
        current = self._device.compute_stream()
        if event is not None:
            self._wait_for_reload(record, flat, event, current)
        self._device.note_use(flat, home, current, event)
        return flat

    def _begin_copies_of_forward(self) -> None:
        """Begin the copies of the forward that runs, because a backward inside it reads them."""
        scope = self.scopes.current
        if scope is not None:
            self.begin_copies(scope.unwritten)

    def _note_wanted_again(self, record: StorageRecord) -> None:
        """Note that a backward with ``create_graph=True`` reads a record.

        Its graph holds the buffer, unless the bytes were only copied from it. If the buffer were
        freed here, its memory would not come back, and the next backward would reload the bytes to
        other memory beside it.
        """
        layer = record.layer
        self.wanted_again.add((None if layer is None else layer.index, record.number))
        record.buffer_stays = record.buffer is not None and record.form is None

    def _note_task(self, log: ForwardLog) -> bool:
        """Note that autograd's running graph task reads saved tensors of a forward.

        Returns:
            Whether this backward makes a graph itself (``create_graph=True``).
        """
        task = log.task = current_graph_task()
        creates_graph = self._backwards.get(task)
        if creates_graph is None:
            if task == -1:  # a saved tensor is looked at outside a backward
                return False
            creates_graph = self._backwards[task] = torch.is_grad_enabled()
            self._account.meter.had_backward = True
            if self._account.memory is not None:
                self._account.memory.enter_backward()
            # The last saved tensors to die die in this backward.
            end = functools.partial(self._end_backward, task)
            call_after_backward(end)
        return creates_graph

    def _end_backward(self, task: int) -> None:
        if not self._backwards.pop(task, True):
            if len(self._ended) >= _MOST_ENDED:
                self._ended &= {record.forward.task for record in self.alive()}
            self._ended.add(task)
        self.transfers.settle()

    def end_step_with_graphs(self) -> None:
        """End the step, although graphs are alive, if this is where a training step is over.

        Called before a forward, where `Transfers` finds no moment without graphs. See [Note: steps
        with graphs].
        """
        self.transfers.settle()
        if not self.transfers.live:
            self._ended.clear()
            self._overlaps = False
            return
        if current_graph_task() != -1:
            return
        with self._gate:
            alive = self.alive()
            # The last saves come first: in most loops they tell that a backward is to come.
            unread = any(record.forward.task not in self._ended for record in reversed(alive))
            had_backward = self._account.meter.had_backward
            many = self._account.meter.num_forwards >= _MOST_FORWARDS
            over = (self._overlaps or many) and had_backward
            over |= many if not alive else not unread  # small tensors tell of no backward
            if over and self.transfers.finish_step_if_over(with_graphs=True):
                self._overlaps = unread or not alive

    def _wait_for_reload(
        self,
        record: StorageRecord,
        flat: torch.Tensor,
        event: AbstractEvent,
        current: AbstractStream,
    ) -> None:
        try:
            # Guard compute-waits-for-reload: compute waits for the copy up. Backward kernels would
            # read a buffer that the copy has not filled.
            self._account.wait(record, event, current, is_reload=True)
        except BaseException:  # the disk could not be read
            with self._gate:
                # Guard failed-reload: a buffer is held while copies of a failed reload are under
                # way. Part of the bytes could be read and are on their way into the buffer when
                # backward raises: it would be freed under them.
                self._reloads.abandoned.append((flat, event))
            raise

    def note_backward(self, log: ForwardLog) -> None:
        """Note that backward has begun with kept tensors, and prefetch what it needs next."""
        self._note_task(log)
        with self._gate:
            self.note_deaths()
            log.note_backward()
            self._offloads.retire_finished()
            if log.prefetches:
                self._reloads.prefetch(log)

    def rebuild(self, record: StorageRecord, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a rebuilt value, ready for the kernels that the calling thread queues next.

        It is freed when all handles have read it. Two threads may rebuild it at the same time.
        Either of the two values is right.

        Args:
            record: the decision for its storage was to rebuild it.
            run: returns a tensor with the storage's bytes, written by kernels of the current
                stream.
        """
        self._note_task(record.forward)
        with self._gate:
            self.note_deaths()
            value = record.buffer
            if value is None:
                self._reloads.make_room(record.size_bytes)
            else:
                assert record.ready is not None
                current = self._device.compute_stream()
                # Guard rebuilt-elsewhere: compute waits for a value that was rebuilt on another
                # stream. Kernels of this stream would read memory that those of the other stream,
                # where another reader has rebuilt it, have not written yet.
                current.wait(record.ready)
                self._device.note_use(value, record.home, current, record.ready)
        if value is None:
            value = self._account.run("rebuild", subject(record), run)
        with self._gate:
            if record.buffer is None:
                home = self._device.compute_stream()
                record.take_buffer(value, home.record(), home, REBUILT)
                record.awaited = True  # compute itself writes it
                self._reloads.hold(record)
            self._reloads.note_read(record)
            self._reloads.make_room(0)
        return value

    def peek(self, record: StorageRecord) -> torch.Tensor:
        """Return the bytes of an offloaded record before backward has begun.

        Shape:
            (size_bytes,), uint8.
        """
        if record.unwritten:
            self._begin_copies_of_forward()
        with self._gate:
            if record.source is not None:
                return record.source
            assert record.slot is not None
            flat, event = self.transfers.store.reload(record.slot)
        self._wait_for_reload(record, flat, event, self._device.compute_stream())
        return flat

    # ---- recomputed layers --------------------------------------------------------------------

    def add_recomputed(self, owner: object, call: RecomputedLayer) -> None:
        """Count a call of a recomputed layer whose forward has ended.

        Args:
            owner: what dies when nothing saved inside the call is needed any more.
            call: what was called.
        """
        with self.transfers, self._gate:
            meter = self._account.meter
            meter.recomputed.append(call)
            meter.recomputed_bytes += call.size_bytes
            self.transfers.live += 1
            self.deaths.expect(owner, call)
        self.transfers.store.note_freed(call.size_bytes)

    def recompute(self, call: RecomputedLayer, run: Callable[[], None]) -> None:
        """Run a layer's operations again.

        What they save counts as held until the call dies, although backward frees each storage when
        it has read it.

        Args:
            call: the call of the layer.
            run: runs the operations.
        """
        self.note_backward(call.log)
        self.transfers.store.note_freed(call.size_bytes)  # of the layer whose backward has ended
        with self._gate:
            self._account.take(-call.held_bytes, Owner.RECOMPUTED)
            call.held_bytes = call.size_bytes
            self._account.take(call.held_bytes, Owner.RECOMPUTED)
        self._account.run("recompute", Subject(call.layer, call.microbatch, call.size_bytes), run)

    def recomputed(self) -> list[RecomputedLayer]:
        """Return the recomputed layers of the last finished step, in the order of their calls."""
        last = self._account.last_meter
        return [] if last is None else last.recomputed

    # ---- ends ---------------------------------------------------------------------------------

    def note_deaths(self) -> None:
        """Note which saved tensors have died. Called with the lock held; see [Note: deaths]."""
        died, awaited = self._died, self.deaths.awaited
        while died:
            held = awaited.pop(died.popleft(), None)
            if type(held) is StorageRecord:
                self._forget_handle(held)
            elif type(held) is dict:
                if held:  # the small tensors of a forward
                    self.transfers.live -= 1
                    self._account.take_kept(-sum(held.values()))
            elif type(held) is RecomputedLayer:
                self.transfers.live -= 1
                self._account.take(-held.held_bytes, Owner.RECOMPUTED)

    def _forget_handle(self, record: StorageRecord) -> None:
        self.transfers.live -= 1
        record.handles -= 1
        if record.unread > record.handles:
            record.unread = record.handles
        if not record.handles:
            self._drop(record)
        elif record.is_read():
            self._reloads.release(record)

    def _drop(self, record: StorageRecord) -> None:
        """Forget a record that no saved tensor needs any more."""
        self._unlink(record)
        if record.buffer is not None:
            record.buffer_stays = False
            self._reloads.release(record)
        if record.unit is not None:
            record.unit.forget(record)
        # A source whose copy is under way stays until that is complete: the copy reads it.
        if record.unwritten:
            record.source = None
        elif record.source is not None:
            self._offloads.stop_retaining(record)
        record.move_to(DROPPED)
        record.release_identity()
        slot, record.slot = record.slot, None
        if slot is not None:
            record.tier = slot.tier
            self.transfers.store.drop(slot)
            self._account.stored_bytes[slot.tier] -= record.size_bytes
        if record.decision is KEEP:
            self._account.take_kept(-record.size_bytes, record)
            self.transfers.store.note_freed(record.size_bytes)
        elif record.decision is REBUILD:
            record.call = None
            for each in record.rebuilt_from:
                if each.decision is not KEEP:
                    self._forget_handle(each)
        else:
            log = record.forward
            log.remove(record.ordinal)
            if not log.live:
                self.scopes.learn(log)

    def _unlink(self, record: StorageRecord) -> None:
        """Remove a record from those that `find` returns."""
        forms = self._records.get(record.address)
        if forms is not None and forms.get(record.form) is record:
            del forms[record.form]
            if not forms:
                del self._records[record.address]

    def saved(self) -> list[StorageRecord]:
        """Return the records of the last finished step, in the order of their first save."""
        last = self._account.last_meter
        return [] if last is None else last.saved

    def alive(self) -> list[StorageRecord]:
        """Return the records that graphs hold now."""
        meter = self._account.meter
        records = (*meter.carried, *self.saved(), *meter.saved)
        return [record for record in records if record.state is not DROPPED]


# ---- Bounds the bytes in flight pass by pass, as a plan says ----
#
# See [Note: windows] in `ebbtide.planning.prediction`.


class Window(NamedTuple):
    """What may be in flight in one pass, in bytes.

    Attributes:
        others_bytes: in a forward, what earlier passes have on its way down when the pass begins;
            in a backward, what is brought back before it is needed.
        own_bytes: what the pass itself offloads, or brings back for itself.
    """

    others_bytes: int
    own_bytes: int


class PassWindows(NamedTuple):
    """The windows of a step.

    Attributes:
        forward: of the forward of each layer's call.
        between: of the work in the forward before the first call, and after each call; None where
            there is none.
        loss: of what comes between the model's forward and the backward of its last layer.
        backward: of the backward of each layer's call.
    """

    forward: Sequence[Window]
    between: Sequence[Window | None]
    loss: Window
    backward: Sequence[Window]

    def begin_forward(self, activations: Activations) -> None:
        """Begin the model's forward."""
        self._begin_between(0, activations)

    def begin_forward_of(self, layer: int, activations: Activations) -> None:
        """Begin the forward of a layer's call; a model may make more calls than the plan has.

        Nothing was left for what these have in flight.
        """
        known = layer < len(self.forward)
        _begin_forward(self.forward[layer] if known else Window(0, 0), activations)

    def end_forward_of(self, layer: int, activations: Activations) -> None:
        """Begin what comes after it."""
        self._begin_between(layer + 1, activations)

    def end_forward(self, activations: Activations) -> None:
        """Begin what comes after the model's forward."""
        _begin_forward(self.loss, activations)
        with activations.transfers.gate:
            activations.transfers.reloads.window(0, 0)

    def begin_backward_of(self, layer: int, activations: Activations, log: ForwardLog) -> None:
        """Begin the backward of a layer's call.

        Args:
            layer: number of the call.
            activations: the model's activations.
            log: of the forward that the call belongs to.
        """
        transfers = activations.transfers
        if layer >= len(self.backward) or transfers.windows is not self:
            return  # another plan is followed since the forward
        window = self.backward[layer]
        with transfers.gate:
            transfers.offloads.hold_to(0)
            transfers.reloads.window(window.others_bytes, window.own_bytes)
        activations.note_backward(log)

    def _begin_between(self, place: int, activations: Activations) -> None:
        window = self.between[place] if place < len(self.between) else None
        if window is not None:
            _begin_forward(window, activations)


def _begin_forward(window: Window, activations: Activations) -> None:
    offloads = activations.transfers.offloads
    with activations.transfers.gate:
        offloads.hold_to(window.others_bytes)
        offloads.bound_bytes = window.others_bytes + window.own_bytes
