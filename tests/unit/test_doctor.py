"""The doctor's command: its JSON, its report, and what could not be measured."""

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
from page_locks import PageLocks

MIB = 2**20
QUICK = ("doctor", "--quick", "--device", "cpu")
GUIDE = Path(__file__).parents[2] / "docs/guides/doctor.md"


@pytest.fixture(autouse=True)
def _shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure for a moment, with little memory."""
    monkeypatch.setattr("ebbtide.tools.doctor.QUICK_S", 0.03)
    monkeypatch.setattr("ebbtide.tools.doctor.ROOM_BYTES", 64 * MIB)


def test_the_hardware_of_this_machine(tmp_path: Path) -> None:
    done = call(*QUICK, "--json", "--store", f"disk:{tmp_path}")
    assert done.exit_code == 0, done.output
    hardware = Hardware.from_json(done.stdout)
    assert hardware.computes_on_host
    assert 1e8 < hardware.matmul_fp32_flops < 1e15
    assert 1e6 < hardware.h2d_bytes_per_s <= hardware.device_memory_bytes_per_s < 1e13
    assert 1e6 < hardware.d2h_bytes_per_s <= 1e12
    assert 0 <= hardware.link_latency_s < 0.1
    assert hardware.device_memory_bytes <= psutil.virtual_memory().total
    assert hardware.disk_write_bytes_per_s > 1e6
    figures = json.loads(done.stdout)["figures"]
    assert {"matmul", "copy", "fft", "links", "disk"} <= figures.keys()
    assert figures["problems"] == {}
    assert figures["facts"]["store"] == str(tmp_path)
    assert isinstance(figures["advice"], list)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    threads = {thread.name for thread in threading.enumerate()}
    before_bytes = psutil.Process().memory_info().rss
    for _ in range(3):
        call(*QUICK, "--store", f"disk:{tmp_path}")
    assert not list(tmp_path.iterdir())
    assert not {thread.name for thread in threading.enumerate()} - threads
    assert psutil.Process().memory_info().rss < before_bytes + 64 * MIB


def test_it_uses_a_small_part_of_memory_and_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With 64 MiB of free RAM and 100 MiB of free disk: 1/8 = 8 MiB and 1/50 = 2 MiB."""
    facts = dataclasses.replace(
        HEALTHY, free_ram_bytes=64 * MIB, store=str(tmp_path), store_free_bytes=100 * MIB
    )
    monkeypatch.setattr("ebbtide.tools.doctor.read_machine", lambda *_: facts)
    rooms: dict[str, int] = {}

    def note(name: str) -> Any:
        def measure(*arguments: Any) -> None:
            rooms[name] = arguments[-1]

        return measure

    for name in ("matmul", "copy", "fft", "links", "disk", "pinning"):
        monkeypatch.setattr(f"ebbtide.tools.doctor.measure_{name}", note(name))
    assert call(*QUICK, "--store", f"disk:{tmp_path}").exit_code == 1  # nothing was measured
    expected = dict.fromkeys(("matmul", "copy", "fft"), 8 * MIB)
    assert rooms == expected | {"links": 2 * MIB, "disk": 2 * MIB}


@pytest.mark.parametrize("refuses", [False, True])
def test_an_accelerator(refuses: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The CPU's lanes, which page-lock and offload to host memory as an accelerator's streams."""
    device = CpuDevice()
    monkeypatch.setattr(device, "computes_on_host", False)
    monkeypatch.setattr("ebbtide.tools.doctor.CpuDevice", lambda: device)
    facts = dataclasses.replace(HEALTHY, **GPU)
    monkeypatch.setattr("ebbtide.tools.doctor.read_machine", lambda *_: facts)
    locks = PageLocks(device, refuses=refuses)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of what cannot be locked, the advice tells
        done = call(*QUICK, "--json", "--store", f"disk:{tmp_path}")
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)["figures"]
    assert figures["problems"] == {}
    assert (figures["pinning"]["refusal"] is not None) == refuses
    assert figures["pinning"]["size_bytes"] == 64 * MIB
    hardware = Hardware.from_json(done.stdout)
    assert not hardware.computes_on_host
    assert hardware.device_memory_bytes == GPU["accelerator_bytes"]
    assert hardware.pinned_limit_bytes == (0 if refuses else HEALTHY.free_ram_bytes)
    assert "pin" in locks.log
    assert locks.size_bytes == 0  # all was given back
    assert not list(tmp_path.iterdir())


def test_the_guide_shows_a_report_as_it_is(tmp_path: Path) -> None:
    """Its sections, and the rows of its tables, are those of a report of today."""
    shown = GUIDE.read_text().partition("$ ebbtide doctor\n")[2].partition("```")[0]
    done = call(*QUICK, "--store", f"disk:{tmp_path}")
    assert done.exit_code == 0, done.output
    titles = [
        [line.split("  ")[0] for line in text.splitlines() if line[:1].strip()]
        for text in (shown, done.stdout)
    ]
    assert titles[0] == titles[1]
    rows = {line.split("  ")[1] for line in done.stdout.splitlines() if line.startswith("  ")}
    for row in ("processor", "locked memory", "matmul float32", "each copy besides"):
        assert row in rows
        assert f"  {row} " in shown


def test_a_report_without_all_figures_is_not_a_success() -> None:
    store = "disk:/proc"  # in which nobody can make a file
    assert call(*QUICK, "--store", store).exit_code == 1
    done = call(*QUICK, "--json", "--store", store)
    assert done.exit_code == 1
    figures = json.loads(done.stdout)["figures"]
    assert figures["problems"].keys() == {"links", "disk"}
    assert figures["matmul"], "the rest was measured"
    with pytest.raises(ebbtide.PolicyError):
        Hardware.from_json(done.stdout)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--device", "abacus"], "abacus"),
        (["--device", "cuda:7"], "cuda:7"),
        (["--store", "cloud"], "cloud"),
        (["--store", "disk:/no/such"], "/no/such: there is no such directory"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], named: str) -> None:
    if torch.cuda.device_count() > 7:
        pytest.skip("there are so many")
    done = call("doctor", *arguments)
    assert done.exit_code == 2
    assert named in done.stderr
