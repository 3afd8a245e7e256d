"""Random programs see every missing wait and hold: each is needed, and the tests can fail."""

import multiprocessing
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

import ebbtide
from guards import find_guards, without
from mutant import CAUGHT, try_mutant
from mutations import MUTATIONS, SOFT_ONLY, Mutation
from races_page import PAGE, page, soft_results

SOURCE = Path(ebbtide.__file__).parent
SEEDS = 200
STUCK_S = 1200.0
"""Of one mutant: a hundred times what the slowest takes, so that it is reached only by one that
hangs, however busy the machine is."""


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[str]]]:
    """What is printed under the mutations that were asked for, as many at a time as cores."""
    items = [item for item in request.session.items if hasattr(item, "callspec")]
    chosen = [i.callspec.params["mutation"] for i in items if "mutation" in i.callspec.params]
    # Forked from a process that has imported what takes longer than most mutations live.
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["torch._dynamo", "hypothesis", "psutil"])
    # Parsed here, because Python 3.11 cannot parse in two threads at once: "SystemError: AST
    # constructor recursion depth mismatch".
    folders = {m.name: _mutate(m, tmp_path_factory.mktemp("m")) for m in chosen}
    pool = ThreadPoolExecutor(os.cpu_count())
    yield {m.name: pool.submit(_run_mutated, forks, m, folders[m.name]) for m in chosen}
    pool.shutdown(cancel_futures=True)


@pytest.mark.slow
@pytest.mark.timeout(STUCK_S + 300)
@pytest.mark.parametrize(
    "mutation",
    [m for m in MUTATIONS if m.check not in SOFT_ONLY],
    ids=lambda mutation: mutation.name,
)
def test_simulation_catches(mutation: Mutation, runs: dict[str, Future[str]]) -> None:
    printed = runs[mutation.name].result()
    assert any(line.startswith(CAUGHT) for line in printed.splitlines()), printed


def test_every_guard_has_a_mutation() -> None:
    assert find_guards(SOURCE).keys() == {mutation.guard for mutation in MUTATIONS}


def test_every_mutation_finds_what_it_changes() -> None:
    guards = find_guards(SOURCE)
    for mutation in MUTATIONS:
        guard = guards[mutation.guard]
        source = (SOURCE / guard.file).read_text()
        assert without(source, guard, mutation.edit) != source


def test_every_mutation_was_tried_on_the_software_accelerator() -> None:
    assert soft_results().keys() == {m.name for m in MUTATIONS}, "try them: make soft-mutants"


def test_the_software_accelerator_noticed_what_the_simulation_cannot() -> None:
    for mutation in MUTATIONS:
        if mutation.check in SOFT_ONLY:
            assert soft_results()[mutation.name]["noticed"], f"{mutation.name}: make soft-mutants"


def test_the_page_of_races_is_written_from_the_tags() -> None:
    assert PAGE.read_text() == page(), "write it again: make races"


def _mutate(mutation: Mutation, directory: Path) -> Path:
    """Copy the package into a folder, without the guard of a mutation."""
    shutil.copytree(SOURCE, directory / "ebbtide", ignore=shutil.ignore_patterns("__pycache__"))
    guard = find_guards(SOURCE)[mutation.guard]
    file = directory / "ebbtide" / guard.file
    file.write_text(without(file.read_text(), guard, mutation.edit))
    return directory


def _run_mutated(
    forks: ForkServerContext,
    mutation: Mutation,
    directory: Path,
    seeds: Sequence[int] = range(SEEDS),
) -> str:
    output = directory / "output"
    arguments = (str(directory), mutation.check, seeds, str(output), STUCK_S)
    process = forks.Process(target=try_mutant, args=arguments, daemon=True)
    process.start()
    # Its exit code says nothing: one thread's `start` may take it away from another's `join`.
    process.join()
    return output.read_text() if output.exists() else f"exit {process.exitcode}"
