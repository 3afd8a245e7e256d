"""The simulation sees every missing wait and hold: each is needed, and the tests can fail."""

import multiprocessing
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

import ebbtide
from mutant import CAUGHT, try_mutant
from mutations import MUTATIONS, Mutation

SOURCE = Path(ebbtide.__file__).parent
SEEDS = 200

Run = tuple[int | None, str]
"""The exit code of a process, None if it was still running; and what it printed."""


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Run]]]:
    """The mutations whose tests were asked for, as many at a time as there are cores."""
    items = [item for item in request.session.items if hasattr(item, "callspec")]
    chosen = [i.callspec.params["mutation"] for i in items if "mutation" in i.callspec.params]
    # Forked from a process that has imported torch: that takes longer than most mutations live.
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["torch", "hypothesis"])
    pool = ThreadPoolExecutor(os.cpu_count())
    yield {
        m.name: pool.submit(_run_mutated, forks, m, tmp_path_factory.mktemp("m")) for m in chosen
    }
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_simulation_catches(mutation: Mutation, runs: dict[str, Future[Run]]) -> None:
    code, printed = runs[mutation.name].result()
    assert code == CAUGHT, f"not caught by {SEEDS} seeds: exit {code}\n{printed}"
    assert "caught: " in printed


def test_documentation_lists_every_guard() -> None:
    text = (Path(__file__).parents[2] / "docs" / "internals" / "races.md").read_text()
    flat = " ".join(text.split())
    for mutation in MUTATIONS:
        assert mutation.name in flat.lower(), mutation.name
        assert mutation.hazard in flat, mutation.name


def _run_mutated(forks: ForkServerContext, mutation: Mutation, directory: Path) -> Run:
    shutil.copytree(SOURCE, directory / "ebbtide", ignore=shutil.ignore_patterns("__pycache__"))
    file = directory / "ebbtide" / mutation.file
    text = file.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file} has no longer exactly one such place"
    file.write_text(text.replace(mutation.old, mutation.new))
    output = directory / "output"
    arguments = (str(directory), mutation.check, SEEDS, str(output))
    process = forks.Process(target=try_mutant, args=arguments, daemon=True)
    process.start()
    process.join(240)
    code = process.exitcode
    process.kill()
    return code, output.read_text() if output.exists() else ""
