"""The demo: trains the same FNO on Darcy flow in every mode, and compares and reports."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Final, TypeVar, final

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ebbtide.errors import PolicyError
from ebbtide.observe.page import write_page
from ebbtide.runtime.stats import StepStats
from ebbtide.tools import demo_worker as worker
from ebbtide.tools.demo_config import (
    STEPS_PER_TURN,
    DemoConfig,
    Mode,
    ModeResult,
    StepResult,
    check_neuralop,
    check_writable,
    first_difference,
)
from ebbtide.tools.machine import cpu_name
from ebbtide.units import format_size
from ebbtide.version import __version__

_ABSENT = "-"
_NOISY = 1.5  # times vary too much above this ratio of a mode's slowest to its fastest step


def compare(results: list[ModeResult]) -> dict[Mode, str | None]:
    """Compare each other mode with the one without offload, if that ran.

    Returns:
        For each other mode the result of `first_difference`.
    """
    reference = _reference(results)
    if reference is None:
        return {}
    return {
        result.mode: first_difference(reference, result)
        for result in results
        if result is not reference
    }


def build_table(config: DemoConfig, results: list[ModeResult]) -> Table:
    """Build the table of results, with one column per mode."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(
        f"FNO, Darcy {config.resolution} x {config.resolution}, batch {config.batch_size}"
    )
    for result in results:
        table.add_column(
            result.mode.title, justify="right", style="bold" if result.mode is Mode.EBBTIDE else ""
        )
    reference, differences = _reference(results), compare(results)
    columns = [_cells(config, result, reference, differences) for result in results]
    for labelled in zip(*columns, strict=True):
        cells = [cell for _, cell in labelled]
        if any(cell != _ABSENT for cell in cells):
            table.add_row(labelled[0][0], *cells)
    return table


def _cells(
    config: DemoConfig,
    result: ModeResult,
    reference: ModeResult | None,
    differences: dict[Mode, str | None],
) -> list[tuple[str, str]]:
    """Return what the rows of the table say of a mode, each with the label of its row."""
    assert result.final is not None
    peak_ratio = step_ratio = same = _ABSENT
    if reference is not None:
        peak_ratio = _ratio(_above_idle(result), _above_idle(reference))
        step_ratio = _ratio(result.median_s, reference.median_s)
    if result.mode in differences:
        difference = differences[result.mode]
        same = "[green]same bits[/]" if difference is None else f"[red]differ: {difference}[/]"
    stats, last, final = result.stats, result.steps[-1], result.final
    sizes = [_ABSENT] * 4
    if stats is not None:
        saved = (stats.saved_bytes, stats.unique_bytes, stats.rebuilt_bytes, stats.offloaded_bytes)
        sizes = [format_size(size) for size in saved]
    what = "RSS" if config.device.type == "cpu" else "device memory"
    fastest_s, slowest_s = _extremes_s(result)
    return [
        (f"Peak {what} of a step", format_size(result.peak_bytes)),
        ("  above idle", format_size(_above_idle(result))),
        ("  relative to no offload", peak_ratio),
        (f"Step, median of {len(result.timed)}", f"{_digits(result.median_s)} s"),
        ("  relative to no offload", step_ratio),
        ("  fastest - slowest", f"{_digits(fastest_s)} - {_digits(slowest_s)} s"),
        ("Saved by autograd in a step", sizes[0]),
        ("  without repeats and weights", sizes[1]),
        ("  rebuilt in backward", sizes[2]),
        ("  offloaded", sizes[3]),
        ("Train error, L2 / H1", f"{last.train_l2:.3f} / {last.train_h1:.3f}"),
        ("Test error, L2 / H1", f"{final.test_l2:.3f} / {final.test_h1:.3f}"),
        ("Losses, gradients, weights", same),
    ]


