"""Runs generated training programs plainly and offloaded, compares, and minimises what differs.

    python tests/programs/program_runs.py --seed 17                # its text, what differs
    python tests/programs/program_runs.py --count 2000             # many, in two processes
    python tests/programs/program_runs.py --count 500 --order random:1      # software accelerator
    python tests/programs/program_runs.py --count 50 --family "MAML"        # seeds that have it

A program runs in one namespace, statement by statement. Both runs begin with the same random states
and end with a look at everything that the namespace holds: parameters, gradients, buffers,
optimizer state, attributes of modules, arrays, and the random states of torch, Python and NumPy.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import functools
import gc
import io
import itertools
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.func
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations as norms
from torch.nn.utils import parametrize

import ebbtide
from training_programs import FAMILIES, Program, Statement, generate

SEED_TIMEOUT_S = 120
REAL = "real"
"""In place of an order of the software accelerator: the accelerator of the machine."""
SAME_ARITHMETIC = ("cpu", "softdevice")
"""Devices that compute as the host does, to the bit."""
REFUSALS = (ebbtide.BudgetError, ebbtide.StoreFullError)
IMPORTS = """\
import contextlib, copy, functools, gc, io, itertools, random, warnings, weakref
from concurrent.futures import ThreadPoolExecutor
import numpy as np, psutil, torch, torch.func, torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations as norms, parametrize
import ebbtide
note = print
used = lambda: psutil.Process().memory_info().rss
"""
"""What a program takes as given, for a program that is to run alone."""


@dataclass
class Run:
    """What one run of a program gave.

    Attributes:
        values: (where, value) pairs, in the order in which they were noted.
        errors: by the number of the statement.
        refused: what was asked for does not fit the program; it ended there.
    """

    values: list[tuple[str, object]] = field(default_factory=list)
    errors: dict[int, BaseException] = field(default_factory=dict)
    refused: str = ""


@dataclass(frozen=True)
class Difference:
    """How an offloaded run differs from the plain one.

    Attributes:
        kind: "numbers", or the names of the errors.
        text: where, and by how much.
    """

    kind: str
    text: str


def used_bytes(device: str) -> int:
    """What a budget is judged by."""
    if device == "cpu":
        return int(psutil.Process().memory_info().rss)
    return int(torch.accelerator.memory_reserved())


# ---- one run ------------------------------------------------------------------------------------


def _namespace(device: str) -> dict[str, Any]:
    given = {
        "ThreadPoolExecutor": ThreadPoolExecutor,
        "contextlib": contextlib,
        "copy": copy,
        "ebbtide": ebbtide,
        "F": F,
        "functools": functools,
        "gc": gc,
        "io": io,
        "itertools": itertools,
        "nn": nn,
        "norms": norms,
        "np": np,
        "parametrize": parametrize,
        "random": random,
        "torch": torch,
        "warnings": warnings,
        "weakref": weakref,
        "used": functools.partial(used_bytes, device),
    }
    return {"__name__": "program", **given}


@functools.cache
def _freeze() -> None:
    """Spare the collector what has been imported: a program may call it."""
    gc.collect()
    gc.freeze()


@functools.lru_cache(maxsize=4096)
def _compiled(text: str) -> types.CodeType:
    return compile(text, "<program>", "exec")


class _Runner:
    """Carries out the statements of a program in a namespace."""

    def __init__(self, program: Program, device: str, *, offloaded: bool) -> None:
        self.program, self.offloaded = program, offloaded
        self.space = _namespace(device)
        self.given = set(self.space)
        self.space["note"] = self.note
        self.run = Run()
        self.at = 0

    def note(self, *values: object) -> None:
        """Keep copies of values, which are compared when both runs have ended."""
        for value in values:
            self.run.values += [
                (f"{self.at}: {name}", each) for name, each in _flatten("noted", value)
            ]

    def carry_out(self, expected: Run | None = None) -> Run:
        """Run all statements, until an error comes that the expected run has not."""
        for at, statement in enumerate(self.program.statements):
            self.at = at
            if statement.offloaded_only and not self.offloaded:
                continue
            error = self._try(statement)
            if error is None:
                if self.program.watched and ".backward(" in statement.text:
                    self._note_gradients()
                continue
            self.run.errors[self.at] = error
            if expected is not None and self._is_refusal(error, statement):
                self.run.refused = type(error).__name__
                break
            if expected is not None and self.at not in expected.errors:
                break
            self._forget_graphs()
        else:
            self._note_all()
        self._let_go()
        return self.run

    def _try(self, statement: Statement) -> BaseException | None:
        try:
            exec(_compiled(statement.text), self.space)
        except Exception as error:
            return error
        return None

    def _is_refusal(self, error: BaseException, statement: Statement) -> bool:
        if isinstance(error, REFUSALS):
            return True
        if isinstance(error, ebbtide.PolicyError):
            # docs/guides/weights.md: weights on the host can be in no transform, for example.
            asked = self.program.recomputes or self.program.rests
            return statement.offloaded_only or asked
        # docs/guides/recompute.md: a layer that was asked to be recomputed needs what it read.
        return self.program.recomputes and isinstance(error, ebbtide.SavedTensorModifiedError)

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for name, value in sorted(self.space.items(), key=lambda item: item[0]):
            if isinstance(value, nn.Module):
                yield name, value

    def _note_gradients(self) -> None:
        for name, module in self._modules():
            for key, parameter in module.named_parameters():
                if parameter.grad is not None:
                    self.note_as(f"{name}.{key}.grad", parameter.grad)

    def note_as(self, name: str, value: object) -> None:
        self.run.values += [(f"{self.at}: {key}", each) for key, each in _flatten(name, value)]

    def _forget_graphs(self) -> None:
        """What of a backward was done before an error, nobody can say: start over."""
        for name, value in list(self.space.items()):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                del self.space[name]
        for _, module in self._modules():
            for parameter in module.parameters():
                parameter.grad = None

    def _note_all(self) -> None:
        for name, value in sorted(self.space.items(), key=lambda item: item[0]):
            if name not in self.given and not name.startswith("_") and "handle" not in name:
                self.note_as(f"at the end, {name}", value)
        self.note_as("random state of torch", torch.get_rng_state())
        self.note_as("random state of Python", random.getstate())
        self.note_as("random state of NumPy", np.random.get_state()[:3])

    def _let_go(self) -> None:
        for name, value in self.space.items():
            if isinstance(value, ebbtide.OffloadHandle):
                try:
                    value.detach()
                except Exception as error:
                    if not self.run.errors:
                        self.run.errors[len(self.program.statements)] = error
                    self.run.values.append((f"detach of {name}", repr(error)))
        self.space.clear()


def _flatten(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield names and copies of everything in a value that can be compared."""
    if isinstance(value, Tensor):
        if type(value).__name__ == "FakeTensor":
            yield name, "FakeTensor"
        elif not torch.nn.parameter.is_lazy(value):
            plain = value.detach()
            yield name, (plain.to_dense() if plain.is_sparse else plain).clone()
    elif isinstance(value, nn.Module):
        yield from _flatten_module(name, value)
    elif isinstance(value, torch.optim.Optimizer):
        for n, state in enumerate(value.state.values()):
            yield from _flatten(f"{name}.state[{n}]", dict(state))
    elif isinstance(value, np.ndarray):
        yield name, torch.from_numpy(value.copy())
    elif isinstance(value, bool | int | float | str | None):
        yield name, value
    elif isinstance(value, list | tuple):
        for n, each in enumerate(value):
            yield from _flatten(f"{name}[{n}]", each)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _flatten(f"{name}[{key!r}]", each)
    elif isinstance(value, np.random.Generator):
        yield name, repr(value.bit_generator.state)
    elif isinstance(value, torch.Generator):
        yield name, value.get_state()
    elif isinstance(value, itertools.count):
        yield name, repr(value)
    elif isinstance(value, type):
        for key, each in vars(value).items():
            if isinstance(each, bool | int | float) and not key.startswith("_"):
                yield f"{name}.{key}", each


