"""Changes the source at random places, and counts how many changes `make test` notices.

    python tests/mutants/random_mutants.py --count 60 --seed 0 --folder build/mutants

A mutant is the package with one change in the rooms that run a step: a comparison that is flipped,
a call whose result nobody uses that is dropped, two arguments that are swapped, or a number that is
one more.

First `make test` runs once on a package that is not changed, but notes at the place of each mutant
which test is running. Each mutant then runs only the tests that came by its place, those of the
quickest files first, until the first failure. A test's processes count as the test, because the
name of a running test is in the environment. What runs while no test does, such as a constant of a
module, belongs to all tests.

With a folder, a run goes on where another ended: it reads there which tests come by each mutant,
and which mutants were found. Those that were not found run again, for a test may have been added.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("runtime", "weights", "stores", "devices")
FLIPPED = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow")
IGNORED = tuple(f"--ignore=tests/{each}" for each in ("clients", "gpu", "softdevice"))
TEST_TIMEOUT_S = 120
"""Of one test on a mutant, which may hang: some ten times what the slowest test takes."""

NO_TEST = ""
"""Stands for the test that runs while the tests' files are imported."""

NOTES = """
import contextlib, os

_noted = set()


def note(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if (number, test) not in _noted:
        with contextlib.suppress(OSError), open({path!r}, "a") as file:
            file.write(f"{{number}} {{test}}\\n")
            _noted.add((number, test))
"""
"""A module beside the package, for the run that notes which tests come by which mutant."""


class Edit(NamedTuple):
    """One change of one file: where it begins and ends, in bytes, and what stands there instead."""

    begin: int
    end: int
    text: str


class Mutant(NamedTuple):
    """One change of the package.

    Attributes:
        file: the file, below ``src/ebbtide``.
        edit: the change.
        begin: where the expression begins that is evaluated when the change matters, in bytes.
        end: where it ends.
        what: the change, in words.
    """

    file: Path
    edit: Edit
    begin: int
    end: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.what}"


class Outcome(NamedTuple):
    """What came of a mutant: whether a test failed, after how long, and which one."""

    is_found: bool
    duration_s: float
    by: str


class Executed(NamedTuple):
    """Which tests come by each mutant.

    Attributes:
        seconds: of each test, by its name.
        tests: by mutant, with ``NO_TEST`` for what runs while no test does.
    """

    seconds: dict[str, float]
    tests: dict[str, list[str]]

    def choose(self, mutant: Mutant) -> list[str]:
        """Return the tests that a mutant runs, those of the quickest files first."""
        tests = self.tests[str(mutant)]
        chosen = list(self.seconds) if NO_TEST in tests else tests
        of_file: Counter[str] = Counter()
        for test in chosen:
            of_file[test.split("::")[0]] += self.seconds.get(test, 0.0)
        return sorted(chosen, key=lambda test: (of_file[test.split("::")[0]], test.split("::")[0]))


def find_mutants(file: Path, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a file."""
    lines = [0]
    for line in source.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return lines[node.lineno - 1] + node.col_offset, lines[
            node.end_lineno - 1
        ] + node.end_col_offset

    def text(node: ast.expr) -> str:
        begin, end = span(node)
        return source.encode()[begin:end].decode()

    tree = ast.parse(source)
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    # Python 3.11 does not say where in an f-string an expression is.
    unplaced = {id(node) for string in strings for node in ast.walk(string)}
    for node in ast.walk(tree):
        if id(node) in unplaced:
            continue
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            sign = FLIPPED[type(node.ops[0])]
            left, right = text(node.left), text(node.comparators[0])
            what = f"{node.lineno}: {ast.unparse(node)} has {sign!r}"
            edit = Edit(*span(node), f"({left}) {sign} ({right})")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            what = f"{node.lineno}: no {ast.unparse(node)}"
            edit = Edit(*span(node), "pass")
        elif isinstance(node, ast.Call) and len(node.args) >= 2:
            one, other = node.args[:2]
            if isinstance(one, ast.Starred) or isinstance(other, ast.Starred):
                continue
            if ast.unparse(node.func) in ("max", "min"):
                continue  # of two numbers, in either order
            what = f"{node.lineno}: {ast.unparse(node.func)} has its first two swapped"
            edit = Edit(span(one)[0], span(other)[1], f"{text(other)}, {text(one)}")
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            what = f"{node.lineno}: {node.value} is one more"
            edit = Edit(*span(node), str(node.value + 1))
        else:
            continue
        yield Mutant(file, edit, *span(node), what)


def draw(count: int, seed: int) -> list[Mutant]:
    """Return this many mutants of the rooms that run a step, all as likely as any other."""
    source = ROOT / "src/ebbtide"
    files = sorted(path for room in ROOMS for path in (source / room).glob("*.py"))
    found = [m for path in files for m in find_mutants(path.relative_to(source), path.read_text())]
    return random.Random(seed).sample(found, count)


@contextlib.contextmanager
def changed_package(edits: Sequence[tuple[Path, Edit]]) -> Iterator[Path]:
    """Copy the package, with these changes, into a folder that goes on exit."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(
            ROOT / "src", copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
        )
        # From the end, so that what is still to be changed stays where it was.
        for file, edit in sorted(edits, key=lambda each: each[1], reverse=True):
            path = copy / "ebbtide" / file
            before = path.read_bytes()
            path.write_bytes(before[: edit.begin] + edit.text.encode() + before[edit.end :])
        yield copy


