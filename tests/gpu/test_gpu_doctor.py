"""`ebbtide doctor` on this device."""

from pathlib import Path

import pytest
import torch

from ebbtide.planning import Hardware
from ebbtide.tools.doctor import advise, build_report
from ebbtide.tools.examination import QUICK, Examination, examine


def _is_in_software(device: torch.device) -> bool:
    """Whether times on this device mean nothing."""
    return getattr(torch.get_device_module(device), "IN_SOFTWARE", False)


@pytest.fixture(scope="module")
def found(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Examination:
    return examine(device, tmp_path_factory.mktemp("store"), QUICK)


def test_everything_is_measured(found: Examination, device: torch.device) -> None:
    assert found.problems == {}
    hardware = found.hardware()
    assert Hardware.from_json(hardware.to_json(found.figures())) == hardware
    one_way = (hardware.h2d_bytes_per_s, hardware.d2h_bytes_per_s)
    assert hardware.duplex_bytes_per_s <= sum(one_way)
    if not _is_in_software(device):
        assert all(1e8 < rate < 1e12 for rate in one_way)
        assert max(one_way) <= hardware.device_memory_bytes_per_s


@pytest.mark.usefixtures("needs_accelerator")
def test_the_device_is_the_accelerator(found: Examination, device: torch.device) -> None:
    hardware = found.hardware()
    assert not hardware.computes_on_host
    assert found.facts.accelerator.name == hardware.name
    assert found.pinning is not None
    free_bytes, total_bytes = torch.get_device_module(device).mem_get_info(device)
    assert hardware.device_memory_bytes == total_bytes
    assert free_bytes > 0.5 * found.facts.accelerator.free_bytes  # it was given back
    # A copy on a stream costs some microseconds beside its bytes.
    assert hardware.link_latency_s < 1e-3 or _is_in_software(device)


def test_the_report_fits_80_columns(found: Examination) -> None:
    lines = build_report(found, advise(found)).splitlines()
    path = str(Path(found.facts.store.path))
    assert all(len(line) <= 80 or path in line for line in lines)
