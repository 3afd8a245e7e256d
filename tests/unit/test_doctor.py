"""The doctor's measurements: on this machine, on stand-ins for accelerators, and when they fail."""

from __future__ import annotations

import dataclasses
import json
import threading
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import ebbtide
from commands import call
from doctor_cases import GPU, HEALTHY
from ebbtide.devices import CpuDevice
from ebbtide.planning import Hardware
from ebbtide.tools import examination
from ebbtide.tools import machine as machine_facts
from ebbtide.tools.doctor import advise, build_report
from ebbtide.tools.examination import (
    QUICK,
    Examination,
    examine,
    examine_device,
)
from page_locks import PageLocks

KIB, MIB = 2**10, 2**20
CPU = torch.device("cpu")
SHORT = QUICK._replace(compute_s=0.02, links_s=0.1, disk_s=0.1)._replace(
    sizes_bytes=(64 * KIB, MIB), room_bytes=64 * MIB, disk_bytes=8 * MIB
)


# ---- this machine --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Examination:
    return examine(CPU, tmp_path_factory.mktemp("store"), QUICK)


def test_a_quick_examination_of_this_machine(found: Examination) -> None:
    assert found.problems == {}
    hardware = found.hardware()
    assert hardware.computes_on_host
    assert 1e8 < hardware.matmul_fp32_flops < 1e15
    assert 1e7 < hardware.device_memory_bytes_per_s < 1e13
    for rate in (hardware.h2d_bytes_per_s, hardware.d2h_bytes_per_s):
        assert 1e6 < rate <= 1e12
    assert hardware.h2d_bytes_per_s <= hardware.device_memory_bytes_per_s
    assert hardware.device_memory_bytes <= psutil.virtual_memory().total
    assert hardware.disk_write_bytes_per_s > 1e6
    assert found.pinning is None  # a CPU needs none
    assert found.duration_s < 60


def test_the_json_has_all_figures(found: Examination) -> None:
    figures = json.loads(json.dumps(found.figures()))
    assert {"facts", "matmul", "copy", "fft", "links", "disk", "problems"} <= figures.keys()
    assert figures["facts"]["cores"] == machine_facts.usable_cores()
    assert figures["links"]["down"].keys() == figures["links"]["up"].keys()
    text = found.hardware().to_json(figures)
    assert Hardware.from_json(text) == found.hardware()


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    threads = {thread.name for thread in threading.enumerate()}
    before_bytes = psutil.Process().memory_info().rss
    for _ in range(3):
        examine(CPU, tmp_path, SHORT)
    assert not list(tmp_path.iterdir())
    left = {thread.name for thread in threading.enumerate()} - threads
    assert not left
    assert psutil.Process().memory_info().rss < before_bytes + 64 * MIB


def test_it_uses_a_small_part_of_memory_and_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With 64 MiB of free RAM and 100 MiB of free disk: 1/8 = 8 MiB and 1/50 = 2 MiB."""
    store = machine_facts.Directory(str(tmp_path), "ext4", 100 * MIB)
    facts = dataclasses.replace(HEALTHY, free_ram_bytes=64 * MIB, store=store)
    monkeypatch.setattr(examination, "read_machine", lambda *_: facts)
    rooms = note_rooms(monkeypatch)
    examine(CPU, tmp_path, QUICK)
    expected = dict.fromkeys(("matmul", "copy", "fft"), 8 * MIB)
    assert rooms == expected | {"links": 2 * MIB, "disk": 2 * MIB}


def note_rooms(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Measure nothing, but note how much memory or disk each measurement may use."""
    rooms: dict[str, int] = {}

    def note(name: str) -> Any:
        def measure(*arguments: Any) -> None:
            rooms[name] = arguments[-1]

        return measure

    for name in ("matmul", "copy", "fft", "links", "disk", "pinning"):
        monkeypatch.setattr(examination, f"measure_{name}", note(name))
    return rooms


# ---- an accelerator ------------------------------------------------------------------------------


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> CpuDevice:
    """The CPU's lanes, which page-lock and offload to host memory as an accelerator's streams."""
    device = CpuDevice()
    monkeypatch.setattr(device, "computes_on_host", False)
    facts = dataclasses.replace(HEALTHY, accelerator=GPU)
    monkeypatch.setattr(examination, "read_machine", lambda *_: facts)
    return device


