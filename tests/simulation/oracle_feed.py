"""Tells the oracle what the engine queues on simulated devices, and what torch runs."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.cuda import _sanitizer
from torch.utils._python_dispatch import TorchDispatchMode

import harness
import schedule_programs
import weight_programs
import weight_statements
from ebbtide.devices import SimulatedDevice, simulated
from ebbtide.stores import disk_file
from oracle import DOWN, UP, Oracle, point_of

_NO_ACCESS = {"set_", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Operators that touch no element, although their schemas do not say so."""


# ---- what torch runs ----------------------------------------------------------------------------


class _Arguments(_sanitizer.ArgumentHandler):
    """The sanitizer's own analysis of an operator's schema, for tensors of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] = {}
        self.reads: dict[int, Tensor] = {}
        self.writes: dict[int, Tensor] = {}

    def _handle_argument(
        self,
        value: Any,
        is_write: bool,
        metadata_only: bool,
        name: str | None = None,  # noqa: ARG002
        is_output: bool = False,
    ) -> None:
        if not isinstance(value, Tensor):
            return
        memory = value.untyped_storage()._cdata
        if is_output and memory in self.tensors:
            return  # a view, although the schema does not say so; or an argument that was written
        if not is_output:
            self.tensors[memory] = value
        if is_write:
            self.writes[id(value)] = value
        elif not metadata_only:
            self.reads[id(value)] = value


class _Kernels(TorchDispatchMode):
    """Tells of every operator, as the sanitizer's own mode does."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        oracle = self._watch.oracle
        name = func._schema.name.removeprefix("aten::")
        if oracle is None or self._watch.quiet or name in _NO_ACCESS:
            return func(*args, **kwargs)
        is_factory = bool(_sanitizer.FACTORY_FUNCTION_REGEX.match(func._schema.name))
        arguments = _Arguments()
        arguments.parse_inputs(func._schema, args, kwargs, is_factory=is_factory)
        outputs = func(*args, **kwargs)
        arguments.parse_outputs(func._schema, outputs, is_factory=is_factory)
        if arguments.reads or arguments.writes:
            oracle.kernel([*arguments.reads.values()], [*arguments.writes.values()], name)
        return outputs


# ---- what the engine queues ---------------------------------------------------------------------


class Watch:
    """The oracle of the newest device, and what all of them have found."""

    def __init__(self) -> None:
        self.oracle: Oracle | None = None
        self.found: list[str] = []
        self.quiet = 0
        self.content: dict[str, int] = {}

    def oracle_of(self, device: SimulatedDevice) -> Oracle:
        if self.oracle is None or self.oracle.device is not device:
            self.oracle = Oracle(device, self.found)
        return self.oracle

    def finish(self) -> None:
        """Let workers and copies go on that a program has left behind: what they do may be late."""
        device = None if self.oracle is None else self.oracle.device
        for work in () if device is None else (device.finish_jobs, device.finish_copies):
            with contextlib.suppress(Exception):
                work()

    def count(self, what: str) -> None:
        self.content[what] = self.content.get(what, 0) + 1


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    """Within, what is queued on simulated devices is told to the sanitizer."""
    watch = Watch()
    empty = traceback.StackSummary()
    no_stacks = SimpleNamespace(
        StackSummary=SimpleNamespace(extract=lambda *_, **__: empty), walk_stack=lambda _: ()
    )
    with contextlib.ExitStack() as stack:
        # Where each access comes from is known from its name; a stack each would take most time.
        stack.enter_context(mock.patch.object(_sanitizer, "traceback", no_stacks))
        for patches in (_device_patches, _stream_patches, _worker_patches):
            for owner, name, make in patches(watch):
                original = getattr(owner, name)
                stack.enter_context(mock.patch.object(owner, name, make(original)))
        # It is not the program's mode: it sees ebbtide's own operations, too, and changes nothing.
        counted = "ebbtide.runtime.torch_internals.count_dispatch_modes"
        stack.enter_context(mock.patch(counted, int))
        stack.enter_context(_Kernels(watch))
        yield watch