def run_tests(package: Path, arguments: Sequence[str], timeout_s: float | None) -> tuple[int, str]:
    """Run tests on a copy of the package.

    Returns:
        The exit code of pytest and what it printed. A run that took too long has exit code 1.

    Raises:
        SystemExit: pytest knows no test of a name, because a file of tests has changed meanwhile.
    """
    environment = os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            [*PYTEST, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return 1, "FAILED it hangs"
        printed.seek(0)
        text = printed.read()
        if code == pytest.ExitCode.USAGE_ERROR and "loading conftest" not in text:
            raise SystemExit(text)
        return code, text


def find_failures(code: int, printed: str) -> list[str]:
    """Return the names of the tests that failed, or the exit code if none has a name."""
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", printed, re.MULTILINE)
    return failed or [f"exit code {code}"] * bool(code)


def find_executed(mutants: Sequence[Mutant], processes: int) -> Executed:
    """Run `make test` once, and note which tests come by which mutant.

    Raises:
        SystemExit: if a test fails although nothing is changed.
    """
    edits = []
    for number, mutant in enumerate(mutants):
        note = f'(__import__("mutant_notes").note({number}) or ('
        # Of notes at one place, all are made before anything is evaluated, in any order.
        edits += [(mutant.file, Edit(mutant.begin, mutant.begin, note))]
        edits += [(mutant.file, Edit(mutant.end, mutant.end, "))"))]
    with changed_package(edits) as package:
        notes = package / "notes.txt"
        notes.touch()
        (package / "mutant_notes.py").write_text(NOTES.format(path=str(notes)))
        workers = ("--numprocesses", str(processes), "--dist", "loadfile")
        durations = ("--durations=0", "--durations-min=0")
        code, printed = run_tests(package, (*workers, *durations, *IGNORED), None)
        noted = [line.split(" ", 1) for line in notes.read_text().splitlines()]
    # Tests of open files, and of what is imported, see the notes: every mutant runs them.
    failed = find_failures(code, printed)
    with changed_package([]) as package:
        if failed and (again := find_failures(*run_tests(package, failed, None))):
            raise SystemExit(f"tests fail without any change: {' '.join(again)}")
    seconds: defaultdict[str, float] = defaultdict(float)
    for duration, test in re.findall(r"^([\d.]+)s (?:setup|call|teardown) +(.*)$", printed, re.M):
        seconds[test] += float(duration)
    came_by = {(int(number), test) for number, test in noted}
    tests = {
        str(mutant): sorted({test for at, test in came_by if at == number}.union(failed))
        for number, mutant in enumerate(mutants)
    }
    return Executed(dict(seconds), tests)


def try_mutant(mutant: Mutant, executed: Executed) -> Outcome:
    """Run the tests that come by a mutant, until the first failure."""
    tests = executed.choose(mutant)
    if not tests:
        return Outcome(False, 0.0, "no test comes by")
    expected_s = sum(executed.seconds.get(test, 0.0) for test in tests)
    with changed_package([(mutant.file, mutant.edit)]) as package:
        names = package / "tests.txt"
        names.write_text("\n".join(tests))
        begin_s = time.perf_counter()
        options = ("-x", f"--timeout={TEST_TIMEOUT_S}", f"@{names}")
        code, printed = run_tests(package, options, 3 * (TEST_TIMEOUT_S + expected_s))
        duration_s = time.perf_counter() - begin_s
    return Outcome(code != 0, round(duration_s, 1), "".join(find_failures(code, printed)[:1]))


def main() -> int:
    """Draw mutants, run those that are not known to be found, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="for results, which are read first")
    arguments = parser.parse_args()
    mutants = draw(arguments.count, arguments.seed)
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        came_by = folder / "executed.json"
        executed = Executed(*json.loads(came_by.read_text())) if came_by.exists() else None
        if executed is None or not executed.tests.keys() >= {str(each) for each in mutants}:
            executed = find_executed(mutants, arguments.processes)
            came_by.write_text(json.dumps(executed))
        results = folder / "results.jsonl"
        results.touch()
        lines = [json.loads(line) for line in results.read_text().splitlines()]
        outcomes = {name: Outcome(*outcome) for name, outcome in lines if outcome[0]}
        missing = [mutant for mutant in mutants if str(mutant) not in outcomes]
        with ThreadPoolExecutor(arguments.processes) as pool:
            tried = pool.map(lambda mutant: try_mutant(mutant, executed), missing)
            for mutant, outcome in zip(missing, tried, strict=True):
                outcomes[str(mutant)] = outcome
                found = "found" if outcome.is_found else "NOT FOUND"
                print(
                    f"{found} after {outcome.duration_s:.0f} s: {mutant}; {outcome.by}", flush=True
                )
                with results.open("a") as file:
                    file.write(json.dumps([str(mutant), outcome]) + "\n")
    found_s = [
        outcomes[str(mutant)].duration_s for mutant in mutants if outcomes[str(mutant)].is_found
    ]
    median_s = statistics.median(found_s) if found_s else 0.0
    print(f"{len(found_s)} of {len(mutants)} found, the median after {median_s:.0f} s")
    return 0 if len(found_s) == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
