"""The device's own tests run in processes that have the device: `make soft`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import softdevice

WITHOUT = "runs in a process of its own, where torch has the software accelerator: make soft"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if softdevice.is_loaded():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=WITHOUT))


@pytest.fixture(autouse=True)
def _current_stream() -> Iterator[None]:
    """Each test leaves the stream on which it began to the next one.

    What several threads do is ordered by nobody where one of them has another stream than the rest.
    """
    if not softdevice.is_loaded():
        yield
        return
    before = torch.accelerator.current_stream()
    yield
    after = torch.accelerator.current_stream()
    torch.accelerator.set_stream(before)
    assert after == before, "the test leaves another stream"


@pytest.fixture
def device() -> torch.device:
    return torch.device("softdevice", 0)
