"""Where the tests of this folder run.

They take their device from the fixture `device`: the current accelerator. Without one they are all
skipped, except with EBBTIDE_GPU_TESTS_ON=cpu in the environment: then they run on the CPU, a dry
run that shows that they can run at all, less those for which a CPU means nothing.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu_bench import DRY_RUN, can_register, can_sleep, find_device, finish_device

# On several streams cuBLAS repeats its results only with workspaces set aside for them. torch reads
# this when it first calls cuBLAS.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

NO_ACCELERATOR = "no accelerator; EBBTIDE_GPU_TESTS_ON=cpu makes a dry run"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if find_device() is None:
            item.add_marker(pytest.mark.skip(reason=NO_ACCELERATOR))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the models compute."""
    found = find_device()
    assert found is not None, NO_ACCELERATOR
    return found


@pytest.fixture
def needs_accelerator() -> None:
    """For tests of streams and of device memory."""
    if DRY_RUN:
        pytest.skip("means nothing on a CPU")


@pytest.fixture
def needs_sleep(device: torch.device, needs_accelerator: None) -> None:  # noqa: ARG001
    """For tests that let streams sleep, so that others overtake them."""
    if not can_sleep(device):
        pytest.skip(f"torch.{device.type} has no _sleep: kernels of this device cannot sleep")


@pytest.fixture
def needs_registration(device: torch.device, needs_accelerator: None) -> None:  # noqa: ARG001
    """For tests of host memory that is page-locked where it is."""
    if not can_register(device):
        pytest.skip(f"torch.{device.type} offers no way to page-lock memory that exists already")


@pytest.fixture(autouse=True)
def _finished(device: torch.device) -> Iterator[None]:
    """A kernel that fails is blamed on the test that queued it, and no test inherits memory."""
    yield
    finish_device(device)
    gc.collect()
    if not DRY_RUN:
        torch.accelerator.empty_cache()
