"""`ebbtide run --report`: a page on the last step of each model."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from run_cases import SMALL, make, session_of, step
from test_cli_run import TRAIN, run, script

pytestmark = pytest.mark.slow


@contextmanager
def watching(report: Path | None, *, trace: bool = True) -> Iterator[Any]:
    """Watch what the block trains, write the report after it, and detach all models."""
    session = session_of(report=report, activations=SMALL, trace=trace)
    session.begin()
    try:
        yield session
    finally:
        session.report()
        for model in session.finder.found:
            if model.is_offloaded:
                model.detach("the test is over")


def test_a_script_leaves_a_page_with_its_last_step(tmp_path: Path) -> None:
    name = script(tmp_path, TRAIN + "train(3)\n")
    found = run("--report", "run.html", name, at=tmp_path)
    assert found.returncode == 0, found.stderr
    page = (tmp_path / "run.html").read_text()
    assert ">Sequential</h1>" in page
    assert 'data-chart="lanes"' in page
    assert "offloaded" in page


def test_a_script_without_a_finished_step_leaves_none_and_says_so(tmp_path: Path) -> None:
    name = script(tmp_path, "import torch")
    found = run("--report", "run.html", name, at=tmp_path)
    assert not (tmp_path / "run.html").exists()
    assert "run.html was not written, because no model has finished a step" in found.stderr


def test_every_model_is_a_run_of_the_page_and_also_one_that_is_gone(tmp_path: Path) -> None:
    with watching(tmp_path / "run.html") as session:
        first, second = make(), make(depth=5)
        step(first)
        step(second)
        del first
        gc.collect()
        gone, alive = (model.record() for model in session.finder.found)
    assert gone is not None and alive is not None
    assert [each.label for each in gone.events if each.what == "forward"][:3] == ["F0", "F1", "F2"]
    assert gone.stats is not None and gone.stats.offloaded_bytes
    assert len(alive.layers) >= 5 > len(gone.layers)
    page = (tmp_path / "run.html").read_text()
    assert "Net (1)" in page and "Net (2)" in page