def limits(config: DemoConfig, results: list[ModeResult]) -> Iterator[str]:
    """Yield sentences that say what limits ebbtide's figures, and how far to trust them."""
    for result in results:
        if result.stats is not None and result.mode is Mode.EBBTIDE:
            yield from _limits_of(config, result, result.stats)
    if any(slowest_s > _NOISY * fastest_s for fastest_s, slowest_s in map(_extremes_s, results)):
        yield (
            "Times vary too much to compare: other programs run on this machine, or the steps are "
            "too short."
        )


def _limits_of(config: DemoConfig, result: ModeResult, stats: StepStats) -> Iterator[str]:
    if not stats.offloaded_bytes:
        yield "Nothing was offloaded: no saved tensor was large enough. Increase --resolution."
        return
    where = "disk" if stats.peak_disk_bytes else "host memory"
    rate = format_size(int(stats.offloaded_bytes / result.median_s))
    yield (
        f"Time: in each step {format_size(stats.offloaded_bytes)} go to {where} and come back "
        f"while the model computes, which needs {rate}/s each way. In the last step the model "
        f"waited {stats.stall_s:.2f} s for copies ({stats.late_reloads} reloads were late)."
    )
    yield (
        f"Memory: saved tensors took at most {format_size(stats.peak_device_bytes)} at once, of a "
        f"peak of {format_size(_above_idle(result))} above idle."
    )
    if config.device.type == "cpu":
        yield "The kernel caches the file in otherwise unused RAM, which RSS does not count."


def _reference(results: list[ModeResult]) -> ModeResult | None:
    return next((result for result in results if result.mode is Mode.NONE), None)


def _above_idle(result: ModeResult) -> int:
    return result.peak_bytes - result.idle_bytes


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}x" if base else _ABSENT


def _digits(value: float) -> str:
    """Format with three significant digits, such as ``3.10``."""
    return f"{value:#.3g}".rstrip(".")


def _extremes_s(result: ModeResult) -> tuple[float, float]:
    durations_s = [step.duration_s for step in result.timed]
    return min(durations_s), max(durations_s)


# ---- Shows how far the demo is. Progress goes to standard error ----

Note = Callable[[Mode, int, StepResult], None]


@contextlib.contextmanager
def training(console: Console, modes: Sequence[Mode], steps: int) -> Iterator[Note]:
    """Show a bar for each mode on a terminal, and one for all; elsewhere a line for each step.

    Yields:
        A function to call with each step as soon as it is done.
    """
    columns = (
        TextColumn("{task.description:>11}"),
        BarColumn(16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[last]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks = {mode: bars.add_task(mode.title, total=steps, last="") for mode in modes}
        overall = bars.add_task("all", total=steps * len(modes), last="")

        def note(mode: Mode, number: int, step: StepResult) -> None:
            words = f"{step.duration_s:5.2f} s, peak {format_size(step.peak_bytes)}"
            bars.update(tasks[mode], advance=1, last=words)
            bars.update(overall, advance=1)
            if not console.is_terminal:
                _say(console, f"{f'{mode.title}: step {number} of {steps}':<27} {words}")

        yield note


def _say(console: Console, words: str) -> None:
    console.print(words, highlight=False, markup=False)


# ---- The worker processes: start them, give them turns, notice when one dies ----

Result = TypeVar("Result")

# [Note: a fair baseline] On a CPU, two costs would hide those of offloading. Torch takes the memory
# of every large tensor fresh from the kernel, and in pages of 4 KiB that took two thirds of a plain
# step. Threads that spin while they wait for one another become several times slower when another
# program runs. These variables avoid both costs; settings of the user take precedence.
ENVIRONMENT = {"THP_MEM_ALLOC_ENABLE": "1", "OMP_WAIT_POLICY": "passive"}


class WorkerError(Exception):
    """A mode's process failed or died.

    Attributes:
        trace: the traceback of the process, empty if it left none.
    """

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


@final
class Team:
    """One worker process per mode. All live at the same time and work in turns."""

    def __init__(self, config: DemoConfig) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)  # workers inherit the environment
        # A forked child would inherit the parent's memory, and a state of torch in which the
        # parent's threads seem to run but do not exist.
        context = multiprocessing.get_context("spawn")
        self._pools = {mode: ProcessPoolExecutor(1, context) for mode in config.modes}
        self._config = config

    def start(self) -> None:
        """Start all processes at once, and wait until their models are built.

        Raises:
            PolicyError: a mode cannot do what the user asked for.
            WorkerError: a mode failed.
        """
        started = {
            mode: pool.submit(worker.start, self._config, mode)
            for mode, pool in self._pools.items()
        }
        for mode, future in started.items():
            self._wait(mode, future)

    def ask(self, mode: Mode, work: Callable[..., Result], *arguments: Any) -> Result:
        """Give a mode its turn and wait for the result; raise as `start` does.

        Args:
            mode: the mode.
            work: a function of `demo_worker`, or another that a process can import.
            arguments: its arguments.
        """
        return self._wait(mode, self._pools[mode].submit(work, *arguments))

    def _wait(self, mode: Mode, future: Future[Result]) -> Result:
        try:
            return future.result()
        except BrokenProcessPool:
            raise WorkerError(
                f"the process of mode {mode.title} has died; if memory ran out, try a smaller "
                f"--batch-size or --resolution"
            ) from None
        except PolicyError:
            raise
        except Exception as error:
            message = f"mode {mode.title} failed: {type(error).__name__}: {error}"
            raise WorkerError(message, str(error.__cause__ or "")) from None

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            for process in multiprocessing.active_children():
                process.kill()
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)


