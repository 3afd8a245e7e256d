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
from benchmarks.modes import all_modes  # noqa: E402
from benchmarks.record import RESULTS  # noqa: E402
from benchmarks.tables import limit_of_step_s  # noqa: E402

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


@pytest.mark.slow
def test_the_dry_run_puts_every_job_to_every_mode(dry_run: tuple[Path, str]) -> None:
    found = answers(dry_run[0])
    assert set(found) == {(job.name, mode) for job in jobs.tiny_jobs() for mode in job.modes}
    assert {mode for _, mode in found} == set(all_modes())
    assert not [key for key, answer in found.items() if "failed" in answer]


@pytest.mark.slow
def test_every_mode_computes_the_same(dry_run: tuple[Path, str]) -> None:
    found = answers(dry_run[0])
    for (name, mode), answer in found.items():
        if "losses" in answer:
            assert answer["losses"] == found[name, "none"]["losses"], (name, mode)
            assert len(answer["losses"]) == 3
            assert len(answer["samples_s"]) == 2


@pytest.mark.slow
def test_ebbtide_says_what_it_moved(dry_run: tuple[Path, str]) -> None:
    found = answers(dry_run[0])
    for name, mode in found:
        if "ebbtide" in mode and "step_s" in found[name, mode] and name != "overhead":
            assert found[name, mode]["mode"]["num_saved"] > 0, (name, mode)


@pytest.mark.slow
def test_a_page_can_be_made_of_them(dry_run: tuple[Path, str]) -> None:
    page = report.page(dry_run[0])
    assert "A transformer of about a billion parameters" in page
    assert "x limit" in page
    assert "Nothing here has been measured on an accelerator" in page


# What goes wrong


@pytest.mark.slow
def test_a_job_that_does_not_exist_is_named() -> None:
    done = run_gpu("--device", "cpu", "--only", "transformer-8192,warp")
    assert done.returncode == 2
    assert "no job is called warp; there are: link, transformer-8192" in done.stderr


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


# The measurements that need no accelerator


@pytest.mark.slow
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
