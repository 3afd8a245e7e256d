"""What holds for all tests. pytest reads it before any test file, and so before torch."""

import os
from typing import Any

import pytest

# By default threads of OpenMP spin at every barrier. Where other processes want the cores too, a
# spinning thread takes the time that the thread it waits for needs, and small operations take ten
# times as long. Processes that tests start inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# `make test` has a process for each core.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

_dead_workers: list[str] = []


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
