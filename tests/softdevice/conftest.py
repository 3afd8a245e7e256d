"""The device's own tests run in processes that have the device: `make soft`."""

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


@pytest.fixture
def device() -> torch.device:
    return torch.device("softdevice", 0)
