"""For pytest: `PYTHONPATH=tests/softdevice python -m pytest -p softdevice.plugin tests/gpu`.

The whole process gets the device. Every test begins its order of execution anew, so that one test
alone repeats what it did among others. A test that fails says in which order it ran.

A test that exceeds its time ends the process. pytest-timeout's other method raises an exception in
the test, which never happens in one that waits for the device.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import softdevice


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--order",
        default="threads",
        help=f"of execution: {', '.join(softdevice.ORDERS)}; or random, which draws a seed",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout reads its options
def pytest_configure(config: pytest.Config) -> None:
    config.option.timeout_method = "thread"
    if config.option.order == "random":
        config.option.order = f"random:{random.randrange(10**6)}"
    # Before any test file is imported: torch starts a device's threads with the first backward.
    try:
        softdevice.load(config.option.order)
    except RuntimeError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_report_header(config: pytest.Config) -> str:
    return f"software accelerator: order {config.getoption('--order')}"


@pytest.fixture(autouse=True)
def _order_begins_anew(request: pytest.FixtureRequest) -> Iterator[None]:
    softdevice.choose_order(request.config.option.order)
    capacity_bytes = softdevice.capacity()
    yield
    softdevice.set_capacity(capacity_bytes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        order = item.config.option.order
        report.sections.append(("software accelerator", f"order of execution: --order {order}"))
    return report
