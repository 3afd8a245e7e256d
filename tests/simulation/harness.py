"""Runs a program on the simulated device and checks what must hold during and after it."""

import contextlib
import dataclasses
import errno
import gc
import itertools
import os
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide.devices import AbstractDevice, AbstractEvent, Layer, SimulatedDevice
from ebbtide.policy import ActivationPolicy
from ebbtide.runtime import rebuild, saved_tensors
from ebbtide.runtime.activations import Activations
from ebbtide.runtime.handles import OFFLOAD, Saved, StorageRecord, restore
from ebbtide.runtime.parameter_index import ParameterIndex
from ebbtide.runtime.rebuild import Placement
from ebbtide.runtime.recompute import Proofs, Recorder
from ebbtide.runtime.record import Record, State
from ebbtide.runtime.saved_tensors import SavedTensorHooks
from ebbtide.runtime.transfers import Transfers
from ebbtide.stores import AbstractStore, PinnedStore, Slot, StagedDiskStore, TieredStore
from programs import WIDTH, Outcome, Program, Run, Source

KIB = 1024
SAVED_BY_ONE_KERNEL = 3
"""Most reloaded tensors that backward holds after the session has let go: `hypot` saves three."""


CONTENTS = {
    State.KEPT: set[str](),
    State.PENDING: {"source"},
    State.RETAINED: {"source", "slot"},
    State.OFFLOADING: {"source", "slot"},
    State.STUCK: {"source", "slot"},
    State.STORED: {"slot"},
    State.RELOADED: {"slot", "buffer"},
    State.REBUILDABLE: set[str](),
    State.REBUILT: {"buffer"},
    State.DROPPED: set[str](),
}
"""The parts that a record has in each state, by the table in `ebbtide.runtime.record`."""


def check_record(record: Record) -> None:
    """Hold a record to the table of states."""
    state = record.state
    parts = {part for part in ("source", "slot", "buffer") if getattr(record, part) is not None}
    if state is State.DROPPED:
        parts.discard("source")  # it may be there until its copy has ended
    assert parts == CONTENTS[state], f"a {state.name} record has {parts}"
    assert (record.ready is not None) == (record.buffer is not None), "a buffer without its event"
    assert not record.buffer_stays or state is State.RELOADED, "must stay, but was not reloaded"
    if not isinstance(record, StorageRecord):
        return
    rebuilds = state in (State.REBUILDABLE, State.REBUILT)
    assert rebuilds == (record.call is not None), f"{state.name} with call {record.call}"
    assert state is State.DROPPED or record.handles > 0, "a record without a handle"
    assert 0 <= record.unread <= record.handles, "more readers than handles"
    assert (record.decision is OFFLOAD) == (record.ordinal >= 0), "only what moves has an ordinal"


def poll_weakly(transfers: Transfers) -> Callable[[], None]:
    """What a store calls when a write has ended. A store must not keep its engine alive."""
    known = weakref.ref(transfers)

    def poll() -> None:
        alive = known()
        if alive is not None:
            alive.poll()

    return poll


@dataclass(frozen=True)
class Knobs:
    """What of a simulation is not the program.

    Args:
        device_seed: decides the order of copies.
        bound_bytes: on bytes in flight.
        eagerness: how often a copy runs earlier than it must.
        backward_stream: backward computes on another stream than forward.
        closes_early: the store is closed while copies are under way.
        store: `host`, `disk` or `tiered`.
        refusals: how often the system refuses to page-lock memory.
        slow_copies: how often a copy takes ten times as long.
        short_calls: how often a read or a write moves less than it was asked for.
        failures: how often the disk is full, or a write to it fails.
        rebuild: what a recipe gives again is neither kept nor moved.
        mixed_streams: operations of backward compute on one stream or another, as they come.
        recompute: how often an operation is a recomputed layer.
        scales: whether the bound scales with what a step moves.
    """

    device_seed: int
    bound_bytes: int
    eagerness: float
    backward_stream: bool
    closes_early: bool
    store: str = "host"
    refusals: float = 0.0
    slow_copies: float = 0.0
    short_calls: float = 0.0
    failures: float = 0.0
    rebuild: bool = False
    mixed_streams: bool = False
    recompute: float = 0.0
    scales: bool = False

    @classmethod
    def of(cls, seed: int) -> "Knobs":
        return cls(
            device_seed=seed,
            bound_bytes=(0, 4 * KIB, 16 * KIB, 256 * KIB)[seed % 4],
            eagerness=(0.0, 0.1, 0.6)[seed % 3],
            backward_stream=seed % 5 == 0,
            closes_early=bool(seed % 2),
            store=("host", "host", "host", "disk", "disk", "tiered", "tiered")[seed % 7],
            refusals=(0.0, 0.0, 0.3, 1.0)[seed % 11 % 4],
            slow_copies=(0.0, 0.3)[seed % 13 % 2],
            short_calls=(0.0, 0.5)[seed % 17 % 2],
            failures=(0.0, 0.0, 0.1, 0.9)[seed % 19 % 4],
            rebuild=bool(seed % 23 % 2),
            mixed_streams=seed % 29 % 3 == 0,
            scales=bool(seed % 31 % 2),
        )


