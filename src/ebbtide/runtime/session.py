"""The session: moves storage records down as autograd saves them and up before backward asks."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, final

import torch

from ebbtide.devices.device import AbstractDevice, AbstractEvent
from ebbtide.runtime.account import Account
from ebbtide.runtime.conductor import Conductor
from ebbtide.runtime.forward import ForwardLog, UnpackOrder
from ebbtide.runtime.gate import Gate
from ebbtide.runtime.kept import KeptStorages, SmallKept
from ebbtide.runtime.offloads import Offloads
from ebbtide.runtime.ranges import Layer, profiler_range
from ebbtide.runtime.rebuilt import Call, RebuildRecord, Rebuilds
from ebbtide.runtime.recorder import Subject
from ebbtide.runtime.records import AbstractPacking, RecordState, StorageRecord
from ebbtide.runtime.reloads import Reloads
from ebbtide.runtime.rounds import Rounds
from ebbtide.runtime.stats import StepStats
from ebbtide.runtime.units import Following, UnitRecords
from ebbtide.runtime.weak import call_weakly
from ebbtide.schedule import Verb
from ebbtide.stores.store import AbstractStore
from ebbtide.tracing.trace import Trace

if TYPE_CHECKING:
    from ebbtide.runtime.saved import OffloadedTensor, RebuiltTensor


@final
class Session:
    """Executes the offload of one model on one device with one store.

    Ownership runs one way: saved tensors, which live in autograd's graphs, own their record and
    the session; the session knows records only while saved tensors share them. When a graph dies,
    by backward or by being dropped, its records go at once, without the garbage collector.

    Args:
        device: where the model computes.
        store: where bytes go. Owned by the session.
        max_inflight_bytes: the bound that `ActivationPolicy` describes.
        traced: whether to record every step.
        following: the schedule that says what moves when; None: what is saved while the hooks
            offload leaves at once, and comes back as backward asks.

    Attributes:
        layer: the layer that runs now, None outside layers.
        meter: the counters of the step that runs.
        conductor: where there is a schedule, told which passes begin.

    Streams:
        `offload` and `bring_back` queue work on the calling thread's compute stream and on the
        copy streams; neither blocks the host where the streams are the hardware's.
    """

    def __init__(
        self,
        device: AbstractDevice,
        store: AbstractStore,
        max_inflight_bytes: int,
        *,
        traced: bool = False,
        following: Following | None = None,
    ) -> None:
        self.device = device
        self.layer: Layer | None = None
        self._store = store
        self._account = Account(device, traced=traced)
        self._offloads = Offloads(store, self._account, max_inflight_bytes)
        self._reloads = Reloads(device, store, self._account, max_inflight_bytes)
        self._rebuilds = Rebuilds(device, self._account, max_inflight_bytes)
        self._kept = KeptStorages(self._account)
        self._gate = Gate(self)
        self._rounds: Rounds | None = None
        self.conductor: Conductor | None = None
        if following is not None:
            self._rounds = Rounds(following, self._offloads, self._reloads)
            self.conductor = Conductor(self._rounds, self._gate, self._account)
        self._unit: UnitRecords | None = None  # whose forward runs now
        self._records: dict[Hashable, StorageRecord | RebuildRecord] = {}
        self._dead: deque[tuple[StorageRecord | RebuildRecord | None, int]] = deque()
        self._dead_small: deque[int] = deque()
        self._forwards = 0  # that run now
        self._microbatches = 0  # forwards that this step has begun
        self._log = ForwardLog(None)
        self._learned: UnpackOrder | None = None
        self._closing = False
        self._polled = False
        self.meter = self._account.meter

    @property
    def stats(self) -> StepStats:
        """The last finished step. Reading it waits until the device has finished that step."""
        return self._account.stats

    @property
    def trace(self) -> Trace:
        """What the last finished step did. Reading it waits until the device has finished it."""
        return self._account.trace

    # ---- forward ------------------------------------------------------------------------------

    def begin_forward(self) -> SmallKept:
        """A forward whose saved tensors come here begins. Returns the count of its small ones."""
        with self._gate:
            self._account.begin()
            self._forwards += 1
            self._log = ForwardLog(self._learned, self._microbatches)
            self._log.prefetches = self._rounds is None
            self._microbatches += 1
        return SmallKept(self)

    def end_forward(self, small: SmallKept) -> None:
        """The forward that `begin_forward` gave ``small`` for has ended, in whatever way."""
        with self._gate:
            if small.pointers:
                self._account.live += 1
                self._kept.count(small.size_bytes)
            self._forwards -= 1
            self._finish_step_if_over()

    # ---- layers -------------------------------------------------------------------------------

    def begin_layer(self, layer: Layer) -> None:
        """A layer's forward begins; layers can be nested."""
        recorder = self._account.recorder
        if recorder is not None:
            recorder.begin_forward(Subject(layer, self._log.number))

    def end_layer(self) -> None:
        """The innermost layer's forward has ended."""
        recorder = self._account.recorder
        if recorder is not None:
            recorder.end_forward()

    def note_outputs(
        self, layer: Layer, unit: UnitRecords | None, outputs: Iterable[torch.Tensor]
    ) -> None:
        """A layer's backward begins with the backward of these, its outputs.

        Args:
            layer: which.
            unit: what the schedule knows of it, if there is one.
            outputs: of its forward.
        """
        recorder, conductor = self._account.recorder, self.conductor
        if recorder is None and unit is None:
            return
        about = Subject(layer, self._log.number)
        known = None if recorder is None else weakref.ref(recorder)

        def begin_backward(_: object) -> None:
            if unit is not None and conductor is not None:
                conductor.begin_backward(unit)
            alive = None if known is None else known()
            if alive is not None:
                alive.begin_backward(about)

        for node in {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}:
            node.register_prehook(begin_backward)

    def switch_unit(self, records: UnitRecords | None) -> None:
        """What is saved from now on belongs to this unit; None: to no unit, so it is kept."""
        self._unit = records
        if records is not None:
            assert self._rounds is not None
            self._log = self._rounds.log(records)

    # ---- saved tensors ------------------------------------------------------------------------

    def keep(self, key: int, size_bytes: int) -> ForwardLog:
        """Count a large tensor that stays on the device, once for all that share its storage.

        Args:
            key: the address of its storage, which the saved tensor keeps alive.
            size_bytes: of the storage.

        Returns:
            The log of the forward that runs.
        """
        with self._gate:
            self._offloads.retire_finished()
            self._account.live += 1
            record = self._records.get(key)
            there = isinstance(record, StorageRecord) and record.source is not None
            self._kept.add(key, 0 if there else size_bytes)
            return self._log

    def keeps(self, key: int) -> bool:
        """Whether a large tensor that stays on the device has this storage."""
        return key in self._kept.holders

    def has(self, key: Hashable, version: int) -> bool:
        """Whether a live record holds these bytes at this version."""
        record = self._records.get(key)
        return (
            type(record) is StorageRecord and record.version == version and self._can_share(record)
        )

    def _can_share(self, record: StorageRecord) -> bool:
        """Whether what a unit saves can be in this record: it stays, if the unit is to stay."""
        unit = self._unit
        return unit is None or unit.leaves or not unit.followed or record.source is not None

    def offload(
        self,
        key: Hashable,
        storage: torch.UntypedStorage,
        version: int,
        source: Callable[[], torch.Tensor],
        packing: AbstractPacking | None = None,
    ) -> StorageRecord:
        """The record of some bytes: one that exists at this version, or a new one that leaves now.

        Args:
            key: what identifies the bytes while `storage` lives: its address, or that with a view.
            storage: the storage that was saved.
            version: of the saved tensor.
            source: gives the bytes to copy, (size_bytes,) uint8, when the record is new.
            packing: makes fewer of them first.

        Raises:
            StoreFullError: the store has no room. The saved tensor was not taken.
        """
        with self._gate:
            if not self.has(key, version):
                with profiler_range("offload", self.layer):
                    self._records[key] = self._new_record(key, storage, version, source(), packing)
            record = self._records[key]
            assert isinstance(record, StorageRecord)
            self._add_handle(record)
            return record

    def share(self, record: StorageRecord | RebuildRecord) -> None:
        """Count one more handle of a record."""
        with self._gate:
            self._add_handle(record)

    def _add_handle(self, record: StorageRecord | RebuildRecord) -> None:
        if isinstance(record, StorageRecord):
            record.forward.note_save(record.ordinal)
        if self._unit is not None:
            self._claim(record, self._unit)
        record.handles += 1
        self._account.live += 1

    def _claim(self, record: StorageRecord | RebuildRecord, unit: UnitRecords) -> None:
        """A unit saves what is in a record, or is rebuilt from records, perhaps of other units."""
        if isinstance(record, RebuildRecord):
            for saved in record.call.inputs:
                source = getattr(saved, "record", None)
                if source is not None:
                    self._claim(source, unit)
        elif unit.wants(record):
            if record.state is RecordState.HELD and Verb.OFFLOAD in unit.done:
                self._offloads.begin(record)  # the unit that saved it first is in no hurry
            unit.take(record)

    def _new_record(
        self,
        key: Hashable,
        storage: torch.UntypedStorage,
        version: int,
        flat: torch.Tensor,
        packing: AbstractPacking | None,
    ) -> StorageRecord:
        """A record of some bytes, which leave now or when a schedule says so."""
        unit = self._unit if self._unit is not None and self._unit.followed else None
        waits = unit is not None and not unit.at_once
        packing = None if waits else packing
        source = flat if packing is None else packing.pack(flat)
        home = self.device.compute_stream()
        record = StorageRecord(key, storage, version, source, self._log, home, self.layer)
        if packing is not None:
            record.packing, record.unpacked_bytes = packing, flat.numel()
        if waits:
            self._offloads.hold(record)
            return record
        self._offloads.depart(record, held=unit is not None)
        self.meter.packed_bytes += flat.numel() - source.numel()
        return record

    # ---- backward -----------------------------------------------------------------------------

    def bring_back(self, saved: OffloadedTensor) -> torch.Tensor:
        """The bytes of a record on the device, ready for what the calling thread queues next.

        Shape:
            (size_bytes,), uint8.
        """
        with self._gate:
            record = saved.record
            record.forward.note_unpack(record.ordinal)
            if record.source is not None:
                flat, event = record.source, None
            else:
                if record.buffer is None:
                    self._reloads.make_room(record.size_bytes)
                    self._rebuilds.make_room(record.size_bytes, self._reloads.held_bytes)
                    self._reloads.begin(record)
                assert record.buffer is not None and record.reloaded is not None
                flat, event = record.buffer, record.reloaded
            home = record.home
            self._offloads.retire_finished()
            self._prefetch(record.forward)
            if event is not None:
                saved.generation = self._reloads.note_read(record, saved.generation)
        if event is not None:
            self._wait_for_reload(record, flat, event)
        self.device.note_use(flat, home)
        return flat

    def _wait_for_reload(
        self, record: StorageRecord, flat: torch.Tensor, event: AbstractEvent
    ) -> None:
        try:
            # Kernels queued from now on read these bytes.
            self._account.wait(record, event, self.device.compute_stream(), is_reload=True)
        except BaseException:  # the disk could not be read
            with self._gate:
                self._reloads.abandoned.append((flat, event))  # a copy may run
            raise

    def note_backward(self, log: ForwardLog) -> None:
        """Backward is at work on what a forward kept: what has left comes next."""
        with self._gate:
            log.note_backward()
            self._offloads.retire_finished()
            self._prefetch(log)

    def _prefetch(self, log: ForwardLog) -> None:
        if log.prefetches:
            self._reloads.prefetch(log, self._rebuilds.held_bytes)

    # ---- rebuilding ---------------------------------------------------------------------------

    def rebuilt(self, key: Hashable, version: int) -> RebuildRecord | None:
        """The live record of bytes that are to be rebuilt, if there is one at this version.

        Its handles are one more after this call.
        """
        record = self._records.get(key)
        if not isinstance(record, RebuildRecord) or record.version != version:
            return None
        self.share(record)
        return record

    def leave_out(
        self, key: Hashable, storage: torch.UntypedStorage, version: int, call: Call
    ) -> RebuildRecord:
        """Neither keep nor move some bytes: `call` gives them again."""
        with self._gate:
            record = RebuildRecord(key, storage, version, call, self.layer, self._log.number)
            self._records[key] = record
            self._add_handle(record)
            self.meter.rebuilt_bytes += record.size_bytes
            return record

    def inspect(self, record: StorageRecord) -> torch.Tensor:
        """The bytes of a record on the device, while backward has not begun.

        Shape:
            (size_bytes,), uint8.
        """
        with self._gate:
            if record.source is not None:
                return record.source
            assert record.slot is not None
            flat, event = self._store.reload(record.slot)
        self._wait_for_reload(record, flat, event)
        return flat

    def begin_rebuild(self, record: RebuildRecord) -> torch.Tensor | None:
        """The record's value if it is there, ready for what the calling thread queues next."""
        with self._gate:
            return self._rebuilds.begin(record, self._reloads.held_bytes)

    def end_rebuild(self, saved: RebuiltTensor, value: torch.Tensor) -> None:
        """A handle has read the value; the last one to do so lets go of it."""
        record = saved.record
        with self._gate:
            if record.value is None:
                self._rebuilds.hold(record, value)
                # Its inputs may be wanted again, but not before what has been rebuilt.
                self._reloads.make_room(record.size_bytes)
            saved.generation = self._rebuilds.note_read(
                record, saved.generation, self._reloads.held_bytes
            )

    def _forget_rebuilt(self, record: RebuildRecord, generation: int) -> None:
        self._rebuilds.forget_handle(record, generation)
        if not record.handles and self._records.get(record.key) is record:
            del self._records[record.key]

    # ---- ends ---------------------------------------------------------------------------------

    def forget(self, record: StorageRecord | RebuildRecord | None, mark: int) -> None:
        """A saved tensor has died. See [Note: deferred work].

        Args:
            record: the record that it shared, or None if it was kept on the device.
            mark: the generation that it had read, or the address of the storage it kept.
        """
        self._dead.append((record, mark))
        self._gate.knock()

    def forget_small(self, size_bytes: int) -> None:
        """All the small tensors that a forward had kept have died."""
        self._dead_small.append(size_bytes)
        self._gate.knock()

    def poll(self) -> None:
        """Let go of what finished copies no longer need. Any thread may call this."""
        self._polled = True
        self._gate.knock()

    def weak_poll(self) -> Callable[[], None]:
        """`poll` for those that the session owns: it does not keep the session alive."""
        return call_weakly(self.poll)

    def close(self) -> None:
        """Give the store back, at once or when the last graph that needs it is gone."""
        with self._gate:
            self._closing = True
            self._close_if_idle()

    def has_deferred_work(self) -> bool:
        # No look at events, which costs: this is asked twice for each saved tensor.
        news = self.conductor is not None and self.conductor.news
        return bool(self._dead or self._dead_small or self._polled or news)

    def do_deferred_work(self) -> None:
        self._polled = False
        if self.conductor is not None:
            self.conductor.news = False
        while self._dead:
            record, mark = self._dead.popleft()
            self._account.live -= 1
            if record is None:
                self._kept.forget(mark)
            elif isinstance(record, RebuildRecord):
                self._forget_rebuilt(record, mark)
            else:
                self._forget_handle(record, mark)
        while self._dead_small:
            self._account.live -= 1
            self._kept.discount(self._dead_small.popleft())
        self._let_go_of_finished()
        if not self._account.live:
            self._finish_step_if_over()
            self._close_if_idle()

    def _let_go_of_finished(self) -> None:
        """Let go of what copies under way had needed."""
        self._offloads.retire_finished()
        self._reloads.let_go_of_finished()

    def _forget_handle(self, record: StorageRecord, generation: int) -> None:
        record.handles -= 1
        if record.state is RecordState.RELOADED and generation != record.generation:
            record.unread -= 1
        if record.handles:
            self._reloads.release_if_read(record)
        else:
            self._drop(record)

    def _drop(self, record: StorageRecord) -> None:
        """No graph can ask for these bytes any more."""
        if self._records.get(record.key) is record:
            del self._records[record.key]
        if record.state is RecordState.RELOADED:
            self._reloads.release(record)
        if record.owner is not None:
            record.owner.forget(record)
        # A source whose copy is under way stays until that is complete: the copy reads it.
        self._offloads.let_go(record)
        record.move_to(RecordState.DROPPED)
        self._reloads.expect(record, False)
        if record.slot is not None:
            self._store.drop(record.slot)
            self._account.stored_bytes[record.slot.tier] -= record.size_bytes
        log = record.forward
        log.remove(record)
        if not log.live:
            self._learned = log.learned() or self._learned

    def _finish_step_if_over(self) -> None:
        if self._account.live or self._forwards or not self.meter.num_saved:
            return
        if self._rounds is not None:
            if self._rounds.is_open():
                return  # between the graphs of a round
            self._rounds.finish_step()
        self._account.finish(self._store.host_capacity_bytes)
        self.meter = self._account.meter
        self._microbatches = 0

    def _close_if_idle(self) -> None:
        if self._closing and not self._account.live and not self._forwards:
            self._store.close()
            self._let_go_of_finished()