def _flatten_module(name: str, module: nn.Module) -> Iterator[tuple[str, object]]:
    for key, parameter in module.named_parameters():
        yield from _flatten(f"{name}.{key}", parameter)
        if parameter.grad is not None and not torch.nn.parameter.is_lazy(parameter):
            yield from _flatten(f"{name}.{key}.grad", parameter.grad)
    for key, buffer in module.named_buffers():
        yield from _flatten(f"{name}.{key}", buffer)
    for path, each in module.named_modules():
        for key, value in vars(each).items():
            if not key.startswith("_") and isinstance(value, bool | int | float | str | list):
                yield from _flatten(f"{name}.{path}.{key}", value)


def run_program(
    program: Program, device: str, *, offloaded: bool, expected: Run | None = None
) -> Run:
    """Run a program from its beginning, with the random states of its seed."""
    _freeze()
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.manual_seed(program.seed)
    random.seed(program.seed)
    np.random.seed(program.seed)
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Runner(program, device, offloaded=offloaded).carry_out(expected)
    finally:
        gc.enable()
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(True)


# ---- comparing ----------------------------------------------------------------------------------


class InvalidProgramError(AssertionError):
    """Plain training raises where the generator did not mean it to."""


def check_valid(program: Program, plain: Run) -> None:
    """Check that plain training raised only where it may, or because it had raised before.

    Raises:
        InvalidProgramError: it did not.
    """
    raised = False
    for at, error in plain.errors.items():
        statement = program.statements[at]
        fine = (isinstance(error, RuntimeError) and statement.may_raise) or (
            raised and isinstance(error, NameError)
        )
        if not fine:
            raise InvalidProgramError(
                f"seed {program.seed}: plain training raises {error!r} in\n{statement.text}"
            )
        raised = True