class FaultyOs:
    """The module `os` on a bad day, as far as stores on disk use it.

    Args:
        knobs: what goes wrong how often; the device's seed says when.

    Attributes:
        failing_reads: how often a read fails. Backward then raises after it has added to some
            gradients, so random programs could not be compared with plain autograd.
    """

    def __init__(self, knobs: Knobs) -> None:
        self.failing_reads = 0.0
        self._knobs = knobs
        self._choices = random.Random(knobs.device_seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        self._fail(errno.EIO)
        return os.pwrite(fd, self._shortened(view), offset)

    def preadv(self, fd: int, views: list[memoryview], offset: int) -> int:
        if self._choices.random() < self.failing_reads:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(fd, [self._shortened(view) for view in views], offset)

    def posix_fallocate(self, fd: int, offset: int, size_bytes: int) -> None:
        self._fail(errno.ENOSPC)
        os.posix_fallocate(fd, offset, size_bytes)

    def _shortened(self, view: memoryview) -> memoryview:
        if self._choices.random() < self._knobs.short_calls:
            return view[: self._choices.randint(1, len(view))]
        return view

    def _fail(self, code: int) -> None:
        if self._choices.random() < self._knobs.failures:
            raise OSError(code, os.strerror(code))


class Simulation:
    """Activations on a simulated device, whose bounds and eagerness follow from the seed."""

    def __init__(self, seed: int, knobs: Knobs | None = None) -> None:
        self.knobs = knobs or Knobs.of(seed)
        bound_bytes = self.knobs.bound_bytes
        self.device: Any = self.make_device()
        self.store = make_store(self.device, self.knobs.store)
        transfers = Transfers(self.device, self.store, bound_bytes, scales=self.knobs.scales)
        self.take(Activations(transfers))
        policy = ActivationPolicy(min_bytes=512, rebuild=self.knobs.rebuild)
        self.hooks = SavedTensorHooks(self.activations, Placement(policy), ParameterIndex([]))
        self._proofs = Proofs()
        self.recomputed = 0
        self._choices = random.Random(seed)

    def make_device(self) -> AbstractDevice:
        """Make the device. A bench on another one makes another."""
        device = SimulatedDevice(self.knobs.device_seed, eagerness=self.knobs.eagerness)
        device.pins_host_memory = True
        device.refusals = self.knobs.refusals
        device.slow_copies = self.knobs.slow_copies
        return device

    def take(self, activations: Activations) -> None:
        """Look at these from now on."""
        self.activations = activations
        self.transfers = activations.transfers

    def forward(self, function: Callable[[], Any]) -> Any:
        """Run a forward with hooks; what comes after it may run on another compute stream."""
        began = self.hooks.begin()
        self.device.current = 0
        try:
            return function()
        finally:
            if began:
                self.hooks.end()
            self.device.current = int(self.knobs.backward_stream)

    def switch(self, offloading: bool) -> None:
        """Whether what is saved from now on leaves. Called within a forward."""
        self.activations.scopes.current.offloads = offloading

    def apply(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Apply a function to tensors, and chance says whether as a recomputed layer."""
        if self._choices.random() < self.knobs.recompute:
            layer = Layer(self.recomputed, "recomputed")
            if self.hooks.are_on_top():
                self.recomputed += 1
                if self._choices.random() < 0.3:
                    self._proofs.of(layer).clear()  # its operations are proven anew
                recorder = Recorder(layer, self.hooks, self._proofs)
                recorder.begin()
                try:
                    return function(*tensors)
                finally:
                    recorder.end()
        return function(*tensors)

    @contextlib.contextmanager
    def on_mixed_streams(self) -> Iterator[None]:
        """Within, each saved tensor is asked for on a stream that chance picks, if that is so."""
        if not self.knobs.mixed_streams:
            yield
            return

        def restore_anywhere(saved: Saved) -> Tensor:
            if not torch.is_grad_enabled():  # else the operation saves on the same stream
                self.device.current = int(self.device.flip())
            return restore(saved)

        with (
            mock.patch.object(saved_tensors, "restore", restore_anywhere),
            mock.patch.object(rebuild, "restore", restore_anywhere),
        ):
            yield

    def check_states(self) -> None:
        """Hold every record to the table of states."""
        for record in self.activations.alive():
            check_record(record)

    def check_account(self) -> None:
        """No graph is alive and nothing is held for one; copies may be under way."""
        transfers, activations = self.transfers, self.activations
        transfers.settle()
        assert transfers.live == 0, f"{transfers.live} handles are alive"
        assert transfers.running == 0
        assert not activations.alive()
        assert not transfers.reloads.buffered
        assert transfers.reloads.buffered_bytes == 0
        assert transfers.account.kept_bytes == 0
        assert not any(transfers.account.stored_bytes.values())
        under_way_bytes = sum(record.size_bytes for record in transfers.offloads.queue)
        assert transfers.offloads.queued_bytes == under_way_bytes
        assert transfers.account.device_bytes == under_way_bytes
        assert transfers.offloads.retained_bytes == 0
        assert transfers.account.meter.num_saved == 0, "the step has not ended"

    def check_at_rest(self) -> None:
        """Nothing is under way, held or stored any more."""
        if self.knobs.closes_early:
            self.transfers.close()  # with copies still under way
            assert not self.transfers.offloads.queue, "memory is held after close"
            assert not self.device.has_jobs(), "workers have something to do after close"
        self.device.finish_jobs()
        self.device.finish_copies()
        self.transfers.poll()
        self.check_account()
        assert not self.transfers.offloads.queue
        assert not self.transfers.reloads.abandoned
        assert self.store.used_bytes == 0
        assert self.device.allocated_bytes() == 0
        self.transfers.close()
        assert self.store.host_capacity_bytes == 0
        assert self.device.pinned_bytes == 0


def make_store(device: AbstractDevice, kind: str) -> AbstractStore:
    """A store so small that its chunks and slabs are used again and again."""
    if kind == "host":
        return PinnedStore(device, slab_bytes=32 * KIB)
    disk = StagedDiskStore(device, staging_bytes=16 * KIB, growth_bytes=64 * KIB)
    if kind == "disk":
        return disk
    return TieredStore(PinnedStore(device, budget_bytes=24 * KIB, slab_bytes=8 * KIB), disk)


@dataclass
class Watch:
    """Follows a simulation while it runs: its slots, its device memory, its bytes in flight.

    What is wrong is noted and raised after the step, for nothing can raise out of a `__del__`.

    Attributes:
        slots: how often each slot that the store gave out, and that is not dropped, was reloaded.
        offloads: slots given out.
        reloads: of all of them together.
        read: slots that were reloaded, then dropped.
        unread: slots that were dropped without it.
        rebuilds: storages that are rebuilt.
        largest_bytes: the largest slot so far.
        most_excess: reloaded bytes beyond the bound, at most, in units of the largest slot.
        wrong: what must not have happened.
    """

    simulation: Simulation
    slots: dict[Slot, int] = field(default_factory=dict)
    offloads: int = 0
    reloads: int = 0
    read: int = 0
    unread: int = 0
    rebuilds: int = 0
    largest_bytes: int = 0
    most_excess: float = 0.0
    wrong: list[str] = field(default_factory=list)
    _saved_again: list[tuple[StorageWeakRef, int]] = field(default_factory=list)
    _read_slots: set[Slot] = field(default_factory=set)
    _errors: int = 0

    def __post_init__(self) -> None:
        self._watch_offloads()
        self._watch_reloads()
        self._watch_memory()
        self._watch_rebuilds()

    def after_step(self, outcome: Outcome) -> None:
        """All graphs of the step are gone: check what holds although copies are under way."""
        if len(outcome.errors) > self._errors:
            self._errors = len(outcome.errors)
            drain_autograd()
        assert not self.wrong, self.wrong[0]
        self.simulation.check_account()
        assert not self.slots, f"{len(self.slots)} slots were never dropped"
        assert self.offloads == self.read + self.unread
        assert self.reloads >= self.read
        assert self._held_bytes() == 0, "device memory is alive that the session does not count"
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None

    def _require(self, condition: bool, otherwise: str) -> None:
        if not condition:
            self.wrong.append(otherwise)

    def _watch_offloads(self) -> None:
        offloads, store = self.simulation.transfers.offloads, self.simulation.store
        offload, drop = store.offload, store.drop

        def watched_offload(source: Tensor, ready: AbstractEvent) -> Slot:
            alone = offloads.queued_bytes == 0
            fits = offloads.queued_bytes + source.numel() <= offloads.bound_bytes
            self._require(alone or fits, "more bytes than the bound are on their way down")
            slot = offload(source, ready)
            self.slots[slot] = 0
            self.offloads += 1
            self.largest_bytes = max(self.largest_bytes, slot.size_bytes)
            return slot

        def watched_drop(slot: Slot) -> None:
            self._require(slot in self.slots, "a slot was dropped twice")
            if self.slots.pop(slot, 0):
                self.read += 1
            else:
                self.unread += 1
            self._read_slots.discard(slot)
            drop(slot)

        store.offload, store.drop = watched_offload, watched_drop

    def _watch_rebuilds(self) -> None:
        activations = self.simulation.activations
        add = activations.add

        def watched_add(*args: Any, call: Any = None, **how: Any) -> Any:
            self.rebuilds += call is not None
            return add(*args, call=call, **how)

        activations.add = watched_add

    def _watch_reloads(self) -> None:
        reloads, store = self.simulation.transfers.reloads, self.simulation.store
        reload, prefetch = store.reload, reloads.prefetch
        prefetching = False

        def watched_reload(slot: Slot, *target: Any) -> tuple[Tensor, AbstractEvent]:
            self._require(slot in self.slots, "a slot was reloaded after it was dropped")
            self._require_room(slot, prefetching)
            self.slots[slot] = self.slots.get(slot, 0) + 1
            self.reloads += 1
            self._read_slots.discard(slot)
            return reload(slot, *target)

        def watched_prefetch(*args: Any) -> Any:
            nonlocal prefetching
            prefetching = True
            try:
                return prefetch(*args)
            finally:
                prefetching = False

        store.reload, reloads.prefetch = watched_reload, watched_prefetch

    def _require_room(self, slot: Slot, prefetching: bool) -> None:
        """A prefetch fits in the bound or is alone; a reload on demand comes on top of that."""
        reloads = self.simulation.transfers.reloads
        bound_bytes = self.simulation.transfers.offloads.bound_bytes
        most_bytes = max(bound_bytes, self.largest_bytes)
        # Values that were rebuilt are under the same bound.
        reloaded = [record for record in reloads.buffered if record.slot is not None]
        reloaded_bytes = sum(record.size_bytes for record in reloaded)
        if prefetching:
            fits = reloads.buffered_bytes + slot.size_bytes <= bound_bytes
            self._require(fits or not reloads.buffered, "a prefetch exceeds the bound")
        unread = [record for record in reloaded if record.slot not in self._read_slots]
        unread_bytes = sum(record.size_bytes for record in unread)
        self._require(unread_bytes <= most_bytes, "reloads that nobody has read exceed the bound")
        excess_bytes = reloaded_bytes + slot.size_bytes - most_bytes
        self.most_excess = max(self.most_excess, excess_bytes / self.largest_bytes)

    def _watch_memory(self) -> None:
        device, activations = self.simulation.device, self.simulation.activations
        allocate, bring_back = device.allocate, activations.bring_back

        def watched_allocate(size_bytes: int) -> Tensor:
            self._saved_again = [known for known in self._saved_again if not known[0].expired()]
            held_bytes = self._held_bytes() - sum(size for _, size in self._saved_again)
            most_bytes = SAVED_BY_ONE_KERNEL * self.largest_bytes
            self._require(held_bytes <= most_bytes, "device memory outlives its last reader")
            return allocate(size_bytes)

        def watched_bring_back(record: StorageRecord) -> Tensor:
            there = record.source is not None
            flat = bring_back(record)
            self.simulation.check_states()
            if record.slot is not None:
                self._read_slots.add(record.slot)
            # The backward of a backward keeps what the first one read.
            if torch.is_grad_enabled() and not there:
                reference = StorageWeakRef(flat.untyped_storage())
                self._saved_again.append((reference, flat.numel()))
            return flat

        device.allocate, activations.bring_back = watched_allocate, watched_bring_back

    def _held_bytes(self) -> int:
        """Device bytes given out and alive beyond what the engine accounts for."""
        transfers = self.simulation.transfers
        own = [record.buffer for record in transfers.reloads.buffered]
        own += [buffer for buffer, _ in transfers.reloads.abandoned]
        # In the backward of a backward, what was reloaded is saved again and leaves again.
        own += [record.source for record in transfers.offloads.queue]
        addresses = {memory.untyped_storage()._cdata for memory in own if memory is not None}
        return sum(
            size_bytes
            for storage, size_bytes, _ in self.simulation.device._allocations
            if not storage.expired() and storage.cdata not in addresses
        )


def simulate(source: Source, knobs: Knobs | None = None) -> tuple[Outcome, Outcome, Watch]:
    """The outcome of a program plainly, and offloaded on the simulated device.

    Args:
        source: of the program: a seed, or a tape.
        knobs: of the simulation; those of the seed if there is one.
    """
    simulation = Simulation(source if isinstance(source, int) else 0, knobs)
    watch = Watch(simulation)
    starts_over = simulation.knobs.rebuild
    changes = not simulation.knobs.recompute
    program = Program(
        source,
        simulation.switch,
        starts_over=starts_over,
        apply=simulation.apply,
        changes=changes,
    )
    failed: set[int] = set()
    faulty = mock.patch("ebbtide.stores.disk_file.os", FaultyOs(simulation.knobs))
    with faulty, simulation.on_mixed_streams(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the system refused to page-lock", RuntimeWarning)
        offloaded = program.run(_noting_failures(simulation.forward, failed), watch.after_step)
    again = Program(source, starts_over=starts_over, changes=changes)
    plain = again.run(_failing_again(failed))
    return plain, offloaded, watch


def _noting_failures(run: Run, failed: set[int]) -> Run:
    numbers = itertools.count()

    def run_noting(function: Callable[[], Any]) -> Any:
        number = next(numbers)
        try:
            return run(function)
        except OSError:
            failed.add(number)
            raise

    return run_noting


def _failing_again(failed: set[int]) -> Run:
    """Runs forwards plainly, but for those that the store could not take."""
    numbers = itertools.count()

    def run_failing(function: Callable[[], Any]) -> Any:
        if next(numbers) in failed:
            raise OSError
        return function()

    return run_failing


def check(source: Source, knobs: Knobs | None = None) -> Simulation:
    """Simulate a program and check everything; the message of a failure names the seed."""
    return check_outcome(source, knobs)[1].simulation


def check_failed_reads(
    seed: int, make_bench: Callable[[int, Knobs], Simulation] = Simulation
) -> None:
    """A chain whose bytes cannot all be read: backward raises, or is right, and nothing is left."""
    knobs = dataclasses.replace(Knobs.of(seed), store="disk", failures=0.0)
    simulation = make_bench(seed, knobs)
    faulty = FaultyOs(knobs)
    x = torch.linspace(-1, 1, 64 * WIDTH).view(-1, WIDTH).requires_grad_()

    def chain() -> Tensor:
        y = x
        for _ in range(6):
            y = y.sin()
        return y.sum()

    expected = torch.autograd.grad(chain(), x)[0]
    with mock.patch("ebbtide.stores.disk_file.os", faulty), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the system refused to page-lock", RuntimeWarning)
        loss = simulation.forward(chain)
        faulty.failing_reads = 0.1
        with contextlib.suppress(OSError):
            assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
        del loss
        drain_autograd()
        again = [x.sin() for _ in range(8)]  # in what memory the backward has left
        simulation.check_at_rest()
        assert all(torch.equal(each, x.sin()) for each in again), "memory was written to later"


def check_outcome(source: Source, knobs: Knobs | None = None) -> tuple[Outcome, Watch]:
    """`check`, for those who want to know what the program did, too."""
    if isinstance(source, int) and knobs is None:
        with _named(source):
            check_failed_reads(source)
    with _named(source), without_collector():
        plain, offloaded, watch = simulate(source, knobs)
        knobs = watch.simulation.knobs
        assert _comparable(offloaded, knobs) == _comparable(plain, knobs)
        assert len(offloaded.tensors) == len(plain.tensors)
        for got, expected in zip(offloaded.tensors, plain.tensors, strict=True):
            same = torch.equal(_bits(got), _bits(expected))
            assert same, "numbers differ from plain autograd"
        watch.simulation.check_at_rest()
    return offloaded, watch


def _comparable(outcome: Outcome, knobs: Knobs) -> list[str]:
    """The errors. Of two that a backward meets, a rebuild may meet the other one first."""
    if not knobs.rebuild:
        return outcome.errors
    both = {"modified in place", "interrupted backward"}
    return ["backward raised" if error in both else error for error in outcome.errors]


@contextlib.contextmanager
def _named(source: Source) -> Iterator[None]:
    """What fails within says what replays it."""
    try:
        yield
    except Exception as error:
        name = "seed" if isinstance(source, int) else "tape"
        raise AssertionError(f"{name} {source}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """What dies within must die by its references alone."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def drain_autograd() -> None:
    """Run a backward of nothing.

    After a backward that raised, torch's queue keeps what had been ready to run, and with it parts
    of the graph, until the thread's next backward.
    """
    torch.ones(1, requires_grad=True).sum().backward()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
