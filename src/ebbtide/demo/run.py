"""Run the demo: train the same FNO on Darcy flow in every mode; the modes take turns."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from rich.console import Console

from ebbtide.demo import darcy_fno, worker
from ebbtide.demo.comparison import build_table, compare, limits
from ebbtide.demo.config import DemoConfig, Mode, UsageError, check_neuralop, check_writable
from ebbtide.demo.picture import draw
from ebbtide.demo.progress import activity, training
from ebbtide.demo.results import STEPS_PER_TURN, FinalResult, ModeResult, StepResult
from ebbtide.demo.team import ENVIRONMENT, Team
from ebbtide.pages.page import write_page
from ebbtide.version import __version__

FORMAT: Final = "ebbtide-demo"
VERSION: Final = 1

_WIDTH: Final = 80


@final
@dataclass(frozen=True)
class Outputs:
    """Where the demo prints.

    Attributes:
        progress: what is under way, and what should be known besides.
        report: the table and the sentences, or the JSON.
        as_json: whether JSON is printed instead of the table.
    """

    progress: Console
    report: Console
    as_json: bool = False


def run_demo(config: DemoConfig, outputs: Outputs) -> bool:
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
    progress = outputs.progress
    _announce(config, progress)
    with Team(config) as team:
        with activity(progress, "1/4  Starting a process for each mode"):
            for mode in config.modes:
                team.tell(mode)
            for mode in config.modes:
                team.hear(mode, worker.Started)
        weights = _prepare(config, progress)
        results, peak_is_per_step = _begin(team, config, weights)
        progress.print("4/4  Training", highlight=False)
        _train(team, config, results, progress)
        with activity(progress, "     Test errors, and a forward without autograd"):
            for mode in config.modes:
                results[mode].final = team.ask(mode, FinalResult)
    if config.device.type == "cpu" and not peak_is_per_step:
        progress.print("This kernel cannot reset the peak RSS: peaks are since the process began.")
    _report(config, list(results.values()), outputs)
    progress.print(f"{time.perf_counter() - begin_s:.0f} s in all", highlight=False)
    differences = compare(list(results.values()))
    return differences.get(Mode.EBBTIDE) is None


def _announce(config: DemoConfig, console: Console) -> None:
    """Say what is about to be done."""
    grid = f"{config.resolution} x {config.resolution}"
    where = "the CPU" if config.device.type == "cpu" else str(config.device)
    names = ", ".join(mode.title for mode in config.modes)
    lines = [
        f"A Fourier neural operator learns Darcy flow at {grid} on {where}, batch "
        f"{config.batch_size}.",
        f"Modes: {names}. Each trains {config.steps} steps, in turns.",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _prepare(config: DemoConfig, console: Console) -> darcy_fno.Weights:
    """Generate the data and train the weights that all modes begin with, while the modes wait."""
    number = config.steps * config.batch_size + darcy_fno.N_TEST
    what = f"2/4  Data: {number} samples, generated unless a run before has left them here"
    console.print(what, highlight=False, markup=False)
    try:
        darcy_fno.load_problem(config)
        coarse = darcy_fno.load_coarse_problem(config)
    except (OSError, ValueError) as error:
        raise UsageError(f"--data: {error}") from error
    what = f"3/4  Warm start: {config.warm_steps} steps on a coarse grid"
    with activity(console, what), one_thread():
        return darcy_fno.warm_start(config, coarse)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread inside of the block.

    On the coarse grid, threads save little and wait for one another most of the time. On two cores
    that other programs used as well, the warm start took eight times as long with two threads as
    with one: what [Note: a fair baseline] sets for the workers comes too late for this process.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    with training(console, config.modes, config.steps) as note:
        for first in range(0, config.steps, STEPS_PER_TURN):
            for mode in config.modes:
                for _ in range(first, min(first + STEPS_PER_TURN, config.steps)):
                    step = team.ask(mode, StepResult)
                    results[mode].steps.append(step)
                    note(mode, step)


def _report(config: DemoConfig, results: list[ModeResult], outputs: Outputs) -> None:
    """Print the table, or JSON, and name the files that are written."""
    document = json.dumps(_as_json(config, results), indent=2)
    written = _write_files(config, results, document)
    if outputs.as_json:
        # As it is: a console would wrap it.
        print(document, file=outputs.report.file)
        return
    report = outputs.report
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
    figures = config.out / "demo.json"
    figures.write_text(f"{document}\n")
    picture = config.out / "demo.png"
    is_drawn = draw(config, results, picture)
    page = config.out / "demo.html"
    finals = [result.final for result in results if result.final is not None]
    records = [final.record for final in finals if final.record is not None]
    if records:
        write_page(page, records)
    return {
        "Report": page if records else "not written: no mode can be recorded",
        "Figures": figures,
        "Picture": picture if is_drawn else 'not drawn; pip install "ebbtide[plots]" allows it',
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
            "lasting_bytes": result.final.lasting_bytes,
            "forward_bytes": result.final.forward_bytes,
            "first_difference": differences.get(result.mode),
            "compared": result.mode in differences,
            "steps": [_step_as_json(step) for step in result.steps],
        }
    return {
        "format": FORMAT,
        "version": VERSION,
        "environment": _environment(config),
        "configuration": settings,
        "modes": modes,
    }


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
        "variables": {name: os.environ.get(name) for name in ENVIRONMENT},
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
