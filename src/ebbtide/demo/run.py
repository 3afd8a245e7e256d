"""Run the demo: train the same FNO on Darcy flow in every mode; the modes take turns."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from ebbtide.demo import darcy_fno, worker
from ebbtide.demo.comparison import build_table, compare, limits
from ebbtide.demo.config import DemoConfig, Mode, UsageError, check_neuralop, check_writable
from ebbtide.demo.picture import draw
from ebbtide.demo.results import STEPS_PER_TURN, FinalResult, ModeResult, StepResult
from ebbtide.demo.team import ENVIRONMENT, Team
from ebbtide.units import format_size
from ebbtide.version import __version__

_PLAIN_WIDTH = 80


def run_demo(config: DemoConfig, console: Console) -> bool:
    """Train, measure, compare and report.

    Returns:
        Whether ebbtide's run was bitwise the same as the run without offload; True also if one of
        the two did not run.

    Raises:
        UsageError: the configuration asks for something that cannot be done on this machine.
        WorkerError: a mode failed.
    """
    check_neuralop()
    check_writable(config.out)
    begin_s = time.perf_counter()
    with Team(config) as team:
        with _activity(console, "Starting a process for each mode"):
            for mode in config.modes:
                team.tell(mode)
            for mode in config.modes:
                team.hear(mode, worker.Started)
        weights = _prepare(config, console)
        results, peak_is_per_step = _begin(team, config, weights)
        _train(team, config, results, console)
        for mode in config.modes:
            results[mode].final = team.ask(mode, FinalResult)
    if config.device.type == "cpu" and not peak_is_per_step:
        console.print("This kernel cannot reset the peak RSS: peaks are since the process began.")
    _report(config, list(results.values()), console)
    console.print(f"[dim]{time.perf_counter() - begin_s:.0f} s in all[/]")
    differences = compare(list(results.values()))
    return differences.get(Mode.EBBTIDE) is None


def _prepare(config: DemoConfig, console: Console) -> darcy_fno.Weights:
    """Generate the data and train the weights that all modes begin with, while the modes wait."""
    grid = f"{config.resolution} x {config.resolution}"
    console.print(f"Darcy flow data at {grid}: samples that are not cached yet are generated")
    try:
        darcy_fno.load_problem(config)
        coarse = darcy_fno.load_coarse_problem(config)
    except (OSError, ValueError) as error:
        raise UsageError(f"--data: {error}") from error
    with _activity(console, f"Warm start: {config.warm_steps} steps on a coarse grid"):
        return darcy_fno.warm_start(config, coarse)


def _begin(
    team: Team, config: DemoConfig, weights: darcy_fno.Weights
) -> tuple[dict[Mode, ModeResult], bool]:
    results = {}
    peak_is_per_step = True
    for mode in config.modes:
        prepared = team.ask(mode, worker.Prepared, weights)
        results[mode] = ModeResult(mode, prepared.idle_bytes)
        peak_is_per_step &= prepared.peak_is_per_step
    return results, peak_is_per_step


def _train(
    team: Team, config: DemoConfig, results: dict[Mode, ModeResult], console: Console
) -> None:
    """Run all steps of all modes, in turns."""
    with _progress(config, console) as note:
        for first in range(0, config.steps, STEPS_PER_TURN):
            for mode in config.modes:
                for number in range(first, min(first + STEPS_PER_TURN, config.steps)):
                    step = team.ask(mode, StepResult)
                    results[mode].steps.append(step)
                    note(mode, number + 1, step)


@contextlib.contextmanager
def _progress(
    config: DemoConfig, console: Console
) -> Iterator[Callable[[Mode, int, StepResult], None]]:
    """Show a progress bar for each mode on a terminal; elsewhere print a line for each step."""

    def describe(step: StepResult) -> str:
        return f"{step.duration_s:6.2f} s, peak {format_size(step.peak_bytes)}"

    if not console.is_terminal:
        total = config.steps
        yield lambda mode, number, step: console.print(
            f"{mode.value:>11}: step {number}/{total}, {describe(step)}", highlight=False
        )
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:>11}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[last]}"),
    )
    with Progress(*columns, console=console) as bars:
        tasks = {
            mode: bars.add_task(mode.value, total=config.steps, last="") for mode in config.modes
        }
        yield lambda mode, number, step: bars.update(
            tasks[mode], completed=number, last=describe(step)
        )


@contextlib.contextmanager
def _activity(console: Console, what: str) -> Iterator[None]:
    if not console.is_terminal:
        console.print(what)
        yield
        return
    begin_s = time.perf_counter()
    with console.status(what):
        yield
    console.print(f"{what} [dim]({time.perf_counter() - begin_s:.0f} s)[/]")


def _report(config: DemoConfig, results: list[ModeResult], console: Console) -> None:
    console.print()
    width = min(console.width, _PLAIN_WIDTH)
    console.print(build_table(config, results), width=width)
    for line in limits(config, results):
        console.print(line, width=width, highlight=False)
    path = config.out / "demo.json"
    path.write_text(json.dumps(_as_json(config, results), indent=2) + "\n")
    console.print(f"\nFigures: {path}", soft_wrap=True, markup=False, highlight=False)
    picture = config.out / "demo.png"
    if draw(config, results, picture):
        console.print(f"Picture: {picture}", soft_wrap=True, markup=False, highlight=False)
    else:
        console.print('No picture was drawn: it needs pip install "ebbtide\\[plots]"')


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
            "steps": [_step_as_json(step) for step in result.steps],
        }
    return {"environment": _environment(config), "configuration": settings, "modes": modes}


def _step_as_json(step: StepResult) -> dict[str, Any]:
    figures = dataclasses.asdict(step)
    del figures["timeline"]  # hundreds of numbers, which the picture shows
    return figures


def _environment(config: DemoConfig) -> dict[str, Any]:
    accelerator = None
    if config.device.type == "cuda":
        accelerator = torch.cuda.get_device_name(config.device)
    return {
        "ebbtide": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "torch_threads": config.threads or torch.get_num_threads(),
        "variables": {name: os.environ[name] for name in ENVIRONMENT},
        "device": str(config.device),
        "accelerator": accelerator,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
