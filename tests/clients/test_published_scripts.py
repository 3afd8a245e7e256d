"""Scripts as their projects publish them run under `ebbtide run` as they run under Python."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from published import PUBLISHED, SCRIPTS, Published, Ran, run

MIB = 2**20
RUN_ALL = os.environ.get("EBBTIDE_CLIENTS") == "all"


def test_each_script_is_run_and_knows_nothing_of_ebbtide() -> None:
    scripts = sorted(path.name for path in SCRIPTS.glob("*.py"))
    assert scripts == sorted(each.script for each in PUBLISHED)
    for name in scripts:
        assert "import ebbtide" not in (SCRIPTS / name).read_text()


@pytest.mark.slow
@pytest.mark.skipif(not RUN_ALL, reason="takes minutes: make clients")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.script)
def test_a_published_script_runs_unedited(published: Published, tmp_path: Path) -> None:
    for package in published.packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}, which is not installed")
    plain = run(published, tmp_path / "plain", watched=False)
    watched = run(published, tmp_path / "watched")
    _same_numbers(plain, watched)
    assert watched.peak_bytes < 0.99 * plain.peak_bytes
    assert _offloaded_bytes(watched) > MIB

    # With room for all, so that no single step can be over; the first steps offload all the same.
    budget = f"{plain.peak_bytes // MIB + 200}MiB"
    planned = run(published, tmp_path / "planned", "--budget", budget)
    _same_numbers(plain, planned)
    assert planned.report["peak_bytes"] < planned.report["budget_bytes"]


def _same_numbers(plain: Ran, watched: Ran) -> None:
    assert watched.printed == plain.printed
    assert watched.left == plain.left


def _offloaded_bytes(ran: Ran) -> int:
    (model,) = ran.report["models"]
    step = model["last_step"]
    return int(step["offloaded_bytes"]) + int(step["rebuilt_bytes"])