# ---- Run the demo: train the same FNO on Darcy flow in every mode; the modes take turns ----

FORMAT: Final = "ebbtide-demo"
VERSION: Final = 1

_WIDTH: Final = 80


def run_demo(config: DemoConfig, progress: Console, *, as_json: bool = False) -> bool:
    """Train, measure, compare and report.

    Args:
        config: the run.
        progress: where to say what is under way, and what should be known besides.
        as_json: whether JSON is printed instead of the table.

    Returns:
        Whether ebbtide's run was bitwise the same as the run without offload; True also if one of
        the two did not run.

    Raises:
        PolicyError: the configuration asks for something that cannot be done on this machine.
        WorkerError: a mode failed.
    """
    check_neuralop()
    check_writable(config.out)
    begin_s = time.perf_counter()
    _announce(config, progress)
    _say(progress, "1/4  Starting a process for each mode")
    with Team(config) as team:
        team.start()
        weights = _prepare(config, progress)
        results, peak_is_per_step = _begin(team, config, weights)
        _say(progress, "4/4  Training")
        _train(team, config, results, progress)
        _say(progress, "     Test errors")
        for mode in config.modes:
            results[mode].final = team.ask(mode, worker.finish)
    if config.device.type == "cpu" and not peak_is_per_step:
        progress.print("This kernel cannot reset the peak RSS: peaks are since the process began.")
    _report(config, list(results.values()), as_json=as_json)
    progress.print(f"{time.perf_counter() - begin_s:.0f} s in all", highlight=False)
    differences = compare(list(results.values()))
    return differences.get(Mode.EBBTIDE) is None


def _announce(config: DemoConfig, console: Console) -> None:
    """Say what is about to be done."""
    grid = f"{config.resolution} x {config.resolution}"
    where = "the CPU" if config.device.type == "cpu" else str(config.device)
    names = ", ".join(mode.title for mode in config.modes)
    size = f"{grid} on {where}, batch {config.batch_size}"
    _say(console, f"A Fourier neural operator learns Darcy flow at {size}.")
    _say(console, f"Modes: {names}. Each trains {config.steps} steps, in turns.")