Make = Callable[[Callable[..., Any]], Callable[..., Any]]
Patches = Iterator[tuple[Any, str, Make]]


def _device_patches(watch: Watch) -> Patches:
    def begin(original: Any) -> Any:
        def watched(device: SimulatedDevice, *args: Any, **kwargs: Any) -> None:
            original(device, *args, **kwargs)
            watch.oracle_of(device)  # from now on: the first copy may read what kernels write now

        return watched

    def allocate(original: Any) -> Any:
        def watched(device: SimulatedDevice, size_bytes: int) -> Tensor:
            oracle = watch.oracle_of(device)
            oracle.look_for_dead()
            memory = quietly(original)(device, size_bytes)
            oracle.allocated(memory)
            return memory

        return watched

    def note_use(original: Any) -> Any:
        def watched(
            device: SimulatedDevice, memory: Tensor, home: Any, current: Any, ready: Any = None
        ) -> bool:
            watch.oracle_of(device).handed_out(memory, ours=ready is not None)
            return original(device, memory, home, current, ready)

        return watched

    def pin(original: Any) -> Any:
        def watched(device: SimulatedDevice, address: int, size_bytes: int) -> Any:
            unlock = original(device, address, size_bytes)
            oracle = watch.oracle_of(device)
            oracle.locked(address, size_bytes)

            def unlock_watched() -> None:
                watch.count("unlocks")
                oracle.unlocked(address)
                unlock()

            return unlock_watched

        return watched

    def copy(stream: int) -> Make:
        def make(original: Any) -> Any:
            def watched(device: Any, target: Tensor, source: Tensor, *after: Any) -> Any:
                watch.count("copies")
                point = watch.oracle_of(device).copy(stream, target, source, after)
                event = original(device, target, source, *after)
                event.oracle_point = point
                return event

            return watched

        return make

    def finish_copies(original: Any) -> Any:
        def watched(device: SimulatedDevice) -> None:
            original(device)
            oracle = watch.oracle_of(device)
            oracle.look_for_dead()
            oracle.finish(DOWN, UP)

        return watched

    def quietly(original: Any) -> Any:
        def watched(*args: Any) -> Any:
            watch.quiet += 1
            try:
                return original(*args)
            finally:
                watch.quiet -= 1

        return watched

    def moved(kind: str) -> Make:
        def make(original: Any) -> Any:
            def watched(file: Any, view: memoryview, offset_bytes: int) -> None:
                oracle = watch.oracle
                if oracle is not None and len(view):
                    watch.count("file accesses")
                    address = _address(view)
                    oracle.host_access(address, len(view), f"a {kind}", writes=kind == "read")
                original(file, view, offset_bytes)

            return watched

        return make

    def go_on(original: Any) -> Any:  # noqa: ARG001
        def watched(device: SimulatedDevice, message: str) -> None:  # noqa: ARG001
            watch.count("objections")  # of the device, which would end the program

        return watched

    yield SimulatedDevice, "__init__", begin
    yield SimulatedDevice, "object_to", go_on
    yield SimulatedDevice, "allocate", allocate
    yield SimulatedDevice, "note_use", note_use
    yield SimulatedDevice, "pin", pin
    yield SimulatedDevice, "copy_down", copy(DOWN)
    yield SimulatedDevice, "copy_up", copy(UP)
    yield SimulatedDevice, "finish_copies", finish_copies
    yield SimulatedDevice, "run", quietly
    yield SimulatedDevice, "_poison", quietly
    yield disk_file.OpenFile, "write", moved("write")
    yield disk_file.OpenFile, "read", moved("read")


def _address(view: memoryview) -> int:
    with torch.utils._python_dispatch._disable_current_modes():
        return torch.frombuffer(view, dtype=torch.uint8).data_ptr()