def compare(program: Program, device: str = "cpu") -> tuple[Difference | None, Run]:
    """Run a program plainly and offloaded.

    Returns:
        The first difference, and the offloaded run.
    """
    plain = run_program(program, device, offloaded=False)
    check_valid(program, plain)
    mine = run_program(program, device, offloaded=True, expected=plain)
    text = str(program)
    if device not in SAME_ARITHMETIC and ("WeightPolicy(" in text or "budget=" in text):
        # The optimizer may step on the host, which rounds as it does.
        before = (_cut(program, run, [".step("], last_too=False) for run in (plain, mine))
        return _difference(program, *before), mine
    return _difference(program, plain, mine), mine


def _cut(program: Program, run: Run, words: Sequence[str], *, last_too: bool) -> Run:
    """Return what a run gave until the first statement with one of these words began or ended."""
    places = [n for n, each in enumerate(program.statements) if any(w in each.text for w in words)]
    last = places[0] if places else len(program.statements)
    if places and (not last_too or "for _ in" in program.statements[last].text):
        last -= 1  # a loop runs more than one
    values = [(name, value) for name, value in run.values if _number(name) <= last]
    values = [(name, value) for name, value in values if "at the end" not in name]
    errors = {at: error for at, error in run.errors.items() if at <= last}
    return Run(values, errors, run.refused if len(errors) == len(run.errors) else "")


def _difference(program: Program, plain: Run, mine: Run) -> Difference | None:
    for at in sorted(plain.errors.keys() | mine.errors.keys()):
        expected, got = plain.errors.get(at), mine.errors.get(at)
        if mine.refused and at == max(mine.errors):
            break
        if got is None and program.recomputes and isinstance(expected, RuntimeError):
            # What was changed in place, so that torch refuses it, is recomputed as it was.
            wrong = _first_wrong(program, plain, mine, until=at)
            return Difference("numbers", wrong) if wrong else None
        if _kind(expected) != _kind(got):
            wrong = _first_wrong(program, plain, mine, until=at)
            if wrong:
                return Difference("numbers", f"{wrong}\nlater, {got!r} instead of {expected!r}")
            statement = program.statements[at].text if at < len(program.statements) else "detach"
            return Difference(
                f"{_kind(got)} instead of {_kind(expected)}",
                f"offloaded: {got!r}\nplain: {expected!r}\nin: {statement}",
            )
    wrong = _first_wrong(program, plain, mine)
    return Difference("numbers", wrong) if wrong else None


