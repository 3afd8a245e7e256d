"""The session: moves storage records down as autograd saves them and up before backward asks."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, final

import torch

from ebbtide.devices.base import AbstractDevice, AbstractEvent, AbstractStream, raise_again
from ebbtide.runtime.forward import ForwardLog, UnpackOrder
from ebbtide.runtime.gate import Gate
from ebbtide.runtime.kept import SmallKept
from ebbtide.runtime.ranges import Layer, profiler_range
from ebbtide.runtime.rebuilt import Call, RebuildRecord, Rebuilds
from ebbtide.runtime.recorder import StepRecorder, Subject
from ebbtide.runtime.records import AbstractPacking, RecordState, StorageRecord
from ebbtide.runtime.reloads import Reloads
from ebbtide.runtime.stats import StepMeter, StepStats
from ebbtide.stores.base import AbstractStore
from ebbtide.tracing.events import Trace

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
        tier: what the store's tier is called in the statistics, `host` or `disk`.
        max_inflight_bytes: the bound that `ActivationPolicy` describes.
        traced: whether to record every step.

    Attributes:
        layer: the layer that runs now, None outside layers.

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
    ) -> None:
        self.device = device
        self.layer: Layer | None = None
        self._store = store
        self._reloads = Reloads(device, store, max_inflight_bytes)
        self._rebuilds = Rebuilds(device, max_inflight_bytes)
        self._traced = traced
        device.keeps_time = traced
        self._finished: StepMeter | StepStats = StepStats()
        self._recorder: StepRecorder | None = None
        self._trace: StepRecorder | Trace = Trace()
        self._bound_bytes = max_inflight_bytes
        self._gate = Gate(self)
        self._records: dict[Hashable, StorageRecord | RebuildRecord] = {}
        self._offloading: deque[StorageRecord] = deque()
        self._offloading_bytes = 0
        self._dead: deque[tuple[StorageRecord | RebuildRecord | None, int]] = deque()
        self._rebuilding: dict[RebuildRecord, AbstractEvent] = {}  # where compute began to
        self._dead_small: deque[int] = deque()
        self._kept: dict[int, tuple[int, int]] = {}  # storage address -> (holders, bytes counted)
        self._kept_bytes = 0
        self._stored_bytes = {"host": 0, "disk": 0}
        self._live = 0
        self._forwards = 0  # that run now
        self._microbatches = 0  # forwards that this step has begun
        self._log = ForwardLog(None)
        self._learned: UnpackOrder | None = None
        self._closing = False
        self._polled = False
        self._error: BaseException | None = None
        self.meter = StepMeter()

    @property
    def stats(self) -> StepStats:
        """The last finished step. Reading it waits until the device has finished that step."""
        if isinstance(self._finished, StepMeter):
            self._finished = self._finished.freeze()
        return self._finished

    @property
    def trace(self) -> Trace:
        """What the last finished step did. Reading it waits until the device has finished it."""
        if isinstance(self._trace, StepRecorder):
            self._trace = self._trace.trace()
        return self._trace

    # ---- forward ------------------------------------------------------------------------------

    def begin_forward(self) -> SmallKept:
        """A forward whose saved tensors come here begins. Returns the count of its small ones."""
        with self._gate:
            if self._traced and self._recorder is None:
                self._recorder = StepRecorder(self.device)
            self._forwards += 1
            self._log = ForwardLog(self._learned, self._microbatches)
            self._microbatches += 1
        return SmallKept(self)

    def end_forward(self, small: SmallKept) -> None:
        """The forward that `begin_forward` gave ``small`` for has ended, in whatever way."""
        with self._gate:
            if small.pointers:
                self._live += 1
                self._kept_bytes += small.size_bytes
                self.meter.kept_bytes += small.size_bytes
                self._note_peak()
            self._forwards -= 1
            self._finish_step_if_over()

    # ---- layers -------------------------------------------------------------------------------

    def begin_layer(self, layer: Layer) -> None:
        """A layer's forward begins; layers can be nested."""
        if self._recorder is not None:
            self._recorder.begin_forward(Subject(layer, self._log.number))

    def end_layer(self, layer: Layer, outputs: Iterable[torch.Tensor]) -> None:
        """A layer's forward has ended with these outputs: its backward begins with them."""
        if self._recorder is None:
            return
        self._recorder.end_forward()
        subject, recorder = Subject(layer, self._log.number), weakref.ref(self._recorder)

        def begin_backward(_: object) -> None:
            alive = recorder()
            if alive is not None:
                alive.begin_backward(subject)

        for node in {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}:
            node.register_prehook(begin_backward)

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
            self._retire_finished()
            self._live += 1
            holders, _ = self._kept.get(key, (0, 0))
            counted = 0 if type(self._records.get(key)) is StorageRecord else size_bytes
            if not holders:
                self._kept_bytes += counted
                self.meter.kept_bytes += counted
                self._note_peak()
                self._kept[key] = (1, counted)
            else:
                self._kept[key] = (holders + 1, self._kept[key][1])
            return self._log

    def keeps(self, key: int) -> bool:
        """Whether a large tensor that stays on the device has this storage."""
        return key in self._kept

    def has(self, key: Hashable, version: int) -> bool:
        """Whether a live record holds these bytes at this version."""
        record = self._records.get(key)
        return type(record) is StorageRecord and record.version == version

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
                    self._records[key] = self._pack_and_offload(
                        key, storage, version, source(), packing
                    )
            record = self._records[key]
            assert isinstance(record, StorageRecord)
            self._add_handle(record)
            return record

    def share(self, record: StorageRecord | RebuildRecord) -> None:
        """Count one more handle of a record."""
        with self._gate:
            self._add_handle(record)

    def _add_handle(self, record: StorageRecord | RebuildRecord) -> None:
        record.handles += 1
        self._live += 1
        if isinstance(record, StorageRecord):
            record.forward.note_save(record.ordinal)

    def _pack_and_offload(
        self,
        key: Hashable,
        storage: torch.UntypedStorage,
        version: int,
        flat: torch.Tensor,
        packing: AbstractPacking | None,
    ) -> StorageRecord:
        if packing is None:
            return self._begin_offload(key, storage, version, flat)
        packed = packing.pack(flat)
        record = self._begin_offload(key, storage, version, packed)
        record.packing, record.unpacked_bytes = packing, flat.numel()
        self.meter.packed_bytes += flat.numel() - packed.numel()
        return record

    def _begin_offload(
        self, key: Hashable, storage: torch.UntypedStorage, version: int, source: torch.Tensor
    ) -> StorageRecord:
        if self._error is not None:
            error, self._error = self._error, None
            raise_again(error)
        size_bytes = source.numel()
        self._retire_finished()
        self._make_room(size_bytes)
        # The copy may start when the kernels queued so far have run: they write these bytes.
        home = self.device.compute_stream()
        slot = self._store.offload(source, home.record())
        record = StorageRecord(key, storage, version, source, slot, self._log, home, self.layer)
        self._offloading.append(record)
        self._offloading_bytes += size_bytes
        self._stored_bytes[slot.tier] += size_bytes
        if self._recorder is not None:
            self._recorder.copy("offload", _subject(record), slot.offloaded)
        self.meter.note_offload(size_bytes, self._stored_bytes)
        self._note_peak()
        return record

    def _make_room(self, size_bytes: int) -> None:
        """Hold the compute stream back while too many bytes are on their way down."""
        while self._offloading and self._offloading_bytes + size_bytes > self._bound_bytes:
            oldest = self._offloading[0]
            # After this wait, memory freed now is reused only once the copy has read it: that is
            # in the order of the stream to which it belongs.
            self._wait(oldest, oldest.slot.offloaded, oldest.home)
            self._retire_offload()

    def _retire_finished(self) -> None:
        while self._offloading and self._offloading[0].slot.offloaded.query():
            self._retire_offload()

    def _retire_offload(self) -> None:
        """The oldest copy down is complete, or compute is ordered after it: its source can go."""
        record = self._offloading.popleft()
        self._offloading_bytes -= record.size_bytes
        failure = record.slot.offloaded.failure
        if failure is None:
            with profiler_range("release", record.layer):
                record.release_source()
            record.forward.note_offloaded(record.ordinal)
            if self._recorder is not None:
                self._recorder.moment("release", _subject(record))
        elif record.state is not RecordState.DROPPED:
            self._error = failure  # the bytes stay where they are; the next offload says why

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
                    self._begin_reload(record)
                assert record.buffer is not None and record.reloaded is not None
                flat, event = record.buffer, record.reloaded
            home = record.home
            self._retire_finished()
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
            self._wait(record, event, self.device.compute_stream(), is_reload=True)
        except BaseException:  # the disk could not be read
            with self._gate:
                self._reloads.abandoned.append((flat, event))  # a copy may run
            raise

    def note_backward(self, log: ForwardLog) -> None:
        """Backward is at work on what a forward kept: what has left comes next."""
        with self._gate:
            log.note_backward()
            self._retire_finished()
            self._prefetch(log)

    def _begin_reload(self, record: StorageRecord) -> None:
        self._reloads.begin(record)
        self._note_reload(record)

    def _prefetch(self, log: ForwardLog) -> None:
        for record in self._reloads.prefetch(log, self._rebuilds.held_bytes):
            self._note_reload(record)

    def _note_reload(self, record: StorageRecord) -> None:
        assert record.reloaded is not None
        if self._recorder is not None:
            self._recorder.copy("reload", _subject(record), record.reloaded)
        self.meter.reloaded_bytes += record.size_bytes
        self._note_peak()

    def _wait(
        self,
        record: StorageRecord,
        event: AbstractEvent,
        stream: AbstractStream,
        *,
        is_reload: bool = False,
    ) -> None:
        """Order what is queued on ``stream`` from now on after ``event``."""
        before = self.device.moment()
        self.meter.waits.append((before, event, is_reload))
        with profiler_range("wait", record.layer):
            # A reload from disk is queued by a worker, once it has read the bytes.
            stream.wait(event.settled())
        if self._recorder is not None:
            self._recorder.compute("wait", _subject(record), before.event)

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
            flat, event = self._store.reload(record.slot)
        self._wait_for_reload(record, flat, event)
        return flat

    def begin_rebuild(self, record: RebuildRecord) -> torch.Tensor | None:
        """The record's value if it is there, ready for what the calling thread queues next."""
        with self._gate:
            if record.value is None:
                self._rebuilds.make_room(record.size_bytes, self._reloads.held_bytes)
            if record.value is None and self._recorder is not None:
                self._rebuilding[record] = self._recorder.mark()
            return self._rebuilds.value(record)

    def end_rebuild(self, saved: RebuiltTensor, value: torch.Tensor) -> None:
        """A handle has read the value; the last one to do so lets go of it."""
        record = saved.record
        with self._gate:
            if record.value is None:
                self._rebuilds.hold(record, value)
                self._note_peak()
                # Its inputs may be wanted again, but not before what has been rebuilt.
                self._reloads.make_room(record.size_bytes)
                begun = self._rebuilding.pop(record, None)
                if self._recorder is not None and begun is not None:
                    subject = Subject(record.layer, record.number, record.size_bytes)
                    self._recorder.compute("rebuild", subject, begun)
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
        method = weakref.WeakMethod(self.poll)

        def poll() -> None:
            alive = method()
            if alive is not None:
                alive()

        return poll

    def close(self) -> None:
        """Give the store back, at once or when the last graph that needs it is gone."""
        with self._gate:
            self._closing = True
            self._close_if_idle()

    def has_deferred_work(self) -> bool:
        # No look at events, which costs: this is asked twice for each saved tensor.
        return bool(self._dead or self._dead_small or self._polled)

    def do_deferred_work(self) -> None:
        self._polled = False
        while self._dead:
            record, mark = self._dead.popleft()
            self._live -= 1
            if record is None:
                self._forget_kept(mark)
            elif isinstance(record, RebuildRecord):
                self._forget_rebuilt(record, mark)
            else:
                self._forget_handle(record, mark)
        while self._dead_small:
            self._live -= 1
            self._kept_bytes -= self._dead_small.popleft()
        self._let_go_of_finished()
        if not self._live:
            self._finish_step_if_over()
            self._close_if_idle()

    def _let_go_of_finished(self) -> None:
        """Let go of what copies under way had needed."""
        self._retire_finished()
        self._reloads.let_go_of_finished()

    def _forget_kept(self, key: int) -> None:
        holders, size_bytes = self._kept.pop(key)
        if holders > 1:
            self._kept[key] = (holders - 1, size_bytes)
        else:
            self._kept_bytes -= size_bytes

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
        # A source whose copy is under way stays until `_retire_offload`: the copy reads it.
        record.move_to(RecordState.DROPPED)
        self._reloads.expect(record, False)
        self._store.drop(record.slot)
        self._stored_bytes[record.slot.tier] -= record.size_bytes
        log = record.forward
        log.remove(record)
        if not log.live:
            self._learned = log.learned() or self._learned

    def _note_peak(self) -> None:
        now_bytes = self._kept_bytes + self._offloading_bytes
        now_bytes += self._reloads.held_bytes + self._rebuilds.held_bytes
        self.meter.peak_device_bytes = max(self.meter.peak_device_bytes, now_bytes)

    def _finish_step_if_over(self) -> None:
        if not self._live and not self._forwards and self.meter.num_saved:
            self.meter.capacity_bytes = self._store.host_capacity_bytes
            self._finished, self.meter = self.meter, StepMeter()
            self._microbatches = 0
            if self._recorder is not None:
                self._recorder.begin_backward(None)
                self._trace, self._recorder = self._recorder, None

    def _close_if_idle(self) -> None:
        if self._closing and not self._live and not self._forwards:
            self._store.close()
            self._let_go_of_finished()


def _subject(record: StorageRecord) -> Subject:
    return Subject(record.layer, record.forward.number, record.size_bytes)
