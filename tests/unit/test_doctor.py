"""The doctor's measurements: on this machine, on stand-ins for accelerators, and when they fail."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

import ebbtide
from doctor_cases import GPU, HEALTHY
from ebbtide.devices import CpuDevice, SimulatedDevice
from ebbtide.planning import Hardware
from ebbtide.stores import AbstractStore, DiskStore, PinnedStore, build_store
from ebbtide.tools import examination
from ebbtide.tools import examination as compute_speed
from ebbtide.tools import examination as disk_speed
from ebbtide.tools import examination as link_speed
from ebbtide.tools import machine as machine_facts
from ebbtide.tools import machine as sampling
from ebbtide.tools.doctor import advise, build_report
from ebbtide.tools.examination import (
    QUICK,
    Examination,
    examine,
    examine_device,
    measure_disk,
    measure_links,
    measure_pinning,
)
from ebbtide.tools.machine import Sample, sample
from ebbtide.tools.main import app
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


def test_it_uses_a_small_part_of_the_device(
    monkeypatch: pytest.MonkeyPatch, accelerator: CpuDevice, tmp_path: Path
) -> None:
    """Of 320 MiB that are free on the device 1/8, and no more page-locked memory than that."""
    free = dataclasses.replace(GPU, free_bytes=320 * MIB)
    facts = dataclasses.replace(HEALTHY, accelerator=free)
    monkeypatch.setattr(examination, "read_machine", lambda *_: facts)
    rooms = note_rooms(monkeypatch)
    examine_device(accelerator, tmp_path, QUICK)
    assert rooms["matmul"] == rooms["copy"] == rooms["fft"] == rooms["links"] == 40 * MIB
    assert rooms["pinning"] == QUICK.room_bytes  # of the host's memory


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


@pytest.mark.parametrize("seed", range(3))
def test_the_copies_are_right_on_the_simulated_device(seed: int) -> None:
    """Its checks find a read before the write, and a reuse before the last read."""
    device = SimulatedDevice(seed)
    figures = measure_links(
        device, lambda: PinnedStore(device, 8 * MIB), (64 * KIB, MIB), 0.05, 8 * MIB
    )
    assert figures.down.keys() == figures.up.keys()
    device.finish_copies()


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


def test_large_copies_are_left_out_where_there_is_no_room(tmp_path: Path) -> None:
    device = CpuDevice()
    figures = measure_links(
        device,
        lambda: build_store(device, "disk", tmp_path, None),
        (64 * KIB, MIB, 16 * MIB),
        0.2,
        2 * MIB - 1,
    )
    assert list(figures.down) == [64 * KIB]  # one copy of 1 MiB, both ways, is 2 MiB
    assert figures.both.amount == 2 * 15 * 64 * KIB  # 15 x 64 KiB are less than 1 MiB
    assert not list(tmp_path.iterdir())


def test_the_largest_copies_may_need_all_the_room() -> None:
    """Both ways at once, they take as much memory as there is: that of smaller copies, too."""
    device = SimulatedDevice(0)
    sizes_bytes = (64 * KIB, 512 * KIB, 4 * MIB)
    figures = measure_links(
        device, lambda: PinnedStore(device, 8 * MIB), sizes_bytes, 10.0, 8 * MIB
    )
    assert tuple(figures.down) == sizes_bytes
    assert figures.both.amount == 8 * MIB
    device.finish_copies()


def test_the_latency_is_what_small_copies_cost_besides() -> None:
    """10 GB/s and 20 us: 64 KiB take 26.6 us, 64 MiB take 6.73 ms."""
    times = {size: 20e-6 + size / 10e9 for size in (64 * KIB, 64 * MIB)}
    way = {size: Sample.of(size, [seconds]) for size, seconds in times.items()}
    figures = ebbtide.tools.examination.LinkFigures(way, way, way[64 * KIB])
    assert figures.latency_s == pytest.approx(20e-6, rel=0.01)


def test_pinning_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """For devices that can use only what torch's own allocator has locked."""
    device = CpuDevice()
    monkeypatch.setattr(device, "pins_host_memory", True)
    monkeypatch.setattr(device, "pin", lambda *_: None)
    pinning = measure_pinning(device, MIB)
    assert pinning.size_bytes == MIB
    assert pinning.seconds_per_gib > 0


