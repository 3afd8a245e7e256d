"""Worker lanes: in order, with their failures, and without holding on to anything."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from ebbtide.devices import CpuDevice, LaneEvent, WorkLane, lanes
from store_bench import wait_for

WAIT_S = 5.0  # far more than anything here takes; reached only when a test fails


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    """What goes, goes when its last reference does."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def lane() -> Iterator[WorkLane]:
    lane = WorkLane("test-lane")
    yield lane
    lane.close()


def threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def ends(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(WAIT_S)
    return not any(thread.is_alive() for thread in threads)


def test_jobs_run_in_the_order_of_their_submission(lane: WorkLane) -> None:
    ran: list[int] = []
    all_are_queued = threading.Event()

    def job(number: int) -> Callable[[], None]:
        def work() -> None:
            if number == 0:  # the others could overtake it
                assert all_are_queued.wait(WAIT_S)
            ran.append(number)

        return work

    events = [lane.submit(job(number)) for number in range(50)]
    all_are_queued.set()
    wait_for(events[-1])
    assert ran == list(range(50))
    assert all(event.query() for event in events)


def test_an_event_is_reached_when_the_work_has_run_and_not_before(lane: WorkLane) -> None:
    may_run = threading.Event()
    first = lane.submit(lambda: may_run.wait(WAIT_S) and None)
    second = lane.submit(lambda: None)
    assert not first.query()
    assert not second.query()
    may_run.set()
    first.synchronize()
    second.synchronize()
    assert first.query()
    assert second.query()
    assert second.failure is None


@pytest.mark.parametrize("kind", [OSError, MemoryError, KeyboardInterrupt, SystemExit])
def test_a_failure_reaches_whoever_waits_and_nobody_else(
    lane: WorkLane, kind: type[BaseException]
) -> None:
    error = kind("on purpose")

    def fail() -> None:
        raise error

    failed = lane.submit(fail)
    after = lane.submit(lambda: None)
    wait_for(after)
    assert failed.failure is error
    for _ in range(2):
        with pytest.raises(kind) as raised:
            failed.synchronize()
        assert raised.value.args == error.args
        assert raised.value is not error  # its traceback would refer back to the event
    assert failed.query()
    assert after.failure is None
    after.synchronize()


@pytest.mark.parametrize("fails", [False, True])
def test_then_runs_in_the_lane_after_the_event_is_reached(lane: WorkLane, fails: bool) -> None:
    submitted = threading.Event()
    seen: list[tuple[bool, str]] = []
    events: list[LaneEvent] = []

    def work() -> None:
        submitted.wait(WAIT_S)
        if fails:
            raise OSError("on purpose")

    def then() -> None:
        seen.append((events[0].query(), threading.current_thread().name))

    events.append(lane.submit(work, then=then))
    assert not seen
    submitted.set()
    wait_for(lane.submit(lambda: None))
    assert seen == [(True, "test-lane")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_then_that_raises_does_not_take_the_lane_with_it(lane: WorkLane) -> None:
    """A dead lane would leave everybody who waits for a later event waiting for ever."""

    def then() -> None:
        raise ValueError("on purpose")

    wait_for(lane.submit(lambda: None, then=then))
    wait_for(lane.submit(lambda: None))


def test_a_finished_job_keeps_no_tensor_alive(lane: WorkLane) -> None:
    """Not even the last one, for which no next job comes to take its place."""
    tensor = torch.zeros(1000)
    alive = weakref.ref(tensor)

    def work(tensor: torch.Tensor = tensor) -> None:
        tensor.add_(1)

    event = lane.submit(work)
    del work
    wait_for(event)
    assert alive() is tensor
    del tensor
    assert alive() is None
    assert event.query()


def test_what_a_job_holds_is_gone_when_its_event_is_reached(lane: WorkLane) -> None:
    """Memory may be reused after the event: by then the lane must have let go of it."""
    for _ in range(200):
        tensor = torch.zeros(10)
        alive = weakref.ref(tensor)
        event = lane.submit(tensor.zero_)
        del tensor
        wait_for(event)
        assert alive() is None


def test_a_failed_job_keeps_no_tensor_alive(lane: WorkLane) -> None:
    """Its event holds the error; the error's traceback must not hold the job's frame."""
    tensor = torch.zeros(10)
    alive = weakref.ref(tensor)

    def work(tensor: torch.Tensor = tensor) -> None:
        tensor.zero_()
        raise OSError("on purpose")

    event = lane.submit(work)
    del tensor, work
    wait_for(event)
    assert isinstance(event.failure, OSError)
    assert alive() is None


def test_close_finishes_what_was_submitted_and_ends_the_thread() -> None:
    lane = WorkLane("test-close")
    ran: list[int] = []
    may_run = threading.Event()
    lane.submit(lambda: may_run.wait(WAIT_S) and None)
    for number in range(5):
        lane.submit(lambda number=number: ran.append(number))
    threads = threads_named("test-close")
    assert len(threads) == 1
    threading.Timer(0.05, may_run.set).start()
    lane.close()
    assert ran == [0, 1, 2, 3, 4]
    assert not threads[0].is_alive()
    lane.close()


def test_a_job_that_has_not_begun_can_be_withdrawn(lane: WorkLane) -> None:
    ran: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        assert go_on.wait(WAIT_S)
        ran.append("first")

    running = lane.submit(first)
    withdrawn = lane.submit(lambda: ran.append("withdrawn"), lambda: ran.append("then"))
    assert begun.wait(WAIT_S)
    assert withdrawn.withdraw() and not running.withdraw()
    go_on.set()
    withdrawn.synchronize()
    lane.submit(lambda: ran.append("last")).synchronize()
    assert ran == ["first", "then", "last"]
    origin = CpuDevice().origin()
    assert len(running.spans(origin)) == 1 and withdrawn.spans(origin) == []  # for traces
    assert not withdrawn.withdraw()


def test_a_lane_that_never_ran_closes() -> None:
    WorkLane("test-unused").close()
    assert not threads_named("test-unused")


def test_a_collected_lane_finishes_what_was_submitted_and_ends_its_thread() -> None:
    lane = WorkLane("test-collected")
    may_run = threading.Event()
    ran: list[int] = []
    lane.submit(lambda: may_run.wait(WAIT_S) and None)
    last = lane.submit(lambda: ran.append(1))
    threads = threads_named("test-collected")
    alive = weakref.ref(lane)
    del lane
    assert alive() is None, "the running thread must not keep the lane alive"
    may_run.set()
    wait_for(last)
    assert ran == [1]
    assert ends(threads)


def test_submissions_from_several_threads_all_run_each_threads_in_order(lane: WorkLane) -> None:
    ran: list[tuple[int, int]] = []
    together = threading.Barrier(4)

    def submit(thread: int) -> None:
        together.wait(WAIT_S)
        for number in range(50):
            lane.submit(lambda number=number: ran.append((thread, number)))

    threads = [threading.Thread(target=submit, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    assert ends(threads)
    wait_for(lane.submit(lambda: None))
    assert len(ran) == 4 * 50
    for thread in range(4):
        assert [number for at, number in ran if at == thread] == list(range(50))


def test_the_cpu_devices_lanes_end_with_it() -> None:
    names = ("ebbtide-d2h", "ebbtide-h2d")
    earlier = {thread for name in names for thread in threads_named(name)}  # of other tests
    device = CpuDevice()
    source, target = torch.arange(8), torch.zeros(8, dtype=torch.int64)
    device.copy_down(target, source)
    device.copy_up(target, source)
    device.finish_copies()
    assert torch.equal(target, torch.arange(8))
    threads = [each for name in names for each in threads_named(name) if each not in earlier]
    assert len(threads) == 2
    del device
    assert ends(threads)


def test_a_copy_waits_for_its_events_and_passes_their_failure_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = CpuDevice()
    source, target = torch.ones(8), torch.zeros(8)
    ready, is_waited_for = LaneEvent(), threading.Event()

    def synchronize() -> None:
        is_waited_for.set()
        LaneEvent.synchronize(ready)

    monkeypatch.setattr(ready, "synchronize", synchronize)
    copied = device.copy_down(target, source, ready)
    assert is_waited_for.wait(WAIT_S)
    assert not copied.query()
    assert not target.any()
    ready.finish()
    wait_for(copied)
    assert target.all()
    failed = LaneEvent()
    failed.finish(OSError("on purpose"))
    not_copied = device.copy_down(target, torch.zeros(8), failed)
    wait_for(not_copied)
    assert str(not_copied.failure) == "on purpose"
    assert target.all()


AT_THE_END = """
import torch
from ebbtide.devices import WorkLane
from ebbtide.devices.lanes import defer

square = torch.rand(300, 300)


def work():
    for _ in range(60):
        torch.mm(square, square)
    print("ended")


lanes = [WorkLane(str(number)) for number in range(6)]
for lane in lanes:
    lane.submit(work)
defer(work)
collected = WorkLane("collected")
for _ in range(3):  # it is the last to end
    collected.submit(work)
del collected
"""


def test_work_under_way_when_the_process_ends_is_finished() -> None:
    """Otherwise the interpreter stops a thread that is inside torch, and the process aborts."""
    command = [sys.executable, "-c", AT_THE_END]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("ended") == 10


SLOW_TO_FREE = """
import time
import torch
from ebbtide.devices.lanes import watch


class SlowToFree(bytearray):
    def __del__(self):
        begun.append(None)
        time.sleep(0.3)
        print("freed")


begun = []
tensors = [torch.frombuffer(SlowToFree(64), dtype=torch.uint8)]


def look():
    tensors.clear()
    return True  # the end of the process ends it


watch(look, 0.001, "looks")
while not begun:
    time.sleep(0.001)
"""


def test_a_tensor_that_a_watching_thread_frees_is_freed_before_the_process_ends() -> None:
    """Otherwise the interpreter stops the thread inside torch, and the process aborts."""
    command = [sys.executable, "-c", SLOW_TO_FREE]
    timeout_s = lanes._LONGEST_END_S - 5
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    assert (done.returncode, done.stdout, done.stderr) == (0, "freed\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_waits_for_no_thread_at_its_end() -> None:
    code = """
import os, sys, threading
from ebbtide.devices import WorkLane
from ebbtide.devices.lanes import defer, watch
go_on = threading.Event()
lane = WorkLane("lane")
lane.submit(go_on.wait)
defer(go_on.wait)
watch(go_on.wait, 0, "watches")
child = os.fork()
if child == 0:
    sys.exit(7)  # runs what is registered with atexit
status = os.waitpid(child, 0)[1]
go_on.set()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert done.returncode == 7
