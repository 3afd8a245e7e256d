"""torch's sanitizer finds nothing in what the engine queues, and finds planted races."""

import dataclasses
import multiprocessing
import os
from pathlib import Path

import pytest

import harness
import schedule_programs
import weight_programs
import weight_statements
from mutant import CAUGHT
from mutations import ACTIVATIONS, MUTATIONS, SCHEDULES, STATEMENTS, WEIGHTS, Mutation
from oracle_feed import check_activations, watched
from test_mutations import _mutate, _run_mutated

_CHECKS = {
    ACTIVATIONS: "oracle_feed.check_activations",
    SCHEDULES: "oracle_feed.check_schedules",
    WEIGHTS: "oracle_feed.check_weights",
    STATEMENTS: "oracle_feed.check_statements",
}
SEEN = {
    "source-until-copied",
    "copy-down-after-kernels",
    "bound-after-copy",
    "retire-when-complete",
    "release-after-copy of schedules",
    "retained-until-copied of schedules",
    "copy-up-after-kernels",
    "copy-up-after-copy-down",
    "compute-waits-for-reload",
    "abandoned-until-copied",
    "abandoned-when-complete",
    "failed-reload",
    "resize-after-copies",
    "close-after-copies",
    "write-after-copy",
    "chunk-after-write",
    "chunk-after-kernels",
    "chunk-up-after-kernels",
    "read-up-after-kernels",
    "read-after-copy-up",
    "backward-after-read",
    "arrival-with-copies",
    "close-after-writes",
    "chunks-after-copies",
    "weights-after-kernels of weights",
    "weights-read-before-return of weights",
    "abandoned-until-copied of weights",
    "abandoned-when-complete of weights",
    "gradient-after-kernels of weights",
    "gradient-until-copied of weights",
    "retire-when-complete of weights",
    "bound-after-copy of weights",
    "gradient-before-accumulation of weights",
    "buffer-without-readers of weights",
    "buffer-of-one-stream of weights",
    "compute-waits-for-weights of weights",
    "copies-outlive-engine of statements",
}
"""The mutations that the sanitizer reports; docs/internals/softdevice.md names the others."""
RARE = {
    "chunk-up-after-copy-down": 76,
    "chunk-after-readers": 122,
    "rebuilt-elsewhere": 525,
}
"""Mutations that it reports in few programs, of activations: the seed of one."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "num_seeds"),
    [
        (harness.check, 16),
        (schedule_programs.check_schedule, 16),
        (weight_programs.check_weights, 8),
        (weight_statements.check_statements, 8),
    ],
)
def test_it_finds_nothing(check, num_seeds: int) -> None:
    copies = waits = 0
    for seed in range(num_seeds):
        watch, failure = watched(check, seed)
        assert failure is None, failure
        copies += watch.content.get("copies", 0)
        waits += watch.content.get("waits", 0)
    assert copies > 100
    assert waits > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", RARE)
def test_it_finds_planted_races_that_show_in_few_programs(name: str, tmp_path: Path) -> None:
    forks = multiprocessing.get_context("forkserver")
    (mutation,) = (mutation for mutation in MUTATIONS if mutation.name == name)
    check_activations(RARE[name])  # as the engine is, nothing is reported
    oracle = dataclasses.replace(mutation, check=_CHECKS[mutation.check])
    printed = _run_mutated(forks, oracle, _mutate(mutation, tmp_path), [RARE[name]])
    assert any(line.startswith(CAUGHT) for line in printed.splitlines()), printed


PLANTED = [mutation for mutation in MUTATIONS if mutation.name in SEEN]
if "EBBTIDE_SIMULATION_SEEDS" not in os.environ:
    PLANTED = PLANTED[::3]  # `make soak` tries them all


@pytest.mark.slow
@pytest.mark.parametrize("mutation", PLANTED, ids=lambda mutation: mutation.name)
def test_it_finds_planted_races(mutation: Mutation, tmp_path: Path) -> None:
    forks = multiprocessing.get_context("forkserver")
    oracle = dataclasses.replace(mutation, check=_CHECKS[mutation.check])
    printed = _run_mutated(forks, oracle, _mutate(mutation, tmp_path))
    assert any(line.startswith(CAUGHT) for line in printed.splitlines()), printed
