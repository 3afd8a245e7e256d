"""`benchmarks.gpu --tiny` on the software accelerator: every case and mode, tables and page."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import jobs, report  # noqa: E402
from benchmarks.modes import all_modes  # noqa: E402
from benchmarks.record import RESULTS  # noqa: E402
from benchmarks.tables import CASES  # noqa: E402

# About 25 processes, each of which imports torch and loads the device.
LIMIT_S = 1500
pytestmark = pytest.mark.timeout(LIMIT_S + 60)

WARNING = "**These are not figures of a GPU.**"
MAY_BE_SKIPPED = {
    "torchtune": ("torchtune is not installed", "torchao is not installed", "works on cuda only"),
    "trl": ("trl is not installed",),
    "megatron": ("megatron is not installed", "works inside Megatron-core's own layers only"),
    "fsdp2": ("torch has no process group for softdevice",),
}
"""Whatever else is skipped is a defect."""
MOVES_NOTHING = {"none", "checkpoint", "ebbtide-default"}  # the last one, as all of it fits


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT / "tests" / "softdevice"), *sys.path]
    command = [sys.executable, "-m", "benchmarks.gpu", "--import", "softdevice.loaded", *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def tiny_run(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("results")
    order = request.config.option.order
    arguments = ("--tiny", "--no-tests", "--limit-s", str(LIMIT_S), "--out", str(out))
    done = _run(*arguments, SOFTDEVICE_ORDER=order)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def _answers(out: Path) -> dict[tuple[str, str], Any]:
    """What each mode answered to each job."""
    found = {}
    for file in out.glob("*.json"):
        for name, entry in json.loads(file.read_text())["results"].items():
            for mode, answer in entry["modes"].items():
                found[name, mode] = answer
    return found


def test_every_job_runs_in_every_mode(tiny_run: tuple[Path, str]) -> None:
    found = _answers(tiny_run[0])
    assert set(found) == {(job.name, mode) for job in jobs.tiny_jobs() for mode in job.modes}
    assert {mode for _, mode in found} == set(all_modes())
    assert not [key for key, answer in found.items() if "failed" in answer]
    for (name, mode), answer in found.items():
        if "skipped" in answer:
            assert answer["skipped"].startswith(MAY_BE_SKIPPED.get(mode, ())), (name, mode, answer)


def test_every_mode_computes_the_same_and_moves_what_it_says(tiny_run: tuple[Path, str]) -> None:
    found = _answers(tiny_run[0])
    steps = {key: answer for key, answer in found.items() if "losses" in answer}
    assert {name for name, _ in steps} == {"transformer-64", "fno2d-32", "fno3d-16"}
    for (name, mode), answer in steps.items():
        plain = found[name, "none"]["losses"]
        # A mode that follows a budget takes a few steps more, until its steps are alike.
        assert len(answer["losses"]) == len(plain) + all_modes()[mode].settling_steps
        assert answer["losses"][: len(plain)] == plain, (name, mode)
        assert answer["peak_bytes"] > 0
        moved = answer["down_bytes"], answer["up_bytes"]
        if "%" not in mode:  # a budget decides what moves
            assert (min(moved) > 0) == (mode not in MOVES_NOTHING), (name, mode, moved)
        if mode == "ebbtide":
            assert answer["down_bytes"] == answer["mode"]["offloaded_bytes"]
            assert answer["up_bytes"] == answer["mode"]["reloaded_bytes"]


def test_the_memory_limit_decides_what_trains(tiny_run: tuple[Path, str]) -> None:
    found = _answers(tiny_run[0])
    assert found["fno2d-capacity-size-1", "ebbtide"]["largest"] == 16


def test_the_link_is_measured_with_page_locked_memory(tiny_run: tuple[Path, str]) -> None:
    link = _answers(tiny_run[0])["link", "none"]
    assert link["pinned_both_bytes_per_s"] > 0
    assert "ebbtide, mapped and registered" in link["pinning_s_per_gib"]


def test_nobody_can_take_the_results_for_a_gpus(tiny_run: tuple[Path, str]) -> None:
    """Each table that is printed, each Markdown file and each section of the page says so."""
    out, printed = tiny_run
    assert printed.count(WARNING) == len(CASES)
    files = list(out.iterdir())
    assert {file.stem.split("_", 2)[2] for file in files} == set(CASES)
    for file in files:
        assert "_an-accelerator-in-software_" in file.name
        if file.suffix == ".md":
            assert WARNING in file.read_text()
    page = report.page(out)
    assert page.count("\n## ") == page.count(WARNING) == len(CASES)
    assert "Nothing here has been measured on an accelerator" in page


def test_results_are_refused_among_those_of_the_project() -> None:
    done = _run("--tiny", "--no-tests", "--only", "overhead")
    assert done.returncode == 2
    assert "is an accelerator in software" in done.stderr
    assert "--out DIR" in done.stderr


def test_no_seconds_of_a_software_accelerator_are_committed() -> None:
    """How budgets settle there is, in bytes and in virtual time."""
    for file in RESULTS.glob("*.json"):
        if file.stem.endswith("_settling-softdevice"):
            continue
        facts = json.loads(file.read_text())["environment"]
        assert not facts.get("in_software"), file.name
        assert "software" not in file.name
