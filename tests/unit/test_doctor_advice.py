"""What the doctor advises, each time for one thing that is wrong, and what its report says."""

from __future__ import annotations

import re

import pytest

from doctor_cases import GIB, MIB, Examination, links, on_cpu, on_gpu, pinning
from ebbtide.planning import Hardware
from ebbtide.tools.doctor import advise, build_report


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that glibc returns."""
    monkeypatch.setattr("ebbtide.stores.measured_memory._refusal", lambda: None)


REFUSED = pinning(0.4, "cudaHostRegister: out of memory")
CASES = {
    "tmpfs": (
        on_cpu(store_filesystem="tmpfs"),
        "tmpfs: its files are kept in RAM.*disk:/a/dir",
    ),
    "small disk": (
        on_cpu(store_free_bytes=10 * GIB),
        "10.00 GiB free, less than the RAM of 128",
    ),
    "read-only": (
        on_cpu({"links": None, "problems": {"links": "cannot create a file; name a directory"}}),
        "Nothing can be offloaded to /scratch: cannot create a file. Name a directory.*TMPDIR",
    ),
    "a GPU without its torch": (
        on_cpu(has_unseen_gpu=True),
        "has the driver of a GPU that torch 2.13.0",
    ),
    "memlock": (
        on_gpu({"pinning": REFUSED}, memlock_bytes=8 * MIB),
        r"refused to page-lock 256.0 MiB.*The limit on locked memory is 8.0 MiB; raise it",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_illness_has_one_advice(name: str) -> None:
    found, expected = CASES[name]
    advice = list(advise(found))
    matching = [text for text in advice if re.search(expected, text)]
    assert len(matching) == 1, advice
    assert len(advice) == 1, advice


@pytest.mark.parametrize("found", [on_cpu(), on_gpu()])
def test_a_healthy_machine_needs_no_advice(found: Examination) -> None:
    assert list(advise(found)) == []
    report = build_report(found, [])
    assert "Nothing was found that slows ebbtide here." in report


# ---- the hardware --------------------------------------------------------------------------------


def test_the_hardware_of_a_cpu() -> None:
    hardware = on_cpu().hardware()
    assert hardware.computes_on_host
    assert hardware.device_memory_bytes == hardware.host_memory_bytes == 128 * GIB
    assert hardware.pinned_limit_bytes == 0
    assert hardware.d2h_bytes_per_s == pytest.approx(8e9)
    assert hardware.h2d_bytes_per_s == pytest.approx(40e9)  # mapped: as fast as memory, not 500
    assert hardware.duplex_bytes_per_s == pytest.approx(20e9)
    assert hardware.link_latency_s == pytest.approx(10e-6)
    assert hardware.disk_write_bytes_per_s == pytest.approx(2e9)
    assert hardware.matmul_flops("bfloat16") == pytest.approx(2e12)
    assert all(source.startswith("measured: ") for source in hardware.sources.values())
    assert Hardware.from_json(hardware.to_json()) == hardware


def test_the_hardware_of_an_accelerator() -> None:
    hardware = on_gpu(total_ram_bytes=64 * GIB).hardware()
    assert not hardware.computes_on_host
    assert hardware.device_memory_bytes == 80 * GIB
    assert hardware.host_memory_bytes == 64 * GIB
    assert hardware.pinned_limit_bytes == 100 * GIB  # what is free
    assert hardware.h2d_bytes_per_s == pytest.approx(25e9)
    assert hardware.name == "Test GPU"


def test_both_ways_are_never_faster_than_their_sum() -> None:
    """Noise can make them look so, and a plan would believe it."""
    hardware = on_gpu({"links": links(25e9, 25e9, 60e9)}).hardware()
    assert hardware.duplex_bytes_per_s == pytest.approx(50e9)


@pytest.mark.parametrize("missing", ["links", "copy", "matmul"])
def test_no_hardware_without_what_a_plan_needs(missing: str) -> None:
    found = on_cpu({missing: {} if missing == "matmul" else None})
    assert found.hardware() is None
    assert build_report(found, list(advise(found)))


@pytest.mark.parametrize("missing", ["fft", "disk"])
def test_hardware_without_the_rest(missing: str) -> None:
    found = on_cpu({missing: None, "problems": {missing: "RuntimeError: not compiled with MKL"}})
    assert found.hardware() is not None
    report = build_report(found, list(advise(found)))
    assert f"{missing}: RuntimeError: not compiled with MKL" in report


# ---- the report ----------------------------------------------------------------------------------


@pytest.mark.parametrize("found", [case for case, _ in CASES.values()], ids=list(CASES))
def test_reports_fit_80_columns(found: Examination) -> None:
    report = build_report(found, list(advise(found)))
    assert max(map(len, report.splitlines())) <= 80
    assert report.splitlines()[0] == "This machine"
    assert "What ebbtide can do here" in report


def test_the_last_lines_say_what_the_figures_mean() -> None:
    """25 GB/s: 1 GiB in 43 ms, both ways 2 GiB / 45 GB/s = 48 ms; 5e13 / 25e9 = 2000 FLOP."""
    text = " ".join(build_report(on_gpu(), []).partition("What ebbtide can do")[2].split())
    for part in (
        "1 GiB of activations leaves in 42.9 ms and comes back in 42.9 ms",
        "1 GiB each way at once takes 47.7 ms",
        "computes 2,000 FLOP of float32 or 32,000 FLOP of bfloat16 matrix products",
        "computes for 100 ms hides 2.33 GiB.",
    ):
        assert part in text
    assert "page cache" not in text
    assert "256.0 MiB were locked, 200 ms for each GiB" in build_report(on_gpu(), [])
