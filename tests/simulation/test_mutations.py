"""The simulation sees every missing wait and hold: each is needed, and the tests can fail."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import ebbtide
from mutations import MUTATIONS, Mutation

SOURCE = Path(ebbtide.__file__).parent
SEEDS = 200

PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
import ebbtide
assert ebbtide.__file__.startswith(sys.argv[1]), "the mutated copy must be what runs"
import importlib
module, _, name = sys.argv[3].partition(".")
check = getattr(importlib.import_module(module), name)
for seed in range(int(sys.argv[2])):
    try:
        check(seed)
    except AssertionError as error:
        print("caught:", error)
        sys.exit(1)
"""


Run = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Run]]]:
    """The mutations whose tests were asked for, as many at a time as there are cores."""
    items = [item for item in request.session.items if hasattr(item, "callspec")]
    chosen = [i.callspec.params["mutation"] for i in items if "mutation" in i.callspec.params]
    pool = ThreadPoolExecutor(os.cpu_count())
    yield {m.name: pool.submit(_run_mutated, m, tmp_path_factory.mktemp("m")) for m in chosen}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_simulation_catches(mutation: Mutation, runs: dict[str, Future[Run]]) -> None:
    result = runs[mutation.name].result()
    assert result.returncode == 1, f"not caught by {SEEDS} seeds\n{result.stdout}{result.stderr}"
    assert "caught: " in result.stdout, result.stderr


def test_documentation_lists_every_guard() -> None:
    text = (Path(__file__).parents[2] / "docs" / "internals" / "races.md").read_text()
    flat = " ".join(text.split())
    for mutation in MUTATIONS:
        assert mutation.name in flat.lower(), mutation.name
        assert mutation.hazard in flat, mutation.name


def _run_mutated(mutation: Mutation, directory: Path) -> Run:
    shutil.copytree(SOURCE, directory / "ebbtide", ignore=shutil.ignore_patterns("__pycache__"))
    file = directory / "ebbtide" / mutation.file
    text = file.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file} has no longer exactly one such place"
    file.write_text(text.replace(mutation.old, mutation.new))
    paths = [str(directory), str(Path(__file__).parent)]
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory), str(SEEDS), mutation.check],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