def _kind(error: BaseException | None) -> str:
    """The class of an error; all that torch may say about a tensor changed in place are one."""
    if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
        return "RuntimeError"
    return "nothing" if error is None else type(error).__name__


def _first_wrong(program: Program, plain: Run, mine: Run, until: int | None = None) -> str:
    """Return the first value that differs, and by how much."""
    theirs = plain.values
    if mine.refused or until is not None:
        last = until if until is not None else max(mine.errors)
        theirs = [(name, value) for name, value in theirs if _number(name) < last]
        ours = [(name, value) for name, value in mine.values if _number(name) < last]
    else:
        ours = mine.values
    for (name, expected), (my_name, got) in zip(theirs, ours, strict=False):
        if name != my_name:
            return f"{my_name} where plain training has {name}"
        text = _unlike(expected, got, loosely=program.rounds)
        if text:
            return f"statement {name}: {text}"
    if len(theirs) != len(ours):
        longer = max((theirs, ours), key=len)
        whose = "plain" if longer is theirs else "offloaded"
        return f"only {whose} training has {longer[min(len(theirs), len(ours))][0]}"
    return ""


def _number(name: str) -> int:
    head = name.split(":")[0]
    return int(head) if head.isdigit() else sys.maxsize


def _unlike(expected: object, got: object, *, loosely: bool) -> str:
    if isinstance(expected, Tensor) and isinstance(got, Tensor):
        a, b = expected.cpu(), got.cpu()
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{tuple(b.shape)} {b.dtype} instead of {tuple(a.shape)} {a.dtype}"
        if torch.equal(a, b) or (a.is_floating_point() and torch.equal(_bits(a), _bits(b))):
            return ""
        near = loosely and a.is_floating_point()
        if near and torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True):
            return ""
        off = (a.double() - b.double()).abs().max()
        return f"off by {float(off):.3g} of {float(a.double().abs().max()):.3g}"
    if type(expected) is not type(got) or expected != got:
        return f"{got!r:.60} instead of {expected!r:.60}"
    return ""


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# ---- minimising ---------------------------------------------------------------------------------


def minimise(program: Program, device: str, difference: Difference) -> Program:
    """Return a program with fewer and simpler statements that differs in the same way."""

    def fails(statements: Sequence[Statement]) -> bool:
        candidate = program.with_statements(statements)
        try:
            found, _ = compare(candidate, device)
        except InvalidProgramError:
            return False
        return found is not None and found.kind == difference.kind

    statements = list(program.statements)
    while True:
        before = list(statements)
        statements = _without_chunks(statements, fails)
        statements = _simpler(statements, fails)
        statements = _shorter(statements, fails)
        if statements == before:
            return program.with_statements(statements)