def _prepare(config: DemoConfig, console: Console) -> worker.Weights:
    """Generate the data and train the weights that all modes begin with, while the modes wait."""
    number = config.steps * config.batch_size + worker.N_TEST
    what = f"2/4  Data: {number} samples, generated unless a run before has left them here"
    _say(console, what)
    try:
        worker.load_problem(config)
        coarse = worker.load_coarse_problem(config)
    except (OSError, ValueError) as error:
        raise PolicyError(f"--data: {error}") from error
    _say(console, f"3/4  Warm start: {config.warm_steps} steps on a coarse grid")
    # On the coarse grid, threads save little and wait for one another most of the time. On two
    # cores that other programs used as well, the warm start took eight times as long with two
    # threads as with one: what [Note: a fair baseline] sets for the workers comes too late here.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return worker.warm_start(config, coarse)
    finally:
        torch.set_num_threads(threads)


def _begin(
    team: Team, config: DemoConfig, weights: worker.Weights
) -> tuple[dict[Mode, ModeResult], bool]:
    results = {}
    peak_is_per_step = True
    for mode in config.modes:
        idle_bytes, can_reset = team.ask(mode, worker.prepare, weights)
        results[mode] = ModeResult(mode, idle_bytes)
        peak_is_per_step &= can_reset
    return results, peak_is_per_step


def _train(
    team: Team, config: DemoConfig, results: dict[Mode, ModeResult], console: Console
) -> None:
    """Run all steps of all modes, in turns."""
    with training(console, config.modes, config.steps) as note:
        for first in range(0, config.steps, STEPS_PER_TURN):
            for mode in config.modes:
                for _ in range(first, min(first + STEPS_PER_TURN, config.steps)):
                    step = team.ask(mode, worker.step)
                    results[mode].steps.append(step)
                    note(mode, len(results[mode].steps), step)


def _report(config: DemoConfig, results: list[ModeResult], *, as_json: bool) -> None:
    """Print the table, or JSON, and name the files that are written."""
    document = json.dumps(_as_json(config, results), indent=2)
    written = _write_files(config, results, document)
    if as_json:
        print(document)
        return
    report = Console()
    width = min(report.width, _WIDTH)
    report.print()
    report.print(build_table(config, results), width=width)
    for line in limits(config, results):
        report.print(line, width=width, highlight=False)
    report.print()
    for what, path in written.items():
        report.print(f"{what}: {path}", soft_wrap=True, markup=False, highlight=False)


def _write_files(
    config: DemoConfig, results: list[ModeResult], document: str
) -> dict[str, Path | str]:
    """Write what remains of a run. Returns what each file has, and where it is."""
    figures, page = config.out / "demo.json", config.out / "demo.html"
    figures.write_text(f"{document}\n")
    finals = [result.final for result in results if result.final is not None]
    records = [final.record for final in finals if final.record is not None]
    if records:
        write_page(page, records)
    return {
        "Report": page if records else "not written: no mode can be recorded",
        "Figures": figures,
    }


def _as_json(config: DemoConfig, results: list[ModeResult]) -> dict[str, Any]:
    differences = compare(results)
    settings = {
        name: str(value) if isinstance(value, (Path, torch.device)) else value
        for name, value in dataclasses.asdict(config).items()
    }
    settings["modes"] = [mode.value for mode in config.modes]
    modes = {}
    for result in results:
        assert result.final is not None
        modes[result.mode.value] = {
            "idle_bytes": result.idle_bytes,
            "peak_bytes": result.peak_bytes,
            "median_s": result.median_s,
            "test_l2": result.final.test_l2,
            "test_h1": result.final.test_h1,
            "parameters_sha256": result.final.parameters_sha256,
            "first_difference": differences.get(result.mode),
            "compared": result.mode in differences,
            "steps": [dataclasses.asdict(step) for step in result.steps],
        }
    return {
        "format": FORMAT,
        "version": VERSION,
        "environment": _environment(config),
        "configuration": settings,
        "modes": modes,
    }


def _environment(config: DemoConfig) -> dict[str, Any]:
    return {
        "ebbtide": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "torch_threads": config.threads or torch.get_num_threads(),
        "variables": {name: os.environ.get(name) for name in ENVIRONMENT},
        "device": str(config.device),
        "accelerator": torch.cuda.get_device_name(config.device)
        if config.device.type == "cuda"
        else None,
    }
