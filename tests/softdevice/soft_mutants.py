"""Tries each mutation of the engine on the software accelerator: ``make soft-mutants``.

What comes of it is written to soft_mutants.json, from which docs/internals/races.md says which of
the devices notices that a guard is missing. Each mutated copy of the package runs in a process of
its own: with a guard missing, it may crash, or hang.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import softdevice
from guards import find_guards, without
from mutant import CAUGHT, try_mutant
from mutations import (
    ACTIVATIONS,
    LATE_READS,
    MUTATIONS,
    OVERLAP,
    SCHEDULES,
    STATEMENTS,
    TWO_GRADIENTS,
    WEIGHTS,
    Mutation,
)
from softdevice import build

RESULTS = Path(__file__).with_name("soft_mutants.json")
_PARSING = threading.Lock()
SOURCE = Path(__file__).parents[2] / "src" / "ebbtide"
ORDERS = ("compute-first", "copies-first", "random", "threads")
SEEDS = 60
STUCK_S = 600.0


def activations(seed: int) -> None:
    """Run a program of activations in every order."""
    _in_every_order("soft_programs", "check_activations", seed)


def schedules(seed: int) -> None:
    """Run a program of activations under a schedule in every order."""
    _in_every_order("soft_programs", "check_schedules", seed)


def weights(seed: int) -> None:
    """Run a program of weights at rest in every order."""
    _in_every_order("soft_weight_programs", "check_weights", seed)


def statements(seed: int) -> None:
    """Run a loop with anything between two statements in every order."""
    _in_every_order("soft_weight_statements", "check_statements", seed)


def overlap(seed: int) -> None:
    """Step inside backward in every order."""
    _in_every_order("soft_overlap_programs", "check_overlap", seed)


def late_reads(seed: int) -> None:
    """Read on a stream of the program's own what `detach` takes away, in every order."""
    _in_every_order("soft_guards", "check_late_reads", seed)


def two_gradients(seed: int) -> None:
    """Add gradients from two of autograd's threads in every order."""
    _in_every_order("soft_guards", "check_two_gradients", seed)


_PROGRAMS = {
    ACTIVATIONS: activations,
    SCHEDULES: schedules,
    WEIGHTS: weights,
    STATEMENTS: statements,
    OVERLAP: overlap,
    LATE_READS: late_reads,
    TWO_GRADIENTS: two_gradients,
}


def _in_every_order(module: str, check: str, seed: int) -> None:
    softdevice.load()
    programs = importlib.import_module(module)  # which imports the package: the mutated one
    for order in ORDERS:
        getattr(programs, check)(seed, order)


def try_one(mutation: Mutation, *, mutated: bool = True) -> dict[str, object]:
    """Run programs on a copy of the package in which a guard is missing.

    Returns:
        Whether they noticed, and what they said; how many seeds were to be tried.
    """
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "ebbtide"
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if mutated:
            guard = find_guards(SOURCE)[mutation.guard]
            file = copy / guard.file
            with _PARSING:  # Python 3.11 cannot parse in two threads at once
                file.write_text(without(file.read_text(), guard, mutation.edit))
        output = Path(directory) / "output"
        command = [sys.executable, __file__, "--child", directory, mutation.check]
        finished = subprocess.run([*command, str(output)], check=False, capture_output=True)
        said = output.read_text() if output.exists() else ""
    noticed, words = _judge(said, finished.returncode)
    return {"noticed": noticed, "said": words[:200], "seeds": SEEDS, "orders": ORDERS}


def _judge(said: str, code: int) -> tuple[bool, str]:
    for line in said.splitlines():
        if line.startswith(CAUGHT):
            return True, line.removeprefix(CAUGHT)
    if code < 0:
        return True, f"the process ended by signal {-code}"
    if "Timeout" in said:
        return True, f"it hung for {STUCK_S:.0f} s"
    if "not caught" in said:
        return False, ""
    raise RuntimeError(f"a mutated copy did not run:\n{said}")


def _child(directory: str, check: str, output: str) -> None:
    name = f"soft_mutants.{_PROGRAMS[check].__name__}"
    try_mutant(directory, name, range(SEEDS), output, STUCK_S)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of mutations; none: all of them")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.child:
        _child(*arguments.child)
        return
    build.build()  # once, before all children want it
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    chosen = [m for m in MUTATIONS if not arguments.names or m.name in arguments.names]
    with ThreadPoolExecutor(arguments.processes) as pool:
        for mutation, result in zip(chosen, pool.map(try_one, chosen), strict=True):
            results[mutation.name] = result
            print(f"{mutation.name}: {result}", flush=True)
            known = {m.name: results[m.name] for m in MUTATIONS if m.name in results}
            RESULTS.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    _main()
