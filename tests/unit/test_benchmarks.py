"""The GPU suite where there is no GPU: every case's code, and what goes wrong on the way."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import gpu, jobs, overhead, pinned, report, trial  # noqa: E402
from benchmarks.models import fno, transformer  # noqa: E402
from benchmarks.modes import all_modes  # noqa: E402
from benchmarks.record import RESULTS, save  # noqa: E402
from benchmarks.tables import CASES, limit_of_step_s, tables_of  # noqa: E402

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def run_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


# The dry run


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("results")
    done = run_gpu("--device", "cpu", "--tiny", "--no-tests", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def answers(out: Path) -> dict[tuple[str, str], Any]:
    """What each mode answered to each job."""
    found = {}
    for file in out.glob("*.json"):
        for name, entry in json.loads(file.read_text())["results"].items():
            for mode, answer in entry["modes"].items():
                found[name, mode] = answer
    return found


def test_the_dry_run_puts_every_job_to_every_mode(dry_run: tuple[Path, str]) -> None:
    found = answers(dry_run[0])
    assert set(found) == {(job.name, mode) for job in jobs.tiny_jobs() for mode in job.modes}
    assert {mode for _, mode in found} == set(all_modes())
    assert not [key for key, answer in found.items() if "failed" in answer]


def test_only_what_cannot_run_here_is_skipped(dry_run: tuple[Path, str]) -> None:
    skipped = {mode: a["skipped"] for (_, mode), a in answers(dry_run[0]).items() if "skipped" in a}
    assert set(skipped) <= {"torchtune", "trl", "megatron", "fsdp2"}
    for reason in skipped.values():
        assert "not installed" in reason or "accelerator" in reason or "own layers" in reason


def test_every_mode_computes_the_same(dry_run: tuple[Path, str]) -> None:
    found = answers(dry_run[0])
    for (name, mode), answer in found.items():
        if "losses" in answer:
            assert answer["losses"] == found[name, "none"]["losses"], (name, mode)
            assert len(answer["losses"]) == 3
            assert len(answer["samples_s"]) == 2


def test_ebbtide_says_what_it_moved(dry_run: tuple[Path, str]) -> None:
    found = answers(dry_run[0])
    for name, mode in found:
        if "ebbtide" in mode and "step_s" in found[name, mode] and name != "overhead":
            assert found[name, mode]["mode"]["num_saved"] > 0, (name, mode)


def test_results_are_few_files_that_a_person_can_read(dry_run: tuple[Path, str]) -> None:
    out, printed = dry_run
    files = sorted(out.iterdir())
    assert len(files) == 8  # JSON and Markdown for each case
    assert {file.stem.split("_", 2)[2] for file in files} == set(CASES)
    for file in files:
        assert file.stat().st_size < 300_000
    for case in CASES:
        assert f"## {case}" in printed
    assert "| none |" in next(out.glob("*_transformer.md")).read_text()


def test_a_page_can_be_made_of_them(dry_run: tuple[Path, str]) -> None:
    page = report.page(dry_run[0])
    assert "A transformer of about a billion parameters" in page
    assert "x limit" in page
    assert "Nothing here has been measured on an accelerator" in page


# What goes wrong


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_it_says_so() -> None:
    done = run_gpu()
    assert done.returncode == 2
    assert "no accelerator" in done.stderr
    assert "--device cpu --tiny" in done.stderr


def test_a_job_that_does_not_exist_is_named() -> None:
    done = run_gpu("--device", "cpu", "--only", "transformer-8192,warp")
    assert done.returncode == 2
    assert "no job is called warp; there are: link, transformer-8192" in done.stderr


def test_a_module_that_cannot_be_imported_is_named() -> None:
    done = run_gpu("--import", "no_such_device", "--list")
    assert done.returncode == 2
    assert "--import no_such_device: No module named 'no_such_device'" in done.stderr


def suite(out: Path, left_s: float = 1000.0) -> gpu.Suite:
    return gpu.Suite(CPU, out, time.monotonic() + left_s)


JOB = jobs.Job("overhead", "overhead", ("none", "save_on_cpu", "ebbtide"), None, {"tensors": 10})


def answering(suite: gpu.Suite, answer: Callable[[str], dict[str, Any]]) -> list[str]:
    """Let a function answer in place of processes; returns who is asked."""
    asked: list[str] = []

    def ask(_: jobs.Job, mode: str, limit_s: float) -> dict[str, Any]:  # noqa: ARG001
        asked.append(mode)
        return answer(mode)

    suite._ask = ask  # type: ignore[method-assign]
    return asked


def test_one_failure_loses_no_other_result(tmp_path: Path) -> None:
    one = suite(tmp_path)
    broken = jobs.Job("overhead", "no such task", ("none",), None, {})
    one.run_job(broken)
    assert one.failed
    one.run_job(jobs.Job("overhead-2", *("overhead", ("none",), None), JOB_ARGUMENTS))
    found = answers(tmp_path)
    assert found["overhead", "none"]["failed"].startswith("exit 1: ")
    assert "KeyError: 'no such task'" in found["overhead", "none"]["failed"]
    assert found["overhead-2", "none"]["step_s"] > 0


JOB_ARGUMENTS = {"tensors": 10, "warmup": 0, "steps": 1}


def test_a_trial_that_does_not_end_is_stopped() -> None:
    """Nor does a process that it started go on: that would keep the output open."""
    begin_s = time.monotonic()
    output, code = gpu._run(["sh", "-c", "echo begun; sleep 600; echo ended"], 1.5, {})
    assert (output, code) == ("begun\n", None)
    assert time.monotonic() - begin_s < 300


def test_after_the_limit_nothing_begins(tmp_path: Path) -> None:
    late = suite(tmp_path, left_s=0)
    asked = answering(late, lambda _: {"step_s": 1.0})
    late.run_job(JOB)
    assert asked == []
    assert answers(tmp_path)["overhead", "ebbtide"] == {"skipped": "the time limit was reached"}


def test_a_later_call_goes_on_where_one_stopped(tmp_path: Path) -> None:
    first = suite(tmp_path)
    answering(first, lambda mode: {"failed": "x"} if mode == "ebbtide" else {"step_s": 1.0})
    first.run_job(JOB)
    second = suite(tmp_path)
    second.resume(tmp_path)
    asked = answering(second, lambda _: {"step_s": 2.0})
    second.run_job(JOB)
    assert asked == ["ebbtide"]
    found = answers(tmp_path)
    assert [found["overhead", mode]["step_s"] for mode in JOB.modes] == [1.0, 1.0, 2.0]


def test_results_of_another_commit_are_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = suite(tmp_path)
    answering(first, lambda _: {"step_s": 1.0})
    first.run_job(JOB)
    monkeypatch.setenv("EBBTIDE_COMMIT", "another")
    second = suite(tmp_path)
    second.resume(tmp_path)
    assert answering(second, lambda _: {"step_s": 2.0}) == []
    second.run_job(JOB)
    assert answers(tmp_path)["overhead", "none"]["step_s"] == 2.0


# The full suite


def test_jobs_have_names_of_their_own_and_known_modes() -> None:
    names = [job.name for job in jobs.jobs()]
    assert len(set(names)) == len(names)
    for job in jobs.jobs():
        assert job.case in CASES
        assert set(job.modes) <= set(all_modes())
        assert job.modes[0] == "none"


def test_the_link_and_the_largest_goals_come_first() -> None:
    names = [job.name for job in jobs.jobs()]
    assert names[:3] == ["link", "transformer-8192", "fno2d-1024"]
    points = {job.name for job in jobs.jobs() if job.task == "steps"}
    assert points == {
        *(f"transformer-{length}" for length in (2048, 8192, 32768)),
        *(f"fno2d-{n}" for n in (512, 1024, 2048)),
        *(f"fno3d-{n}" for n in (64, 128, 256)),
    }


def test_the_transformer_has_about_a_billion_parameters() -> None:
    """20 x (12 x 2048^2 + biases and norms) + 2 x 32,000 x 2048."""
    with torch.device("meta"):
        model = transformer(20, 2048, 16, 32_000)
    matrices = 20 * 12 * 2048**2 + 2 * 32_000 * 2048
    biases = 20 * (4 * 2048 + 2048 + 4 * 2048)
    assert sum(p.numel() for p in model.parameters()) == matrices + biases
    assert 1.0e9 < matrices < 1.2e9


@pytest.mark.parametrize("dimensions", [2, 3])
def test_the_fno_maps_a_field_to_a_field(dimensions: int) -> None:
    model = fno(channels=4, modes=8, dimensions=dimensions, num_layers=2)
    x = torch.randn(2, 1, *[16] * dimensions)
    assert model(x).shape == x.shape
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_spectral_convolution_keeps_low_modes_only() -> None:
    """With ones for its weights it is a low-pass filter: a slow wave stays, a fast one goes."""
    from benchmarks.models import SpectralConv

    conv = SpectralConv(channels=1, modes=8, dimensions=2)
    with torch.no_grad():
        conv.weight.fill_(1)
    t = torch.arange(32) / 32 * 2 * math.pi
    slow = (torch.cos(2 * t)[:, None] * torch.cos(3 * t)).view(1, 1, 32, 32)
    fast = torch.cos(9 * t).expand(1, 1, 32, 32)
    assert torch.allclose(conv(slow), slow, atol=1e-5)
    assert torch.allclose(conv(fast.contiguous()), torch.zeros(1, 1, 32, 32), atol=1e-5)


# Arithmetic


@settings(max_examples=200, deadline=None)
@given(largest=st.integers(0, 300), most=st.integers(1, 200))
def test_the_search_finds_the_largest(largest: int, most: int) -> None:
    asked: list[int] = []

    def holds(count: int) -> bool:
        asked.append(count)
        return count <= largest

    assert trial.largest_that(holds, most) == min(largest, most)
    assert max(asked) <= most
    assert len(asked) <= 2 * math.log2(most + 1) + 3


def test_the_limit_is_compute_or_the_slower_way() -> None:
    """10 GB down at 50 GB/s take 0.2 s, 30 GB up at 60 GB/s take 0.5 s."""
    link = {"pinned_down_bytes_per_s": 50e9, "pinned_up_bytes_per_s": 60e9}
    answer = {"step_s": 1.0, "down_bytes": 10e9, "up_bytes": 30e9}
    assert limit_of_step_s(answer, {"step_s": 0.1}, link) == 0.5
    assert limit_of_step_s(answer, {"step_s": 0.8}, link) == 0.8
    assert limit_of_step_s(answer, {}, link) is None
    assert limit_of_step_s({"step_s": 1.0}, {"step_s": 0.8}, link) is None


def test_a_table_without_its_baseline_is_a_table() -> None:
    entry = {
        "job": {"task": "steps", "shape": {"model": "fno2d", "size": 4}, "more": {}},
        "modes": {"ebbtide": {"step_s": 1.0, "peak_bytes": 5, "losses": []}},
    }
    assert "| ebbtide | 1000.0 ms |" in tables_of("fno", {"fno2d-4": entry})


# The measurements that need no accelerator


def test_what_the_measurements_put_under_the_engine_has_all_that_it_asks_for() -> None:
    """A store and a device of their own: each must follow the engine's abstract classes."""
    steps = pinned._note_steps(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.ones(64, 8), 1)
    # Saved are the input, the result of tanh, and that of the square's input, which is the same.
    input_bytes = result_bytes = 64 * 8 * 4
    for moves in steps:
        offloads = [move for move in moves if not move.drops]
        assert [move.size_bytes for move in offloads] == [input_bytes, result_bytes]
        assert {move.number for move in moves if move.drops} == {move.number for move in offloads}
    modes = overhead._measure("activation", steps=4, rounds=1, size=16)
    assert all(len(seconds) == 1 for seconds in modes.values())


# The page


def test_the_page_is_what_the_results_say() -> None:
    assert report.PAGE.read_text() == report.page(RESULTS), "run python -m benchmarks.report"


def test_trls_wrapper_attaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as TRL's own class comes without an accelerator: it is made, for streams to come."""
    pytest.importorskip("trl.models.activation_offloading")
    mode = all_modes()["trl"]
    assert mode.missing(torch.device("cpu")) == "needs an accelerator"
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: cpu)
    monkeypatch.setattr(torch, "Stream", lambda *_, **__: None)
    context = mode.attach(nn.Sequential(nn.Linear(4, 4)))
    assert type(context()).__name__ == "OffloadActivations"


def test_a_result_makes_its_folder(tmp_path: Path) -> None:
    """A measurement takes minutes, and would be lost at its end."""
    path = save("nothing", {}, {"seconds": 1}, "| s |\n|---|\n| 1 |", tmp_path / "new" / "results")
    assert json.loads(path.read_text())["results"] == {"seconds": 1}
    assert path.with_suffix(".md").exists()
