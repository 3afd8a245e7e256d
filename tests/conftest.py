"""What holds for all tests. pytest reads it before any test file, and so before torch."""

import contextlib
import gc
import os
import signal
import zlib
from typing import Any

import pytest

# By default threads of OpenMP spin at every barrier. Where other processes want the cores too, a
# spinning thread takes the time that the thread it waits for needs, and small operations take ten
# times as long. Processes that tests start inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# `make test` has a process for each core.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell ignores Ctrl-C in what it runs in the background, and so do all processes below it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says nothing on a busy machine. The environments of the clients and of
# the GPU suite need no hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("ebbtide", deadline=None)
    settings.load_profile("ebbtide")

_dead_workers: list[str] = []
_PART = os.environ.get("EBBTIDE_PART", "1/1")
"""Which part of the test files runs, such as ``2/4``: CI runs one part of the slow tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the files of other parts."""
    number, _, count = _PART.partition("/")
    items[:] = [
        item
        for item in items
        if zlib.crc32(item.path.name.encode()) % int(count) == int(number) - 1
    ]


@pytest.fixture(scope="module")
def frozen_imports() -> None:
    """Hide from the collector what has been imported, for files whose tests each call it.

    With all tests' imports it reads half a million objects, which takes a third of a second.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Note that a process of pytest-xdist has died. A process that has finished has no error."""
    if error:
        _dead_workers.append(node.gateway.id)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport() -> None:
    """End the run if a process has died, without waiting for the tests of the others.

    xdist reports the death as a failure of the test that the process ran. That comes first.
    """
    if _dead_workers:
        pytest.exit(f"the test process {_dead_workers[0]} has died", returncode=1)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many examples of the documentation ran, if their tests were among those that ran.

    tests/docs could not do so: the process that writes the summary for xdist reads only this file.
    """
    statuses = ("passed", "failed", "skipped")
    reports = [report for each in statuses for report in terminalreporter.stats.get(each, [])]
    if any(report.nodeid.startswith("tests/docs/test_docs.py::") for report in reports):
        from snippet_summary import summarize_run

        terminalreporter.write_line(summarize_run(terminalreporter.stats))
