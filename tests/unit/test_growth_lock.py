"""One process of a host at a time allocates host memory, whatever happens to the one before."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebbtide.stores import host_memory as growth_lock
from ebbtide.stores.host_memory import GrowthLock
from forked import LIMIT_S

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
SOON_S = 5.0  # much less than the patience of 30 s, and much more than a poll


@pytest.fixture(autouse=True)
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GrowthLock:
    """A lock on files that no other test and no other program uses."""
    for name in ("_LOCK_FILE", "_DOOR_FILE"):
        (tmp_path / name).touch()
        monkeypatch.setattr(growth_lock, name, str(tmp_path / name))
    return GrowthLock()


@contextlib.contextmanager
def child(work: Callable[[Callable[[], None]], None]) -> Iterator[int]:
    """Fork; begins when the child has called what ``work`` is given. Kills the child at the end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work(lambda: os.write(writer, b"."))  # type: ignore[arg-type, return-value]
        finally:
            os._exit(0)
    os.close(writer)
    try:
        assert os.read(reader, 1) == b"."
        yield pid
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def holds(lock: GrowthLock, seconds: float) -> Callable[[Callable[[], None]], None]:
    """What a process does that holds the lock for a while."""

    def work(begun: Callable[[], None]) -> None:
        with lock.hold():
            begun()
            time.sleep(seconds)
        time.sleep(LIMIT_S)

    return work


def seconds_until_held(lock: GrowthLock) -> float:
    begin_s = time.monotonic()
    with lock.hold():
        return time.monotonic() - begin_s


def is_free() -> bool:
    """Whether the lock can be had at once."""
    file = growth_lock._open(growth_lock._LOCK_FILE)
    assert file is not None
    with file:
        try:
            growth_lock.fcntl.flock(file, growth_lock.fcntl.LOCK_EX | growth_lock.fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_another_process_waits(lock: GrowthLock) -> None:
    with child(holds(lock, 0.5)):
        assert not is_free()
        assert 0.1 < seconds_until_held(lock) < SOON_S
    assert is_free()


def test_another_thread_waits(lock: GrowthLock) -> None:
    held, order = threading.Event(), []

    def hold() -> None:
        with lock.hold():
            held.set()
            time.sleep(0.1)
            order.append("first")

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    with lock.hold():
        order.append("second")
    thread.join()
    assert order == ["first", "second"]


def test_who_waits_comes_before_who_had_it(lock: GrowthLock) -> None:
    """The child allocates block after block, with no time in between to notice that it is free."""

    def hold_again_and_again(begun: Callable[[], None]) -> None:
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            with lock.hold():
                begun()
                time.sleep(0.05)

    with child(hold_again_and_again):
        waits_s = []
        for _ in range(5):
            time.sleep(0.07)  # until the child has it again
            waits_s.append(seconds_until_held(lock))
        # The child's present turn, and none after it. By chance it was 0.2 to 25 s each time.
        assert max(waits_s) < 1


def test_an_error_releases(lock: GrowthLock) -> None:
    def interrupted() -> None:
        with lock.hold():
            assert not is_free()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert is_free()


def test_a_killed_process_holds_nothing(lock: GrowthLock) -> None:
    with child(holds(lock, LIMIT_S)) as pid:
        assert not is_free()
        os.kill(pid, signal.SIGKILL)
        assert seconds_until_held(lock) < SOON_S


def test_a_stopped_process_is_not_waited_for_twice(
    lock: GrowthLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth_lock, "_PATIENCE_S", 1.5)
    with child(holds(lock, 0.5)) as pid:
        os.kill(pid, signal.SIGSTOP)
        with pytest.warns(RuntimeWarning, match=r"\[ebbtide: growth-lock\]") as caught:
            assert 1.5 <= seconds_until_held(lock) < SOON_S
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                assert seconds_until_held(lock) < 1
        # When it goes on, the lock is obeyed again.
        os.kill(pid, signal.SIGCONT)
        while not is_free():
            time.sleep(0.01)
        with lock.hold():
            assert not is_free()
        monkeypatch.setattr(growth_lock, "_PATIENCE_S", SOON_S)
        with child(holds(lock, 1)), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert 0.3 < seconds_until_held(lock) < SOON_S


def test_a_child_forked_meanwhile_does_not_keep_it(lock: GrowthLock, tmp_path: Path) -> None:
    """Such as a worker of a data loader, which outlives the process that was killed."""
    path = tmp_path / "lives"
    os.mkfifo(path)

    def fork_while_held(begun: Callable[[], None]) -> None:
        held = threading.Event()

        def hold() -> None:
            with lock.hold():
                held.set()
                time.sleep(LIMIT_S)

        threading.Thread(target=hold, daemon=True).start()
        held.wait()
        if os.fork() == 0:
            path.read_bytes()  # until somebody has written there
            os._exit(0)
        begun()
        time.sleep(LIMIT_S)

    with child(fork_while_held) as pid, open(path, "wb", buffering=0) as end:
        assert not is_free()
        os.kill(pid, signal.SIGKILL)
        assert seconds_until_held(lock) < SOON_S
        assert end.write(b".") == 1  # the grandchild was alive until now


def test_a_copy_of_the_descriptor_does_not_keep_it(lock: GrowthLock) -> None:
    """Such as that of a process which a library in C has forked."""
    with lock.hold():
        copies = [os.dup(file.fileno()) for file in lock._files if not file.closed]
        assert copies
    assert is_free()
    for copy in copies:
        os.close(copy)


def test_a_process_forked_inside_goes_on(lock: GrowthLock) -> None:
    """It does not have the lock, and its end does not release the parent's."""
    with lock.hold():
        pid = os.fork()
        if pid == 0:
            os._exit(7 if is_free() else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert not is_free()
    assert is_free()


@pytest.mark.parametrize("lacks", ["fcntl", "file", "flock"])
def test_a_system_without_such_a_lock(
    lacks: str, lock: GrowthLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    if lacks == "fcntl":
        monkeypatch.setattr(growth_lock, "fcntl", None)
    elif lacks == "file":
        monkeypatch.setattr(growth_lock, "_LOCK_FILE", "/no/such/file")
    else:
        monkeypatch.setattr(growth_lock.fcntl, "flock", refuse)
    assert seconds_until_held(lock) < SOON_S


def test_the_files_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for path in (growth_lock._LOCK_FILE, growth_lock._DOOR_FILE):
        file = growth_lock._open(path)
        assert file is not None
        file.close()
