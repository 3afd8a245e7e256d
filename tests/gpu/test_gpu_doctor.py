"""`ebbtide doctor` on this device."""

import json
from typing import Any

import pytest
import torch

from commands import call
from ebbtide.planning import Hardware


def _is_in_software(device: torch.device) -> bool:
    """Whether times on this device mean nothing."""
    return getattr(torch.get_device_module(device), "IN_SOFTWARE", False)


@pytest.fixture(scope="module")
def found(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the doctor writes as JSON."""
    store = f"disk:{tmp_path_factory.mktemp('store')}"
    done = call("doctor", "--quick", "--json", "--device", device, "--store", store)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_everything_is_measured(found: str, device: torch.device) -> None:
    assert json.loads(found)["figures"]["problems"] == {}
    hardware = Hardware.from_json(found)
    one_way = (hardware.h2d_bytes_per_s, hardware.d2h_bytes_per_s)
    assert hardware.duplex_bytes_per_s <= sum(one_way)
    if not _is_in_software(device):
        assert all(1e8 < rate < 1e12 for rate in one_way), one_way
        assert max(one_way) <= hardware.device_memory_bytes_per_s


@pytest.mark.usefixtures("needs_accelerator")
def test_the_device_is_the_accelerator(found: str, device: torch.device) -> None:
    hardware = Hardware.from_json(found)
    figures: dict[str, Any] = json.loads(found)["figures"]
    assert not hardware.computes_on_host
    assert figures["facts"]["accelerator"] == hardware.name
    assert figures["pinning"] is not None
    free_bytes, total_bytes = torch.get_device_module(device).mem_get_info(device)
    assert hardware.device_memory_bytes == total_bytes
    before_bytes = figures["facts"]["accelerator_free_bytes"]
    assert free_bytes > 0.5 * before_bytes  # it was given back
    # A copy on a stream costs some microseconds beside its bytes.
    assert hardware.link_latency_s < 1e-3 or _is_in_software(device)
