"""The versions in the metadata are those that `make versions` tests."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import run_versions
from ebbtide.interop.training_offload import TrainingOffload
from ebbtide.version import TESTED_FRAMEWORKS, TESTED_TORCH

ROOT = Path(__file__).parents[2]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


def test_the_metadata_admits_what_is_tested() -> None:
    oldest, newest = run_versions.supported_torch()
    assert (oldest, newest) == ("2.11", "2.15") == TESTED_TORCH
    assert f'"torch>={oldest}"' in (ROOT / "pyproject.toml").read_text()
    minors = [int(version.split(".")[1]) for version in (oldest, newest)]
    for version in (run_versions.pinned_torch(), torch.__version__):
        assert minors[0] <= int(version.split(".")[1]) <= minors[1]
    requirement = re.search(r'requires-python = ">=(\S+)"', (ROOT / "pyproject.toml").read_text())
    assert requirement is not None
    assert requirement[1] == run_versions.supported_pythons()[0]
    assert f"{sys.version_info[0]}.{sys.version_info[1]}" in run_versions.supported_pythons()


def test_a_torch_newer_than_what_is_tested_is_warned_of_once() -> None:
    program = (
        "import warnings, torch, ebbtide; warnings.simplefilter('always')\n"
        "torch.__version__ = '2.99.0'\n"
        "for _ in range(2): ebbtide.offload(torch.nn.Linear(8, 8))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.count("[ebbtide: untested-version]") == 1, done.stderr


def test_frameworks_newer_than_what_is_tested_are_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers, "__version__", "6.0.0.dev0")
    offload, model = TrainingOffload(), torch.nn.Linear(8, 8)
    with pytest.warns(RuntimeWarning) as told:
        offload.begin(model, run=model)
    offload.end()
    texts = [str(each.message) for each in told]
    assert [text.endswith("[ebbtide: untested-version]") for text in texts] == [True], texts


def test_the_tested_frameworks_are_those_of_the_constraints() -> None:
    pinned = dict(re.findall(r"^(\w+)==(\d+\.\d+)", CONSTRAINTS, re.MULTILINE))
    assert {name: pinned[name] for name in TESTED_FRAMEWORKS} == TESTED_FRAMEWORKS


def test_both_ends_are_tested_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    pinned = run_versions.pinned_torch()
    assert [str(row) for row in run_versions.rows(["3.10", "3.11", "3.12", "3.13"])] == [
        "Python 3.10, torch 2.11.*",
        f"Python 3.12, torch {pinned}",
        "Python 3.13, torch 2.15.*",
    ]
    assert [str(row) for row in run_versions.rows(["3.11"])] == [
        "Python 3.11, torch 2.11.*",
        "Python 3.11, torch 2.15.*",
    ]
