"""What the doctor reads from the system, from directories that look like other machines'."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from ebbtide.tools.machine import read_machine

GIB = 2**30
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fakes directories of Linux")


def mounts(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    found = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in entries]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: found)


def test_the_facts_of_this_machine(tmp_path: Path) -> None:
    facts = read_machine(CPU, tmp_path)
    assert 0 < facts.free_ram_bytes <= facts.total_ram_bytes <= psutil.virtual_memory().total
    assert facts.cores == len(os.sched_getaffinity(0))
    assert facts.torch_threads == torch.get_num_threads()
    assert facts.store_free_bytes > 0
    assert facts.store_filesystem
    assert facts.accelerator is None


def test_a_container_has_what_it_may_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ebbtide.tools.machine.memory_limit", lambda: (GIB, 2**20))
    facts = read_machine(CPU, tmp_path)
    assert facts.total_ram_bytes == GIB
    assert facts.free_ram_bytes == 2**20


def test_a_gpu_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr("ebbtide.tools.machine._GPU_DRIVERS", (str(driver),))
    assert not read_machine(CPU, tmp_path).has_unseen_gpu
    driver.touch()
    assert read_machine(CPU, tmp_path).has_unseen_gpu


# ---- directories ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "in_ram"), [("ext4", False), ("tmpfs", True), ("nfs4", False), ("overlay", False)]
)
def test_kinds_of_file_systems(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, in_ram: bool
) -> None:
    mounts(monkeypatch, ("/", "btrfs"), (str(tmp_path), kind), (f"{tmp_path}2", "xfs"))
    facts = read_machine(CPU, tmp_path)
    assert facts.store_filesystem == kind
    assert facts.store_is_in_ram == in_ram


# ---- accelerators --------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU. Returns what torch would ask it by."""
    module = SimpleNamespace(
        mem_get_info=lambda _: (79 * GIB, 80 * GIB),
        get_device_name=lambda _: "Test GPU",
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    return module


@pytest.mark.usefixtures("gpu")
def test_an_accelerator(tmp_path: Path) -> None:
    facts = read_machine(CUDA, tmp_path)
    assert (facts.accelerator, facts.num_accelerators) == ("Test GPU", 2)
    assert (facts.accelerator_bytes, facts.accelerator_free_bytes) == (80 * GIB, 79 * GIB)
