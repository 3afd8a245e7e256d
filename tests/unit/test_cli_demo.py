"""The demo: its figures, its report, and what it says when it cannot run."""

import base64
import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from commands import call

# 4 samples x 32 channels x 64 x 64 nodes x 4 B = 2 MiB: the smallest size that is offloaded.
TINY = ["--resolution", "64", "--batch-size", "4", "--steps", "3"]


# The whole demo


class Run(NamedTuple):
    """A run of the demo, whose output went to pipes.

    Attributes:
        report: what it printed on standard output.
        progress: and on standard error.
        out: where its results are.
    """

    report: str
    progress: str
    out: Path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    pytest.importorskip("neuralop")
    out = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "ebbtide.tools.main", "demo", "--device", "cpu", *TINY]
    done = subprocess.run(
        [*command, "--out", out],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200", "EBBTIDE_CACHE": str(out / "data")},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return Run(done.stdout, done.stderr, out)


@pytest.fixture(scope="module")
def figures(run: Run) -> dict:
    return json.loads((run.out / "demo.json").read_text())


@pytest.mark.slow
def test_report_fits_80_columns_even_on_a_wide_terminal(run: Run) -> None:
    report = run.report.partition("Figures:")[0]
    assert "Peak RSS" in report
    assert max(map(len, report.splitlines())) <= 80


@pytest.mark.slow
def test_what_limits_it_is_said(run: Run) -> None:
    for text in ("same bits", "In each step", "while the model computes"):
        assert text in run.report


@pytest.mark.slow
def test_the_page_shows_both_modes(run: Run) -> None:
    page = (run.out / "demo.html").read_text()
    packed = re.search(r'id="data">([^<]*)<', page)
    assert packed is not None
    runs = json.loads(gzip.decompress(base64.b64decode(packed[1])))["runs"]
    records = [each["ebbtide"] for each in runs]
    assert [each["title"] for each in records] == ["no offload", "ebbtide"]
    assert all(each["memory"] is not None for each in records)


@pytest.mark.slow
def test_figures_are_complete(figures: dict) -> None:
    assert list(figures)[:2] == ["format", "version"]
    assert set(figures["modes"]) == {"none", "ebbtide"}
    assert figures["configuration"]["resolution"] == 64
    assert figures["environment"]["torch"] == torch.__version__
    assert {"cpu", "cores", "Python", "device", "system"} <= set(figures["environment"])
    for mode in figures["modes"].values():
        assert len(mode["steps"]) == 3
        assert mode["idle_bytes"] < mode["peak_bytes"]
        assert all(step["duration_s"] > 0 and step["peak_bytes"] > 0 for step in mode["steps"])


@pytest.mark.slow
def test_ebbtide_offloads_and_changes_no_bit(figures: dict) -> None:
    plain, offloaded = figures["modes"]["none"], figures["modes"]["ebbtide"]
    assert figures["first_difference"] is None
    # About 27 unique tensors of 2 MiB, less 12 that GELUs give again.
    assert 25 * 2**20 < offloaded["steps"][1]["stats"]["offloaded_bytes"] < 40 * 2**20
    for one, other in zip(plain["steps"], offloaded["steps"], strict=True):
        assert one["loss"] == other["loss"]
        assert one["gradients_sha256"] == other["gradients_sha256"]
    # Steps differ from each other, so equal hashes mean something.
    assert plain["steps"][0]["gradients_sha256"] != plain["steps"][1]["gradients_sha256"]
    assert plain["parameters_sha256"] == offloaded["parameters_sha256"]


# What cannot run


def refused(options: list[str], out: Path) -> str:
    """What is printed on stderr when the demo refuses with exit code 2."""
    done = call("demo", "--out", str(out), *options)
    assert done.exit_code == 2, done.output
    return done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--resolution", "8"], "--resolution must be 32 or more"),
        (["--batch-size", "0"], "--batch-size must be 1 or more"),
        (["--steps", "2"], "--steps must be 3 or more"),
        (["--device", "warp"], "'warp' is not a torch device"),
    ],
)
def test_wrong_option_is_one_line(options: list[str], says: str, tmp_path: Path) -> None:
    message = refused(options, tmp_path)
    assert says in message
    assert message.count("\n") == 1


def test_neuraloperator_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = [name for name in sys.modules if name.startswith("neuralop.")]
    for name in ("neuralop", *loaded):
        monkeypatch.setitem(sys.modules, name, None)
    assert 'pip install "ebbtide[neuralop]"' in refused([], tmp_path)


@pytest.mark.slow
def test_store_that_does_not_fit_is_refused_by_the_worker(tmp_path: Path) -> None:
    pytest.importorskip("neuralop")
    message = refused([*TINY, "--device", "cpu", "--store", "host"], tmp_path)
    assert 'store="host"' in message
    assert "Traceback" not in message


def test_a_difference_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.tools.demo.run_demo", lambda *_, **__: False)
    done = call("demo", "--out", str(tmp_path), "--device", "cpu")
    assert done.exit_code == 1