# ---- disk ----------------------------------------------------------------------------------------


def test_a_file_is_read_from_the_disk(tmp_path: Path) -> None:
    figures = measure_disk(tmp_path, 0.3, 16 * MIB)
    assert 0 < figures.size_bytes <= 16 * MIB
    assert figures.cache_was_emptied
    assert not list(tmp_path.iterdir())


def test_a_slow_disk_is_given_less(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At 16 MiB a second, 4 seconds have room for about 32 MiB, half for writing."""
    clock = itertools.count()
    monkeypatch.setattr(disk_speed.time, "perf_counter", lambda: float(next(clock)))
    figures = measure_disk(tmp_path, 6, 512 * MIB)
    assert figures.size_bytes == 32 * MIB


# ---- what can go wrong ---------------------------------------------------------------------------


def test_a_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    found = examine(CPU, tmp_path / "missing", SHORT)
    assert found.problems.keys() == {"links", "disk"}
    assert "cannot create a file" in found.problems["links"]
    assert found.hardware() is None
    assert found.matmul  # the rest was measured


@pytest.mark.parametrize(
    "error", [RuntimeError("fft: ATen not compiled with MKL support"), NotImplementedError()]
)
def test_a_torch_without_ffts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(compute_speed.torch.fft, "rfft2", refuse)
    found = examine(CPU, tmp_path, SHORT)
    assert found.problems == {"fft": f"{type(error).__name__}: {error}"}
    assert found.hardware().fft_flops is None


def test_a_copy_within_caches_is_no_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With 500 MiB of free RAM, 62.5 MiB may be used: two tensors of 31.2 MiB."""
    facts = dataclasses.replace(HEALTHY, free_ram_bytes=500 * MIB)
    monkeypatch.setattr(examination, "read_machine", lambda *_: facts)
    found = examine(CPU, tmp_path, SHORT)
    assert "copies of 31.2 MiB stay in caches" in found.problems["copy"]
    assert found.hardware() is None


def test_a_type_that_the_device_does_not_compute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = torch.mm

    def mm(left: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        if left.dtype is torch.bfloat16:
            raise RuntimeError('"addmm_impl_cpu_" not implemented for BFloat16')
        return plain(left, *rest, **more)

    monkeypatch.setattr(compute_speed.torch, "mm", mm)
    found = examine(CPU, tmp_path, SHORT)
    assert found.problems.keys() == {"matmul bf16"}
    assert found.hardware().matmul_bf16_flops is None


def test_the_store_is_closed_whatever_happens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built, closed = [], []
    monkeypatch.setattr(DiskStore, "close", lambda store: closed.append(store))

    def build(*arguments: Any) -> AbstractStore:
        built.append(build_store(*arguments))
        return built[-1]

    monkeypatch.setattr(examination, "build_store", build)
    examine(CPU, tmp_path, SHORT)
    assert closed == built != []
    before = len(built)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(link_speed, "sample", interrupt)
    with pytest.raises(KeyboardInterrupt):
        examine(CPU, tmp_path, SHORT)
    assert closed == built
    assert len(built) == before + 1


def test_a_disk_that_fills(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    found = examine(CPU, tmp_path, SHORT)
    assert "no room for" in found.problems["links"]
    assert "No space left" in found.problems["disk"]


def test_tf32_puts_the_setting_back() -> None:
    before = torch.get_float32_matmul_precision()
    compute_speed.measure_tf32(CpuDevice(), 0.01, MIB)
    assert torch.get_float32_matmul_precision() == before


# ---- samples -------------------------------------------------------------------------------------


def test_the_first_repetition_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([9.0, 2.0, 1.0, 4.0])
    clock = itertools.count()
    monkeypatch.setattr(sampling.time, "perf_counter", lambda: float(next(clock)))
    found = sample(8.0, lambda: next(times), 1000, most=3)
    assert found.repetitions == 3
    assert found.best_per_s == 8.0
    assert found.median_per_s == 4.0


def test_at_least_one_repetition_counts() -> None:
    assert sample(1.0, lambda: 5.0, 0).repetitions == 1


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "QUICK", SHORT)


@pytest.mark.usefixtures("fast")
def test_the_command_prints_a_report(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["doctor", "--quick", "--device", "cpu", "--store", f"disk:{tmp_path}"]
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("This machine\n")
    assert max(map(len, done.stdout.splitlines())) <= 80 or len(str(tmp_path)) > 50


@pytest.mark.usefixtures("fast")
def test_the_command_prints_hardware(tmp_path: Path) -> None:
    arguments = ["doctor", "--quick", "--json", "--device", "cpu", "--store", f"disk:{tmp_path}"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert Hardware.from_json(done.stdout).computes_on_host
    figures = json.loads(done.stdout)["figures"]
    assert isinstance(figures["advice"], list)
    assert figures["facts"]["store"]["path"] == str(tmp_path)


@pytest.mark.usefixtures("fast")
def test_a_report_without_all_figures_is_not_a_success(tmp_path: Path) -> None:
    store = f"disk:{tmp_path / 'missing'}"
    done = CliRunner().invoke(app, ["doctor", "--quick", "--device", "cpu", "--store", store])
    assert done.exit_code == 1
    assert '"Not measured"' in done.stderr
    assert "Not measured" in done.stdout
    done = CliRunner().invoke(
        app, ["doctor", "--quick", "--json", "--device", "cpu", "--store", store]
    )
    assert done.exit_code == 1
    assert "the figures are incomplete" in done.stderr
    with pytest.raises(ebbtide.PolicyError, match="could not be measured in full: links: cannot"):
        Hardware.from_json(done.stdout)


def test_a_system_without_a_directory_for_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`tempfile` finds none if all disks are read-only."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.gettempdir", refuse)
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    monkeypatch.chdir(tmp_path)
    found = examine(CPU, None, SHORT)
    assert found.problems.keys() == {"links", "disk"}
    assert "Read-only file system" in found.problems["disk"]
    assert "Nothing can be offloaded" in advise(found)[0]


@pytest.mark.usefixtures("fast")
def test_a_mac_is_examined_on_its_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ebbtide refuses models on Apple's GPU, which has one stream."""
    mps = torch.device("mps")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: mps)
    done = CliRunner().invoke(app, ["doctor", "--quick", "--store", f"disk:{tmp_path}"])
    assert done.exit_code == 0, done.output
    assert "device          the CPU" in done.stdout


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
    done = CliRunner().invoke(app, ["doctor", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    code = "import sys; from ebbtide.tools.main import app; sys.argv[0] = 'ebbtide'; app()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "doctor", "--device", "cpu", "--store", f"disk:{tmp_path}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(ebbtide.__file__).parents[1])},
    )
    deadline_s = time.monotonic() + 100
    files = Path(f"/proc/{process.pid}/fd")
    while not _has_open_file(files, tmp_path) and time.monotonic() < deadline_s:
        time.sleep(0.05)  # until it has its file, that is, while it measures the links
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted; nothing was left behind" in errors
    assert "Traceback" not in errors
    assert output == ""
    assert not list(tmp_path.iterdir())


def _has_open_file(files: Path, directory: Path) -> bool:
    try:
        return any(os.readlink(file).startswith(str(directory)) for file in files.iterdir())
    except OSError:
        return False