def _stream_patches(watch: Watch) -> Patches:
    def record(original: Any) -> Any:
        def watched(stream: Any) -> Any:
            event = original(stream)
            oracle = watch.oracle_of(stream._device)
            oracle.look_for_dead()
            event.oracle_point = oracle.mark(oracle.stream_of(stream))
            return event

        return watched

    def wait(original: Any) -> Any:
        def watched(stream: Any, event: Any) -> None:
            event = event.settled()
            oracle = watch.oracle_of(stream._device)
            oracle.look_for_dead()
            oracle._catch_up(oracle.stream_of(stream))
            if isinstance(event, (simulated._ComputeEvent, simulated._CopyEvent)):
                watch.count("waits")
                oracle.wait(oracle.stream_of(stream), point_of(event))
                original(stream, event)

        return watched

    def seen(original: Any) -> Any:
        def watched(event: Any) -> Any:
            oracle = watch.oracle_of(event._device)
            oracle.look_for_dead()
            result = original(event)
            if result is not False:  # a query that says no tells nothing
                oracle.learn(point_of(event))
            return result

        return watched

    yield simulated._ComputeStream, "record", record
    yield simulated._ComputeStream, "wait", wait
    for kind in (simulated._ComputeEvent, simulated._CopyEvent):
        yield kind, "query", seen
        yield kind, "synchronize", seen


def _worker_patches(watch: Watch) -> Patches:
    def append(original: Any) -> Any:
        def watched(lane: Any, work: Any, then: Any = None) -> Any:
            oracle = watch.oracle_of(lane._device)
            submitted = oracle.mark(oracle.thread)
            event: Any = None

            def as_worker(function: Callable[[], None]) -> None:
                before, oracle.thread = oracle.thread, oracle.worker(lane)
                try:
                    oracle.learn(submitted)
                    function()
                finally:
                    event.oracle_point = oracle.mark(oracle.thread)
                    oracle.thread = before

            event = original(
                lane,
                lambda: as_worker(work),
                None if then is None else (lambda: as_worker(then)),
            )
            watch.count("jobs")
            return event

        return watched

    def query(original: Any) -> Any:
        def watched(event: Any) -> bool:
            oracle = watch.oracle_of(event._lane._device)
            oracle.look_for_dead()
            done = original(event)
            if done:
                oracle.learn(point_of(event))
            return done

        return watched

    def run_to(original: Any) -> Any:
        def watched(lane: Any, event: Any) -> None:
            original(lane, event)
            watch.oracle_of(lane._device).learn(point_of(event))

        return watched

    def close(original: Any) -> Any:
        def watched(lane: Any) -> None:
            original(lane)
            oracle = watch.oracle_of(lane._device)
            oracle.finish(oracle.worker(lane))

        return watched

    yield simulated._Lane, "append", append
    yield simulated._JobEvent, "query", query
    yield simulated._Lane, "run_to", run_to
    yield simulated._Lane, "close", close


# ---- programs ------------------------------------------------------------------------------------


def check_activations(seed: int) -> None:
    """See `watched`."""
    watched(harness.check, seed)


def check_schedules(seed: int) -> None:
    """See `watched`."""
    watched(schedule_programs.check_schedule, seed)


def check_weights(seed: int) -> None:
    """See `watched`."""
    watched(weight_programs.check_weights, seed)


def check_statements(seed: int) -> None:
    """See `watched`."""
    watched(weight_statements.check_statements, seed)


def watched(check: Callable[[int], None], seed: int) -> tuple[Watch, Exception | None]:
    """Run the program of a seed; raise an AssertionError if the sanitizer reports anything.

    Returns:
        What was seen, and what the program's own check raised: that is not the oracle's judgement.
    """
    failure = None
    with watching() as watch:
        try:
            check(seed)
        except Exception as error:
            failure = error
            watch.finish()
    assert not watch.found, f"seed {seed}: {watch.found[0]}"
    return watch, failure
