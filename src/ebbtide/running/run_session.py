"""Runs a script, has its models found and offloaded, and reports when the process ends."""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any, Final, TextIO, final

import torch
from torch import nn

import ebbtide.api
from ebbtide.errors import BudgetError
from ebbtide.memory.measured_memory import resident_peak_bytes
from ebbtide.pages.page import render_page
from ebbtide.running.found_model import FoundModel
from ebbtide.running.main_script import MainScript, ScriptNotFoundError, script_frames
from ebbtide.running.model_finder import ModelFinder
from ebbtide.running.module_calls import ModuleCalls
from ebbtide.running.run_options import RunOptions
from ebbtide.running.run_report import RunReport

_JIT: Any = torch.jit._recursive
BUDGET_EXIT_CODE: Final = 78  # no plan fits into the budget; EX_CONFIG of sysexits.h


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What `ebbtide run` was asked for.

    Args:
        script: what to run.
        options: how to offload.
        dry: whether to offload nothing and say what would be done.
        quiet: whether to print nothing but errors.
        json: file for the figures; None: none. ``Path("-")`` is standard output.
        report: file for a page on the last step of each model; None: none. Its steps should be
            recorded: `RunOptions.trace`.
    """

    script: MainScript
    options: RunOptions
    dry: bool = False
    quiet: bool = False
    json: Path | None = None
    report: Path | None = None


def run_script(request: RunRequest) -> None:
    """Run a script as Python would, and offload the models that it trains.

    Whatever ends the script ends this function. The report is printed when the process ends, after
    all threads and after what the script has registered with `atexit`.

    Raises:
        SystemExit: the script has called `sys.exit`, it was not found (2), or no plan fits into the
            budget (`BUDGET_EXIT_CODE`).
    """
    session = RunSession(request)
    session.begin()
    try:
        request.script.run()
    except ScriptNotFoundError as error:
        session.end()
        print(f"ebbtide run: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except SystemExit as end:
        if not end.code and session.is_over_budget():
            raise SystemExit(BUDGET_EXIT_CODE) from None
        raise
    except BaseException as error:
        _show_as_python_does()
        if isinstance(error, Exception) and _comes_from_budget(error):
            sys.excepthook(type(error), error, error.__traceback__)
            raise SystemExit(BUDGET_EXIT_CODE) from None
        raise
    if session.is_over_budget():
        raise SystemExit(BUDGET_EXIT_CODE)


@final
class RunSession:
    """Watches the modules of a script until the process ends.

    Args:
        request: what was asked for.
        err: where to print; None: the standard error that the process began with.
    """

    def __init__(self, request: RunRequest, err: TextIO | None = None) -> None:
        self._request = request
        self._err = err or sys.__stderr__
        self._rank = _read_rank()
        self._process = os.getpid()
        self.finder = ModelFinder(request.options, self._say, self._show, is_dry=request.dry)
        self._calls = ModuleCalls(self.finder)
        self._compile = _JIT.create_script_module

    def begin(self) -> None:
        """Watch from now on."""
        atexit.register(self.report)
        self._calls.install()
        ebbtide.api.before_offload.append(self.finder.give_way_for_good)
        _JIT.create_script_module = self._compile_plain

    def end(self) -> None:
        """Watch no longer, and report nothing. Models that are offloaded stay so."""
        atexit.unregister(self.report)
        self._calls.remove()
        ebbtide.api.before_offload.remove(self.finder.give_way_for_good)
        _JIT.create_script_module = self._compile

    def report(self) -> None:
        """End, print what was found, and write the file that was asked for."""
        self.end()
        if os.getpid() != self._process:
            return  # a forked child that ends like its parent
        report = self.make_report()
        if self._request.json is not None:
            text = json.dumps(report.document(), indent=2) + "\n"
            self._write(self._request.json, text)
        if self._request.report is not None:
            self._write_page(self._request.report)
        if self._rank == 0 and not self._request.quiet:
            self._print(report.text())
        elif self._rank:
            for trouble in report.troubles():
                self._print(f"ebbtide run: rank {self._rank}: {trouble}")

    def make_report(self) -> RunReport:
        """Return the report on what was found until now. The device is waited for."""
        finder = self.finder
        finder.end_dry_steps()
        for model in finder.found:
            model.freeze()
        memory = finder.memory
        return RunReport(
            finder.found,
            self._request.options,
            passing=finder.passing,
            is_dry=self._request.dry,
            peak_bytes=resident_peak_bytes() if memory is None else memory.reserved_peak_bytes(),
            budget_bytes=finder.budget_bytes,
            hints=_find_hints(),
        )

    def is_over_budget(self) -> bool:
        """Whether the last call of a model found no plan within the budget."""
        self.finder.end_dry_steps()
        return any(
            model.budget_error is not None and not model.has_recovered
            for model in self.finder.found
        )

    def _compile_plain(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compile a module by torch.jit, which cannot compile an offloaded one."""
        self.finder.give_way(module, for_good=False)
        return self._compile(module, *args, **kwargs)

    def _say(self, words: str) -> None:
        rank = f"rank {self._rank}: " if self._rank else ""
        if not self._request.quiet:
            self._print(f"ebbtide run: {rank}{words}")

    def _show(self, model: FoundModel) -> None:
        if not self._request.quiet and not self._rank:
            self._print(f"ebbtide run --dry:\n{self.make_report().describe(model)}")

    def _print(self, text: str) -> None:
        if self._err is not None and not self._err.closed:
            print(text, file=self._err, flush=True)

    def _write_page(self, path: Path) -> None:
        records = [model.record() for model in self.finder.found]
        found = [record for record in records if record is not None]
        if found:
            self._write(path, render_page(found))
        else:
            self._say(f"{path} was not written, because no model has finished a step")

    def _write(self, path: Path, text: str) -> None:
        if str(path) == "-":
            if not self._rank and sys.__stdout__ is not None and not sys.__stdout__.closed:
                print(text, file=sys.__stdout__, flush=True)
            return
        if self._rank:
            path = path.with_name(f"{path.stem}.rank{self._rank}{path.suffix}")
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            self._print(f"ebbtide run: {path} could not be written: {error}")


def _show_as_python_does() -> None:
    """Have the traceback of the error that ends the process begin in the script."""
    hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, _: Any) -> None:
        trace = script_frames(error)
        error.__traceback__ = trace
        hook(kind, error, trace)

    sys.excepthook = show


def _comes_from_budget(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, BudgetError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _read_rank() -> int:
    """Return the rank of this process; 0 without a launcher."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def _find_hints() -> list[str]:
    hints = ["Models are looked for in this process only, not in processes that it starts."]
    if "torch._dynamo" in sys.modules:
        hints.append("A function that torch.compile compiles as a whole is not looked into.")
    return hints
