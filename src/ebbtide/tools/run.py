"""Runs a script as ``python`` does, with its models offloaded, and reports on them at the end."""

from __future__ import annotations

import atexit
import dataclasses
import importlib.util
import json
import os
import runpy
import sys
import types
import zipfile
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO, final

import torch
from torch import nn

import ebbtide.api
from ebbtide.errors import BudgetError, PolicyError
from ebbtide.observe.page import render_page
from ebbtide.observe.run_record import RUN_FORMAT, RUN_VERSION, RunRecord, as_document
from ebbtide.runtime.stats import describe_fates
from ebbtide.stores.measured_memory import resident_peak_bytes
from ebbtide.tools.exit_codes import ExitCode, in_options
from ebbtide.tools.found_models import (
    FoundModel,
    ModelFinder,
    RunOptions,
    watch_calls,
)
from ebbtide.tools.layout import indented, labelled, render, scaled
from ebbtide.units import count, few, format_size


@final
class MainScript:
    """A script, or a module that is run like one.

    Args:
        name: path of a file, or of a directory or archive with a ``__main__.py``; or a module.
        arguments: what follows it on the command line.
        is_module: whether ``name`` is the name of a module.

    Raises:
        PolicyError: there is no such script, or it cannot be run.
    """

    def __init__(self, name: str, arguments: Sequence[str], *, is_module: bool) -> None:
        self.name = name
        self.arguments = list(arguments)
        self._is_module = is_module
        if is_module:
            _set_search_path(os.getcwd())  # where it is looked for
            if not _has_module(name):
                raise PolicyError(f"there is no module {name}")
        elif not os.path.exists(name):
            raise PolicyError(f"there is no file {name}")
        elif _is_package(name) and PathFinder.find_spec("__main__", [name]) is None:
            raise PolicyError(f"{name} has no __main__.py, so it cannot be run")

    def run(self) -> None:
        """Run it. What it raises is raised here."""
        sys.argv[:] = [self.name, *self.arguments]
        path = os.path.abspath(self.name)
        if self._is_module:
            _set_search_path(os.getcwd())
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            return
        if _is_package(path):
            spec: Any = PathFinder.find_spec("__main__", [path])
            _set_search_path(path)
            module, code = importlib.util.module_from_spec(spec), spec.loader.get_code("__main__")
        else:
            _set_search_path(os.path.dirname(os.path.realpath(path)))
            loader = SourceFileLoader("__main__", path)
            # Not by the loader, whose frames would be in the traceback of a wrong syntax.
            code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
            module = types.ModuleType("__main__")
            vars(module).update(__file__=path, __loader__=loader)
        vars(module).update(__builtins__=sys.modules["builtins"])
        before, sys.modules["__main__"] = sys.modules["__main__"], module
        exec(code, vars(module))
        del before  # until now, or its globals would have gone while its code runs


def _is_package(path: str) -> bool:
    """Whether a path is a directory, or an archive, of which its ``__main__.py`` runs."""
    return os.path.isdir(path) or zipfile.is_zipfile(path)


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def script_frames(error: BaseException) -> types.TracebackType | None:
    """Return the traceback of an error without the frames of ebbtide that run and watch the script.

    Python prints such a traceback as it would if it had run the script itself.
    """
    kept: list[types.TracebackType] = []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is MainScript.run.__code__:
            kept.clear()  # what is around the script
        elif Path(trace.tb_frame.f_code.co_filename).parent != Path(__file__).parent:
            kept.append(trace)
        trace = trace.tb_next
    for number, each in enumerate(kept):
        each.tb_next = kept[number + 1] if number + 1 < len(kept) else None
    return kept[0] if kept else None


def _set_search_path(first: str) -> None:
    """Set the entry of ``sys.path`` that Python sets from what it runs."""
    if not getattr(sys.flags, "safe_path", False):  # python -P has no such entry
        sys.path[0] = first


# ---- Runs a script, has its models found and offloaded, and reports when the process ends ----

_JIT: Any = torch.jit._recursive
_LABEL_WIDTH: Final = 10
_MAY_LEAVE: Final = "is not below --min-bytes, a parameter, or needed for a second backward"