def test_an_accelerator_is_examined(accelerator: CpuDevice, tmp_path: Path) -> None:
    locks = PageLocks(accelerator)
    found = examine_device(accelerator, tmp_path, SHORT)
    assert found.problems == {}
    assert found.pinning.refusal is None
    assert found.pinning.size_bytes == 64 * MIB
    hardware = found.hardware()
    assert not hardware.computes_on_host
    assert hardware.device_memory_bytes == GPU.total_bytes
    assert hardware.pinned_limit_bytes == HEALTHY.free_ram_bytes
    assert "pin" in locks.log
    assert locks.size_bytes == 0  # all was given back
    assert not list(tmp_path.iterdir())


def test_an_accelerator_whose_memory_cannot_be_locked(
    accelerator: CpuDevice, tmp_path: Path
) -> None:
    PageLocks(accelerator, refuses=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the advice says it
        found = examine_device(accelerator, tmp_path, SHORT)
    assert found.problems == {}
    assert found.pinning.refusal is not None
    assert found.hardware().pinned_limit_bytes == 0


def test_the_guide_shows_a_report_as_it_is(found: Examination) -> None:
    """Its sections, and the rows of its tables, are those of a report of today."""
    guide = Path(__file__).parents[2] / "docs/guides/doctor.md"
    shown = guide.read_text().partition("$ ebbtide doctor\n")[2].partition("```")[0]
    report = build_report(found, advise(found))
    assert max(map(len, shown.splitlines())) <= 80
    titles = [line.split("  ")[0] for line in shown.splitlines() if line[:1].strip()]
    assert titles == [line.split("  ")[0] for line in report.splitlines() if line[:1].strip()]
    rows = {line.split("  ")[1] for line in report.splitlines() if line.startswith("  ")}
    for row in (
        "processor",
        "locked memory",
        "matmul float32",
        "copy, read + written",
        "each copy besides",
    ):
        assert row in rows
        assert f"  {row} " in shown


# ---- links ---------------------------------------------------------------------------------------


# ---- disk ----------------------------------------------------------------------------------------


# ---- what can go wrong ---------------------------------------------------------------------------


def test_a_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    found = examine(CPU, tmp_path / "missing", SHORT)
    assert found.problems.keys() == {"links", "disk"}
    assert "cannot create a file" in found.problems["links"]
    assert found.hardware() is None
    assert found.matmul  # the rest was measured


# ---- samples -------------------------------------------------------------------------------------


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "QUICK", SHORT)


@pytest.mark.usefixtures("fast")
def test_the_command_prints_a_report(tmp_path: Path) -> None:
    done = call("doctor", "--quick", "--device", "cpu", "--store", f"disk:{tmp_path}")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("This machine\n")
    assert max(map(len, done.stdout.splitlines())) <= 80 or len(str(tmp_path)) > 50


@pytest.mark.usefixtures("fast")
def test_the_command_prints_hardware(tmp_path: Path) -> None:
    arguments = ["doctor", "--quick", "--json", "--device", "cpu", "--store", f"disk:{tmp_path}"]
    done = call(*arguments)
    assert done.exit_code == 0, done.output
    assert Hardware.from_json(done.stdout).computes_on_host
    figures = json.loads(done.stdout)["figures"]
    assert isinstance(figures["advice"], list)
    assert figures["facts"]["store"]["path"] == str(tmp_path)


@pytest.mark.usefixtures("fast")
def test_a_report_without_all_figures_is_not_a_success(tmp_path: Path) -> None:
    store = f"disk:{tmp_path / 'missing'}"
    done = call("doctor", "--quick", "--device", "cpu", "--store", store)
    assert done.exit_code == 1
    assert '"Not measured"' in done.stderr
    assert "Not measured" in done.stdout
    done = call("doctor", "--quick", "--json", "--device", "cpu", "--store", store)
    assert done.exit_code == 1
    assert "the figures are incomplete" in done.stderr
    with pytest.raises(ebbtide.PolicyError):
        Hardware.from_json(done.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "abacus"], "'abacus' is not a torch device"),
        (["--device", "cuda:7"], "--device cuda:7: "),
        (["--store", "cloud"], "store='cloud' is not one of"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], message: str) -> None:
    if torch.cuda.device_count() > 7:
        pytest.skip("there are so many")
    done = call("doctor", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
