"""Run the GPU suite within a time limit: the tests, then every case, the most valuable first.

Each result is written as soon as it is known, so a failure or the limit loses no earlier result.
Run: ``make gpu``, or ``python -m benchmarks.gpu --out DIR --limit-s 540 --only NAME,...``
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import functools
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import record
from benchmarks.jobs import Job, jobs, tiny_jobs
from benchmarks.tables import CASES, tables_of
from benchmarks.trial import request

ROOT = Path(__file__).parents[1]
_TRIAL_LIMIT_S = 240.0
_TESTS_SHARE = 0.4  # share of the time limit that the tests may take
_TOO_LATE: dict[str, Any] = {"skipped": "the time limit was reached"}


def main() -> None:
    """Run the suite. Exit with 2 if there is no accelerator, with 1 if a test or a trial failed."""
    arguments = _arguments()
    if arguments.load is not None:
        _import(arguments.load)
    device = _find_device(arguments.device)
    record.refuse_to_commit(device, arguments.out)
    chosen = _choose(tiny_jobs() if arguments.tiny else jobs(), arguments.only)
    chosen = [_in_modes(job, arguments.modes) for job in chosen]
    if arguments.list:
        print("\n".join(job.name for job in chosen))
        return
    end_s = time.monotonic() + arguments.limit_s
    suite = Suite(device, arguments.out, end_s, arguments.load)
    if arguments.resume is not None:
        suite.resume(arguments.resume)
    if arguments.tests:
        suite.run_tests(_TESTS_SHARE * arguments.limit_s)
    for job in chosen:
        suite.run_job(job)
    suite.print_tables()
    sys.exit(suite.failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=record.RESULTS, help="directory for result files"
    )
    parser.add_argument("--limit-s", type=float, default=540.0, help="time limit in seconds")
    parser.add_argument(
        "--only", default="*", help="names or patterns of jobs, separated by commas"
    )
    parser.add_argument(
        "--modes",
        default="*",
        help="names or patterns of modes; `none`, to compare with, is always run",
    )
    parser.add_argument("--device", default="auto", help="auto, cuda, xpu ...; cpu makes a dry run")
    parser.add_argument(
        "--import",
        dest="load",
        metavar="MODULE",
        help="import a module first, in every process: one that registers a device with torch",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="run the code of every case on tiny models"
    )
    parser.add_argument("--no-tests", dest="tests", action="store_false", help="skip the tests")
    parser.add_argument(
        "--resume", type=Path, metavar="DIR", help="continue from result files of the same commit"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the jobs and stop")
    return parser.parse_args()


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        print(
            f"--import {module}: {error}. Is the module's directory on PYTHONPATH?",
            file=sys.stderr,
        )
        sys.exit(2)


def _find_device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        print(
            "no accelerator: torch sees none on this machine, so the GPU suite has nothing to "
            "measure.\nInstall your accelerator's driver and a torch built for it, or run the code "
            "of every case on the CPU:\n  python -m benchmarks.gpu --device cpu --tiny --out DIR",
            file=sys.stderr,
        )
        sys.exit(2)
    return accelerator


def _choose(all_jobs: Sequence[Job], only: str) -> list[Job]:
    patterns = [pattern.strip() for pattern in only.split(",")]
    chosen = [j for j in all_jobs if any(fnmatch.fnmatch(j.name, p) for p in patterns)]
    unknown = [p for p in patterns if not any(fnmatch.fnmatch(j.name, p) for j in all_jobs)]
    if unknown:
        names = ", ".join(job.name for job in all_jobs)
        print(f"no job is called {', '.join(unknown)}; there are: {names}", file=sys.stderr)
        sys.exit(2)
    return chosen


def _in_modes(job: Job, only: str) -> Job:
    patterns = ["none", *(pattern.strip() for pattern in only.split(","))]
    modes = (mode for mode in job.modes if any(fnmatch.fnmatch(mode, p) for p in patterns))
    return dataclasses.replace(job, modes=tuple(modes))


class Suite:
    """Runs jobs until the deadline and writes their results.

    Args:
        device: device to run on.
        directory: directory for result files.
        deadline_s: deadline in seconds on the monotonic clock.
        load: module that every process imports first; None if there is none.

    Attributes:
        failed: whether a test or a trial failed.
    """

    def __init__(
        self, device: torch.device, directory: Path, deadline_s: float, load: str | None = None
    ) -> None:
        self.failed = False
        self._device = device
        self._load = load
        self._directory = directory
        self._deadline_s = deadline_s
        self._tests = "not run"
        self._results: dict[str, dict[str, Any]] = {}
        directory.mkdir(parents=True, exist_ok=True)

    def run_tests(self, limit_s: float) -> None:
        """Run `tests/gpu`, which include the parity suite, in a process of their own."""
        first = [] if self._load is None else ["-p", self._load]
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", *_in_parallel(), *first]
        command.append("tests/gpu")
        on = {} if self._device.type != "cpu" else {"EBBTIDE_GPU_TESTS_ON": "cpu"}
        output, code = _run(command, limit_s, on)
        lines = output.strip().splitlines()
        print("\n".join(lines[-60:]), flush=True)
        self._tests = lines[-1].strip("= ") if lines else "no output"
        if code is None:
            self._tests = f"stopped after {limit_s:.0f} s; last line: {self._tests}"
        self.failed |= code != 0

    def resume(self, directory: Path) -> None:
        """Take over the results that an earlier call measured on this device at this commit."""
        here = record.environment()
        for file in sorted(directory.glob("*.json")):
            document = json.loads(file.read_text())
            there = document.get("environment", {})
            same = all(there.get(key) == here[key] for key in ("device", "torch", "commit"))
            if same and document.get("case") in CASES:
                self._tests = document["configuration"]["tests"]
                # The file of a case also has a copy of the link's figures, which its table needs.
                own = {name: entry for name, entry in document["results"].items() if name != "link"}
                self._results[document["case"]] = (
                    document["results"] if document["case"] == "link" else own
                )

    def run_job(self, job: Job) -> None:
        """Run a job in each of its modes that has no result yet, as far as time allows."""
        known = self._results.get(job.case, {}).get(job.name, {}).get("modes", {})
        due = [
            mode
            for mode in job.modes
            if mode not in known or "failed" in known[mode] or known[mode] == _TOO_LATE
        ]
        # The plain step comes first, because budgets are shares of its peak.
        for modes in (due[:1], due[1:]):
            for mode, answer in zip(modes, self._ask_all(job, modes), strict=True):
                self._note(job, mode, answer)

    def _ask_all(self, job: Job, modes: Sequence[str]) -> Iterable[dict[str, Any]]:
        ask = functools.partial(self._ask_in_time, job)
        if self._device.type == "cpu" or record.is_software(self._device):
            # Such a run measures nothing, so trials may run in parallel.
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return list(pool.map(ask, modes))
        return map(ask, modes)

    def _ask_in_time(self, job: Job, mode: str) -> dict[str, Any]:
        left_s = self._deadline_s - time.monotonic()
        limit_s = min(left_s, _TRIAL_LIMIT_S)
        return self._ask(job, mode, limit_s) if left_s > 5 else _TOO_LATE

    def _ask(self, job: Job, mode: str, limit_s: float) -> dict[str, Any]:
        first = {} if self._load is None else {"import": self._load}
        known = self._results.get(job.case, {}).get(job.name, {}).get("modes", {})
        peak_bytes = known.get("none", {}).get("peak_bytes")
        peak = {} if peak_bytes is None else {"plain_peak_bytes": peak_bytes}
        text = request(job.task, mode, str(self._device), job.shape, **first, **peak, **job.more)
        begin_s = time.monotonic()
        output, code = _run([sys.executable, "-m", "benchmarks.trial", text], limit_s, {})
        took_s = time.monotonic() - begin_s
        lines = output.strip().splitlines()
        if code == 0 and lines:
            with contextlib.suppress(ValueError):
                answer: dict[str, Any] = json.loads(lines[-1])
                answer["trial_s"] = took_s
                return answer
        if code is None and limit_s < _TRIAL_LIMIT_S:
            return _TOO_LATE
        self.failed = True
        why = f"stopped after {limit_s:.0f} s" if code is None else f"exit {code}"
        return {"failed": f"{why}: {' | '.join(lines[-3:])[-600:]}"}

    def _note(self, job: Job, mode: str, answer: dict[str, Any]) -> None:
        short = next((f"{k}: {answer[k]}" for k in ("skipped", "failed") if k in answer), "")
        if "step_s" in answer:
            short = f"{answer['step_s'] * 1e3:.1f} ms"
        print(f"{job.name:<28} {mode:<24} {short[:100]}", flush=True)
        case = self._results.setdefault(job.case, {})
        entry = case.setdefault(job.name, {"job": dataclasses.asdict(job), "modes": {}})
        entry["modes"][mode] = answer
        self._save(job.case)

    def _save(self, case: str) -> None:
        results = dict(self._results[case])
        if case != "link" and "link" in self._results:
            results["link"] = self._results["link"]["link"]  # needed for the column `x limit`
        configuration = {"device": str(self._device), "tests": self._tests}
        table = tables_of(case, results)
        record.save(case, configuration, results, table, self._directory)

    def print_tables(self) -> None:
        """Print all tables. They come last, so that a log which is cut from the top has them."""
        warning = record.warning_of(record.environment())
        for case in self._results:
            results = {"link": self._results.get("link", {}).get("link"), **self._results[case]}
            print(f"\n## {case}\n\n{warning}{tables_of(case, results)}")
        print(f"\ntests: {self._tests}")


def _in_parallel() -> list[str]:
    """Return pytest's arguments for several processes, where pytest-xdist is installed."""
    if importlib.util.find_spec("xdist") is None:
        return []
    processes = max(1, min(8, (os.cpu_count() or 1) // 2))
    return ["--numprocesses", str(processes), "--dist", "worksteal", "--max-worker-restart", "0"]


def _kill(process: subprocess.Popen[str]) -> None:
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
        return
    # Windows has no groups of processes that one call could end.
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.kill()


def _run(command: list[str], limit_s: float, more: dict[str, str]) -> tuple[str, int | None]:
    """Run a process; at the limit it is killed together with its children.

    Returns:
        Its output and its exit status; the status is None if it was killed.
    """
    environment = {**os.environ, **more}
    paths = [str(ROOT), str(ROOT / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        return output, process.returncode
    except subprocess.TimeoutExpired:
        _kill(process)
        output, _ = process.communicate()
        return output, None


if __name__ == "__main__":
    main()
