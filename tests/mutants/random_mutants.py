"""Changes the source at random places, and counts how many changes `make test` notices.

    python tests/mutants/random_mutants.py --count 60 --seed 0
    python tests/mutants/random_mutants.py --results found.jsonl --tests tests/unit/test_seams.py

A mutant is the package with one change in the rooms that run a step: a comparison that is flipped,
a call whose result nobody uses that is dropped, two arguments that are swapped, or a number that is
one more. Each runs what `make test` runs, until the first failure. Two run side by side.

Most mutants fail in one of a few files. With a file of results a run goes on where another ended:
first with those few files, and then, for the mutants that passed them, with all tests.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
ROOMS = ("runtime", "weights", "stores", "devices")
TIMEOUT_S = 1800.0
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
PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow")
IGNORED = ("clients", "docs", "gpu", "softdevice", "versions")


class Mutant(NamedTuple):
    """One change of one file.

    Attributes:
        file: the file, below ``src/ebbtide``.
        begin: where the change begins, in bytes of the file.
        end: where it ends.
        text: what stands there instead.
        what: the change, in words.
    """

    file: Path
    begin: int
    end: int
    text: str
    what: str


class Outcome(NamedTuple):
    """What came of a mutant: whether a test failed, after how long, and which one."""

    mutant: Mutant
    is_found: bool
    duration_s: float
    by: str


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
            yield Mutant(file, *span(node), f"({left}) {sign} ({right})", what)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield Mutant(file, *span(node), "pass", f"{node.lineno}: no {ast.unparse(node)}")
        elif isinstance(node, ast.Call) and len(node.args) >= 2:
            one, other = node.args[:2]
            if not isinstance(one, ast.Starred) and not isinstance(other, ast.Starred):
                begin, end = span(one)[0], span(other)[1]
                what = f"{node.lineno}: {ast.unparse(node.func)} has its first two swapped"
                yield Mutant(file, begin, end, f"{text(other)}, {text(one)}", what)
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            what = f"{node.lineno}: {node.value} is one more"
            yield Mutant(file, *span(node), str(node.value + 1), what)


def draw(count: int, seed: int) -> list[Mutant]:
    """Return this many mutants of the rooms that run a step, all as likely as any other."""
    source = ROOT / "src/ebbtide"
    files = sorted(path for room in ROOMS for path in (source / room).glob("*.py"))
    found = [m for path in files for m in find_mutants(path.relative_to(source), path.read_text())]
    return random.Random(seed).sample(found, count)


def run(mutant: Mutant, tests: Sequence[str]) -> Outcome:
    """Run these tests on a mutant until the first failure."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        path = copy / "ebbtide" / mutant.file
        before = path.read_bytes()
        path.write_bytes(before[: mutant.begin] + mutant.text.encode() + before[mutant.end :])
        ignored = [f"--ignore={ROOT / 'tests' / each}" for each in IGNORED]
        environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        begin_s = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, *PYTEST, *ignored, *(str(ROOT / each) for each in tests)],
                env=environment,
                cwd=directory,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return Outcome(mutant, True, TIMEOUT_S, "it hangs")
        lines = done.stdout.splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        by = failed[0].split(" - ")[0] if failed else f"exit code {done.returncode}"
        return Outcome(mutant, bool(done.returncode), time.perf_counter() - begin_s, by)


def read_results(file: Path | None, tests: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return, by mutant, the results that need no other run: found, or passed by the same tests."""
    lines = file.read_text().splitlines() if file is not None and file.exists() else []
    results = [json.loads(line) for line in lines]
    return {
        result["mutant"]: result
        for result in results
        if result["is_found"] or result["tests"] == list(tests)
    }


def main() -> int:
    """Draw mutants, run those without a result, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tests", nargs="+", default=["tests"], help="what runs on each mutant")
    parser.add_argument("--results", type=Path, help="JSON lines, read first and written to")
    arguments = parser.parse_args()
    unchanged = run(Mutant(Path("__init__.py"), 0, 0, "", "no change"), arguments.tests)
    if unchanged.is_found:
        print(f"the tests fail without any change: {unchanged.by}")
        return 2
    print(f"the tests pass without a change after {unchanged.duration_s:.0f} s", flush=True)
    results = read_results(arguments.results, arguments.tests)
    drawn = {f"{each.file}:{each.what}": each for each in draw(arguments.count, arguments.seed)}
    missing = {name: mutant for name, mutant in drawn.items() if name not in results}
    with ThreadPoolExecutor(arguments.processes) as pool:
        outcomes = pool.map(lambda mutant: run(mutant, arguments.tests), missing.values())
        for name, outcome in zip(missing, outcomes, strict=True):
            results[name] = {
                "mutant": name,
                "is_found": outcome.is_found,
                "duration_s": round(outcome.duration_s, 1),
                "by": outcome.by,
                "tests": arguments.tests,
            }
            found = "found" if outcome.is_found else "NOT FOUND"
            print(f"{found} after {outcome.duration_s:.0f} s: {name}; {outcome.by}", flush=True)
            if arguments.results is not None:
                with arguments.results.open("a") as file:
                    file.write(json.dumps(results[name]) + "\n")
    found_s = [results[name]["duration_s"] for name in drawn if results[name]["is_found"]]
    median_s = statistics.median(found_s) if found_s else 0.0
    print(f"{len(found_s)} of {len(drawn)} found, the median after {median_s:.0f} s")
    return 0 if len(found_s) == len(drawn) else 1


if __name__ == "__main__":
    sys.exit(main())
