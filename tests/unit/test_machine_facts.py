"""What the doctor reads from the system, from directories that look like other machines'."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from ebbtide.stores import host_memory
from ebbtide.stores import host_memory as cgroups
from ebbtide.tools import machine as machine_facts
from ebbtide.tools.machine import (
    OtherPrograms,
    another_disk,
    cpu_name,
    read_directory,
    read_lanes,
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
    limit = cgroups.MemoryLimit(GIB, GIB - 2**20)
    monkeypatch.setattr(machine_facts, "memory_limit", lambda _: limit)
    facts = read_machine(CPU, tmp_path)
    assert facts.total_ram_bytes == GIB
    assert facts.free_ram_bytes == 2**20


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("always [madvise] never", "madvise"),
        ("[always] madvise never", "always"),
        ("", None),
        ("odd", None),
    ],
)
def test_huge_pages(tmp_path: Path, text: str, setting: str | None) -> None:
    root = write(tmp_path, sys__kernel__mm__transparent_hugepage__enabled=text)
    assert read_machine(CPU, tmp_path, root).huge_pages == setting


def test_the_name_of_the_processor(tmp_path: Path) -> None:
    root = write(tmp_path, proc__cpuinfo="processor\t: 0\nmodel name\t: AMD  EPYC 9354\n")
    assert cpu_name(root) == "AMD EPYC 9354"
    assert cpu_name(tmp_path / "nothing")


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


def test_the_longest_and_the_last_mount_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mounts(monkeypatch, (str(tmp_path), "ext4"), (str(tmp_path), "tmpfs"), ("/", "xfs"))
    assert read_directory(tmp_path).filesystem == "tmpfs"


def test_a_system_that_lists_no_mounts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(psutil, "disk_partitions", refuse)
    directory = read_directory(tmp_path)
    assert directory.filesystem is None
    assert not directory.in_ram
    assert read_directory(tmp_path / "missing").free_bytes is None


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")
def test_another_disk_is_on_another_file_system() -> None:
    other = another_disk(Path("/dev/shm"))
    if other is not None:
        assert os.stat(other).st_dev != os.stat("/dev/shm").st_dev
        assert not read_directory(other).in_ram
        assert another_disk(other) != other


# ---- accelerators --------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A GPU on node 1, at 0000:0a:00.0. Returns its directory."""
    properties = SimpleNamespace(
        pci_domain_id=0, pci_bus_id=10, pci_device_id=0, total_memory=80 * GIB
    )
    module = SimpleNamespace(
        mem_get_info=lambda _: (79 * GIB, 80 * GIB),
        get_device_name=lambda _: "Test GPU",
        get_device_properties=lambda _: properties,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(host_memory, "_SYSFS", tmp_path / "sys")
    core = min(os.sched_getaffinity(0))
    write(tmp_path, sys__devices__system__node__node1__cpulist=f"{core}-{core},100000-100003\n")
    folder = tmp_path / "sys/bus/pci/devices/0000:0a:00.0"
    write(folder, current_link_width="8\n", max_link_width="16\n", numa_node="1\n")
    return folder


def test_an_accelerator_and_its_place(gpu: Path, tmp_path: Path) -> None:
    assert gpu.is_dir()
    found = read_machine(CUDA, tmp_path, tmp_path).accelerator
    assert (found.name, found.count) == ("Test GPU", 2)
    assert (found.total_bytes, found.free_bytes) == (80 * GIB, 79 * GIB)
    assert found.lanes == (8, 16)
    assert (found.numa_node, found.near_cores) == (1, 1)


@pytest.mark.parametrize("width", ["", "0\n", "Unknown\n"])
def test_lanes_that_are_not_known(gpu: Path, width: str) -> None:
    write(gpu, current_link_width=width)
    assert read_lanes(CUDA) is None


def test_a_driver_that_does_not_say_what_is_free(
    monkeypatch: pytest.MonkeyPatch, gpu: Path, tmp_path: Path
) -> None:
    assert gpu.is_dir()
    module = torch.get_device_module(CUDA)

    def refuse(_: torch.device) -> None:
        raise RuntimeError("not supported")

    monkeypatch.setattr(module, "mem_get_info", refuse)
    found = read_machine(CUDA, tmp_path, tmp_path).accelerator
    assert found.free_bytes == found.total_bytes == 80 * GIB


def test_a_device_without_a_place_on_the_bus() -> None:
    assert read_lanes(torch.device("xpu", 0)) is None
    assert read_lanes(CPU) is None


# ---- other programs ------------------------------------------------------------------------------


def test_the_time_of_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 2 s the machine was busy for 5 s and this program for 1 s: the others took 2 cores."""
    clock = iter([10.0, 12.0])
    machine = iter([SimpleNamespace(user=100, system=50), SimpleNamespace(user=104, system=51)])
    own = iter([SimpleNamespace(user=7, system=1), SimpleNamespace(user=7.5, system=1.5)])
    process = SimpleNamespace(cpu_times=lambda: next(own))
    monkeypatch.setattr(machine_facts.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(machine))
    monkeypatch.setattr(psutil, "Process", lambda: process)
    assert OtherPrograms().cores() == 2.0


def test_a_system_that_does_not_say_how_busy_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(psutil, "cpu_times", refuse)
    monkeypatch.setattr(psutil, "swap_memory", refuse)
    assert OtherPrograms().cores() is None
    assert machine_facts._swap() == (0, 0)