def _without_chunks(
    statements: list[Statement], fails: Callable[[Sequence[Statement]], bool]
) -> list[Statement]:
    """Leave out runs of statements, long ones first: delta debugging."""
    size = max(1, len(statements) // 2)
    while True:
        at = len(statements) - size
        while at > -size:
            without = statements[: max(at, 0)] + statements[at + size :]
            if len(without) < len(statements) and fails(without):
                statements = without
            at -= size
        if size == 1:
            return statements
        size //= 2


def _simpler(
    statements: list[Statement], fails: Callable[[Sequence[Statement]], bool]
) -> list[Statement]:
    for at, statement in enumerate(statements):
        for text in statement.simpler:
            others = tuple(each for each in statement.simpler if len(each) < len(text))
            changed = Statement(
                text, statement.family, statement.offloaded_only, statement.may_raise, others
            )
            candidate = [*statements[:at], changed, *statements[at + 1 :]]
            if fails(candidate):
                statements = candidate
                break
    return statements


def _shorter(
    statements: list[Statement], fails: Callable[[Sequence[Statement]], bool]
) -> list[Statement]:
    """Leave out lines of statements that are several."""
    for at, statement in enumerate(statements):
        if statement.text.startswith(("class ", "def ", "@")):
            continue
        lines = statement.text.splitlines()
        n = len(lines) - 1
        while n >= 0 and len(lines) > 1:
            text = "\n".join(lines[:n] + lines[n + 1 :])
            changed = Statement(
                text, statement.family, statement.offloaded_only, statement.may_raise
            )
            with contextlib.suppress(SyntaxError):
                _compiled(text)
                candidate = [*statements[:at], changed, *statements[at + 1 :]]
                if fails(candidate):
                    statements = candidate
                    lines = text.splitlines()
            n -= 1
    return statements


# ---- many seeds ---------------------------------------------------------------------------------


def prepare(order: str) -> str:
    """Load the device that programs run on. Returns its name."""
    torch.set_num_threads(1)
    if not order:
        return "cpu"
    if order == REAL:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else it repeats no result
        torch.use_deterministic_algorithms(True, warn_only=True)
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
        found = torch.accelerator.current_accelerator(check_available=True)
        assert found is not None, "torch sees no accelerator"
        return found.type
    sys.path.insert(0, str(Path(__file__).parents[1] / "softdevice"))
    import softdevice

    softdevice.load("threads")
    return "softdevice"


def choose_order(order: str, seed: int) -> None:
    """Begin an order of execution anew, so that a seed alone repeats what it did among others."""
    if order not in ("", REAL):
        import softdevice

        softdevice.choose_order(order.replace("random:N", f"random:{seed}"))


def check_seed(
    seed: int, device: str = "cpu", order: str = "", **how: Any
) -> tuple[Program, Difference | None, Run]:
    """Generate the program of a seed, run it, and compare."""
    choose_order(order, seed)
    program = generate(seed, device, **how)
    difference, run = compare(program, device)
    if difference is not None and order == REAL and _varies(program, device):
        return program, None, run
    return program, difference, run


def _varies(program: Program, device: str) -> bool:
    """Return whether plain runs differ, as they do with kernels that add in no fixed order."""
    first, second = (run_program(program, device, offloaded=False) for _ in range(2))
    return _difference(program, first, second) is not None


def _work(arguments: argparse.Namespace) -> None:
    """Run seeds and print a line of JSON for each: what a process of many does."""
    device = prepare(arguments.order)
    how = {"without": arguments.without, "only": arguments.family, "alone": arguments.alone}
    minimised: Counter[str] = Counter()
    end_s = time.monotonic() + arguments.limit_s
    for number, seed in enumerate(arguments.seeds):
        if time.monotonic() > end_s:
            break
        print(json.dumps({"begins": seed}), flush=True)
        faulthandler.dump_traceback_later(SEED_TIMEOUT_S, exit=True)
        found: dict[str, object] = {"seed": seed}
        try:
            program, difference, run = check_seed(seed, device, arguments.order, **how)
            found |= {"families": sorted(program.families), "refused": run.refused}
            if difference is not None:
                found |= {"kind": difference.kind, "text": difference.text}
                if minimised[difference.kind] < arguments.minimise:
                    minimised[difference.kind] += 1
                    faulthandler.dump_traceback_later(5 * SEED_TIMEOUT_S, exit=True)
                    small = minimise(program, device, difference)
                    again, _ = compare(small, device)
                    found["minimised"] = str(small)
                    found["minimised families"] = sorted(
                        {each.family for each in small.statements if each.family}
                    )
                    found["minimised text"] = "" if again is None else again.text
        except InvalidProgramError as error:
            found |= {"kind": "invalid", "text": str(error)}
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(found), flush=True)
        if number % 50 == 49:
            gc.collect()


