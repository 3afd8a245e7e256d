"""What the doctor reads from the system, from directories that look like other machines'."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from ebbtide.tools.machine import (
    read_directory,
    read_machine,
)

GIB = 2**30
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fakes directories of Linux")


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def mounts(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    found = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in entries]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: found)


def test_the_facts_of_this_machine(tmp_path: Path) -> None:
    facts = read_machine(CPU, tmp_path)
    assert 0 < facts.free_ram_bytes <= facts.total_ram_bytes <= psutil.virtual_memory().total
    assert facts.cores == len(os.sched_getaffinity(0))
    assert facts.torch_threads == torch.get_num_threads()
    assert facts.store.free_bytes > 0
    assert facts.store.filesystem
    assert facts.accelerator is None


def test_a_container_has_what_it_may_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = SimpleNamespace(limit_bytes=GIB, free_bytes=2**20)
    monkeypatch.setattr("ebbtide.tools.machine.memory_limit", lambda _: limit)
    facts = read_machine(CPU, tmp_path)
    assert facts.total_ram_bytes == GIB
    assert facts.free_ram_bytes == 2**20


def test_gpus_that_torch_does_not_see(tmp_path: Path) -> None:
    devices = {
        "a": ("0x10de", "0x030200"),
        "b": ("0x8086", "0x030000"),
        "c": ("0x10de", "0x0c0330"),
    }
    for name, (vendor, kind) in devices.items():
        folder = f"sys__bus__pci__devices__{name}__"
        write(tmp_path, **{f"{folder}vendor": vendor + "\n", f"{folder}class": kind + "\n"})
    assert read_machine(CPU, tmp_path, tmp_path).idle_gpus == ("NVIDIA",)


# ---- directories ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "in_ram", "on_network"),
    [
        ("ext4", False, False),
        ("tmpfs", True, False),
        ("nfs4", False, True),
        ("lustre", False, True),
        ("overlay", False, False),
    ],
)
def test_kinds_of_file_systems(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, in_ram: bool, on_network: bool
) -> None:
    mounts(monkeypatch, ("/", "btrfs"), (str(tmp_path), kind), (f"{tmp_path}2", "xfs"))
    directory = read_directory(tmp_path)
    assert directory.filesystem == kind
    assert directory.in_ram == in_ram
    assert directory.on_network == on_network


# ---- accelerators --------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU. Returns what torch would ask it by."""
    module = SimpleNamespace(
        mem_get_info=lambda _: (79 * GIB, 80 * GIB),
        get_device_name=lambda _: "Test GPU",
        get_device_properties=lambda _: SimpleNamespace(total_memory=80 * GIB),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    return module


@pytest.mark.usefixtures("gpu")
def test_an_accelerator(tmp_path: Path) -> None:
    found = read_machine(CUDA, tmp_path, tmp_path).accelerator
    assert (found.name, found.count) == ("Test GPU", 2)
    assert (found.total_bytes, found.free_bytes) == (80 * GIB, 79 * GIB)