@final
class RunSession:
    """Runs a script with its models offloaded, and reports on them when the process ends.

    Args:
        script: what to run.
        options: how to offload. The steps that a page shows should be recorded: `RunOptions.trace`.
        quiet: whether to print nothing but errors.
        json: file for the figures; None: none. ``Path("-")`` is standard output.
        page: file for a page on the last step of each model; None: none.
        err: where to print; None: the standard error that the process began with.

    Attributes:
        finder: has found the models.
    """

    def __init__(
        self,
        script: MainScript,
        options: RunOptions,
        *,
        quiet: bool = False,
        json: Path | None = None,
        page: Path | None = None,
        err: TextIO | None = None,
    ) -> None:
        self._script, self._options = script, options
        self._quiet = quiet
        self._json, self._page = json, page
        self._err = err or sys.__stderr__
        rank = os.environ.get("RANK", "")  # of a launcher
        self._rank = int(rank) if rank.isdecimal() else 0
        self._process = os.getpid()
        self.finder = ModelFinder(options, self._say, self._refuse)
        self._compile = _JIT.create_script_module

    def run(self) -> None:
        """Run the script as Python would, and offload the models that it trains.

        Whatever ends the script ends this function. The report is printed when the process ends,
        after all threads and after what the script has registered with `atexit`.

        Raises:
            SystemExit: the script has called `sys.exit`, a setting fits no model (2), or no plan
                fits into the budget (`ExitCode.DOES_NOT_FIT`).
        """
        self.begin()
        try:
            self._script.run()
        except SystemExit:
            raise
        except BaseException as error:
            _show_as_python_does()
            refused = _find_budget_error(error) if isinstance(error, Exception) else None
            if refused is None:
                raise
            sys.excepthook(type(error), error, error.__traceback__)
            self._print(f"ebbtide run: {in_options(refused)}")
            raise SystemExit(ExitCode.DOES_NOT_FIT) from None

    def begin(self) -> None:
        """Watch from now on."""
        atexit.register(self.report)
        self._stop_watching = watch_calls(self.finder)
        ebbtide.api.before_offload.append(self.finder.give_way_for_good)
        _JIT.create_script_module = self._compile_plain

    def end(self) -> None:
        """Watch no longer, and report nothing. Models that are offloaded stay so."""
        atexit.unregister(self.report)
        self._stop_watching()
        ebbtide.api.before_offload.remove(self.finder.give_way_for_good)
        _JIT.create_script_module = self._compile

    def _compile_plain(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compile a module by torch.jit, which cannot compile an offloaded one."""
        self.finder.give_way(module, for_good=False)
        return self._compile(module, *args, **kwargs)

    def _refuse(self, error: Exception) -> NoReturn:
        """End the process, because what the user asked for cannot be right."""
        atexit.unregister(self.report)  # it would say that nothing was trained
        self._print(f"ebbtide run: {in_options(error)}")
        raise SystemExit(ExitCode.WRONG_USE)

    def _say(self, words: str) -> None:
        rank = f"rank {self._rank}: " if self._rank else ""
        if not self._quiet:
            self._print(f"ebbtide run: {rank}{words}")

    def _print(self, text: str) -> None:
        if self._err is not None and not self._err.closed:
            print(text, file=self._err, flush=True)

    # ---- the report; the device is waited for -------------------------------------------------

    def report(self) -> None:
        """End, print what was found, and write the files that were asked for."""
        self.end()
        if os.getpid() != self._process:
            return  # a forked child that ends like its parent
        if self._json is not None:
            self._write(self._json, json.dumps(self.document(), indent=2) + "\n")
        if self._page is not None:
            if records := self._records():
                self._write(self._page, render_page(records))
            else:
                self._say(f"{self._page} was not written, because no model has finished a step")
        if self._rank == 0 and not self._quiet:
            self._print(self.text())
        elif self._rank:
            for trouble in self.troubles():
                self._print(f"ebbtide run: rank {self._rank}: {trouble}")

    def document(self) -> dict[str, Any]:
        """Return all figures for JSON: bytes, and seconds."""
        return {
            "format": RUN_FORMAT,
            "version": RUN_VERSION,
            "budget_bytes": self.finder.budget_bytes,
            "peak_bytes": self._peak_bytes,
            "models": [_model_entry(model) for model in self.finder.found],
            "passed_over": self.finder.passing,
            "records": [as_document(record) for record in self._records()],
        }

    def troubles(self) -> list[str]:
        """Return what must not be overlooked, each in a sentence."""
        return [
            f"{model.name} was left alone: {model.left_alone}"
            for model in self.finder.found
            if model.left_alone is not None and not model.num_steps
        ]

    def text(self) -> str:
        """Return the report, 80 columns wide."""
        number = count(len(self.finder.found), "model")
        if not self.finder.found:
            passed = self.finder.passing.items()
            reasons = [f"{name} was passed over: {why}" for name, why in passed]
            reasons.append("Models are looked for in this process only, not in those it starts.")
            if "torch._dynamo" in sys.modules:
                reasons.append(
                    "A function that torch.compile compiles as a whole is not looked into."
                )
            return render(
                "ebbtide run: nothing trained: no model was found", *map(indented, reasons)
            )
        memory = labelled([("memory", self._describe_memory())], _LABEL_WIDTH, indent=4)
        models = map(self._describe, self.finder.found)
        return "\n".join([render(f"ebbtide run: {number} trained", memory), *models])

    @property
    def _peak_bytes(self) -> int | None:
        """The peak of memory since the first model was found; None if it is not known."""
        memory = self.finder.memory
        return resident_peak_bytes() if memory is None else memory.peak_bytes()

    def _records(self) -> list[RunRecord]:
        """Return the record of the last step of each model that has finished one."""
        records = (model.record() for model in self.finder.found)
        return [record for record in records if record is not None]

    def _describe_memory(self) -> str:
        peak_bytes, budget_bytes = self._peak_bytes, self.finder.budget_bytes
        peak = "unknown" if peak_bytes is None else format_size(peak_bytes)
        if budget_bytes is None:
            return f"peak {peak}, no budget"
        words = f"peak {peak}, budget {format_size(budget_bytes)}"
        over_bytes = (peak_bytes or 0) - budget_bytes
        return words + (f": OVER by {format_size(over_bytes)}" if over_bytes > 0 else "")

    def _describe(self, model: FoundModel) -> str:
        """Return what there is to say of one model."""
        kinds = " and ".join(model.dtypes)
        title = (
            f"{model.name}: {scaled(model.num_parameters)} parameters, {kinds} on {model.device}"
        )
        return render(indented(title), labelled(self._facts(model), _LABEL_WIDTH, indent=4))

    def _facts(self, model: FoundModel) -> Iterator[tuple[str, str]]:
        last, plan = model.last_step, model.plan
        if model.left_alone is not None:
            yield "left alone", model.left_alone
        if model.layers:
            yield "layers", f"{count(len(model.layers), 'module')}: {few(model.layers)}"
        if last is None:
            if model.left_alone is None:
                yield "steps", "none was finished"
        else:
            if plan is not None:
                yield "plan", f"{plan.summary}; {'settled' if plan.settled else 'not settled'}"
            elif self._options.is_planned:
                none = "none until other models have theirs" if model.waits_for_turn else "none"
                yield "plan", f"{none}; all that can leave does"
            done = describe_fates(last) or "nothing was saved"
            yield "last step", f"{done}; waited {last.stall_s:.3f} s for copies"
            left_bytes = last.offloaded_bytes + last.rebuilt_bytes + last.recomputed_bytes
            if plan is None and not left_bytes + last.weight_reload_bytes:
                yield "why", f"nothing was saved that {_MAY_LEAVE}"
            yield "steps", f"{model.num_steps:,}"
        yield from (("note", note) for note in model.notes)

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


def _model_entry(model: FoundModel) -> dict[str, Any]:
    plan, last = model.plan, model.last_step
    measured = None if plan is None or plan.measured is None else plan.measured._asdict()
    return {
        "model": model.name,
        "parameters": model.num_parameters,
        "dtypes": model.dtypes,
        "device": str(model.device),
        "layers": list(model.layers),
        "steps": model.num_steps,
        "left_alone": model.left_alone,
        "notes": model.notes,
        "plan": None
        if plan is None
        else {
            "settled": plan.settled,
            "predicted_peak_bytes": plan.plan.peak_bytes,
            "predicted_step_s": plan.plan.step_s,
            "measured": measured,
            "table": str(plan),
        },
        "last_step": None if last is None else dataclasses.asdict(last),
    }


def _show_as_python_does() -> None:
    """Have the traceback of the error that ends the process begin in the script."""
    hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, _: Any) -> None:
        trace = script_frames(error)
        error.__traceback__ = trace
        hook(kind, error, trace)

    sys.excepthook = show


def _find_budget_error(error: BaseException | None) -> BudgetError | None:
    """Return the error, or one that it comes from, that says that no plan fits."""
    while error is not None and not isinstance(error, BudgetError):
        error = error.__cause__ or error.__context__
    return error
