"""An independent judge of the order of what the engine queues: torch's sanitizer for CUDA.

`torch.cuda._sanitizer.EventHandler` needs no GPU. It is told of kernels with their reads and
writes, of copies, and of events that are recorded and waited for, and reports two accesses of the
same memory, one of them a write, that nothing orders. `oracle_feed` tells it of everything that is
queued on simulated devices. It looks at the calls of the devices' interface only, and at every
operator that torch runs, so it shares nothing with the checks of `ebbtide.devices.simulated`.

[Note: what the oracle is told]

- *Streams* are the two compute streams, the two copy streams, and one for each thread of the host,
  workers included. What a thread queues comes after all that the thread has done and seen complete;
  a query that says yes is such a sight. Files are read and written by the thread that does it.
- *Device memory* is one thing for each storage. When a storage dies, an allocator writes to it: it
  hands the memory out again, on the stream that the memory belongs to, after the recorded uses.
  Memory that the engine allocates is written on the compute stream at once, because kernels that
  are still queued may use what was there before. Late copies thus show, and so do early frees.
- *Host memory* is known by its address, in blocks of the stores' alignment. Page-locked memory that
  is unlocked is written by the thread that does it.
- *The program's own order* is the program's business. Kernels on one compute stream wait for those
  on the other whose values they use, for exactly these. Tensors that the engine hands out are
  ordered by the engine on the stream on which they were asked for.
- A program that changes a source while it is copied down is not reported: version counters notice.
  Nor is a change of host memory that a copy up still reads, if nobody reads what the copy brings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.cuda import _sanitizer
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide.devices import SimulatedDevice

BLOCK_BYTES = 512
"""The alignment of what stores give out."""
_SWEEP = 512  # storages, above which the dead ones are forgotten

COMPUTE, DOWN, UP = (1, 2), 3, 4
_MAIN, _ALLOCATOR = 5, 6
_FIRST_WORKER = 10
_COPIES = {"copy_", "_to_copy"}
"""Operators that block the host if they copy between the host and the device."""
_REUSE = "the allocator hands the memory out again"

_UNLOCK = "giving host memory back"

Point = int
"""An event of the sanitizer."""


@dataclass
class Fill:
    """A copy up.

    Attributes:
        is_read: a kernel has read what it brought.
        spoilt: reports of changes to its source while it may have been under way. They matter only
            if somebody reads what it brought: prefetched bytes that nobody wants are thrown away.
    """

    is_read: bool = False
    spoilt: list[str] = field(default_factory=list)


class Storage:
    """Device memory.

    Attributes:
        key: its name for the sanitizer.
        home: the compute stream to which it belongs.
        ours: the engine allocated it, or hands it out; else it is the program's.
        at_risk: its death matters: a copy used it, or the engine handed it out.
        used: for each compute stream, the point after its last kernel that used this.
        handed: for each compute stream on which the engine handed it out, the point there.
    """

    def __init__(self, storage: torch.UntypedStorage, key: int, home: int) -> None:
        self.reference = StorageWeakRef(storage)
        self.key = key
        self.home = home
        self.ours = False
        self.at_risk = False
        self.used: dict[int, Point] = {}
        self.handed: dict[int, Point] = {}
        self.fills: list[Fill] = []  # that no kernel has read


class Oracle:
    """What happens on one device, told to the sanitizer.

    Attributes:
        found: what the sanitizer reported, a line each.
    """

    def __init__(self, device: SimulatedDevice, found: list[str]) -> None:
        self.device = device
        self.found = found
        self.thread = _MAIN
        self._handler = _sanitizer.EventHandler()
        self._storages: dict[int, Storage] = {}
        self._at_risk: list[Storage] = []
        self._locked: dict[int, int] = {}  # begin and end of page-locked memory
        self._workers: dict[Any, int] = {}
        self._fills: dict[int, Fill] = {}  # by the sanitizer's number of the copy
        self._points = 0
        self._keys = 1 << 60  # above every address

    # ---- streams and events ---------------------------------------------------------------------

    @property
    def stream(self) -> int:
        """The current compute stream."""
        return COMPUTE[self.device.current]

    def stream_of(self, stream: Any) -> int:
        return COMPUTE[self.device._compute.index(stream)]

    def mark(self, stream: int) -> Point:
        """Record an event on a stream."""
        self._points += 1
        self._catch_up(stream)
        self._handler._handle_event_creation(self._points)
        self._handler._handle_event_record(self._points, stream)
        return self._points

    def wait(self, stream: int, point: Point | None) -> None:
        """Let a stream, or a thread, wait for an event."""
        if point is not None:
            self._handler._handle_event_wait(point, stream)

    def learn(self, point: Point | None) -> None:
        """The current thread has seen that an event is reached."""
        self.wait(self.thread, point)

    def finish(self, *streams: int) -> None:
        """The current thread has waited for streams."""
        for stream in streams:
            self.learn(self.mark(stream))

    def _catch_up(self, stream: int) -> None:
        """What the current thread queues comes after what it has done and seen."""
        if stream < _MAIN:
            self._handler._handle_event_record(0, self.thread)
            self._handler._handle_event_wait(0, stream)

    def worker(self, lane: Any) -> int:
        return self._workers.setdefault(lane, _FIRST_WORKER + len(self._workers))

    # ---- accesses -------------------------------------------------------------------------------

    def launch(self, stream: int, reads: set[int], writes: set[int], name: str) -> None:
        """Queue a kernel or a copy on a stream, or let a thread do something at once."""
        self._catch_up(stream)
        aliases = {key: [] for key in reads | writes}
        report = self._handler._handle_kernel_launch
        for error in report(stream, reads - writes, writes, set(), name, aliases):
            now, before = error.current_access, error.previous_access
            told = f"{_told(now)}, in no order with {_told(before)}"
            was_read = before.type is _sanitizer.AccessType.READ
            if was_read and before.stream == DOWN and stream in COMPUTE:
                continue  # the program changes a source
            fill = self._fills.get(before.seq_num)
            if was_read and fill is not None and not fill.is_read and name != _UNLOCK:
                fill.spoilt.append(told)
            else:
                self.found.append(told)

    def kernel(self, reads: list[Tensor], writes: list[Tensor], name: str) -> None:
        """The calling thread runs an operator of torch."""
        self.look_for_dead()
        used = self._keys_of(reads), self._keys_of(writes)
        blocks = [{key for key in keys if not isinstance(key, Storage)} for keys in used]
        read, written = ({k for k in keys if isinstance(k, Storage)} for keys in used)
        crosses = any(blocks) and bool(read | written) and name in _COPIES
        if any(blocks) and not crosses:
            self.launch(self.thread, *blocks, f"{name} on the host")
            blocks = [set(), set()]
        if not read | written:
            return
        stream = self.stream
        for storage in read:
            self._note_fills_are_read(storage)
        for storage in read | written:
            self._order_as_programs_do(storage, stream, writes=storage in written)
        keys = ({storage.key for storage in storages} for storages in (read, written))
        self.launch(stream, *(mine | host for mine, host in zip(keys, blocks, strict=True)), name)
        point = self.mark(stream)
        for storage in read | written:
            storage.used[stream] = point
        if crosses:
            self.learn(point)

    def copy(self, stream: int, target: Tensor, source: Tensor, after: tuple[Any, ...]) -> Point:
        """A copy is queued on a copy stream. Gives the point at its end."""
        self.look_for_dead()
        self._catch_up(stream)
        for event in after:
            self.wait(stream, point_of(event))
        on_device = self._storage_of(source if stream == DOWN else target)
        self._watch(on_device)
        if not on_device.ours:
            for other, point in on_device.used.items():
                if other != self.stream:  # the program saves only what is there on this one
                    self.wait(stream, point)
            on_device.used[self.stream] = self.mark(self.stream)
        blocks = self._blocks(*_range_of(target if stream == DOWN else source))
        if stream == DOWN:
            self.launch(DOWN, {on_device.key}, blocks, "the copy down")
        else:
            on_device.fills.append(Fill())
            self.launch(UP, blocks, {on_device.key}, "the copy up")
            self._fills[self._handler.seq_num] = on_device.fills[-1]
        return self.mark(stream)

    def host_access(self, address: int, size_bytes: int, name: str, *, writes: bool) -> None:
        """The current thread reads or writes host memory."""
        blocks = self._blocks(address, address + size_bytes)
        reads, written = (set(), blocks) if writes else (blocks, set())
        self.launch(self.thread, reads, written, name)

    def _note_fills_are_read(self, storage: Storage) -> None:
        for fill in storage.fills:
            fill.is_read = True
            self.found += fill.spoilt
        storage.fills.clear()

    def _order_as_programs_do(self, storage: Storage, stream: int, *, writes: bool) -> None:
        # Who changes what others were handed, too, waits for their kernels, with or without an
        # engine: a saved tensor is one for all who read it.
        is_ours = storage.ours and not writes
        points = storage.handed if is_ours else storage.used
        if is_ours and stream in storage.handed:
            return
        for other, point in points.items():
            if other != stream:
                self.wait(stream, point)

    # ---- memory ---------------------------------------------------------------------------------

    def allocated(self, memory: Tensor) -> None:
        """The engine has allocated memory on the current compute stream."""
        storage = self._storage_of(memory)
        storage.ours = True
        self._watch(storage)
        self.launch(storage.home, set(), {storage.key}, "kernels queued before the allocation")

    def handed_out(self, memory: Tensor, *, ours: bool) -> None:
        """The engine hands memory to the program on the current compute stream.

        Args:
            memory: what it hands out.
            ours: these are not the program's own bytes, which never left.
        """
        storage = self._storage_of(memory)
        self._watch(storage)
        point = self.mark(self.stream)
        if ours:
            storage.ours = True
            storage.handed[self.stream] = point
        else:
            storage.used[self.stream] = point

    def locked(self, address: int, size_bytes: int) -> None:
        self._locked[address] = address + size_bytes

    def unlocked(self, address: int) -> None:
        self.look_for_dead()
        size_bytes = self._locked.pop(address) - address
        self.host_access(address, size_bytes, _UNLOCK, writes=True)

    def look_for_dead(self) -> None:
        """Let the allocator have what has died since the last look."""
        dead = [storage for storage in self._at_risk if storage.reference.expired()]
        if dead:
            self._at_risk = [storage for storage in self._at_risk if storage not in dead]
            for storage in dead:
                self._reuse(storage)
        if len(self._storages) > _SWEEP + 2 * len(self._at_risk):
            alive = self._storages.items()
            self._storages = {name: s for name, s in alive if not s.reference.expired()}

    def _reuse(self, storage: Storage) -> None:
        """A stream of its own, for the others do not wait for what the allocator waits for."""
        states = self._handler.syncs.current_sync_states
        states.pop(_ALLOCATOR, None)
        self._handler._handle_stream_creation(_ALLOCATOR)
        self.wait(_ALLOCATOR, self.mark(storage.home))
        self.wait(_ALLOCATOR, self.mark(self.thread))
        # What the program does with memory on other streams, the program has recorded.
        recorded = {*storage.handed, *storage.used} if storage.handed or not storage.ours else ()
        for stream in recorded:
            self.wait(_ALLOCATOR, self.mark(stream))
        self.launch(_ALLOCATOR, set(), {storage.key}, _REUSE)
        self._handler._handle_memory_deallocation(storage.key)

    def _watch(self, storage: Storage) -> None:
        if not storage.at_risk:
            storage.at_risk = True
            self._at_risk.append(storage)

    def _storage_of(self, tensor: Tensor) -> Storage:
        memory = tensor.untyped_storage()
        storage = self._storages.get(memory._cdata)
        if storage is None:
            self._keys += 1
            storage = self._storages[memory._cdata] = Storage(memory, self._keys, self.stream)
        return storage

    def _keys_of(self, tensors: list[Tensor]) -> set[Any]:
        """Blocks of host memory, and storages of the device."""
        keys: set[Any] = set()
        for tensor in tensors:
            if not tensor.numel() or tensor.device.type != "cpu":
                continue
            begin, end = _range_of(tensor)
            if any(first <= begin < last for first, last in self._locked.items()):
                keys |= self._blocks(begin, end)
            else:
                keys.add(self._storage_of(tensor))
        return keys

    def _blocks(self, begin: int, end: int) -> set[int]:
        return set(range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)))


def point_of(event: Any) -> Point | None:
    """The sanitizer's event for one of the device's. A worker's event has one once it is done."""
    return getattr(event, "oracle_point", None)


def _range_of(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _told(access: _sanitizer.Access) -> str:
    names = {1: "compute", 2: "the second compute stream", 3: "d2h", 4: "h2d", 5: "the host"}
    stream = names.get(access.stream, "a worker" if access.stream >= _FIRST_WORKER else "")
    on = f" on {stream}" if stream else ""
    verb = "reads" if access.type is _sanitizer.AccessType.READ else "writes"
    return f"{access.operator} ({verb}{on})"