class _Process:
    """A process that runs seeds, and another one if it dies or hangs."""

    def __init__(self, seeds: list[int], arguments: argparse.Namespace) -> None:
        self.left, self.arguments = seeds, arguments
        self.results: list[dict[str, Any]] = []

    def run(self) -> None:
        end_s = time.monotonic() + self.arguments.limit_s
        while self.left and time.monotonic() < end_s:
            seeds = ",".join(map(str, self.left))
            command = [sys.executable, __file__, "--worker", seeds]
            command += ["--minimise", str(self.arguments.minimise)]
            command += ["--alone"] * self.arguments.alone
            command += ["--family", self.arguments.family, "--order", self.arguments.order]
            command += ["--limit-s", str(end_s - time.monotonic())]
            command += [f"--without={';'.join(self.arguments.without)}"]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            errors = self._follow(process)
            if process.returncode and self.left:
                self._report(
                    {"seed": self.left.pop(0), "kind": "died or hung", "text": errors[-3000:]}
                )

    def _follow(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        assert process.stderr is not None
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.append(process.stderr.read()))  # type: ignore[union-attr]
        reader.start()
        for line in process.stdout:
            with contextlib.suppress(json.JSONDecodeError):
                result = json.loads(line)
                if "seed" in result:
                    self.left.remove(result["seed"])
                    self._report(result)
        process.wait()
        reader.join()
        return "".join(errors)

    def _report(self, result: dict[str, Any]) -> None:
        self.results.append(result)
        if "kind" in result:
            print(f"seed {result['seed']}: {result['kind']}", flush=True)


def _run_many(arguments: argparse.Namespace) -> int:
    seeds = list(range(arguments.first, arguments.first + arguments.count))
    processes = [
        _Process(seeds[n :: arguments.processes], arguments) for n in range(arguments.processes)
    ]
    with ThreadPoolExecutor(len(processes)) as pool:
        list(pool.map(_Process.run, processes))
    results = [result for process in processes for result in process.results]
    failed = sorted((r for r in results if "kind" in r), key=lambda r: r["seed"])
    for result in failed:
        _print_failure(result)
    _print_summary(results, failed)
    return 1 if failed else 0


def _print_failure(result: dict[str, Any]) -> None:
    print(f"\n==== seed {result['seed']}: {result['kind']}\n{result['text']}")
    if "minimised" in result:
        print(f"---- minimised\n{result['minimised']}\n---- {result['minimised text']}")


def _print_summary(results: list[dict[str, Any]], failed: list[dict[str, Any]]) -> None:
    refused = Counter(r["refused"] for r in results if r.get("refused"))
    kinds = Counter(r["kind"] for r in failed)
    families = Counter(f for r in failed for f in r.get("minimised families", ()))
    print(f"\n{len(results)} programs, {len(failed)} differ; refused: {dict(refused)}")
    print("kinds:", dict(kinds.most_common()))
    print("families of minimised programs:", dict(families.most_common()))
    print("seeds:", *(r["seed"] for r in failed))


def _run_one(arguments: argparse.Namespace) -> int:
    device = prepare(arguments.order)
    how = {"without": arguments.without, "only": arguments.family, "alone": arguments.alone}
    print(generate(arguments.seed, device, **how))
    program, difference, run = check_seed(arguments.seed, device, arguments.order, **how)
    if difference is None:
        print(f"\nseed {arguments.seed}: the same{f', refused: {run.refused}' * bool(run.refused)}")
        return 0
    print(f"\n==== {difference.kind}\n{difference.text}")
    if arguments.minimise:
        small = minimise(program, device, difference)
        again, _ = compare(small, device)
        print(f"\n==== minimised\n{small}\n\n==== {again and again.text}")
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="run this one, and print its program")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--order",
        default="",
        help=f"of the software accelerator; none: a CPU; {REAL}: the accelerator",
    )
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin no program later")
    parser.add_argument("--family", default="", choices=["", *FAMILIES], metavar="FAMILY")
    parser.add_argument("--alone", action="store_true", help="no other families beside a seed's")
    parser.add_argument("--without", default="", help="families to leave out, separated by ;")
    parser.add_argument("--minimise", type=int, default=2, help="programs of each kind")
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.without = [each for each in arguments.without.split(";") if each]
    if arguments.worker is not None:
        arguments.seeds = [int(seed) for seed in arguments.worker.split(",")]
        _work(arguments)
        return 0
    return _run_many(arguments) if arguments.seed is None else _run_one(arguments)


if __name__ == "__main__":
    sys.exit(main())
